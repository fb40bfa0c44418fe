"""The Keras wrapper on two workers, each a process: MultiWorkerMirroredStrategy in custom loops and under Model.fit."""

import json
import socket
import subprocess
import sys

import numpy as np
import pytest

from tests import keras_cases
from tests import keras_workers
from tests import testing


def free_ports(count):
  sockets = [socket.socket() for _ in range(count)]
  for one in sockets:
    one.bind(("localhost", 0))
  ports = [one.getsockname()[1] for one in sockets]
  for one in sockets:
    one.close()
  return ports


@pytest.mark.slow
@pytest.mark.skipif(keras_cases.VERSION < (2, 4), reason="this TensorFlow has no such strategy in eager mode")
def test_an_overflow_on_one_worker_is_applied_on_none():
  workers = ["localhost:{}".format(port) for port in free_ports(2)]
  processes = []
  for i in range(2):
    config = json.dumps({"cluster": {"worker": workers}, "task": {"type": "worker", "index": i}})
    processes.append(subprocess.Popen(
        [sys.executable, "-m", "tests.keras_workers"], stdout=subprocess.PIPE, text=True, cwd=testing.ROOT,
        env=dict(testing.environment(), TF_CONFIG=config, TF_CPP_MIN_LOG_LEVEL="3", CUDA_VISIBLE_DEVICES="")))
  try:
    said = [json.loads(process.communicate(timeout=150)[0].strip().splitlines()[-1]) for process in processes]
  finally:
    for process in processes:
      process.kill()
  assert said[0] == said[1]
  assert len(said[0]) == len(keras_cases.FAMILIES) + len(keras_cases.KERAS_2)
  for steps in said[0].values():
    weights, scales, iterations = zip(*steps)
    assert scales == (8., 4., 4., 8.) and iterations == (1, 2, 3, 4)
    assert weights[1] == weights[0] and weights[2] != weights[1]

  # By hand: w -= 0.1 * (x of one worker + x of the other), but for the step that overflows.
  xs = [keras_workers.batches(worker)[:, 0] for worker in range(2)]
  w = np.array([1., 2.], np.float32)
  for step, (now, _, _) in enumerate(said[0]["v2 loop"]):
    w = w if step == 1 else w - np.float32(.1) * (xs[0][step] + xs[1][step])
    assert np.allclose(now, w, rtol=1e-6)
