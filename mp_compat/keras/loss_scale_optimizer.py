# SPDX-License-Identifier: Apache-2.0
"""The wrapper of Keras optimizers: both interfaces, the configurations, and the
step.
"""

import contextlib
import dataclasses
import functools
from typing import Any, Callable, Dict, Iterable, Iterator, List, Optional, Type, Union
import weakref

from mp_compat._tensorflow import autograph
from mp_compat._tensorflow import keras_features
from mp_compat._tensorflow import native
from mp_compat._tensorflow import optimizers
from mp_compat._tensorflow import tf
from mp_compat.core import conditional_apply
from mp_compat.core import distribute
from mp_compat.core import gradients
from mp_compat.core import lineage
from mp_compat.core import loss_scale
from mp_compat.core.loss_scale import get_loss_scale
from mp_compat.graph import contexts
from mp_compat.graph import graphs
from mp_compat.graph import op_names
from mp_compat.graph import records
from mp_compat.keras import keras2
from mp_compat.keras import keras3
from mp_compat.keras import optimizer_kinds
from mp_compat.training import step

_SETTINGS = step.Settings()


@dataclasses.dataclass
class KerasState:
  """What a LossScaleOptimizer keeps in a graph (a Session's or a function's), or in
  eager mode.

  Attributes:
    scale: The scale that `get_scaled_loss` read, until `get_unscaled_gradients` uses
      it; None in eager mode.
    takes_scaled: Whether Keras 3's `apply_gradients` takes scaled gradients: True after
      `scale_loss`; else False after `get_unscaled_gradients`; else None.
    has_scaled: Whether a loss was scaled in this graph, or in a function inside of it.
    has_unscaled: Whether `get_unscaled_gradients` was called in them.
    has_unscaled_since: With Keras 3, whether it was called in them after the last
      `scale_loss`; for a warning.
    divides_others: Whether a function of them has Keras 3's `apply_gradients`, which
      divides gradients of other functions.
    unscaled: With Keras 3, the gradients that `get_unscaled_gradients` returned in
      them, by their ids.
  """

  scale: Optional[tf.Tensor] = None
  takes_scaled: Optional[bool] = None
  has_scaled: bool = False
  has_unscaled: bool = False
  has_unscaled_since: bool = False
  divides_others: bool = False
  unscaled: Optional["weakref.WeakValueDictionary[int, Any]"] = None


class LossScaleOptimizer(metaclass=optimizer_kinds.AcceptsNative):
  """Scales the loss for a Keras optimizer, unscales the gradients, and skips steps that
  are not finite.

      opt = LossScaleOptimizer(tf.keras.optimizers.Adam(), "dynamic")
      opt.minimize(lambda: loss(), variables)  # scales and unscales, as does Model.fit

      with tf.GradientTape() as tape:
        loss = opt.get_scaled_loss(...)
      grads = opt.get_unscaled_gradients(tape.gradient(loss, variables))
      opt.apply_gradients(zip(grads, variables))  # on all replicas or none

  The class has two interfaces: `(optimizer, loss_scale)` of TensorFlow 2.0 to 2.3, and
  `(inner_optimizer, dynamic, initial_scale, dynamic_growth_steps)` of 2.4 to 2.15.
  docs/keras.md lists the kinds of inner optimizers, and what differs between versions.
  Public attributes that this class lacks are read from the inner optimizer.

  Source: `tf.keras.mixed_precision.LossScaleOptimizer` and
  `tf.keras.mixed_precision.experimental.LossScaleOptimizer`; Micikevicius et al.,
  "Mixed Precision Training", 2018 (arXiv:1710.03740).
  """

  _stands_for_native = True
  # Attributes of the classes that `concrete_class` returns.
  _kind: optimizer_kinds.OptimizerKind
  _public_class: Type["LossScaleOptimizer"]

  def __init__(
    self,
    optimizer: Optional[optimizers.KerasOptimizer] = None,
    loss_scale: Any = None,
    initial_scale: Optional[float] = None,
    dynamic_growth_steps: Optional[int] = None,
    *,
    dynamic: Optional[bool] = None,
    inner_optimizer: Optional[optimizers.KerasOptimizer] = None,
    opt: Optional[optimizers.KerasOptimizer] = None,
    count_skipped_steps: Optional[bool] = None,
    name: Optional[str] = None,
    **unsupported: object,
  ) -> None:
    """Wraps a Keras optimizer. A bool passed as `loss_scale` means `dynamic`.

    Args:
      optimizer: the inner optimizer; `inner_optimizer` (later form) and `opt`
        (TensorFlow 1.15) are other names for it.
      loss_scale: (earlier form) a number from 1 to 2**126 for a fixed scale, "dynamic",
        or a LossScale, ours or TensorFlow's.
      initial_scale: (later form) the initial or, if not `dynamic`, the fixed scale,
        from 1 (an initial scale of Keras 3: `2**-126`) to `2**126`: a number, or a
        scalar tensor in eager mode. By default `2**15` if `dynamic`, otherwise
        required.
      dynamic_growth_steps: (later form, only if `dynamic`) the number of consecutive
        finite steps after which the scale doubles; at least 1, by default 2000.
      dynamic: (later form) whether the scale changes; True by default.
      count_skipped_steps: whether a skipped step increments `iterations`; by default as
        in Keras's own class: True for Keras 2 from TensorFlow 2.3 on, else False. True
        has no effect on `gradient_accumulation_steps` of Keras 3.
      name: a name, for Keras 3.

    Raises:
      TypeError: If there is not exactly one Keras optimizer, it already scales the
        loss, `dynamic` is not a bool, or an argument is unknown (with Keras 3, a
        ValueError).
      ValueError: If the forms are mixed, an argument is out of its range, the current
        strategy is not supported, or the optimizer is already wrapped (Keras 2 from
        TensorFlow 2.3 on).
      RuntimeError: If Keras 3 has another backend than TensorFlow, or eager execution
        is disabled with Keras 3.
    """
    inner = _inner_of(optimizer, inner_optimizer, opt)
    # A subclass may make the inner optimizer in its constructor, so that the class for
    # its kind is known only now.
    if not hasattr(type(self), "_kind"):
      self.__class__ = optimizer_kinds.concrete_class(type(self), inner)
    if unsupported:
      message = (
        "Unsupported arguments: `{}`. Set them on the `inner_optimizer`.".format(
          "`, `".join(unsupported)
        )
      )
      # as Keras's own classes
      if self._kind.is_keras_3:
        raise ValueError(message)
      raise TypeError(message)
    distribute.check_supported(by_replica=True)
    if isinstance(loss_scale, bool):
      loss_scale, dynamic = None, loss_scale
    later = dict(
      dynamic=dynamic,
      initial_scale=_as_number(initial_scale),
      dynamic_growth_steps=_as_number(dynamic_growth_steps),
    )
    self._loss_scale = _loss_scale_of(loss_scale, later, self._dynamic_arguments)
    if count_skipped_steps is None:
      count_skipped_steps = self._counts_by_default
    self._count_skipped_steps = count_skipped_steps
    self._initialize(inner, name)
    self._track_variables()

  @property
  def inner_optimizer(self) -> optimizers.KerasOptimizer:
    """Returns the wrapped optimizer."""
    return self._optimizer

  @property
  def loss_scale(self) -> Any:
    """Returns what Keras's own class does: up to TensorFlow 2.3 the LossScale, then its
    value, a float32 scalar.
    """
    if keras_features.HAS_LATER_FORM:
      return self._current_scale()
    return self._loss_scale

  lr = keras2.inner_attribute("learning_rate")

  @property
  def dynamic(self) -> bool:
    """Returns whether the loss scale can change."""
    fixed = (loss_scale.FixedLossScale, *native.FIXED_LOSS_SCALES)
    return not isinstance(self._loss_scale, fixed)

  @property
  def dynamic_counter(self) -> Optional[tf.Variable]:
    """Returns the int64 scalar count of finite steps since the scale changed or a step
    was skipped; None if fixed.
    """
    return getattr(self._loss_scale, "_num_good_steps", None)

  @property
  def initial_scale(self) -> Optional[float]:
    """Returns the initial or fixed scale; None if the LossScale's configuration does
    not contain it.
    """
    config = self._loss_scale.get_config()
    return config.get("initial_loss_scale", config.get("loss_scale_value"))

  @property
  def dynamic_growth_steps(self) -> Optional[int]:
    """Returns the number of consecutive finite steps after which the scale grows; None
    for a fixed scale.
    """
    return self._loss_scale.get_config().get("increment_period")

  @autograph.do_not_convert
  def get_scaled_loss(self, loss: Union[float, gradients.Loss]) -> gradients.Loss:
    """Returns `loss * loss_scale`, whose gradients are for `get_unscaled_gradients`; a
    callable for a callable.

    Args:
      loss: a tensor of any shape and floating dtype, a Python float, or a callable that
        returns one.

    Raises:
      ValueError: If the loss is not floating.
    """
    if callable(loss):
      # not an override, which has been called
      return lambda: LossScaleOptimizer.get_scaled_loss(self, loss())
    scale = self._loss_scale_value()
    state = self._state_in(graphs.default_graph())
    state.scale = None
    if not tf.executing_eagerly():
      state.scale = scale
    if state.takes_scaled:  # by an earlier `scale_loss`
      state.takes_scaled = None
    self._state_in(graphs.init_scope_graph()).has_scaled = True
    return gradients.scale_loss(loss, scale)

  @autograph.do_not_convert
  def get_unscaled_gradients(
    self, grads: Iterable[gradients.Gradient]
  ) -> List[gradients.Gradient]:
    """Returns a list with `g * (1 / loss_scale)` for each gradient of a loss that
    `get_scaled_loss` scaled.

    In graphs and functions the finite check of `apply_gradients` also covers them as
    returned, before any clipping.

    Args:
      grads: any iterable of gradients of any shapes and floating dtypes (the results
        have the same), dense, `tf.IndexedSlices` or None.

    Raises:
      TypeError: If a gradient cannot be converted to a tensor, or is not numeric.
    """
    state = self._state_in(graphs.default_graph())
    # In a graph, the scale is read once for the loss and the gradients.
    scale = state.scale
    state.scale = None
    # It cannot be read here if a branch scaled the loss.
    if scale is None or not contexts.is_readable(scale):
      scale = self._loss_scale_value()
    unscaled = self._unscale(grads, scale)
    self._state_in(graphs.init_scope_graph()).has_unscaled = True
    self._record_unscaled(unscaled)
    return unscaled

  def _unscale(
    self, grads: Iterable[gradients.Gradient], scale: tf.Tensor
  ) -> List[gradients.Gradient]:
    """Returns gradients divided by a scale, and records them for the finite check."""
    converted = [gradients.convert(grad) for grad in grads]
    unscaled = gradients.unscale(converted, scale)
    lineage.record(unscaled, ["gradient {}".format(i) for i in range(len(unscaled))])
    return unscaled

  def _state_in(self, graph: Optional[tf.Graph]) -> KerasState:
    """Returns what this optimizer keeps in a graph; in eager mode for None."""
    return records.state_of(self, graph, KerasState)

  def _current_scale(self) -> tf.Tensor:
    """Reads the loss scale; returns a float32 scalar."""
    scale = gradients.readable(tf.cast(self._loss_scale(), tf.float32))
    self._track_variables()
    return scale

  def _loss_scale_value(self) -> tf.Tensor:
    """Returns the scale that a loss is multiplied by, a float32 scalar.

    From TensorFlow 2.4 on, Keras's own class reads the property `loss_scale`, which a
    subclass may override.
    """
    if not keras_features.HAS_LATER_FORM:
      return self._current_scale()
    scale = self.loss_scale
    self._track_variables()
    if callable(scale):  # a LossScale
      scale = scale()
    return gradients.readable(tf.cast(scale, tf.float32))

  def _track_variables(self) -> None:
    """Registers the loss scale's variables with Keras 2, whose Session initializes them
    in graph mode.
    """
    if graphs.init_scope_graph() is not None and not self._kind.is_keras_3:
      for variable in self._loss_scale._weights.values():
        self._kind.module("backend").track_variable(variable)

  def _check_step(self) -> None:
    """Raises an error if no step can be applied in this context; warns if methods were
    never called.
    """
    distribute.check_replica_context(by_replica=True)
    state = self._state_in(graphs.init_scope_graph())
    missing = []
    if not state.has_scaled:
      missing.append("get_scaled_loss()")
    if not state.has_unscaled and not self._kind.is_keras_3:
      missing.append("get_unscaled_gradients()")
    if missing:
      records.warn_once(
        self,
        "A step of a LossScaleOptimizer was applied without %s. The gradients are then "
        "scaled wrongly, or underflow in float16. Call get_scaled_loss() before "
        "gradients are computed and get_unscaled_gradients() after it, or call "
        "minimize(). With Keras 3, you can also call scale_loss() and pass the scaled "
        "gradients to apply().",
        " and ".join(missing),
      )

  def _apply(
    self,
    pairs: keras2.Pairs,
    apply: Callable[[keras2.Pairs], Optional[tf.Operation]],
    check: Optional[keras2.CombineFinite] = None,
  ) -> Optional[tf.Operation]:
    """Calls `apply` in all replicas if all gradients are finite, and updates the scale;
    called in each replica.

    `check` returns the result of the finite check in this replica, a scalar bool
    tensor, from that of this package.
    """
    part = step.prepare(pairs, _SETTINGS)
    step.check_not_of_window(part)
    if check is not None:
      part = part._replace(finite=tf.convert_to_tensor(check(part.finite)))
    apply_or_skip = functools.partial(self._apply_or_skip, apply)
    return distribute.merge_call(apply_or_skip, part)

  def _apply_or_skip(
    self, apply: Callable[[keras2.Pairs], Optional[tf.Operation]], part: step.Part
  ) -> Optional[tf.Operation]:
    """Applies or skips a step; called once for all replicas, with per-replica
    values.
    """
    # Keras needs the distributed variables.
    grads, variables = zip(*part.grads_and_vars)

    def skip() -> Optional[tf.Operation]:
      """Counts the step in `iterations`, if that is wanted. In eager mode, it makes the
      variables that an applied step makes.
      """
      if tf.executing_eagerly():
        self._create_variables(part.grads_and_vars)
      # Keras 3 applies accumulated gradients every few iterations: a skipped
      # micro-batch must not count as one.
      accumulates = vars(self._optimizer).get("gradient_accumulation_steps")
      if not self._count_skipped_steps or accumulates:
        return tf.no_op()
      return distribute.group(self._optimizer.iterations.assign_add(1))

    def apply_in_replica(grads: Any, variables: Any) -> Optional[tf.Operation]:
      return apply(list(zip(grads, variables)))

    with self._keeps_loss_scale_on_error():
      decision = step.decide(self._loss_scale, [part], _SETTINGS)
      applied = conditional_apply.apply_in_each_replica(
        decision.apply[0],
        apply_in_replica,
        grads,
        [variables],
        {},
        part.scope,
        op_names.NOTHING,
        skip,
      )
    return distribute.group(applied, decision.update_op)

  @contextlib.contextmanager
  def _keeps_loss_scale_on_error(self) -> Iterator[None]:
    """Makes an error in an eager step leave the loss scale as it was before the
    step.
    """
    if not tf.executing_eagerly():
      yield
      return
    # TensorFlow's class makes the attribute in its constructor.
    variables = list(getattr(self._loss_scale, "_weights", {}).values())
    values = [variable.read_value() for variable in variables]
    try:
      yield
    except Exception:
      for variable, value in zip(variables, values):
        variable.assign(value)
      raise

  def __getattr__(self, name: str) -> Any:
    """Returns a public attribute of the inner optimizer, which this class lacks."""
    return optimizers.inner_attribute(self, name)

  def __setattr__(self, name: str, value: object) -> None:
    """Sets an attribute of the inner optimizer if only that has it, otherwise one of
    this object.
    """
    if optimizers.sets_inner_attribute(self, name):
      setattr(self._optimizer, name, value)
    else:
      object.__setattr__(self, name, value)

  def get_config(self) -> Dict[str, Any]:
    """Returns the keyword arguments that make an equal optimizer, in the form of this
    Keras's own class.

    Loss scales that the later form cannot express (a custom LossScale, a multiplier
    other than 2) have the earlier. Logs a warning if Keras's own class would not skip
    steps with it.
    """
    if not self.dynamic and not self._kind.is_keras_3:  # Keras 3 raises an error.
      records.warn_once(
        self,
        "A copy or a loaded model with this fixed loss scale has Keras's own "
        "LossScaleOptimizer, which applies steps that are not finite. Copy and load it "
        "in `with custom_object_scope(mp_compat.keras.CUSTOM_OBJECTS)`.",
      )
    inner = self._kind.module("optimizers").serialize(self._optimizer)
    config: Dict[str, Any]
    if keras_features.HAS_LATER_FORM and self._has_scale_of_later_form():
      config = {
        "inner_optimizer": inner,
        "initial_scale": self.initial_scale,
        "dynamic_growth_steps": self.dynamic_growth_steps,
      }
      if not self.dynamic or not self._kind.is_keras_3:
        # Keras 3's own class is always dynamic and does not take it.
        config["dynamic"] = self.dynamic
    else:
      scale = {
        "class_name": type(self._loss_scale).__name__,
        "config": self._loss_scale.get_config(),
      }
      config = {"optimizer": inner, "loss_scale": scale}
    if self._count_skipped_steps != self._counts_by_default:
      config["count_skipped_steps"] = self._count_skipped_steps
    if self._kind.is_keras_3:
      config["name"] = self.name
    return config

  def _has_scale_of_later_form(self) -> bool:
    """Returns whether arguments of the later form can express the loss scale."""
    name = type(self._loss_scale).__name__
    if name != "DynamicLossScale":
      return name == "FixedLossScale"
    expressible = dict(
      initial_loss_scale=self.initial_scale,
      increment_period=self.dynamic_growth_steps,
      multiplier=2.0,
    )
    expressible.update(self._dynamic_arguments)
    return self._loss_scale.get_config() == expressible

  @classmethod
  def from_config(
    cls, config: Dict[str, Any], custom_objects: Optional[Dict[str, Any]] = None
  ) -> "LossScaleOptimizer":
    """Returns an optimizer from a configuration by `get_config` of this class or
    TensorFlow's, of any version.

        inner = the optimizer that the configuration contains
        cls = the public class, if this one is for another kind of optimizers
        if it describes a LossScale: make that
        if it has the later form, and the constructor of `cls` only the earlier form:
          make a LossScale from the arguments of the later form
        cls(inner, **the other arguments)

    Args:
      config: a configuration of either form; is not changed.
      custom_objects: further classes of optimizers and loss scales, by name.

    Raises:
      ValueError: If the configuration names an unknown class. For its arguments, errors
        are those of the constructor.
    """
    arguments = {}
    for key, value in config.items():
      if (key, value) not in keras3.UNUSED_SETTINGS.items():
        arguments[key] = value
    inner_key = "optimizer"
    if "inner_optimizer" in config:
      inner_key = "inner_optimizer"
    serialized = arguments.pop(inner_key)
    kind = getattr(cls, "_kind", None)
    inner = optimizer_kinds.deserialize(kind, serialized, custom_objects)
    inner_kind: Any = optimizer_kinds.kind_of(type(inner))
    if kind not in (None, inner_kind):
      cls = cls._public_class
    takes_later_form = optimizers.takes_argument(cls.__init__, "initial_scale")
    if isinstance(config.get("loss_scale"), dict):
      arguments["loss_scale"] = _deserialize_scale(
        config["loss_scale"], custom_objects or {}
      )
    elif "loss_scale" not in config and not takes_later_form:
      # of the experimental class, or of a program's subclass like it
      later = dict(inner_kind.mixin._dynamic_arguments)
      for name in ("dynamic", "initial_scale", "dynamic_growth_steps"):
        if name in arguments:
          later[name] = arguments.pop(name)
      arguments["loss_scale"] = _later_loss_scale(**later)
    if optimizers.takes_position(cls.__init__):
      return cls(inner, **arguments)
    return cls(inner_optimizer=inner, **arguments)  # a subclass of Horovod


def _inner_of(*given: Optional[optimizers.KerasOptimizer]) -> Any:
  """Returns the argument that is not None; None if all are. Raises a TypeError if there
  are several, or if it scales the loss itself.
  """
  optimizers_given = [optimizer for optimizer in given if optimizer is not None]
  if len(optimizers_given) > 1:
    raise TypeError(
      "Expected one inner optimizer, but several arguments were passed: {}.".format(
        optimizers_given
      )
    )
  if not optimizers_given:
    return None
  (inner,) = optimizers_given
  if isinstance(inner, LossScaleOptimizer):  # also Keras's own
    raise TypeError(
      "A LossScaleOptimizer cannot wrap another, but got: {}. Pass the one inside "
      "it.".format(inner)
    )
  return inner


def _loss_scale_of(
  identifier: Any, later: Dict[str, Any], dynamic_arguments: Dict[str, Any]
) -> loss_scale.AnyLossScale:
  """Returns the LossScale that the constructor's arguments specify.

  Args:
    identifier: `loss_scale`, of the earlier form; None for the later form.
    later: the arguments of the later form, None where none was passed.
    dynamic_arguments: further ones of the DynamicLossScale that this Keras's own class
      makes by default.

  Raises:
    ValueError: If the forms are mixed, or an argument is out of its range.
    TypeError: If `dynamic` is not a bool.
  """
  given = {name: value for name, value in later.items() if value is not None}
  if given and identifier is not None:
    raise ValueError(
      "Arguments of two interfaces were mixed: loss_scale ({!r}) belongs to "
      "(optimizer, loss_scale), and {} to (inner_optimizer, dynamic, initial_scale, "
      "dynamic_growth_steps).".format(identifier, ", ".join(sorted(given)))
    )
  is_dynamic = isinstance(identifier, str) and identifier == "dynamic"
  if identifier is None or is_dynamic:  # both as in this Keras's own class
    return _later_loss_scale(**given, **dynamic_arguments)
  return get_loss_scale(identifier)


def _as_number(value: Any) -> Any:
  """Returns a scalar tensor, variable or array as a float; other values as they are."""
  if hasattr(value, "numpy"):
    value = value.numpy()
  if hasattr(value, "shape"):
    return float(value)
  return value


def _later_loss_scale(
  dynamic: bool = True,
  initial_scale: Optional[float] = None,
  dynamic_growth_steps: Optional[int] = None,
  **dynamic_arguments: Any,
) -> loss_scale.LossScale:
  """Returns the LossScale that the arguments of the later form specify; raises errors
  as `LossScaleOptimizer`.

  `dynamic_arguments` are further ones of a DynamicLossScale.
  """
  if not isinstance(dynamic, bool):
    raise TypeError(
      '"dynamic" argument to LossScaleOptimizer.__init__ must be a bool, but got: '
      "{!r}".format(dynamic)
    )
  if not dynamic:
    if initial_scale is None:
      raise ValueError('"initial_scale" must be specified if "dynamic" is False')
    if dynamic_growth_steps is not None:
      raise ValueError(
        '"dynamic_growth_steps" must be None if "dynamic" is False, but got: {}'.format(
          dynamic_growth_steps
        )
      )
    return loss_scale.FixedLossScale(initial_scale)
  if initial_scale is not None:
    dynamic_arguments["initial_loss_scale"] = initial_scale
  if dynamic_growth_steps is not None:
    dynamic_arguments["increment_period"] = dynamic_growth_steps
  return loss_scale.DynamicLossScale(**dynamic_arguments)


def _deserialize_scale(
  config: Dict[str, Any], custom_objects: Dict[str, Any]
) -> loss_scale.LossScale:
  """Returns the LossScale that a configuration describes, with `class_name` and
  `config`; raises a ValueError for an unknown class.

  `custom_objects` are further classes, by name.
  """
  known: Dict[str, Any] = {
    "FixedLossScale": loss_scale.FixedLossScale,
    "DynamicLossScale": loss_scale.DynamicLossScale,
  }
  known.update(custom_objects)
  name = config["class_name"]
  if name not in known:
    raise ValueError(
      "Unknown loss scale: {}. Expected one of {} and `custom_objects`.".format(
        name, sorted(known)
      )
    )
  return known[name].from_config(config["config"])
