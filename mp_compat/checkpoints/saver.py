# SPDX-License-Identifier: Apache-2.0
"""A `tf.train.Saver` that restores checkpoints of every naming scheme (see
`mp_compat.core.naming_schemes`).
"""

import collections
import functools
import itertools
import re
from typing import (
  Any,
  Container,
  Dict,
  Iterator,
  List,
  NamedTuple,
  Optional,
  Sequence,
  Set,
  Tuple,
)

import numpy as np

from mp_compat._tensorflow import log
from mp_compat._tensorflow import savers
from mp_compat._tensorflow import tf
from mp_compat.checkpoints import files
from mp_compat.core import loss_scale
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

  Restoring accepts both names of Adam's powers, contrib's state (int32 counts become
  int64), and state under another name scope. Variables of a loss scale that are not in
  the checkpoint, those of subclasses of `mp_compat.LossScale` included, start at their
  initial values. The arguments, and the files that are written, are those of
  `tf.train.Saver`.

  Source: `tf.train.Saver`.
  """

  def __init__(
    self, var_list: Optional[files.VarList] = None, *args: Any, **kwargs: Any
  ) -> None:
    """Creates a Saver.

    Args:
      var_list: See `tf.train.Saver`. Takes a cast of `float32_variable_storage_getter`
        for its variable.
      *args: See `tf.train.Saver`.
      **kwargs: See `tf.train.Saver`.
    """
    super().__init__(variable_scope.variables_of(var_list), *args, **kwargs)

  def restore(self, sess: tf.Session, save_path: files.Path) -> None:
    """Restores the variables; see `tf.train.Saver.restore`. Adds nothing to the graph.

    Args:
      sess: A Session on the graph.
      save_path: The path of a checkpoint, as returned by `save` or
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
  path = None if save_path is None else files.path_text(save_path)
  if path is None or not files.checkpoint_exists(path):
    raise ValueError(
      "The passed save_path is not a valid checkpoint: {}. Expected the path that "
      "save() or tf.train.latest_checkpoint() returned.".format(path)
    )
  checkpoint, entries = files.Checkpoint(path), []
  if not checkpoint.is_object_based:
    entries = _entries(sess.graph.as_graph_element(self.saver_def.restore_op_name))
  matched = _match_names(sess.graph, entries, checkpoint)
  feeds: Dict[str, object] = {}
  if any(
    matched.get(entry.name) != entry.name
    or checkpoint.dtypes[entry.name] != entry.tensor.dtype
    for entry in entries
  ):
    feeds = _restore_feeds(sess, entries, matched, checkpoint)
    feeds[self.saver_def.filename_tensor_name] = path
  try:
    if feeds:
      tf.logging.info(
        "Restoring parameters from %s, which has other variable names", path
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


def add_tensorflow_names(var_list: Optional[files.VarList]) -> Optional[files.VarList]:
  """Returns the `var_list` of a Saver that also saves variables under their names in
  TensorFlow's class.

  Variables that the program renames (in a dict) have one entry. Logs a warning if
  another variable has that name.
  """
  recorded = files.tensorflow_names(tf.get_default_graph())
  renamed = {
    name: tensorflow_name
    for name, tensorflow_name in sorted(recorded.items())
    if name != tensorflow_name
  }
  if not renamed:
    return var_list
  if isinstance(var_list, dict):
    return dict(var_list, **_aliases(var_list, recorded, renamed))
  by_default = tf.global_variables() + tf.get_collection(tf.GraphKeys.SAVEABLE_OBJECTS)
  entries = by_default if var_list is None else list(var_list)
  named = {files.op_name(value): value for value in entries if files.op_name(value)}
  return entries + list(_aliases(named, recorded, renamed).values())


def _aliases(
  named: Dict[str, tf.Variable], recorded: Container[str], renamed: Dict[str, str]
) -> Dict[str, savers.AliasSaveable]:
  """Returns the variables that are also saved under their names in TensorFlow's class,
  by these names.

  Logs warnings of variables whose name, or whose number, in TensorFlow's class another
  one has.
  """
  aliases = {}
  for name, tensorflow_name in renamed.items():
    if tensorflow_name in named:
      log.warn(
        "%s is not also saved as %s, its name in TensorFlow's class, because another "
        "variable has that name. To restore this checkpoint without mp_compat, convert "
        "it: python -m mp_compat checkpoint convert --like.",
        name,
        tensorflow_name,
      )
    elif name in named and files.op_name(named[name]) == name:
      aliases[tensorflow_name] = savers.AliasSaveable(named[name], tensorflow_name)
  shifted = sorted(
    name
    for name in named
    if name not in recorded and re.sub(r"_\d+$", "", name) in renamed
  )
  if shifted:
    log.warn(
      "%s, of an optimizer without loss scaling, would have another number with "
      "TensorFlow's class. Restored without mp_compat, this checkpoint gives that "
      "variable another value.",
      ", ".join(shifted),
    )
  return aliases


class _Entry(NamedTuple):
  """A tensor that a Saver reads from a checkpoint: an output of a RestoreV2 op, and the
  variables assigned from it.
  """

  tensor: tf.Tensor
  name: str  # in the checkpoint
  # the shape of a partitioned variable and the slice to read, "6 2 0,2:-"; "" for the
  # whole tensor
  part: str
  # with tf.distribute, one per local device; empty for an iterator's state
  variables: List[tf.Operation]
  reshaped: bool  # Saver(reshape=True)

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
    known = [
      variable.get_attr("shape")
      for variable in self.variables
      if "shape" in variable.node_def.attr
    ]
    return tf.TensorShape(known[0] if known else None)


def _entries(restore_op: tf.Operation) -> List[_Entry]:
  """Returns the tensors that running `restore_op` reads, those of each RestoreV2 op in
  their order.
  """
  ops = runs.executed_ops([restore_op])
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
      names, parts = [
        map(tf.compat.as_str, tf.make_ndarray(text.op.get_attr("value")))
        for text in op.inputs[1:3]
      ]
      for tensor, name, part in zip(op.outputs, names, parts):
        variables, reshaped_each = (
          zip(*assigned[tensor.name]) if assigned[tensor.name] else ((), ())
        )
        entries.append(_Entry(tensor, name, part, list(variables), any(reshaped_each)))
  return entries


def _match_names(
  graph: tf.Graph, entries: List[_Entry], checkpoint: files.Checkpoint
) -> Dict[str, str]:
  """Returns the names in the checkpoint by the names in the graph; omits state that
  starts at its initial value.
  """
  needed = {entry.name: entry for entry in entries if entry.is_needed}
  wanted = _wanted(needed)
  match = files.match(graph, wanted, checkpoint)
  if match.ambiguous:
    raise tf.errors.InvalidArgumentError(
      None,
      None,
      "Nothing was restored. " + files.ambiguity(match.ambiguous, checkpoint.path),
    )
  # The state of iterators has no shape.
  matched = {
    entry.name: entry.name
    for entry in entries
    if entry.name in checkpoint.shapes and entry.name not in wanted
  }
  matched.update(match.names)
  variables = _variables(needed)
  state = {variables[name] for name in variables.keys() & loss_scale.state_names(graph)}
  # of TensorFlow's classes, and of imported graphs
  state.update(
    naming_schemes.state({name: shape for name, (_, shape) in wanted.items()})
  )
  _check_fits(needed, matched, state, checkpoint)
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
) -> Dict[str, Tuple[str, naming_schemes.Shape]]:
  """Returns the name of a variable's op, and the shape, by the name in the Saver."""
  wanted: Dict[str, Tuple[str, naming_schemes.Shape]] = {}
  for name, entry in entries.items():
    ops = [variable.name for variable in entry.variables]
    if ops and entry.shape.is_fully_defined():
      op = name if name in ops else ops[0]
      wanted[name] = op, tuple(entry.shape.as_list())
  return wanted


def _variables(entries: Dict[str, _Entry]) -> Dict[str, str]:
  """Returns the names in the graph's Saver by the names of the variables' ops."""
  return {
    variable.name: name
    for name, entry in entries.items()
    for variable in entry.variables
  }


def _check_fits(
  needed: Dict[str, _Entry],
  matched: Dict[str, str],
  state: Set[str],
  checkpoint: files.Checkpoint,
) -> None:
  """Raises an error that names all variables that the checkpoint lacks, except `state`,
  or has in another form.
  """
  missing = [name for name in needed if name not in matched and name not in state]
  different: List[str] = []
  for name in [name for name in needed if name in matched]:
    source = matched[name]
    different += _differences(
      needed[name], checkpoint.shapes[source], checkpoint.dtypes[source], name in state
    )
  if missing or different:
    raise _mismatch(missing, different, checkpoint)


def _differences(
  entry: _Entry, shape: Sequence[int], dtype: tf.DType, is_state: bool
) -> Iterator[str]:
  """Yields how a variable differs from its value in the checkpoint; another dtype of
  state is converted.
  """
  text = "{} has the {} {} in the graph, {} in the checkpoint"
  can_reshape = entry.reshaped and entry.shape.num_elements() == np.prod(
    shape, dtype=np.int64
  )
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
      "{}.".format(
        checkpoint.path,
        naming_schemes.recognize(checkpoint.shapes).name,
        ", ".join(missing),
        ", ".join(sorted(checkpoint.shapes)),
      )
    )
  if different:
    parts.append(
      "Different in the checkpoint {}: {}. Expected a checkpoint of the same model; to "
      "restore a part of it, pass var_list.".format(
        checkpoint.path, "; ".join(different)
      )
    )
  return (tf.errors.NotFoundError if missing else tf.errors.InvalidArgumentError)(
    None, None, " ".join(parts)
  )


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
  all outputs in use are fed instead.
  """
  shapes, dtypes = checkpoint.shapes, checkpoint.dtypes
  stand_ins = {
    dtypes[name]: name
    for name in sorted(shapes, key=lambda name: -np.prod(shapes[name], dtype=np.int64))
  }
  feeds: Dict[str, object] = {}
  for op, outputs in itertools.groupby(entries, lambda entry: entry.tensor.op):
    to_read, fitting = [], []
    for entry in outputs:
      source, dtype = matched.get(entry.name), entry.tensor.dtype
      fits = source is not None and dtypes[source] == dtype
      to_read.append(source if fits else stand_ins.get(dtype))
      if entry.is_needed and fits:
        fitting.append(entry)
      elif entry.is_needed:
        feeds[entry.tensor.name] = _value(sess, entry, source, checkpoint)
    if None not in to_read:
      feeds[op.inputs[1].name] = to_read
    elif fitting:
      names, parts = (
        [matched[entry.name] for entry in fitting],
        [entry.part for entry in fitting],
      )
      values = checkpoint.read_slices(
        names, parts, [entry.tensor.dtype for entry in fitting]
      )
      feeds.update((entry.tensor.name, value) for entry, value in zip(fitting, values))
  return feeds


def _value(
  sess: tf.Session,
  entry: _Entry,
  source_name: Optional[str],
  checkpoint: files.Checkpoint,
) -> np.ndarray:
  """Returns the value to assign to a variable: the initial one without a `source_name`,
  else that, converted.
  """
  if source_name is not None:
    return checkpoint.read(source_name).astype(entry.tensor.dtype.as_numpy_dtype)
  # The name of the initializer is part of the graph format.
  return sess.run(
    sess.graph.get_operation_by_name(entry.variables[0].name + "/Assign").inputs[1]
  )
