# SPDX-License-Identifier: Apache-2.0
"""Excludes functions and classes from AutoGraph."""

from typing import Any, Callable, TypeVar

from mp_compat._tensorflow import tf

_Class = TypeVar("_Class", bound=Any)
_Function = TypeVar("_Function", bound=Callable[..., Any])


def do_not_convert(function: _Function) -> _Function:
  """Excludes a function: AutoGraph of TensorFlow 1.15 rewrites comprehensions with two loops wrongly."""
  return tf.autograph.experimental.do_not_convert(function)


def exclude_from_autograph(cls: _Class) -> _Class:
  """Excludes the instances of a class, which TensorFlow 2.0 to 2.2 otherwise compare to strings; returns the class."""
  cls.autograph_info__ = {}
  return cls
