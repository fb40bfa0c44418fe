# SPDX-License-Identifier: Apache-2.0
"""Measures the range of every gradient of a step: histograms of binary exponents beside
the range of float16.
"""

import collections
from typing import (
  Dict,
  Hashable,
  Iterable,
  List,
  NamedTuple,
  Optional,
  Sequence,
  Tuple,
  Union,
)

import numpy as np

from mp_compat._tensorflow import autograph
from mp_compat._tensorflow import ops
from mp_compat._tensorflow import tf
from mp_compat.core import finite_check
from mp_compat.core import lineage
from mp_compat.graph import contexts
from mp_compat.graph import dead_tensors
from mp_compat.graph import graphs
from mp_compat.monitoring import dataflow
from mp_compat.monitoring import range_history
from mp_compat.monitoring import reports
from mp_compat.training import step
from mp_compat.training.optimizer import MixedPrecisionLossScaleOptimizer

# 0 to 255 for the exponents, 256 for zeros; a power of 2, because a bitwise or adds
_BINS = 512

# A sum of n terms of random signs is about 1 / sqrt(n) of the sum of their magnitudes.
# What is much smaller cancels by construction. The terms may be differences of larger
# values, so that their own errors are not relative to them: units of the last place say
# nothing. docs/gradient_ranges.md has what was measured.
_LARGEST_CANCELLATION = 2.0**-7  # of the sum of magnitudes, also of a few terms
_LARGEST_OF_RANDOM_SIGNS = 0.125  # the same, times sqrt(n)

Dtypes = Union[str, tf.DType, Iterable[Union[str, tf.DType]]]


class GradientRange(NamedTuple):
  """Describes the magnitudes of one gradient of the scaled loss: tensors, or their
  values fetched by a Session.

  Shares are float64 scalars in [0, 1], relative to all values of the gradient; 0 for an
  empty gradient. float64 gradients are cast to float32 first. The real and the
  imaginary part of a complex value count as two values.

  Attributes:
    exponents: int32 of shape [256]. Index e counts magnitudes in `[2**(e-127),
      2**(e-126))`, index 0 smaller ones, index 255 inf and NaN.
    zeros: the share of zeros.
    subnormal: the share of nonzero magnitudes below `2**-14`, float16's smallest normal
      number.
    vanishing: the share of nonzero magnitudes below `2**-24`, float16's smallest
      number.
    largest: the largest finite magnitude, float32; may be 0 if it is below `2**-126`.
    nonfinite: the number of infinite values and NaNs, int32.
    headroom: the largest n with `largest * 2**n <= 65504`, int32; 142 if all are zero,
      -1 if any is not finite.
    scale: the loss scale of the values, float32; 1 for a gradient that was measured as
      it was passed.
    noise: whether the values are sums whose terms cancel, bool: rounding errors of a
      gradient that is mathematically zero, such as that of a bias before batch
      normalization.
  """

  exponents: Union[tf.Tensor, np.ndarray]
  zeros: Union[tf.Tensor, np.float64]
  subnormal: Union[tf.Tensor, np.float64]
  vanishing: Union[tf.Tensor, np.float64]
  largest: Union[tf.Tensor, np.float32]
  nonfinite: Union[tf.Tensor, np.int32]
  headroom: Union[tf.Tensor, np.int32]
  scale: Union[tf.Tensor, np.float32]
  noise: Union[tf.Tensor, np.bool_]


class Measured(NamedTuple):
  """A tensor that is measured, and what a record says of it besides its values."""

  name: str
  tensor: tf.Tensor
  # a float32 scalar; None if the tensor is measured as it was passed
  scale: Optional[tf.Tensor]
  dtype: str = ""  # the narrowest floating dtype that its values have had
  is_selected: bool = True  # whether the advice is for the tensor
  # the dtype of a variable's gradient after it is divided by the scale
  applied: Optional[str] = None


class Report(NamedTuple):
  """The tensors that are measured in a step, by name, and their ranges in the same
  order.
  """

  measured: "collections.OrderedDict[str, Measured]"
  # each field stacked: int32 [N, 256] for `exponents`, [N] for the others; empty for no
  # tensors
  ranges: GradientRange
  is_complete: bool  # False if a part of the backward pass is not measured


@autograph.do_not_convert
def gradient_ranges(
  optimizer: MixedPrecisionLossScaleOptimizer, dtypes: Dtypes = tf.float16
) -> "collections.OrderedDict[str, GradientRange]":
  """Returns the ranges of the gradients of the last `apply_gradients`, and of the
  backward pass that computes them.

  Fetch it with the train op to get the same step.

      ranges = mp_compat.gradient_ranges(optimizer)
      _, values = sess.run([train_op, ranges])
      print([name for name, gradient in values.items() if gradient.vanishing > 0.01])

  All values are those of the scaled loss, before they are divided by the loss scale. A
  report that is not fetched takes no time in a step. docs/gradient_ranges.md says which
  tensors are measured.

  Args:
    optimizer: a `MixedPrecisionLossScaleOptimizer` whose train op is in the current
      graph.
    dtypes: the floating dtype, or dtypes, of the tensors of the backward pass to
      measure. If it has none of them, those in bfloat16 are measured, or else those in
      float32, which show whether the model could be trained in float16.

  Returns:
    An ordered dictionary from names to `GradientRange`s, in the order of the backward
    pass, from the loss to the inputs. The gradients of variables have the names of the
    variables. A tensor of the backward pass has the name of its op, such as
    `gradients/dense/MatMul_grad/MatMul`; of dtypes other than float16, those between
    the loss and the last layer with a variable are left out. If a tensor is in a branch
    of `tf.cond`, the values are zeros whenever that branch is not executed. A gradient
    that was not computed from the scaled loss in this graph, or that was computed
    inside of a loop, is measured as it was passed, with a scale of 1.

  Raises:
    RuntimeError: If the current graph has no train op of this optimizer, or has it
      inside a loop or a function.
    ValueError: If `optimizer` is not a `MixedPrecisionLossScaleOptimizer`, or a dtype
      is not floating.

  Source: the histograms follow Micikevicius et al., "Mixed Precision Training", 2018
  (arXiv:1710.03740), figure 3.
  """
  found = report(optimizer, dtypes)
  columns = [tf.unstack(values) for values in found.ranges] if found.measured else []
  return collections.OrderedDict(
    zip(found.measured, [GradientRange(*row) for row in zip(*columns)])
  )


def report(optimizer: MixedPrecisionLossScaleOptimizer, dtypes: Dtypes) -> Report:
  """Builds the measurement that `gradient_ranges` describes."""
  wanted = _floating(dtypes)
  record = reports.readable_step(optimizer)
  passed, computed = _gradients(
    record, optimizer._mp_compat_settings.check_computed_gradients
  )
  derived, layers = _backward_passes(computed)
  existing = {tensor.dtype.base_dtype for tensor in derived}
  wanted = next(
    (
      other
      for other in (wanted, [tf.bfloat16], [tf.float32])
      if existing.intersection(other)
    ),
    wanted,
  )
  measured = passed + [
    Measured(each.name, each.scaled, each.scale, applied=each.values.dtype.name)
    for each in computed
  ]
  for item, is_behind_loss in layers:
    if item.tensor.dtype.base_dtype in wanted and (
      item.tensor.dtype == tf.float16 or is_behind_loss
    ):
      measured.append(item)
  measured = _with_dtypes(
    [item for item in measured if contexts.is_in_branches_only(item.tensor.op)], wanted
  )
  order = graphs.creation_order()
  measured.sort(key=lambda item: order[item.tensor.op])
  return Report(
    reports.by_unique_names((item.name, item) for item in measured),
    _measure(measured),
    is_complete=not passed
    and not any(tensor.op.type in dataflow.HIDING for tensor in derived),
  )


def _floating(dtypes: Dtypes) -> List[tf.DType]:
  """Returns the dtypes that one or several are; raises a ValueError if one is not
  floating.
  """
  found = [
    tf.as_dtype(dtype)
    for dtype in ([dtypes] if isinstance(dtypes, (str, tf.DType)) else dtypes)
  ]
  for dtype in found:
    if not dtype.is_floating:
      raise ValueError(
        "dtypes must be floating, such as tf.float16, but got {}.".format(dtype.name)
      )
  return found


def _with_dtypes(
  measured: List[Measured], dtypes: Iterable[tf.DType]
) -> List[Measured]:
  """Adds the narrowest dtype of each tensor; selects those that have had one of
  `dtypes`, or all if none has.
  """
  found = []
  sources = dataflow.sources_of(item.tensor for item in measured)
  for item in measured:
    own = sources[lineage.tensor_key(item.tensor)]
    narrowest = min(
      (dtype for dtype in own if dtype is not None), key=lambda dtype: dtype.size
    )
    # Functions and loops may compute in any dtype.
    found.append(
      item._replace(
        dtype=narrowest.name, is_selected=not own.isdisjoint([*dtypes, None])
      )
    )
  return (
    found
    if any(item.is_selected for item in found)
    else [item._replace(is_selected=True) for item in found]
  )


def _gradients(
  record: step.Step, read_computed: bool
) -> Tuple[List[Measured], List[lineage.Computed]]:
  """Returns the passed gradients that derive from no computed one, and the records of
  the computed ones, if read.
  """
  computed = (
    [each for of_replica in record.lineages for each in of_replica.computed]
    if read_computed
    else []
  )
  measurable = [
    each
    for each in computed
    if each.scaled is not None and contexts.is_in_branches_only(each.scaled.op)
  ]
  found = {lineage.tensor_key(each.values): each for each in measurable}
  passed = [
    Measured(name, values, None) for name, values in reports.passed_gradients(record)
  ]
  read_by = dataflow.readers([item.tensor for item in passed])
  derived = {
    **found,
    **dataflow.descendants(read_by, [each.values for each in measurable]),
  }
  return [
    item for item in passed if lineage.tensor_key(item.tensor) not in derived
  ], list(found.values())


def _backward_passes(
  computed: Iterable[lineage.Computed],
) -> Tuple[List[tf.Tensor], List[Tuple[Measured, bool]]]:
  """Returns the tensors between each scale and the gradients that were computed with
  it, and the gradients of layers.

  The latter are those that are not gradients of variables, and do not only contain the
  scale or move values; each with whether it comes after the gradient of the loss
  function.
  """
  by_scale: Dict[lineage.TensorKey, List[lineage.Computed]] = collections.defaultdict(
    list
  )
  for record in computed:
    by_scale[lineage.tensor_key(record.scale)].append(record)
  tensors: List[tf.Tensor] = []
  layers: List[Tuple[Measured, bool]] = []
  for scale_key, records in by_scale.items():
    scale, ends = records[0].scale, [record.scaled for record in records]
    read_by = dataflow.readers(ends)
    derived = dataflow.descendants(read_by, [scale])
    # The tensors from which the layers' ops compute the gradients of their variables.
    inputs = [
      value for op in {op for op, _ in dataflow.sources_of(ends)} for value in op.inputs
    ]
    entering = [
      value
      for value in dataflow.same_values(inputs)
      if lineage.tensor_key(value) in derived
    ]
    behind_loss = {
      *contexts.keys_of(entering),
      *dataflow.descendants(read_by, entering),
    }
    casts = [reader for reader in read_by[scale_key] if reader.op.type == "Cast"]
    others = contexts.keys_of([*dataflow.same_values(ends), *casts])
    tensors += derived.values()
    for (op, index), tensor in derived.items():
      if (op, index) not in others and op.type not in dataflow.MOVING:
        layers.append(
          (
            Measured(tensor.name if index else op.name, tensor, scale),
            (op, index) in behind_loss,
          )
        )
  return tensors, layers


class _Counts(NamedTuple):
  """What is counted of n tensors of one dtype, shape and scale.

  The first four have one row for each tensor; the last two are scalars.
  """

  bins: tf.Tensor  # int32 [n * 512]: for each exponent, without zeros; then the zeros
  largest: tf.Tensor  # float32 [n]: the largest finite magnitudes, -inf if empty
  magnitude: tf.Tensor  # float32 [n]: the sum of the magnitudes; zeros without terms
  magnitude_of_terms: tf.Tensor  # float32 [n]: the same of the terms of the values
  number_of_terms: tf.Tensor  # int32 []: of all values of one tensor
  scale: tf.Tensor  # float32 []


def _measure(measured: List[Measured]) -> GradientRange:
  """Returns the ranges of tensors, stacked; zeros for those in branches that are not
  executed.
  """
  if not measured:
    return GradientRange(*[()] * len(GradientRange._fields))
  terms = [
    dataflow.terms_of(item.tensor) if item.scale is not None else []
    for item in measured
  ]
  are_dead = dead_tensors.may_be_dead(item.tensor for item in measured)
  groups: Dict[Hashable, List[int]] = collections.defaultdict(list)
  for index, (item, is_dead) in enumerate(zip(measured, are_dead)):
    groups[index if is_dead else _stacking_keys(item, terms[index])].append(index)
  with tf.name_scope("gradient_ranges"):
    counter = _Counter()
    counted: List[_Counts] = []
    for group in groups.values():
      with contexts.enter(contexts.of_outputs(measured[group[0]].tensor.op)):
        counts = counter.count(
          [measured[index] for index in group], [terms[index] for index in group]
        )
      is_dead = are_dead[group[0]]
      counted.append(
        _Counts(
          *[dead_tensors.merge_out_of_branches(each, 0, is_dead) for each in counts]
        )
      )
    return _ranges(_in_order(counted, list(groups.values())))


def _in_order(counted: List[_Counts], groups: List[List[int]]) -> _Counts:
  """Returns the counts of all tensors, n, in the order of the indices in `groups`.

  The result has `bins` [n, 512], and [n] for the other fields.
  """
  sizes = [len(group) for group in groups]
  row_of = np.argsort(np.concatenate(groups))
  group_of = np.repeat(range(len(groups)), sizes)[row_of]
  fields = _Counts(*zip(*counted))

  def rows(parts: Sequence[tf.Tensor]) -> tf.Tensor:
    return tf.gather(tf.concat(parts, axis=0), row_of)

  bins = tf.reshape(tf.concat(fields.bins, axis=0), [sum(sizes), _BINS])
  return _Counts(
    bins=tf.gather(bins, row_of),
    largest=rows(fields.largest),
    magnitude=rows(fields.magnitude),
    magnitude_of_terms=rows(fields.magnitude_of_terms),
    number_of_terms=tf.gather(tf.stack(fields.number_of_terms), group_of),
    scale=tf.gather(tf.stack(fields.scale), group_of),
  )


def _stacking_keys(item: Measured, terms: List[tf.Tensor]) -> Hashable:
  """Returns a key that tensors share which may be stacked: small ones of one shape,
  with the same scale.
  """
  found: List[Hashable] = [
    None if item.scale is None else lineage.tensor_key(item.scale)
  ]
  for tensor in [item.tensor, *terms]:
    if finite_check.is_small(tensor):
      found.append((tensor.dtype, tuple(tensor.shape.as_list()), tensor.device))
    else:
      found.append(lineage.tensor_key(tensor))
  return tuple(found)


def _ranges(counted: _Counts) -> GradientRange:
  """Returns stacked ranges from the counts of all tensors, as `_in_order` returns
  them.
  """
  zeros, counts = counted.bins[:, 256:257], counted.bins[:, :256]
  exponents = tf.concat([counts[:, :1] + zeros, counts[:, 1:]], axis=1)
  total = tf.cast(tf.maximum(tf.reduce_sum(exponents, axis=1), 1), tf.float64)

  def share(numbers: tf.Tensor) -> tf.Tensor:
    return tf.cast(tf.reduce_sum(numbers, axis=1), tf.float64) / total

  largest = tf.maximum(counted.largest, 0.0)  # -inf of an empty tensor becomes 0
  bits, nonfinite = tf.bitcast(largest, tf.int32), counts[:, 255]
  exponent = tf.bitwise.right_shift(bits, 23)
  fraction = tf.bitwise.bitwise_and(bits, 0x7FFFFF)
  # 65504 is 0x1.FFCp15
  headroom = 15 + range_history.BIAS - exponent - tf.cast(fraction > 0x7FE000, tf.int32)
  return GradientRange(
    exponents=exponents,
    zeros=share(zeros),
    subnormal=share(counts[:, : range_history.BIAS - 14]),
    vanishing=share(counts[:, : range_history.BIAS - 24]),
    largest=largest,
    nonfinite=nonfinite,
    headroom=tf.where_v2(nonfinite > 0, -1, headroom),
    scale=counted.scale,
    noise=_is_noise(counted, total),
  )


def _is_noise(counted: _Counts, total: tf.Tensor) -> tf.Tensor:
  """Returns bool [n], whether the terms of each tensor cancel; `total` [n] is the number
  of its values.

  With n terms for each value, that is

      sum |values| <= min(2**-7, 0.125 / sqrt(n)) * sum |terms|

  Not if all terms are zeros, which may have underflowed, nor if their sum overflows.
  """
  terms_of_value = tf.cast(counted.number_of_terms, tf.float64) / total
  of_random_signs = _LARGEST_OF_RANDOM_SIGNS * tf.math.rsqrt(
    tf.maximum(terms_of_value, 1.0)
  )
  share = tf.cast(tf.minimum(of_random_signs, _LARGEST_CANCELLATION), tf.float32)
  terms = counted.magnitude_of_terms
  return (counted.magnitude <= share * terms) & (terms > 0.0) & tf.is_finite(terms)


class _Counter:
  """Counts the values of tensors. Its ops share constants, which would otherwise be
  half of all ops.
  """

  def __init__(self) -> None:
    self._zero, self._unscaled, self._shift, self._bin_of_zeros = map(
      tf.constant, (0.0, 1.0, 23, 256)
    )
    self._row, self._axis = tf.constant([1, -1]), tf.constant([1])
    self._bins, self._no_weights = tf.constant(_BINS), tf.zeros([0], tf.int32)
    self._no_sum, self._no_terms = tf.zeros([1]), tf.constant(0)

  def count(self, items: List[Measured], terms: List[List[tf.Tensor]]) -> _Counts:
    """Counts the values of n tensors of the same dtype, shape and scale, with the terms
    of each. All ops have GPU kernels for their dtypes.
    """
    rows, size = self._magnitudes([item.tensor for item in items]), len(items)
    bits = tf.bitcast(rows, tf.int32)
    bins = tf.raw_ops.RightShift(x=bits, y=self._shift)
    bin_of_zeros, all_bins = self._bin_of_zeros, self._bins
    if size > 1:
      offsets = tf.constant(_BINS * np.arange(size, dtype=np.int32)[:, np.newaxis])
      bins = tf.bitwise.bitwise_or(bins, offsets)
      bin_of_zeros, all_bins = 256 + offsets, tf.constant(_BINS * size)
    bins = tf.where_v2(tf.cast(bits, tf.bool), bins, bin_of_zeros)
    counts = tf.raw_ops.Bincount(arr=bins, size=all_bins, weights=self._no_weights)
    finite = tf.where_v2(tf.is_finite(rows), rows, self._zero)
    largest = tf.raw_ops.Max(input=finite, axis=self._axis)
    magnitude = magnitude_of_terms = self._no_sum if size == 1 else tf.zeros([size])
    number_of_terms = self._no_terms
    if terms[0]:
      magnitude = tf.raw_ops.Sum(input=rows, axis=self._axis)
      parts = [self._magnitudes(each) for each in zip(*terms)]
      rows_of_terms = tf.concat(parts, axis=1) if len(parts) > 1 else parts[0]
      magnitude_of_terms = tf.raw_ops.Sum(input=rows_of_terms, axis=self._axis)
      number_of_terms = _length_of_row(rows_of_terms)
    counts.set_shape([_BINS * size])  # which TensorFlow does not know in a branch
    for values in (largest, magnitude, magnitude_of_terms):
      values.set_shape([size])
    scale = self._unscaled
    if items[0].scale is not None:
      scale = tf.cast(items[0].scale, tf.float32)
    return _Counts(
      counts, largest, magnitude, magnitude_of_terms, number_of_terms, scale
    )

  def _magnitudes(self, tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Returns the magnitudes of the values of each tensor in a row, float32."""
    parts = [ops.real_parts(tensor) for tensor in tensors]
    if len(parts) == 1:
      rows = tf.raw_ops.Reshape(tensor=parts[0], shape=self._row)
    else:
      rows = tf.reshape(tf.stack(parts), [len(parts), -1])
    return tf.abs(tf.cast(rows, tf.float32))


def _length_of_row(rows: tf.Tensor) -> tf.Tensor:
  """Returns the second dimension of a matrix; if it is unknown, of one with one row."""
  length = rows.shape.as_list()[1]
  return tf.size(rows) if length is None else tf.constant(length)
