# SPDX-License-Identifier: Apache-2.0
"""`tf.contrib.mixed_precision` of TensorFlow 1.15, for all versions and without its
defects.

Names, numbers (bit for bit) and variables are the same: `loss_scale` (float32),
`good_steps` and `bad_steps` (int32). The optimizer is a
`mp_compat.MixedPrecisionLossScaleOptimizer`. Gradients may therefore be None, or in any
iterable; all replicas apply or skip a step together; Adam's beta powers have the same
names as without loss scaling.

Source: `tf.contrib.mixed_precision`.
"""

import abc
from typing import Any, Dict, Iterable, List, Optional

from mp_compat._tensorflow import log
from mp_compat._tensorflow import tf
from mp_compat.core import gradients
from mp_compat.core import loss_scale
from mp_compat.core import update_rule
from mp_compat.training import optimizer

__all__ = [
  "ExponentialUpdateLossScaleManager",
  "FixedLossScaleManager",
  "LossScaleManager",
  "LossScaleOptimizer",
]


class LossScaleManager(loss_scale.FiniteLossScale):
  """The base class of loss scale managers, which provide the loss scale and update it.

  Every manager is also an `mp_compat.LossScale`.

  Source: `tf.contrib.mixed_precision.LossScaleManager`.
  """

  @abc.abstractmethod
  def get_loss_scale(self) -> Any:
    """Returns the loss scale: a float32 scalar tensor or variable."""

  @abc.abstractmethod
  def update_loss_scale(self, finite_grads: tf.Tensor) -> Optional[tf.Operation]:
    """Returns an op that updates the loss scale after a step; in eager mode it may be
    None.

    Args:
      finite_grads: a scalar bool tensor, True if all gradients of the step are finite.
    """

  def __call__(self) -> tf.Tensor:
    return tf.convert_to_tensor(self.get_loss_scale())

  def _update_scale(self, finite: tf.Tensor) -> Optional[tf.Operation]:
    return self.update_loss_scale(finite)

  def get_config(self) -> Dict[str, Any]:
    """Returns an empty dictionary: managers of `tf.contrib` have no configuration."""
    return {}


class FixedLossScaleManager(LossScaleManager):
  """A fixed loss scale: `loss_scale` is a number of at least 1, else a ValueError is
  raised.

  Source: `tf.contrib.mixed_precision.FixedLossScaleManager`.
  """

  def __init__(self, loss_scale: float) -> None:
    if not loss_scale >= 1:
      raise ValueError(
        "loss scale must be at least 1. Expected a number, but got {!r}.".format(
          loss_scale
        )
      )
    self._loss_scale = loss_scale

  def get_loss_scale(self) -> tf.Tensor:
    return loss_scale.constant(self._loss_scale)  # programs fetch it in each step

  def __call__(self) -> tf.Tensor:
    return tf.identity(self.get_loss_scale())

  def update_loss_scale(self, finite_grads: tf.Tensor) -> Optional[tf.Operation]:
    del finite_grads
    return tf.no_op()

  def get_config(self) -> Dict[str, Any]:
    return {"loss_scale": self._loss_scale}


class ExponentialUpdateLossScaleManager(LossScaleManager):
  """A dynamic loss scale: increases after consecutive finite steps, decreases after
  overflows, consecutive or not.

      if finite:
        good_steps += 1
        if good_steps >= incr_every_n_steps:
          if loss_scale * incr_ratio <= 2**126:
            loss_scale *= incr_ratio
          good_steps = bad_steps = 0
      else:
        good_steps = 0
        bad_steps += 1
        if bad_steps >= decr_every_n_nan_or_inf:
          loss_scale = max(loss_scale * decr_ratio, 1)
          bad_steps = 0

  The constructor makes the variables in the current graph.

  Source: `tf.contrib.mixed_precision.ExponentialUpdateLossScaleManager`.
  """

  def __init__(
    self,
    init_loss_scale: float,
    incr_every_n_steps: int,
    decr_every_n_nan_or_inf: int = 2,
    incr_ratio: float = 2,
    decr_ratio: float = 0.8,
  ) -> None:
    """Makes a manager; as in `tf.contrib`, no argument is checked.

    Args:
      init_loss_scale: the loss scale at first, at least 1.
      incr_every_n_steps: the number of consecutive finite steps before an increase.
      decr_every_n_nan_or_inf: the number of overflows before a decrease.
      incr_ratio: the factor of an increase, above 1.
      decr_ratio: the factor of a decrease, below 1.
    """
    self._incr_every_n_steps = incr_every_n_steps
    self._decr_every_n_nan_or_inf = decr_every_n_nan_or_inf
    self._incr_ratio = incr_ratio
    self._decr_ratio = decr_ratio
    self._init_loss_scale = init_loss_scale
    self._add_weight("loss_scale", init_loss_scale, tf.float32)
    self._add_weight("good_steps", 0, tf.int32)
    self._add_weight("bad_steps", 0, tf.int32)

  # Subclasses may set these and the attributes above: each update reads all of them.
  _loss_scale = loss_scale.weight("loss_scale")
  _num_good_steps = loss_scale.weight("good_steps")
  _num_bad_steps = loss_scale.weight("bad_steps")

  def get_loss_scale(self) -> tf.Variable:
    return self._loss_scale

  def update_loss_scale(self, finite_grads: tf.Tensor) -> Optional[tf.Operation]:
    """Returns an op that updates all three variables; see the class."""
    rule = update_rule.Rule(
      increment_period=self._incr_every_n_steps,
      multiplier=self._incr_ratio,
      backoff=None,
      decrement_ratio=self._decr_ratio,
      overflow_tolerance=self._decr_every_n_nan_or_inf,
      floor=1.0,
    )
    variables = [self._loss_scale, self._num_good_steps, self._num_bad_steps]
    return update_rule.transition(variables, finite_grads, rule)

  def _reset_stats(self) -> Optional[tf.Operation]:
    """Returns an op that sets both counters to 0, for subclasses."""
    return tf.group(
      self._num_good_steps.assign(0, read_value=False),
      self._num_bad_steps.assign(0, read_value=False),
    )

  def get_config(self) -> Dict[str, Any]:
    return {
      "init_loss_scale": self._init_loss_scale,
      "incr_every_n_steps": self._incr_every_n_steps,
      "decr_every_n_nan_or_inf": self._decr_every_n_nan_or_inf,
      "incr_ratio": self._incr_ratio,
      "decr_ratio": self._decr_ratio,
    }


class LossScaleOptimizer(optimizer.MixedPrecisionLossScaleOptimizer):
  """Scales the loss by a manager's loss scale, and makes sparse gradients dense when it
  unscales them; otherwise a `mp_compat.MixedPrecisionLossScaleOptimizer`.

  Optimizers such as Momentum and RMSProp also update the rows of a variable without
  gradients if the gradient is dense. A sparse gradient that is passed to
  `apply_gradients` stays sparse.

  Source: `tf.contrib.mixed_precision.LossScaleOptimizer`.
  """

  def __init__(
    self, opt: tf.train.Optimizer, loss_scale_manager: LossScaleManager
  ) -> None:
    """Wraps an optimizer.

    Args:
      opt: the inner optimizer, any `tf.compat.v1.train.Optimizer`. If it is the result
        of `enable_mixed_precision_graph_rewrite`, the optimizer that it wraps is used,
        and a warning is logged.
      loss_scale_manager: a `LossScaleManager`.

    Raises:
      ValueError: If `loss_scale_manager` is not a `LossScaleManager`; for `opt`, see
        the base class.
    """
    if not isinstance(loss_scale_manager, LossScaleManager):
      raise ValueError(
        "loss_scale_manager must be a {}.LossScaleManager, but got {!r}. Pass a "
        "FixedLossScaleManager, for example.".format(__name__, loss_scale_manager)
      )
    if type(opt) is optimizer.MixedPrecisionLossScaleOptimizer:
      # Of two dynamic scales, the inner one is not updated after an overflow, and
      # training stops in the end.
      log.warn(
        "The optimizer passed to LossScaleOptimizer already scales the loss. Only the "
        "scale of the loss_scale_manager is used. Pass the manager to "
        "enable_mixed_precision_graph_rewrite(), and remove LossScaleOptimizer."
      )
      opt = opt.inner_optimizer
    super().__init__(opt, loss_scale_manager)

  # The attributes of tf.contrib's class, and a method that subclasses may call.

  @property
  def _opt(self) -> tf.train.Optimizer:
    return self._optimizer

  @_opt.setter
  def _opt(self, opt: tf.train.Optimizer) -> None:
    self._optimizer = opt

  @property
  def _loss_scale_manager(self) -> LossScaleManager:
    return self._loss_scale

  @_loss_scale_manager.setter
  def _loss_scale_manager(self, manager: LossScaleManager) -> None:
    self._loss_scale = manager

  def _down_scale(
    self, grads_vars: Iterable[gradients.GradAndVar], loss_scale: tf.Tensor
  ) -> List[gradients.GradAndVar]:
    """Returns the pairs with gradients that are divided by `loss_scale`, and dense."""
    grads, variables = zip(*grads_vars)
    dense = [self._convert_computed(grad) for grad in grads]
    return list(zip(gradients.unscale(dense, loss_scale), variables))

  def _convert_computed(self, grad: object) -> gradients.Gradient:
    """Returns a gradient of the scaled loss as it is unscaled: dense, unless it is
    sparse and its shape is not known.
    """
    converted = super()._convert_computed(grad)
    if converted is None or not isinstance(converted, tf.IndexedSlices):
      return converted
    if converted.dense_shape is None:
      return converted
    return tf.convert_to_tensor(converted)
