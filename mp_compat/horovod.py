# SPDX-License-Identifier: Apache-2.0
"""Reduces the finite check over the ranks of Horovod, which is imported on first
use.
"""

import sys
from typing import Optional

from mp_compat._tensorflow import optimizers
from mp_compat._tensorflow import tf


def all_ranks_finite(finite: tf.Tensor, name: Optional[str] = None) -> tf.Tensor:
  """Returns whether `finite` is True on every rank: `sum over ranks(not finite) == 0`.
  For `finite_reducer=`.

  Runs one allreduce, which every rank must run in every step. `finite` is a bool tensor
  of any shape, reduced element by element; the result has the same shape, and is the
  same on all ranks. `name` is a name scope for the ops. Raises an ImportError if
  Horovod is not installed.
  """
  import horovod.tensorflow as hvd

  with tf.name_scope(name, "all_ranks_finite", [finite]):
    overflowed = tf.cast(tf.logical_not(finite), tf.float32)
    return tf.equal(hvd.allreduce(overflowed, op=hvd.Sum), 0.0)


def aggregates_passes(optimizer: tf.train.Optimizer) -> bool:
  """Returns whether this is or wraps a `hvd.DistributedOptimizer` with
  `backward_passes_per_step` above 1.
  """
  for layer in optimizers.wrapper_chain(optimizer):
    if vars(layer).get("_agg_helper") is not None:
      return True
  return False


def leaves_gradients_unreduced(optimizer: tf.train.Optimizer) -> bool:
  """Returns whether this is or wraps an optimizer of Horovod that reduces gradients
  only when it applies them.

  Ranks may then disagree on whether their gradients are finite.
  """
  if "horovod.tensorflow" not in sys.modules:
    return False
  for layer in optimizers.wrapper_chain(optimizer):
    if "Adasum" in type(layer).__name__:
      return True
  return aggregates_passes(optimizer)
