"""Restores and converts checkpoints of TensorFlow's class, of tf.contrib and of training without loss scaling.

`Saver` writes what `tf.train.Saver` writes, and restores every naming scheme (see `mp_compat.dialects`). `convert`
rewrites a checkpoint for programs that have only `tf.train.Saver`.
"""

import collections
import os
import re
from typing import Any, Callable, Dict, Iterable, List, NamedTuple, Optional, Tuple, Union

from absl import logging
import numpy as np

from mp_compat import _compat
from mp_compat import dialects
from mp_compat._compat import tf

Path = Union[str, bytes, "os.PathLike[str]"]
VarList = Union[None, Iterable[tf.Variable], Dict[str, tf.Variable]]

# An entry of every checkpoint written by tf.train.Checkpoint. Such names are object paths, whichever class trained.
_OBJECT_GRAPH = "_CHECKPOINTABLE_OBJECT_GRAPH"

# Errors that TensorFlow raises for a damaged checkpoint: in a Session, and in a checkpoint reader.
_BROKEN_IN_SESSION = (tf.errors.DataLossError, tf.errors.NotFoundError, tf.errors.OutOfRangeError)
_BROKEN = (tf.errors.OpError, IndexError, RuntimeError, ValueError)

# The beginning of error messages about the graph, as opposed to the file.
_MISFIT = "Nothing was restored."


class Inspection(NamedTuple):
  """The content of a checkpoint."""

  path: str
  dialect: str  # the naming scheme: one of `mp_compat.dialects.DIALECTS`, or "object-based"
  variables: "collections.OrderedDict[str, Tuple[tf.DType, Tuple[int, ...]]]"  # dtype and shape by name
  state: "collections.OrderedDict[str, Any]"  # the values of the loss scale's variables by name


class Saver(tf.train.Saver):
  """A `tf.train.Saver` that restores checkpoints of every naming scheme, into graphs with and without loss scaling.

      scaffold = tf.train.Scaffold(saver=mp_compat.checkpoints.Saver())      after the train op is built
      with tf.train.MonitoredTrainingSession(checkpoint_dir=..., scaffold=scaffold) as sess: ...
      tf.estimator.EstimatorSpec(..., scaffold=scaffold)
      saver.restore(sess, path)

  Restoring accepts both names of Adam's powers, contrib's state (int32 counts become int64), and state under another
  name scope. A loss scale that is not in the checkpoint starts at its initial value. The arguments, and the files
  that are written, are those of `tf.train.Saver`.

  Source: `tf.train.Saver`.
  """

  def restore(self, sess: tf.Session, save_path: Path) -> None:
    """Restores the variables; see `tf.train.Saver.restore`. Adds nothing to the graph.

    Args:
      sess: A Session on the graph.
      save_path: The path of a checkpoint, as returned by `save` or `tf.train.latest_checkpoint`.

    Raises:
      tf.errors.NotFoundError: If variables other than the loss scale's are not in the checkpoint.
      tf.errors.InvalidArgumentError: If variables have another shape or dtype in the checkpoint. Both errors name all
        variables that do not fit, and are raised before any variable is assigned.
      tf.errors.DataLossError: If the checkpoint is truncated or corrupt.
      ValueError: If there is no checkpoint at `save_path`.
    """
    try:
      restore(self, sess, save_path, super().restore)
    except _BROKEN_IN_SESSION as error:
      if save_path is None or not _exists(_text(save_path)) or _MISFIT in str(error):
        raise
      raise _damaged(_text(save_path), error) from error


def restore(saver: tf.train.Saver, sess: tf.Session, save_path: Path, as_tensorflow: Callable[..., None]) -> None:
  """Restores the variables of a Saver from a checkpoint of any naming scheme.

  Args:
    saver: Any `tf.train.Saver`.
    sess: A Session on its graph.
    save_path: The path of a checkpoint.
    as_tensorflow: TensorFlow's `restore`, a function of `sess` and the path. It is called if all names and dtypes are
      those in the checkpoint, if the checkpoint is object-based, if the Saver is not built, and in eager mode.

  Raises:
    tf.errors.NotFoundError, tf.errors.InvalidArgumentError, tf.errors.DataLossError, ValueError: See `Saver.restore`.
  """
  if tf.executing_eagerly() or saver.saver_def is None:  # None if the Saver is empty, or build() was not called
    as_tensorflow(sess, save_path)
    return
  if save_path is None or not _exists(_text(save_path)):
    raise ValueError("The passed save_path is not a valid checkpoint: {}. Expected the path that save() or "
                     "tf.train.latest_checkpoint() returned.".format(save_path))
  path = _text(save_path)
  reader = _reader(path)
  if reader.has_tensor(_OBJECT_GRAPH):
    as_tensorflow(sess, path)
    return
  entries = _entries(sess.graph.as_graph_element(saver.saver_def.restore_op_name))
  matched = _matched(entries, reader, path)
  dtypes = reader.get_variable_to_dtype_map()
  if all(matched.get(entry.name) == entry.name and dtypes[entry.name] == entry.dtype for entry in entries):
    as_tensorflow(sess, path)
    return
  feeds = _feeds(sess, entries, matched, reader, path)
  feeds[saver.saver_def.filename_tensor_name] = path
  logging.info("Restoring parameters from %s, which has other names", path)
  sess.run(saver.saver_def.restore_op_name, feeds)


def with_names_elsewhere(var_list: Any) -> Any:
  """Returns the `var_list` of a Saver whose checkpoints a program with TensorFlow's class can restore.

  Args:
    var_list: None, a list or a dict, as for `tf.train.Saver`.

  Returns:
    `var_list`, with a second entry for each variable to which TensorFlow's class gives another name, under that name.
    Variables that the program renames (in a dict) have one entry. Logs a warning if another variable has that name.
  """
  elsewhere = _compat.names_elsewhere(tf.get_default_graph())
  if all(ours == theirs for ours, theirs in elsewhere.items()):
    return var_list
  if var_list is None:
    var_list = tf.global_variables() + tf.get_collection(tf.GraphKeys.SAVEABLE_OBJECTS)
  if not isinstance(var_list, dict):
    var_list = list(var_list)
  named = var_list if isinstance(var_list, dict) else {one.op.name: one for one in var_list if hasattr(one, "op")}
  again = collections.OrderedDict()
  for ours, theirs in sorted(elsewhere.items()):
    if theirs in named and theirs != ours:
      logging.warning("%s is not saved as %s, as TensorFlow's class calls it: that is the name of another variable "
                      "here. For a program without mp_compat convert the checkpoint: python -m mp_compat checkpoint "
                      "convert --like.", ours, theirs)
    elif ours in named and theirs != ours and getattr(named[ours], "op", None) is not None and (
        named[ours].op.name == ours):
      again[theirs] = _compat.SavedAgain(named[ours], theirs)
  return dict(var_list, **again) if isinstance(var_list, dict) else var_list + list(again.values())


def assignment_map(path: Path, wanted: Any) -> Any:
  """Returns an `assignment_map` for `tf.train.init_from_checkpoint` with the names that the checkpoint has.

  Args:
    path: A checkpoint, or a directory, of which the latest checkpoint is used.
    wanted: An assignment map with the names of any naming scheme: a dict or an iterable of pairs.

  Returns:
    A dict, or `wanted` itself if the checkpoint has all its names. Scopes and names without a match are unchanged. The
    state of a loss scale that the checkpoint lacks is left out and keeps its initial value; logs a warning.

  Raises:
    ValueError: If there is no checkpoint at `path`.
    tf.errors.DataLossError: If the checkpoint is truncated or corrupt.
  """
  pairs = list(wanted.items() if hasattr(wanted, "items") else wanted)
  reader = _reader(_latest(path))
  variables = _named({name: value for name, value in pairs if not isinstance(value, str)})
  if all(reader.has_tensor(name) for name in variables):
    return wanted
  matched = _match(variables, reader)
  begins = [name for name, one in variables.items() if name not in matched and _is_state(name, one.shape)]
  _tell_what_begins(begins, path)
  return {matched.get(name, name): value for name, value in pairs if name not in begins}


def name_map(path: Path, var_list: VarList = None) -> Dict[str, tf.Variable]:
  """Returns the map for `tf.train.init_from_checkpoint(path, name_map(path))` and `tf.train.Saver(name_map(path))`.

  Args:
    path: A checkpoint of any naming scheme, or a directory, of which the latest checkpoint is used.
    var_list: The variables, an iterable or a dict by name; by default the global variables of the current graph.

  Returns:
    A dict of variables by the names in the checkpoint; the value is a list of parts for a partitioned variable.
    Variables that the checkpoint lacks, or has in another dtype, are left out. Only `Saver` converts contrib's int32
    counts.

  Raises:
    ValueError: If there is no checkpoint at `path`.
    tf.errors.DataLossError: If the checkpoint is truncated or corrupt.
  """
  wanted, reader = _named(tf.global_variables() if var_list is None else var_list), _reader(_latest(path))
  dtypes = reader.get_variable_to_dtype_map()
  return {found: wanted[name].parts if len(wanted[name].parts) > 1 else wanted[name].parts[0]
          for name, found in _match(wanted, reader).items() if dtypes[found] == wanted[name].dtype}


def inspect(path: Path) -> Inspection:
  """Returns the variables in a checkpoint, its naming scheme and the state of its loss scale.

  Args:
    path: A checkpoint, or a directory, of which the latest checkpoint is used.

  Returns:
    An `Inspection`, with dtypes, shapes and the values of the loss scale's variables.

  Raises:
    ValueError: If there is no checkpoint at `path`.
    tf.errors.DataLossError: If the checkpoint is truncated or corrupt.
  """
  path = _latest(path)
  reader = _reader(path)
  shapes, dtypes = reader.get_variable_to_shape_map(), reader.get_variable_to_dtype_map()
  variables = collections.OrderedDict((name, (dtypes[name], tuple(shapes[name]))) for name in sorted(shapes))
  if _OBJECT_GRAPH in shapes:
    dialect, state = "object-based", [name for name in variables if dialects.is_state(name.partition("/.ATTR")[0])]
  else:
    dialect, state = dialects.dialect(shapes), list(dialects.state(shapes))
  return Inspection(path, dialect, variables, collections.OrderedDict((name, _read(reader, path, name))
                                                                      for name in state))


def convert(source: Path, target: Path, to: Optional[str] = None, like: Optional[Path] = None) -> Inspection:
  """Writes a checkpoint with the names of another naming scheme or program, and verifies it by reading it back.

  A loss scale that `source` lacks starts at 2**15, with counts of 0.

  Args:
    source: A checkpoint, or a directory, of which the latest checkpoint is used. It is not changed.
    target: The path of the checkpoint to write. The index is moved there last: no partial checkpoint can be read.
    to: One of "mp_compat", "tensorflow", "contrib" and "plain". The names are those of a program whose only
      conditionals are the optimizer's.
    like: Instead of `to`, a checkpoint (or a directory) of the program that will restore `target`: its names are used.
      TensorFlow's class names Adam's powers after the enclosing conditional: `cond_3/beta1_power` if the program
      itself builds two. Its `.meta` file, if there is one, is copied too.

  Returns:
    An `Inspection` of the checkpoint at `target`.

  Raises:
    ValueError: If there is no checkpoint at `source` or `like`, `source` is object-based, `to` is unknown, `target`
      exists, `like` has variables that are not in `source`, or not exactly one of `to` and `like` is given.
    tf.errors.DataLossError: If the checkpoint is truncated or corrupt, or was not written correctly.
  """
  if (to is None) == (like is None):
    raise ValueError("Expected either a dialect (to) or a checkpoint to be like (like), got {!r} and {!r}.".format(
        to, like))
  found, target = inspect(source), _text(target)
  if found.dialect == "object-based":
    raise ValueError("{} was written by tf.train.Checkpoint, whose names are the same in every dialect: restore it as "
                     "it is. Only without loss scaling it is tf.train.Checkpoint(optimizer=opt.inner_optimizer)."
                     .format(found.path))
  if _exists(target) or tf.gfile.Exists(target):
    raise ValueError("There is something at {} already, which is not overwritten. Give another path.".format(target))
  names = dialects.translate(found.variables, to) if like is None else _as_in(inspect(like), found)
  count = np.int32 if to == "contrib" or like is not None and inspect(like).dialect == "contrib" else np.int64
  reader = _reader(found.path)
  values = {}
  for name, copied in names.items():
    role = dialects.state([name]).get(name)
    value = np.float32(2. ** 15 if role == "current_loss_scale" else 0.) if copied is None else (
        _read(reader, found.path, copied))
    values[name] = value.astype(count) if role in ("good_steps", "bad_steps") else value
  _write(values, target)
  if like is not None and tf.gfile.Exists("{}.meta".format(_latest(like))):
    tf.gfile.Copy("{}.meta".format(_latest(like)), "{}.meta".format(target), overwrite=True)
  return inspect(target)


def _as_in(like: Inspection, found: Inspection) -> Dict[str, Optional[str]]:
  """Returns for each name in `like` the name in `found` to copy from; None for state that starts anew."""
  shapes = collections.OrderedDict((name, like.variables[name][1]) for name in sorted(
      like.variables, key=dialects.in_order))
  matched = dialects.match(shapes, {name: shape for name, (_, shape) in found.variables.items()})
  missing = [name for name in shapes if name not in matched and not dialects.is_state(name)]
  if missing:
    raise ValueError("Expected the variables of {}, but {} does not have these in the same shape: {}. Pass "
                     "checkpoints of the same model.".format(like.path, found.path, ", ".join(missing)))
  return {name: matched.get(name) for name in shapes}


def _write(values: Dict[str, np.ndarray], target: str) -> None:
  """Writes a checkpoint to a temporary directory, compares it with `values`, and moves it to `target`, index last."""
  beside = "{}.unfinished".format(target)
  _remove(beside)  # left by a conversion that was killed
  tf.gfile.MakeDirs(beside)
  try:
    prefix = os.path.join(beside, os.path.basename(target))
    names = sorted(values)
    with tf.Graph().as_default(), tf.Session() as sess:
      feeds = [tf.placeholder(values[name].dtype, values[name].shape) for name in names]
      save = tf.raw_ops.SaveV2(prefix=prefix, tensor_names=names, shape_and_slices=[""] * len(names), tensors=feeds)
      sess.run(save, {feed: values[name] for feed, name in zip(feeds, names)})
    reader = _reader(prefix)
    for name in names:
      written = _read(reader, prefix, name)
      if not _same(written, values[name]):
        raise tf.errors.DataLossError(None, None, "{} of {} was not written as it should be.".format(name, prefix))
    # Some file systems list whole paths. The index comes last: without it, there is no checkpoint.
    for part in sorted(os.path.basename(path) for path in tf.gfile.ListDirectory(beside)):
      tf.gfile.Rename(os.path.join(beside, part), os.path.join(os.path.dirname(target), part), overwrite=True)
  finally:
    _remove(beside)


def _remove(folder: str) -> None:
  if tf.gfile.Exists(folder):
    tf.gfile.DeleteRecursively(folder)


def _same(a: np.ndarray, b: np.ndarray) -> bool:
  same = a.tolist() == b.tolist() if a.dtype == object else a.tobytes() == b.tobytes()
  return same and (a.dtype, a.shape) == (b.dtype, b.shape)


def _text(path: Path) -> str:
  return tf.compat.as_str_any(path)


def _latest(path: Path) -> str:
  path = _text(path)
  found = tf.train.latest_checkpoint(path) if tf.gfile.IsDirectory(path) and not _exists(path) else path
  if found is None or not _exists(found):
    raise ValueError("There is no checkpoint at {}. Expected the path of one, such as model.ckpt-100 without .index, "
                     "or a directory with a file named checkpoint.".format(path))
  return found


def _exists(path: str) -> bool:
  """Returns whether there is an index file (V2), or files match the path itself (V1, "model-?????-of-00002")."""
  if tf.gfile.Exists("{}.index".format(path)):
    return True
  try:
    return any(not tf.gfile.IsDirectory(file) for file in tf.gfile.Glob(path))
  except tf.errors.NotFoundError:  # TensorFlow 1.15 raises it if the directory does not exist.
    return False


def _reader(path: str) -> Any:
  try:
    return tf.train.NewCheckpointReader(path)  # load_checkpoint() would prefer a directory of that name
  except _BROKEN as error:
    raise _damaged(path, error) from error


def _read(reader: Any, path: str, name: str) -> np.ndarray:
  try:
    return np.asarray(reader.get_tensor(name))
  except tf.errors.UnimplementedError:  # a partitioned variable in the V1 format
    return _read_parts(path, [name], [""], [reader.get_variable_to_dtype_map()[name]])[0]
  except _BROKEN as error:
    raise _damaged(path, error) from error


def _damaged(path: str, error: Exception) -> tf.errors.DataLossError:
  # A Session's message includes the node and its traceback. The line before the node states the error.
  reason = re.search(r"([^\n]+)\n\s*\[\[", str(error)) or re.search(r"([^\n]+)", str(error))
  return tf.errors.DataLossError(
      None, None, "The checkpoint {} is truncated or corrupt: {}. Restore an earlier one; "
      "tf.train.get_checkpoint_state({!r}).all_model_checkpoint_paths lists those that are kept.".format(
          path, reason.group(1) if reason else type(error).__name__, os.path.dirname(path)))


class _Wanted(NamedTuple):
  """A variable of the graph under its name in checkpoints; with a partitioner, several parts share one name."""

  parts: List[tf.Variable]
  shape: Tuple[int, ...]

  @property
  def dtype(self) -> tf.DType:
    return self.parts[0].dtype.base_dtype


def _named(var_list: VarList) -> "collections.OrderedDict[str, _Wanted]":
  """Returns variables by the names that `tf.train.Saver` gives them."""
  wanted = collections.OrderedDict()
  for name, value in var_list.items() if isinstance(var_list, dict) else [(None, value) for value in var_list]:
    for part in [value] if hasattr(value, "op") else value:
      if not hasattr(part, "initializer"):
        continue  # not a variable: an iterator's state, or a table
      whole = _compat.slice_of(part)
      shape = part.shape.as_list() if whole is None else whole.full_shape
      full_name = name or (part.op.name if whole is None else whole.full_name)
      wanted.setdefault(full_name, _Wanted([], tuple(shape))).parts.append(part)
  return wanted


def _match(wanted: Dict[str, _Wanted], reader: Any) -> Dict[str, str]:
  shapes = collections.OrderedDict((name, one.shape) for name, one in wanted.items())
  return dialects.match(shapes, _shapes(reader))


def _shapes(reader: Any) -> Dict[str, Tuple[int, ...]]:
  return {name: tuple(shape) for name, shape in reader.get_variable_to_shape_map().items()}


class _Entry(NamedTuple):
  """A tensor that a Saver reads from a checkpoint: an output of a RestoreV2 op, and the variables assigned from it."""

  op: tf.Operation
  index: int
  name: str  # in the checkpoint
  part: str  # the shape of a partitioned variable and the slice to read, "6 2 0,2:-"; "" for the whole tensor
  variables: Tuple[tf.Operation, ...]  # with tf.distribute, one per local device; empty for an iterator's state
  reshaped: bool  # Saver(reshape=True)

  @property
  def dtype(self) -> tf.DType:
    return self.op.outputs[self.index].dtype

  @property
  def is_needed(self) -> bool:
    """Returns whether any op reads it: False for a variable that is only saved again, under another name."""
    return bool(self.op.outputs[self.index].consumers())

  @property
  def shape(self) -> tf.TensorShape:
    """Returns the static shape of the whole variable."""
    if self.part:
      return tf.TensorShape([int(size) for size in self.part.split()[:-1]])
    known = [variable.get_attr("shape") for variable in self.variables if "shape" in variable.node_def.attr]
    return tf.TensorShape(known[0] if known else None)


def _entries(restore_op: tf.Operation) -> List[_Entry]:
  """Returns the tensors that running `restore_op` reads, in the order in which the variables were created."""
  seen, ahead, restores, assigned = set(), [restore_op], [], collections.defaultdict(list)
  while ahead:
    op = ahead.pop()
    if op.name in seen:
      continue
    seen.add(op.name)
    ahead += [tensor.op for tensor in op.inputs] + list(op.control_inputs)
    if op.type == "RestoreV2":
      restores.append(op)
    elif op.type in ("Assign", "AssignVariableOp"):
      value, reshaped = op.inputs[1], False
      while value.op.type != "RestoreV2" and value.op.inputs:
        value, reshaped = value.op.inputs[0], reshaped or value.op.type == "Reshape"
      assigned[value.name].append((op.inputs[0].op, reshaped))
  entries = []
  for op in restores:
    names, parts = [tf.make_ndarray(tensor.op.get_attr("value")) for tensor in op.inputs[1:3]]
    for index, (name, part) in enumerate(zip(names, parts)):
      variables = assigned[op.outputs[index].name]
      entries.append(_Entry(op, index, tf.compat.as_str(name), tf.compat.as_str(part),
                            tuple(variable for variable, _ in variables), any(reshaped for _, reshaped in variables)))
  made = {op.name: number for number, op in enumerate(restore_op.graph.get_operations())}
  return sorted(entries, key=lambda entry: [made[variable.name] for variable in entry.variables])


def _matched(entries: List[_Entry], reader: Any, path: str) -> Dict[str, str]:
  """Returns the names in the checkpoint by the names in the graph, without state that starts anew.

  Raises:
    tf.errors.NotFoundError, tf.errors.InvalidArgumentError: See `Saver.restore`.
  """
  shapes, dtypes = _shapes(reader), reader.get_variable_to_dtype_map()
  elsewhere = _compat.names_elsewhere(entries[0].op.graph) if entries else {}
  needed = [entry for entry in entries if entry.is_needed]
  wanted = collections.OrderedDict(
      (entry.name, entry.shape.as_list()) for entry in needed if entry.shape.is_fully_defined())
  matched = {entry.name: entry.name for entry in needed if entry.name in shapes}
  for entry in needed:
    for variable in entry.variables:
      if elsewhere.get(variable.name) in shapes:
        matched.setdefault(entry.name, elsewhere[variable.name])
  others = {name: shape for name, shape in shapes.items() if name not in matched.values()}
  matched.update(dialects.match(
      collections.OrderedDict((name, shape) for name, shape in wanted.items() if name not in matched), others))
  missing, different, begins = [], [], []
  for name, entry in collections.OrderedDict((entry.name, entry) for entry in needed).items():
    found = matched.get(name)
    if found is None:
      (begins if _is_state(name, entry.shape) else missing).append(name)
      continue
    if not (entry.shape.is_compatible_with(shapes[found]) or entry.reshaped and (
        entry.shape.num_elements() == np.prod(shapes[found], dtype=np.int64))):
      different.append("{} has the shape {} here, {} there".format(name, entry.shape, list(shapes[found])))
    if dtypes[found] != entry.dtype and not dialects.is_state(name):
      different.append("{} has the dtype {} here, {} there".format(name, entry.dtype.name, dtypes[found].name))
  if missing or different:
    parts = [_MISFIT]
    if missing:
      parts.append("Not found in the checkpoint {}, which has the names of the dialect {}: {}. It has: {}.".format(
          path, dialects.dialect(shapes), ", ".join(missing), ", ".join(sorted(shapes))))
    if different:
      parts.append("Different in the checkpoint {}: {}. Expected a checkpoint of the same model; to restore a part of "
                   "it, pass var_list.".format(path, "; ".join(different)))
    raise (tf.errors.NotFoundError if missing else tf.errors.InvalidArgumentError)(None, None, " ".join(parts))
  _tell_what_begins(begins, path)
  matched.update((entry.name, entry.name) for entry in entries if not entry.is_needed and entry.name in shapes)
  return matched


def _is_state(name: str, shape: Any) -> bool:
  return dialects.is_state(name) and tf.TensorShape(shape).rank == 0


def _tell_what_begins(names: List[str], path: Path) -> None:
  if names:
    logging.warning("The checkpoint %s has no loss scale: %s begin(s) at the initial value.", _text(path),
                    ", ".join(names))


def _feeds(sess: tf.Session, entries: List[_Entry], matched: Dict[str, str], reader: Any,
           path: str) -> Dict[str, Any]:
  """Returns the feeds with which a Saver's own ops restore the names in `matched`.

  The names that RestoreV2 reads are fed. If it cannot read a value (state that starts anew, or has another dtype), its
  output is fed, and the op reads another tensor of the same dtype. If the checkpoint has none of that dtype, all
  outputs in use are fed.
  """
  shapes, dtypes = _shapes(reader), reader.get_variable_to_dtype_map()
  stand_ins = {dtypes[name]: name for name in sorted(shapes, key=lambda name: -np.prod(shapes[name], dtype=np.int64))}
  feeds, names = {}, collections.OrderedDict((entry.op, {}) for entry in entries)
  for entry in entries:
    found = matched.get(entry.name)
    if not entry.is_needed:
      names[entry.op][entry.index] = stand_ins.get(entry.dtype)
      continue
    if found is None or dtypes[found] != entry.dtype:
      # The name of the initializer is part of the graph format.
      initial = sess.graph.get_operation_by_name(entry.variables[0].name + "/Assign").inputs[1]
      value = sess.run(initial) if found is None else _read(reader, path, found).astype(entry.dtype.as_numpy_dtype)
      feeds[entry.op.outputs[entry.index].name] = value
      found = stand_ins.get(entry.dtype)
    names[entry.op][entry.index] = found
  for op, found in names.items():
    found = [found[index] for index in range(len(found))]
    if None not in found:
      feeds[op.inputs[1].name] = found
      continue
    parts = tf.make_ndarray(op.inputs[2].op.get_attr("value"))
    rest = [index for index, output in enumerate(op.outputs) if output.name not in feeds and output.consumers()]
    values = _read_parts(path, [found[index] for index in rest], [parts[index] for index in rest],
                         [op.outputs[index].dtype for index in rest])
    feeds.update((op.outputs[index].name, value) for index, value in zip(rest, values))
  return feeds


def _read_parts(path: str, names: List[str], parts: List[str], dtypes: List[tf.DType]) -> List[np.ndarray]:
  with tf.Graph().as_default(), tf.Session(config=tf.ConfigProto(device_count={"GPU": 0})) as sess:
    return sess.run(tf.raw_ops.RestoreV2(prefix=path, tensor_names=names, shape_and_slices=parts, dtypes=dtypes))
