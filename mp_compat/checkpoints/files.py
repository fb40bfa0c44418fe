# SPDX-License-Identifier: Apache-2.0
"""Reads checkpoints of any format, from any file system that TensorFlow knows; also by
the names in this package.
"""

import functools
import json
import os
import re
from typing import (
  Any,
  Dict,
  Iterable,
  List,
  Mapping,
  Optional,
  Sequence,
  Set,
  Tuple,
  Union,
)

from google.protobuf import message
import numpy as np

from mp_compat._tensorflow import tf
from mp_compat._tensorflow import variables as tf_variables
from mp_compat.core import loss_scale
from mp_compat.core import matching
from mp_compat.core import naming_schemes
from mp_compat.core import translation

Path = Union[str, bytes, "os.PathLike[str]"]
# The name of a variable's op and the shape.
Named = Tuple[str, naming_schemes.Shape]
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


def resolve_path(path: Path) -> str:
  """Returns the path of a checkpoint; for a directory, of its latest. Raises a
  ValueError if there is none.
  """
  text: str = tf.compat.as_str_any(path)
  checkpoint: Optional[str] = text
  if tf.gfile.IsDirectory(text) and not checkpoint_exists(text):
    checkpoint = tf.train.latest_checkpoint(text)
  if checkpoint is None or not checkpoint_exists(checkpoint):
    raise ValueError(
      "There is no checkpoint at {}. Expected the path of a checkpoint, such as "
      "model.ckpt-100 (without .index), or a directory with a file named "
      "checkpoint.".format(text)
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
  if tf.gfile.Exists(path + ".index"):
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
    self._variables: Optional[matching.Variables] = None
    if not self.shapes:
      raise data_loss_error(path, ValueError("it has no variables"))

  def read(self, name: str) -> np.ndarray:
    """Returns the value of a variable."""
    try:
      return np.asarray(self._reader.get_tensor(name))
    except tf.errors.UnimplementedError:  # a partitioned variable in the V1 format
      return self.read_slice(name, "")
    except _BROKEN as error:
      if "sufficient slices" in str(error):
        raise ValueError(
          "The checkpoint {} has only a slice of {}, and cannot be converted. Restore "
          "it with mp_compat.checkpoints.Saver.".format(self.path, name)
        ) from error
      raise data_loss_error(self.path, error) from error

  def read_slice(self, name: str, part: str) -> np.ndarray:
    """Returns a slice of a variable, as `RestoreV2` reads it: `part` is "shape
    offset,size:...", or "" for all.
    """
    config = tf.ConfigProto(device_count={"GPU": 0})
    with tf.Graph().as_default(), tf.Session(config=config) as sess:
      values = tf.raw_ops.RestoreV2(
        prefix=self.path,
        tensor_names=[name],
        shape_and_slices=[part],
        dtypes=[self.dtypes[name]],
      )
      try:
        return sess.run(values)[0]
      except _BROKEN as error:
        raise data_loss_error(self.path, error) from error

  def have_equal_values(self, names: Sequence[str]) -> bool:
    """Returns whether variables have the same dtype, shape and value, bit for bit;
    False for several if the checkpoint lacks one.
    """
    if len(names) < 2:
      return True
    has_all = self.shapes.keys() >= set(names)
    return has_all and len({self.bits(name) for name in names}) == 1

  def bits(self, name: str) -> Tuple[object, ...]:
    """Returns what is equal for variables of the same value; see `bits`."""
    return bits(self.read(name), self.dtypes[name])

  @property
  def variables(self) -> matching.Variables:
    """Returns the variables of the program that wrote the checkpoint: those in the
    `.meta` file beside it, or else only those in the checkpoint.
    """
    if self._variables is None:
      meta_graph = _meta_graph(self.path + ".meta")
      nodes = meta_graph.graph_def.node
      shapes: Dict[str, naming_schemes.Shape] = {}
      for node in nodes:
        if node.op in _VARIABLES:
          shapes[node.name] = [dim.size for dim in node.attr["shape"].shape.dim]
      self._variables = matching.Variables(
        {**shapes, **self.shapes},
        order=list(shapes),
        created=_in_conditionals(nodes) - tf_variables.names_of_model(meta_graph),
        unsaved=shapes.keys() - self.shapes.keys(),
      )
    return self._variables

  def variables_without(self, names: Iterable[str]) -> matching.Variables:
    """Returns `variables` but those with some names."""
    kept = dict(self.variables.shapes)
    for name in names:
      kept.pop(name, None)
    return self.variables._replace(shapes=kept)


def bits(array: np.ndarray, dtype: tf.DType) -> Tuple[object, ...]:
  """Returns what is equal for values that are the same, bit for bit. Arrays of strings
  and of quantized dtypes are arrays of objects.
  """
  content: object = array.tobytes()
  if array.dtype == object:
    content = repr(array.tolist())
  return dtype, array.shape, content


def _meta_graph(path: str) -> tf.MetaGraphDef:
  """Returns the graph in a `.meta` file; an empty one if it is missing or damaged."""
  if not tf.gfile.Exists(path):
    return tf.MetaGraphDef()
  try:
    with tf.gfile.GFile(path, "rb") as file:
      return tf.MetaGraphDef.FromString(file.read())
  except (tf.errors.OpError, message.DecodeError):
    return tf.MetaGraphDef()


def _in_conditionals(nodes: Sequence[tf.NodeDef]) -> Set[str]:
  """Returns the names of the ops in conditionals of control flow v1."""
  end = "pred_id"  # Each has an op of this name; a scope called "cond" has none.
  scopes = [node.name[: -len(end)] for node in nodes if node.name.endswith("/" + end)]
  return {node.name for node in nodes if node.name.startswith(tuple(scopes))}


def match(
  graph: tf.Graph, wanted: Mapping[str, Named], checkpoint: Checkpoint
) -> matching.Match:
  """Returns which variable in a checkpoint each variable of a graph is.

  Those wanted are matched together with the other global variables of the graph.

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
  names = {op: name for name, (op, _) in wanted.items()}
  variables: Dict[str, Named] = {}  # in the order of creation
  for op, variable in global_variables(graph).items():
    variables[names.get(op, op)] = variable
  variables.update(wanted)
  explicit: Dict[str, str] = {}
  for name, (op, _) in wanted.items():
    is_kept = name != op and name in checkpoint.shapes
    if is_kept and not naming_schemes.is_state_name(name):
      explicit[name] = name
      del variables[name]
  loss_scales = loss_scale.kinds_of_created(graph)
  trainable = graph.get_collection(tf.GraphKeys.TRAINABLE_VARIABLES)
  weights = set(map(op_name, trainable))
  matched = matching.match(
    wanted,
    matching.Variables(
      _shapes(variables),
      order=list(variables),
      loss_scales={
        name: loss_scales[op]
        for name, (op, _) in variables.items()
        if op in loss_scales
      },
      weights={name for name, (op, _) in variables.items() if op in weights},
    ),
    checkpoint.variables_without(explicit),
    checkpoint.have_equal_values,
  )
  matched.names.update(explicit)
  return matched


def state_in(graph: tf.Graph, wanted: Mapping[str, Named]) -> Set[str]:
  """Returns which variables are those of loss scales: of this package, of TensorFlow's
  classes, and of imported graphs. `wanted` is that of `match`.
  """
  names = set(naming_schemes.state(_shapes(wanted)))
  registered = loss_scale.state_names(graph)
  names.update(name for name, (op, _) in wanted.items() if op in registered)
  return names


def _shapes(variables: Mapping[str, Named]) -> Dict[str, naming_schemes.Shape]:
  """Returns the shapes of variables by name."""
  return {name: shape for name, (_, shape) in variables.items()}


def global_variables(graph: tf.Graph) -> Dict[str, Named]:
  """Returns (name, shape) of each global variable with a known shape, by its name, in
  the order of creation, as `match` takes them.
  """
  result: Dict[str, Named] = {}
  for variable in graph.get_collection(tf.GraphKeys.GLOBAL_VARIABLES):
    name = op_name(variable)
    if name and variable.shape.is_fully_defined():
      result[name] = name, tuple(variable.shape.as_list())
  return result


def ambiguity(match: matching.Match, path: str) -> str:
  """Returns the message of an error for variables that may be several in a checkpoint,
  with a map of names to be completed: what is certain, and what is not.
  """
  names = {name: source for name, source in match.names.items() if name != source}
  for name, sources in match.ambiguous.items():
    names[name] = " or ".join([*sources, "nothing"])
  return (
    "The checkpoint {} does not tell which of its variables are those of the graph: "
    "several fit, by their names and the .meta file beside it, if there is one. If an "
    "optimizer was added to the program, restore only variables that the checkpoint "
    "has (var_list). Otherwise complete this map, without those that are nothing in "
    "the checkpoint; add those that the graph lacks, as nothing, nothing_1. {} "
    "{}".format(path, _conversion(path), json.dumps(names, indent=2))
  )


def missing(names: Iterable[str], checkpoint: Checkpoint) -> str:
  """Returns the message of an error for variables that a checkpoint lacks."""
  return (
    "Not found in the checkpoint {}, which has the naming scheme {}: {}. It has: {}. "
    "{}".format(
      checkpoint.path,
      naming_schemes.recognize(checkpoint.shapes).name,
      ", ".join(sorted(names)),
      ", ".join(sorted(checkpoint.shapes)),
      _conversion(checkpoint.path),
    )
  )


def _conversion(path: str) -> str:
  """Returns what an error advises to do with names that differ."""
  return (
    "Write names in the graph, with those in the checkpoint, as JSON to a FILE, and "
    "restore what `python -m mp_compat checkpoint convert {} OUT --to mp_compat "
    "--name-map FILE` writes (or --like, where that was given).".format(path)
  )


def data_loss_error(path: str, error: Exception) -> tf.errors.DataLossError:
  """Returns the error to raise for a damaged checkpoint, with the reason that `error`
  states.
  """
  text = str(error)
  # A Session's message includes the node and its traceback. The line before the node
  # states the error.
  line = re.search(r"[^\n]+(?=\n\s*\[\[)", text) or re.search(r"[^\n]+", text)
  reason = line.group() if line else type(error).__name__
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
  """Returns TensorFlow's reader of a checkpoint, which has variables under their names
  in the default graph, too.
  """
  reader = tensorflow_reader(filepattern)
  if reader.has_tensor(_OBJECT_GRAPH) or not reader.get_variable_to_shape_map():
    return reader
  return _Reader(reader, Checkpoint(tf.compat.as_str_any(filepattern), reader))


class _Reader:
  """A reader with the names in the checkpoint, those without loss scaling, and those of
  the default graph: a name that a variable of the graph has is that variable, also
  where another one has this name in the checkpoint.
  """

  def __init__(self, reader: Any, checkpoint: Checkpoint) -> None:
    """Wraps TensorFlow's `reader` of a `checkpoint` that is not object-based."""
    self._reader = reader
    self._checkpoint = checkpoint
    self._names_without_graph = {
      **_plain_names(checkpoint),
      **{name: name for name in checkpoint.shapes},
    }
    # It is called for each variable.
    self._match = functools.lru_cache(maxsize=1)(self._match_graph)

  def __getattr__(self, name: str) -> Any:
    """Returns an attribute that does not depend on names from TensorFlow's reader."""
    return getattr(self._reader, name)

  def has_tensor(self, tensor_str: str) -> bool:
    """Returns whether a variable has this name."""
    return tf.compat.as_str_any(tensor_str) in self._names()

  def get_tensor(self, tensor_str: str) -> np.ndarray:
    """Returns the value of the variable that has this name in the default graph; if
    none has, in the checkpoint, or else without loss scaling.

    Raises:
      tf.errors.InvalidArgumentError: If a variable of the default graph may be one of
        several in the checkpoint.
    """
    name = tf.compat.as_str_any(tensor_str)
    if name in self._matched.ambiguous:
      raise tf.errors.InvalidArgumentError(
        None, None, ambiguity(self._matched, self._checkpoint.path)
      )
    return self._reader.get_tensor(self._names().get(name, name))

  def get_variable_to_shape_map(self) -> Dict[str, List[int]]:
    """Returns the shape of each variable, by all its names."""
    return self._by_all_names(self._reader.get_variable_to_shape_map())

  def get_variable_to_dtype_map(self) -> Dict[str, tf.DType]:
    """Returns the dtype of each variable, by all its names."""
    return self._by_all_names(self._reader.get_variable_to_dtype_map())

  def _by_all_names(self, by_name: Dict[str, Any]) -> Dict[str, Any]:
    """Returns what is known by the names in the checkpoint by all names."""
    return {name: by_name[source] for name, source in self._names().items()}

  def _names(self) -> Dict[str, str]:
    """Returns all names, each with the name in the checkpoint, or one of those that it
    may be.
    """
    names = dict(self._names_without_graph)
    for name, sources in self._matched.ambiguous.items():
      names[name] = sources[0]
    return {**names, **self._matched.names}

  @property
  def _matched(self) -> matching.Match:
    """Returns which variables in the checkpoint those of the default graph are."""
    graph = tf.get_default_graph()
    return self._match(graph, graph.version)

  def _match_graph(self, graph: tf.Graph, version: int) -> matching.Match:
    """Returns which variables in the checkpoint those of a graph are.

    Args:
      graph: the graph.
      version: its version, which changes with each op.
    """
    del version
    return match(graph, global_variables(graph), self._checkpoint)


def _plain_names(checkpoint: Checkpoint) -> Dict[str, str]:
  """Returns the names in a checkpoint by those without loss scaling; {} if these are
  not certain.
  """
  try:
    names = translation.translate(
      checkpoint.variables, "plain", checkpoint.have_equal_values
    )
  except ValueError:
    return {}
  return {name: source for name, source in names.items() if source}
