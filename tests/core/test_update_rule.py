"""The rule against tables that a person can check, and the same lines on tensors and on Python numbers."""

import random

import numpy as np
import pytest

import mp_compat
from mp_compat.core import update_rule
from tests import testing
from tests.testing import tf


def scales(history, initial=16., **rule):
  """The scale after every step of a history: "." finite, "x" overflow."""
  parameters = dict(increment_period=2, multiplier=2., backoff=2., overflow_tolerance=1, floor=1.)
  parameters.update(rule)
  state, seen = update_rule.State(initial, 0, 0), []
  for step in history:
    state = update_rule.next_state(state, step == ".", update_rule.Rule(**parameters))
    seen.append(state.scale)
  return seen


@pytest.mark.parametrize("history, rule, expected", [
    ("......", {}, [16, 32, 32, 64, 64, 128]),
    (".x.x..", {}, [16, 8, 8, 4, 4, 8]),
    ("xxxxxx", {}, [8, 4, 2, 1, 1, 1]),
    ("......", dict(increment_period=1), [32, 64, 128, 256, 512, 1024]),
    ("......", dict(increment_period=4), [16, 16, 16, 32, 32, 32]),
    ("..x..x", dict(multiplier=4., backoff=2.), [16, 64, 32, 32, 128, 64]),
    ("......", dict(ceiling=63.), [16, 32, 32, 32, 32, 32]),
    ("......", dict(ceiling=64.), [16, 32, 32, 64, 64, 64]),
    ("xxxx", dict(floor=3.), [8, 4, 3, 3]),
    ("xx", dict(floor=.25, initial=.75), [.375, .25]),
    # Above its ceiling (restored) it comes down to it when it would grow.
    ("....x", dict(initial=100., ceiling=64.), [100, 64, 64, 64, 32]),
    ("x.x..", dict(initial=200., ceiling=16.), [100, 100, 50, 50, 16]),
    # Below its floor (restored from a checkpoint, say) a scale is neither raised to it nor lowered further.
    ("xx..", dict(floor=32.), [16, 16, 16, 32]),
    # Two overflows to shrink; finite steps in between do not clear the count, a chance to grow does.
    ("xxxx", dict(overflow_tolerance=2), [16, 8, 8, 4]),
    ("x.x.", dict(overflow_tolerance=2), [16, 16, 8, 8]),
    ("x..x", dict(overflow_tolerance=2), [16, 16, 32, 32]),
    ("x..x", dict(overflow_tolerance=2, ceiling=16.), [16, 16, 16, 16]),
    ("xx.xx", dict(overflow_tolerance=3), [16, 16, 16, 8, 8]),
    # An overflow starts the row of finite steps anew, also where it does not shrink the scale.
    (".x.", dict(overflow_tolerance=2), [16, 16, 16]),
])
def test_the_scale_moves_as_the_table_says(history, rule, expected):
  assert scales(history, **rule) == expected


def test_no_scale_grows_to_where_its_reciprocal_is_subnormal_but_the_row_starts_anew():
  rule = update_rule.Rule(1, 2., 2., 1, 1.)
  for before, after in [(2. ** 125, 2. ** 126), (2. ** 126, 2. ** 126), (1.5 * 2. ** 125, 1.5 * 2. ** 125),
                        (1.5e308, 2. ** 126)]:
    assert update_rule.next_state(update_rule.State(before, 0, 0), True, rule) == (after, 0, 0)


@pytest.mark.slow
def test_a_million_steps_keep_a_power_of_two_within_its_bounds():
  generator, state = random.Random(0), update_rule.State(2. ** 15, 0, 0)
  rule = update_rule.Rule(100, 2., 2., 2, 2. ** -4, 2. ** 24)
  powers = {2. ** exponent for exponent in range(-4, 25)}
  seen = set()
  for _ in range(10 ** 6):
    # Overflows get likelier as the scale grows, as they do in training.
    state = update_rule.next_state(state, generator.random() > state.scale / 2. ** 27, rule)
    seen.add(state.scale)
    assert 0 <= state.good_steps < 100 and 0 <= state.bad_steps < 2
  assert seen <= powers and len(seen) > 5 and max(seen) == 2. ** 24


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("kwargs", [
    dict(),
    dict(multiplier=3.),
    dict(backoff=1.5, min_loss_scale=.125),
    dict(overflow_tolerance=3, max_loss_scale=100.),
    dict(initial_loss_scale=2. ** 125, increment_period=1),
], ids=str)
def test_variables_in_a_session_go_the_way_of_the_python_numbers(kwargs, version):
  kwargs = dict(dict(initial_loss_scale=16., increment_period=3), **kwargs)
  # Constant folding turns x / 3 into x * (1 / 3), in TensorFlow's class as in ours; NumPy does not.
  config = tf.ConfigProto()
  config.graph_options.rewrite_options.constant_folding = 2  # RewriterConfig.OFF
  with tf.Graph().as_default(), testing.control_flow(version):
    loss_scale = mp_compat.DynamicLossScale(**kwargs)
    gradient = tf.placeholder(tf.float32, [2])
    update_op, should_apply = loss_scale.update([gradient, None])
    rule = update_rule.Rule(
        loss_scale.increment_period, np.float32(loss_scale.multiplier), np.float32(loss_scale.backoff),
        loss_scale.overflow_tolerance, np.float32(loss_scale.min_loss_scale), np.float32(loss_scale.max_loss_scale))
    state = update_rule.State(np.float32(loss_scale.initial_loss_scale), 0, 0)
    generator = random.Random(1)
    with tf.Session(config=config) as sess:
      sess.run(tf.global_variables_initializer())
      for _ in range(300):
        finite = generator.random() > .3
        applied, _ = sess.run([should_apply, update_op], {gradient: [1., 2. if finite else np.inf]})
        assert applied == finite
        with np.errstate(over="ignore"):
          state = update_rule.next_state(state, finite, rule)
        assert sess.run(loss_scale.variables()) == list(state[:len(loss_scale.variables())])
