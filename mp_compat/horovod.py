# SPDX-License-Identifier: Apache-2.0
"""Reduces the finite check over the ranks of Horovod, which is imported on first use."""

import sys
from typing import Callable, Iterable, Optional

from mp_compat._tensorflow import contexts
from mp_compat._tensorflow import optimizers
from mp_compat._tensorflow import tf
from mp_compat.core import gradients


def all_ranks_finite(finite: tf.Tensor, name: Optional[str] = None) -> tf.Tensor:
  """Returns whether `finite` is True on every rank: `sum over ranks(not finite) == 0`. For `finite_reducer=`.

  Runs one allreduce, which every rank must run in every step.

  Args:
    finite: a scalar bool tensor; or one of any shape, reduced element by element.
    name: a name scope for the ops.

  Returns:
    A bool tensor of the same shape, the same on all ranks.

  Raises:
    ImportError: If Horovod is not installed.
  """
  import horovod.tensorflow as hvd

  with tf.name_scope(name, "all_ranks_finite", [finite]):
    overflowed = tf.cast(tf.logical_not(finite), tf.float32)
    return tf.equal(hvd.allreduce(overflowed, op=hvd.Sum), 0.0)


def aggregates_passes(optimizer: tf.train.Optimizer) -> bool:
  """Returns whether this is or wraps a `hvd.DistributedOptimizer` with `backward_passes_per_step` above 1."""
  return any(getattr(layer, "_agg_helper", None) is not None for layer in optimizers.wrapper_chain(optimizer))


def default_reducer(
  optimizer: tf.train.Optimizer, grads: Iterable[gradients.Gradient]
) -> Optional[Callable[[tf.Tensor], tf.Tensor]]:
  """Returns `all_ranks_finite` if the finite check of these gradients may differ between ranks, else None.

  The check may differ in two cases:

  - The inner optimizer is one of Horovod's that does not reduce gradients when it computes them (Adasum,
    `backward_passes_per_step` above 1).
  - Horovod reduced the gradients after `compute_gradients` returned them, as a `hvd.DistributedOptimizer` around the
    loss scaling does. The check also covers the gradients that each rank computed.

  Args:
    optimizer: the inner optimizer.
    grads: the gradients of this step.
  """
  if "horovod.tensorflow" not in sys.modules:
    return None
  unreduced = aggregates_passes(optimizer) or any(
    "Adasum" in type(layer).__name__ for layer in optimizers.wrapper_chain(optimizer)
  )
  # Searches back from the gradients for the nearest computed gradients, or Horovod ops that reduced them.
  sources = gradients.nearest_ancestors(
    gradients.values_of(grads),
    lambda tensor: gradients.is_computed(tensor) or contexts.contains_op(tensor.op, "Horovod"),
  )
  if unreduced or any(not gradients.is_computed(tensor) for tensor in sources):
    return all_ranks_finite
  return None
