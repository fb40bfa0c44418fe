# SPDX-License-Identifier: Apache-2.0
"""Logs the warnings of this package with TensorFlow's logger."""

from typing import Callable, List

from mp_compat._tensorflow import tf

# Functions that are called with the text of each warning, also with those that the
# program's verbosity hides.
observers: List[Callable[[str], object]] = []


def warn(message: str, *args: object) -> None:
  """Logs `message % args` as a warning; without `args`, a "%" in `message` stays."""
  text = message
  if args:
    text = message % args
  for observer in observers:
    observer(text)
  tf.logging.warning(message, *args)
