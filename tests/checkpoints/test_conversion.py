"""checkpoints.convert and the command `checkpoint`."""

import os
import subprocess
import sys
import time

import numpy as np
import pytest

import mp_compat
from mp_compat import __main__ as command_line
from mp_compat import checkpoints
from mp_compat.checkpoints import files
from tests import testing
from tests.checkpoints import goldens
from tests.checkpoints.golden_cases import Case
from tests.testing import tf


@pytest.fixture(autouse=True)
def _graph():
  with tf.Graph().as_default():
    yield


@pytest.mark.parametrize("to", ["mp_compat", "tensorflow", "plain"] + ["contrib"] * (tf.__version__ < "2"))
@pytest.mark.parametrize("version, case", goldens.SESSIONS)
def test_a_converted_checkpoint_needs_tensorflows_saver_only(version, case, to, tmp_path):
  path = str(tmp_path / "converted")
  found = checkpoints.convert(goldens.golden(version, case), path, to)
  saved = goldens.expected_here(version, case, "saved")
  values = {goldens.here(name, case): value for name, value in goldens.restored(to, case, path, tf.train.Saver).items()}
  assert found.path == path and "converted.unfinished" not in os.listdir(str(tmp_path))
  for name in set(values) & set(saved):  # counts have other dtypes
    np.testing.assert_array_equal(values[name], saved[name])
  assert set(values) - set(saved) <= {"bad_steps", "head/bad_steps"} | (
      {"current_loss_scale", "good_steps"} if case.writer == "plain" else set())


def test_nothing_is_overwritten(tmp_path):
  source, target = goldens.golden("1.15", Case("tensorflow", "adam")), str(tmp_path / "out")
  checkpoints.convert(source, target, "plain")
  before = {name: (tmp_path / name).read_bytes() for name in os.listdir(str(tmp_path))}
  assert sorted(before) == ["out.data-00000-of-00001", "out.index"]
  for other in [source, target]:
    with pytest.raises(ValueError, match="There is something at .* already, which is not overwritten"):
      checkpoints.convert(source, other, "mp_compat")
  assert before == {name: (tmp_path / name).read_bytes() for name in os.listdir(str(tmp_path))}


def test_what_was_written_wrongly_is_not_left_there(tmp_path, monkeypatch):
  read = files.read

  def read_wrongly(reader, path, name):
    value = read(reader, path, name)
    return value + 1 if ".unfinished" in path and name == "w" else value

  monkeypatch.setattr(files, "read", read_wrongly)
  with pytest.raises(tf.errors.DataLossError, match="w of .* was not written as it should be"):
    checkpoints.convert(goldens.golden("1.15", Case("tensorflow", "adam")), str(tmp_path / "out"), "plain")
  assert os.listdir(str(tmp_path)) == []


def test_checkpoints_of_objects_need_no_conversion(tmp_path):
  source = goldens.golden("1.15", Case("tensorflow", "adam", kind="objects"))
  found = checkpoints.inspect(source)
  assert found.dialect == "object-based" and len(found.state) == 2
  with pytest.raises(ValueError, match="written by tf.train.Checkpoint, whose names are the same in every dialect"):
    checkpoints.convert(source, str(tmp_path / "out"), "plain")


def command(*arguments):
  return [sys.executable, "-W", "ignore", "-m", "mp_compat", "checkpoint"] + list(arguments)


def run(*arguments):
  return subprocess.run(command(*arguments), env=testing.environment(), capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_the_command_line_inspects_and_converts(tmp_path):
  source, target = goldens.golden("1.15", Case("tensorflow", "adam")), str(tmp_path / "out")
  told = run("inspect", source)
  assert told.returncode == 0 and told.stdout.splitlines()[0] == source + ": tensorflow"
  state = checkpoints.inspect(source).state
  assert any(line.split() == ["current_loss_scale", "float32", "[]", "=", str(state["current_loss_scale"])]
             for line in told.stdout.splitlines())
  assert any(line.split()[:2] == ["cond_1/beta1_power", "float32"] for line in told.stdout.splitlines())
  converted = run("convert", source, target, "--to", "plain")
  assert converted.returncode == 0 and converted.stdout.splitlines()[0] == target + ": plain", converted.stderr
  again = run("convert", source, target, "--to", "plain")
  assert again.returncode == 2 and "There is something at" in again.stderr and "Traceback" not in again.stderr


@pytest.mark.slow
def test_a_conversion_that_is_killed_leaves_nothing_half_written(tmp_path):
  source = str(tmp_path / "big")
  with tf.Graph().as_default(), testing.session() as sess:
    for i in range(40):
      tf.get_variable("v{}".format(i), [100000], initializer=tf.zeros_initializer())
    sess.run(tf.global_variables_initializer())
    tf.train.Saver().save(sess, source, write_meta_graph=False)
  target = str(tmp_path / "out" / "model")
  begin = time.monotonic()
  os.makedirs(os.path.dirname(target))
  subprocess.run(command("convert", source, target + "-whole", "--to", "plain"), env=testing.environment(), check=True,
                 stdout=subprocess.DEVNULL)
  whole = time.monotonic() - begin
  ended = 0
  for attempt in range(10):
    process = subprocess.Popen(command("convert", source, target, "--to", "plain"), env=testing.environment(),
                               stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    time.sleep(whole * (.6 + .05 * attempt))
    process.kill()
    process.wait()
    if tf.train.checkpoint_exists(target):
      ended += 1
      reader = tf.train.load_checkpoint(target)
      assert all((reader.get_tensor("v{}".format(i)) == 0.).all() for i in range(40))
      for part in os.listdir(os.path.dirname(target)):
        if part.startswith("model.") and not part.endswith(".unfinished"):
          os.remove(os.path.join(os.path.dirname(target), part))
  assert ended < 10
  checkpoints.convert(source, target, "plain")
  assert not [name for name in os.listdir(os.path.dirname(target)) if name.endswith(".unfinished")]


def test_the_command_tells_of_a_checkpoint_that_is_not_there_in_one_line(tmp_path, capsys):
  assert command_line.main(["checkpoint", "inspect", str(tmp_path)]) == 2
  assert capsys.readouterr().err.startswith("mp_compat checkpoint inspect: There is no checkpoint at ")


def conditional_training(wrap, path, restore_from=None):
  """Adam on two variables in a graph that has conditionals of its own; all variables after going on."""
  with testing.control_flow(1), tf.Graph().as_default(), testing.session() as sess:
    x = tf.placeholder(tf.float32, [2])
    loss = tf.cond(x[0] > 0, lambda: x * 1., lambda: x * 2.)
    loss *= tf.cond(x[1] > 0, lambda: x * 1., lambda: x * 2.)
    w = tf.get_variable("w", initializer=np.array([1., 2.], np.float32), use_resource=True)
    train_op = wrap(tf.train.AdamOptimizer(.1)).minimize(tf.reduce_sum(w * w * loss))
    saver = tf.train.Saver()
    sess.run(tf.global_variables_initializer())
    if restore_from:
      saver.restore(sess, restore_from)
    for value in (1., 1e30, 2.):
      sess.run(train_op, {x: [value, 1.]})
    saver.save(sess, path)
    return {testing.plain_name(variable): value
            for variable, value in zip(tf.global_variables(), sess.run(tf.global_variables()))}


@pytest.mark.parametrize("source, to", [("tensorflow", "mp_compat"), ("mp_compat", "tensorflow"),
                                        ("plain", "tensorflow"), ("tensorflow", "plain")])
def test_a_checkpoint_is_converted_for_a_program_with_conditionals_of_its_own(source, to, tmp_path):
  wraps = {"tensorflow": lambda opt: testing.native.MixedPrecisionLossScaleOptimizer(opt, "dynamic"),
           "mp_compat": lambda opt: mp_compat.MixedPrecisionLossScaleOptimizer(opt, "dynamic"),
           "plain": lambda opt: opt}
  paths = {name: str(tmp_path / name) for name in wraps}
  for name in (source, to):
    conditional_training(wraps[name], paths[name])
  out = str(tmp_path / "out")
  found = checkpoints.convert(paths[source], out, like=paths[to])
  assert set(found.variables) == set(checkpoints.inspect(paths[to]).variables)
  assert "cond_3/beta1_power" in found.variables or to != "tensorflow"
  with open(out + ".meta", "rb") as ours, open(paths[to] + ".meta", "rb") as theirs:
    assert ours.read() == theirs.read()
  went_on = conditional_training(wraps[to], str(tmp_path / "on"), out)
  expected = conditional_training(wraps[source], str(tmp_path / "same"), paths[source])
  assert set(went_on) & set(expected) >= {"w:0", "w/Adam:0", "beta1_power:0"}
  if "plain" not in (source, to):  # which does not skip
    np.testing.assert_equal(went_on, expected)


def test_converting_wants_either_a_dialect_or_a_likeness_of_the_same_model(tmp_path):
  path = goldens.golden("1.15", Case("tensorflow", "adam"))
  for arguments in ({}, dict(to="plain", like=path)):
    with pytest.raises(ValueError, match="Expected either a dialect"):
      checkpoints.convert(path, str(tmp_path / "out"), **arguments)
  with pytest.raises(ValueError, match="does not have these in the same shape: b/Momentum, w/Momentum. Pass"):
    checkpoints.convert(path, str(tmp_path / "out"), like=goldens.golden("1.15", Case("tensorflow", "momentum")))
