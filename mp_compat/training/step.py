# SPDX-License-Identifier: Apache-2.0
"""One step: checks the gradients, updates the loss scale, and applies the gradients or
skips them.

`prepare` is called in each replica, then `decide` and `apply` once for all
(docs/design.md has a drawing). The optimizer, optimizers that share a loss scale,
gradient accumulation and the Keras wrapper call these functions. Observers
(`mp_compat.monitoring`) read the record of a step, which `apply` keeps and `recorded`
returns.
"""

import functools
from typing import (
  Any,
  Callable,
  Dict,
  Iterable,
  List,
  NamedTuple,
  Optional,
  Sequence,
  Tuple,
  TypeVar,
  cast,
)

from mp_compat import horovod
from mp_compat._tensorflow import ops
from mp_compat._tensorflow import optimizers
from mp_compat._tensorflow import tf
from mp_compat.core import conditional_apply
from mp_compat.core import distribute
from mp_compat.core import finite_check
from mp_compat.core import gradients
from mp_compat.core import lineage
from mp_compat.core import loss_scale
from mp_compat.core.lineage import Lineage
from mp_compat.graph import contexts
from mp_compat.graph import dead_tensors
from mp_compat.graph import op_names
from mp_compat.training import advice
from mp_compat.training import recorded
from mp_compat.training.recorded import ShouldApply

# Reduces over processes: maps a bool tensor to one of the same shape, True where it is
# True in all processes.
FiniteReducer = Callable[[tf.Tensor], tf.Tensor]
_Update = Tuple[Optional[tf.Operation], ShouldApply]  # what `LossScale.update` returns

_Builder = TypeVar("_Builder", bound=Callable[..., Optional[tf.Operation]])


class MissingCheckError(RuntimeError, AttributeError):
  """An error for reading the result of a finite check in a graph without one; `hasattr`
  is then False.
  """


class Settings(NamedTuple):
  """The settings of an optimizer for its steps; see
  `MixedPrecisionLossScaleOptimizer`.
  """

  # whether to skip steps that are not finite, if the loss scale does not
  skip_nonfinite: bool = True
  # whether the finite check also covers the gradients as they were computed
  check_computed_gradients: bool = True
  finite_reducer: Optional[FiniteReducer] = None
  use_locking: bool = False

  @classmethod
  def of_shared_step(cls, settings: Sequence["Settings"]) -> "Settings":
    """Returns the settings of a step that several optimizers share."""
    finite_reducer = None
    for each in reversed(settings):
      finite_reducer = each.finite_reducer or finite_reducer
    # Without defaults: a new setting needs a rule.
    joined: Dict[str, Any] = dict(
      skip_nonfinite=all(each.skip_nonfinite for each in settings),
      check_computed_gradients=all(each.check_computed_gradients for each in settings),
      finite_reducer=finite_reducer,
      use_locking=any(each.use_locking for each in settings),
    )
    return cls(*[joined[field] for field in cls._fields])


class Part(NamedTuple):
  """What one optimizer applies in one step, in one replica. After `merge_call`, what
  differs between replicas is a per-replica value in each field.

  Attributes:
    grads_and_vars: The (gradient, variable) pairs, with converted gradients; empty for
      a part that is only checked.
    finite: A scalar bool tensor: whether all gradients are finite in the replica; None
      without a check.
    lineage: What the gradients derive from.
    scope: The name scope of the replica.
    optimizer: The MixedPrecisionLossScaleOptimizer of the replica; None for a part that
      is only checked, and for Keras.
  """

  grads_and_vars: Tuple[gradients.GradAndVar, ...]
  finite: Optional[tf.Tensor]
  lineage: Lineage
  scope: str
  optimizer: Optional[tf.train.Optimizer] = None


class Decision(NamedTuple):
  """Which parts of a step to apply, for all replicas.

  Attributes:
    finite: For each part a scalar bool tensor: whether it is finite in all replicas and
      processes. Without a check, what the loss scale answers if that is a tensor, else
      None.
    apply: For each part a bool, or a scalar bool tensor: whether it is applied.
    update_op: The op that updates the loss scale; None in eager mode.
  """

  finite: List[Optional[tf.Tensor]]
  apply: List[ShouldApply]
  update_op: Optional[tf.Operation]


def prepare(
  grads_and_vars: Iterable[Tuple[object, tf.Variable]],
  settings: Settings,
  check: bool = True,
  optimizer: Optional[tf.train.Optimizer] = None,
) -> Part:
  """Converts the gradients of one replica, traces what they derive from and checks
  whether all values are finite.
  """
  pairs = gradients.convert_pairs(grads_and_vars)
  grads, variables = zip(*pairs)
  traced = lineage.trace(grads, settings.check_computed_gradients, variables)
  finite = None
  if check:
    passed = dead_tensors.zeros_if_dead(gradients.values_of(grads))
    computed = dead_tensors.zeros_if_dead(traced.hidden_values)
    finite = finite_check.all_finite(passed, computed, traced.sums_of_squares)
  return Part(pairs, finite, traced, op_names.name_scope(), optimizer)


def check_not_of_window(part: Part) -> None:
  """Raises a ValueError if gradients are means of a GradientAccumulator."""
  if part.lineage.has_window_means:
    raise ValueError(
      "Expected gradients of one step, but got means of a GradientAccumulator, whose "
      "window this would never empty. Pass them to apply_gradients() of the "
      "GradientAccumulator."
    )


def decide(
  scale: loss_scale.AnyLossScale,
  parts: Sequence[Part],
  settings: Settings,
  skip: str = "all",
) -> Decision:
  """Reduces the checks over replicas and processes, updates the loss scale; called once
  for all replicas.

      all_finite = all parts are finite in all replicas and processes
      if the update of the scale depends on nothing but all_finite: should_apply = True
      else: should_apply = what scale.update(gradients of all parts) answers
      a part is applied
        skip="all":   if all_finite and should_apply
        skip="each":  if the part is finite and (should_apply or not all_finite)
        no check:     if should_apply

  With "each", a refusal of the loss scale counts only if all parts are finite:
  otherwise it may refuse because of a part that is skipped anyway.

  Args:
    scale: the loss scale; may be TensorFlow's.
    parts: the parts of the step, per-replica values; either all were checked or none.
    settings: those of the optimizer, or of a step that several optimizers share.
    skip: "all" or "each": which parts to skip if one is not finite.
  """
  grads: List[gradients.Gradient] = []
  lineages: List[Lineage] = []
  for part in parts:
    grads += [grad for grad, _ in part.grads_and_vars]
    lineages += distribute.local_results(part.lineage)
  check_computed = settings.check_computed_gradients
  if parts[0].finite is None:  # the update of the scale needs no check
    update_op, should_apply = _update(scale, grads, None, False, check_computed)
    finite_of_scale = should_apply if tf.is_tensor(should_apply) else None
    count = len(parts)
    return Decision([finite_of_scale] * count, [should_apply] * count, update_op)
  reducer = settings.finite_reducer or _horovod_reducer(lineages)
  finite = _reduce_finite([part.finite for part in parts], reducer)
  all_finite = finite[0]
  if len(finite) > 1:
    all_finite = tf.reduce_all(tf.stack(finite))
  may_be_hidden = reducer is not None or _may_be_hidden(parts, lineages)

  def update() -> _Update:
    return _update(scale, grads, all_finite, may_be_hidden, check_computed)

  if settings.use_locking:
    update_op, should_apply = _in_mutex(update, all_finite)
  else:
    update_op, should_apply = update()
  return Decision(finite, _decisions(skip, finite, all_finite, should_apply), update_op)


def _may_be_hidden(parts: Iterable[Part], lineages: Iterable[Lineage]) -> bool:
  """Returns whether a step may not be finite although all gradients of its parts are:
  because of computed gradients, or of a part that is only checked.
  """
  has_hidden = any(one.hidden for one in lineages)
  return has_hidden or not all(part.grads_and_vars for part in parts)


def _horovod_reducer(lineages: Iterable[Lineage]) -> Optional[FiniteReducer]:
  """Returns that for Horovod if it reduced the gradients: the check also covers those
  that each rank computed. Returns None otherwise.
  """
  if any(one.is_reduced_by_horovod for one in lineages):
    return horovod.all_ranks_finite
  return None


def _decisions(
  skip: str, finite: List[tf.Tensor], all_finite: tf.Tensor, should_apply: ShouldApply
) -> List[ShouldApply]:
  """Returns for each part whether it is applied: see `decide`."""
  if skip == "all" or len(finite) == 1:
    # the same tensor for all: `_reads_other_steps` compares it by identity
    return [_and(should_apply, all_finite)] * len(finite)
  # No part is applied before the gradients of all parts are computed.
  with tf.control_dependencies([all_finite]):
    unless_rejected: ShouldApply = True
    if should_apply is not True:
      unless_rejected = tf.logical_or(should_apply, tf.logical_not(all_finite))
    return [tf.identity(_and(unless_rejected, each)) for each in finite]


def _and(condition: ShouldApply, finite: tf.Tensor) -> ShouldApply:
  """Returns the AND of a bool or scalar bool tensor and a scalar bool tensor."""
  if tf.is_tensor(condition):
    return tf.logical_and(condition, finite)
  if not condition:
    return False
  return finite


def _update(
  scale: loss_scale.AnyLossScale,
  grads: List[gradients.Gradient],
  all_finite: Optional[tf.Tensor],
  may_be_hidden: bool,
  check_computed: bool,
) -> _Update:
  """Returns `(update_op, should_apply)` as `LossScale.update` does; True if the scale
  is updated by `all_finite` only.

  `may_be_hidden`: whether the step may not be finite although all of `grads` are: in
  this process, or in another one.
  """
  if loss_scale.is_updated_by_check(scale):
    return scale._update_scale(all_finite), True
  if may_be_hidden:
    grads = distribute.call_for_each_replica(
      gradients.add_nan_unless, all_finite, grads
    )
  if not check_computed and isinstance(scale, loss_scale.FiniteLossScale):
    # its `update` may check them again
    grads = distribute.call_for_each_replica(lineage.cut, grads)
  return distribute.call_in_cross_replica_context(scale.update, grads)


def _reduce_finite(
  finite: List[tf.Tensor], reducer: Optional[FiniteReducer]
) -> List[tf.Tensor]:
  """Returns, for each per-replica scalar bool, whether it is True in all replicas and
  processes.
  """
  stacked = finite[0]
  expected = "scalar bool"
  if len(finite) > 1:
    stacked = distribute.call_for_each_replica(lambda *parts: tf.stack(parts), *finite)
    expected = "bool of shape [{}]".format(len(finite))
  stacked = distribute.reduce_all_replicas(stacked)
  if reducer is not None:
    reduced = tf.convert_to_tensor(reducer(stacked))
    if reduced.dtype != tf.bool or not reduced.shape.is_compatible_with(stacked.shape):
      raise ValueError(
        "finite_reducer must return a {}, True where the gradients are finite in all "
        "processes, but returned {}. Sum the number of processes with an overflow and "
        "compare it with 0, as mp_compat.horovod.all_ranks_finite does; an average of "
        "bools is True for a partial overflow.".format(expected, reduced)
      )
    stacked = reduced
  if len(finite) == 1:
    return [stacked]
  return tf.unstack(stacked, len(finite))


def _in_mutex(update: Callable[[], _Update], finite: tf.Tensor) -> _Update:
  """Returns `update()`, whose ops run in a mutex after `finite`; without one in eager
  mode, functions and XLA.
  """
  if tf.executing_eagerly() or ops.may_be_compiled():
    return update()
  with tf.control_dependencies([finite]), tf.device("/cpu:0"):
    lock = tf.raw_ops.MutexLock(mutex=tf.raw_ops.MutexV2())
  with tf.control_dependencies([lock]):
    update_op, should_apply = update()
  updated = [] if update_op is None else [update_op]
  with tf.control_dependencies(updated), tf.device("/cpu:0"):
    return tf.raw_ops.ConsumeMutexLock(mutex_lock=lock), should_apply


def apply(
  part: Part,
  decision: Decision,
  index: int = 0,
  global_step: Optional[tf.Variable] = None,
  name: Optional[str] = None,
  **kwargs: object,
) -> Optional[tf.Operation]:
  """Applies a part of a step in all replicas, or skips it, and records the step; called
  once for all replicas.

  The inner optimizer of the first replica's optimizer gets the part's gradients,
  `global_step`, `name` and `kwargs`. Returns one op that applies or skips the part and
  updates the loss scale; None in eager mode.
  """
  optimizers_of_replicas = distribute.local_results(part.optimizer)
  optimizer = optimizers_of_replicas[0]
  inner_optimizer = optimizer.inner_optimizer
  step = _unfinished_step(part, decision, index)
  # Steps of an optimizer inside of the inner one are later ones.
  earlier = recorded.earlier_steps()
  # "train/" is the scope of the train op.
  given = dict(global_step=global_step, name=name and name.rstrip("/"), **kwargs)
  args, keywords = optimizers.arguments_for(
    inner_optimizer.apply_gradients, tf.train.Optimizer.apply_gradients, given
  )
  part_grads, variables = zip(*part.grads_and_vars)
  reserved = op_names.reserve(name or optimizer.get_name())
  with loss_scale.recording_created(optimizer.loss_scale):
    applied = conditional_apply.apply_in_each_replica(
      step.applied,
      functools.partial(_apply_inner, inner_optimizer, step, earlier),
      part_grads,
      [variables] + args,
      keywords,
      part.scope,
      reserved,
    )
  accumulators_set = set_accumulator_steps(step.lineages, global_step, applied)
  train_op = distribute.group(
    applied, decision.update_op, accumulators_set, name=reserved.scope
  )
  step = step._replace(train_op=train_op)
  recorded.add(optimizers_of_replicas, step)
  advice.on_step(optimizer, step)
  return train_op


def _unfinished_step(part: Part, decision: Decision, index: int) -> recorded.Step:
  """Returns the record of a step, without its train op; in eager mode without gradients
  and what they derive from.
  """
  finite, apply = decision.finite[index], decision.apply[index]
  step = recorded.Step(None, [], (), finite, apply, set())
  if tf.executing_eagerly():
    return step
  local: List[Tuple[gradients.Gradient, str]] = []
  grads = [grad for grad, _ in part.grads_and_vars]
  of_replicas = distribute.local_results_of_each(grads)
  for (_, variable), local_grads in zip(part.grads_and_vars, of_replicas):
    local += [(grad, variable.name) for grad in local_grads]
  lineages = distribute.local_results(part.lineage)
  return step._replace(gradients=local, lineages=lineages)


def _apply_inner(
  inner_optimizer: tf.train.Optimizer,
  step: recorded.Step,
  earlier: List[recorded.Step],
  grads: Iterable[gradients.Gradient],
  variables: Iterable[tf.Variable],
  *args: object,
  **kwargs: object,
) -> Optional[tf.Operation]:
  """Calls `inner_optimizer.apply_gradients` in one replica, and checks which gradients
  its ops read; in eager mode, only calls it.

      step.reads = the tensors that the ops built by the call derive from, no further
        back than the gradients of this step and the results of earlier steps
      if one is a gradient of an earlier step with another decision: raise an error

  An op that reads the result of an earlier step (`step_applied`, `gradients_finite`)
  does not count as one that reads the gradients of that step.

  Args:
    inner_optimizer: the inner optimizer of the first replica's wrapper.
    step: the record of this step, to which `reads` are added.
    earlier: the steps before this one.
    grads: the gradients of this replica, which are not computed in a skipped step.
    variables: their variables.
    *args: further arguments of `inner_optimizer.apply_gradients`, by position.
    **kwargs: those by keyword.

  Returns:
    What `inner_optimizer.apply_gradients` returns; None only in eager mode and
    functions.

  Raises:
    ValueError: If it returns None in a plain graph, or if its ops read gradients of an
      earlier step that may be applied when this one is skipped, or the reverse.
  """
  grads_and_vars = list(zip(grads, variables))
  if tf.executing_eagerly():
    return inner_optimizer.apply_gradients(grads_and_vars, *args, **kwargs)
  graph = tf.get_default_graph()
  built_before = len(graph.get_operations())
  applied = inner_optimizer.apply_gradients(grads_and_vars, *args, **kwargs)
  inner_name = type(inner_optimizer).__name__
  if applied is None and not graph.building_function:
    raise ValueError(
      "{}.apply_gradients() must return the op that applies the gradients, but "
      "returned None. Only ops that it returns run with the train op. Return the op "
      "that it builds.".format(inner_name)
    )
  read: List[tf.Tensor] = []
  for op in graph.get_operations()[built_before:]:
    read += op.inputs
  known = step.own().union(*[other.results() for other in earlier])
  step.reads.update(contexts.search_back_by_key(read, contexts.data_inputs, known))
  if _reads_other_steps(step, earlier):
    raise ValueError(
      "apply_gradients() of {0} reads gradients of an earlier apply_gradients(). It "
      "would use them unchecked: if they overflowed, that step was skipped, but this "
      "one is not. To apply them, sum the gradients before one apply_gradients(), or "
      "wrap in the other order, with one LossScale: "
      "{0}(MixedPrecisionLossScaleOptimizer(opt, loss_scale)). To compute a learning "
      "rate from them, call apply_gradients_together(): both steps are applied, or "
      "none.".format(inner_name)
    )
  return applied


def _reads_other_steps(step: recorded.Step, earlier: Iterable[recorded.Step]) -> bool:
  """Returns whether ops of the inner optimizer read a gradient of an earlier step that
  may be applied when this one is not, or the reverse.

  Steps of `apply_gradients_together(skip="all")` have the same decision: the same
  tensor.
  """
  decisions: Dict[contexts.TensorKey, ShouldApply] = {}
  for other in earlier:
    decisions.update(dict.fromkeys(other.own(), other.applied))
  for key in step.reads.difference(step.own()):
    if key in decisions and decisions[key] is not step.applied:
      return True
  return False


def set_accumulator_steps(
  lineages: Iterable[Lineage], global_step: Optional[tf.Variable], applied: tf.Operation
) -> Optional[tf.Operation]:
  """Returns an op that sets the step of accumulators that gradients were taken from to
  that after `applied`, or None.

  Taking gradients from a `tf.ConditionalAccumulator`, as a `SyncReplicasOptimizer`
  around the loss scaling does, increments its step. The accumulator then drops new
  gradients of earlier steps as stale. A skipped step leaves `global_step` unchanged, so
  without this op the workers would wait forever.

  Args:
    lineages: what the gradients of each local replica derive from.
    global_step: the variable that counts applied steps, an int scalar; may be None.
    applied: the op or tensor that applies or skips the step.

  Returns:
    One op for all accumulators. None if no gradients were taken from one, or without a
    `global_step`.
  """
  takes: Dict[str, tf.Operation] = {}  # one for each accumulator
  for one in lineages:
    takes.update((take.inputs[0].name, take) for take in one.accumulator_takes)
  if not takes or global_step is None:
    return None
  with tf.control_dependencies([applied]), tf.colocate_with(
    global_step, ignore_existing=True
  ):
    current_step = tf.cast(global_step.read_value(), tf.int64)
  updates = []
  for take in takes.values():
    with tf.colocate_with(take, ignore_existing=True):
      set_step = tf.raw_ops.AccumulatorSetGlobalStep
      if take.type.startswith("Resource"):
        set_step = tf.raw_ops.ResourceAccumulatorSetGlobalStep
      updates.append(set_step(handle=take.inputs[0], new_global_step=current_step))
  return tf.group(*updates)


def collected(build: _Builder) -> _Builder:
  """Makes a function add the op that it returns to the graph's train ops, without those
  that are a part of it.
  """

  def build_and_collect(*args: object, **kwargs: object) -> Optional[tf.Operation]:
    others = tf.get_collection(tf.GraphKeys.TRAIN_OP)
    train_op = build(*args, **kwargs)
    if train_op is not None:  # not in eager mode
      tf.get_collection_ref(tf.GraphKeys.TRAIN_OP)[:] = others + [train_op]
    return train_op

  return cast(_Builder, functools.wraps(build)(build_and_collect))


@collected
def apply_first(
  parts: Sequence[Part],
  global_step: Optional[tf.Variable],
  name: Optional[str],
  **kwargs: object,
) -> Optional[tf.Operation]:
  """Applies the first part in all replicas, or skips it; the others are only checked;
  called once for all replicas.
  """
  optimizer = distribute.local_results(parts[0].optimizer)[0]
  decision = decide(
    optimizer.loss_scale, parts, optimizer._mp_compat_settings, skip="each"
  )
  return apply(parts[0], decision, 0, global_step, name, **kwargs)


def last_tensor(tensors: Sequence[Optional[ShouldApply]], what: str) -> tf.Tensor:
  """Returns the tensor of the last step; raises a MissingCheckError, which begins with
  `what`, if there is none.
  """
  if not tensors or not tf.is_tensor(tensors[-1]):
    raise MissingCheckError(
      "{}, which this graph lacks. First call minimize() or apply_gradients() in this "
      "graph, with skip_nonfinite=True.".format(what)
    )
  return tensors[-1]
