# SPDX-License-Identifier: Apache-2.0
"""A `tf.train.Saver` that restores checkpoints of every naming scheme (see
`mp_compat.core.naming_schemes`).
"""

import collections
import functools
import itertools
from typing import (
  Any,
  Dict,
  Iterator,
  List,
  NamedTuple,
  Optional,
  Sequence,
  Set,
)

import numpy as np

from mp_compat._tensorflow import log
from mp_compat._tensorflow import tf
from mp_compat.checkpoints import files
from mp_compat.core import naming_schemes
from mp_compat.core import variable_scope
from mp_compat.graph import runs

tensorflow_restore = tf.train.Saver.restore  # `install()` replaces it.


class Saver(tf.train.Saver):
  """A `tf.train.Saver` that restores checkpoints of every naming scheme, into graphs
  with and without loss scaling.

      saver = mp_compat.checkpoints.Saver()  # after the train op is built
      saver.restore(sess, path)
      scaffold = tf.train.Scaffold(saver=saver)  # for Estimator and MonitoredSession

  `restore(sess, path)` does this:

      matched = names in the checkpoint, by the names of the variables in the graph
      if a variable is ambiguous, missing or of another form: raise an error
      if all names and dtypes are those in the checkpoint:
        let TensorFlow restore them
      else:
        run the same ops, and feed them the matched names, and the values that they
        cannot read: initial values of state that is missing, and converted ones

  Restoring accepts both names of Adam's powers, contrib's state (int32 counts become
  int64), and state under another name scope. Variables of a loss scale that are not in
  the checkpoint, those of subclasses of `mp_compat.LossScale` included, start at their
  initial values. The arguments, and the files that are written, are those of
  `tf.train.Saver`.

      >>> import os, tempfile
      >>> import tensorflow.compat.v1 as tf
      >>> import mp_compat
      >>> path = os.path.join(tempfile.mkdtemp(), "model.ckpt")
      >>> with tf.Graph().as_default(), tf.Session() as sess:
      ...   weight = tf.get_variable("weight", [], use_resource=True)
      ...   sess.run(weight.assign(3.0).op)
      ...   _ = tf.train.Saver().save(sess, path)  # a program without loss scaling
      >>> with tf.Graph().as_default(), tf.Session() as sess:
      ...   weight = tf.get_variable("weight", [], use_resource=True)
      ...   loss_scale = mp_compat.DynamicLossScale()
      ...   values = [weight, loss_scale()]
      ...   mp_compat.checkpoints.Saver().restore(sess, path)
      ...   print([float(value) for value in sess.run(values)])
      [3.0, 32768.0]

  Source: `tf.train.Saver`.
  """

  def __init__(
    self, var_list: Optional[files.VarList] = None, *args: Any, **kwargs: Any
  ) -> None:
    """Creates a Saver.

    Args:
      var_list: see `tf.train.Saver`. Takes a cast of `float32_variable_storage_getter`
        for its variable.
      *args: see `tf.train.Saver`.
      **kwargs: see `tf.train.Saver`.
    """
    super().__init__(variable_scope.variables_of(var_list), *args, **kwargs)

  def restore(self, sess: tf.Session, save_path: files.Path) -> None:
    """Restores the variables; see `tf.train.Saver.restore`. Adds nothing to the graph.

    Args:
      sess: a Session on the graph.
      save_path: the path of a checkpoint, as returned by `save` or
        `tf.train.latest_checkpoint`.

    Raises:
      tf.errors.NotFoundError: If variables other than the loss scale's are not in the
        checkpoint.
      tf.errors.InvalidArgumentError: If variables have another shape or dtype in the
        checkpoint. Both errors name all variables that do not fit, and are raised
        before any variable is assigned.
      tf.errors.DataLossError: If the checkpoint is truncated or corrupt.
      ValueError: If there is no checkpoint at `save_path`.
    """
    restore(self, sess, save_path)


@functools.wraps(tensorflow_restore)
def restore(self: tf.train.Saver, sess: tf.Session, save_path: files.Path) -> None:
  """Restores the variables of any Saver from a checkpoint of any naming scheme; see
  `Saver.restore`.

  Calls TensorFlow's `restore` if all names and dtypes are those in the checkpoint, if
  the checkpoint is object-based, if the Saver is not built, and in eager mode.
  """
  # None if the Saver is empty, or build() was not called
  if tf.executing_eagerly() or self.saver_def is None:
    tensorflow_restore(self, sess, save_path)
    return
  path = _existing_path(save_path)
  checkpoint = files.Checkpoint(path)
  entries: List[_Entry] = []
  if not checkpoint.is_object_based:
    entries = _entries(sess.graph.as_graph_element(self.saver_def.restore_op_name))
  matched = _match_names(sess.graph, entries, checkpoint)
  feeds: Dict[str, object] = {}
  if not all(_is_unchanged(entry, matched, checkpoint) for entry in entries):
    feeds = _restore_feeds(sess, entries, matched, checkpoint)
    feeds[self.saver_def.filename_tensor_name] = path
  try:
    if feeds:
      tf.logging.info(
        "Restoring parameters from %s, in which some names or dtypes are missing or "
        "differ",
        path,
      )
      sess.run(self.saver_def.restore_op_name, feeds)
    else:
      tensorflow_restore(self, sess, path)
  except (
    tf.errors.DataLossError,
    tf.errors.NotFoundError,
    tf.errors.OutOfRangeError,
  ) as error:
    if checkpoint.is_object_based and isinstance(error, tf.errors.NotFoundError):
      raise  # It names variables.
    raise files.data_loss_error(path, error) from error


def _existing_path(save_path: Optional[files.Path]) -> str:
  """Returns the path of a checkpoint as a str; raises a ValueError if there is none."""
  path = None if save_path is None else files.path_text(save_path)
  if path is None or not files.checkpoint_exists(path):
    raise ValueError(
      "The passed save_path is not a valid checkpoint: {}. Expected the path that "
      "save() or tf.train.latest_checkpoint() returned.".format(path)
    )
  return path


def _is_unchanged(
  entry: "_Entry", matched: Dict[str, str], checkpoint: files.Checkpoint
) -> bool:
  """Returns whether TensorFlow finds a tensor as it is in a checkpoint."""
  is_renamed = matched.get(entry.name) != entry.name
  return not is_renamed and _is_readable(entry, matched, checkpoint)


class _Entry(NamedTuple):
  """A tensor that a Saver reads from a checkpoint, and the variables assigned from it.

  Attributes:
    tensor: An output of a RestoreV2 op.
    name: The name that the op reads in the checkpoint.
    part: The shape of a partitioned variable and the slice to read, "6 2 0,2:-"; "" for
      the whole tensor.
    variables: The ops of the variables: with `tf.distribute`, one per local device;
      empty for an iterator's state.
  """

  tensor: tf.Tensor
  name: str
  part: str
  variables: List[tf.Operation]

  @property
  def is_reshaped(self) -> bool:
    """Returns whether the Saver reshapes the tensor (`Saver(reshape=True)`)."""
    return any(op.type == "Reshape" for op in self.tensor.consumers())

  @property
  def is_needed(self) -> bool:
    """Returns whether any op reads the tensor: False for a variable that is only saved
    again, under another name.
    """
    return bool(self.tensor.consumers())

  @property
  def shape(self) -> tf.TensorShape:
    """Returns the static shape of the whole variable."""
    if self.part:
      return tf.TensorShape([int(size) for size in self.part.split()[:-1]])
    for variable in self.variables:
      if "shape" in variable.node_def.attr:
        return tf.TensorShape(variable.get_attr("shape"))
    return tf.TensorShape(None)


def _entries(restore_op: tf.Operation) -> List[_Entry]:
  """Returns the tensors that running `restore_op` reads, those of each RestoreV2 op in
  their order.
  """
  ops = runs.executed_ops([restore_op])
  assigned = _assigned(ops)
  entries = []
  for op in ops:
    if op.type == "RestoreV2":
      _, names, parts = op.inputs
      for tensor, name, part in zip(op.outputs, _strings(names), _strings(parts)):
        entries.append(_Entry(tensor, name, part, assigned[tensor.name]))
  return entries


def _assigned(ops: List[tf.Operation]) -> Dict[str, List[tf.Operation]]:
  """Returns the ops of the variables that are assigned, by the names of the tensors
  that RestoreV2 ops read for them; a tensor may be cast or copied to a device before.
  """
  found: Dict[str, List[tf.Operation]] = collections.defaultdict(list)
  for op in ops:
    if op.type in ("Assign", "AssignVariableOp"):
      variable, value = op.inputs[0].op, op.inputs[1]
      while value.op.type != "RestoreV2" and value.op.inputs:
        value = value.op.inputs[0]
      found[value.name].append(variable)
  return found


def _strings(constant: tf.Tensor) -> List[str]:
  """Returns the values of a constant of strings."""
  values = tf.make_ndarray(constant.op.get_attr("value"))
  return [tf.compat.as_str(value) for value in values]


def _match_names(
  graph: tf.Graph, entries: List[_Entry], checkpoint: files.Checkpoint
) -> Dict[str, str]:
  """Returns the names in the checkpoint by the names that the Saver reads.

      needed = the entries that an op reads; others are second names, only saved
      needed variables of known shape: matched with the whole graph (`files.match`)
      other entries: by name

  Args:
    graph: the graph of the Saver.
    entries: the tensors that the Saver reads; [] for an object-based checkpoint.
    checkpoint: the checkpoint.

  Returns:
    Names in the checkpoint by `_Entry.name`: {"beta1_power": "cond_1/beta1_power"}.
    Omits state of a loss scale that starts at its initial value, and logs a warning of
    it; omits second names that the checkpoint lacks.

  Raises:
    tf.errors.InvalidArgumentError: If a variable may be several in the checkpoint, or
      has another shape or dtype there.
    tf.errors.NotFoundError: If variables that are not such state are missing.
  """
  needed = {entry.name: entry for entry in entries if entry.is_needed}
  wanted = _wanted(needed)
  match = files.match(graph, wanted, checkpoint)
  matched: Dict[str, str] = {}
  for entry in entries:
    # The state of iterators has no shape, so that it is not in `wanted`.
    if entry.name in checkpoint.shapes and entry.name not in wanted:
      matched[entry.name] = entry.name
  matched.update(match.names)
  state = files.state_names(graph, wanted)
  certain = {name: needed[name] for name in needed if name not in match.ambiguous}
  _check_fits(certain, matched, state, checkpoint)
  if match.ambiguous:  # A missing variable may be the reason: it is reported first.
    raise tf.errors.InvalidArgumentError(
      None,
      None,
      "Nothing was restored. " + files.ambiguity(match, checkpoint.path),
    )
  initialized = [name for name in needed if name not in matched]
  if initialized:
    log.warn(
      "The checkpoint %s lacks state of the loss scale: %s initialized instead.",
      checkpoint.path,
      ", ".join(initialized),
    )
  return matched


def _wanted(
  entries: Dict[str, _Entry],
) -> Dict[str, files.Named]:
  """Returns the name of a variable's op, and the shape, by the name in the Saver, as
  `files.match` takes them; omits what is no variable, or has no known shape.
  """
  wanted: Dict[str, files.Named] = {}
  for name, entry in entries.items():
    ops = [variable.name for variable in entry.variables]
    if ops and entry.shape.is_fully_defined():
      op = name if name in ops else ops[0]
      wanted[name] = op, tuple(entry.shape.as_list())
  return wanted


def _check_fits(
  needed: Dict[str, _Entry],
  matched: Dict[str, str],
  state: Set[str],
  checkpoint: files.Checkpoint,
) -> None:
  """Raises an error that names all variables that the checkpoint lacks, except `state`,
  or has in another form.
  """
  missing: List[str] = []
  different: List[str] = []
  for name, entry in needed.items():
    is_state = name in state
    if name in matched:
      source = matched[name]
      shape, dtype = checkpoint.shapes[source], checkpoint.dtypes[source]
      different += _differences(entry, shape, dtype, is_state=is_state)
    elif not is_state:
      missing.append(name)
  if missing or different:
    raise _mismatch(missing, different, checkpoint)


def _differences(
  entry: _Entry, shape: Sequence[int], dtype: tf.DType, is_state: bool
) -> Iterator[str]:
  """Yields how a variable differs from its value in the checkpoint; another dtype of
  state is converted.
  """
  text = "{} has the {} {} in the graph, {} in the checkpoint"
  size = np.prod(shape, dtype=np.int64)
  can_reshape = entry.is_reshaped and entry.shape.num_elements() == size
  if not can_reshape and not entry.shape.is_compatible_with(shape):
    yield text.format(entry.name, "shape", entry.shape, list(shape))
  if dtype != entry.tensor.dtype and not is_state:
    yield text.format(entry.name, "dtype", entry.tensor.dtype.name, dtype.name)


def _mismatch(
  missing: List[str], different: List[str], checkpoint: files.Checkpoint
) -> tf.errors.OpError:
  """Returns the error for variables that the checkpoint does not have, or has in
  another shape or dtype.
  """
  parts = ["Nothing was restored."]
  if missing:
    parts.append(
      "Not found in the checkpoint {}, which has the naming scheme {}: {}. It has: "
      "{}. For other names, make a map of those in the graph to those in the "
      "checkpoint. {}".format(
        checkpoint.path,
        naming_schemes.recognize(checkpoint.shapes).name,
        ", ".join(missing),
        ", ".join(sorted(checkpoint.shapes)),
        files.conversion(checkpoint.path),
      )
    )
  if different:
    parts.append(
      "Different in the checkpoint {}: {}. Expected a checkpoint of the same model; to "
      "restore a part of it, pass var_list.".format(
        checkpoint.path, "; ".join(different)
      )
    )
  error = tf.errors.NotFoundError if missing else tf.errors.InvalidArgumentError
  return error(None, None, " ".join(parts))


def _restore_feeds(
  sess: tf.Session,
  entries: List[_Entry],
  matched: Dict[str, str],
  checkpoint: files.Checkpoint,
) -> Dict[str, object]:
  """Returns the feeds with which a Saver's own ops restore the names in `matched`.

  The feeds are the names that RestoreV2 reads. If it cannot read a value (of state that
  is initialized or has another dtype), its output is fed, too, and the op reads another
  tensor of the same dtype (a stand-in). If the checkpoint has no tensor of that dtype,
  all outputs in use are fed instead, so that the op does not run.

  Args:
    sess: the Session, which computes initial values.
    entries: the tensors that the Saver reads, those of one op next to each other.
    matched: names in the checkpoint by `_Entry.name`; state that is missing there is
      initialized.
    checkpoint: the checkpoint.

  Returns:
    The feeds by the names of tensors: a list of str for the names that an op reads, an
    array for each other tensor. Without the name of the file.
  """
  stand_ins = _stand_ins(checkpoint)
  feeds: Dict[str, object] = {}
  for op, group in itertools.groupby(entries, lambda entry: entry.tensor.op):
    outputs = list(group)
    to_read: List[Optional[str]] = []
    to_feed: List[_Entry] = []
    for entry in outputs:
      if _is_readable(entry, matched, checkpoint):
        to_read.append(matched[entry.name])
      else:
        to_read.append(stand_ins.get(entry.tensor.dtype))
        to_feed.append(entry)
    if None in to_read:
      to_feed = outputs
    else:
      feeds[op.inputs[1].name] = to_read
    for entry in to_feed:
      if entry.is_needed:
        feeds[entry.tensor.name] = _value(sess, entry, matched, checkpoint)
  return feeds


def _is_readable(
  entry: _Entry, matched: Dict[str, str], checkpoint: files.Checkpoint
) -> bool:
  """Returns whether a RestoreV2 op can read a tensor under its name in `matched`."""
  if entry.name not in matched:
    return False
  return checkpoint.dtypes[matched[entry.name]] == entry.tensor.dtype


def _stand_ins(checkpoint: files.Checkpoint) -> Dict[tf.DType, str]:
  """Returns the name of the smallest tensor of each dtype in a checkpoint."""
  shapes = checkpoint.shapes

  def size(name: str) -> int:
    """Returns the number of elements of a tensor."""
    return int(np.prod(shapes[name], dtype=np.int64))

  found: Dict[tf.DType, str] = {}
  for name in sorted(shapes, key=size, reverse=True):
    found[checkpoint.dtypes[name]] = name  # The last one is the smallest.
  return found


def _value(
  sess: tf.Session,
  entry: _Entry,
  matched: Dict[str, str],
  checkpoint: files.Checkpoint,
) -> np.ndarray:
  """Returns the value to assign to a variable.

  Args:
    sess: the Session, which computes the initial value.
    entry: the tensor that is assigned to the variable.
    matched: names in the checkpoint; without one, the value is the initial one.
    checkpoint: the checkpoint.

  Returns:
    An array; a value from the checkpoint is converted to the dtype of `entry.tensor`.
  """
  if entry.name not in matched:
    # The name of the initializer is part of the graph format.
    initializer = entry.variables[0].name + "/Assign"
    initial_value = sess.graph.get_operation_by_name(initializer).inputs[1]
    return sess.run(initial_value)
  source = matched[entry.name]
  if entry.part:
    return checkpoint.read_slice(source, entry.part)
  return checkpoint.read(source).astype(entry.tensor.dtype.as_numpy_dtype)
