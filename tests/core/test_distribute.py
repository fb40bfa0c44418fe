"""Tests of the finite check and the optimizer on replicas."""

import numpy as np
import pytest

import mp_compat
from mp_compat.core import distribute
from tests import testing
from tests.testing import Optimizer
from tests.testing import tf


@pytest.fixture(name="strategy", autouse=True)
def _strategy():
  with tf.Graph().as_default():
    yield tf.distribute.MirroredStrategy(testing.TWO_CPUS)


def on_replicas(strategy, function):
  """Calls `function(x)` on two replicas. Returns the per-replica results and the placeholder [2, 2] of their inputs."""
  x = tf.placeholder(tf.float32, [2, 2])
  with strategy.scope():
    return strategy.extended.call_for_each_replica(
      lambda: function(x[tf.distribute.get_replica_context().replica_id_in_sync_group])
    ), x


def test_single_replica_needs_no_strategy():
  x = tf.placeholder(tf.float32, [])
  with testing.session() as sess:
    assert sess.run(distribute.reduce_all_replicas(tf.is_finite(x)), {x: 1.0})


def test_update_in_replica_context_raises(strategy):
  with pytest.raises(RuntimeError, match="cross-replica context.*merge_call"):
    on_replicas(strategy, mp_compat.DynamicLossScale().update)


def test_applying_requires_replica_context(strategy):
  opt = Optimizer(tf.train.GradientDescentOptimizer(1.0), 8.0)
  with strategy.scope(), pytest.raises(
    ValueError, match=r"apply_gradients\(\) must be called in a replica context, but .* context of MirroredStrategy"
  ):
    opt.apply_gradients([(tf.constant(1.0), None)])


def train(strategy, make_scale, inputs, between):
  """Trains on two replicas. Returns the copies of `w` after every step, and the last loss scale.

  `between` is applied to each gradient before apply_gradients.
  """
  optimizers = []

  def step(x):
    w = tf.get_variable("w", [2], initializer=tf.zeros_initializer())
    optimizers.append(Optimizer(tf.train.GradientDescentOptimizer(0.5), make_scale()))
    grads_and_vars = optimizers[-1].compute_gradients(tf.reduce_sum(w * x))
    return optimizers[-1].apply_gradients([(between(g), v) for g, v in grads_and_vars])

  train_ops, x = on_replicas(strategy, step)
  copies = [copy for v in tf.trainable_variables() for copy in strategy.experimental_local_results(v)]
  train_op = strategy.group(train_ops)
  with testing.initialized_session() as sess:
    after = []
    for value in inputs:
      sess.run(train_op, {x: value})
      after.append(sess.run(copies))
    return after, sess.run(optimizers[0].loss_scale())


@pytest.mark.parametrize(
  "scale, clipped", [("fixed", True), ("dynamic", False), ("created outside", True), ("tensorflow", False)]
)
def test_overflow_on_one_replica_skips_all(strategy, scale, clipped):
  outside = mp_compat.DynamicLossScale()
  make_scale = {
    "fixed": lambda: 8.0,
    "dynamic": lambda: "dynamic",
    "created outside": lambda: outside,
    "tensorflow": testing.native.DynamicLossScale,
  }[scale]
  inputs = [[[0.5, 1.0], [0.5, 1.0]], [[0.5, 1.0], [np.inf, 1.0]], [[np.nan, 1.0], [0.5, 1.0]]]
  clip = (lambda g: tf.clip_by_value(g, -1.0, 1.0)) if clipped else (lambda g: g)
  after, scale_after = train(strategy, make_scale, inputs, clip)
  np.testing.assert_array_equal(after, [[[-0.5, -1.0]] * 2] * 3)
  assert scale_after == {"fixed": 8.0}.get(scale, 2.0**13)


def test_tpu_strategy_raises():
  # The constructor of TPUStrategy needs a TPU, so it is not called.
  strategy = object.__new__(tf.distribute.experimental.TPUStrategy)
  tf.distribute.Strategy.__init__(strategy, tf.distribute.OneDeviceStrategy("/cpu:0").extended)
  strategy.extended._container_strategy_weakref = lambda: strategy
  opt = Optimizer(tf.train.GradientDescentOptimizer(1.0), 8.0)
  words = "not supported with the strategy TPUStrategy.*bfloat16.*MirroredStrategy, MultiWorkerMirroredStrategy"
  w, gradient = tf.get_variable("w", [2]), tf.zeros([2])
  before = len(tf.get_default_graph().get_operations())
  with strategy.scope():
    for build in [lambda: opt.compute_gradients(w), lambda: opt.apply_gradients([(gradient, w)])]:
      with pytest.raises(ValueError, match=words):
        build()
  assert len(tf.get_default_graph().get_operations()) == before


STRATEGIES = {
  "none": tf.distribute.get_strategy,
  "one device": lambda: tf.distribute.OneDeviceStrategy("/cpu:0"),
  "mirrored": lambda: tf.distribute.MirroredStrategy(testing.TWO_CPUS),
  "central storage": lambda: tf.distribute.experimental.CentralStorageStrategy(
    compute_devices=testing.TWO_CPUS, parameter_device="/cpu:0"
  ),
}


@pytest.mark.parametrize("name", sorted(STRATEGIES))
def test_counters_keep_names_in_scopes(name):

  def names(wrap):

    def step():
      with tf.variable_scope("outer"), tf.variable_scope("net"):
        w = tf.get_variable("w", [2], initializer=tf.ones_initializer())
        return wrap(tf.train.AdamOptimizer(1.0)).minimize(tf.reduce_sum(w * w))

    with tf.Graph().as_default():
      strategy = STRATEGIES[name]()
      with strategy.scope():
        strategy.extended.call_for_each_replica(step)
      return sorted(variable.op.name for variable in tf.global_variables())

  assert names(lambda opt: Optimizer(opt, 8.0)) == names(lambda opt: opt)
