"""Tests of `checkpoints.name_map`, and of `checkpoints.Saver` in an Estimator's Scaffold."""

import os

import numpy as np
import pytest

from mp_compat import checkpoints
from tests import testing
from tests.checkpoints import golden_cases
from tests.checkpoints import goldens
from tests.checkpoints.golden_cases import Case
from tests.testing import tf


@pytest.fixture(autouse=True)
def _graph():
  with tf.Graph().as_default():
    yield


@pytest.mark.skipif(not hasattr(tf, "estimator"), reason="TensorFlow 2.16 and later have no Estimator")
def test_estimator_starts_from_contrib_checkpoint(tmp_path):
  case = Case("contrib", "adam")
  path = goldens.golden_path("1.15", case)

  def model_fn(features, mode):
    training = golden_cases.GoldenTraining(case._replace(writer="mp_compat"), features["x"])
    saver = checkpoints.Saver()
    scaffold = tf.train.Scaffold(saver=saver, init_fn=lambda _, sess: saver.restore(sess, path))
    return tf.estimator.EstimatorSpec(
      mode, loss=tf.reduce_sum(training.w), train_op=training.train_op, scaffold=scaffold
    )

  estimator = tf.estimator.Estimator(model_fn, str(tmp_path))
  (step,) = [int(v) for n, v in checkpoints.inspect(path).state.items() if n == "good_steps"]
  estimator.train(lambda: tf.data.Dataset.from_tensors({"x": golden_cases.FEEDS[0]}))
  assert estimator.get_variable_value("good_steps") in (step + 1, 0)
  assert (
    estimator.get_variable_value("global_step")
    == np.load(os.path.join(golden_cases.GOLDENS, "1.15", "expected.npz"))[case.name + "/saved/global_step"] + 1
  )


@pytest.mark.parametrize("writer", ["tensorflow", "contrib", "plain"])
def test_name_map_initializes_and_restores_variables(writer):
  case = Case(writer, "adam")
  path = goldens.golden_path("1.15", case)
  golden_cases.GoldenTraining(case._replace(writer="mp_compat"))
  names = checkpoints.name_map(path)
  saver = tf.train.Saver(names)
  tf.train.init_from_checkpoint(path, names)
  saved = goldens.load_expected_renamed("1.15", case, "saved")
  mapped = {variable.op.name for variable in names.values()}
  assert set(saved) - mapped <= {"good_steps", "bad_steps"} and ("good_steps" in mapped) == (writer == "tensorflow")
  with testing.session() as sess:
    for restore in [lambda: sess.run(tf.global_variables_initializer()), lambda: saver.restore(sess, path)]:
      restore()
      for variable in names.values():
        assert sess.run(variable).tobytes() == saved[variable.op.name].tobytes()


def test_name_map_names_what_it_leaves_out(caplog):
  golden_cases.GoldenTraining(Case("mp_compat", "adam"))
  new, _ = tf.get_variable("new", []), tf.get_variable("w_1", [3])
  names = checkpoints.name_map(goldens.golden_path("1.15", Case("contrib", "adam")))
  assert new not in names.values() and "lacks good_steps, new, w_1, or has another dtype" in caplog.text
  assert "mp_compat checkpoint convert" in caplog.text


def test_assignment_map_leaves_out_counts_of_other_dtype(caplog):
  case = Case("contrib", "adam")
  path = goldens.golden_path("1.15", case)
  training = golden_cases.GoldenTraining(case._replace(writer="mp_compat"))
  wanted = {variable.op.name: variable for variable in tf.global_variables()}
  tf.train.init_from_checkpoint(path, checkpoints.assignment_map(path, wanted))
  assert "lacks good_steps, or has another dtype" in caplog.text
  with testing.session() as sess:
    sess.run(tf.global_variables_initializer())
    values = training.run(sess, [])
  saved = goldens.load_expected_renamed("1.15", case, "saved")
  assert values.pop("good_steps") == 0 and saved.pop("good_steps") == 1
  del saved["bad_steps"]
  goldens.assert_equal(values, saved)
