# SPDX-License-Identifier: Apache-2.0
"""Tensors that are dead whenever a branch (control flow v1) is not taken: finds the branches, reads them from outside.

Every op that reads a dead tensor is dead, too, and silently does not run.
"""

from typing import Any, Dict, FrozenSet, Iterable, List, NamedTuple, Optional, Tuple

from mp_compat._tensorflow import contexts
from mp_compat._tensorflow import tf


class Branch(NamedTuple):
  """A branch of a conditional (control flow v1)."""

  predicate: tf.Tensor
  output: int  # of a Switch by the predicate: 1 if the branch runs if it is True, 0 otherwise


_BranchKey = Tuple[tf.Operation, int, int]  # the op and the output that compute the predicate, and Branch.output


def merge_out_of_branches(tensor: tf.Tensor, default: Any, branches: Optional[List[Branch]] = None) -> tf.Tensor:
  """Returns a tensor outside of branches: `tensor` if all branches that it is in run, else `default`.

  Its op is `is_in_branches_only`. `default` is a Python value, for a scalar if the tensor's shape is unknown. The
  branches are by default those of the tensor's control-flow context.
  """
  if branches is None:
    branches = [Branch(context.pred, context.branch) for context in contexts.enclosing(contexts.of_outputs(tensor.op))]
  for predicate, output in branches:
    shape = tensor.shape if tensor.shape.is_fully_defined() else []
    other = tf.raw_ops.Switch(data=tf.constant(default, tensor.dtype, shape), pred=predicate)
    tensor = tf.raw_ops.Merge(inputs=[tensor, other[1 - output]]).output
  return tensor


def zeros_if_dead(tensors: List[tf.Tensor]) -> List[tf.Tensor]:
  """Returns the same tensors, with zeros for those that are dead in a run; outside of control flow only.

  Programs that route examples by Switch and Merge, or read a gradient that was computed in a branch, have gradients
  that are dead in some runs. Their variables are then not updated, but the others are.
  """
  if tf.executing_eagerly() or contexts.is_in_control_flow():
    return tensors
  if not any(op.type in ("Switch", "RefSwitch") for op in tf.get_default_graph().get_operations()):
    return tensors  # quick, for most graphs
  return [
    merge_out_of_branches(tensor, 0, branches) if branches else tensor
    for tensor, branches in zip(tensors, branches_of(tensors))
  ]


def branches_of(tensors: Iterable[tf.Tensor]) -> List[List[Branch]]:
  """Returns for each tensor the branches (control flow v1) without which it is not computed.

  The ops of a gradient belong to no control-flow context, but they are computed only if their inputs are.
  """
  tensors = list(tensors)
  found: Dict[tf.Operation, FrozenSet[_BranchKey]] = {}  # by op, without what a Switch adds to its outputs

  def branches_at(tensor: tf.Tensor) -> FrozenSet[_BranchKey]:
    branches = found.get(tensor.op, frozenset())
    if tensor.op.type not in ("Switch", "RefSwitch") or tensor.op.inputs[1].op.type == "LoopCond":
      return branches
    predicate = tensor.op.inputs[1]
    return branches | {(predicate.op, predicate.value_index, tensor.value_index)}

  def branches_in(op: tf.Operation) -> FrozenSet[_BranchKey]:
    around = [context for context in contexts.enclosing(contexts.of_outputs(op)) if hasattr(context, "pred")]
    branches = frozenset((context.pred.op, context.pred.value_index, context.branch) for context in around)
    inputs = [branches_at(tensor) for tensor in inputs_of(op)]
    if op.type in ("Merge", "RefMerge"):
      inputs = [frozenset.intersection(*inputs)]
    return branches.union(*inputs, *[found.get(control, frozenset()) for control in op.control_inputs])

  def inputs_of(op: tf.Operation) -> List[tf.Tensor]:
    inputs = list(op.inputs)
    is_in_loop = op.type in ("Merge", "RefMerge") and inputs[-1].op.type in ("NextIteration", "RefNextIteration")
    return inputs[:1] if is_in_loop else inputs

  for graph in {tensor.graph for tensor in tensors}:
    for op in graph.get_operations():  # in the order of creation, inputs first
      found[op] = branches_in(op)
  return [
    [
      Branch(op.outputs[index], output)
      for op, index, output in sorted(branches_at(tensor), key=lambda key: (key[0].name, key[1:]))
    ]
    for tensor in tensors
  ]
