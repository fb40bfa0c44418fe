"""float32 storage for variables that a model uses in float16."""

from typing import Any, Callable

from mp_compat._compat import tf


def float32_variable_storage_getter(getter: Callable[..., Any], name: str, *args: Any, **kwargs: Any) -> Any:
  """Custom getter for `tf.compat.v1.variable_scope`: stores float32, hands out float16 or bfloat16.

      with tf.compat.v1.variable_scope("model", custom_getter=mp_compat.float32_variable_storage_getter):
        w = tf.compat.v1.get_variable("w", [3, 3], tf.float16)      # a float16 tensor, of a float32 variable

  Trainable variables asked for in float16 or bfloat16 are stored, initialized, regularized and updated in float32, the
  model sees them rounded. Every other variable is what it was asked to be. Gradients pass through the cast, so the
  optimizer gets float32 ones. The variables themselves are in the collections, as ever.

  Args:
    getter: the getter that this one customizes.
    name: the variable's name.
    *args: see `tf.compat.v1.get_variable`.
    **kwargs: see `tf.compat.v1.get_variable`.

  Returns:
    A tensor of the dtype that was asked for, of the variable's shape; or the variable, where it is none of those.

  Source: "Training With Mixed Precision", NVIDIA, the section on TensorFlow.
  """
  dtype = tf.as_dtype(kwargs.get("dtype") or tf.float32)
  frozen = (kwargs.get("trainable") is False
            or kwargs.get("synchronization") == tf.VariableSynchronization.ON_READ)
  if frozen or dtype not in (tf.float16, tf.bfloat16):
    return getter(name, *args, **kwargs)
  kwargs["dtype"] = tf.float32
  return tf.cast(getter(name, *args, **kwargs), dtype, name=name.rpartition("/")[2] + "_cast")
