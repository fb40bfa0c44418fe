"""Optimizers around optimizers, and functions that build train ops; what they train to is computed by hand, in NumPy.

Gradients have norms that are powers of two, rates and decays are powers of two: float32 holds every number exactly.
"""

import numpy as np
import pytest
import tensorflow

import mp_compat
from tests import testing
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
    reason="tf_slim's own clipping asks for a name that this TensorFlow lacks; run on 1.15, 2.4 and 2.10 in CI")

SCALE = 8.
FIRST, SECOND, SMALL = [2., -2., 2., 2.], [4., 4., -4., 4.], [.5, -.5, .5, .5]  # their norms: 4, 8, 1
HUGE = [2. ** 126, 2., 2., 2.]  # finite, as is the loss, but not once it is scaled
STEPS = [FIRST, HUGE, SECOND, SMALL]
RATE, MOMENTUM, CLIP, DECAY = .25, .5, 2., .75

Optimizer = mp_compat.MixedPrecisionLossScaleOptimizer


def momentum():
  return tf.train.MomentumOptimizer(RATE, MOMENTUM)


def scaled(opt):
  """The optimizer with a loss scale that grows after two steps: SCALE, then on HUGE half of it, and SCALE again."""
  return Optimizer(opt, mp_compat.DynamicLossScale(SCALE, 2))


@pytest.fixture(name="use_resource", params=[True, False], ids=["resource", "reference"])
def _use_resource(request):
  return request.param


@pytest.fixture(name="graph", autouse=True, params=[1, 2], ids=["control_flow_v1", "control_flow_v2"])
def _graph(request, use_resource):
  with tf.Graph().as_default(), testing.control_flow(request.param), tf.variable_scope("", use_resource=use_resource):
    yield


class Job:
  """`sum(w * x)`, so that the gradient of `w`, from ones, is what is fed."""

  def __init__(self):
    self.x = tf.placeholder(tf.float32, [4])
    self.w = tf.get_variable("w", [4], initializer=tf.ones_initializer())
    self.global_step = tf.train.get_or_create_global_step()
    self.loss = tf.reduce_sum(self.w * self.x)

  def run(self, train_op, xs, fetch=()):
    """The values of all variables at the beginning and after every step; and what else was fetched, of every step."""
    history, fetched = [], []
    with testing.session() as sess:
      sess.run(tf.global_variables_initializer())
      history.append(testing.values(sess))
      for x in xs:
        fetched.append(sess.run([train_op, fetch], {self.x: x})[1])
        history.append(testing.values(sess))
    return history, fetched


@pytest.fixture(name="job")
def _job(graph):
  del graph
  return Job()


def expected(grads):
  """`w` after every step of Momentum with these gradients; where None, the step is skipped."""
  w, accumulator = np.ones(4, np.float32), np.zeros(4, np.float32)
  after = [w]
  for grad in grads:
    if grad is not None:
      accumulator = np.float32(MOMENTUM) * accumulator + np.float32(grad)
      w = w - np.float32(RATE) * accumulator
    after.append(w)
  return after


def clipped(grad):
  norm = np.sqrt(np.sum(np.square(grad)))
  return None if norm > 2. ** 100 else np.array(grad) * CLIP / max(norm, CLIP)


def check(history, grads, name="w:0"):
  """The variable went as `expected`; a skipped step left all variables as they were, but those of the loss scale."""
  np.testing.assert_array_equal([values[name] for values in history], expected(grads))
  for before, after, grad in zip(history, history[1:], grads):
    changed = {key for key, value in after.items() if value.tobytes() != before[key].tobytes()}
    if grad is None:
      assert changed == {"current_loss_scale:0", "good_steps:0"}
    else:
      assert {name, "global_step:0"} < changed
  assert history[-1]["global_step:0"] == sum(grad is not None for grad in grads)
  assert history[-1]["current_loss_scale:0"] == SCALE and history[-1]["good_steps:0"] == 0


# --- wrappers that average -------------------------------------------------------------------------------------------


class Averaging(tf.train.Optimizer):
  """Keeps moving averages of what it trains."""

  def __init__(self, opt, decay):
    super().__init__(False, "Averaging")
    self._opt = opt
    self._averages = tf.train.ExponentialMovingAverage(decay)

  def compute_gradients(self, *args, **kwargs):
    return self._opt.compute_gradients(*args, **kwargs)

  def apply_gradients(self, grads_and_vars, global_step=None, name=None):
    grads_and_vars = list(grads_and_vars)
    with tf.control_dependencies([self._opt.apply_gradients(grads_and_vars, global_step)]):
      return self._averages.apply([v for _, v in grads_and_vars])


def _skip_if_tensorflow_cannot_average(use_resource):
  if tf.control_flow_v2_enabled() and not use_resource:
    pytest.skip("TensorFlow cannot initialize the average of a reference variable under control flow v2")


averaging = pytest.mark.parametrize("average", [
    pytest.param(Averaging, id="user's"),
    pytest.param(contrib and contrib.opt.MovingAverageOptimizer, id="contrib's", marks=needs_contrib)])
AVERAGE = "w/ExponentialMovingAverage:0"


@averaging
def test_an_average_inside_stands_still_on_skipped_steps(job, average, use_resource):
  _skip_if_tensorflow_cannot_average(use_resource)
  history, _ = job.run(scaled(average(momentum(), DECAY)).minimize(job.loss, job.global_step), STEPS)
  check(history, [FIRST, None, SECOND, SMALL])
  averages = [np.ones(4)]
  for skipped, w in zip([False, True, False, False], expected([FIRST, None, SECOND, SMALL])[1:]):
    averages.append(averages[-1] if skipped else DECAY * averages[-1] + (1 - DECAY) * w)
  np.testing.assert_array_equal([values[AVERAGE] for values in history], averages)


@averaging
def test_an_average_outside_sees_every_attempt_but_nothing_that_is_not_finite(job, average, use_resource):
  """It cannot stand still there: it does not know of the verdict."""
  _skip_if_tensorflow_cannot_average(use_resource)
  history, _ = job.run(average(scaled(momentum()), DECAY).minimize(job.loss, job.global_step), STEPS)
  after = expected([FIRST, None, SECOND, SMALL])
  np.testing.assert_array_equal([values["w:0"] for values in history], after)
  averages = [np.ones(4)]
  for w in after[1:]:
    averages.append(DECAY * averages[-1] + (1 - DECAY) * w)
  np.testing.assert_array_equal([values[AVERAGE] for values in history], averages)
  assert np.any(averages[2] != averages[1])


@averaging
def test_averages_have_the_names_that_they_have_without_loss_scaling(average):
  names = []
  for wrap in [scaled, lambda opt: opt]:
    with tf.Graph().as_default():
      job = Job()
      wrap(average(momentum(), DECAY)).minimize(job.loss, job.global_step)
      names.append({v.name for v in tf.global_variables()} - {"current_loss_scale:0", "good_steps:0"})
  assert names[0] == names[1] == {"w:0", "w/Momentum:0", AVERAGE, "global_step:0"}


@needs_contrib
def test_the_swapping_saver_is_there_and_saves_the_average_as_the_variable(job, tmp_path, use_resource):
  _skip_if_tensorflow_cannot_average(use_resource)
  opt = scaled(contrib.opt.MovingAverageOptimizer(momentum(), DECAY))
  train_op = opt.minimize(job.loss, job.global_step)
  saver = opt.swapping_saver()
  with testing.session() as sess:
    sess.run(tf.global_variables_initializer())
    sess.run(train_op, {job.x: FIRST})
    path = saver.save(sess, str(tmp_path / "model"))
  w = expected([FIRST])[1]
  np.testing.assert_array_equal(tf.train.load_variable(path, "w"), DECAY + (1 - DECAY) * w)
  np.testing.assert_array_equal(tf.train.load_variable(path, AVERAGE[:-2]), w)
  assert tf.train.load_variable(path, "current_loss_scale") == SCALE


# --- wrappers that clip ----------------------------------------------------------------------------------------------


class ClippingBeforeApplying(tf.train.Optimizer):
  """Clips what it applies. As TensorFlow's own wrappers it does not call the constructor of its base class."""

  def __init__(self, opt):  # pylint: disable=super-init-not-called
    self._opt = opt

  def compute_gradients(self, *args, **kwargs):
    return self._opt.compute_gradients(*args, **kwargs)

  def apply_gradients(self, grads_and_vars, global_step=None, name=None):
    grads, variables = zip(*grads_and_vars)
    grads, _ = tf.clip_by_global_norm(grads, CLIP)
    return self._opt.apply_gradients(zip(grads, variables), global_step, name)


class ClippingAfterComputing(tf.train.Optimizer):
  """Clips what it computes, value by value: an inf becomes an ordinary number."""

  def __init__(self, opt):
    super().__init__(False, "Clipping")
    self._opt = opt

  def compute_gradients(self, *args, **kwargs):
    return [(tf.clip_by_value(g, -CLIP, CLIP), v) for g, v in self._opt.compute_gradients(*args, **kwargs)]

  def apply_gradients(self, *args, **kwargs):
    return self._opt.apply_gradients(*args, **kwargs)


@pytest.mark.parametrize("wrap", [
    lambda: scaled(ClippingBeforeApplying(momentum())),
    lambda: ClippingBeforeApplying(scaled(momentum())),
], ids=["inside", "outside"])
def test_clipping_of_what_is_applied_works_inside_and_outside(job, wrap):
  history, _ = job.run(wrap().minimize(job.loss, job.global_step), STEPS)
  check(history, [clipped(FIRST), None, clipped(SECOND), clipped(SMALL)])


def test_clipping_of_what_is_computed_works_outside_though_it_makes_an_overflow_look_like_a_number(job):
  opt = ClippingAfterComputing(scaled(momentum()))
  history, _ = job.run(opt.minimize(job.loss, job.global_step), STEPS)
  check(history, [np.clip(FIRST, -CLIP, CLIP), None, np.clip(SECOND, -CLIP, CLIP), SMALL])


def test_clipping_of_what_is_computed_cannot_work_inside_where_it_gets_scaled_gradients(job):
  """It clips them to CLIP / scale, and an overflow to a number before anybody saw it: the scale never falls."""
  opt = scaled(ClippingAfterComputing(momentum()))
  history, _ = job.run(opt.minimize(job.loss, job.global_step), STEPS)
  scales = [SCALE, SCALE, 2 * SCALE, 2 * SCALE]
  np.testing.assert_array_equal(
      [values["w:0"] for values in history],
      expected([np.clip(np.multiply(x, scale), -CLIP, CLIP) / scale for x, scale in zip(STEPS, scales)]))
  assert history[-1]["current_loss_scale:0"] == 4 * SCALE and history[-1]["global_step:0"] == 4


# --- wrappers that add noise -----------------------------------------------------------------------------------------


class Noise(tf.train.Optimizer):
  """Adds noise to what it computes, as in arXiv:1511.06807."""

  def __init__(self, opt, stddev):
    super().__init__(False, "Noise")
    self._opt = opt
    self._stddev = stddev
    self.noises = []

  def compute_gradients(self, *args, **kwargs):
    grads_and_vars = self._opt.compute_gradients(*args, **kwargs)
    self.noises = [tf.random_normal(g.shape, stddev=self._stddev, seed=1) for g, _ in grads_and_vars]
    return [(g + noise, v) for noise, (g, v) in zip(self.noises, grads_and_vars)]

  def apply_gradients(self, *args, **kwargs):
    return self._opt.apply_gradients(*args, **kwargs)


def test_noise_from_outside_is_added_as_it_is(job):
  opt = Noise(scaled(momentum()), .5)
  history, noises = job.run(opt.minimize(job.loss, job.global_step), STEPS, opt.noises)
  check(history, [None if x is HUGE else np.float32(x) + noise for x, [noise] in zip(STEPS, noises)])


def test_noise_from_inside_is_divided_by_the_scale(job):
  """So it is smaller the higher the scale is: a wrapper that adds noise belongs outside."""
  noise = Noise(momentum(), .5)
  history, noises = job.run(scaled(noise).minimize(job.loss, job.global_step), STEPS, noise.noises)
  scales = np.float32([SCALE, SCALE, SCALE / 2, SCALE / 2])
  check(history, [None if x is HUGE else (np.float32(x) * scale + noise) / scale
                  for x, [noise], scale in zip(STEPS, noises, scales)])


# --- functions that build train ops ----------------------------------------------------------------------------------


def optimize_loss(job, opt, **kwargs):
  return contrib.layers.optimize_loss(job.loss, job.global_step, None, opt, clip_gradients=CLIP, **kwargs)


def contrib_create_train_op(job, opt, **kwargs):
  return contrib.training.create_train_op(
      job.loss, opt, job.global_step, transform_grads_fn=contrib.training.clip_gradient_norms_fn(CLIP), **kwargs)


def slim_learning_create_train_op(job, opt, **kwargs):
  return slim.learning.create_train_op(job.loss, opt, job.global_step, clip_gradient_norm=CLIP, **kwargs)


def slim_training_create_train_op(job, opt, **kwargs):

  def clip(grads_and_vars):
    grads, variables = zip(*grads_and_vars)
    return list(zip(mp_compat.clip_by_global_norm(grads, CLIP)[0], variables))

  return slim.training.create_train_op(job.loss, opt, job.global_step, transform_grads_fn=clip, **kwargs)


CREATE_TRAIN_OP = [
    pytest.param(contrib_create_train_op, id="contrib.training", marks=needs_contrib),
    pytest.param(slim_learning_create_train_op, id="tf_slim.learning", marks=[needs_slim, needs_slim_that_clips]),
    pytest.param(slim_training_create_train_op, id="tf_slim.training", marks=needs_slim)]
OPTIMIZE_LOSS = pytest.param(optimize_loss, id="contrib.layers", marks=needs_contrib)
build = pytest.mark.parametrize("build", [OPTIMIZE_LOSS] + CREATE_TRAIN_OP)


@build
def test_a_function_that_clips_and_builds_the_train_op_trains_and_skips(job, build):
  train_op = build(job, scaled(momentum()))
  history, fetched = job.run(train_op, STEPS, train_op)
  check(history, [clipped(FIRST), None, clipped(SECOND), clipped(SMALL)])
  assert fetched[0] == np.sum(FIRST)  # what it returns is the loss


@build
def test_the_function_makes_the_variables_that_it_makes_without_loss_scaling(build):
  names = []
  for wrap in [scaled, lambda opt: opt]:
    with tf.Graph().as_default():
      build(Job(), wrap(momentum()))
      names.append({v.name for v in tf.global_variables()} - {"current_loss_scale:0", "good_steps:0"})
  assert names[0] == names[1] and len(names[0]) == 3


@build
def test_a_hook_follows_the_train_op_that_the_function_builds(job, build):
  opt = scaled(momentum())
  train_op = build(job, opt)
  hook = mp_compat.LossScaleHook(opt)
  with tf.train.MonitoredTrainingSession(hooks=[hook], log_step_count_steps=None) as sess:
    for x in STEPS:
      sess.run(train_op, {job.x: x})
  assert (hook.attempted, hook.skipped) == (4, 1)


@needs_contrib
def test_optimize_loss_takes_a_function_of_the_learning_rate_and_may_multiply(job):
  loss_scale = mp_compat.DynamicLossScale(SCALE, 2)  # Made inside, its names would begin with OptimizeLoss/.
  train_op = contrib.layers.optimize_loss(
      job.loss, job.global_step, RATE,
      lambda rate: Optimizer(tf.train.MomentumOptimizer(rate, MOMENTUM), loss_scale),
      gradient_multipliers={"w:0": 2.})
  history, _ = job.run(train_op, STEPS)
  check(history, [np.multiply(2., FIRST), None, np.multiply(2., SECOND), np.multiply(2., SMALL)])


@pytest.mark.parametrize("create", CREATE_TRAIN_OP)
def test_a_loss_that_is_not_finite_is_an_error_unless_checks_are_switched_off(job, create, use_resource):
  infinite = [np.inf, 2., 2., 2.]
  checked = create(job, scaled(momentum()))
  with testing.session() as sess:
    sess.run(tf.global_variables_initializer())
    with pytest.raises(tf.errors.InvalidArgumentError, match="LossTensor is inf or nan"):
      sess.run(checked, {job.x: infinite})

  with tf.Graph().as_default(), tf.variable_scope("", use_resource=use_resource):
    job = Job()
    history, _ = job.run(create(job, scaled(momentum()), check_numerics=False), [FIRST, infinite, SECOND, SMALL])
  check(history, [clipped(FIRST), None, clipped(SECOND), clipped(SMALL)])
