# SPDX-License-Identifier: Apache-2.0
"""Excludes functions from AutoGraph."""

from typing import Any, Callable, TypeVar

from mp_compat._tensorflow import tf

_Function = TypeVar("_Function", bound=Callable[..., Any])


def do_not_convert(function: _Function) -> _Function:
  """Excludes a function: AutoGraph of TensorFlow 1.15 rewrites comprehensions with two
  loops wrongly.
  """
  return tf.autograph.experimental.do_not_convert(function)
