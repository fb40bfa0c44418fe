# SPDX-License-Identifier: Apache-2.0
"""Control-flow contexts: in which branch, loop or function an op is, and what can read it."""

import contextlib
from typing import Any, Iterator, List

from mp_compat._tensorflow import graphs
from mp_compat._tensorflow import tf


def enclosing(context: Any) -> Iterator[Any]:
  """Yields a control-flow context and those around it."""
  while context is not None:
    yield context
    context = context.outer_context


def of_outputs(op: tf.Operation) -> Any:
  """Returns the control-flow context in which the outputs of `op` can be read."""
  context = op._get_control_flow_context()
  return context.outer_context if context is not None and op.type in ("Exit", "RefExit") else context


def loop_around(context: Any) -> Any:
  """Returns the innermost loop (control flow v1) of a context and those around it; None outside of loops."""
  return next((around for around in enclosing(context) if around.IsWhileContext()), None)


def compiled_around(op: tf.Operation) -> Any:
  """Returns the XLA context that contains `op`; None for none."""
  return next((around for around in enclosing(op._get_control_flow_context()) if around.IsXLAContext()), None)


def loop_around_inputs(op: tf.Operation) -> Any:
  """Returns the innermost loop in which the inputs of `op` can be computed; an Enter passes one into another loop."""
  context = op._get_control_flow_context()
  return loop_around(context.outer_context if context is not None and op.type in ("Enter", "RefEnter") else context)


@contextlib.contextmanager
def enter(context: Any) -> Iterator[None]:
  """Makes a context manager: ops built inside belong to a control-flow context; None means that they belong to none."""
  if context is None:
    yield
    return
  context.Enter()
  try:
    yield
  finally:
    context.Exit()


def is_readable(tensor: tf.Tensor) -> bool:
  """Returns whether ops built now, in the graph of `tensor` or a function in it, may read it."""
  wanted = of_outputs(tensor.op)
  return wanted is None or any(context is wanted for context in enclosing(tensor.graph._get_control_flow_context()))


def is_in_control_flow() -> bool:
  """Returns whether ops built now belong to a branch, a loop, a function or an XLA computation."""
  graph = tf.get_default_graph()
  return graph._get_control_flow_context() is not None or graph is not graphs.init_scope_graph()


def predicates() -> List[tf.Tensor]:
  """Returns the predicates of the branches (control flow v1) to which ops built now belong."""
  if tf.executing_eagerly():
    return []
  around = enclosing(tf.get_default_graph()._get_control_flow_context())
  return [context.pred for context in around if context.IsCondContext()]


def is_in_branches_only(op: tf.Operation) -> bool:
  """Returns whether `merge_out_of_branches` can read `op`: it is in the current graph, at most inside branches."""
  context = of_outputs(op)
  while context is not None and context.IsCondContext():
    context = context.outer_context
  return context is None and op.graph is tf.get_default_graph()


def may_be_compiled() -> bool:
  """Returns whether ops built now belong to a function or an XLA context, which XLA may compile."""
  if tf.executing_eagerly():
    return False
  graph = tf.get_default_graph()
  around = enclosing(graph._get_control_flow_context())
  return graph.building_function or any(context.IsXLAContext() for context in around)


def tensor_inputs(tensor: tf.Tensor) -> List[tf.Tensor]:
  """Returns the graph tensors that `tensor` is computed from; for a capture of a function, the captured tensor."""
  op = tensor.op
  if op.type != "Placeholder":
    return list(op.inputs)
  captures = getattr(op.graph, "captures", ())
  return [outer for outer, inner in captures if inner.op is op and hasattr(outer, "graph")]


def contains_op(op: tf.Operation, prefix: str) -> bool:
  """Returns whether the type of `op` begins with `prefix`, or `op` is a conditional with such an op in a function."""
  if op.type.startswith(prefix):
    return True
  if op.type not in ("If", "StatelessIf"):
    return False
  branches = [op.graph._get_function(op.get_attr(branch).name) for branch in ("then_branch", "else_branch")]
  return any(node.op.startswith(prefix) for branch in branches for node in branch.definition.node_def)
