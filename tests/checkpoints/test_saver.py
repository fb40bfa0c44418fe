"""Tests of `checkpoints.Saver`: kinds of variables, paths, formats, errors."""

import contextlib
import os
import pathlib

import numpy as np
import pytest
from tensorflow.python.training.saving import saveable_object

import mp_compat
from mp_compat import checkpoints
from tests import testing
from tests.checkpoints import golden_cases
from tests.checkpoints import goldens
from tests.checkpoints.golden_cases import Case
from tests.programs.table import VERSION
from tests.testing import tf

pytestmark = pytest.mark.usefixtures("graph")


@pytest.mark.parametrize("use_resource", [False, True])
def test_partitions_restore_from_whole_variable(use_resource, tmp_path):
  path, whole = str(tmp_path / "whole"), np.arange(12, dtype=np.float32).reshape([6, 2])
  goldens.save_variables(path, {"table": whole, "table/Momentum": whole + 1})
  with tf.variable_scope(
    "", use_resource=use_resource, partitioner=tf.fixed_size_partitioner(3)
  ):
    table = tf.get_variable("table", [6, 2], initializer=tf.zeros_initializer())
    opt = mp_compat.MixedPrecisionLossScaleOptimizer(
      tf.train.MomentumOptimizer(0.1, 0.9), "dynamic"
    )
    opt.minimize(tf.reduce_sum(tf.square(tf.convert_to_tensor(table))))
  saver = checkpoints.Saver()
  with testing.session() as sess:
    saver.restore(sess, path)
    parts = tf.trainable_variables()
    np.testing.assert_array_equal(np.concatenate(sess.run(parts)), whole)
    slots = [opt.get_slot(part, "momentum") for part in parts]
    np.testing.assert_array_equal(np.concatenate(sess.run(slots)), whole + 1)
    assert len(parts) == 3 and sess.run(tf.global_variables("current_loss_scale")) == [
      2.0**15
    ]


def test_restore_assigns_every_replica():
  strategy = tf.distribute.MirroredStrategy(testing.TWO_CPUS)
  case = Case("tensorflow", "adam")
  with strategy.scope():
    w = tf.get_variable("w", [3])
    power = tf.get_variable("beta1_power", [])
    saver = checkpoints.Saver([w, power])
  with testing.session() as sess:
    saver.restore(sess, goldens.golden_path("1.15", case))
    saved = goldens.load_expected("1.15", case, "saved")
    for variable, name in [(w, "w"), (power, "cond_1/beta1_power")]:
      copies = strategy.experimental_local_results(variable)
      assert len(copies) == 2
      for copy in copies:
        np.testing.assert_array_equal(sess.run(copy), saved[name])


@pytest.mark.parametrize("writer", ["tensorflow", "mp_compat"])
def test_path_precedes_directory(writer, tmp_path):
  case, other = Case(writer, "adam"), Case("plain", "momentum")
  prefix, inside = str(tmp_path / "m"), str(tmp_path / "m" / "later")
  (tmp_path / "m").mkdir()
  goldens.copy_golden(case, prefix)
  goldens.copy_golden(other, inside)
  tf.train.update_checkpoint_state(str(tmp_path / "m"), inside)
  saved = goldens.load_expected_renamed("1.15", case, "saved")
  goldens.assert_equal(goldens.restore("mp_compat", case, prefix), saved)
  assert (
    checkpoints.inspect(prefix).path == prefix
    and checkpoints.inspect(str(tmp_path / "m") + "/").path == inside
  )
  assert checkpoints.convert(prefix, str(tmp_path / "plain"), "plain").variables[
    "beta1_power"
  ]
  golden_cases.GoldenTraining(case._replace(writer="mp_compat"))
  assert "current_loss_scale" in checkpoints.name_map(prefix)


@pytest.mark.parametrize(
  "writer, sharded", [("tensorflow", True), ("mp_compat", False)]
)
def test_version_1_format_restores(sharded, writer, tmp_path):
  case = Case(writer, "adam")

  def build(case):
    table = tf.get_variable("table", [4, 2], partitioner=tf.fixed_size_partitioner(2))
    return table, golden_cases.GoldenTraining(case)

  with testing.control_flow(1), tf.Graph().as_default(), testing.session() as sess:
    table, training = build(case)
    sess.run(tf.global_variables_initializer())
    saved = goldens.rename_to_ours(training.run(sess, golden_cases.FEEDS[:3]), case)
    whole = sess.run(tf.convert_to_tensor(table))
    saver = tf.train.Saver(write_version=tf.train.SaverDef.V1, sharded=sharded)
    path = saver.save(sess, str(tmp_path / "model.ckpt"))
  assert not tf.gfile.Exists(path + ".index") and ("?????" in path) == sharded
  table, training = build(case._replace(writer="mp_compat"))
  converted = str(tmp_path / "converted")
  assert (
    checkpoints.inspect(path).naming_scheme == writer
    and checkpoints.inspect(str(tmp_path)).path == path
  )
  checkpoints.convert(path, converted, "mp_compat")
  saver, plain_saver = checkpoints.Saver(), tf.train.Saver()
  init = tf.train.Saver(checkpoints.name_map(path))
  with testing.session() as sess:
    for restore in [
      lambda: saver.restore(sess, path),
      lambda: init.restore(sess, path),
      lambda: plain_saver.restore(sess, converted),
    ]:
      sess.run(tf.global_variables_initializer())
      restore()
      goldens.assert_equal(goldens.rename_to_ours(training.run(sess, []), case), saved)
      np.testing.assert_array_equal(sess.run(tf.convert_to_tensor(table)), whole)


IN_MEMORY = pytest.mark.skipif(
  VERSION < (2, 4), reason="the in-memory file system needs TensorFlow 2.4"
)


@pytest.mark.parametrize(
  "writer, as_path, folder, has_meta",
  [
    ("tensorflow", pathlib.Path, "{}", False),
    ("mp_compat", str.encode, "{}", True),
    pytest.param("tensorflow", str, "ram:/{}", True, marks=IN_MEMORY),
    pytest.param("mp_compat", str, "ram:/{}", True, marks=IN_MEMORY),
  ],
)
def test_paths_of_each_kind_are_accepted(as_path, folder, writer, has_meta, tmp_path):
  case, folder = Case(writer, "adam"), folder.format(tmp_path)
  source, target = folder + "/model-7", folder + "/converted"
  goldens.copy_golden(case, source)
  if has_meta:
    tf.gfile.Copy(goldens.golden_path("1.15", case) + ".index", source + ".meta")
  saved = goldens.load_expected_renamed("1.15", case, "saved")
  goldens.assert_equal(goldens.restore("mp_compat", case, as_path(source)), saved)
  assert checkpoints.inspect(as_path(source)).path == source
  assert (
    checkpoints.convert(as_path(source), as_path(target), like=as_path(source)).path
    == target
  )
  assert not tf.gfile.Exists(target + ".unfinished")
  goldens.assert_equal(goldens.restore("mp_compat", case, target), saved)
  golden_cases.GoldenTraining(case._replace(writer="mp_compat"))
  assert checkpoints.name_map(as_path(source))
  with pytest.raises(
    ValueError, match="{} exists and is not overwritten".format(target)
  ):
    checkpoints.convert(as_path(source), as_path(target), "plain")


@pytest.mark.parametrize("writer", ["tensorflow", "mp_compat"])
def test_saver_def_selects_variables(writer):
  case = Case(writer, "adam")
  golden_cases.GoldenTraining(case._replace(writer="mp_compat"))
  saver_def = tf.train.Saver().as_saver_def()
  later = tf.get_variable("later", [])
  saver = checkpoints.Saver(saver_def=saver_def)
  with testing.session() as sess:
    saver.restore(sess, goldens.golden_path("1.15", case))
    saved = goldens.load_expected_renamed("1.15", case, "saved")
    goldens.assert_equal(
      sess.run({v.op.name: v for v in tf.global_variables() if v is not later}), saved
    )
    assert sess.run(tf.report_uninitialized_variables()).tolist() == [b"later"]


@pytest.mark.parametrize("new", [["new"], []])
def test_failed_restore_assigns_nothing(new, tmp_path):
  path = str(tmp_path / "model")
  in_checkpoint = {
    "a": [2],
    "x": [4],
    "y": [2],
    "w": [1],
    "cond_1/beta1_power": [],
    "head/current_loss_scale": [],
  }
  values = {name: np.zeros(shape, np.float32) for name, shape in in_checkpoint.items()}
  goldens.save_variables(path, dict(values, z=np.float64(0)))
  with tf.variable_scope("", use_resource=bool(new)):
    for name, shape in [
      ("a", [2]),
      ("x", [2, 2]),
      ("y", [3]),
      ("z", []),
      ("good_steps", []),
      ("current_loss_scale", []),
    ]:
      tf.get_variable(name, shape)
    for name in new:
      tf.get_variable(name, [])
  saver = checkpoints.Saver()
  with testing.initialized_session() as sess:
    before = [value.tobytes() for value in sess.run(tf.global_variables())]
    with pytest.raises(
      tf.errors.NotFoundError if new else tf.errors.InvalidArgumentError
    ) as raised:
      saver.restore(sess, path)
    assert [value.tobytes() for value in sess.run(tf.global_variables())] == before
  message = str(raised.value)
  for part in [
    "Nothing was restored",
    "x has the shape (2, 2) in the graph, [4] in the checkpoint",
    "y has the shape (3,) in the graph, [2] in the checkpoint",
    "z has the dtype float32 in the graph, float64 in the checkpoint",
    *[
      "which has the naming scheme tensorflow: new. It has: a, cond_1/beta1_power, head"
    ]
    * len(new),
  ]:
    assert part in message, message
  assert ("Not found in the checkpoint" in message) == bool(
    new
  ) and "good_steps" not in message


def test_names_that_the_program_chose_are_kept(tmp_path):
  path = str(tmp_path / "model")
  values = {"beta1_power": 0.25, "cond_1/beta1_power": 0.5, "mine": 0.75}
  values["current_loss_scale"] = 8.0
  goldens.save_variables(path, {name: np.float32(values[name]) for name in values})
  powers = [tf.get_variable(name, []) for name in ("beta1_power", "beta1_power_1")]
  other = tf.get_variable("other", [])
  named = {"cond_1/beta1_power": powers[0], "beta1_power": powers[1], "mine": other}
  with testing.session() as sess:
    checkpoints.Saver(named).restore(sess, path)
    assert sess.run([*powers, other]) == [0.5, 0.25, 0.75]
    # A name of its own does not count as the name of the op.
    named = {"cond_1/beta1_power": powers[0], "beta1_power_1": powers[1]}
    checkpoints.Saver(named).restore(sess, path)
    assert sess.run(powers) == [0.5, 0.25]


def test_slices_alone_are_not_converted(tmp_path):
  w = tf.get_variable("w", [4, 2], partitioner=tf.fixed_size_partitioner(2))
  with tf.variable_scope("other"):
    opt = mp_compat.MixedPrecisionLossScaleOptimizer(
      tf.train.MomentumOptimizer(0.1, 0.9), "dynamic"
    )
    opt.minimize(tf.reduce_sum(tf.square(tf.convert_to_tensor(w))))
  saver = checkpoints.Saver()
  with testing.initialized_session() as sess:
    path = saver.save(sess, str(tmp_path / "model"))
    with pytest.raises(ValueError, match="only a slice of w/.*checkpoints.Saver"):
      checkpoints.convert(path, str(tmp_path / "out"), "plain")
    slots = opt.get_slot(tf.trainable_variables()[0], "momentum")
    sess.run(slots.assign(slots + 1))
    saver.restore(sess, path)
    np.testing.assert_array_equal(sess.run(slots), np.zeros([2, 2]))


def test_missing_variable_raises(tmp_path):
  path = str(tmp_path / "model")
  goldens.save_variables(path, {"w": np.float32(0)})
  for name in ("w", "new"):
    tf.get_variable(name, [])
  saver = checkpoints.Saver()
  with testing.session() as sess, pytest.raises(tf.errors.NotFoundError) as raised:
    saver.restore(sess, path)
  message = str(raised.value)
  assert "naming scheme plain: new. It has: w." in message
  assert "Different in the checkpoint" not in message


def test_missing_variable_is_reported_before_ambiguous_ones(tmp_path):
  path = str(tmp_path / "model")
  saved = {"beta1_power": np.float32(0.5), "current_loss_scale": np.float32(8)}
  goldens.save_variables(path, saved)
  for name in ("added", "ns/beta1_power", "beta1_power"):
    tf.get_variable(name, [])
  with testing.session() as sess:
    with pytest.raises(tf.errors.NotFoundError, match=": added. It has: beta1_power, "):
      checkpoints.Saver().restore(sess, path)


def test_reader_names_variables_between_which_it_cannot_decide(tmp_path):
  path = str(tmp_path / "model")
  names = ["beta1_power", "cond_1/beta1_power"]
  goldens.save_variables(path, dict(zip(names, np.float32([0.25, 0.5]))))
  loss = testing.Training().loss
  with mp_compat.install():
    for _ in names:
      testing.Optimizer(tf.train.AdamOptimizer(), "dynamic").minimize(loss)
    reader = tf.train.load_checkpoint(path)
  with pytest.raises(tf.errors.InvalidArgumentError, match="cond_1/beta1_power"):
    reader.get_tensor("beta1_power")


def test_reshape_restores_different_shape(tmp_path):
  path = str(tmp_path / "model")
  goldens.save_variables(
    path, {"cond_1/beta1_power": np.float32(0.5), "v": np.arange(6, dtype=np.float32)}
  )
  v = tf.get_variable("v", [2, 3])
  power = tf.get_variable("beta1_power", [])
  with testing.session() as sess:
    checkpoints.Saver(reshape=True).restore(sess, path)
    np.testing.assert_array_equal(sess.run(v), [[0, 1, 2], [3, 4, 5]])
    assert sess.run(power) == 0.5
    with pytest.raises(
      tf.errors.InvalidArgumentError,
      match=r"v has the shape \(2, 3\) in the graph, \[6\] in",
    ):
      checkpoints.Saver().restore(sess, path)


def test_missing_state_is_initialized(tmp_path):
  path, expected = (
    str(tmp_path / "model"),
    np.arange(8, dtype=np.float32).reshape([4, 2]),
  )
  # no int64 tensor from which good_steps could be read
  goldens.save_variables(path, {"table": expected})
  table = tf.get_variable("table", [4, 2], partitioner=tf.fixed_size_partitioner(2))
  mp_compat.DynamicLossScale(64.0)()
  with testing.session() as sess:
    checkpoints.Saver().restore(sess, path)
    np.testing.assert_array_equal(sess.run(tf.convert_to_tensor(table)), expected)
    state = tf.global_variables("current_loss_scale|good_steps")
    assert sess.run(state) == [64.0, 0]
    sess.run(state[0].assign(8.0))
    checkpoints.Saver(state).restore(sess, path)
    assert sess.run(state) == [64.0, 0]
    os.truncate(path + DATA, 10)
    with pytest.raises(tf.errors.DataLossError, match=DAMAGED.format("")):
      checkpoints.Saver().restore(sess, path)


def test_powers_restore_in_order_of_creation(tmp_path):
  path = str(tmp_path / "model")
  goldens.save_variables(
    path, {"cond_{}/beta1_power".format(n): np.float32(n) for n in (1, 3, 11)}
  )
  powers = [tf.get_variable("beta1_power_{}".format(n), []) for n in (2, 10, 3)]
  with testing.session() as sess:
    for saver in [checkpoints.Saver(), tf.train.Saver(checkpoints.name_map(path))]:
      sess.run(tf.global_variables_initializer())
      saver.restore(sess, path)
      assert sess.run(powers) == [1, 3, 11]


def test_eager_saver_restores(tmp_path):
  with testing.eager_mode():
    w = tf.Variable([1.0, 2.0], name="w", use_resource=True)
    path = tf.train.Saver([w]).save(None, str(tmp_path / "model"))
    for context, make in [
      (contextlib.nullcontext, checkpoints.Saver),
      (mp_compat.install, tf.train.Saver),
    ]:
      w.assign([5.0, 5.0])
      with context():
        make([w]).restore(None, path)
      np.testing.assert_array_equal(w.numpy(), [1.0, 2.0])


def test_missing_checkpoint_raises(tmp_path):
  golden_cases.GoldenTraining(Case("mp_compat", "adam"))
  saver = checkpoints.Saver()
  with testing.session() as sess:
    for missing in (None, str(tmp_path / "nothing")):
      with pytest.raises(ValueError, match="There is no checkpoint at"):
        saver.restore(sess, missing)
  for missing in (tmp_path, tmp_path / "missing" / "model.ckpt-5"):
    for read in [checkpoints.inspect, checkpoints.name_map]:
      with pytest.raises(
        ValueError,
        match="There is no checkpoint at .*Expected the path of a checkpoint",
      ):
        read(str(missing))


def corrupt(path, offset=0):
  with open(path, "r+b") as file:
    file.seek(offset)
    file.write(b"\xff" * 30)


INDEX, DATA = ".index", ".data-00000-of-00001"
DAMAGED = "^The checkpoint [^ ]*model{} is truncated or corrupt: (?!The checkpoint).*Restore an earlier one"


@pytest.mark.parametrize(
  "part, damage",
  [
    (INDEX, lambda path: corrupt(path, 20)),
    (INDEX, lambda path: os.truncate(path, 30)),
    (DATA, corrupt),
    (DATA, lambda path: os.truncate(path, 10)),
    (DATA, os.remove),
  ],
  ids=[
    "corrupt_index",
    "truncated_index",
    "corrupt_data",
    "truncated_data",
    "missing_data",
  ],
)
def test_damaged_checkpoint_raises(part, damage, tmp_path):
  training = golden_cases.GoldenTraining(Case("mp_compat", "adam"))
  saver, plain_saver = checkpoints.Saver(), tf.train.Saver()
  with testing.initialized_session() as sess:
    paths = []
    for step in (1, 2):
      values = training.run(sess, golden_cases.FEEDS[:1])
      paths.append(
        (saver.save(sess, str(tmp_path / "model"), global_step=step), values)
      )
    damage(paths[1][0] + part)
    for context, restorer in [
      (contextlib.nullcontext, saver),
      (mp_compat.install, saver),
      (mp_compat.install, plain_saver),
    ]:
      with context(), pytest.raises(
        tf.errors.DataLossError, match=DAMAGED.format("-2")
      ):
        restorer.restore(sess, paths[1][0])
    kept = tf.train.get_checkpoint_state(str(tmp_path)).all_model_checkpoint_paths
    assert list(kept) == [path for path, _ in paths]
    saver.restore(sess, kept[0])
    goldens.assert_equal(training.run(sess, []), paths[0][1])
  with pytest.raises(tf.errors.DataLossError, match="model-2 is truncated or corrupt"):
    checkpoints.convert(paths[1][0], str(tmp_path / "out"), "plain")
  assert not [name for name in os.listdir(str(tmp_path)) if name.startswith("out")]


def test_saver_restores_iterator_state(tmp_path):
  v = tf.get_variable("v", initializer=np.float32(3.0))
  iterator = tf.data.make_initializable_iterator(tf.data.Dataset.range(9))
  next_element = iterator.get_next()
  saver = checkpoints.Saver(
    [v, tf.data.experimental.make_saveable_from_iterator(iterator)]
  )
  with testing.session() as sess:
    sess.run([tf.global_variables_initializer(), iterator.initializer])
    sess.run([next_element, next_element])
    path = saver.save(sess, str(tmp_path / "model"))
    assert [sess.run(next_element) for _ in range(2)] == [1, 2]
    sess.run(v.assign(5.0))
    saver.restore(sess, path)
    assert sess.run([v, next_element]) == [3.0, 1]


class Copied(saveable_object.SaveableObject):
  """Restores a variable through a copy of its handle."""

  def __init__(self, variable):
    self._copy = tf.identity(variable.handle)
    spec = saveable_object.SaveSpec(variable.read_value(), "", "copied")
    super().__init__(variable, [spec], "copied")

  def restore(self, restored_tensors, restored_shapes):
    (value,) = restored_tensors
    return tf.raw_ops.AssignVariableOp(resource=self._copy, value=value)


def test_saver_restores_custom_objects(tmp_path):
  v = tf.get_variable("v", initializer=[1.0, 2.0], use_resource=True)
  saver = checkpoints.Saver([Copied(v)])
  with testing.initialized_session() as sess:
    path = saver.save(sess, str(tmp_path / "model"))
    sess.run(v.assign([3.0, 4.0]))
    saver.restore(sess, path)
    np.testing.assert_array_equal(sess.run(v), [1.0, 2.0])


@pytest.mark.parametrize("partitioner", [None, tf.fixed_size_partitioner(2)])
@pytest.mark.parametrize("as_dict", [False, True], ids=["list", "dict"])
def test_saver_takes_casts_for_their_variables(as_dict, partitioner, tmp_path):
  with tf.variable_scope(
    "",
    dtype=tf.float16,
    partitioner=partitioner,
    custom_getter=mp_compat.float32_variable_storage_getter,
  ):
    w = tf.get_variable("w", [4, 3], initializer=tf.ones_initializer())
  saver = checkpoints.Saver({"w": w} if as_dict else [w])
  with testing.initialized_session() as sess:
    path = saver.save(sess, str(tmp_path / "model"))
    sess.run([variable.assign(variable * 2) for variable in tf.global_variables()])
    saver.restore(sess, path)
    np.testing.assert_array_equal(sess.run(w), np.ones([4, 3]))
  reader = tf.train.load_checkpoint(path)
  assert reader.get_variable_to_dtype_map() == {"w": tf.float32}
  assert list(checkpoints.name_map(path, [w])) == ["w"]
  assert "w" in checkpoints.assignment_map(path, {"w": w})


def save_blocks(path, scopes):
  """Saves a scaled model with one weight, the number of the scope, in each scope."""
  with tf.Graph().as_default(), testing.session() as sess:
    make_blocks(scopes)
    sess.run(tf.global_variables_initializer())
    checkpoints.Saver().save(sess, path)


def make_blocks(scopes):
  made = []
  for number, scope in enumerate(scopes):
    with tf.variable_scope(scope):
      made.append(tf.get_variable("w", initializer=float(number), use_resource=True))
  opt = mp_compat.MixedPrecisionLossScaleOptimizer(
    tf.train.GradientDescentOptimizer(0.1), "dynamic"
  )
  opt.minimize(tf.add_n(made))
  return made


@pytest.mark.parametrize("to", ["mp_compat", "plain"])
def test_weights_in_scopes_that_are_called_cond_are_kept(to, tmp_path):
  paths = [str(tmp_path / name) for name in ("model", "converted")]
  scopes = ["cond/k", "k", "g/cond"]
  save_blocks(paths[0], scopes)
  checkpoints.convert(*paths, to=to)
  made = make_blocks(reversed(scopes))
  with testing.session() as sess:
    tf.train.Saver(made).restore(sess, paths[1])
    assert sess.run(made) == [2.0, 1.0, 0.0]


def make_adams(count):
  """Builds steps of several optimizers; returns the variables of the first one."""
  kept = []
  for number in range(count):
    weight = tf.get_variable("w{}".format(number), initializer=1.0, use_resource=True)
    adam = tf.train.AdamOptimizer(0.1, beta1=0.5 + 0.1 * number)
    opt = mp_compat.MixedPrecisionLossScaleOptimizer(adam, "dynamic")
    opt.minimize(weight * weight)
    kept = kept or tf.global_variables()
  return kept


def test_error_says_how_to_continue_with_an_added_optimizer(tmp_path):
  path = str(tmp_path / "model")
  with tf.Graph().as_default():
    make_adams(1)
    with testing.initialized_session() as sess:
      tf.train.Saver().save(sess, path)
  kept = make_adams(2)
  with pytest.raises(
    ValueError, match="restore only variables that the checkpoint has"
  ):
    checkpoints.name_map(path)
  assert list(checkpoints.name_map(path, kept).values()) == kept
  added = [each for each in tf.global_variables() if each not in kept]
  with pytest.raises(ValueError, match="restore only variables"):
    checkpoints.name_map(path, added)
  with testing.initialized_session() as sess:
    checkpoints.Saver(kept).restore(sess, path)
    (power,) = [each for each in kept if each.op.name == "beta1_power"]
    assert sess.run(power) == np.float32(0.5)


def test_a_block_that_was_added_is_missing(tmp_path):
  path = str(tmp_path / "model")
  save_blocks(path, ["g/cond", "g/cond_1"])
  make_blocks(["g/cond_1", "g/cond_2"])
  with testing.session() as sess, pytest.raises(
    tf.errors.NotFoundError, match="g/cond_2/w. It has: "
  ):
    checkpoints.Saver().restore(sess, path)
