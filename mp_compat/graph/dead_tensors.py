# SPDX-License-Identifier: Apache-2.0
"""Tensors that are dead in some runs, as in a branch that is not taken (control flow
v1): finds and replaces them.

Every op that reads a dead tensor is dead, too, and silently does not run. A Merge is
dead if all of its inputs are.
"""

from typing import (
  Any,
  Dict,
  FrozenSet,
  Iterable,
  List,
  NamedTuple,
  Optional,
  Set,
  Tuple,
)

from mp_compat._tensorflow import tf
from mp_compat.graph import contexts


class _Condition(NamedTuple):
  """What must happen for an op to run: a predicate has a value, or a Merge runs.

  Attributes:
    op: The op that computes the predicate; or the Merge.
    output: The index of its output that is the predicate; None for a Merge.
    branch: 1 if the predicate must be True, 0 if it must be False, as the outputs of a
      Switch are numbered; None for a Merge.
  """

  op: tf.Operation
  output: Optional[int]
  branch: Optional[int]


_Conditions = FrozenSet[_Condition]  # all of which must be met


def merge_out_of_branches(
  tensor: tf.Tensor, default: Any, is_in_branches: Optional[bool] = None
) -> tf.Tensor:
  r"""Returns a tensor outside of branches: `tensor` if it is computed, else `default`.

  Args:
    tensor: a tensor of any dtype, whose op is `is_in_branches_only`.
    default: a Python value, which fills the shape of `tensor`. If that is not known, it
      is a scalar.
    is_in_branches: whether `tensor` may be dead, also for another reason than a branch
      (`may_be_dead`); if not, it is returned as it is. By default, whether its op has a
      control-flow context.

  Returns:
    A tensor of the same dtype that each run can compute.

  A Merge has the value of the input that is computed first, even if another follows. A
  ControlTrigger runs whether its input is dead or not, but after it. So the last Merge
  gets `default` second:

      tensor -> Merge ----------------------------> Merge
                  \ - -> ControlTrigger - -> default /
  """
  if is_in_branches is None:
    is_in_branches = contexts.of_outputs(tensor.op) is not None
  if not is_in_branches:
    return tensor
  shape = []
  if tensor.shape.is_fully_defined():
    shape = tensor.shape
  # In a cluster of XLA or on another device, control edges might arrive before data: a
  # Merge is in no cluster.
  with tf.get_default_graph().colocate_with(tensor.op, ignore_existing=True):
    own = tf.raw_ops.Merge(inputs=[tensor]).output
    with tf.control_dependencies([own]):
      decided = tf.raw_ops.ControlTrigger()
    with tf.control_dependencies([decided]):
      other = tf.constant(default, tensor.dtype, shape)
    return tf.raw_ops.Merge(inputs=[own, other]).output


def zeros_if_dead(tensors: List[tf.Tensor]) -> List[tf.Tensor]:
  """Returns the same tensors, with zeros for those that are dead in a run; as they are
  in eager mode, functions and control flow, where nothing can tell.

  Programs that route examples by Switch and Merge, or read a gradient that was computed
  in a branch, have gradients that are dead in some runs. Their variables are then not
  updated, but the others are.
  """
  if not tensors or tf.executing_eagerly() or contexts.is_in_control_flow():
    return tensors
  types = {op.type for op in tf.get_default_graph().get_operations()}
  if types.isdisjoint(contexts.SWITCHES):  # quick, for most graphs
    return tensors
  results = []
  for tensor, is_dead in zip(tensors, may_be_dead(tensors)):
    zero = False if tensor.dtype.base_dtype == tf.bool else 0
    results.append(merge_out_of_branches(tensor, zero, is_dead))
  return results


def may_be_dead(tensors: Iterable[tf.Tensor]) -> List[bool]:
  """Returns for each tensor whether it may be dead in a run.

  The ops of a gradient belong to no control-flow context, but they are computed only if
  their inputs are. A Merge of which one input runs if a predicate is True, and one if
  it is False, always runs, as that of `tf.cond`.
  """
  tensors = list(tensors)
  found = _conditions_of_ops(tensors)
  return [bool(_conditions_of(tensor, found)) for tensor in tensors]


def _conditions_of_ops(tensors: List[tf.Tensor]) -> Dict[tf.Operation, _Conditions]:
  """Returns the conditions of the ops of tensors, and of all ops that these need.

  Those of an op are the ones of the branches that it is in, and of everything that it
  reads. A graph may be deeper than Python's recursion limit: an op stays in `pending`
  until all ops that it needs are found.
  """
  found: Dict[tf.Operation, _Conditions] = {}
  pending = [tensor.op for tensor in tensors]
  while pending:
    op = pending[-1]
    inputs, controls = _read_by(op)
    needed = [tensor.op for tensor in inputs] + controls
    missing = [each for each in needed if each not in found]
    if missing:
      pending += missing
      continue
    del pending[-1]
    of_inputs = [_conditions_of(tensor, found) for tensor in inputs]
    conditions = _conditions_of_branches(op)
    if op.type in contexts.MERGES:
      conditions |= _conditions_of_merge(op, of_inputs)
    else:
      conditions = conditions.union(*of_inputs)
    for control in controls:
      conditions |= found[control]
    found[op] = conditions
  return found


def _conditions_of(
  tensor: tf.Tensor, found: Dict[tf.Operation, _Conditions]
) -> _Conditions:
  """Returns the conditions under which a tensor is computed: those of its op, and the
  predicate of a Switch, unless it is that of a loop.
  """
  if tensor.op.type not in contexts.SWITCHES:
    return found[tensor.op]
  predicate = tensor.op.inputs[1]
  if predicate.op.type == "LoopCond":
    return found[tensor.op]
  return found[tensor.op] | {_condition(predicate, tensor.value_index)}


def _conditions_of_branches(op: tf.Operation) -> _Conditions:
  """Returns the conditions of the branches in which the outputs of `op` are."""
  conditions = set()
  for context in contexts.enclosing(contexts.of_outputs(op)):
    if context.IsCondContext():
      conditions.add(_condition(context.pred, context.branch))
  return frozenset(conditions)


def _read_by(op: tf.Operation) -> Tuple[List[tf.Tensor], List[tf.Operation]]:
  """Returns the tensors and the ops without which `op` does not run: its inputs, and
  its control inputs.

  The Merge of a loop runs with its first input. A ControlTrigger runs after dead ops,
  too.
  """
  inputs = list(op.inputs)
  if op.type in contexts.MERGES and inputs[-1].op.type in contexts.NEXT_ITERATIONS:
    del inputs[1:]
  if op.type == "ControlTrigger":
    return inputs, []
  return inputs, list(op.control_inputs)


def _condition(predicate: tf.Tensor, branch: int) -> _Condition:
  """Returns the condition that a predicate is True if `branch` is 1, else False; for
  copies of a predicate, the same one.
  """
  while predicate.op.type == "Identity":  # `tf.cond` makes one
    predicate = predicate.op.inputs[0]
  return _Condition(predicate.op, predicate.value_index, branch)


def _conditions_of_merge(merge: tf.Operation, inputs: List[_Conditions]) -> _Conditions:
  """Returns what must happen for a Merge to run; `inputs` are the conditions of each of
  its inputs.

  Those that all inputs have in common must be met. The Merge always runs if they are
  met, if one input needs nothing else, or if two inputs need, besides, the same
  predicate to be True and to be False. Otherwise it may be dead: it is a condition of
  its own.

      conditions of the inputs  of the Merge
      {p}, {not p}              {}                   of `tf.cond`
      {q, p}, {q, not p}        {q}                  of a `tf.cond` in a branch
      {p}, {q}                  {the Merge runs}     dead if p and q are False
  """
  common = frozenset.intersection(*inputs)
  # of the inputs that need only one thing besides
  singles: Set[_Condition] = set()
  for conditions in inputs:
    own = conditions - common
    if not own:
      return common
    if len(own) == 1:
      singles |= own
  for condition in singles:
    if condition.branch is None:  # a Merge, which has no opposite
      continue
    opposite = condition._replace(branch=1 - condition.branch)
    if opposite in singles:
      return common
  return common | {_Condition(merge, None, None)}
