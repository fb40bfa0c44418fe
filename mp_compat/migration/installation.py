# SPDX-License-Identifier: Apache-2.0
"""Makes TensorFlow's old names for loss scaling refer to this package, until
`uninstall` is called.
"""

import functools
import importlib
import inspect
import operator
import re
import sys
import types
from typing import Callable, List, Tuple

import mp_compat
from mp_compat._tensorflow import modules
from mp_compat._tensorflow import tensorflow
from mp_compat._tensorflow import tf
from mp_compat.checkpoints import files
from mp_compat.checkpoints import initialization
from mp_compat.checkpoints import saver
from mp_compat.migration import old_names

_ABSENT = object()
_MADE = "Made by mp_compat.install()."


class Installation:
  """Records what `install` changed, and undoes it. Also a context manager.

  Attributes:
    patched: The full names that refer to this package now, in order; empty after
      `uninstall`.
    skipped: Modules that could not be imported and were not changed, as "name: reason".
  """

  def __init__(self) -> None:
    self.patched: List[str] = []
    self.skipped: List[str] = []
    # an owner, a name in it, and its value before
    self._undo: List[Tuple[object, str, object]] = []

  def uninstall(self) -> None:
    """Undoes all changes. A second call does nothing."""
    global _active
    while self._undo:
      owner, name, before = self._undo.pop()
      if isinstance(owner, dict):
        owner.pop(name, None)
      elif before is _ABSENT:
        modules.delete_attribute(owner, name)
      else:
        setattr(owner, name, before)
    if _active is self:
      _active = None
    self.patched = []

  def __enter__(self) -> "Installation":
    return self

  def __exit__(self, *exception: object) -> None:
    self.uninstall()

  def __repr__(self) -> str:
    return "Installation(patched={}, skipped={})".format(self.patched, self.skipped)

  def _install(self) -> None:
    """Makes the public names, and the functions for checkpoints, refer to this
    package.
    """
    for path, replacements in old_names.PUBLIC:
      try:
        copies = self._modules(path)
      except ImportError as error:  # Keras is not installed.
        self.skipped.append("tensorflow.{}: {}".format(path, error))
        continue
      for name, new in replacements.items():
        _, _, path_here = new.partition(".")
        replacement = operator.attrgetter(path_here)(mp_compat)
        for module in copies:
          self._set(module, name, replacement)
        self.patched.append("tensorflow.{}.{}".format(path, name))
    self._install_checkpoints()

  def _install_checkpoints(self) -> None:
    """Makes TensorFlow read checkpoints of every naming scheme."""
    self._set(tf.train.Saver, "restore", saver.restore)
    self._replace(tf.train.NewCheckpointReader, files.open_with_own_names)
    self._replace(
      tf.train.init_from_checkpoint,
      _with_names_in_checkpoint(tf.train.init_from_checkpoint),
    )
    self.patched += [
      "tensorflow.compat.v1.train.Saver.restore",
      "tensorflow.compat.v1.train.NewCheckpointReader",
      "tensorflow.compat.v1.train.init_from_checkpoint",
    ]
    if hasattr(tensorflow.contrib, "framework"):  # TensorFlow 1.15
      init = tensorflow.contrib.framework.init_from_checkpoint
      self._replace(init, _with_names_in_checkpoint(init))
      self.patched.append("tensorflow.contrib.framework.init_from_checkpoint")

  def _replace(
    self, function: Callable[..., object], replacement: Callable[..., object]
  ) -> None:
    """Replaces a function of `tf.train` or `tf.contrib` in all of TensorFlow's modules
    that have it.
    """
    name = function.__name__
    interface = self._modules("compat.v1.train") + self._modules("train")
    owners = [module for module in interface if getattr(module, name, None) is function]
    for key, module in list(sys.modules.items()):
      if (
        key.startswith("tensorflow")
        and isinstance(module, types.ModuleType)
        and vars(module).get(name) is function
      ):
        owners.append(module)
    for module in owners:
      self._set(module, name, replacement)

  def _modules(self, path: str) -> List[types.ModuleType]:
    """Returns all copies of the module `tensorflow.path`; creates missing modules.

    TensorFlow keeps its interface in `tensorflow._api`; importing
    `tensorflow.compat.v1` by name creates a second copy.

        for each part of the path:
          create the module, in all copies of the one around it, if it is missing
          make it importable by its full name
        return all copies of the last module

    Args:
      path: a name with dots, without `tensorflow.`, such as "compat.v1.train".

    Raises:
      ImportError: If the path leads into Keras, and Keras is not installed.
    """
    module, full = tensorflow, "tensorflow"
    for part in path.split("."):
      if not modules.has_attribute(module, part):
        new_module = types.ModuleType("{}.{}".format(full, part), _MADE)
        new_module.__path__ = []  # a package: its submodules can be imported
        for copy in _copies(module, full):
          self._set(copy, part, new_module)
      module, full = getattr(module, part), "{}.{}".format(full, part)
      if full not in sys.modules:  # An import would create a copy.
        sys.modules[full] = module
        self._undo.append((sys.modules, full, _ABSENT))
    first, _, rest = path.partition(".")
    real = sys.modules["tensorflow." + first].__name__
    if rest and real.startswith("tensorflow_core.") and module.__doc__ != _MADE:
      # TensorFlow 2.1: importing a submodule creates a copy.
      importlib.import_module("{}.{}".format(real, rest))
    return _copies(module, full)

  def _set(self, owner: object, name: str, value: object) -> None:
    """Sets an attribute of a module or class, and remembers how to undo that."""
    self._undo.append((owner, name, getattr(owner, name, _ABSENT)))
    setattr(owner, name, value)


def _copies(module: types.ModuleType, full: str) -> List[types.ModuleType]:
  """Returns a module of TensorFlow's interface, whose name is `full`, and all copies of
  it that were imported.
  """
  name = re.compile(
    r"tensorflow(_core)?(\._api\.v\d)?" + re.escape(full[len("tensorflow") :])
  )
  copies = [
    copy
    for key, copy in list(sys.modules.items())
    if name.fullmatch(key) and copy is not None
  ]
  return list({id(copy): copy for copy in [module] + copies}.values())


def _with_names_in_checkpoint(
  init_from_checkpoint: Callable[..., None],
) -> Callable[..., None]:
  """Returns an `init_from_checkpoint` that takes an assignment map with the names of
  any naming scheme.
  """

  @functools.wraps(init_from_checkpoint)
  def init(*args: object, **kwargs: object) -> None:
    path, wanted = inspect.signature(init_from_checkpoint).bind(*args, **kwargs).args
    init_from_checkpoint(path, initialization.assignment_map(path, wanted))

  return init


_active = None


def install() -> Installation:
  """Makes TensorFlow's old names for loss scaling refer to this package.

      mp_compat.install()                       until the program ends
      with mp_compat.install() as installed:    or within a block
        print(installed.patched)

  Replaces the names for loss scaling in `tf.train.experimental`,
  `tf.mixed_precision.experimental` and `tf.keras.mixed_precision.experimental`, in the
  same modules of `tf.compat.v1` and `tf.compat.v2`, and in
  `tf.compat.v1.mixed_precision` and `tf.contrib.mixed_precision`. Creates modules that
  TensorFlow no longer has. `tf.compat.v1.train.Saver`, `init_from_checkpoint` and the
  checkpoint readers then know the names of TensorFlow's classes and of this package.
  Names that the program imported before do not change, so call this first.

  Returns:
    An `Installation`, with `uninstall()`. If the names are installed already, it is
    empty and changes nothing.
  """
  global _active
  installation = Installation()
  if _active is None:
    _active = installation
    installation._install()
  return installation
