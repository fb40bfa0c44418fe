# SPDX-License-Identifier: Apache-2.0
"""Inspects checkpoints and converts them to other naming schemes."""

import collections
import os
from types import MappingProxyType
from typing import Container, Dict, Iterable, Mapping, NamedTuple, Optional, Tuple

import numpy as np

from mp_compat._tensorflow import tf
from mp_compat.checkpoints import files
from mp_compat.core import dialects


class Inspection(NamedTuple):
  """The content of a checkpoint.

  Attributes:
    path: the path of the checkpoint.
    dialect: the naming scheme: "mp_compat", "tensorflow", "contrib", "plain" or
      "object-based".
    variables: the dtype and the shape of each variable, by name.
    state: the values of the loss scale's variables, by name.
  """

  path: str
  dialect: str
  variables: "collections.OrderedDict[str, Tuple[tf.DType, Tuple[int, ...]]]"
  state: "collections.OrderedDict[str, np.ndarray]"


def inspect(path: files.Path, state: Iterable[str] = ()) -> Inspection:
  """Returns the variables in a checkpoint, its naming scheme and the state of its loss
  scale.

  Args:
    path: A checkpoint, or a directory, of which the latest checkpoint is used.
    state: The names of further variables of the loss scale, which a subclass added.

  Returns:
    An `Inspection`, with dtypes, shapes and the values of the loss scale's variables.

  Raises:
    ValueError: If there is no checkpoint at `path`.
    tf.errors.DataLossError: If the checkpoint is truncated or corrupt.
  """
  checkpoint = files.Checkpoint(files.resolve_path(path))
  shapes = checkpoint.shapes
  if checkpoint.is_object_based:
    dialect, names = (
      "object-based",
      [name for name in shapes if dialects.is_state_name(name.partition("/.ATTR")[0])],
    )
  else:
    dialect, names = dialects.dialect(shapes), list(dialects.state(shapes))
  return Inspection(
    checkpoint.path,
    dialect,
    collections.OrderedDict(
      (name, (checkpoint.dtypes[name], shapes[name])) for name in sorted(shapes)
    ),
    collections.OrderedDict(
      (name, checkpoint.read(name)) for name in sorted({*names, *shapes.keys() & state})
    ),
  )


def convert(
  source: files.Path,
  target: files.Path,
  to: Optional[str] = None,
  like: Optional[files.Path] = None,
  state: Mapping[str, float] = MappingProxyType({}),
) -> Inspection:
  """Writes a checkpoint with the names of another naming scheme or program, and
  verifies it by reading it back.

  A loss scale that `source` lacks starts at 2**15, with counts of 0.

  Args:
    source: A checkpoint, or a directory, of which the latest checkpoint is used. It is
      not changed.
    target: The path of the checkpoint to write. The index is moved there last: no
      partial checkpoint can be read. It becomes the latest one of its directory
      (`tf.train.latest_checkpoint`).
    to: One of "mp_compat", "tensorflow", "contrib" and "plain". The names are those of
      a program that builds no other conditionals than the optimizer's.
    like: Instead of `to`, a checkpoint (or a directory) of the program that will
      restore `target`: its names are used. TensorFlow's class names Adam's powers after
      the enclosing conditional: `cond_3/beta1_power` if the program itself builds two.
      Its `.meta` file, if there is one, is copied too.
    state: The initial values of further variables of the loss scale, which a subclass
      added, by name: ints for int64, floats for float32 (with `like`, its dtypes).
      "plain" omits them; they are added where `source` lacks them.

  Returns:
    An `Inspection` of the checkpoint at `target`.

  Raises:
    ValueError: If there is no checkpoint at `source` or `like`, `source` is
      object-based, `to` is unknown, `target` exists or contains brackets, `like` has
      variables that are not in `source`, or not exactly one of `to` and `like` is
      given.
    tf.errors.DataLossError: If the checkpoint is truncated or corrupt, or was not
      written correctly.
  """
  if (to is None) == (like is None):
    raise ValueError(
      "Expected either a naming scheme (`to`) or a checkpoint (`like`), but got "
      "to={!r} and like={!r}.".format(to, like)
    )
  inspection, target = inspect(source, state), files.path_text(target)
  if inspection.dialect == "object-based":
    raise ValueError(
      "{} was written by tf.train.Checkpoint. Its names are the same in every naming "
      "scheme, so it needs no conversion. To restore it without loss scaling, use "
      "tf.train.Checkpoint(optimizer=opt.inner_optimizer).".format(inspection.path)
    )
  files.check_no_pattern(target)
  if files.checkpoint_exists(target) or tf.gfile.Exists(target):
    raise ValueError(
      "{} exists and is not overwritten. Pass another path.".format(target)
    )
  if to is not None:
    names, dialect, meta = _names_in(to, inspection, state), to, None
    dtypes: Dict[str, type] = {
      name: np.int64 if isinstance(value, int) else np.float32
      for name, value in state.items()
    }
  else:
    assert like is not None  # checked above
    example = inspect(like)
    names, dialect, meta = (
      _names_like(example, inspection, state),
      example.dialect,
      "{}.meta".format(example.path),
    )
    dtypes = {
      name: example.variables[name][0].as_numpy_dtype for name in names.keys() & state
    }
  initial: Dict[str, np.ndarray] = {
    name: np.asarray(state[name], dtype) for name, dtype in dtypes.items()
  }
  _write(_values(inspection, names, dialect, initial), target)
  if meta is not None and tf.gfile.Exists(meta):
    tf.gfile.Copy(meta, "{}.meta".format(target), overwrite=True)
  _make_latest(target)
  return inspect(target, state)


def _make_latest(path: str) -> None:
  """Makes a checkpoint the latest of its directory, from which sessions and Estimators
  continue.
  """
  directory = os.path.dirname(path) or "."
  state = tf.train.get_checkpoint_state(directory)
  others = list(state.all_model_checkpoint_paths) if state else []
  tf.train.update_checkpoint_state(directory, path, others + [path])


def _shapes(inspection: Inspection) -> Dict[str, Tuple[int, ...]]:
  """Returns the shapes of the variables by name, in the order of their creation."""
  return {
    name: inspection.variables[name][1]
    for name in sorted(inspection.variables, key=dialects.parse)
  }


def _names_in(
  dialect: str, source: Inspection, own: Iterable[str]
) -> Dict[str, Optional[str]]:
  """Returns for each name in a naming scheme the name in `source` to copy from; None
  for state that starts anew.
  """
  others = {name: shape for name, shape in _shapes(source).items() if name not in own}
  names = dialects.translate(others, dialect)
  names.update(
    (name, name if name in source.variables else None)
    for name in own
    if dialect != "plain"
  )
  return names


def _names_like(
  like: Inspection, source: Inspection, own: Container[str]
) -> Dict[str, Optional[str]]:
  """Returns for each name in `like` the name in `source` to copy from; None for state
  that starts anew.
  """
  shapes, found = _shapes(like), _shapes(source)
  matched, state = dialects.match(shapes, found), dialects.state(shapes)
  second_names = dialects.aliases(shapes)
  if not {*second_names, *second_names.values()} <= set(matched):
    matched = dialects.match(
      {name: shapes[name] for name in shapes if name not in second_names}, found
    )
    matched.update(
      (second, matched[first])
      for second, first in second_names.items()
      if first in matched
    )
  missing = [
    name
    for name in shapes
    if name not in matched and name not in state and name not in own
  ]
  if missing:
    raise ValueError(
      "Expected the variables of {}, but {} does not have these in the same shape: {}. "
      "Pass checkpoints of the same model, and as `state` the variables of a loss "
      "scale of your own.".format(like.path, source.path, ", ".join(missing))
    )
  return {name: matched.get(name) for name in shapes}


def _values(
  source: Inspection,
  names: Mapping[str, Optional[str]],
  to: str,
  initial: Mapping[str, np.ndarray],
) -> Dict[str, np.ndarray]:
  """Returns the values to write by name; `names` has the name in `source` for each, or
  None for state to add.

  `initial` has values for state of the program's own.
  """
  checkpoint = files.Checkpoint(source.path)
  roles = dialects.state(
    {name: source.variables[old][1] if old else () for name, old in names.items()}
  )
  values = {}
  for name, old in names.items():
    if old is not None:
      values[name] = checkpoint.read(old)
    elif name in initial:
      values[name] = initial[name]
    if name in roles:
      role = dialects.ROLES[roles[name]]
      dtype = role.contrib_dtype if to == "contrib" else role.dtype
      values[name] = np.asarray(values.get(name, role.initial)).astype(dtype)
  return values


def _write(values: Dict[str, np.ndarray], target: str) -> None:
  """Writes a checkpoint to a temporary directory, compares it with `values`, and moves
  it to `target`, index last.
  """
  temporary = "{}.unfinished".format(target)
  _remove(temporary)  # from a conversion that was killed
  tf.gfile.MakeDirs(temporary)
  try:
    prefix = os.path.join(temporary, os.path.basename(target))
    with tf.Graph().as_default(), tf.Session() as sess:
      feeds = {
        name: tf.placeholder(value.dtype, value.shape)
        for name, value in sorted(values.items())
      }
      save = tf.raw_ops.SaveV2(
        prefix=prefix,
        tensor_names=list(feeds),
        shape_and_slices=[""] * len(feeds),
        tensors=list(feeds.values()),
      )
      sess.run(save, {feed: values[name] for name, feed in feeds.items()})
    written = files.Checkpoint(prefix)
    for name, value in values.items():
      if _bits(written.read(name)) != _bits(value):
        raise tf.errors.DataLossError(
          None,
          None,
          "{} in {} differs from the value that was written.".format(name, prefix),
        )
    # Some file systems list whole paths. The index is moved last: without it, there is
    # no checkpoint.
    for part in sorted(
      os.path.basename(path) for path in tf.gfile.ListDirectory(temporary)
    ):
      tf.gfile.Rename(
        os.path.join(temporary, part),
        os.path.join(os.path.dirname(target), part),
        overwrite=True,
      )
  finally:
    _remove(temporary)


def _remove(folder: str) -> None:
  if tf.gfile.Exists(folder):
    tf.gfile.DeleteRecursively(folder)


def _bits(value: np.ndarray) -> Tuple[object, ...]:
  return (
    value.dtype,
    value.shape,
    value.tolist() if value.dtype == object else value.tobytes(),
  )
