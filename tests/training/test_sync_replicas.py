"""Tests of gradients from accumulators, in one process, such as those of a
`tf.train.SyncReplicasOptimizer` around the wrapper.

Several processes are in tests/processes/test_clusters.py.
"""

import numpy as np
import pytest

import mp_compat
from tests import testing
from tests.testing import FINITE
from tests.testing import OVERFLOW
from tests.testing import Optimizer
from tests.testing import tf

pytestmark = pytest.mark.usefixtures("graph")


def train(wrap, inputs, use_resource=True, sparse=False, seconds=60.0):
  """Trains one worker that aggregates its own gradients. Returns the row and the global
  step after every step.

  Raises tf.errors.DeadlineExceededError if a step takes more than `seconds`.
  """
  with tf.variable_scope("", use_resource=use_resource):
    w = tf.get_variable("w", [2], initializer=tf.zeros_initializer())
    table = tf.get_variable("table", [3, 2], initializer=tf.zeros_initializer())
    global_step = tf.train.get_or_create_global_step()
  row, x = (table[1] if sparse else w), tf.placeholder(tf.float32, [2])
  opt = tf.train.SyncReplicasOptimizer(
    wrap(tf.train.GradientDescentOptimizer(1.0)), replicas_to_aggregate=1
  )
  train_op = opt.minimize(
    tf.reduce_sum((tf.gather(table, [1]) if sparse else w) * x), global_step
  )
  config = tf.ConfigProto(operation_timeout_in_ms=int(1000 * seconds))
  after = []
  with tf.train.MonitoredTrainingSession(
    config=config,
    hooks=[opt.make_session_run_hook(True, num_tokens=0)],
    stop_grace_period_secs=1,
  ) as sess:
    for value in inputs:
      sess.run(train_op, {x: value})
      after.append(sess.run([row, global_step]))
  return after


@pytest.mark.parametrize("use_resource, sparse", [(False, True), (True, False)])
def test_skipped_step_does_not_block(use_resource, sparse):
  xs = [FINITE, OVERFLOW, OVERFLOW, FINITE]
  rows, steps = zip(
    *train(lambda opt: Optimizer(opt, "dynamic"), xs, use_resource, sparse)
  )
  np.testing.assert_array_equal(rows, [-FINITE, -FINITE, -FINITE, -2 * FINITE])
  assert steps == (1, 1, 1, 2)


@pytest.mark.slow
def test_skipped_step_blocks_tensorflow_class():
  def wrap(opt):
    return testing.native.MixedPrecisionLossScaleOptimizer(
      opt, testing.native.DynamicLossScale()
    )

  with pytest.raises((tf.errors.DeadlineExceededError, tf.errors.CancelledError)):
    train(wrap, [FINITE, OVERFLOW, FINITE], seconds=4.0)


def test_accumulators_follow_global_step(graph):
  training = testing.Training()
  accumulator = tf.ConditionalAccumulator(tf.float32, [2])
  opt = Optimizer(tf.train.GradientDescentOptimizer(1.0), 8.0)
  opt.apply_gradients([(accumulator.take_grad(1), training.w)], training.global_step)
  (follow,) = [
    op for op in graph.get_operations() if op.type.endswith("AccumulatorSetGlobalStep")
  ]
  (increment,) = [
    op for op in graph.get_operations() if op.type == "AssignAddVariableOp"
  ]
  assert testing.waits_for(follow, increment)


def test_other_steps_add_no_accumulator_ops(graph):
  training = testing.Training()
  opt = Optimizer(tf.train.GradientDescentOptimizer(1.0), 8.0)
  opt.minimize(training.loss, training.global_step)
  # without global_step
  opt.apply_gradients(
    [(tf.ConditionalAccumulator(tf.float32, [2]).take_grad(1), training.w)]
  )
  assert not [op for op in graph.get_operations() if "SetGlobalStep" in op.type]


@pytest.mark.parametrize("use_resource", [True, False])
@pytest.mark.parametrize(
  "skip, first_steps, second_steps",
  [
    ("all", [1, 1, 2, 2, 3], [1, 1, 2, 2, 3]),
    ("each", [1, 2, 3, 3, 4], [1, 1, 2, 2, 3]),
  ],
)
def test_shared_step_keeps_accumulators_current(
  use_resource, skip, first_steps, second_steps
):
  with tf.variable_scope("", use_resource=use_resource):
    weights = [
      tf.get_variable(name, [2], initializer=tf.zeros_initializer()) for name in "dg"
    ]
    global_step = tf.train.get_or_create_global_step()
  inputs = [tf.placeholder(tf.float32, [2]) for _ in weights]
  accumulators = [tf.ConditionalAccumulator(tf.float32, [2]) for _ in weights]
  added = [
    accumulator.apply_grad(grad, local_step=global_step)
    for accumulator, grad in zip(accumulators, inputs)
  ]
  scale = mp_compat.DynamicLossScale(8.0)
  steps = []
  for weight, accumulator in zip(weights, accumulators):
    opt = Optimizer(tf.train.GradientDescentOptimizer(1.0), scale)
    steps.append((opt, [(accumulator.take_grad(1), weight)]))
  train_op = mp_compat.apply_gradients_together(steps, global_step, skip)

  after = []
  config = tf.ConfigProto(operation_timeout_in_ms=60000)
  with tf.Session(config=config) as sess:
    sess.run(tf.global_variables_initializer())
    for first, second in [
      (FINITE, FINITE),
      (FINITE, OVERFLOW),
      (FINITE, FINITE),
      (OVERFLOW, OVERFLOW),
      (FINITE, FINITE),
    ]:
      sess.run(added, dict(zip(inputs, (first, second))))
      sess.run(train_op)
      after.append(sess.run(weights + [global_step]))
  firsts, seconds, global_steps = zip(*after)
  np.testing.assert_array_equal(firsts, np.outer(first_steps, -FINITE))
  np.testing.assert_array_equal(seconds, np.outer(second_steps, -FINITE))
  # with "each", a step counts if one of the optimizers applies it
  assert list(global_steps) == first_steps
