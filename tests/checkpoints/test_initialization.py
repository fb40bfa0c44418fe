"""Tests of `checkpoints.name_map` and `checkpoints.assignment_map`."""

import pytest

from mp_compat import checkpoints
from tests import testing
from tests.checkpoints import golden_cases
from tests.checkpoints import goldens
from tests.checkpoints.golden_cases import Case
from tests.testing import tf

pytestmark = pytest.mark.usefixtures("graph")


@pytest.mark.parametrize("writer", ["tensorflow", "contrib", "plain"])
def test_name_map_initializes_and_restores(writer):
  case = Case(writer, "adam")
  path = goldens.golden_path("1.15", case)
  golden_cases.GoldenTraining(case._replace(writer="mp_compat"))
  names = checkpoints.name_map(path)
  saver = tf.train.Saver(names)
  tf.train.init_from_checkpoint(path, names)
  saved = goldens.load_expected_renamed("1.15", case, "saved")
  mapped = {variable.op.name for variable in names.values()}
  assert set(saved) - mapped <= {"good_steps", "bad_steps"} and (
    "good_steps" in mapped
  ) == (writer == "tensorflow")
  with testing.session() as sess:
    for restore in [
      lambda: sess.run(tf.global_variables_initializer()),
      lambda: saver.restore(sess, path),
    ]:
      restore()
      for variable in names.values():
        assert sess.run(variable).tobytes() == saved[variable.op.name].tobytes()


def test_name_map_names_what_it_leaves_out(caplog):
  golden_cases.GoldenTraining(Case("mp_compat", "adam"))
  new, _ = tf.get_variable("new", []), tf.get_variable("w_1", [3])
  names = checkpoints.name_map(goldens.golden_path("1.15", Case("contrib", "adam")))
  assert (
    new not in names.values()
    and "lacks good_steps, new, w_1, or has another dtype" in caplog.text
  )
  assert "mp_compat checkpoint convert" in caplog.text


def test_assignment_map_leaves_out_other_dtypes(caplog):
  case = Case("contrib", "adam")
  path = goldens.golden_path("1.15", case)
  training = golden_cases.GoldenTraining(case._replace(writer="mp_compat"))
  wanted = {variable.op.name: variable for variable in tf.global_variables()}
  tf.train.init_from_checkpoint(path, checkpoints.assignment_map(path, wanted))
  assert "lacks good_steps, or has another dtype" in caplog.text
  with testing.initialized_session() as sess:
    values = training.run(sess, [])
  saved = goldens.load_expected_renamed("1.15", case, "saved")
  assert values.pop("good_steps") == 0 and saved.pop("good_steps") == 1
  del saved["bad_steps"]
  goldens.assert_equal(values, saved)


def test_variables_of_unknown_shape_are_not_compared():
  case = Case("tensorflow", "adam")
  golden_cases.GoldenTraining(case._replace(writer="mp_compat"))
  tf.get_variable(
    "unknown", initializer=tf.placeholder(tf.float32), validate_shape=False
  )
  w = tf.global_variables("w:0")
  assert checkpoints.name_map(goldens.golden_path("1.15", case), w) == {"w": w[0]}


@pytest.mark.parametrize(
  "scopes, is_complete", [({"/": "/"}, False), ({"w/": "w/"}, True), ({}, True)]
)
def test_variables_outside_scopes_are_named(scopes, is_complete, caplog):
  case = Case("tensorflow", "adam")
  path = goldens.golden_path("1.15", case)
  golden_cases.GoldenTraining(case._replace(writer="mp_compat"))
  named = {
    variable.op.name: variable for variable in tf.global_variables("beta1_power")
  }
  checkpoints.assignment_map(path, {**scopes, **named})
  expected = "does not initialize current_loss_scale, good_steps, beta2_power from the checkpoint"
  assert ("A map of scopes" in caplog.text) != is_complete
  assert is_complete or expected in caplog.text, caplog.text


def test_pairs_stay_pairs():
  path = goldens.golden_path("1.15", Case("tensorflow", "adam"))
  golden_cases.GoldenTraining(Case("mp_compat", "adam"))
  wanted = {variable.op.name: variable for variable in tf.global_variables("beta")}
  expected = checkpoints.assignment_map(path, wanted)
  pairs = checkpoints.assignment_map(path, list(wanted.items()))
  assert sorted(pairs) == sorted(expected.items()) and len(pairs) == 2


def test_variables_that_the_checkpoint_lacks_are_not_named(caplog):
  path = goldens.golden_path("1.15", Case("plain", "adam"))
  golden_cases.GoldenTraining(Case("mp_compat", "adam"))
  powers = {variable.op.name: variable for variable in tf.global_variables("beta")}
  checkpoints.assignment_map(path, {"/": "/", **powers})
  assert "A map of scopes" not in caplog.text


@pytest.mark.parametrize("shards", [1, 2])
def test_name_map_initializes_slots_of_partitions(shards, tmp_path):
  def build():
    partitioner = tf.fixed_size_partitioner(shards)
    with tf.variable_scope("scope", partitioner=partitioner):
      w = tf.get_variable("w", [4], initializer=tf.ones_initializer())
      opt = tf.train.MomentumOptimizer(0.5, 0.5)
      return opt.minimize(tf.reduce_sum(tf.square(tf.convert_to_tensor(w))))

  def values(sess):
    found = sess.run({v.op.name: v for v in tf.global_variables()})
    return {name: value.tolist() for name, value in found.items()}

  path = str(tmp_path / "model")
  with tf.Graph().as_default(), testing.session() as sess:
    train_op = build()
    sess.run(tf.global_variables_initializer())
    sess.run(train_op)
    saved = values(sess)
    tf.train.Saver().save(sess, path)
  with tf.Graph().as_default(), testing.session() as sess:
    build()
    tf.train.init_from_checkpoint(path, checkpoints.name_map(path))
    sess.run(tf.global_variables_initializer())
    assert values(sess) == saved
