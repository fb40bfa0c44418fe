# SPDX-License-Identifier: Apache-2.0
"""The finite check: computes whether all values of tensors are finite.

    if is_finite(sum(x) for each tensor x):
      finite = True
    else:
      finite = all(is_finite(x) for each tensor x)

A sum reads each gradient once, on all threads. If it is finite, so are all terms; if
not (because of an overflow, or of finite terms whose sum is out of range), an exact
check inside a conditional decides. XLA may assume that sums are not NaN
(docs/design.md): they are kept out of XLA clusters, and code that XLA may compile uses
the exact check.

Gradients as they were computed, of which the step applies something else, have a
conditional each, so that their memory is free, or reused, before the last one is
checked. Where the program itself sums the squares of such a gradient, to clip it by a
norm, that sum is read instead: if it is finite, so are all values.
"""

from typing import Dict, Hashable, Iterable, List, Optional, Sequence

from mp_compat._tensorflow import ops
from mp_compat._tensorflow import tf
from mp_compat.graph import contexts
from mp_compat.graph import control_flow

# The size in bytes up to which tensors of one shape are stacked: an op for each tensor
# would cost more than its sum.
_SMALL = 2**16

_SumsOfSquares = Dict[contexts.TensorKey, tf.Tensor]


def all_finite(
  tensors: List[tf.Tensor],
  computed: Sequence[tf.Tensor] = (),
  sums_of_squares: Optional[_SumsOfSquares] = None,
) -> tf.Tensor:
  """Returns whether all values of tensors are finite.

  Integers are finite; a complex number is finite if both of its parts are.

  Args:
    tensors: tensors of any shapes and numeric dtypes.
    computed: further ones: gradients as they were computed, of which the step applies
      something else.
    sums_of_squares: sums of squares, over any axes, that the graph has of some
      `computed`, by the keys of these (`lineage.Lineage`).

  Returns:
    A scalar bool tensor.
  """
  tensors = _floating_parts(tensors)
  computed = _floating_parts(computed)
  if not tensors and not computed:
    return tf.constant(True)
  with tf.name_scope("check_finite"):
    if tf.executing_eagerly() or ops.may_be_compiled():
      return _exact(_stack_small(tensors + computed))
    known: _SumsOfSquares = {}
    if sums_of_squares and not ops.is_fast_math():
      known = sums_of_squares
    results = []
    for group in _groups_to_check(tensors, computed):
      results.append(_all_finite_if_sums_are(group, known))
    return _all_true(results)


def _floating_parts(tensors: Iterable[tf.Tensor]) -> List[tf.Tensor]:
  """Returns the tensors that may have values that are not finite; of a complex one, its
  real and imaginary parts.
  """
  return [part for part in ops.real_parts(tensors) if part.dtype.is_floating]


def _groups_to_check(
  tensors: List[tf.Tensor], computed: List[tf.Tensor]
) -> List[List[tf.Tensor]]:
  """Returns the tensors in groups, with a conditional for each: a large tensor of
  `computed` has its own.
  """
  together = list(tensors)
  alone = []
  for tensor in computed:
    if is_small(tensor):
      together.append(tensor)
    else:
      alone.append([tensor])
  if not together:
    return alone
  return [together] + alone


def _all_finite_if_sums_are(
  tensors: List[tf.Tensor], known: _SumsOfSquares
) -> tf.Tensor:
  """Returns whether all values of `tensors` are finite, which a finite sum of them, or
  of their squares, proves.
  """
  read = tensors
  if known:
    read = [known.get(contexts.tensor_key(tensor), tensor) for tensor in tensors]
  summands = _stack_small(read)
  with tf.xla.experimental.jit_scope(compile_ops=False):
    sums = tf.stack([_sum(tensor) for tensor in summands])
    sums_finite = tf.reduce_all(tf.is_finite(sums))
  return control_flow.cond(
    sums_finite, lambda: tf.constant(True), lambda: _exact(_stack_small(tensors))
  )


def _sum(tensor: tf.Tensor) -> tf.Tensor:
  """Returns the sum of all values, a float32 scalar."""
  with tf.device(tensor.device):
    if tensor.dtype in (tf.float16, tf.bfloat16):
      tensor = tf.cast(tensor, tf.float32)
    return tf.cast(tf.reduce_sum(tensor), tf.float32)


def _exact(tensors: List[tf.Tensor]) -> tf.Tensor:
  """Returns whether each value of `tensors` is finite, a scalar bool."""
  finite = []
  for tensor in tensors:
    with tf.device(tensor.device):
      finite.append(tf.reduce_all(ops.is_finite(tensor)))
  return _all_true(finite)


def _all_true(conditions: List[tf.Tensor]) -> tf.Tensor:
  """Returns the AND of scalar bools, of which there is at least one."""
  if len(conditions) == 1:
    return conditions[0]
  return tf.reduce_all(tf.stack(conditions))


def is_small(tensor: tf.Tensor) -> bool:
  """Returns whether a tensor may be stacked with others."""
  size = tensor.shape.num_elements()
  return size is not None and size * tensor.dtype.size <= _SMALL


def _stack_small(tensors: List[tf.Tensor]) -> List[tf.Tensor]:
  """Returns the same values in fewer tensors: large ones as they are, and the small
  ones of a group (`_stacking_group`) in one.
  """
  groups: Dict[Hashable, List[tf.Tensor]] = {}
  for number, tensor in enumerate(tensors):
    key: Hashable = number  # its own group
    if is_small(tensor):
      key = _stacking_group(tensor)
    groups.setdefault(key, []).append(tensor)
  results: List[tf.Tensor] = []
  several = []
  for group in groups.values():
    if len(group) == 1:
      results += group
    else:
      several.append(group)
  for group in several:
    if tf.executing_eagerly():
      results.append(_concatenate(group))
    else:
      results.append(_stack(group))
  return results


def _stacking_group(tensor: tf.Tensor) -> Hashable:
  """Returns what tensors have in common that are stacked: dtype and device; in graphs,
  also the shape.
  """
  if tf.executing_eagerly():
    return tensor.dtype, tensor.device
  return tensor.dtype, tuple(tensor.shape.as_list()), tensor.device


def _stack(tensors: List[tf.Tensor]) -> tf.Tensor:
  """Returns tensors of one shape in one, with another axis."""
  with tf.device(tensors[0].device):
    return tf.stack(tensors)


def _concatenate(tensors: List[tf.Tensor]) -> tf.Tensor:
  """Returns the values of eager tensors in one vector."""
  # Converting the shape for each tensor would take most of the time.
  vector_shape = tf.constant([-1])
  vectors = []
  with tf.device(tensors[0].device):
    for tensor in tensors:
      vectors.append(tf.raw_ops.Reshape(tensor=tensor, shape=vector_shape))
    return tf.concat(vectors, 0)
