# SPDX-License-Identifier: Apache-2.0
"""Lists the ops of a model that compute in float16, but are likely to overflow."""

from typing import Iterable, List, NamedTuple

from mp_compat._tensorflow import tf
from mp_compat.graph import contexts
from mp_compat.graph import runs
from mp_compat.monitoring import dataflow

# In float16, exp(x) is inf from x = 11.1 on, and x * x from x = 256 on.
_EXPONENTIALS = frozenset(["Cosh", "Exp", "Expm1", "Sinh"])
_NORMS = frozenset(["EuclideanNorm", "L2Loss"])
_REDUCTIONS = frozenset(["Mean", "Sum"])
_SQUARES = frozenset(["Square", "SquaredDifference"])


class Float16Op(NamedTuple):
  """An op that computes in float16 and is likely to overflow.

  Attributes:
    name: the name of the op.
    type: its type, such as "Exp".
  """

  name: str
  type: str


def float16_ops(loss: tf.Tensor) -> List[Float16Op]:
  """Returns the ops of the forward pass to compute in float32, which compute in float16.

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
    ValueError: `loss` is not a tensor of a graph.

  Source: the lists of ops that compute in float32 of `torch.autocast` and of
  TensorFlow's graph rewrite (`auto_mixed_precision`).
  """
  if not isinstance(loss, tf.Tensor) or not hasattr(loss, "graph"):
    raise ValueError(
      "loss must be a tensor of a graph, but got {!r}. Call float16_ops in graph "
      "mode.".format(loss)
    )
  executed = set(runs.executed_ops([loss]))
  in_order = [op for op in loss.graph.get_operations() if op in executed]
  return [Float16Op(op.name, op.type) for op in likely_to_overflow(in_order)]


def likely_to_overflow(ops: Iterable[tf.Operation]) -> List[tf.Operation]:
  """Returns those of some ops that `float16_ops` lists."""
  return [op for op in ops if _is_in_float16(op) and _may_be_large(op)]


def _is_in_float16(op: tf.Operation) -> bool:
  results = op.outputs[:1] if len(op.inputs) else []
  return any(result.dtype.base_dtype == tf.float16 for result in results)


def _may_be_large(op: tf.Operation) -> bool:
  if op.type in _EXPONENTIALS or op.type in _NORMS:
    return True
  if op.type != "Cast":
    return _is_reduction_of_squares(op)
  # `tf.nn.moments` computes in float32, and returns a float16 variance.
  return _is_reduction_of_squares(dataflow.same_values([op.inputs[0]])[-1].op)


def _is_reduction_of_squares(op: tf.Operation) -> bool:
  if op.type not in _REDUCTIONS:
    return False
  squares = dataflow.same_values([op.inputs[0]])[-1].op
  if squares.type != "Mul":
    return squares.type in _SQUARES
  first, second = squares.inputs
  return contexts.tensor_key(first) == contexts.tensor_key(second)
