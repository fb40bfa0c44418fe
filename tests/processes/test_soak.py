"""A long training run: nothing grows, nothing slows down, and the state at the end is the reference's."""

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
  with open("/proc/self/statm") as file:
    return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def train():
  """Trains, and gives the seconds that each part took and the bytes after it; raises where the state is another."""
  finite = np.random.RandomState(0).random_sample(STEPS) > .01
  with tf.Graph().as_default() as graph:
    job = testing.Job()
    opt = mp_compat.MixedPrecisionLossScaleOptimizer(
        tf.train.GradientDescentOptimizer(2. ** -10),
        mp_compat.DynamicLossScale(increment_period=50, overflow_tolerance=2, max_loss_scale=2. ** 24))
    train_op = opt.minimize(job.loss, job.global_step)
    good, bad = np.array([1., -2. ** -3]), np.array([np.nan, np.inf])
    seconds, resident, state = [], [], update_rule.State(2. ** 15, 0, 0)
    with job.session as sess:
      sess.run(tf.global_variables_initializer())
      graph.finalize()
      for part in np.split(finite, PARTS):
        began = time.perf_counter()
        for step_is_finite in part:
          sess.run(train_op, {job.x: good if step_is_finite else bad})
        seconds.append(time.perf_counter() - began)
        gc.collect()
        resident.append(resident_bytes())
        for step_is_finite in part.tolist():
          state = update_rule.next_state(state, step_is_finite, update_rule.Rule(50, 2., 2., 2, 1., 2. ** 24))
        assert sess.run(opt.loss_scale.variables()) == list(state)
      w, steps = sess.run([job.w, job.global_step])
  applied = int(finite.sum())
  assert steps == applied
  # Exact: every w on the way is a float32.
  np.testing.assert_array_equal(w, np.float32([-applied / 2. ** 10, applied / 2. ** 13]))
  return seconds, resident


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="needs Linux: memory is read from /proc")
def test_a_hundred_thousand_steps_in_one_session_leave_no_trace_but_the_state():
  # In a process of its own: other tests leave threads and a heap full of holes behind, which move for a while.
  with multiprocessing.get_context("spawn").Pool(1) as pool:
    seconds, resident = pool.apply(train)
  # The first part warms up. Less than a byte for each step after it.
  slope = np.polyfit(np.arange(1, PARTS), resident[1:], 1)[0] / (STEPS // PARTS)
  assert slope < 1., "{:.2f} bytes a step; {}".format(slope, resident)
  assert max(seconds[PARTS // 2:]) < 2 * min(seconds[:PARTS // 2]), seconds
