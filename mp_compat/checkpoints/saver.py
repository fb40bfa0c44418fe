# SPDX-License-Identifier: Apache-2.0
"""A `tf.train.Saver` that restores checkpoints of every naming scheme (see
`mp_compat.core.naming_schemes`).
"""

import collections
import functools
import itertools
from typing import (
  Any,
  Container,
  Dict,
  Iterator,
  List,
  NamedTuple,
  Optional,
  Set,
)

import numpy as np

from mp_compat._tensorflow import log
from mp_compat._tensorflow import tf
from mp_compat.checkpoints import files
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

  Restoring accepts all names of Adam's powers, contrib's state (int32 counts become
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
  path = files.resolve_path(save_path)
  checkpoint = files.Checkpoint(path)
  entries: List[_Entry] = []
  if not checkpoint.is_object_based:
    restore_op = sess.graph.as_graph_element(self.saver_def.restore_op_name)
    entries = _matched(_entries(restore_op), sess.graph, checkpoint)
  feeds: Dict[str, object] = {}
  if not all(entry.is_readable and entry.source == entry.name for entry in entries):
    feeds = _restore_feeds(sess, entries, checkpoint)
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


class _Entry(NamedTuple):
  """A tensor that a Saver reads from a checkpoint, and the variables assigned from it.

  Attributes:
    tensor: An output of a RestoreV2 op.
    name: The name that the op reads in the checkpoint.
    part: The shape of a partitioned variable and the slice to read, "6 2 0,2:-"; "" for
      the whole tensor.
    variables: The ops of the variables: with `tf.distribute`, one per local device;
      empty for an iterator's state.
    source: The name of the tensor in the checkpoint; "" if it lacks it.
    is_readable: Whether the op can read it there: it has the same dtype.
  """

  tensor: tf.Tensor
  name: str
  part: str
  variables: List[tf.Operation]
  source: str = ""
  is_readable: bool = False

  @property
  def is_reshaped(self) -> bool:
    """Returns whether the Saver reshapes the tensor (`Saver(reshape=True)`), which
    checks its size.
    """
    return any(op.type == "Reshape" for op in self.tensor.consumers())

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


def _matched(
  entries: List[_Entry], graph: tf.Graph, checkpoint: files.Checkpoint
) -> List[_Entry]:
  """Returns what a Saver reads, with the names in a checkpoint.

      variables of known shape: matched with the whole graph (`files.match`)
      others, such as the state of iterators: by name

  State of a loss scale that the checkpoint lacks starts at its initial value; logs a
  warning.

  Raises:
    tf.errors.InvalidArgumentError: If a variable may be several in the checkpoint, or
      has another shape or dtype there.
    tf.errors.NotFoundError: If variables that are not such state are missing.
  """
  wanted = _wanted(entries)
  match = files.match(graph, wanted, checkpoint)
  found: List[_Entry] = []
  for entry in entries:
    source = match.names.get(entry.name, "")
    if entry.name in checkpoint.shapes and entry.name not in wanted:
      source = entry.name
    is_readable = checkpoint.dtypes.get(source) == entry.tensor.dtype
    found.append(entry._replace(source=source, is_readable=is_readable))
  certain = [entry for entry in found if entry.name not in match.ambiguous]
  _check_fits(certain, files.state_in(graph, wanted), checkpoint)
  if match.ambiguous:  # A missing variable may be the reason: it is reported first.
    message = "Nothing was restored. " + files.ambiguity(match, checkpoint.path)
    raise tf.errors.InvalidArgumentError(None, None, message)
  initialized = [entry.name for entry in found if not entry.source]
  if initialized:
    log.warn(
      "The checkpoint %s lacks state of the loss scale: %s initialized instead.",
      checkpoint.path,
      ", ".join(initialized),
    )
  return found


def _wanted(entries: List[_Entry]) -> Dict[str, files.Named]:
  """Returns the name of a variable's op, and the shape, by the name in the Saver, as
  `files.match` takes them; omits what is no variable, or has no known shape.
  """
  wanted: Dict[str, files.Named] = {}
  for entry in entries:
    ops = [variable.name for variable in entry.variables]
    if ops and entry.shape.is_fully_defined():
      op = entry.name if entry.name in ops else ops[0]
      wanted[entry.name] = op, tuple(entry.shape.as_list())
  return wanted


def _check_fits(
  entries: List[_Entry], state: Container[str], checkpoint: files.Checkpoint
) -> None:
  """Raises an error that names all variables that the checkpoint lacks, except `state`,
  or has in another shape or dtype.
  """
  missing: Set[str] = set()
  different: List[str] = []
  for entry in entries:
    is_state = entry.name in state
    if entry.source:
      different += _differences(entry, checkpoint, is_state)
    elif not is_state:
      missing.add(entry.name)
  parts: List[str] = []
  if missing:
    parts.append(files.missing(missing, checkpoint))
  if different:
    parts.append(
      "Different in the checkpoint {}: {}. Expected a checkpoint of the same model; to "
      "restore a part of it, pass var_list.".format(
        checkpoint.path, "; ".join(different)
      )
    )
  if parts:
    error = tf.errors.NotFoundError if missing else tf.errors.InvalidArgumentError
    raise error(None, None, " ".join(["Nothing was restored.", *parts]))


def _differences(
  entry: _Entry, checkpoint: files.Checkpoint, is_state: bool
) -> Iterator[str]:
  """Yields how a variable differs from its value in the checkpoint; another dtype of
  state is converted.
  """
  text = "{} has the {} {} in the graph, {} in the checkpoint"
  shape = checkpoint.shapes[entry.source]
  if not entry.is_reshaped and not entry.shape.is_compatible_with(shape):
    yield text.format(entry.name, "shape", entry.shape, list(shape))
  if not entry.is_readable and not is_state:
    dtype = checkpoint.dtypes[entry.source]
    yield text.format(entry.name, "dtype", entry.tensor.dtype.name, dtype.name)


def _restore_feeds(
  sess: tf.Session, entries: List[_Entry], checkpoint: files.Checkpoint
) -> Dict[str, object]:
  """Returns the feeds with which a Saver's own ops restore other names.

  The feeds are the names that RestoreV2 reads. If it cannot read a value (of state that
  is initialized or has another dtype), its output is fed, too, and the op reads another
  tensor of the same dtype (a stand-in). If the checkpoint has no tensor of that dtype,
  all outputs are fed instead, so that the op does not run.

  Args:
    sess: the Session, which computes initial values.
    entries: the tensors that the Saver reads, those of one op next to each other.
    checkpoint: the checkpoint.

  Returns:
    The feeds by the names of tensors: a list of str for the names that an op reads, an
    array for each other tensor. Without the name of the file.
  """
  shapes = checkpoint.shapes
  largest_first = sorted(shapes, key=lambda name: -np.prod(shapes[name]))
  stand_ins = {checkpoint.dtypes[name]: name for name in largest_first}
  feeds: Dict[str, object] = {}
  for op, group in itertools.groupby(entries, lambda entry: entry.tensor.op):
    outputs = list(group)
    names: List[Optional[str]] = []
    for entry in outputs:
      stand_in = stand_ins.get(entry.tensor.dtype)
      names.append(entry.source if entry.is_readable else stand_in)
    if all(names):
      feeds[op.inputs[1].name] = names
      outputs = [entry for entry in outputs if not entry.is_readable]
    for entry in outputs:
      feeds[entry.tensor.name] = _value(sess, entry, checkpoint)
  return feeds


def _value(sess: tf.Session, entry: _Entry, checkpoint: files.Checkpoint) -> np.ndarray:
  """Returns the value to assign to a variable: that in the checkpoint, converted to the
  dtype of the variable, or the initial value, which the Session computes.
  """
  if not entry.source:
    # The name of the initializer is part of the graph format.
    initializer = entry.variables[0].name + "/Assign"
    initial_value = sess.graph.get_operation_by_name(initializer).inputs[1]
    return sess.run(initial_value)
  if entry.part:
    return checkpoint.read_slice(entry.source, entry.part)
  return checkpoint.read(entry.source).astype(entry.tensor.dtype.as_numpy_dtype)
