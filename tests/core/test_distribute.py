"""Tests of the finite check and the optimizer on replicas;
tests/programs/test_strategies.py trains on them.
"""

import numpy as np
import pytest

import mp_compat
from tests import testing
from tests.testing import Optimizer
from tests.testing import tf


@pytest.fixture(name="strategy", autouse=True)
def _strategy():
  with tf.Graph().as_default():
    yield tf.distribute.MirroredStrategy(testing.TWO_CPUS)


def test_update_in_replica_context_raises(strategy):
  scale, grads = mp_compat.DynamicLossScale(), [tf.constant(1.0)]
  with strategy.scope(), pytest.raises(
    RuntimeError, match="cross-replica context.*merge_call"
  ):
    strategy.extended.call_for_each_replica(lambda: scale.update(grads))


def test_applying_requires_replica_context(strategy):
  opt = Optimizer(tf.train.GradientDescentOptimizer(1.0), 8.0)
  with strategy.scope(), pytest.raises(
    ValueError,
    match=r"apply_gradients\(\) must be called in a replica context, but .* context of MirroredStrategy",
  ):
    opt.apply_gradients([(tf.constant(1.0), None)])


class InDict(tf.train.GradientDescentOptimizer):
  """Returns a dict of what it built."""

  def apply_gradients(self, *args, **kwargs):
    return {"applied": super().apply_gradients(*args, **kwargs), "other": None}


@pytest.mark.usefixtures("control_flow")
def test_inner_optimizer_may_return_dict(strategy):
  x = tf.placeholder(tf.float32, [2])
  opt = Optimizer(InDict(1.0), "dynamic")

  def step():
    w = tf.get_variable("w", [2], initializer=tf.zeros_initializer())
    return opt.minimize(tf.reduce_sum(w * x), var_list=[w])

  with strategy.scope():
    train_op = strategy.group(strategy.extended.call_for_each_replica(step))
  with testing.initialized_session() as sess:
    for value in [testing.OVERFLOW, testing.FINITE]:
      sess.run(train_op, {x: value})
    for value in sess.run(tf.trainable_variables()):
      np.testing.assert_array_equal(value, -2.0 * testing.FINITE)


def test_tpu_strategy_raises():
  # The constructor of TPUStrategy needs a TPU, so it is not called.
  strategy = object.__new__(tf.distribute.experimental.TPUStrategy)
  tf.distribute.Strategy.__init__(
    strategy, tf.distribute.OneDeviceStrategy("/cpu:0").extended
  )
  strategy.extended._container_strategy_weakref = lambda: strategy
  opt = Optimizer(tf.train.GradientDescentOptimizer(1.0), 8.0)
  words = "not supported with the strategy TPUStrategy.*bfloat16.*MirroredStrategy, MultiWorkerMirroredStrategy"
  w, gradient = tf.get_variable("w", [2]), tf.zeros([2])
  before = len(tf.get_default_graph().get_operations())
  with strategy.scope():
    for build in [
      lambda: opt.compute_gradients(w),
      lambda: opt.apply_gradients([(gradient, w)]),
    ]:
      with pytest.raises(ValueError, match=words):
        build()
  assert len(tf.get_default_graph().get_operations()) == before
