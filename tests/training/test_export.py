"""Tests that MetaGraphs resume training without mp_compat.
tests/programs/test_feeding.py has other exported graphs.
"""

import numpy as np
import pytest

from tests import testing
from tests.checkpoints import golden_cases
from tests.checkpoints import goldens
from tests.testing import tf

CASE = golden_cases.Case("mp_compat", "adam")
PROGRAM = """
import sys
import numpy as np
import tensorflow.compat.v1 as tf

meta_graph, checkpoint, output = sys.argv[1:]
tf.disable_eager_execution()
saver = tf.train.import_meta_graph(meta_graph)
(train_op,) = tf.get_collection(tf.GraphKeys.TRAIN_OP)
with tf.Session() as sess:
  saver.restore(sess, checkpoint)
  for x in np.load(checkpoint + ".feeds.npy"):
    sess.run(train_op, {"x:0": x})
  np.savez(output, **{v.op.name: sess.run(v) for v in tf.global_variables()})
assert "mp_compat" not in sys.modules
"""


def resume_training(meta_graph, checkpoint, tmp_path):
  """Resumes training in a process that imports only TensorFlow. Returns the variables
  after the last step.
  """
  np.save(checkpoint + ".feeds.npy", golden_cases.FEEDS[golden_cases.BEFORE :])
  output = str(tmp_path / "after.npz")
  testing.run_python("-W", "ignore", "-c", PROGRAM, meta_graph, checkpoint, output)
  return dict(np.load(output))


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
