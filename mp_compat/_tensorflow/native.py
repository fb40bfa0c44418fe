# SPDX-License-Identifier: Apache-2.0
"""TensorFlow's own classes for loss scaling, in tuples for isinstance; empty if this version lacks them."""

from mp_compat._tensorflow import tf

experimental = getattr(tf.train, "experimental", None)

LOSS_SCALES, FIXED_LOSS_SCALES, DYNAMIC_LOSS_SCALES, LOSS_SCALE_OPTIMIZERS = (
  (getattr(experimental, name),) if hasattr(experimental, name) else ()
  for name in ("LossScale", "FixedLossScale", "DynamicLossScale", "MixedPrecisionLossScaleOptimizer")
)


def is_of_keras(cls: type) -> bool:
  """Returns whether a class is defined in Keras: the package itself, tf_keras, or TensorFlow's."""
  return cls.__module__.startswith(("keras.", "tf_keras.", "tensorflow.python.keras.", "tensorflow_core.python.keras."))
