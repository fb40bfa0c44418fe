"""The gradients of a step in buckets: what is done to each of them is done once for a bucket.

All-or-nothing gating has a floor: the first update waits for the last gradient. What comes on top is kept small here:

    looked at as they come    one pass over the scaled gradients tells whether the unscaled ones are finite
    unscaled where applied    in the branch that applies them, where an update finds them in the cache
    small ones in one buffer  an op for each would cost more than its work

Nothing is packed across devices, and no value is rounded otherwise than by `g * (1 / scale)`.

Source: gradient buckets, Li et al., "PyTorch Distributed", 2020 (arXiv:2006.15704); multi-tensor kernels, NVIDIA Apex.
"""

from typing import Any, Dict, Iterable, List, NamedTuple, Optional, Tuple

from mp_compat import _compat
from mp_compat import gradients
from mp_compat._compat import tf

# The largest gradient that is packed, in bytes.
_SMALL = 2 ** 16


class _Bucket(NamedTuple):
  """Gradients of one shape, dtype and device."""

  members: List[tf.Tensor]  # unscaled, as they are known outside
  values: tf.Tensor  # [len(members), ...]; or the only one's, in its own shape
  reciprocal: Optional[tf.Tensor]  # what `values` are to be multiplied by; None where they are unscaled

  def unscaled(self) -> tf.Tensor:
    """`values`, unscaled here and now."""
    if self.reciprocal is None:
      return self.values
    with _compat.on_device_of(self.members[0]):
      return _compat.kept_from_grappler(gradients.unscale_values(self.values, self.reciprocal))

  def rows(self) -> List[tf.Tensor]:
    """The members, unscaled here and now."""
    values = self.unscaled()
    if len(self.members) == 1:
      return [values]
    with _compat.on_device_of(values):
      return tf.unstack(values)


class Buckets:
  """The gradients of one replica, and the raw ones that they were computed from, to be judged and then applied.

  Clipping can turn an inf into a number (`tf.clip_by_value`), and masking can hide a NaN; the raw gradients, marked by
  `gradients.mark_raw`, tell. Only those that a gradient derives from by data are looked at, so that gradients read from
  accumulator variables bring no backward pass along.
  """

  def __init__(self, grads: Iterable[gradients.Gradient]) -> None:
    """Sorts gradients into buckets, in the current context.

    Args:
      grads: gradients of any shapes, each float16, bfloat16, float32, float64 or None.

    Raises:
      TypeError: a gradient is not of a floating dtype.
    """
    values = gradients.values_of(grads)
    contents: Dict[Any, List[Tuple[tf.Tensor, gradients.Scaled]]] = {}
    for number, one in enumerate(values + gradients.raw_sources(values)):
      scaled = gradients.before_unscaling(gradients.check_floating(one))
      contents.setdefault(_shared_by_small(one, scaled) or number, []).append((one, scaled))
    self._buckets = [_fill(members, scaled) for members, scaled in (zip(*one) for one in contents.values())]

  def all_finite(self) -> tf.Tensor:
    """Whether every value is finite, unscaled, up to the largest of its dtype: a scalar bool tensor; True of none."""
    if not self._buckets:
      return tf.constant(True)
    reciprocals = {id(one.reciprocal): one.reciprocal for one in self._buckets if one.reciprocal is not None}
    if not reciprocals:
      return _compat.all_finite([bucket.values for bucket in self._buckets])
    # Where nothing grows by unscaling, what is finite stays so; what is not, never becomes so.
    factors = tf.stack([tf.cast(one, tf.float64) for one in reciprocals.values()])
    nothing_grows = tf.reduce_all(tf.abs(factors) <= 1)
    with _compat.conditionals_in_graph():
      return tf.cond(nothing_grows, lambda: _compat.all_finite([bucket.values for bucket in self._buckets]),
                     lambda: _compat.all_finite([bucket.unscaled() for bucket in self._buckets]))

  def unscaled(self, grads: Iterable[gradients.Gradient]) -> List[gradients.Gradient]:
    """The same gradients, unscaled in the current context: the branch that applies them.

    Args:
      grads: all or some of those that the buckets were made of.
    """
    grads = list(grads)
    if tf.executing_eagerly():
      return grads
    wanted = {gradients.key_of(values) for values in gradients.values_of(grads)}
    made: Dict[Tuple[int, str], tf.Tensor] = {}
    for bucket in self._buckets:
      keys = [gradients.key_of(member) for member in bucket.members]
      if not wanted.isdisjoint(keys):
        made.update(zip(keys, bucket.rows()))
    return [gradients.map_values(lambda values: made[gradients.key_of(values)], grad) for grad in grads]


def _shared_by_small(values: tf.Tensor, scaled: gradients.Scaled) -> Optional[Tuple[Any, ...]]:
  """What small gradients must have in common to be in one bucket; None for a large one, or one of unknown shape."""
  size = values.shape.num_elements()
  if size is None or size * values.dtype.size > _SMALL:
    return None
  return values.dtype, tuple(values.shape.as_list()), values.device, id(scaled.reciprocal)


def _fill(members: List[tf.Tensor], scaled: List[gradients.Scaled]) -> _Bucket:
  values = [one.values for one in scaled]
  if len(values) == 1:
    return _Bucket(list(members), values[0], scaled[0].reciprocal)
  with _compat.on_device_of(members[0]):
    return _Bucket(list(members), tf.stack(values), scaled[0].reciprocal)
