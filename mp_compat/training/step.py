# SPDX-License-Identifier: Apache-2.0
"""One step: checks the gradients, updates the loss scale, and applies the gradients or skips them. The functions:

    check     in each replica: converts the gradients once and checks whether all values are finite
    decide    once for all replicas: reduces the check over replicas and processes, updates the loss scale
    apply     once for all replicas: calls the inner optimizer's apply_gradients in a conditional

The optimizer, gradient accumulation and optimizers that share a loss scale call them.
"""

import functools
from typing import Any, Callable, Dict, Iterable, List, NamedTuple, Optional, Tuple, Union

from mp_compat import horovod
from mp_compat._tensorflow import contexts
from mp_compat._tensorflow import graphs
from mp_compat._tensorflow import optimizers
from mp_compat._tensorflow import tf
from mp_compat.core import conditional_apply
from mp_compat.core import distribute
from mp_compat.core import finite_check
from mp_compat.core import gradients
from mp_compat.core import loss_scale as loss_scale_module
from mp_compat.monitoring import reports
from mp_compat.monitoring import summaries
from mp_compat.training import sync_replicas

# Reduces over processes: maps a bool tensor to one of the same shape, True where it is True in all processes.
FiniteReducer = Callable[[tf.Tensor], tf.Tensor]


class Settings(NamedTuple):
  """The settings of an optimizer for its steps; see `MixedPrecisionLossScaleOptimizer`."""

  name: str
  inner_optimizer: tf.train.Optimizer
  loss_scale: Any
  skip_nonfinite: bool
  check_computed_gradients: bool
  finite_reducer: Optional[FiniteReducer]
  add_summaries: bool
  use_locking: bool


class CheckedGradients(NamedTuple):
  """The gradients of one replica and the result of their finite check."""

  grads_and_vars: Tuple[gradients.GradAndVar, ...]  # with converted gradients
  finite: Optional[tf.Tensor]  # a scalar bool; None without a check
  hidden: bool  # whether the check covers tensors that are not among the gradients
  scope: str  # the name scope of the replica


class Decision(NamedTuple):
  """The decision on a step, for all replicas."""

  finite: Optional[tf.Tensor]  # a scalar bool; None without a check
  should_apply: Union[bool, tf.Tensor]
  update_op: Optional[tf.Operation]  # updates the loss scale
  scale: Optional[tf.Tensor]  # the loss scale before the update, for summaries


def check(
  grads_and_vars: Iterable[Tuple[Any, tf.Variable]],
  check_finite: bool = True,
  check_computed: bool = True,
  empties_window: bool = False,
) -> CheckedGradients:
  """Converts the gradients of one replica and checks whether all of their values are finite.

  Args:
    grads_and_vars: (gradient, variable) pairs.
    check_finite: whether to check at all.
    check_computed: whether the check also covers the gradients as `compute_gradients` returned them.
    empties_window: whether the caller is a GradientAccumulator, which empties its window after the step.

  Returns:
    The converted gradients and the result of the check.

  Raises:
    ValueError: If there are no pairs, all gradients are None, or they are means of a GradientAccumulator and not
      `empties_window`.
    TypeError: See `gradients.convert_pairs`.
  """
  grads_and_vars = gradients.convert_pairs(grads_and_vars)
  grads = [grad for grad, _ in grads_and_vars]
  if not empties_window and gradients.has_window_mean(grads):
    raise ValueError(
      "Expected gradients of one step, but got means of a GradientAccumulator, whose window this would never empty. "
      "Pass them to apply_gradients() of the GradientAccumulator."
    )
  scope = graphs.name_scope()
  if not check_finite:
    return CheckedGradients(grads_and_vars, None, False, scope)
  hidden = [tensor for _, tensor in gradients.computed_ancestors(grads)] if check_computed else []
  finite = finite_check.all_finite(gradients.values_of(grads) + hidden)
  return CheckedGradients(grads_and_vars, finite, bool(hidden), scope)


def reduce_finite(finite: List[tf.Tensor], reducer: Optional[FiniteReducer] = None) -> List[tf.Tensor]:
  """Returns, for each tensor, whether it is True in all replicas and processes; called once for all replicas.

  Args:
    finite: scalar bool tensors, per-replica values.
    reducer: reduces over processes; called once, with a vector if there are several tensors.

  Returns:
    As many scalar bool tensors.

  Raises:
    ValueError: If `reducer` returns another dtype or shape.
  """
  single = len(finite) == 1
  stacked = finite[0] if single else distribute.call_for_each_replica(lambda *parts: tf.stack(parts), *finite)
  stacked = distribute.reduce_all_replicas(stacked)
  if reducer is not None:
    reduced = tf.convert_to_tensor(reducer(stacked))
    if reduced.dtype != tf.bool or not reduced.shape.is_compatible_with(stacked.shape):
      raise ValueError(
        "finite_reducer must return a {}, True where the gradients are finite in all processes, but returned {}. "
        "Sum the number of processes with an overflow and compare it with 0, as mp_compat.horovod.all_ranks_finite "
        "does; an average of bools is True for a partial overflow.".format(
          "scalar bool" if single else "bool of shape [{}]".format(len(finite)), reduced
        )
      )
    stacked = reduced
  return [stacked] if single else tf.unstack(stacked, len(finite))


def decide(settings: Settings, checked: CheckedGradients, micro_batches_finite: Optional[tf.Tensor] = None) -> Decision:
  """Reduces the result of the check over replicas and processes, updates the loss scale; called once for all replicas.

  Args:
    settings: the settings of the optimizer.
    checked: the gradients, per-replica values.
    micro_batches_finite: a scalar bool in each replica, False if micro-batches that were not finite were left out of
      the gradients. The loss scale is then updated as for a step that is not finite, but the gradients are applied if
      they are finite.

  Returns:
    A `Decision`.
  """
  grads = [grad for grad, _ in checked.grads_and_vars]
  scale = tf.cast(settings.loss_scale(), tf.float32) if settings.add_summaries else None
  with tf.control_dependencies([] if scale is None else [scale]):
    if checked.finite is None:
      update_op, should_apply = settings.loss_scale.update(grads)
      return Decision(should_apply if tf.is_tensor(should_apply) else None, should_apply, update_op, scale)
    reducer = finite_reducer_for(settings, grads)
    if micro_batches_finite is None:
      (finite,) = reduce_finite([checked.finite], reducer)
      update_op, should_apply = update(settings, grads, finite, checked.hidden or reducer is not None)
      return Decision(finite, logical_and(should_apply, finite), update_op, scale)
    finite, micro_batches_finite = reduce_finite([checked.finite, micro_batches_finite], reducer)
    all_finite = tf.logical_and(finite, micro_batches_finite)
    update_op, should_apply = update(settings, grads, all_finite, hidden=True)
    return Decision(finite, should_apply_part(should_apply, all_finite, finite), update_op, scale)


def finite_reducer_for(settings: Settings, grads: Iterable[gradients.Gradient]) -> Optional[FiniteReducer]:
  """Returns the optimizer's reducer, else Horovod's if its ranks could disagree on these gradients, else None."""
  return settings.finite_reducer or horovod.default_reducer(settings.inner_optimizer, local_gradients(grads))


def local_gradients(grads: Iterable[gradients.Gradient]) -> List[gradients.Gradient]:
  """Returns the values of `grads` on all local replicas: for each gradient, its values in the order of the replicas."""
  return [local_grad for grad in grads for local_grad in distribute.local_results(grad)]


def update(
  settings: Settings, grads: List[gradients.Gradient], finite: tf.Tensor, hidden: bool
) -> Tuple[Optional[tf.Operation], Any]:
  """Updates the loss scale after a step; with `use_locking`, in a mutex (in graphs, outside of functions and XLA).

  Args:
    settings: the settings of the optimizer.
    grads: the gradients of the step, per-replica values.
    finite: a scalar bool tensor, True if the step is finite in all replicas and processes.
    hidden: whether `finite` may be False although all of `grads` are finite.

  Returns:
    `(update_op, should_apply)`, see `LossScale.update`.
  """
  locked = settings.use_locking and not tf.executing_eagerly() and not contexts.may_be_compiled()
  if not locked:
    return loss_scale_module.update_loss_scale(settings.loss_scale, grads, finite, hidden)
  with tf.control_dependencies([finite]), tf.device("/cpu:0"):
    lock = tf.raw_ops.MutexLock(mutex=tf.raw_ops.MutexV2())
  with tf.control_dependencies([lock]):
    update_op, should_apply = loss_scale_module.update_loss_scale(settings.loss_scale, grads, finite, hidden)
  with tf.control_dependencies([] if update_op is None else [update_op]), tf.device("/cpu:0"):
    return tf.raw_ops.ConsumeMutexLock(mutex_lock=lock), should_apply


def logical_and(should_apply: Any, finite: tf.Tensor) -> Any:
  """Returns `should_apply and finite`; adds an op only for two different tensors."""
  if not tf.is_tensor(should_apply):
    return finite if should_apply else False
  return finite if should_apply is finite else tf.logical_and(should_apply, finite)


def should_apply_part(should_apply: Any, all_finite: tf.Tensor, part_finite: tf.Tensor) -> tf.Tensor:
  """Returns a scalar bool tensor: whether to apply one part of a step, such as the gradients of one optimizer.

  A part is applied if it is finite, unless the whole step is finite and the loss scale skips it.

  Args:
    should_apply: the result of `LossScale.update`, a bool or a scalar bool tensor.
    all_finite: a scalar bool tensor, True if the whole step is finite.
    part_finite: a scalar bool tensor, True if the part is finite.
  """
  if should_apply is True or should_apply is all_finite:
    return part_finite
  return tf.logical_and(part_finite, tf.logical_or(should_apply, tf.logical_not(all_finite)))


def apply(
  settings: Settings,
  checked: CheckedGradients,
  decision: Decision,
  global_step: Optional[tf.Variable],
  name: Optional[str],
  **kwargs: Any,
) -> reports.Step:
  """Applies the gradients of all replicas if `decision.should_apply`; called once for all replicas.

  Args:
    settings: the settings of the optimizer.
    checked: the gradients, per-replica values.
    decision: whether to apply them.
    global_step: a variable that the inner optimizer increments, or None.
    name: the name of the op; the inner optimizer's by default.
    **kwargs: further arguments of the inner optimizer's `apply_gradients`.

  Returns:
    A record of what was built; in eager mode it holds the decision only.
  """
  train_ops = tf.get_collection(tf.GraphKeys.TRAIN_OP)
  given: Dict[str, Any] = {}  # Passes only given arguments: custom optimizers may take fewer.
  if global_step is not None or name is not None:
    given["global_step"] = global_step
  if name is not None:
    given["name"] = name
  step_name = name or settings.name
  with tf.name_scope(step_name) as step_scope:  # for variables that the inner optimizer makes, and for the train op
    pass
  args, keywords = optimizers.arguments_for(settings.inner_optimizer.apply_gradients, given)
  applied = conditional_apply.apply_in_each_replica(
    decision.should_apply,
    functools.partial(_apply_inner, settings.inner_optimizer),
    [checked.grads_and_vars] + args,
    dict(kwargs, **keywords),
    checked.scope,
    opened={step_name: step_scope},
  )
  if tf.executing_eagerly():
    return reports.Step(None, decision.finite, decision.should_apply, [])
  local = [
    (local_grad, variable.name)
    for grad, variable in checked.grads_and_vars
    for local_grad in distribute.local_results(grad)
  ]
  accumulators_set = sync_replicas.set_accumulator_steps([grad for grad, _ in local], global_step, applied)
  counted = counters = None
  if settings.add_summaries:
    good_steps = getattr(settings.loss_scale, "_num_good_steps", None)
    counted, counters = summaries.add(decision.scale, good_steps, decision.should_apply)
  train_op = distribute.group(applied, decision.update_op, accumulators_set, counted, name=step_scope)
  set_train_ops(train_ops + [train_op])
  return reports.Step(train_op, decision.finite, decision.should_apply, local, counters)


def _apply_inner(
  inner_optimizer: tf.train.Optimizer, grads_and_vars: Iterable[gradients.GradAndVar], *args: Any, **kwargs: Any
) -> Any:
  """Returns what the inner optimizer's `apply_gradients` returns; raises a ValueError if that is None in a graph."""
  applied = inner_optimizer.apply_gradients(list(grads_and_vars), *args, **kwargs)
  if applied is None and not tf.executing_eagerly() and not tf.get_default_graph().building_function:
    raise ValueError(
      "{}.apply_gradients() must return the op that applies the gradients, but returned None. Only ops that it returns "
      "run with the train op. Return the op that it builds.".format(type(inner_optimizer).__name__)
    )
  return applied


def set_train_ops(train_ops: List[tf.Operation]) -> None:
  """Sets the collection of train ops. Ops that the inner optimizer added to it belong to a branch and cannot be run."""
  tf.get_collection_ref(tf.GraphKeys.TRAIN_OP)[:] = train_ops
