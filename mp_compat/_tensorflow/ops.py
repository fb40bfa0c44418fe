# SPDX-License-Identifier: Apache-2.0
"""Ops that are missing or wrong in some TensorFlow versions."""

import os
from typing import Iterable, List

from tensorflow.python.ops import control_flow_util

from mp_compat._tensorflow import VERSION
from mp_compat._tensorflow import graph_internals
from mp_compat._tensorflow import tf


def real_parts(tensors: Iterable[tf.Tensor]) -> List[tf.Tensor]:
  """Returns the real and imaginary parts of each complex tensor, of shape [2, ...], and
  other tensors as they are.
  """
  parts = []
  for tensor in tensors:
    if tensor.dtype.is_complex:
      with tf.device(tensor.device):
        tensor = tf.stack([tf.math.real(tensor), tf.math.imag(tensor)])
    parts.append(tensor)
  return parts


def may_be_compiled() -> bool:
  """Returns whether ops built now belong to a function or an XLA context, which XLA may
  compile.
  """
  if tf.executing_eagerly():
    return False
  graph = tf.get_default_graph()
  if graph.building_function:
    return True
  context = graph_internals.context_of(graph)
  return control_flow_util.GetContainingXLAContext(context) is not None


def is_fast_math() -> bool:
  """Returns whether XLA on CPUs assumes that there are no NaN and no inf, the default
  up to TensorFlow 2.2.
  """
  return VERSION < (2, 3) or "fast_math" in os.environ.get("XLA_FLAGS", "")


def is_finite(value: tf.Tensor) -> tf.Tensor:
  """Returns `tf.is_finite(value)`, also where TensorFlow's op is missing or wrong.

  For bfloat16, TensorFlow 1.15 has no op, and TensorFlow up to 2.10 has none for GPUs:
  half precision is cast to float32. With fast math, code that XLA may compile tests the
  bits of the exponent, as a number: comparisons of floats have GPU kernels, those of
  int32 do not. The test takes three times as long.

  `value` is a float16, bfloat16, float32 or float64 tensor; the result is a bool tensor
  of its shape.
  """
  if value.dtype in (tf.float16, tf.bfloat16):
    value = tf.cast(value, tf.float32)
  if not is_fast_math() or not may_be_compiled():
    return tf.is_finite(value)
  # All bits of the exponent are 1 in inf and NaN only.
  integer, exponent_mask = tf.int32, 0x7F800000
  if value.dtype == tf.float64:
    integer, exponent_mask = tf.int64, 0x7FF << 52
  bits = tf.bitcast(value, integer)
  exponent = tf.bitwise.bitwise_and(bits, tf.constant(exponent_mask, integer))
  # The cast is exact: at most 11 of the bits of `exponent`, which are adjacent, are 1.
  return tf.cast(exponent, value.dtype) < exponent_mask
