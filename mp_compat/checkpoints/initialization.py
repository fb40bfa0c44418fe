# SPDX-License-Identifier: Apache-2.0
"""Makes maps for `tf.train.init_from_checkpoint` from the names in a checkpoint of any
naming scheme.
"""

from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Set, Tuple

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
    A dict, or `wanted` itself if the checkpoint has all its names. Scopes and names
    without a match are unchanged. The state of a loss scale that the checkpoint lacks,
    or has in another dtype, is left out and keeps its initial value; logs a warning.

  Raises:
    ValueError: If there is no checkpoint at `path`, or a variable may be one of several
      in it. Names in `wanted` that are not those of variables are taken as they are.
    tf.errors.DataLossError: If the checkpoint is truncated or corrupt.
  """
  wanted = variable_scope.variables_of(wanted)
  pairs = list(wanted.items() if isinstance(wanted, Mapping) else wanted)
  targets = [value for _, value in pairs if isinstance(value, str)]
  named = {name: value for name, value in pairs if not isinstance(value, str)}
  matches = _match(named, path)
  wanted_by_name = {name: match.named for name, match in matches.items()}
  state = files.state_names(tf.get_default_graph(), wanted_by_name)
  left_out = [name for name in matches if name in state and not matches[name].is_usable]
  _warn_left_out(left_out, path)
  _warn_outside_scopes(targets, matches, path)
  result: Dict[str, Any] = {}
  for name, value in pairs:
    if name not in left_out:
      source = matches[name].source if name in matches else None
      result[source or name] = value
  if list(result.items()) == pairs:
    return wanted
  return result


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
  result: Dict[str, Any] = {}
  left_out: List[str] = []
  for name, match in _match(wanted, path).items():
    if match.source is None or not match.is_usable:
      left_out.append(name)
    else:
      is_partitioned = variables.save_slice_info(match.parts[0]) is not None
      result[match.source] = match.parts if is_partitioned else match.parts[0]
  _warn_left_out(left_out, path)
  return result


class _Match(NamedTuple):
  """A variable of the graph, and what a checkpoint has for it.

  Attributes:
    parts: The variable; several of them with a partitioner.
    shape: The shape of the whole variable.
    source: The name in the checkpoint; None if it lacks the variable.
    is_usable: Whether it has the dtype of the variable there.
  """

  parts: List[tf.Variable]
  shape: Tuple[int, ...]
  source: Optional[str] = None
  is_usable: bool = False

  @property
  def named(self) -> files.Named:
    """Returns the name of the op and the shape of the whole variable."""
    return self.parts[0].op.name, self.shape


def _match(var_list: files.VarList, path: files.Path) -> Dict[str, _Match]:
  """Returns which variable in a checkpoint each variable of a graph is.

  Arguments and result are those of `_find`.

  Raises:
    ValueError: If there is no checkpoint, or a variable may be one of several in it.
  """
  found, match = _find(var_list, path)
  if match.ambiguous:
    raise ValueError(files.ambiguity(match, files.resolve_path(path)))
  return found


def _find(
  var_list: files.VarList, path: files.Path
) -> Tuple[Dict[str, _Match], matching.Match]:
  """Returns what is known of the variables of a graph in a checkpoint.

  Args:
    var_list: the variables, or lists of their parts, an iterable or a dict by name.
      What is no variable is ignored.
    path: a checkpoint, or a directory.

  Returns:
    The variables by the names that `tf.train.Saver` gives them, or by those of the
    dict; and their names in the checkpoint.

  Raises:
    ValueError: If there is no checkpoint.
  """
  wanted: Dict[str, _Match] = {}
  if isinstance(var_list, dict):
    named = list(var_list.items())
  else:
    named = [("", value) for value in var_list]
  for name, value in named:
    parts = [value] if files.op_name(value) else value
    for part in parts:
      if not hasattr(part, "initializer"):
        continue  # not a variable, but for example an iterator's state or a table
      own_name, shape = _whole_variable(part)
      match = wanted.setdefault(name or own_name, _Match([], shape))
      match.parts.append(part)
  checkpoint = files.Checkpoint(files.resolve_path(path))
  matched = files.match(
    tf.get_default_graph(),
    {name: each.named for name, each in wanted.items()},
    checkpoint,
  )
  for name, source in matched.names.items():
    is_usable = checkpoint.dtypes[source] == wanted[name].parts[0].dtype.base_dtype
    wanted[name] = wanted[name]._replace(source=source, is_usable=is_usable)
  return wanted, matched


def _whole_variable(part: tf.Variable) -> Tuple[str, Tuple[int, ...]]:
  """Returns the name and the shape of a variable; for a part of a partitioned one,
  those of the whole.
  """
  slice_info = variables.save_slice_info(part)
  if slice_info is None:
    return part.op.name, tuple(part.shape.as_list())
  return slice_info.full_name, tuple(slice_info.full_shape)


def _warn_left_out(names: List[str], path: files.Path) -> None:
  """Logs a warning of variables that a map leaves out, if there are any."""
  if names:
    log.warn(
      "The checkpoint %s lacks %s, or has another dtype. Initial values are used "
      "instead. To use another program's values, convert the checkpoint: python -m "
      "mp_compat checkpoint convert.",
      files.path_text(path),
      ", ".join(names),
    )


def _outside_scopes(scopes: Tuple[str, ...]) -> List[tf.Variable]:
  """Returns the variables with the names of scopes that `tf.get_variable` did not make:
  to TensorFlow, they are not in the scopes.
  """
  found = []
  for variable in tf.global_variables():
    is_named_after_scope = variable.op.name.startswith(scopes)
    if is_named_after_scope and not variables.is_made_by_get_variable(variable):
      found.append(variable)
  return found


def _warn_outside_scopes(
  targets: List[str], matches: Dict[str, _Match], path: files.Path
) -> None:
  """Logs a warning of variables that `tf.get_variable` did not make, if the checkpoint
  has values for them: scopes leave them out.

  `tf.train.init_from_checkpoint` finds the variables of a scope in the variable store
  of `tf.get_variable`. A loss scale and Adam make some of theirs otherwise.

  Args:
    targets: scopes, such as "encoder/", and names of variables in the graph, which are
      ignored here; "/" is the scope of all variables.
    matches: the variables that the map itself names, by these names. They are not left
      out.
    path: the checkpoint.
  """
  scopes = tuple(target.lstrip("/") for target in targets if target.endswith("/"))
  matched: Set[str] = set()
  for known in matches.values():
    matched.update(part.op.name for part in known.parts)
  others = []
  for variable in _outside_scopes(scopes):
    if variable.op.name not in matched:
      others.append(variable)
  if not others:
    return
  _, match = _find(others, path)
  names = [*match.names, *match.ambiguous]
  if names:
    log.warn(
      "A map of scopes does not initialize %s from the checkpoint %s, which has values "
      "for them: a scope contains only variables of tf.get_variable(). Pass "
      "mp_compat.checkpoints.name_map(path) instead of the map.",
      ", ".join(names),
      files.path_text(path),
    )
