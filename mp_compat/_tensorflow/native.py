# SPDX-License-Identifier: Apache-2.0
"""TensorFlow's own classes for loss scaling, in tuples for isinstance; empty if this
version lacks them.
"""

from typing import Any, Tuple

from mp_compat._tensorflow import VERSION
from mp_compat._tensorflow import tf

_experimental = getattr(tf.train, "experimental", None)


def find(name: str) -> Any:
  """Returns a name of `tf.train.experimental`; None if this version lacks it."""
  return getattr(_experimental, name, None)


def _classes(name: str) -> Tuple[Any, ...]:
  """Returns the class of this name in a tuple; () if this version lacks it."""
  found = find(name)
  if found is None:
    return ()
  return (found,)


LOSS_SCALES = _classes("LossScale")
FIXED_LOSS_SCALES = _classes("FixedLossScale")
DYNAMIC_LOSS_SCALES = _classes("DynamicLossScale")
LOSS_SCALE_OPTIMIZERS = _classes("MixedPrecisionLossScaleOptimizer")
HAS_CONTRIB = VERSION < (2, 0)  # `install()` makes a `tf.contrib` for later versions


def is_of_keras(cls: type) -> bool:
  """Returns whether a class is defined in Keras: the package itself, tf_keras, or
  TensorFlow's.
  """
  return cls.__module__.startswith(
    ("keras.", "tf_keras.", "tensorflow.python.keras.", "tensorflow_core.python.keras.")
  )
