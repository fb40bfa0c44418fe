"""Programs that train with distribution strategies in one process, in graph mode."""

import functools

import numpy as np

from tests import testing
from tests.programs import table as programs
from tests.testing import tf

TABLE = programs.Table()

STRATEGIES = {
  "one_device": lambda: tf.distribute.OneDeviceStrategy("/cpu:0"),
  "mirrored": lambda: tf.distribute.MirroredStrategy(testing.TWO_CPUS),
  "mirrored_one": lambda: tf.distribute.MirroredStrategy(["/cpu:0"]),
  "multi_worker_mirrored": lambda: tf.distribute.experimental.MultiWorkerMirroredStrategy(),
  "parameter_server": lambda: tf.distribute.experimental.ParameterServerStrategy(),
  "central_storage": lambda: tf.distribute.experimental.CentralStorageStrategy(testing.TWO_CPUS),
}


def train_replicas(t, make_strategy, sparse=False, change=list, make_inner=lambda: None):
  strategy = make_strategy()
  with strategy.scope():
    step_count = tf.Variable(0, trainable=False, dtype=tf.int64, name="step_count", use_resource=True)
    w = tf.get_variable("w", initializer=np.array([1.0, -2.0, 3.0], np.float32), use_resource=True)
    table = tf.get_variable("table", initializer=np.ones([6, 3], np.float32), use_resource=True)

    def replica():
      number = tf.cast(tf.distribute.get_replica_context().replica_id_in_sync_group, tf.float32)
      # Only one replica overflows.
      x = tf.where(tf.is_finite(t.x), t.x * (1.0 + number), tf.where(tf.fill([3], number > 0.0), tf.ones([3]), t.x))
      rows = tf.gather(table, [1, 4, 1]) if sparse else table
      loss = tf.reduce_sum(w * w * x) + tf.reduce_sum(rows * rows * x)
      optimizer = t.wrap(make_inner())
      return optimizer.apply_gradients(change(optimizer.compute_gradients(loss)), step_count)

    return strategy.group(strategy.extended.call_for_each_replica(replica))


def clip_pairs(pairs):
  grads, variables = zip(*pairs)
  return zip(tf.clip_by_global_norm(grads, 0.5)[0], variables)


class Grouping(tf.train.MomentumOptimizer):
  """Returns an op of the replica."""

  def __init__(self):
    super().__init__(0.1, 0.9)

  def apply_gradients(self, grads_and_vars, global_step=None, name=None):
    return tf.group(super().apply_gradients(grads_and_vars, global_step), tf.no_op(), name=name)


KINDS = {
  "dense": {},
  "sparse": {"sparse": True},
  "clipped": {"change": clip_pairs},
  "grouped": {"make_inner": Grouping},
}
RUN_BY_DEFAULT = [
  ("mirrored", "dense"),
  ("mirrored", "sparse"),
  ("mirrored", "grouped"),
  ("one_device", "clipped"),
  ("central_storage", "sparse"),
]
for name, make_strategy in STRATEGIES.items():
  for kind, settings in KINDS.items():
    TABLE.add(
      "{}_gradients_with_strategy_{}".format(kind, name),
      functools.partial(train_replicas, make_strategy=make_strategy, **settings),
      variants=programs.RESOURCE,
      slow=(name, kind) not in RUN_BY_DEFAULT,
    )


test_program_trains_with_the_same_numbers = TABLE.make_test()
