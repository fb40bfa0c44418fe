# SPDX-License-Identifier: Apache-2.0
"""Makes maps for `tf.train.init_from_checkpoint` from the names in a checkpoint of any
naming scheme.
"""

import collections
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Tuple

from mp_compat._tensorflow import log
from mp_compat._tensorflow import tf
from mp_compat._tensorflow import variables
from mp_compat.checkpoints import files
from mp_compat.core import matching
from mp_compat.core import variable_scope


def assignment_map(path: files.Path, wanted: Any) -> Any:
  """Returns an `assignment_map` for `tf.train.init_from_checkpoint` with the names that
  the checkpoint has.

  Args:
    path: a checkpoint, or a directory, of which the latest checkpoint is used.
    wanted: an assignment map with the names of any naming scheme: a dict or an iterable
      of pairs.

  Returns:
    A dict, or a list of pairs as `wanted`. Scopes and names without a match are
    unchanged. The state of a loss scale that the checkpoint lacks,
    or has in another dtype, is left out and keeps its initial value; logs a warning.

  Raises:
    ValueError: If there is no checkpoint at `path`, or a variable may be one of several
      in it. Names in `wanted` that are not those of variables are taken as they are.
    tf.errors.DataLossError: If the checkpoint is truncated or corrupt.
  """
  wanted = variable_scope.variables_of(wanted)
  pairs: List[Tuple[str, Any]] = list(wanted)
  if isinstance(wanted, Mapping):
    pairs = list(wanted.items())
  scopes = [value for _, value in pairs if isinstance(value, str)]
  named = {name: value for name, value in pairs if not isinstance(value, str)}
  found = _find(named, path)
  state = files.state_in(tf.get_default_graph(), found.wanted)
  left_out = [name for name in found.lacking() if name in state]
  _warn_left_out(left_out, found)
  if scopes:
    _warn_outside_scopes(scopes, found)
  result: List[Tuple[str, Any]] = []
  for name, value in pairs:
    if name not in left_out:
      result.append((found.match.names.get(name, name), value))
  return dict(result) if isinstance(wanted, Mapping) else result


def name_map(
  path: files.Path, var_list: Optional[files.VarList] = None
) -> Dict[str, tf.Variable]:
  """Returns the map for `tf.train.init_from_checkpoint(path, name_map(path))` and
  `tf.train.Saver(name_map(path))`.

  Args:
    path: a checkpoint of any naming scheme, or a directory, of which the latest
      checkpoint is used.
    var_list: the variables, an iterable or a dict by name; by default the global
      variables of the current graph.

  Returns:
    A dict of variables by the names in the checkpoint; the value is a list of parts for
    a partitioned variable. Variables that the checkpoint lacks, or has in another
    dtype, are left out; logs a warning. Only `Saver` converts contrib's int32 counts.

  Raises:
    ValueError, tf.errors.DataLossError: See `assignment_map`.
  """
  wanted = variable_scope.variables_of(var_list)
  if wanted is None:
    wanted = tf.global_variables()
  found = _find(wanted, path)
  left_out = found.lacking()
  _warn_left_out(left_out, found)
  result: Dict[str, Any] = {}
  for name, parts in found.parts.items():
    if name not in left_out:
      is_partitioned = variables.save_slice_info(parts[0]) is not None
      result[found.match.names[name]] = parts if is_partitioned else parts[0]
  return result


class _Found(NamedTuple):
  """The variables of a graph, and what a checkpoint has for them.

  Attributes:
    checkpoint: The checkpoint.
    parts: The variables by the names that `tf.train.Saver` gives them, or by those of a
      map: each a list of one, or of several with a partitioner.
    wanted: The names of the ops and the shapes of the whole variables.
    match: Their names in the checkpoint.
  """

  checkpoint: files.Checkpoint
  parts: Dict[str, List[tf.Variable]]
  wanted: Dict[str, files.Named]
  match: matching.Match

  def lacking(self) -> List[str]:
    """Returns the variables that the checkpoint lacks, or has in another dtype."""
    result: List[str] = []
    for name, parts in self.parts.items():
      dtype = self.checkpoint.dtypes.get(self.match.names.get(name, ""))
      if dtype != parts[0].dtype.base_dtype:
        result.append(name)
    return result


def _find(var_list: files.VarList, path: files.Path) -> _Found:
  """Returns what is known of the variables of a graph in a checkpoint.

  Args:
    var_list: the variables, or lists of their parts, an iterable or a dict by name.
      What is no variable is ignored.
    path: a checkpoint, or a directory.

  Raises:
    ValueError: If there is no checkpoint, or a variable may be one of several in it.
  """
  named: List[Tuple[str, Any]] = [("", value) for value in var_list]
  if isinstance(var_list, dict):
    named = list(var_list.items())
  parts: Dict[str, List[tf.Variable]] = collections.defaultdict(list)
  wanted: Dict[str, files.Named] = {}
  for name, value in named:
    for part in [value] if files.op_name(value) else value:
      # Others are no variables, but for example an iterator's state or a table.
      if hasattr(part, "initializer"):
        own_name, shape = _whole_variable(part)
        parts[name or own_name].append(part)
        wanted.setdefault(name or own_name, (part.op.name, shape))
  checkpoint = files.Checkpoint(files.resolve_path(path))
  match = files.match(tf.get_default_graph(), wanted, checkpoint)
  if match.ambiguous:
    raise ValueError(files.ambiguity(match, checkpoint.path))
  return _Found(checkpoint, parts, wanted, match)


def _whole_variable(part: tf.Variable) -> Tuple[str, Tuple[int, ...]]:
  """Returns the name and the shape of a variable; for a part of a partitioned one,
  those of the whole.
  """
  slice_info = variables.save_slice_info(part)
  if slice_info is None:
    return part.op.name, tuple(part.shape.as_list())
  return slice_info.full_name, tuple(slice_info.full_shape)


def _warn_left_out(names: List[str], found: _Found) -> None:
  """Logs a warning of variables that a map leaves out, if there are any."""
  if names:
    log.warn(
      "The checkpoint %s lacks %s, or has another dtype. Initial values are used "
      "instead. To use another program's values, convert the checkpoint: python -m "
      "mp_compat checkpoint convert.",
      found.checkpoint.path,
      ", ".join(names),
    )


def _warn_outside_scopes(scopes: List[str], found: _Found) -> None:
  """Logs a warning of variables that `tf.get_variable` did not make, if the checkpoint
  has values for them: scopes leave them out.

  `tf.train.init_from_checkpoint` finds the variables of a scope in the variable store
  of `tf.get_variable`. A loss scale and Adam make some of theirs otherwise.

  Args:
    scopes: scopes, such as "encoder/", and names of variables in the graph, which are
      ignored here; "/" is the scope of all variables.
    found: the variables that the map itself names. They are not left out.
  """
  prefixes = tuple(scope.lstrip("/") for scope in scopes if scope.endswith("/"))
  named = {part.op.name for parts in found.parts.values() for part in parts}
  graph = tf.get_default_graph()
  match = files.match(graph, files.global_variables(graph), found.checkpoint)
  in_checkpoint = match.names.keys() | match.ambiguous
  names: List[str] = []
  for variable in tf.global_variables():
    name = variable.op.name
    is_left_out = name.startswith(prefixes) and name not in named
    is_made_by_get_variable = variables.is_made_by_get_variable(variable)
    if is_left_out and not is_made_by_get_variable and name in in_checkpoint:
      names.append(name)
  if names:
    log.warn(
      "A map of scopes does not initialize %s from the checkpoint %s, which has values "
      "for them: a scope contains only variables of tf.get_variable(). Pass "
      "mp_compat.checkpoints.name_map(path) instead of the map.",
      ", ".join(names),
      found.checkpoint.path,
    )
