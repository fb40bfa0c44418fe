"""Tests of warnings for gradients that are multiplied by the loss scale, or whose
origin is unknown.
"""

import numpy as np
import pytest
import tensorflow

import mp_compat
from tests import testing
from tests.testing import FINITE
from tests.testing import OVERFLOW
from tests.testing import Optimizer
from tests.testing import tf

pytestmark = pytest.mark.usefixtures("graph")


class TensorScale(mp_compat.LossScale):
  """A loss scale that returns the same tensor in each call."""

  def __init__(self):
    self._tensor = tf.placeholder_with_default(8.0, [])

  def __call__(self):
    return self._tensor

  def update(self, grads):
    return tf.no_op(), tf.constant(True)

  def get_config(self):
    return {}


SCALES = {
  "dynamic": lambda: "dynamic",
  "fixed": lambda: 1024.0,
  "tensor": TensorScale,
  "tensorflow": lambda: testing.native.DynamicLossScale(),
}


def scaled_gradients(opt, training):
  return tf.gradients(opt.scale_loss(training.loss), [training.w])


@pytest.mark.parametrize("scale", SCALES)
def test_forgotten_unscaling_logs_warning(scale, warnings):
  training = testing.Training()
  opt = Optimizer(testing.sgd(), SCALES[scale]())
  opt.apply_gradients(zip(scaled_gradients(opt, training), [training.w]))
  (warning,) = warnings
  assert "unscale_gradients() was not called" in warning


@pytest.mark.parametrize("scale", SCALES)
def test_control_dependencies_hide_no_forgotten_unscaling(scale, warnings):
  training = testing.Training()
  opt = Optimizer(testing.sgd(), SCALES[scale]())
  (grad,) = scaled_gradients(opt, training)
  with tf.control_dependencies([grad]):  # as with the updates of batch normalization
    opt.apply_gradients([(grad, training.w)])
  (warning,) = warnings
  assert "unscale_gradients() was not called" in warning


class NumberScale(mp_compat.LossScale):
  """A loss scale that returns a number, as TensorFlow's class allows."""

  def __call__(self):
    return 8.0

  def update(self, grads):
    return tf.no_op(), tf.constant(True)

  def get_config(self):
    return {}


def test_scale_may_be_a_number(warnings):
  training = testing.Training()
  opt = Optimizer(testing.sgd(), NumberScale())
  grads = opt.unscale_gradients(scaled_gradients(opt, training))
  train_op = opt.apply_gradients(zip(grads, [training.w]))
  x = np.float32([1.0, 2.0])
  np.testing.assert_array_equal(training.run(train_op, x, OVERFLOW), [-x, -x])
  assert not warnings


def unscaled(opt, grads):
  return opt.unscale_gradients(grads)


def divided(opt, grads):
  return [grad / opt.loss_scale() for grad in grads]


def divided_in_function(opt, grads):
  (grad,) = grads
  return [tensorflow.function(lambda: grad / opt.loss_scale())()]


@pytest.mark.parametrize(
  "scale, unscale",
  [(scale, function) for scale in SCALES for function in (unscaled, divided)]
  # A fixed scale is a constant inside of the function.
  + [("dynamic", divided_in_function)],
)
def test_unscaling_of_any_kind_logs_nothing(scale, unscale, warnings):
  training = testing.Training()
  opt = Optimizer(testing.sgd(), SCALES[scale]())
  grads = unscale(opt, scaled_gradients(opt, training))
  opt.apply_gradients(zip(grads, [training.w]))
  assert not warnings


def test_reports_name_variables_of_unscaled_gradients():
  first, second = [tf.Variable([1.0, 1.0], name=name) for name in ("first", "second")]
  x = tf.placeholder(tf.float32, [2])
  opt = Optimizer(testing.sgd(), "dynamic")
  loss = tf.reduce_sum(first * x) + tf.reduce_sum(second)
  grads = opt.unscale_gradients(tf.gradients(opt.scale_loss(loss), [second, first]))
  clipped = [tf.clip_by_value(grad, -1.0, 1.0) for grad in grads]
  opt.apply_gradients(zip(clipped, [second, first]))
  names = sorted(mp_compat.nonfinite_gradients(opt))
  assert names == ["first:0", "first:0 (computed)", "second:0", "second:0 (computed)"]


def clip_and_apply(opt, variables):
  def apply(*grads):
    clipped = [tf.clip_by_value(grad, -1.0, 1.0) for grad in grads]
    opt.apply_gradients(zip(clipped, variables))
    return tf.constant(0.0)

  return apply


def as_arguments(opt, grads, variables):
  return tensorflow.function(clip_and_apply(opt, variables))(*grads)


def as_nested_arguments(opt, grads, variables):
  inner = tensorflow.function(clip_and_apply(opt, variables))
  return tensorflow.function(lambda *grads: inner(*grads))(*grads)


def as_captures(opt, grads, variables):
  return tensorflow.function(lambda: clip_and_apply(opt, variables)(*grads))()


@pytest.mark.parametrize("call", [as_arguments, as_nested_arguments])
def test_clipped_argument_logs_warning(call, warnings):
  training = testing.Training()
  opt = Optimizer(testing.sgd(), "dynamic")
  grads, variables = zip(*opt.compute_gradients(training.loss))
  call(opt, grads, variables)
  assert [line for line in warnings if "arguments of a function" in line]


@pytest.mark.parametrize("wrap", [tf.wrap_function, tensorflow.function])
def test_argument_traced_before_gradients_logs_only_that(wrap, warnings):
  training = testing.Training()
  opt = Optimizer(testing.sgd(), "dynamic")

  def apply(grad):
    with tf.control_dependencies([opt.apply_gradients([(grad, training.w)])]):
      return tf.constant(0.0)

  signature = [tensorflow.TensorSpec([2], tf.float32)]
  if wrap is tf.wrap_function:
    applied = wrap(apply, signature)
  else:
    applied = wrap(apply, input_signature=signature)
    applied.get_concrete_function()
  ((grad, _),) = opt.compute_gradients(training.loss)
  train_op = applied(grad)
  (line,) = warnings
  assert "arguments of a function" in line
  with testing.initialized_session() as sess:
    for x in (OVERFLOW, FINITE):
      sess.run(train_op, {training.x: x})
    np.testing.assert_array_equal(sess.run(training.w), -FINITE)


def test_clipped_variable_of_functional_loop_logs_warning(warnings):
  training = testing.Training()
  opt = Optimizer(testing.sgd(), "dynamic")
  grads, variables = zip(*opt.compute_gradients(training.loss))

  def body(i, grad):
    with tf.control_dependencies([clip_and_apply(opt, variables)(grad)]):
      return i + 1, tf.identity(grad)

  with testing.control_flow(2):
    tf.while_loop(lambda i, grad: i < 1, body, [0, grads[0]])
  assert [line for line in warnings if "variables of a loop" in line]


def test_clipped_capture_is_checked(warnings):
  training = testing.Training()
  opt = Optimizer(testing.sgd(), "dynamic")
  grads, variables = zip(*opt.compute_gradients(training.loss))
  train_op = as_captures(opt, grads, variables)
  assert not warnings
  with testing.initialized_session() as sess:
    sess.run(train_op, {training.x: OVERFLOW})
    np.testing.assert_array_equal(sess.run(training.w), [0.0, 0.0])


def test_step_in_function_logs_nothing(warnings):
  training = testing.Training()
  opt = Optimizer(testing.sgd(), "dynamic")
  other = Optimizer(testing.sgd(), "dynamic")
  other.minimize(training.loss)

  @tensorflow.function
  def step(x, rate):
    pairs = opt.compute_gradients(tf.reduce_sum(training.w * x))
    opt.apply_gradients([(rate * grad, variable) for grad, variable in pairs])
    return tf.constant(0.0)

  step(training.x, tf.placeholder_with_default(0.5, []))
  assert not warnings
