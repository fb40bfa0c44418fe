"""Tests of subclasses of the Keras wrapper: their constructors, and overrides of public
methods, which call each other as those of Keras's own class do.
"""

import numpy as np
import pytest
import tensorflow

from mp_compat import keras as mp_keras
from tests import testing
from tests.keras import cases as keras_cases
from tests.testing import tf

pytestmark = pytest.mark.usefixtures("eager")
each_family = keras_cases.each_family


def make_with_own_optimizer(optimizers):
  class WithOwnOptimizer(mp_keras.LossScaleOptimizer):
    def __init__(self, rate):
      self.rate = rate
      super().__init__(optimizers.SGD(rate), "dynamic")

  return WithOwnOptimizer(0.25)


def make_with_optimizer_second(optimizers):
  class WithOptimizerSecond(mp_keras.LossScaleOptimizer):
    def __init__(self, scale, wrapped):
      super().__init__(wrapped, scale)

  return WithOptimizerSecond(8.0, optimizers.SGD(0.25))


def make_with_other_name(optimizers):
  class WithOtherName(mp_keras.LossScaleOptimizer):
    def __init__(self, *, wrapped):
      super().__init__(wrapped)

  return WithOtherName(wrapped=optimizers.SGD(0.25))


@each_family
@pytest.mark.parametrize(
  "make", [make_with_own_optimizer, make_with_optimizer_second, make_with_other_name]
)
def test_constructor_may_take_anything(family, make):
  opt, v = make(family.optimizers), tensorflow.Variable([1.0, 2.0])
  assert isinstance(opt, family.native) and isinstance(opt, mp_keras.LossScaleOptimizer)
  opt.minimize(lambda: tf.reduce_sum(v * v), [v])
  assert v.numpy().tolist() == [0.5, 1.0]


def test_missing_optimizer_raises():
  with pytest.raises(TypeError, match='"inner_optimizer" must be an instance'):
    mp_keras.LossScaleOptimizer()
  with pytest.raises(TypeError, match='"inner_optimizer" must be an instance'):
    mp_keras.LossScaleOptimizer(unknown=1)


METHODS = (
  "apply apply_gradients build check_finite compute_gradients get_gradients "
  "get_scaled_loss get_unscaled_gradients get_updates minimize scale_loss"
).split()


def record_calls(cls, calls):
  """Returns a subclass that appends the name of each public method that is called to
  `calls`.
  """

  def record(name):
    base = getattr(cls, name)

    def method(self, *args, **kwargs):
      calls.append(name)
      return base(self, *args, **kwargs)

    return method

  names = [name for name in METHODS if hasattr(cls, name)]
  return type("Recording", (cls,), {name: record(name) for name in names})


def classes(family):
  """Returns Keras's own class and ours."""
  return [
    type(family.native_dynamic(family.optimizers.SGD(0.1), 8.0, 4)),
    type(mp_keras.LossScaleOptimizer(family.optimizers.SGD(0.1))),
  ]


def make_recording(family, cls, calls):
  """Returns an optimizer of a subclass of `cls` that appends its calls to `calls`."""
  derived = keras_cases.Family(family.name, family.keras, family.optimizers)
  derived.native = record_calls(cls, calls)
  return derived.native_dynamic(family.optimizers.SGD(0.1), 8.0, 4)


def minimize(opt, v, keras):
  opt.minimize(lambda: tf.reduce_sum(v * v), [v])


def apply_gradients(opt, v, keras):
  opt.apply_gradients([(tf.constant([1.0, 2.0]), v)])


def apply_scaled(opt, v, keras):
  opt.apply([tf.constant([1.0, 2.0])], [v])


def scale_and_unscale(opt, v, keras):
  opt.get_unscaled_gradients([opt.get_scaled_loss(tf.constant([1.0, 2.0]))])


def fit(opt, v, keras):
  model = keras.Sequential([keras.layers.Dense(1, input_shape=(2,))])
  model.compile(opt, "mse")
  model.fit(np.ones([2, 2], np.float32), np.ones([2, 1], np.float32), verbose=0)


# What Keras's own classes lack in a kind of optimizer.
MISSING = {("keras3", minimize), ("keras3", scale_and_unscale)}
MISSING.update((name, apply_scaled) for name in ("v2", "newer"))


@each_family
@pytest.mark.parametrize(
  "program",
  [
    minimize,
    apply_gradients,
    apply_scaled,
    scale_and_unscale,
    pytest.param(fit, marks=pytest.mark.matrix),
  ],
)
def test_methods_call_each_other_as_native(family, program):
  if (family.name, program) in MISSING:
    pytest.skip("Keras's own class has no such method")
  recorded = []
  for cls in classes(family):
    calls, v = [], tensorflow.Variable([1.0, 2.0])
    program(make_recording(family, cls, calls), v, family.keras)
    # `fit` may trace its function twice.
    recorded.append(list(dict.fromkeys(calls)) if program is fit else calls)
  assert recorded[1] == recorded[0] and recorded[0]


def test_graph_methods_call_each_other_as_native():
  family, recorded = keras_cases.V2, []
  for cls in classes(family):
    with tf.Graph().as_default():
      calls, v = [], tf.Variable([1.0, 2.0], use_resource=True)
      opt = make_recording(family, cls, calls)
      opt.get_updates(tf.reduce_sum(v * v), [v])
    recorded.append(calls)
  assert recorded[1] == recorded[0] and recorded[0]


@pytest.mark.skipif(keras_cases.VERSION < (2, 4), reason="loss_scale is an object")
@keras_cases.each_family_of_keras_2
def test_overridden_loss_scale_scales(family):
  recorded = []
  for cls in classes(family):
    four = property(lambda self: tf.constant(4.0))
    derived = keras_cases.Family(family.name, family.keras, family.optimizers)
    derived.native = type("Four", (cls,), {"loss_scale": four})
    opt = derived.native_dynamic(family.optimizers.SGD(0.1), 8.0, 4)
    (unscaled,) = opt.get_unscaled_gradients([tf.constant(2.0)])
    recorded.append((float(opt.get_scaled_loss(tf.constant(2.0))), float(unscaled)))
  assert recorded == [(8.0, 0.5)] * 2


def make_fit(optimizer):
  """Returns the weights after a step of `fit` with Keras 3."""
  keras = tensorflow.keras
  model = keras.Sequential(
    [keras.layers.Input([2]), keras.layers.Dense(1, kernel_initializer="ones")]
  )
  model.compile(optimizer, lambda _, y: y, jit_compile=False)
  model.fit(np.ones([1, 2], np.float32), np.zeros([1, 1]), verbose=0)
  return model.get_weights()[0].ravel().tolist()


def make_doubling(cls):
  class Doubling(cls):
    """Applies gradients twice as large, and remembers how large the scaled ones are."""

    def apply(self, grads, trainable_variables=None):
      self.__dict__["received"] = grads
      super().apply([2.0 * grad for grad in grads], trainable_variables)

  return Doubling


@each_family
def test_overridden_scaling_of_callable_is_called_once(family):
  class Doubling(mp_keras.LossScaleOptimizer):
    def get_scaled_loss(self, loss):
      scaled = super().get_scaled_loss(loss)
      return (lambda: 2.0 * scaled()) if callable(scaled) else 2.0 * scaled

  opt = Doubling(family.optimizers.SGD(0.1), 8.0)
  assert float(opt.get_scaled_loss(lambda: tf.constant(1.0))()) == 16.0


@keras_cases.needs_keras_3
def test_overridden_apply_is_called():
  optimizers = tensorflow.keras.optimizers
  native = make_doubling(optimizers.LossScaleOptimizer)
  ours = make_doubling(mp_keras.LossScaleOptimizer)
  expected = make_fit(native(optimizers.SGD(0.125), initial_scale=8.0))
  assert (
    make_fit(ours(optimizers.SGD(0.125), initial_scale=8.0)) == expected == [0.75] * 2
  )
  # It gets scaled gradients if apply_gradients() gets unscaled ones, too.
  opt, v = ours(optimizers.SGD(0.125), initial_scale=8.0), tensorflow.Variable(1.0)
  opt.minimize(lambda: 2.0 * v, [v])
  assert float(v) == 0.5 and float(opt.received[0]) == 16.0


@keras_cases.needs_keras_3
def test_overridden_check_finite_decides():
  class Limited(mp_keras.LossScaleOptimizer):
    def check_finite(self, grads):
      return tf.reduce_all([tf.reduce_all(tf.abs(grad) < 100.0) for grad in grads])

  opt = Limited(tensorflow.keras.optimizers.SGD(0.5), initial_scale=8.0)
  v = tensorflow.Variable(1.0)
  opt.apply([tf.constant(80.0)], [v])
  opt.apply([tf.constant(160.0)], [v])
  assert float(v) == -4.0 and float(opt.dynamic_scale) == 4.0


@each_family
def test_class_derived_from_bases_trains(family):
  """Horovod's DistributedOptimizer derives a class from the bases, then another."""
  opt, v = (
    keras_cases.wrap(family.optimizers.SGD(0.25)),
    tensorflow.Variable([1.0, 2.0]),
  )

  class Distributed(*type(opt).__bases__):
    def __init__(self, **kwargs):
      super(self.__class__, self).__init__(**kwargs)

  derived = type(type(opt).__name__, (type(opt),), dict(vars(Distributed)))
  again = derived.from_config(opt.get_config())
  again.minimize(lambda: tf.reduce_sum(v * v), [v])
  assert v.numpy().tolist() == [0.5, 1.0] and type(again) is derived
  assert again.get_config() == opt.get_config()


@each_family
def test_subclass_trains_as_class(family):
  class Subclass(mp_keras.LossScaleOptimizer):
    """A subclass without overrides."""

  xs = list(testing.feeds(4, (1,)))
  states = []
  for cls in (mp_keras.LossScaleOptimizer, Subclass):
    opt = cls(family.optimizers.SGD(0.1, momentum=0.9, name="SGD"), initial_scale=8.0)
    states.append(keras_cases.train(opt, xs, sparse=False))
  testing.assert_same(*states)
