# SPDX-License-Identifier: Apache-2.0
"""Logs the warnings of this package with TensorFlow's logger."""

from mp_compat._tensorflow import tf


def warn(message: str, *args: object) -> None:
  """Logs `text_of(message, *args)` as a warning."""
  tf.logging.warning(message, *args)


def text_of(message: str, *args: object) -> str:
  """Returns `message % args`; without `args`, a "%" in `message` stays."""
  if not args:
    return message
  return message % args
