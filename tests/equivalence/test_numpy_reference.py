"""What TensorFlow's class cannot train, against NumPy: float16 and float64, users' loss scales, hidden overflows.

Each step is computed again, in float64, from the variables that TensorFlow had before it. Whether it is applied, the
scale and the counters must agree exactly; what an update makes of a variable, to a few units in the last place.
"""

import hypothesis
from hypothesis import strategies as st
import numpy as np

import mp_compat
from mp_compat.core import update_rule
from tests import testing
from tests.testing import tf

STEPS = 40
RATE, MOMENTUM, BETA1, BETA2, EPSILON = .125, .75, .875, .96875, 2. ** -6  # exact in float16
OPTIMIZERS = {
    "sgd": lambda: tf.train.GradientDescentOptimizer(RATE),
    "momentum": lambda: tf.train.MomentumOptimizer(RATE, MOMENTUM),
    "adam": lambda: tf.train.AdamOptimizer(RATE, BETA1, BETA2, EPSILON),
}
# What is done to the gradients before they are applied; an overflow is not to be seen afterwards.
BETWEEN = {
    "nothing": (lambda g: g, lambda g: g),
    "clip": (lambda g: tf.clip_by_value(g, -.5, .5), lambda g: np.clip(g, -.5, .5)),
    "mask": (lambda g: tf.where_v2(tf.is_finite(g), g, tf.zeros_like(g)), lambda g: np.where(np.isfinite(g), g, 0)),
}


class Sawtooth(mp_compat.LossScale):
  """A user's loss scale: falls to a fourth on overflow, rises to the double on every other step; never below 1/4."""

  def __init__(self, initial):
    self._add_weight("teeth", initial, tf.float32)

  def __call__(self):
    return self._weight("teeth") * 1.

  def update(self, grads):
    finite = tf.reduce_all([tf.reduce_all(tf.is_finite(g)) for g in tf.nest.flatten(grads)])
    teeth = self._weight("teeth")
    return teeth.assign(tf.where_v2(finite, teeth * 2., tf.maximum(teeth / 4., .25))), finite

  def get_config(self):
    return {}

  @staticmethod
  def after(state, finite):
    return [state[0] * 2 if finite else max(state[0] / 4, .25)]


class Dynamic(mp_compat.DynamicLossScale):
  """TensorFlow's rule, with a period of 3 and a floor of 1/4."""

  def __init__(self, initial):
    super().__init__(initial, 3, min_loss_scale=.25)

  @staticmethod
  def after(state, finite):
    return update_rule.next_state(
        update_rule.State(*state, bad_steps=0), finite, update_rule.Rule(3, 2., 2., 1, .25))[:2]


class Fixed(mp_compat.FixedLossScale):

  @staticmethod
  def after(state, finite):
    return []


def updated(name, before, gradient, dtype):
  """What one applied step makes of the variable and its slots, in float64."""
  w, *slots = [value.astype(np.float64) for value in before]
  g = gradient.astype(np.float64)
  if name == "sgd":
    return [w - RATE * g]
  if name == "momentum":
    accumulated = slots[0] * MOMENTUM + g
    return [w - RATE * accumulated, accumulated]
  m, v, power1, power2 = slots
  m, v = m + (g - m) * (1 - BETA1), v + (g * g - v) * (1 - BETA2)
  rate = RATE * np.sqrt(1 - dtype(power2)) / (1 - dtype(power1))  # the powers are float32
  return [w - rate * m / (np.sqrt(v) + EPSILON), m, v, power1 * BETA1, power2 * BETA2]


def tracked(name, opt, w):
  if name == "adam":
    return [w, opt.get_slot(w, "m"), opt.get_slot(w, "v")] + list(opt._get_beta_accumulators())
  return [w] + [opt.get_slot(w, slot) for slot in opt.get_slot_names()]


@hypothesis.settings(max_examples=40)
@hypothesis.given(
    dtype=st.sampled_from([np.float16, np.float64]), name=st.sampled_from(sorted(OPTIMIZERS)),
    make_scale=st.sampled_from([Dynamic, Fixed, Sawtooth]), exponent=st.integers(0, 17),
    between=st.sampled_from(sorted(BETWEEN)), resource=st.booleans(), version=st.sampled_from([1, 2]),
    seed=st.integers(0, 999),
    overflows=st.dictionaries(st.integers(0, STEPS - 1), st.sampled_from([np.inf, -np.inf, np.nan, 200.]), max_size=8))
def test_every_step_is_the_one_that_numpy_computes(
    dtype, name, make_scale, exponent, between, resource, version, seed, overflows):
  random = np.random.RandomState(seed)
  with tf.Graph().as_default(), testing.control_flow(version):
    with tf.variable_scope("", use_resource=resource):
      w = tf.get_variable("w", initializer=random.uniform(-2, 2, 5).astype(dtype))
      global_step = tf.train.get_or_create_global_step()
    x = tf.placeholder(dtype, [5])
    inner, loss_scale = OPTIMIZERS[name](), make_scale(2. ** exponent)
    opt = mp_compat.MixedPrecisionLossScaleOptimizer(inner, loss_scale)
    grads_and_vars = opt.compute_gradients(tf.reduce_sum(w * x))
    train_op = opt.apply_gradients([(BETWEEN[between][0](g), v) for g, v in grads_and_vars], global_step)
    everything = [tracked(name, inner, w), loss_scale.variables(), global_step]
    with testing.session() as sess:
      sess.run(tf.global_variables_initializer())
      before = sess.run(everything)
      for step in range(STEPS):
        gradient = random.normal(size=5).astype(dtype)
        if step in overflows:
          gradient[step % 5] = overflows[step]
        scale = np.float32(before[1][0] if before[1] else 2. ** exponent)
        sess.run(train_op, {x: gradient})
        after = sess.run(everything)
        with np.errstate(all="ignore"):
          wide = np.float64 if dtype is np.float64 else np.float32
          raw = (gradient * dtype(scale) * (1 / wide(scale))).astype(dtype)
          finite = bool(np.isfinite(raw).all())
          assert after[1] == list(make_scale.after(before[1], finite)), step
          assert after[2] == before[2] + finite, step
          expected = updated(name, before[0], BETWEEN[between][1](raw), dtype) if finite else before[0]
        for now, then, reference in zip(after[0], before[0], expected):
          if finite:
            eps = np.finfo(now.dtype).eps
            np.testing.assert_allclose(now, reference, rtol=8 * eps, atol=8 * eps * (np.abs(then).max() + eps))
          else:
            assert now.tobytes() == then.tobytes(), step
        before = after
