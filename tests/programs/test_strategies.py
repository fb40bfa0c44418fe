"""Programs that train with distribution strategies in one process, in graph mode."""

import functools

import numpy as np

import mp_compat
from tests import testing
from tests.programs import table as programs
from tests.testing import tf

TABLE = programs.Table()

STRATEGIES = {
  "one_device": lambda: tf.distribute.OneDeviceStrategy("/cpu:0"),
  "mirrored": lambda: tf.distribute.MirroredStrategy(testing.TWO_CPUS),
  "mirrored_one": lambda: tf.distribute.MirroredStrategy(["/cpu:0"]),
  "multi_worker_mirrored": lambda: (
    tf.distribute.experimental.MultiWorkerMirroredStrategy()
  ),
  "parameter_server": lambda: tf.distribute.experimental.ParameterServerStrategy(),
  "central_storage": lambda: tf.distribute.experimental.CentralStorageStrategy(
    testing.TWO_CPUS
  ),
}


def train_replicas(
  t,
  make_strategy,
  sparse=False,
  change=list,
  make_inner=lambda: None,
  make_scale=None,
  together=False,
):
  strategy = make_strategy()
  scale = t.api and make_scale and make_scale(t.api)
  with strategy.scope():
    step_count = tf.Variable(
      0, trainable=False, dtype=tf.int64, name="step_count", use_resource=True
    )
    w = tf.get_variable(
      "w", initializer=np.array([1.0, -2.0, 3.0], np.float32), use_resource=True
    )
    table = tf.get_variable(
      "table", initializer=np.ones([6, 3], np.float32), use_resource=True
    )

    def replica():
      number = tf.cast(
        tf.distribute.get_replica_context().replica_id_in_sync_group, tf.float32
      )
      # Only one replica overflows: the last one if the value is NaN, otherwise the
      # first one.
      overflows = tf.equal(
        number,
        tf.cast(tf.is_nan(t.x), tf.float32) * (strategy.num_replicas_in_sync - 1.0),
      )
      x = tf.where(
        tf.is_finite(t.x), t.x * (1.0 + number), tf.where(overflows, t.x, tf.ones([3]))
      )
      rows = tf.gather(table, [1, 4, 1]) if sparse else table
      loss = tf.reduce_sum(w * w * x) + tf.reduce_sum(
        rows * rows * (tf.ones([3]) if together else x)
      )
      with tf.variable_scope("outer"), tf.variable_scope("net"):
        optimizer, other = [
          t.wrap(make_inner(), (lambda api: scale) if scale else None) for _ in range(2)
        ]
        pairs = change(optimizer.compute_gradients(loss))
        if together and t.api is mp_compat:
          return mp_compat.apply_gradients_together(
            [(optimizer, pairs[:1]), (other, pairs[1:])], step_count
          )
        return optimizer.apply_gradients(pairs, step_count)

    built = strategy.extended.call_for_each_replica(replica)
    if isinstance(built, list):  # which TensorFlow 1.15 cannot group
      return tf.group(*[strategy.group(op) for op in built])
    return strategy.group(built)


def clip_pairs(pairs):
  grads, variables = zip(*pairs)
  return zip(tf.clip_by_global_norm(grads, 0.5)[0], variables)


def clip_values(pairs):
  return [
    (tf.clip_by_value(tf.convert_to_tensor(grad), -0.5, 0.5), v) for grad, v in pairs
  ]


class Grouping(tf.train.MomentumOptimizer):
  """Returns an op of the replica."""

  def __init__(self):
    super().__init__(0.1, 0.9)

  def apply_gradients(self, grads_and_vars, global_step=None, name=None):
    return tf.group(
      super().apply_gradients(grads_and_vars, global_step), tf.no_op(), name=name
    )


class Listing(tf.train.MomentumOptimizer):
  """Returns a list of ops of the replica."""

  def __init__(self):
    super().__init__(0.1, 0.9)

  def apply_gradients(self, grads_and_vars, global_step=None, name=None):
    return [super().apply_gradients(grads_and_vars, global_step, name), tf.no_op()]


KINDS = {
  "dense": {},
  "listed": {"make_inner": Listing},
  "sparse": {"sparse": True},
  "clipped": {"change": clip_pairs},
  "clipped_values_of": {
    "change": clip_values,
    "make_scale": lambda api: api.DynamicLossScale(2**10, 3),
  },
  "together_applied": {
    "together": True,
    "make_scale": lambda api: api.DynamicLossScale(2**10, 3),
  },
  "locked": {
    "make_inner": lambda: tf.train.GradientDescentOptimizer(0.1, use_locking=True)
  },
  "grouped": {
    "make_inner": Grouping,
    "change": clip_values,
    "make_scale": lambda api: 8.0,
  },
  "adam_for": {
    "make_inner": lambda: tf.train.AdamOptimizer(0.1),
    "make_scale": lambda api: testing.native.DynamicLossScale(2**10, 3),
  },
}


def explain_reference_failure(kind, name, variant):
  """Returns why TensorFlow's class fails with a strategy, or None."""
  if kind == "adam_for":
    return "the beta powers are not in the name scope"
  several = kind == "listed" and name in ("mirrored", "central_storage")
  if several and variant == programs.V2 and programs.VERSION <= (2, 4):
    return "it groups ops of several replicas in a branch"
  return None


for name, make_strategy in STRATEGIES.items():
  for kind, settings in KINDS.items():
    TABLE.add(
      "{}_gradients_with_strategy_{}".format(kind, name),
      functools.partial(train_replicas, make_strategy=make_strategy, **settings),
      variants=programs.RESOURCE,
      slow=name != "mirrored" and kind != "adam_for",
      hidden=settings.get("change") is clip_values,
      tensorflow_fails=functools.partial(explain_reference_failure, kind, name),
    )


test_program_trains_with_the_same_numbers = TABLE.make_test()
