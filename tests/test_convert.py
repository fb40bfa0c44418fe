"""checkpoints.convert to the likeness of a program's own checkpoint."""

import os

import numpy as np
import pytest

import mp_compat
from mp_compat import checkpoints
from tests import golden_cases
from tests import testing
from tests.testing import tf


def conditional_training(wrap, path, restore_from=None):
  """Adam on two variables in a graph that has conditionals of its own; all variables after going on."""
  with testing.control_flow(1), tf.Graph().as_default(), testing.session() as sess:
    x = tf.placeholder(tf.float32, [2])
    loss = tf.cond(x[0] > 0, lambda: x * 1., lambda: x * 2.)
    loss *= tf.cond(x[1] > 0, lambda: x * 1., lambda: x * 2.)
    w = tf.get_variable("w", initializer=np.array([1., 2.], np.float32), use_resource=True)
    train_op = wrap(tf.train.AdamOptimizer(.1)).minimize(tf.reduce_sum(w * w * loss))
    saver = tf.train.Saver()
    sess.run(tf.global_variables_initializer())
    if restore_from:
      saver.restore(sess, restore_from)
    for value in (1., 1e30, 2.):
      sess.run(train_op, {x: [value, 1.]})
    saver.save(sess, path)
    return {testing.plain_name(variable): value
            for variable, value in zip(tf.global_variables(), sess.run(tf.global_variables()))}


@pytest.mark.parametrize("source, to", [("tensorflow", "mp_compat"), ("mp_compat", "tensorflow"),
                                        ("plain", "tensorflow"), ("tensorflow", "plain")])
def test_a_checkpoint_is_converted_for_a_program_with_conditionals_of_its_own(source, to, tmp_path):
  wraps = {"tensorflow": lambda opt: testing.native.MixedPrecisionLossScaleOptimizer(opt, "dynamic"),
           "mp_compat": lambda opt: mp_compat.MixedPrecisionLossScaleOptimizer(opt, "dynamic"),
           "plain": lambda opt: opt}
  paths = {name: str(tmp_path / name) for name in wraps}
  for name in (source, to):
    conditional_training(wraps[name], paths[name])
  out = str(tmp_path / "out")
  found = checkpoints.convert(paths[source], out, like=paths[to])
  assert set(found.variables) == set(checkpoints.inspect(paths[to]).variables)
  assert "cond_3/beta1_power" in found.variables or to != "tensorflow"
  with open(out + ".meta", "rb") as ours, open(paths[to] + ".meta", "rb") as theirs:
    assert ours.read() == theirs.read()
  went_on = conditional_training(wraps[to], str(tmp_path / "on"), out)
  expected = conditional_training(wraps[source], str(tmp_path / "same"), paths[source])
  assert set(went_on) & set(expected) >= {"w:0", "w/Adam:0", "beta1_power:0"}
  if "plain" not in (source, to):  # which does not skip
    np.testing.assert_equal(went_on, expected)


def golden(optimizer):
  return os.path.join(golden_cases.GOLDENS, "1.15", golden_cases.Case("tensorflow", optimizer).name)


def test_converting_wants_either_a_dialect_or_a_likeness_of_the_same_model(tmp_path):
  path = golden("adam")
  for arguments in ({}, dict(to="plain", like=path)):
    with pytest.raises(ValueError, match="Expected either a dialect"):
      checkpoints.convert(path, str(tmp_path / "out"), **arguments)
  with pytest.raises(ValueError, match="does not have these in the same shape: b/Momentum, w/Momentum. Pass"):
    checkpoints.convert(path, str(tmp_path / "out"), like=golden("momentum"))
