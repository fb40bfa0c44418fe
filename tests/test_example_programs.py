"""Tests of what the programs under examples/ have in common, and of the demo's check of
its speed.
"""

import importlib
import os
import re

import pytest

from tests import testing

EXAMPLES, TOOLS = (
  os.path.join(testing.ROOT, folder) for folder in ("examples", "tools")
)
# TensorFlow logs it if it is imported with oneDNN's ops enabled.
ENABLED = "oneDNN custom operations are on"


@pytest.fixture(name="demo")
def _demo(monkeypatch):
  pytest.importorskip("sklearn")
  monkeypatch.syspath_prepend(EXAMPLES)
  monkeypatch.setattr(os, "environ", dict(os.environ))
  return importlib.import_module("train_digits")


@pytest.fixture(name="import_log")
def _import_log(monkeypatch):
  """Returns a function that returns what a new process logs that runs code, with
  examples/ and tools/ on its path.
  """
  monkeypatch.delenv("TF_ENABLE_ONEDNN_OPTS", raising=False)

  def import_log(code, **variables):
    variables = dict(variables, TF_CPP_MIN_LOG_LEVEL="0")
    return testing.run_python(
      "-c", code, path=[EXAMPLES, TOOLS], variables=variables
    ).stderr

  return import_log


@pytest.mark.matrix
def test_setting_of_the_user_wins(import_log):
  pytest.importorskip("sklearn")
  if ENABLED not in import_log("import tensorflow", TF_ENABLE_ONEDNN_OPTS="1"):
    pytest.skip("This TensorFlow does not log it.")
  assert ENABLED in import_log("import train_digits", TF_ENABLE_ONEDNN_OPTS="1")


@pytest.mark.matrix
@pytest.mark.parametrize(
  "code",
  [
    "import train_digits",
    "import check_advice",
    "import train_keras_graph",
    "import train_estimator",
    "import train_transformer",
    "import train_unet",
    "import cluster; cluster.FLAGS(['program']); cluster.tensorflow()",
  ],
)
def test_float16_programs_run_without_onednn(import_log, code):
  pytest.importorskip("sklearn")
  assert ENABLED not in import_log(code)


@pytest.mark.matrix
def test_estimator_logs_each_line_once(tmp_path):
  if not hasattr(testing.tf, "estimator"):
    pytest.skip("This TensorFlow has no Estimator.")
  pytest.importorskip("sklearn")
  arguments = ["--steps", "50", "--model_dir", tmp_path]
  done = testing.run_python(os.path.join(EXAMPLES, "train_estimator.py"), *arguments)
  assert done.stderr.count("loss scale 65536 after 40 attempted steps") == 1
  assert re.search("skipped steps +1\n", done.stdout)


@pytest.mark.parametrize(
  "program, arguments, words",
  [
    ("train_estimator", ["--overflow_every", "1"], "must be 0 or at least 2"),
    ("train_workers", ["--overflow_at", "3", "8"], "Expected only flags; got 8."),
    (
      "train_parameter_server",
      ["--steps", "5", "--kill", "5"],
      "--kill must be less than --steps",
    ),
    ("train_horovod", ["--ranks", "0"], "0 is not a positive integer"),
  ],
)
@pytest.mark.matrix
def test_wrong_flags_are_named(program, arguments, words):
  pytest.importorskip("sklearn")
  done = testing.run_python(
    os.path.join(EXAMPLES, program + ".py"), *arguments, check=False
  )
  assert done.returncode == 1 and words in done.stdout + done.stderr


@pytest.mark.parametrize("flag", ["--help", "--helpfull"])
def test_help_lists_flags_and_succeeds(flag):
  program = os.path.join(EXAMPLES, "train_workers.py")  # imports TensorFlow later
  done = testing.run_python(program, flag, check=False)
  assert done.returncode == 0 and "Training steps." in done.stdout


@pytest.mark.parametrize("slow", ["float16", "float16 + mp_compat"])
def test_check_fails_if_float16_is_slow(demo, slow):
  def results(ratio):
    # One slow step, such as the first one, does not matter.
    seconds = {run.name: [9.0, 0.1, 0.1] for run in demo.RUNS}
    seconds[slow] = [9.0, 0.1 * ratio, 0.1 * ratio]
    return {name: [{"step_seconds": values}] for name, values in seconds.items()}

  demo.check_speed(results(14.9), "this machine")
  with pytest.raises(
    SystemExit, match="a step takes 15.1 times as long as in float32; .* this machine"
  ):
    demo.check_speed(results(15.1), "this machine")
