"""Tests of the update rule against tables, and of the same rule on tensors and on Python numbers."""

import random

import numpy as np
import pytest

import mp_compat
from mp_compat.core import update_rule
from tests import testing
from tests.testing import tf


def scales(history, initial=16.0, **rule):
  """Returns the scale after every step of a history, in which "." is a finite step and "x" an overflow."""
  parameters = dict(increment_period=2, multiplier=2.0, backoff=2.0, overflow_tolerance=1, floor=1.0)
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
    # A restored scale below its floor is neither raised to it nor lowered further by an overflow.
    ("xx..", dict(floor=32.0), [16, 16, 16, 32]),
    # Two overflows lower the scale. A full growth interval of finite steps resets the count; fewer finite steps do not.
    ("xxxx", dict(overflow_tolerance=2), [16, 8, 8, 4]),
    ("x.x.", dict(overflow_tolerance=2), [16, 16, 8, 8]),
    ("x..x", dict(overflow_tolerance=2), [16, 16, 32, 32]),
    ("x..x", dict(overflow_tolerance=2, ceiling=16.0), [16, 16, 16, 16]),
    ("xx.xx", dict(overflow_tolerance=3), [16, 16, 16, 8, 8]),
    # An overflow resets the count of finite steps, even if it does not lower the scale.
    (".x.", dict(overflow_tolerance=2), [16, 16, 16]),
  ],
)
def test_scale_history_matches_the_table(history, rule, expected):
  assert scales(history, **rule) == expected


def test_growth_never_makes_the_reciprocal_subnormal():
  rule = update_rule.Rule(1, 2.0, 2.0, 1, 1.0)
  for before, after in [
    (2.0**125, 2.0**126),
    (2.0**126, 2.0**126),
    (1.5 * 2.0**125, 1.5 * 2.0**125),
    (1.5e308, 2.0**126),
  ]:
    assert update_rule.next_state(update_rule.State(before, 0, 0), True, rule) == (after, 0, 0)


@pytest.mark.slow
def test_million_steps_keep_scale_within_bounds():
  generator, state = random.Random(0), update_rule.State(2.0**15, 0, 0)
  rule = update_rule.Rule(100, 2.0, 2.0, 2, 2.0**-4, 2.0**24)
  powers = {2.0**exponent for exponent in range(-4, 25)}
  seen = set()
  for _ in range(10**6):
    # The probability of an overflow grows with the scale, as in training.
    state = update_rule.next_state(state, generator.random() > state.scale / 2.0**27, rule)
    seen.add(state.scale)
    assert 0 <= state.good_steps < 100 and 0 <= state.bad_steps < 2
  assert seen <= powers and len(seen) > 5 and max(seen) == 2.0**24


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(
  "kwargs",
  [
    dict(),
    dict(multiplier=3.0),
    dict(backoff=1.5, min_loss_scale=0.125),
    dict(overflow_tolerance=3, max_loss_scale=100.0),
    dict(initial_loss_scale=2.0**125, increment_period=1),
  ],
  ids=str,
)
def test_session_variables_match_python_update_rule(kwargs, version):
  kwargs = dict(dict(initial_loss_scale=16.0, increment_period=3), **kwargs)
  # Constant folding would turn x / 3 into x * (1 / 3), which NumPy does not.
  config = tf.ConfigProto()
  config.graph_options.rewrite_options.constant_folding = 2  # RewriterConfig.OFF
  with tf.Graph().as_default(), testing.control_flow(version):
    loss_scale = mp_compat.DynamicLossScale(**kwargs)
    gradient = tf.placeholder(tf.float32, [2])
    update_op, should_apply = loss_scale.update([gradient, None])
    rule = update_rule.Rule(
      loss_scale.increment_period,
      np.float32(loss_scale.multiplier),
      np.float32(loss_scale.backoff),
      loss_scale.overflow_tolerance,
      np.float32(loss_scale.min_loss_scale),
      np.float32(loss_scale.max_loss_scale),
    )
    state = update_rule.State(np.float32(loss_scale.initial_loss_scale), 0, 0)
    generator = random.Random(1)
    with tf.Session(config=config) as sess:
      sess.run(tf.global_variables_initializer())
      for _ in range(300):
        finite = generator.random() > 0.3
        applied, _ = sess.run([should_apply, update_op], {gradient: [1.0, 2.0 if finite else np.inf]})
        assert applied == finite
        with np.errstate(over="ignore"):
          state = update_rule.next_state(state, finite, rule)
        assert sess.run(loss_scale.variables()) == list(state[: len(loss_scale.variables())])
