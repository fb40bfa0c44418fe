# SPDX-License-Identifier: Apache-2.0
"""Ops that are missing or wrong in some TensorFlow versions, and the placement of ops."""

import contextlib
from typing import ContextManager

from mp_compat._tensorflow import VERSION
from mp_compat._tensorflow import contexts
from mp_compat._tensorflow import tf


def on_device_of(tensor: tf.Tensor) -> ContextManager[None]:
  """Returns a context manager that places ops on the requested device of `tensor`; without one, it changes nothing."""
  return tf.device(tensor.device) if tensor.device else contextlib.nullcontext()


def real_parts(tensor: tf.Tensor) -> tf.Tensor:
  """Returns the real and imaginary parts of a complex tensor, of shape [2, ...]; returns another tensor as it is."""
  if not tensor.dtype.is_complex:
    return tensor
  with on_device_of(tensor):
    return tf.stack([tf.math.real(tensor), tf.math.imag(tensor)])


def is_finite(value: tf.Tensor) -> tf.Tensor:
  """Returns `tf.is_finite(value)`, also where TensorFlow's op is missing or wrong.

  For bfloat16, TensorFlow 1.15 has no op, and TensorFlow up to 2.10 has none for GPUs: bfloat16 values are cast to
  float32. In XLA computations on CPUs, TensorFlow up to 2.1 assumes that there are no NaNs: the bits of the exponent
  are tested instead.

  Args:
    value: a tensor of any shape, float16, bfloat16, float32 or float64.

  Returns:
    A bool tensor of the same shape.
  """
  if value.dtype == tf.bfloat16:
    value = tf.cast(value, tf.float32)
  if VERSION >= (2, 2) or not contexts.may_be_compiled():
    return tf.is_finite(value)
  bits, exponent = {
    tf.float16: (tf.uint16, 0x7C00),
    tf.float32: (tf.int32, 0x7F800000),
    tf.float64: (tf.int64, 0x7FF << 52),
  }[value.dtype]
  exponent = tf.constant(exponent, bits)
  return tf.not_equal(tf.bitwise.bitwise_and(tf.bitcast(value, bits), exponent), exponent)
