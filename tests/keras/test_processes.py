"""Tests of the Keras wrapper in two worker processes: MultiWorkerMirroredStrategy in
custom loops and in Model.fit.
"""

import numpy as np
import pytest

from tests import testing
from tests.keras import cases as keras_cases
from tests.keras import workers as keras_workers


@pytest.mark.slow
@pytest.mark.skipif(
  keras_cases.VERSION < (2, 4),
  reason="this TensorFlow lacks the strategy in eager mode",
)
def test_overflow_on_one_worker_skips_all():
  records = testing.run_two_workers("tests.keras.workers")
  assert records[0] == records[1]
  assert len(records[0]) == len(keras_cases.FAMILIES) + len(keras_cases.KERAS_2)
  for name, steps in records[0].items():
    weights, scales, iterations = zip(*steps)
    assert scales == (8.0, 4.0, 4.0, 8.0)
    assert iterations == ((1, 1, 2, 3) if name.startswith("keras3") else (1, 2, 3, 4))
    assert weights[1] == weights[0] and weights[2] != weights[1]

  # Expected: w -= 0.1 * (x of one worker + x of the other), except in the step that
  # overflows.
  xs = [keras_workers.make_batches(worker)[:, 0] for worker in range(2)]
  w = np.array([1.0, 2.0], np.float32)
  for step, (recorded, _, _) in enumerate(records[0]["v2 loop"]):
    w = w if step == 1 else w - np.float32(0.1) * (xs[0][step] + xs[1][step])
    assert np.allclose(recorded, w, rtol=1e-6)
