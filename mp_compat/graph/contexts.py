# SPDX-License-Identifier: Apache-2.0
"""Control-flow contexts: in which branch, loop or function an op is, and what can read
it. Searches from tensors.
"""

import contextlib
from typing import Any, Callable, Container, Dict, Iterable, Iterator, List, Set, Tuple

from mp_compat._tensorflow import graph_internals
from mp_compat._tensorflow import tf
from mp_compat.graph import graphs

# The ops of control flow v1; those of references have types of their own.
SWITCHES = ("Switch", "RefSwitch")
MERGES = ("Merge", "RefMerge")
ENTERS = ("Enter", "RefEnter")
EXITS = ("Exit", "RefExit")
NEXT_ITERATIONS = ("NextIteration", "RefNextIteration")

Context = Any  # a ControlFlowContext of TensorFlow; None outside of all of them
TensorKey = Tuple[tf.Operation, int]


def enclosing(context: Context) -> List[Context]:
  """Returns a control-flow context and those around it, from the inside out; [] for
  None.
  """
  found = []
  while context is not None:
    found.append(context)
    context = context.outer_context
  return found


def of_outputs(op: tf.Operation) -> Context:
  """Returns the control-flow context in which the outputs of `op` can be read."""
  context = graph_internals.context_of(op)
  if context is not None and op.type in EXITS:
    return context.outer_context
  return context


def loop_around(context: Context) -> Context:
  """Returns the innermost loop (control flow v1) of a context and those around it; None
  outside of loops.
  """
  for around in enclosing(context):
    if around.IsWhileContext():
      return around
  return None


def compiled_around(op: tf.Operation) -> Context:
  """Returns the innermost XLA context that contains `op`; None outside of them."""
  for around in enclosing(graph_internals.context_of(op)):
    if around.IsXLAContext():
      return around
  return None


def loop_around_inputs(op: tf.Operation) -> Context:
  """Returns the innermost loop in which the inputs of `op` can be computed; an Enter
  passes one into another loop.
  """
  context = graph_internals.context_of(op)
  if context is not None and op.type in ENTERS:
    context = context.outer_context
  return loop_around(context)


@contextlib.contextmanager
def enter(context: Context) -> Iterator[None]:
  """Makes a context manager: ops built inside belong to a control-flow context; for
  None, to the one that they belong to without it.
  """
  if context is None:
    yield
    return
  context.Enter()
  try:
    yield
  finally:
    context.Exit()


def is_readable(tensor: tf.Tensor) -> bool:
  """Returns whether ops built now, in the graph of `tensor` or a function in it, may
  read it: whether they are in the branch or loop of `tensor`, too.
  """
  wanted = of_outputs(tensor.op)
  if wanted is None:
    return True
  for context in enclosing(graph_internals.context_of(tensor.graph)):
    if context is wanted:
      return True
  return False


def is_in_control_flow() -> bool:
  """Returns whether ops built now belong to a branch, a loop, a function or an XLA
  computation.
  """
  graph = tf.get_default_graph()
  return (
    graph_internals.context_of(graph) is not None
    or graph is not graphs.init_scope_graph()
  )


def predicates() -> List[tf.Tensor]:
  """Returns the predicates of the branches (control flow v1) to which ops built now
  belong.
  """
  if tf.executing_eagerly():
    return []
  around = enclosing(graph_internals.context_of(tf.get_default_graph()))
  return [context.pred for context in around if context.IsCondContext()]


def is_in_branches_only(op: tf.Operation) -> bool:
  """Returns whether `merge_out_of_branches` can read the outputs of `op`: it is in the
  current graph, and in no loop or XLA computation.
  """
  if op.graph is not tf.get_default_graph():
    return False
  for context in enclosing(of_outputs(op)):
    if not context.IsCondContext():
      return False
  return True


def tensor_key(tensor: tf.Tensor) -> TensorKey:
  """Returns a key that identifies a graph tensor; tensors are not hashable in all
  TensorFlow versions.
  """
  return tensor.op, tensor.value_index


def tensor_keys(tensors: Iterable[tf.Tensor]) -> List[TensorKey]:
  """Returns the key of each of several graph tensors."""
  return [tensor_key(tensor) for tensor in tensors]


def keys_of(tensors: Iterable[tf.Tensor]) -> Set[TensorKey]:
  """Returns the keys of graph tensors, each once."""
  return set(tensor_keys(tensors))


def search_back(
  ends: Iterable[tf.Tensor],
  inputs_of: Callable[[tf.Tensor], List[tf.Tensor]],
  until: Container[TensorKey] = (),
) -> List[tf.Tensor]:
  """Returns the tensors that `search_back_by_key` finds, in the order of the search."""
  return list(search_back_by_key(ends, inputs_of, until).values())


def search_back_by_key(
  ends: Iterable[tf.Tensor],
  inputs_of: Callable[[tf.Tensor], List[tf.Tensor]],
  until: Container[TensorKey] = (),
) -> Dict[TensorKey, tf.Tensor]:
  """Searches tensors and those that they are computed from, each once, depth first.

  Args:
    ends: the tensors to begin with; they are in the result, too.
    inputs_of: returns the tensors to go on with from one, such as `tensor_inputs`.
    until: keys of tensors; those behind them are not searched.

  Returns:
    The graph tensors found by their keys, in the order of the search.
  """
  found: Dict[TensorKey, tf.Tensor] = {}
  pending = list(ends)[::-1]  # the next one is last
  while pending:
    tensor = pending.pop()
    key = tensor.op, tensor.value_index  # `tensor_key`; graphs are large
    if key in found:
      continue
    found[key] = tensor
    if key not in until:
      pending += reversed(inputs_of(tensor))
  return found


def tensor_inputs(tensor: tf.Tensor) -> List[tf.Tensor]:
  """Returns the graph tensors that `tensor` is computed from; for a capture of a
  function, the captured tensor.
  """
  op = tensor.op
  if op.type != "Placeholder":
    return list(op.inputs)
  captured = []
  for outer, inner in getattr(op.graph, "captures", ()):
    if inner.op is op and graphs.graph_of(outer) is not None:
      captured.append(outer)
  return captured


def is_argument(tensor: tf.Tensor) -> bool:
  """Returns whether a floating tensor is an argument of the function that is built now
  or around it, or a variable of its loop: what a call passes for it is not known.
  """
  graph = tensor.graph
  if tensor.op.type != "Placeholder" or not tensor.dtype.is_floating:
    return False
  if not graph.building_function:
    return False
  captures = getattr(graph, "captures", ())
  return all(inner.op is not tensor.op for _, inner in captures)


def data_inputs(tensor: tf.Tensor) -> List[tf.Tensor]:
  """Returns `tensor_inputs` without the predicate of a Switch."""
  inputs = tensor_inputs(tensor)
  if tensor.op.type in SWITCHES:
    return inputs[:1]
  return inputs


def contains_op(op: tf.Operation, prefix: str) -> bool:
  """Returns whether the type of `op` begins with `prefix`, or `op` is a conditional
  with such an op in a function.
  """
  if op.type.startswith(prefix):
    return True
  if op.type not in ("If", "StatelessIf"):
    return False
  for branch in ("then_branch", "else_branch"):
    function = graph_internals.function_named(op.get_attr(branch).name, op.graph)
    for node in function.definition.node_def:
      if node.op.startswith(prefix):
        return True
  return False
