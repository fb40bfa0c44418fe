"""Tests of several threads that run one train op concurrently (Hogwild), or build
programs at the same time.
"""

from concurrent import futures
import threading

import numpy as np
import pytest

import mp_compat
from tests import testing
from tests.programs import table as programs
from tests.programs import test_control_flow  # noqa: F401 -- adds programs to PROGRAMS
from tests.programs import test_optimizers  # noqa: F401
from tests.programs import test_training  # noqa: F401
from tests.testing import FINITE
from tests.testing import OVERFLOW
from tests.testing import Optimizer
from tests.testing import tf

pytestmark = pytest.mark.usefixtures("graph")
THREADS, STEPS = 4, 300


def train(opt, training):
  """Alternates finite and overflowing steps in every thread. Returns `w`, the global
  step and the loss scale state.
  """
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
  return training.session.run(
    [training.w, training.global_step] + opt.loss_scale.variables()
  )


@pytest.mark.usefixtures("control_flow")
def test_locked_steps_are_counted():
  # Each finite step doubles the scale and each overflow halves it, so in any order the
  # scale returns to its start.
  scale = mp_compat.DynamicLossScale(2.0**20, 1, 2.0, min_loss_scale=2.0**-126)
  opt = Optimizer(tf.train.GradientDescentOptimizer(0.5, use_locking=True), scale)
  w, steps, scale, good = train(opt, testing.Training())
  applied = THREADS * STEPS // 2
  np.testing.assert_array_equal(w, -0.5 * applied * FINITE)
  assert (steps, scale, good) == (applied, 2.0**20, 0)


@pytest.mark.parametrize("use_resource", [True, False], ids=["resource", "reference"])
def test_unlocked_threads_keep_state_valid(use_resource):
  scale = mp_compat.DynamicLossScale(
    2.0**20, 3, 2.0, min_loss_scale=2.0**10, max_loss_scale=2.0**24
  )
  opt = Optimizer(tf.train.AdamOptimizer(0.001), scale)
  w, steps, scale, good = train(opt, testing.Training(use_resource=use_resource))
  assert np.isfinite(w).all() and 0 < steps <= THREADS * STEPS // 2
  assert 2.0**10 <= scale <= 2.0**24 and np.frexp(scale)[0] == 0.5 and 0 <= good < 3


@pytest.mark.parametrize("use_locking", [False, True])
def test_mutex_needs_use_locking(use_locking, graph):
  Optimizer(tf.train.GradientDescentOptimizer(0.5, use_locking), "dynamic").minimize(
    testing.Training().loss
  )
  assert ("MutexLock" in [op.type for op in graph.get_operations()]) == use_locking


@pytest.mark.parametrize("version", [1, 2])
def test_building_keeps_other_threads(version):
  observed, stop = set(), threading.Event()

  def watch():
    while not stop.is_set():
      with tf.Graph().as_default() as graph:
        tf.cond(
          tf.placeholder(tf.bool, []),
          lambda: tf.constant(1.0),
          lambda: tf.constant(2.0),
        )
        conditional_is_a_function = not any(
          op.type == "Switch" for op in graph.get_operations()
        )
        observed.add((tf.control_flow_v2_enabled(), conditional_is_a_function))

  with testing.control_flow(version):
    thread = threading.Thread(target=watch)
    thread.start()
    try:
      for _ in range(3):
        with tf.Graph().as_default():
          Optimizer(tf.train.AdamOptimizer(0.1), "dynamic").minimize(
            testing.Training().loss
          )
    finally:
      stop.set()
      thread.join()
  assert observed == {(version == 2, version == 2)}


def test_threads_build_same_programs():
  names = [
    "trained_by_adam",
    "both_in_cond",
    "compute_in_while_loop",
    "averaged_over_towers",
  ]
  alone, together = {}, {}
  for name in names:
    train_finite_steps(name, alone)
  threads = [
    threading.Thread(target=train_finite_steps, args=(name, together)) for name in names
  ]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  for name in names:
    testing.assert_same(together[name], alone[name])


def train_finite_steps(name, histories):
  """Adds the history of a program under the current control flow version, which all
  threads share.
  """
  version = 2 if tf.control_flow_v2_enabled() else 1
  histories[name] = programs.train(
    programs.PROGRAMS[name], programs.Variant(version, True), mp_compat
  ).clean
