# SPDX-License-Identifier: Apache-2.0
"""Finds out whether an op changes state that outlives a run, from its definition and
the functions that it calls.
"""

import functools
from typing import Any, Container, Iterable, Iterator, List, NamedTuple, Optional, Set

from mp_compat._tensorflow import graph_internals
from mp_compat._tensorflow import tf

# Stateful ops that read a resource, print, or raise an error.
_READING = frozenset(
  """
  Assert DisableCopyOnRead IsVariableInitialized LookupTableFind LookupTableFindV2
  LookupTableSize LookupTableSizeV2 Print PrintV2 ReadVariableOp ResourceGather
  ResourceGatherNd VarIsInitializedOp VariableShape
  """.split()
)
# Ops that pass a reference on.
_PASSING = frozenset(
  """
  RefEnter RefExit RefIdentity RefMerge RefNextIteration RefSelect RefSwitch
  """.split()
)
# prefixes of ops on resources that end with the run
_OF_ONE_RUN = ("Stack", "TensorArray")


class _Kind(NamedTuple):
  """What the definition of a type of ops tells.

  Attributes:
    is_defined: Whether there is a definition; a function of a graph has none.
    takes_functions: Whether functions are attributes of these ops.
    runs_dataset: Whether they take a dataset, and return something else.
    changes_state: Whether they may change state, if they call no functions.
  """

  is_defined: bool
  takes_functions: bool
  runs_dataset: bool
  changes_state: bool


def changing(
  ops: Iterable[tf.Operation], calls: Container[str], graph: tf.Graph
) -> Set[tf.Operation]:
  """Returns those of `ops` that may change state that outlives the run, and those that
  `tf.print` made.

  A call may change state if an op of its functions may. Whatever runs a dataset may,
  because functions of the dataset may, wherever it was built. Ops without a known
  definition may. Random ops change the state of their generators. `tf.print` writes to
  a file or a stream, and no op can read it; `tf.Print` and `tf.Assert` are not in the
  result.

  `calls`: the types of those of `ops` that call functions (`call_types`).
  """
  found: Set[tf.Operation] = set()
  for op in ops:
    kind = _kind_of(op.type)
    if op.type in calls and not kind.runs_dataset:
      is_changing = _of_call(op.node_def, graph)
    else:
      is_changing = op.type == "PrintV2" or kind.changes_state
    if is_changing:
      found.add(op)
  return found


def call_types(ops: Iterable[tf.Operation], graph: tf.Graph) -> Set[str]:
  """Returns the types of those of `ops` that call functions."""
  types = {op.type for op in ops}
  return {op_type for op_type in types if is_call(op_type, graph)}


def is_call(op_type: str, graph: tf.Graph) -> bool:
  """Returns whether ops of a type call functions: conditionals, loops, datasets and
  others.
  """
  kind = _kind_of(op_type)
  if kind.is_defined:
    return kind.takes_functions
  return graph_internals.calls_function(op_type, graph)


def called_types(node: tf.NodeDef, graph: tf.Graph) -> Iterator[Optional[str]]:
  """Yields the types of the ops in functions that a node calls, also through others;
  None for a function without a known definition.
  """
  names: Set[str] = set()
  pending = _function_names(node, graph)
  while pending:
    name = pending.pop()
    if name in names:
      continue
    names.add(name)
    function = graph_internals.function_named(name, graph)
    if function is None:
      yield None
      continue
    for called in function.definition.node_def:
      if is_call(called.op, graph):
        pending += _function_names(called, graph)
      if not is_call(called.op, graph) or _kind_of(called.op).runs_dataset:
        yield called.op


def _of_call(node: tf.NodeDef, graph: tf.Graph) -> bool:
  """Returns whether one of the functions that a node calls, also through others, may
  change state.
  """
  for called in called_types(node, graph):
    if called is None or _kind_of(called).changes_state:
      return True
  return False


def _function_names(node: tf.NodeDef, graph: tf.Graph) -> List[str]:
  """Returns the names of the functions that a node itself calls."""
  if graph_internals.calls_function(node.op, graph):
    return [node.op]
  names: List[str] = []
  for value in node.attr.values():
    for function in (value.func, *value.list.func):
      if function.name:  # else the attribute is no function
        names.append(function.name)
  return names


@functools.lru_cache(maxsize=None)
def _kind_of(op_type: str) -> _Kind:
  """Returns what is known of a type of ops; without a definition, they may change
  state, and so may what runs a dataset.
  """
  definition = graph_internals.op_definition(op_type)
  if definition is None:
    return _Kind(
      is_defined=False, takes_functions=False, runs_dataset=False, changes_state=True
    )
  types = {attribute.type for attribute in definition.attr}
  runs_dataset = _runs_dataset(definition)
  return _Kind(
    is_defined=True,
    takes_functions="func" in types or "list(func)" in types,
    runs_dataset=runs_dataset,
    changes_state=runs_dataset or _changes_state(definition),
  )


def _runs_dataset(definition: Any) -> bool:
  """Returns whether ops take a dataset, and return something else."""
  variant = tf.variant.as_datatype_enum
  returned = [argument.type for argument in definition.output_arg]
  if returned == [variant]:  # another dataset
    return False
  for argument in definition.input_arg:
    if "dataset" in argument.name and argument.type == variant:
      return True
  return False


def _changes_state(definition: Any) -> bool:
  """Returns whether ops that call no functions, and run no dataset, may change state.

  reads a resource, passes a reference on, or is of one run    no
  makes a handle, except TemporaryVariable                     no
  is stateful, or takes a reference                            yes
  is anything else                                             no
  """
  op_type = definition.name
  if op_type in _READING or op_type in _PASSING or op_type.startswith(_OF_ONE_RUN):
    return False
  if _makes_handles(definition):  # of a variable, a queue, an iterator
    return op_type == "TemporaryVariable"
  if definition.is_stateful:
    return True
  return any(argument.is_ref for argument in definition.input_arg)


def _makes_handles(definition: Any) -> bool:
  """Returns whether all outputs of an op are resources, or references of an op without
  inputs.
  """
  for argument in definition.output_arg:
    is_own_reference = argument.is_ref and not definition.input_arg
    if argument.type != tf.resource and not is_own_reference:
      return False
  return bool(definition.output_arg)
