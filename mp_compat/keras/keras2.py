# SPDX-License-Identifier: Apache-2.0
"""The mixins of the Keras wrapper for Keras 2, and its layout in a
`tf.train.Checkpoint`.

In each TensorFlow version, the wrapper writes the layout of TensorFlow's own class and
reads both: up to 2.2 the inner optimizer is its child `base_optimizer`; from 2.3 on it
has the inner optimizer's children (`iter`, `learning_rate`, slots, ...) as its own, and
a `base_optimizer` only for reading. `loss_scale` is a child in both layouts.
"""

import functools
from typing import Any, Callable, Dict, Iterable, List, Optional, Sequence, Tuple

from mp_compat._tensorflow import autograph
from mp_compat._tensorflow import keras_features
from mp_compat._tensorflow import optimizers
from mp_compat._tensorflow import tf
from mp_compat._tensorflow import trackable
from mp_compat.core import finite_check
from mp_compat.core import gradients
from mp_compat.graph import graphs

Pairs = List[gradients.GradAndVar]
# Maps the result of the finite check of this package, a scalar bool tensor, to that of
# another check.
# From whether the gradients are finite: whether others are, too.
CombineFinite = Callable[[tf.Tensor], tf.Tensor]
# A base class for mixins. Type checkers assume that it has all attributes, such as
# those of the Keras classes.
AnyBase: Any = object


def inner_attribute(name: str) -> Any:
  """Returns a property: an attribute of the inner optimizer."""

  def get_attribute(self: Any) -> Any:
    return getattr(self._optimizer, name)

  def set_attribute(self: Any, value: object) -> None:
    setattr(self._optimizer, name, value)

  return property(get_attribute, set_attribute)


def _clip_by_value(grad: tf.Tensor, limit: float) -> tf.Tensor:
  """Returns a gradient with values from `-limit` to `limit`."""
  return tf.clip_by_value(grad, -limit, limit)


_CLIPPING = {"clipnorm": tf.clip_by_norm, "clipvalue": _clip_by_value}


def _clip(grad: gradients.Gradient, name: str, limit: float) -> gradients.Gradient:
  """Returns a gradient clipped by `clipnorm` or `clipvalue`, except for overflows."""
  if grad is None:
    return None
  clip = _CLIPPING[name]
  return _keep_overflows(clip(grad, limit), grad)


def _keep_overflows(
  clipped: gradients.Gradient, grad: gradients.Gradient
) -> gradients.Gradient:
  """Returns `clipped` with the values of `grad` that are not finite.

  Clipping would make them finite, so that the finite check would not see them.
  """
  if grad is None:
    return None
  (before,) = gradients.values_of([grad])
  (after,) = gradients.values_of([clipped])
  kept = tf.where_v2(tf.is_finite(before), after, before)
  return gradients.map_values(lambda values: kept, grad)


class _InnerLookupMixin(AnyBase):
  """Looks up checkpoint dependencies in the inner optimizer, too, except one that may
  be the inner optimizer.
  """

  # to restore into variables that do not exist yet
  _deferred_dependencies = inner_attribute("_deferred_dependencies")
  _create_or_restore_slot_variable = inner_attribute("_create_or_restore_slot_variable")

  def _lookup_dependency(self, name: str, *args: Any, **kwargs: Any) -> Any:
    """Returns the child of this name in a checkpoint, of the wrapper or else of the
    inner optimizer; None if neither has it.
    """
    dependency = super()._lookup_dependency(name, *args, **kwargs)
    if dependency is None and name != "base_optimizer":
      return self._optimizer._lookup_dependency(name)
    return dependency


class _EarlierLayout(_InnerLookupMixin, trackable.Trackable):
  """Represents the inner optimizer in the earlier layout, for reading; has no
  variables.
  """

  def __init__(self, optimizer: optimizers.KerasOptimizer) -> None:
    super().__init__()
    self._optimizer = optimizer

  # called when saving; writes nothing, as it lacks `get_slot`
  get_slot_names = inner_attribute("get_slot_names")


def _convert_pair(pair: Tuple[object, tf.Variable]) -> gradients.GradAndVar:
  """Returns the pair with its gradient converted, if it is no tensor, to the dtype of
  the variable, as natively in eager mode.
  """
  grad, variable = pair
  if isinstance(grad, (tf.Tensor, tf.IndexedSlices)):  # converted when it is checked
    return grad, variable
  return gradients.convert(grad, tf.as_dtype(variable.dtype).base_dtype), variable


def _check_of_changed(before: Pairs, after: Pairs) -> Optional[CombineFinite]:
  """Returns a check of the gradients of `before` that `after` lacks, in addition to the
  finite check; None if it lacks none.
  """
  kept = {id(grad) for grad, _ in after}
  changed = [grad for grad, _ in before if id(grad) not in kept]
  if not changed:
    return None
  finite_before = finite_check.all_finite(gradients.values_of(changed))
  return functools.partial(tf.logical_and, finite_before)


class Keras2Mixin(AnyBase):
  """What both mixins share.

  Attributes:
    _dynamic_arguments: Arguments of the DynamicLossScale of Keras's own class that are
      not those of TensorFlow's.
    _counts_by_default: Whether a skipped step increments `iterations`.
    _argument_for_sums: The argument of the inner optimizer's `apply_gradients` which
      says that the gradients are sums over replicas: its name, and its value.
  """

  _dynamic_arguments: Dict[str, float] = {}
  _counts_by_default = keras_features.COUNTS_SKIPPED_STEPS
  _argument_for_sums: Tuple[str, bool]
  set_weights = inner_attribute("set_weights")  # called by `load_model` for HDF5

  def _record_unscaled(self, grads: List[gradients.Gradient]) -> None:
    """Does nothing: `apply_gradients` of Keras 2 always takes unscaled gradients."""

  def _initialize(self, inner: optimizers.KerasOptimizer, name: Optional[str]) -> None:
    """Wraps an optimizer, and makes the layout in a checkpoint; the loss scale is set
    already.

    Raises:
      ValueError: If another wrapper has the optimizer, from TensorFlow 2.3 on.
    """
    del name  # The inner optimizer has a name.
    self._optimizer = inner
    inner._maybe_initialize_trackable()
    if keras_features.DELEGATES_TO_INNER:
      self._delegate_to(inner)
    else:
      trackable.track(self, inner, "base_optimizer")
    trackable.track(self, self._loss_scale, "loss_scale")

  def _delegate_to(self, inner: optimizers.KerasOptimizer) -> None:
    """Gives the wrapper the inner optimizer's children in a checkpoint, and a
    `base_optimizer` for reading the earlier layout.
    """
    if vars(inner).get("_is_wrapped_by_loss_scale_optimizer"):
      raise ValueError(
        "{} is already wrapped by a LossScaleOptimizer. Use that, or make "
        "another.".format(inner)
      )
    inner._is_wrapped_by_loss_scale_optimizer = True
    self._trackable = inner  # to which TensorFlow's class delegates
    if not isinstance(self, OptimizerV2Mixin):
      return  # The newer optimizers never had the earlier layout.
    # Some optimizers have a child `base_optimizer` themselves.
    if inner._lookup_dependency("base_optimizer") is None:
      trackable.track(self, _EarlierLayout(inner), "base_optimizer")

  @autograph.do_not_convert
  def apply_gradients(
    self,
    grads_and_vars: Iterable[gradients.GradAndVar],
    name: Optional[str] = None,
    experimental_aggregate_gradients: bool = True,
  ) -> Optional[tf.Operation]:
    """Applies the gradients on all replicas, or on none if any is not finite, and
    updates the loss scale.

    Args:
      grads_and_vars: (gradient, variable) pairs with unscaled gradients. An empty list
        goes to the inner optimizer.
      name: a name for the ops.
      experimental_aggregate_gradients: whether to sum the gradients of all replicas;
        False if they are already sums.

    Returns:
      An op; None in eager mode.

    Raises:
      ValueError: If called in a cross-replica context or under an unsupported strategy,
        or if all gradients are None.
      TypeError: If a gradient is not floating.
    """
    self._check_step()
    inner = self._optimizer
    pairs = [_convert_pair(pair) for pair in grads_and_vars]
    aggregates = experimental_aggregate_gradients and self._can_aggregate()
    arguments: Dict[str, object] = {"name": name}
    if aggregates or not experimental_aggregate_gradients:
      argument, value = self._argument_for_sums
      arguments[argument] = value
    args, kwargs = optimizers.arguments_for(
      inner.apply_gradients, self._kind.mixin.apply_gradients, arguments
    )
    if not pairs:  # Nothing to train.
      return inner.apply_gradients(pairs, *args, **kwargs)
    # In eager mode, `apply_gradients` of an OptimizerV2 makes the same variables, so
    # that only a skipped step must.
    if not tf.executing_eagerly() or not isinstance(self, OptimizerV2Mixin):
      self._create_variables(pairs)
    check = None
    if aggregates:
      # The check then covers sums that overflow, and no worker waits in a branch that
      # another did not take.
      pairs, check = self._aggregate_present(pairs)

    def apply(pairs: Pairs) -> Optional[tf.Operation]:
      return inner.apply_gradients(pairs, *args, **kwargs)

    return self._apply(pairs, apply, check)

  def _can_aggregate(self) -> bool:
    """Returns whether the wrapper sums gradients over replicas, and the inner optimizer
    can be told so.
    """
    if not keras_features.AGGREGATES_FIRST or not self._HAS_AGGREGATE_GRAD:
      return False
    argument, _ = self._argument_for_sums
    return optimizers.takes_argument(self._optimizer.apply_gradients, argument)

  def _aggregate_present(self, pairs: Pairs) -> Tuple[Pairs, Optional[CombineFinite]]:
    """Returns pairs with sums over replicas, and a check of what was summed.

    Pairs without a gradient stay, because Keras logs a warning for their variables.
    """
    present = [pair for pair in pairs if pair[0] is not None]
    if not present:
      return pairs, None
    aggregated = list(self._aggregate(present))
    missing = [pair for pair in pairs if pair[0] is None]
    return aggregated + missing, _check_of_changed(present, aggregated)


class OptimizerV2Mixin(_InnerLookupMixin, Keras2Mixin):
  """Makes the wrapper an OptimizerV2: `tf.keras.optimizers` up to 2.10, `.legacy` from
  2.11 on.
  """

  _argument_for_sums = ("experimental_aggregate_gradients", False)

  @autograph.do_not_convert
  def _compute_gradients(self, *args: Any, **kwargs: Any) -> Pairs:
    """Computes unscaled gradients of the scaled loss, as Keras's method; clips them
    after that.
    """
    compute = functools.partial(super()._compute_gradients, *args, **kwargs)
    return self._clipping_later(compute)

  def get_gradients(
    self, loss: tf.Tensor, params: Sequence[tf.Variable]
  ) -> List[gradients.Gradient]:
    """Returns unscaled gradients of the scaled loss, in graph mode; arguments as for
    Keras's `get_gradients`.
    """
    compute_grads = super().get_gradients

    def compute() -> Pairs:
      """Returns pairs without variables, as `_clipping_later` expects them."""
      return [(grad, None) for grad in compute_grads(loss, params)]

    pairs = self._clipping_later(compute)
    return [grad for grad, _ in pairs]

  def _clipping_later(self, compute: Callable[[], Pairs]) -> Pairs:
    """Returns what `compute` returns; up to 2.3 the inner optimizer would clip in it,
    before gradients are unscaled.

        remove `clipnorm` and `clipvalue` from the inner optimizer
        pairs = compute()                       unscaled gradients
        set them again, also after an error
        clip the gradients of the pairs

    Args:
      compute: returns pairs of unscaled gradients and variables.
    """
    if keras_features.CLIPS_WHEN_APPLYING:
      return compute()
    attributes = self._optimizer.__dict__
    limits = {}
    for name in _CLIPPING:
      if attributes.get(name) is not None:
        limits[name] = attributes.pop(name)
        if keras_features.MISSING_LIMIT_IS_NONE:
          attributes[name] = None
    try:
      pairs = compute()
    finally:
      attributes.update(limits)
    for name, limit in limits.items():
      pairs = [(_clip(grad, name, limit), variable) for grad, variable in pairs]
    return pairs

  def _clip_gradients(
    self, grads: List[gradients.Gradient]
  ) -> List[gradients.Gradient]:
    """Returns clipped gradients, as Keras's method; values that are not finite stay so.

    Called by `fit` of TensorFlow 2.2 and 2.3.
    """
    clipped = super()._clip_gradients(grads)
    return [_keep_overflows(after, before) for after, before in zip(clipped, grads)]

  def _create_variables(self, pairs: Iterable[gradients.GradAndVar]) -> None:
    """Makes the inner optimizer's variables for those that have gradients."""
    inner = self._optimizer
    variables = [variable for grad, variable in pairs if grad is not None]
    with tf.name_scope(inner._name), graphs.init_scope():
      if keras_features.CREATES_ALL_WEIGHTS:
        inner._create_all_weights(variables)
      else:
        _ = inner.iterations
        inner._create_hypers()
        inner._create_slots(variables)

  def _aggregate(self, pairs: Pairs) -> Pairs:
    """Returns pairs with sums over replicas of what the inner optimizer makes of the
    gradients.
    """
    return self._aggregate_gradients(self._transform_unaggregated_gradients(pairs))

  def get_slot(self, var: tf.Variable, slot_name: str) -> tf.Variable:
    """Returns the inner optimizer's slot `slot_name` for `var`."""
    return trackable.slot_of_inner(self._optimizer, var, slot_name)

  def get_slot_names(self) -> List[str]:
    """Returns the names of the inner optimizer's slots."""
    names = self._optimizer.get_slot_names()
    if keras_features.DELEGATES_TO_INNER:
      return names
    return [trackable.SlotName(name) for name in names]


for _name in """
  add_slot add_weight clipnorm clipvalue get_weights global_clipnorm iterations
  learning_rate variables weights
  _HAS_AGGREGATE_GRAD _aggregate_gradients _decayed_lr _distribution_strategy _get_hyper
  _restore_slot_variable _set_hyper _transform_unaggregated_gradients
""".split():
  setattr(OptimizerV2Mixin, _name, inner_attribute(_name))


class OptimizerV3Mixin(Keras2Mixin):
  """Makes the wrapper an `Optimizer` of `tf.keras` of TensorFlow 2.11 to 2.15, and of
  tf_keras.
  """

  _argument_for_sums = ("skip_gradients_aggregation", True)
  _HAS_AGGREGATE_GRAD = True
  exclude_from_weight_decay = inner_attribute("exclude_from_weight_decay")

  @autograph.do_not_convert
  def apply_gradients(  # type: ignore[override]  # in the order of Keras's method
    self,
    grads_and_vars: Iterable[gradients.GradAndVar],
    name: Optional[str] = None,
    skip_gradients_aggregation: bool = False,
    experimental_aggregate_gradients: bool = True,
  ) -> None:
    """Applies or skips the gradients as an OptimizerV2 does; arguments as for Keras's
    method.
    """
    super().apply_gradients(
      grads_and_vars,
      name,
      experimental_aggregate_gradients and not skip_gradients_aggregation,
    )

  def _create_variables(self, pairs: Iterable[gradients.GradAndVar]) -> None:
    """Makes the inner optimizer's variables for all variables of `pairs`."""
    build = self._optimizer.build
    if keras_features.BUILDS_WHEN_APPLYING:
      build = self.build
    with tf.name_scope(self._optimizer.name), graphs.init_scope():
      build([variable for _, variable in pairs])

  def _aggregate(self, pairs: Pairs) -> Pairs:
    """Returns pairs with sums over replicas."""
    return self._optimizer.aggregate_gradients(pairs)
