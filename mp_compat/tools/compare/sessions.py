# SPDX-License-Identifier: Apache-2.0
"""Observes the runs of all sessions, finds the steps of optimizers in them, and makes
op seeds repeatable.
"""

import functools
import itertools
import re
import types
from typing import (
  Any,
  Callable,
  Dict,
  FrozenSet,
  Iterable,
  List,
  Mapping,
  NamedTuple,
  Optional,
  Set,
  Tuple,
)

from tensorflow.python.client import session
from tensorflow.python.eager import imperative_grad
from tensorflow.python.framework import random_seed  # pyright: ignore[reportAttributeAccessIssue]
from tensorflow.python.ops import gradients_util
from tensorflow.python.ops import stateful_random_ops

from mp_compat._tensorflow import autograph
from mp_compat._tensorflow import tf
from mp_compat._tensorflow import trackable
from mp_compat._tensorflow import variables as variable_kinds
from mp_compat.graph import contexts
from mp_compat.graph import effects
from mp_compat.graph import graphs
from mp_compat.graph import records
from mp_compat.graph import runs
from mp_compat.tools.compare import training

# Runs and reads whether steps are applied; returns the result of the run, and what was
# read, by name. A partial run reads only what is fed.
Run = Callable[[List[tf.Tensor]], Tuple[Any, Dict[str, bool]]]
_Function = Callable[..., Any]

_VARIABLES = ("VarHandleOp", "Variable", "VariableV2")
_run = session.BaseSession._run  # which is not observed
_calls = itertools.count()


# TensorFlow's ops that apply gradients to a variable, and only they: those of its
# optimizers.
_APPLYING = re.compile("(Resource)?(Sparse)?Apply[A-Z]")


class BuiltStep:
  """What a call of `apply_gradients` built in a graph, or in a function inside of
  it.
  """

  def __init__(
    self,
    variables: Iterable[str],
    is_scaled: bool,
    is_called: bool = False,
    told: Optional[List[Optional[bool]]] = None,
  ) -> None:
    self.call = next(_calls)
    # the names of those to which it applies gradients
    self.variables = frozenset(variables)
    self.is_scaled = is_scaled  # whether its optimizer scales the loss
    self.is_called = is_called  # whether it is in a function
    # what was returned, and the mark; a run that executes one executes the step
    self.ops: Set[tf.Operation] = set()
    # scalar bools by name: it is applied if all are True
    self.decisions: Dict[str, tf.Tensor] = {}
    # Whether it has a mark: it is in control flow, and an op tells of each execution
    # whether it is applied (None: not known). Those that were not taken yet:
    self.is_marked = told is not None
    self.told: List[Optional[bool]] = [] if told is None else told


class KnownStep(NamedTuple):
  """A step by names, to find it in a graph that was imported."""

  op_types: Dict[str, str]  # of its ops, by name; none for a step in a function
  variables: List[str]
  is_scaled: bool
  decisions: List[str]
  told: Optional[List[Optional[bool]]]  # of a marked one, shared with its copies


class Effects(NamedTuple):
  """What a run does to variables."""

  change: training.Change
  # that it executes; of those in control flow, those that it may execute
  steps: List[BuiltStep]
  # scalar bools, whether to apply the steps; without those in control flow
  decisions: List[tf.Tensor]


def observe(
  around: Callable[[tf.Session, List[runs.Element], FrozenSet[str], Run], object],
) -> None:
  """Makes each run of any session call `around(session, elements, fed, run)`, and
  return what it returns.

  `elements` are the ops and tensors that the run executes, `fed` the names of the
  tensors that it feeds. `around` calls `run(decisions)` with those of `effects_of`.
  """
  base = session.BaseSession
  make_callable, from_options = base.make_callable, base._make_callable_from_options

  def observed_run(
    self: tf.Session, handle: Any, fetches: Any, feeds: Any, *args: object
  ) -> object:
    fed = frozenset(
      tensor.name for tensor in runs.fetched_elements(self.graph, list(feeds or {}))
    )

    def run(decisions: List[tf.Tensor]) -> Tuple[Any, Dict[str, bool]]:
      readable = {
        tensor.name: tensor
        for tensor in decisions
        if handle is None or tensor.name in fed
      }
      return _run(self, handle, (fetches, readable), feeds, *args)

    return around(self, runs.fetched_elements(self.graph, fetches), fed, run)

  def observed_make_callable(
    self: Any, fetches: Any, feed_list: Any = None, accept_options: bool = False
  ) -> Any:
    make_callable(self, fetches, feed_list, accept_options)  # checks the arguments
    return lambda *values, **options: self.run(
      fetches, dict(zip(feed_list or [], values)), **options
    )

  def observed_from_options(self: tf.Session, options: Any) -> _Function:  # for Keras
    elements = [
      self.graph.as_graph_element(name) for name in [*options.target, *options.fetch]
    ]
    fed = frozenset(options.feed)

    @functools.lru_cache(maxsize=None)
    def callable_with(*further: str) -> _Function:
      extended = type(options)()
      extended.CopyFrom(options)
      extended.fetch.extend(further)
      return from_options(self, extended)

    def call(*values: object, **keywords: object) -> object:
      def run(decisions: List[tf.Tensor]) -> Tuple[Any, Dict[str, bool]]:
        further = [tensor.name for tensor in decisions if tensor.name not in fed]
        results = callable_with(*further)(*values, **keywords)
        count = len(options.fetch)
        return results[:count], dict(zip(further, results[count:]))

      return around(self, elements, fed, run)

    return call

  base._run, base.make_callable = observed_run, observed_make_callable
  base._make_callable_from_options = observed_from_options


def observe_optimizers(
  scales_loss: Callable[[trackable.Trackable], bool],
  know: Callable[[KnownStep], object] = lambda step: None,
) -> None:
  """Makes graphs record what `apply_gradients` of each optimizer builds, Keras's
  included, for `effects_of`; calls `know` with each step.

  It calls `scales_loss(optimizer)` first, which returns whether an optimizer scales the
  loss. In control flow, it adds an op that tells when a step runs.
  """

  def recording(apply: _Function) -> _Function:
    @autograph.do_not_convert
    @functools.wraps(apply)
    def apply_and_record(
      self: trackable.Trackable, grads_and_vars: Any, *args: object, **kwargs: object
    ) -> object:
      if graphs.init_scope_graph() is None:
        return apply(self, grads_and_vars, *args, **kwargs)
      pairs = list(grads_and_vars)
      build = functools.partial(apply, self, pairs, *args, **kwargs)
      return _record(pairs, scales_loss(self), [], build, know)

    return apply_and_record

  def observe_class(cls: Any) -> None:
    definer = next((one for one in cls.__mro__ if "apply_gradients" in vars(one)), None)
    # or that of a mixin
    is_own = definer is cls or not issubclass(definer or base, base)
    if (
      is_own
      and hasattr(cls, "minimize")
      and isinstance(vars(definer)["apply_gradients"], types.FunctionType)
    ):
      cls.apply_gradients = recording(cls.apply_gradients)

  def observe_subclass(cls: Any, **kwargs: object) -> None:
    super(base, cls).__init_subclass__(**kwargs)
    observe_class(cls)

  def with_subclasses(cls: type) -> Set[type]:
    return {cls}.union(*map(with_subclasses, type.__subclasses__(cls)))

  base: Any = trackable.Trackable
  for cls in with_subclasses(base):
    observe_class(cls)
  base.__init_subclass__ = classmethod(observe_subclass)  # type: ignore[arg-type]


def observe_parts(
  owner: object,
  method: str,
  part_of: Callable[..., Tuple[List[Any], object]],
  know: Callable[[KnownStep], object],
) -> None:
  """Makes graphs record what a function of `owner` builds that applies a part of a step
  with loss scaling, for `effects_of`; calls `know` with each.

  `part_of` gets its arguments, and returns pairs of gradients and variables, and
  whether to apply them.
  """
  apply = vars(owner)[method]

  @functools.wraps(apply)
  def apply_and_record(*args: Any, **kwargs: Any) -> object:
    if graphs.init_scope_graph() is None:
      return apply(*args, **kwargs)
    pairs, should_apply = part_of(*args, **kwargs)
    build = functools.partial(apply, *args, **kwargs)
    return _record(pairs, True, [should_apply], build, know)

  setattr(owner, method, apply_and_record)


def _record(
  pairs: List[Any],
  is_scaled: bool,
  decisions: List[object],
  build: Callable[[], object],
  know: Callable[[KnownStep], object],
) -> object:
  """Returns `build()`, and records it as a step that applies gradients to the variables
  of `pairs` if `decisions` and those made meanwhile are True.
  """
  graph = graphs.init_scope_graph()
  names = [
    variable.name.rpartition(":")[0] for grad, variable in pairs if grad is not None
  ]
  step = BuiltStep(names, is_scaled, is_called=graph is not tf.get_default_graph())
  open_steps = _open_steps(graph)
  for around in open_steps:  # They skip this step, too.
    step.decisions.update(around.decisions)
  _decide([step], decisions)
  _steps(graph).append(step)
  open_steps.append(step)
  try:
    result = build()
  finally:
    open_steps.remove(step)
  mark = _mark(step, [grad for grad, _ in pairs])
  for element in tf.nest.flatten(result):
    op = getattr(element, "op", element)
    if isinstance(op, tf.Operation):
      step.ops.add(op)
      if mark is not None and _place(op) == _place(mark):
        op._add_control_input(mark)
  know(_names(step, graph))
  return result


def observe_decisions(
  owner: object, method: str, decisions_of: Callable[[Any, Any], List[Any]]
) -> None:
  """Makes graphs record whether steps are applied, for `effects_of`.

  `decisions_of(argument, result)` returns it, from the last argument and the result of
  a method or function of `owner`, for the steps with loss scaling that are being built.
  What further observed methods return that it calls does not count.
  """
  decide = vars(owner)[method]
  if "is_observed" in vars(decide):
    return

  @functools.wraps(decide)
  def decide_and_record(*args: Any, **kwargs: Any) -> Any:
    graph = graphs.init_scope_graph()
    if graph is None:
      return decide(*args, **kwargs)
    scaled = [step for step in _open_steps(graph) if step.is_scaled]
    before = [dict(step.decisions) for step in scaled]
    result = decide(*args, **kwargs)
    for step, decisions in zip(scaled, before):
      step.decisions = decisions
    _decide(scaled, decisions_of(args[-1], result))
    return result

  decide_and_record.is_observed = True  # type: ignore[attr-defined]
  setattr(owner, method, decide_and_record)


def _decide(steps: List[BuiltStep], decisions: List[Any]) -> None:
  """Adds what decides whether steps are applied; what is no tensor decides nothing."""
  for step in steps:
    step.decisions.update((each.name, each) for each in decisions if tf.is_tensor(each))


def _steps(graph: tf.Graph) -> List[BuiltStep]:
  return records.record_in(graph, "steps_of_optimizers", list)


def _open_steps(graph: tf.Graph) -> List[BuiltStep]:
  """Returns the steps that are being built; with replicas, several beside each other."""
  return records.record_in(graph, "steps_being_built", list)


def _place(op: tf.Operation) -> Tuple[tf.Graph, contexts.Context]:
  return op.graph, op._get_control_flow_context()


def _mark(step: BuiltStep, grads: List[Any]) -> Optional[tf.Operation]:
  """Returns an op that tells that a step runs and whether it is applied, built in the
  current branch, loop or function.

  Returns None outside of all, and in code that XLA compiles, which cannot contain such
  an op.
  """
  enclosing = list(graphs.enclosing_graphs())
  around = [graph._get_control_flow_context() for graph in enclosing]
  is_compiled = any(
    context.IsXLAContext()
    for innermost in around
    for context in contexts.enclosing(innermost)
  )
  if is_compiled or not contexts.is_in_control_flow():
    return None
  # If TensorFlow inlines a function that is not called, its ops without input run; Size
  # and Shape become constants.
  tensors = [
    grad.values if isinstance(grad, tf.IndexedSlices) else grad for grad in grads
  ]
  inputs = [tf.reshape(tensor, [-1])[:1] for tensor in tensors if tf.is_tensor(tensor)][
    :1
  ]
  decisions = list(step.decisions.values())
  is_readable = all(
    tensor.graph in enclosing and contexts.is_readable(tensor) for tensor in decisions
  )

  def tell(*values: Any) -> None:
    decided = values[len(inputs) :]
    step.told.append(all(decided) if is_readable else None)

  with tf.device(None):
    mark = tf.py_func(
      tell, inputs + (decisions if is_readable else []), [], name="step_runs"
    )
  step.ops.add(mark)
  step.is_marked = True
  return mark


def take_executions(
  steps: Iterable[BuiltStep], decided: Mapping[str, bool]
) -> List[training.Execution]:
  """Returns what a run has executed of the steps that it may execute; called after
  each, also if it fails.

  `decided` has the decisions that were read, by name. A marked step has a result for
  each of its executions since the last call. If threads run the same step at the same
  time, some may be those of another run.
  """
  executions = []
  for step in steps:
    applied = step.told[:]
    del step.told[: len(applied)]
    if not step.is_marked:
      is_known = decided.keys() >= step.decisions.keys()
      is_applied = all(decided[name] for name in step.decisions) if is_known else None
      applied = [is_applied]
    for each in applied:
      executions.append(
        training.Execution(
          step.call, step.variables, step.is_scaled, tuple(step.decisions), each
        )
      )
  return executions


def _names(step: BuiltStep, graph: tf.Graph) -> KnownStep:
  """Returns a step of a graph by names."""
  return KnownStep(
    {op.name: op.type for op in step.ops if op.graph is graph},
    sorted(step.variables),
    step.is_scaled,
    list(step.decisions),
    step.told if step.is_marked else None,
  )


def find_imported(graph: tf.Graph, known: Iterable[KnownStep]) -> None:
  """Makes a graph record steps that were built in another graph and imported into this
  one, for `effects_of`.

  A step is found by the names of its variables and ops, all below one name scope.
  """
  own = set().union(*[step.ops for step in _steps(graph)])
  variables = {op.name for op in graph.get_operations() if op.type in _VARIABLES}
  found = records.record_in(graph, "imported_steps", set)
  for number, step in enumerate(known):
    for prefix in _prefixes(step.variables, variables):
      if (number, prefix) in found or not _is_imported(step, prefix, graph, own):
        continue
      found.add((number, prefix))
      copy = BuiltStep(
        [prefix + name for name in step.variables],
        step.is_scaled,
        is_called=not step.op_types,
        told=step.told,
      )
      copy.ops = {graph.get_operation_by_name(prefix + name) for name in step.op_types}
      _decide([copy], [_tensor(graph, prefix + name) for name in step.decisions])
      _steps(graph).append(copy)


def _prefixes(wanted: List[str], names: Set[str]) -> List[str]:
  """Returns the scopes, "" or with a final "/", in which all `wanted` names are."""
  if not wanted:
    return []
  first = wanted[0]
  prefixes = []
  for name in names:
    prefix = name[: len(name) - len(first)]
    is_scope = not prefix or prefix.endswith("/")
    if name.endswith(first) and is_scope:
      if names.issuperset(prefix + other for other in wanted):
        prefixes.append(prefix)
  return prefixes


def _is_imported(
  step: KnownStep, prefix: str, graph: tf.Graph, own: Set[tf.Operation]
) -> bool:
  """Returns whether a graph has all ops of a step below a name scope, none of which is
  in `own`.
  """
  if not step.op_types:
    return step.told is not None  # A step in a function tells its executions.
  for name, op_type in step.op_types.items():
    try:
      op = graph.get_operation_by_name(prefix + name)
    except KeyError:
      return False
    if op.type != op_type or op in own:
      return False
  return all(_tensor(graph, prefix + name) is not None for name in step.decisions)


def _tensor(graph: tf.Graph, name: str) -> Optional[tf.Tensor]:
  try:
    return graph.get_tensor_by_name(name)
  except KeyError:
    return None


def on_eager_gradients(report: Callable[[], None]) -> None:
  """Calls `report()` whenever gradients are computed in eager mode, or in a function
  that eager code calls.
  """

  def reporting(compute: _Function) -> _Function:
    def compute_and_report(*args: object, **kwargs: object) -> object:
      if graphs.init_scope_graph() is None:
        report()
      return compute(*args, **kwargs)

    return compute_and_report

  imperative_grad.imperative_grad = reporting(imperative_grad.imperative_grad)
  gradients_util._GradientsHelper = reporting(gradients_util._GradientsHelper)


def make_seeds_repeatable() -> None:
  """Gives each op without a seed the number of its call in the graph, not that of its
  op, and always a graph seed.

  Generators with a state from the system's entropy get such a seed, too.
  """
  get_seed, eager_seeds = random_seed.get_seed, itertools.count()

  def get_repeatable_seed(
    op_seed: Optional[int],
  ) -> Tuple[Optional[int], Optional[int]]:
    graph = graphs.init_scope_graph()
    if op_seed is None:
      op_seed = next(
        records.record_in(graph, "op_seeds", itertools.count)
        if graph is not None
        else eager_seeds
      )
    return get_seed(op_seed)

  def from_repeatable_state(cls: Any, alg: object = None) -> object:
    return cls.from_seed(get_repeatable_seed(None)[1], alg)

  random_seed.get_seed = get_repeatable_seed
  stateful_random_ops.Generator.from_non_deterministic_state = classmethod(
    from_repeatable_state
  )


def effects_of(
  graph: tf.Graph, elements: Iterable[runs.Element], fed: FrozenSet[str] = frozenset()
) -> Effects:
  """Returns what a run of ops and tensors does to variables, from the ops that it
  executes; `fed` are not computed.
  """
  executed = set(runs.executed_ops(elements, fed))
  written = {op: _written_by(op) for op in effects.changing(executed, graph)}
  steps = _executed_steps(graph, executed, written)
  in_steps = _ops_of_steps(graph, steps, written, fed)
  in_scaled = _ops_of_steps(graph, filter(_is_scaled, steps), written, fed)
  others = set().union(*[written[op] for op in written if op not in in_scaled])
  unseen: Set[str] = set()
  for op in written:
    if op not in in_steps and _applies_gradients(op, graph):
      unseen |= written[op] or {op.name}
  local = _local_names(graph)
  change = training.Change(
    written=frozenset().union(*written.values()) - local,
    others=frozenset(others) - local,
    is_initialization=_are_initializations(written, graph),
    may_train=bool(steps),
    unseen=frozenset(unseen) - local,
  )
  return Effects(change, steps, _readable_decisions(graph, steps, executed))


def _executed_steps(
  graph: tf.Graph,
  executed: Set[tf.Operation],
  written: Mapping[tf.Operation, Set[str]],
) -> List[BuiltStep]:
  """Returns the steps that a run may execute, which changes variables as in
  `written`.
  """
  calls = [op for op in written if effects.is_call(op.type, graph)]
  by_calls = frozenset().union(*[written[op] for op in calls])
  steps = []
  for step in _steps(graph):
    is_called = step.is_called and not by_calls.isdisjoint(step.variables)
    if is_called or not executed.isdisjoint(step.ops):
      steps.append(step)
  return steps


def _readable_decisions(
  graph: tf.Graph, steps: Iterable[BuiltStep], executed: Set[tf.Operation]
) -> List[tf.Tensor]:
  """Returns what decides on steps and can be fetched without executing more."""
  decided = {name: one for step in steps for name, one in step.decisions.items()}
  readable = []
  for tensor in decided.values():
    if tensor.graph is graph and tensor.op in executed and graph.is_fetchable(tensor):
      readable.append(tensor)
  return readable


def _is_scaled(step: BuiltStep) -> bool:
  return step.is_scaled


def _ops_of_steps(
  graph: tf.Graph,
  steps: Iterable[BuiltStep],
  written: Mapping[tf.Operation, Set[str]],
  fed: FrozenSet[str],
) -> Set[tf.Operation]:
  """Returns the ops that steps execute, and the calls of functions that contain one;
  `written` has what ops change.
  """
  ops: List[tf.Operation] = []
  for step in steps:
    ops += [op for op in step.ops if op.graph is graph]
    if step.is_called:
      ops += [
        op
        for op, names in written.items()
        if effects.is_call(op.type, graph) and not names.isdisjoint(step.variables)
      ]
  return set(runs.executed_ops(ops, fed))


def _applies_gradients(op: tf.Operation, graph: tf.Graph) -> bool:
  """Returns whether an op, or one in the functions that it calls, is one with which
  TensorFlow's optimizers apply gradients.
  """
  types = [op.type]
  if effects.is_call(op.type, graph):
    types = list(filter(None, effects.called_types(op.node_def, graph)))
  return any(_APPLYING.match(op_type) for op_type in types)


def _are_initializations(
  written: Mapping[tf.Operation, Set[str]], graph: tf.Graph
) -> bool:
  """Returns whether the ops that change variables only set them to initial values, or
  to others that derive from no variable: restored or fed ones.
  """
  assigning = [op for op in written if written[op]]
  others = [op for op in assigning if not _sets_value(op)]
  return bool(assigning) and (not others or _initializers(graph).issuperset(others))


def _initializers(graph: tf.Graph) -> Set[tf.Operation]:
  """Returns the ops that initializers of the variables in a graph's collections
  execute.
  """
  variables = graph.get_collection(tf.GraphKeys.GLOBAL_VARIABLES)
  variables += graph.get_collection(tf.GraphKeys.LOCAL_VARIABLES)
  initializers: List[Optional[tf.Operation]] = []
  for (
    variable
  ) in variables:  # The initializer of a mirrored one is built when it is read.
    initializers += [copy.initializer for copy in variable_kinds.local_copies(variable)]
  return set(runs.executed_ops(filter(None, initializers)))


def _sets_value(op: tf.Operation) -> bool:
  """Returns whether an op assigns a value that derives from no variable."""
  if op.type not in ("Assign", "AssignVariableOp"):
    return False
  found = contexts.search_back([op.inputs[1]], contexts.tensor_inputs)
  return not any(tensor.op.type in _VARIABLES for tensor in found)


def trained_variables(graph: tf.Graph) -> FrozenSet[str]:
  """Returns the names of the variables that steps of a graph train."""
  return frozenset().union(*[step.variables for step in _steps(graph)])


def variable_values(graph: tf.Graph) -> Dict[str, tf.Tensor]:
  """Returns the existing tensors that read the variables of a graph, by name; without
  variables that none reads.
  """
  local = _local_names(graph)
  tensors = {}
  for op in graph.get_operations():
    if op.type in _VARIABLES and op.name not in local:
      reads = (
        [op]
        if op.type != "VarHandleOp"
        else [read for read in op.outputs[0].consumers() if _only_reads(read)]
      )
      if reads:
        tensors[op.name] = reads[0].outputs[0]
  return tensors


def read(sess: tf.Session, tensors: Dict[str, tf.Tensor]) -> Dict[str, Any]:
  """Returns the values of variables by name, without those that are not initialized;
  the run is not observed.
  """
  try:
    return _run(sess, None, tensors, None, None, None)
  except (tf.errors.FailedPreconditionError, tf.errors.NotFoundError):
    names = list(tensors)
    halves = (
      [names[: len(names) // 2], names[len(names) // 2 :]] if len(names) > 1 else []
    )
    values = [read(sess, {name: tensors[name] for name in half}) for half in halves]
    return {name: value for part in values for name, value in part.items()}


def _local_names(graph: tf.Graph) -> FrozenSet[str]:
  local = graph.get_collection(tf.GraphKeys.LOCAL_VARIABLES) + graph.get_collection(
    tf.GraphKeys.METRIC_VARIABLES
  )
  names = frozenset(variable.name.rpartition(":")[0] for variable in local)
  return names - trained_variables(graph)


def _is_handle(tensor: tf.Tensor) -> bool:
  return tensor.dtype == tf.resource or tensor.dtype._is_ref_dtype


def _handles_read(handle: tf.Tensor) -> List[tf.Tensor]:
  """Returns the resources and references that a handle may be a copy of, through
  conditionals and loops.
  """
  return (
    [] if handle.op.type in _VARIABLES else list(filter(_is_handle, handle.op.inputs))
  )


def _written_by(op: tf.Operation) -> Set[str]:
  """Returns the names of the variables that an op changes, if it changes state."""
  # Conditionals, loops and functions have the attribute, from 2.3 on.
  only_read = op.node_def.attr["_read_only_resource_inputs"].list.i
  handles = [
    tensor
    for i, tensor in enumerate(op.inputs)
    if tensor.dtype == tf.resource and i not in only_read
  ]
  handles += [
    tensor
    for tensor, argument in zip(op.inputs, op.op_def.input_arg)
    if argument.is_ref
  ]
  found = contexts.search_back(handles, _handles_read)
  return {handle.op.name for handle in found if handle.op.type in _VARIABLES}


def _only_reads(op: tf.Operation) -> bool:
  return (
    op.type == "ReadVariableOp"
    and not op.control_inputs
    and op._get_control_flow_context() is None
  )
