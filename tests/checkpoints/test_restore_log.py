"""Tests what Saver.restore logs of a checkpoint that it does not restore as it is."""

import mp_compat
from tests import testing
from tests.testing import Optimizer
from tests.testing import sgd
from tests.testing import tf


def test_missing_loss_scale_is_no_other_name(tmp_path, monkeypatch):
  """A float32 checkpoint has all other variables under their names."""
  path = str(tmp_path / "model")
  lines = []
  monkeypatch.setattr(tf.logging, "info", lambda text, *args: lines.append(text % args))
  for wrap in [lambda opt: opt, lambda opt: Optimizer(opt, "dynamic")]:
    with tf.Graph().as_default():
      w = tf.get_variable("w", [2])
      wrap(sgd()).minimize(tf.reduce_sum(w))
      saver = mp_compat.checkpoints.Saver()
      with testing.initialized_session() as sess:
        if not tf.train.checkpoint_exists(path):
          saver.save(sess, path)
        else:
          saver.restore(sess, path)
  (line,) = [line for line in lines if "Restoring" in line]
  assert line == (
    "Restoring parameters from {}, in which some names or dtypes are missing or "
    "differ".format(path)
  )
