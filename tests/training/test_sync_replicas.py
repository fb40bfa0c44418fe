"""`tf.train.SyncReplicasOptimizer` around the loss scaling. Real workers: test_processes.py."""

import numpy as np
import pytest

import mp_compat
from tests import testing
from tests.testing import BAD
from tests.testing import GOOD
from tests.testing import tf


@pytest.fixture(autouse=True, params=[1, 2], ids=["control_flow_v1", "control_flow_v2"])
def _control_flow(request):
  with testing.control_flow(request.param), tf.Graph().as_default():
    yield


def train(wrap, inputs, use_resource=True, sparse=False, seconds=60.):
  """One worker that aggregates its own gradients: `w` and the global step after every step.

  A step that hangs ends in tf.errors.DeadlineExceededError.
  """
  with tf.variable_scope("", use_resource=use_resource):
    w = tf.get_variable("w", [2], initializer=tf.zeros_initializer())
    table = tf.get_variable("table", [3, 2], initializer=tf.zeros_initializer())
    global_step = tf.train.get_or_create_global_step()
  row, x = (table[1] if sparse else w), tf.placeholder(tf.float32, [2])
  opt = tf.train.SyncReplicasOptimizer(wrap(tf.train.GradientDescentOptimizer(1.)), replicas_to_aggregate=1)
  train_op = opt.minimize(tf.reduce_sum((tf.gather(table, [1]) if sparse else w) * x), global_step)
  config = tf.ConfigProto(operation_timeout_in_ms=int(1000 * seconds))
  after = []
  with tf.train.MonitoredTrainingSession(
      config=config, hooks=[opt.make_session_run_hook(True, num_tokens=0)], stop_grace_period_secs=1) as sess:
    for value in inputs:
      sess.run(train_op, {x: value})
      after.append(sess.run([row, global_step]))
  return after


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("use_resource", [False, True])
def test_the_step_after_a_skipped_one_does_not_wait_for_ever(use_resource, sparse):
  after = train(lambda opt: mp_compat.MixedPrecisionLossScaleOptimizer(opt, "dynamic"), [GOOD, BAD, BAD, GOOD],
                use_resource, sparse)
  np.testing.assert_array_equal([w for w, _ in after], [-GOOD, -GOOD, -GOOD, -2 * GOOD])
  assert [step for _, step in after] == [1, 1, 1, 2]


@pytest.mark.slow
def test_tensorflows_class_waits_for_ever():
  native = testing.native
  with pytest.raises((tf.errors.DeadlineExceededError, tf.errors.CancelledError)):
    train(lambda opt: native.MixedPrecisionLossScaleOptimizer(opt, native.DynamicLossScale()), [GOOD, BAD, GOOD],
          seconds=4.)


def test_the_accumulators_follow_the_step_that_was_made():
  job = testing.Job()
  accumulator = tf.ConditionalAccumulator(tf.float32, [2])
  opt = mp_compat.MixedPrecisionLossScaleOptimizer(tf.train.GradientDescentOptimizer(1.), 8.)
  opt.apply_gradients([(accumulator.take_grad(1), job.w)], job.global_step)
  operations = tf.get_default_graph().get_operations()
  follow, = [op for op in operations if op.type.endswith("AccumulatorSetGlobalStep")]
  increment, = [op for op in operations if op.type == "AssignAddVariableOp"]
  assert testing.waits_for(follow, increment)


def test_other_gradients_need_no_op_for_it():
  job = testing.Job()
  mp_compat.MixedPrecisionLossScaleOptimizer(tf.train.GradientDescentOptimizer(1.), 8.).minimize(
      job.loss, job.global_step)
  assert not [op for op in tf.get_default_graph().get_operations() if "SetGlobalStep" in op.type]


def test_the_other_order_is_refused_with_the_one_that_works():
  inner = tf.train.SyncReplicasOptimizer(tf.train.GradientDescentOptimizer(1.), 1)
  with pytest.raises(ValueError, match=r"SyncReplicasOptimizer.*Put it outside: SyncReplicasOptimizer\("
                                       r"MixedPrecisionLossScaleOptimizer\(opt, loss_scale\), ...\)"):
    mp_compat.MixedPrecisionLossScaleOptimizer(inner, 8.)
