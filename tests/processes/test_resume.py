"""Tests that a training run that is killed and resumed ends like an uninterrupted run."""

import os
import random
import subprocess
import sys
import time

import numpy as np
import pytest

from tests import testing
from tests.processes import resumed_training
from tests.testing import tf

STEPS, KILLS = 400, 20


def start(directory):
  return subprocess.Popen(
    [sys.executable, "-W", "ignore", resumed_training.__file__, str(directory), str(STEPS)],
    env=testing.environment(),
    stdout=subprocess.PIPE,
    stderr=subprocess.DEVNULL,
    text=True,
  )


def final_state(directory):
  reader = tf.train.load_checkpoint(tf.train.latest_checkpoint(str(directory)))
  return {name: reader.get_tensor(name).tobytes() for name in reader.get_variable_to_shape_map()}


@pytest.mark.slow
def test_resuming_after_random_kills_is_exact(tmp_path):
  uninterrupted = start(tmp_path / "uninterrupted")
  lines = uninterrupted.communicate()[0].splitlines()
  assert uninterrupted.returncode == 0
  skipped = sum(line.endswith("applied=0") for line in lines)
  assert skipped > 10, "the gradients should overflow repeatedly"

  seed = random.SystemRandom().randrange(10**6)
  print("seed", seed)  # pytest shows it if the test fails
  generator = random.Random(seed)
  directory = tmp_path / "killed"
  for _ in range(KILLS):
    process = start(directory)
    # Kills occur while the graph is built or restored, between steps, and while a checkpoint is saved.
    for _ in range(generator.choice([0, 1, generator.randrange(2, 30)])):
      assert process.stdout.readline(), "the run ended before it was killed"
    time.sleep(generator.uniform(0.0, 0.05))
    process.kill()
    process.communicate()
    assert process.returncode < 0
  last = start(directory)
  resumed_at = last.stdout.readline()
  last.communicate()
  assert last.returncode == 0 and "step=" in resumed_at and int(resumed_at.split()[0][5:]) > 7
  expected, found = final_state(tmp_path / "uninterrupted"), final_state(directory)
  assert found == expected
  assert np.frombuffer(found["global_step"], np.int64) == [STEPS]
  assert not [name for name in os.listdir(str(directory)) if "tempstate" in name and "index" in name]
