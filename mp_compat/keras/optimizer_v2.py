# SPDX-License-Identifier: Apache-2.0
"""The mixin of the Keras wrapper for OptimizerV2: `tf.keras.optimizers` up to 2.10, `.legacy` from 2.11 on."""

import contextlib
from typing import Any, Dict, FrozenSet, Iterable, List, Optional

from mp_compat._tensorflow import autograph
from mp_compat._tensorflow import keras_trackable
from mp_compat._tensorflow import tf
from mp_compat._tensorflow import trackable
from mp_compat.core import gradients

_CLIPPING = ("clipvalue", "clipnorm")


class _InnerAttribute:
  """A descriptor: reads and sets an attribute of the inner optimizer; None if the inner optimizer lacks it."""

  def __set_name__(self, owner: type, name: str) -> None:
    self._name = name

  def __get__(self, instance: Any, owner: type) -> Any:
    return self if instance is None else getattr(instance._optimizer, self._name, None)

  def __set__(self, instance: Any, value: Any) -> None:
    setattr(instance._optimizer, self._name, value)


class OptimizerV2Mixin(keras_trackable.InnerLookupMixin):
  """Makes the wrapper an OptimizerV2."""

  add_slot = _InnerAttribute()
  add_weight = _InnerAttribute()
  clipnorm = _InnerAttribute()
  clipvalue = _InnerAttribute()
  get_weights = _InnerAttribute()
  global_clipnorm = _InnerAttribute()
  iterations = _InnerAttribute()
  learning_rate = _InnerAttribute()
  set_weights = _InnerAttribute()
  variables = _InnerAttribute()
  weights = _InnerAttribute()
  _aggregate_gradients = _InnerAttribute()
  _distribution_strategy = _InnerAttribute()
  _restore_slot_variable = _InnerAttribute()
  _transform_unaggregated_gradients = _InnerAttribute()

  _own_attributes: FrozenSet[str] = frozenset()

  @property
  def _writes_later_config(self) -> bool:
    return hasattr(self._kind.native, "inner_optimizer")  # from TensorFlow 2.4 on

  def _initialize(self, name: Optional[str]) -> None:
    del name  # The inner optimizer has a name.
    keras_trackable.track(self, self._optimizer, self._loss_scale)

  @autograph.do_not_convert
  def minimize(self, *args: Any, **kwargs: Any) -> Optional[tf.Operation]:
    """Computes gradients of the scaled loss, unscales and applies them; arguments as for Keras's `minimize`."""
    return super().minimize(*args, **kwargs)

  def _compute_gradients(
    self, loss: Any, var_list: Any, grad_loss: Optional[tf.Tensor] = None, tape: Optional[tf.GradientTape] = None
  ) -> List[gradients.GradAndVar]:
    with contextlib.ExitStack() as stack:
      kwargs = {}
      if tape is not None:
        stack.enter_context(tape)
        kwargs["tape"] = tape
      loss = self.get_scaled_loss(loss)
    with self._clipping_after_unscaling() as clip:
      pairs = self._optimizer._compute_gradients(loss, var_list, grad_loss, **kwargs)
    unscaled = self.get_unscaled_gradients(grad for grad, _ in pairs)
    return [(grad, variable) for grad, (_, variable) in zip(clip(unscaled), pairs)]

  def get_gradients(self, loss: tf.Tensor, params: Any) -> List[gradients.Gradient]:
    """Returns unscaled gradients of the scaled loss, in graph mode.

    Args:
      loss: a floating tensor.
      params: variables.

    Returns:
      A list with a gradient for each variable.

    Raises:
      ValueError: If the loss is not floating, or a variable has no gradient.
    """
    with self._clipping_after_unscaling() as clip:
      grads = self._optimizer.get_gradients(self.get_scaled_loss(loss), params)
    return clip(self.get_unscaled_gradients(grads))

  @contextlib.contextmanager
  def _clipping_after_unscaling(self) -> Any:
    """Stops the inner optimizer from clipping scaled gradients (up to 2.3); yields a function that clips later."""
    inner = self._optimizer
    limits: Dict[str, Any] = {}
    if not hasattr(inner, "_transform_gradients"):
      limits = {name: inner.__dict__.pop(name) for name in _CLIPPING if name in inner.__dict__}
      if hasattr(inner, "_HAS_AGGREGATE_GRAD"):  # From 2.2 on, a missing limit is None.
        inner.__dict__.update(dict.fromkeys(limits))

    def clip(grads: List[gradients.Gradient]) -> List[gradients.Gradient]:
      if limits.get("clipnorm") is not None:
        grads = [tf.clip_by_norm(grad, limits["clipnorm"]) for grad in grads]
      if limits.get("clipvalue") is not None:
        grads = [tf.clip_by_value(grad, -limits["clipvalue"], limits["clipvalue"]) for grad in grads]
      return grads

    try:
      yield clip
    finally:
      inner.__dict__.update(limits)

  @autograph.do_not_convert
  def apply_gradients(
    self,
    grads_and_vars: Iterable[gradients.GradAndVar],
    name: Optional[str] = None,
    experimental_aggregate_gradients: bool = True,
  ) -> Optional[tf.Operation]:
    """Applies the gradients on all replicas, or on none if any is not finite, and updates the loss scale.

    Args:
      grads_and_vars: (gradient, variable) pairs with unscaled gradients. An empty list goes to the inner optimizer.
      name: a name for the ops.
      experimental_aggregate_gradients: whether to sum the gradients of all replicas; False if they are already sums.

    Returns:
      An op that does the step and updates the loss scale; None in eager mode.

    Raises:
      ValueError: If called in a cross-replica context or under an unsupported strategy, or if all gradients are None.
      TypeError: If a gradient is not floating.
    """
    self._check_step()
    inner = self._optimizer
    kwargs: Dict[str, Any] = {"name": name}
    grads_and_vars = list(grads_and_vars)
    if not grads_and_vars:  # Nothing to train.
      return inner.apply_gradients(grads_and_vars, **kwargs)
    grads_and_vars = gradients.convert_pairs(grads_and_vars)
    with tf.name_scope(inner._name), tf.init_scope():
      self._create_all_weights([variable for grad, variable in grads_and_vars if grad is not None])
    if not experimental_aggregate_gradients:
      kwargs["experimental_aggregate_gradients"] = False
    elif getattr(inner, "_HAS_AGGREGATE_GRAD", False) and hasattr(inner, "_transform_unaggregated_gradients"):
      # From 2.4 on. The check covers sums that overflow, and no worker waits in a branch that another did not take.
      grads_and_vars = [pair for pair in grads_and_vars if pair[0] is not None]
      grads_and_vars = self._aggregate_gradients(self._transform_unaggregated_gradients(grads_and_vars))
      kwargs["experimental_aggregate_gradients"] = False
    return self._apply(grads_and_vars, lambda pairs: inner.apply_gradients(pairs, **kwargs))

  def _create_all_weights(self, var_list: List[tf.Variable]) -> None:
    inner = self._optimizer
    if hasattr(inner, "_create_all_weights"):
      inner._create_all_weights(var_list)
    else:
      _ = inner.iterations
      inner._create_hypers()
      inner._create_slots(var_list)

  def get_slot(self, var: tf.Variable, slot_name: str) -> tf.Variable:
    """Returns the inner optimizer's slot `slot_name` for `var`."""
    return trackable.slot_of_inner(self._optimizer, var, slot_name)

  def get_slot_names(self) -> List[str]:
    """Returns the names of the inner optimizer's slots."""
    names = self._optimizer.get_slot_names()
    return names if keras_trackable.delegates_to_inner(self) else [trackable.SlotName(name) for name in names]

  def get_updates(self, loss: tf.Tensor, params: Any) -> List[tf.Operation]:
    """Returns the ops of one step, in graph mode: `[apply_gradients(get_gradients(loss, params))]`."""
    return [self.apply_gradients(zip(self.get_gradients(loss, params), tf.nest.flatten(params)))]
