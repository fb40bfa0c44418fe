"""Tests of two optimizers that share one loss scale, as for a generator and a
discriminator.
"""

import collections
import functools

import numpy as np
import pytest

import mp_compat
from tests import testing
from tests.testing import FINITE
from tests.testing import OVERFLOW
from tests.testing import Optimizer
from tests.testing import tf

pytestmark = pytest.mark.usefixtures("graph")


# The state after each step: applied steps of the optimizers of `d` and of `g`, global
# steps, loss scales.
History = collections.namedtuple("History", "d_steps g_steps global_steps scales")


class Pair:
  """Trains variables `d` and `g`, whose gradients are placeholders, with one optimizer
  each and a shared loss scale.
  """

  def __init__(
    self, make_scale=mp_compat.DynamicLossScale, use_resource=True, **kwargs
  ):
    with tf.variable_scope("", use_resource=use_resource):
      self.variables = [
        tf.get_variable(name, [2], initializer=tf.zeros_initializer()) for name in "dg"
      ]
      self.global_step = tf.train.get_or_create_global_step()
    self.inputs = [tf.placeholder(tf.float32, [2]) for _ in "dg"]
    self.scale = make_scale(2.0**10, increment_period=2)
    self.opts = [
      Optimizer(tf.train.AdamOptimizer(1.0), self.scale, **kwargs) for _ in "dg"
    ]
    self.pairs = [
      opt.compute_gradients(tf.reduce_sum(v * x), [v])
      for opt, v, x in zip(self.opts, self.variables, self.inputs)
    ]

  def together(self, **kwargs):
    return mp_compat.apply_gradients_together(
      zip(self.opts, self.pairs), self.global_step, **kwargs
    )

  def run(self, train_op, steps):
    """Runs `steps`, a list of the gradients of `d` and `g`. Returns a History."""
    powers = [opt.inner_optimizer._get_beta_accumulators()[0] for opt in self.opts]
    after = []
    with testing.initialized_session() as sess:
      for values in steps:
        sess.run(train_op, dict(zip(self.inputs, values)))
        step_counts = [
          round(np.log(power) / np.log(0.9)) - 1 for power in sess.run(powers)
        ]
        assert [(v == 0).all() for v in sess.run(self.variables)] == [
          count == 0 for count in step_counts
        ]
        after.append(
          tuple(step_counts) + tuple(sess.run([self.global_step, self.scale()]))
        )
    return History(*zip(*after))


# The gradients of `d` and of `g` in every step, and the loss scales after it.
STEPS = [
  (FINITE, FINITE),
  (FINITE, OVERFLOW),
  (OVERFLOW, FINITE),
  (OVERFLOW, OVERFLOW),
] + [(FINITE, FINITE)] * 2
SCALES = (1024.0, 512.0, 256.0, 128.0, 128.0, 256.0)


@pytest.mark.each_choice
@pytest.mark.parametrize("use_resource", [False, True])
@pytest.mark.parametrize(
  "make_scale, skip, d_steps, g_steps, global_steps",
  [
    (
      mp_compat.DynamicLossScale,
      "all",
      (1, 1, 1, 1, 2, 3),
      (1, 1, 1, 1, 2, 3),
      (1, 1, 1, 1, 2, 3),
    ),
    (
      mp_compat.DynamicLossScale,
      "each",
      (1, 2, 2, 2, 3, 4),
      (1, 1, 2, 2, 3, 4),
      (1, 2, 3, 3, 4, 5),
    ),
    (
      testing.SkipsFiniteSteps,
      "each",
      (0, 1, 1, 1, 1, 1),
      (0, 0, 1, 1, 1, 1),
      (0, 1, 2, 2, 2, 2),
    ),
  ],
)
def test_shared_scale_is_updated_once(
  make_scale, skip, d_steps, g_steps, global_steps, use_resource
):
  pair = Pair(make_scale, use_resource)
  tf.add_to_collection(tf.GraphKeys.TRAIN_OP, pair.global_step)
  train_op = pair.together(skip=skip)
  assert pair.run(train_op, STEPS) == History(d_steps, g_steps, global_steps, SCALES)
  others = tf.get_collection(tf.GraphKeys.TRAIN_OP)
  assert others.pop() is train_op and len(others) == 1


@pytest.mark.parametrize("skip", ["all", "each"])
def test_updates_wait_for_all_gradients(skip, monkeypatch):
  """A loss reads the other optimizer's variables as they were before the step."""
  pair = Pair()
  d, g = pair.variables
  pair.pairs[1] = pair.opts[1].compute_gradients(
    tf.reduce_sum(g * d * pair.inputs[1]), [g]
  )
  updates = []
  inner = pair.opts[0].inner_optimizer
  apply_gradients = inner.apply_gradients
  monkeypatch.setattr(
    inner,
    "apply_gradients",
    lambda *args, **kwargs: (
      updates.append(apply_gradients(*args, **kwargs)) or updates[0]
    ),
  )
  pair.together(skip=skip)
  assert testing.waits_for(updates[0], pair.pairs[1][0][0].op)


@pytest.mark.parametrize("skip, steps", [("all", (1, 1)), ("each", (2, 1))])
def test_finite_reducer_is_called_once(skip, steps):
  calls = []

  def reducer(finite):
    calls.append(finite.shape.as_list())
    return tf.identity(finite)

  pair = Pair(finite_reducer=reducer)
  train_op = pair.together(skip=skip)
  assert calls == [[2]]
  history = pair.run(train_op, STEPS[:2])
  assert (history.d_steps[-1], history.g_steps[-1]) == steps


def test_settings_of_any_optimizer_apply():
  pair = Pair()
  inner = tf.train.AdamOptimizer(1.0)
  inner._use_locking = True
  pair.opts[1] = Optimizer(inner, pair.scale, finite_reducer=tf.zeros_like)
  train_op = pair.together()
  assert "MutexLock" in {op.type for op in train_op.graph.get_operations()}
  history = pair.run(train_op, [(FINITE, FINITE)])
  assert (history.d_steps, history.g_steps) == ((0,), (0,))


@pytest.mark.parametrize("skip", ["all", "each"])
def test_learning_rate_from_gradients_of_other_step(skip):
  """Only if both steps are applied or none, the rate is checked."""

  def minimize(wrap, apply):
    with tf.Graph().as_default():
      d, g = [
        tf.get_variable(name, [2], initializer=tf.ones_initializer()) for name in "dg"
      ]
      x = tf.placeholder(tf.float32, [2])
      first = wrap(tf.train.AdamOptimizer(1.0))
      pairs = first.compute_gradients(tf.reduce_sum(d * x), [d])
      second = wrap(tf.train.GradientDescentOptimizer(1.0 / tf.norm(pairs[0][0])))
      train_op = apply(
        [(first, pairs), (second, second.compute_gradients(tf.reduce_sum(g * x), [g]))]
      )
      with testing.initialized_session() as sess:
        for value in STEPS[1]:
          if np.isfinite(value).all() or wrap is not alone:
            sess.run(train_op, {x: value})
        return sess.run([d, g])

  def alone(opt):
    return opt

  scale = mp_compat.DynamicLossScale(8.0)
  together = functools.partial(mp_compat.apply_gradients_together, skip=skip)
  train = functools.partial(minimize, lambda opt: Optimizer(opt, scale), together)
  if skip == "each":
    with pytest.raises(
      ValueError, match="reads gradients of an earlier .* call apply_gradients_together"
    ):
      train()
  else:
    expected = minimize(
      alone,
      lambda steps: tf.group(*[opt.apply_gradients(pairs) for opt, pairs in steps]),
    )
    np.testing.assert_array_equal(train(), expected)
