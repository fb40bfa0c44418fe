# SPDX-License-Identifier: Apache-2.0
"""The finite check: computes whether all values of tensors are finite.

A sum reads each gradient once, on all threads. If it is finite, so are all terms; if
not (because of an overflow, or of finite terms whose sum is out of range), an exact
check inside a conditional decides. XLA may assume that sums are not NaN
(docs/design.md): they are kept out of XLA clusters, and code that XLA may compile uses
the exact check.

Gradients as they were computed, of which the step applies something else, have a
conditional each, so that their memory is free, or reused, before the last one is
checked. Clipping by a norm reads them, too: a finite sum of their squares, which the
program computes, is as good as ours.
"""

from typing import Dict, Hashable, Iterable, List, Optional, Sequence

from mp_compat._tensorflow import ops
from mp_compat._tensorflow import tf
from mp_compat.core import lineage
from mp_compat.graph import control_flow

# The size in bytes up to which tensors of one shape are stacked: an op for each tensor
# would cost more than its sum.
_SMALL = 2**16


def all_finite(
  tensors: List[tf.Tensor],
  computed: Sequence[tf.Tensor] = (),
  sums_of_squares: Optional[Dict[lineage.TensorKey, tf.Tensor]] = None,
) -> tf.Tensor:
  """Returns a scalar bool tensor: True if all values of tensors of any shapes and
  numeric dtypes are finite.

  Integers are finite; a complex number is finite if both of its parts are. `computed`
  are further tensors, of which the graph has `sums_of_squares` (`lineage.Lineage`),
  over any axes, or has not.
  """
  tensors, computed = _floating_parts(tensors), _floating_parts(computed)
  if not tensors and not computed:
    return tf.constant(True)
  with tf.name_scope("check_finite"):
    if tf.executing_eagerly() or ops.may_be_compiled():
      return _exact(_stack_small(tensors + computed))
    known = {} if ops.is_fast_math() else sums_of_squares or {}
    groups = [tensors + [tensor for tensor in computed if is_small(tensor)]]
    groups += [[tensor] for tensor in computed if not is_small(tensor)]
    parts = [_all_finite_if_sums_are(group, known) for group in groups if group]
    return parts[0] if len(parts) == 1 else tf.reduce_all(tf.stack(parts))


def _floating_parts(tensors: Iterable[tf.Tensor]) -> List[tf.Tensor]:
  return [part for part in map(ops.real_parts, tensors) if part.dtype.is_floating]


def _all_finite_if_sums_are(
  tensors: List[tf.Tensor], known: Dict[lineage.TensorKey, tf.Tensor]
) -> tf.Tensor:
  """Returns whether all values of `tensors` are finite, which a finite sum of them, or
  of their squares, proves.
  """
  read = _stack_small(
    [known.get(lineage.tensor_key(tensor), tensor) for tensor in tensors]
  )
  with tf.xla.experimental.jit_scope(compile_ops=False):
    sums_finite = tf.reduce_all(
      tf.is_finite(tf.stack([_sum(tensor) for tensor in read]))
    )
  return control_flow.cond(
    sums_finite, lambda: tf.constant(True), lambda: _exact(_stack_small(tensors))
  )


def _sum(tensor: tf.Tensor) -> tf.Tensor:
  """Returns the sum of all values, a float32 scalar."""
  with ops.on_device(tensor.device):
    if tensor.dtype in (tf.float16, tf.bfloat16):
      tensor = tf.cast(tensor, tf.float32)
    return tf.cast(tf.reduce_sum(tensor), tf.float32)


def _exact(tensors: List[tf.Tensor]) -> tf.Tensor:
  finite = []
  for tensor in tensors:
    with ops.on_device(tensor.device):
      finite.append(tf.reduce_all(ops.is_finite(tensor)))
  return finite[0] if len(finite) == 1 else tf.reduce_all(tf.stack(finite))


def is_small(tensor: tf.Tensor) -> bool:
  """Returns whether a tensor may be stacked with others."""
  size = tensor.shape.num_elements()
  return size is not None and size * tensor.dtype.size <= _SMALL


def _stack_small(tensors: List[tf.Tensor]) -> List[tf.Tensor]:
  """Returns the same values with small tensors of one dtype and device in one tensor;
  in graphs, those of one shape.
  """
  is_eager = tf.executing_eagerly()
  groups: Dict[Hashable, List[tf.Tensor]] = {}
  for number, tensor in enumerate(tensors):
    can_stack = is_small(tensor)
    shape = () if is_eager or not can_stack else tuple(tensor.shape.as_list())
    group_key = (tensor.dtype, shape, tensor.device) if can_stack else number
    groups.setdefault(group_key, []).append(tensor)
  stacked = [group[0] for group in groups.values() if len(group) == 1]
  # Its conversion for each tensor would take most of the time.
  flat_shape = tf.constant([-1]) if is_eager else None
  for group in [group for group in groups.values() if len(group) > 1]:
    with ops.on_device(group[0].device):
      stacked.append(
        tf.concat([tf.raw_ops.Reshape(tensor=x, shape=flat_shape) for x in group], 0)
        if is_eager
        else tf.stack(group)
      )
  return stacked
