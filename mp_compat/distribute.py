"""Replicas: which context this is, what all of them say, and running something on each (`tf.distribute`).

Without a strategy there is one replica, and every function here does the plain thing.
"""

from typing import Any, Callable, Optional, Tuple

from mp_compat._compat import tf

# Strategies that cannot train with loss scaling, by the name of their class or a base class, and why.
_UNSUPPORTED = dict.fromkeys(["TPUStrategy", "TPUStrategyV1", "TPUStrategyV2"],
                             "TPUs compute in bfloat16, which has float32's range and needs no loss scaling")


def check_supported() -> None:
  """Raises a ValueError where the current strategy cannot train with loss scaling."""
  strategy = tf.distribute.get_strategy()
  for base in type(strategy).__mro__:
    if base.__name__ in _UNSUPPORTED:
      raise ValueError(
          "Loss scaling is not supported with the strategy {}: {}. Use the inner optimizer alone there. Strategies "
          "that work: MirroredStrategy, MultiWorkerMirroredStrategy, ParameterServerStrategy (compat.v1), "
          "CentralStorageStrategy, OneDeviceStrategy.".format(type(strategy).__name__, _UNSUPPORTED[base.__name__]))


def check_replica_context() -> None:
  """Raises a ValueError where gradients cannot be applied: outside of replicas, and where no loss can be scaled."""
  check_supported()
  if in_cross_replica_context():
    raise ValueError("apply_gradients() must be called in a replica context, but this is the cross-replica context of "
                     "{}. Call it inside the function that you give to strategy.run (experimental_run_v2, "
                     "call_for_each_replica).".format(type(tf.distribute.get_strategy()).__name__))


def in_cross_replica_context() -> bool:
  """Whether this code runs once for all replicas, and not once in each."""
  return tf.distribute.in_cross_replica_context()


def merge(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
  """Called in every replica: `function(strategy, *args, **kwargs)` once for all, with the replicas' values joined."""
  return tf.distribute.get_replica_context().merge_call(function, args=args, kwargs=kwargs)


def on_each_replica(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
  """Called once for all: `function(*args, **kwargs)` in every replica, with that replica's values."""
  return tf.distribute.get_strategy().extended.call_for_each_replica(function, args=args, kwargs=kwargs)


def all_replicas(predicate: Callable[..., tf.Tensor], *args: Any) -> tf.Tensor:
  """Called once for all: whether `predicate(*args)` holds in every replica of every worker.

  Args:
    predicate: gives a scalar bool tensor for one replica's values.
    *args: per-replica values.

  Returns:
    A scalar bool tensor, the same on every worker.

  Raises:
    RuntimeError: this is a replica context of a strategy.
  """
  if not tf.distribute.has_strategy():
    return predicate(*args)
  strategy = tf.distribute.get_strategy()
  # Strategies reduce numbers only, and by sum or mean only.
  votes = on_each_replica(lambda *values: tf.cast(predicate(*values), tf.float32), *args)
  return tf.equal(strategy.reduce(tf.distribute.ReduceOp.SUM, votes, axis=None), strategy.num_replicas_in_sync)


def each_local(value: Any) -> Tuple[Any, ...]:
  """The values of this worker's replicas, in order; the one value, without a strategy."""
  return tf.distribute.get_strategy().experimental_local_results(value)


def group(*values: Any, **name: Optional[str]) -> Optional[tf.Operation]:
  """One op (None in eager mode) that runs `values`, each an op, a tensor, None, or one of these for every replica."""
  if tf.executing_eagerly():
    return None
  return tf.group(*[value for value in values if value is not None], **name)
