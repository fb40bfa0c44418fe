# SPDX-License-Identifier: Apache-2.0
"""Scales the loss of one replica; unscales, converts and clips its gradients.

A gradient is a dense tensor, a `tf.IndexedSlices` (only its `.values` are changed) or
None.
"""

import functools
import itertools
from typing import Callable, Iterable, List, Optional, Tuple, Union

from mp_compat._tensorflow import autograph
from mp_compat._tensorflow import ops
from mp_compat._tensorflow import tf
from mp_compat.core import variable_scope
from mp_compat.graph import control_flow

Gradient = Optional[Union[tf.Tensor, tf.IndexedSlices]]
GradAndVar = Tuple[Gradient, tf.Variable]
Loss = Union[tf.Tensor, Callable[[], tf.Tensor]]

_DTYPES = (tf.bfloat16, tf.float16, tf.float32, tf.float64)


def scale_loss(loss: Loss, scale: tf.Tensor) -> Loss:
  """Returns `loss * scale` in the dtype of the loss.

  A float16 loss cannot be scaled by more than 65504: the scale becomes inf, the step is
  skipped and a dynamic scale backs off. Compute the loss in float32 instead.

  `loss` is a dense or ragged tensor of any shape and a dtype of `_DTYPES` (else a
  ValueError), or a callable that returns one, for which the result is a callable.
  `scale` is a float32 scalar.
  """
  if callable(loss):
    return lambda: scale_loss(loss(), scale)
  if isinstance(loss, tf.RaggedTensor):
    return loss.with_flat_values(scale_loss(loss.flat_values, scale))
  loss = tf.convert_to_tensor(loss)
  dtype = loss.dtype.base_dtype
  if dtype not in _DTYPES:
    raise ValueError(
      "Invalid type {!r} for {}, expected: {}. Only a loss of floating dtype can be "
      "scaled; cast it, for example with tf.cast(loss, tf.float32).".format(
        dtype, loss, list(_DTYPES)
      )
    )
  with tf.name_scope("scale_loss"):
    return loss * tf.cast(scale, dtype)


def unscale(grads: Iterable[Gradient], scale: tf.Tensor) -> List[Gradient]:
  """Returns `g * (1 / scale)` for every gradient, in the gradient's dtype.

  float16 and bfloat16 gradients are multiplied in float32 and rounded once: in float16,
  1/2**16 would be subnormal and 1/2**25 would be zero. `scale` is a float32 scalar.
  """
  grads = list(grads)

  def unscale_values(values: tf.Tensor) -> tf.Tensor:
    wide = _widened(values.dtype)
    # In eager mode, an op is faster than an operator, and a cast takes time although it
    # changes nothing.
    if values.dtype == wide:
      return tf.raw_ops.Mul(x=values, y=reciprocals[wide], name="mul")
    return tf.cast(tf.cast(values, wide) * reciprocals[wide], values.dtype)

  unscaled: List[Gradient] = []
  with tf.name_scope("unscale_gradients"):
    dtypes = dict.fromkeys(_widened(values.dtype) for values in values_of(grads))
    reciprocals = {dtype: 1 / tf.cast(scale, dtype) for dtype in dtypes}
    for device, group in itertools.groupby(
      grads, lambda grad: "" if grad is None else grad.device
    ):
      with tf.device(device):
        unscaled += [map_values(unscale_values, grad) for grad in group]
  return unscaled


def _widened(dtype: tf.DType) -> tf.DType:
  """Returns the dtype in which values are unscaled, at least float32."""
  if dtype in (tf.float16, tf.bfloat16):
    return tf.float32
  return dtype


def convert(grad: object, dtype: Optional[tf.DType] = None) -> Gradient:
  """Converts a tensor, `tf.IndexedSlices`, variable, NumPy array, list or number to a
  gradient; returns None for None.

  Arrays, lists and numbers get the dtype, by default that which TensorFlow chooses.
  Each part of a `tf.IndexedSlices` may be a tensor, a variable, a NumPy array, a list
  or a tuple, and becomes a tensor.

  Raises a TypeError if `grad` cannot be converted, is not numeric, or is a (gradient,
  variable) pair.
  """
  if grad is None:
    return None
  if isinstance(grad, tf.Tensor):
    return _as_value(grad)
  if isinstance(grad, tuple) and len(grad) == 2 and hasattr(grad[1], "assign"):
    raise TypeError(
      "Expected a gradient, but got a (gradient, variable) pair: {}. Separate "
      "gradients and variables first: grads, variables = "
      "zip(*grads_and_vars).".format(grad)
    )
  try:
    if isinstance(grad, tf.IndexedSlices):
      return _converted_slices(grad, dtype)
    converted = _to_tensor(grad, dtype)
  except (TypeError, ValueError) as error:
    raise TypeError(
      "Gradient must be convertible to a Tensor or IndexedSlices, or None: {}. Got "
      "{!r}.".format(grad, type(grad))
    ) from error
  return _as_value(converted)


def _to_tensor(value: object, dtype: Optional[tf.DType]) -> tf.Tensor:
  """Returns a tensor; of arrays, lists and numbers of a dtype, if one is given."""
  return tf.convert_to_tensor(value, None if tf.is_tensor(value) else dtype)


def _converted_slices(
  grad: tf.IndexedSlices, dtype: Optional[tf.DType]
) -> tf.IndexedSlices:
  """Returns a sparse gradient whose parts are tensors that ops built now can read."""
  values = _as_value(_to_tensor(grad.values, dtype))
  indices = readable(tf.convert_to_tensor(grad.indices))
  dense_shape = grad.dense_shape
  if dense_shape is not None:
    dense_shape = readable(tf.convert_to_tensor(dense_shape))
  return tf.IndexedSlices(values, indices, dense_shape)


def convert_pairs(
  grads_and_vars: Iterable[Tuple[object, tf.Variable]],
) -> Tuple[GradAndVar, ...]:
  """Returns the (gradient, variable) pairs, with each gradient converted once, and
  the variable in place of its cast (`float32_variable_storage_getter`).

  Raises a ValueError if all gradients are None or there are no pairs, a TypeError if
  `convert` does or a gradient is neither floating nor of its variable's dtype.
  """
  converted: List[GradAndVar] = []
  for grad, variable in grads_and_vars:
    grad = convert(grad)
    if isinstance(variable, tf.Tensor):
      variable = variable_scope.variable_of(variable)
    converted.append((grad, variable))
  pairs = tuple(converted)
  for grad, variable in pairs:
    _check_dtype(grad, variable)
  if not pairs:
    raise ValueError(
      "No variables provided. Expected (gradient, variable) pairs, but got none."
    )
  if all(grad is None for grad, _ in pairs):
    variables = [str(variable) for _, variable in pairs]
    raise ValueError(
      "No gradients provided for any variable: {}. All gradients are None.".format(
        variables
      )
    )
  return pairs


def _check_dtype(grad: Gradient, variable: tf.Variable) -> None:
  """Raises a TypeError unless a gradient is floating, or of its variable's dtype."""
  if grad is None or grad.dtype.is_floating:
    return
  if grad.dtype == tf.as_dtype(variable.dtype).base_dtype:
    return
  allowed = ", ".join(dtype.name for dtype in _DTYPES)
  raise TypeError(
    "Value passed to parameter 'x' has DataType {} not in list of allowed values: "
    "{}. The gradient of {} must be floating, but got {}.".format(
      grad.dtype.name, allowed, variable, grad
    )
  )


def _as_value(values: tf.Tensor) -> tf.Tensor:
  """Returns the values as an ordinary numeric tensor of the current graph."""
  dtype = values.dtype.base_dtype
  if not (dtype.is_floating or dtype.is_complex or dtype.is_integer):
    raise TypeError(
      "Gradients must be numeric, but got {} of dtype {}.".format(values, dtype.name)
    )
  return readable(values)


def readable(tensor: tf.Tensor) -> tf.Tensor:
  """Returns a tensor of the current graph, not a reference, with the same values.

  Branches that are functions cannot take references, such as the output of
  `tf.assign_add`. When a function is built, `tf.identity` turns eager tensors into its
  tensors.
  """
  is_reference = tensor.dtype != tensor.dtype.base_dtype
  is_eager = not hasattr(tensor, "graph")
  is_of_graph = tf.executing_eagerly() or not is_eager
  if is_of_graph and not is_reference:
    return tensor
  return tf.identity(tensor)


def values_of(grads: Iterable[Gradient]) -> List[tf.Tensor]:
  """Returns the tensors that hold the values of the gradients; omits None."""
  values: List[tf.Tensor] = []
  for grad in grads:
    if grad is None:
      continue
    is_sparse = isinstance(grad, tf.IndexedSlices)
    values.append(grad.values if is_sparse else grad)
  return values


def with_values(
  grads: Iterable[Gradient], values: Iterable[tf.Tensor]
) -> List[Gradient]:
  """Returns the gradients with other values, of which there are as many as `values_of`
  returns, in the same order.
  """
  remaining = iter(values)
  return [map_values(lambda _: next(remaining), grad) for grad in grads]


def map_values(function: Callable[[tf.Tensor], tf.Tensor], grad: Gradient) -> Gradient:
  """Returns the gradient with `function` applied to its values; None for None."""
  if grad is None:
    return None
  if isinstance(grad, tf.IndexedSlices):
    return tf.IndexedSlices(function(grad.values), grad.indices, grad.dense_shape)
  return function(grad)


def add_nan_unless(finite: tf.Tensor, grads: Iterable[Gradient]) -> List[Gradient]:
  """Returns the same gradients; if `finite` is False, adds NaN to the first dense one,
  or to all if all are sparse.

  A sparse gradient may have no values. Integers stay as they are.
  """
  grads = list(grads)
  zero_or_nan = tf.where_v2(finite, 0.0, float("nan"))

  def add_nan(values: tf.Tensor) -> tf.Tensor:
    return values + tf.cast(zero_or_nan, values.dtype)

  dense: List[int] = []
  sparse: List[int] = []
  for index, grad in enumerate(grads):
    if grad is None or grad.dtype.is_integer:
      continue
    if isinstance(grad, tf.IndexedSlices):
      sparse.append(index)
    else:
      dense.append(index)
  for index in dense[:1] or sparse:
    grads[index] = map_values(add_nan, grads[index])
  return grads


@autograph.do_not_convert
def clip_by_global_norm(
  grads: Iterable[Gradient], clip_norm: Union[float, tf.Tensor]
) -> Tuple[List[Gradient], tf.Tensor]:
  """Returns `g * clip_norm / max(norm, clip_norm)`, with the norm over all gradients,
  as `tf.clip_by_global_norm` does.

  Unlike in `tf.clip_by_global_norm`, the norm does not overflow: it is computed in
  float32 for float16 and bfloat16 gradients, and is correct up to the largest float32
  (a sum of squares overflows from a norm of 256 on in float16, of 1.8e19 in float32).
  If a gradient is not finite, all returned gradients are NaN: `apply_gradients` skips
  the step.

  Args:
    grads: gradients of any shapes, each float16, bfloat16, float32 or float64; dense,
      `tf.IndexedSlices` or None.
    clip_norm: a positive scalar.

  Returns:
    `(clipped, norm)`: a list of as many gradients, of the same kinds, shapes and
    dtypes; and the norm before clipping, a scalar, float64 if any gradient is float64,
    else float32.

  Raises:
    TypeError: If a gradient is complex, or cannot be converted to a numeric tensor.

  Source: Pascanu et al., "On the difficulty of training Recurrent Neural Networks",
  2012 (arXiv:1211.5063); `tf.clip_by_global_norm`.
  """
  grads = [convert(grad) for grad in grads]
  values = values_of(grads)
  for value in values:
    if value.dtype.is_complex:
      raise TypeError(
        "Expected gradients of floating dtypes, as tf.clip_by_global_norm does, but "
        "got {}: {}. Clip its tf.math.real() and tf.math.imag().".format(
          value.dtype.name, value
        )
      )
  dtypes = {value.dtype for value in values}
  wide_dtype = tf.float64 if tf.float64 in dtypes else tf.float32
  wide = [map_values(lambda value: tf.cast(value, wide_dtype), grad) for grad in grads]
  norm = tf.global_norm(wide)

  def norm_of_large() -> tf.Tensor:
    """Returns the norm if the sum of squares overflows: that of the values divided by
    the largest one, times this one. It is not finite if a value is not.
    """
    peaks = [tf.reduce_max(tf.abs(value)) for value in values_of(wide)]
    peak = tf.reduce_max(tf.stack(peaks))
    at_most_one = [map_values(lambda value: value / peak, grad) for grad in wide]
    return peak * tf.global_norm(at_most_one)

  if values:
    norm = control_flow.cond(tf.is_finite(norm), lambda: norm, norm_of_large)
  clip_norm = tf.cast(clip_norm, wide_dtype)
  clipped_wide, _ = tf.clip_by_global_norm(wide, clip_norm, use_norm=norm)
  clipped: List[Gradient] = []
  for grad, result in zip(grads, clipped_wide):
    if grad is not None:
      result = map_values(functools.partial(tf.cast, dtype=grad.dtype), result)
    clipped.append(result)
  return clipped, norm


@autograph.do_not_convert
def finite_or_zero(grads: Iterable[Gradient]) -> List[Gradient]:
  """Returns the gradients with zeros in place of NaN and inf, which make
  `tf.summary.histogram` raise an error.

  For summaries only: training with them hides overflows. `grads` are gradients of any
  shapes and floating dtypes, dense, `tf.IndexedSlices` or None; the result is a list of
  as many, of the same kinds, shapes and dtypes. Raises a TypeError if a gradient cannot
  be converted to a numeric tensor.
  """

  def replaced(value: tf.Tensor) -> tf.Tensor:
    return tf.where_v2(ops.is_finite(value), value, tf.zeros_like(value))

  return [map_values(replaced, convert(grad)) for grad in grads]
