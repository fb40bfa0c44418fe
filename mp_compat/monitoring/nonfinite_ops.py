# SPDX-License-Identifier: Apache-2.0
"""Explains why an op has a result that is not finite: computes it again in float64."""

from typing import Dict, List, NamedTuple, Optional, Sequence

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
  """Why the result of an op is not finite.

  Attributes:
    cause: One of the constants above, such as `OVERFLOW`.
    text: What the op does, to follow its name, if the cause is `UNDEFINED`.
  """

  cause: str
  text: str = ""


def explain(
  tensor: tf.Tensor, values: np.ndarray, inputs: Sequence[Optional[np.ndarray]]
) -> Explanation:
  """Returns why some values of an op's result are not finite.

      no inputs                          -> INPUT; OVERFLOW for a float16 constant
      an input is unknown, or not finite -> UNKNOWN
      the op gets values of others       -> RECEIVED
      exact = the result, computed again in float64
      a value is not finite in either    -> UNDEFINED
      otherwise                          -> OVERFLOW

  Args:
    tensor: the result.
    values: its values.
    inputs: the values of each input of the op; None if they are not known.
  """
  op = tensor.op
  if not len(op.inputs):
    is_float16_constant = op.type == "Const" and tensor.dtype == tf.float16
    return Explanation(OVERFLOW if is_float16_constant else INPUT)
  finite = [each for each in inputs if each is not None and _is_finite(each).all()]
  if len(finite) < len(inputs):
    return Explanation(UNKNOWN)
  if op.type.startswith(_RECEIVING):
    return Explanation(RECEIVED)
  exact = _in_float64(op, finite, tensor.value_index)
  if exact is None or exact.shape != np.shape(values):
    return Explanation(UNKNOWN)
  undefined = ~_is_finite(values) & ~_is_finite(exact)
  if not undefined.any():
    return Explanation(OVERFLOW)
  return Explanation(UNDEFINED, _describe(op.type, finite))


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


def _in_float64(
  op: tf.Operation, inputs: Sequence[np.ndarray], index: int
) -> Optional[np.ndarray]:
  """Computes an op again in float64, on the CPU.

  Args:
    op: the op.
    inputs: the values of its inputs.
    index: the index of the output.

  Returns:
    The values of this output; None if TensorFlow has no such kernel.
  """
  definition = tf.GraphDef()
  definition.versions.CopyFrom(op.graph.graph_def_versions)
  feeds: Dict[str, np.ndarray] = {}
  names: List[str] = []
  for place, (tensor, values) in enumerate(zip(op.inputs, inputs)):
    dtype = tf.as_dtype(_wider(tensor.dtype.base_dtype.as_datatype_enum))
    name = "input_{}".format(place)
    placeholder = definition.node.add(name=name, op="Placeholder")
    placeholder.attr["dtype"].type = dtype.as_datatype_enum
    names.append(name)
    feeds[name + ":0"] = np.asarray(values).astype(dtype.as_numpy_dtype)
  _add_in_float64(definition, op, names)
  config = tf.ConfigProto(device_count={"GPU": 0})
  try:
    with tf.Graph().as_default() as graph:
      tf.import_graph_def(definition, name="")
      with tf.Session(graph=graph, config=config) as sess:
        return sess.run("exact:{}".format(index), feeds)
  except (tf.errors.OpError, TypeError, ValueError):
    return None


def _add_in_float64(
  definition: tf.GraphDef, op: tf.Operation, inputs: Sequence[str]
) -> None:
  """Adds a copy of an op to a graph definition, named "exact", with wider dtypes and
  the names of other inputs; without its device, and without attributes of its graph.
  """
  node = definition.node.add()
  node.CopyFrom(op.node_def)
  del node.input[:]
  node.input.extend(inputs)
  node.name = "exact"
  node.device = ""
  for attribute in node.attr.values():
    if attribute.HasField("type"):
      attribute.type = _wider(attribute.type)
  for key in list(node.attr):
    if key.startswith("_"):
      del node.attr[key]


def _wider(datatype: int) -> int:
  """Returns the enum of float64 or complex128 for that of a smaller such dtype; others
  as they are.
  """
  return _WIDER.get(datatype, datatype)
