"""Several threads that run one train op at the same time, as queue runners' programs do (Hogwild)."""

import threading

import numpy as np
import pytest

import mp_compat
from tests import testing
from tests.testing import BAD
from tests.testing import GOOD
from tests.testing import tf

THREADS, STEPS = 4, 300


def run_together(sess, runs):
  """Calls each function of `sess` in a thread of its own, all at the same time; what one raises, this raises."""
  errors, start = [], threading.Barrier(len(runs))

  def thread(run):
    start.wait()
    try:
      run()
    except Exception as error:  # whatever it is, the test is to fail by it
      errors.append(error)

  threads = [threading.Thread(target=thread, args=(run,)) for run in runs]
  for one in threads:
    one.start()
  for one in threads:
    one.join()
  if errors:
    raise errors[0]


def train(opt, job):
  """Every thread runs good and bad steps in turn; gives the train op's session, not closed."""
  train_op = opt.minimize(job.loss, job.global_step)
  job.session.run(tf.global_variables_initializer())

  def run():
    for step in range(STEPS):
      job.session.run(train_op, {job.x: BAD if step % 2 else GOOD})

  run_together(job.session, [run] * THREADS)
  return job.session.run([job.w, job.global_step] + opt.loss_scale.variables())


@pytest.mark.parametrize("version", [1, 2])
def test_with_locking_every_step_of_every_thread_counts_once(version):
  with tf.Graph().as_default(), testing.control_flow(version):
    job = testing.Job()
    # Each finite step doubles the scale and each overflow halves it: in whatever order, all of them leave it as it was.
    scale = mp_compat.DynamicLossScale(2. ** 20, 1, 2., min_loss_scale=2. ** -126)
    w, steps, scale, good = train(mp_compat.MixedPrecisionLossScaleOptimizer(
        tf.train.GradientDescentOptimizer(.5, use_locking=True), scale), job)
  applied = THREADS * STEPS // 2
  np.testing.assert_array_equal(w, -.5 * applied * GOOD)
  assert (steps, scale, good) == (applied, 2. ** 20, 0)


@pytest.mark.parametrize("use_resource", [True, False], ids=["resource", "reference"])
def test_without_locking_no_overflow_reaches_a_weight_and_the_scale_keeps_its_bounds(use_resource):
  with tf.Graph().as_default():
    job = testing.Job(use_resource=use_resource)
    scale = mp_compat.DynamicLossScale(2. ** 20, 3, 2., min_loss_scale=2. ** 10, max_loss_scale=2. ** 24)
    w, steps, scale, good = train(
        mp_compat.MixedPrecisionLossScaleOptimizer(tf.train.AdamOptimizer(.001), scale), job)
  assert np.isfinite(w).all() and 0 < steps <= THREADS * STEPS // 2
  assert 2. ** 10 <= scale <= 2. ** 24 and np.frexp(scale)[0] == .5 and 0 <= good < 3


def test_no_lock_where_none_is_asked_for():
  for use_locking in (False, True):
    with tf.Graph().as_default() as graph:
      job = testing.Job()
      mp_compat.MixedPrecisionLossScaleOptimizer(
          tf.train.GradientDescentOptimizer(.5, use_locking), "dynamic").minimize(job.loss)
      assert ("MutexLock" in [op.type for op in graph.get_operations()]) == use_locking


def test_with_locking_replicas_train_and_skip():
  with tf.Graph().as_default():
    strategy = tf.distribute.MirroredStrategy(testing.TWO_CPUS)
    x = tf.placeholder(tf.float32, [2])
    scale = mp_compat.DynamicLossScale(8.)

    def step():
      w = tf.get_variable("w", [2], initializer=tf.zeros_initializer())
      opt = mp_compat.MixedPrecisionLossScaleOptimizer(tf.train.GradientDescentOptimizer(.5, use_locking=True), scale)
      return opt.minimize(tf.reduce_sum(w * x)), w

    with strategy.scope():
      train_op, w = strategy.extended.call_for_each_replica(step)
      train_op, w = strategy.group(train_op), strategy.experimental_local_results(w)
    with testing.session() as sess:
      sess.run(tf.global_variables_initializer())
      for value in (GOOD, BAD):
        sess.run(train_op, {x: value})
      for copy in sess.run(w):
        np.testing.assert_array_equal(copy, -GOOD)
      assert sess.run(scale()) == 4.
