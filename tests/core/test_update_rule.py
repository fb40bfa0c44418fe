"""Tests of the update rule against tables, and of the same rule on tensors and on
Python numbers.
"""

import pytest

from mp_compat.core import update_rule
from tests.testing import tf


def scales(history, initial=16.0, **rule):
  """Returns the scale after every step of a history, in which "." is a finite step and
  "x" an overflow.
  """
  parameters = dict(
    increment_period=2, multiplier=2.0, backoff=2.0, overflow_tolerance=1, floor=1.0
  )
  parameters.update(rule)
  state, seen = update_rule.State(initial, 0, 0), []
  for step in history:
    state = update_rule.next_state(state, step == ".", update_rule.Rule(**parameters))
    seen.append(state.scale)
  return seen


@pytest.mark.parametrize(
  "history, rule, expected",
  [
    ("......", {}, [16, 32, 32, 64, 64, 128]),
    (".x.x..", {}, [16, 8, 8, 4, 4, 8]),
    ("xxxxxx", {}, [8, 4, 2, 1, 1, 1]),
    ("......", dict(increment_period=1), [32, 64, 128, 256, 512, 1024]),
    ("......", dict(increment_period=4), [16, 16, 16, 32, 32, 32]),
    ("..x..x", dict(multiplier=4.0, backoff=2.0), [16, 64, 32, 32, 128, 64]),
    ("......", dict(ceiling=63.0), [16, 32, 32, 32, 32, 32]),
    ("......", dict(ceiling=64.0), [16, 32, 32, 64, 64, 64]),
    ("xxxx", dict(floor=3.0), [8, 4, 3, 3]),
    ("xx", dict(floor=0.25, initial=0.75), [0.375, 0.25]),
    # A restored scale above its ceiling is lowered to it at the next growth.
    ("....x", dict(initial=100.0, ceiling=64.0), [100, 64, 64, 64, 32]),
    ("x.x..", dict(initial=200.0, ceiling=16.0), [100, 100, 50, 50, 16]),
    # A restored scale below its floor is neither raised to it nor lowered further by an
    # overflow.
    ("xx..", dict(floor=32.0), [16, 16, 16, 32]),
    # Two overflows lower the scale. A full growth interval of finite steps resets the
    # count; fewer finite steps do not.
    ("xxxx", dict(overflow_tolerance=2), [16, 8, 8, 4]),
    ("x.x.", dict(overflow_tolerance=2), [16, 16, 8, 8]),
    ("x..x", dict(overflow_tolerance=2), [16, 16, 32, 32]),
    ("x..x", dict(overflow_tolerance=2, ceiling=16.0), [16, 16, 16, 16]),
    ("xx.xx", dict(overflow_tolerance=3), [16, 16, 16, 8, 8]),
    # An overflow resets the count of finite steps, even if it does not lower the scale.
    (".x.", dict(overflow_tolerance=2), [16, 16, 16]),
  ],
)
def test_scale_history_matches_table(history, rule, expected):
  assert scales(history, **rule) == expected


def test_reciprocal_never_becomes_subnormal():
  rule = update_rule.Rule(1, 2.0, 2.0, 1, 1.0)
  for before, after in [
    (2.0**125, 2.0**126),
    (2.0**126, 2.0**126),
    (1.5 * 2.0**125, 1.5 * 2.0**125),
    (1.5e308, 2.0**126),
  ]:
    assert update_rule.next_state(update_rule.State(before, 0, 0), True, rule) == (
      after,
      0,
      0,
    )


@pytest.mark.usefixtures("graph")
def test_selects_between_two_numbers():
  condition = tf.placeholder(tf.bool, [])
  selected = update_rule._select_tensor(condition, 2, 3)
  with tf.Session() as sess:
    assert sess.run(selected, {condition: True}) == 2
    assert sess.run(selected, {condition: False}) == 3
