"""Tests of Horovod around the Keras wrapper and inside it, with ranks that mpirun starts.

Run alone: `scripts/nox -s horovod_keras`.
"""

import subprocess
import sys

import pytest

pytest.importorskip(
  "horovod.tensorflow.keras",
  reason="Horovod is installed only by `scripts/nox -s horovod_keras`",
)

from tests import testing  # noqa: E402
from tests.keras import cases as keras_cases  # noqa: E402

pytestmark = pytest.mark.skipif(
  keras_cases.VERSION < (2, 4), reason="tests/processes/test_horovod.py has those"
)

# The input of step 3 is not finite on rank 1. The mean of the gradients is otherwise
# [1.5, 2].
PROGRAM = """
import sys
import horovod.tensorflow.keras as hvd
import numpy as np
import tensorflow as tf
import mp_compat

def scaled(opt):
  return mp_compat.keras.LossScaleOptimizer(opt, initial_scale=8.0, dynamic_growth_steps=3)

hvd.init()
orders = {
  "inside": lambda opt: hvd.DistributedOptimizer(scaled(opt)),
  "outside": lambda opt: scaled(hvd.DistributedOptimizer(opt)),
}
opt = orders[sys.argv[1]](tf.keras.optimizers.SGD(0.5))
model = tf.keras.Sequential(
  [tf.keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros", input_shape=(2,))]
)
model.compile(opt, lambda _, y: y)
values = []
for step in range(6):
  x = [np.inf if step == 3 and hvd.rank() == 1 else 1.0 + hvd.rank(), 2.0]
  model.fit(np.array([x], np.float32), np.zeros([1, 1]), verbose=0)
  weights = model.get_weights()[0].ravel().tolist()
  values.append(weights + [float(opt.loss_scale), int(opt.iterations)])
with open("{}/{}".format(sys.argv[2], hvd.rank()), "w") as file:
  file.write(repr(values))
"""


@pytest.mark.parametrize("order", ["inside", "outside"])
def test_overflow_skips_all_ranks(order, tmp_path):
  command = "mpirun --allow-run-as-root --oversubscribe --timeout 240 -np 2".split()
  done = subprocess.run(
    command + [sys.executable, "-c", PROGRAM, order, str(tmp_path)],
    env=testing.environment(),
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
    check=False,
  )
  assert done.returncode == 0, done.stdout[-5000:]
  expected, applied, scales = [], 0, [8.0, 8.0, 16.0, 8.0, 8.0, 8.0]
  for step, scale in enumerate(scales):
    applied += step != 3
    expected.append([-0.75 * applied, -1.0 * applied, scale, step + 1])
  for rank in range(2):
    assert (tmp_path / str(rank)).read_text() == repr(expected)
