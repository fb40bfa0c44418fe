# SPDX-License-Identifier: Apache-2.0
"""Reads checkpoints of any format, from any file system that TensorFlow knows; also by
the names in this package.
"""

import functools
import os
import re
from typing import (
  Any,
  Container,
  Dict,
  Iterable,
  List,
  Mapping,
  NamedTuple,
  Optional,
  Sequence,
  Set,
  Tuple,
  Union,
)

from google.protobuf import message
import numpy as np

from mp_compat._tensorflow import tf
from mp_compat.core import loss_scale
from mp_compat.core import matching
from mp_compat.core import naming_schemes
from mp_compat.core import translation

Path = Union[str, bytes, "os.PathLike[str]"]
VarList = Union[Iterable[tf.Variable], Dict[str, tf.Variable]]

# An entry of every checkpoint that tf.train.Checkpoint wrote. The other names are
# object paths, for every optimizer.
_OBJECT_GRAPH = "_CHECKPOINTABLE_OBJECT_GRAPH"

# Opens a checkpoint. `install()` replaces it in TensorFlow's modules.
tensorflow_reader = tf.train.NewCheckpointReader

# Files of a checkpoint in the V2 format, which are no checkpoints.
_PART = re.compile(r"(.+)\.(index|meta|data-\d+-of-\d+)")

# Ops of variables in a graph.
_VARIABLES = ("VarHandleOp", "VariableV2", "Variable")

# Errors that TensorFlow's checkpoint readers raise for a damaged checkpoint.
_BROKEN = (tf.errors.OpError, IndexError, RuntimeError, ValueError)


def path_text(path: Path) -> str:
  """Returns a path as a str; raises a ValueError if it is not in UTF-8, which
  TensorFlow requires.
  """
  try:
    text: str = tf.compat.as_str_any(path)
    text.encode()
  except UnicodeError as error:
    raise ValueError("Expected a path in UTF-8, but got {!r}.".format(path)) from error
  return text


def resolve_path(path: Path) -> str:
  """Returns the path of a checkpoint; for a directory, of its latest. Raises a
  ValueError if there is none.
  """
  path = path_text(path)
  checkpoint: Optional[str] = path
  if tf.gfile.IsDirectory(path) and not checkpoint_exists(path):
    checkpoint = tf.train.latest_checkpoint(path)
  if checkpoint is None or not checkpoint_exists(checkpoint):
    raise ValueError(
      "There is no checkpoint at {}. Expected the path of a checkpoint, such as "
      "model.ckpt-100 (without .index), or a directory with a file named "
      "checkpoint.".format(path)
    )
  return checkpoint


def check_no_pattern(path: str) -> None:
  """Raises a ValueError if TensorFlow's readers take a path for a pattern that the path
  itself does not match.
  """
  if "[" in path or ("\\" in path and os.sep == "/"):
    raise ValueError(
      "TensorFlow reads the path {} as a pattern for file names. Expected a path "
      "without brackets and backslashes.".format(path)
    )


def checkpoint_exists(path: str) -> bool:
  """Returns whether there is an index file (V2), or files match the path itself (V1,
  "model-?????-of-00002").
  """
  if tf.gfile.Exists("{}.index".format(path)):
    return True
  if _PART.fullmatch(path):
    return False
  try:
    return any(not tf.gfile.IsDirectory(file) for file in tf.gfile.Glob(path))
  # TensorFlow 1.15 raises it if the directory does not exist.
  except tf.errors.NotFoundError:
    return False


class Checkpoint:
  """An open checkpoint. Its methods raise a DataLossError if it is damaged.

  Attributes:
    path: Its path.
    shapes: The shapes of its variables by name.
    dtypes: The dtypes of its variables by name.
    is_object_based: Whether `tf.train.Checkpoint` wrote it.
  """

  def __init__(self, path: str, reader: Any = None) -> None:
    """Opens a checkpoint, unless TensorFlow's `reader` of it is passed; one without
    variables counts as damaged.
    """
    self.path = path
    try:
      # load_checkpoint() would read a directory of that name
      self._reader = tensorflow_reader(path) if reader is None else reader
    except _BROKEN as error:
      check_no_pattern(path)
      raise data_loss_error(path, error) from error
    shapes = self._reader.get_variable_to_shape_map()
    self.shapes = {name: tuple(shape) for name, shape in shapes.items()}
    self.dtypes: Dict[str, tf.DType] = self._reader.get_variable_to_dtype_map()
    self.is_object_based = _OBJECT_GRAPH in self.shapes
    if not self.shapes:
      raise data_loss_error(path, ValueError("it has no variables"))

  def read(self, name: str) -> np.ndarray:
    """Returns the value of a variable."""
    try:
      return np.asarray(self._reader.get_tensor(name))
    except tf.errors.UnimplementedError:  # a partitioned variable in the V1 format
      return self.read_slices([name], [""], [self.dtypes[name]])[0]
    except _BROKEN as error:
      raise data_loss_error(self.path, error) from error

  def read_slices(
    self, names: List[str], parts: List[str], dtypes: List[tf.DType]
  ) -> List[np.ndarray]:
    """Returns slices of variables, as `RestoreV2` reads them.

    Args:
      names: the names of the variables.
      parts: the slice of each: "shape offset,size:...", "" for all.
      dtypes: the dtype of each.
    """
    config = tf.ConfigProto(device_count={"GPU": 0})
    with tf.Graph().as_default(), tf.Session(config=config) as sess:
      values = tf.raw_ops.RestoreV2(
        prefix=self.path, tensor_names=names, shape_and_slices=parts, dtypes=dtypes
      )
      try:
        return sess.run(values)
      except _BROKEN as error:
        raise data_loss_error(self.path, error) from error

  def have_equal_values(self, names: Sequence[str]) -> bool:
    """Returns whether variables have the same dtype and value, bit for bit."""
    if len(names) < 2:
      return True
    if len({(self.dtypes[name], self.shapes[name]) for name in names}) > 1:
      return False
    return len({self.read(name).tobytes() for name in names}) == 1

  def creation_order(self) -> List[str]:
    """Returns the names of variables in the order in which the program created them, as
    far as the `.meta` file beside the checkpoint tells.
    """
    path = "{}.meta".format(self.path)
    if not tf.gfile.Exists(path):
      return []
    try:
      with tf.gfile.GFile(path, "rb") as file:
        graph_def = tf.MetaGraphDef.FromString(file.read()).graph_def
    except (tf.errors.OpError, message.DecodeError):
      return []
    names = []
    for node in graph_def.node:
      if node.op in _VARIABLES and node.name in self.shapes:
        names.append(node.name)
    return names

  def variables(
    self, ordered: bool = False, left_out: Container[str] = ()
  ) -> matching.Variables:
    """Returns the names and shapes of the variables.

    Args:
      ordered: whether to read in which order the program created them, as far as the
        checkpoint tells.
      left_out: names to leave out.
    """
    order = self.creation_order() if ordered else []
    shapes = self.shapes.items()
    kept = {name: shape for name, shape in shapes if name not in left_out}
    return matching.Variables(kept, order)


def match(
  graph: tf.Graph,
  wanted: Mapping[str, Tuple[str, naming_schemes.Shape]],
  checkpoint: Checkpoint,
) -> matching.Match:
  """Returns which variable in a checkpoint each variable of a graph is.

      graph_variables = those wanted, and the other global variables of the graph
      match them by name, shape and kind
      if some of them may be several: again, with the order in the `.meta` file

  Args:
    graph: the graph.
    wanted: the names of variables' ops and their shapes, by the names to restore them
      by: those that a Saver or an assignment map has. A name other than that of the op
      is one that the program wrote: if the checkpoint has it, no other one is sought.
    checkpoint: the checkpoint.

  Returns:
    The match of those in `wanted`, by their names there. The other variables of the
    graph are only compared: they show which names in the checkpoint are theirs.
  """
  all_shapes = {name: shape for name, (_, shape) in wanted.items()}
  ops = {name: op for name, (op, _) in wanted.items()}
  known = {*ops, *ops.values()}
  all_ops = dict(ops)
  for name, (_, shape) in global_variables(graph).items():
    if name not in known:
      all_shapes[name] = shape
      all_ops[name] = name
  explicit: Set[str] = set()
  for name, op in ops.items():
    is_kept = name != op and name in checkpoint.shapes
    if is_kept and not naming_schemes.is_state_name(name):
      explicit.add(name)
      del all_shapes[name], all_ops[name]
  graph_variables = _graph_variables(graph, all_shapes, all_ops)
  matched = matching.Match({}, {})
  # The `.meta` file has the whole graph: it is read only if names do not suffice.
  for ordered in (False, True):
    matched = matching.match(
      [name for name in wanted if name not in explicit],
      graph_variables,
      checkpoint.variables(ordered=ordered, left_out=explicit),
      checkpoint.have_equal_values,
    )
    if not matched.ambiguous:
      break
  matched.names.update((name, name) for name in explicit)
  return matched


def global_variables(graph: tf.Graph) -> Dict[str, Tuple[str, naming_schemes.Shape]]:
  """Returns (name, shape) of each global variable with a known shape, by its name, as
  `match` takes them.
  """
  result: Dict[str, Tuple[str, naming_schemes.Shape]] = {}
  for variable in graph.get_collection(tf.GraphKeys.GLOBAL_VARIABLES):
    name = op_name(variable)
    if name and variable.shape.is_fully_defined():
      result[name] = name, tuple(variable.shape.as_list())
  return result


def _graph_variables(
  graph: tf.Graph, shapes: naming_schemes.Shapes, ops: Mapping[str, str]
) -> matching.Variables:
  """Returns variables of a graph, by the names of `shapes`; `ops` has those of their
  ops.
  """
  place = {op.name: number for number, op in enumerate(graph.get_operations())}
  kinds = loss_scale.kinds_of_created(graph)
  order = sorted(shapes, key=lambda name: place[ops[name]])
  kinds_by_name = {name: kinds[op] for name, op in ops.items() if op in kinds}
  return matching.Variables(shapes, order, kinds_by_name)


def ambiguity(
  ambiguous: Mapping[str, Sequence[str]], path: str, remedy: Optional[str] = None
) -> str:
  """Returns the message of an error for variables that may be several in a checkpoint.

  Args:
    ambiguous: the names that each variable may have in the checkpoint.
    path: the path of the checkpoint.
    remedy: what else to do; by default that for a Saver or an assignment map.
  """
  choices = [
    "{} may be {}".format(name, " or ".join(sources))
    for name, sources in ambiguous.items()
  ]
  if not remedy:
    example = next(iter(ambiguous.values()))[-1]
    remedy = "Or pass the names, as in {{{!r}: variable, ...}}.".format(example)
  order = (
    "Expected the .meta file beside the checkpoint, which has the order in which the "
    "program creates them."
  )
  if tf.gfile.Exists("{}.meta".format(path)):
    order = "The .meta file beside the checkpoint does not tell, either."
  return (
    "The checkpoint {} has variables of several optimizers, and their names do not "
    "tell which is which: {}. {} {}".format(path, "; ".join(choices), order, remedy)
  )


def data_loss_error(path: str, error: Exception) -> tf.errors.DataLossError:
  """Returns the error to raise for a damaged checkpoint, with the reason that `error`
  states.
  """
  text = str(error)
  # A Session's message includes the node and its traceback. The line before the node
  # states the error.
  line = re.search(r"([^\n]+)\n\s*\[\[", text) or re.search(r"([^\n]+)", text)
  reason = line.group(1) if line else type(error).__name__
  return tf.errors.DataLossError(
    None,
    None,
    "The checkpoint {} is truncated or corrupt: {}. Restore an earlier one; "
    "tf.train.get_checkpoint_state({!r}).all_model_checkpoint_paths lists those that "
    "are kept.".format(path, reason, os.path.dirname(path)),
  )


def op_name(value: tf.Variable) -> str:
  """Returns the name of the op of a variable; "" for what has no op, such as a list of
  the parts of a variable.
  """
  return value.op.name if hasattr(value, "op") else ""


@functools.wraps(tensorflow_reader)
def open_with_own_names(filepattern: str) -> Any:
  """Returns TensorFlow's reader of a checkpoint, which has Adam's powers under their
  names in this package, too.
  """
  reader = tensorflow_reader(filepattern)
  if reader.has_tensor(_OBJECT_GRAPH) or not reader.get_variable_to_shape_map():
    return reader
  return _Reader(reader, Checkpoint(tf.compat.as_str_any(filepattern), reader))


class _Known(NamedTuple):
  """What a reader knows of the default graph of the last call.

  Attributes:
    graph: The graph; None before the first call.
    version: Its version, which changes with each op.
    matched: Which variables in the checkpoint its variables are.
  """

  graph: Optional[tf.Graph]
  version: int
  matched: matching.Match


class _Reader:
  """A reader with two names for a variable: its name in the checkpoint, and that of
  this package.

  A name that a variable of the default graph has is that variable, also where another
  one has this name in the checkpoint. For variables that the graph does not have, the
  name of this package is that without conditionals.
  """

  def __init__(self, reader: Any, checkpoint: Checkpoint) -> None:
    """Wraps TensorFlow's `reader` of a `checkpoint` that is not object-based."""
    self._reader = reader
    self._checkpoint = checkpoint
    self._own_names = {name: name for name in checkpoint.shapes}
    self._plain_names = translation.plain_names(
      checkpoint.variables(ordered=True), checkpoint.have_equal_values
    )
    self._known = _Known(graph=None, version=0, matched=matching.Match({}, {}))

  def __getattr__(self, name: str) -> Any:
    """Returns an attribute that does not depend on names from TensorFlow's reader."""
    return getattr(self._reader, name)

  def has_tensor(self, tensor_str: str) -> bool:
    """Returns whether one of the two names of a variable is this one."""
    return tf.compat.as_str_any(tensor_str) in self._names()

  def get_tensor(self, tensor_str: str) -> np.ndarray:
    """Returns the value of the variable that has this name in the default graph; if
    none has, in the checkpoint, or else in this package.

    Raises:
      tf.errors.InvalidArgumentError: If a variable of the default graph may be one of
        several in the checkpoint.
    """
    name = tf.compat.as_str_any(tensor_str)
    ambiguous = self._match().ambiguous
    if name in ambiguous:
      raise tf.errors.InvalidArgumentError(
        None, None, ambiguity({name: ambiguous[name]}, self._checkpoint.path)
      )
    return self._reader.get_tensor(self._names().get(name, name))

  def get_variable_to_shape_map(self) -> Dict[str, List[int]]:
    """Returns the shape of each variable, by both names."""
    by_name = self._reader.get_variable_to_shape_map()
    return {name: by_name[source] for name, source in self._names().items()}

  def get_variable_to_dtype_map(self) -> Dict[str, tf.DType]:
    """Returns the dtype of each variable, by both names."""
    by_name = self._reader.get_variable_to_dtype_map()
    return {name: by_name[source] for name, source in self._names().items()}

  def _names(self) -> Dict[str, str]:
    """Returns all names, each with the name in the checkpoint."""
    return {**self._plain_names, **self._own_names, **self._match().names}

  def _match(self) -> matching.Match:
    """Returns which variables in the checkpoint those of the default graph are, if
    an optimizer with a loss scale created some of them.
    """
    graph = tf.get_default_graph()
    version = graph.version
    if self._known.graph is graph and self._known.version == version:
      return self._known.matched
    found = matching.Match({}, {})
    if loss_scale.kinds_of_created(graph):
      found = match(graph, global_variables(graph), self._checkpoint)
    self._known = _Known(graph, graph.version, found)
    return found
