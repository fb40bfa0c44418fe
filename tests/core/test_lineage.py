"""Tests of the search back from gradients to those that were computed."""

import pytest

import mp_compat
from mp_compat.core import lineage
from tests import testing
from tests.testing import tf

pytestmark = pytest.mark.usefixtures("graph")


def to_check(grads):
  """Returns the computed gradients that the finite check must read besides `grads`, by name."""
  return {computed.name: computed.values for computed in lineage.trace(grads).to_check}


# Functions whose result may be finite though the computed gradient is not.
HIDING = {
  "clip_by_value": lambda g: tf.clip_by_value(g, -1.0, 1.0),
  "where": lambda g: tf.where(tf.is_finite(g), g, tf.zeros_like(g)),
  "tf.cond": lambda g: tf.cond(tf.reduce_all(tf.is_finite(g)), lambda: g, lambda: tf.zeros_like(g)),
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
  found = to_check([HIDING[how](computed)])
  assert list(found) == ["computed"] and found["computed"] is computed


def test_passed_gradients_are_checked_once():
  computed = [tf.placeholder(tf.float32, [2]) for _ in "ab"]
  lineage.record(computed, "ab")
  assert list(to_check([computed[0], tf.sign(computed[1])])) == ["b"]
  assert not to_check([None] + computed + [computed[0] + computed[1]])


# Functions whose result is not finite if the computed gradient is not.
SHOWING = {
  "clip_by_global_norm of this package": lambda g: mp_compat.clip_by_global_norm([g, g * 2.0], 1.0)[0][0],
  "mean": lambda g: (g + tf.ones([2])) / 2.0,
  "on one of two paths": lambda g: tf.sign(g) + g,
}


@pytest.mark.parametrize("how", sorted(SHOWING))
def test_shown_overflow_needs_no_check(how):
  computed = tf.placeholder(tf.float32, [2])
  lineage.record([computed], ["v"])
  found = lineage.trace([SHOWING[how](computed)])
  assert not found.to_check
  assert [each.name for each in found.computed] == [each.name for each in found.replaced] == ["v"]


def test_captured_gradients_are_followed():
  computed = tf.placeholder(tf.float32, [2])
  lineage.record([computed], ["v"])
  hidden, shown = {}, []

  def branch():
    hidden.update(to_check([tf.clip_by_value(computed, -1.0, 1.0)]))
    shown.append(lineage.trace([computed * 2.0]))
    return tf.constant(True)

  with testing.control_flow(2):
    tf.cond(tf.placeholder_with_default(True, []), branch, lambda: tf.constant(True))
  assert hidden == {"v": computed}
  assert shown[0].replaced and not shown[0].to_check


# Build a tensor with `make` inside a control-flow construct, and return it outside.
CONTEXTS = {
  "cond": lambda make: tf.cond(tf.placeholder(tf.bool, []), make, lambda: tf.zeros([2])),
  "while_loop": lambda make: tf.while_loop(lambda i, g: i < 2, lambda i, g: (i + 1, make()), [0, tf.zeros([2])])[1],
  "map_fn": lambda make: tf.map_fn(lambda x: make() * x, tf.ones([3])),
  "xla": lambda make: tf.xla.experimental.compile(make)[0],
}


@pytest.mark.usefixtures("control_flow")
@pytest.mark.parametrize("context", sorted(CONTEXTS))
def test_only_readable_gradients_are_checked(context):
  x = tf.placeholder(tf.float32, [2])
  inside = {}

  def make():
    computed = x * 2.0
    lineage.record([computed], ["v"])
    clipped = tf.clip_by_value(computed, -1.0, 1.0)
    inside.update(to_check([clipped]))
    return clipped

  outside = CONTEXTS[context](make)
  assert list(inside) == ["v"] and not to_check([outside, outside + 1.0])
