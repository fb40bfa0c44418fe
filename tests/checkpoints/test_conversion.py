"""Tests of `checkpoints.convert` and of the command `mp_compat checkpoint`."""

import json
import os
import shutil
import signal

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

pytestmark = pytest.mark.usefixtures("graph")
ADAM = goldens.golden_path("1.15", Case("tensorflow", "adam"))


@pytest.mark.matrix
@pytest.mark.parametrize(
  "to", ["mp_compat", "tensorflow", "plain"] + ["contrib"] * (tf.__version__ < "2")
)
@pytest.mark.parametrize("version, case", goldens.SESSIONS)
def test_saver_restores_converted_checkpoint(version, case, to, tmp_path):
  path = str(tmp_path / "converted")
  if case.control_flow == 2 and case.scope and case.optimizer == "adam":
    with pytest.raises(ValueError, match='(?s)--name-map FILE.*"head/beta1_power": "b'):
      checkpoints.convert(goldens.golden_path(version, case), path, to)
    return
  found = checkpoints.convert(goldens.golden_path(version, case), path, to)
  saved = goldens.load_expected_renamed(version, case, "saved")
  values = goldens.rename_to_ours(goldens.restore(to, case, path, tf.train.Saver), case)
  assert found.path == path and "converted.unfinished" not in os.listdir(str(tmp_path))
  for name in set(values) & set(saved):  # counters have different dtypes
    np.testing.assert_array_equal(values[name], saved[name])
  assert set(values) - set(saved) <= {"bad_steps", "head/bad_steps"} | (
    {"current_loss_scale", "good_steps"} if case.writer == "plain" else set()
  )


def test_convert_does_not_overwrite_files(tmp_path):
  target = str(tmp_path / "out")
  checkpoints.convert(ADAM, target, "plain")
  before = {name: (tmp_path / name).read_bytes() for name in os.listdir(str(tmp_path))}
  assert sorted(before) == ["checkpoint", "out.data-00000-of-00001", "out.index"]
  for other in [ADAM, target]:
    with pytest.raises(ValueError, match="exists and is not overwritten"):
      checkpoints.convert(ADAM, other, "mp_compat")
  assert before == {
    name: (tmp_path / name).read_bytes() for name in os.listdir(str(tmp_path))
  }


def train_in_session(folder, wrap):
  """Trains with Adam for 3 steps in a MonitoredTrainingSession; returns `global_step`
  and `beta1_power` at the end.
  """
  with tf.Graph().as_default():
    training = testing.Training()
    inner = tf.train.AdamOptimizer(0.1)
    train_op = wrap(inner).minimize(training.loss, training.global_step)
    power = inner._get_beta_accumulators()[0]
    with tf.train.MonitoredTrainingSession(
      checkpoint_dir=folder, log_step_count_steps=None
    ) as sess:
      for _ in range(3):
        sess.run(train_op, {training.x: testing.FINITE})
      return sess.run([training.global_step, power])


@pytest.mark.parametrize(
  "earlier", [False, True], ids=["new_folder", "folder_with_checkpoint"]
)
def test_session_continues_from_converted_checkpoint(earlier, tmp_path):
  source, target = str(tmp_path / "source"), str(tmp_path / "target")
  train_in_session(source, lambda inner: inner)
  if earlier:
    train_in_session(target, lambda inner: testing.Optimizer(inner, "dynamic"))
  path = os.path.join(target, "converted-3")
  checkpoints.convert(source, path, "mp_compat")
  assert (
    tf.train.latest_checkpoint(target) == path
    and checkpoints.inspect(target).path == path
  )
  state = tf.train.get_checkpoint_state(target)
  assert len(state.all_model_checkpoint_paths) == (3 if earlier else 1)
  step, power = train_in_session(
    target, lambda inner: testing.Optimizer(inner, "dynamic")
  )
  assert step == 6 and power == pytest.approx(0.9**7)


def test_convert_removes_wrong_files(tmp_path, monkeypatch):
  read = files.Checkpoint.read

  def read_wrongly(checkpoint, name):
    value = read(checkpoint, name)
    return value + 1 if ".unfinished" in checkpoint.path and name == "w" else value

  monkeypatch.setattr(files.Checkpoint, "read", read_wrongly)
  with pytest.raises(
    tf.errors.DataLossError, match="w in .* differs from the value that was written"
  ):
    checkpoints.convert(ADAM, str(tmp_path / "out"), "plain")
  assert os.listdir(str(tmp_path)) == []


def test_convert_rejects_object_based_checkpoint(tmp_path):
  source = goldens.golden_path("1.15", Case("tensorflow", "adam", kind="objects"))
  found = checkpoints.inspect(source)
  assert found.naming_scheme == "object-based" and len(found.state) == 2
  with pytest.raises(
    ValueError,
    match="written by tf.train.Checkpoint. Its names are the same in every naming scheme",
  ):
    checkpoints.convert(source, str(tmp_path / "out"), "plain")


def test_command_line_inspects_and_converts(tmp_path, capsys):
  target = str(tmp_path / "out")
  assert command_line.main(["checkpoint", "inspect", ADAM]) == 0
  title, *lines = capsys.readouterr().out.splitlines()
  assert title == ADAM + ": tensorflow"
  scale = checkpoints.inspect(ADAM).state["current_loss_scale"]
  assert ["current_loss_scale", "float32", "[]", "=", str(scale)] in [
    line.split() for line in lines
  ]
  assert ["cond_1/beta1_power", "float32"] in [line.split()[:2] for line in lines]
  assert (
    command_line.main(["checkpoint", "convert", ADAM, target, "--to", "plain"]) == 0
  )
  assert capsys.readouterr().out.splitlines()[0] == target + ": plain"
  assert (
    command_line.main(["checkpoint", "convert", ADAM, target, "--to", "plain"]) == 2
  )
  assert "exists and is not overwritten" in capsys.readouterr().err
  assert command_line.main(["checkpoint", "inspect", str(tmp_path)]) == 0
  assert capsys.readouterr().out.splitlines()[0] == target + ": plain"
  assert command_line.main(["checkpoint", "inspect", str(tmp_path / "missing")]) == 2
  assert capsys.readouterr().err.startswith(
    "mp_compat checkpoint inspect: There is no checkpoint at "
  )


KILLED = """
import os, signal, sys
import tensorflow.compat.v1 as tf
from mp_compat import checkpoints

source, target, moves = sys.argv[1], sys.argv[2], int(sys.argv[3])
rename = tf.gfile.Rename

def rename_until_killed(*args, **kwargs):
  global moves
  if not moves:
    os.kill(os.getpid(), signal.SIGKILL)
  moves -= 1
  rename(*args, **kwargs)

tf.gfile.Rename = rename_until_killed
checkpoints.convert(source, target, "plain")
"""


@pytest.mark.matrix
@pytest.mark.parametrize("moves", [0, 1])
def test_killed_conversion_leaves_no_checkpoint(moves, tmp_path):
  target = str(tmp_path / "model")
  killed = testing.run_python("-c", KILLED, ADAM, target, moves, check=False)
  assert killed.returncode == -signal.SIGKILL and not os.path.exists(target + ".index")
  assert any(".unfinished" in name for name in os.listdir(str(tmp_path)))
  checkpoints.convert(ADAM, target, "plain")
  names = [name for name in os.listdir(str(tmp_path)) if ".unfinished" not in name]
  assert sorted(names) == ["checkpoint", "model.data-00000-of-00001", "model.index"]


@pytest.mark.matrix
def test_conversion_completes_one_killed_before_it_was_listed(tmp_path):
  target = str(tmp_path / "model")
  program = KILLED.replace("tf.gfile.Rename", "tf.train.update_checkpoint_state")
  killed = testing.run_python("-c", program, ADAM, target, 0, check=False)
  assert killed.returncode == -signal.SIGKILL
  assert tf.train.latest_checkpoint(str(tmp_path)) is None
  checkpoints.convert(ADAM, target, "plain")
  assert tf.train.latest_checkpoint(str(tmp_path)) == target


@pytest.mark.parametrize("to", ["mp_compat", "plain"])
def test_weight_in_scope_of_conditional_keeps_its_name(to, tmp_path):
  path, target = str(tmp_path / "model"), str(tmp_path / "out")
  expected = {"cond/kernel": 1.0, "kernel": 2.0}
  with testing.control_flow(1):
    tf.cond(tf.placeholder_with_default(True, []), lambda: 1.0, lambda: 2.0)
    for name, value in expected.items():
      tf.get_variable(name, initializer=value, use_resource=True)
    tf.get_variable("current_loss_scale", initializer=8.0, trainable=False)
  with testing.initialized_session() as sess:
    tf.train.Saver().save(sess, path)
  checkpoints.convert(path, target, to)
  reader = tf.train.load_checkpoint(target)
  assert {name: reader.get_tensor(name) for name in expected} == expected


def test_variable_of_program_named_as_count_raises(tmp_path):
  path = str(tmp_path / "model")
  goldens.save_variables(
    path, {"current_loss_scale": np.float32(8), "good_steps": np.float32(7.75)}
  )
  with pytest.raises(ValueError, match="good_steps is 7.75, which is no int64"):
    checkpoints.convert(path, str(tmp_path / "out"), like=path)


def test_name_map_gives_names_that_are_not_certain(tmp_path, capsys):
  source, like, target = [str(tmp_path / name) for name in ("source", "like", "out")]
  goldens.save_variables(
    source, {"beta1_power": np.float32(1), "cond_1/beta1_power": np.float32(2)}
  )
  goldens.save_variables(
    like, {"beta1_power": np.float32(0), "beta1_power_1": np.float32(9)}
  )
  with pytest.raises(ValueError, match="(?s)--name-map FILE.*{.*beta1_power_1"):
    checkpoints.convert(source, target, like=like)
  with pytest.raises(
    ValueError, match="got nothing as beta1_power. It has: beta1_power"
  ):
    checkpoints.convert(source, target, like=like, name_map={"beta1_power": "nothing"})
  names = {"beta1_power": "cond_1/beta1_power", "beta1_power_1": "beta1_power"}
  (tmp_path / "names.json").write_text(json.dumps(names))
  for index, option in enumerate([["--like", like], ["--to", "plain"]]):
    out = "{}{}".format(target, index)
    command = ["checkpoint", "convert", source, out, *option]
    assert command_line.main(command) == 2
    command += ["--name-map", str(tmp_path / "names.json")]
    assert command_line.main(command) == 0
    reader = tf.train.load_checkpoint(out)
    assert [reader.get_tensor(name) for name in sorted(names)] == [2, 1]
  assert "beta1_power" in capsys.readouterr().err


@pytest.mark.parametrize(
  "names, got",
  [
    ({"w": "w", "v": "w"}, "got w as v"),
    ({"w": "w", "unknown": "b"}, "got b as unknown"),
  ],
)
def test_name_map_with_wrong_names_raises(names, got, tmp_path):
  with pytest.raises(ValueError, match="names to write, each once, but " + got):
    checkpoints.convert(ADAM, str(tmp_path / "out"), like=ADAM, name_map=names)
  assert os.listdir(str(tmp_path)) == []


def test_damaged_meta_file_is_ignored(tmp_path):
  source, target = str(tmp_path / "source"), str(tmp_path / "target")
  goldens.copy_golden(Case("tensorflow", "adam"), source)
  (tmp_path / "source.meta").write_bytes(b"\xff" * 30)
  found = checkpoints.convert(source, target, "mp_compat")
  assert "beta1_power" in found.variables


def test_values_of_other_dtypes_and_shapes_differ(tmp_path):
  path = str(tmp_path / "model")
  values = {"a": np.float32(0), "b": np.float32(0), "int": np.int32(0)}
  goldens.save_variables(path, dict(values, vector=np.zeros([1], np.float32)))
  checkpoint = files.Checkpoint(path)
  for other, is_equal in [("b", True), ("int", False), ("vector", False)]:
    assert checkpoint.have_equal_values(["a", other]) == is_equal


@pytest.mark.parametrize("part", [".index", ".data-00000-of-00001", ".meta"])
def test_part_of_checkpoint_is_rejected(part, tmp_path):
  tf.get_variable("w", [])
  saver = tf.train.Saver()
  with testing.initialized_session() as sess:
    path = saver.save(sess, str(tmp_path / "model.ckpt-5"))
    for read in [
      checkpoints.inspect,
      checkpoints.name_map,
      lambda path: checkpoints.convert(path, str(tmp_path / "out"), "plain"),
    ]:
      with pytest.raises(
        ValueError, match="There is no checkpoint at .*without .index"
      ):
        read(path + part)
    with mp_compat.install(), pytest.raises(ValueError, match="There is no checkpoint"):
      saver.restore(sess, path + part)
  assert os.path.exists(path + part) and not os.path.exists(str(tmp_path / "out.index"))


def test_empty_checkpoint_is_rejected(tmp_path):
  # is read as a checkpoint in the V1 format
  shutil.copyfile(ADAM + ".index", str(tmp_path / "model"))
  with pytest.raises(
    tf.errors.DataLossError, match="model is truncated or corrupt: it has no variables"
  ):
    checkpoints.convert(str(tmp_path / "model"), str(tmp_path / "out"), "plain")


@pytest.mark.parametrize("folder", ["a*b", "a?b"])
def test_wildcards_in_paths_are_kept(folder, tmp_path):
  target = str(tmp_path / folder / "model")
  converted = checkpoints.convert(ADAM, target, "plain")
  assert converted.path == target and os.listdir(str(tmp_path)) == [folder]
  assert (
    checkpoints.convert(target, str(tmp_path / folder / "again"), "plain").variables
    == converted.variables
  )


def test_brackets_in_paths_are_rejected(tmp_path):
  with pytest.raises(ValueError, match="Expected a path without brackets"):
    checkpoints.convert(ADAM, str(tmp_path / "a*b[c]" / "model"), "plain")
  assert os.listdir(str(tmp_path)) == []
  for part in (".index", ".data-00000-of-00001"):
    shutil.copyfile(ADAM + part, str(tmp_path / "model[1]") + part)
  with pytest.raises(ValueError, match="Expected a path without brackets"):
    checkpoints.inspect(str(tmp_path / "model[1]"))


def test_path_not_in_utf8_is_reported(tmp_path, capsys):
  path = os.fsdecode(os.fsencode(str(tmp_path)) + b"/m\xff")
  to = ["--to", "plain"]
  for arguments in (
    ["inspect", path],
    ["convert", path, "out", *to],
    ["convert", ADAM, path, *to],
  ):
    assert command_line.main(["checkpoint"] + arguments) == 2
    assert "can't encode character" in capsys.readouterr().err
  assert os.listdir(str(tmp_path)) == []


def train_with_conditionals(wrap, path, restore_from=None):
  """Trains with Adam in a graph that has other conditionals, and saves; returns the
  values of all variables.
  """
  with testing.control_flow(1), tf.Graph().as_default(), testing.session() as sess:
    x = tf.placeholder(tf.float32, [2])
    loss = tf.cond(x[0] > 0, lambda: x * 1.0, lambda: x * 2.0)
    loss *= tf.cond(x[1] > 0, lambda: x * 1.0, lambda: x * 2.0)
    w = tf.get_variable(
      "w", initializer=np.array([1.0, 2.0], np.float32), use_resource=True
    )
    train_op = wrap(tf.train.AdamOptimizer(0.1)).minimize(tf.reduce_sum(w * w * loss))
    saver = tf.train.Saver()
    sess.run(tf.global_variables_initializer())
    if restore_from:
      saver.restore(sess, restore_from)
    for value in (1.0, 1e30, 2.0):
      sess.run(train_op, {x: [value, 1.0]})
    saver.save(sess, path)
    return testing.values(sess)


WRAPS = {
  "tensorflow": lambda opt: testing.native.MixedPrecisionLossScaleOptimizer(
    opt, "dynamic"
  ),
  "mp_compat": lambda opt: mp_compat.MixedPrecisionLossScaleOptimizer(opt, "dynamic"),
  "plain": lambda opt: opt,
}


@pytest.mark.matrix
@pytest.mark.parametrize(
  "source, to",
  [
    ("tensorflow", "mp_compat"),
    ("mp_compat", "tensorflow"),
    ("plain", "tensorflow"),
    ("tensorflow", "plain"),
  ],
)
def test_convert_like_supports_conditionals(source, to, tmp_path):
  paths = {name: str(tmp_path / name) for name in (source, to)}
  for name, path in paths.items():
    train_with_conditionals(WRAPS[name], path)
  out = str(tmp_path / "out")
  found = checkpoints.convert(paths[source], out, like=paths[to])
  assert set(found.variables) == set(checkpoints.inspect(paths[to]).variables)
  assert "cond_3/beta1_power" in found.variables or to != "tensorflow"
  continued = train_with_conditionals(WRAPS[to], str(tmp_path / "continued"), out)
  expected = train_with_conditionals(
    WRAPS[source], str(tmp_path / "same"), paths[source]
  )
  assert set(continued) & set(expected) >= {"w:0", "w/Adam:0", "beta1_power:0"}
  if "plain" not in (source, to):  # plain training skips no steps
    np.testing.assert_equal(continued, expected)


@pytest.mark.parametrize(
  "old, source, conditional",
  [
    ("tensorflow", "installed", "cond_7/"),
    ("installed", "tensorflow", "cond_7/"),
    ("installed", "tensorflow", "cond_3/"),
    ("installed", "plain", "cond_7/"),
  ],
)
def test_convert_like_supports_second_names(old, source, conditional, tmp_path):
  paths = {name: str(tmp_path / name) for name in ("tensorflow", "installed", "plain")}
  for name in ("tensorflow", "plain"):
    train_with_conditionals(WRAPS[name], paths[name])
  with mp_compat.install():
    train_with_conditionals(WRAPS["mp_compat"], paths["installed"], paths["tensorflow"])
  # as a program with another number of conditionals
  for name in ("tensorflow", "plain"):
    reader = tf.train.load_checkpoint(paths[name])
    names = reader.get_variable_to_shape_map()
    goldens.save_variables(
      paths[name],
      {key.replace("cond_3/", conditional): reader.get_tensor(key) for key in names},
    )
  converted = checkpoints.convert(paths[source], str(tmp_path / "out"), like=paths[old])
  assert set(converted.variables) == set(checkpoints.inspect(paths[old]).variables)
  powers = {
    tf.train.load_variable(converted.path, name)
    for name in converted.variables
    if "beta1_power" in name
  }
  assert powers == {
    tf.train.load_variable(
      paths[source],
      "beta1_power" if source != "tensorflow" else conditional + "beta1_power",
    )
  }


def test_convert_requires_naming_scheme_or_like(tmp_path):
  for arguments in ({}, dict(to="plain", like=ADAM)):
    with pytest.raises(ValueError, match="Expected either a naming scheme"):
      checkpoints.convert(ADAM, str(tmp_path / "out"), **arguments)
  with pytest.raises(
    ValueError,
    match="Not found in .*: b/Momentum, w/Momentum. It has: .*--name-map FILE",
  ):
    checkpoints.convert(
      ADAM,
      str(tmp_path / "out"),
      like=goldens.golden_path("1.15", Case("tensorflow", "momentum")),
    )


def test_convert_keeps_strings(tmp_path):
  path, converted = str(tmp_path / "model"), str(tmp_path / "converted")
  goldens.save_variables(path, {"words": [b"", b"one", b"\0two"]})
  checkpoints.convert(path, converted, "mp_compat")
  assert tf.train.load_variable(converted, "words").tolist() == [b"", b"one", b"\0two"]


@pytest.mark.parametrize("dtype", [tf.qint8, tf.quint8, tf.qint32], ids=str)
def test_convert_keeps_quantized_dtypes(dtype, tmp_path):
  numpy_dtype = {tf.qint8: np.int8, tf.quint8: np.uint8, tf.qint32: np.int32}[dtype]
  value = tf.bitcast(tf.constant([1, 2, 3], numpy_dtype), dtype)
  path = str(tmp_path / "model")
  save = tf.raw_ops.SaveV2(
    prefix=path, tensor_names=["q"], shape_and_slices=[""], tensors=[value]
  )
  converted = str(tmp_path / "converted")
  restored = tf.raw_ops.RestoreV2(
    prefix=converted, tensor_names=["q"], shape_and_slices=[""], dtypes=[dtype]
  )
  with testing.session() as sess:
    sess.run(save)
    found = checkpoints.convert(path, converted, "mp_compat")
    assert found.variables["q"] == (dtype, (3,))
    values = sess.run(tf.bitcast(restored[0], numpy_dtype))
  assert values.tolist() == [1, 2, 3] and values.dtype == numpy_dtype
