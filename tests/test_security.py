"""Tests that malicious checkpoints, configs and source files do no harm when they are
read.
"""

import ast
import json
import os

import numpy as np
import pytest

import mp_compat
from mp_compat import checkpoints
from tests import testing
from tests.checkpoints import goldens
from tests.testing import FINITE
from tests.testing import OVERFLOW
from tests.testing import tf

PACKAGE = os.path.dirname(mp_compat.__file__)
# `mp_compat run` executes the program that the user names; `mp_compat compare` adds an
# op that notes that a step runs. A stall is explained by one op of the program, which the
# program itself has just executed.
EXECUTING = {
  os.path.join(PACKAGE, "tools", "run.py"): {"exec"},
  os.path.join(PACKAGE, "tools", "compare", "step_building.py"): {"py_func"},
  os.path.join(PACKAGE, "monitoring", "recomputation.py"): {"import_graph_def"},
}
# Functions that execute code, or load data that can execute code.
FORBIDDEN = set(
  "eval exec compile __import__ execfile system popen py_func numpy_function "
  "py_function import_meta_graph import_graph_def load_model".split()
)
FORBIDDEN_MODULES = set(
  "pickle cPickle dill marshal shelve subprocess joblib yaml ctypes tarfile "
  "zipfile".split()
)
# `mp_compat compare` runs the program that the user names in processes, with this
# interpreter, and no shell.
IMPORTING = {os.path.join(PACKAGE, "tools", "compare", "processes.py"): {"subprocess"}}


def sources():
  """Yields the paths of all source files of the package."""
  for folder, _, files in os.walk(PACKAGE):
    yield from (
      os.path.join(folder, name) for name in files if name.endswith((".py", ".pyi"))
    )


@pytest.mark.parametrize(
  "path", list(sources()), ids=lambda path: os.path.relpath(path, PACKAGE)
)
def test_modules_execute_no_code(path):
  with open(path, encoding="utf-8") as source:
    tree = ast.parse(source.read())
  for node in ast.walk(tree):
    if isinstance(node, ast.Call):
      called = getattr(node.func, "attr", getattr(node.func, "id", None))
      # `re.compile` does not execute code.
      if (
        called == "compile"
        and getattr(getattr(node.func, "value", None), "id", None) == "re"
      ):
        continue
      assert called not in FORBIDDEN - EXECUTING.get(path, set()), "{}, line {}".format(
        called, node.lineno
      )
      assert not any(keyword.arg == "allow_pickle" for keyword in node.keywords)
    names = (
      [alias.name for alias in node.names]
      if isinstance(node, (ast.Import, ast.ImportFrom))
      else []
    )
    names += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
    assert not {name.split(".")[0] for name in names} & (
      FORBIDDEN_MODULES - IMPORTING.get(path, set())
    ), names


@pytest.mark.matrix
@pytest.mark.parametrize("scale", [np.nan, np.inf, -np.inf, 0.0, -8.0, 1e-45])
@pytest.mark.parametrize("good_steps", [0, -(2**63), 2**63 - 1])
def test_invalid_scales_keep_weights_finite(scale, good_steps, tmp_path):
  path = str(tmp_path / "hostile")
  goldens.save_variables(
    path, {"current_loss_scale": np.float32(scale), "good_steps": np.int64(good_steps)}
  )
  with tf.Graph().as_default():
    training = testing.Training()
    opt = mp_compat.MixedPrecisionLossScaleOptimizer(
      tf.train.GradientDescentOptimizer(0.5), "dynamic"
    )
    train_op = opt.minimize(training.loss, training.global_step)
    saver = tf.train.Saver(opt.loss_scale.variables())
    scaffold = tf.train.Scaffold(init_fn=lambda _, sess: saver.restore(sess, path))
    hook = mp_compat.LossScaleHook(opt, max_consecutive_skips=5, on_stall="stop")
    with tf.train.MonitoredSession(
      tf.train.ChiefSessionCreator(scaffold), hooks=[hook]
    ) as sess:
      w, applied = np.zeros(2), 0
      for step in range(20):
        if sess.should_stop():
          break
        _, finite = sess.run(
          [train_op, opt.gradients_finite],
          {training.x: OVERFLOW if step % 3 == 2 else FINITE},
        )
        applied += finite
        w = sess.run_step_fn(lambda step_context: step_context.session.run(training.w))
        np.testing.assert_array_equal(w, -0.5 * applied * FINITE)
      # These scales never recover: no step is applied, and the hook stops the run.
      with np.errstate(all="ignore"):
        reciprocal = np.float32(1) / np.float32(scale)
      assert sess.should_stop() == (
        not np.isfinite(reciprocal) or not np.isfinite(scale)
      )


def test_names_are_not_used_as_paths(tmp_path):
  folder = tmp_path / "inner"
  folder.mkdir()
  names = [
    "../../escaped",
    "/tmp/mp_compat_escaped",
    "w;rm -rf x",
    "current_loss_scale",
  ]
  source, target = str(folder / "source"), str(folder / "target")
  with tf.Graph().as_default(), tf.Session() as sess:
    tensors = [tf.constant(8.0)] * len(names)
    save = tf.raw_ops.SaveV2(
      prefix=source,
      tensor_names=names,
      shape_and_slices=[""] * len(names),
      tensors=tensors,
    )
    sess.run(save)
  assert sorted(checkpoints.convert(source, target, "mp_compat").variables)[:2] == [
    "../../escaped",
    names[1],
  ]
  assert os.listdir(str(tmp_path)) == ["inner"] and not os.path.exists(names[1])
  assert {name.split(".")[0] for name in os.listdir(str(folder))} == {
    "checkpoint",
    "source",
    "target",
  }


def test_migration_executes_nothing(tmp_path):
  marker = tmp_path / "executed"
  code = "open({!r}, 'w')\nimport tensorflow as tf\nscale = tf.train.experimental.DynamicLossScale()\n"
  code = code.format(str(marker))
  (tmp_path / "script.py").write_text(code)
  # would be imported if the current directory were on sys.path
  (tmp_path / "libcst.py").write_text(code)
  cell = dict(
    cell_type="code", metadata={}, outputs=[], execution_count=None, source=code
  )
  notebook = dict(cells=[cell], metadata={}, nbformat=4, nbformat_minor=4)
  (tmp_path / "notebook.ipynb").write_text(json.dumps(notebook, indent=1))
  testing.run_python("-m", "mp_compat", "migrate", "--write", tmp_path)
  for name in ["script.py", "libcst.py", "notebook.ipynb"]:
    assert "mp_compat.DynamicLossScale()" in (tmp_path / name).read_text()
  assert not marker.exists()
