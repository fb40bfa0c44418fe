# SPDX-License-Identifier: Apache-2.0
"""Excludes functions and classes from AutoGraph."""

from typing import Any, TypeVar

from mp_compat._tensorflow import tf

_Class = TypeVar("_Class", bound=Any)

# A decorator for functions that contain nothing to convert; in a tf.function, AutoGraph would rewrite them.
do_not_convert = tf.autograph.experimental.do_not_convert


def exclude_from_autograph(cls: _Class) -> _Class:
  """Marks a class so that AutoGraph does not convert its instances; returns the class.

  Without the mark, TensorFlow 2.0 to 2.2 compare the instances to strings.
  """
  cls.autograph_info__ = {}
  return cls
