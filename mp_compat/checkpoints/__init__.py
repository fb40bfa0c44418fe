# SPDX-License-Identifier: Apache-2.0
"""Restores and converts checkpoints of TensorFlow's class, of tf.contrib and of
training without loss scaling.

`Saver` writes what `tf.train.Saver` writes, and restores every naming scheme (see
`mp_compat.core.naming_schemes`). `convert` rewrites a checkpoint for programs that have
only `tf.train.Saver`.
"""

from mp_compat.checkpoints.conversion import Inspection
from mp_compat.checkpoints.conversion import convert
from mp_compat.checkpoints.conversion import inspect
from mp_compat.checkpoints.initialization import assignment_map
from mp_compat.checkpoints.initialization import name_map
from mp_compat.checkpoints.saver import Saver

__all__ = ["Inspection", "Saver", "assignment_map", "convert", "inspect", "name_map"]
