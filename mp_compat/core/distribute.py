# SPDX-License-Identifier: Apache-2.0
"""Replicas of `tf.distribute`: checks the current context, reduces over replicas, and
calls functions in each of them.

Without a strategy there is one replica, and every function uses its value directly.
"""

from typing import Any, Callable, Iterable, List, Optional, Tuple, TypeVar

from mp_compat._tensorflow import tf
from mp_compat.graph import runs

_Result = TypeVar("_Result")

# a value of a strategy with one for each replica; without a strategy, the value itself
PerReplica = Any


def check_supported(by_replica: bool = False) -> None:
  """Checks that the current strategy can train with loss scaling.

  Args:
    by_replica: whether gradients are unscaled in each replica, as by Keras, so that
      variables must be replicated.

  Raises:
    ValueError: If the strategy is of TPUs; with `by_replica`, also if it is a
      ParameterServerStrategy or CentralStorageStrategy.
  """
  strategy = type(tf.distribute.get_strategy())
  # Some classes are private, and their modules differ between TensorFlow versions.
  names = [base.__name__ for base in strategy.__mro__]
  if by_replica:
    for name in names:
      if name.startswith(("ParameterServerStrategy", "CentralStorageStrategy")):
        raise _not_replicated(strategy)
  if not {"TPUStrategy", "TPUStrategyV1", "TPUStrategyV2"}.isdisjoint(names):
    raise _not_needed(strategy)


def _not_replicated(strategy: type) -> ValueError:
  """Returns the error for Keras with a strategy that does not replicate variables."""
  return ValueError(
    "Loss scaling is not supported with the tf.distribute.Strategy: {}. Keras "
    "unscales gradients in each replica, but this strategy does not replicate "
    "variables. Use another, such as MirroredStrategy.".format(strategy.__name__)
  )


def _not_needed(strategy: type) -> ValueError:
  """Returns the error for a strategy on TPUs."""
  return ValueError(
    "Loss scaling is not supported with the strategy {}: TPUs compute in bfloat16, "
    "which has float32's range and needs no loss scaling. Use the inner optimizer "
    "alone there. Strategies that work: MirroredStrategy, "
    "MultiWorkerMirroredStrategy, ParameterServerStrategy (compat.v1), "
    "CentralStorageStrategy, OneDeviceStrategy.".format(strategy.__name__)
  )


def check_replica_context(by_replica: bool = False) -> None:
  """Checks that `apply_gradients` may be called now.

  Raises:
    ValueError: In a cross-replica context, and as `check_supported` does.
  """
  check_supported(by_replica)
  if tf.distribute.in_cross_replica_context():
    strategy = type(tf.distribute.get_strategy())
    raise ValueError(
      "apply_gradients() must be called in a replica context, but this is the "
      "cross-replica context of {}. Call it inside the function that you give to "
      "strategy.run (experimental_run_v2, call_for_each_replica).".format(
        strategy.__name__
      )
    )


def merge_call(
  function: Callable[..., _Result], *args: object, **kwargs: object
) -> _Result:
  """Calls `function(*args, **kwargs)` once for all replicas, in the cross-replica
  context.

  Is itself called in each replica, with that replica's values. `function` gets them as
  per-replica values, and every replica gets its result.
  """
  if not tf.distribute.has_strategy():
    return function(*args, **kwargs)
  return call_in_cross_replica_context(function, *args, **kwargs)


def call_in_cross_replica_context(
  function: Callable[..., _Result], *args: object, **kwargs: object
) -> _Result:
  """Calls `function` in the cross-replica context, as TensorFlow updates loss scales;
  once for all replicas.

  Without a strategy of its own, a program is in a replica context of TensorFlow's
  default strategy, which has one replica.
  """
  if tf.distribute.in_cross_replica_context():
    return function(*args, **kwargs)

  def without_first(_: object, *values: object, **named: object) -> _Result:
    return function(*values, **named)

  context = tf.distribute.get_replica_context()
  return context.merge_call(without_first, args=args, kwargs=kwargs)


def call_for_each_replica(
  function: Callable[..., object], *args: PerReplica, **kwargs: PerReplica
) -> PerReplica:
  """Calls `function(*args, **kwargs)` in every replica, with that replica's values;
  called once for all replicas.
  """
  if not tf.distribute.has_strategy():
    return function(*args, **kwargs)
  return tf.distribute.get_strategy().extended.call_for_each_replica(
    function, args=args, kwargs=kwargs
  )


def reduce_all_replicas(values: PerReplica) -> tf.Tensor:
  """Returns whether bools are True in all replicas of all workers.

  Args:
    values: a per-replica bool tensor, of any shape; without a strategy, a tensor, which
      is returned as it is.

  Returns:
    A bool tensor of the same shape: the AND over the replicas, element by element.
  """
  if not tf.distribute.has_strategy():
    return values

  def as_number(replica_values: tf.Tensor) -> tf.Tensor:
    return tf.cast(replica_values, tf.float32)

  strategy = tf.distribute.get_strategy()
  # Strategies reduce only numbers, and only by sum or mean.
  numbers = call_for_each_replica(as_number, values)
  count = strategy.reduce(tf.distribute.ReduceOp.SUM, numbers, axis=None)
  return tf.equal(count, strategy.num_replicas_in_sync)


def local_results(value: PerReplica) -> Tuple[Any, ...]:
  """Returns the values of this worker's replicas, in order; without a strategy, a tuple
  of the one value.
  """
  return tf.distribute.get_strategy().experimental_local_results(value)


def local_results_of_each(values: Iterable[PerReplica]) -> List[Tuple[Any, ...]]:
  """Returns `local_results` of each of several values."""
  return [local_results(value) for value in values]


def group(*values: PerReplica, **name: Optional[str]) -> Optional[tf.Operation]:
  """Returns one op (None in eager mode) that runs `values`: ops, tensors, None, or
  per-replica ones.
  """
  if tf.executing_eagerly():
    return None
  return tf.group(*ops_of(*values), **name)


def ops_of(*values: PerReplica) -> List[runs.Element]:
  """Returns the ops and tensors in `values`: in lists, tuples and dicts, with None, or
  per replica.
  """
  results: List[runs.Element] = []
  for value in values:
    if isinstance(value, (list, tuple)):
      results += ops_of(*value)
    elif isinstance(value, dict):
      results += ops_of(*value.values())
    elif value is not None:
      # Custom optimizers return ops of their own in each replica.
      local = local_results(value)
      results += [value] if local[0] is value else ops_of(*local)
  return results
