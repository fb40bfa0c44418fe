"""Tests of the search back from gradients to those that were computed."""

import numpy as np
import pytest

import mp_compat
from mp_compat.core import lineage
from tests import testing
from tests.testing import tf

pytestmark = pytest.mark.usefixtures("graph")


def replaced(grads):
  """Returns the computed gradients that the finite check must read besides `grads`, by
  name.
  """
  return {computed.name: computed.values for computed in lineage.trace(grads).hidden}


# Functions whose result may be finite though the computed gradient is not.
HIDING = {
  "clip_by_value": lambda g: tf.clip_by_value(g, -1.0, 1.0),
  "where": lambda g: tf.where(tf.is_finite(g), g, tf.zeros_like(g)),
  "tf.cond": lambda g: tf.cond(
    tf.reduce_all(tf.is_finite(g)), lambda: g, lambda: tf.zeros_like(g)
  ),
  "while_loop": lambda g: tf.while_loop(
    lambda i, h: i < 2, lambda i, h: (i + 1, tf.clip_by_value(h, -1.0, 1.0)), [0, g]
  )[1],
}


@pytest.mark.usefixtures("control_flow")
@pytest.mark.parametrize("how", sorted(HIDING))
def test_clipped_gradients_are_found(how):
  behind, computed, other = [tf.placeholder(tf.float32, [2]) for _ in range(3)]
  computed += behind
  lineage.record([behind, computed, other], ["behind", "computed", "other"])
  found = replaced([HIDING[how](computed)])
  assert list(found) == ["computed"] and found["computed"] is computed


def test_gradient_that_only_chooses_a_branch_is_no_origin():
  chooses, taken, other = [tf.placeholder(tf.float32, [2]) for _ in range(3)]
  lineage.record([chooses, taken, other], ["chooses", "taken", "other"])
  with testing.control_flow(1):
    passed = tf.cond(tf.reduce_all(chooses > 0), lambda: taken * 2.0, lambda: other)
  assert sorted(replaced([passed])) == ["other", "taken"]


def test_passed_gradients_are_checked_once():
  computed = [tf.placeholder(tf.float32, [2]) for _ in "ab"]
  lineage.record(computed, "ab")
  assert list(replaced([computed[0], tf.sign(computed[1])])) == ["b"]
  assert not replaced([None] + computed + [computed[0] + computed[1]])


def test_gradients_without_names_are_named_after_their_variables():
  named, unnamed, other = [tf.placeholder(tf.float32, [2]) for _ in range(3)]
  lineage.record([named], ["a:0"])
  lineage.record([unnamed], ["gradient 0"], are_names_of_variables=False)
  variables = [tf.get_variable(name, [2]) for name in "bcd"]
  factor = other * other  # reads a tensor twice
  found = lineage.trace([named * 2.0, other, factor * unnamed], variables=variables)
  assert sorted(computed.name for computed in found.computed) == ["a:0", "d:0"]


# Functions that compute the sum of a tensor's squares.
SQUARING = {
  "clip_by_global_norm": lambda g: tf.clip_by_global_norm([g], 1.0)[0][0],
  "clip_by_global_norm of this package": lambda g: mp_compat.clip_by_global_norm(
    [g], 1.0
  )[0][0],
  "clip_by_norm": lambda g: tf.clip_by_norm(g, 1.0),
  "of a copy": lambda g: tf.nn.l2_loss(tf.identity(g)),
  "over one axis": lambda g: tf.reduce_sum(tf.square(g), axis=0),
}
# Functions that do not, or in a way that cannot be relied on.
NOT_SQUARING = {
  "behind a control input": lambda g: after(tf.no_op(), lambda: tf.nn.l2_loss(g)),
  "another factor": lambda g: tf.reduce_sum(g * tf.sign(g)),
  "in a branch": lambda g: tf.cond(
    tf.placeholder(tf.bool, []), lambda: tf.nn.l2_loss(g), lambda: 0.0
  ),
  "over axes that are fed": lambda g: tf.reduce_sum(
    tf.square(g), tf.placeholder(tf.int32, [None])
  ),
  "sum": tf.reduce_sum,
}


def after(op, make):
  with tf.control_dependencies([op]):
    return make()


@pytest.mark.usefixtures("control_flow")
@pytest.mark.parametrize("how", sorted(SQUARING) + sorted(NOT_SQUARING))
def test_sums_of_squares_are_found(how):
  computed = tf.placeholder(tf.float32, [2])
  result = dict(SQUARING, **NOT_SQUARING)[how](computed)
  assert (lineage.tensor_key(computed) in lineage.trace([result]).sums_of_squares) == (
    how in SQUARING
  )


def test_finite_gradients_with_infinite_squares_are_finite():
  training = testing.Training()
  opt = testing.Optimizer(testing.sgd(), "dynamic")
  ((grad, w),) = opt.compute_gradients(training.loss, [training.w])
  train_op = opt.apply_gradients([(tf.clip_by_norm(grad, 1.0), w)])
  results = training.run(
    train_op,
    [1e30, 1.0],
    [1e30, np.inf],
    [np.nan, 0.0],
    [3.0, 4.0],
    fetch=opt.gradients_finite,
  )
  assert results == [[True], [False], [False], [True]]


def test_captured_gradients_are_followed():
  computed = tf.placeholder(tf.float32, [2])
  lineage.record([computed], ["v"])
  hidden = {}

  def branch():
    hidden.update(replaced([tf.clip_by_value(computed, -1.0, 1.0)]))
    return tf.constant(True)

  with testing.control_flow(2):
    tf.cond(tf.placeholder_with_default(True, []), branch, lambda: tf.constant(True))
  assert hidden == {"v": computed}


# Build a tensor with `make` inside a control-flow construct, and return it outside.
CONTEXTS = {
  "cond": lambda make: tf.cond(
    tf.placeholder(tf.bool, []), make, lambda: tf.zeros([2])
  ),
  "while_loop": lambda make: tf.while_loop(
    lambda i, g: i < 2, lambda i, g: (i + 1, make()), [0, tf.zeros([2])]
  )[1],
  "map_fn": lambda make: tf.map_fn(lambda x: make() * x, tf.ones([3])),
  "xla": lambda make: tf.xla.experimental.compile(make)[0],
}


@pytest.mark.each_choice
@pytest.mark.usefixtures("control_flow")
@pytest.mark.parametrize("context", sorted(CONTEXTS))
def test_only_readable_gradients_are_checked(context):
  x = tf.placeholder(tf.float32, [2])
  inside = {}

  def make():
    computed = x * 2.0
    lineage.record([computed], ["v"])
    clipped = tf.clip_by_value(computed, -1.0, 1.0)
    inside.update(replaced([clipped]))
    return clipped

  outside = CONTEXTS[context](make)
  assert list(inside) == ["v"] and not replaced([outside, outside + 1.0])
