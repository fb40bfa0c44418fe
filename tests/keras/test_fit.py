"""Tests of the Keras wrapper in Model.fit with the policy mixed_float16: small gradients reach the weights."""

import contextlib

import numpy as np
import pytest

from mp_compat import keras as mp_keras
from tests.keras import cases as keras_cases
from tests.testing import tf

pytestmark = pytest.mark.usefixtures("eager")
GRADIENT = 1e-9  # underflows in float16


@contextlib.contextmanager
def mixed_float16(keras):
  """Lets models compute in float16, so that `compile` scales their loss; yields the policy for their layers.

  Yields None if the global policy applies.
  """
  module = keras.mixed_precision
  if keras_cases.VERSION < (2, 0):  # There is no global policy.
    yield module.experimental.Policy("mixed_float16")
    return
  if keras_cases.VERSION < (2, 4):
    set_policy, initial = module.experimental.set_policy, None  # after "float32", the graph rewrite would be refused
  else:
    set_policy, initial = module.set_global_policy, "float32"
  set_policy("mixed_float16")
  try:
    yield None
  finally:
    set_policy(initial)


def fit(family, optimizer):
  """Trains one step; returns the model and the decrease of its weights."""
  with mixed_float16(family.keras) as policy:
    model = family.keras.Sequential(
      [family.keras.layers.Dense(2, input_shape=(1,), use_bias=False, kernel_initializer="ones", dtype=policy)]
    )
    model.compile(optimizer=optimizer, loss=lambda _, y: tf.reduce_sum(tf.cast(y, tf.float32), -1) * GRADIENT)
    before = model.get_weights()[0]
    model.fit(np.ones([1, 1], np.float32), np.ones([1, 2], np.float32), verbose=0)
  return model, before - model.get_weights()[0]


@keras_cases.each_family
def test_mixed_float16_fit_applies_small_gradients(family):
  opt = mp_keras.LossScaleOptimizer(family.optimizers.SGD(1e6), "dynamic")
  model, decrease = fit(family, opt)
  assert model.optimizer is opt  # not wrapped again
  assert np.allclose(decrease, GRADIENT * 1e6, rtol=0.01)
  assert int(keras_cases.to_numpy(opt.iterations)) == 1 and int(opt.dynamic_counter) == 1


@keras_cases.each_family
def test_loss_scale_of_one_underflows_small_gradients(family):
  _, decrease = fit(family, mp_keras.LossScaleOptimizer(family.optimizers.SGD(1e6), 1))
  assert (decrease == 0).all()
