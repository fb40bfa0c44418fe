# SPDX-License-Identifier: Apache-2.0
"""Computes a tensor of a step again in a wider dtype, from values that were fetched."""

from typing import Dict, Iterable, List, NamedTuple, Optional

import numpy as np

from mp_compat._tensorflow import tf
from mp_compat.graph import contexts
from mp_compat.monitoring import dataflow

Values = Dict[contexts.TensorKey, np.ndarray]

NARROW = (tf.float16, tf.bfloat16)
# Ops of Horovod, NCCL and TensorFlow whose results depend on other processes.
RECEIVING = ("Collective", "Horovod", "Nccl")
_WIDER = {
  tf.float32: {tf.float16: tf.float32, tf.bfloat16: tf.float32},
  tf.float64: {
    tf.float16: tf.float64,
    tf.bfloat16: tf.float64,
    tf.float32: tf.float64,
    tf.complex64: tf.complex128,
  },
}


class Chain(NamedTuple):
  """The last ops that compute a tensor.

  Attributes:
    ops: The ops, that of the tensor first.
    begin: What they read and do not compute.
  """

  ops: List[tf.Operation]
  begin: List[tf.Tensor]

  def narrow_ops(self) -> List[tf.Operation]:
    """Returns the ops that compute float16 or bfloat16 values."""
    return [op for op in self.ops if op.outputs[0].dtype.base_dtype in NARROW]

  def readers(self, tensor: tf.Tensor) -> List[tf.Operation]:
    """Returns the ops that compute from a tensor, in any order."""
    found: Dict[tf.Operation, None] = {}
    pending = [tensor]
    while pending:
      for op in pending.pop().consumers():
        if op in self.ops and op not in found:
          found[op] = None
          pending += op.outputs
    return list(found)


def chain(tensor: tf.Tensor, fetched: Values, depth: int) -> Chain:
  """Returns the ops that are at most `depth` in a row before a tensor, as far as they
  can be computed again from fetched values: floating-point functions of known values.
  """
  ops: Dict[tf.Operation, None] = {tensor.op: None}  # in order, each once
  last = [tensor.op]
  for _ in range(depth - 1):
    before: Dict[tf.Operation, None] = {}
    for op in last:
      before.update((value.op, None) for value in op.inputs)
    last = [op for op in before if op not in ops and _is_function(op, fetched)]
    ops.update((op, None) for op in last)
  begin: Dict[contexts.TensorKey, tf.Tensor] = {}
  for op in ops:
    for value in op.inputs:
      if value.op not in ops:
        begin[contexts.tensor_key(value)] = value
  return Chain(list(ops), list(begin.values()))


def _is_function(op: tf.Operation, fetched: Values) -> bool:
  """Returns whether an op computes floating-point values from such, and all that it
  reads was fetched.
  """
  if op.type in dataflow.HIDING or op.type in dataflow.ROUTING:
    return False
  if op.type.startswith(RECEIVING) or op.op_def.is_stateful:
    return False
  if any(contexts.tensor_key(value) not in fetched for value in op.inputs):
    return False
  # Random numbers and casts of integers have no such inputs.
  return _is_floating(op.inputs) and _is_floating(op.outputs)


def _is_floating(tensors: Iterable[tf.Tensor]) -> bool:
  """Returns whether one of the tensors has a floating or complex dtype."""
  return any(each.dtype.is_floating or each.dtype.is_complex for each in tensors)


def compute(
  tensor: tf.Tensor, ops: Chain, fetched: Values, dtype: tf.DType
) -> Optional[np.ndarray]:
  """Computes a tensor again on the CPU, in a graph of its own.

  Args:
    tensor: the tensor.
    ops: the ops to compute again.
    fetched: the values of what they read.
    dtype: float32 or float64: what is narrower is computed in it.

  Returns:
    The values; None if a value is missing, or TensorFlow has no such kernel.
  """
  if any(contexts.tensor_key(value) not in fetched for value in ops.begin):
    return None
  definition = tf.GraphDef()
  definition.versions.CopyFrom(tensor.graph.graph_def_versions)
  names: Dict[contexts.TensorKey, str] = {}
  feeds: Dict[str, np.ndarray] = {}
  for value in ops.begin:
    name = "value_{}".format(len(feeds))
    wide = _wider(value.dtype.base_dtype, dtype)
    placeholder = definition.node.add(name=name, op="Placeholder")
    placeholder.attr["dtype"].type = wide.as_datatype_enum
    key = contexts.tensor_key(value)
    names[key] = name + ":0"
    feeds[names[key]] = np.asarray(fetched[key]).astype(wide.as_numpy_dtype)
  for place, op in enumerate(ops.ops):
    for value in op.outputs:
      names[contexts.tensor_key(value)] = "op_{}:{}".format(place, value.value_index)
  for place, op in enumerate(ops.ops):
    inputs = [names[contexts.tensor_key(value)] for value in op.inputs]
    _add(definition, op, "op_{}".format(place), inputs, dtype)
  config = tf.ConfigProto(device_count={"GPU": 0})
  config.graph_options.rewrite_options.disable_meta_optimizer = True
  try:
    with tf.Graph().as_default() as graph:
      tf.import_graph_def(definition, name="")
      with tf.Session(graph=graph, config=config) as sess:
        return sess.run(names[contexts.tensor_key(tensor)], feeds)
  except (tf.errors.OpError, TypeError, ValueError):
    return None


def _add(
  definition: tf.GraphDef,
  op: tf.Operation,
  name: str,
  inputs: List[str],
  dtype: tf.DType,
) -> None:
  """Adds a copy of an op to a graph definition, with wider dtypes and other names;
  without its device, and without attributes of its graph.
  """
  node = definition.node.add()
  node.CopyFrom(op.node_def)
  del node.input[:]
  node.input.extend(inputs)
  node.name = name
  node.device = ""
  for attribute in node.attr.values():
    if attribute.HasField("type"):
      attribute.type = _wider_enum(attribute.type, dtype)
    for place, of_list in enumerate(attribute.list.type):
      attribute.list.type[place] = _wider_enum(of_list, dtype)
  for key in list(node.attr):
    if key.startswith("_"):
      del node.attr[key]


def _wider(dtype: tf.DType, wide: tf.DType) -> tf.DType:
  """Returns what to compute in instead of a dtype: `wide`, or its complex dtype; the
  dtype itself if it is no narrower.
  """
  return _WIDER[wide].get(dtype, dtype)


def _wider_enum(enum: int, wide: tf.DType) -> int:
  """Returns the same for the enums of dtypes."""
  return _wider(tf.as_dtype(enum), wide).as_datatype_enum
