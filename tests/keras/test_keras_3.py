"""Tests of the wrapper of Keras 3 optimizers, among them those of Keras's own wrapper,
with ours in its place.
"""

import importlib
import logging
import unittest

import numpy as np
import pytest
import tensorflow

from mp_compat import keras as mp_keras
from tests.keras import cases as keras_cases
from tests.testing import tf

pytestmark = [keras_cases.needs_keras_3, pytest.mark.usefixtures("eager")]
KERAS = tensorflow.keras


def make(rate=0.5):
  """Returns the wrapper of SGD, whose scale is 256 at first; the factor of the inner
  optimizer is ignored.
  """
  return mp_keras.LossScaleOptimizer(
    KERAS.optimizers.SGD(rate, loss_scale_factor=16.0), initial_scale=256.0
  )


def scaled_gradient(opt, v, scale_loss="scale_loss"):
  with tensorflow.GradientTape() as tape:
    loss = getattr(opt, scale_loss)(v * v)
  return tape.gradient(loss, v)


def unscaled_gradients(opt, v):
  return opt.get_unscaled_gradients([scaled_gradient(opt, v, "get_scaled_loss")])


# Steps. Each computes the gradient of v * v and applies it.


def scaled_by_hand(opt, v):
  opt.apply([2.0 * v * opt.dynamic_scale], [v])


def clipped(opt, v):
  (grad,) = unscaled_gradients(opt, v)
  opt.apply_gradients([(tf.clip_by_value(grad, -100.0, 100.0), v)])


def clipped_before_branch(opt, v):
  (grad,) = unscaled_gradients(opt, v)

  def apply():
    opt.apply_gradients([(tf.clip_by_value(grad, -100.0, 100.0), v)])
    return 0

  tf.cond(tf.reduce_all(tf.is_finite(grad)), apply, lambda: 0)


def scaled_as_by_fit(opt, v):
  opt.apply_gradients([(scaled_gradient(opt, v), v)])


def scaled_and_clipped_by_unscaled_norm(opt, v):
  grad = scaled_gradient(opt, v)
  norm = tf.norm(opt.get_unscaled_gradients([grad])[0])
  opt.apply_gradients([(grad * tf.minimum(1.0, 100.0 / norm), v)])


def unscaled_for_a_log(opt, v):
  """Applies scaled gradients, as Keras 3 does, and unscales them as well."""
  grad = scaled_gradient(opt, v)
  opt.get_unscaled_gradients([grad])
  opt.apply([grad], [v])


def unscaled_for_a_log_and_clipped(opt, v):
  opt.get_unscaled_gradients([tf.constant(1.0)])
  opt.apply([tf.clip_by_value(scaled_gradient(opt, v), -1000.0, 1000.0)], [v])


def scaled_again_before_apply(opt, v):
  grads = unscaled_gradients(opt, v)
  opt.get_scaled_loss(v * v)
  opt.apply_gradients([(tf.identity(grad), v) for grad in grads])


def scaled_without_unscaling(opt, v):
  opt.apply([scaled_gradient(opt, v, "get_scaled_loss")], [v])


def minimized(opt, v):
  opt.minimize(lambda: v * v, [v])


def minimized_with_callable(opt, v):
  opt.minimize(lambda: v * v, lambda: [v])


# Programs make their step once for all steps.


def in_eager_mode(step):
  return lambda opt, v: lambda: step(opt, v)


def in_function(step):
  return lambda opt, v: tensorflow.function(lambda: step(opt, v))


def in_two_functions(compute):
  """Traces the function that applies the gradient before the one that computes it."""

  def program(opt, v):
    apply = tensorflow.function(lambda g: opt.apply([g], [v]))
    apply.get_concrete_function(tensorflow.TensorSpec([], tf.float32))
    compute_in_function = tensorflow.function(lambda: compute(opt, v))
    return lambda: apply(compute_in_function())

  return program


def train(caplog, programs):
  """Returns a variable after each of four steps, in which the programs take turns, and
  warnings about its gradients.
  """
  caplog.set_level(logging.WARNING)
  v, opt = KERAS.Variable(1.0), make(rate=0.125)
  opt.build([v])
  steps = [program(opt, v) for program in programs] * 4
  values = []
  for step in steps[:4]:
    step()
    values.append(float(v))
  return values, [
    record.getMessage()
    for record in caplog.records
    if "cannot tell" in record.getMessage()
  ]


PROGRAMS = {
  "traced_first": [in_two_functions(scaled_gradient)],
  "scaled_by_hand": [in_two_functions(lambda opt, v: 2.0 * v * opt.dynamic_scale)],
  "scaled_by_hand_in_eager_mode": [in_eager_mode(scaled_by_hand)],
  "clipped": [in_eager_mode(clipped)],
  "clipped_in_function": [in_function(clipped)],
  "clipped_before_branch": [in_function(clipped_before_branch)],
  "scaled_as_by_fit": [in_eager_mode(scaled_as_by_fit), in_function(scaled_as_by_fit)],
  "clipped_then_scaled_as_by_fit": [
    in_eager_mode(clipped),
    in_eager_mode(scaled_as_by_fit),
  ],
  "unscaled_for_a_log_and_clipped": [in_eager_mode(unscaled_for_a_log_and_clipped)],
  "scaled_again_before_apply": [in_eager_mode(scaled_again_before_apply)],
  "scaled_without_unscaling": [in_eager_mode(scaled_without_unscaling)],
  "minimized": [in_eager_mode(minimized)],
  "minimized_with_callable": [in_eager_mode(minimized_with_callable)],
}
# Both interfaces in one step, or in steps that take turns.
MIXED_PROGRAMS = {
  "unscaled_for_a_log": [in_eager_mode(unscaled_for_a_log)],
  "unscaled_for_a_log_in_function": [in_function(unscaled_for_a_log)],
  "clipped_by_unscaled_norm": [in_eager_mode(scaled_and_clipped_by_unscaled_norm)],
  "clipped_by_unscaled_norm_in_function": [
    in_function(scaled_and_clipped_by_unscaled_norm)
  ],
  "clipped_then_scaled_by_hand": [
    in_eager_mode(clipped),
    in_eager_mode(scaled_by_hand),
  ],
  "clipped_then_scaled_without_unscaling": [
    in_eager_mode(clipped),
    in_eager_mode(scaled_without_unscaling),
  ],
  "clipped_then_unscaled_for_a_log": [
    in_eager_mode(clipped),
    in_function(unscaled_for_a_log),
  ],
}


@pytest.mark.parametrize("name", list(PROGRAMS) + list(MIXED_PROGRAMS))
def test_gradients_are_unscaled_exactly_once(name, caplog):
  values, warnings = train(caplog, dict(PROGRAMS, **MIXED_PROGRAMS)[name])
  assert values == [0.75, 0.75**2, 0.75**3, 0.75**4] and len(warnings) == (
    name in MIXED_PROGRAMS
  )
  assert all(
    "It takes them for scaled, and divides them" in warning for warning in warnings
  )


def unscaled_in_another_function(opt, v):
  compute = tensorflow.function(lambda: unscaled_gradients(opt, v))
  return lambda: opt.apply_gradients([(compute()[0], v)])


def applied_in_another_function(opt, v):
  apply = tensorflow.function(lambda grad: opt.apply_gradients([(grad, v)]))
  return lambda: apply(unscaled_gradients(opt, v)[0])


def applied_in_function_traced_first(opt, v):
  apply = tensorflow.function(lambda grad: opt.apply_gradients([(grad, v)]))
  apply.get_concrete_function(tensorflow.TensorSpec([], tf.float32))
  return lambda: apply(unscaled_gradients(opt, v)[0])


def summed_in_variable(opt, v):
  total = tensorflow.Variable(0.0)
  add = tensorflow.function(lambda: total.assign_add(unscaled_gradients(opt, v)[0]))
  apply = tensorflow.function(lambda: opt.apply_gradients([(total.read_value(), v)]))
  return lambda: add() is None or apply()


@pytest.mark.parametrize(
  "program",
  [
    unscaled_in_another_function,
    applied_in_another_function,
    applied_in_function_traced_first,
    summed_in_variable,
  ],
)
def test_gradients_of_another_function_raise(program):
  v, opt = KERAS.Variable(1.0), make(rate=0.125)
  opt.build([v])
  with pytest.raises(ValueError, match="cannot tell whether these are scaled"):
    program(opt, v)()
  assert float(v) == 1.0


def test_unscaled_gradients_for_apply_raise():
  v, opt = KERAS.Variable(1.0), make(rate=0.125)
  opt.build([v])

  def step():
    opt.apply(unscaled_gradients(opt, v), [v])

  for program in (step, tensorflow.function(step)):
    with pytest.raises(
      ValueError, match=r"Pass them to apply_gradients\(\), or pass the"
    ):
      program()
  assert float(v) == 1.0


def summed_over_calls(opt, v):
  """Sums the gradients of two micro-batches."""
  grads = [unscaled_gradients(opt, v)[0] for _ in range(2)]
  opt.apply_gradients([(0.5 * (grads[0] + grads[1]), v)])


def summed_in_loop(opt, v):
  def add(i, total):
    return i + 1, total + 0.5 * unscaled_gradients(opt, v)[0]

  _, total = tf.while_loop(lambda i, total: i < 2, add, [0, tf.constant(0.0)])
  opt.apply_gradients([(total, v)])


def summed_in_nested_function(opt, v):
  grads = [tensorflow.function(lambda: unscaled_gradients(opt, v))()[0]] * 2
  opt.apply_gradients([(0.5 * (grads[0] + grads[1]), v)])


def scaled_sums_in_loop(opt, v):
  def add(i, total):
    return i + 1, total + 0.5 * scaled_gradient(opt, v)

  _, total = tf.while_loop(lambda i, total: i < 2, add, [0, tf.constant(0.0)])
  opt.apply_gradients([(total, v)])


def unscaled_after_scale_loss(opt, v):
  """Passes on what it is known to be unscaled, although `scale_loss` was called."""
  opt.apply_gradients([(opt.get_unscaled_gradients([scaled_gradient(opt, v)])[0], v)])


@pytest.mark.parametrize(
  "program",
  [
    in_eager_mode(summed_over_calls),
    in_function(summed_over_calls),
    in_function(summed_in_loop),
    in_function(summed_in_nested_function),
    in_function(scaled_sums_in_loop),
    in_eager_mode(unscaled_after_scale_loss),
    in_function(unscaled_after_scale_loss),
  ],
)
def test_sums_are_unscaled_once(program, caplog):
  values, warnings = train(caplog, [program])
  assert values == [0.75, 0.75**2, 0.75**3, 0.75**4] and not warnings


def test_groups_of_variables_are_unscaled_once():
  v, w, opt = KERAS.Variable(1.0), KERAS.Variable(1.0), make(rate=0.5)
  with tensorflow.GradientTape() as tape:
    loss = opt.get_scaled_loss(2.0 * (v + w))
  grads = opt.get_unscaled_gradients(tape.gradient(loss, [v, w]))
  opt.build([v, w])
  for grad, variable in zip(grads, [v, w]):
    opt.apply_gradients([(2.0 * grad, variable)])
  assert float(v) == float(w) == -1.0


def test_inner_apply_gradients_is_called():

  class Halving(KERAS.optimizers.SGD):
    def apply_gradients(self, grads_and_vars):
      return super().apply_gradients(
        [(grad / 2.0, variable) for grad, variable in grads_and_vars]
      )

  weights = []
  for wrap in (lambda opt: opt, mp_keras.LossScaleOptimizer):
    model = KERAS.Sequential(
      [KERAS.layers.Input([3]), KERAS.layers.Dense(2, kernel_initializer="ones")]
    )
    model.compile(wrap(Halving(0.125)), "mse", jit_compile=False)
    model.fit(np.ones([2, 3], np.float32), np.zeros([2, 2], np.float32), verbose=0)
    weights.append(model.get_weights()[0].tolist())
  assert weights[0] == weights[1] == [[0.8125] * 2] * 3  # 1 - 0.125 * 3 / 2


def test_minimize_calls_overridden_methods():
  """A subclass may have a scale below 1."""

  class Tenth(mp_keras.LossScaleOptimizer):
    def get_scaled_loss(self, loss):
      return 0.1 * loss

    def get_unscaled_gradients(self, grads):
      return [10.0 * grad for grad in grads]

  v = KERAS.Variable(1.0)
  Tenth(KERAS.optimizers.SGD(0.1), initial_scale=2.0**15).minimize(lambda: 2.0 * v, [v])
  assert float(v) == pytest.approx(0.8)


def test_scale_falls_below_one_as_native():
  states = []
  for wrapper in (KERAS.optimizers.LossScaleOptimizer, mp_keras.LossScaleOptimizer):
    v, opt = (
      KERAS.Variable(1.0),
      wrapper(KERAS.optimizers.SGD(0.1), initial_scale=1.0, dynamic_growth_steps=1),
    )
    opt.build([v])
    history = []
    for factor in (np.inf, np.inf, 1.0, np.nan, 1.0):
      opt.apply([v * factor * opt.dynamic_scale], [v])
      history.append((float(v), float(opt.dynamic_scale)))
    states.append(history)
    config = opt.get_config()
    assert (
      type(opt).from_config(dict(config)).get_config() == config
      and "inner_optimizer" in config
    )
  assert states[0] == states[1] and [scale for _, scale in states[0]] == [
    0.5,
    0.25,
    0.5,
    0.25,
    0.5,
  ]


def test_dynamic_falls_as_native():
  scales = []
  for opt in (
    KERAS.optimizers.LossScaleOptimizer(KERAS.optimizers.SGD(0.1)),
    mp_keras.LossScaleOptimizer(KERAS.optimizers.SGD(0.1), "dynamic"),
    mp_keras.experimental.LossScaleOptimizer(KERAS.optimizers.SGD(0.1), "dynamic"),
  ):
    v = KERAS.Variable(1.0)
    for _ in range(20):
      opt.apply([tf.constant(np.inf)], [v])
    scales.append(float(opt.dynamic_scale))
  assert scales == [2.0**-5] * 3


@pytest.mark.parametrize("name", keras_cases.FAMILIES[-1].classes)
def test_variables_match_keras_wrapper(name):
  paths = []
  for wrapper in (KERAS.optimizers.LossScaleOptimizer, mp_keras.LossScaleOptimizer):
    opt = wrapper(getattr(KERAS.optimizers, name)(name="inner"), name="wrapper")
    opt.build(
      [
        KERAS.Variable(np.ones([4, 4], np.float32), name="a"),
        KERAS.Variable([1.0, 1.0], name="b"),
      ]
    )
    paths.append([variable.path for variable in opt.variables])
  assert paths[0] == paths[1]


def test_weight_decay_exclusion_is_forwarded():
  v = KERAS.Variable(1.0, name="bias")
  opt = mp_keras.LossScaleOptimizer(KERAS.optimizers.AdamW(0.0, weight_decay=0.5))
  opt.exclude_from_weight_decay(var_names=["bias"])
  opt.minimize(lambda: v * v, [v])
  assert float(v) == 1.0


def test_model_of_keras_wrapper_continues(tmp_path):
  """As docs/keras.md shows: Keras loads its own class from a .keras file."""
  x, y = np.arange(12, dtype=np.float32).reshape([4, 3]), np.ones([4, 2], np.float32)

  def fit(model):
    model.fit(x, y, verbose=0, shuffle=False)
    return [
      weight.tolist()
      for weight in model.get_weights()
      + [value.numpy() for value in model.optimizer.variables]
    ]

  model = KERAS.Sequential(
    [KERAS.layers.Input([3]), KERAS.layers.Dense(2, kernel_initializer="ones")]
  )
  model.compile(
    KERAS.optimizers.LossScaleOptimizer(KERAS.optimizers.Nadam(0.1), 8.0),
    "mse",
    jit_compile=False,
  )
  fit(model)
  model.save(str(tmp_path / "model.keras"))
  loaded = KERAS.models.load_model(str(tmp_path / "model.keras"))
  native = loaded.optimizer
  opt = mp_keras.LossScaleOptimizer.from_config(native.get_config())
  opt.build(loaded.trainable_variables)
  opt.set_weights([variable.numpy() for variable in native.variables])
  loaded.compile(opt, "mse", jit_compile=False)
  assert fit(loaded) == fit(KERAS.models.load_model(str(tmp_path / "model.keras")))


def keras_test_case():
  """Returns the test case of Keras's own wrapper, in which `LossScaleOptimizer` is
  ours.
  """
  if keras_cases.VERSION < (2, 16):
    return unittest.TestCase
  try:
    module = importlib.import_module("keras.src.optimizers.loss_scale_optimizer_test")
  except ImportError:  # Keras 3.16, for example, is installed without its tests
    return unittest.skip("Keras is installed without its tests")(
      type("NoTests", (unittest.TestCase,), {})
    )
  module.LossScaleOptimizer = mp_keras.LossScaleOptimizer
  return module.LossScaleOptimizerTest


class TestsOfKeras(keras_test_case()):
  """The tests of Keras's own wrapper."""

  @unittest.skip(
    "compares the attributes of the object with those that Keras's class has"
  )
  def test_config(self):
    pass

  @unittest.skip(
    "expects an error for a fixed scale, dynamic=False, which the wrapper supports"
  )
  def test_init_dynamic_arg(self):
    pass
