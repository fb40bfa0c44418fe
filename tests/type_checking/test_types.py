"""Tests that mypy accepts the package and a typed program of a user, and that it
reports wrong uses.
"""

import os
import re
import subprocess
import sys

import pytest

import mp_compat

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(mp_compat.__file__)))
PROGRAM = os.path.join(os.path.dirname(os.path.abspath(__file__)), "user_program.py")

# Statements that are wrong, and the kind of error that mypy reports; each is a line of
# one program.
WRONG_USES = [
  ("mp_compat.LossScales", "attr-defined"),
  ("mp_compat.checkpoints.Savers", "attr-defined"),
  ("mp_compat.FixedLossScale()", "call-arg"),
  ('mp_compat.DynamicLossScale(increment_period="x")', "arg-type"),
  ("mp_compat.LossScale()", "abstract"),
  ("integer = mp_compat.get_loss_scale(128)", "assignment"),
  ("integer = mp_compat.FixedLossScale.from_config({})", "assignment"),
  ("mp_compat.get_loss_scale(None).update([])", "attr-defined"),
  (
    "integer = mp_compat.MixedPrecisionLossScaleOptimizer(inner, 128).loss_scale",
    "assignment",
  ),
  ("mp_compat.MixedPrecisionLossScaleOptimizer(inner, 128, True)", "call-arg"),
  ("mp_compat.GradientAccumulator(mp_compat.DynamicLossScale())", "arg-type"),
  (
    "mp_compat.apply_gradients_together([(inner, []), mp_compat.FixedLossScale(2)])",
    "list-item",
  ),
  ("mp_compat.LossScaleHook(inner, on_stall=None)", "arg-type"),
  ("integer = mp_compat.nonfinite_gradients(inner)", "assignment"),
  ("mp_compat.enable_mixed_precision_graph_rewrite(inner, scale=2)", "call-arg"),
  ("mp_compat.install().uninstall(True)", "call-arg"),
  ('mp_compat.keras.LossScaleOptimizer(inner, dynamic="yes")', "arg-type"),
  ("integer = mp_compat.keras.LossScaleOptimizer(inner).initial_scale", "assignment"),
  ("mp_compat.keras.LossScaleOptimizer.from_config([])", "arg-type"),
]


@pytest.fixture(name="mypy", scope="module")
def _mypy(tmp_path_factory):
  """Returns a function that runs mypy with the project's configuration and returns its
  output.
  """
  pytest.importorskip("mypy", reason="mypy is installed only by `scripts/nox -s types`")
  cache = tmp_path_factory.mktemp("cache")

  def run(*arguments):
    done = subprocess.run(
      [sys.executable, "-m", "mypy", "--cache-dir", str(cache)] + list(arguments),
      cwd=ROOT,
      capture_output=True,
      text=True,
      check=False,
    )
    assert done.returncode in (0, 1), done.stderr
    return done.stdout

  return run


@pytest.mark.slow
@pytest.mark.parametrize(
  "files", ["mp_compat", PROGRAM], ids=["package", "user_program"]
)
def test_mypy_finds_no_errors(files, mypy):
  pytest.importorskip("libcst", reason="the package imports LibCST")
  assert mypy(files).startswith("Success")


@pytest.mark.slow
def test_mypy_reports_each_wrong_use(mypy, tmp_path):
  program = tmp_path / "wrong_uses.py"
  header = [
    "import tensorflow.compat.v1 as tf",
    "import mp_compat",
    "inner = tf.train.AdamOptimizer()",
    "integer = 1",
  ]
  program.write_text(
    "\n".join(header + [statement for statement, _ in WRONG_USES]) + "\n"
  )
  reported = re.findall(
    r"^\S*wrong_uses\.py:(\d+): error: .*\[([\w-]+)\]$", mypy(str(program)), re.M
  )
  assert reported == [
    (str(line), code) for line, (_, code) in enumerate(WRONG_USES, len(header) + 1)
  ]


def test_user_program_uses_every_public_name():
  with open(PROGRAM, encoding="utf-8") as source:
    used = set(re.findall(r"\bmp_compat\.(\w+)", source.read()))
  assert set(mp_compat.__all__) <= used
