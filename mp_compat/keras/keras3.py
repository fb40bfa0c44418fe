# SPDX-License-Identifier: Apache-2.0
"""The mixin of the Keras wrapper for Keras 3 with the TensorFlow backend."""

import functools
import sys
from typing import IO, Any, Callable, Dict, Iterable, List, Optional, Sequence
import weakref

from mp_compat._tensorflow import autograph
from mp_compat._tensorflow import optimizers
from mp_compat._tensorflow import tf
from mp_compat._tensorflow import trackable
from mp_compat.core import gradients
from mp_compat.core import loss_scale
from mp_compat.graph import graphs
from mp_compat.graph import records
from mp_compat.keras import keras2

# Settings of Keras 3 optimizers that the wrapper does not use, with the defaults in
# configurations of earlier wrappers.
UNUSED_SETTINGS: Dict[str, object] = dict(
  use_ema=False, ema_momentum=0.99, ema_overwrite_frequency=None
)
UNUSED_SETTINGS.update(
  dict.fromkeys(["weight_decay", "clipnorm", "global_clipnorm", "clipvalue"])
)
UNUSED_SETTINGS.update(
  dict.fromkeys(["loss_scale_factor", "gradient_accumulation_steps"])
)

_Variable = Any  # a tf.Variable or a Variable of Keras 3
_Apply = Callable[[keras2.Pairs], object]

# The names of a loss scale's variables in Keras's own class.
_NAMES_IN_KERAS = {
  "current_loss_scale": "dynamic_scale",
  "good_steps": "step_counter",
}


_CANNOT_TELL = (
  "A LossScaleOptimizer has gradients that get_unscaled_gradients() returned in one "
  "function, and applies gradients in another. It cannot tell whether these are "
  "scaled, and would divide them by the loss scale, as Keras's own class does. Call "
  "get_unscaled_gradients() in the function that calls apply_gradients(). Or do not "
  "call it: compute gradients of scale_loss(loss), and pass them, or their sum, to "
  "apply(), in any function."
)


def _map_gradients(
  function: Callable[[List[gradients.Gradient]], List[gradients.Gradient]],
  grads: Sequence[gradients.Gradient],
  variables: Sequence[_Variable],
) -> List[gradients.Gradient]:
  """Returns `function(grads)`, but new values of variables as they are.

  The "gradient" of a variable with `overwrite_with_gradient` is its new value, which is
  not scaled; `function` gets None for it.

  Args:
    function: scales or unscales a list of gradients; returns as many.
    grads: gradients, or new values, side by side with `variables`.
    variables: variables of Keras 3 or TensorFlow.
  """
  given: List[gradients.Gradient] = []
  values = {}  # by their places
  for place, (grad, variable) in enumerate(zip(grads, variables)):
    if getattr(variable, "overwrite_with_gradient", False):
      values[place] = grad
      given.append(None)
    else:
      given.append(grad)
  mapped = list(function(given))
  for place, value in values.items():
    mapped[place] = value
  return mapped


def _check_layout(variables: Any) -> None:
  """Raises a ValueError if the checkpoint is one of an optimizer without loss scaling.

  `variables` is the position in it of the optimizer's list of variables, which the
  class of this package does not have as a child.
  """
  for node in variables.checkpoint.object_graph_proto.nodes:
    names = {child.local_name: child.node_id for child in node.children}
    if names.get("_variables") == variables.proto_id and "inner_optimizer" in names:
      return
  raise ValueError(
    "Expected a checkpoint of a LossScaleOptimizer, but got one of an optimizer "
    "without loss scaling. Restore it into the inner optimizer: "
    "tf.train.Checkpoint(optimizer=opt.inner_optimizer). If it is the checkpoint of a "
    "compiled model, restore it after model.compile(inner_optimizer), and then call "
    "model.compile(LossScaleOptimizer(inner_optimizer))."
  )


class Keras3Mixin(keras2.AnyBase):
  """Makes the wrapper an `Optimizer` of Keras 3, which itself calls `scale_loss`, and
  `apply` with scaled gradients.
  """

  _dynamic_arguments = {"min_loss_scale": 2.0**-126}  # Keras 3's own class has no bound
  _counts_by_default = False
  exclude_from_weight_decay = keras2.inner_attribute("exclude_from_weight_decay")

  def _initialize(self, inner: optimizers.KerasOptimizer, name: Optional[str]) -> None:
    """Wraps an optimizer, and makes the variables and checkpoint keys of Keras's class,
    whose variables Keras 3 alone saves; the loss scale is set already.

    Raises:
      RuntimeError: If the backend is not TensorFlow, or eager execution is disabled.
    """
    self._check_runtime(inner)
    super(self._kind.native, self).__init__(learning_rate=0.0, name=name)
    for setting in UNUSED_SETTINGS:  # the inner optimizer's are read instead
      self.__dict__.pop(setting, None)
    # Attributes that are set from now on are the inner optimizer's.
    self._optimizer = inner
    inner.loss_scale_factor = None  # It would unscale a second time.
    tracked = dict(
      inner_optimizer=inner,
      _iterations=self._iterations,
      _learning_rate=self._learning_rate,
    )
    if isinstance(self._loss_scale, loss_scale.LossScale):
      tracked.update(self._make_state(self._loss_scale))
    else:
      tracked["loss_scale"] = self._loss_scale
    for key, child in tracked.items():
      trackable.track(self, child, key)
    # Keras variables: finite steps since the last change, int64, and the scale,
    # float32; None if it lacks them.
    for keras_name in _NAMES_IN_KERAS.values():
      self.__dict__[keras_name] = tracked.get(keras_name)

  def _make_state(self, scale: loss_scale.LossScale) -> Dict[str, _Variable]:
    """Makes Keras variables for the state of a loss scale, which uses them from now on;
    returns them by their names in Keras.
    """
    weights = scale._graph_variables()
    made = {}
    # good_steps, current_loss_scale: Keras 3's order
    for name in sorted(weights, reverse=True):
      keras_name = _NAMES_IN_KERAS.get(name, name)
      dtype = weights[name].dtype.name
      initial = self._kind.module("initializers").Constant(weights[name].numpy())
      made[keras_name] = self.add_variable(
        (), initial, dtype, aggregation="none", name=keras_name
      )
      weights[name] = made[keras_name].value
    return made

  def _check_runtime(self, inner: optimizers.KerasOptimizer) -> None:
    """Raises a RuntimeError if Keras 3 cannot train with TensorFlow here."""
    backend = sys.modules[self._kind.keras + ".backend"].backend()
    if backend != "tensorflow":
      raise RuntimeError(
        "mp_compat.keras needs Keras 3's TensorFlow backend, but the backend is {}. "
        "Set KERAS_BACKEND=tensorflow before importing keras.".format(backend)
      )
    if not tf.compat.v1.executing_eagerly_outside_functions():
      raise RuntimeError(
        "Keras 3 does not train in graphs, but eager execution is disabled. Pass an "
        "optimizer of Keras 2 (`pip install tf_keras`): "
        "tf_keras.optimizers.legacy.{}.".format(type(inner).__name__)
      )

  @property
  def _deferred_dependencies(self) -> Dict[str, List[Any]]:
    """Returns what a restored checkpoint has for objects that are missing, by name.

    TensorFlow asks for it while it restores.

    Raises:
      ValueError: If the checkpoint is one of an optimizer without loss scaling.
    """
    deferred = super()._deferred_dependencies
    for position in deferred.get("_variables", ()):
      _check_layout(position)
    return deferred

  def build(self, var_list: List[_Variable]) -> None:
    """Makes the inner optimizer's variables for the trainable variables `var_list`."""
    # As in Keras's class, what the inner optimizer sets is not tracked.
    tracking = self._kind.module("utils.tracking")
    build = tracking.no_automatic_dependency_tracking(self._optimizer.build)
    build(var_list)
    self._trainable_variables = list(var_list)
    self.built = True

  def set_weights(self, weights: List[Any]) -> None:
    """Sets all variables, in the order of `variables`; called by `load_model` for
    HDF5.
    """
    super(self._kind.native, self).set_weights(weights)
    self._optimizer.set_weights(weights[len(self._variables) :])

  @classmethod
  def _unpickle_model(cls, file: IO[bytes]) -> "Keras3Mixin":
    """Returns a model from its pickled form; otherwise Keras finds its own class."""
    with cls._kind.module("saving").custom_object_scope({cls.__name__: cls}):
      return super()._unpickle_model(file)

  def scale_loss(self, loss: tf.Tensor) -> tf.Tensor:
    """Returns `loss * loss_scale`, whose gradients are for `apply`; raises a ValueError
    if `loss` is not floating.
    """
    for state in self._states_here():
      state.takes_scaled = True
    outer = self._state_in(graphs.init_scope_graph())
    outer.has_scaled, outer.has_unscaled_since = True, False
    return gradients.scale_loss(loss, self._current_scale())

  @autograph.do_not_convert
  def minimize(
    self,
    loss: Callable[[], tf.Tensor],
    var_list: Any,
    grad_loss: Optional[tf.Tensor] = None,
  ) -> None:
    """Computes gradients of the scaled loss, unscales and applies them; arguments as
    for Keras 2's `minimize`.
    """
    with tf.GradientTape() as tape:
      scaled = self.get_scaled_loss(loss())
    if callable(var_list):
      var_list = var_list()
    variables = tf.nest.flatten(var_list)
    grads = self.get_unscaled_gradients(tape.gradient(scaled, variables, grad_loss))
    # An override of one of these methods may not call that of this class.
    self._state_in(graphs.default_graph()).takes_scaled = False
    self.apply_gradients(zip(grads, variables))

  @autograph.do_not_convert
  def apply(
    self,
    grads: Sequence[gradients.Gradient],
    trainable_variables: Optional[Sequence[Any]] = None,
  ) -> None:
    """Unscales and applies the gradients on all replicas, or on none if any is not
    finite, and updates the loss scale.

    Raises errors as `apply_gradients` of Keras 2.

    Args:
      grads: gradients of a scaled loss.
      trainable_variables: as many variables; those of `build` by default.
    """
    if self._are_unscaled(grads, any):
      raise ValueError(
        "apply() of a LossScaleOptimizer takes gradients of a scaled loss, which it "
        "divides by the loss scale, but got gradients that get_unscaled_gradients() "
        "returned. Pass them to apply_gradients(), or pass the gradients of "
        "scale_loss() to apply()."
      )
    variables = list(trainable_variables or self._trainable_variables)

    def apply(pairs: keras2.Pairs) -> None:
      """Calls the inner optimizer's `apply`, which takes two lists."""
      inner_grads, inner_variables = zip(*pairs)
      self._optimizer.apply(list(inner_grads), list(inner_variables))

    self._apply_scaled(grads, variables, apply)

  @autograph.do_not_convert
  def apply_gradients(
    self, grads_and_vars: Iterable[gradients.GradAndVar]
  ) -> _Variable:
    """Applies gradients as `apply` does; does not unscale those of
    `get_unscaled_gradients` (docs/keras.md).

    Takes (gradient, variable) pairs, and returns `iterations`. Raises a ValueError if
    it cannot tell whether the gradients are unscaled.
    """
    grads: Sequence[gradients.Gradient]
    grads, variables = zip(*grads_and_vars)
    are_scaled = self._takes_scaled(grads)
    if self._overrides("apply", Keras3Mixin):  # Keras's own class calls it
      if not are_scaled:
        grads = self._scaled(grads, variables)
      self.apply(grads, variables)
    elif are_scaled:
      self._apply_scaled(grads, variables, self._optimizer.apply_gradients)
    else:
      self._apply_step(grads, variables, self._optimizer.apply_gradients)
    return self.iterations

  def _overrides(self, method: str, base: type) -> bool:
    """Returns whether a subclass overrides a method of `base`."""
    own = getattr(getattr(self, method), "__func__", None)
    return own is not getattr(base, method)

  def _takes_scaled(self, grads: Iterable[gradients.Gradient]) -> bool:
    """Returns whether `apply_gradients` unscales gradients; raises a ValueError if it
    cannot tell.

        gradients that get_unscaled_gradients() returned     not scaled
        what this function did last, or a graph around it    as `KerasState` says
        otherwise                                            scaled, as in Keras's class

    The last case raises the error if `get_unscaled_gradients` was called elsewhere, in
    another function: these may be its gradients, or derive from them. A function keeps
    this answer for all later calls, so that the state outside notes it
    (`divides_others`), and a later `get_unscaled_gradients` raises the error instead.
    """
    if self._are_unscaled(grads, all):
      return False
    # Of this graph, or if it is a function's and has none, of the graphs around it.
    for graph in list(graphs.enclosing_graphs()) or [None]:
      takes_scaled = self._state_in(graph).takes_scaled
      if takes_scaled is not None:
        return takes_scaled
    outer = self._state_in(graphs.init_scope_graph())
    if outer.has_unscaled:
      raise ValueError(_CANNOT_TELL)
    outer.divides_others = outer.divides_others or not tf.executing_eagerly()
    return True

  def _record_unscaled(self, grads: List[gradients.Gradient]) -> None:
    """Records what `get_unscaled_gradients` returns, for `apply_gradients`; raises a
    ValueError if another function has divided gradients that may be unscaled.

    The gradients are known by identity. What derives from them, such as clipped ones,
    is known only by `takes_scaled` of the functions here: None becomes False. After
    `scale_loss` it stays True, because the program may unscale only to log or to
    compute a norm, and then pass on the scaled gradients.
    """
    outer = self._state_in(graphs.init_scope_graph())
    if outer.divides_others:
      raise ValueError(_CANNOT_TELL)
    outer.has_unscaled_since = True
    if outer.unscaled is None:
      outer.unscaled = weakref.WeakValueDictionary()
    for grad in grads:
      if grad is not None:
        outer.unscaled[id(grad)] = grad
    for state in self._states_here():
      state.takes_scaled = bool(state.takes_scaled)

  def _states_here(self) -> List[Any]:
    """Returns the states of the current function, branch or loop body and of those
    around it; in eager mode, its state.

    The graphs around a branch count, because gradients that it returns are applied
    there. In a function, the state of eager mode is not among them.
    """
    functions = [
      graph for graph in graphs.enclosing_graphs() if graph.building_function
    ]
    return [self._state_in(graph) for graph in functions or [graphs.default_graph()]]

  def _are_unscaled(
    self, grads: Iterable[gradients.Gradient], which: Callable[..., bool]
  ) -> bool:
    """Returns whether any or all (`which`) of the gradients are known to be
    unscaled.

    `which` is the built-in `any` or `all`. None does not count; without any other
    gradient, the result is False.
    """
    known = self._state_in(graphs.init_scope_graph()).unscaled or {}
    present = [grad for grad in grads if grad is not None]
    return bool(present) and which(known.get(id(grad)) is grad for grad in present)

  def _apply_scaled(
    self,
    grads: Sequence[gradients.Gradient],
    variables: Sequence[_Variable],
    apply: _Apply,
  ) -> None:
    """Unscales gradients and applies them; warns if they may be unscaled already.

    `apply` is that of the inner optimizer, for (gradient, variable) pairs.
    """
    if self._state_in(graphs.init_scope_graph()).has_unscaled_since:
      records.warn_once(
        self,
        "A LossScaleOptimizer cannot tell whether gradients are from "
        "get_unscaled_gradients(). It takes them for scaled, and divides them by the "
        "loss scale, as Keras's own class does. For gradients that are unscaled, call "
        "get_scaled_loss(), get_unscaled_gradients() and apply_gradients(), the last "
        "two in one function.",
      )
    check = None
    if self._overrides("check_finite", self._kind.native):
      check = functools.partial(self._checked, grads)
    unscale = functools.partial(self._unscale, scale=self._current_scale())
    unscaled = _map_gradients(unscale, grads, variables)
    self._apply_step(unscaled, variables, apply, check)

  def _checked(
    self, grads: Sequence[gradients.Gradient], finite: tf.Tensor
  ) -> tf.Tensor:
    """Returns what an overridden `check_finite` says, instead of `finite`."""
    del finite
    return self.check_finite(grads)

  def _scaled(
    self, grads: Sequence[gradients.Gradient], variables: Sequence[_Variable]
  ) -> List[gradients.Gradient]:
    """Returns unscaled gradients times the loss scale, for an overridden `apply`."""
    scale = self._current_scale()
    multiply = functools.partial(gradients.scale_loss, scale=scale)

    def multiply_all(grads: List[gradients.Gradient]) -> List[gradients.Gradient]:
      return [gradients.map_values(multiply, grad) for grad in grads]

    converted = [gradients.convert(grad) for grad in grads]
    return _map_gradients(multiply_all, converted, variables)

  def _apply_step(
    self,
    grads: Iterable[gradients.Gradient],
    variables: Iterable[_Variable],
    apply: _Apply,
    check: Optional[Callable[[tf.Tensor], tf.Tensor]] = None,
  ) -> None:
    """Calls `apply` of the inner optimizer with (gradient, variable) pairs in all
    replicas, or skips the step; `check` replaces the finite check.
    """
    self._check_step()
    pairs = list(zip(grads, variables))
    self._create_variables(pairs)

    # the conditional must not return `iterations`
    def apply_in_replica(pairs: keras2.Pairs) -> None:
      apply(pairs)

    self._apply(pairs, apply_in_replica, check)

  def _create_variables(self, pairs: Iterable[gradients.GradAndVar]) -> None:
    """Makes the inner optimizer's variables, unless they exist."""
    # Not in `tf.init_scope`, because new variables may copy the model's.
    if not self.built:
      self.build([variable for _, variable in pairs])
