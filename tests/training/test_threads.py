"""Tests of several threads that run one train op concurrently (Hogwild)."""

import threading

import numpy as np
import pytest

import mp_compat
from tests import testing
from tests.testing import FINITE
from tests.testing import OVERFLOW
from tests.testing import Optimizer
from tests.testing import tf

THREADS, STEPS = 4, 300


def run_together(sess, runs):
  """Calls each function in its own thread, concurrently. Raises the first error of a thread."""
  errors, start = [], threading.Barrier(len(runs))

  def thread(run):
    start.wait()
    try:
      run()
    except Exception as error:  # any error must fail the test
      errors.append(error)

  threads = [threading.Thread(target=thread, args=(run,)) for run in runs]
  for one in threads:
    one.start()
  for one in threads:
    one.join()
  if errors:
    raise errors[0]


def train(opt, training):
  """Alternates finite and overflowing steps in every thread. Returns `w`, the global step and the loss scale state."""
  train_op = opt.minimize(training.loss, training.global_step)
  training.session.run(tf.global_variables_initializer())

  def run():
    for step in range(STEPS):
      training.session.run(train_op, {training.x: OVERFLOW if step % 2 else FINITE})

  run_together(training.session, [run] * THREADS)
  return training.session.run([training.w, training.global_step] + opt.loss_scale.variables())


@pytest.mark.parametrize("version", [1, 2])
def test_locked_steps_are_counted(version):
  with tf.Graph().as_default(), testing.control_flow(version):
    training = testing.Training()
    # Each finite step doubles the scale and each overflow halves it, so in any order the scale returns to its start.
    scale = mp_compat.DynamicLossScale(2.0**20, 1, 2.0, min_loss_scale=2.0**-126)
    w, steps, scale, good = train(
      Optimizer(tf.train.GradientDescentOptimizer(0.5, use_locking=True), scale),
      training,
    )
  applied = THREADS * STEPS // 2
  np.testing.assert_array_equal(w, -0.5 * applied * FINITE)
  assert (steps, scale, good) == (applied, 2.0**20, 0)


@pytest.mark.parametrize("use_resource", [True, False], ids=["resource", "reference"])
def test_unlocked_threads_keep_state_valid(use_resource):
  with tf.Graph().as_default():
    training = testing.Training(use_resource=use_resource)
    scale = mp_compat.DynamicLossScale(2.0**20, 3, 2.0, min_loss_scale=2.0**10, max_loss_scale=2.0**24)
    w, steps, scale, good = train(Optimizer(tf.train.AdamOptimizer(0.001), scale), training)
  assert np.isfinite(w).all() and 0 < steps <= THREADS * STEPS // 2
  assert 2.0**10 <= scale <= 2.0**24 and np.frexp(scale)[0] == 0.5 and 0 <= good < 3


def test_mutex_needs_use_locking():
  for use_locking in (False, True):
    with tf.Graph().as_default() as graph:
      training = testing.Training()
      Optimizer(tf.train.GradientDescentOptimizer(0.5, use_locking), "dynamic").minimize(training.loss)
      assert ("MutexLock" in [op.type for op in graph.get_operations()]) == use_locking


def test_locked_replicas_train_and_skip():
  with tf.Graph().as_default():
    strategy = tf.distribute.MirroredStrategy(testing.TWO_CPUS)
    x = tf.placeholder(tf.float32, [2])
    scale = mp_compat.DynamicLossScale(8.0)

    def step():
      w = tf.get_variable("w", [2], initializer=tf.zeros_initializer())
      opt = Optimizer(tf.train.GradientDescentOptimizer(0.5, use_locking=True), scale)
      return opt.minimize(tf.reduce_sum(w * x)), w

    with strategy.scope():
      train_op, w = strategy.extended.call_for_each_replica(step)
      train_op, w = strategy.group(train_op), strategy.experimental_local_results(w)
    with testing.initialized_session() as sess:
      for value in (FINITE, OVERFLOW):
        sess.run(train_op, {x: value})
      for copy in sess.run(w):
        np.testing.assert_array_equal(copy, -FINITE)
      assert sess.run(scale()) == 4.0
