"""Tests that a training run that is killed and resumed ends like an uninterrupted
run.
"""

import random
import subprocess
import sys
import time

import numpy as np
import pytest

from tests import testing
from tests.processes import resumed_training
from tests.testing import tf

KILLS = 20
UNLIMITED = 10**9


def start(directory, steps):
  return subprocess.Popen(
    [
      sys.executable,
      "-W",
      "ignore",
      resumed_training.__file__,
      str(directory),
      str(steps),
    ],
    env=testing.environment(),
    stdout=subprocess.PIPE,
    text=True,
  )


def latest_state(directory):
  reader = tf.train.load_checkpoint(tf.train.latest_checkpoint(str(directory)))
  return {
    name: reader.get_tensor(name).tobytes()
    for name in reader.get_variable_to_shape_map()
  }


def latest_step(directory):
  return int(np.frombuffer(latest_state(directory)["global_step"], np.int64)[0])


@pytest.mark.slow
def test_resuming_after_kills_is_exact(tmp_path):
  seed = random.SystemRandom().randrange(10**6)
  print("seed", seed)  # pytest shows it if the test fails
  generator = random.Random(seed)
  directory = tmp_path / "killed"
  # Kills occur while the graph is built or restored, between steps, and while a
  # checkpoint is saved.
  lines_until_kill = [100] + [
    generator.choice([0, 1, generator.randrange(2, 30)]) for _ in range(KILLS - 1)
  ]
  for lines in lines_until_kill:
    process = start(directory, UNLIMITED)
    for _ in range(lines):
      assert process.stdout.readline(), "the run failed before it was killed"
    time.sleep(generator.uniform(0.0, 0.05))
    process.kill()
    process.communicate()
    assert process.returncode < 0

  resumed_at = latest_step(directory)
  # In so few steps, a loss scale whose state was lost or damaged does not recover.
  steps = resumed_at + 2
  last = start(directory, steps)
  first_line = last.stdout.readline()
  assert int(first_line.split()[0][len("step=") :]) >= resumed_at
  last.communicate()
  assert last.returncode == 0

  uninterrupted = start(tmp_path / "uninterrupted", steps)
  lines = uninterrupted.communicate()[0].splitlines()
  assert uninterrupted.returncode == 0
  skipped = sum(line.endswith("applied=0") for line in lines)
  assert skipped > 10, "the gradients should overflow repeatedly"

  assert latest_state(directory) == latest_state(tmp_path / "uninterrupted")
  assert latest_step(directory) == steps
