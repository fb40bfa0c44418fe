"""Checkpoints: of TensorFlow's class, of tf.contrib.mixed_precision, and of training without loss scaling.

`Saver` writes what `tf.train.Saver` writes, and restores every dialect (`mp_compat.dialects`). `convert` rewrites a
checkpoint for those who have only `tf.train.Saver`.
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

# Among the entries of a checkpoint that tf.train.Checkpoint wrote: its names are paths, the same in every dialect.
_OBJECT_GRAPH = "_CHECKPOINTABLE_OBJECT_GRAPH"

# What TensorFlow raises over a damaged checkpoint: in a Session, and reading it.
_BROKEN_IN_SESSION = (tf.errors.DataLossError, tf.errors.NotFoundError, tf.errors.OutOfRangeError)
_BROKEN = (tf.errors.OpError, IndexError, RuntimeError, ValueError)

# How errors begin that are about the graph and not about the file.
_MISFIT = "Nothing was restored."


class Inspection(NamedTuple):
  """What is in a checkpoint."""

  path: str
  dialect: str  # one of `mp_compat.dialects.DIALECTS`, or "object-based"
  variables: "collections.OrderedDict[str, Tuple[tf.DType, Tuple[int, ...]]]"  # dtype and shape by name
  state: "collections.OrderedDict[str, Any]"  # the values of the loss scale's variables by name


class Saver(tf.train.Saver):
  """A `tf.train.Saver` that restores checkpoints of every dialect, into graphs with and without loss scaling.

      scaffold = tf.train.Scaffold(saver=mp_compat.checkpoints.Saver())      after the train op is built
      with tf.train.MonitoredTrainingSession(checkpoint_dir=..., scaffold=scaffold) as sess: ...
      tf.estimator.EstimatorSpec(..., scaffold=scaffold)
      saver.restore(sess, path)

  Restoring reads either spelling of Adam's powers, contrib's state (int32 counts become int64), and state that lives
  under another scope. A loss scale that the checkpoint knows nothing of begins at its initial value. Arguments as
  `tf.train.Saver`'s; what it writes is the same.

  Source: `tf.train.Saver`.
  """

  def restore(self, sess: tf.Session, save_path: Path) -> None:
    """Restores the variables; see `tf.train.Saver.restore`. Adds nothing to the graph.

    Args:
      sess: a Session on the graph.
      save_path: the path of a checkpoint, as `save` or `tf.train.latest_checkpoint` returned it.

    Raises:
      tf.errors.NotFoundError: variables other than the loss scale's are not in the checkpoint.
      tf.errors.InvalidArgumentError: variables have another shape or dtype in the checkpoint. Both errors name all
        variables that do not fit, and no variable has been assigned.
      tf.errors.DataLossError: the checkpoint is truncated or corrupt.
      ValueError: `save_path` is no checkpoint.
    """
    try:
      restore(self, sess, save_path, super().restore)
    except _BROKEN_IN_SESSION as error:
      if save_path is None or not _exists(_text(save_path)) or _MISFIT in str(error):
        raise
      raise _damaged(_text(save_path), error) from error


def restore(saver: tf.train.Saver, sess: tf.Session, save_path: Path, as_tensorflow: Callable[..., None]) -> None:
  """Restores what `saver` has ops for from a checkpoint of any dialect.

  Args:
    saver: any `tf.train.Saver`.
    sess: a Session on its graph.
    save_path: the path of a checkpoint.
    as_tensorflow: TensorFlow's `restore`, without the Saver. It is called where every name is in the checkpoint.

  Raises:
    tf.errors.NotFoundError, tf.errors.InvalidArgumentError, tf.errors.DataLossError, ValueError: as `Saver.restore`.
  """
  if tf.executing_eagerly() or saver.saver_def is None:  # None: the Saver is empty, or build() was not called
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
  """Returns what a Saver has to save so that a program with TensorFlow's class can restore it.

  Args:
    var_list: None, a list or a dict, as `tf.train.Saver` takes it.

  Returns:
    The same, and variables to which TensorFlow's class gives another name a second time, under that name. Variables to
    which the program gives a name of its own (in a dict) are saved once.
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
    path: a checkpoint, or a directory, for the latest in it.
    wanted: an assignment map with the names of any dialect: a dict, or pairs. Entries that the checkpoint has, and
      scopes, stay as they are. The state of a loss scale that the checkpoint lacks is left out: it keeps its initial
      value.
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
  """For `tf.train.init_from_checkpoint(path, name_map(path))` and `tf.train.Saver(name_map(path))`.

  Args:
    path: a checkpoint of any dialect, or a directory, for the latest in it.
    var_list: the variables; the current graph's global ones by default.

  Returns:
    Variables by the name that they have in the checkpoint. Those that it lacks are left out, and so are those that it
    has in another dtype (contrib's int32 counts), which only `Saver` takes over.

  Raises:
    ValueError: there is no checkpoint.
    tf.errors.DataLossError: the checkpoint is truncated or corrupt.
  """
  wanted, reader = _named(tf.global_variables() if var_list is None else var_list), _reader(_latest(path))
  dtypes = reader.get_variable_to_dtype_map()
  return {found: wanted[name].parts if len(wanted[name].parts) > 1 else wanted[name].parts[0]
          for name, found in _match(wanted, reader).items() if dtypes[found] == wanted[name].dtype}


def inspect(path: Path) -> Inspection:
  """What is in a checkpoint, and whose it is.

  Args:
    path: a checkpoint, or a directory, for the latest in it.

  Returns:
    An `Inspection`.

  Raises:
    ValueError: there is no checkpoint.
    tf.errors.DataLossError: it is truncated or corrupt.
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
  """Writes a checkpoint as another dialect, or another program, has it, and reads it back.

  Args:
    source: a checkpoint, or a directory, for the latest in it. It stays as it is.
    target: the path of the checkpoint to write. It appears there as a whole or not at all.
    to: one of "mp_compat", "tensorflow", "contrib" and "plain". The names are those of a program whose only
      conditionals are the optimizer's.
    like: instead, a checkpoint (or a directory) of the program that is to restore this one, the names of which are
      taken. TensorFlow's class calls Adam's powers after the conditional around them, `cond_3/beta1_power` where the
      program has two of its own. Its `.meta` file, if there is one, is copied, too.

  Returns:
    What was written.

  Raises:
    ValueError: there is no checkpoint; it is object-based; `to` is no dialect; there is something at `target`; what
      `like` has is not in it; not just one of `to` and `like` is given.
    tf.errors.DataLossError: the checkpoint is truncated or corrupt.
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
  """For the names in one checkpoint, those in the other; None for state that begins anew."""
  shapes = collections.OrderedDict((name, like.variables[name][1]) for name in sorted(
      like.variables, key=dialects.in_order))
  matched = dialects.match(shapes, {name: shape for name, (_, shape) in found.variables.items()})
  missing = [name for name in shapes if name not in matched and not dialects.is_state(name)]
  if missing:
    raise ValueError("Expected what is in {}, but not found in {}, with the same shape: {}. Are they checkpoints of "
                     "one model?".format(like.path, found.path, ", ".join(missing)))
  return {name: matched.get(name) for name in shapes}


def _write(values: Dict[str, np.ndarray], target: str) -> None:
  """Writes a checkpoint beside its place, compares it with `values`, and moves it there, the index last."""
  beside = "{}.unfinished".format(target)
  _remove(beside)  # of a conversion that was killed
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
    for part in sorted(tf.gfile.ListDirectory(beside)):  # "data" before "index", without which it is no checkpoint
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
  """Returns whether there is an index (V2), or files that match the path itself (V1, "model-?????-of-00002")."""
  if tf.gfile.Exists("{}.index".format(path)):
    return True
  try:
    return any(not tf.gfile.IsDirectory(file) for file in tf.gfile.Glob(path))
  except tf.errors.NotFoundError:  # TensorFlow 1.15 lists no files of a directory that does not exist
    return False


def _reader(path: str) -> Any:
  try:
    return tf.train.NewCheckpointReader(path)  # load_checkpoint() prefers a directory of that name
  except _BROKEN as error:
    raise _damaged(path, error) from error


def _read(reader: Any, path: str, name: str) -> np.ndarray:
  try:
    return np.asarray(reader.get_tensor(name))
  except tf.errors.UnimplementedError:  # the parts of a partitioned variable in the V1 format
    return _read_parts(path, [name], [""], [reader.get_variable_to_dtype_map()[name]])[0]
  except _BROKEN as error:
    raise _damaged(path, error) from error


def _damaged(path: str, error: Exception) -> tf.errors.DataLossError:
  # A Session tells of the node and all its history; the line before the node says what happened.
  reason = re.search(r"([^\n]+)\n\s*\[\[", str(error)) or re.search(r"([^\n]+)", str(error))
  return tf.errors.DataLossError(
      None, None, "The checkpoint {} is truncated or corrupt: {}. Restore an earlier one; "
      "tf.train.get_checkpoint_state({!r}).all_model_checkpoint_paths lists those that are kept.".format(
          path, reason.group(1) if reason else type(error).__name__, os.path.dirname(path)))


class _Wanted(NamedTuple):
  """A variable of the graph as checkpoints see it: with a partitioner, several parts under one name."""

  parts: List[tf.Variable]
  shape: Tuple[int, ...]

  @property
  def dtype(self) -> tf.DType:
    return self.parts[0].dtype.base_dtype


def _named(var_list: VarList) -> "collections.OrderedDict[str, _Wanted]":
  """Variables by the names that `tf.train.Saver` gives them."""
  wanted = collections.OrderedDict()
  for name, value in var_list.items() if isinstance(var_list, dict) else [(None, value) for value in var_list]:
    for part in [value] if hasattr(value, "op") else value:
      if not hasattr(part, "initializer"):
        continue  # no variable: the state of an iterator, or a table
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
  """A tensor that a Saver reads from a checkpoint: an output of a RestoreV2 op, and what is assigned from it."""

  op: tf.Operation
  index: int
  name: str  # in the checkpoint
  part: str  # the shape of a partitioned variable and the slice to read, "6 2 0,2:-"; "" for everything
  variables: Tuple[tf.Operation, ...]  # with tf.distribute one for each local device; none for an iterator's state
  reshaped: bool  # Saver(reshape=True)

  @property
  def dtype(self) -> tf.DType:
    return self.op.outputs[self.index].dtype

  @property
  def is_needed(self) -> bool:
    """Whether anything is computed from it: not so for what is only saved again, under another name."""
    return bool(self.op.outputs[self.index].consumers())

  @property
  def shape(self) -> tf.TensorShape:
    """The shape of the whole variable, as far as the graph knows it."""
    if self.part:
      return tf.TensorShape([int(size) for size in self.part.split()[:-1]])
    known = [variable.get_attr("shape") for variable in self.variables if "shape" in variable.node_def.attr]
    return tf.TensorShape(known[0] if known else None)


def _entries(restore_op: tf.Operation) -> List[_Entry]:
  """Returns what running `restore_op` reads, in the order in which the variables were made."""
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
  """Returns the names in the checkpoint by the names in the graph, without state that begins anew.

  Raises:
    tf.errors.NotFoundError, tf.errors.InvalidArgumentError: as `Saver.restore`.
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
  """Returns what to feed so that a Saver's own ops restore the names in `matched`.

  RestoreV2 is fed the names under which to look. Where it cannot give a value (state that begins anew, or has another
  dtype), that output is fed, and the op reads some other tensor instead. If the checkpoint has none of that dtype, all
  outputs are fed.
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
      # The initializer's name is a part of the format of graphs.
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
