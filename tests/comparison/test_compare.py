"""Tests of `python -m mp_compat compare`, with real programs in real processes."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from mp_compat import __main__ as command_line
from mp_compat.comparison import processes
from tests import testing
from tests.keras import cases as keras_cases

# Each argument switches something on.
PROGRAM = """
import multiprocessing, os, subprocess, sys
import numpy as np
import tensorflow
import tensorflow.compat.v1 as tf

args = set(sys.argv[1:])
data = tf.random.normal([2]).numpy() if "data" in args else 0.0
if "eager" not in args:
  tf.disable_v2_behavior()


class Skips(tf.train.experimental.FixedLossScale):
  def update(self, grads):
    return tf.no_op(), tf.placeholder_with_default(False, [])


def make_optimizer():
  opt, experimental = tf.train.AdamOptimizer(0.1), tf.train.experimental
  if "plain" in args:
    return opt
  if "migrated" in args:
    import mp_compat as experimental
  if "twice" in args:
    contrib = tensorflow.contrib.mixed_precision
    opt = experimental.enable_mixed_precision_graph_rewrite(opt)
    return contrib.LossScaleOptimizer(opt, contrib.ExponentialUpdateLossScaleManager(8.0, 4))
  scale = 128.0 if "fixed" in args else Skips(8.0) if "custom" in args else experimental.DynamicLossScale(2.0**10, 4)
  return experimental.MixedPrecisionLossScaleOptimizer(opt, scale)


def train():
  x = tf.placeholder(tf.float32, [2])
  w = tf.get_variable("w", [2], initializer=tf.zeros_initializer(), use_resource="ref" not in args)
  v = tf.get_variable("v", [3], use_resource="ref" not in args)
  loss = tf.reduce_sum(w * x) + tf.reduce_sum(tf.nn.dropout(tf.square(v), rate=0.5))
  opt, global_step = make_optimizer(), tf.train.get_or_create_global_step()
  if "unscaled" in args:
    tf.logging.set_verbosity(tf.logging.ERROR)
    grads_and_vars = list(zip(tf.gradients(loss, [w, v]), [w, v]))
  else:
    grads_and_vars = opt.compute_gradients(loss)
  if "clip" in args:
    grads_and_vars = [(tf.clip_by_value(grad, -1.0, 1.0), variable) for grad, variable in grads_and_vars]
  train_op = opt.apply_gradients(grads_and_vars, global_step)
  if "averages" in args:  # Their initializers read the variables, and they are updated in skipped steps, too.
    with tf.control_dependencies([train_op]):
      train_op = tf.train.ExponentialMovingAverage(0.9).apply([w, v])
  ours = os.environ["MP_COMPAT_RUN"] == "mp_compat"
  if "variable" in args and ours:
    tf.get_variable("more", initializer="a string")
  if "zero" in args:
    zero = tf.get_variable("zero", initializer=1.0)
    train_op = tf.group(train_op, zero.assign(-0.0 if ours else 0.0))
  initializers = [tf.global_variables_initializer()]
  if "unreadable" in args:
    handle = tf.raw_ops.VarHandleOp(dtype=tf.float32, shape=[], shared_name="handle")
    initializers.append(tf.raw_ops.AssignVariableOp(resource=handle, value=0.0))
    train_op = tf.group(train_op, tf.raw_ops.AssignAddVariableOp(resource=handle, value=1.0))
  if "reads" in args:
    tf.enable_control_flow_v2()
  read = tf.cond(tf.placeholder_with_default(True, []), lambda: w + 1.0, lambda: w - 1.0)
  random = np.random.RandomState(int.from_bytes(os.urandom(4), "big")) if "entropy" in args else np.random
  folder = os.environ["MP_COMPAT_RUN"] if "env" in args else "folder"
  with tf.Session() as sess:
    sess.run(initializers)
    saver = tf.train.Saver()
    if "checkpoint" in args and tf.train.latest_checkpoint(folder):
      saver.restore(sess, tf.train.latest_checkpoint(folder))
    run = sess.make_callable(train_op, [x]) if "callable" in args else lambda value: sess.run(train_op, {x: value})
    for step in range(0 if "untrained" in args else 5 if "shorter" in args and ours else 6):
      value = random.normal(size=2) + data
      if step == 3 and "overflow" in args or "overflows" in args:
        value[0] = np.inf
      run(value + (step == 3 and "numbers" in args and ours))
      if "reads" in args:
        sess.run(read)
    if "checkpoint" in args:
      saver.save(sess, folder + "/model", global_step)


def train_eagerly():
  w = tf.Variable([1.0])
  with tf.GradientTape() as tape:
    loss = tf.square(w)
  w.assign_sub(tape.gradient(loss, w))


if "eager" in args:
  train_eagerly()
if "fork" in args:
  child = multiprocessing.get_context("fork").Process(target=train)
  child.start()
  child.join()
with tf.Graph().as_default():
  train()
if "later" in args:
  args.add("checkpoint")
  with tf.Graph().as_default():
    train()
if "process" in args:
  subprocess.check_call([sys.executable, "-c", "import time\\nwhile time.process_time() < 1.5: pass"])
if "input" in args:
  assert sys.stdin.read() == "some input"
if "megabytes" in args:
  print("x" * 2**22)
if "crash" in args:
  raise ValueError("It crashes.")
if "kill" in args:
  os.kill(os.getpid(), 9)
if "exit" in args:
  sys.exit(3)
if "_exit" in args:
  os._exit(0)
"""

ESTIMATOR = """
import tensorflow.compat.v1 as tf
tf.disable_v2_behavior()

def model_fn(features, labels, mode):
  loss = tf.reduce_mean(tf.square(tf.layers.flatten(features) @ tf.get_variable("w", [4, 1]) - labels))
  opt = tf.train.experimental.MixedPrecisionLossScaleOptimizer(tf.train.AdamOptimizer(0.1), "dynamic")
  return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=opt.minimize(loss, tf.train.get_global_step()))

def input_fn():
  features = tf.data.Dataset.from_tensor_slices((tf.random.normal([32, 4]), tf.random.normal([32, 1])))
  return features.shuffle(32).repeat().batch(8)

tf.estimator.train_and_evaluate(
  tf.estimator.Estimator(model_fn, "folder", tf.estimator.RunConfig(save_checkpoints_steps=4)),
  tf.estimator.TrainSpec(input_fn, 8),
  tf.estimator.EvalSpec(input_fn, 2, throttle_secs=0),
)
"""

SEVERAL = """
import sys
import numpy as np
import tensorflow.compat.v1 as tf
tf.disable_v2_behavior()

def make_optimizer():
  return tf.train.experimental.MixedPrecisionLossScaleOptimizer(tf.train.MomentumOptimizer(0.1, 0.9), "dynamic")

def build():
  x = tf.placeholder(tf.float32, [None, 3])
  generator = tf.get_variable("generator", [3, 2])
  discriminator = tf.get_variable("discriminator", [2, 1])
  loss = tf.reduce_mean(tf.matmul(tf.matmul(x, generator), discriminator)) + tf.nn.l2_loss(discriminator)
  train_ops = []
  for variable in (generator, discriminator):
    opt = make_optimizer()
    ((grad, _),) = opt.compute_gradients(loss, [variable])
    train_ops.append(opt.apply_gradients([(tf.clip_by_value(grad, -1, 1) if "clip" in sys.argv else grad, variable)]))
  return x, train_ops, tf.global_variables_initializer()

sessions = []
for _ in range(2):
  with tf.Graph().as_default() as graph:
    x, train_ops, initializer = build()
  for sess in [tf.Session(graph=graph), tf.Session(graph=graph)]:
    sess.run(initializer)
    sessions.append((sess, x, train_ops))
for step in range(3):
  for sess, x, train_ops in sessions:
    for train_op in train_ops:
      value = np.abs(np.random.normal(size=[4, 3]))
      if step == 1 and "clip" not in sys.argv:
        value *= np.inf
      elif step == 1 and sess is sessions[0][0]:
        value *= 1e36  # The generator's gradients are infinite, not NaN.
      sess.run(train_op, {x: value})
"""

STRATEGY = """
import sys
import numpy as np
import tensorflow.compat.v1 as tf
tf.disable_v2_behavior()
if "server" in sys.argv:
  server = tf.train.Server.create_local_server()
  config, target, strategy = None, server.target, tf.distribute.get_strategy()
  placement = tf.device(tf.train.replica_device_setter(
      cluster=server.server_def.cluster, ps_device="/job:local/task:0", worker_device="/job:local/task:0"))
else:
  config, target = tf.ConfigProto(device_count={"CPU": 2}), ""
  strategy, placement = tf.distribute.MirroredStrategy(["/cpu:0", "/cpu:1"]), tf.device(None)

with strategy.scope(), placement:
  x, w = tf.placeholder(tf.float32, [None, 3]), tf.get_variable("w", [3, 2])
  global_step = tf.train.get_or_create_global_step()
  opt = tf.train.experimental.MixedPrecisionLossScaleOptimizer(tf.train.MomentumOptimizer(0.1, 0.9), "dynamic")
  minimize = lambda: opt.minimize(tf.reduce_mean(tf.square(tf.matmul(x, w))), global_step)
  train_op = strategy.group(strategy.extended.call_for_each_replica(minimize))
with tf.train.MonitoredTrainingSession(target, config=config) as sess:
  for step in range(6):
    sess.run(train_op, {x: np.random.normal(size=[4, 3]) * (np.inf if step == 3 else 1)})
"""

KERAS = """
import sys
import numpy as np
import tensorflow.compat.v1 as tf
tf.disable_v2_behavior()
wrapper = tf.keras.mixed_precision.experimental.LossScaleOptimizer
if "migrated" in sys.argv:
  from mp_compat.keras.experimental import LossScaleOptimizer as wrapper
model = tf.keras.Sequential([tf.keras.layers.Dense(3, input_shape=(4,)), tf.keras.layers.Dropout(0.5)])
model.compile(wrapper(tf.keras.optimizers.Adam(), "dynamic"), "mse", metrics=["mae"])
data = np.random.normal(size=[32, 4]), np.zeros([32, 3])
model.fit(*data, epochs=2, batch_size=8, validation_data=data, verbose=0)
"""


@pytest.fixture(name="compare")
def _compare(tmp_path, monkeypatch, capfd):
  """Returns a function that compares a program of `tmp_path`; it returns exit code, output and report."""
  (tmp_path / "program.py").write_text(PROGRAM)
  (tmp_path / "estimator.py").write_text(ESTIMATOR)
  (tmp_path / "keras_program.py").write_text(KERAS)
  (tmp_path / "several.py").write_text(SEVERAL)
  (tmp_path / "strategy.py").write_text(STRATEGY)
  monkeypatch.chdir(tmp_path)
  monkeypatch.setenv("PYTHONPATH", testing.ROOT)
  monkeypatch.setenv("MP_COMPAT_RUN", "of another comparison")
  monkeypatch.delenv("TF2_BEHAVIOR", raising=False)

  def compare(*arguments):
    code = command_line.main(["compare", "--json", str(tmp_path / "report.json"), *arguments])
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["status"] == code
    return code, capfd.readouterr().out, report

  return compare


def test_equal_programs_are_same(compare):
  code, output, report = compare("program.py", "overflow")
  assert code == 0, output
  runs = report["runs"]
  assert list(runs) == ["original", "mp_compat", "again"]
  for run in runs.values():
    assert (run["steps"], run["read"], run["skipped"], run["variables"]) == (6, 6, 1, 11)
    assert run["scales"] == {"current_loss_scale": [1024.0, 512.0]}
  lines = output.splitlines()
  assert lines[1].split() == "1. as it is 6 train steps, 1 skipped, loss scale 1024 -> 512".split()
  assert lines[2].split() == "2. with mp_compat the same bits: 11 variables after each of 6 steps".split()
  assert lines[3].split() == "3. as it is, again the same bits: the program is deterministic".split()
  assert lines[-1] == "The program trains the same, in the steps that were compared."


@pytest.mark.slow
@pytest.mark.skipif(keras_cases.VERSION < (2, 3), reason="ops do not say which variables their functions only read")
def test_conditional_that_reads_is_no_step(compare):
  code, output, _ = compare("--runs", "original,mp_compat", "program.py", "reads")
  assert code == 0 and "6 train steps, 0 skipped" in output, output


@pytest.mark.slow
@pytest.mark.parametrize(
  "arguments, words",
  [
    ("program.py ref callable overflow", "6 steps"),
    ("program.py _exit", "6 steps"),
    ("program.py averages overflow", "6 train steps, 1 skipped"),
    ("program.py unscaled", "with mp_compat: a warning of mp_compat: Adam applies gradients that were never scaled"),
    ("several.py", "24 train steps, 8 skipped, current_loss_scale 32768 -> 16384, current_loss_scale_1 32768 -> 16384"),
    ("program.py overflows", "6 train steps, 6 skipped"),
    ("strategy.py", "6 train steps, 1 skipped"),
    ("strategy.py server", "6 train steps, 1 skipped"),
    ("program.py megabytes", "6 steps"),
    ("--steps 4 program.py crash", "4 steps"),
    ("--steps 5 --every 2 -m program overflow", "every 2 of 5 steps"),
    ("--without program.py", "without loss scaling  the same bits"),
    ("--without program.py overflow", "Before it, the bits are the same."),
    ("--runs original,without,again program.py migrated", "the same bits"),
    ("program.py checkpoint env", "6 steps"),
    ("--restore folder program.py checkpoint", "6 steps"),
    ("--runs original,again program.py process", "The program ran other processes, which are not compared."),
  ],
)
def test_equal_variants_are_same(arguments, words, compare, tmp_path):
  code, output, _ = compare(*arguments.split())
  assert code == 0 and words in output, output
  assert not (tmp_path / "folder").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
  "switches, step, reason",
  [
    ("averages clip overflow", 4, "clipping or masking hid its overflow"),
    ("averages fixed overflow", 4, "a fixed loss scale of TensorFlow's class applies them"),
    ("numbers", 4, "The reason is not known."),
    ("custom", 1, "update() of the program's LossScale returned False"),
  ],
)
def test_differences_have_step_and_reason(switches, step, reason, compare):
  code, output, report = compare("program.py", *switches.split())
  assert code == 1 and reason in output, output
  assert report["runs"]["mp_compat"]["difference"]["step"] == step
  assert "  w: 2 of 2 values differ, by up to " in output


@pytest.mark.slow
@pytest.mark.parametrize(
  "arguments, words",
  [
    (
      "program.py variable",
      ["in 1 of 12 variables", "do not have the same", "more: is missing in one of the runs"],
    ),
    ("program.py zero", ["zero: differs"]),
    ("--every 4 several.py clip", ["step 10 is the first that differs"]),
    ("--runs original,mp_compat program.py fixed overflow", ["step 4 is the first", "this needs the run 'again'"]),
    ("program.py shorter", ["step 6 is the first that differs", "number of steps: differs"]),
    ("--runs original,mp_compat program.py numbers", ["this needs the run 'again'", "w: differs"]),
  ],
)
def test_other_differences_are_described(arguments, words, compare):
  code, output, _ = compare(*arguments.split())
  assert code == 1 and all(text in output for text in words), output


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(testing.tensorflow, "contrib"), reason="tf.contrib is in TensorFlow 1.15 only")
def test_loss_scaled_twice_is_reason(compare):
  code, output, _ = compare("program.py", "twice")
  assert code == 1 and "the first run scales the loss twice" in output and "already scales the loss" in output, output


@pytest.mark.slow
@pytest.mark.parametrize(
  "arguments, words",
  [
    ("program.py entropy", "differs from itself: at step 1, first in w"),
    ("program.py crash", "as it is: The program ended with exit code 1. Its last lines:"),
    ("program.py kill", "as it is: The program was killed by signal 9."),
    ("program.py exit", "as it is: The program ended with exit code 3."),
    ("nothing.py", "NotFoundError"),
    ("program.py plain", "with mp_compat: The program made no optimizer of mp_compat"),
    ("program.py untrained", "as it is: No train step was seen"),
    ("program.py fork", "as it is: Training in a forked process was seen"),
    ("program.py migrated", "as it is: The program uses mp_compat as it is"),
    ("--runs original,again program.py later", "It starts from other values than the first run: first "),
    ("program.py checkpoint", "with mp_compat: It starts from other values than the first run: first "),
    ("--every 9 program.py", "No train step was seen"),
    ("program.py unreadable", "as it is: No tensor of the graph reads VarHandleOp."),
  ],
)
def test_status_is_2_if_nothing_follows(arguments, words, compare):
  code, output, _ = compare(*arguments.split())
  assert code == 2 and words in output, output


@pytest.mark.slow
@pytest.mark.skipif(testing.tf.VERSION.startswith("1."), reason="TensorFlow 1 is not eager")
def test_eager_training_is_not_called_same(compare):
  code, output, _ = compare("program.py", "eager")
  assert code == 2 and "Eager training was seen" in output, output
  code, output, _ = compare("--runs", "original,again", "program.py", "data")  # has random data from eager mode
  assert code == 0 and "the same bits" in output, output


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(testing.tf, "estimator"), reason="this TensorFlow has no Estimator")
def test_estimators_are_compared(compare, tmp_path):
  (tmp_path / "folder").mkdir()
  (tmp_path / "folder" / "kept").write_text("before")
  code, output, _ = compare("--restore", "folder", "estimator.py")
  assert code == 0 and "after each of 8 steps" in output, output
  assert [path.name for path in (tmp_path / "folder").iterdir()] == ["kept"]


@pytest.mark.slow
@pytest.mark.skipif(
  "experimental" not in dir(getattr(testing.tf.keras, "mixed_precision", None)),
  reason="this Keras has no experimental wrapper",
)
def test_keras_in_graph_mode_is_compared(compare):
  code, output, _ = compare("--without", "keras_program.py")
  assert code == 0 and "after each of 8 steps" in output, output
  code, output, _ = compare("keras_program.py", "migrated")
  assert code == 2 and "as it is: The program uses mp_compat as it is" in output, output


@pytest.mark.slow
def test_each_run_reads_standard_input(compare, tmp_path):
  command = ["-m", "mp_compat", "compare", "--runs", "original,mp_compat", "program.py", "input"]
  assert "the same bits" in testing.run_python(*command, input="some input", cwd=str(tmp_path)).stdout


@pytest.mark.slow
def test_interrupt_puts_folders_back(tmp_path):
  (tmp_path / "folder").mkdir()
  (tmp_path / "folder" / "kept").write_text("before")
  (tmp_path / "program.py").write_text(
    "import os, time\nopen('folder/kept', 'w').write(str(os.getpid()))\ntime.sleep(600)\n"
  )
  command = [sys.executable, "-m", "mp_compat", "compare", "--restore", "folder", "program.py"]
  kept = tmp_path / "folder" / "kept"
  with subprocess.Popen(
    command,
    cwd=str(tmp_path),
    env=testing.environment(),
    preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
  ) as process:
    while not kept.exists() or not kept.read_text().isdigit():
      time.sleep(0.1)
    program = int(kept.read_text())
    process.send_signal(signal.SIGINT)
    assert process.wait() == 130
  assert kept.read_text() == "before" and os.listdir(str(tmp_path / "folder")) == ["kept"]
  with pytest.raises(ProcessLookupError):
    os.kill(program, 0)


@pytest.mark.parametrize(
  "arguments, words",
  [
    ([], "expected a script, or -m and a module"),
    (["--runs", "original", "x.py"], "expected at least two of"),
    (["--runs", "again,original", "x.py"], "in this order"),
    (["--steps", "0", "x.py"], "expected a number of at least 1"),
    pytest.param(["--json", "no/such/file", "x.py"], "No such file or directory", marks=pytest.mark.slow),
  ],
)
def test_invalid_arguments_are_rejected(arguments, words, capsys):
  try:
    assert command_line.main(["compare", *arguments]) == 2
  except SystemExit as error:
    assert error.code == 2
  assert words in capsys.readouterr().err


class TestFolders:
  def test_folders_are_put_back_after_errors(self, tmp_path):
    existing, absent = tmp_path / "existing", tmp_path / "absent"
    (existing / "inner").mkdir(parents=True)
    (existing / "inner" / "file").write_text("before")
    folders = processes.Folders([str(existing), str(absent), str(existing / "inner"), str(existing)])
    with pytest.raises(RuntimeError), folders.kept():
      for _ in range(2):
        folders.copy_back()
        assert (existing / "inner" / "file").read_text() == "before" and not absent.exists()
        (existing / "inner" / "file").write_text("changed")
        absent.mkdir()
      raise RuntimeError
    assert (existing / "inner" / "file").read_text() == "before"
    assert os.listdir(str(tmp_path)) == ["existing"]

  def test_leftover_folders_are_reported(self, tmp_path):
    (tmp_path / ("folder" + processes.KEPT)).mkdir()
    with pytest.raises(processes.CannotRunError, match="was killed"), processes.Folders(
      [str(tmp_path / "folder")]
    ).kept():
      pass

  def test_files_are_rejected_and_stay(self, tmp_path):
    (tmp_path / "file").write_text("before")
    with pytest.raises(processes.CannotRunError, match="is a file"), processes.Folders([str(tmp_path / "file")]).kept():
      pass
    assert (tmp_path / "file").read_text() == "before"

  def test_folders_that_cannot_be_renamed_stay(self, tmp_path, monkeypatch):
    for name in ("a", "b"):
      (tmp_path / name).mkdir()
      (tmp_path / name / "file").write_text("before")
    rename = os.rename

    def fail(source, target):
      if str(source).endswith("b"):
        raise PermissionError(source)
      rename(source, target)

    monkeypatch.setattr(os, "rename", fail)
    with pytest.raises(PermissionError), processes.Folders([str(tmp_path / "a"), str(tmp_path / "b")]).kept():
      pass
    assert [(tmp_path / name / "file").read_text() for name in ("a", "b")] == ["before"] * 2
    assert sorted(os.listdir(str(tmp_path))) == ["a", "b"]
