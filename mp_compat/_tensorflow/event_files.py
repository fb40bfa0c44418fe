# SPDX-License-Identifier: Apache-2.0
"""Writes event files, for TensorBoard."""

from typing import Any, Callable, Optional
import uuid

from mp_compat._tensorflow import log
from mp_compat._tensorflow import tf


class EventFile:
  """A new event file in a directory, if there is one. Logs a warning at the first
  failure, as on a full disk.
  """

  def __init__(self, owner: str, directory: Optional[str]) -> None:
    """Opens an event file.

    Args:
      owner: what writes it, for warnings.
      directory: where to create it; None for no file.
    """
    self._owner, self._directory = owner, directory
    self._has_failed = False
    # A unique name: TensorFlow gives the files that are created in a directory in the
    # same second the same one.
    suffix = "." + uuid.uuid4().hex
    self._writer: Optional[tf.summary.FileWriter] = None
    if directory:
      self._writer = self._try(
        lambda: tf.summary.FileWriter(directory, filename_suffix=suffix)
      )

  def write(self, write: Callable[[tf.summary.FileWriter], object]) -> None:
    """Calls a function that writes, unless the file could not be created."""
    if self._writer is not None:
      self._try(lambda: write(self._writer))

  def _try(self, action: Callable[[], Any]) -> Any:
    """Returns the result of a function; logs a warning at its first failure."""
    try:
      return action()
    # the class depends on the status: OSError, OpError, RuntimeError, IndexError and
    # others
    except Exception as error:
      if not self._has_failed:
        self._has_failed = True
        log.warn(
          "%s cannot write to %s, records are missing: %s",
          self._owner,
          self._directory,
          error,
        )
      return None
