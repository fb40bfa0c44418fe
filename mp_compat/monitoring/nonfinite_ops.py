# SPDX-License-Identifier: Apache-2.0
"""Explains why an op has a result that is not finite: computes it again in float64."""

from typing import List, NamedTuple, Optional, Sequence

import numpy as np

from mp_compat._tensorflow import tf

# Ops of Horovod, NCCL and TensorFlow whose results depend on other processes.
_RECEIVING = ("Collective", "Horovod", "Nccl")

_WIDER = {
  tf.float16.as_datatype_enum: tf.float64.as_datatype_enum,
  tf.bfloat16.as_datatype_enum: tf.float64.as_datatype_enum,
  tf.float32.as_datatype_enum: tf.float64.as_datatype_enum,
  tf.complex64.as_datatype_enum: tf.complex128.as_datatype_enum,
}

# What ops do whose exact result is not finite, if an input is 0, or otherwise.
_AT_ZERO = {
  "Div": "divides by zero",
  "Inv": "divides by zero",
  "Log": "computes the logarithm of zero",
  "Pow": "computes a power of zero that is not finite",
  "RealDiv": "divides by zero",
  "Reciprocal": "divides by zero",
  "ReciprocalGrad": "divides by zero",
  "Rsqrt": "computes the reciprocal root of zero",
  "RsqrtGrad": "computes the gradient of a reciprocal root at zero",
  "SqrtGrad": "computes the gradient of a root at zero",
  "Xdivy": "divides by zero",
}
_ELSEWHERE = {
  "Acos": "computes an arc cosine outside of [-1, 1]",
  "Asin": "computes an arc sine outside of [-1, 1]",
  "Atanh": "computes an inverse hyperbolic tangent outside of (-1, 1)",
  "Log": "computes the logarithm of a negative number",
  "Log1p": "computes the logarithm of zero or of a negative number",
  "Pow": "computes a power that is not a real number",
  "Rsqrt": "computes the root of a negative number",
  "Sqrt": "computes the root of a negative number",
}

INPUT = "input"  # It has no inputs: a placeholder, an iterator.
OVERFLOW = "overflow"  # Its exact result is finite, but above the largest number.
UNDEFINED = "undefined"  # Its exact result is not finite either.
RECEIVED = "received"  # It has finite inputs, and gets values of other processes.
UNKNOWN = "unknown"  # It cannot be computed again.


class Explanation(NamedTuple):
  """Why the result of an op is not finite."""

  cause: str  # one of the constants above
  text: str = ""  # what the op does, if the cause is UNDEFINED


def explain(
  tensor: tf.Tensor, values: np.ndarray, inputs: Sequence[Optional[np.ndarray]]
) -> Explanation:
  """Returns why some values of an op's result are not finite.

  Args:
    tensor: the result.
    values: its values.
    inputs: the values of each input of the op; None if they are not known.
  """
  op = tensor.op
  if not len(op.inputs):
    is_constant = op.type == "Const" and tensor.dtype == tf.float16
    return Explanation(OVERFLOW if is_constant else INPUT)
  known = [each for each in inputs if each is not None]
  if len(known) < len(inputs) or not all(_is_finite(each).all() for each in known):
    return Explanation(UNKNOWN)
  if op.type.startswith(_RECEIVING):
    return Explanation(RECEIVED)
  exact = in_float64(op, known, tensor.value_index)
  if exact is None or exact.shape != np.shape(values):
    return Explanation(UNKNOWN)
  undefined = ~_is_finite(values) & ~_is_finite(exact)
  if not undefined.any():
    return Explanation(OVERFLOW)
  return Explanation(UNDEFINED, _describe(op.type, known))


def _describe(op_type: str, inputs: Sequence[np.ndarray]) -> str:
  """Returns what an op does whose result is not finite in float64 either."""
  has_zeros = any(np.any(np.equal(each, 0)) for each in inputs)
  if has_zeros and op_type in _AT_ZERO:
    return _AT_ZERO[op_type]
  return _ELSEWHERE.get(op_type, "is not finite in float64 either")


def _is_finite(values: np.ndarray) -> np.ndarray:
  """Returns whether values of any dtype are finite."""
  values = np.asarray(values)
  if values.dtype.kind in "fc":
    return np.isfinite(values)
  if values.dtype.kind in "iub":
    return np.ones(values.shape, bool)
  return np.isfinite(values.astype(np.float32))  # bfloat16


def in_float64(
  op: tf.Operation, inputs: Sequence[np.ndarray], index: int
) -> Optional[np.ndarray]:
  """Returns an output of an op, computed in float64 on the CPU from values of its
  inputs; None if TensorFlow has no such kernel.
  """
  definition = tf.GraphDef()
  definition.versions.CopyFrom(op.graph.graph_def_versions)
  feeds = {}
  names: List[str] = []
  for place, (tensor, values) in enumerate(zip(op.inputs, inputs)):
    dtype = tf.as_dtype(_wider(tensor.dtype.base_dtype.as_datatype_enum))
    name = "input_{}".format(place)
    node = definition.node.add(name=name, op="Placeholder")
    node.attr["dtype"].type = dtype.as_datatype_enum
    names.append(name)
    feeds[name + ":0"] = np.asarray(values).astype(dtype.as_numpy_dtype)
  node = definition.node.add()
  node.CopyFrom(op.node_def)
  del node.input[:]
  node.input.extend(names)
  node.name, node.device = "exact", ""
  for attribute in node.attr.values():
    if attribute.HasField("type"):
      attribute.type = _wider(attribute.type)
  for key in [key for key in node.attr if key.startswith("_")]:
    del node.attr[key]
  try:
    with tf.Graph().as_default() as graph:
      tf.import_graph_def(definition, name="")
      with tf.Session(
        graph=graph, config=tf.ConfigProto(device_count={"GPU": 0})
      ) as sess:
        return sess.run("exact:{}".format(index), feeds)
  except (tf.errors.OpError, TypeError, ValueError):
    return None


def _wider(datatype: int) -> int:
  return _WIDER.get(datatype, datatype)
