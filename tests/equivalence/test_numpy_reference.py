"""Compares training that TensorFlow's class does not support with NumPy.

These are float16 and float64 variables, user-defined loss scales and overflows hidden
by clipping. NumPy recomputes each step in float64 from the variables before it. Skipped
steps, scale and counters must be equal. Variables may differ by a few units in the last
place.
"""

from typing import Any, List, NamedTuple

import hypothesis
from hypothesis import strategies as st
import numpy as np
import pytest

import mp_compat
from mp_compat.core import update_rule
from tests import testing
from tests.testing import tf

STEPS = 40
# exact in float16
RATE, MOMENTUM, BETA1, BETA2, EPSILON = (0.125, 0.75, 0.875, 0.96875, 2.0**-6)
OPTIMIZERS = {
  "sgd": lambda: tf.train.GradientDescentOptimizer(RATE),
  "momentum": lambda: tf.train.MomentumOptimizer(RATE, MOMENTUM),
  "adam": lambda: tf.train.AdamOptimizer(RATE, BETA1, BETA2, EPSILON),
}
# Functions of a gradient before apply_gradients, in TensorFlow and in NumPy. Some hide
# an overflow.
BETWEEN = {
  "nothing": (lambda g: g, lambda g: g),
  "clip": (lambda g: tf.clip_by_value(g, -0.5, 0.5), lambda g: np.clip(g, -0.5, 0.5)),
  "mask": (
    lambda g: tf.where_v2(tf.is_finite(g), g, tf.zeros_like(g)),
    lambda g: np.where(np.isfinite(g), g, 0),
  ),
}


class QuarterOnOverflow(mp_compat.LossScale):
  """A user-defined loss scale: divides by 4 on overflow, doubles otherwise, and stays
  at least 1/4.
  """

  def __init__(self, initial):
    self._add_weight("scale", initial, tf.float32)

  def __call__(self):
    return self._weight("scale") * 1.0

  def update(self, grads):
    finite = tf.reduce_all(
      [tf.reduce_all(tf.is_finite(g)) for g in tf.nest.flatten(grads)]
    )
    scale = self._weight("scale")
    return scale.assign(
      tf.where_v2(finite, scale * 2.0, tf.maximum(scale / 4.0, 0.25))
    ), finite

  def get_config(self):
    return {}

  @staticmethod
  def after(state, finite):
    return [state[0] * 2 if finite else max(state[0] / 4, 0.25)]


class Dynamic(mp_compat.DynamicLossScale):
  """TensorFlow's rule with a growth interval of 3 steps and a floor of 1/4."""

  def __init__(self, initial):
    super().__init__(initial, 3, min_loss_scale=0.25)

  @staticmethod
  def after(state, finite):
    return update_rule.next_state(
      update_rule.State(*state, bad_steps=0),
      finite,
      update_rule.Rule(3, 2.0, 2.0, 1, 0.25),
    )[:2]


class Fixed(mp_compat.FixedLossScale):
  @staticmethod
  def after(state, finite):
    return []


class TrainingState(NamedTuple):
  # the trained variable, its slots and the counters of the optimizer
  variables: List[Any]
  loss_scale: List[Any]
  global_step: Any


def updated(name, before, gradient, dtype):
  """Returns the variable and its slots after one applied step, computed in float64."""
  w, *slots = [value.astype(np.float64) for value in before]
  g = gradient.astype(np.float64)
  if name == "sgd":
    return [w - RATE * g]
  if name == "momentum":
    accumulated = slots[0] * MOMENTUM + g
    return [w - RATE * accumulated, accumulated]
  m, v, power1, power2 = slots
  m, v = m + (g - m) * (1 - BETA1), v + (g * g - v) * (1 - BETA2)
  # the powers are float32
  rate = RATE * np.sqrt(1 - dtype(power2)) / (1 - dtype(power1))
  return [w - rate * m / (np.sqrt(v) + EPSILON), m, v, power1 * BETA1, power2 * BETA2]


def tracked(name, opt, w):
  """Returns the variable, its slots and the counters of the optimizer, in the order of
  `updated`.
  """
  if name == "adam":
    return [w, opt.get_slot(w, "m"), opt.get_slot(w, "v")] + list(
      opt._get_beta_accumulators()
    )
  return [w] + [opt.get_slot(w, slot) for slot in opt.get_slot_names()]


each_case = hypothesis.given(
  dtype=st.sampled_from([np.float16, np.float64]),
  name=st.sampled_from(sorted(OPTIMIZERS)),
  make_scale=st.sampled_from([Dynamic, Fixed, QuarterOnOverflow]),
  exponent=st.integers(0, 17),
  between=st.sampled_from(sorted(BETWEEN)),
  resource=st.booleans(),
  version=st.sampled_from([1, 2]),
  seed=st.integers(0, 999),
  overflows=st.dictionaries(
    st.integers(0, STEPS - 1),
    st.sampled_from([np.inf, -np.inf, np.nan, 200.0]),
    max_size=8,
  ),
)


@hypothesis.settings(max_examples=12)
@each_case
def test_every_step_matches_numpy(**case):
  assert_steps_match(**case)


@pytest.mark.matrix
@hypothesis.settings(max_examples=40)
@each_case
def test_every_step_of_more_cases_matches_numpy(**case):
  assert_steps_match(**case)


def assert_steps_match(
  dtype, name, make_scale, exponent, between, resource, version, seed, overflows
):
  random = np.random.RandomState(seed)
  with tf.Graph().as_default(), testing.control_flow(version):
    with tf.variable_scope("", use_resource=resource):
      w = tf.get_variable("w", initializer=random.uniform(-2, 2, 5).astype(dtype))
      global_step = tf.train.get_or_create_global_step()
    x = tf.placeholder(dtype, [5])
    inner, loss_scale = OPTIMIZERS[name](), make_scale(2.0**exponent)
    opt = mp_compat.MixedPrecisionLossScaleOptimizer(inner, loss_scale)
    grads_and_vars = opt.compute_gradients(tf.reduce_sum(w * x))
    train_op = opt.apply_gradients(
      [(BETWEEN[between][0](g), v) for g, v in grads_and_vars], global_step
    )
    state = TrainingState(tracked(name, inner, w), loss_scale.variables(), global_step)
    with testing.initialized_session() as sess:
      before = sess.run(state)
      for step in range(STEPS):
        gradient = random.normal(size=5).astype(dtype)
        if step in overflows:
          gradient[step % 5] = overflows[step]
        scale = np.float32(before.loss_scale[0] if before.loss_scale else 2.0**exponent)
        sess.run(train_op, {x: gradient})
        after = sess.run(state)
        with np.errstate(all="ignore"):
          wide = np.float64 if dtype is np.float64 else np.float32
          raw = (gradient * dtype(scale) * (1 / wide(scale))).astype(dtype)
          finite = bool(np.isfinite(raw).all())
          assert after.loss_scale == list(
            make_scale.after(before.loss_scale, finite)
          ), step
          assert after.global_step == before.global_step + finite, step
          expected = before.variables
          if finite:
            expected = updated(name, before.variables, BETWEEN[between][1](raw), dtype)
        for current, previous, reference in zip(
          after.variables, before.variables, expected
        ):
          if finite:
            eps = np.finfo(current.dtype).eps
            np.testing.assert_allclose(
              current,
              reference,
              rtol=8 * eps,
              atol=8 * eps * (np.abs(previous).max() + eps),
            )
          else:
            assert current.tobytes() == previous.tobytes(), step
        before = after
