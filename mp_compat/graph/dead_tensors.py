# SPDX-License-Identifier: Apache-2.0
"""Tensors that are dead in some runs, as in a branch that is not taken (control flow
v1): finds and replaces them.

Every op that reads a dead tensor is dead, too, and silently does not run. A Merge is
dead if all of its inputs are.
"""

from typing import Any, Dict, FrozenSet, Iterable, List, Optional, Tuple

from mp_compat._tensorflow import tf
from mp_compat.graph import contexts

# What must happen for an op to run: the op and the output that compute a predicate, and
# the output of a Switch by it (1 if it must be True, 0 if False); or a Merge that must
# run, with the outputs None.
_Condition = Tuple[tf.Operation, Optional[int], Optional[int]]


def merge_out_of_branches(
  tensor: tf.Tensor, default: Any, is_in_branches: Optional[bool] = None
) -> tf.Tensor:
  r"""Returns a tensor outside of branches: `tensor` if it is computed, else `default`.

  Its op is `is_in_branches_only`. `default` is a Python value, for a scalar if the
  tensor's shape is unknown. If `is_in_branches` is False, by default if its
  control-flow context is in no branch, the tensor is returned as it is.

  A ControlTrigger runs whether its input is dead or not, but after it. So the last
  Merge gets `default` second:

      tensor -> Merge ----------------------------> Merge
                  \ - -> ControlTrigger - -> default /
  """
  if not (
    contexts.of_outputs(tensor.op) is not None
    if is_in_branches is None
    else is_in_branches
  ):
    return tensor
  shape = tensor.shape if tensor.shape.is_fully_defined() else []
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
  """Returns the same tensors, with zeros for those that are dead in a run; outside of
  control flow only.

  Programs that route examples by Switch and Merge, or read a gradient that was computed
  in a branch, have gradients that are dead in some runs. Their variables are then not
  updated, but the others are.
  """
  if not tensors or tf.executing_eagerly() or contexts.is_in_control_flow():
    return tensors
  if {"Switch", "RefSwitch"}.isdisjoint(
    [op.type for op in tf.get_default_graph().get_operations()]
  ):
    return tensors  # quick, for most graphs
  return [
    merge_out_of_branches(tensor, 0, is_dead)
    for tensor, is_dead in zip(tensors, may_be_dead(tensors))
  ]


def may_be_dead(tensors: Iterable[tf.Tensor]) -> List[bool]:
  """Returns for each tensor whether it may be dead in a run.

  The ops of a gradient belong to no control-flow context, but they are computed only if
  their inputs are. A Merge of which one input runs if a predicate is True, and one if
  it is False, always runs, as that of `tf.cond`.
  """
  tensors = list(tensors)
  # by op, without what a Switch adds to its outputs
  found: Dict[tf.Operation, FrozenSet[_Condition]] = {}

  def conditions_of(tensor: tf.Tensor) -> FrozenSet[_Condition]:
    if (
      tensor.op.type not in ("Switch", "RefSwitch")
      or tensor.op.inputs[1].op.type == "LoopCond"
    ):
      return found[tensor.op]
    return found[tensor.op] | {_condition(tensor.op.inputs[1], tensor.value_index)}

  pending = [tensor.op for tensor in tensors]
  while pending:
    op = pending[-1]
    inputs, controls = _read_by(op)
    missing = [
      each for each in [tensor.op for tensor in inputs] + controls if each not in found
    ]
    if missing:
      pending += missing
      continue
    del pending[-1]
    of_inputs = [conditions_of(tensor) for tensor in inputs]
    if op.type in ("Merge", "RefMerge"):
      of_inputs = [_of_merge(op, of_inputs)]
    around = [
      context
      for context in contexts.enclosing(contexts.of_outputs(op))
      if context.IsCondContext()
    ]
    of_branches = [_condition(context.pred, context.branch) for context in around]
    found[op] = frozenset(of_branches).union(
      *of_inputs, *[found[control] for control in controls]
    )
  return [bool(conditions_of(tensor)) for tensor in tensors]


def _read_by(op: tf.Operation) -> Tuple[List[tf.Tensor], List[tf.Operation]]:
  """Returns the tensors and the ops without which `op` does not run."""
  inputs = list(op.inputs)
  if op.type in ("Merge", "RefMerge") and inputs[-1].op.type in (
    "NextIteration",
    "RefNextIteration",
  ):
    del inputs[1:]
  return inputs, [] if op.type == "ControlTrigger" else list(op.control_inputs)


def _condition(predicate: tf.Tensor, output: int) -> _Condition:
  while predicate.op.type == "Identity":  # `tf.cond` makes one
    predicate = predicate.op.inputs[0]
  return predicate.op, predicate.value_index, output


def _of_merge(
  merge: tf.Operation, inputs: List[FrozenSet[_Condition]]
) -> FrozenSet[_Condition]:
  """Returns what must happen for a Merge to run; `inputs` is the same for each of its
  inputs.
  """
  common = frozenset.intersection(*inputs)
  own = [conditions - common for conditions in inputs]
  if frozenset() in own:
    return common
  singles = {
    condition for conditions in own if len(conditions) == 1 for condition in conditions
  }
  if any(
    (op, index, 1 - output) in singles
    for op, index, output in singles
    if output is not None
  ):
    return common
  return common | {(merge, None, None)}
