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


def values_of(text):
  return {value.tag: value.simple_value for value in tf.Summary.FromString(text).value}


def test_summaries_show_their_own_step():
  with tf.Graph().as_default():
    training = Training()
    opt = Optimizer(tf.train.GradientDescentOptimizer(1.0), mp_compat.DynamicLossScale(16.0, 2))
    train_op = opt.minimize(training.loss, training.global_step)
    summaries = mp_compat.loss_scale_summaries(opt)
    assert summaries == tf.get_collection(tf.GraphKeys.SUMMARIES)
    merged = tf.summary.merge_all()
    seen = []
    with testing.initialized_session() as sess:
      for x in [FINITE, FINITE, OVERFLOW, OVERFLOW, FINITE]:
        seen.append(values_of(sess.run([train_op, merged], {training.x: x})[1]))
      steps = sess.run(training.global_step)
      assert values_of(sess.run(merged, {training.x: FINITE})) == {"loss_scale/scale": 8.0, "loss_scale/applied": 1.0}
      assert sess.run(training.global_step) == steps == 3  # summaries alone do not train
  assert [values["loss_scale/scale"] for values in seen] == [16.0, 16.0, 32.0, 16.0, 8.0]
  assert [values["loss_scale/applied"] for values in seen] == [1.0, 1.0, 0.0, 0.0, 1.0]


def test_skipped_branch_is_zero():
  with tf.Graph().as_default(), testing.control_flow(1):
    training = Training()
    opt = Optimizer(tf.train.GradientDescentOptimizer(1.0), 8.0)
    executed = tf.placeholder(tf.bool, [])
    tf.cond(executed, lambda: opt.minimize(training.loss), tf.no_op)
    mp_compat.loss_scale_summaries(opt)
    merged = tf.summary.merge_all()
    with testing.initialized_session() as sess:
      assert [values_of(sess.run(merged, {training.x: FINITE, executed: value})) for value in (True, False)] == [
        {"loss_scale/applied": 1.0},
        {"loss_scale/applied": 0.0},
      ]


@pytest.mark.parametrize("replica, loss_scale", [(0, lambda: 8.0), (1, testing.native.DynamicLossScale)])
def test_summaries_work_on_replicas(loss_scale, replica):
  strategy = tf.distribute.MirroredStrategy(testing.TWO_CPUS)
  optimizers = []

  def step():
    w = tf.get_variable("w", [], initializer=tf.zeros_initializer())
    optimizers.append(Optimizer(tf.train.GradientDescentOptimizer(1.0), loss_scale()))
    return optimizers[-1].minimize(w * tf.placeholder_with_default(np.float32(np.inf), []))

  with tf.Graph().as_default():
    with strategy.scope():
      train_op = strategy.group(strategy.extended.call_for_each_replica(step))
    mp_compat.loss_scale_summaries(optimizers[replica])
    with testing.initialized_session() as sess:
      _, text = sess.run([train_op, tf.summary.merge_all()])
  assert values_of(text)["loss_scale/applied"] == 0.0
