"""Compares our class with TensorFlow's on the same graph and data: all variables are bitwise equal after every step."""

import itertools

import numpy as np
import pytest

import mp_compat
from tests import testing
from tests.testing import tf

OVERFLOWS = (0, 3, 4, 9)
SCALES = {
  "fixed": (lambda: 1024.0, ()),
  "dynamic": (lambda api: api.DynamicLossScale(initial_loss_scale=8, increment_period=3, multiplier=2.0), OVERFLOWS),
  "dynamic_by_3": (lambda api: api.DynamicLossScale(2**10, 2, 3.0), OVERFLOWS),
}


def loss_scaled(api, make_inner, scale):
  """Returns a function that creates the wrapped optimizer with the API `api`, ours or TensorFlow's."""
  if scale == "fixed":
    return lambda: api.MixedPrecisionLossScaleOptimizer(make_inner(), 1024.0)
  return lambda: api.MixedPrecisionLossScaleOptimizer(make_inner(), SCALES[scale][0](api))


def both(make_inner, scale, steps=12, version=1, use_resource=True, **kwargs):
  """Trains with both classes. Returns both histories."""
  xs = list(testing.feeds(steps, SCALES[scale][1]))
  with testing.control_flow(version):
    ours = testing.train(loss_scaled(mp_compat, make_inner, scale), xs, use_resource, **kwargs)
  # TensorFlow's class cannot update reference variables under control flow v2.
  with testing.control_flow(version if use_resource else 1):
    theirs = testing.train(loss_scaled(testing.native, make_inner, scale), xs, use_resource, **kwargs)
  return ours, theirs


@pytest.mark.parametrize(
  "use_resource", [pytest.param(True, id="resource"), pytest.param(False, id="reference", marks=pytest.mark.matrix)]
)
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("scale", sorted(SCALES))
@pytest.mark.parametrize("name", sorted(testing.OPTIMIZERS))
def test_all_variables_match_tensorflow_class(name, scale, version, use_resource):
  ours, theirs = both(testing.OPTIMIZERS[name], scale, version=version, use_resource=use_resource)
  testing.assert_same(ours, theirs)
  assert ours[-1]["global_step:0"] == 12 - len(SCALES[scale][1])


@pytest.mark.parametrize(
  "kwargs",
  [
    dict(gate_gradients=gate, aggregation_method=aggregation, colocate_gradients_with_ops=colocate)
    for gate, aggregation, colocate in itertools.product(
      range(3), [None, tf.AggregationMethod.EXPERIMENTAL_TREE], [False, True]
    )
  ]
  + [dict(grad_loss=lambda: tf.constant(2.5))],
)
def test_compute_gradients_arguments_match_tensorflow_class(kwargs):
  testing.assert_same(*both(testing.OPTIMIZERS["Momentum"], "dynamic", **kwargs))


def test_clipping_by_global_norm_matches_tensorflow_class():

  def clip(grads_and_vars):
    grads, variables = zip(*grads_and_vars)
    return zip(tf.clip_by_global_norm(grads, 0.5)[0], variables)

  testing.assert_same(*both(testing.OPTIMIZERS["Adam"], "dynamic", between=clip))


@pytest.mark.parametrize("scale", ["fixed", "dynamic"])
def test_wrapper_with_tensorflow_loss_scale_matches_tensorflow(scale):
  xs = list(testing.feeds(12, SCALES[scale][1]))
  inner = testing.OPTIMIZERS["Momentum"]

  def make_optimizer():
    tensorflow_scale = testing.native.FixedLossScale(1024.0) if scale == "fixed" else SCALES[scale][0](testing.native)
    return mp_compat.MixedPrecisionLossScaleOptimizer(inner(), tensorflow_scale)

  testing.assert_same(testing.train(make_optimizer, xs), testing.train(loss_scaled(testing.native, inner, scale), xs))


STRATEGIES = {
  "Mirrored": lambda: tf.distribute.MirroredStrategy(testing.TWO_CPUS),
  "CentralStorage": lambda: tf.distribute.experimental.CentralStorageStrategy(testing.TWO_CPUS, "/cpu:0"),
  "OneDevice": lambda: tf.distribute.OneDeviceStrategy("/cpu:0"),
  "MultiWorkerMirrored": lambda: tf.distribute.experimental.MultiWorkerMirroredStrategy(),
  "ParameterServer": lambda: tf.distribute.experimental.ParameterServerStrategy(),
}


def train_distributed(make_optimizer, make_strategy, overflow_at, sparse):
  """Trains `testing.model` with a different input on every replica. Returns all copies of the variables by step."""
  with tf.Graph().as_default():
    strategy = make_strategy()
    replicas = strategy.num_replicas_in_sync
    x = tf.placeholder(tf.float32, [replicas, 3])
    with strategy.scope():
      global_step = tf.train.get_or_create_global_step()

    def step():
      replica_x = tf.gather(x, tf.distribute.get_replica_context().replica_id_in_sync_group)
      return make_optimizer().minimize(testing.model(replica_x, True, sparse), global_step=global_step)

    with strategy.scope():
      train_op = strategy.group(strategy.extended.call_for_each_replica(step))
    variables = [copy for v in tf.global_variables() for copy in strategy.experimental_local_results(v)]
    names = ["{} on {}".format(testing.plain_name(v), v.device) for v in variables]
    with testing.session() as sess:
      sess.run(tf.global_variables_initializer())
      history = []
      # Each overflow occurs on one replica only.
      for inputs in zip(*[testing.feeds(10, overflow_at[replica::replicas]) for replica in range(replicas)]):
        sess.run(train_op, {x: np.stack(inputs)})
        history.append(dict(zip(names, sess.run(variables))))
  return history


@pytest.mark.matrix
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("scale", ["dynamic", "fixed"])
@pytest.mark.parametrize("name", ["Momentum", "Adam"])
@pytest.mark.parametrize("kind", sorted(STRATEGIES))
def test_strategies_match_tensorflow_class(kind, name, scale, version):
  # TensorFlow 1.15's Adam has no sparse update for the variables of CentralStorageStrategy.
  sparse = (kind, name) != ("CentralStorage", "Adam")
  with testing.control_flow(version):
    ours, theirs = [
      train_distributed(loss_scaled(api, testing.OPTIMIZERS[name], scale), STRATEGIES[kind], SCALES[scale][1], sparse)
      for api in [mp_compat, testing.native]
    ]
  testing.assert_same(ours, theirs)
  steps = [value for key, value in ours[-1].items() if key.startswith("global_step")]
  assert set(steps) == {10 - len(SCALES[scale][1])}
