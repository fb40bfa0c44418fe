# SPDX-License-Identifier: Apache-2.0
"""Stores variables in float32 that a model uses in float16 or bfloat16."""

from typing import Any, Callable

from mp_compat._tensorflow import tf


def float32_variable_storage_getter(getter: Callable[..., Any], name: str, *args: Any, **kwargs: Any) -> Any:
  """Returns a float16 or bfloat16 variable as a cast of a float32 one; a getter for `tf.compat.v1.variable_scope`.

      with tf.compat.v1.variable_scope("model", custom_getter=mp_compat.float32_variable_storage_getter):
        w = tf.compat.v1.get_variable("w", [3, 3], tf.float16)      # a float16 tensor, of a float32 variable

  Trainable variables requested in float16 or bfloat16 are stored, initialized, regularized and updated in float32; the
  model uses their rounded values. All other variables are returned unchanged. Gradients pass through the cast, so the
  optimizer receives float32 gradients. The collections hold the float32 variables.

  Args:
    getter: the getter that this one customizes.
    name: the variable's name.
    *args: see `tf.compat.v1.get_variable`.
    **kwargs: see `tf.compat.v1.get_variable`.

  Returns:
    A tensor of the requested dtype and the variable's shape; for all other variables, the variable itself.

  Source: "Training With Mixed Precision", NVIDIA, the section on TensorFlow.
  """
  dtype = tf.as_dtype(kwargs.get("dtype") or tf.float32)
  frozen = kwargs.get("trainable") is False or kwargs.get("synchronization") == tf.VariableSynchronization.ON_READ
  if frozen or dtype not in (tf.float16, tf.bfloat16):
    return getter(name, *args, **kwargs)
  kwargs["dtype"] = tf.float32
  return tf.cast(getter(name, *args, **kwargs), dtype, name=name.rpartition("/")[2] + "_cast")
