# SPDX-License-Identifier: Apache-2.0
"""Follows floating-point values through a graph: what is computed from them, what
contains them, what adds them up.
"""

import collections
from typing import Dict, FrozenSet, Iterable, List, Optional, Set

from mp_compat._tensorflow import tf
from mp_compat.graph import contexts
from mp_compat.graph import runs
from mp_compat.graph.contexts import TensorKey
from mp_compat.graph.contexts import tensor_key

# Ops that only copy the values of their first input.
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
# Ops of branches and loops of control flow v1.
ROUTING = frozenset(["Enter", "Exit", "Merge", "NextIteration", "Switch"])
# Ops that compute no values, but copy those of some of their inputs.
MOVING = _COPYING.union(
  ["ConcatV2", "IdentityN", "Pack", "Split", "SplitV", "Unpack"],
  ROUTING - {"Exit"},
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


def forward_pass(loss: tf.Tensor, caller: str) -> List[tf.Operation]:
  """Returns the ops that a loss depends on, in the order in which they were built.

  Raises a ValueError, which names the function `caller`, if `loss` is not a tensor of a
  graph.
  """
  if not isinstance(loss, tf.Tensor) or not hasattr(loss, "graph"):
    raise ValueError(
      "loss must be a tensor of a graph, but got {!r}. Call {} in graph mode.".format(
        loss, caller
      )
    )
  executed = set(runs.executed_ops([loss]))
  return [op for op in loss.graph.get_operations() if op in executed]


def variable_read_by(op: tf.Operation) -> Optional[str]:
  """Returns the name of the variable that `op` reads, or reads rows of; None for other
  ops.
  """
  if op.type not in _READING:
    return None
  if not len(op.inputs):  # A reference variable is its own read.
    return op.name
  handle = op.inputs[0].op
  return handle.name


def readers(ends: Iterable[tf.Tensor]) -> Dict[TensorKey, List[tf.Tensor]]:
  """Searches back from `ends`, and returns for each tensor which others are computed
  from it.

  Args:
    ends: graph tensors. They, and the tensors that they derive from, are searched.

  Returns:
    By the key of a tensor, those of the searched tensors whose op reads it. Only
    tensors with values of a floating or complex dtype, and lists of them, are followed;
    the search does not pass a `StopGradient`.
  """
  found: Dict[TensorKey, List[tf.Tensor]] = collections.defaultdict(list)
  for tensor in contexts.search_back(ends, _followed_inputs):
    for value in _followed_inputs(tensor):
      found[tensor_key(value)].append(tensor)
  return found


def _followed_inputs(tensor: tf.Tensor) -> List[tf.Tensor]:
  """Returns the inputs through which a gradient can flow: not integers, for example."""
  if tensor.op.type == "StopGradient":
    return []
  followed = []
  for value in contexts.tensor_inputs(tensor):
    is_list = value.dtype == tf.variant
    if is_list or _is_measurable(value):
      followed.append(value)
  return followed


def descendants(
  read_by: Dict[TensorKey, List[tf.Tensor]], sources: Iterable[tf.Tensor]
) -> Dict[TensorKey, tf.Tensor]:
  """Returns the tensors computed from `sources`, by their keys.

  Args:
    read_by: what `readers` returns: only tensors that it has found are returned.
    sources: graph tensors, which are in the result only if they derive from others.
  """

  def readers_of(tensor: tf.Tensor) -> List[tf.Tensor]:
    return read_by.get(tensor_key(tensor), [])

  first: List[tf.Tensor] = []
  for source in sources:
    first += readers_of(source)
  derived = contexts.search_back(first, readers_of)
  return {tensor_key(tensor): tensor for tensor in derived}


def same_values(tensors: Iterable[tf.Tensor]) -> List[tf.Tensor]:
  """Returns tensors, each followed by those before it that contain the same values, as
  the float16 input of a cast.
  """
  return contexts.search_back(tensors, _copied)


def origin(tensor: tf.Tensor) -> tf.Tensor:
  """Returns the tensor in which the values of `tensor` were computed, before copies and
  casts; `tensor` itself if its op computes them.
  """
  return same_values([tensor])[-1]


def _copied(tensor: tf.Tensor) -> List[tf.Tensor]:
  """Returns a list of the tensor that the op of `tensor` copies or casts; [] if it
  computes new values.
  """
  if tensor.op.type in _COPYING or tensor.op.type == "Cast":
    return _containing(tensor)[:1]
  return []


def _containing(tensor: tf.Tensor) -> List[tf.Tensor]:
  """Returns the inputs that contain the values of a tensor, or parts or summands of
  them: those of its op, without integers. A cast to a smaller dtype contains none.
  """
  op = tensor.op
  if op.type in _COPYING:
    inputs = op.inputs[:1]
  elif op.type == "Cast" or op.type in MOVING or op.type in _SUMMING:
    inputs = op.inputs
  else:
    return []
  containing = [value for value in inputs if _is_measurable(value)]
  if op.type != "Cast":
    return containing
  return [value for value in containing if value.dtype.size <= tensor.dtype.size]


def _is_measurable(tensor: tf.Tensor) -> bool:
  """Returns whether a tensor has magnitudes: those of floating or complex values."""
  return tensor.dtype.is_floating or tensor.dtype.is_complex


def sources_of(
  tensors: Iterable[tf.Tensor],
) -> Dict[TensorKey, FrozenSet[Optional[tf.DType]]]:
  """Returns the dtypes that the values of tensors, their parts and summands have had.

      for each tensor, after the tensors that contain its values:
        dtypes = {its own dtype}
        dtypes |= {None} if a function or a loop computed it
        dtypes |= dtypes of each tensor that contains its values

  Args:
    tensors: graph tensors, in any order.

  Returns:
    The base dtypes by the keys of the tensors, and of all tensors that contain their
    values, parts or summands. None among them means that a function or a loop has
    computed some of the values, in any dtype.
  """
  found: Dict[TensorKey, FrozenSet[Optional[tf.DType]]] = {}
  pending = list(tensors)
  while pending:
    tensor = pending[-1]
    before = _containing(tensor)
    unknown = [value for value in before if tensor_key(value) not in found]
    if unknown:
      pending += unknown
      continue
    dtypes: Set[Optional[tf.DType]] = {tensor.dtype.base_dtype}
    if tensor.op.type in HIDING:
      dtypes.add(None)
    for value in before:
      dtypes |= found[tensor_key(value)]
    found[tensor_key(tensor)] = frozenset(dtypes)
    pending.pop()
  return found


def terms_of(tensor: tf.Tensor) -> List[tf.Tensor]:
  """Returns the tensors of which the values of a gradient are sums.

  Returns:
    The input of the sum, with all terms of each value; of a sum of sums (`AddN`, for a
    variable that several ops use), the inputs of all of them. [] if the values are no
    sums.
  """
  computed = origin(tensor)
  if computed.op.type in _TERM_BY_TERM:
    return [computed.op.inputs[0]]
  if computed.op.type != "AddN":
    return []
  terms = []
  for value in computed.op.inputs:
    summand = origin(value)
    if summand.op.type in _TERM_BY_TERM:
      summand = summand.op.inputs[0]
    terms.append(summand)
  return terms
