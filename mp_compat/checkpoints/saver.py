# SPDX-License-Identifier: Apache-2.0
"""A `tf.train.Saver` that restores checkpoints of every naming scheme (see `mp_compat.core.dialects`)."""

import collections
import re
from typing import Any, Callable, Container, Dict, List, NamedTuple, Optional, Tuple

import numpy as np

from mp_compat._tensorflow import graphs
from mp_compat._tensorflow import log
from mp_compat._tensorflow import savers
from mp_compat._tensorflow import tf
from mp_compat.checkpoints import files
from mp_compat.checkpoints import names
from mp_compat.core import dialects

# Errors that a Session raises for a damaged checkpoint.
_BROKEN_IN_SESSION = (tf.errors.DataLossError, tf.errors.NotFoundError, tf.errors.OutOfRangeError)

# The beginning of error messages about the graph, as opposed to the file.
_NOTHING_RESTORED = "Nothing was restored."


class Saver(tf.train.Saver):
  """A `tf.train.Saver` that restores checkpoints of every naming scheme, into graphs with and without loss scaling.

      saver = mp_compat.checkpoints.Saver()  # after the train op is built
      saver.restore(sess, path)
      scaffold = tf.train.Scaffold(saver=saver)  # for Estimator and MonitoredSession

  Restoring accepts both names of Adam's powers, contrib's state (int32 counts become int64), and state under another
  name scope. A loss scale that is not in the checkpoint starts at its initial value. The arguments, and the files
  that are written, are those of `tf.train.Saver`.

  Source: `tf.train.Saver`.
  """

  def restore(self, sess: tf.Session, save_path: files.Path) -> None:
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
      if (
        save_path is None or not files.checkpoint_exists(files.path_text(save_path)) or _NOTHING_RESTORED in str(error)
      ):
        raise
      raise files.data_loss_error(files.path_text(save_path), error) from error


def restore(saver: tf.train.Saver, sess: tf.Session, save_path: files.Path, as_tensorflow: Callable[..., None]) -> None:
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
  path = None if save_path is None else files.path_text(save_path)
  if path is None or not files.checkpoint_exists(path):
    raise ValueError(
      "The passed save_path is not a valid checkpoint: {}. Expected the path that save() or "
      "tf.train.latest_checkpoint() returned.".format(path)
    )
  reader = files.open_reader(path)
  if reader.has_tensor(files.OBJECT_GRAPH):
    as_tensorflow(sess, path)
    return
  entries = _entries(sess.graph.as_graph_element(saver.saver_def.restore_op_name))
  matched = _match_names(entries, reader, path)
  dtypes = reader.get_variable_to_dtype_map()
  if all(matched.get(entry.name) == entry.name and dtypes[entry.name] == entry.dtype for entry in entries):
    as_tensorflow(sess, path)
    return
  feeds = _restore_feeds(sess, entries, matched, reader, path)
  feeds[saver.saver_def.filename_tensor_name] = path
  tf.logging.info("Restoring parameters from %s, which has other variable names", path)
  sess.run(saver.saver_def.restore_op_name, feeds)


def add_tensorflow_names(var_list: Any) -> Any:
  """Returns the `var_list` of a Saver whose checkpoints a program with TensorFlow's class can restore.

  Args:
    var_list: None, a list or a dict, as for `tf.train.Saver`.

  Returns:
    `var_list`, with a second entry for each variable to which TensorFlow's class gives another name, under that name.
    Variables that the program renames (in a dict) have one entry. Logs a warning if another variable has that name.
  """
  recorded = names.tensorflow_names(tf.get_default_graph())
  renamed = {name: tensorflow_name for name, tensorflow_name in recorded.items() if name != tensorflow_name}
  if not renamed:
    return var_list
  if var_list is None:
    var_list = tf.global_variables() + tf.get_collection(tf.GraphKeys.SAVEABLE_OBJECTS)
  if not isinstance(var_list, dict):
    var_list = list(var_list)
  named = _by_saved_name(var_list)
  aliases = _aliases(named, renamed)
  shifted = sorted(name for name in named if name not in recorded and re.sub(r"_\d+$", "", name) in renamed)
  if shifted:
    log.warn(
      "%s, of an optimizer without loss scaling, would have another number with TensorFlow's class. Restored without "
      "mp_compat, this checkpoint gives that variable another value.",
      ", ".join(shifted),
    )
  return dict(var_list, **aliases) if isinstance(var_list, dict) else var_list + list(aliases.values())


def _by_saved_name(var_list: Any) -> Dict[str, Any]:
  """Returns the variables of a Saver by the names under which it saves them."""
  if isinstance(var_list, dict):
    return var_list
  return {variable.op.name: variable for variable in var_list if hasattr(variable, "op")}


def _aliases(named: Dict[str, Any], renamed: Dict[str, str]) -> "collections.OrderedDict[str, savers.AliasSaveable]":
  """Returns second entries of a Saver for the variables in `renamed`, by TensorFlow's names; see above."""
  aliases = collections.OrderedDict()
  for name, tensorflow_name in sorted(renamed.items()):
    if tensorflow_name in named:
      log.warn(
        "%s is not also saved as %s, its name in TensorFlow's class, because another variable has that "
        "name. To restore this checkpoint without mp_compat, convert it: python -m mp_compat checkpoint "
        "convert --like.",
        name,
        tensorflow_name,
      )
    elif name in named and getattr(getattr(named[name], "op", None), "name", None) == name:
      aliases[tensorflow_name] = savers.AliasSaveable(named[name], tensorflow_name)
  return aliases


class _Entry(NamedTuple):
  """A tensor that a Saver reads from a checkpoint: an output of a RestoreV2 op, and the variables assigned from it."""

  op: tf.Operation
  index: int  # type: ignore[assignment]  # hides tuple.index, which nothing uses
  name: str  # in the checkpoint
  part: str  # the shape of a partitioned variable and the slice to read, "6 2 0,2:-"; "" for the whole tensor
  variables: Tuple[tf.Operation, ...]  # with tf.distribute, one per local device; empty for an iterator's state
  reshaped: bool  # Saver(reshape=True)

  @property
  def dtype(self) -> tf.DType:
    return self.op.outputs[self.index].dtype

  @property
  def is_needed(self) -> bool:
    """Returns whether any op reads the tensor: False for a variable that is only saved again, under another name."""
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
  ops = graphs.executed_ops([restore_op])
  assigned: Dict[str, List[Tuple[tf.Operation, bool]]] = collections.defaultdict(list)
  for op in ops:
    if op.type in ("Assign", "AssignVariableOp"):
      value, reshaped = op.inputs[1], False
      while value.op.type != "RestoreV2" and value.op.inputs:
        value, reshaped = value.op.inputs[0], reshaped or value.op.type == "Reshape"
      assigned[value.name].append((op.inputs[0].op, reshaped))
  entries = []
  for op in ops:
    if op.type == "RestoreV2":
      read, parts = [tf.make_ndarray(tensor.op.get_attr("value")) for tensor in op.inputs[1:3]]
      for index, (name, part) in enumerate(zip(read, parts)):
        variables = assigned[op.outputs[index].name]
        entries.append(
          _Entry(
            op,
            index,
            tf.compat.as_str(name),
            tf.compat.as_str(part),
            tuple(variable for variable, _ in variables),
            any(reshaped for _, reshaped in variables),
          )
        )
  creation_index = {op.name: index for index, op in enumerate(restore_op.graph.get_operations())}
  return sorted(entries, key=lambda entry: [creation_index[variable.name] for variable in entry.variables])


def _match_names(entries: List[_Entry], reader: Any, path: str) -> Dict[str, str]:
  """Returns the names in the checkpoint by the names in the graph; omits state that starts at its initial value.

  Raises:
    tf.errors.NotFoundError, tf.errors.InvalidArgumentError: See `Saver.restore`.
  """
  shapes = files.shapes_in(reader)
  needed = [entry for entry in entries if entry.is_needed]
  matched, state = _match_needed(needed, shapes)
  unmatched = collections.OrderedDict.fromkeys(entry.name for entry in needed if entry.name not in matched)
  missing = [name for name in unmatched if name not in state]
  different = _differences(needed, matched, state, reader)
  if missing or different:
    raise _mismatch(missing, different, shapes, path)
  files.warn_initialized(list(unmatched), path)
  matched.update((entry.name, entry.name) for entry in entries if not entry.is_needed and entry.name in shapes)
  return matched


def _match_needed(needed: List[_Entry], shapes: dialects.Shapes) -> Tuple[Dict[str, str], Container[str]]:
  """Returns the names in the checkpoint by the names in the graph, and which of the latter are a loss scale's."""
  wanted = collections.OrderedDict(
    (entry.name, entry.shape.as_list()) for entry in needed if entry.shape.is_fully_defined()
  )
  recorded = names.tensorflow_names(needed[0].op.graph) if needed else {}
  recorded = {entry.name: recorded[v.name] for entry in needed for v in entry.variables if v.name in recorded}
  matched = {entry.name: entry.name for entry in needed if entry.name in shapes}  # state of iterators has no shape
  return dict(matched, **names.match(wanted, shapes, recorded)), dialects.state(wanted)


def _differences(needed: List[_Entry], matched: Dict[str, str], state: Container[str], reader: Any) -> List[str]:
  """Returns a text for each shape or dtype that differs in the checkpoint. The dtype of a loss scale may differ."""
  shapes, dtypes = files.shapes_in(reader), reader.get_variable_to_dtype_map()
  different = []
  for name, entry in collections.OrderedDict((entry.name, entry) for entry in needed if entry.name in matched).items():
    shape, dtype = shapes[matched[name]], dtypes[matched[name]]
    fits = entry.reshaped and entry.shape.num_elements() == np.prod(shape, dtype=np.int64)
    if not fits and not entry.shape.is_compatible_with(shape):
      different.append("{} has the shape {} in the graph, {} in the checkpoint".format(name, entry.shape, list(shape)))
    if dtype != entry.dtype and name not in state:
      text = "{} has the dtype {} in the graph, {} in the checkpoint"
      different.append(text.format(name, entry.dtype.name, dtype.name))
  return different


def _mismatch(missing: List[str], different: List[str], shapes: dialects.Shapes, path: str) -> tf.errors.OpError:
  """Returns the error for variables that the checkpoint does not have, or has in another shape or dtype."""
  parts = [_NOTHING_RESTORED]
  if missing:
    parts.append(
      "Not found in the checkpoint {}, which has the naming scheme {}: {}. It has: {}.".format(
        path, dialects.dialect(shapes), ", ".join(missing), ", ".join(sorted(shapes))
      )
    )
  if different:
    parts.append(
      "Different in the checkpoint {}: {}. Expected a checkpoint of the same model; to restore a part of "
      "it, pass var_list.".format(path, "; ".join(different))
    )
  return (tf.errors.NotFoundError if missing else tf.errors.InvalidArgumentError)(None, None, " ".join(parts))


def _restore_feeds(
  sess: tf.Session, entries: List[_Entry], matched: Dict[str, str], reader: Any, path: str
) -> Dict[str, Any]:
  """Returns the feeds with which a Saver's own ops restore the names in `matched`.

  The feeds are the names that RestoreV2 reads. If it cannot read a value (of state that is initialized or has another
  dtype), its output is fed, too, and the op reads another tensor of the same dtype (a stand-in). If the checkpoint has
  no tensor of that dtype, all outputs in use are fed instead.
  """
  shapes, dtypes = files.shapes_in(reader), reader.get_variable_to_dtype_map()
  stand_ins = {dtypes[name]: name for name in sorted(shapes, key=lambda name: -np.prod(shapes[name], dtype=np.int64))}
  feeds: Dict[str, Any] = {}
  to_read: Dict[tf.Operation, Dict[int, Optional[str]]] = collections.OrderedDict((entry.op, {}) for entry in entries)
  for entry in entries:
    source_name = matched.get(entry.name)
    if entry.is_needed and (source_name is None or dtypes[source_name] != entry.dtype):
      feeds[entry.op.outputs[entry.index].name] = _value(sess, entry, source_name, reader, path)
    is_read = entry.is_needed and source_name is not None and dtypes[source_name] == entry.dtype
    to_read[entry.op][entry.index] = source_name if is_read else stand_ins.get(entry.dtype)
  for op, name_of_output in to_read.items():
    source_names = [name_of_output[index] for index in range(len(name_of_output))]
    if None in source_names:
      feeds.update(_read_outputs(op, source_names, feeds, path))
    else:
      feeds[op.inputs[1].name] = source_names
  return feeds


def _value(sess: tf.Session, entry: _Entry, source_name: Optional[str], reader: Any, path: str) -> np.ndarray:
  """Returns the value to assign to a variable: the initial one without a `source_name`, else that, converted."""
  if source_name is not None:
    return files.read_tensor(reader, path, source_name).astype(entry.dtype.as_numpy_dtype)
  # The name of the initializer is part of the graph format.
  return sess.run(sess.graph.get_operation_by_name(entry.variables[0].name + "/Assign").inputs[1])


def _read_outputs(op: tf.Operation, to_read: List[Optional[str]], feeds: Dict[str, Any], path: str) -> Dict[str, Any]:
  """Returns the values of the outputs of a RestoreV2 op that are used and not yet in `feeds`."""
  parts = tf.make_ndarray(op.inputs[2].op.get_attr("value"))
  outputs = {
    index: name
    for index, name in enumerate(to_read)
    if name is not None and op.outputs[index].name not in feeds and op.outputs[index].consumers()
  }
  values = files.read_slices(
    path, list(outputs.values()), [parts[index] for index in outputs], [op.outputs[index].dtype for index in outputs]
  )
  return {op.outputs[index].name: value for index, value in zip(outputs, values)}
