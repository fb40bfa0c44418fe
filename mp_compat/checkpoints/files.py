# SPDX-License-Identifier: Apache-2.0
"""Reads checkpoints of any format, from any file system that TensorFlow knows; also by
the names in this package.
"""

import functools
import os
import re
from typing import Any, Dict, Iterable, List, Union

import numpy as np

from mp_compat._tensorflow import tf
from mp_compat.core import dialects
from mp_compat.graph import graphs

Path = Union[str, bytes, "os.PathLike[str]"]
VarList = Union[Iterable[tf.Variable], Dict[str, tf.Variable]]

# An entry of every checkpoint that tf.train.Checkpoint wrote. The other names are
# object paths, for every optimizer.
_OBJECT_GRAPH = "_CHECKPOINTABLE_OBJECT_GRAPH"

# Opens a checkpoint. `install()` replaces it in TensorFlow's modules.
tensorflow_reader = tf.train.NewCheckpointReader

# Files of a checkpoint in the V2 format, which are no checkpoints.
_PART = re.compile(r"(.+)\.(index|meta|data-\d+-of-\d+)")

# Errors that TensorFlow's checkpoint readers raise for a damaged checkpoint.
_BROKEN = (tf.errors.OpError, IndexError, RuntimeError, ValueError)


def path_text(path: Path) -> str:
  """Returns a path as a str; raises a ValueError if it is not in UTF-8, which
  TensorFlow requires.
  """
  try:
    text: str = tf.compat.as_str_any(path)
    text.encode()
  except UnicodeError as error:
    raise ValueError("Expected a path in UTF-8, but got {!r}.".format(path)) from error
  return text


def resolve_path(path: Path) -> str:
  """Returns the path of a checkpoint; for a directory, of its latest. Raises a
  ValueError if there is none.
  """
  path = path_text(path)
  checkpoint = (
    tf.train.latest_checkpoint(path)
    if tf.gfile.IsDirectory(path) and not checkpoint_exists(path)
    else path
  )
  if checkpoint is None or not checkpoint_exists(checkpoint):
    raise ValueError(
      "There is no checkpoint at {}. Expected the path of a checkpoint, such as "
      "model.ckpt-100 (without .index), or a directory with a file named "
      "checkpoint.".format(path)
    )
  return checkpoint


def check_no_pattern(path: str) -> None:
  """Raises a ValueError if TensorFlow's readers take a path for a pattern that the path
  itself does not match.
  """
  if "[" in path or ("\\" in path and os.sep == "/"):
    raise ValueError(
      "TensorFlow reads the path {} as a pattern for file names. Expected a path "
      "without brackets and backslashes.".format(path)
    )


def checkpoint_exists(path: str) -> bool:
  """Returns whether there is an index file (V2), or files match the path itself (V1,
  "model-?????-of-00002").
  """
  if tf.gfile.Exists("{}.index".format(path)):
    return True
  if _PART.fullmatch(path):
    return False
  try:
    return any(not tf.gfile.IsDirectory(file) for file in tf.gfile.Glob(path))
  # TensorFlow 1.15 raises it if the directory does not exist.
  except tf.errors.NotFoundError:
    return False


class Checkpoint:
  """An open checkpoint. Its methods raise a DataLossError if it is damaged.

  Attributes:
    path: Its path.
    shapes: The shapes of its variables by name.
    dtypes: The dtypes of its variables by name.
    is_object_based: Whether `tf.train.Checkpoint` wrote it.
  """

  def __init__(self, path: str) -> None:
    """Opens a checkpoint; one without variables counts as damaged."""
    self.path = path
    try:
      # load_checkpoint() would read a directory of that name
      self._reader = tensorflow_reader(path)
    except _BROKEN as error:
      check_no_pattern(path)
      raise data_loss_error(path, error) from error
    self.shapes = {
      name: tuple(shape)
      for name, shape in self._reader.get_variable_to_shape_map().items()
    }
    self.dtypes: Dict[str, tf.DType] = self._reader.get_variable_to_dtype_map()
    self.is_object_based = _OBJECT_GRAPH in self.shapes
    if not self.shapes:
      raise data_loss_error(path, ValueError("it has no variables"))

  def read(self, name: str) -> np.ndarray:
    """Returns the value of a variable."""
    try:
      return np.asarray(self._reader.get_tensor(name))
    except tf.errors.UnimplementedError:  # a partitioned variable in the V1 format
      return self.read_slices([name], [""], [self.dtypes[name]])[0]
    except _BROKEN as error:
      raise data_loss_error(self.path, error) from error

  def read_slices(
    self, names: List[str], parts: List[str], dtypes: List[tf.DType]
  ) -> List[np.ndarray]:
    """Returns slices of variables; a slice is "shape offset,size:..." as in
    `RestoreV2`, "" for all.
    """
    with tf.Graph().as_default(), tf.Session(
      config=tf.ConfigProto(device_count={"GPU": 0})
    ) as sess:
      values = tf.raw_ops.RestoreV2(
        prefix=self.path, tensor_names=names, shape_and_slices=parts, dtypes=dtypes
      )
      try:
        return sess.run(values)
      except _BROKEN as error:
        raise data_loss_error(self.path, error) from error


def data_loss_error(path: str, error: Exception) -> tf.errors.DataLossError:
  """Returns the error to raise for a damaged checkpoint, with the reason that `error`
  states.
  """
  # A Session's message includes the node and its traceback. The line before the node
  # states the error.
  reason = re.search(r"([^\n]+)\n\s*\[\[", str(error)) or re.search(
    r"([^\n]+)", str(error)
  )
  return tf.errors.DataLossError(
    None,
    None,
    "The checkpoint {} is truncated or corrupt: {}. Restore an earlier one; "
    "tf.train.get_checkpoint_state({!r}).all_model_checkpoint_paths lists those that "
    "are kept.".format(
      path, reason.group(1) if reason else type(error).__name__, os.path.dirname(path)
    ),
  )


def op_name(value: tf.Variable) -> str:
  """Returns the name of the op of a variable; "" for what has no op, such as a list of
  the parts of a variable.
  """
  return value.op.name if hasattr(value, "op") else ""


def tensorflow_names(graph: tf.Graph) -> Dict[str, str]:
  """Returns the record in `graph` of the names that TensorFlow's class would give to
  variables, by their own names.
  """
  return graphs.record_in(graph, "tensorflow_names")


@functools.wraps(tensorflow_reader)
def open_with_own_names(filepattern: str) -> Any:
  """Returns TensorFlow's reader of a checkpoint, which has Adam's powers under their
  names in this package, too.
  """
  reader = tensorflow_reader(filepattern)
  return reader if reader.has_tensor(_OBJECT_GRAPH) else _Reader(reader)


class _Reader:
  """A reader with two names for a variable: its name in the checkpoint, and that of
  this package.

  The latter is the name of the variable in the default graph for which TensorFlow's
  class has the name in the checkpoint. For all others, it is the name without
  conditionals. No name in the checkpoint is hidden.
  """

  def __init__(self, reader: Any) -> None:
    self._reader = reader
    self._own_names = {name: name for name in reader.get_variable_to_shape_map()}
    self._plain_names = dialects.without_conditionals(
      reader.get_variable_to_shape_map()
    )

  def __getattr__(self, name: str) -> Any:
    return getattr(self._reader, name)

  def has_tensor(self, tensor_str: str) -> bool:
    return tf.compat.as_str_any(tensor_str) in self._names()

  def get_tensor(self, tensor_str: str) -> np.ndarray:
    name = tf.compat.as_str_any(tensor_str)
    return self._reader.get_tensor(self._names().get(name, name))

  def get_variable_to_shape_map(self) -> Dict[str, List[int]]:
    by_name = self._reader.get_variable_to_shape_map()
    return {name: by_name[source] for name, source in self._names().items()}

  def get_variable_to_dtype_map(self) -> Dict[str, tf.DType]:
    by_name = self._reader.get_variable_to_dtype_map()
    return {name: by_name[source] for name, source in self._names().items()}

  def _names(self) -> Dict[str, str]:
    """Returns all names, each with the name in the checkpoint."""
    recorded = tensorflow_names(tf.get_default_graph())
    recorded = {
      name: source for name, source in recorded.items() if source in self._own_names
    }
    return {**self._plain_names, **recorded, **self._own_names}
