# SPDX-License-Identifier: Apache-2.0
"""Lists the ops of a model that compute in float16, but are likely to overflow."""

from typing import Iterable, List, NamedTuple

from mp_compat._tensorflow import tf
from mp_compat.graph import contexts
from mp_compat.monitoring import dataflow

# In float16, exp(x) is inf from x = 11.1 on, and x * x from x = 256 on.
_EXPONENTIALS = frozenset(["Cosh", "Exp", "Expm1", "Sinh"])
_NORMS = frozenset(["EuclideanNorm", "L2Loss"])
_REDUCTIONS = frozenset(["Mean", "Sum"])
_SQUARES = frozenset(["Square", "SquaredDifference"])


class Float16Op(NamedTuple):
  """An op that computes in float16 and is likely to overflow.

  Attributes:
    name: The name of the op.
    type: Its type, such as "Exp".
  """

  name: str
  type: str


def float16_ops(loss: tf.Tensor) -> List[Float16Op]:
  """Returns the ops of the forward pass that compute in float16, but should in float32.

  These are exponentials, which are inf from 11.1 on, and sums, means and norms of
  squares, which are inf from values of 256 on: of a layer normalization, the variance
  becomes inf and the result 0, so that the loss stands still, without an error. Cast
  their inputs to float32, and their results back.

      for op in mp_compat.float16_ops(loss):
        print("Compute", op.name, "in float32")

  Args:
    loss: a tensor of a graph, of any shape and dtype. The ops that it depends on are
      the forward pass.

  Returns:
    A `Float16Op` for each such op, in the order in which they were built. Ops in the
    body of a function, among them those of control flow v2, are not listed.

  Raises:
    ValueError: If `loss` is not a tensor of a graph.

  Source: the lists of ops that compute in float32 of `torch.autocast` and of
  TensorFlow's graph rewrite (`auto_mixed_precision`).
  """
  listed = likely_to_overflow(dataflow.forward_pass(loss, "float16_ops"))
  return [Float16Op(name=op.name, type=op.type) for op in listed]


def likely_to_overflow(ops: Iterable[tf.Operation]) -> List[tf.Operation]:
  """Returns those of some ops that `float16_ops` lists, in the same order."""
  return [op for op in ops if _is_in_float16(op) and _may_be_large(op)]


def _is_in_float16(op: tf.Operation) -> bool:
  """Returns whether an op computes a float16 result; False for constants and inputs."""
  if not len(op.inputs) or not len(op.outputs):
    return False
  return op.outputs[0].dtype.base_dtype == tf.float16


def _may_be_large(op: tf.Operation) -> bool:
  """Returns whether the result of an op grows with the square or the exponential of
  values, so that it leaves the range of float16 early.
  """
  if op.type in _EXPONENTIALS or op.type in _NORMS:
    return True
  if op.type != "Cast":
    return _is_reduction_of_squares(op)
  return _is_variance(dataflow.origin(op.inputs[0]).op)


def _is_variance(op: tf.Operation) -> bool:
  """Returns whether an op computes the variance of `tf.nn.moments`, which is computed
  in float32 and returned in float16.

  It is a mean of squares; from TensorFlow 2.22 on, that minus another one, and at least
  0.
  """
  if op.type == "Maximum":
    op = op.inputs[0].op
  if op.type == "Sub":
    op = op.inputs[0].op
  return _is_reduction_of_squares(op)


def _is_reduction_of_squares(op: tf.Operation) -> bool:
  """Returns whether an op is a sum or a mean of squares, also of casts or reshapes of
  them: `x * x` counts, too.
  """
  if op.type not in _REDUCTIONS:
    return False
  squares = dataflow.origin(op.inputs[0]).op
  if squares.type in _SQUARES:
    return True
  if squares.type != "Mul":
    return False
  first, second = squares.inputs
  return contexts.tensor_key(first) == contexts.tensor_key(second)
