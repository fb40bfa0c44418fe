"""Tests of scalar summaries of a step."""

import numpy as np
import pytest

import mp_compat
from tests import testing
from tests.testing import FINITE
from tests.testing import OVERFLOW
from tests.testing import Optimizer
from tests.testing import Training
from tests.testing import tf

pytestmark = pytest.mark.usefixtures("graph")


def values_of(text):
  return {value.tag: value.simple_value for value in tf.Summary.FromString(text).value}


def test_summaries_show_their_own_step():
  training = Training()
  opt = Optimizer(tf.train.GradientDescentOptimizer(1.0), mp_compat.DynamicLossScale(16.0, 2))
  train_op = opt.minimize(training.loss, training.global_step)
  assert mp_compat.loss_scale_summaries(opt) == tf.get_collection(tf.GraphKeys.SUMMARIES)
  merged = tf.summary.merge_all()
  with testing.initialized_session() as sess:
    for x, scale, applied in [(FINITE, 16, 1), (FINITE, 16, 1), (OVERFLOW, 32, 0), (OVERFLOW, 16, 0), (FINITE, 8, 1)]:
      _, text = sess.run([train_op, merged], {training.x: x})
      assert values_of(text) == {"loss_scale/scale": scale, "loss_scale/applied": applied}
    assert values_of(sess.run(merged, {training.x: FINITE})) == {"loss_scale/scale": 8.0, "loss_scale/applied": 1.0}
    assert sess.run(training.global_step) == 3  # summaries alone do not train


def test_skipped_branch_is_zero():
  training = Training()
  opt = Optimizer(tf.train.GradientDescentOptimizer(1.0), 8.0)
  executed = tf.placeholder(tf.bool, [])
  with testing.control_flow(1):
    tf.cond(executed, lambda: opt.minimize(training.loss), tf.no_op)
    mp_compat.loss_scale_summaries(opt)
  merged = tf.summary.merge_all()
  with testing.initialized_session() as sess:
    for value, applied in [(True, 1.0), (False, 0.0)]:
      text = sess.run(merged, {training.x: FINITE, executed: value})
      assert values_of(text) == {"loss_scale/applied": applied}


@pytest.mark.parametrize("replica, loss_scale", [(0, lambda: 8.0), (1, testing.native.DynamicLossScale)])
def test_summaries_work_on_replicas(loss_scale, replica):
  optimizers = []

  def step():
    w = tf.get_variable("w", [], initializer=tf.zeros_initializer())
    optimizers.append(Optimizer(tf.train.GradientDescentOptimizer(1.0), loss_scale()))
    return optimizers[-1].minimize(w * tf.placeholder_with_default(np.float32(np.inf), []))

  train_op = testing.call_on_replicas(step)
  mp_compat.loss_scale_summaries(optimizers[replica])
  with testing.initialized_session() as sess:
    _, text = sess.run([train_op, tf.summary.merge_all()])
  assert values_of(text)["loss_scale/applied"] == 0.0
