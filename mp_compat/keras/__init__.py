# SPDX-License-Identifier: Apache-2.0
"""Loss scaling for Keras optimizers, with both interfaces that TensorFlow 2.0 to 2.15
had.

Importing this package does not import Keras. The wrapper uses the Keras that its inner
optimizer belongs to.
"""

from mp_compat.keras import experimental
from mp_compat.keras.loss_scale_optimizer import LossScaleOptimizer

CUSTOM_OBJECTS = {
  spelling: LossScaleOptimizer
  for name in ("LossScaleOptimizer", "LossScaleOptimizerV1", "LossScaleOptimizerV3")
  for spelling in (name, name.lower())  # some versions look names up in lower case
}
"""For `load_model(path, custom_objects=CUSTOM_OBJECTS)`: loads models that were saved
with TensorFlow's class, under any of its names, with `LossScaleOptimizer`.
"""

__all__ = ["CUSTOM_OBJECTS", "LossScaleOptimizer", "experimental"]
