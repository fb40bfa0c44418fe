# SPDX-License-Identifier: Apache-2.0
"""Lists the matrix products and convolutions of a model that compute in float32, and
why.
"""

from typing import Dict, FrozenSet, List, NamedTuple, Tuple

from mp_compat._tensorflow import tf
from mp_compat.graph import graphs
from mp_compat.monitoring import dataflow

# The ops that Tensor Cores compute. Those named after a gradient are the forward pass
# of transposed convolutions.
_PRODUCTS = frozenset(
  """
  BatchMatMul BatchMatMulV2 BatchMatMulV3 BlockLSTM BlockLSTMV2 Conv2D Conv2DBackpropInput Conv3D Conv3DBackpropInputV2
  CudnnRNN CudnnRNNV2 CudnnRNNV3 DepthwiseConv2dNative DepthwiseConv2dNativeBackpropInput Einsum GRUBlockCell
  LSTMBlockCell MatMul
  """.split()
)


class Float32Op(NamedTuple):
  """A matrix product or a convolution that computes in float32.

  Attributes:
    name: the name of the op.
    type: its type, such as "MatMul".
    sources: where float32 values enter the graph that the op computes with, such as "x
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
    ValueError: `loss` is not a tensor of a graph.
  """
  if not isinstance(loss, tf.Tensor) or not hasattr(loss, "graph"):
    raise ValueError(
      "loss must be a tensor of a graph, but got {!r}. Call float32_ops in graph "
      "mode.".format(loss)
    )
  ops = set(graphs.executed_ops([loss]))
  in_order = [op for op in loss.graph.get_operations() if op in ops]
  sources = _sources(in_order)
  return [
    Float32Op(op.name, op.type, tuple(name for _, name in sorted(sources[op])))
    for op in in_order
    if op.type in _PRODUCTS and _float32_inputs(op)
  ]


def _sources(
  in_order: List[tf.Operation],
) -> Dict[tf.Operation, FrozenSet[Tuple[int, str]]]:
  """Returns the kinds and names of the sources of each op, those of its lowest kind;
  ops are in order of creation.
  """
  found: Dict[tf.Operation, FrozenSet[Tuple[int, str]]] = {}
  is_complete = False
  while not is_complete:  # again if an input is created after its op, as in a loop
    is_complete = True
    for op in in_order:
      inputs = _float32_inputs(op)
      sources = (
        [source for tensor in inputs for source in found.get(tensor.op, ())]
        if inputs
        else [_describe(op)]
      )
      lowest, _ = min(sources)
      own = frozenset(source for source in sources if source[0] == lowest)
      if own != found.get(op):
        found[op], is_complete = own, False
  return found


def _float32_inputs(op: tf.Operation) -> List[tf.Tensor]:
  return [tensor for tensor in op.inputs if tensor.dtype.base_dtype == tf.float32]


def _describe(source: tf.Operation) -> Tuple[int, str]:
  """Returns the kind of a source (0: an input or a cast, 1: a variable, 2: a constant
  or a mask) and its name.
  """
  variable = dataflow.variable_read_by(source)
  if variable:
    return 1, "{} (variable)".format(variable)
  if source.type == "Cast":
    dtype = source.inputs[0].dtype
    # A mask, such as that of dropout, is cast from bool.
    return 2 if dtype == tf.bool else 0, "{} (Cast from {})".format(
      source.name, dtype.name
    )
  return 2 if source.type == "Const" else 0, "{} ({})".format(source.name, source.type)
