"""Tests of what LossScaleStalledError says of the reason."""

import numpy as np
import pytest

import mp_compat
from tests import testing
from tests.testing import Optimizer
from tests.testing import tf

pytestmark = pytest.mark.usefixtures("graph")


def stall(opt, train_op, feed=None, **kwargs):
  """Runs the train op until a hook raises an error; returns its text."""
  with pytest.raises(mp_compat.LossScaleStalledError) as raised:
    with tf.train.MonitoredTrainingSession(hooks=[mp_compat.LossScaleHook(opt, **kwargs)]) as sess:
      while True:
        sess.run(train_op, feed)
  return str(raised.value)


def two_layers(x):
  """Returns the logits of two layers."""
  with tf.variable_scope("", initializer=tf.ones_initializer(), use_resource=True):
    return tf.matmul(tf.matmul(x, tf.get_variable("one", [2, 2], x.dtype)), tf.get_variable("two", [2, 1], x.dtype))


def root_in_branch(x):
  with testing.control_flow(1):
    return tf.cond(tf.placeholder_with_default(True, []), lambda: tf.sqrt(two_layers(x)), lambda: tf.zeros([1, 1]))


# The input, its dtype, the loss scale, the values of which the sum is the loss, and texts of the error.
REASONS = {
  "infinite gradient": (
    ([1.0, -1.0], tf.float32, lambda: mp_compat.DynamicLossScale(2.0), lambda x: tf.sqrt(two_layers(x))),
    "one:0: ",
    "The first value of the backward pass that is not finite is gradients/Sqrt_grad/",
    "If it is finite, an op of the backward pass overflows in float16 or has no finite gradient",
  ),
  "fixed scale": (
    ([1.0, 1.0], tf.float16, lambda: 2.0**20, lambda x: tf.cast(two_layers(x), tf.float32)),
    "not finite is gradients/Cast_grad/Cast.",
    'the fixed loss scale may be too large: lower it, or use "dynamic"',
    "no step was ever applied of 2 attempted",
  ),
  "fixed scale of float16 loss": (
    ([1.0, 1.0], tf.float16, lambda: testing.native.FixedLossScale(2.0**20), two_layers),
    "not finite is scale_loss/Cast.",
    "the fixed loss scale may be too large",
  ),
  "falling scale": (
    ([np.inf, 1.0], tf.float32, lambda: "dynamic", two_layers),
    "the scale may still be too large: begin with a lower one, or allow more skips.",
  ),
  "skipped by loss scale": (
    ([1.0, 1.0], tf.float32, lambda: testing.SkipsFiniteSteps(8.0), two_layers),
    "All gradients are finite here: the loss scale itself or another process decided to skip.",
  ),
  "value in branch": (
    ([1.0, -1.0], tf.float32, lambda: 2.0, root_in_branch),
    "not finite is gradients/cond/Sqrt_grad/",
  ),
}


@pytest.mark.parametrize("reason", sorted(REASONS))
def test_stall_error_names_reason(reason):
  (value, dtype, make_scale, outputs), *texts = REASONS[reason]
  x = tf.placeholder(dtype, [1, 2])
  opt = Optimizer(tf.train.GradientDescentOptimizer(1.0), make_scale())
  train_op = opt.minimize(tf.reduce_sum(outputs(x)))
  error = stall(opt, train_op, {x: [value]}, max_consecutive_skips=4, min_scale_patience=2)
  assert not [text for text in texts if text not in error]


def test_unclipped_gradients_come_first():
  x = tf.placeholder(tf.float32, [1, 2])
  opt = Optimizer(tf.train.GradientDescentOptimizer(1.0), 2.0)
  variables = [tf.get_variable(name, [2]) for name in "ab"]
  loss = tf.reduce_sum(variables[0] * x) + tf.reduce_sum(variables[1])
  grads, variables = zip(*opt.compute_gradients(loss, variables))
  clipped, _ = mp_compat.clip_by_global_norm(grads, 1.0)
  text = stall(opt, opt.apply_gradients(zip(clipped, variables)), {x: [[np.inf, 1.0]]}, min_scale_patience=2)
  lines = [line.split(", ")[0] for line in text.splitlines() if "NaN" in line]
  assert lines == ["  a:0 (computed): 0 NaN", "  a:0: 2 NaN", "  b:0: 2 NaN"]


def test_fed_gradients_need_no_backward_pass():
  x = tf.placeholder(tf.float32, [1, 2])
  opt = Optimizer(tf.train.GradientDescentOptimizer(1.0), 2.0, check_computed_gradients=False)
  grads, variables = zip(*opt.compute_gradients(tf.reduce_sum(two_layers(x))))
  clipped, _ = tf.clip_by_global_norm(grads, 1.0)
  train_op = opt.apply_gradients(zip(clipped, variables))
  text = stall(opt, train_op, {clipped[0]: np.full([2, 2], np.nan), clipped[1]: np.ones([2, 1])}, min_scale_patience=2)
  assert "one:0: 4 NaN" in text and "(computed)" not in text and "first value" not in text


def test_stall_between_applied_steps(warnings):
  w = tf.get_variable("w", [2])
  xs = [tf.placeholder(tf.float32, [2]) for _ in range(2)]
  opt = Optimizer(tf.train.GradientDescentOptimizer(1.0), 2.0)
  train_ops = [opt.minimize(tf.reduce_sum(w * x)) for x in xs]
  hook = mp_compat.LossScaleHook(opt, max_consecutive_skips=1, on_stall="warn")
  with tf.train.MonitoredTrainingSession(hooks=[hook]) as sess:
    for first in [np.inf, 1.0]:
      sess.run(train_ops, {xs[0]: [first, 1.0], xs[1]: [np.inf, 1.0]})
  assert len([line for line in warnings if "w:0: 0 NaN, 1 inf" in line]) == 2
