# SPDX-License-Identifier: Apache-2.0
"""Inspects checkpoints and converts them to other naming schemes."""

import collections
import os
import platform
from types import MappingProxyType
from typing import Dict, List, Mapping, NamedTuple, Optional, Tuple

import numpy as np

from mp_compat._tensorflow import tf
from mp_compat.checkpoints import files
from mp_compat.core import matching
from mp_compat.core import naming_schemes
from mp_compat.core import translation
from mp_compat.core.naming_schemes import NamingScheme


class Inspection(NamedTuple):
  """The content of a checkpoint.

  Attributes:
    path: The path of the checkpoint.
    naming_scheme: one of those of `convert`, or "object-based".
    variables: The dtype and the shape of each variable, by name.
    state: The values of the loss scale's variables, by name.
  """

  path: str
  naming_scheme: str
  variables: "collections.OrderedDict[str, Tuple[tf.DType, Tuple[int, ...]]]"
  state: "collections.OrderedDict[str, np.ndarray]"


def inspect(path: files.Path) -> Inspection:
  """Returns the variables in a checkpoint, its naming scheme and the state of its loss
  scale.

  Args:
    path: a checkpoint, or a directory, of which the latest checkpoint is used.

  Returns:
    An `Inspection`, with dtypes, shapes and the values of the loss scale's variables.

  Raises:
    ValueError: If there is no checkpoint at `path`.
    tf.errors.DataLossError: If the checkpoint is truncated or corrupt.
  """
  checkpoint = files.Checkpoint(files.resolve_path(path))
  shapes = checkpoint.shapes
  scheme = naming_schemes.recognize(shapes).name
  names = list(naming_schemes.state(shapes))
  if checkpoint.is_object_based:
    scheme = "object-based"
    for name in sorted(shapes):
      if naming_schemes.is_state_name(name.partition("/.ATTR")[0]):
        names.append(name)
  variables = [
    (name, (checkpoint.dtypes[name], shapes[name])) for name in sorted(shapes)
  ]
  return Inspection(
    path=checkpoint.path,
    naming_scheme=scheme,
    variables=collections.OrderedDict(variables),
    state=collections.OrderedDict((name, checkpoint.read(name)) for name in names),
  )


def convert(
  source: files.Path,
  target: files.Path,
  to: Optional[str] = None,
  like: Optional[files.Path] = None,
  name_map: Mapping[str, str] = MappingProxyType({}),
) -> Inspection:
  """Writes a checkpoint with the names of another naming scheme or program, and
  verifies it by reading it back.

  A loss scale that `source` lacks starts at 2**15, with counts of 0.

      names = for each name in the new checkpoint, the name in `source` to copy from
      values = those in `source`, or initial values of state that it lacks
      write them to a temporary directory, read them back, and compare
      move the files to `target`, which becomes the latest checkpoint

  Args:
    source: a checkpoint, or a directory, of which the latest checkpoint is used. It is
      not changed.
    target: the path of the checkpoint to write. The index is moved there last: no
      partial checkpoint can be read. It becomes the latest one of its directory
      (`tf.train.latest_checkpoint`).
    to: one of "mp_compat", "tensorflow" (control flow v1), "tensorflow_v2", "contrib"
      and "plain". The names are those of a program that builds no other conditionals
      than the optimizer's. The `.meta` file of `source` tells the order of several
      optimizers' variables.
    like: instead of `to`, a checkpoint (or a directory) of the program that will
      restore `target`: its names are used. TensorFlow's class names Adam's powers after
      the enclosing conditional: `cond_3/beta1_power` if the program itself builds two.
    name_map: names in `source` by those to write, for variables of which an error says
      that they are not certain. Those by "nothing", "nothing_1" and so on are left
      out: a program that lacks their optimizers restores the checkpoint.

  Returns:
    An `Inspection` of the checkpoint at `target`.

  Raises:
    ValueError: If there is no checkpoint at `source` or `like`, `source` is
      object-based, `to` is unknown, `name_map` has a name that is not there, `target`
      exists or contains brackets, `like` has variables that are not in `source`, the
      names or values of several optimizers' variables are not certain, or not exactly
      one of `to` and `like` is given.
    tf.errors.DataLossError: If the checkpoint is truncated or corrupt, or was not
      written correctly.
  """
  if (to is None) == (like is None):
    raise ValueError(
      "Expected either a naming scheme (`to`) or a checkpoint (`like`), but got "
      "to={!r} and like={!r}.".format(to, like)
    )
  checkpoint = files.Checkpoint(files.resolve_path(source))
  path: str = tf.compat.as_str_any(target)
  if checkpoint.is_object_based:
    raise ValueError(
      "{} was written by tf.train.Checkpoint. Its names are the same in every naming "
      "scheme, so it needs no conversion. To restore it without loss scaling, use "
      "tf.train.Checkpoint(optimizer=opt.inner_optimizer).".format(checkpoint.path)
    )
  files.check_no_pattern(path)
  if files.checkpoint_exists(path) or tf.gfile.Exists(path):
    raise ValueError(
      "{} exists and is not overwritten. Pass another path.".format(path)
    )
  if to is not None:
    _check_names(name_map, checkpoint, None)
    found = checkpoint.variables_without(name_map.values())
    names = translation.translate(found, to, checkpoint.have_equal_values, name_map)
    for name in name_map:
      if _is_left_out(name):
        del names[name]
    scheme = naming_schemes.SCHEMES[to]
  else:
    assert like is not None  # checked above
    example = files.Checkpoint(files.resolve_path(like))
    _check_names(name_map, checkpoint, example)
    names = _names_like(example, checkpoint, name_map)
    scheme = naming_schemes.recognize(example.shapes)
  _write(_values(checkpoint, names, scheme), path)
  return inspect(path)


class _Value(NamedTuple):
  """The value of a variable to write.

  Attributes:
    array: The value; of quantized dtypes, an array of ints.
    dtype: The dtype of the variable.
  """

  array: np.ndarray
  dtype: tf.DType


def _make_latest(path: str) -> None:
  """Makes a checkpoint the latest of its directory, from which sessions and Estimators
  continue.
  """
  directory = os.path.dirname(path) or "."
  state = tf.train.get_checkpoint_state(directory)
  others = state.all_model_checkpoint_paths if state else []
  tf.train.update_checkpoint_state(directory, path, [*others, path])


def _check_names(
  name_map: Mapping[str, str],
  source: files.Checkpoint,
  like: Optional[files.Checkpoint],
) -> None:
  """Raises a ValueError if `name_map` has a name that is not in `source` or `like`, or
  one of `source` twice.
  """
  counts = collections.Counter(name_map.values())
  for target, name in sorted(name_map.items()):
    is_target = like is None or target in like.shapes or _is_left_out(target)
    if not is_target or name not in source.shapes or counts[name] > 1:
      raise ValueError(
        "Expected in the name map names in {} by names to write, each once, but got {} "
        "as {}. It has: {}.".format(
          source.path, name, target, ", ".join(sorted(source.shapes))
        )
      )


def _is_left_out(target: str) -> bool:
  """Returns whether a name in a map is that of a variable that is not written."""
  return naming_schemes.parse(target).stem == "nothing"


def _names_like(
  like: files.Checkpoint,
  source: files.Checkpoint,
  name_map: Mapping[str, str],
) -> Dict[str, Optional[str]]:
  """Returns for each name in `like` the name in `source` to copy from, which is that in
  `name_map`, if it has one; None for state that starts anew. Raises a ValueError if the
  names are not certain, or missing.
  """
  matched = matching.match(
    like.shapes.keys() - name_map.keys(),
    like.variables_without(name_map),
    source.variables_without(name_map.values()),
    source.have_equal_values,
  )
  matched.names.update(name_map)
  if matched.ambiguous:
    raise ValueError(files.ambiguity(matched, source.path))
  required = like.shapes.keys() - naming_schemes.state(like.shapes).keys()
  missing = required - matched.names.keys()
  if missing:
    raise ValueError(
      "Expected the variables of {}. {} If a loss scale of your own adds variables, "
      "restore the checkpoint with mp_compat.checkpoints.Saver instead.".format(
        like.path, files.missing(missing, source)
      )
    )
  return {name: matched.names.get(name) for name in like.shapes}


def _values(
  source: files.Checkpoint, names: Mapping[str, Optional[str]], scheme: NamingScheme
) -> Dict[str, _Value]:
  """Returns the values to write by name.

      a name with one in `source`: the value there, with its dtype
      a variable of a loss scale: that value, or else its initial value in `scheme`,
        converted to its dtype in `scheme`, such as int32 counts to int64

  Args:
    source: the checkpoint to copy from.
    names: for each name to write, that in `source`; None for a variable of a loss scale
      to add.
    scheme: the naming scheme to write, with the dtypes and the initial values of the
      loss scale's variables.
  """
  shapes = {name: source.shapes[old] if old else () for name, old in names.items()}
  roles = naming_schemes.state(shapes)
  values: Dict[str, _Value] = {}
  for name, old in names.items():
    if old and name not in roles:
      values[name] = _Value(source.read(old), source.dtypes[old])
      continue
    variable = scheme.variable(roles[name])
    dtype = tf.as_dtype(variable.dtype)
    array = source.read(old) if old else np.asarray(variable.initial)
    converted = array.astype(dtype.as_numpy_dtype)
    if dtype.is_integer and converted != array:
      raise ValueError(
        "{} is {}, which is no {}: expected the count of a loss scale. Rename the "
        "variable of the program that has this name.".format(old, array, dtype.name)
      )
    values[name] = _Value(converted, dtype)
  return values


def _write(values: Dict[str, _Value], target: str) -> None:
  """Writes a checkpoint to a temporary directory, compares it with `values`, and moves
  it to `target`, which becomes the latest checkpoint of its directory.
  """
  temporary = "{}.unfinished-{}-{}".format(target, platform.node(), os.getpid())
  tf.gfile.MakeDirs(temporary)
  try:
    prefix = os.path.join(temporary, os.path.basename(target))
    _save(values, prefix)
    written = files.Checkpoint(prefix)
    for name in sorted(values):
      if written.bits(name) != files.bits(*values[name]):
        raise tf.errors.DataLossError(
          None,
          None,
          "{} in {} differs from the value that was written.".format(name, prefix),
        )
    tf.gfile.Rename(
      prefix + ".data-00000-of-00001", target + ".data-00000-of-00001", overwrite=True
    )
    _make_latest(target)
    # The index is last: without it, there is no checkpoint, and none that is not the
    # latest. The same conversion can then be run again.
    tf.gfile.Rename(prefix + ".index", target + ".index", overwrite=True)
  finally:
    # In memory, a folder without files does not exist.
    if tf.gfile.Exists(temporary):
      tf.gfile.DeleteRecursively(temporary)


def _save(values: Dict[str, _Value], prefix: str) -> None:
  """Writes the files of a checkpoint."""
  with tf.Graph().as_default(), tf.Session() as sess:
    feeds: Dict[tf.Tensor, np.ndarray] = {}
    tensors: List[tf.Tensor] = []
    for name in sorted(values):
      array, dtype = values[name]
      placeholder = tf.placeholder(dtype, array.shape)
      feeds[placeholder] = array.astype(dtype.as_numpy_dtype)
      tensors.append(placeholder)
    save = tf.raw_ops.SaveV2(
      prefix=prefix,
      tensor_names=sorted(values),
      shape_and_slices=[""] * len(values),
      tensors=tensors,
    )
    sess.run(save, feeds)
