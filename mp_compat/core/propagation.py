# SPDX-License-Identifier: Apache-2.0
"""Ops that propagate values that are not finite: if an input contains inf or NaN, so does the output.

The finite check of such an op's output is then a check of the input, too. `tests/core/test_propagation.py` runs every
entry with TensorFlow's graph optimizers, which replace a product with constant zeros, and `x - x`, by zeros: there, inf
and NaN are lost. Ops that the tables lack may hide an overflow: minimum, maximum, select, sign, comparisons, slices.
"""

from typing import Dict, List, Tuple

import numpy as np

from mp_compat._tensorflow import tf

# Ops of which each output value is an input value, or a sum of input values.
_COPIES = frozenset(["ExpandDims", "Identity", "Reshape", "Squeeze", "Transpose"])
_SUMS = frozenset(["Add", "AddN", "AddV2", "Cast", "ConcatV2", "Mean", "Pack", "Sum"]).union(_COPIES)
# The input is what a function captures, or the default, which graph optimizers do not take for a constant.
_PLACEHOLDERS = frozenset(["Placeholder", "PlaceholderWithDefault"])
_PRODUCTS = frozenset(["MatMul", "Mul"])
# Ops whose results TensorFlow's graph optimizers may compute in advance from the shape of the input.
_OF_SHAPES = frozenset(["OnesLike", "Rank", "Shape", "ShapeN", "Size", "ZerosLike"])


class PropagatingOps:
  """Finds the inputs that ops propagate, and remembers what it found out about factors."""

  def __init__(self) -> None:
    self._folds: Dict[Tuple[tf.Operation, int], bool] = {}  # the results of `_may_fold_to_zeros`

  def inputs_of(self, tensor: tf.Tensor, inputs: List[tf.Tensor]) -> List[tf.Tensor]:
    """Returns the inputs that a graph tensor propagates: if one is not finite, the tensor is not finite.

    Args:
      tensor: the tensor.
      inputs: its inputs; for a capture of a function, the captured tensor.
    """
    op = tensor.op.type
    if op in _SUMS.union(_PLACEHOLDERS):
      return [value for value in inputs if _keeps_values(value.dtype, tensor.dtype)]
    if op in _PRODUCTS:
      return [value for value, other in zip(inputs, reversed(inputs)) if not self._may_fold_to_zeros(other)]
    if op == "RealDiv" and not (_is_constant(inputs[1]) and np.isinf(_value_of(inputs[1], np.inf)).any()):
      return inputs[:1]
    return []

  def _may_fold_to_zeros(self, factor: tf.Tensor) -> bool:
    """Returns whether graph optimizers may replace a product by zeros because of this factor.

    The value of a variable may be 0, too, but its product with an inf is computed, and NaN.
    """
    key = factor.op, factor.value_index
    if key not in self._folds:
      self._folds[key] = self._finds_zeros(factor)
    return self._folds[key]

  def _finds_zeros(self, factor: tf.Tensor) -> bool:
    if _is_constant(factor):
      return not _value_of(factor, 0.0).all()
    op, inputs = factor.op.type, factor.op.inputs
    if op == "Sub":
      return _original(inputs[0]) is _original(inputs[1])
    if op in ("Add", "AddV2"):
      return all(map(self._may_fold_to_zeros, inputs))
    if op in _PRODUCTS:
      return any(map(self._may_fold_to_zeros, inputs))
    return op in _COPIES.union(["Cast", "Mean", "RealDiv", "Sum"]) and self._may_fold_to_zeros(inputs[0])


def _keeps_values(source: tf.DType, target: tf.DType) -> bool:
  """Returns whether a sum or a cast from one dtype to another keeps inf and NaN."""
  source, target = source.base_dtype, target.base_dtype
  return target.is_complex if source.is_complex else source.is_floating and (target.is_floating or target.is_complex)


def _is_constant(tensor: tf.Tensor) -> bool:
  """Returns whether a tensor depends on constants and shapes only."""
  seen, pending = set(), [tensor.op]
  while pending:
    op = pending.pop()
    if op in seen or op.type == "Const" or op.type in _OF_SHAPES:
      continue
    seen.add(op)
    if not op.inputs or op.type in _PLACEHOLDERS:  # a variable, an input pipeline
      return False
    pending.extend(value.op for value in op.inputs)
  return True


def _value_of(constant: tf.Tensor, unknown: float) -> np.ndarray:
  """Returns the value of a constant tensor; `unknown` if only running the graph would tell."""
  value = tf.get_static_value(constant)
  return np.asarray(unknown if value is None else value)


def _original(tensor: tf.Tensor) -> tf.Tensor:
  while tensor.op.type in _COPIES:
    tensor = tensor.op.inputs[0]
  return tensor
