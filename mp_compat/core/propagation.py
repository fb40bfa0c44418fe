# SPDX-License-Identifier: Apache-2.0
"""Ops that propagate values that are not finite: if an input contains inf or NaN, so does the output.

The finite check of such an op's output is then a check of the input, too. `tests/core/test_propagation.py` runs every
entry with TensorFlow's graph optimizers, which replace a product with constant zeros, and `x - x`, by zeros: there, inf
and NaN are lost. Ops that the tables lack may hide an overflow: minimum, maximum, select, sign, comparisons, slices.
"""

from typing import Callable, Dict, List, Tuple

import numpy as np

from mp_compat._tensorflow import contexts
from mp_compat._tensorflow import tf

# Ops of which each output value is an input value, or a sum of input values.
_COPIES = frozenset(["ExpandDims", "Identity", "Reshape", "Squeeze", "Transpose"])
_ADDING = frozenset(["Add", "AddN", "AddV2", "Mean", "Sum"])
_SUMS = _ADDING.union(_COPIES, ["Cast", "ConcatV2", "Pack"])
# The input is what a function captures, or the default.
_PLACEHOLDERS = frozenset(["Placeholder", "PlaceholderWithDefault"])
_VARIABLES = frozenset(["IteratorGetNext", "ReadVariableOp", "Variable", "VariableV2"])
_PRODUCTS = frozenset(["MatMul", "Mul"])
# Ops whose results TensorFlow's graph optimizers may compute in advance from the shape of the input.
_OF_SHAPES = frozenset(["OnesLike", "Rank", "Shape", "ShapeN", "Size", "ZerosLike"])
# Ops from which a factor may be computed, such as that of clipping. If no input may fold to zeros, neither do they.
_IN_FACTORS = frozenset(
  ["Abs", "Fill", "L2Loss", "Max", "Maximum", "Merge", "Minimum", "RealDiv", "Rsqrt", "Select", "SelectV2", "Sqrt"]
  + ["Square", "Switch"]
)
_DEEPEST = 50  # the number of ops behind a factor that are looked at


class PropagatingOps:
  """Finds the inputs that ops propagate, and remembers what it found out about factors."""

  def __init__(self, is_computed: Callable[[tf.Tensor], bool]) -> None:
    self._is_computed = is_computed  # returns whether a tensor is a computed gradient
    self._folds: Dict[Tuple[tf.Operation, int], bool] = {}  # the results of `_may_fold_to_zeros`

  def inputs_of(self, tensor: tf.Tensor, inputs: List[tf.Tensor]) -> List[tf.Tensor]:
    """Returns those of its `inputs` (of a function's capture, what it captures) that a graph tensor propagates."""
    op = tensor.op.type
    if op in _SUMS or op in _PLACEHOLDERS:
      return [value for value in inputs if _keeps_values(value.dtype, tensor.dtype)]
    if op in _PRODUCTS:
      return [value for value, other in zip(inputs, reversed(inputs)) if not self._may_fold_to_zeros(other)]
    if op == "RealDiv" and not self._may_fold_to_zeros(inputs[1]):  # nor to inf
      return inputs[:1]
    return []

  def _may_fold_to_zeros(self, factor: tf.Tensor, depth: int = 0) -> bool:
    """Returns whether graph optimizers may replace a product by zeros because of this factor.

    The value of a variable may be 0, too, but its product with an inf is computed, and NaN.
    """
    key = factor.op, factor.value_index
    if key not in self._folds:
      self._folds[key] = depth > _DEEPEST or self._finds_zeros(factor, depth)
    return self._folds[key]

  def _finds_zeros(self, factor: tf.Tensor, depth: int) -> bool:
    op, inputs = factor.op.type, contexts.tensor_inputs(factor)
    if self._is_computed(factor) or _is_runtime(factor.op):
      return False
    if op == "Placeholder":  # of a function: a captured tensor, which is in `inputs`, or an argument, which is unknown
      return not inputs or self._may_fold_to_zeros(inputs[0], depth + 1)
    if op == "Const" or (op == "Cast" and _is_constant(factor)):  # a cast may round to 0
      return not _is_moderate(factor)
    if (op in _ADDING or op in _PRODUCTS) and _is_constant(factor):  # such as 1 + -1
      return True
    if op in ("Add", "AddV2"):
      return all(self._may_fold_to_zeros(value, depth + 1) for value in inputs)
    if op in _SUMS or op in _PRODUCTS or op in _IN_FACTORS:
      inputs = [value for value in inputs if value.dtype.is_floating or op == "Cast"]
      return any(self._may_fold_to_zeros(value, depth + 1) for value in inputs)
    return True


def _keeps_values(source: tf.DType, target: tf.DType) -> bool:
  """Returns whether a sum or a cast from one dtype to another keeps inf and NaN."""
  source, target = source.base_dtype, target.base_dtype
  return target.is_complex if source.is_complex else source.is_floating and (target.is_floating or target.is_complex)


def _is_runtime(op: tf.Operation) -> bool:
  """Returns whether graph optimizers know nothing of the value of an op: a variable, or a placeholder of a Session."""
  return op.type in _VARIABLES or (op.type in _PLACEHOLDERS and not op.graph.building_function)


def _is_constant(tensor: tf.Tensor) -> bool:
  """Returns whether a tensor may depend on constants, shapes and functions only."""
  seen, pending = set(), [tensor.op]
  while pending:
    op = pending.pop()
    if op in seen or op.type == "Const" or op.type in _OF_SHAPES:
      continue
    seen.add(op)
    if _is_runtime(op):
      return False
    pending.extend(value.op for value in op.inputs)
  return True


def _is_moderate(constant: tf.Tensor) -> bool:
  """Returns whether a constant tensor is known, without running the graph, to have only NaNs and moderate values.

  Products of a few moderate values, which graph optimizers compute in advance, neither overflow nor underflow.
  """
  value = tf.get_static_value(constant)
  if value is None:
    return False
  magnitude = np.abs(np.asarray(value)).astype(np.float64)
  largest = 2.0**7 if constant.dtype.base_dtype == tf.float16 else 2.0**40
  return bool((np.isnan(magnitude) | ((1 / largest <= magnitude) & (magnitude <= largest))).all())
