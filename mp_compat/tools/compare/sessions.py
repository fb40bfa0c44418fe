# SPDX-License-Identifier: Apache-2.0
"""Observes the runs of all sessions, finds the steps of optimizers in them, and makes
op seeds repeatable.
"""

import functools
import itertools
import types
from typing import (
  Any,
  Callable,
  Dict,
  FrozenSet,
  Iterable,
  List,
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
from mp_compat.graph import contexts
from mp_compat.graph import effects
from mp_compat.graph import graphs

# Runs and reads whether steps are applied; returns the result of the run, and what was
# read. A partial run reads only what is fed.
Run = Callable[[List[tf.Tensor]], Tuple[Any, List[bool]]]
_Function = Callable[..., Any]

_VARIABLES = ("VarHandleOp", "Variable", "VariableV2")
_run = session.BaseSession._run  # which is not observed


class Step:
  """What a call of `apply_gradients` built in a graph, or in a function inside of
  it.
  """

  def __init__(
    self, variables: FrozenSet[str], is_scaled: bool, is_called: bool
  ) -> None:
    self.variables = variables  # the names of those to which it applies gradients
    self.is_scaled = is_scaled  # whether its optimizer scales the loss
    self.is_called = is_called  # whether it is in a function
    # what was returned, and the mark; a run that executes one executes the step
    self.ops: Set[tf.Operation] = set()
    # whether it has a mark: it is in control flow, and an op tells each execution
    self.is_marked = False
    self.executions: List[Step] = []  # itself for each that was told and not taken


class Effects(NamedTuple):
  """What a run does to variables; of local variables and metrics, only those count that
  have gradients.
  """

  written: FrozenSet[str]  # the names of the ops of variables that it may change
  # that it executes; of those in control flow, those that it may execute
  steps: List[Step]
  # scalar bools, whether to apply the steps; without those in control flow
  decisions: List[tf.Tensor]


def observe(
  around: Callable[[tf.Session, List[graphs.Element], FrozenSet[str], Run], object],
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
      tensor.name for tensor in graphs.fetched_elements(self.graph, list(feeds or {}))
    )

    def run(decisions: List[tf.Tensor]) -> Tuple[Any, List[bool]]:
      readable = [
        tensor for tensor in decisions if handle is None or tensor.name in fed
      ]
      return _run(self, handle, (fetches, readable), feeds, *args)

    return around(self, graphs.fetched_elements(self.graph, fetches), fed, run)

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
      def run(decisions: List[tf.Tensor]) -> Tuple[Any, List[bool]]:
        further = [tensor.name for tensor in decisions if tensor.name not in fed]
        results = callable_with(*further)(*values, **keywords)
        return results[: len(options.fetch)], results[len(options.fetch) :]

      return around(self, elements, fed, run)

    return call

  base._run, base.make_callable = observed_run, observed_make_callable
  base._make_callable_from_options = observed_from_options


def observe_optimizers(scales_loss: Callable[[trackable.Trackable], bool]) -> None:
  """Makes graphs record what `apply_gradients` of each optimizer builds, Keras's
  included, for `effects_of`.

  It calls `scales_loss(optimizer)` first, which returns whether an optimizer scales the
  loss. In control flow, it adds an op that tells when a step runs.
  """

  def recording(apply: _Function) -> _Function:
    @autograph.do_not_convert
    @functools.wraps(apply)
    def apply_and_record(
      self: trackable.Trackable, grads_and_vars: Any, *args: object, **kwargs: object
    ) -> object:
      graph = graphs.init_scope_graph()
      if graph is None:
        return apply(self, grads_and_vars, *args, **kwargs)
      pairs = list(grads_and_vars)
      names = [
        variable.name.rpartition(":")[0] for grad, variable in pairs if grad is not None
      ]
      step = Step(
        frozenset(names),
        scales_loss(self),
        is_called=graph is not tf.get_default_graph(),
      )
      _steps(graph).append(step)
      mark = _mark(step, [grad for grad, _ in pairs])
      result = apply(self, pairs, *args, **kwargs)
      for element in tf.nest.flatten(result):
        op = getattr(element, "op", element)
        if isinstance(op, tf.Operation):
          step.ops.add(op)
          if mark is not None and _place(op) == _place(mark):
            op._add_control_input(mark)
      return result

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


def observe_decisions(
  owner: object, method: str, decisions_of: Callable[[Any, Any], List[Any]]
) -> None:
  """Makes graphs record whether steps are applied, for `effects_of`.

  `decisions_of(argument, result)` returns it, from the last argument and the result of
  a method or function of `owner`. What further observed methods return that it calls
  does not count.
  """
  decide = vars(owner)[method]
  if "is_observed" in vars(decide):
    return

  @functools.wraps(decide)
  def decide_and_record(*args: Any, **kwargs: Any) -> Any:
    graph = graphs.init_scope_graph()
    if graph is None:
      return decide(*args, **kwargs)
    decisions = graphs.record_in(graph, "decisions_on_steps")
    before = dict(decisions)
    result = decide(*args, **kwargs)
    tensors = [
      tensor
      for tensor in decisions_of(args[-1], result)
      if tf.is_tensor(tensor) and tensor.graph is graph
    ]
    decisions.clear()
    decisions.update({**before, **{tensor.name: tensor for tensor in tensors}})
    return result

  decide_and_record.is_observed = True  # type: ignore[attr-defined]
  setattr(owner, method, decide_and_record)


def _steps(graph: tf.Graph) -> List[Step]:
  return graphs.record_in(graph, "steps_of_optimizers", list)


def _place(op: tf.Operation) -> Tuple[tf.Graph, contexts.Context]:
  return op.graph, op._get_control_flow_context()


def _mark(step: Step, grads: List[Any]) -> Optional[tf.Operation]:
  """Returns an op that tells that a step runs, built in the current branch, loop or
  function.

  Returns None outside of all, and in code that XLA compiles, which cannot contain such
  an op.
  """
  around = [graph._get_control_flow_context() for graph in graphs.enclosing_graphs()]
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
  with tf.device(None):
    mark = tf.py_func(
      lambda *_: step.executions.append(step), inputs, [], name="step_runs"
    )
  step.ops.add(mark)
  step.is_marked = True
  return mark


def take_executed(steps: Iterable[Step]) -> List[Step]:
  """Returns the steps that a run has executed, of those that it may execute; called
  after each, also if it fails.

  Returns a marked step for each of its executions since the last call. If threads run
  the same step at the same time, some may be those of another run.
  """
  executed = []
  for step in steps:
    told = step.executions[:]
    del step.executions[: len(told)]
    executed += told if step.is_marked else [step]
  return executed


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
        graphs.record_in(graph, "op_seeds", itertools.count)
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
  graph: tf.Graph, elements: Iterable[graphs.Element], fed: FrozenSet[str] = frozenset()
) -> Effects:
  """Returns what a run of ops and tensors does to variables, from the ops that it
  executes; `fed` are not computed.
  """
  executed = set(graphs.executed_ops(elements, fed))
  written = {op: _written_by(op) for op in effects.changing(executed, graph)}
  by_calls = frozenset().union(
    *[names for op, names in written.items() if effects.is_call(op.type, graph)]
  )
  steps = [
    step
    for step in _steps(graph)
    if not executed.isdisjoint(step.ops)
    or (step.is_called and not by_calls.isdisjoint(step.variables))
  ]
  decided = graphs.record_in(graph, "decisions_on_steps").values() if steps else ()
  decisions = [
    tensor for tensor in decided if tensor.op in executed and graph.is_fetchable(tensor)
  ]
  return Effects(
    frozenset().union(*written.values()) - _local_names(graph), steps, decisions
  )


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
  return names.difference(*[step.variables for step in _steps(graph)])


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
