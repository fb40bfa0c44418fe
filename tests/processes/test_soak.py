"""Tests that a long training run has constant memory and speed, and ends in the
expected state.
"""

import gc
import multiprocessing
import os
import time

import numpy as np
import pytest

import mp_compat
from mp_compat.core import update_rule
from tests import testing
from tests.testing import tf

STEPS, PARTS = 100000, 10


def resident_bytes():
  """Returns the resident memory of this process."""
  with open("/proc/self/statm") as file:
    return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def train():
  """Trains and asserts the state. Returns the processor seconds of each part and the
  resident bytes after it.
  """
  finite = np.random.RandomState(0).random_sample(STEPS) > 0.01
  with tf.Graph().as_default() as graph:
    training = testing.Training()
    opt = mp_compat.MixedPrecisionLossScaleOptimizer(
      tf.train.GradientDescentOptimizer(2.0**-10),
      mp_compat.DynamicLossScale(
        increment_period=50, overflow_tolerance=2, max_loss_scale=2.0**24
      ),
    )
    train_op = opt.minimize(training.loss, training.global_step)
    finite_gradient, overflow = np.array([1.0, -(2.0**-3)]), np.array([np.nan, np.inf])
    seconds, resident, state = [], [], update_rule.State(2.0**15, 0, 0)
    with training.session as sess:
      sess.run(tf.global_variables_initializer())
      graph.finalize()
      for part in np.split(finite, PARTS):
        began = time.process_time()
        for step_is_finite in part:
          sess.run(
            train_op, {training.x: finite_gradient if step_is_finite else overflow}
          )
        seconds.append(time.process_time() - began)
        gc.collect()
        resident.append(resident_bytes())
        for step_is_finite in part.tolist():
          state = update_rule.next_state(
            state, step_is_finite, update_rule.Rule(50, 2.0, 2.0, 2, 1.0, 2.0**24)
          )
        assert sess.run(opt.loss_scale.variables()) == list(state)
      w, steps = sess.run([training.w, training.global_step])
  applied = int(finite.sum())
  assert steps == applied
  # The comparison is exact because float32 represents every intermediate `w`.
  np.testing.assert_array_equal(w, np.float32([-applied / 2.0**10, applied / 2.0**13]))
  return seconds, resident


@pytest.mark.slow
@pytest.mark.skipif(
  not os.path.exists("/proc/self/statm"),
  reason="needs Linux: memory is read from /proc",
)
def test_memory_and_speed_stay_constant():
  # In a new process: threads and heap fragmentation left by other tests would disturb
  # the measurement.
  with multiprocessing.get_context("spawn").Pool(1) as pool:
    seconds, resident = pool.apply(train)
  # The first part is warm-up. After it, memory grows by less than a byte per step.
  slope = np.polyfit(np.arange(1, PARTS), resident[1:], 1)[0] / (STEPS // PARTS)
  assert slope < 1.0, "{:.2f} bytes a step; {}".format(slope, resident)
  assert max(seconds[PARTS // 2 :]) < 2 * min(seconds[: PARTS // 2]), seconds
