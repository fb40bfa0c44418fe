"""Tests of scripts/gpu on CPUs. Two virtual CPUs stand for a GPU and its host."""

import importlib
import itertools
import os
import subprocess
import sys

import pytest
import tensorflow

import mp_compat
from tests import testing
from tests.programs import table
from tests.testing import tf

pytestmark = pytest.mark.skipif(
  table.VERSION < (2, 4), reason="scripts/gpu needs TensorFlow 2.4"
)


@pytest.fixture(name="gpu")
def _gpu(monkeypatch):
  monkeypatch.syspath_prepend(os.path.join(testing.ROOT, "tools"))
  monkeypatch.setattr(os, "environ", dict(os.environ))
  return importlib.import_module("gpu")


@pytest.mark.matrix
def test_without_gpu_the_command_fails():
  path = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
  environment = dict(testing.environment(), PATH=path, CUDA_VISIBLE_DEVICES="")
  done = subprocess.run(
    ["scripts/gpu"], cwd=testing.ROOT, env=environment, capture_output=True, check=False
  )
  assert done.returncode == 1 and not done.stdout
  assert "No GPU is visible to TensorFlow " + tf.VERSION in done.stderr.decode()


@pytest.mark.parametrize("failed", [[], ["trace"]])
def test_exit_status_is_that_of_the_parts(gpu, monkeypatch, capsys, failed):
  monkeypatch.setattr(tensorflow.config, "list_physical_devices", lambda kind: [kind])
  monkeypatch.setattr(
    tensorflow.config.experimental,
    "get_device_details",
    lambda gpu: {"device_name": "A " + gpu},
  )
  monkeypatch.setattr(gpu, "trace", lambda: failed)
  monkeypatch.setattr(gpu, "benchmark", lambda folder: [])
  monkeypatch.setattr(sys, "argv", ["gpu", "--part", "trace", "--part", "benchmark"])
  with pytest.raises(SystemExit) as stopped:
    gpu.main()
  assert bool(stopped.value.code) == bool(failed)
  assert capsys.readouterr().out.splitlines()[-1] == (
    "Failed: trace" if failed else "No check failed."
  )


@pytest.mark.matrix
def test_trace_finds_no_gradient_on_another_device(gpu, capsys):
  assert gpu.trace("/cpu:1") == []
  lines = capsys.readouterr().out.splitlines()
  assert len(lines) == 3 and all("added: none; ops: " in line for line in lines), lines


class OnHost(mp_compat.FixedLossScale):
  """Checks the gradients on the first device, or their sums."""

  sums = False

  def update(self, grads):
    grads = [grad for grad in grads if isinstance(grad, tf.Tensor)]
    checked = [tf.reduce_sum(grad) for grad in grads] if self.sums else grads
    with tf.device("/cpu:0"):
      return tf.no_op(), tf.reduce_all(
        [tf.reduce_all(tf.is_finite(value)) for value in checked]
      )


class SumsOnHost(OnHost):
  sums = True


@pytest.mark.matrix
@pytest.mark.parametrize("loss_scale", [OnHost, SumsOnHost])
def test_trace_finds_gradients_but_no_scalars(gpu, capsys, loss_scale):
  failed = gpu.trace(
    "/cpu:1",
    {
      "it": lambda opt: mp_compat.MixedPrecisionLossScaleOptimizer(opt, loss_scale(8.0))
    },
  )
  printed = capsys.readouterr().out
  added = ["1 of float32 (2, 3)" in printed, "1 of float32 (256, 256)" in printed]
  assert (failed, added) == (
    ([], [False, False]) if loss_scale.sums else (["it"], [True, True])
  )


@pytest.mark.matrix
def test_trace_fails_if_nothing_is_on_the_device(gpu):
  before = tensorflow.config.get_soft_device_placement()
  tensorflow.config.set_soft_device_placement(True)
  try:
    assert gpu.trace("/gpu:7") == ["dynamic", "fixed", "clipped"]
  finally:
    tensorflow.config.set_soft_device_placement(before)


def fail_for(api):
  return lambda used: 1 / (used is not api)


RUNS = itertools.count(1.0)


@pytest.mark.matrix
@pytest.mark.parametrize(
  "factor, result",
  [
    (lambda api: 1.0, "same"),
    (lambda api: 2.0 if api is mp_compat else 1.0, "FAILED"),
    (fail_for(mp_compat), "FAILED"),
    (lambda api: next(RUNS), "fail, or differ from run to run, without mp_compat"),
    (fail_for(None), "fail, or differ from run to run, without mp_compat"),
    (
      fail_for(testing.native),
      "same, but TensorFlow's class fails or works unexpectedly",
    ),
  ],
  ids=[
    "same",
    "different",
    "fails",
    "differs without mp_compat",
    "fails without mp_compat",
    "TensorFlow fails",
  ],
)
def test_program_is_classified(gpu, monkeypatch, request, factor, result):
  row = table.Program(
    request.node.name,
    lambda t: t.wrap().minimize(factor(t.api) * t.loss(), t.global_step),
  )
  monkeypatch.setitem(table.PROGRAMS, row.name, row)
  assert gpu.compare_program(row)[0] == result
  assert gpu.compare_programs([row]) == (
    [] if result == "same" else [row.name] if result == "FAILED" else ["all"]
  )


def test_programs_end_in_time(gpu, capsys):
  assert gpu.compare_programs(seconds=0) == ["all"]
  count, text = capsys.readouterr().out.split(maxsplit=1)
  assert int(count) > 300 and text == "left out, for lack of time\n"
