# SPDX-License-Identifier: Apache-2.0
"""Measures the range of every gradient of a step: histograms of binary exponents beside the range of float16."""

import collections
from typing import Any, Dict, FrozenSet, Iterable, Iterator, List, NamedTuple, Optional, Set, Tuple

from mp_compat._tensorflow import autograph
from mp_compat._tensorflow import contexts
from mp_compat._tensorflow import dead_tensors
from mp_compat._tensorflow import graphs
from mp_compat._tensorflow import ops
from mp_compat._tensorflow import tf
from mp_compat.core import gradients
from mp_compat.core import lineage
from mp_compat.monitoring import range_history
from mp_compat.monitoring import reports
from mp_compat.training import step as step_module
from mp_compat.training.optimizer import MixedPrecisionLossScaleOptimizer

# Ops that only copy the values of their first input, and ops that copy some of their inputs' values.
_COPYING = frozenset(["DepthToSpace", "ExpandDims", "Identity", "Reshape", "SpaceToDepth", "Squeeze", "Transpose"])
MOVING = _COPYING.union(
  ["ConcatV2", "Enter", "IdentityN", "Merge", "NextIteration", "Pack", "Split", "SplitV", "Switch", "Unpack"]
)
# Ops that add up gradients: of a variable that several ops use, and of one that is broadcast.
_SUMMING = frozenset(["AddN", "Sum"])
# The number of bits of the fraction; those of float32 for all other dtypes.
_PRECISION = {"float16": 10, "bfloat16": 7}
# Sums of rounded values that are mathematically zero were up to 0.8 units of the last place of the sum of magnitudes in
# models with batch normalization and attention, and all other sums more than 50.
_MOST_UNITS_OF_NOISE = 8
# Ops whose results are computed in a loop (control flow v1), in a function, or in a conditional or loop of functions.
_HIDING = frozenset(["Exit", "PartitionedCall", "StatefulPartitionedCall", "SymbolicGradient"]).union(
  ["Case", "If", "StatelessCase", "StatelessIf", "StatelessWhile", "While"]
)


class GradientRange(NamedTuple):
  """Describes the magnitudes of one gradient of the scaled loss: tensors, or their values fetched by a Session.

  Shares are float64 scalars in [0, 1], relative to all values of the gradient; 0 for an empty gradient. float64
  gradients are cast to float32 first. The real and the imaginary part of a complex value count as two values.

  Attributes:
    exponents: int32 of shape [256]. Index e counts magnitudes in `[2**(e-127), 2**(e-126))`, index 0 smaller ones,
      index 255 inf and NaN.
    zeros: the share of zeros.
    subnormal: the share of nonzero magnitudes below `2**-14`, float16's smallest normal number.
    vanishing: the share of nonzero magnitudes below `2**-24`, float16's smallest number.
    largest: the largest finite magnitude, float32; may be 0 if it is below `2**-126`.
    nonfinite: the number of infinite values and NaNs, int32.
    headroom: the largest n with `largest * 2**n <= 65504`, int32; 142 if all are zero, -1 if any is not finite.
    scale: the loss scale of the values, float32; 1 for a gradient that was measured as it was passed.
    noise: whether the values are sums that are as small as rounding errors of their terms, bool: gradients that are
      mathematically zero, such as that of a bias before batch normalization.
  """

  exponents: Any
  zeros: Any
  subnormal: Any
  vanishing: Any
  largest: Any
  nonfinite: Any
  headroom: Any
  scale: Any
  noise: Any


class Measured(NamedTuple):
  """A tensor that is measured, and what a record says of it besides its values."""

  name: str
  tensor: tf.Tensor
  scale: Optional[tf.Tensor]  # a float32 scalar; None if the tensor is measured as it was passed
  dtype: str = ""  # the narrowest floating dtype that its values have had
  is_selected: bool = True  # whether the advice is for the tensor


class Report(NamedTuple):
  """The ranges of a step, and the tensors that they are of, by the same names."""

  ranges: "collections.OrderedDict[str, GradientRange]"
  measured: Dict[str, Measured]
  is_complete: bool  # False if a part of the backward pass is not measured


class _Derived(NamedTuple):
  """A tensor that is computed from a loss scale, and from which a gradient is computed."""

  tensor: tf.Tensor
  scale: tf.Tensor
  is_behind_loss: bool  # comes after the gradient of the loss function
  is_measured: bool  # as the gradient of a variable, or need not be, because it only contains the scale


@autograph.do_not_convert
def gradient_ranges(
  optimizer: MixedPrecisionLossScaleOptimizer, dtypes: Any = tf.float16
) -> "collections.OrderedDict[str, GradientRange]":
  """Returns the ranges of the gradients of the last `apply_gradients`, and of the backward pass that computes them.

  Fetch it with the train op to get the same step.

      ranges = mp_compat.gradient_ranges(optimizer)
      _, values = sess.run([train_op, ranges])
      print([name for name, gradient in values.items() if gradient.vanishing > 0.01])

  All values are those of the scaled loss, before they are divided by the loss scale. A report that is not fetched takes
  no time in a step. docs/gradient_ranges.md says which tensors are measured.

  Args:
    optimizer: a `MixedPrecisionLossScaleOptimizer` whose train op is in the current graph.
    dtypes: the floating dtype, or dtypes, of the tensors of the backward pass to measure. If it has none of them, those
      in bfloat16 are measured, or else those in float32, which show whether the model could be trained in float16.

  Returns:
    An ordered dictionary from names to `GradientRange`s, in the order of the backward pass, from the loss to the
    inputs. The gradients of variables have the names of the variables. A tensor of the backward pass has the name of
    its op, such as `gradients/dense/MatMul_grad/MatMul`; of dtypes other than float16, those between the loss and the
    last layer with a variable are left out. If a tensor is in a branch of `tf.cond`, the values are zeros whenever that
    branch is not executed. A gradient that was not computed from the scaled loss in this graph, or that was computed
    inside of a loop, is measured as it was passed, with a scale of 1.

  Raises:
    RuntimeError: If the current graph has no train op of this optimizer, or has it inside a loop or a function.
    ValueError: If `optimizer` is not a `MixedPrecisionLossScaleOptimizer`, or a dtype is not floating.

  Source: the histograms follow Micikevicius et al., "Mixed Precision Training", 2018 (arXiv:1710.03740), figure 3.
  """
  return report(optimizer, dtypes).ranges


def report(optimizer: MixedPrecisionLossScaleOptimizer, dtypes: Any) -> Report:
  dtypes = [tf.as_dtype(dtype) for dtype in ([dtypes] if isinstance(dtypes, (str, tf.DType)) else dtypes)]
  for dtype in dtypes:
    if not dtype.is_floating:
      raise ValueError("dtypes must be floating, such as tf.float16, but got {}.".format(dtype.name))
  step = reports.readable_step(optimizer)
  passed, computed = _gradients(step, optimizer._mp_compat_settings.check_computed_gradients)
  derived = _backward_passes(computed)
  existing = {each.tensor.dtype.base_dtype for each in derived}
  dtypes = next((other for other in (dtypes, [tf.bfloat16], [tf.float32]) if existing.intersection(other)), dtypes)
  measured = passed + [Measured(record.name, record.scaled, record.scale) for record in computed]
  wanted = [each for each in derived if each.tensor.dtype.base_dtype in dtypes and not each.is_measured]
  measured += _named(each for each in wanted if each.tensor.dtype == tf.float16 or each.is_behind_loss)
  measured = _readable_in_order(measured)
  sources = _sources(item.tensor for item in measured)
  measured = [_describe(item, dtypes, sources[lineage.tensor_key(item.tensor)]) for item in measured]
  if not any(item.is_selected for item in measured):
    measured = [item._replace(is_selected=True) for item in measured]
  names = reports.number_repeated([item.name for item in measured])
  return Report(
    ranges=collections.OrderedDict(zip(names, _measure_all(measured))),
    measured=dict(zip(names, measured)),
    is_complete=not passed and not _is_hiding(derived),
  )


def backward_dtypes(step: step_module.Step) -> Set[Optional[tf.DType]]:
  """Returns the floating dtypes of the backward pass, and None if functions or loops compute a part of it."""
  derived = _backward_passes(_gradients(step, read_computed=True)[1])
  dtypes: Set[Optional[tf.DType]] = {each.tensor.dtype.base_dtype for each in derived if each.tensor.dtype.is_floating}
  return dtypes | {None} if _is_hiding(derived) else dtypes


def _is_hiding(derived: List[_Derived]) -> bool:
  return any(each.tensor.op.type in _HIDING for each in derived)


def _named(derived: Iterable[_Derived]) -> List[Measured]:
  """Returns the tensors that do not only move values, by the names of their ops, or their own if these have more."""
  return [
    Measured(tensor.op.name if tensor.value_index == 0 else tensor.name, tensor, scale)
    for tensor, scale, _, _ in derived
    if tensor.op.type not in MOVING
  ]


def _readable_in_order(measured: List[Measured]) -> List[Measured]:
  """Returns the tensors outside of loops and functions, in the order of their ops."""
  order = graphs.creation_order()
  readable = [item for item in measured if contexts.is_in_branches_only(item.tensor.op)]
  return sorted(readable, key=lambda item: order[item.tensor.op])


def _describe(item: Measured, dtypes: List[tf.DType], own: FrozenSet[Optional[tf.DType]]) -> Measured:
  return item._replace(
    dtype=min((dtype for dtype in own if dtype is not None), key=lambda dtype: dtype.size).name,
    is_selected=not own.isdisjoint([*dtypes, None]),  # functions and loops may compute in any dtype
  )


def _gradients(step: step_module.Step, read_computed: bool) -> Tuple[List[Measured], List[lineage.Computed]]:
  """Returns the passed gradients that derive from no computed one, and the records of the computed ones, if read."""
  computed = [each for one in step.lineages for each in one.computed] if read_computed else []
  measurable = [each for each in computed if each.scaled is not None and contexts.is_in_branches_only(each.scaled.op)]
  found = {lineage.tensor_key(each.values): each for each in measurable}
  passed = [Measured(name, values, None) for grad, name in step.gradients for values in gradients.values_of([grad])]
  derived = descendants(readers([item.tensor for item in passed]), [each.values for each in measurable])
  passed = [item for item in passed if lineage.tensor_key(item.tensor) not in {**found, **derived}]
  return passed, list(found.values())


def _backward_passes(computed: Iterable[lineage.Computed]) -> List[_Derived]:
  """Returns the tensors between each scale and the gradients that were computed with it."""
  by_scale: Dict[Any, List[lineage.Computed]] = collections.defaultdict(list)
  for record in computed:
    by_scale[lineage.tensor_key(record.scale)].append(record)
  found: List[_Derived] = []
  for scale_key, records in by_scale.items():
    scale, ends = records[0].scale, [record.scaled for record in records]
    read_by = readers(ends)
    derived = descendants(read_by, [scale])
    # The tensors from which the layers' ops compute the gradients of their variables.
    inputs = [value for op in {op for op, _ in _sources(ends)} for value in op.inputs]
    entering = [tensor for value in inputs for tensor in _same_values(value) if lineage.tensor_key(tensor) in derived]
    behind_loss = set(map(lineage.tensor_key, entering)).union(descendants(read_by, entering))
    measured = [tensor for end in ends for tensor in _same_values(end)]
    measured += [reader for reader in read_by[scale_key] if reader.op.type == "Cast"]
    measured_keys = set(map(lineage.tensor_key, measured))
    found += [_Derived(tensor, scale, key in behind_loss, key in measured_keys) for key, tensor in derived.items()]
  return found


def readers(ends: List[tf.Tensor]) -> Dict[lineage.TensorKey, List[tf.Tensor]]:
  """Returns the tensors computed from each tensor that `ends` derive from, not by integers or stopped gradients."""
  found: Dict[lineage.TensorKey, List[tf.Tensor]] = collections.defaultdict(list)
  seen, pending = set(), list(ends)
  while pending:
    tensor = pending.pop()
    if lineage.tensor_key(tensor) not in seen and tensor.op.type != "StopGradient":
      seen.add(lineage.tensor_key(tensor))
      for value in contexts.tensor_inputs(tensor):
        if value.dtype.is_floating or value.dtype == tf.variant:
          found[lineage.tensor_key(value)].append(tensor)
          pending.append(value)
  return found


def descendants(
  read_by: Dict[lineage.TensorKey, List[tf.Tensor]], sources: Iterable[tf.Tensor]
) -> Dict[lineage.TensorKey, tf.Tensor]:
  """Returns the tensors computed from `sources`, by their keys."""
  found: Dict[lineage.TensorKey, tf.Tensor] = {}
  pending = list(sources)
  while pending:
    for reader in read_by.get(lineage.tensor_key(pending.pop()), ()):
      if lineage.tensor_key(reader) not in found:
        found[lineage.tensor_key(reader)] = reader
        pending.append(reader)
  return found


def _same_values(tensor: tf.Tensor) -> Iterator[tf.Tensor]:
  """Yields a tensor and those before it that contain the same values, such as the float16 input of a cast."""
  yield tensor
  while tensor.op.type in _COPYING or tensor.op.type == "Cast":
    before = _containing(tensor)
    if not before:
      break
    tensor = before[0]
    yield tensor


def _containing(tensor: tf.Tensor) -> List[tf.Tensor]:
  """Returns the inputs of the op of a tensor that contain its values, or parts or summands of it."""
  op = tensor.op
  if op.type == "Cast":
    return [value for value in op.inputs if _is_measurable(value) and value.dtype.size <= tensor.dtype.size]
  inputs = op.inputs[:1] if op.type in _COPYING else op.inputs if op.type in MOVING or op.type in _SUMMING else ()
  return [value for value in inputs if _is_measurable(value)]


def _is_measurable(tensor: tf.Tensor) -> bool:
  return tensor.dtype.is_floating or tensor.dtype.is_complex


def _sources(tensors: Iterable[tf.Tensor]) -> Dict[lineage.TensorKey, FrozenSet[Optional[tf.DType]]]:
  """Returns the dtypes that the values of tensors, their parts and summands have had, by the keys of all of these.

  They contain None if a function or a loop has computed any of them.
  """
  found: Dict[lineage.TensorKey, FrozenSet[Optional[tf.DType]]] = {}
  pending = list(tensors)
  while pending:
    tensor = pending[-1]
    before = _containing(tensor)
    unknown = [value for value in before if lineage.tensor_key(value) not in found]
    pending += unknown
    if not unknown:
      own = [tensor.dtype.base_dtype] + [None] * (tensor.op.type in _HIDING)
      found[lineage.tensor_key(pending.pop())] = frozenset(own).union(
        *[found[lineage.tensor_key(value)] for value in before]
      )
  return found


def _terms(tensor: tf.Tensor) -> List[tf.Tensor]:
  """Returns the tensors of which the values of a gradient are sums; [] if they are no sums."""
  *_, last = _same_values(tensor)
  if last.op.type == "AddN":
    return [term for value in last.op.inputs for term in (_terms(value) if value.op.type != "AddN" else ()) or [value]]
  return list(last.op.inputs[:1]) if last.op.type in ("BiasAddGrad", "Sum") else []


def _measure_all(measured: List[Measured]) -> List[GradientRange]:
  """Returns the ranges of tensors; zeros for those in branches that are not executed."""
  if not measured:
    return []
  with tf.name_scope("gradient_ranges"):
    branches = dead_tensors.branches_of([item.tensor for item in measured])
    counted = [
      [dead_tensors.merge_out_of_branches(value, 0, around) for value in _count(item)]
      for item, around in zip(measured, branches)
    ]
    each_exponents, each_zeros, each_largest, scales, noise = zip(*counted)
    exponents, zeros, largest = tf.stack(each_exponents), tf.stack(each_zeros), tf.stack(each_largest)
    total = tf.cast(tf.maximum(tf.reduce_sum(exponents, axis=1), 1), tf.float64)

    def share(count: tf.Tensor) -> List[tf.Tensor]:
      return tf.unstack(tf.cast(count, tf.float64) / total)

    def share_below(exponent: int) -> List[tf.Tensor]:
      return share(tf.reduce_sum(exponents[:, : exponent + range_history.BIAS], axis=1) - zeros)

    nonfinite, bits = exponents[:, 255], tf.bitcast(largest, tf.int32)
    exponent, fraction = tf.bitwise.right_shift(bits, 23), tf.bitwise.bitwise_and(bits, 0x7FFFFF)
    headroom = 15 + range_history.BIAS - exponent - tf.cast(fraction > 0x7FE000, tf.int32)  # 65504 is 0x1.FFCp15
    columns = [
      each_exponents,
      share(zeros),
      share_below(-14),
      share_below(-24),
      each_largest,
      tf.unstack(nonfinite),
      tf.unstack(tf.where_v2(nonfinite > 0, -1, headroom)),
      scales,
      tf.unstack(tf.stack(noise) > 0),
    ]
    return [GradientRange(*values) for values in zip(*columns)]


def _magnitudes(tensor: tf.Tensor) -> tf.Tensor:
  return tf.abs(tf.cast(tf.reshape(ops.real_parts(tensor), [-1]), tf.float32))


def _count(item: Measured) -> Tuple[tf.Tensor, ...]:
  """Returns exponents, number of zeros, largest magnitude, scale and noise (1 or 0), as in `GradientRange`."""
  with contexts.enter(contexts.of_outputs(item.tensor.op)):
    values = _magnitudes(item.tensor)
    bits = tf.bitcast(values, tf.int32)
    exponents = tf.raw_ops.Bincount(arr=tf.bitwise.right_shift(bits, 23), size=256, weights=tf.zeros([0], tf.int32))
    exponents.set_shape([256])
    zeros = tf.reduce_sum(tf.cast(tf.equal(bits, 0), tf.int32))
    finite = tf.where_v2(tf.is_finite(values), values, 0.0)
    scale = 1.0 if item.scale is None else item.scale
    terms, is_noise = _terms(item.tensor) if item.scale is not None else [], tf.constant(False)
    if terms:
      unit = 2.0 ** -_PRECISION.get(item.dtype, 23) * tf.add_n([tf.reduce_sum(_magnitudes(term)) for term in terms])
      # Not if all terms are zeros, nor if their sum overflows.
      is_noise = (tf.reduce_sum(values) <= _MOST_UNITS_OF_NOISE * unit) & (unit > 0.0) & tf.is_finite(unit)
    return (
      exponents,
      zeros,
      tf.maximum(tf.reduce_max(finite), 0.0),
      tf.cast(scale, tf.float32),
      tf.cast(is_noise, tf.int32),
    )
