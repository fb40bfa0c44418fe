"""Losses and gradients of one replica: scaled, unscaled, looked at.

A gradient is a dense tensor, a `tf.IndexedSlices` (of which only `.values` are ever touched) or None.
"""

from typing import Any, Callable, Dict, Iterable, List, NamedTuple, Optional, Tuple, Union

from mp_compat import _compat
from mp_compat._compat import tf

Gradient = Optional[Union[tf.Tensor, tf.IndexedSlices]]
Loss = Union[tf.Tensor, Callable[[], tf.Tensor]]

_DTYPES = (tf.bfloat16, tf.float16, tf.float32, tf.float64)


class Scaled(NamedTuple):
  """What `unscale` was given: it returned `unscale_values(values, reciprocal)`."""

  values: tf.Tensor
  reciprocal: Optional[tf.Tensor]  # None where they are as they were


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


def unscale(grads: Iterable[Gradient], scale: tf.Tensor, deferrable: bool = False) -> List[Gradient]:
  """`g * (1 / scale)` for every gradient, in the gradient's own dtype.

  float16 and bfloat16 gradients are multiplied in float32 and rounded once: in float16 itself, 1/2**16 would be
  subnormal and 1/2**25 zero.

  Args:
    grads: gradients of any shapes, each float16, bfloat16, float32 or float64.
    scale: the loss scale, a float32 scalar.
    deferrable: whether those who apply them may multiply later instead (`before_unscaling`).

  Returns:
    As many gradients, of the same kinds, shapes and dtypes.
  """
  reciprocals: Dict[tf.DType, tf.Tensor] = {}

  def unscale_one(values: tf.Tensor) -> tf.Tensor:
    wide = tf.float64 if values.dtype == tf.float64 else tf.float32
    if wide not in reciprocals:
      reciprocals[wide] = 1 / tf.cast(scale, wide)
    with _compat.on_device_of(values):
      unscaled = unscale_values(values, reciprocals[wide])
    if deferrable:
      _note_scaled(unscaled, Scaled(values, reciprocals[wide]))
    return unscaled

  return [map_values(unscale_one, grad) for grad in grads]


def unscale_values(values: tf.Tensor, reciprocal: tf.Tensor) -> tf.Tensor:
  """`values * reciprocal`, multiplied in the dtype of the latter and rounded to that of the former."""
  return tf.cast(tf.cast(values, reciprocal.dtype) * reciprocal, values.dtype)


def before_unscaling(values: tf.Tensor) -> Scaled:
  """What deferrable values were before `unscale`; in functions and in eager mode, the values themselves."""
  graph = _compat.current_graph()
  unknown = Scaled(values, None)
  return unknown if graph is None else _compat.scaled_tensors(graph).get(values.name, unknown)


def _note_scaled(values: tf.Tensor, scaled: Scaled) -> None:
  graph = _compat.current_graph()
  if graph is not None and not _compat.may_be_compiled():
    _compat.scaled_tensors(graph)[values.name] = scaled


def gate(grads: Iterable[Gradient]) -> List[Gradient]:
  """The same gradients, none of which is available before all are computed (`Optimizer.GATE_GRAPH`)."""
  grads = list(grads)
  if all(grad is None for grad in grads):
    return grads
  gated = tf.tuple(grads)
  for before, after in zip(values_of(grads), values_of(gated)):
    _note_scaled(after, before_unscaling(before))
  return gated


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
  sources = raw_sources([values for _, values in pairs])
  return pairs + [(_compat.marked_tensors(raw.graph)[raw.name], raw) for raw in sources]


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
  if seen_elsewhere or raw_sources(values_of(grads)):
    first = next(i for i, grad in enumerate(grads) if grad is not None)
    nan_or_zero = tf.where_v2(finite, 0., float("nan"))
    grads[first] = map_values(lambda values: values + tf.cast(nan_or_zero, values.dtype), grads[first])
  return grads


def values_of(grads: Iterable[Gradient]) -> List[tf.Tensor]:
  """The tensors that hold the values of these gradients; those that are None have none."""
  return [_as_tensor(grad.values if isinstance(grad, tf.IndexedSlices) else grad) for grad in grads if grad is not None]


def check_floating(values: tf.Tensor) -> tf.Tensor:
  """The same tensor; a TypeError where it is not of a floating dtype."""
  dtype = values.dtype.base_dtype
  if dtype not in _DTYPES:
    raise TypeError("Value passed to parameter 'x' has DataType {} not in list of allowed values: {}. Gradients must "
                    "be floating: got {}.".format(dtype.name, ", ".join(d.name for d in _DTYPES), values))
  return values


def map_values(function: Callable[[tf.Tensor], tf.Tensor], grad: Gradient) -> Gradient:
  """The gradient with `function` of its values in place of these."""
  if grad is None:
    return None
  if isinstance(grad, tf.IndexedSlices):
    return tf.IndexedSlices(function(grad.values), grad.indices, grad.dense_shape)
  return function(_as_tensor(grad))


def raw_sources(values: List[tf.Tensor]) -> List[tf.Tensor]:
  """The raw gradients that `values` were computed from, without those that are among `values`."""
  raw = nearest(values, is_raw)
  handed_in = {key_of(value) for value in values} if raw else ()
  return [source for source in raw if key_of(source) not in handed_in]


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
    key = key_of(tensor)
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


def key_of(tensor: tf.Tensor) -> Tuple[int, str]:
  """By what a tensor of a graph can be told from all others."""
  return id(tensor.graph), tensor.name


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
  wide = [map_values(lambda value: tf.cast(value, wide_dtype), grad) for grad in grads]
  norm = tf.global_norm(wide)

  def norm_of_large() -> tf.Tensor:
    peak = tf.reduce_max(tf.stack([tf.reduce_max(tf.abs(value)) for value in values_of(wide)]))
    return peak * tf.global_norm([map_values(lambda value: value / peak, grad) for grad in wide])

  if values:
    norm = tf.cond(tf.is_finite(norm), lambda: norm, norm_of_large)
  clipped, _ = tf.clip_by_global_norm(wide, tf.cast(clip_norm, wide_dtype), use_norm=norm)
  dtypes = [None if grad is None else values_of([grad])[0].dtype for grad in grads]
  return [map_values(lambda value, dtype=dtype: tf.cast(value, dtype), grad)
          for grad, dtype in zip(clipped, dtypes)], norm


def finite_or_zero(grads: Iterable[Gradient]) -> List[Gradient]:
  """The same gradients with zeros in place of NaN and inf, for `tf.summary.histogram`, which raises on those.

  For looking at only: training on them hides overflows.

  Args:
    grads: gradients of any shapes, of floating dtypes.
  """
  return [map_values(lambda value: tf.where_v2(_compat.is_finite(value), value, tf.zeros_like(value)), grad)
          for grad in grads]


def _as_tensor(values: Any) -> tf.Tensor:
  try:
    return tf.convert_to_tensor(values)
  except (TypeError, ValueError) as error:
    raise TypeError("Gradient must be convertible to a Tensor or IndexedSlices, or None: {}. Got {!r}.".format(
        values, type(values))) from error
