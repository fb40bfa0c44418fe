"""Names of `tf.contrib`, which TensorFlow 2 has no more."""

from mp_compat.contrib import mixed_precision

__all__ = ["mixed_precision"]
