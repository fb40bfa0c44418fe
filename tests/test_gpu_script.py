"""Tests of the parts of scripts/gpu on CPUs. Two virtual CPUs stand for a GPU and its host, or for two GPUs."""

import importlib
import itertools
import json
import os
import re
import subprocess
import sys

import numpy as np
import pytest
import tensorflow

import mp_compat
from tests import testing
from tests.programs import table
from tests.testing import tf

pytestmark = pytest.mark.skipif(table.VERSION < (2, 4), reason="scripts/gpu needs TensorFlow 2.4")

SCRIPTS = os.path.join(testing.ROOT, "scripts")
FAST = {"width": 32, "rounds": 2, "seconds": 5}
GOOD = "loss finite, overflow skipped, scale lowered"


@pytest.fixture(name="parts")
def _parts(monkeypatch):
  monkeypatch.syspath_prepend(SCRIPTS)
  return importlib.import_module("gpu_parts")


@pytest.fixture(name="training")
def _training(monkeypatch):
  monkeypatch.syspath_prepend(SCRIPTS)
  return importlib.import_module("gpu_training")


@pytest.fixture(name="gpu")
def _gpu(monkeypatch):
  monkeypatch.syspath_prepend(SCRIPTS)
  return importlib.import_module("gpu")


@pytest.mark.matrix
def test_without_gpu_the_command_fails(tmp_path):
  path = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
  done = subprocess.run(
    [os.path.join(SCRIPTS, "gpu"), "--out", str(tmp_path)],
    env=dict(testing.environment(), PATH=path, CUDA_VISIBLE_DEVICES=""),
    capture_output=True,
    text=True,
    check=False,
  )
  assert done.returncode == 1 and not done.stdout
  assert done.stderr.startswith("No GPU is visible to TensorFlow {} (built with CUDA: ".format(tf.VERSION))


MACHINE = dict(gpus=[], tensorflow="2.21.0", cuda=None, cuda_build=False)


@pytest.mark.parametrize(
  "absent, failed, details, message",
  [
    ("pip install numpy", False, {}, "Expected TensorFlow's GPU build and its packages in .* Run: pip install numpy"),
    (None, True, {}, "TensorFlow could not describe this machine: broken"),
    (None, False, MACHINE, r"No GPU is visible to TensorFlow 2.21.0 \(built with CUDA: False\)\."),
    (None, False, dict(MACHINE, gpus=["A GPU"]), None),
  ],
)
def test_machine_is_described_or_error_raised(gpu, monkeypatch, absent, failed, details, message):
  row = dict(name="machine", milliseconds=None, result="broken", failed=failed, details=details)
  monkeypatch.setattr(gpu, "missing", lambda packages: absent)
  monkeypatch.setattr(gpu, "run_part", lambda part, folder: [row])
  if message:
    with pytest.raises(SystemExit, match=message):
      gpu.require_gpu("runs")
  else:
    assert {"date", "driver"} | set(MACHINE) == set(gpu.require_gpu("runs"))


def test_missing_packages_are_named(gpu):
  packages = {"numpy": "numpy", "no_such_module": "distribution", "nor_this": "another"}
  assert gpu.missing(packages) == "python3 -m pip install distribution another"
  assert gpu.missing({"numpy": "numpy"}) is None


def test_parts_of_command_and_program_agree(gpu, parts):
  assert list(parts.PARTS) == ["machine"] + list(gpu.PARTS)


@pytest.mark.parametrize(
  "minutes, end, expected",
  [
    (5, "sys.exit(0)", [("first", False)]),
    (5, "sys.exit(3)", [("first", False), ("ended with status 3", True)]),
    pytest.param(
      0.05, "time.sleep(60)", [("first", False), ("did not end in 0.05 minutes", True)], marks=pytest.mark.matrix
    ),
    (5, "print('{', end='', file=file, flush=True)", [("first", False)]),
  ],
)
def test_rows_of_a_part_survive_its_end(gpu, monkeypatch, tmp_path, minutes, end, expected):
  row = dict(name="", milliseconds=None, result="first", failed=False, details={})
  program = "import sys, time\nfile = open(sys.argv[2], 'w')\nprint({!r}, file=file, flush=True)\n".format(
    json.dumps(row)
  )
  (tmp_path / "gpu_parts.py").write_text(program + end)
  monkeypatch.setattr(gpu, "HERE", str(tmp_path))
  monkeypatch.setattr(gpu, "MINUTES", minutes)
  rows = gpu.run_part("trace", str(tmp_path))
  assert [(found["result"].partition(";")[0], found["failed"]) for found in rows] == expected


@pytest.mark.parametrize("failed", [False, True])
def test_command_writes_table_json_and_png(gpu, monkeypatch, tmp_path, capsys, failed):
  row = dict(name="model, mp_compat", milliseconds=1.5, result="checked", failed=failed, details={})
  monkeypatch.setitem(gpu.PARTS, "programs", {"no_such_module": "distribution"})
  monkeypatch.setattr(gpu, "require_gpu", lambda folder: dict(gpus=["A GPU"], tensorflow="2.21.0", date="today"))
  monkeypatch.setattr(gpu, "run_part", lambda part, folder: [row])
  monkeypatch.setattr(sys, "argv", ["gpu", "--out", str(tmp_path), "--part", "programs", "--part", "xla"])
  with pytest.raises(SystemExit) as stopped:
    gpu.main()
  assert stopped.value.code == int(failed)
  lines = capsys.readouterr().out.splitlines()
  left_out = "left out; to run it: python3 -m pip install distribution"
  assert lines[-3].split(None, 1) == ["programs", left_out]
  assert lines[-2].split() == ["xla", "model,", "mp_compat", "1.500"] + ["FAILED:"] * failed + ["checked"]
  written = json.loads((tmp_path / "gpu.json").read_text())
  assert written["machine"]["gpus"] == ["A GPU"] and written["parts"]["xla"] == [row]
  assert (tmp_path / "gpu.png").read_bytes().startswith(b"\x89PNG")


def test_error_in_a_piece_is_a_failed_row(parts):
  def fails():
    raise ValueError("what\n  happened")

  rows = list(parts.run_pieces([fails, lambda: [dict(name="next", result="", failed=False)]]))
  assert [(row["name"], row["result"], row["failed"]) for row in rows] == [
    ("fails", "ValueError: what happened", True),
    ("next", "", False),
  ]


class OnHost(mp_compat.FixedLossScale):
  """Checks the gradients on the first device, or their sums."""

  sums = False

  def update(self, grads):
    grads = [grad for grad in grads if isinstance(grad, tf.Tensor)]
    checked = [tf.reduce_sum(grad) for grad in grads] if self.sums else grads
    with tf.device("/cpu:0"):
      return tf.no_op(), tf.reduce_all([tf.reduce_all(tf.is_finite(value)) for value in checked])


class SumsOnHost(OnHost):
  sums = True


@pytest.mark.matrix
def test_trace_finds_no_gradient_on_another_device(parts):
  rows = list(parts.trace("/cpu:1"))
  assert [row["name"] for row in rows] == ["dynamic", "fixed", "clipped"]
  for row in rows:
    assert not row["failed"] and row["result"].startswith("transfers: 1 without loss scaling, none added; ops: "), row
  fixed, dynamic, clipped = (rows[number]["details"]["ops"] for number in (1, 0, 2))
  assert fixed < dynamic < clipped


@pytest.mark.matrix
@pytest.mark.parametrize("loss_scale, found", [(OnHost, True), (SumsOnHost, False)])
def test_trace_finds_gradients_but_no_scalars_on_another_device(parts, loss_scale, found):
  def check_on_host(opt):
    return mp_compat.MixedPrecisionLossScaleOptimizer(opt, loss_scale(8.0))

  (row,) = parts.trace("/cpu:1", [("on host", check_on_host)])
  assert row["failed"] == found
  assert not found or {"1 of float32 (2, 3)", "8 of float32 (256, 256)"} < set(row["details"]["added"])


@pytest.mark.matrix
def test_trace_fails_if_nothing_is_on_the_device(parts):
  before = tensorflow.config.get_soft_device_placement()
  tensorflow.config.set_soft_device_placement(True)
  try:
    (row,) = parts.trace("/gpu:7", [("fixed", parts.fix)])
  finally:
    tensorflow.config.set_soft_device_placement(before)
  assert row["failed"] and not row["details"]["added"]


@pytest.mark.matrix
@pytest.mark.parametrize(
  "piece, arguments, expected",
  [
    ("train_mirrored", {"devices": testing.TWO_CPUS}, GOOD + ", .* ops on /cpu:1"),
    ("train_clustered", {"device": "/cpu:0"}, "no XLA clusters"),  # as always on CPUs
    ("train_compiled", {"device": "/cpu:0"}, GOOD),
    ("rewrite_session", {"device": "/cpu:0"}, "no MatMul ops in float16"),  # as always on CPUs
    ("rewrite_keras", {"device": "/cpu:0"}, GOOD),
  ],
)
def test_training_skips_overflows(training, piece, arguments, expected):
  rows = list(getattr(training, piece)(**dict(FAST, **arguments)))
  assert len(rows) == (3 if "rewrite" in piece else 2)
  assert all(row["milliseconds"] > 0 for row in rows)
  assert [row["failed"] for row in rows] == [False] * (len(rows) - 1) + [expected.startswith("no ")]
  assert re.fullmatch(expected, rows[-1]["result"])


@pytest.mark.parametrize(
  "values, scales, losses, expected",
  [
    ([1, 1, 2], [8, 4, 4], [np.inf, 0.5], []),
    ([1, 0, 2], [8, 4, 4], [np.inf, 0.5], ["an overflow changed w"]),
    ([1, 1, 2], [8, 8, 8], [np.inf, 0.5], ["an overflow left the loss scale at 8"]),
    ([1, 1, 2], [8, 4, 4], [np.inf, np.nan], ["the loss is nan"]),
    ([1, 1, 1], [8, 4, 4], [np.inf, 0.5], ["a step without overflow changed no variable"]),
  ],
)
def test_wrong_training_is_found(training, values, scales, losses, expected):
  states = iter([({"w": np.float32(value)}, scale) for value, scale in zip(values, scales)])
  losses = iter(losses)
  program = training.Program(lambda weight: next(losses), lambda: next(states), None)
  assert training.check_training(program) == expected


def raise_for(api):
  def build(t):
    if t.api is api:
      raise TypeError("not with this one")
    return t.wrap().minimize(t.loss(), t.global_step)

  return build


def train_otherwise(t):
  factor = 2.0 if t.api is mp_compat else 1.0
  return t.wrap().minimize(factor * t.loss(), t.global_step)


RUNS = itertools.count(1.0)


def train_otherwise_in_each_run(t):
  return t.wrap().minimize(next(RUNS) * t.loss(), t.global_step)


PROGRAMS = {
  "equal": lambda t: t.wrap().minimize(t.loss(), t.global_step),
  "different": train_otherwise,
  "fails": raise_for(mp_compat),
  "fails without loss scaling, too": raise_for(None),
  "differs from run to run without loss scaling, too": train_otherwise_in_each_run,
  "TensorFlow's class fails, or works unexpectedly": raise_for(testing.native),
}


@pytest.mark.matrix
@pytest.mark.parametrize("status", sorted(PROGRAMS))
def test_program_is_classified(parts, monkeypatch, status):
  name = "program that " + status
  monkeypatch.setitem(table.PROGRAMS, name, table.Program(name, PROGRAMS[status]))
  (row,) = parts.compare_programs([name])
  assert row["result"] == "1 " + status
  assert row["failed"] == (status != "equal")
  assert row["details"]["wrong"] == ([name] if status in ("different", "fails") else [])


@pytest.mark.matrix
def test_programs_end_in_time(parts):
  (row,) = parts.compare_programs(seconds=0)
  assert row["failed"] and row["result"].endswith(" left out after 0 s")
  assert len(row["details"]["found"]["left out after 0 s"]) > 300


@pytest.mark.matrix
def test_digits_have_a_row_for_each_precision(parts, monkeypatch):
  monkeypatch.setattr(importlib.import_module("train_digits"), "TEST_DIGITS", 8)
  rows = list(parts.train_digits(steps=5, batch=2))
  assert [row["name"] for row in rows] == [
    name + ", batch 2, width 1" for name in ("float32", "float16", "float16 + mp_compat")
  ]
  assert all(row["milliseconds"] > 0 and row["result"].endswith(" after 5 steps") for row in rows)


@pytest.mark.matrix
def test_workload_has_a_row_for_each_variant(parts, monkeypatch):
  monkeypatch.setitem(importlib.import_module("benchmark").SHAPES, "small-100", lambda: [(8,)] * 3)
  rows = list(parts.measure_workload("small-100", rounds=1, seconds=1))
  assert [row["name"] for row in rows] == [
    "small-100 " + variant for variant in ("plain", "barrier", "tensorflow", "dynamic")
  ]
  assert "of TensorFlow's class" in rows[-1]["result"]
