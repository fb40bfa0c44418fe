# SPDX-License-Identifier: Apache-2.0
"""Makes TensorFlow's old names for loss scaling refer to this package, until `uninstall` is called."""

import functools
import importlib
import operator
import re
import sys
import types
from typing import Any, List, Tuple

import mp_compat
from mp_compat._tensorflow import modules
from mp_compat._tensorflow import savers
from mp_compat._tensorflow import tensorflow
from mp_compat._tensorflow import tf
from mp_compat.checkpoints import initialization
from mp_compat.checkpoints import saver
from mp_compat.migration import conditional_names
from mp_compat.migration import old_names

_ABSENT = object()
_MADE = "Made by mp_compat.install()."


class Installation:
  """Records what `install` changed, and undoes it. Also a context manager.

  Attributes:
    patched: The full names that refer to this package now, in order; empty after `uninstall`.
    skipped: Modules that could not be imported and were not changed, as "name: reason".
  """

  def __init__(self) -> None:
    self.patched: List[str] = []
    self.skipped: List[str] = []
    self._undo: List[Tuple[Any, str, Any]] = []

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

  def __exit__(self, *exception: Any) -> None:
    self.uninstall()

  def __repr__(self) -> str:
    return "Installation(patched={}, skipped={})".format(self.patched, self.skipped)

  def _install(self) -> None:
    for path, replacements in old_names.PUBLIC:
      try:
        copies = self._modules(path)
      except ImportError as error:  # Keras is not installed.
        self.skipped.append("tensorflow.{}: {}".format(path, error))
        continue
      for name, new in replacements.items():
        replacement = operator.attrgetter(new.partition(".")[2])(mp_compat)
        for module in copies:
          self._set(module, name, replacement)
        self.patched.append("tensorflow.{}.{}".format(path, name))
    self._install_checkpoints()

  def _install_checkpoints(self) -> None:
    """Makes Saver and `init_from_checkpoint` read every naming scheme, and Saver also write TensorFlow's names."""
    native_saver, init = tf.train.Saver, tf.train.init_from_checkpoint
    saver_restore, saver_build = native_saver.restore, native_saver.build

    @functools.wraps(saver_restore)
    def restore(self: Any, sess: Any, save_path: Any) -> None:
      saver.restore(self, sess, save_path, functools.partial(saver_restore, self))

    @functools.wraps(saver_build)
    def build(self: Any) -> None:
      if self.saver_def is None:
        savers.set_var_list(self, saver.add_tensorflow_names(savers.get_var_list(self)))
      saver_build(self)

    @functools.wraps(init)
    def init_from_checkpoint(ckpt_dir_or_file: Any, assignment_map: Any) -> None:
      init(ckpt_dir_or_file, initialization.assignment_map(ckpt_dir_or_file, assignment_map))

    self._set(native_saver, "restore", restore)
    self._set(native_saver, "build", build)
    for module in self._modules("compat.v1.train") + self._modules("train") + [sys.modules[init.__module__]]:
      if getattr(module, "init_from_checkpoint", None) is init:
        self._set(module, "init_from_checkpoint", init_from_checkpoint)
    self.patched += [
      "tensorflow.compat.v1.train." + name for name in ("Saver.restore", "Saver.build", "init_from_checkpoint")
    ]
    optimizer = mp_compat.MixedPrecisionLossScaleOptimizer
    self._set(
      optimizer,
      "apply_gradients",
      functools.wraps(optimizer.apply_gradients)(conditional_names.record_tensorflow_names(optimizer.apply_gradients)),
    )

  def _modules(self, path: str) -> List[Any]:
    """Returns all copies of the module `tensorflow.path`; creates missing modules.

    TensorFlow keeps its interface in `tensorflow._api`; importing `tensorflow.compat.v1` by name creates a second copy.
    """
    module, full = tensorflow, "tensorflow"
    for part in path.split("."):
      full += "." + part
      if not hasattr(module, part):
        new_module = types.ModuleType(full, _MADE)
        new_module.__path__ = []  # a package: its submodules can be imported
        self._set(module, part, new_module)
      module = getattr(module, part)
      if full not in sys.modules:  # An import would create a copy.
        sys.modules[full] = module
        self._undo.append((sys.modules, full, _ABSENT))
    first, _, rest = path.partition(".")
    real = getattr(sys.modules["tensorflow." + first], "__name__", "")
    if rest and real.startswith("tensorflow_core.") and module.__doc__ != _MADE:
      importlib.import_module("{}.{}".format(real, rest))  # TensorFlow 2.1: importing a submodule creates a copy.
    name = re.compile(r"tensorflow(_core)?(\._api\.v\d)?\." + re.escape(path))
    copies = [copy for key, copy in list(sys.modules.items()) if name.fullmatch(key) and copy is not None]
    return list({id(copy): copy for copy in [module] + copies}.values())

  def _set(self, owner: Any, name: str, value: Any) -> None:
    self._undo.append((owner, name, getattr(owner, name, _ABSENT)))
    setattr(owner, name, value)


_active = None


def install() -> Installation:
  """Makes TensorFlow's old names for loss scaling refer to this package.

      mp_compat.install()                       until the program ends
      with mp_compat.install() as installed:    or within a block
        print(installed.patched)

  Replaces the names for loss scaling in `tf.train.experimental`, `tf.mixed_precision.experimental` and
  `tf.keras.mixed_precision.experimental`, in the same modules of `tf.compat.v1` and `tf.compat.v2`, and in
  `tf.compat.v1.mixed_precision` and `tf.contrib.mixed_precision`. Creates modules that TensorFlow no longer has.
  `tf.compat.v1.train.Saver` and `init_from_checkpoint` then read checkpoints of TensorFlow's classes and of this
  package. Names that the program imported before do not change, so call this first.

  Returns:
    An `Installation`, with `uninstall()`. If the names are installed already, it is empty and changes nothing.
  """
  global _active
  installation = Installation()
  if _active is None:
    _active = installation
    installation._install()
  return installation
