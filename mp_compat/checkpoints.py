"""Checkpoints: of TensorFlow's class, of tf.contrib.mixed_precision, and of training without loss scaling.

`Saver` writes what `tf.train.Saver` writes, and restores every dialect (`mp_compat.dialects`). `convert` rewrites a
checkpoint for those who have only `tf.train.Saver`.
"""

import collections
import os
import re
import shutil
from typing import Any, Dict, Iterable, List, NamedTuple, Optional, Tuple, Union

import numpy as np

from mp_compat import _compat
from mp_compat import dialects
from mp_compat._compat import tf

VarList = Union[None, Iterable[tf.Variable], Dict[str, tf.Variable]]

# Among the entries of a checkpoint that tf.train.Checkpoint wrote: its names are paths, the same in every dialect.
_OBJECT_GRAPH = "_CHECKPOINTABLE_OBJECT_GRAPH"

# What TensorFlow raises over a damaged checkpoint: in a Session, and reading it.
_BROKEN_IN_SESSION = (tf.errors.DataLossError, tf.errors.NotFoundError, tf.errors.OutOfRangeError)
_BROKEN = (tf.errors.OpError, IndexError, RuntimeError, ValueError)


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

  def restore(self, sess: tf.Session, save_path: str) -> None:
    """Restores the variables; see `tf.train.Saver.restore`. Adds nothing to the graph.

    Args:
      sess: a Session on the graph.
      save_path: the path of a checkpoint, as `save` or `tf.train.latest_checkpoint` returned it.

    Raises:
      tf.errors.NotFoundError: variables other than the loss scale's are not in the checkpoint.
      tf.errors.DataLossError: the checkpoint is truncated or corrupt.
      ValueError: `save_path` is no checkpoint.
    """
    if not _exists(save_path):
      raise ValueError("The passed save_path is not a valid checkpoint: {}. Expected the path that save() or "
                       "tf.train.latest_checkpoint() returned.".format(save_path))
    with sess.graph.as_default():
      wanted = _named(tf.global_variables() if self._var_list is None else self._var_list)
    reader = _reader(save_path)
    dtypes = reader.get_variable_to_dtype_map()
    if _OBJECT_GRAPH in dtypes:
      super().restore(sess, save_path)
      return
    if any(dtypes.get(name) != one.dtype for name, one in wanted.items()):
      _restore_matched(sess, reader, wanted, save_path)
      return
    try:
      super().restore(sess, save_path)
    except _BROKEN_IN_SESSION as error:
      raise _damaged(save_path, error) from error


def name_map(path: str, var_list: VarList = None) -> Dict[str, tf.Variable]:
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


def inspect(path: str) -> Inspection:
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


def convert(source: str, target: str, to: Optional[str] = None, like: Optional[str] = None) -> Inspection:
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
  found = inspect(source)
  if found.dialect == "object-based":
    raise ValueError("{} was written by tf.train.Checkpoint, whose names are the same in every dialect: restore it as "
                     "it is. Only without loss scaling it is tf.train.Checkpoint(optimizer=opt.inner_optimizer)."
                     .format(found.path))
  if _exists(target) or os.path.exists(target):
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
  if like is not None and os.path.exists("{}.meta".format(_latest(like))):
    shutil.copyfile("{}.meta".format(_latest(like)), "{}.meta".format(target))
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
  shutil.rmtree(beside, ignore_errors=True)  # of a conversion that was killed
  os.makedirs(beside)
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
    for part in sorted(os.listdir(beside)):  # "data" before "index", without which it is no checkpoint
      os.replace(os.path.join(beside, part), os.path.join(os.path.dirname(os.path.abspath(target)), part))
  finally:
    shutil.rmtree(beside, ignore_errors=True)


def _same(a: np.ndarray, b: np.ndarray) -> bool:
  same = a.tolist() == b.tolist() if a.dtype == object else a.tobytes() == b.tobytes()
  return same and (a.dtype, a.shape) == (b.dtype, b.shape)


def _latest(path: str) -> str:
  path = str(path)
  found = tf.train.latest_checkpoint(path) if tf.gfile.IsDirectory(path) else path
  if found is None or not _exists(found):
    raise ValueError("There is no checkpoint at {}. Expected the path of one, such as model.ckpt-100 without .index, "
                     "or a directory with a file named checkpoint.".format(path))
  return found


def _exists(path: str) -> bool:
  return tf.gfile.Exists("{}.index".format(path))


def _reader(path: str) -> Any:
  try:
    return tf.train.load_checkpoint(path)
  except _BROKEN as error:
    raise _damaged(path, error) from error


def _read(reader: Any, path: str, name: str) -> np.ndarray:
  try:
    return np.asarray(reader.get_tensor(name))
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
  return dialects.match(shapes, {name: tuple(shape) for name, shape in reader.get_variable_to_shape_map().items()})


def _restore_matched(sess: tf.Session, reader: Any, wanted: Dict[str, _Wanted], path: str) -> None:
  matched = _match(wanted, reader)
  missing = [name for name in wanted if name not in matched and not dialects.is_state(name)]
  if missing:
    raise tf.errors.NotFoundError(
        None, None, "Not found in the checkpoint {}, which has the names of the dialect {}: {}. It has: {}.".format(
            path, dialects.dialect(reader.get_variable_to_shape_map()), ", ".join(missing),
            ", ".join(sorted(reader.get_variable_to_shape_map()))))
  for name, one in wanted.items():
    value = _read(reader, path, matched[name]) if name in matched else None  # feeding casts it
    for part in one.parts:
      for copy in _compat.copies_of(part):
        sess.run(copy.initializer, {} if value is None else {copy.initializer.inputs[1]: _part_of(value, part)})


def _part_of(value: np.ndarray, part: tf.Variable) -> np.ndarray:
  whole = _compat.slice_of(part)
  if whole is None:
    return value
  return value[tuple(slice(begin, begin + size) for begin, size in zip(whole.var_offset, whole.var_shape))]
