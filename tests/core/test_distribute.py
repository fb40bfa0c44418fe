"""Replicas: agreement, and the optimizer in their contexts. Same numbers as TensorFlow's: test_same_numbers.py."""

import numpy as np
import pytest

import mp_compat
from mp_compat.core import distribute
from tests import testing
from tests.testing import tf

GOOD, BAD = [1., 2.], [np.nan, 2.]


@pytest.fixture(name="strategy", autouse=True)
def _strategy():
  with tf.Graph().as_default():
    yield tf.distribute.MirroredStrategy(testing.TWO_CPUS)


def on_replicas(strategy, function):
  """`function(x)` on both replicas, with an input of their own; gives the results joined, and what to feed."""
  x = tf.placeholder(tf.float32, [2, 2])
  with strategy.scope():
    return strategy.extended.call_for_each_replica(
        lambda: function(x[tf.distribute.get_replica_context().replica_id_in_sync_group])), x


def test_all_replicas_must_agree(strategy):
  values, x = on_replicas(strategy, tf.identity)
  with strategy.scope():
    agreed = distribute.reduce_all_replicas(distribute.call_for_each_replica(
        lambda value: tf.reduce_all(tf.is_finite(value)), values))
  with testing.session() as sess:
    answers = [sess.run(agreed, {x: inputs}) for inputs in [[GOOD, GOOD], [GOOD, BAD], [BAD, GOOD], [BAD, BAD]]]
  assert agreed.shape == [] and answers == [True, False, False, False]


def test_without_a_strategy_one_replica_decides():
  x = tf.placeholder(tf.float32, [])
  with testing.session() as sess:
    assert sess.run(distribute.reduce_all_replicas(tf.is_finite(x)), {x: 1.})


def test_a_replica_alone_cannot_ask_for_agreement(strategy):
  with pytest.raises(RuntimeError, match="cross-replica context.*merge_call"):
    on_replicas(strategy, mp_compat.DynamicLossScale().update)


def test_gradients_are_applied_in_replica_contexts_only(strategy):
  opt = mp_compat.MixedPrecisionLossScaleOptimizer(tf.train.GradientDescentOptimizer(1.), 8.)
  with strategy.scope(), pytest.raises(
      ValueError, match=r"apply_gradients\(\) must be called in a replica context, but .* context of MirroredStrategy"):
    opt.apply_gradients([(tf.constant(1.), None)])


def train(strategy, make_optimizer, inputs, between=lambda g: g):
  """Sums of gradients over replicas, applied: the copies of `w` after every step, and the optimizer."""
  made = []

  def step(x):
    w = tf.get_variable("w", [2], initializer=tf.zeros_initializer())
    made.append(make_optimizer())
    grads_and_vars = made[-1].compute_gradients(tf.reduce_sum(w * x))
    return made[-1].apply_gradients([(between(g), v) for g, v in grads_and_vars])

  train_ops, x = on_replicas(strategy, step)
  copies = [copy for v in tf.trainable_variables() for copy in strategy.experimental_local_results(v)]
  with testing.session() as sess:
    sess.run(tf.global_variables_initializer())
    after = []
    for value in inputs:
      sess.run(strategy.group(train_ops), {x: value})
      after.append(sess.run(copies))
    scale = sess.run(made[0].loss_scale())
  return after, scale


@pytest.mark.parametrize("scale", ["fixed", "dynamic", "built outside", "tensorflow's"])
@pytest.mark.parametrize("hidden", [False, True])
def test_one_replicas_overflow_skips_the_step_on_all_even_when_clipped_away(strategy, scale, hidden):
  outside = mp_compat.DynamicLossScale()
  make_scale = {"fixed": lambda: 8., "dynamic": lambda: "dynamic", "built outside": lambda: outside,
                "tensorflow's": testing.native.DynamicLossScale}[scale]
  clip = (lambda g: tf.clip_by_value(g, -1., 1.)) if hidden else (lambda g: g)
  after, scale_after = train(
      strategy, lambda: mp_compat.MixedPrecisionLossScaleOptimizer(tf.train.GradientDescentOptimizer(.5), make_scale()),
      [[[.5, 1.], [.5, 1.]], [[.5, 1.], [np.inf, 1.]], [[np.nan, 1.], [.5, 1.]]], clip)
  for copies in after:
    assert len(copies) == 2
    for copy in copies:
      np.testing.assert_array_equal(copy, [-.5, -1.])
  assert scale_after == {"fixed": 8.}.get(scale, 2. ** 13)


def strategies():
  one = {"OneDeviceStrategy": lambda: tf.distribute.OneDeviceStrategy("/cpu:0")}
  return dict(one, **{name: getattr(tf.distribute.experimental, name)
                      for name in ["CentralStorageStrategy", "ParameterServerStrategy"]})


@pytest.mark.parametrize("name", sorted(strategies()))
def test_other_strategies_train_and_skip(name):
  strategy = strategies()[name]()
  x = tf.placeholder(tf.float32, [2])

  def step():
    w = tf.get_variable("w", [2], initializer=tf.zeros_initializer())
    opt = mp_compat.MixedPrecisionLossScaleOptimizer(tf.train.AdamOptimizer(1.), "dynamic")
    global_step = tf.train.get_or_create_global_step()
    return opt.minimize(tf.reduce_sum(w * x), global_step), opt.loss_scale(), global_step

  with strategy.scope():
    train_op, *state = strategy.extended.call_for_each_replica(step)
  after = []
  with testing.session() as sess:
    sess.run(tf.global_variables_initializer())
    for value in [GOOD, BAD, GOOD]:
      sess.run(train_op, {x: value})
      after.append(tuple(sess.run(state)))
  assert after == [(2. ** 15, 1), (2. ** 14, 1), (2. ** 14, 2)]


def test_tpus_are_refused_before_anything_is_built():
  # A TPUStrategy as TensorFlow makes it, but for the TPU that its constructor would look for.
  strategy = object.__new__(tf.distribute.experimental.TPUStrategy)
  tf.distribute.Strategy.__init__(strategy, tf.distribute.OneDeviceStrategy("/cpu:0").extended)
  strategy.extended._container_strategy_weakref = lambda: strategy
  opt = mp_compat.MixedPrecisionLossScaleOptimizer(tf.train.GradientDescentOptimizer(1.), 8.)
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
        compute_devices=testing.TWO_CPUS, parameter_device="/cpu:0"),
}


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("name", sorted(STRATEGIES))
def test_counters_in_variable_scopes_keep_their_names(name, version):

  def names(wrap):

    def step():
      with tf.variable_scope("outer"), tf.variable_scope("net"):
        w = tf.get_variable("w", [2], initializer=tf.ones_initializer())
        return wrap(tf.train.AdamOptimizer(1.)).minimize(tf.reduce_sum(w * w))

    with tf.Graph().as_default(), testing.control_flow(version):
      strategy = STRATEGIES[name]()
      with strategy.scope():
        strategy.extended.call_for_each_replica(step)
      return sorted(variable.op.name for variable in tf.global_variables())

  assert names(lambda opt: mp_compat.MixedPrecisionLossScaleOptimizer(opt, 8.)) == names(lambda opt: opt)
