# SPDX-License-Identifier: Apache-2.0
"""Observes the runs of all sessions, finds the steps of optimizers in them, and makes op seeds repeatable."""

import functools
import itertools
import threading
import types
from typing import Any, Callable, Dict, FrozenSet, Iterable, List, NamedTuple, Optional, Set, Tuple

from tensorflow.python.client import session
from tensorflow.python.eager import imperative_grad
from tensorflow.python.framework import random_seed  # pyright: ignore[reportAttributeAccessIssue]
from tensorflow.python.ops import gradients_util
from tensorflow.python.ops import stateful_random_ops

from mp_compat._tensorflow import autograph
from mp_compat._tensorflow import contexts
from mp_compat._tensorflow import effects
from mp_compat._tensorflow import graphs
from mp_compat._tensorflow import tf
from mp_compat._tensorflow import trackable

Values = Dict[str, Any]  # of tensors by name, as a Session returns them
# Takes further tensors; returns the result, and their values. Partial runs give those only that are fed.
Run = Callable[[List[tf.Tensor]], Tuple[object, Values]]
_Function = Callable[..., object]

_VARIABLES = ("VarHandleOp", "Variable", "VariableV2")


class Step(NamedTuple):
  """What a call of `apply_gradients` built."""

  variables: FrozenSet[str]  # the names of those to which it applies gradients
  is_scaled: bool  # whether its optimizer scales the loss


class Effects(NamedTuple):
  """What a run does to variables; of local variables and metrics, only those count that have gradients."""

  written: FrozenSet[str]  # the names of the ops of variables that it may change
  steps: List[Step]  # that it executes
  may_execute_more: bool  # whether it may execute steps in control flow, see `take_executed`
  decisions: List[tf.Tensor]  # scalar bools, whether to apply steps; without those in control flow


class _Steps:
  """What optimizers built in a graph, and in functions inside of it."""

  def __init__(self) -> None:
    self.by_op: Dict[tf.Operation, Step] = {}  # by the ops that `apply_gradients` returned
    self.by_mark: Dict[tf.Operation, Step] = {}  # those in control flow, by an op that runs with them
    self.compiled: List[Step] = []  # those in functions that XLA compiles, which cannot contain such an op
    self.executed: List[Step] = []  # those of `by_mark` that ran, until they are taken
    self.decisions: Dict[str, tf.Tensor] = {}  # whether to apply a step, by name

  @property
  def variables(self) -> FrozenSet[str]:
    """Returns the names of the variables that have gradients."""
    steps = [*self.by_op.values(), *self.by_mark.values(), *self.compiled]
    return frozenset().union(*[step.variables for step in steps])


def observe(around: Callable[[tf.Session, List[graphs.Element], FrozenSet[str], Run], object]) -> None:
  """Makes each run of any session call `around(session, elements, fed, run)`.

  `elements` are the ops and tensors that the run executes, `fed` the names of the tensors that it feeds. `around`
  calls `run(tensors)` and returns its result. Runs of the same session in it are not observed.
  """
  base, inside = session.BaseSession, threading.local()
  do_run, make_callable, from_options = base._do_run, base.make_callable, base._make_callable_from_options

  def call(sess: tf.Session, elements: List[graphs.Element], fed: Values, run: Callable[..., Any]) -> object:
    def run_and_read(tensors: List[tf.Tensor]) -> Tuple[object, Values]:
      names = [tensor.name for tensor in tensors if tensor.name not in fed]
      result, values = run(names)
      return result, {**fed, **dict(zip(names, values))}

    outer = vars(inside).get("session")
    if outer is sess:
      return run([])[0]
    inside.session = sess
    try:
      return around(sess, elements, frozenset(fed), run_and_read)
    finally:
      inside.session = outer

  def observed_do_run(self: tf.Session, handle: Any, targets: Any, fetches: Any, feeds: Any, *args: object) -> object:
    def run(names: List[str]) -> Tuple[object, List[object]]:
      further = [] if handle else [self.graph.get_tensor_by_name(name) for name in names]  # A partial run declared all.
      values = do_run(self, handle, targets, [*fetches, *further], feeds, *args)
      return values[: len(fetches)], values[len(fetches) :]

    # The keys are references from TensorFlow 2.1 on.
    fed = {(key if isinstance(key, tf.Tensor) else key.deref()).name: value for key, value in feeds.items()}
    return call(self, [*targets, *fetches], fed, run)

  def observed_make_callable(self: Any, fetches: Any, feed_list: Any = None, accept_options: bool = False) -> Any:
    make_callable(self, fetches, feed_list, accept_options)  # checks the arguments
    return lambda *values, **options: self.run(fetches, dict(zip(feed_list or [], values)), **options)

  def observed_from_options(self: tf.Session, options: Any) -> _Function:  # for Keras
    elements = [self.graph.as_graph_element(name) for name in [*options.target, *options.fetch]]

    @functools.lru_cache(maxsize=None)
    def callable_with(*further: str) -> Callable[..., List[object]]:
      extended = type(options)()
      extended.CopyFrom(options)
      extended.fetch.extend(further)
      return from_options(self, extended)

    def call_with(*values: object, **keywords: object) -> object:
      def run(names: List[str]) -> Tuple[object, List[object]]:
        results = callable_with(*names)(*values, **keywords)
        return results[: len(options.fetch)], results[len(options.fetch) :]

      return call(self, elements, dict(zip(options.feed, values)), run)

    return call_with

  base._do_run, base.make_callable = observed_do_run, observed_make_callable
  base._make_callable_from_options = observed_from_options


def observe_optimizers(scales_loss: Callable[[trackable.Trackable], bool]) -> None:
  """Makes graphs record what `apply_gradients` of each optimizer builds, Keras's included, for `effects_of`.

  It calls `scales_loss(optimizer)` first, which returns whether an optimizer scales the loss. In control flow, it adds
  an op that tells when a step runs.
  """

  def recording(apply: _Function) -> _Function:
    @autograph.do_not_convert
    @functools.wraps(apply)
    def apply_and_record(self: trackable.Trackable, *args: Any, **kwargs: Any) -> object:
      graph = graphs.init_scope_graph()
      if graph is None:
        return apply(self, *args, **kwargs)
      if args:
        args = (list(args[0]), *args[1:])
      elif "grads_and_vars" in kwargs:
        kwargs["grads_and_vars"] = list(kwargs["grads_and_vars"])
      pairs = args[0] if args else kwargs.get("grads_and_vars", ())
      names = [variable.name.rpartition(":")[0] for grad, variable in pairs if grad is not None]
      step = Step(frozenset(names), scales_loss(self))
      mark = _mark(graph, step, [grad for grad, _ in pairs])
      result = apply(self, *args, **kwargs)
      for element in tf.nest.flatten(result):
        op = getattr(element, "op", element)
        if isinstance(op, tf.Operation):
          _record(graph, step, mark, op)
      return result

    return apply_and_record

  def observe_class(cls: Any) -> None:
    if hasattr(cls, "minimize") and isinstance(vars(cls).get("apply_gradients"), types.FunctionType):  # an optimizer
      cls.apply_gradients = recording(cls.apply_gradients)

  def observe_subclass(cls: Any, **kwargs: object) -> None:
    super(base, cls).__init_subclass__(**kwargs)
    observe_class(cls)

  base: Any = trackable.Trackable
  pending, seen = [base], {base}
  while pending:
    cls = pending.pop()
    observe_class(cls)
    new = set(type.__subclasses__(cls)) - seen
    seen |= new
    pending += new
  base.__init_subclass__ = classmethod(observe_subclass)  # type: ignore[arg-type]


def observe_decisions(owner: object, method: str, decisions_of: Callable[[Any, Any], List[Any]]) -> None:
  """Makes graphs record whether steps are applied, for `effects_of`.

  `decisions_of(argument, result)` returns it, from the last argument and the result of a method or function of `owner`.
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
    before = dict(_steps(graph).decisions)
    result = decide(*args, **kwargs)
    tensors = [tensor for tensor in decisions_of(args[-1], result) if tf.is_tensor(tensor) and tensor.graph is graph]
    _steps(graph).decisions = {**before, **{tensor.name: tensor for tensor in tensors}}
    return result

  decide_and_record.is_observed = True  # type: ignore[attr-defined]
  setattr(owner, method, decide_and_record)


def _steps(graph: tf.Graph) -> _Steps:
  return graphs.record_in(graph, "optimizer_steps", _Steps)


def _mark(graph: tf.Graph, step: Step, grads: List[Any]) -> Optional[tf.Operation]:
  """Returns an op that notes that a step runs, built in the current branch, loop or function; None outside of all."""
  steps, graphs_around = _steps(graph), list(graphs.enclosing_graphs())
  around = [context for one in graphs_around for context in contexts.enclosing(one._get_control_flow_context())]
  if any(context.IsXLAContext() for context in around):
    steps.compiled += [step] * (graph is not graphs_around[0])
    return None
  if not contexts.is_in_control_flow():
    return None
  # If TensorFlow inlines a function that is not called, its ops without input run; Size and Shape become constants.
  tensors = [grad.values if isinstance(grad, tf.IndexedSlices) else grad for grad in grads]
  inputs = [tf.reshape(tensor, [-1])[:1] for tensor in tensors if tf.is_tensor(tensor)][:1]
  with tf.device(None):
    mark = tf.py_func(lambda *_: steps.executed.append(step), inputs, [], name="step_runs")
  steps.by_mark[mark] = step
  return mark


def _record(graph: tf.Graph, step: Step, mark: Optional[tf.Operation], op: tf.Operation) -> None:
  """Records an op that `apply_gradients` returned for a step; makes it run the `mark` of the step."""
  if mark is None or op.graph is not mark.graph:
    _steps(graph).by_op[op] = step
  elif op._get_control_flow_context() is mark._get_control_flow_context():
    op._add_control_input(mark)


def take_executed(graph: tf.Graph) -> List[Step]:
  """Returns the steps in control flow that runs have executed since the last call."""
  executed = _steps(graph).executed
  taken = executed[:]
  del executed[: len(taken)]
  return taken


def on_eager_gradients(report: Callable[[], None]) -> None:
  """Calls `report()` whenever gradients are computed in eager mode, or in a function that eager code calls."""

  def reporting(compute: _Function) -> _Function:
    def compute_and_report(*args: object, **kwargs: object) -> object:
      if graphs.init_scope_graph() is None:
        report()
      return compute(*args, **kwargs)

    return compute_and_report

  imperative_grad.imperative_grad = reporting(imperative_grad.imperative_grad)
  gradients_util._GradientsHelper = reporting(gradients_util._GradientsHelper)


def make_seeds_repeatable() -> None:
  """Gives each op without a seed the number of its call in the graph, not that of its op, and always a graph seed.

  Generators with a state from the system's entropy get such a seed, too.
  """
  get_seed, eager_seeds = random_seed.get_seed, itertools.count()

  def get_repeatable_seed(op_seed: Optional[int]) -> Tuple[Optional[int], Optional[int]]:
    graph = graphs.init_scope_graph()
    if op_seed is None:
      op_seed = next(graphs.record_in(graph, "op_seeds", itertools.count) if graph is not None else eager_seeds)
    return get_seed(op_seed)

  def from_repeatable_state(cls: Any, alg: object = None) -> object:
    return cls.from_seed(get_repeatable_seed(None)[1], alg)

  random_seed.get_seed = get_repeatable_seed
  stateful_random_ops.Generator.from_non_deterministic_state = classmethod(from_repeatable_state)


def effects_of(graph: tf.Graph, elements: Iterable[graphs.Element], fed: FrozenSet[str] = frozenset()) -> Effects:
  """Returns what a run of ops and tensors does to variables, from the ops that it executes; `fed` are not computed."""
  steps, executed, local = _steps(graph), set(graphs.executed_ops(elements, fed)), _local_names(graph)
  written = {op: _written_by(op) - local for op in executed}
  by_calls = frozenset().union(*[names for op, names in written.items() if effects.is_call(op.type, graph)])
  certain = [step for op, step in steps.by_op.items() if op in executed]
  certain += [step for step in steps.compiled if not by_calls.isdisjoint(step.variables)]
  possible = [mark in executed or not by_calls.isdisjoint(step.variables) for mark, step in steps.by_mark.items()]
  decisions = [tensor for tensor in steps.decisions.values() if tensor.op in executed and _can_be_fetched(tensor)]
  return Effects(frozenset().union(*written.values()), certain, any(possible), decisions)


def _can_be_fetched(tensor: tf.Tensor) -> bool:
  return tensor.graph.is_fetchable(tensor) and tensor.op._get_control_flow_context() is None


def variable_values(graph: tf.Graph) -> Dict[str, tf.Tensor]:
  """Returns the existing tensors that read the variables of a graph, by name; without variables that none reads."""
  local = _local_names(graph)
  tensors = {}
  for op in graph.get_operations():
    if op.type in _VARIABLES and op.name not in local:
      reads = [op] if op.type != "VarHandleOp" else [read for read in op.outputs[0].consumers() if _only_reads(read)]
      if reads:
        tensors[op.name] = reads[0].outputs[0]
  return tensors


def read(sess: tf.Session, tensors: Dict[str, tf.Tensor]) -> Values:
  """Returns the values of variables by name, without those that are not initialized."""
  try:
    return session.BaseSession.run(sess, tensors)
  except (tf.errors.FailedPreconditionError, tf.errors.NotFoundError):
    names = list(tensors)
    halves = [names[: len(names) // 2], names[len(names) // 2 :]] if len(names) > 1 else []
    values = [read(sess, {name: tensors[name] for name in half}) for half in halves]
    return {name: value for part in values for name, value in part.items()}


def _local_names(graph: tf.Graph) -> FrozenSet[str]:
  local = graph.get_collection(tf.GraphKeys.LOCAL_VARIABLES) + graph.get_collection(tf.GraphKeys.METRIC_VARIABLES)
  return frozenset(variable.name.rpartition(":")[0] for variable in local) - _steps(graph).variables


def _is_handle(tensor: tf.Tensor) -> bool:
  return tensor.dtype == tf.resource or tensor.dtype._is_ref_dtype


def _handles_read(handle: tf.Tensor) -> List[tf.Tensor]:
  """Returns the resources and references that a handle may be a copy of, through conditionals and loops."""
  return [] if handle.op.type in _VARIABLES else [tensor for tensor in handle.op.inputs if _is_handle(tensor)]


def _written_by(op: tf.Operation) -> Set[str]:
  """Returns the names of the variables that an op may change."""
  if op.type == "DisableCopyOnRead" or not any(map(_is_handle, op.inputs)) or not effects.changes_state(op):
    return set()
  try:
    only_read = op.get_attr("_read_only_resource_inputs")  # Conditionals, loops and functions have it, from 2.3 on.
  except ValueError:
    only_read = []
  handles = [tensor for i, tensor in enumerate(op.inputs) if tensor.dtype == tf.resource and i not in only_read]
  handles += [tensor for tensor, argument in zip(op.inputs, op.op_def.input_arg) if argument.is_ref]
  found = contexts.search_back(handles, _handles_read)
  return {handle.op.name for handle in found if handle.op.type in _VARIABLES}


def _only_reads(op: tf.Operation) -> bool:
  return op.type == "ReadVariableOp" and not op.control_inputs and op._get_control_flow_context() is None
