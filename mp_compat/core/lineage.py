# SPDX-License-Identifier: Apache-2.0
"""Where gradients come from: records of the gradients that were computed, and the search back to them.

The finite check of a tensor also checks what it is computed from by ops that propagate inf and NaN: if an input has
one, so does the output. `tests/core/test_propagation.py` runs every entry of the tables with TensorFlow's graph
optimizers, which replace a product with constant zeros, and `x - x`, by zeros: there, inf and NaN are lost. Ops that
the tables lack may hide an overflow: minimum, maximum, select, sign, comparisons, slices.
"""

from typing import Callable, Dict, Iterable, Iterator, List, NamedTuple, Optional, Tuple

import numpy as np

from mp_compat._tensorflow import contexts
from mp_compat._tensorflow import graphs
from mp_compat._tensorflow import tf
from mp_compat.core import gradients

TensorKey = Tuple[tf.Operation, int]

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


class Computed(NamedTuple):
  """The record of a gradient that `compute_gradients` or `GradientAccumulator.mean` returned."""

  name: str  # of its variable
  values: tf.Tensor  # the values of the gradient, of its shape and dtype
  scaled: Optional[tf.Tensor]  # the same of the scaled loss; None if they are unknown
  scale: Optional[tf.Tensor]  # the loss scale, a float32 scalar; None if it is unknown
  is_window_mean: bool  # of a GradientAccumulator


class Lineage:
  """What gradients derive from, by data. An opaque object: `tf.distribute` passes it on as a per-replica value."""

  def __init__(self) -> None:
    self.computed: List[Computed] = []  # the nearest computed gradients
    self.replaced: List[Computed] = []  # those of them that are not passed as they are, and that ops here can read
    self.to_check: List[Computed] = []  # those of `replaced` that the finite check must read besides the gradients
    self.accumulator_takes: List[tf.Operation] = []  # ops that took gradients from a `tf.ConditionalAccumulator`
    self.is_reduced_by_horovod = False  # whether ops of Horovod reduced them after they were computed

  @property
  def hidden_values(self) -> List[tf.Tensor]:
    """Returns the tensors of `to_check`, in which there may be an overflow that the gradients do not show."""
    return [computed.values for computed in self.to_check]


def record(
  grads: Iterable[gradients.Gradient],
  names: Iterable[str],
  scaled: Optional[Iterable[gradients.Gradient]] = None,
  scale: Optional[tf.Tensor] = None,
  are_window_means: bool = False,
) -> None:
  """Records a `Computed` of each gradient in its graph; does nothing in eager mode."""
  if graphs.default_graph() is None:
    return
  grads = list(grads)
  for grad, name, before in zip(grads, names, grads if scaled is None else scaled):
    for values, scaled_values in zip(gradients.values_of([grad]), gradients.values_of([before])):
      _records_in(values.graph)[tensor_key(values)] = Computed(
        name, values, None if scaled is None else scaled_values, scale, are_window_means
      )


def trace(grads: Iterable[gradients.Gradient], check_computed: bool = True) -> Lineage:
  """Searches back from gradients to the nearest computed ones, along data inputs; finds nothing in eager mode.

  Clipping can turn an inf into a finite number (`tf.clip_by_value`), and masking can remove a NaN. The finite check
  therefore covers the computed gradients, too (`to_check`), unless a path of ops that propagate inf and NaN leads from
  them to one of `grads`, whose check is then exact, or ops built here cannot read them: these must be inside of each
  branch, loop, function or XLA computation around them. With `check_computed=False`, it covers none of them.
  """
  found = Lineage()
  values = [] if graphs.default_graph() is None else gradients.values_of(grads)
  passed = {tensor_key(tensor) for tensor in values}
  for tensor, computed, is_propagated in _search(values):
    if computed is None:
      found.accumulator_takes += [tensor.op] if tensor.op.type.endswith("AccumulatorTakeGradient") else []
      found.is_reduced_by_horovod = found.is_reduced_by_horovod or contexts.contains_op(tensor.op, "Horovod")
      continue
    found.computed.append(computed)
    if check_computed and tensor_key(tensor) not in passed and contexts.is_readable(tensor):
      found.replaced.append(computed)
      found.to_check += [] if is_propagated else [computed]
  return found


def _search(values: Iterable[tf.Tensor]) -> Iterator[Tuple[tf.Tensor, Optional[Computed], bool]]:
  """Yields the tensors that `values` derive from, each with its record, behind which it does not search.

  With each comes whether its inf and NaN reach `values`. Those whose do come first: others may lead to them, too.
  """
  propagated: List[tf.Tensor] = list(values)
  others: List[tf.Tensor] = []
  ops = PropagatingOps(lambda tensor: tensor_key(tensor) in _records_in(tensor.graph))
  seen = set()
  while propagated or others:
    is_propagated = bool(propagated)
    tensor = (propagated or others).pop()
    key = tensor_key(tensor)
    if key in seen:
      continue
    seen.add(key)
    records = _records_in(tensor.graph)  # Functions read tensors of the graphs around them.
    yield tensor, records.get(key), is_propagated
    if key not in records:
      inputs = contexts.tensor_inputs(tensor)
      others += inputs
      if is_propagated:
        propagated += ops.inputs_of(tensor, inputs)


def cut(grads: Iterable[gradients.Gradient]) -> List[gradients.Gradient]:
  """Returns the same gradients as new tensors, from which `trace` does not search further back."""
  grads = [gradients.map_values(tf.identity, grad) for grad in grads]
  record(grads, [""] * len(grads))
  return grads


def tensor_key(tensor: tf.Tensor) -> TensorKey:
  """Returns a key that identifies a graph tensor; tensors are not hashable in all TensorFlow versions."""
  return tensor.op, tensor.value_index


def _records_in(graph: tf.Graph) -> Dict[TensorKey, Computed]:
  return graphs.record_in(graph, "computed_gradients")


class PropagatingOps:
  """Finds the inputs that ops propagate; `is_computed` returns whether a tensor is a computed gradient."""

  def __init__(self, is_computed: Callable[[tf.Tensor], bool]) -> None:
    self._is_computed = is_computed
    self._folds: Dict[TensorKey, bool] = {}  # the results of `_may_fold_to_zeros`

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
    key = tensor_key(factor)
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
  """Returns whether a tensor is a known constant of NaN and of values whose products neither overflow nor underflow."""
  value = tf.get_static_value(constant)
  if value is None:
    return False
  magnitude = np.abs(np.asarray(value)).astype(np.float64)
  largest = 2.0**7 if constant.dtype.base_dtype == tf.float16 else 2.0**40
  return bool((np.isnan(magnitude) | ((1 / largest <= magnitude) & (magnitude <= largest))).all())
