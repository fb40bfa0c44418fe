# SPDX-License-Identifier: Apache-2.0
"""One step: checks the gradients, updates the loss scale, and applies the gradients or
skips them.

`prepare` is called in each replica, then `decide` and `apply` once for all
(docs/design.md has a drawing). The optimizer, optimizers that share a loss scale,
gradient accumulation and the Keras wrapper call these functions. Observers
(`mp_compat.monitoring`) read the record of a step, which `apply` keeps and `recorded`
returns.
"""

import dataclasses
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
  Set,
  Tuple,
  TypeVar,
  Union,
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
from mp_compat.graph import graphs
from mp_compat.graph import names
from mp_compat.graph import records

# Reduces over processes: maps a bool tensor to one of the same shape, True where it is
# True in all processes.
FiniteReducer = Callable[[tf.Tensor], tf.Tensor]
ShouldApply = Union[bool, tf.Tensor]
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

  skip_nonfinite: bool = True
  check_computed_gradients: bool = True
  finite_reducer: Optional[FiniteReducer] = None
  use_locking: bool = False

  @classmethod
  def of_shared_step(cls, settings: Sequence["Settings"]) -> "Settings":
    """Returns the settings of a step that several optimizers share."""
    reducers = [each.finite_reducer for each in settings if each.finite_reducer]
    # Without defaults: a new setting needs a rule.
    joined: Dict[str, Any] = dict(
      skip_nonfinite=all(each.skip_nonfinite for each in settings),
      check_computed_gradients=all(each.check_computed_gradients for each in settings),
      finite_reducer=reducers[0] if reducers else None,
      use_locking=any(each.use_locking for each in settings),
    )
    return cls(*[joined[field] for field in cls._fields])


class Part(NamedTuple):
  """What one optimizer applies in one step, in one replica. `merge_call` makes each
  field a per-replica value.
  """

  # with converted gradients; empty for a part that is only checked
  grads_and_vars: Tuple[gradients.GradAndVar, ...]
  finite: Optional[tf.Tensor]  # a scalar bool; None without a check
  lineage: Lineage
  scope: str  # the name scope of the replica
  optimizer: Optional[tf.train.Optimizer] = (
    None  # the MixedPrecisionLossScaleOptimizer of the replica
  )


class Decision(NamedTuple):
  """Which parts of a step to apply, for all replicas."""

  finite: List[Optional[tf.Tensor]]  # for each part a scalar bool; None without a check
  apply: List[ShouldApply]  # for each part a bool, or a scalar bool tensor
  update_op: Optional[tf.Operation]  # updates the loss scale


class Step(NamedTuple):
  """The record of a step: what `apply_gradients` built for one optimizer."""

  train_op: tf.Operation  # None in eager mode
  # those passed in, of each local replica, and their variables' names
  gradients: List[Tuple[gradients.Gradient, str]]
  lineages: Tuple[Lineage, ...]  # of each local replica
  # a scalar bool, True if all gradients are finite; None without a check
  finite: Optional[tf.Tensor]
  # whether the step is applied: gradients finite, and should_apply of the loss scale
  applied: ShouldApply


@dataclasses.dataclass
class OptimizerState:
  """What a MixedPrecisionLossScaleOptimizer keeps in a graph."""

  # those that `scale_loss` read in this graph, in order
  scales: List[tf.Tensor] = dataclasses.field(default_factory=list)
  # whether `scale_loss` was called in this graph, or in a function inside of it
  has_scaled: bool = False
  # whether gradients were unscaled in this graph, or in a function inside of it
  has_unscaled: bool = False
  # also of functions inside; in eager mode only the last
  steps: List[Step] = dataclasses.field(default_factory=list)


def prepare(
  grads_and_vars: Iterable[Tuple[object, tf.Variable]],
  settings: Settings,
  check: bool = True,
  empties_window: bool = False,
) -> Part:
  """Converts the gradients of one replica, traces what they derive from and checks
  whether all values are finite.

  Raises a ValueError for means of a GradientAccumulator, unless the caller is one,
  which `empties_window`.
  """
  grads_and_vars = gradients.convert_pairs(grads_and_vars)
  grads = [grad for grad, _ in grads_and_vars]
  lineage.name_computed(grads_and_vars)
  traced = lineage.trace(grads, settings.check_computed_gradients)
  if not empties_window and any(
    computed.is_window_mean for computed in traced.computed
  ):
    raise ValueError(
      "Expected gradients of one step, but got means of a GradientAccumulator, whose "
      "window this would never empty. Pass them to apply_gradients() of the "
      "GradientAccumulator."
    )
  finite = None
  if check:
    passed, computed = map(
      dead_tensors.zeros_if_dead, (gradients.values_of(grads), traced.hidden_values)
    )
    finite = finite_check.all_finite(passed, computed, traced.sums_of_squares)
  return Part(grads_and_vars, finite, traced, names.name_scope())


def decide(
  scale: loss_scale.AnyLossScale,
  parts: Sequence[Part],
  settings: Settings,
  skip: str = "all",
) -> Decision:
  """Reduces the checks over replicas and processes, updates the loss scale; called once
  for all replicas.

  With `all_finite` True if all parts are finite in all replicas and processes, and
  `should_apply` what the loss scale answers (True if its update is only by
  `all_finite`), a part is applied:

      skip="all"     if all_finite and should_apply
      skip="each"    if the part is finite and (should_apply or not all_finite)
      no check       if should_apply

  The loss scale may be TensorFlow's. The parts are per-replica values; either all were
  checked or none.
  """
  grads = [grad for part in parts for grad, _ in part.grads_and_vars]
  if parts[0].finite is None:
    update_op, should_apply = _update(
      scale, grads, None, False, settings.check_computed_gradients
    )
    finite = should_apply if tf.is_tensor(should_apply) else None
    return Decision([finite] * len(parts), [should_apply] * len(parts), update_op)
  lineages = [one for part in parts for one in distribute.local_results(part.lineage)]
  reducer = settings.finite_reducer or _horovod_reducer(lineages)
  finite = _reduce_finite([part.finite for part in parts], reducer)
  all_finite = finite[0] if len(finite) == 1 else tf.reduce_all(tf.stack(finite))
  has_hidden = any(one.replaced for one in lineages) or not all(
    part.grads_and_vars for part in parts
  )
  update = functools.partial(
    _update,
    scale,
    grads,
    all_finite,
    has_hidden or reducer is not None,
    settings.check_computed_gradients,
  )
  update_op, should_apply = (
    _in_mutex(update, all_finite) if settings.use_locking else update()
  )
  return Decision(finite, _applied(skip, finite, all_finite, should_apply), update_op)


def _horovod_reducer(lineages: Iterable[lineage.Lineage]) -> Optional[FiniteReducer]:
  """Returns that for Horovod if it reduced the gradients: the check also covers those
  that each rank computed.
  """
  return (
    horovod.all_ranks_finite
    if any(one.is_reduced_by_horovod for one in lineages)
    else None
  )


def _applied(
  skip: str, finite: List[tf.Tensor], all_finite: tf.Tensor, should_apply: ShouldApply
) -> List[ShouldApply]:
  if skip == "all" or len(finite) == 1:
    return [_and(should_apply, all_finite)] * len(finite)
  # No part is applied before the gradients of all parts are computed.
  with tf.control_dependencies([all_finite]):
    unless_rejected = (
      True
      if should_apply is True
      else tf.logical_or(should_apply, tf.logical_not(all_finite))
    )
    return [tf.identity(_and(unless_rejected, each)) for each in finite]


def _and(condition: ShouldApply, finite: tf.Tensor) -> ShouldApply:
  if tf.is_tensor(condition):
    return tf.logical_and(condition, finite)
  return finite if condition else False


def _update(
  scale: loss_scale.AnyLossScale,
  grads: List[gradients.Gradient],
  all_finite: Optional[tf.Tensor],
  is_hidden: bool,
  check_computed: bool,
) -> _Update:
  """Returns `(update_op, should_apply)` as `LossScale.update` does; True if the scale
  is updated by `all_finite` only.

  `is_hidden`: whether the step may not be finite although all of `grads` are.
  """
  if loss_scale.is_updated_by_check(scale):
    return scale._update_scale(all_finite), True
  if is_hidden:
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
  single = len(finite) == 1
  stacked = (
    finite[0]
    if single
    else distribute.call_for_each_replica(lambda *parts: tf.stack(parts), *finite)
  )
  stacked = distribute.reduce_all_replicas(stacked)
  if reducer is not None:
    reduced = tf.convert_to_tensor(reducer(stacked))
    if reduced.dtype != tf.bool or not reduced.shape.is_compatible_with(stacked.shape):
      raise ValueError(
        "finite_reducer must return a {}, True where the gradients are finite in all "
        "processes, but returned {}. Sum the number of processes with an overflow and "
        "compare it with 0, as mp_compat.horovod.all_ranks_finite does; an average of "
        "bools is True for a partial overflow.".format(
          "scalar bool" if single else "bool of shape [{}]".format(len(finite)), reduced
        )
      )
    stacked = reduced
  return [stacked] if single else tf.unstack(stacked, len(finite))


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
  with tf.control_dependencies([] if update_op is None else [update_op]), tf.device(
    "/cpu:0"
  ):
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
  lineages = distribute.local_results(part.lineage)
  local = [
    (local_grad, variable.name)
    for grad, variable in part.grads_and_vars
    for local_grad in distribute.local_results(grad)
  ]
  grads = [grad for grad, _ in local]
  computed = [each for one in lineages for each in one.computed]
  graph = graphs.default_graph()
  values = [] if graph is None else gradients.values_of(grads)
  own = contexts.keys_of(values + [each.values for each in computed])
  scaled = contexts.keys_of(each.scaled for each in computed if each.scaled is not None)
  # The gradients that were applied in the graph before, and those that they derive
  # from, with the decision on each.
  decided = {} if graph is None else records.record_in(graph, "gradients_of_steps")
  # A step may depend on whether another is applied.
  decisions = set() if graph is None else records.record_in(graph, "decisions", set)
  # "train/" is the scope of the train op.
  given = dict(global_step=global_step, name=name and name.rstrip("/"), **kwargs)
  method, base = (
    optimizer.inner_optimizer.apply_gradients,
    tf.train.Optimizer.apply_gradients,
  )
  args, keywords = optimizers.arguments_for(method, base, given)
  part_grads, variables = zip(*part.grads_and_vars)
  recording = loss_scale.recording_created(optimizer.loss_scale)
  with names.reserve_name(name or optimizer.get_name()) as step_scope, recording:
    applied = conditional_apply.apply_in_each_replica(
      decision.apply[index],
      functools.partial(
        _apply_inner,
        optimizer,
        own,
        scaled,
        dict(decided),
        set(decisions),
        decision.apply[index],
      ),
      part_grads,
      [variables] + args,
      keywords,
      part.scope,
    )
  step = Step(None, [], (), decision.finite[index], decision.apply[index])
  if tf.executing_eagerly():
    _record(optimizers_of_replicas, step)
    return None
  decided.update(dict.fromkeys(own, decision.apply[index]))
  results = [decision.finite[index], decision.apply[index]]
  decisions.update(contexts.keys_of(filter(tf.is_tensor, results)))
  accumulators_set = _set_accumulator_steps(lineages, global_step, applied)
  train_op = distribute.group(
    applied, decision.update_op, accumulators_set, name=step_scope
  )
  _record(
    optimizers_of_replicas,
    step._replace(train_op=train_op, gradients=local, lineages=lineages),
  )
  return train_op


def _apply_inner(
  optimizer: tf.train.Optimizer,
  own: Set[contexts.TensorKey],
  scaled: Set[contexts.TensorKey],
  decided: Dict[contexts.TensorKey, ShouldApply],
  decisions: Set[contexts.TensorKey],
  should_apply: ShouldApply,
  grads: Iterable[gradients.Gradient],
  variables: Iterable[tf.Variable],
  *args: object,
  **kwargs: object,
) -> Optional[tf.Operation]:
  """Calls the inner optimizer of `optimizer`; checks which gradients it uses, not by
  way of its `own`.

  Logs a warning for `scaled` ones of this step. Raises a ValueError for those of
  earlier steps, which were `decided` otherwise than by `should_apply`, but not for the
  `decisions` themselves.
  """
  inner_optimizer = optimizer.inner_optimizer
  grads_and_vars = list(zip(grads, variables))
  if tf.executing_eagerly():
    return inner_optimizer.apply_gradients(grads_and_vars, *args, **kwargs)
  graph = tf.get_default_graph()
  count = len(graph.get_operations())
  applied = inner_optimizer.apply_gradients(grads_and_vars, *args, **kwargs)
  if applied is None and not graph.building_function:
    raise ValueError(
      "{}.apply_gradients() must return the op that applies the gradients, but "
      "returned None. Only ops that it returns run with the train op. Return the op "
      "that it builds.".format(type(inner_optimizer).__name__)
    )
  read = [tensor for op in graph.get_operations()[count:] for tensor in op.inputs]
  found = contexts.search_back(read, contexts.data_inputs, own | decisions)
  used = contexts.keys_of(found)
  if [key for key in used - own if decided.get(key, should_apply) is not should_apply]:
    raise ValueError(
      "apply_gradients() of {0} reads gradients of an earlier apply_gradients(). It "
      "would use them unchecked: if they overflowed, that step was skipped, but this "
      "one is not. To apply them, sum the gradients before one apply_gradients(), or "
      "wrap in the other order, with one LossScale: "
      "{0}(MixedPrecisionLossScaleOptimizer(opt, loss_scale)). To compute a learning "
      "rate from them, call apply_gradients_together(): both steps are applied, or "
      "none.".format(type(inner_optimizer).__name__)
    )
  if not scaled.isdisjoint(used):
    records.warn_once(
      optimizer,
      "apply_gradients() of %s reads gradients that its compute_gradients() computed, "
      "instead of those passed to it. They are multiplied by the loss scale. Use the "
      "gradients that are passed.",
      type(inner_optimizer).__name__,
    )
  return applied


def _set_accumulator_steps(
  lineages: Iterable[Lineage], global_step: Optional[tf.Variable], applied: tf.Operation
) -> Optional[tf.Operation]:
  """Returns an op that sets the step of accumulators that gradients were taken from to
  that after `applied`, or None.

  Taking gradients from a `tf.ConditionalAccumulator`, as a `SyncReplicasOptimizer`
  around the loss scaling does, increments its step. The accumulator then drops new
  gradients of earlier steps as stale. A skipped step leaves `global_step` unchanged, so
  without this op the workers would wait forever.
  """
  takes = {
    take.inputs[0].name: take for one in lineages for take in one.accumulator_takes
  }
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


def _record(optimizers_of_replicas: Iterable[tf.train.Optimizer], step: Step) -> None:
  """Records a step of each optimizer, in the current graph and in the graph that a
  Session runs.
  """
  current, outermost = graphs.default_graph(), graphs.init_scope_graph()
  recording = {current} if None in (current, outermost) else {current, outermost}
  for graph in recording:
    for optimizer in optimizers_of_replicas:
      steps = records.state_of(optimizer, graph, OptimizerState).steps
      if step.train_op is None:
        steps.clear()
      steps.append(step)


def recorded(optimizer: tf.train.Optimizer) -> List[Step]:
  """Returns the steps of the optimizer in the current graph and in functions inside of
  it, the newest last.
  """
  return list(records.state_of(optimizer, graphs.default_graph(), OptimizerState).steps)


def last_tensor(tensors: Sequence[Optional[ShouldApply]], what: str) -> tf.Tensor:
  """Returns the tensor of the last step; raises a MissingCheckError, which begins with
  `what`, if there is none.
  """
  if not tensors or not tf.is_tensor(tensors[-1]):
    raise MissingCheckError(
      what
      + ", which this graph lacks. First call minimize() or apply_gradients() in this graph, with "
      "skip_nonfinite=True."
    )
  return tensors[-1]
