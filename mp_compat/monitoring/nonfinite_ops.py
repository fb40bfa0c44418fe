# SPDX-License-Identifier: Apache-2.0
"""Explains why an op has a result that is not finite: computes it again in a wider
dtype, from its inputs and from what came before.
"""

from typing import Dict, List, NamedTuple, Sequence, Set

import numpy as np

from mp_compat._tensorflow import graph_internals
from mp_compat._tensorflow import tf
from mp_compat.monitoring import recomputation

# How many ops in a row before an op may have read a constant that decides.
_NEAR = 8
# The most of them to try, each with computations of its own.
_MOST_CONSTANTS = 16

# What ops do whose exact result is not finite, if an input is 0, or otherwise.
_AT_ZERO = {
  "Div": "divides by zero",
  "Inv": "divides by zero",
  "Log": "computes the logarithm of zero",
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
  "Pow": "computes a power of zero or of a negative number",
  "Rsqrt": "computes the root of a negative number",
  "Sqrt": "computes the root of a negative number",
}

# By dtype, the relative difference of numbers that round to the same, and the largest
# power of 2 below those that do not round to 0.
_INDISTINCT = {tf.float16: (2.0**-13, 2.0**-26), tf.bfloat16: (2.0**-10, 0.0)}

INPUT = "input"  # It has no inputs: a placeholder, an iterator, a constant.
OVERFLOW = "overflow"  # Its exact result is finite, but above the largest number.
UNDEFINED = "undefined"  # Its exact result is not finite either.
RECEIVED = "received"  # It has finite inputs, and gets values of other processes.
UNKNOWN = "unknown"  # It cannot be computed again.


class Explanation(NamedTuple):
  """Why the result of an op is not finite.

  Attributes:
    cause: One of the constants above, such as `OVERFLOW`.
    text: What the op does, to follow its name, if the cause is `UNDEFINED`.
    largest: The largest magnitude of the exact result, if the cause is `OVERFLOW`; inf
      if it is not known.
    finite_in: "float32" or "float64" if the cause is `UNDEFINED`, but the result is
      finite when `ops` compute in it; otherwise "".
    ops: The ops to compute in a wider dtype, in float16 or bfloat16 now for "float32".
    constants: The numbers in float16 and bfloat16 constants, float64, by name: others
      that round to the same make the result finite when `with_constants` compute in
      float32.
    with_constants: These constants, and ops that compute in float16 or bfloat16 now.
    begin: What the ops read that were computed again in float32, if the cause is
      `UNDEFINED`, and the result is not finite then.
  """

  cause: str
  text: str = ""
  largest: float = np.inf
  finite_in: str = ""
  ops: Sequence[tf.Operation] = ()
  constants: Dict[str, np.ndarray] = {}
  with_constants: Sequence[tf.Operation] = ()
  begin: Sequence[tf.Tensor] = ()


def explain(
  again: recomputation.Recomputation, forward: Set[tf.Operation]
) -> Explanation:
  """Returns why some values of an op's result are not finite.

      no inputs                          -> INPUT
      an input is unknown, or not finite -> UNKNOWN
      the op gets values of others       -> RECEIVED
      the op has a state, or effects     -> UNKNOWN
      exact = the result, computed again in float64 from its inputs
      a value is not finite in either    -> UNDEFINED: search for the rounding
      otherwise                          -> OVERFLOW

  Args:
    again: computes the result.
    forward: the ops of the forward pass.
  """
  op = again.tensor.op
  if again.is_input():
    return Explanation(INPUT)
  inputs = [again.value_of(value) for value in op.inputs]
  finite = [
    each for each in inputs if each is not None and recomputation.is_finite(each).all()
  ]
  if len(finite) < len(inputs):
    return Explanation(UNKNOWN)
  if op.type.startswith(recomputation.RECEIVING):
    return Explanation(RECEIVED)
  if recomputation.has_effects(op):
    return Explanation(UNKNOWN)
  exact = again.compute(tf.float64, again.chain(1))
  values = again.value_of(again.tensor)
  if exact is None or values is None or exact.shape != np.shape(values):
    return Explanation(UNKNOWN)
  undefined = ~recomputation.is_finite(values) & ~recomputation.is_finite(exact)
  if undefined.any():
    return _search_rounding(again, _describe(op.type, finite), forward)
  return Explanation(OVERFLOW, largest=float(np.abs(exact).max(initial=0)))


def _search_rounding(
  again: recomputation.Recomputation, text: str, forward: Set[tf.Operation]
) -> Explanation:
  """Returns which rounding makes a result undefined.

  it is finite if the last ops compute in float32   -> "float32", these ops
  or if a constant is another number that rounds to it -> the constants
  it is finite if the last ops compute in float64   -> "float64", these ops
  otherwise                                         -> what it was computed from
  """
  undefined = Explanation(UNDEFINED, text)
  deepest = again.deepest(tf.float32)
  found = again.shortest(tf.float32, deepest)
  if found is not None and found.narrow_ops():
    return undefined._replace(finite_in="float32", ops=found.narrow_ops())
  undefined = _with_constants(undefined, again, deepest, forward)
  found = again.shortest(tf.float64, again.deepest(tf.float64))
  if found is not None:
    return undefined._replace(finite_in="float64", ops=found.ops)
  return undefined._replace(begin=again.chain(deepest).begin)


def _with_constants(
  undefined: Explanation,
  again: recomputation.Recomputation,
  deepest: int,
  forward: Set[tf.Operation],
) -> Explanation:
  """Adds the constants near an op for each of which another number, that rounds to the
  same in its dtype, makes the result finite in float32.

  `1e-8` is 0 in a float16 graph, and `1 - 1e-7` is 1.

  Args:
    undefined: the explanation without them.
    again: computes the result.
    deepest: what `again.deepest(tf.float32)` returns.
    forward: the ops of the forward pass.
  """
  near = again.chain(min(_NEAR, deepest))
  constants: Dict[str, np.ndarray] = {}
  ops: List[tf.Operation] = []
  for constant in rounded_constants(near.begin, forward)[:_MOST_CONSTANTS]:
    values = np.asarray(again.value_of(constant)).astype(np.float64)
    for numbers in _numbers_that_round_to(constant.dtype.base_dtype, values):
      changed = again.with_value(constant, numbers)
      if not changed.is_finite_in(tf.float32, near):
        continue
      found = changed.shortest(tf.float32, deepest)
      if found is not None:
        constants[constant.op.name] = np.unique(values)
        ops += [constant.op, *found.narrow_ops()]
  return undefined._replace(constants=constants, with_constants=ops)


def rounded_constants(
  tensors: Sequence[tf.Tensor], forward: Set[tf.Operation]
) -> List[tf.Tensor]:
  """Returns the constants of the program among tensors, of a dtype in which others
  round to them: those of TensorFlow's own gradients are exact.
  """
  return [
    tensor
    for tensor in tensors
    if tensor.op.type == "Const"
    and tensor.dtype.base_dtype in _INDISTINCT
    and (tensor.op in forward or graph_internals.is_in_custom_gradient(tensor.op))
  ]


def _numbers_that_round_to(dtype: tf.DType, values: np.ndarray) -> List[np.ndarray]:
  """Returns numbers farther from and nearer to zero than `values`, float64, that a
  dtype of `_INDISTINCT` does not distinguish from them; instead of zeros, such of their
  sign.
  """
  relative, of_zero = _INDISTINCT[dtype]
  instead_of_zero = np.copysign(of_zero, values)
  return [
    np.where(values == 0, instead_of_zero, values * factor)
    for factor in (1 + relative, 1 - relative)
  ]


def _describe(op_type: str, inputs: Sequence[np.ndarray]) -> str:
  """Returns what an op does whose result is not finite in float64 either."""
  has_zeros = any(np.any(np.equal(each, 0)) for each in inputs)
  if has_zeros and op_type in _AT_ZERO:
    return _AT_ZERO[op_type]
  beyond_float64 = "is not finite in float64 either"
  if op_type == "Pow" and np.greater(inputs[0], 0).all():
    return beyond_float64
  return _ELSEWHERE.get(op_type, beyond_float64)
