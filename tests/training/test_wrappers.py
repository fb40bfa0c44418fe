"""Tests of optimizers that change gradients inside, and of functions that build train ops, against NumPy.

Other optimizers that wrap optimizers are in tests/programs/test_optimizers.py. The norms of the gradients and the rates
are powers of two, so float32 represents all results exactly.
"""

import numpy as np
import pytest
import tensorflow

import mp_compat
from tests import testing
from tests.programs.test_optimizers import ClipsByValueOutside
from tests.programs.test_optimizers import Wrapper
from tests.testing import Optimizer
from tests.testing import tf

try:
  import tf_slim as slim
except ImportError:
  slim = None
contrib = tensorflow.contrib if tf.__version__.startswith("1.") else None

needs_contrib = pytest.mark.skipif(contrib is None, reason="TensorFlow 2 has no tf.contrib; run on 1.15 in CI")
needs_slim = pytest.mark.skipif(slim is None, reason="tf_slim is not installed; run on every TensorFlow in CI")
needs_slim_that_clips = pytest.mark.skipif(
  slim is not None and not hasattr(slim.learning.ops, "IndexedSlices"),
  reason="tf_slim's clipping uses a name that this TensorFlow does not have; run on 1.15, 2.4 and 2.10 in CI",
)

SCALE = 8.0
FIRST, SECOND, SMALL = [2.0, -2.0, 2.0, 2.0], [4.0, 4.0, -4.0, 4.0], [0.5, -0.5, 0.5, 0.5]  # with norms 4, 8, 1
HUGE = [2.0**126, 2.0, 2.0, 2.0]  # finite, as is the loss, but overflows when scaled
STEPS = [FIRST, HUGE, SECOND, SMALL]
RATE, MOMENTUM, CLIP, DECAY = 0.25, 0.5, 2.0, 0.75


def momentum():
  return tf.train.MomentumOptimizer(RATE, MOMENTUM)


def scaled(opt):
  """Wraps the optimizer with a loss scale that grows after two finite steps.

  Over STEPS it starts at SCALE, is halved by HUGE and returns to SCALE.
  """
  return Optimizer(opt, mp_compat.DynamicLossScale(SCALE, 2))


class RecordedTraining:
  """Trains `w` [4], initially ones, with the placeholder `x` as its gradient, and records all variables."""

  def __init__(self):
    self.x = tf.placeholder(tf.float32, [4])
    self.w = tf.get_variable("w", [4], initializer=tf.ones_initializer())
    self.global_step = tf.train.get_or_create_global_step()
    self.loss = tf.reduce_sum(self.w * self.x)

  def run(self, train_op, xs, fetch=()):
    """Returns the values of all variables, initially and after every step, and what `fetch` gave in every step."""
    history, fetched = [], []
    with testing.initialized_session() as sess:
      history.append(testing.values(sess))
      for x in xs:
        fetched.append(sess.run([train_op, fetch], {self.x: x})[1])
        history.append(testing.values(sess))
    return history, fetched


@pytest.fixture(name="training")
def _training(graph):
  del graph
  return RecordedTraining()


def expected(grads):
  """Computes Momentum in NumPy. Returns `w`, initially and after every step; a gradient of None skips the step."""
  w, accumulator = np.ones(4, np.float32), np.zeros(4, np.float32)
  after = [w]
  for grad in grads:
    if grad is not None:
      accumulator = np.float32(MOMENTUM) * accumulator + np.float32(grad)
      w = w - np.float32(RATE) * accumulator
    after.append(w)
  return after


def clipped(grad):
  """Returns the gradient clipped to norm CLIP, or None if the norm is too large to be finite when scaled."""
  norm = np.sqrt(np.sum(np.square(grad)))
  return None if norm > 2.0**100 else np.array(grad) * CLIP / max(norm, CLIP)


def check(history, grads, name="w:0"):
  """Checks the variable against `expected`, and that a skipped step (None) changes only the loss scale."""
  np.testing.assert_array_equal([values[name] for values in history], expected(grads))
  for before, after, grad in zip(history, history[1:], grads):
    changed = {key for key, value in after.items() if value.tobytes() != before[key].tobytes()}
    if grad is None:
      assert changed == {"current_loss_scale:0", "good_steps:0"}
    else:
      assert {name, "global_step:0"} < changed
  assert history[-1]["global_step:0"] == sum(grad is not None for grad in grads)
  assert history[-1]["current_loss_scale:0"] == SCALE and history[-1]["good_steps:0"] == 0


AVERAGE = "w/ExponentialMovingAverage:0"


@needs_contrib
def test_swapping_saver_saves_moving_average(training, tmp_path):
  opt = scaled(contrib.opt.MovingAverageOptimizer(momentum(), DECAY))
  train_op = opt.minimize(training.loss, training.global_step)
  saver = opt.swapping_saver()
  with testing.initialized_session() as sess:
    sess.run(train_op, {training.x: FIRST})
    path = saver.save(sess, str(tmp_path / "model"))
  w = expected([FIRST])[1]
  np.testing.assert_array_equal(tf.train.load_variable(path, "w"), DECAY + (1 - DECAY) * w)
  np.testing.assert_array_equal(tf.train.load_variable(path, AVERAGE[:-2]), w)
  assert tf.train.load_variable(path, "current_loss_scale") == SCALE


def test_inner_clipping_hides_overflow(training):
  """Inside, scaled gradients are clipped before the finite check. The scale therefore never decreases."""
  opt = scaled(ClipsByValueOutside(momentum()))
  history, _ = training.run(opt.minimize(training.loss, training.global_step), STEPS)
  scales = [SCALE, SCALE, 2 * SCALE, 2 * SCALE]
  np.testing.assert_array_equal(
    [values["w:0"] for values in history],
    expected([np.clip(np.multiply(x, scale), -0.5, 0.5) / scale for x, scale in zip(STEPS, scales)]),
  )
  assert history[-1]["current_loss_scale:0"] == 4 * SCALE and history[-1]["global_step:0"] == 4


class Noise(Wrapper):
  """Adds noise to the result of compute_gradients, as in arXiv:1511.06807."""

  def compute_gradients(self, *args, **kwargs):
    grads_and_vars = super().compute_gradients(*args, **kwargs)
    self.noises = [tf.random_normal(g.shape, stddev=0.5, seed=1) for g, _ in grads_and_vars]
    return [(g + noise, v) for noise, (g, v) in zip(self.noises, grads_and_vars)]


def test_inner_noise_is_divided_by_scale(training):
  """The noise shrinks as the scale grows. Wrappers that add noise should therefore be outside."""
  noise = Noise(momentum())
  train_op = scaled(noise).minimize(training.loss, training.global_step)
  history, noises = training.run(train_op, STEPS, noise.noises)
  scales = np.float32([SCALE, SCALE, SCALE / 2, SCALE / 2])
  check(
    history,
    [
      None if x is HUGE else (np.float32(x) * scale + noise) / scale for x, [noise], scale in zip(STEPS, noises, scales)
    ],
  )


def optimize_loss(training, opt, **kwargs):
  return contrib.layers.optimize_loss(training.loss, training.global_step, None, opt, clip_gradients=CLIP, **kwargs)


def contrib_create_train_op(training, opt, **kwargs):
  return contrib.training.create_train_op(
    training.loss, opt, training.global_step, transform_grads_fn=contrib.training.clip_gradient_norms_fn(CLIP), **kwargs
  )


def slim_learning_create_train_op(training, opt, **kwargs):
  return slim.learning.create_train_op(training.loss, opt, training.global_step, clip_gradient_norm=CLIP, **kwargs)


def slim_training_create_train_op(training, opt, **kwargs):

  def clip(grads_and_vars):
    grads, variables = zip(*grads_and_vars)
    return list(zip(mp_compat.clip_by_global_norm(grads, CLIP)[0], variables))

  return slim.training.create_train_op(training.loss, opt, training.global_step, transform_grads_fn=clip, **kwargs)


CREATE_TRAIN_OP = [
  pytest.param(contrib_create_train_op, id="contrib.training", marks=needs_contrib),
  pytest.param(slim_learning_create_train_op, id="tf_slim.learning", marks=[needs_slim, needs_slim_that_clips]),
  pytest.param(slim_training_create_train_op, id="tf_slim.training", marks=needs_slim),
]
OPTIMIZE_LOSS = pytest.param(optimize_loss, id="contrib.layers", marks=needs_contrib)


@pytest.mark.parametrize("build", [OPTIMIZE_LOSS] + CREATE_TRAIN_OP)
def test_builders_clip_and_skip(training, build):
  train_op = build(training, scaled(momentum()))
  history, fetched = training.run(train_op, STEPS, train_op)
  check(history, [clipped(FIRST), None, clipped(SECOND), clipped(SMALL)])
  assert fetched[0] == np.sum(FIRST)  # the train op returns the loss
  names = sorted(name.replace("OptimizeLoss/", "") for name in history[0])
  assert names == ["current_loss_scale:0", "global_step:0", "good_steps:0", "w/Momentum:0", "w:0"]


@needs_contrib
def test_optimize_loss_accepts_factory(training):
  loss_scale = mp_compat.DynamicLossScale(SCALE, 2)  # Created inside, its variables would be named OptimizeLoss/...
  train_op = contrib.layers.optimize_loss(
    training.loss,
    training.global_step,
    RATE,
    lambda rate: Optimizer(tf.train.MomentumOptimizer(rate, MOMENTUM), loss_scale),
    gradient_multipliers={"w:0": 2.0},
  )
  history, _ = training.run(train_op, STEPS)
  check(history, [np.multiply(2.0, FIRST), None, np.multiply(2.0, SECOND), np.multiply(2.0, SMALL)])


@pytest.mark.parametrize("create", CREATE_TRAIN_OP)
def test_nonfinite_loss_raises(training, create):
  infinite = [np.inf, 2.0, 2.0, 2.0]
  checked = create(training, scaled(momentum()))
  with testing.initialized_session() as sess:
    with pytest.raises(tf.errors.InvalidArgumentError, match="LossTensor is inf or nan"):
      sess.run(checked, {training.x: infinite})

  with tf.Graph().as_default():
    training = RecordedTraining()
    unchecked = create(training, scaled(momentum()), check_numerics=False)
    history, _ = training.run(unchecked, [FIRST, infinite, SECOND, SMALL])
  check(history, [clipped(FIRST), None, clipped(SECOND), clipped(SMALL)])
