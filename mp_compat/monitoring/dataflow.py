# SPDX-License-Identifier: Apache-2.0
"""Follows floating-point values through a graph: what is computed from them, what
contains them, what adds them up.
"""

import collections
from typing import Dict, FrozenSet, Iterable, List, Optional

from mp_compat._tensorflow import tf
from mp_compat.graph import contexts
from mp_compat.graph.contexts import TensorKey
from mp_compat.graph.contexts import tensor_key

# Ops that only copy the values of their first input, and ops that copy some of their
# inputs' values.
_COPYING = frozenset(
  [
    "DepthToSpace",
    "ExpandDims",
    "Identity",
    "Reshape",
    "SpaceToDepth",
    "Squeeze",
    "Transpose",
  ]
)
MOVING = _COPYING.union(
  [
    "ConcatV2",
    "Enter",
    "IdentityN",
    "Merge",
    "NextIteration",
    "Pack",
    "Split",
    "SplitV",
    "Switch",
    "Unpack",
  ]
)
# Ops that add up gradients: of a variable that several ops use, and of one that is
# broadcast.
_SUMMING = frozenset(["AddN", "Sum"])
# ops whose results are sums of values of their first input
_TERM_BY_TERM = ("BiasAddGrad", "Sum")
# Ops that read a variable, or rows of it.
_READING = frozenset(
  ["ReadVariableOp", "ResourceGather", "ResourceGatherNd", "Variable", "VariableV2"]
)
# Ops whose results are computed in a loop (control flow v1), in a function, or in a
# conditional or loop of functions.
HIDING = frozenset(
  ["Exit", "PartitionedCall", "StatefulPartitionedCall", "SymbolicGradient"]
).union(["Case", "If", "StatelessCase", "StatelessIf", "StatelessWhile", "While"])


def variable_read_by(op: tf.Operation) -> Optional[str]:
  """Returns the name of the variable that an op reads, or reads rows of; None for other
  ops.
  """
  return (
    (op.inputs[0].op if len(op.inputs) else op).name if op.type in _READING else None
  )


def readers(ends: Iterable[tf.Tensor]) -> Dict[TensorKey, List[tf.Tensor]]:
  """Returns the tensors computed from each tensor that `ends` derive from, not by
  integers or stopped gradients.
  """
  found: Dict[TensorKey, List[tf.Tensor]] = collections.defaultdict(list)
  for tensor in contexts.search_back(ends, _followed_inputs):
    for value in _followed_inputs(tensor):
      found[tensor_key(value)].append(tensor)
  return found


def _followed_inputs(tensor: tf.Tensor) -> List[tf.Tensor]:
  inputs = [] if tensor.op.type == "StopGradient" else contexts.tensor_inputs(tensor)
  return [
    value for value in inputs if _is_measurable(value) or value.dtype == tf.variant
  ]


def descendants(
  read_by: Dict[TensorKey, List[tf.Tensor]], sources: Iterable[tf.Tensor]
) -> Dict[TensorKey, tf.Tensor]:
  """Returns the tensors computed from `sources`, by their keys."""

  def readers_of(tensor: tf.Tensor) -> List[tf.Tensor]:
    return read_by.get(tensor_key(tensor), [])

  first = [reader for source in sources for reader in readers_of(source)]
  return {
    tensor_key(tensor): tensor for tensor in contexts.search_back(first, readers_of)
  }


def same_values(tensors: Iterable[tf.Tensor]) -> List[tf.Tensor]:
  """Returns tensors, each followed by those before it that contain the same values, as
  the float16 input of a cast.
  """
  return contexts.search_back(tensors, _copied)


def _copied(tensor: tf.Tensor) -> List[tf.Tensor]:
  return (
    _containing(tensor)[:1]
    if tensor.op.type in _COPYING or tensor.op.type == "Cast"
    else []
  )


def _containing(tensor: tf.Tensor) -> List[tf.Tensor]:
  """Returns the inputs of the op of a tensor that contain its values, or parts or
  summands of it.
  """
  op = tensor.op
  if op.type == "Cast":
    return [
      value
      for value in op.inputs
      if _is_measurable(value) and value.dtype.size <= tensor.dtype.size
    ]
  inputs = (
    op.inputs[:1]
    if op.type in _COPYING
    else op.inputs
    if op.type in MOVING.union(_SUMMING)
    else ()
  )
  return [value for value in inputs if _is_measurable(value)]


def _is_measurable(tensor: tf.Tensor) -> bool:
  return tensor.dtype.is_floating or tensor.dtype.is_complex


def sources_of(
  tensors: Iterable[tf.Tensor],
) -> Dict[TensorKey, FrozenSet[Optional[tf.DType]]]:
  """Returns the dtypes that the values of tensors, their parts and summands have had,
  by the keys of all these tensors.

  The dtypes contain None if a function or a loop has computed any of them.
  """
  found: Dict[TensorKey, FrozenSet[Optional[tf.DType]]] = {}
  pending = list(tensors)
  while pending:
    tensor = pending[-1]
    before = _containing(tensor)
    unknown = [value for value in before if tensor_key(value) not in found]
    pending += unknown
    if not unknown:
      own = [tensor.dtype.base_dtype] + [None] * (tensor.op.type in HIDING)
      found[tensor_key(pending.pop())] = frozenset(own).union(
        *[found[tensor_key(value)] for value in before]
      )
  return found


def terms_of(tensor: tf.Tensor) -> List[tf.Tensor]:
  """Returns the tensors of which the values of a gradient are sums; [] if they are no
  sums.
  """
  last = same_values([tensor])[-1]
  if last.op.type in _TERM_BY_TERM:
    return list(last.op.inputs[:1])
  added = (
    [same_values([value])[-1] for value in last.op.inputs]
    if last.op.type == "AddN"
    else []
  )
  return [
    value.op.inputs[0] if value.op.type in _TERM_BY_TERM else value for value in added
  ]
