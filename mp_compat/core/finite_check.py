# SPDX-License-Identifier: Apache-2.0
"""The finite check: computes whether all values of tensors are finite.

A sum reads each gradient once, on all threads. If it is finite, so are all terms; if not (because of an overflow, or of
finite terms whose sum is out of range), an exact check inside a conditional decides. XLA may assume that sums are not
NaN (docs/design.md): they are kept out of XLA clusters, and code that XLA may compile uses the exact check.
"""

from typing import Any, Dict, List

from mp_compat._tensorflow import contexts
from mp_compat._tensorflow import control_flow
from mp_compat._tensorflow import ops
from mp_compat._tensorflow import tf

# The size in bytes up to which tensors of one shape are stacked: an op for each tensor would cost more than its sum.
_SMALL = 2**16


def all_finite(tensors: List[tf.Tensor]) -> tf.Tensor:
  """Returns a scalar bool tensor: True if all values of tensors of any shapes and numeric dtypes are finite.

  Integers are finite; a complex number is finite if both of its parts are.
  """
  parts = [ops.real_parts(tensor) for tensor in tensors]
  tensors = [part for part in parts if part.dtype.is_floating]
  if not tensors:
    return tf.constant(True)
  with tf.name_scope("check_finite"):
    stacked = _stack_small(tensors)
    if tf.executing_eagerly() or contexts.may_be_compiled():
      return _exact(stacked)
    with tf.xla.experimental.jit_scope(compile_ops=False):
      sums_finite = tf.reduce_all(tf.is_finite(tf.stack([_sum(tensor) for tensor in stacked])))
    return control_flow.cond(sums_finite, lambda: tf.constant(True), lambda: _exact(stacked))


def _sum(tensor: tf.Tensor) -> tf.Tensor:
  """Returns the sum of all values, a float32 scalar."""
  with ops.on_device_of(tensor):
    if tensor.dtype in (tf.float16, tf.bfloat16):
      tensor = tf.cast(tensor, tf.float32)
    return tf.cast(tf.reduce_sum(tensor), tf.float32)


def _exact(tensors: List[tf.Tensor]) -> tf.Tensor:
  finite = []
  for tensor in tensors:
    with ops.on_device_of(tensor):
      finite.append(tf.reduce_all(ops.is_finite(tensor)))
  return finite[0] if len(finite) == 1 else tf.reduce_all(tf.stack(finite))


def _stack_small(tensors: List[tf.Tensor]) -> List[tf.Tensor]:
  """Returns the same values with small tensors of one dtype and device in one tensor; in graphs, those of one shape."""
  is_eager = tf.executing_eagerly()
  groups: Dict[Any, List[tf.Tensor]] = {}
  for number, tensor in enumerate(tensors):
    size = tensor.shape.num_elements()
    is_small = size is not None and size * tensor.dtype.size <= _SMALL
    shape = () if is_eager or not is_small else tuple(tensor.shape.as_list())
    group_key = (tensor.dtype, shape, tensor.device) if is_small else number
    groups.setdefault(group_key, []).append(tensor)
  stacked = [group[0] for group in groups.values() if len(group) == 1]
  flat_shape = tf.constant([-1]) if is_eager else None  # Its conversion for each tensor would take most of the time.
  for group in [group for group in groups.values() if len(group) > 1]:
    with ops.on_device_of(group[0]):
      stacked.append(tf.concat([tf.reshape(x, flat_shape) for x in group], 0) if is_eager else tf.stack(group))
  return stacked
