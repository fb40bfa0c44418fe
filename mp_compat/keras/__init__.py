"""Loss scaling for Keras optimizers, under the two interfaces that TensorFlow 2.0 to 2.15 had for it.

Importing this imports no Keras: which one it works with is decided by the optimizer that it is given.
"""

from mp_compat.keras import experimental
from mp_compat.keras.loss_scale_optimizer import LossScaleOptimizer

# For `load_model(path, custom_objects=CUSTOM_OBJECTS)`: models that were saved with TensorFlow's class, under each of
# the names that it had, come back with this one. Some versions look names up in lower case.
CUSTOM_OBJECTS = {
    spelling: LossScaleOptimizer
    for name in ("LossScaleOptimizer", "LossScaleOptimizerV1", "LossScaleOptimizerV3")
    for spelling in (name, name.lower())}

__all__ = ["CUSTOM_OBJECTS", "LossScaleOptimizer", "experimental"]
