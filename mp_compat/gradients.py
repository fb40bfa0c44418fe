"""Losses and gradients of one replica: scaling, unscaling, conversion, clipping.

A gradient is a dense tensor, a `tf.IndexedSlices` (of which only `.values` are ever touched) or None.
"""

from typing import Any, Callable, Dict, Iterable, List, Optional, Tuple, Union

from mp_compat import _compat
from mp_compat._compat import tf

Gradient = Optional[Union[tf.Tensor, tf.IndexedSlices]]
GradAndVar = Tuple[Gradient, tf.Variable]
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
  """Returns `g * (1 / scale)` for every gradient, in the gradient's own dtype.

  float16 and bfloat16 gradients are multiplied in float32 and rounded once: in float16 itself, 1/2**16 would be
  subnormal and 1/2**25 zero.

  Args:
    grads: gradients of any shapes, of floating or complex dtypes.
    scale: the loss scale, a float32 scalar.

  Returns:
    As many gradients, of the same kinds, shapes and dtypes.
  """
  reciprocals: Dict[tf.DType, tf.Tensor] = {}

  def unscale_values(values: tf.Tensor) -> tf.Tensor:
    wide = tf.float32 if values.dtype in (tf.float16, tf.bfloat16) else values.dtype
    if wide not in reciprocals:
      reciprocals[wide] = 1 / tf.cast(scale, wide)
    with _compat.on_device_of(values):
      return tf.cast(tf.cast(values, wide) * reciprocals[wide], values.dtype)

  return [map_values(unscale_values, convert(grad)) for grad in grads]


def gate(grads: Iterable[Gradient]) -> List[Gradient]:
  """Returns the same gradients, none of which is available before all are computed (`Optimizer.GATE_GRAPH`)."""
  grads = list(grads)
  return grads if all(grad is None for grad in grads) else tf.tuple(grads)


def convert(grad: Any) -> Gradient:
  """Converts a gradient to a tensor or `tf.IndexedSlices`; returns None for None.

  Args:
    grad: a tensor, `tf.IndexedSlices`, a variable, a NumPy array, a list, a number, or None.

  Raises:
    TypeError: if it cannot be converted, or is not numeric.
  """
  if grad is None:
    return None
  try:
    converted = map_values(tf.convert_to_tensor, tf.convert_to_tensor_or_indexed_slices(grad))
  except (TypeError, ValueError) as error:
    raise TypeError("Gradient must be convertible to a Tensor or IndexedSlices, or None: {}. Got {!r}.".format(
        grad, type(grad))) from error
  return map_values(_as_value, converted)


def convert_pairs(grads_and_vars: Iterable[Tuple[Any, tf.Variable]]) -> Tuple[GradAndVar, ...]:
  """Converts the gradients of (gradient, variable) pairs, each once.

  Raises:
    ValueError: if there are no pairs, or all gradients are None.
    TypeError: see `convert`; if a gradient is not floating and of another dtype than its variable.
  """
  grads_and_vars = tuple((convert(grad), variable) for grad, variable in grads_and_vars)
  for grad, variable in grads_and_vars:
    for values in values_of([grad]):
      if not values.dtype.is_floating and values.dtype != tf.as_dtype(variable.dtype).base_dtype:
        raise TypeError("Value passed to parameter 'x' has DataType {} not in list of allowed values: {}. The gradient "
                        "of {} must be floating, but got {}.".format(
                            values.dtype.name, ", ".join(dtype.name for dtype in _DTYPES), variable, values))
  if not grads_and_vars:
    raise ValueError("No variables provided. Expected (gradient, variable) pairs, but got none.")
  if all(grad is None for grad, _ in grads_and_vars):
    raise ValueError("No gradients provided for any variable: {}. Expected a gradient for at least one, but all are "
                     "None.".format([str(variable) for _, variable in grads_and_vars]))
  return grads_and_vars


def _as_value(values: tf.Tensor) -> tf.Tensor:
  """Returns the values as an ordinary numeric tensor of the current graph."""
  dtype = values.dtype.base_dtype
  if not (dtype.is_floating or dtype.is_complex or dtype.is_integer):
    raise TypeError("Gradients must be numeric, but got {} of dtype {}.".format(values, dtype.name))
  # References (the outputs of tf.assign_add, say) cannot be inputs of branches that are functions. Eager tensors become
  # tensors of the function that is built.
  as_they_are = values.dtype == dtype and (tf.executing_eagerly() or hasattr(values, "graph"))
  return values if as_they_are else tf.identity(values)


def values_of(grads: Iterable[Gradient]) -> List[tf.Tensor]:
  """Returns the tensors that hold the values of these gradients, without those that are None."""
  return [grad.values if isinstance(grad, tf.IndexedSlices) else grad for grad in grads if grad is not None]


def map_values(function: Callable[[tf.Tensor], tf.Tensor], grad: Gradient) -> Gradient:
  """Returns the gradient with `function` of its values in place of them."""
  if grad is None:
    return None
  if isinstance(grad, tf.IndexedSlices):
    return tf.IndexedSlices(function(grad.values), grad.indices, grad.dense_shape)
  return function(grad)


def record_computed(grads: Iterable[Gradient], names: Iterable[str]) -> None:
  """Records in their graph that these are gradients as `compute_gradients` returned them; nothing in eager mode.

  Args:
    grads: the gradients.
    names: the names of their variables, for reports.
  """
  if _compat.current_graph() is None:
    return
  for grad, name in zip(grads, names):
    for values in values_of([grad]):
      computed = _computed_in(values.graph)
      computed[_key(values)] = name


def is_computed(tensor: tf.Tensor) -> bool:
  """Returns whether `record_computed` recorded this tensor."""
  return _key(tensor) in _computed_in(tensor.graph)


def hidden_sources(grads: Iterable[Gradient]) -> List[Tuple[str, tf.Tensor]]:
  """Returns the computed gradients that `grads` derive from by data, as far as they can be read here.

  Clipping can turn an inf into a number (`tf.clip_by_value`), and masking can remove a NaN: the gradients as they were
  computed still show it. Those that are among `grads` are left out, and so are those in a branch, loop, function or XLA
  computation that ops built here are not part of.

  Args:
    grads: converted gradients.

  Returns:
    (variable name, tensor) pairs.
  """
  values = values_of(grads)
  passed = {_key(one) for one in values} if _compat.current_graph() is not None else ()
  return [(_computed_in(tensor.graph)[_key(tensor)], tensor) for tensor in nearest_sources(values, is_computed)
          if _key(tensor) not in passed and _compat.is_readable(tensor)]


def nearest_sources(values: Iterable[tf.Tensor], wanted: Callable[[tf.Tensor], bool]) -> List[tf.Tensor]:
  """Returns the tensors for which `wanted` holds that `values` are or derive from, by data, without those behind them.

  Args:
    values: tensors; in eager mode, none are found.
    wanted: tells of a tensor whether it is to be found.
  """
  if _compat.current_graph() is None:
    return []
  found, seen, ahead = [], set(), list(values)
  while ahead:
    tensor = ahead.pop()
    if not hasattr(tensor, "graph") or _key(tensor) in seen:  # an eager tensor has no graph
      continue
    seen.add(_key(tensor))
    if wanted(tensor):
      found.append(tensor)
    else:
      ahead.extend(_compat.tensor_inputs(tensor))
  return found


def _key(tensor: tf.Tensor) -> Tuple[tf.Operation, int]:
  """Returns what tells a graph tensor from all others; tensors themselves are not hashable everywhere."""
  return tensor.op, tensor.value_index


def _computed_in(graph: tf.Graph) -> Dict[Tuple[tf.Operation, int], str]:
  """Returns the computed gradients of this graph with the names of their variables; the graph owns the dictionary."""
  return _compat.record_in(graph, "computed_gradients")


def nan_unless(finite: tf.Tensor, grads: Iterable[Gradient]) -> List[Gradient]:
  """Returns the same gradients, of which the first is NaN unless `finite`.

  For `LossScale.update` of any class, where the gradients that it is given do not show what made the step not finite.

  Args:
    finite: a scalar bool tensor.
    grads: gradients of any shapes, one at least that is not None.
  """
  grads = list(grads)
  first = next(i for i, grad in enumerate(grads) if grad is not None)
  zero_or_nan = tf.where_v2(finite, 0., float("nan"))
  grads[first] = map_values(lambda values: values + tf.cast(zero_or_nan, values.dtype), grads[first])
  return grads


def clip_by_global_norm(grads: Iterable[Gradient], clip_norm: Any) -> Tuple[List[Gradient], tf.Tensor]:
  """Returns `g * clip_norm / max(norm, clip_norm)`, with the norm over all gradients, as `tf.clip_by_global_norm` does.

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
  grads = [convert(grad) for grad in grads]
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
  """Returns the gradients with zeros in place of NaN and inf, for `tf.summary.histogram`, which raises on those.

  For summaries only: training on them hides overflows.

  Args:
    grads: gradients of any shapes, of floating dtypes.
  """
  return [map_values(lambda value: tf.where_v2(_compat.is_finite(value), value, tf.zeros_like(value)),
                     convert(grad)) for grad in grads]
