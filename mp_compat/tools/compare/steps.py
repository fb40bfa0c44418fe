# SPDX-License-Identifier: Apache-2.0
"""The steps of optimizers that a graph records: those that were built in it, and those
that it imported. What a run has executed of them.
"""

import itertools
from typing import (
  Any,
  Dict,
  FrozenSet,
  Iterable,
  List,
  Mapping,
  NamedTuple,
  Optional,
  Set,
)

from mp_compat._tensorflow import tf
from mp_compat.graph import records
from mp_compat.tools.compare import training

VARIABLE_OPS = ("VarHandleOp", "Variable", "VariableV2")
_calls = itertools.count()


class BuiltStep:
  """What a call of `apply_gradients` built in a graph, or in a function inside of it.

  Attributes:
    call: The number of the call, in this process.
    variables: The names of the variables to which it applies gradients.
    is_scaled: Whether its optimizer scales the loss.
    is_called: Whether it is in a function, which ops of the graph call.
    ops: What `apply_gradients` returned, and the mark; a run that executes one of them
      executes the step.
    decisions: Scalar bool tensors by name; the step is applied if all are True.
    is_marked: Whether it has a mark: it is in control flow, and an op tells of each
      execution whether it is applied.
    told: What the mark told, for each execution that `take_executions` has not returned
      yet: whether the step was applied; None if that is not known.
  """

  def __init__(
    self,
    variables: Iterable[str],
    is_scaled: bool,
    is_called: bool = False,
    told: Optional[List[Optional[bool]]] = None,
  ) -> None:
    """Makes a step without ops and decisions, marked if `told` is not None."""
    self.call = next(_calls)
    self.variables = frozenset(variables)
    self.is_scaled = is_scaled
    self.is_called = is_called
    self.ops: Set[tf.Operation] = set()
    self.decisions: Dict[str, tf.Tensor] = {}
    self.is_marked = told is not None
    self.told: List[Optional[bool]] = [] if told is None else told

  def add_decisions(self, decisions: Iterable[Any]) -> None:
    """Adds what decides whether it is applied; what is no tensor decides nothing."""
    for decision in decisions:
      if tf.is_tensor(decision):
        self.decisions[decision.name] = decision

  def named(self, graph: tf.Graph) -> "KnownStep":
    """Returns this step of `graph` by names."""
    told = None
    if self.is_marked:
      told = self.told
    return KnownStep(
      op_types={op.name: op.type for op in self.ops if op.graph is graph},
      variables=sorted(self.variables),
      is_scaled=self.is_scaled,
      decisions=list(self.decisions),
      told=told,
    )


class KnownStep(NamedTuple):
  """A step by names, to find it in a graph that was imported.

  Attributes:
    op_types: The types of its ops, by name; {} for a step in a function.
    variables: The names of the variables to which it applies gradients.
    is_scaled: Whether its optimizer scales the loss.
    decisions: The names of the tensors that decide whether it is applied.
    told: `BuiltStep.told` of a marked step, which its copies share; else None.
  """

  op_types: Dict[str, str]
  variables: List[str]
  is_scaled: bool
  decisions: List[str]
  told: Optional[List[Optional[bool]]]


def steps_in(graph: tf.Graph) -> List[BuiltStep]:
  """Returns the list of all steps that a graph records."""
  return records.record_in(graph, "steps_of_optimizers", list)


def open_steps_in(graph: tf.Graph) -> List[BuiltStep]:
  """Returns the list of the steps that are being built; with replicas, several beside
  each other.
  """
  return records.record_in(graph, "steps_being_built", list)


def trained_variables(graph: tf.Graph) -> FrozenSet[str]:
  """Returns the names of the variables that steps of a graph train."""
  return frozenset().union(*[step.variables for step in steps_in(graph)])


def take_executions(
  steps: Iterable[BuiltStep], decided: Optional[Mapping[str, bool]]
) -> List[training.Execution]:
  """Returns what a run has executed of the steps that it may execute; called after
  each, also if it fails.

  `decided` has the decisions that were read, by name; None if the run failed, and may
  not have executed all. A marked step has a result for
  each of its executions since the last call. If threads run the same step at the same
  time, some may be those of another run.
  """
  executions = []
  for step in steps:
    if step.is_marked:
      results = step.told[:]
      del step.told[: len(results)]  # Another thread may have told more.
    else:
      results = [_is_applied(step, decided)]
    for applied in results:
      execution = training.Execution(
        step.call,
        step.variables,
        step.is_scaled,
        decisions=tuple(step.decisions),
        applied=applied,
      )
      executions.append(execution)
  return executions


def _is_applied(
  step: BuiltStep, decided: Optional[Mapping[str, bool]]
) -> Optional[bool]:
  """Returns whether decisions that were read apply a step; None if one is missing."""
  if decided is None or not decided.keys() >= step.decisions.keys():
    return None
  return all(decided[name] for name in step.decisions)


def find_imported(graph: tf.Graph, known: Iterable[KnownStep]) -> None:
  """Makes a graph record steps that were built in another graph and imported into this
  one.

  A step is found by the names of its variables and ops, all below one name scope. A
  second call finds only what is new since the first.
  """
  own = set()
  for step in steps_in(graph):
    own |= step.ops
  variables = {op.name for op in graph.get_operations() if op.type in VARIABLE_OPS}
  found = records.record_in(graph, "imported_steps", set)
  for number, known_step in enumerate(known):
    for prefix in _prefixes(known_step.variables, variables):
      place = number, prefix
      if place not in found and _is_imported(known_step, prefix, graph, own):
        found.add(place)
        steps_in(graph).append(_imported(known_step, prefix, graph))


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
  for name in step.decisions:
    if _tensor(graph, prefix + name) is None:
      return False
  return True


def _imported(step: KnownStep, prefix: str, graph: tf.Graph) -> BuiltStep:
  """Returns the copy of a step that a graph has below a name scope."""
  copy = BuiltStep(
    [prefix + name for name in step.variables],
    step.is_scaled,
    is_called=not step.op_types,
    told=step.told,
  )
  copy.ops = {graph.get_operation_by_name(prefix + name) for name in step.op_types}
  copy.add_decisions([_tensor(graph, prefix + name) for name in step.decisions])
  return copy


def _tensor(graph: tf.Graph, name: str) -> Optional[tf.Tensor]:
  """Returns a tensor of a graph; None if there is none of that name."""
  try:
    return graph.get_tensor_by_name(name)
  except KeyError:
    return None
