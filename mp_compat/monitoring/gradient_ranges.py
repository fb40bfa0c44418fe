# SPDX-License-Identifier: Apache-2.0
"""Measures the range of every gradient of a step: histograms of binary exponents beside the range of float16."""

import collections
from typing import Any, Dict, Iterable, List, NamedTuple, Optional, Tuple

from mp_compat._tensorflow import autograph
from mp_compat._tensorflow import contexts
from mp_compat._tensorflow import dead_tensors
from mp_compat._tensorflow import graphs
from mp_compat._tensorflow import ops
from mp_compat._tensorflow import tf
from mp_compat.core import dataflow
from mp_compat.core import gradients
from mp_compat.core import lineage
from mp_compat.monitoring import range_history
from mp_compat.monitoring import reports
from mp_compat.training import step as step_module
from mp_compat.training.optimizer import MixedPrecisionLossScaleOptimizer

_PRECISION = {"float16": 10, "bfloat16": 7}  # bits of the fraction; those of float32 for all other dtypes
# In models with batch normalization and attention, sums that are mathematically zero were up to 0.8 units of the last
# place of the sum of magnitudes, all others more than 50.
_MOST_UNITS_OF_NOISE = 8


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
  for tensor, scale, is_behind_loss, is_measured in derived:
    is_wanted = tensor.dtype.base_dtype in dtypes and (tensor.dtype == tf.float16 or is_behind_loss)
    if is_wanted and not is_measured and tensor.op.type not in dataflow.MOVING:
      measured.append(Measured(tensor.op.name if tensor.value_index == 0 else tensor.name, tensor, scale))
  order = graphs.creation_order()
  measured = [item for item in measured if contexts.is_in_branches_only(item.tensor.op)]
  measured.sort(key=lambda item: order[item.tensor.op])
  sources = dataflow.sources_of(item.tensor for item in measured)
  for index, item in enumerate(measured):
    own = sources[lineage.tensor_key(item.tensor)]
    narrowest = min((dtype for dtype in own if dtype is not None), key=lambda dtype: dtype.size)
    # Functions and loops may compute in any dtype.
    measured[index] = item._replace(dtype=narrowest.name, is_selected=not own.isdisjoint([*dtypes, None]))
  if not any(item.is_selected for item in measured):
    measured = [item._replace(is_selected=True) for item in measured]
  names = reports.number_repeated([item.name for item in measured])
  return Report(
    ranges=collections.OrderedDict(zip(names, _measure_all(measured))),
    measured=dict(zip(names, measured)),
    is_complete=not passed and not any(each.tensor.op.type in dataflow.HIDING for each in derived),
  )


def _gradients(step: step_module.Step, read_computed: bool) -> Tuple[List[Measured], List[lineage.Computed]]:
  """Returns the passed gradients that derive from no computed one, and the records of the computed ones, if read."""
  computed = [each for one in step.lineages for each in one.computed] if read_computed else []
  measurable = [each for each in computed if each.scaled is not None and contexts.is_in_branches_only(each.scaled.op)]
  found = {lineage.tensor_key(each.values): each for each in measurable}
  passed = [Measured(name, values, None) for grad, name in step.gradients for values in gradients.values_of([grad])]
  read_by = dataflow.readers([item.tensor for item in passed])
  derived = {**found, **dataflow.descendants(read_by, [each.values for each in measurable])}
  return [item for item in passed if lineage.tensor_key(item.tensor) not in derived], list(found.values())


def _backward_passes(computed: Iterable[lineage.Computed]) -> List[_Derived]:
  """Returns the tensors between each scale and the gradients that were computed with it."""
  by_scale: Dict[Any, List[lineage.Computed]] = collections.defaultdict(list)
  for record in computed:
    by_scale[lineage.tensor_key(record.scale)].append(record)
  found: List[_Derived] = []
  for scale_key, records in by_scale.items():
    scale, ends = records[0].scale, [record.scaled for record in records]
    read_by = dataflow.readers(ends)
    derived = dataflow.descendants(read_by, [scale])
    # The tensors from which the layers' ops compute the gradients of their variables.
    inputs = [value for op in {op for op, _ in dataflow.sources_of(ends)} for value in op.inputs]
    same = {lineage.tensor_key(tensor): tensor for value in inputs for tensor in dataflow.same_values(value)}
    entering = {key: tensor for key, tensor in same.items() if key in derived}
    behind_loss = {**entering, **dataflow.descendants(read_by, entering.values())}
    measured = {lineage.tensor_key(tensor) for end in ends for tensor in dataflow.same_values(end)}
    measured.update(lineage.tensor_key(reader) for reader in read_by[scale_key] if reader.op.type == "Cast")
    found += [_Derived(tensor, scale, key in behind_loss, key in measured) for key, tensor in derived.items()]
  return found


def _measure_all(measured: List[Measured]) -> List[GradientRange]:
  """Returns the ranges of tensors; zeros for those in branches that are not executed."""
  if not measured:
    return []
  with tf.name_scope("gradient_ranges"):
    are_dead = dead_tensors.may_be_dead([item.tensor for item in measured])
    counted = [
      [dead_tensors.merge_out_of_branches(value, 0, is_dead) for value in _count(item)]
      for item, is_dead in zip(measured, are_dead)
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
    largest = tf.maximum(tf.reduce_max(tf.where_v2(tf.is_finite(values), values, 0.0)), 0.0)
    scale = 1.0 if item.scale is None else item.scale
    terms, is_noise = dataflow.terms_of(item.tensor) if item.scale is not None else [], tf.constant(False)
    if terms:
      unit = 2.0 ** -_PRECISION.get(item.dtype, 23) * tf.add_n([tf.reduce_sum(_magnitudes(term)) for term in terms])
      # Not if all terms are zeros, nor if their sum overflows.
      is_noise = (tf.reduce_sum(values) <= _MOST_UNITS_OF_NOISE * unit) & (unit > 0.0) & tf.is_finite(unit)
    return exponents, zeros, largest, tf.cast(scale, tf.float32), tf.cast(is_noise, tf.int32)
