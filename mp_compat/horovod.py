"""Horovod: agreement of all ranks. Horovod itself is imported when a function here needs it."""

import sys
from typing import Callable, Iterable, Optional

from mp_compat import _compat
from mp_compat import gradients
from mp_compat._compat import tf


def all_ranks_finite(finite: tf.Tensor, name: Optional[str] = None) -> tf.Tensor:
  """Whether this holds on every rank: `sum over ranks(not finite) == 0`. For `finite_reducer=`.

  One allreduce of a scalar, which every rank has to run in every step.

  Args:
    finite: a scalar bool tensor.
    name: a name for the op.

  Returns:
    A scalar bool tensor, the same on all ranks.

  Raises:
    ImportError: Horovod is not installed.
  """
  import horovod.tensorflow as hvd
  with tf.name_scope(name, "all_ranks_finite", [finite]):
    overflowed = tf.cast(tf.logical_not(finite), tf.float32)
    return tf.equal(hvd.allreduce(overflowed, op=hvd.Sum), 0.)


def adds_up_passes(optimizer: tf.train.Optimizer) -> bool:
  """Whether this is or wraps a `hvd.DistributedOptimizer` with `backward_passes_per_step` above 1."""
  return any(getattr(layer, "_agg_helper", None) is not None for layer in _compat.layers(optimizer))


def default_reducer(optimizer: tf.train.Optimizer,
                    grads: Iterable[gradients.Gradient]) -> Optional[Callable[[tf.Tensor], tf.Tensor]]:
  """Returns `all_ranks_finite` if the finite check of these gradients may differ between ranks, else None.

  It may if the inner optimizer is one of Horovod's that leaves gradients as each rank computed them (Adasum,
  `backward_passes_per_step` above 1), and if Horovod reduced the gradients after `compute_gradients` returned them, as
  with a `hvd.DistributedOptimizer` around the loss scaling: the check covers what each rank computed.

  Args:
    optimizer: the inner optimizer.
    grads: gradients of this step.
  """
  if "horovod.tensorflow" not in sys.modules:
    return None
  unreduced = adds_up_passes(optimizer) or any(
      "Adasum" in type(layer).__name__ for layer in _compat.layers(optimizer))
  # Back from the gradients, what comes first: the computed gradients, or an op of Horovod's that reduced them?
  sources = gradients.nearest_sources(gradients.values_of(grads), lambda tensor: gradients.is_computed(tensor)
                                      or _compat.contains_op(tensor.op, "Horovod"))
  if unreduced or any(not gradients.is_computed(tensor) for tensor in sources):
    return all_ranks_finite
  return None
