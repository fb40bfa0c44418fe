"""mp_compat.install() and `mp_compat run`: TensorFlow's old names mean this package, and mean TensorFlow again."""

import importlib
import inspect
import operator
import subprocess
import sys

import pytest
import tensorflow

import mp_compat
from mp_compat.migration import old_names
from tests import testing
from tests.keras import cases as keras_cases
from tests.testing import tf

PATHS = ["train.experimental", "compat.v1.train.experimental", "compat.v1.mixed_precision",
         "compat.v1.mixed_precision.experimental", "mixed_precision.experimental", "keras.mixed_precision.experimental"]


def seen(path):
  """What a module below `tensorflow` holds, by name; None if there is none."""
  module = tensorflow
  for part in path.split("."):
    module = getattr(module, part, None)
  return module and {name: id(getattr(module, name)) for name in dir(module) if not name.startswith("__")}


def everything():
  top = [sorted(dir(module)) for module in (tensorflow, tf, tf.train, tensorflow.keras.mixed_precision)]
  imported = {name: id(module) for name, module in sys.modules.items() if name.startswith("tensorflow.")}
  return top, {path: seen(path) for path in PATHS}, imported


def test_old_names_mean_this_package_and_then_tensorflow_again():
  mp_compat.install().uninstall()  # Keras and contrib, loaded for the first time, leave traces of their own.
  before = everything()
  with mp_compat.install() as installed:
    for place in (tensorflow.train.experimental, tf.train.experimental, tf.mixed_precision):
      assert place.MixedPrecisionLossScaleOptimizer is mp_compat.MixedPrecisionLossScaleOptimizer
      assert place.enable_mixed_precision_graph_rewrite is mp_compat.enable_mixed_precision_graph_rewrite
      assert place.disable_mixed_precision_graph_rewrite is mp_compat.disable_mixed_precision_graph_rewrite
    for place in (tensorflow.train.experimental, tf.train.experimental, tf.mixed_precision,
                  tf.mixed_precision.experimental):
      assert place.LossScale is mp_compat.LossScale and place.FixedLossScale is mp_compat.FixedLossScale
      assert place.DynamicLossScale is mp_compat.DynamicLossScale
    for path in PATHS[:5]:
      assert importlib.import_module("tensorflow." + path).LossScale is mp_compat.LossScale
    experimental = importlib.import_module("tensorflow.keras.mixed_precision.experimental")
    assert experimental is tensorflow.keras.mixed_precision.experimental
    assert experimental.LossScaleOptimizer is mp_compat.keras.experimental.LossScaleOptimizer
    from tensorflow.contrib import mixed_precision
    from tensorflow.contrib.mixed_precision import FixedLossScaleManager
    assert mixed_precision.FixedLossScaleManager is FixedLossScaleManager
    assert tensorflow.contrib.mixed_precision.LossScaleOptimizer is mp_compat.contrib.mixed_precision.LossScaleOptimizer
    assert "tensorflow.compat.v1.train.experimental.LossScale" in installed.patched and not installed.skipped
    assert len(installed.patched) == 43 and repr(installed).startswith("Installation(patched=['tensorflow.train.")
  assert everything() == before and installed.patched == []
  assert tf.train.experimental.LossScale is testing.native.LossScale is not mp_compat.LossScale


def test_arguments_are_called_as_they_were():
  seen = 0
  for path, meanings in old_names.PUBLIC:
    for name, here in meanings.items():
      try:
        theirs = operator.attrgetter("{}.{}".format(path, name))(tensorflow)
      except (AttributeError, ImportError):  # not in this TensorFlow, or a Keras that has none
        continue
      ours = operator.attrgetter(here.partition(".")[2])(mp_compat)
      names = [list(inspect.signature(one.__init__ if isinstance(one, type) else one).parameters)
               for one in (theirs, ours)]
      assert set(names[0]) - {"args", "kwargs"} <= set(names[1]), here
      seen += 1
  assert seen >= 12


def test_every_copy_of_tensorflows_interface_is_meant():
  # In one process, in the order in which programs do it: an attribute, an import by name, and then the installation.
  program = ("import tensorflow\n"
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
             "  assert tf.mixed_precision.experimental.LossScale is mp_compat.LossScale\n")
  subprocess.run([sys.executable, "-c", program], env=testing.environment(), check=True)


def test_once_more_changes_nothing():
  installed = mp_compat.install()
  before = everything()
  with mp_compat.install() as again:
    assert again.patched == []
  assert everything() == before
  installed.uninstall()
  installed.uninstall()
  assert tf.train.experimental.LossScale is not mp_compat.LossScale
  with mp_compat.install() as installed:
    assert len(installed.patched) == 43


def test_the_switch_of_the_graph_rewrite_is_still_tensorflows():
  with mp_compat.install(), tf.Graph().as_default():
    opt = tf.train.experimental.enable_mixed_precision_graph_rewrite(tf.train.AdamOptimizer())
    assert type(opt) is mp_compat.MixedPrecisionLossScaleOptimizer
    assert tensorflow.config.optimizer.get_experimental_options()["auto_mixed_precision"]
    tf.train.experimental.disable_mixed_precision_graph_rewrite()


@pytest.mark.skipif(keras_cases.VERSION < (2, 16), reason="Keras is a part of this TensorFlow")
def test_a_keras_that_is_not_there_is_skipped():
  program = ("import sys\n"
             "sys.modules['keras'] = sys.modules['tf_keras'] = None\n"
             "import mp_compat\n"
             "installed = mp_compat.install()\n"
             "print(len(installed.patched), [line.split(':')[0] for line in installed.skipped])\n")
  said = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, env=testing.environment(), check=True)
  assert said.stdout.decode().strip() == "40 ['tensorflow.keras.mixed_precision.experimental', " \
      "'tensorflow.compat.v1.keras.mixed_precision.experimental', " \
      "'tensorflow.compat.v2.keras.mixed_precision.experimental']"


# A program of 2019, which knows nothing of this package.
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


def run(folder, *command):
  return subprocess.run([sys.executable] + list(command), capture_output=True, text=True, env=testing.environment(),
                        cwd=str(folder), check=False)


@pytest.mark.parametrize("command", [
    ["run", "-m", "program"],
    pytest.param(["run", "program.py"], marks=pytest.mark.slow),
    pytest.param(["run", "--", "program.py"], marks=pytest.mark.slow),
], ids=" ".join)
def test_an_unmodified_program_runs_with_it_and_prints_the_same(command, tmp_path):
  (tmp_path / "program.py").write_text(PROGRAM)
  values = ["1", "2", "inf", "-0.5", "nan", "3"]
  alone = run(tmp_path, "program.py", *values)
  assert alone.returncode == 0 and alone.stderr.splitlines()[-1].startswith("tensorflow")
  done = run(tmp_path, "-m", "mp_compat", *(command + values))
  assert done.returncode == 0 and done.stdout == alone.stdout, done.stderr
  module, name, first = done.stderr.splitlines()[-1].split()
  assert (module, name) == ("mp_compat.training.optimizer", "__main__") and first.endswith(("program.py", "program"))
  assert len(alone.stdout.splitlines()) == 6


@pytest.mark.slow
def test_what_cannot_be_run_is_told(tmp_path):
  (tmp_path / "fails.py").write_text("import sys\nsys.exit(3)\n")
  assert run(tmp_path, "-m", "mp_compat", "run", "fails.py", "--help").returncode == 3
  done = run(tmp_path, "-m", "mp_compat", "run")
  assert done.returncode == 2 and "mp_compat run: expected a script, or -m and a module" in done.stderr
  done = run(tmp_path, "-m", "mp_compat", "run", "--help")
  assert done.returncode == 0 and "mp_compat run [--] SCRIPT" in done.stdout
