# SPDX-License-Identifier: Apache-2.0
"""Modules of `tf.contrib`, which TensorFlow 2 removed."""

from mp_compat.contrib import mixed_precision

__all__ = ["mixed_precision"]
