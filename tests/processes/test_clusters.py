"""Several processes on loopback: the programs under scripts/, and what their processes recorded of every step.

The reference is TensorFlow alone, in one process, on the batches of all workers joined.
"""

import argparse
import os
import subprocess
import sys

import numpy as np
import pytest

import mp_compat
from tests import testing
from tests.testing import tf

SCRIPTS = os.path.join(testing.ROOT, "scripts")

STEPS, OVERFLOWS, BATCH = 12, (3, 8), 16
# By hand, with INCREMENT_PERIOD = 5: three good steps, an overflow, four, an overflow, three.
SCALES = [2. ** e for e in [15, 15, 15, 14, 14, 14, 14, 14, 13, 13, 13, 13]]
GOOD_STEPS = [1, 2, 3, 0, 1, 2, 3, 4, 0, 1, 2, 3]
GLOBAL_STEPS = [1, 2, 3, 3, 4, 5, 6, 7, 7, 8, 9, 10]


def run(record, script, *arguments):
  """Runs a program to its end; gives what it printed and what each process recorded, by the process's name."""
  done = subprocess.run(
      [sys.executable, os.path.join(SCRIPTS, script), "--record", str(record), "--batch", str(BATCH),
       "--steps", str(STEPS), "--timeout", "120"] + list(arguments),
      env=testing.environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
      check=False)
  assert done.returncode == 0, done.stdout[-5000:]
  return done.stdout, {path.stem: dict(np.load(str(path))) for path in sorted(record.iterdir())}


def assert_all_say_the_same(records):
  first, *others = records.values()
  for other in others:
    assert sorted(first) == sorted(other)
    for name, values in first.items():
      assert values.tobytes() == other[name].tobytes(), name


@pytest.fixture(name="cluster", scope="module")
def _cluster():
  pytest.importorskip("sklearn")
  sys.path.insert(0, SCRIPTS)
  import cluster
  yield cluster
  sys.path.remove(SCRIPTS)


def reference(cluster, workers):
  """Momentum alone, without loss scaling, over the joined batches of the steps that do not overflow."""
  arguments = argparse.Namespace(batch=BATCH * workers, overflow_at=())
  with tf.Graph().as_default():
    model = cluster.Model(tf, mp_compat, "float32")
    train_op = tf.train.MomentumOptimizer(cluster.LEARNING_RATE, .9).minimize(model.loss())
    variables = {v.op.name: v for v in tf.global_variables()}
    digits = cluster.Digits(arguments)
    history = []
    with testing.session() as sess:
      sess.run(tf.global_variables_initializer())
      for attempt in range(STEPS):
        if attempt not in OVERFLOWS:
          sess.run(train_op, digits.feed(model, attempt, 0, 1))
        history.append(sess.run(variables))
  return {name: np.stack([values[name] for values in history]) for name in variables}


def assert_as_reference(record, expected):
  """The state after every step is that of a single process, but for the order in which examples are added up."""
  np.testing.assert_array_equal(record.pop("current_loss_scale"), SCALES)
  np.testing.assert_array_equal(record.pop("good_steps"), GOOD_STEPS)
  np.testing.assert_array_equal(record.pop("global_step"), GLOBAL_STEPS)
  assert sorted(record) == sorted(expected)
  for name, values in expected.items():
    np.testing.assert_allclose(record[name], values, rtol=2e-5, atol=1e-7, err_msg=name)


CONTROL_FLOW = [1, pytest.param(2, marks=pytest.mark.slow)]


@pytest.mark.parametrize("workers, control_flow", [
    (2, 1), pytest.param(2, 2, marks=pytest.mark.slow), pytest.param(3, 1, marks=pytest.mark.slow)])
def test_workers_with_collectives_skip_together_and_train_as_one(cluster, tmp_path, workers, control_flow):
  _, records = run(tmp_path, "train_workers.py", "--workers", str(workers), "--control_flow", str(control_flow),
                   "--dtype", "float32")
  assert sorted(records) == ["worker-{}".format(i) for i in range(workers)]
  assert_all_say_the_same(records)
  assert_as_reference(records["worker-0"], reference(cluster, workers))


@pytest.mark.parametrize("control_flow", CONTROL_FLOW)
def test_synchronized_workers_outlive_an_overflow_and_train_as_one(cluster, tmp_path, control_flow):
  _, records = run(tmp_path, "train_parameter_server.py", "--sync", "--control_flow", str(control_flow),
                   "--dtype", "float32")
  assert sorted(records) == ["worker-0", "worker-1"]
  assert_all_say_the_same(records)
  assert_as_reference(records["worker-0"], reference(cluster, 2))


def assert_invariants(record):
  """What holds however the updates of two workers interleave."""
  exponents = np.log2(record["current_loss_scale"])
  assert (exponents == np.round(exponents)).all() and (exponents >= 0).all()
  assert (record["good_steps"] >= 0).all() and (record["good_steps"] < 5).all()
  assert all(np.isfinite(values).all() for values in record.values())


def last_step(printed):
  end, = [line for line in printed.splitlines() if line.startswith("worker-0 attempt=end ")]
  return int(dict(pair.split("=") for pair in end.split()[1:])["global_step"])


@pytest.mark.parametrize("control_flow", CONTROL_FLOW)
def test_asynchronous_workers_share_a_scale_and_count_every_applied_step(cluster, tmp_path, control_flow):
  del cluster
  # In which order the workers come decides how high the scale gets; in float16 it may be high enough to overflow.
  printed, records = run(tmp_path, "train_parameter_server.py", "--control_flow", str(control_flow),
                         "--dtype", "float32")
  applied = 0
  for name, record in records.items():
    assert_invariants(record)
    overflowed = [attempt for attempt in range(STEPS) if not record["applied"][attempt]]
    assert overflowed == (list(OVERFLOWS) if name == "worker-1" else [])
    applied += record["applied"].sum()
  assert last_step(printed) == applied == 2 * STEPS - len(OVERFLOWS)


@pytest.mark.slow
def test_a_worker_that_is_killed_and_started_anew_carries_on(cluster, tmp_path):
  del cluster
  printed, records = run(tmp_path, "train_parameter_server.py", "--kill", "5", "--overflow_at", "3")
  assert "worker-1 killed, and started anew" in printed
  for record in records.values():
    assert_invariants(record)
    assert len(record["applied"]) == STEPS
  # Worker 1 told of attempts 0 to 5, one of them skipped, before it was killed; it may have made more untold.
  told = sum(record["applied"].sum() for record in records.values()) + 5
  assert told <= last_step(printed) <= told + STEPS - 6


def test_processes_are_ended_when_one_of_them_fails(cluster, tmp_path):
  mark = str(tmp_path / "alive")
  with pytest.raises(SystemExit, match="(?s)broken.*ended with status 3"):
    with cluster.Processes(timeout=60.) as processes:
      processes.start(sys.executable, "-c", "import time; time.sleep(600)", mark)
      processes.wait(processes.start("sh", "-c", "(sleep 1; echo broken) & exit 3"))
  assert subprocess.run(["pgrep", "-f", mark], stdout=subprocess.DEVNULL, check=False).returncode == 1


def test_processes_are_ended_when_time_is_up(cluster, tmp_path):
  mark = str(tmp_path / "alive")
  with pytest.raises(SystemExit, match="Time is up"):
    with cluster.Processes(timeout=1.) as processes:
      processes.wait(processes.start(sys.executable, "-c", "import time; time.sleep(600)", mark))
  assert subprocess.run(["pgrep", "-f", mark], stdout=subprocess.DEVNULL, check=False).returncode == 1
