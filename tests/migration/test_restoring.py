"""Tests of each way in which programs restore, against checkpoints that TensorFlow's
class wrote.

docs/checkpoints.md has the same table: which way continues under `mp_compat run`, after
`mp_compat migrate`, and after a change by hand.
"""

import collections
import os
import re

import numpy as np
import pytest

import mp_compat
from mp_compat import checkpoints
from tests import testing
from tests.checkpoints import golden_cases
from tests.checkpoints import goldens
from tests.checkpoints.golden_cases import Case
from tests.testing import tf

CASE = Case("tensorflow", "adam")


def initialize(sess):
  sess.run(tf.global_variables_initializer())


def copy_into(folder, path):
  """Copies a checkpoint into a folder, where MonitoredTrainingSession and Supervisor
  find it.
  """
  os.makedirs(folder)
  for part in (".index", ".data-00000-of-00001"):
    tf.gfile.Copy(path + part, os.path.join(folder, "model.ckpt-4") + part)
  tf.train.update_checkpoint_state(folder, "model.ckpt-4")


# Each way restores the variables of the default graph; it may return another Session,
# in which they are restored.


def saver(sess, path):
  tf.train.Saver().restore(sess, path)


def monitored_session(sess, path):
  del sess
  copy_into(path + "-monitored", path)
  session = tf.train.MonitoredTrainingSession(
    checkpoint_dir=path + "-monitored", save_checkpoint_secs=None
  )
  return session._tf_sess()


def supervisor(sess, path):
  del sess
  copy_into(path + "-supervised", path)
  supervised = tf.train.Supervisor(logdir=path + "-supervised", summary_op=None)
  return supervised.prepare_or_wait_for_session(start_standard_services=False)


def init_variables(sess, path):
  tf.train.init_from_checkpoint(path, {v.op.name: v for v in tf.global_variables()})
  initialize(sess)


def warm_start(sess, path):
  tf.train.warm_start(path, [".*"])
  initialize(sess)


def init_scopes(sess, path):
  tf.train.init_from_checkpoint(path, {"/": "/"})
  initialize(sess)


def load_each(sess, path):
  """Restores as mozilla/DeepSpeech: each variable is loaded from the checkpoint; an
  error names the key.
  """
  checkpoint = tf.train.load_checkpoint(path)
  for variable in sorted(tf.global_variables(), key=lambda variable: variable.op.name):
    variable.load(checkpoint.get_tensor(variable.op.name), session=sess)


def new_checkpoint_reader(sess, path):
  reader = tf.train.NewCheckpointReader(path)
  for variable in tf.global_variables():
    variable.load(reader.get_tensor(variable.op.name), session=sess)


def load_variable(sess, path):
  for variable in tf.global_variables():
    variable.load(tf.train.load_variable(path, variable.op.name), session=sess)


def shared_names(sess, path):
  """Restores the variables that graph and checkpoint share, and initializes the others
  (an optimistic restore).
  """
  shapes = tf.train.load_checkpoint(path).get_variable_to_shape_map()
  shared = [
    v
    for v in tf.global_variables()
    if v.op.name in shapes and v.shape.as_list() == shapes[v.op.name]
  ]
  initialize(sess)
  tf.train.Saver(shared).restore(sess, path)


def listed_names(sess, path):
  named = {v.op.name: v for v in tf.global_variables()}
  initialize(sess)
  for name, shape in tf.train.list_variables(path):
    if name in named and named[name].shape.as_list() == shape:
      named[name].load(tf.train.load_variable(path, name), session=sess)


def values_before_graph(sess, path):
  """Reads all values in another graph, as a program that reads them before it builds
  its own.
  """
  with tf.Graph().as_default():
    reader = tf.train.load_checkpoint(path)
    values = {
      name: reader.get_tensor(name) for name in reader.get_variable_to_shape_map()
    }
  initialize(sess)
  for variable in tf.global_variables():
    if variable.op.name in values:
      variable.load(values[variable.op.name], session=sess)


def slim_ignoring_missing(sess, path):
  variables = pytest.importorskip("tf_slim.ops.variables")
  initialize(sess)
  variables.assign_from_checkpoint_fn(
    path, tf.global_variables(), ignore_missing_vars=True
  )(sess)


def slim(sess, path):
  variables = pytest.importorskip("tf_slim.ops.variables")
  sess.run(*variables.assign_from_checkpoint(path, tf.global_variables()))


def contrib_framework():
  if tf.__version__ >= "2":
    pytest.skip("TensorFlow 2 has no tf.contrib")
  import tensorflow

  return tensorflow.contrib.framework


def contrib(sess, path):
  sess.run(*contrib_framework().assign_from_checkpoint(path, tf.global_variables()))


def contrib_init(sess, path):
  contrib_framework().init_from_checkpoint(
    path, {v.op.name: v for v in tf.global_variables()}
  )
  initialize(sess)


def contrib_ignoring_missing(sess, path):
  initialize(sess)
  contrib_framework().assign_from_checkpoint_fn(
    path, tf.global_variables(), ignore_missing_vars=True
  )(sess)


def contrib_load_each(sess, path):
  reader = contrib_framework().load_checkpoint(path)
  for variable in tf.global_variables():
    variable.load(reader.get_tensor(variable.op.name), session=sess)


def raw_op(sess, path):
  for v in tf.global_variables():
    value = tf.raw_ops.RestoreV2(
      prefix=path,
      tensor_names=[v.op.name],
      shape_and_slices=[""],
      dtypes=[v.dtype.base_dtype],
    )
    v.load(sess.run(value)[0], session=sess)


def checkpoints_saver(sess, path):
  checkpoints.Saver().restore(sess, path)


def name_map(sess, path):
  tf.train.init_from_checkpoint(path, checkpoints.name_map(path))
  initialize(sess)


def assignment_map(sess, path):
  wanted = {v.op.name: v for v in tf.global_variables()}
  tf.train.init_from_checkpoint(path, checkpoints.assignment_map(path, wanted))
  initialize(sess)


# What happens, as docs/checkpoints.md words it.
CONTINUES, ERROR, ANEW = "continues", "error", "Adam starts anew"

# By the first words of a row in docs/checkpoints.md: the ways, and what happens under
# `run` and after `migrate`.
ROWS = collections.OrderedDict(
  [
    ("`tf.train.Saver`", ([saver, monitored_session, supervisor], CONTINUES, ERROR)),
    (
      "`tf.train.init_from_checkpoint` with names",
      ([init_variables, warm_start], CONTINUES, ERROR),
    ),
    ("`tf.train.init_from_checkpoint` with scopes", ([init_scopes], ANEW, ANEW)),
    (
      "readers, by the name",
      ([load_each, new_checkpoint_reader, load_variable], CONTINUES, ERROR),
    ),
    (
      "the names that graph and checkpoint share",
      (
        [shared_names, listed_names, values_before_graph, slim_ignoring_missing],
        CONTINUES,
        ANEW,
      ),
    ),
    ("`assign_from_checkpoint`", ([slim], CONTINUES, ERROR)),
    (
      "`tf.contrib.framework`",
      ([contrib, contrib_init, contrib_load_each], CONTINUES, ERROR),
    ),
    ("`tf.contrib.framework` with", ([contrib_ignoring_missing], CONTINUES, ANEW)),
    ("`tf.raw_ops.RestoreV2`", ([raw_op], ERROR, ERROR)),
  ]
)
WAYS = [(way, migrated) for ways, _, migrated in ROWS.values() for way in ways]
BY_HAND = [checkpoints_saver, name_map, assignment_map]


def restore_and_train(way, path, writer):
  """Builds the program in a new graph, restores and trains on; returns the powers
  restored, and all values at last.
  """
  with tf.Graph().as_default():
    training = golden_cases.GoldenTraining(CASE._replace(writer=writer))
    sess = tf.Session(config=testing.config())
    sess = way(sess, path) or sess
    with sess:
      powers = {
        testing.plain_name(v)[:-2]: sess.run(v)
        for v in tf.global_variables("(.*/)?beta")
      }
      return powers, training.run(sess, goldens.FEEDS_AFTER)


def assert_outcome(way, path, outcome, writer="mp_compat"):
  if outcome == ERROR:
    with pytest.raises((tf.errors.NotFoundError, ValueError), match="beta[12]_power"):
      restore_and_train(way, path, writer)
    return
  powers, values = restore_and_train(way, path, writer)
  if outcome == ANEW:
    assert powers == {"beta1_power": np.float32(0.9), "beta2_power": np.float32(0.999)}
  else:
    goldens.assert_equal(values, goldens.load_expected_renamed("1.15", CASE, "after"))


@pytest.fixture(name="path")
def _path(tmp_path):
  goldens.copy_golden(CASE, str(tmp_path / "model.ckpt-4"))
  return str(tmp_path / "model.ckpt-4")


def get_id(value):
  return getattr(value, "__name__", value)


def each_way(rows):
  """Parametrizes a test by (way, outcome). By default, the first way of each row of the
  table runs.
  """
  others = {way for ways, _, _ in ROWS.values() for way in ways[1:]}
  params = [
    pytest.param(way, outcome, marks=[pytest.mark.matrix] * (way in others))
    for way, outcome in rows
  ]
  return pytest.mark.parametrize("way, outcome", params, ids=get_id)


@each_way([(way, run) for ways, run, _ in ROWS.values() for way in ways])
def test_way_of_restoring_under_run(way, outcome, path):
  with mp_compat.install():
    assert_outcome(way, path, outcome)


@each_way(WAYS + [(way, CONTINUES) for way in BY_HAND])
def test_way_of_restoring_after_migrate(way, outcome, path):
  assert_outcome(way, path, outcome)


@each_way([(way, CONTINUES) for way, _ in WAYS if way is not init_scopes])
def test_converted_checkpoint_continues(way, outcome, path):
  checkpoints.convert(path, path + "-converted", "mp_compat")
  assert_outcome(way, path + "-converted", outcome)


@pytest.mark.each_choice
@pytest.mark.parametrize(
  "writer, reader", [("contrib", "mp_compat.contrib"), ("mp_compat", "mp_compat")]
)
@pytest.mark.parametrize(
  "way", [saver, init_variables, load_each, shared_names], ids=get_id
)
def test_other_checkpoint_continues(way, writer, reader, tmp_path):
  case, path = Case(writer, "adam"), str(tmp_path / "model.ckpt-4")
  goldens.copy_golden(case, path)
  with mp_compat.install():
    _, values = restore_and_train(way, path, reader)
  goldens.assert_equal(
    goldens.rename_to_ours(values, case),
    goldens.load_expected_renamed("1.15", case, "after"),
  )


def test_tensorflow_starts_anew_with_scopes(path):
  assert_outcome(init_scopes, path, ANEW, "tensorflow")


def test_documentation_has_same_table():
  with open(
    os.path.join(testing.ROOT, "docs", "checkpoints.md"), encoding="utf-8"
  ) as page:
    rows = [
      [cell.strip() for cell in line.split("|")[1:-1]]
      for line in page
      if line.startswith("|")
    ]
  for beginning, (_, run, migrated) in ROWS.items():
    (cells,) = [
      row for row in rows if re.match(re.escape(beginning) + "(?! with)", row[0])
    ]
    assert [
      cell.lstrip("*")[: len(outcome)]
      for cell, outcome in zip(cells[1:], (run, migrated))
    ] == [run, migrated]
