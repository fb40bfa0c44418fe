"""The Keras wrapper under Model.fit with the policy mixed_float16: it is kept, and small gradients survive."""

import contextlib

import numpy as np
import pytest

from mp_compat import keras as mp_keras
from tests import testing
from tests.keras import cases as keras_cases
from tests.testing import tf

each_family = pytest.mark.parametrize("family", keras_cases.FAMILIES, ids=repr)
GRADIENT = 1e-9  # zero in float16


@pytest.fixture(autouse=True)
def _eager():
  with testing.eager_mode():
    yield


@contextlib.contextmanager
def mixed_float16(keras):
  """Models made here compute in float16, and `compile` sees to it that their loss is scaled; gives the policy."""
  module = keras.mixed_precision
  if keras_cases.VERSION < (2, 0):  # There are policies for layers only.
    yield module.experimental.Policy("mixed_float16")
    return
  set_policy = module.set_global_policy if keras_cases.VERSION >= (2, 4) else module.experimental.set_policy
  set_policy("mixed_float16")
  try:
    yield None  # The global one holds.
  finally:
    set_policy("float32")


def fit(family, optimizer):
  """One step; gives the model and by how much its weights fell."""
  with mixed_float16(family.keras) as policy:
    model = family.keras.Sequential([family.keras.layers.Dense(
        2, input_shape=(1,), use_bias=False, kernel_initializer="ones", dtype=policy)])
    model.compile(optimizer=optimizer, loss=lambda _, y: tf.reduce_sum(tf.cast(y, tf.float32), -1) * GRADIENT)
    before = model.get_weights()[0]
    model.fit(np.ones([1, 1], np.float32), np.ones([1, 2], np.float32), verbose=0)
  return model, before - model.get_weights()[0]


@each_family
def test_small_gradients_reach_the_weights(family):
  opt = mp_keras.LossScaleOptimizer(family.optimizers.SGD(1e6), "dynamic")
  model, fell = fit(family, opt)
  assert model.optimizer is opt  # and not wrapped once more
  assert np.allclose(fell, GRADIENT * 1e6, rtol=.01)
  assert int(keras_cases.numpy(opt.iterations)) == 1 and int(opt.dynamic_counter) == 1


@each_family
def test_with_a_scale_of_one_they_vanish(family):
  _, fell = fit(family, mp_keras.LossScaleOptimizer(family.optimizers.SGD(1e6), 1))
  assert (fell == 0).all()
