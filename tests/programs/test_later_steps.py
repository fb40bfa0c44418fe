"""Random programs whose later step reads, or waits for, what an earlier one computes: it
is an error, or the later step runs when the earlier one is skipped.

`USES` are the ways from a tensor of the earlier step to a scalar that the later one
reads.
"""

import random

import numpy as np
import pytest
import tensorflow

from mp_compat._tensorflow import graph_internals
from tests import testing
from tests.programs import test_random_steps
from tests.testing import Optimizer
from tests.testing import loop_twice
from tests.testing import tf

FINITE = [1.0, 2.0]
OVERFLOW = [np.inf, 1.0]


def one():
  return tf.constant(1.0)


def sum_of(tensor):
  return tf.reduce_sum(tf.cast(tensor, tf.float32))


def one_after(tensor):
  with tf.control_dependencies([tensor]):
    return one()


def one_after_trigger(tensor):
  with tf.control_dependencies([tensor]):
    trigger = tf.raw_ops.ControlTrigger()
  return one_after(trigger)


def branch(of_branch):
  flag = tf.placeholder_with_default(True, [])
  return tf.cond(flag, of_branch, one)


def merged(tensor):
  """Returns a Merge with one input that is never computed."""
  flag = tf.placeholder_with_default(False, [])
  _, never = tf.raw_ops.Switch(data=one(), pred=flag)
  return tf.raw_ops.Merge(inputs=[sum_of(tensor), never]).output


USES = {
  "data": sum_of,
  "control": one_after,
  "ControlTrigger": one_after_trigger,
  "Merge": merged,
  "start of loop": lambda t: loop_twice(lambda value: value + 1.0, sum_of(t)),
  "in loop": lambda t: loop_twice(lambda value: value + sum_of(t), one()),
  "control in loop": lambda t: loop_twice(lambda value: one_after(t) * value, one()),
  "in loop in loop": lambda t: loop_twice(
    lambda outer: outer + loop_twice(lambda value: value + sum_of(t), outer), one()
  ),
  "branch in loop": lambda t: loop_twice(
    lambda value: value + branch(lambda: sum_of(t)), one()
  ),
  "branch": lambda t: branch(lambda: sum_of(t)),
  "control in branch": lambda t: branch(lambda: one_after(t)),
  "argument": lambda t: tensorflow.function(lambda value: 2.0 * value)(sum_of(t)),
  "capture": lambda t: tensorflow.function(lambda: sum_of(t))(),
}


class Recorded(test_random_steps.Random):
  """Runs random actions, and keeps the tensors that they build outside of contexts."""

  def apply_gradients(self, *args, **kwargs):
    graph = tf.get_default_graph()
    built_before = len(graph.get_operations())
    applied = super().apply_gradients(*args, **kwargs)
    self.tensors = []
    for op in graph.get_operations()[built_before:]:
      if graph_internals.context_of(op) is None:
        self.tensors += [tensor for tensor in op.outputs if is_number(tensor)]
    return applied


def is_number(tensor):
  return tensor.dtype.base_dtype in (tf.float32, tf.int32, tf.bool)


def apply_second(how, read, variable, x):
  """Applies a gradient of the loss `sum(variable * x)`, with a tensor of the first
  step as `how` says.
  """
  rate, grad = 0.5, tf.identity(x)
  if how == "rate":  # never 0 or NaN
    rate = tf.where(read > 0.0, one() / 2, one() / 4)
  else:
    with tf.control_dependencies([read]):
      grad = tf.identity(x)
  opt = Optimizer(tf.train.GradientDescentOptimizer(rate), loss_scale=8.0)
  return opt.apply_gradients([(grad, variable)])


def is_computed(sess, tensor, feed):
  """Returns whether a run computes a tensor, that is, whether the program itself does
  not leave it out.
  """
  try:
    sess.run(tensor, feed)
  except tf.errors.InvalidArgumentError:
    return False
  return True


@pytest.mark.each_choice
@pytest.mark.usefixtures("graph", "control_flow")
@pytest.mark.parametrize("seed", range(0, 30, 3))
@pytest.mark.parametrize("how", ["rate", "control"])
@pytest.mark.parametrize("use", USES)
def test_later_step_runs_or_raises(use, how, seed):
  training = testing.Training()
  x = tf.placeholder(tf.float32, [test_random_steps.SIZE])
  other = tf.get_variable("other", x.shape, initializer=tf.zeros_initializer())
  inner = Recorded(test_random_steps.Builder(seed, one()), 3)
  first = Optimizer(inner, loss_scale=8.0).minimize(
    training.loss, var_list=[training.w]
  )
  read = USES[use](random.Random(seed).choice(inner.tensors))
  try:
    second = apply_second(how, read, other, x)
  except ValueError as error:
    assert "which an earlier apply_gradients()" in str(error) or (
      "reads gradients of an earlier apply_gradients()" in str(error)
    )
    return
  with testing.initialized_session() as sess:
    if not is_computed(sess, read, {training.x: FINITE}):
      pytest.skip("the program itself does not compute the tensor")
    values = [np.zeros(2)]
    for first_x in (FINITE, OVERFLOW, FINITE):
      sess.run([first, second], {training.x: first_x, x: [1.0, 2.0]})
      values.append(sess.run(other))
    assert np.all(np.diff(values, axis=0) < 0.0)
