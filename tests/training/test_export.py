"""Tests of exported graphs: MetaGraphs resume training without mp_compat; frozen graphs contain no loss scaling."""

import numpy as np
import pytest

from tests import testing
from tests.checkpoints import golden_cases
from tests.checkpoints import goldens
from tests.testing import tf
from tests.training import imported_graph

CASE = golden_cases.Case("mp_compat", "adam")
LOSS_SCALING_NAMES = ("loss_scale", "good_steps", "apply_if_finite", "is_finite", "IsFinite")


def resume_training(meta_graph, checkpoint, tmp_path):
  """Resumes training in a process that imports only TensorFlow. Returns the variables after the last step."""
  np.save(checkpoint + ".feeds.npy", golden_cases.FEEDS[golden_cases.BEFORE :])
  output = str(tmp_path / "after.npz")
  testing.run_python("-W", "ignore", imported_graph.__file__, meta_graph, checkpoint, output)
  return {name: values[-1] for name, values in np.load(output).items()}


@pytest.mark.matrix
@pytest.mark.parametrize("use_resource", [False, True], ids=["reference", "resource"])
def test_meta_graph_resumes_exactly(use_resource, tmp_path):
  path = str(tmp_path / "model")
  with tf.Graph().as_default(), testing.session() as sess:
    with tf.variable_scope("", use_resource=use_resource):
      training = golden_cases.GoldenTraining(CASE)
    saver = tf.train.Saver()
    sess.run(tf.global_variables_initializer())
    training.run(sess, golden_cases.FEEDS[: golden_cases.BEFORE])
    saver.save(sess, path)
    expected = training.run(sess, golden_cases.FEEDS[golden_cases.BEFORE :])
  goldens.assert_equal(resume_training(path + ".meta", path, tmp_path), expected)


@pytest.mark.matrix
def test_old_meta_graph_resumes_exactly(tmp_path):
  path = str(tmp_path / "model")
  goldens.copy_golden(CASE, path)
  values = resume_training(goldens.golden_path("1.15", CASE) + ".meta", path, tmp_path)
  goldens.assert_equal(values, goldens.load_expected("1.15", CASE, "after"))


def test_frozen_graph_has_no_loss_scaling(tmp_path):
  golden_cases.make(CASE, str(tmp_path))
  with tf.Graph().as_default() as graph, testing.session() as sess:
    training = golden_cases.GoldenTraining(CASE)
    y = tf.multiply(training.w, training.x, "y")
    tf.train.Saver().restore(sess, str(tmp_path / CASE.name))
    expected = sess.run(training.w)
    frozen = tf.graph_util.convert_variables_to_constants(sess, graph.as_graph_def(), ["y"])
  assert not [node.name for node in frozen.node if any(part in node.name + node.op for part in LOSS_SCALING_NAMES)]
  assert not [node.name for node in frozen.node if "Variable" in node.op or "VarHandle" in node.op]
  with tf.Graph().as_default(), testing.session() as sess:
    tf.import_graph_def(frozen, name="")
    np.testing.assert_array_equal(sess.run(y.name, {"x:0": np.ones(3)}), expected)
