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
  Set,
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
from mp_compat.training import recorded
from mp_compat.training.optimizer import MixedPrecisionLossScaleOptimizer

# 0 to 255 for the exponents, 256 for zeros; a power of 2, because a bitwise or adds
_BINS = 512

# A sum of n terms of random signs is about 1 / sqrt(n) of the sum of their magnitudes.
# What is much smaller cancels by construction. The terms may be differences of larger
# values, so that their own errors are not relative to them: units of the last place say
# nothing. docs/gradient_ranges.md has what was measured.
_LARGEST_CANCELLATION = 2.0**-7  # of the sum of magnitudes, also of a few terms
_LARGEST_OF_RANDOM_SIGNS = 0.125  # the same, times sqrt(n)
_MANY_VALUES = 4.0  # so many sums of random signs are not all that small

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
    zeros: The share of zeros.
    subnormal: The share of nonzero magnitudes below `2**-14`, float16's smallest normal
      number.
    vanishing: The share of nonzero magnitudes below `2**-24`, float16's smallest
      number.
    largest: The largest finite magnitude, float32; may be 0 if it is below `2**-126`.
    nonfinite: The number of infinite values and NaNs, int32.
    headroom: The largest n with `largest * 2**n <= 65504`, int32; 142 if all are zero,
      -1 if any is not finite.
    scale: The loss scale of the values, float32; 1 for a gradient that was measured as
      it was passed.
    noise: Whether the values are sums whose terms cancel, bool: rounding errors of a
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
  """A tensor that is measured, and what a record says of it besides its values.

  Attributes:
    name: The name of the variable, for its gradient; otherwise that of the op.
    tensor: The tensor.
    scale: The loss scale of the values, a float32 scalar; None if the tensor is
      measured as it was passed.
    dtype: The narrowest floating dtype that its values have had, such as "float16".
    is_selected: Whether the advice is for the tensor.
    applied: The dtype of a variable's gradient after it is divided by the scale; None
      for other tensors.
  """

  name: str
  tensor: tf.Tensor
  scale: Optional[tf.Tensor]
  dtype: str = ""
  is_selected: bool = True
  applied: Optional[str] = None


class Report(NamedTuple):
  """The tensors that are measured in a step, by name, and their ranges.

  Attributes:
    measured: The tensors by unique names, from the loss to the inputs.
    ranges: Their ranges in the same order, each field stacked: int32 [N, 256] for
      `exponents`, [N] for the others. Without tensors, each field is ().
    is_complete: False if a part of the backward pass is not measured.
  """

  measured: "collections.OrderedDict[str, Measured]"
  ranges: GradientRange
  is_complete: bool


class _BackwardPass(NamedTuple):
  """What computes gradients from one loss scale.

  Attributes:
    tensors: All tensors between the scale and the gradients: they derive from the
      scale, and gradients of variables derive from them.
    layers: The gradients of layers among them: not those of variables, nor those that
      only contain the scale, or values of others.
    behind_loss: The keys of those that come after the gradient of the loss function,
      from the last layer with a variable on. The other tensors belong to the loss
      function itself.
  """

  tensors: List[tf.Tensor]
  layers: List[Measured]
  behind_loss: Set[contexts.TensorKey]


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
  ranges: collections.OrderedDict[str, GradientRange] = collections.OrderedDict()
  if not found.measured:
    return ranges
  columns = [tf.unstack(values) for values in found.ranges]
  for name, row in zip(found.measured, zip(*columns)):
    ranges[name] = GradientRange(*row)
  return ranges


def report(optimizer: MixedPrecisionLossScaleOptimizer, dtypes: Dtypes) -> Report:
  """Builds the measurement that `gradient_ranges` describes.

      measured = passed gradients that derive from no computed one
      measured += computed gradients of variables
      measured += gradients of layers in one of `dtypes`
      sort them from the loss to the inputs, and count the values of each

  Returns:
    A `Report`. Its ranges are the only ops that are built.

  Raises:
    RuntimeError, ValueError: See `gradient_ranges`.
  """
  wanted = floating(dtypes)
  record = reports.readable_step(optimizer)
  computed: List[lineage.Computed] = []
  if optimizer._mp_compat_settings.check_computed_gradients:
    computed = _computed_gradients(record)
  passed = _only_passed(record, computed)
  passes = _backward_passes(computed)
  tensors: List[tf.Tensor] = []
  for backward_pass in passes:
    tensors += backward_pass.tensors
  wanted = _dtypes_to_measure(wanted, tensors)
  measured = list(passed)
  for each in computed:
    applied = each.values.dtype.name
    measured.append(Measured(each.name, each.scaled, each.scale, applied=applied))
  for backward_pass in passes:
    measured += _layers_to_measure(backward_pass, wanted)
  readable = [item for item in measured if contexts.is_in_branches_only(item.tensor.op)]
  measured = _with_dtypes(readable, wanted)
  order = graphs.creation_order()
  measured.sort(key=lambda item: order[item.tensor.op])
  has_hidden = any(tensor.op.type in dataflow.HIDING for tensor in tensors)
  return Report(
    measured=reports.by_unique_names((item.name, item) for item in measured),
    ranges=_measure(measured),
    is_complete=not passed and not has_hidden,
  )


def floating(dtypes: Dtypes) -> List[tf.DType]:
  """Returns the dtypes that one or several are; raises a ValueError if one is not
  floating.
  """
  if isinstance(dtypes, (str, tf.DType)):
    dtypes = [dtypes]
  text = "dtypes must be floating, such as tf.float16, but got {}."
  try:
    found = [tf.as_dtype(dtype) for dtype in dtypes]
  except TypeError as error:
    raise ValueError(text.format(repr(dtypes))) from error
  for dtype in found:
    if not dtype.is_floating:
      raise ValueError(text.format(dtype.name))
  return found


def _dtypes_to_measure(
  wanted: List[tf.DType], tensors: Iterable[tf.Tensor]
) -> List[tf.DType]:
  """Returns `wanted` if any of the tensors has one of these dtypes; otherwise bfloat16
  or float32, the first that one has. If none has them, returns `wanted`.
  """
  existing = {tensor.dtype.base_dtype for tensor in tensors}
  for dtypes in (wanted, [tf.bfloat16], [tf.float32]):
    if existing.intersection(dtypes):
      return dtypes
  return wanted


def _layers_to_measure(
  backward_pass: _BackwardPass, wanted: List[tf.DType]
) -> List[Measured]:
  """Returns the gradients of layers in the `wanted` dtypes; float16 ones also before
  the last layer with a variable, where the loss function may overflow.
  """
  found = []
  for item in backward_pass.layers:
    is_behind_loss = contexts.tensor_key(item.tensor) in backward_pass.behind_loss
    is_shown = item.tensor.dtype == tf.float16 or is_behind_loss
    if is_shown and item.tensor.dtype.base_dtype in wanted:
      found.append(item)
  return found


def _with_dtypes(
  measured: List[Measured], dtypes: Iterable[tf.DType]
) -> List[Measured]:
  """Adds the narrowest dtype of each tensor; selects those that have had one of
  `dtypes`, or all if none has.
  """
  # None stands for functions and loops, which may compute in any dtype.
  selected = [*dtypes, None]
  sources = dataflow.sources_of(item.tensor for item in measured)
  found = []
  for item in measured:
    own = sources[contexts.tensor_key(item.tensor)]
    known = [dtype for dtype in own if dtype is not None]
    narrowest = min(known, key=lambda dtype: dtype.size)
    is_selected = not own.isdisjoint(selected)
    found.append(item._replace(dtype=narrowest.name, is_selected=is_selected))
  if any(item.is_selected for item in found):
    return found
  return [item._replace(is_selected=True) for item in found]


def _computed_gradients(record: recorded.Step) -> List[lineage.Computed]:
  """Returns the gradients that were computed from the scaled loss and can be read, one
  for each tensor.
  """
  found: Dict[contexts.TensorKey, lineage.Computed] = {}
  for of_replica in record.lineages:
    for each in of_replica.computed:
      if each.scaled is None:
        continue
      if contexts.is_in_branches_only(each.scaled.op):
        found[contexts.tensor_key(each.values)] = each
  return list(found.values())


def _only_passed(
  record: recorded.Step, computed: List[lineage.Computed]
) -> List[Measured]:
  """Returns the passed gradients that derive from no computed one: they are measured as
  they were passed, without a scale.
  """
  passed = reports.passed_gradients(record)
  read_by = dataflow.readers([values for _, values in passed])
  sources = [each.values for each in computed]
  known = contexts.keys_of(sources)
  known.update(dataflow.descendants(read_by, sources))
  found = []
  for name, values in passed:
    if contexts.tensor_key(values) not in known:
      found.append(Measured(name, values, scale=None))
  return found


def _backward_passes(computed: Iterable[lineage.Computed]) -> List[_BackwardPass]:
  """Returns the backward passes that compute gradients, one for each loss scale."""
  by_scale: Dict[contexts.TensorKey, List[lineage.Computed]] = collections.defaultdict(
    list
  )
  for each in computed:
    by_scale[contexts.tensor_key(each.scale)].append(each)
  passes = []
  for of_scale in by_scale.values():
    scale = of_scale[0].scale
    ends = [each.scaled for each in of_scale]
    passes.append(_backward_pass(scale, ends))
  return passes


def _backward_pass(scale: tf.Tensor, ends: List[tf.Tensor]) -> _BackwardPass:
  """Returns the backward pass from a loss scale to gradients of variables.

      derived = the tensors between `scale` and `ends`
      layers = derived, without tensors that contain the values of an end, casts of
          the scale, and results of ops that only move values
      entering = inputs of the ops that compute the ends, if they are in derived: the
          gradients of the outputs of all layers with variables
      behind_loss = entering, and what derives from them

  Args:
    scale: the loss scale that multiplied the loss.
    ends: the gradients of variables before they are divided by `scale`.
  """
  read_by = dataflow.readers(ends)
  derived = dataflow.descendants(read_by, [scale])
  readers_of_scale = read_by.get(contexts.tensor_key(scale), [])
  casts_of_scale = [each for each in readers_of_scale if each.op.type == "Cast"]
  no_layers = contexts.keys_of([*dataflow.same_values(ends), *casts_of_scale])
  layers = []
  for key, tensor in derived.items():
    if key in no_layers or tensor.op.type in dataflow.MOVING:
      continue
    is_first_output = tensor.value_index == 0
    name = tensor.op.name if is_first_output else tensor.name
    layers.append(Measured(name, tensor, scale))
  # The tensors from which the layers' ops compute the gradients of their variables.
  inputs: List[tf.Tensor] = []
  for op in {op for op, _ in dataflow.sources_of(ends)}:
    inputs += op.inputs
  entering = [
    value
    for value in dataflow.same_values(inputs)
    if contexts.tensor_key(value) in derived
  ]
  behind_loss = contexts.keys_of(entering)
  behind_loss.update(dataflow.descendants(read_by, entering))
  return _BackwardPass(list(derived.values()), layers, behind_loss)


class _Counts(NamedTuple):
  """What is counted of n tensors of one dtype, shape and scale.

  Attributes:
    bins: int32 [n * 512], 512 for each tensor: the numbers of nonzero values by biased
      exponent (0 to 255), then the number of zeros (256); the others are 0.
    largest: float32 [n], the largest finite magnitudes; -inf if empty.
    magnitude: float32 [n], the sums of the magnitudes; zeros without terms.
    magnitude_of_terms: float32 [n], the same of the terms of the values.
    number_of_terms: int32 [], that of all values of one tensor.
    scale: float32 [], the loss scale; 1 without one.
  """

  bins: tf.Tensor
  largest: tf.Tensor
  magnitude: tf.Tensor
  magnitude_of_terms: tf.Tensor
  number_of_terms: tf.Tensor
  scale: tf.Tensor


def _measure(measured: List[Measured]) -> GradientRange:
  """Builds the ops that count the values of tensors.

      for each group of tensors that may be stacked:
        count them together, in the branch in which they are computed
        outside of the branch, zeros stand for the counts if it is not executed
      bring the counts in the order of `measured`, and compute shares from them

  A tensor that may be dead, because a branch is not executed, is a group of its own.
  That is known when the graph is built: `are_dead` has Python bools.

  Returns:
    The ranges, each field stacked; () for each without tensors.
  """
  if not measured:
    return GradientRange(*[()] * len(GradientRange._fields))
  terms: List[List[tf.Tensor]] = []  # of each tensor
  for item in measured:
    # The terms of a passed gradient are not of its scale.
    terms.append([] if item.scale is None else dataflow.terms_of(item.tensor))
  are_dead = dead_tensors.may_be_dead(item.tensor for item in measured)
  groups: Dict[Hashable, List[int]] = collections.defaultdict(list)
  for index, (item, is_dead) in enumerate(zip(measured, are_dead)):
    # Tensors of a branch are not stacked: each has an index of its own as the key.
    key = index if is_dead else _stacking_key(item, terms[index])
    groups[key].append(index)
  with tf.name_scope("gradient_ranges"):
    counter = _Counter()
    counted: List[_Counts] = []
    for group in groups.values():
      items = [measured[index] for index in group]
      branch = contexts.of_outputs(items[0].tensor.op)
      with contexts.enter(branch):
        counts = counter.count(items, [terms[index] for index in group])
      is_dead = are_dead[group[0]]
      outside = [
        dead_tensors.merge_out_of_branches(each, 0, is_dead) for each in counts
      ]
      counted.append(_Counts(*outside))
    in_order = _in_order(counted, list(groups.values()))
    return _ranges(in_order)


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


def _stacking_key(item: Measured, terms: List[tf.Tensor]) -> Hashable:
  """Returns a key that tensors share which may be stacked: small ones of one shape,
  with the same scale, whose terms are small and of one shape, too.
  """
  scale_key = None if item.scale is None else contexts.tensor_key(item.scale)
  found: List[Hashable] = [scale_key]
  for tensor in [item.tensor, *terms]:
    if finite_check.is_small(tensor):
      found.append((tensor.dtype, tuple(tensor.shape.as_list()), tensor.device))
    else:
      found.append(contexts.tensor_key(tensor))
  return tuple(found)


def _ranges(counted: _Counts) -> GradientRange:
  """Returns stacked ranges from the counts of all tensors, as `_in_order` returns
  them. Shares are of all values, with zeros and those that are not finite.
  """
  zeros = counted.bins[:, 256:257]
  counts = counted.bins[:, :256]
  exponents = tf.concat([counts[:, :1] + zeros, counts[:, 1:]], axis=1)
  total = tf.cast(tf.maximum(tf.reduce_sum(exponents, axis=1), 1), tf.float64)

  def share(numbers: tf.Tensor) -> tf.Tensor:
    return tf.cast(tf.reduce_sum(numbers, axis=1), tf.float64) / total

  largest = tf.maximum(counted.largest, 0.0)  # -inf of an empty tensor becomes 0
  bits = tf.bitcast(largest, tf.int32)
  nonfinite = counts[:, 255]
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
  """Returns bool [n], whether the terms of each tensor cancel; `total` [n] is the
  number of its values.

  With n terms for each of m values, that is

      sum |values| <= min(2**-7, 0.125 / sqrt(n) * min(1, m / 4)**2) * sum |terms|

  Of few values, all may be small by chance. Not if all terms are zeros, which may have
  underflowed, nor if their sum overflows.
  """
  terms_of_value = tf.cast(counted.number_of_terms, tf.float64) / total
  by_chance = tf.square(tf.minimum(total / _MANY_VALUES, 1.0))
  of_random_signs = (_LARGEST_OF_RANDOM_SIGNS * by_chance) * tf.math.rsqrt(
    tf.maximum(terms_of_value, 1.0)
  )
  share = tf.cast(tf.minimum(of_random_signs, _LARGEST_CANCELLATION), tf.float32)
  terms = counted.magnitude_of_terms
  return (counted.magnitude <= share * terms) & (terms > 0.0) & tf.is_finite(terms)


class _Counter:
  """Counts the values of tensors. Its ops share constants, which would otherwise be
  half of all ops.

      rows = magnitudes of each tensor in a row, float32
      bin = its exponent (the bits above the fraction), or 256 for a zero
      bins = the number of values in each bin, for each row
      largest = the largest finite magnitude of each row
      magnitude, magnitude_of_terms = sums of the rows, and of those of the terms
  """

  def __init__(self) -> None:
    self._zero = tf.constant(0.0)
    self._unscaled = tf.constant(1.0)
    self._shift = tf.constant(23)  # the bits of the fraction of a float32
    self._bin_of_zeros = tf.constant(256)
    self._row = tf.constant([1, -1])
    self._axis = tf.constant([1])
    self._bins = tf.constant(_BINS)
    self._no_weights = tf.zeros([0], tf.int32)
    self._no_sum = tf.zeros([1])
    self._no_terms = tf.constant(0)

  def count(self, items: List[Measured], terms: List[List[tf.Tensor]]) -> _Counts:
    """Counts the values of n tensors of the same dtype, shape and scale, with the terms
    of each. All ops have GPU kernels for their dtypes.
    """
    size = len(items)
    rows = self._magnitudes([item.tensor for item in items])
    bins = self._count_bins(rows, size)
    finite = tf.where_v2(tf.is_finite(rows), rows, self._zero)
    largest = tf.raw_ops.Max(input=finite, axis=self._axis)
    magnitude = self._no_sum if size == 1 else tf.zeros([size])
    magnitude_of_terms = magnitude
    number_of_terms = self._no_terms
    if terms[0]:
      magnitude = tf.raw_ops.Sum(input=rows, axis=self._axis)
      parts = [self._magnitudes(each) for each in zip(*terms)]
      rows_of_terms = tf.concat(parts, axis=1) if len(parts) > 1 else parts[0]
      magnitude_of_terms = tf.raw_ops.Sum(input=rows_of_terms, axis=self._axis)
      number_of_terms = _length_of_row(rows_of_terms)
    # which TensorFlow does not know in a branch
    bins.set_shape([_BINS * size])
    for values in (largest, magnitude, magnitude_of_terms):
      values.set_shape([size])
    scale = self._unscaled
    if items[0].scale is not None:
      scale = tf.cast(items[0].scale, tf.float32)
    return _Counts(
      bins=bins,
      largest=largest,
      magnitude=magnitude,
      magnitude_of_terms=magnitude_of_terms,
      number_of_terms=number_of_terms,
      scale=scale,
    )

  def _count_bins(self, rows: tf.Tensor, size: int) -> tf.Tensor:
    """Returns how many values are in each bin, int32 [size * 512], from magnitudes in
    `size` rows. Each row has 512 bins of its own.
    """
    bits = tf.bitcast(rows, tf.int32)
    bins = tf.raw_ops.RightShift(x=bits, y=self._shift)
    bin_of_zeros, number_of_bins = self._bin_of_zeros, self._bins
    if size > 1:
      offsets = tf.constant(_BINS * np.arange(size, dtype=np.int32)[:, np.newaxis])
      bins = tf.bitwise.bitwise_or(bins, offsets)
      bin_of_zeros = 256 + offsets
      number_of_bins = tf.constant(_BINS * size)
    is_nonzero = tf.cast(bits, tf.bool)
    bins = tf.where_v2(is_nonzero, bins, bin_of_zeros)
    return tf.raw_ops.Bincount(arr=bins, size=number_of_bins, weights=self._no_weights)

  def _magnitudes(self, tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Returns the magnitudes of the values of each tensor in a row, float32."""
    parts = ops.real_parts(tensors)
    if len(parts) == 1:
      rows = tf.raw_ops.Reshape(tensor=parts[0], shape=self._row)
    else:
      rows = tf.reshape(tf.stack(parts), [len(parts), -1])
    return tf.abs(tf.cast(rows, tf.float32))


def _length_of_row(rows: tf.Tensor) -> tf.Tensor:
  """Returns the second dimension of a matrix, int32 []. If it is not known statically,
  the matrix has one row: only tensors of known shapes are stacked.
  """
  length = rows.shape.as_list()[1]
  if length is None:
    return tf.size(rows)
  return tf.constant(length)
