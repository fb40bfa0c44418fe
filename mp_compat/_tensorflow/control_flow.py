# SPDX-License-Identifier: Apache-2.0
"""Control flow: builds conditionals, and finds where an op can be read."""

import contextlib
from typing import Any, Callable, Dict, FrozenSet, Iterable, Iterator, List, NamedTuple, Optional, Tuple

from tensorflow.python.ops import control_flow_ops

from mp_compat._tensorflow import graphs
from mp_compat._tensorflow import tf


class Branch(NamedTuple):
  """A branch of a conditional (control flow v1)."""

  predicate: tf.Tensor
  output: int  # of a Switch by the predicate: 1 if the branch runs if it is True, 0 otherwise


_BranchKey = Tuple[tf.Operation, int, int]  # the op and the output that compute the predicate, and Branch.output


def cond(predicate: tf.Tensor, true_fn: Callable[[], Any], false_fn: Callable[[], Any]) -> Any:
  """Returns `true_fn()` if `predicate`, else `false_fn()`; in a graph, calls each once to build the branches.

  In a plain graph, the branches are part of the graph (control flow v1: Switch and Merge), even if control flow v2 is
  enabled. Branches that are functions (v2) cannot take reference variables, cannot be split between parameter servers
  before TensorFlow 2.15, and in TensorFlow 2.0 to 2.10 create eager variables despite `tf.disable_eager_execution()`.
  Inside functions and in eager mode, this is `tf.cond`.

  Args:
    predicate: a scalar bool tensor.
    true_fn: returns an op or a scalar bool tensor; in eager mode also None.
    false_fn: returns the same kind as `true_fn`.

  Returns:
    A scalar bool tensor, or an op; None in eager mode if the branches return None.
  """
  graph = tf.get_default_graph()
  if tf.executing_eagerly() or graph.building_function:
    return tf.cond(predicate, true_fn, false_fn)
  with tf.name_scope("cond"):
    results = []
    for branch, (pivot, branch_fn) in enumerate(
      zip(tf.raw_ops.Switch(data=predicate, pred=predicate), (false_fn, true_fn))
    ):
      pivot = tf.identity(pivot)
      context = _BranchContext(predicate, pivot, branch)
      context.Enter()
      try:
        result = branch_fn()
        with tf.control_dependencies([pivot, result]):
          result = tf.identity(result if tf.is_tensor(result) else pivot)
        context.ExitResult([result])
      finally:
        context.Exit()
      graph.add_to_collection(tf.GraphKeys.COND_CONTEXT, context)  # for MetaGraphs
      results.append(result)
    return tf.raw_ops.Merge(inputs=results).output


class _BranchContext(control_flow_ops.CondContext):
  """A branch in which ops may also use tensors that were built in the branch of another conditional.

  For example, a learning rate that two optimizers share may be built in the first one's `apply_gradients`. Without its
  conditional, it would not be computed in the steps in which that is skipped, so its ops are copied.
  """

  def AddValue(self, val: tf.Tensor) -> tf.Tensor:
    around = list(_chain(self))
    others = [context for context in _chain(_context_of(val.op)) if isinstance(context, _BranchContext)]
    others = [context for context in others if context not in around]
    if others and val.name not in self._values:
      copied = super().AddValue(_copy_out(val, others, _refuse_stateful))
      self._values.add(val.name)
      self._external_values[val.name] = copied  # for further ops that read `val`
    return super().AddValue(val)


def _refuse_stateful(op: tf.Operation) -> None:
  """Raises a ValueError for an op of another branch whose result may depend on when it is executed."""
  context = op._get_control_flow_context()
  inside = [control for control in op.control_inputs if control._get_control_flow_context() is context]
  waits = any(control.type != "Identity" for control in inside)  # not only for the pivot of the branch
  if waits or (op.op_def.is_stateful and op.type != "ReadVariableOp"):
    raise ValueError(
      "apply_gradients() must not use {} ({}), which an earlier apply_gradients() built in its conditional: it is not "
      "computed if that step is skipped. Build it before both, or once in each.".format(op.name, op.type)
    )


def is_readable(tensor: tf.Tensor) -> bool:
  """Returns whether ops built now may read `tensor`: its control-flow context is the current one or encloses it.

  Args:
    tensor: a tensor of the current graph, or of a graph around it.
  """
  wanted, context = _context_of(tensor.op), tensor.graph._get_control_flow_context()
  while context is not wanted and context is not None:
    context = context.outer_context
  return context is wanted


def _context_of(op: tf.Operation) -> Any:
  """Returns the control-flow context in which the outputs of `op` can be read."""
  context = op._get_control_flow_context()
  return context.outer_context if context is not None and op.type in ("Exit", "RefExit") else context


@contextlib.contextmanager
def context_of(op: tf.Operation) -> Iterator[None]:
  """Makes a context manager: ops built inside belong to the control-flow context of `op`, such as its branch."""
  with _enter(_context_of(op)):
    yield


@contextlib.contextmanager
def _enter(context: Any) -> Iterator[None]:
  if context is None:
    yield
    return
  context.Enter()
  try:
    yield
  finally:
    context.Exit()


def is_in_control_flow() -> bool:
  """Returns whether ops built now belong to a branch, a loop, a function or an XLA computation."""
  graph = tf.get_default_graph()
  return graph._get_control_flow_context() is not None or graph is not graphs.init_scope_graph()


def is_in_branches_only(op: tf.Operation) -> bool:
  """Returns whether `merge_out_of_branches` can read `op`: it is in the current graph, at most inside branches."""
  context = _context_of(op)
  while hasattr(context, "pred"):
    context = context.outer_context
  return context is None and op.graph is tf.get_default_graph()


def merge_out_of_branches(tensor: tf.Tensor, default: Any, branches: Optional[List[Branch]] = None) -> tf.Tensor:
  """Returns a tensor outside of branches: `tensor` if all branches (control flow v1) that it is in run, else `default`.

  Args:
    tensor: a tensor for whose op `is_in_branches_only` returns True.
    default: a Python value for a tensor of the same dtype and shape.
    branches: the branches; by default those of the tensor's control-flow context.
  """
  if branches is None:
    branches = [Branch(context.pred, context.branch) for context in _chain(_context_of(tensor.op))]
  for predicate, output in branches:
    other = tf.raw_ops.Switch(data=tf.constant(default, tensor.dtype, tensor.shape), pred=predicate)
    tensor = tf.raw_ops.Merge(inputs=[tensor, other[1 - output]]).output
  return tensor


def branches_of(tensors: Iterable[tf.Tensor]) -> List[List[Branch]]:
  """Returns for each tensor the branches (control flow v1) without which it is not computed.

  The ops of a gradient belong to no control-flow context, but they are computed only if their inputs are.
  """
  tensors = list(tensors)
  found: Dict[tf.Operation, FrozenSet[_BranchKey]] = {}  # by op, without what a Switch adds to its outputs
  predicates: Dict[Any, tf.Tensor] = {}

  def branches_at(tensor: tf.Tensor) -> FrozenSet[_BranchKey]:
    branches = found.get(tensor.op, frozenset())
    if tensor.op.type not in ("Switch", "RefSwitch") or tensor.op.inputs[1].op.type == "LoopCond":
      return branches
    return branches | {key_of(tensor.op.inputs[1], tensor.value_index)}

  def key_of(predicate: tf.Tensor, output: int) -> _BranchKey:
    predicates[predicate.op, predicate.value_index] = predicate
    return predicate.op, predicate.value_index, output

  def branches_in(op: tf.Operation) -> FrozenSet[_BranchKey]:
    contexts = [context for context in _chain(_context_of(op)) if hasattr(context, "pred")]
    branches = frozenset(key_of(context.pred, context.branch) for context in contexts)
    inputs = [branches_at(tensor) for tensor in inputs_of(op)]
    if op.type in ("Merge", "RefMerge"):
      inputs = [frozenset.intersection(*inputs)]
    return branches.union(*inputs, *[found.get(control, frozenset()) for control in op.control_inputs])

  def inputs_of(op: tf.Operation) -> List[tf.Tensor]:
    inputs = list(op.inputs)
    is_in_loop = op.type in ("Merge", "RefMerge") and inputs[1].op.type in ("NextIteration", "RefNextIteration")
    return inputs[:1] if is_in_loop else inputs

  pending, entered = [tensor.op for tensor in tensors], set()
  while pending:
    op = pending[-1]
    missing = [] if op in entered else [tensor.op for tensor in inputs_of(op)] + list(op.control_inputs)
    missing = [other for other in missing if other not in found and other not in entered]
    entered.add(op)
    if missing:
      pending.extend(missing)
    else:
      pending.pop()
      if op not in found:
        found[op] = branches_in(op)

  return [
    [Branch(predicates[key[:2]], key[2]) for key in sorted(branches_at(tensor), key=lambda key: (key[0].name, key[1:]))]
    for tensor in tensors
  ]


def copy_out_of_branches(tensor: tf.Tensor) -> tf.Tensor:
  """Returns a tensor of the same value outside of the current branches (control flow v1); copies its ops.

  Used for initial values of variables. A tensor from outside is returned unchanged. Conditionals that were built inside
  the branches are copied as well.

  Raises:
    ValueError: If a loop inside the branches computes the tensor.
  """
  return _copy_out(tensor, list(_chain(tensor.graph._get_control_flow_context())), lambda op: None)


def _copy_out(tensor: tf.Tensor, branches: List[Any], check: Callable[[tf.Operation], None]) -> tf.Tensor:
  """Returns a tensor of the same value outside of `branches`, the contexts around it from the innermost on.

  Args:
    tensor: a tensor.
    branches: control-flow contexts; the ops inside of them are copied.
    check: is called with each op before it is copied.
  """
  predicates = [(context.pred.op, context.pred.value_index) for context in branches if hasattr(context, "pred")]
  copies: Dict[tf.Operation, tf.Operation] = {}

  def copy(value: tf.Tensor) -> tf.Tensor:
    op = value.op
    if not any(context in branches for context in _chain(op._get_control_flow_context())):
      return value
    if op.type in ("Switch", "RefSwitch") and (op.inputs[1].op, op.inputs[1].value_index) in predicates:
      return copy(op.inputs[0])  # passes a tensor from outside into one of the branches
    if op.type in ("Enter", "Exit", "NextIteration", "RefEnter", "RefExit", "RefNextIteration"):
      raise ValueError(
        "The initial value of a variable that apply_gradients() creates, or a tensor that several calls use, must not "
        "be computed by a loop inside apply_gradients(), but {} is. Pass a function that returns the value, or compute "
        "it before.".format(tensor)
      )
    if op not in copies:
      check(op)
      inputs = [copy(value) for value in op.inputs]
      context = op._get_control_flow_context()
      in_copied_branch = context not in branches and op is not context.pivot.op
      pivots = [copy(context.pivot).op] if in_copied_branch else []
      with tf.control_dependencies(pivots):
        copies[op] = tf.get_default_graph().create_op(
          op.type,
          inputs,
          [output.dtype for output in op.outputs],
          name=op.name.rpartition("/")[2],
          attrs=op.node_def.attr,
          op_def=op.op_def,
        )
    return copies[op].outputs[value.value_index]

  around = branches[-1].outer_context if branches else None
  with tf.init_scope(), _enter(around):
    return copy(tensor)


def _chain(context: Any) -> Iterator[Any]:
  """Yields a control-flow context and those around it."""
  while context is not None:
    yield context
    context = context.outer_context


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


def may_be_compiled() -> bool:
  """Returns whether ops built now belong to a function or an XLA context, which XLA may compile."""
  if tf.executing_eagerly():
    return False
  graph = tf.get_default_graph()
  context = graph._get_control_flow_context()
  while context is not None:
    if context.IsXLAContext():
      return True
    context = context.outer_context
  return graph.building_function
