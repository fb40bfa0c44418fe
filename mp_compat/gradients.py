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
    raise ValueError("Invalid type {!r} for {}, expected: {}. Only a loss of floating dtype can be scaled; cast it, "
                     "for example with tf.cast(loss, tf.float32).".format(dtype, loss, list(_DTYPES)))
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
  reciprocals: Dict[tf.DType, tf.Tensor] = {}

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


def mark_raw(grads: Iterable[Gradient], names: Iterable[str]) -> None:
  """Notes in the graph that these gradients are as `compute_gradients` made them, before anybody clipped them.

  Args:
    grads: the gradients.
    names: the names of their variables.
  """
  if _compat.current_graph() is None:
    return
  for grad, name in zip(grads, names):
    for values in values_of([grad]):
      _compat.marked_tensors(values.graph)[values.name] = name


def judged(grads: Iterable[Gradient], names: Iterable[str]) -> List[Tuple[str, tf.Tensor]]:
  """The tensors that the verdict on these gradients looks at, each with the name of its variable.

  Args:
    grads: the gradients.
    names: the names of their variables.
  """
  pairs = [(name, values) for grad, name in zip(grads, names) for values in values_of([grad])]
  sources = _raw_sources([values for _, values in pairs])
  return pairs + [(_compat.marked_tensors(raw.graph)[raw.name], raw) for raw in sources]


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
  values = values_of(grads)
  values += _raw_sources(values)
  if not values:
    return tf.constant(True)
  return tf.reduce_all(tf.stack([tf.reduce_all(tf.is_finite(_checkable(value))) for value in values]))


def reveal(grads: Iterable[Gradient], finite: tf.Tensor, seen_elsewhere: bool = False) -> List[Gradient]:
  """The same gradients, the first of them made NaN where the verdict was against them and they do not show it.

  For those who judge the gradients by looking at them (`LossScale.update` of any class). What is finite stays as it
  is, and nothing is computed where the verdict was made from these very gradients.

  Args:
    grads: gradients of any shapes.
    finite: the verdict, `all_finite(grads)` on all replicas.
    seen_elsewhere: whether the verdict also rests on what is not behind these gradients.
  """
  grads = list(grads)
  if seen_elsewhere or _raw_sources(values_of(grads)):
    first = next(i for i, grad in enumerate(grads) if grad is not None)
    nan_or_zero = tf.where_v2(finite, 0., float("nan"))
    grads[first] = _map_values(lambda values: values + tf.cast(nan_or_zero, values.dtype), grads[first])
  return grads


def values_of(grads: Iterable[Gradient]) -> List[tf.Tensor]:
  """The tensors that hold the values of these gradients; those that are None have none."""
  return [_as_tensor(grad.values if isinstance(grad, tf.IndexedSlices) else grad) for grad in grads if grad is not None]


def nearest(values: Iterable[tf.Tensor], wanted: Callable[[tf.Tensor], bool]) -> List[tf.Tensor]:
  """The tensors for which `wanted` holds that `values` are or derive from, by data, without those behind them.

  Args:
    values: tensors.
    wanted: tells of a tensor whether it is one to be found.
  """
  if _compat.current_graph() is None:
    return []
  found, seen, ahead = [], set(), list(values)
  while ahead:
    tensor = ahead.pop()
    key = _key(tensor)
    if key in seen:
      continue
    seen.add(key)
    if wanted(tensor):
      found.append(tensor)
    else:
      ahead.extend(_compat.tensor_inputs(tensor))
  return found


def is_raw(tensor: tf.Tensor) -> bool:
  """Whether `mark_raw` was told of this tensor."""
  return tensor.name in _compat.marked_tensors(tensor.graph)


def clip_by_global_norm(grads: Iterable[Gradient], clip_norm: Any) -> Tuple[List[Gradient], tf.Tensor]:
  """`g * clip_norm / max(norm, clip_norm)`, with the norm over all gradients: the same as `tf.clip_by_global_norm`.

  It differs where that one fails. The norm is computed in float32 for float16 and bfloat16 gradients, whose own sum of
  squares would overflow from 256 on, and is right up to the largest float32 where the sum of squares overflows from
  1.8e19 on. Where a gradient is not finite, all that come back are NaN and nothing raises: the step will be skipped.

  Args:
    grads: gradients of any shapes, each float16, bfloat16, float32 or float64.
    clip_norm: a positive scalar.

  Returns:
    `(clipped, norm)`: as many gradients of the same kinds, shapes and dtypes; and their norm before, a scalar, float64
    where one of them is, float32 otherwise.

  Source: Pascanu et al., "On the difficulty of training Recurrent Neural Networks", 2012 (arXiv:1211.5063);
  `tf.clip_by_global_norm`.
  """
  grads = list(grads)
  values = values_of(grads)
  wide_dtype = tf.float64 if any(value.dtype == tf.float64 for value in values) else tf.float32
  wide = [_map_values(lambda value: tf.cast(value, wide_dtype), grad) for grad in grads]
  norm = tf.global_norm(wide)

  def norm_of_large() -> tf.Tensor:
    peak = tf.reduce_max(tf.stack([tf.reduce_max(tf.abs(value)) for value in values_of(wide)]))
    return peak * tf.global_norm([_map_values(lambda value: value / peak, grad) for grad in wide])

  if values:
    norm = tf.cond(tf.is_finite(norm), lambda: norm, norm_of_large)
  clipped, _ = tf.clip_by_global_norm(wide, tf.cast(clip_norm, wide_dtype), use_norm=norm)
  dtypes = [None if grad is None else values_of([grad])[0].dtype for grad in grads]
  return [_map_values(lambda value, dtype=dtype: tf.cast(value, dtype), grad)
          for grad, dtype in zip(clipped, dtypes)], norm


def finite_or_zero(grads: Iterable[Gradient]) -> List[Gradient]:
  """The same gradients with zeros in place of NaN and inf, for `tf.summary.histogram`, which raises on those.

  For looking at only: training on them hides overflows.

  Args:
    grads: gradients of any shapes, of floating dtypes.
  """
  return [_map_values(lambda value: tf.where_v2(tf.is_finite(_checkable(value)), value, tf.zeros_like(value)), grad)
          for grad in grads]


def _map_values(function: Callable[[tf.Tensor], tf.Tensor], grad: Gradient) -> Gradient:
  if grad is None:
    return None
  if isinstance(grad, tf.IndexedSlices):
    return tf.IndexedSlices(function(grad.values), grad.indices, grad.dense_shape)
  return function(_as_tensor(grad))


def _as_tensor(values: Any) -> tf.Tensor:
  try:
    return tf.convert_to_tensor(values)
  except (TypeError, ValueError) as error:
    raise TypeError("Gradient must be convertible to a Tensor or IndexedSlices, or None: {}. Got {!r}.".format(
        values, type(values))) from error


def _checkable(values: tf.Tensor) -> tf.Tensor:
  dtype = values.dtype.base_dtype
  if dtype not in _DTYPES:
    raise TypeError("Value passed to parameter 'x' has DataType {} not in list of allowed values: {}. Gradients must "
                    "be floating: got {}.".format(dtype.name, ", ".join(d.name for d in _DTYPES), values))
  # TensorFlow 1.15 has no is_finite for bfloat16; float32 holds every bfloat16 value.
  return tf.cast(values, tf.float32) if dtype == tf.bfloat16 else values


def _raw_sources(values: List[tf.Tensor]) -> List[tf.Tensor]:
  """The raw gradients that `values` were computed from, without those that are among `values`."""
  raw = nearest(values, is_raw)
  handed_in = {_key(value) for value in values} if raw else ()
  return [source for source in raw if _key(source) not in handed_in]


def _key(tensor: tf.Tensor) -> Tuple[int, str]:
  return id(tensor.graph), tensor.name
