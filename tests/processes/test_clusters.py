"""Tests of the programs under examples/ with several processes on localhost, which
record the state after every step.

The reference is TensorFlow without mp_compat, in one process, on the concatenated
batches of all workers.
"""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

import mp_compat
from tests import testing
from tests.processes import estimator_cluster
from tests.testing import tf

EXAMPLES = os.path.join(testing.ROOT, "examples")

STEPS, OVERFLOWS, BATCH = 12, (3, 8), 16
# Expected with INCREMENT_PERIOD = 5. The attempts are 3 finite, 1 overflow, 4 finite, 1
# overflow, 3 finite.
SCALES = [2.0**e for e in [15, 15, 15, 14, 14, 14, 14, 14, 13, 13, 13, 13]]
GOOD_STEPS = [1, 2, 3, 0, 1, 2, 3, 4, 0, 1, 2, 3]
GLOBAL_STEPS = [1, 2, 3, 3, 4, 5, 6, 7, 7, 8, 9, 10]


def run(record, script, *arguments):
  """Runs a program. Returns its output, and {process name: {variable name: values after
  every step}}.
  """
  settings = "--record {} --batch {} --steps {} --timeout 120".format(
    record, BATCH, STEPS
  ).split()
  done = testing.run_python(
    os.path.join(EXAMPLES, script), *settings, *arguments, stderr=subprocess.STDOUT
  )
  return done.stdout, {
    path.stem: dict(np.load(str(path))) for path in sorted(record.iterdir())
  }


def assert_equal_records(records):
  """Asserts that all processes recorded bitwise equal variables."""
  first, *others = records.values()
  for other in others:
    assert sorted(first) == sorted(other)
    for name, values in first.items():
      assert values.tobytes() == other[name].tobytes(), name


@pytest.fixture(name="cluster", scope="module")
def _cluster():
  pytest.importorskip("sklearn")
  sys.path.insert(0, EXAMPLES)
  import cluster

  yield cluster
  sys.path.remove(EXAMPLES)


def reference(cluster, workers):
  """Trains without loss scaling on the concatenated batches of the finite steps.
  Returns {name: values}.
  """
  with tf.Graph().as_default():
    model = cluster.Model(tf, mp_compat, "float32")
    train_op = tf.train.MomentumOptimizer(cluster.LEARNING_RATE, 0.9).minimize(
      model.loss()
    )
    variables = {v.op.name: v for v in tf.global_variables()}
    digits = cluster.Digits(BATCH * workers, overflow_at=())
    history = []
    with testing.initialized_session() as sess:
      for attempt in range(STEPS):
        if attempt not in OVERFLOWS:
          sess.run(train_op, digits.feed(model, attempt, 0, 1))
        history.append(sess.run(variables))
  return {name: np.stack([values[name] for values in history]) for name in variables}


def assert_as_reference(record, expected):
  """Asserts that the states equal the reference up to the order in which examples are
  summed.
  """
  np.testing.assert_array_equal(record.pop("current_loss_scale"), SCALES)
  np.testing.assert_array_equal(record.pop("good_steps"), GOOD_STEPS)
  np.testing.assert_array_equal(record.pop("global_step"), GLOBAL_STEPS)
  assert sorted(record) == sorted(expected)
  for name, values in expected.items():
    np.testing.assert_allclose(record[name], values, rtol=2e-5, atol=1e-7, err_msg=name)


matrix, slow = pytest.mark.matrix, pytest.mark.slow


@pytest.mark.parametrize(
  "program, workers, control_flow",
  [
    pytest.param("train_workers.py --workers 2", 2, 1, marks=matrix),
    pytest.param("train_workers.py --workers 2", 2, 2, marks=slow),
    pytest.param("train_workers.py --workers 3", 3, 1, marks=slow),
    pytest.param("train_parameter_server.py --sync", 2, 1, marks=matrix),
    pytest.param("train_parameter_server.py --sync", 2, 2, marks=[matrix, slow]),
  ],
)
def test_synchronous_workers_match_one_process(
  cluster, tmp_path, program, workers, control_flow
):
  _, records = run(
    tmp_path,
    *program.split(),
    "--control_flow",
    str(control_flow),
    "--dtype",
    "float32",
  )
  assert sorted(records) == ["worker-{}".format(i) for i in range(workers)]
  assert_equal_records(records)
  assert_as_reference(records["worker-0"], reference(cluster, workers))


def assert_invariants(record):
  """Asserts what holds for any order of the updates of two workers."""
  exponents = np.log2(record["current_loss_scale"])
  assert (exponents == np.round(exponents)).all() and (exponents >= 0).all()
  assert (record["good_steps"] >= 0).all() and (record["good_steps"] < 5).all()
  assert all(np.isfinite(values).all() for values in record.values())


def last_step(printed):
  """Returns the last global step that worker 0 printed."""
  (end,) = [
    line for line in printed.splitlines() if line.startswith("worker-0 attempt=end ")
  ]
  return int(dict(pair.split("=") for pair in end.split()[1:])["global_step"])


@pytest.mark.matrix
@pytest.mark.parametrize("control_flow", [1, pytest.param(2, marks=slow)])
def test_asynchronous_workers_share_scale(cluster, tmp_path, control_flow):
  del cluster
  # The order of the workers determines the largest scale. In float16 it could overflow,
  # so the model is float32.
  printed, records = run(
    tmp_path,
    "train_parameter_server.py",
    "--control_flow",
    str(control_flow),
    "--dtype",
    "float32",
  )
  applied = 0
  for name, record in records.items():
    assert_invariants(record)
    overflowed = [attempt for attempt in range(STEPS) if not record["applied"][attempt]]
    assert overflowed == (list(OVERFLOWS) if name == "worker-1" else [])
    applied += record["applied"].sum()
  assert last_step(printed) == applied == 2 * STEPS - len(OVERFLOWS)


@pytest.mark.slow
def test_restarted_worker_continues_training(cluster, tmp_path):
  del cluster
  printed, records = run(
    tmp_path,
    "train_parameter_server.py",
    "--kill",
    "5",
    "--overflow_at",
    "3",
    "--dtype",
    "float32",
  )
  assert "worker-1 killed, and started anew" in printed
  for record in records.values():
    assert_invariants(record)
    assert len(record["applied"]) == STEPS
  # Before it was killed, worker 1 printed its attempts, one of them skipped. It may
  # have made one more.
  attempts_until_kill = (
    sum(line.startswith("worker-1 attempt=") for line in printed.splitlines()) - STEPS
  )
  assert attempts_until_kill > 5
  applied = (
    sum(record["applied"].sum() for record in records.values())
    + attempts_until_kill
    - 1
  )
  assert applied <= last_step(printed) <= applied + 1


@pytest.mark.parametrize(
  "timeout, command, words",
  [
    (60.0, "(sleep 1; echo broken) & exit 3", "(?s)broken.*ended with status 3"),
    (1.0, "sleep 60", "Time is up"),
  ],
)
def test_failures_and_timeouts_terminate_processes(
  cluster, tmp_path, timeout, command, words
):
  mark = str(tmp_path / "alive")
  with pytest.raises(SystemExit, match=words):
    with cluster.Processes(timeout) as processes:
      processes.start(sys.executable, "-c", "import time; time.sleep(600)", mark)
      processes.wait(processes.start("sh", "-c", command, mark))
  assert (
    subprocess.run(
      ["pgrep", "-f", mark], stdout=subprocess.DEVNULL, check=False
    ).returncode
    == 1
  )


def test_workers_share_counters_of_hooks(cluster):
  """Each worker begins with the counts of all workers, which the chief initialized."""
  ps, *workers = cluster.free_addresses(3)
  spec = tf.train.ClusterSpec({"ps": [ps], "worker": workers})
  servers = [
    tf.train.Server(spec, job, task)
    for job, task in [("ps", 0), ("worker", 0), ("worker", 1)]
  ]
  counts = []
  for task, server in enumerate(servers[1:]):
    worker = "/job:worker/task:{}".format(task)
    with tf.Graph().as_default(), tf.device(
      tf.train.replica_device_setter(worker_device=worker, cluster=spec)
    ):
      training = testing.Training()
      opt = testing.Optimizer(testing.sgd(), 8.0)
      train_op = opt.minimize(training.loss, training.global_step)
      hook = mp_compat.LossScaleHook(opt, counters_in_graph=True)
      with tf.train.MonitoredTrainingSession(
        server.target,
        is_chief=task == 0,
        hooks=[hook],
        config=tf.ConfigProto(device_filters=["/job:ps", worker]),
        log_step_count_steps=None,
        max_wait_secs=10,
      ) as sess:
        for x in (testing.FINITE, testing.OVERFLOW):
          sess.run(train_op, {training.x: x})
        counts.append([hook.attempted, hook.skipped])
  assert counts == [[2, 1], [4, 2]]


@pytest.mark.skipif(
  not hasattr(tf, "estimator"),
  reason="TensorFlow after 2.15 has no Estimator; run on 1.15 and 2.15 in CI",
)
@pytest.mark.matrix
def test_estimator_runs_chief_hooks_on_chief_only(cluster, tmp_path):
  """Runs `train_and_evaluate` in three processes. `training_hooks` see the steps of
  their own process, and the parameter server has the loss scale.
  """
  devices = ["/job:ps/task:0"]
  jobs = ["ps", "chief", "worker"]
  addresses = {job: [address] for job, address in zip(jobs, cluster.free_addresses(3))}
  with cluster.Processes(120.0) as processes:
    started = {}
    for job in jobs:
      task = {"cluster": addresses, "task": {"type": job, "index": 0}}
      started[job] = processes.start(
        sys.executable,
        estimator_cluster.__file__,
        str(tmp_path),
        **dict(testing.environment(), TF_CONFIG=json.dumps(task)),
      )
    processes.wait(started["chief"])
    processes.wait(started["worker"])
  seen = {job: json.loads((tmp_path / (job + ".json")).read_text()) for job in jobs[1:]}
  assert seen == {
    "chief": {"training": [4, 1], "chief": [4, 1], "devices": devices},
    "worker": {"training": [6, 1], "chief": [0, 0], "devices": devices},
  }
