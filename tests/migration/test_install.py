"""Tests of mp_compat.install() and `mp_compat run`, which let TensorFlow's names refer
to this package.
"""

import importlib
import inspect
import operator
import sys

import pytest
import tensorflow

import mp_compat
from mp_compat.migration import old_names
from tests import testing
from tests.keras import cases as keras_cases
from tests.testing import tf

PATHS = [
  "train.experimental",
  "compat.v1.train.experimental",
  "compat.v1.mixed_precision",
  "compat.v1.mixed_precision.experimental",
  "mixed_precision.experimental",
  "keras.mixed_precision.experimental",
]
SCALES = ["LossScale", "FixedLossScale", "DynamicLossScale"]
REWRITE = [
  "MixedPrecisionLossScaleOptimizer",
  "enable_mixed_precision_graph_rewrite",
  "disable_mixed_precision_graph_rewrite",
]


def get_identities(path):
  """Returns {name: id} of the attributes of a module below `tensorflow`; None if there
  is no such module.
  """
  module = tensorflow
  for part in path.split("."):
    module = getattr(module, part, None)
  return module and {
    name: id(getattr(module, name)) for name in dir(module) if not name.startswith("__")
  }


def take_snapshot():
  """Returns everything that install() may change in TensorFlow's modules."""
  top = [
    sorted(dir(module))
    for module in (tensorflow, tf, tf.train, tensorflow.keras.mixed_precision)
  ]
  imported = {
    name: id(module)
    for name, module in sys.modules.items()
    if name.startswith("tensorflow.")
  }
  return top, {path: get_identities(path) for path in PATHS}, imported


def test_install_replaces_and_restores_names():
  # The first import of Keras and contrib adds attributes.
  mp_compat.install().uninstall()
  before = take_snapshot()
  with mp_compat.install() as installed:
    for path, names in [(path, REWRITE + SCALES) for path in PATHS[:3]] + [
      (PATHS[3], SCALES)
    ]:
      for name in names:
        assert operator.attrgetter(path + "." + name)(tensorflow) is getattr(
          mp_compat, name
        )
    for path in PATHS[:5]:
      assert (
        importlib.import_module("tensorflow." + path).LossScale is mp_compat.LossScale
      )
    experimental = importlib.import_module(
      "tensorflow.keras.mixed_precision.experimental"
    )
    assert experimental is tensorflow.keras.mixed_precision.experimental
    assert (
      experimental.LossScaleOptimizer is mp_compat.keras.experimental.LossScaleOptimizer
    )
    from tensorflow.contrib import mixed_precision
    from tensorflow.contrib.mixed_precision import FixedLossScaleManager

    assert mixed_precision.FixedLossScaleManager is FixedLossScaleManager
    assert (
      tensorflow.contrib.mixed_precision.LossScaleOptimizer
      is mp_compat.contrib.mixed_precision.LossScaleOptimizer
    )
    assert (
      "tensorflow.compat.v1.train.experimental.LossScale" in installed.patched
      and not installed.skipped
    )
    assert len(installed.patched) == 43 + (tf.__version__ < "2")
    assert repr(installed).startswith("Installation(patched=['tensorflow.train.")
  assert take_snapshot() == before and installed.patched == []
  assert (
    tf.train.experimental.LossScale
    is testing.native.LossScale
    is not mp_compat.LossScale
  )


def test_old_argument_names_are_accepted():
  compared = 0
  for path, new_names in old_names.PUBLIC:
    for name, new_name in new_names.items():
      try:
        theirs = operator.attrgetter("{}.{}".format(path, name))(tensorflow)
      # this TensorFlow or its Keras does not have the name
      except (AttributeError, ImportError):
        continue
      ours = operator.attrgetter(new_name.partition(".")[2])(mp_compat)
      old, new = [
        set(
          inspect.signature(one.__init__ if isinstance(one, type) else one).parameters
        )
        for one in (theirs, ours)
      ]
      assert old - {"args", "kwargs"} <= new, new_name
      compared += 1
  assert compared >= 12


@pytest.mark.matrix
def test_every_module_gets_new_names():
  # One process uses an attribute, an import by name, and then install(), as programs
  # do.
  program = (
    "import tensorflow\n"
    "first = tensorflow.compat.v1\n"
    "import tensorflow.compat.v1 as second\n"
    "import mp_compat\n"
    "mp_compat.install()\n"
    "import tensorflow.compat.v1 as third\n"
    "import tensorflow.compat.v2 as later\n"
    "assert later.train.experimental.LossScale is mp_compat.LossScale\n"
    "ours = mp_compat.keras.experimental.LossScaleOptimizer\n"
    "assert later.keras.mixed_precision.experimental.LossScaleOptimizer is ours\n"
    "for tf in (first, second, third, tensorflow.compat.v1):\n"
    "  assert tf.train.experimental.LossScale is mp_compat.LossScale\n"
    "  assert tf.mixed_precision.experimental.LossScale is mp_compat.LossScale\n"
  )
  testing.run_python("-c", program)


def test_second_install_changes_nothing():
  installed = mp_compat.install()
  before = take_snapshot()
  with mp_compat.install() as again:
    assert again.patched == []
  assert take_snapshot() == before
  installed.uninstall()
  installed.uninstall()
  assert tf.train.experimental.LossScale is not mp_compat.LossScale
  with mp_compat.install() as installed:
    assert len(installed.patched) == 43 + (tf.__version__ < "2")


@pytest.mark.matrix
@pytest.mark.skipif(
  keras_cases.VERSION < (2, 16), reason="this TensorFlow contains Keras"
)
def test_install_skips_missing_keras():
  program = (
    "import sys\n"
    "sys.modules['keras'] = sys.modules['tf_keras'] = None\n"
    "import mp_compat\n"
    "installed = mp_compat.install()\n"
    "print(len(installed.patched), [line.split(':')[0] for line in installed.skipped])\n"
    "import tensorflow\n"
    "try:\n"
    "  tensorflow.keras.layers\n"
    "except ImportError as error:\n"
    "  assert 'Keras cannot be imported' in str(error)\n"
    "else:\n"
    "  raise AssertionError('tf.keras was found')\n"
  )
  skipped = [
    "tensorflow.{}keras.mixed_precision.experimental".format(api)
    for api in ("", "compat.v1.", "compat.v2.")
  ]
  expected = "{} {}".format(40 + (tf.__version__ < "2"), skipped)
  assert testing.run_python("-c", program).stdout.strip() == expected


# A program that does not use this package.
PROGRAM = """
import sys
import numpy as np
import tensorflow.compat.v1 as tf
tf.disable_v2_behavior()

x = tf.placeholder(tf.float32, [2])
w = tf.get_variable("w", initializer=np.array([1., 2.], np.float32), use_resource=True)
opt = tf.train.experimental.MixedPrecisionLossScaleOptimizer(
    tf.train.AdamOptimizer(.1), tf.train.experimental.DynamicLossScale(8., increment_period=2))
train_op = opt.minimize(tf.reduce_sum(w * w * x))
with tf.Session() as sess:
  sess.run(tf.global_variables_initializer())
  for value in sys.argv[1:]:
    sess.run(train_op, {x: [1., float(value)]})
    print(value, sess.run(w).tolist(), sess.run(opt._loss_scale()))
print(type(opt).__module__, __name__, sys.argv[0], file=sys.stderr)
"""


def run_python(folder, *command):
  return testing.run_python(*command, cwd=str(folder), check=False)


@pytest.mark.matrix
@pytest.mark.parametrize(
  "command",
  [
    ["run", "-m", "program"],
    pytest.param(["run", "program.py"], marks=pytest.mark.slow),
    pytest.param(["run", "--", "program.py"], marks=pytest.mark.slow),
  ],
  ids=" ".join,
)
def test_run_prints_same_output(command, tmp_path):
  (tmp_path / "program.py").write_text(PROGRAM)
  values = ["1", "2", "inf", "-0.5", "nan", "3"]
  alone = run_python(tmp_path, "program.py", *values)
  assert alone.returncode == 0 and alone.stderr.splitlines()[-1].startswith(
    "tensorflow"
  )
  done = run_python(tmp_path, "-m", "mp_compat", *(command + values))
  assert done.returncode == 0 and done.stdout == alone.stdout, done.stderr
  module, name, first = done.stderr.splitlines()[-1].split()
  assert (module, name) == (
    "mp_compat.training.optimizer",
    "__main__",
  ) and first.endswith(("program.py", "program"))
  assert len(alone.stdout.splitlines()) == 6


@pytest.mark.slow
def test_run_returns_exit_code(tmp_path):
  (tmp_path / "fails.py").write_text("import sys\nsys.exit(3)\n")
  assert (
    run_python(tmp_path, "-m", "mp_compat", "run", "fails.py", "--help").returncode == 3
  )
  done = run_python(tmp_path, "-m", "mp_compat", "run", "--help")
  assert done.returncode == 0 and "mp_compat run [--] SCRIPT" in done.stdout


WITHOUT_NATIVE_CLASSES = """
import types
import tensorflow.compat.v1 as tf
tf.train.experimental = types.ModuleType("experimental")
import mp_compat
tf.disable_v2_behavior()
mp_compat.install()
w = tf.get_variable("w", [], initializer=tf.ones_initializer())
opt = tf.train.experimental.MixedPrecisionLossScaleOptimizer(tf.train.AdamOptimizer(0.5), 8.0)
train_op = opt.minimize(w * tf.placeholder_with_default(2.0, []))
with tf.Session() as sess:
  sess.run(tf.global_variables_initializer())
  sess.run(train_op)
  print(type(opt).__module__, round(float(sess.run(w)), 3))
"""


def test_program_trains_after_tensorflow_has_removed_its_classes():
  """No TensorFlow up to 2.22 has; mp_compat does not need them."""
  done = testing.run_python("-W", "ignore", "-c", WITHOUT_NATIVE_CLASSES)
  assert done.stdout == "mp_compat.training.optimizer 0.5\n"
