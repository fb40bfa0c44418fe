"""Excludes functions and classes from AutoGraph."""

from typing import Any, TypeVar

from mp_compat._tensorflow import tf

_Class = TypeVar("_Class", bound=Any)

# In a tf.function, AutoGraph would rewrite the functions marked with this; they contain nothing to convert.
do_not_convert = tf.autograph.experimental.do_not_convert


def exclude_from_autograph(cls: _Class) -> _Class:
  """Marks a class so that AutoGraph does not convert its instances; TensorFlow 2.0 to 2.2 compare others to strings."""
  cls.autograph_info__ = {}
  return cls
