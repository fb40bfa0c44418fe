"""`tf.contrib.mixed_precision` of TensorFlow 1.15, on every version and without its defects.

The same names, numbers to the bit, and variables: `loss_scale` (float32), `good_steps` and `bad_steps` (int32). The
optimizer is `mp_compat.MixedPrecisionLossScaleOptimizer`, so that gradients may be None, sparse, or come in any
iterable, replicas agree, and Adam's powers have the names that they have without loss scaling.

Source: `tf.contrib.mixed_precision`.
"""

import abc
from typing import Any, Dict, Optional

from mp_compat import loss_scale
from mp_compat import optimizer
from mp_compat import update_rule
from mp_compat._compat import tf

__all__ = [
    "ExponentialUpdateLossScaleManager",
    "FixedLossScaleManager",
    "LossScaleManager",
    "LossScaleOptimizer",
]


class LossScaleManager(loss_scale.FiniteLossScale):
  """Says what the loss is multiplied by, and how that changes; to be subclassed.

  Every manager is an `mp_compat.LossScale`, too.

  Source: `tf.contrib.mixed_precision.LossScaleManager`.
  """

  @abc.abstractmethod
  def get_loss_scale(self) -> Any:
    """The loss scale: a float32 scalar, a tensor or a variable."""

  @abc.abstractmethod
  def update_loss_scale(self, finite_grads: tf.Tensor) -> Optional[tf.Operation]:
    """Moves the loss scale after a step.

    Args:
      finite_grads: a scalar bool tensor, whether all gradients of the step are finite.

    Returns:
      An op; in eager mode it may be None.
    """

  def __call__(self) -> tf.Tensor:
    return tf.convert_to_tensor(self.get_loss_scale())

  def _update_scale(self, finite: tf.Tensor) -> Optional[tf.Operation]:
    return self.update_loss_scale(finite)

  def get_config(self) -> Dict[str, Any]:
    """Nothing: `tf.contrib`'s managers have no configs."""
    return {}


class FixedLossScaleManager(LossScaleManager):
  """The same loss scale at every step.

  Source: `tf.contrib.mixed_precision.FixedLossScaleManager`.
  """

  def __init__(self, loss_scale: float) -> None:
    """Makes a manager.

    Args:
      loss_scale: a number of at least 1.

    Raises:
      ValueError: it is below 1, or NaN.
    """
    if not loss_scale >= 1:
      raise ValueError("loss scale must be at least 1. A number was expected, but got {!r}.".format(loss_scale))
    self._loss_scale = loss_scale

  def get_loss_scale(self) -> tf.Tensor:
    return tf.convert_to_tensor(self._loss_scale, tf.float32)

  def update_loss_scale(self, finite_grads: tf.Tensor) -> Optional[tf.Operation]:
    del finite_grads
    return tf.no_op()

  def get_config(self) -> Dict[str, Any]:
    return {"loss_scale": self._loss_scale}


class ExponentialUpdateLossScaleManager(LossScaleManager):
  """A loss scale that grows after finite steps in a row, and shrinks after steps that were not, in a row or not.

      incr_every_n_steps finite steps in a row      loss_scale *= incr_ratio, up to 2**126
      decr_every_n_nan_or_inf others                loss_scale = max(1, loss_scale * decr_ratio)

  Both counts begin anew when either is reached; a step that is not finite also ends a row.

  Source: `tf.contrib.mixed_precision.ExponentialUpdateLossScaleManager`.
  """

  def __init__(self,
               init_loss_scale: float,
               incr_every_n_steps: int,
               decr_every_n_nan_or_inf: int = 2,
               incr_ratio: float = 2,
               decr_ratio: float = 0.8) -> None:
    """Makes a manager and, in the current graph, its variables.

    Args:
      init_loss_scale: the loss scale to begin with.
      incr_every_n_steps: how many finite steps in a row it takes to grow.
      decr_every_n_nan_or_inf: how many steps with NaN or inf it takes to shrink.
      incr_ratio: what the scale is multiplied by to grow; above 1.
      decr_ratio: what it is multiplied by to shrink; below 1.
    """
    self._incr_every_n_steps = incr_every_n_steps
    self._decr_every_n_nan_or_inf = decr_every_n_nan_or_inf
    self._incr_ratio = incr_ratio
    self._decr_ratio = decr_ratio
    self._init_loss_scale = init_loss_scale
    self._add_weight("loss_scale", init_loss_scale, tf.float32)
    self._add_weight("good_steps", 0, tf.int32)
    self._add_weight("bad_steps", 0, tf.int32)

  # Subclasses may set these, as those above: each is read in every update.
  _loss_scale = loss_scale.Weight("loss_scale")
  _num_good_steps = loss_scale.Weight("good_steps")
  _num_bad_steps = loss_scale.Weight("bad_steps")

  def get_loss_scale(self) -> tf.Variable:
    return self._loss_scale

  def update_loss_scale(self, finite_grads: tf.Tensor) -> Optional[tf.Operation]:
    rule = update_rule.Rule(
        increment_period=self._incr_every_n_steps, multiplier=self._incr_ratio, backoff=None,
        decrement_ratio=self._decr_ratio, overflow_tolerance=self._decr_every_n_nan_or_inf, floor=1.)
    return loss_scale.transition([self._loss_scale, self._num_good_steps, self._num_bad_steps], finite_grads, rule)

  def get_config(self) -> Dict[str, Any]:
    return dict(init_loss_scale=self._init_loss_scale, incr_every_n_steps=self._incr_every_n_steps,
                decr_every_n_nan_or_inf=self._decr_every_n_nan_or_inf, incr_ratio=self._incr_ratio,
                decr_ratio=self._decr_ratio)


class LossScaleOptimizer(optimizer.MixedPrecisionLossScaleOptimizer):
  """Scales the loss by what a manager says; `mp_compat.MixedPrecisionLossScaleOptimizer` in all else.

  Source: `tf.contrib.mixed_precision.LossScaleOptimizer`.
  """

  def __init__(self, opt: tf.train.Optimizer, loss_scale_manager: LossScaleManager) -> None:
    """Wraps an optimizer.

    Args:
      opt: the inner optimizer, any `tf.compat.v1.train.Optimizer`.
      loss_scale_manager: a `LossScaleManager`.

    Raises:
      ValueError: `opt` is no `tf.compat.v1.train.Optimizer`, or scales the loss already; `loss_scale_manager` is none.
    """
    if not isinstance(loss_scale_manager, LossScaleManager):
      raise ValueError("loss_scale_manager must be a mp_compat.contrib.mixed_precision.LossScaleManager, but got {!r}. "
                       "Subclass it, or use FixedLossScaleManager or ExponentialUpdateLossScaleManager.".format(
                           loss_scale_manager))
    super().__init__(opt, loss_scale_manager)

  @property
  def _opt(self) -> tf.train.Optimizer:
    return self._optimizer

  @property
  def _loss_scale_manager(self) -> LossScaleManager:
    return self._loss_scale
