# SPDX-License-Identifier: Apache-2.0
"""Checks the inner optimizer and the optimizers that it wraps."""

from typing import Any

from mp_compat import horovod
from mp_compat._tensorflow import log
from mp_compat._tensorflow import native
from mp_compat._tensorflow import optimizers
from mp_compat._tensorflow import tf


def check(opt: Any, wrapper: type) -> None:
  """Raises a ValueError if `opt` is not a `tf.train.Optimizer`, or is or wraps one that must wrap `wrapper`."""
  if not isinstance(opt, tf.train.Optimizer):
    is_keras = any(native.is_of_keras(base) for base in type(opt).__mro__)
    raise ValueError(
      '"opt" must be an instance of Optimizer, but got: {}. {}'.format(
        opt if isinstance(opt, type) else type(opt),
        "That is a Keras optimizer; wrap it in mp_compat.keras.LossScaleOptimizer instead."
        if is_keras
        else "Pass an instance of a tf.compat.v1.train.Optimizer, such as tf.compat.v1.train.AdamOptimizer().",
      )
    )
  for layer in optimizers.wrapper_chain(opt):
    if isinstance(layer, (wrapper,) + native.LOSS_SCALE_OPTIMIZERS) or type(layer).__name__ == "LossScaleOptimizer":
      raise ValueError(
        '"opt" must not scale the loss itself, but {} is or wraps a {}: the loss would be scaled '
        "twice. Pass its inner optimizer.".format(type(opt).__name__, type(layer).__name__)
      )
    if isinstance(layer, tf.train.SyncReplicasOptimizer):
      raise ValueError(
        '"opt" must not aggregate the gradients of several workers itself, but {} is or wraps a {}: '
        "after a step that one worker skips, the others would wait forever. Wrap in the other order: "
        "{}(MixedPrecisionLossScaleOptimizer(opt, loss_scale), ...).".format(
          type(opt).__name__, type(layer).__name__, type(layer).__name__
        )
      )


def warn_if_scaled_gradients_are_used(opt: tf.train.Optimizer, name: str, dynamic: bool) -> None:
  """Logs a warning if `opt` sums or clips gradients before they are unscaled."""
  if dynamic and horovod.aggregates_passes(opt):
    log.warn(
      "%s sums the gradients of several passes before they are unscaled. If the loss scale changes between two "
      "passes, the sum is wrong. Wrap in the other order: "
      "hvd.DistributedOptimizer(MixedPrecisionLossScaleOptimizer(opt, loss_scale), backward_passes_per_step=...).",
      name,
    )
  if any(hasattr(layer, "_dp_sum_query") for layer in optimizers.wrapper_chain(opt)):  # tensorflow-privacy
    log.warn(
      "%s clips gradients in compute_gradients(), before they are unscaled, so its l2_norm_clip applies to scaled "
      "gradients. Wrap in the other order: make_optimizer_class(mp_compat.MixedPrecisionLossScaleOptimizer)(..., "
      "opt, loss_scale).",
      name,
    )
