# SPDX-License-Identifier: Apache-2.0
"""What a run of a session does to the variables of its graph, from the ops that it
executes and the steps that the graph records (`steps`). Changes no graph.
"""

from typing import (
  Container,
  Dict,
  FrozenSet,
  Iterable,
  List,
  Mapping,
  NamedTuple,
  Optional,
  Set,
)

from mp_compat._tensorflow import graph_internals
from mp_compat._tensorflow import tf
from mp_compat.graph import contexts
from mp_compat.graph import effects
from mp_compat.graph import runs
from mp_compat.tools.compare import steps
from mp_compat.tools.compare.steps import VARIABLE_OPS
from mp_compat.tools.compare.steps import BuiltStep

# The names of the variables that an op changes, by op. An op that changes other state
# has an empty set.
_Written = Mapping[tf.Operation, Set[str]]


class Effects(NamedTuple):
  """What a run does to variables.

  Attributes:
    written: The names of the variables that it may change. Of local variables and
      metrics, only those count that have gradients.
    steps: The steps that it executes; of those in control flow, those that it may
      execute.
    decisions: Scalar bool tensors that it computes, which decide whether the steps are
      applied; without those in control flow.
  """

  written: FrozenSet[str]
  steps: List[BuiltStep]
  decisions: List[tf.Tensor]


def effects_of(
  graph: tf.Graph, elements: Iterable[runs.Element], fed: FrozenSet[str] = frozenset()
) -> Effects:
  """Returns what a run of ops and tensors does to variables; from the graph alone.

  Args:
    graph: the graph of the session, with the steps that it has recorded.
    elements: the ops and tensors that the run fetches.
    fed: the names of tensors that are fed, and therefore not computed.
  """
  executed = set(runs.executed_ops(elements, fed))
  calls = effects.call_types(executed, graph)
  written: Dict[tf.Operation, Set[str]] = {}
  for op in effects.changing(executed, calls, graph):
    written[op] = _written_by(op)
  names: FrozenSet[str] = frozenset().union(*written.values())
  executed_steps = _executed_steps(graph, executed, written, calls)
  decisions = _computed_decisions(graph, executed_steps, executed)
  return Effects(names - _local_names(graph), executed_steps, decisions)


def _executed_steps(
  graph: tf.Graph,
  executed: Set[tf.Operation],
  written: _Written,
  calls: Container[str],
) -> List[BuiltStep]:
  """Returns the steps that a run may execute.

  A step in a function is one if a call changes a variable that the step trains.

  Args:
    graph: the graph of the session.
    executed: the ops that the run executes.
    written: those of them that change state, with the variables that they change.
    calls: the types of those of them that call functions.
  """
  by_calls: Set[str] = set()
  for op, names in written.items():
    if op.type in calls:
      by_calls |= names
  found = []
  for step in steps.steps_in(graph):
    is_executed = executed & step.ops
    may_be_called = step.is_called and by_calls & step.variables
    if is_executed or may_be_called:
      found.append(step)
  return found


def _computed_decisions(
  graph: tf.Graph, executed_steps: Iterable[BuiltStep], executed: Set[tf.Operation]
) -> List[tf.Tensor]:
  """Returns what decides on steps and can be fetched without executing more; nothing of
  steps with a mark (`step_building`), which tells their decisions.

  Decisions in control flow cannot be fetched, which the op of an imported graph does
  not tell.
  """
  by_name: Dict[str, tf.Tensor] = {}
  for step in executed_steps:
    if not step.is_marked:
      by_name.update(step.decisions)
  computed = []
  for tensor in by_name.values():
    is_executed = tensor.op in executed  # An op of another graph is not.
    if is_executed and graph.is_fetchable(tensor):
      computed.append(tensor)
  return computed


def _written_by(op: tf.Operation) -> Set[str]:
  """Returns the names of the variables that an op changes, if it changes state.

      handles = inputs that are resources, without those that it only reads
      handles += inputs that it takes by reference
      follow the handles back to the ops of variables

  The set is empty if these are other resources, such as iterators.
  """
  # Conditionals, loops and functions have the attribute, from 2.3 on.
  only_read = op.node_def.attr["_read_only_resource_inputs"]
  handles = []
  for index, tensor in enumerate(op.inputs):
    is_read = index in only_read.list.i
    if tensor.dtype == tf.resource and not is_read:
      handles.append(tensor)
  for tensor, argument in zip(op.inputs, op.op_def.input_arg):
    if argument.is_ref:
      handles.append(tensor)
  names = set()
  for handle in contexts.search_back(handles, _copied_handles):
    if handle.op.type in VARIABLE_OPS:
      names.add(handle.op.name)
  return names


def _copied_handles(handle: tf.Tensor) -> List[tf.Tensor]:
  """Returns the resources and references that a handle may be a copy of, through
  conditionals and loops.
  """
  if handle.op.type in VARIABLE_OPS:
    return []
  return [tensor for tensor in handle.op.inputs if _is_handle(tensor)]


def _is_handle(tensor: tf.Tensor) -> bool:
  """Returns whether a tensor is a resource or a reference to a variable."""
  return tensor.dtype == tf.resource or graph_internals.is_reference(tensor.dtype)


def variable_values(graph: tf.Graph) -> Dict[str, tf.Tensor]:
  """Returns the existing tensors that read the variables of a graph, by name; without
  variables that none reads.
  """
  local = _local_names(graph)
  values = {}
  for op in graph.get_operations():
    if op.type in VARIABLE_OPS and op.name not in local:
      value = _value_of(op)
      if value is not None:
        values[op.name] = value
  return values


def _value_of(variable: tf.Operation) -> Optional[tf.Tensor]:
  """Returns an existing tensor that reads a variable, given by its op; None if there is
  none.
  """
  (handle,) = variable.outputs
  if variable.type != "VarHandleOp":  # a reference variable is its own value
    return handle
  for consumer in handle.consumers():
    if _only_reads(consumer):
      return consumer.outputs[0]
  return None


def _only_reads(op: tf.Operation) -> bool:
  """Returns whether an op reads a variable, and a run of it executes nothing else."""
  return (
    op.type == "ReadVariableOp"
    and not op.control_inputs
    and graph_internals.context_of(op) is None
  )


def _local_names(graph: tf.Graph) -> FrozenSet[str]:
  """Returns the names of local variables and metrics that no step trains."""
  local = _names_in(graph, tf.GraphKeys.LOCAL_VARIABLES)
  metrics = _names_in(graph, tf.GraphKeys.METRIC_VARIABLES)
  return (local | metrics) - steps.trained_variables(graph)


def _names_in(graph: tf.Graph, collection: str) -> FrozenSet[str]:
  """Returns the names of the variables in a collection of a graph."""
  names = set()
  for variable in graph.get_collection(collection):
    name, _, _ = variable.name.rpartition(":")
    names.add(name)
  return frozenset(names)
