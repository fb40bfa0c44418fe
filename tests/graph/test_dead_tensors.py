"""Tests that tensors which may be dead are known, compared with runs in which they are
or are not computed.
"""

import itertools

import pytest

import mp_compat
from mp_compat.graph import dead_tensors
from tests import testing
from tests.testing import native
from tests.testing import tf

pytestmark = pytest.mark.usefixtures("graph")


def merged(*tensors):
  return tf.raw_ops.Merge(inputs=list(tensors)).output


def if_true(x, predicate):
  return tf.raw_ops.Switch(data=x, pred=predicate).output_true


def if_false(x, predicate):
  return tf.raw_ops.Switch(data=x, pred=predicate).output_false


def conditional(x, predicate):
  return merged(if_true(x, predicate), if_false(x, predicate))


def after(op, x):
  with tf.control_dependencies([op]):
    return tf.identity(x)


def trigger_after(tensor):
  """Returns an op that runs after `tensor`, also if that is dead."""
  with tf.control_dependencies([tensor]):
    return tf.raw_ops.ControlTrigger()


TENSORS = {
  "always": lambda x, p, q: x,
  "if_p": lambda x, p, q: if_true(x, p),
  "if_p_and_q": lambda x, p, q: if_true(if_true(x, p), q),
  "if_p_or_q": lambda x, p, q: merged(if_true(x, p), if_true(x, q)),
  "conditional": lambda x, p, q: conditional(x, p),
  "conditional_in_branch": lambda x, p, q: conditional(if_true(x, p), q),
  "branch_of_conditional": lambda x, p, q: if_true(conditional(x, p), q),
  "conditional_in_conditional": lambda x, p, q: merged(
    conditional(if_true(x, p), q), if_false(x, p)
  ),
  "p_and_q_or_not_p": lambda x, p, q: merged(if_true(if_true(x, p), q), if_false(x, p)),
  "if_p_or_q_twice": lambda x, p, q: merged(
    merged(if_true(x, p), if_true(x, q)), if_true(x, p)
  ),
  "after_trigger": lambda x, p, q: after(trigger_after(-if_true(x, p)), x),
  "copied_predicate": lambda x, p, q: merged(
    if_true(x, tf.identity(p)), if_false(x, p)
  ),
}


def is_computed(sess, tensor, feed):
  try:
    sess.run(tensor, feed)
  except tf.errors.InvalidArgumentError:  # "Retval[0] does not have value"
    return False
  return True


@pytest.mark.parametrize("name", TENSORS)
def test_tensors_that_may_be_dead_are_known(name):
  x = tf.placeholder(tf.float32, [])
  predicates = [tf.placeholder(tf.bool, []) for _ in "pq"]
  tensor = TENSORS[name](x, *predicates)
  (may_be_dead,) = dead_tensors.may_be_dead([tensor])
  (readable,) = dead_tensors.zeros_if_dead([tensor])
  computed = []
  with testing.session() as sess:
    for values in itertools.product([False, True], repeat=2):
      feed = dict(zip([x, *predicates], [3.0, *values]))
      computed.append(is_computed(sess, tensor, feed))
      assert sess.run(readable, feed) == (3.0 if computed[-1] else 0.0)
  assert may_be_dead == (not all(computed))


# Gradients that a loop computes from a tensor. If that is dead, they do not arrive.
GRADIENTS = {
  "start": lambda tensor: testing.loop_twice(lambda value: 2.0 * value, tensor),
  "body": lambda tensor: testing.loop_twice(lambda value: value + tensor, 0.0),
}


def build_step(api, gradient):
  """Returns an optimizer, its train op, its variables and a predicate: if it is False,
  the gradient of the first variable does not arrive.
  """
  predicate = tf.placeholder(tf.bool, [])
  variables = [tf.get_variable(name, initializer=8.0) for name in "vw"]
  grads = [GRADIENTS[gradient](if_true(tf.constant(1.0), predicate)), tf.constant(1.0)]
  opt = tf.train.GradientDescentOptimizer(1.0)
  opt = api.MixedPrecisionLossScaleOptimizer(opt, api.DynamicLossScale())
  step = tf.train.get_or_create_global_step()
  train_op = opt.apply_gradients(zip(grads, variables), step)
  return opt, train_op, variables, predicate


@pytest.mark.parametrize("gradient", GRADIENTS)
@pytest.mark.parametrize("api", [mp_compat, native], ids=["mp_compat", "tensorflow"])
def test_gradient_of_loop_that_does_not_arrive_updates_nothing(api, gradient):
  with testing.control_flow(1):
    _, train_op, variables, predicate = build_step(api, gradient)
  with testing.initialized_session() as sess:
    sess.run(train_op, {predicate: False})
    assert sess.run(variables) == [8.0, 8.0]
    sess.run(train_op, {predicate: True})
    assert sess.run(variables) == [{"start": 4.0, "body": 6.0}[gradient], 7.0]


def test_hook_raises_if_gradient_of_loop_does_not_arrive():
  with testing.control_flow(1):
    opt, train_op, _, predicate = build_step(mp_compat, "body")
  with tf.train.MonitoredSession(hooks=[mp_compat.LossScaleHook(opt)]) as sess:
    sess.run(train_op, {predicate: True})
    with pytest.raises(tf.errors.InvalidArgumentError, match="does not have value"):
      sess.run(train_op, {predicate: False})
