"""Tests of several threads that run one train op concurrently (Hogwild)."""

from concurrent import futures
import threading

import numpy as np
import pytest

import mp_compat
from tests import testing
from tests.testing import FINITE
from tests.testing import OVERFLOW
from tests.testing import Optimizer
from tests.testing import tf

pytestmark = pytest.mark.usefixtures("graph")
THREADS, STEPS = 4, 300


def train(opt, training):
  """Alternates finite and overflowing steps in every thread. Returns `w`, the global step and the loss scale state."""
  train_op = opt.minimize(training.loss, training.global_step)
  training.session.run(tf.global_variables_initializer())
  start = threading.Barrier(THREADS)

  def run():
    start.wait()
    for step in range(STEPS):
      training.session.run(train_op, {training.x: OVERFLOW if step % 2 else FINITE})

  with futures.ThreadPoolExecutor(THREADS) as pool:
    for thread in [pool.submit(run) for _ in range(THREADS)]:
      thread.result()
  return training.session.run([training.w, training.global_step] + opt.loss_scale.variables())


@pytest.mark.usefixtures("control_flow")
def test_locked_steps_are_counted():
  # Each finite step doubles the scale and each overflow halves it, so in any order the scale returns to its start.
  scale = mp_compat.DynamicLossScale(2.0**20, 1, 2.0, min_loss_scale=2.0**-126)
  opt = Optimizer(tf.train.GradientDescentOptimizer(0.5, use_locking=True), scale)
  w, steps, scale, good = train(opt, testing.Training())
  applied = THREADS * STEPS // 2
  np.testing.assert_array_equal(w, -0.5 * applied * FINITE)
  assert (steps, scale, good) == (applied, 2.0**20, 0)


@pytest.mark.parametrize("use_resource", [True, False], ids=["resource", "reference"])
def test_unlocked_threads_keep_state_valid(use_resource):
  scale = mp_compat.DynamicLossScale(2.0**20, 3, 2.0, min_loss_scale=2.0**10, max_loss_scale=2.0**24)
  opt = Optimizer(tf.train.AdamOptimizer(0.001), scale)
  w, steps, scale, good = train(opt, testing.Training(use_resource=use_resource))
  assert np.isfinite(w).all() and 0 < steps <= THREADS * STEPS // 2
  assert 2.0**10 <= scale <= 2.0**24 and np.frexp(scale)[0] == 0.5 and 0 <= good < 3


@pytest.mark.parametrize("use_locking", [False, True])
def test_mutex_needs_use_locking(use_locking, graph):
  Optimizer(tf.train.GradientDescentOptimizer(0.5, use_locking), "dynamic").minimize(testing.Training().loss)
  assert ("MutexLock" in [op.type for op in graph.get_operations()]) == use_locking
