# SPDX-License-Identifier: Apache-2.0
"""Makes maps for `tf.train.init_from_checkpoint` from the names in a checkpoint of any naming scheme."""

import collections
from typing import Any, Dict, Iterable, List, NamedTuple, Optional, Tuple

from mp_compat._tensorflow import log
from mp_compat._tensorflow import tf
from mp_compat._tensorflow import variables
from mp_compat.checkpoints import files
from mp_compat.checkpoints import names
from mp_compat.core import dialects


def assignment_map(path: files.Path, wanted: Any) -> Any:
  """Returns an `assignment_map` for `tf.train.init_from_checkpoint` with the names that the checkpoint has.

  Args:
    path: A checkpoint, or a directory, of which the latest checkpoint is used.
    wanted: An assignment map with the names of any naming scheme: a dict or an iterable of pairs.

  Returns:
    A dict, or `wanted` itself if the checkpoint has all its names. Scopes and names without a match are unchanged. The
    state of a loss scale that the checkpoint lacks, or has in another dtype, is left out and keeps its initial value;
    logs a warning.

  Raises:
    ValueError: If there is no checkpoint at `path`.
    tf.errors.DataLossError: If the checkpoint is truncated or corrupt.
  """
  pairs = list(wanted.items() if hasattr(wanted, "items") else wanted)
  reader = files.open_reader(files.resolve_path(path))
  named_variables = _by_name({name: value for name, value in pairs if not isinstance(value, str)})
  matched, usable = _match(named_variables, reader)
  state = dialects.state({name: variable.shape for name, variable in named_variables.items()})
  left_out = [name for name in named_variables if name in state and name not in usable]
  _warn_left_out(left_out, path)
  if not left_out and all(name == source_name for name, source_name in matched.items()):
    return wanted
  return {matched.get(name, name): value for name, value in pairs if name not in left_out}


def name_map(path: files.Path, var_list: Optional[files.VarList] = None) -> Dict[str, tf.Variable]:
  """Returns the map for `tf.train.init_from_checkpoint(path, name_map(path))` and `tf.train.Saver(name_map(path))`.

  Args:
    path: A checkpoint of any naming scheme, or a directory, of which the latest checkpoint is used.
    var_list: The variables, an iterable or a dict by name; by default the global variables of the current graph.

  Returns:
    A dict of variables by the names in the checkpoint; the value is a list of parts for a partitioned variable.
    Variables that the checkpoint lacks, or has in another dtype, are left out; logs a warning. Only `Saver` converts
    contrib's int32 counts.

  Raises:
    ValueError: If there is no checkpoint at `path`.
    tf.errors.DataLossError: If the checkpoint is truncated or corrupt.
  """
  wanted = _by_name(tf.global_variables() if var_list is None else var_list)
  reader = files.open_reader(files.resolve_path(path))
  _, usable = _match(wanted, reader)
  _warn_left_out([name for name in wanted if name not in usable], path)
  return {
    source_name: wanted[name].parts if len(wanted[name].parts) > 1 else wanted[name].parts[0]
    for name, source_name in usable.items()
  }


class _Variable(NamedTuple):
  """A variable of the graph under its name in checkpoints; with a partitioner, several parts share one name."""

  parts: List[tf.Variable]
  shape: Tuple[int, ...]

  @property
  def dtype(self) -> tf.DType:
    return self.parts[0].dtype.base_dtype


def _by_name(var_list: files.VarList) -> "collections.OrderedDict[str, _Variable]":
  """Returns variables by the names that `tf.train.Saver` gives them."""
  wanted: collections.OrderedDict[str, _Variable] = collections.OrderedDict()
  named: Iterable[Tuple[Optional[str], Any]] = (
    var_list.items() if isinstance(var_list, dict) else [(None, value) for value in var_list]
  )
  for name, value in named:
    for part in [value] if hasattr(value, "op") else value:
      if not hasattr(part, "initializer"):
        continue  # not a variable, but for example an iterator's state or a table
      slice_info = variables.save_slice_info(part)
      shape = part.shape.as_list() if slice_info is None else slice_info.full_shape
      full_name = name or (part.op.name if slice_info is None else slice_info.full_name)
      wanted.setdefault(full_name, _Variable([], tuple(shape))).parts.append(part)
  return wanted


def _match(wanted: Dict[str, _Variable], reader: Any) -> Tuple[Dict[str, str], Dict[str, str]]:
  """Returns the names in the checkpoint by the names in `wanted`: all that match, and those of the same dtype."""
  shapes = collections.OrderedDict((name, variable.shape) for name, variable in wanted.items())
  recorded = names.tensorflow_names(tf.get_default_graph())
  matched = names.match(
    shapes,
    files.shapes_in(reader),
    {name: recorded[v.parts[0].op.name] for name, v in wanted.items() if v.parts[0].op.name in recorded},
  )
  dtypes = reader.get_variable_to_dtype_map()
  return matched, {name: source for name, source in matched.items() if dtypes[source] == wanted[name].dtype}


def _warn_left_out(names_in_graph: List[str], path: files.Path) -> None:
  if names_in_graph:
    log.warn(
      "The checkpoint %s lacks %s, or has another dtype. Initial values are used instead. To use another program's "
      "values, convert the checkpoint: python -m mp_compat checkpoint convert.",
      files.path_text(path),
      ", ".join(names_in_graph),
    )
