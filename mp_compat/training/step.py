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
from mp_compat.graph import op_names
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
  """What one optimizer applies in one step, in one replica. `merge_call` makes each
  field a per-replica value.

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


class Step(NamedTuple):
  """The record of a step: what `apply_gradients` built for one optimizer.

  Attributes:
    train_op: The op that applies or skips the step; None in eager mode.
    gradients: The gradients that were passed in, of each local replica, and their
      variables' names; empty in eager mode.
    lineages: What the gradients of each local replica derive from; empty in eager mode.
    finite: A scalar bool tensor, True if all gradients are finite; None without a
      check.
    applied: A bool, or a scalar bool tensor: whether the step is applied. The gradients
      are finite, and the loss scale's `should_apply` is True.
  """

  train_op: tf.Operation
  gradients: List[Tuple[gradients.Gradient, str]]
  lineages: Tuple[Lineage, ...]
  finite: Optional[tf.Tensor]
  applied: ShouldApply


@dataclasses.dataclass
class OptimizerState:
  """What a MixedPrecisionLossScaleOptimizer keeps in a graph.

  Attributes:
    scales: The loss scales that `scale_loss` read in this graph, in order; float32
      scalars.
    has_scaled: Whether `scale_loss` was called in this graph, or in a function inside
      of it.
    has_unscaled: Whether gradients were unscaled in this graph, or in a function inside
      of it.
    steps: The steps in this graph and in functions inside of it; in eager mode only the
      last one.
  """

  scales: List[tf.Tensor] = dataclasses.field(default_factory=list)
  has_scaled: bool = False
  has_unscaled: bool = False
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
  pairs = gradients.convert_pairs(grads_and_vars)
  grads, variables = zip(*pairs)
  traced = lineage.trace(grads, settings.check_computed_gradients, variables)
  if not empties_window:
    _check_not_of_window(traced)
  finite = None
  if check:
    passed = dead_tensors.zeros_if_dead(gradients.values_of(grads))
    computed = dead_tensors.zeros_if_dead(traced.hidden_values)
    finite = finite_check.all_finite(passed, computed, traced.sums_of_squares)
  return Part(pairs, finite, traced, op_names.name_scope())


def _check_not_of_window(traced: Lineage) -> None:
  """Raises a ValueError if gradients are means of a GradientAccumulator."""
  if any(computed.is_window_mean for computed in traced.computed):
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
  if parts[0].finite is None:
    update_op, should_apply = _update(scale, grads, None, False, check_computed)
    finite_of_scale = should_apply if tf.is_tensor(should_apply) else None
    count = len(parts)
    return Decision([finite_of_scale] * count, [should_apply] * count, update_op)
  reducer = settings.finite_reducer or _horovod_reducer(lineages)
  finite = _reduce_finite([part.finite for part in parts], reducer)
  all_finite = finite[0]
  if len(finite) > 1:
    all_finite = tf.reduce_all(tf.stack(finite))
  is_hidden = reducer is not None or _may_be_hidden(parts, lineages)

  def update() -> _Update:
    return _update(scale, grads, all_finite, is_hidden, check_computed)

  if settings.use_locking:
    update_op, should_apply = _in_mutex(update, all_finite)
  else:
    update_op, should_apply = update()
  return Decision(finite, _applied(skip, finite, all_finite, should_apply), update_op)


def _may_be_hidden(parts: Iterable[Part], lineages: Iterable[Lineage]) -> bool:
  """Returns whether a step may not be finite although all gradients of its parts are:
  because of computed gradients, or of a part that is only checked.
  """
  has_replaced = any(one.replaced for one in lineages)
  return has_replaced or not all(part.grads_and_vars for part in parts)


def _horovod_reducer(lineages: Iterable[Lineage]) -> Optional[FiniteReducer]:
  """Returns that for Horovod if it reduced the gradients: the check also covers those
  that each rank computed. Returns None otherwise.
  """
  if any(one.is_reduced_by_horovod for one in lineages):
    return horovod.all_ranks_finite
  return None


def _applied(
  skip: str, finite: List[tf.Tensor], all_finite: tf.Tensor, should_apply: ShouldApply
) -> List[ShouldApply]:
  """Returns for each part whether it is applied: see `decide`."""
  if skip == "all" or len(finite) == 1:
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
  update_op, should_apply = distribute.call_in_cross_replica_context(
    scale.update, grads
  )
  if tf.is_tensor(should_apply):
    should_apply = gradients.readable(should_apply)
  return update_op, should_apply


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
  decided = _decided_in(graphs.default_graph())
  readable = _readable_in(step, decided)
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
      functools.partial(_apply_inner, optimizer, inner_optimizer, readable),
      part_grads,
      [variables] + args,
      keywords,
      part.scope,
      reserved,
    )
  if tf.executing_eagerly():
    _record(optimizers_of_replicas, step)
    return None
  _record_decision(step, readable.own, decided)
  accumulators_set = set_accumulator_steps(step.lineages, global_step, applied)
  train_op = distribute.group(
    applied, decision.update_op, accumulators_set, name=reserved.scope
  )
  _record(optimizers_of_replicas, step._replace(train_op=train_op))
  return train_op


def _unfinished_step(part: Part, decision: Decision, index: int) -> Step:
  """Returns the record of a step, without its train op; in eager mode without gradients
  and what they derive from.
  """
  step = Step(None, [], (), decision.finite[index], decision.apply[index])
  if tf.executing_eagerly():
    return step
  local: List[Tuple[gradients.Gradient, str]] = []
  grads = [grad for grad, _ in part.grads_and_vars]
  of_replicas = distribute.local_results_of_each(grads)
  for (_, variable), local_grads in zip(part.grads_and_vars, of_replicas):
    local += [(grad, variable.name) for grad in local_grads]
  lineages = distribute.local_results(part.lineage)
  return step._replace(gradients=local, lineages=lineages)


@dataclasses.dataclass
class _Decided:
  """The record of a graph: what its steps decided.

  Attributes:
    gradients: The keys of gradients that were applied, and of the computed ones that
      they derive from, each with the decision to apply them.
    results: The keys of tensors that tell whether a step is finite, or applied.
  """

  gradients: Dict[contexts.TensorKey, ShouldApply] = dataclasses.field(
    default_factory=dict
  )
  results: Set[contexts.TensorKey] = dataclasses.field(default_factory=set)


class _Readable(NamedTuple):
  """Which gradients an inner optimizer may read, besides those that are passed to it.

  Attributes:
    own: The keys of the gradients of this step, and of the computed ones that they
      derive from.
    scaled: The keys of those computed ones as gradients of the scaled loss.
    earlier: What the steps before this one decided.
    should_apply: What this step decided: a bool, or a scalar bool tensor.
  """

  own: Set[contexts.TensorKey]
  scaled: Set[contexts.TensorKey]
  earlier: _Decided
  should_apply: ShouldApply


def _readable_in(step: Step, decided: _Decided) -> _Readable:
  """Returns what the inner optimizer may read in a step; in eager mode, nothing is
  known.
  """
  if tf.executing_eagerly():
    return _Readable(set(), set(), _Decided(), step.applied)
  own = gradients.values_of([grad for grad, _ in step.gradients])
  scaled: List[tf.Tensor] = []
  for one in step.lineages:
    for computed in one.computed:
      own.append(computed.values)
      if computed.scaled is not None:
        scaled.append(computed.scaled)
  # Steps of an optimizer inside of the inner one add to the record.
  earlier = _Decided(dict(decided.gradients), set(decided.results))
  own_keys, scaled_keys = contexts.keys_of(own), contexts.keys_of(scaled)
  return _Readable(own_keys, scaled_keys, earlier, step.applied)


def _record_decision(
  step: Step, own: Iterable[contexts.TensorKey], decided: _Decided
) -> None:
  """Records in `decided` what a step decided on its `own` gradients, by their keys."""
  decided.gradients.update(dict.fromkeys(own, step.applied))
  results = [each for each in (step.finite, step.applied) if tf.is_tensor(each)]
  decided.results.update(contexts.keys_of(results))


def _decided_in(graph: Optional[tf.Graph]) -> _Decided:
  """Returns the record of a graph; an empty one in eager mode (None)."""
  if graph is None:
    return _Decided()
  return records.record_in(graph, "decided", _Decided)


def _apply_inner(
  optimizer: tf.train.Optimizer,
  inner_optimizer: tf.train.Optimizer,
  readable: _Readable,
  grads: Iterable[gradients.Gradient],
  variables: Iterable[tf.Variable],
  *args: object,
  **kwargs: object,
) -> Optional[tf.Operation]:
  """Calls `inner_optimizer.apply_gradients` in one replica, and checks which gradients
  its ops read; in eager mode, only calls it.

      for each tensor that the ops built by the call derive from, no further back than
          the gradients of this step and the results of earlier steps:
        if it is a gradient of an earlier step with another decision: raise an error
        if it is a gradient of the scaled loss of this step: log a warning

  An op that reads the result of an earlier step (`step_applied`, `gradients_finite`)
  does not count as one that reads the gradients of that step.

  Args:
    optimizer: the wrapper, for which the warning is logged.
    inner_optimizer: the inner optimizer of the first replica's wrapper.
    readable: which gradients the inner optimizer may read.
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
  known = readable.own | readable.earlier.results
  used = contexts.search_back_by_key(read, contexts.data_inputs, known)
  if _reads_other_steps(used, readable):
    raise ValueError(
      "apply_gradients() of {0} reads gradients of an earlier apply_gradients(). It "
      "would use them unchecked: if they overflowed, that step was skipped, but this "
      "one is not. To apply them, sum the gradients before one apply_gradients(), or "
      "wrap in the other order, with one LossScale: "
      "{0}(MixedPrecisionLossScaleOptimizer(opt, loss_scale)). To compute a learning "
      "rate from them, call apply_gradients_together(): both steps are applied, or "
      "none.".format(inner_name)
    )
  if not readable.scaled.isdisjoint(used):
    records.warn_once(
      optimizer,
      "apply_gradients() of %s reads gradients that its compute_gradients() computed, "
      "instead of those passed to it. They are multiplied by the loss scale. Use the "
      "gradients that are passed.",
      inner_name,
    )
  return applied


def _reads_other_steps(used: Iterable[contexts.TensorKey], readable: _Readable) -> bool:
  """Returns whether one of the tensors that are `used`, by key, is a gradient of an
  earlier step that may be applied when this one is not, or the reverse.

  Steps of `apply_gradients_together(skip="all")` have the same decision: the same
  tensor.
  """
  earlier = readable.earlier.gradients
  for key in used:
    if key in readable.own or key not in earlier:
      continue
    if earlier[key] is not readable.should_apply:
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


def _record(optimizers_of_replicas: Iterable[tf.train.Optimizer], step: Step) -> None:
  """Records a step of each optimizer, in the current graph and in the graph that a
  Session runs; in eager mode, in place of the step before.

  A step that is built in a function is thus in two records: ops in the function can
  read its tensors, and observers of the Session find it. A function that eager code
  calls has no such Session.
  """
  current, outermost = graphs.default_graph(), graphs.init_scope_graph()
  recording = {current, outermost}
  if outermost is None:  # a function that eager code calls
    recording = {current}
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
      "{}, which this graph lacks. First call minimize() or apply_gradients() in this "
      "graph, with skip_nonfinite=True.".format(what)
    )
  return tensors[-1]
