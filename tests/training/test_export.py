"""Tests of exported graphs: MetaGraphs resume training without mp_compat, and models contain no loss scaling ops."""

import os
import shutil
import subprocess
import sys

import numpy as np
import pytest

from tests import testing
from tests.checkpoints import golden_cases
from tests.testing import tf
from tests.training import imported_graph

CASE = golden_cases.Case("mp_compat", "adam")
LOSS_SCALING_NAMES = ("loss_scale", "good_steps", "apply_if_finite", "is_finite", "IsFinite")


def resume_training(meta_graph, checkpoint, tmp_path):
  """Resumes training in a process that imports only TensorFlow. Returns the variables after the last step."""
  np.save(checkpoint + ".feeds.npy", golden_cases.FEEDS[golden_cases.BEFORE :])
  output = str(tmp_path / "after.npz")
  subprocess.run(
    [sys.executable, "-W", "ignore", imported_graph.__file__, meta_graph, checkpoint, output],
    check=True,
    env=dict(testing.environment(), PYTHONPATH=""),
  )
  return {name: values[-1] for name, values in np.load(output).items()}


def assert_equal_variables(values, expected):
  assert sorted(values) == sorted(expected)
  for name, value in expected.items():
    assert values[name].tobytes() == value.tobytes(), name


@pytest.mark.matrix
@pytest.mark.parametrize(
  "control_flow, use_resource",
  [
    (1, False),
    (2, True),
    pytest.param(1, True, marks=pytest.mark.slow),
    pytest.param(2, False, marks=pytest.mark.slow),
  ],
)
def test_meta_graph_resumes_exactly_in_another_process(control_flow, use_resource, tmp_path):
  path = str(tmp_path / "model")
  with testing.control_flow(control_flow), tf.Graph().as_default(), testing.session() as sess:
    with tf.variable_scope("", use_resource=use_resource):
      training = golden_cases.GoldenTraining(CASE)
    saver = tf.train.Saver()
    sess.run(tf.global_variables_initializer())
    training.run(sess, golden_cases.FEEDS[: golden_cases.BEFORE])
    saver.save(sess, path)
    expected = training.run(sess, golden_cases.FEEDS[golden_cases.BEFORE :])
  assert_equal_variables(resume_training(path + ".meta", path, tmp_path), expected)


@pytest.mark.matrix
def test_meta_graph_of_tensorflow_1_15_resumes_exactly(tmp_path):
  golden = os.path.join(golden_cases.GOLDENS, "1.15", CASE.name)
  for part in (".index", ".data-00000-of-00001"):
    shutil.copyfile(golden + part, str(tmp_path / "model") + part)
  expected = np.load(os.path.join(golden_cases.GOLDENS, "1.15", "expected.npz"))
  prefix = CASE.name + "/after/"
  assert_equal_variables(
    resume_training(golden + ".meta", str(tmp_path / "model"), tmp_path),
    {key[len(prefix) :]: expected[key] for key in expected.files if key.startswith(prefix)},
  )


@pytest.fixture(name="trained")
def _trained(tmp_path):
  golden_cases.make(CASE, str(tmp_path))
  return str(tmp_path / CASE.name)


def test_saved_model_contains_no_loss_scaling_ops(trained, tmp_path):
  directory = str(tmp_path / "saved_model")
  with tf.Graph().as_default(), testing.session() as sess:
    x = tf.placeholder(tf.float32, [3], "x")
    w = tf.get_variable("w", [3])
    y = tf.multiply(w, x, "y")
    tf.train.Saver().restore(sess, trained)
    expected = sess.run(w)
    tf.saved_model.simple_save(sess, directory, {"x": x}, {"y": y})
  with tf.Graph().as_default() as graph, testing.session() as sess:
    tf.saved_model.load(sess, [tf.saved_model.tag_constants.SERVING], directory)
    np.testing.assert_array_equal(sess.run("y:0", {"x:0": np.ones(3)}), expected)
    names = [op.name for op in graph.get_operations()]
  variables = [name for name, _ in tf.train.list_variables(os.path.join(directory, "variables", "variables"))]
  assert variables == ["w"]
  assert not [name for name in names if any(part in name for part in LOSS_SCALING_NAMES)]


def test_frozen_graph_contains_no_loss_scaling_ops(trained):
  with tf.Graph().as_default() as graph, testing.session() as sess:
    training = golden_cases.GoldenTraining(CASE)
    y = tf.multiply(training.w, training.x, "y")
    tf.train.Saver().restore(sess, trained)
    expected = sess.run(training.w)
    frozen = tf.graph_util.convert_variables_to_constants(sess, graph.as_graph_def(), ["y"])
  assert not [node.name for node in frozen.node if any(part in node.name + node.op for part in LOSS_SCALING_NAMES)]
  assert not [node.name for node in frozen.node if "Variable" in node.op or "VarHandle" in node.op]
  with tf.Graph().as_default(), testing.session() as sess:
    tf.import_graph_def(frozen, name="")
    np.testing.assert_array_equal(sess.run(y.name, {"x:0": np.ones(3)}), expected)
