# SPDX-License-Identifier: Apache-2.0
"""Lists the matrix products and convolutions of a model that compute in float32, and
why.
"""

from typing import Dict, FrozenSet, List, NamedTuple, Set, Tuple

from mp_compat._tensorflow import tf
from mp_compat.monitoring import dataflow

# The ops that Tensor Cores compute. Those named after a gradient are the forward pass
# of transposed convolutions.
_PRODUCTS = frozenset(
  """
  BatchMatMul BatchMatMulV2 BatchMatMulV3 BlockLSTM BlockLSTMV2 Conv2D
  Conv2DBackpropInput Conv3D Conv3DBackpropInputV2 CudnnRNN CudnnRNNV2 CudnnRNNV3
  DepthwiseConv2dNative DepthwiseConv2dNativeBackpropInput Einsum GRUBlockCell
  LSTMBlockCell MatMul
  """.split()
)
# Ops that begin with no values of the model: constants and empty lists.
_EMPTY = frozenset(["Const", "EmptyTensorList", "TensorArrayV3", "TensorListReserve"])

# The kinds of sources, of which the lowest is named.
_INPUT, _VARIABLE, _CONSTANT = range(3)


class _Source(NamedTuple):
  """Where float32 values enter the graph; sorted by kind, then by description.

  Attributes:
    kind: `_INPUT`, also for a cast; `_VARIABLE`; `_CONSTANT`, also for a mask.
    description: The name and the type of the op, such as "x (Placeholder)".
  """

  kind: int
  description: str


class Float32Op(NamedTuple):
  """A matrix product or a convolution that computes in float32.

  Attributes:
    name: The name of the op.
    type: Its type, such as "MatMul".
    sources: Where float32 values enter the graph that the op computes with, such as "x
      (Placeholder)". Inputs and casts are named if one contributes; otherwise
      variables, or else constants.
  """

  name: str
  type: str
  sources: Tuple[str, ...]


def float32_ops(loss: tf.Tensor) -> List[Float32Op]:
  """Returns the matrix products and convolutions of the forward pass that compute in
  float32, and why.

  Tensor Cores compute in float16 only what gets float16 inputs. One input that was not
  cast, or a layer that casts back to float32, makes all layers after it compute in
  float32, without an error. The gradients of an op compute in its dtype.

      for op in mp_compat.float32_ops(loss):
        print(op.name, "computes in float32 because of", ", ".join(op.sources))

  Args:
    loss: a tensor of a graph, of any shape and dtype. The ops that it depends on are
      the forward pass.

  Returns:
    A `Float32Op` for each such op, in the order in which they were built: products of
    matrices (also `tf.einsum`), convolutions (also transposed, depthwise and 3D ones)
    and fused recurrent cells. Ops in the body of a function, among them those of loops
    of control flow v2, are not listed.

  Raises:
    ValueError: If `loss` is not a tensor of a graph.
  """
  products = []
  for op in dataflow.forward_pass(loss, "float32_ops"):
    if op.type in _PRODUCTS and _has_float32_input(op):
      products.append(op)
  sources = _sources(products)
  listed = []
  for op in products:
    descriptions = [source.description for source in sorted(sources[op])]
    listed.append(Float32Op(op.name, op.type, tuple(descriptions)))
  return listed


def _sources(ends: List[tf.Operation]) -> Dict[tf.Operation, FrozenSet[_Source]]:
  """Returns the sources of the lowest kind of ops, and of all ops before them.

      for each op, after those of its inputs:
        sources of op = op itself, if it has no float32 inputs
        sources of op = those of the lowest kind of all its inputs, otherwise
      again, until nothing changes: the body of a loop is its own input

  Args:
    ends: the ops to begin with.

  Returns:
    The sources by op: all of one kind, `_INPUT` if one of them is of it.
  """
  found: Dict[tf.Operation, FrozenSet[_Source]] = {}
  in_order = _inputs_first(ends)
  is_complete = False
  while not is_complete:
    is_complete = True
    for op in in_order:
      sources = _sources_of_inputs(op, found)
      if sources != found.get(op, frozenset()):
        found[op] = sources
        is_complete = False
  return found


def _sources_of_inputs(
  op: tf.Operation, found: Dict[tf.Operation, FrozenSet[_Source]]
) -> FrozenSet[_Source]:
  """Returns the sources of an op, as far as `found` has those of its inputs."""
  inputs = _inputs_with_float32(op)
  if not inputs:
    return frozenset([_describe(op)])
  sources: Set[_Source] = set()
  for tensor in inputs:
    sources.update(found.get(tensor.op, ()))
  lowest = min((source.kind for source in sources), default=None)
  return frozenset(source for source in sources if source.kind == lowest)


def _inputs_first(ends: List[tf.Operation]) -> List[tf.Operation]:
  """Returns ops and those that compute their float32 inputs, each after its inputs.

  The order of creation is another: TensorFlow makes the Switch for an input of a
  branch, and the NextIteration of a loop, after the ops that read them. A loop is cut
  anywhere.
  """
  found: Dict[tf.Operation, None] = {}  # in order, each once
  visited: Set[tf.Operation] = set()
  pending = list(ends)
  while pending:
    op = pending[-1]
    missing = []
    if op not in visited:
      visited.add(op)
      inputs = [tensor.op for tensor in _inputs_with_float32(op)]
      missing = [each for each in inputs if each not in visited]
    if missing:
      pending += missing
    else:
      found[pending.pop()] = None
  return list(found)


def _has_float32_input(op: tf.Operation) -> bool:
  dtypes = [tensor.dtype.base_dtype for tensor in op.inputs]
  return tf.float32 in dtypes


def _inputs_with_float32(op: tf.Operation) -> List[tf.Tensor]:
  """Returns the float32 inputs of an op, and the lists, which may have such values."""
  followed = []
  for tensor in op.inputs:
    if tensor.dtype.base_dtype in (tf.float32, tf.variant):
      followed.append(tensor)
  return followed


def _describe(op: tf.Operation) -> _Source:
  """Returns an op without float32 inputs as a source."""
  variable = dataflow.variable_read_by(op)
  if variable:
    return _Source(_VARIABLE, "{} (variable)".format(variable))
  if op.type == "Cast":
    before = op.inputs[0]
    is_mask = before.dtype == tf.bool  # such as that of dropout
    kind = _INPUT
    if is_mask or before.op.type == "Const":
      kind = _CONSTANT
    return _Source(kind, "{} (Cast from {})".format(op.name, before.dtype.name))
  kind = _CONSTANT if op.type in _EMPTY else _INPUT
  return _Source(kind, "{} ({})".format(op.name, op.type))
