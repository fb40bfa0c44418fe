"""Checkpoints of every dialect, written by every TensorFlow (tests/golden_cases.py), restored by this one."""

import os
import pathlib
import shutil
import subprocess
import sys
import time

import numpy as np
import pytest

import mp_compat
from mp_compat import __main__ as command_line
from mp_compat import checkpoints
from tests import golden_cases
from tests import testing
from tests.golden_cases import Case
from tests.testing import tf

VERSIONS = sorted(name for name in os.listdir(golden_cases.GOLDENS) if name[0].isdigit())
GOLDENS = [pytest.param(version, case, id=version + "-" + case.name)
           for version in VERSIONS for case in golden_cases.cases(version)]
BY_NAME = [param for param in GOLDENS if param.values[1].kind != "objects"]
# The first and the last version: what those between them write is the same.
SESSIONS = [param for param in GOLDENS if param.values[0] in ("1.15", "2.21") and param.values[1].kind == "session"]


@pytest.fixture(autouse=True)
def _graph():
  with tf.Graph().as_default():
    yield


@pytest.fixture(name="expected", scope="module")
def _expected():
  """What the writer's variables were: {name: value} for a version, a case, and "saved" or "after"."""
  files = {version: np.load(os.path.join(golden_cases.GOLDENS, version, "expected.npz")) for version in VERSIONS}

  def expected(version, case, when):
    prefix = "{}/{}/".format(case.name, when)
    return {key[len(prefix):]: files[version][key] for key in files[version].files if key.startswith(prefix)}

  return expected


def golden(version, case):
  return os.path.join(golden_cases.GOLDENS, version, case.name)


def here(name, case):
  """What a variable of the writer's is called here. Adam's powers are as they were without loss scaling."""
  scope, last = case.scope + "/" if case.scope else "", name.split("/")[-1]
  if last.startswith("beta"):
    return scope + last[:len("beta1_power")] + ("_1" if name.startswith("cond_3/") or last.endswith("_1") else "")
  return scope + "current_loss_scale" if last == "loss_scale" else name


def assert_equal(values, expected):
  assert sorted(values) == sorted(expected)
  for name, value in expected.items():
    assert values[name].tobytes() == value.tobytes(), (name, values[name], value)


def restored(writer, case, path, saver=checkpoints.Saver, feeds=(), control_flow=1):
  """All variables after restoring into a graph with this writer's optimizer, and going on for some steps."""
  with testing.control_flow(control_flow), tf.Graph().as_default():
    training = golden_cases.Training(case._replace(writer=writer))
    restorer = saver()
    with testing.session() as sess:
      restorer.restore(sess, path)
      return training.run(sess, feeds)


@pytest.mark.parametrize("version, case", BY_NAME)
def test_what_others_wrote_is_restored_and_goes_on_to_the_bit(version, case, expected):
  saved = {here(name, case): value for name, value in expected(version, case, "saved").items()
           if not name.endswith("bad_steps")}
  if case.writer == "plain":
    saved.update(current_loss_scale=np.float32(2. ** 15), good_steps=np.int64(0))
  elif case.writer == "contrib":
    counts = [name for name in saved if name.endswith("good_steps")]
    saved.update((name, saved[name].astype(np.int64)) for name in counts)
  assert_equal(restored("mp_compat", case, golden(version, case)), saved)
  if case.writer in ("tensorflow", "mp_compat"):
    after = {here(name, case): value for name, value in expected(version, case, "after").items()}
    assert_equal(restored("mp_compat", case, golden(version, case), feeds=golden_cases.FEEDS[golden_cases.BEFORE:]),
                 after)


@pytest.mark.parametrize("version, case", SESSIONS)
def test_or_without_loss_scaling(version, case, expected):
  saved = {here(name, case): value for name, value in expected(version, case, "saved").items()}
  assert_equal(restored("plain", case, golden(version, case)),
               {name: value for name, value in saved.items() if not name.endswith(("loss_scale", "_steps"))})


@pytest.mark.parametrize("control_flow", [1, 2])
@pytest.mark.parametrize("scope", ["", "head"])
@pytest.mark.parametrize("optimizer", sorted(golden_cases.OPTIMIZERS))
def test_what_this_writes_goes_on_with_tensorflows_class_to_the_bit(optimizer, scope, control_flow, tmp_path):
  case = Case("mp_compat", optimizer, 1, scope)
  path, converted = str(tmp_path / case.name), str(tmp_path / "converted")
  saved, after = golden_cases.make(case, str(tmp_path))
  written = checkpoints.convert(path, converted, "tensorflow")
  assert written.dialect == ("tensorflow" if optimizer == "adam" else "mp_compat")
  for saver, source in [(checkpoints.Saver, path), (tf.train.Saver, converted)]:
    for feeds, expected in [((), saved), (golden_cases.FEEDS[golden_cases.BEFORE:], after)]:
      values = restored("tensorflow", case, source, saver, feeds, control_flow)
      assert_equal({here(name, case): value for name, value in values.items()}, expected)


@pytest.mark.parametrize("version", VERSIONS)
def test_what_another_version_wrote_goes_on_with_tensorflows_class(version, expected):
  case = Case("mp_compat", "adam")
  values = restored("tensorflow", case, golden(version, case), feeds=golden_cases.FEEDS[golden_cases.BEFORE:])
  assert_equal({here(name, case): value for name, value in values.items()}, expected(version, case, "after"))


@pytest.mark.parametrize("to", ["mp_compat", "tensorflow", "plain"] + ["contrib"] * (tf.__version__ < "2"))
@pytest.mark.parametrize("version, case", SESSIONS)
def test_a_converted_checkpoint_needs_tensorflows_saver_only(version, case, to, tmp_path, expected):
  path = str(tmp_path / "converted")
  found = checkpoints.convert(golden(version, case), path, to)
  saved = {here(name, case): value for name, value in expected(version, case, "saved").items()}
  values = {here(name, case): value for name, value in restored(to, case, path, tf.train.Saver).items()}
  assert found.path == path and "converted.unfinished" not in os.listdir(str(tmp_path))
  for name in set(values) & set(saved):  # counts have other dtypes
    np.testing.assert_array_equal(values[name], saved[name])
  assert set(values) - set(saved) <= {"bad_steps", "head/bad_steps"} | (
      {"current_loss_scale", "good_steps"} if case.writer == "plain" else set())


@pytest.mark.parametrize("version, case", [param for param in GOLDENS if param.values[1].kind == "objects"])
@pytest.mark.parametrize("writer", ["mp_compat", "tensorflow"])
def test_checkpoints_of_objects_are_consumed_whole_and_go_on_to_the_bit(version, case, writer, expected):
  training = golden_cases.Training(case._replace(writer=writer))
  status = training.checkpoint().restore(golden(version, case))
  with testing.session() as sess:
    sess.run(tf.global_variables_initializer())
    status.assert_consumed().assert_existing_objects_matched().run_restore_ops(sess)
    values = training.run(sess, golden_cases.FEEDS[golden_cases.BEFORE:])
  del values["save_counter"]
  expected = {here(name, case): value for name, value in expected(version, case, "after").items()}
  del expected["save_counter"]
  assert_equal({here(name, case): value for name, value in values.items()}, expected)


def test_state_is_found_in_another_scope(expected):
  case = Case("contrib", "momentum", 1, "head")
  values = restored("mp_compat", case._replace(scope=""), golden("1.15", case))
  saved = expected("1.15", case, "saved")
  assert values["current_loss_scale"] == saved["head/loss_scale"] != 2. ** 15
  assert values["good_steps"] == saved["head/good_steps"] and values["good_steps"].dtype == np.int64


def test_a_directory_of_tensorflows_checkpoints_is_gone_on_with(tmp_path):
  case = Case("tensorflow", "adam")
  for part in (".index", ".data-00000-of-00001"):
    shutil.copyfile(golden("1.15", case) + part, str(tmp_path / "model.ckpt-4") + part)
  (tmp_path / "checkpoint").write_text('model_checkpoint_path: "model.ckpt-4"\n')
  training = golden_cases.Training(case._replace(writer="mp_compat"))
  step = int(np.load(os.path.join(golden_cases.GOLDENS, "1.15", "expected.npz"))[case.name + "/saved/global_step"])
  for expected_step in (step, step + 1):  # from TensorFlow's, then from the one that this wrote
    with tf.train.MonitoredTrainingSession(
        checkpoint_dir=str(tmp_path), scaffold=tf.train.Scaffold(saver=checkpoints.Saver()), save_checkpoint_steps=1,
        save_summaries_steps=None, save_summaries_secs=None, log_step_count_steps=None) as sess:
      assert sess.run(training.global_step) == expected_step
      sess.run(training.train_op, {training.x: golden_cases.FEEDS[0]})
  assert checkpoints.inspect(str(tmp_path)).dialect == "mp_compat"


@pytest.mark.skipif(not hasattr(tf, "estimator"), reason="TensorFlow 2.16 and later have no Estimator")
def test_an_estimator_starts_from_contribs(tmp_path):
  case = Case("contrib", "adam")
  path = golden("1.15", case)

  def model_fn(features, mode):
    training = golden_cases.Training(case._replace(writer="mp_compat"), features["x"])
    saver = checkpoints.Saver()
    scaffold = tf.train.Scaffold(saver=saver, init_fn=lambda _, sess: saver.restore(sess, path))
    return tf.estimator.EstimatorSpec(
        mode, loss=tf.reduce_sum(training.w), train_op=training.train_op, scaffold=scaffold)

  estimator = tf.estimator.Estimator(model_fn, str(tmp_path))
  step, = [int(v) for n, v in checkpoints.inspect(path).state.items() if n == "good_steps"]
  estimator.train(lambda: tf.data.Dataset.from_tensors({"x": golden_cases.FEEDS[0]}))
  assert estimator.get_variable_value("good_steps") in (step + 1, 0)
  assert estimator.get_variable_value("global_step") == np.load(
      os.path.join(golden_cases.GOLDENS, "1.15", "expected.npz"))[case.name + "/saved/global_step"] + 1


@pytest.mark.parametrize("writer", ["tensorflow", "contrib", "plain"])
def test_a_name_map_serves_init_from_checkpoint_and_savers(writer, expected):
  case = Case(writer, "adam")
  path = golden("1.15", case)
  golden_cases.Training(case._replace(writer="mp_compat"))
  names = checkpoints.name_map(path)
  saver = tf.train.Saver(names)
  tf.train.init_from_checkpoint(path, names)
  saved = {here(name, case): value for name, value in expected("1.15", case, "saved").items()}
  mapped = {variable.op.name for variable in names.values()}
  assert set(saved) - mapped <= {"good_steps", "bad_steps"} and ("good_steps" in mapped) == (writer == "tensorflow")
  with testing.session() as sess:
    for restore in [lambda: sess.run(tf.global_variables_initializer()), lambda: saver.restore(sess, path)]:
      restore()
      for variable in names.values():
        assert sess.run(variable).tobytes() == saved[variable.op.name].tobytes()


@pytest.mark.parametrize("use_resource", [False, True])
def test_partitioned_variables_are_put_together_again(use_resource, tmp_path):
  path, whole = str(tmp_path / "whole"), np.arange(12, dtype=np.float32).reshape([6, 2])

  def build(partitioner, wrap):
    with tf.variable_scope("", use_resource=use_resource, partitioner=partitioner):
      table = tf.get_variable("table", [6, 2], initializer=tf.zeros_initializer())
      wrap(tf.train.MomentumOptimizer(.1, .9)).minimize(tf.reduce_sum(tf.square(tf.convert_to_tensor(table))))

  with tf.Graph().as_default(), testing.session() as sess:
    build(None, lambda opt: opt)
    sess.run(tf.global_variables_initializer())
    table, = tf.trainable_variables()
    sess.run(table.initializer, {table.initializer.inputs[1]: whole})
    tf.train.Saver().save(sess, path)
  build(tf.fixed_size_partitioner(3), lambda opt: mp_compat.MixedPrecisionLossScaleOptimizer(opt, "dynamic"))
  saver = checkpoints.Saver()
  with testing.session() as sess:
    saver.restore(sess, path)
    parts = tf.trainable_variables()
    np.testing.assert_array_equal(np.concatenate(sess.run(parts)), whole)
    assert len(parts) == 3 and sess.run(tf.global_variables("current_loss_scale")) == [2. ** 15]


def test_every_replica_is_restored(expected):
  strategy = tf.distribute.MirroredStrategy(testing.TWO_CPUS)
  case = Case("tensorflow", "adam")
  with strategy.scope():
    w = tf.get_variable("w", [3])
    power = tf.get_variable("beta1_power", [])
    saver = checkpoints.Saver([w, power])
  with testing.session() as sess:
    saver.restore(sess, golden("1.15", case))
    saved = expected("1.15", case, "saved")
    for variable, name in [(w, "w"), (power, "cond_1/beta1_power")]:
      copies = strategy.experimental_local_results(variable)
      assert len(copies) == 2
      for copy in copies:
        np.testing.assert_array_equal(sess.run(copy), saved[name])


# --- where checkpoints are -------------------------------------------------------------------------------------------


def copy_golden(case, prefix):
  """Copies a checkpoint that TensorFlow 1.15 wrote."""
  for part in (".index", ".data-00000-of-00001"):
    tf.gfile.Copy(golden("1.15", case) + part, prefix + part, overwrite=True)


@pytest.mark.parametrize("writer", ["tensorflow", "mp_compat"])
def test_a_checkpoint_wins_over_its_directory(writer, tmp_path, expected):
  case, other = Case(writer, "adam"), Case("plain", "momentum")
  prefix, inside = str(tmp_path / "m"), str(tmp_path / "m" / "later")
  (tmp_path / "m").mkdir()
  copy_golden(case, prefix)
  copy_golden(other, inside)
  tf.train.update_checkpoint_state(str(tmp_path / "m"), inside)
  saved = {here(name, case): value for name, value in expected("1.15", case, "saved").items()}
  assert_equal(restored("mp_compat", case, prefix), saved)
  assert checkpoints.inspect(prefix).path == prefix and checkpoints.inspect(str(tmp_path / "m") + "/").path == inside
  assert checkpoints.convert(prefix, str(tmp_path / "plain"), "plain").variables["beta1_power"]
  golden_cases.Training(case._replace(writer="mp_compat"))
  assert "current_loss_scale" in checkpoints.name_map(prefix)


@pytest.mark.skipif(tf.__version__ < "2", reason="TensorFlow 1.15 has no file system in memory")
@pytest.mark.parametrize("writer", ["tensorflow", "mp_compat"])
def test_other_file_systems_hold_checkpoints(writer, expected):
  case, folder = Case(writer, "adam"), "ram://{}".format(writer)
  prefix, converted = folder + "/model-7", folder + "/converted"
  copy_golden(case, prefix)
  saved = {here(name, case): value for name, value in expected("1.15", case, "saved").items()}
  assert_equal(restored("mp_compat", case, prefix), saved)
  assert checkpoints.inspect(prefix).path == prefix
  tf.gfile.Copy(golden("1.15", case) + ".index", prefix + ".meta", overwrite=True)
  assert checkpoints.convert(prefix, converted, like=prefix).path == converted
  assert tf.gfile.Exists(converted + ".meta") and not tf.gfile.Exists(converted + ".unfinished")
  assert_equal(restored("mp_compat", case, converted), saved)
  with pytest.raises(ValueError, match="There is something at ram://.* already"):
    checkpoints.convert(prefix, converted, "plain")


@pytest.mark.parametrize("writer", ["tensorflow", "mp_compat"])
@pytest.mark.parametrize("sharded", [False, True])
def test_checkpoints_in_the_first_format_are_restored(sharded, writer, tmp_path):
  case = Case(writer, "adam")

  def build(case):
    table = tf.get_variable("table", [4, 2], partitioner=tf.fixed_size_partitioner(2))
    return table, golden_cases.Training(case)

  with testing.control_flow(1), tf.Graph().as_default(), testing.session() as sess:
    table, training = build(case)
    sess.run(tf.global_variables_initializer())
    saved = {here(name, case): value for name, value in training.run(sess, golden_cases.FEEDS[:3]).items()}
    whole = sess.run(tf.convert_to_tensor(table))
    saver = tf.train.Saver(write_version=tf.train.SaverDef.V1, sharded=sharded)
    path = saver.save(sess, str(tmp_path / "model.ckpt"))
  assert not tf.gfile.Exists(path + ".index") and ("?????" in path) == sharded
  table, training = build(case._replace(writer="mp_compat"))
  converted = str(tmp_path / "converted")
  assert checkpoints.inspect(path).dialect == writer and checkpoints.inspect(str(tmp_path)).path == path
  checkpoints.convert(path, converted, "mp_compat")
  saver, plain_saver = checkpoints.Saver(), tf.train.Saver()
  init = tf.train.Saver(checkpoints.name_map(path))
  with testing.session() as sess:
    for restore in [lambda: saver.restore(sess, path), lambda: init.restore(sess, path),
                    lambda: plain_saver.restore(sess, converted)]:
      sess.run(tf.global_variables_initializer())
      restore()
      assert_equal({here(name, case): value for name, value in training.run(sess, []).items()}, saved)
      np.testing.assert_array_equal(sess.run(tf.convert_to_tensor(table)), whole)


@pytest.mark.parametrize("writer", ["tensorflow", "mp_compat"])
@pytest.mark.parametrize("as_path", [str.encode, pathlib.Path], ids=["bytes", "Path"])
def test_paths_are_bytes_and_pathlike(as_path, writer, tmp_path, expected):
  case = Case(writer, "adam")
  prefix, target = str(tmp_path / "model-7"), str(tmp_path / "converted")
  copy_golden(case, prefix)
  saved = {here(name, case): value for name, value in expected("1.15", case, "saved").items()}
  assert_equal(restored("mp_compat", case, as_path(prefix)), saved)
  assert checkpoints.inspect(as_path(prefix)).path == prefix
  assert checkpoints.convert(as_path(prefix), as_path(target), like=as_path(prefix)).path == target
  assert_equal(restored("mp_compat", case, target), saved)
  golden_cases.Training(case._replace(writer="mp_compat"))
  assert checkpoints.name_map(as_path(prefix))
  with pytest.raises(ValueError, match="There is something at {} already".format(target)):
    checkpoints.convert(prefix, as_path(target), "plain")


@pytest.mark.parametrize("writer", ["tensorflow", "mp_compat"])
def test_a_saver_def_restores_its_own_variables(writer, expected):
  case = Case(writer, "adam")
  golden_cases.Training(case._replace(writer="mp_compat"))
  saver_def = tf.train.Saver().as_saver_def()
  later = tf.get_variable("later", [])
  saver = checkpoints.Saver(saver_def=saver_def)
  with testing.session() as sess:
    saver.restore(sess, golden("1.15", case))
    saved = {here(name, case): value for name, value in expected("1.15", case, "saved").items()}
    assert_equal(sess.run({v.op.name: v for v in tf.global_variables() if v is not later}), saved)
    assert sess.run(tf.report_uninitialized_variables()).tolist() == [b"later"]


# --- what goes wrong -----------------------------------------------------------------------------------------------


def test_a_weight_that_is_missing_is_named_with_what_there_is():
  tf.get_variable("v", [3])
  with testing.session() as sess, pytest.raises(tf.errors.NotFoundError, match=(
      r"Not found in the checkpoint .*, which has the names of the dialect tensorflow: v\. It has: b, .*cond_1/beta1")):
    checkpoints.Saver().restore(sess, golden("1.15", Case("tensorflow", "adam")))


@pytest.mark.parametrize("writer", ["plain", "mp_compat"])
def test_a_restore_that_fails_assigns_nothing(writer, tmp_path):
  path = str(tmp_path / "model")
  scope = dict(use_resource=writer == "plain", reuse=tf.AUTO_REUSE)
  with tf.Graph().as_default(), testing.session() as sess, tf.variable_scope("", **scope):
    for name, shape, dtype in [("a", [2], tf.float32), ("x", [4], tf.float32), ("y", [2], tf.float32),
                               ("z", [], tf.float64), ("w", [1], tf.float32)]:
      tf.get_variable(name, shape, dtype)
    sess.run(tf.global_variables_initializer())
    tf.train.Saver().save(sess, path)
  with tf.variable_scope("", **scope):
    for name, shape, dtype in [("a", [2], tf.float32), ("x", [2, 2], tf.float32), ("y", [3], tf.float32),
                               ("z", [], tf.float32), ("current_loss_scale", [], tf.float32)]:
      tf.get_variable(name, shape, dtype)
    if writer == "plain":
      tf.get_variable("new", [])
  saver = checkpoints.Saver()
  with testing.session() as sess:
    sess.run(tf.global_variables_initializer())
    before = [value.tobytes() for value in sess.run(tf.global_variables())]
    with pytest.raises(tf.errors.NotFoundError if writer == "plain" else tf.errors.InvalidArgumentError) as told:
      saver.restore(sess, path)
    assert [value.tobytes() for value in sess.run(tf.global_variables())] == before
  said = str(told.value)
  for words in ["Nothing was restored", "x has the shape (2, 2) here, [4] there",
                "y has the shape (3,) here, [2] there", "z has the dtype float32 here, float64 there"]:
    assert words in said, said
  assert ("Not found in the checkpoint" in said) == (writer == "plain") and "current_loss_scale" not in said


def test_another_shape_of_the_same_size_is_asked_for(tmp_path):
  path = str(tmp_path / "model")
  with tf.Graph().as_default(), testing.session() as sess:
    tf.get_variable("cond_1/beta1_power", initializer=np.float32(.5))
    tf.get_variable("v", initializer=np.arange(6, dtype=np.float32))
    sess.run(tf.global_variables_initializer())
    tf.train.Saver().save(sess, path)
  v = tf.get_variable("v", [2, 3])
  power = tf.get_variable("beta1_power", [])
  with testing.session() as sess:
    checkpoints.Saver(reshape=True).restore(sess, path)
    np.testing.assert_array_equal(sess.run(v), [[0, 1, 2], [3, 4, 5]])
    assert sess.run(power) == .5
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"v has the shape \(2, 3\) here, \[6\] there"):
      checkpoints.Saver().restore(sess, path)


def test_state_without_another_variable_of_its_dtype_begins(tmp_path):
  path = str(tmp_path / "model")  # in which no integer is: good_steps has nothing to be read from
  with tf.Graph().as_default(), testing.session() as sess:
    table = tf.get_variable("table", initializer=np.arange(8, dtype=np.float32).reshape([4, 2]))
    sess.run(tf.global_variables_initializer())
    expected = sess.run(table)
    tf.train.Saver().save(sess, path)
  table = tf.get_variable("table", [4, 2], partitioner=tf.fixed_size_partitioner(2))
  scale = mp_compat.DynamicLossScale(64.)
  scale()
  with testing.session() as sess:
    checkpoints.Saver().restore(sess, path)
    np.testing.assert_array_equal(sess.run(tf.convert_to_tensor(table)), expected)
    assert sess.run(tf.global_variables("current_loss_scale|good_steps")) == [64., 0]


def test_no_checkpoint_is_told_from_a_broken_one(tmp_path):
  golden_cases.Training(Case("mp_compat", "adam"))
  saver = checkpoints.Saver()
  with testing.session() as sess:
    for nothing in (None, str(tmp_path / "nothing")):
      with pytest.raises(ValueError, match="not a valid checkpoint"):
        saver.restore(sess, nothing)
  for read in [checkpoints.inspect, checkpoints.name_map]:
    with pytest.raises(ValueError, match="There is no checkpoint at .*Expected the path of one"):
      read(str(tmp_path))


def break_index(path):
  with open(path + ".index", "r+b") as index:
    index.seek(20)
    index.write(b"\xff" * 40)


def cut_index(path):
  os.truncate(path + ".index", 30)


def cut_data(path):
  os.truncate(path + ".data-00000-of-00001", 10)


def break_data(path):
  with open(path + ".data-00000-of-00001", "r+b") as data:
    data.write(b"\xff" * 30)


def lose_data(path):
  os.remove(path + ".data-00000-of-00001")


@pytest.mark.parametrize("damage", [break_index, cut_index, cut_data, break_data, lose_data])
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_there(damage, tmp_path):
  training = golden_cases.Training(Case("mp_compat", "adam"))
  saver = checkpoints.Saver()
  with testing.session() as sess:
    sess.run(tf.global_variables_initializer())
    paths = []
    for step in (1, 2):
      values = training.run(sess, golden_cases.FEEDS[:1])
      paths.append((saver.save(sess, str(tmp_path / "model"), global_step=step), values))
    damage(paths[1][0])
    with pytest.raises(tf.errors.DataLossError, match="model-2 is truncated or corrupt.*Restore an earlier one"):
      saver.restore(sess, paths[1][0])
    kept = tf.train.get_checkpoint_state(str(tmp_path)).all_model_checkpoint_paths
    assert list(kept) == [path for path, _ in paths]
    saver.restore(sess, kept[0])
    assert_equal(training.run(sess, []), paths[0][1])
  with pytest.raises(tf.errors.DataLossError, match="model-2 is truncated or corrupt"):
    checkpoints.convert(paths[1][0], str(tmp_path / "out"), "plain")
  assert not [name for name in os.listdir(str(tmp_path)) if name.startswith("out")]


def test_nothing_is_overwritten(tmp_path):
  source, target = golden("1.15", Case("tensorflow", "adam")), str(tmp_path / "out")
  checkpoints.convert(source, target, "plain")
  before = {name: (tmp_path / name).read_bytes() for name in os.listdir(str(tmp_path))}
  assert sorted(before) == ["out.data-00000-of-00001", "out.index"]
  for other in [source, target]:
    with pytest.raises(ValueError, match="There is something at .* already, which is not overwritten"):
      checkpoints.convert(source, other, "mp_compat")
  assert before == {name: (tmp_path / name).read_bytes() for name in os.listdir(str(tmp_path))}


def test_what_was_written_wrongly_is_not_left_there(tmp_path, monkeypatch):
  read = checkpoints._read

  def read_wrongly(reader, path, name):
    value = read(reader, path, name)
    return value + 1 if ".unfinished" in path and name == "w" else value

  monkeypatch.setattr(checkpoints, "_read", read_wrongly)
  with pytest.raises(tf.errors.DataLossError, match="w of .* was not written as it should be"):
    checkpoints.convert(golden("1.15", Case("tensorflow", "adam")), str(tmp_path / "out"), "plain")
  assert os.listdir(str(tmp_path)) == []


def test_checkpoints_of_objects_need_no_conversion(tmp_path):
  source = golden("1.15", Case("tensorflow", "adam", kind="objects"))
  found = checkpoints.inspect(source)
  assert found.dialect == "object-based" and len(found.state) == 2
  with pytest.raises(ValueError, match="written by tf.train.Checkpoint, whose names are the same in every dialect"):
    checkpoints.convert(source, str(tmp_path / "out"), "plain")


# --- the command line ----------------------------------------------------------------------------------------------


def command(*arguments):
  return [sys.executable, "-W", "ignore", "-m", "mp_compat", "checkpoint"] + list(arguments)


def run(*arguments):
  return subprocess.run(command(*arguments), env=testing.environment(), capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_the_command_line_inspects_and_converts(tmp_path):
  source, target = golden("1.15", Case("tensorflow", "adam")), str(tmp_path / "out")
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


def test_what_is_no_variable_is_saved_and_restored_as_by_tensorflow(tmp_path):
  v = tf.get_variable("v", initializer=np.float32(3.))
  iterator = tf.data.make_initializable_iterator(tf.data.Dataset.range(9))
  following = iterator.get_next()
  saver = checkpoints.Saver([v, tf.data.experimental.make_saveable_from_iterator(iterator)])
  with testing.session() as sess:
    sess.run([tf.global_variables_initializer(), iterator.initializer])
    sess.run([following, following])
    path = saver.save(sess, str(tmp_path / "model"))
    assert [sess.run(following) for _ in range(2)] == [1, 2]
    sess.run(v.assign(5.))
    saver.restore(sess, path)
    assert sess.run([v, following]) == [3., 1]
