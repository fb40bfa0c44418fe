# SPDX-License-Identifier: Apache-2.0
"""Finds the Keras that an optimizer belongs to, and makes the wrapper class for that
Keras.
"""

import copyreg
import functools
import importlib
import importlib.util
from typing import Any, Dict, NamedTuple, Optional

from mp_compat._tensorflow import tf
from mp_compat.keras import keras2
from mp_compat.keras import keras3


class OptimizerKind(NamedTuple):
  """One kind of Keras optimizer, of one installed Keras.

  Attributes:
    mixin: The base class for wrappers of this kind.
    keras: The package of its modules, such as "keras.src".
    native: This Keras's own LossScaleOptimizer.
  """

  mixin: type
  keras: str
  native: type

  @property
  def is_keras_3(self) -> bool:
    """Returns whether it is a Keras 3."""
    return self.mixin is keras3.Keras3Mixin

  def module(self, name: str) -> Any:
    """Imports and returns a module of this Keras, such as "saving"."""
    return importlib.import_module("{}.{}".format(self.keras, name))


# By name of the base class: the mixin, and the name of the native class.
_MIXINS = {
  "OptimizerV2": (keras2.OptimizerV2Mixin, "LossScaleOptimizer"),
  "_BaseOptimizer": (keras2.OptimizerV3Mixin, "LossScaleOptimizerV3"),
  "BaseOptimizer": (keras3.Keras3Mixin, "LossScaleOptimizer"),
}


def kind_of(optimizer_class: type) -> Optional[OptimizerKind]:
  """Returns the kind of a class of Keras optimizers; None for any other class."""
  for base in optimizer_class.__mro__:
    keras, separator, _ = base.__module__.partition(".optimizer")
    if not separator or base.__name__ not in _MIXINS or "keras" not in keras:
      continue
    mixin, native_name = _MIXINS[base.__name__]
    for package in ("optimizers", "mixed_precision", "mixed_precision.experimental"):
      path = "{}.{}.loss_scale_optimizer".format(keras, package)
      # Every Keras with these classes has one; a program's own base classes do not.
      if _exists(path):
        module = importlib.import_module(path)
        return OptimizerKind(mixin, keras, native=vars(module)[native_name])
  return None


class AcceptsNative(type):
  """The metaclass of classes that replace Keras's own LossScaleOptimizer in old
  programs.

  `isinstance` is also True for Keras's own wrappers, in which `Model.compile` may wrap
  an optimizer, so that a program can check whether its optimizer scales the loss.
  Subclasses follow the usual rule.
  """

  def __call__(cls, *args: Any, **kwargs: Any) -> Any:
    """Constructs a wrapper; the metaclass of Keras's own class knows the arguments of
    the later form only, and passes on the first one by position.
    """
    return type.__call__(cls, *args, **kwargs)

  def __instancecheck__(cls, instance: object) -> bool:
    if super().__instancecheck__(instance):
      return True
    if "_stands_for_native" not in vars(cls):  # a subclass
      return False
    kind = kind_of(type(instance))
    return kind is not None and isinstance(instance, kind.native)


def _exists(module: str) -> bool:
  """Returns whether a module is installed; imports the packages that contain it."""
  try:
    return importlib.util.find_spec(module) is not None
  except ImportError:  # the package itself is missing
    return False


def concrete_class(cls: type, optimizer: object) -> Any:
  """Returns a subclass of `cls` that wraps optimizers like `optimizer` and that Keras
  accepts as its own wrapper.

  Raises:
    TypeError: If `optimizer` is not a Keras optimizer.
  """
  kind = kind_of(type(optimizer))
  if kind is None:
    raise TypeError(
      '"inner_optimizer" must be an instance of OptimizerV2 or of a later Keras '
      "optimizer, but got: {}. Pass an object such as tf.keras.optimizers.SGD(). From "
      "TensorFlow 2.16 on, Keras is not installed with it: `pip install keras` for "
      "Keras 3, or `pip install tf_keras` (and set TF_USE_LEGACY_KERAS=1) for Keras 2. "
      "Wrap a tf.compat.v1.train.Optimizer in "
      "mp_compat.MixedPrecisionLossScaleOptimizer.".format(optimizer)
    )
  return _concrete_of(cls, kind)


@functools.lru_cache(maxsize=None)
def _concrete_of(cls: type, kind: OptimizerKind) -> Any:
  """Returns the subclass of `cls` for a kind, always the same.

      combined = class(cls, kind.mixin, kind.native)    with the metaclasses of both
      class(combined)                                   with one base, for Horovod

  Args:
    cls: `LossScaleOptimizer`, `experimental.LossScaleOptimizer`, or a program's
      subclass of one.
    kind: the kind of the inner optimizer.
  """
  # `Model.compile` accepts only instances of the Keras to which the model belongs, and
  # a process may have several: each has a class, made on first use, so that no Keras is
  # imported for nothing.
  metaclass = type("Metaclass", tuple({type(cls): None, type(kind.native): None}), {})
  copyreg.pickle(metaclass, _reduce_class)
  # Saved models and configurations contain the name and module of a class: those of
  # Keras's own class.
  named: type = cls
  if "_stands_for_native" in vars(cls):
    named = kind.native
  attributes: Dict[str, object] = dict(
    __module__=named.__module__,
    __qualname__=named.__qualname__,
    __doc__=cls.__doc__,
    _kind=kind,
    _public_class=cls,
  )
  name = _registered_name(named, kind)
  combined = metaclass(name, (cls, kind.mixin, kind.native), attributes)
  # Horovod derives a class from the bases of this one. With one base, it finds the
  # metaclass.
  return metaclass(name, (combined,), attributes)


def _reduce_class(cls: Any) -> Any:
  """Returns what `pickle` writes for a class: its name, or the call that makes it.

  Under the name of a class that `_concrete_of` returned, it would find Keras's own.
  """
  if cls is not _concrete_of(cls._public_class, cls._kind):
    return cls.__qualname__  # a subclass
  return _concrete_of, (cls._public_class, cls._kind)


def _registered_name(cls: type, kind: OptimizerKind) -> str:
  """Returns the name under which Keras finds a class: "package>name" if it is
  registered, else its own name.
  """
  standalone = "tf_keras"
  if kind.is_keras_3:
    standalone = "keras"
  keras = tf.keras
  if kind.keras.startswith(standalone + ".src"):
    keras = importlib.import_module(standalone)
  get_registered_name = getattr(keras.utils, "get_registered_name", None)
  if get_registered_name is None:  # TensorFlow 1.15 has no registry
    return cls.__name__
  return get_registered_name(cls)


def deserialize(
  kind: Optional[OptimizerKind], config: Any, custom_objects: Optional[Dict[str, Any]]
) -> Any:
  """Returns the optimizer that `config` describes, of the Keras of `kind`.

  `kind` is None for that of `tf.keras`, or of tf_keras for a configuration that only
  Keras 2 can read.
  """
  if kind_of(type(config)) is not None:
    return config
  if kind is None:
    kind = _kind_for(config)
  # `optimizers.deserialize` lacks some of its optimizers
  if kind.is_keras_3 and "module" in config:
    return kind.module("saving").deserialize_keras_object(
      config, custom_objects=custom_objects
    )
  # Keras modifies the configuration.
  made = kind.module("optimizers").deserialize(
    dict(config), custom_objects=custom_objects
  )
  # Keras 2.13 on knows some of its optimizers by name only, such as Lion
  if isinstance(made, str):
    optimizer_class = vars(kind.module("optimizers." + made.lower()))[made]
    return optimizer_class.from_config(config["config"])
  return made


def _kind_for(config: Any) -> OptimizerKind:
  """Returns the kind of the optimizers of `tf.keras`; of tf_keras for a configuration
  that only Keras 2 can read.

  Raises:
    ValueError: If tf_keras is needed, but not installed.
  """
  kind = kind_of(tf.keras.optimizers.SGD)
  assert kind is not None  # They are Keras optimizers.
  only_in_keras_2 = {"decay", "is_legacy_optimizer"}
  if not kind.is_keras_3 or only_in_keras_2.isdisjoint(config["config"]):
    return kind
  if not _exists("tf_keras"):
    raise ValueError(
      "Expected a configuration of a Keras 3 optimizer, but this is one of Keras "
      "2. `pip install tf_keras` to load it. Got: {}".format(config)
    )
  kind = kind_of(importlib.import_module("tf_keras").optimizers.SGD)
  assert kind is not None
  return kind
