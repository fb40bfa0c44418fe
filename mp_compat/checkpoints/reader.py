# SPDX-License-Identifier: Apache-2.0
"""Reads a checkpoint by the names that its variables have in this package, for `install()`."""

from typing import Any, Dict, Optional

import numpy as np

from mp_compat._tensorflow import tf
from mp_compat.checkpoints import files
from mp_compat.checkpoints import names
from mp_compat.core import dialects


def open_reader(path: files.Path) -> Any:
  """Returns TensorFlow's reader of a checkpoint, which has Adam's powers under their names in this package, too.

  Source: `tf.train.NewCheckpointReader`.
  """
  reader = files.tensorflow_reader(path)
  return reader if reader.has_tensor(files.OBJECT_GRAPH) else _Reader(reader)


class _Reader:
  """A reader with two names for a variable: its name in the checkpoint, and that of this package.

  The latter is the name of the variable in the default graph for which TensorFlow's class has the name in the
  checkpoint. For all others, it is the name without conditionals. No name in the checkpoint is hidden.
  """

  def __init__(self, reader: Any) -> None:
    self._reader = reader
    self._plain_names: Optional[Dict[str, str]] = None

  def __getattr__(self, name: str) -> Any:
    return getattr(self._reader, name)

  def has_tensor(self, tensor_str: str) -> bool:
    return self._reader.has_tensor(self._name_in_checkpoint(tensor_str))

  def get_tensor(self, tensor_str: str) -> np.ndarray:
    return self._reader.get_tensor(self._name_in_checkpoint(tensor_str))

  def get_variable_to_shape_map(self) -> Dict[str, Any]:
    return self._with_added_names(self._reader.get_variable_to_shape_map())

  def get_variable_to_dtype_map(self) -> Dict[str, Any]:
    return self._with_added_names(self._reader.get_variable_to_dtype_map())

  def _name_in_checkpoint(self, name: str) -> str:
    return name if self._reader.has_tensor(name) else self._added_names().get(tf.compat.as_str_any(name), name)

  def _with_added_names(self, by_name: Dict[str, Any]) -> Dict[str, Any]:
    return dict(by_name, **{name: by_name[source] for name, source in self._added_names().items()})

  def _added_names(self) -> Dict[str, str]:
    """Returns the names that the checkpoint does not have, each with the name of the variable there."""
    if self._plain_names is None:
      self._plain_names = dialects.names_without_conditionals(self._reader.get_variable_to_shape_map())
    recorded = names.tensorflow_names(tf.get_default_graph())
    return dict(
      self._plain_names,
      **{
        name: source
        for name, source in recorded.items()
        if self._reader.has_tensor(source) and not self._reader.has_tensor(name)
      },
    )
