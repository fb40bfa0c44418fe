"""Losses and gradients of one replica: scaled, unscaled, looked at.

A gradient is a dense tensor, a `tf.IndexedSlices` (of which only `.values` are ever touched) or None.
"""

from typing import Any, Callable, Dict, Iterable, List, Optional, Tuple, Union

from mp_compat import _compat
from mp_compat._compat import tf

Gradient = Optional[Union[tf.Tensor, tf.IndexedSlices]]
Loss = Union[tf.Tensor, Callable[[], tf.Tensor]]

_DTYPES = (tf.bfloat16, tf.float16, tf.float32, tf.float64)


def scale_loss(loss: Loss, scale: tf.Tensor) -> Loss:
  """`loss * scale`, in the dtype of the loss.

  Args:
    loss: a tensor of any shape, float16, bfloat16, float32 or float64; or a callable returning one.
    scale: the loss scale, a float32 scalar. In a float16 loss a scale above 65504 is inf, which costs a step and
      halves the scale: compute the loss in float32.

  Returns:
    A tensor of the loss's shape and dtype; a callable for a callable.

  Raises:
    ValueError: the loss is not of a floating dtype.
  """
  if callable(loss):
    return lambda: scale_loss(loss(), scale)
  loss = tf.convert_to_tensor(loss)
  dtype = loss.dtype.base_dtype
  if dtype not in _DTYPES:
    raise ValueError("Invalid type {!r} for {}, expected: {}. Only a loss of floating dtype can be scaled; cast it, for "
                     "example with tf.cast(loss, tf.float32).".format(dtype, loss, list(_DTYPES)))
  return loss * tf.cast(scale, dtype)


def unscale(grads: Iterable[Gradient], scale: tf.Tensor) -> List[Gradient]:
  """`g * (1 / scale)` for every gradient, in the gradient's own dtype.

  float16 and bfloat16 gradients are multiplied in float32 and rounded once: in float16 itself, 1/2**16 would be
  subnormal and 1/2**25 zero.

  Args:
    grads: gradients of any shapes, each float16, bfloat16, float32 or float64.
    scale: the loss scale, a float32 scalar.

  Returns:
    As many gradients, of the same kinds, shapes and dtypes.
  """
  reciprocals = {}  # type: Dict[tf.DType, tf.Tensor]

  def unscale_values(values: tf.Tensor) -> tf.Tensor:
    wide = tf.float64 if values.dtype == tf.float64 else tf.float32
    if wide not in reciprocals:
      reciprocals[wide] = 1 / tf.cast(scale, wide)
    return tf.cast(tf.cast(values, wide) * reciprocals[wide], values.dtype)

  return [_map_values(unscale_values, grad) for grad in grads]


def gate(grads: Iterable[Gradient]) -> List[Gradient]:
  """The same gradients, none of which is available before all are computed (`Optimizer.GATE_GRAPH`)."""
  grads = list(grads)
  return grads if all(grad is None for grad in grads) else tf.tuple(grads)


def mark_raw(grads: Iterable[Gradient]) -> None:
  """Notes in the graph that these gradients are as `compute_gradients` made them, before anybody clipped them."""
  for values in _values_of(grads):
    if _compat.current_graph() is not None:
      _compat.marked_names(values.graph).add(values.name)


def all_finite(grads: Iterable[Gradient]) -> tf.Tensor:
  """Whether every value of these gradients is finite, and of the raw ones that they were computed from.

  Clipping can turn an inf into a number (`tf.clip_by_value`), and masking can hide a NaN; the raw gradients, marked
  by `mark_raw`, tell. Only those that a gradient derives from by data are looked at, so that gradients read from
  accumulator variables bring no backward pass along.

  Args:
    grads: gradients of any shapes; values of any floating dtype up to the largest finite one count as finite.

  Returns:
    A scalar bool tensor; True where there is nothing to look at.

  Raises:
    TypeError: a gradient is not of a floating dtype.
  """
  values = _values_of(grads)
  values += _raw_sources(values)
  if not values:
    return tf.constant(True)
  return tf.reduce_all(tf.stack([tf.reduce_all(tf.is_finite(_checkable(value))) for value in values]))


def reveal(grads: Iterable[Gradient], finite: tf.Tensor) -> List[Gradient]:
  """The same gradients, the first of them made NaN where a raw gradient was not finite and these do not show it.

  For those who judge the gradients by looking at them (`LossScale.update` of any class). What is finite stays as it
  is, and nothing is computed where the gradients are the raw ones themselves.

  Args:
    grads: gradients of any shapes.
    finite: what `all_finite(grads)` said, on all replicas.
  """
  grads = list(grads)
  if _raw_sources(_values_of(grads)):
    first = next(i for i, grad in enumerate(grads) if grad is not None)
    nan_or_zero = tf.where_v2(finite, 0., float("nan"))
    grads[first] = _map_values(lambda values: values + tf.cast(nan_or_zero, values.dtype), grads[first])
  return grads


def _map_values(function: Callable[[tf.Tensor], tf.Tensor], grad: Gradient) -> Gradient:
  if grad is None:
    return None
  if isinstance(grad, tf.IndexedSlices):
    return tf.IndexedSlices(function(grad.values), grad.indices, grad.dense_shape)
  return function(_as_tensor(grad))


def _values_of(grads: Iterable[Gradient]) -> List[tf.Tensor]:
  return [_as_tensor(grad.values if isinstance(grad, tf.IndexedSlices) else grad) for grad in grads if grad is not None]


def _as_tensor(values: Any) -> tf.Tensor:
  try:
    return tf.convert_to_tensor(values)
  except (TypeError, ValueError) as error:
    raise TypeError("Gradient must be convertible to a Tensor or IndexedSlices, or None: {}. Got {!r}.".format(
        values, type(values))) from error


def _checkable(values: tf.Tensor) -> tf.Tensor:
  dtype = values.dtype.base_dtype
  if dtype not in _DTYPES:
    raise TypeError("Value passed to parameter 'x' has DataType {} not in list of allowed values: {}. Gradients must be "
                    "floating: got {}.".format(dtype.name, ", ".join(d.name for d in _DTYPES), values))
  # TensorFlow 1.15 has no is_finite for bfloat16; float32 holds every bfloat16 value.
  return tf.cast(values, tf.float32) if dtype == tf.bfloat16 else values


def _raw_sources(values: List[tf.Tensor]) -> List[tf.Tensor]:
  """The raw gradients that `values` were computed from, without those that are among `values`."""
  if _compat.current_graph() is None:
    return []
  handed_in = {_key(value) for value in values}
  sources, seen, ahead = [], set(), list(values)
  while ahead:
    tensor = ahead.pop()
    key = _key(tensor)
    if key in seen:
      continue
    seen.add(key)
    if tensor.name not in _compat.marked_names(tensor.graph):
      ahead.extend(_compat.tensor_inputs(tensor))
    elif key not in handed_in:
      sources.append(tensor)
  return sources


def _key(tensor: tf.Tensor) -> Tuple[int, str]:
  return id(tensor.graph), tensor.name
