"""Tests that tensors which may be dead are known, compared with runs in which they are
or are not computed.
"""

import itertools

import pytest

from mp_compat.graph import dead_tensors
from tests import testing
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
