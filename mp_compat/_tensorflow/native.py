# SPDX-License-Identifier: Apache-2.0
"""TensorFlow's own classes for loss scaling, in tuples for isinstance; empty if this
version lacks them.
"""

from typing import Any

from mp_compat._tensorflow import tf

_experimental = getattr(tf.train, "experimental", None)


def find(name: str) -> Any:
  """Returns a name of `tf.train.experimental`; None if this version lacks it."""
  return getattr(_experimental, name, None)


LOSS_SCALES, FIXED_LOSS_SCALES, DYNAMIC_LOSS_SCALES, LOSS_SCALE_OPTIMIZERS = (
  tuple(filter(None, [find(name)]))
  for name in (
    "LossScale",
    "FixedLossScale",
    "DynamicLossScale",
    "MixedPrecisionLossScaleOptimizer",
  )
)


def is_of_keras(cls: type) -> bool:
  """Returns whether a class is defined in Keras: the package itself, tf_keras, or
  TensorFlow's.
  """
  return cls.__module__.startswith(
    ("keras.", "tf_keras.", "tensorflow.python.keras.", "tensorflow_core.python.keras.")
  )
