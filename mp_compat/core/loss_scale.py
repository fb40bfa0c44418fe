# SPDX-License-Identifier: Apache-2.0
"""Loss scales: the factor that multiplies the loss, and its update after each step."""

import abc
import contextlib
import inspect
import operator
from typing import (
  Any,
  Callable,
  Dict,
  Iterator,
  List,
  NoReturn,
  Optional,
  Set,
  Tuple,
  Type,
  TypeVar,
  Union,
  overload,
)

from mp_compat._tensorflow import autograph
from mp_compat._tensorflow import graph_internals
from mp_compat._tensorflow import native
from mp_compat._tensorflow import tf
from mp_compat._tensorflow import trackable
from mp_compat._tensorflow import variables as tf_variables
from mp_compat.core import arguments
from mp_compat.core import distribute
from mp_compat.core import finite_check
from mp_compat.core import gradients
from mp_compat.core import lineage
from mp_compat.core import naming_schemes
from mp_compat.core import update_rule
from mp_compat.graph import graphs
from mp_compat.graph import records

AnyLossScale = Any  # a LossScale, ours or that of TensorFlow

_LossScale = TypeVar("_LossScale", bound="LossScale")


class LossScale(trackable.GraphStateTrackable, metaclass=abc.ABCMeta):
  """A scalar that multiplies the loss and divides the gradients, so that small
  gradients do not underflow in float16.

  A subclass defines `__call__`, `update` and `get_config`. An instance may be
  constructed anywhere and used in many graphs: its variables belong to a graph.
  `_add_weight` creates a variable in the current graph at once, and in every other
  graph on first use. A subclass that is used in several graphs reads its variables with
  `self._weight(name)`.

  Source: `tf.compat.v1.train.experimental.LossScale`.
  """

  # initial values and dtypes by name
  _mp_compat_weights: Dict[str, Tuple[float, Optional[tf.DType]]]

  @abc.abstractmethod
  def __call__(self) -> tf.Tensor:
    """Returns the current loss scale, a float32 scalar tensor."""

  @abc.abstractmethod
  def update(self, grads: Any) -> Tuple[Optional[tf.Operation], Union[bool, tf.Tensor]]:
    """Updates the loss scale from the gradients of one step; called in a cross-replica
    context.

    Args:
      grads: a nested structure of unscaled gradients, dense, `tf.IndexedSlices` or None
        (ignored); per-replica values if there is a strategy.

    Returns:
      `(update_op, should_apply_gradients)`: an op that changes the scale (in eager mode
      None; the scale has already changed), and a bool or a scalar bool tensor, False if
      the step must be skipped.
    """

  @abc.abstractmethod
  def get_config(self) -> Dict[str, Any]:
    """Returns the keyword arguments of an equal instance, as plain Python values."""

  @classmethod
  def from_config(cls: Type[_LossScale], config: Dict[str, Any]) -> _LossScale:
    """Returns an instance from the result of `get_config`."""
    return cls(**config)

  def _raise_not_a_number(self, *args: object) -> NoReturn:
    """Raises a TypeError: arithmetic and comparisons with a LossScale, and
    `Session.run` of it, are mistakes.
    """
    raise TypeError(
      "{} is an object, not a number. Call it to get the current loss scale, a float32 "
      "scalar tensor: opt.loss_scale(), before the session is created.".format(
        type(self).__name__
      )
    )

  __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = (
    __rtruediv__
  ) = _raise_not_a_number
  __lt__ = __le__ = __gt__ = __ge__ = __float__ = __int__ = _as_graph_element = (
    _raise_not_a_number
  )

  def __format__(self, specification: str) -> str:
    if specification:  # such as ".1f"
      self._raise_not_a_number()
    return str(self)

  def variables(self) -> List[tf.Variable]:
    """Returns the variables of this loss scale in the current graph, in the order of
    their declaration.
    """
    return list(self._graph_variables().values())

  def _add_weight(
    self, name: str, initial_value: float, dtype: Optional[tf.DType] = None
  ) -> tf.Variable:
    """Declares a scalar variable; returns that of the current graph, a resource
    variable which is not trainable.

    `initial_value` is a Python number. A second declaration of a name raises a
    RuntimeError.
    """
    if name in self._graph_variables():
      raise RuntimeError(
        "Duplicate variables detected. Each weight of a loss scale must have a unique "
        "name, but {} exists.".format(name)
      )
    vars(self).setdefault("_mp_compat_weights", {})[name] = (initial_value, dtype)
    with graphs.init_scope():
      return self._make_weight(name)

  def _weight(self, name: str) -> tf.Variable:
    """Returns the variable declared as `name` in the current graph; first creates all
    missing ones.
    """
    variables = self._graph_variables()
    missing = [
      declared for declared in self._mp_compat_weights if declared not in variables
    ]
    if missing:
      with graphs.init_scope(), tf.name_scope(None):
        for declared in missing:
          self._make_weight(declared)
    return variables[name]

  def _make_weight(self, name: str) -> tf.Variable:
    """Creates the declared variable `name` in the current graph, and restores its value
    if a checkpoint is waiting for it.
    """
    initial_value, dtype = self._mp_compat_weights[name]
    # Resource variables are created outside of branches, loops and control
    # dependencies.
    variable = tf.Variable(
      initial_value, name=name, dtype=dtype, trainable=False, use_resource=True
    )
    self._graph_variables()[name] = variable
    graph = graphs.init_scope_graph()
    if graph is not None:
      state_names(graph).add(variable.op.name)
    self._handle_deferred_dependencies(name=name, trackable=variable)
    return variable

  def _graph_variables(self) -> Dict[str, tf.Variable]:
    """Returns the variables in the current graph by name, in the order of their
    creation; a record that `_make_weight` adds to.
    """
    return records.state_of(self, graphs.init_scope_graph(), dict)

  @property
  def _weights(self) -> Dict[Tuple[str, Optional[str]], tf.Variable]:
    """Returns the current graph's variables by the keys that TensorFlow's class uses:
    `(name, graph key)`.
    """
    graph = graphs.init_scope_graph()
    graph_key = None
    if graph is not None:
      graph_key = graph_internals.key_of(graph)
    variables = self._graph_variables().items()
    return {(name, graph_key): variable for name, variable in variables}


def state_names(graph: tf.Graph) -> Set[str]:
  """Returns the record in `graph` of the names of all variables of its loss scales,
  those of subclasses included.
  """
  return records.record_in(graph, "state_names", set)


def kinds_of_created(graph: tf.Graph) -> Dict[str, str]:
  """Returns the record in `graph` of the variables that optimizers with a loss scale
  created when they applied gradients, without slots: the kind of the loss scale by
  name.
  """
  return records.record_in(graph, "loss_scales_of_created")


@contextlib.contextmanager
def recording_created(scale: AnyLossScale) -> Iterator[None]:
  """Makes a context manager that records the variables that are created in it, for
  checkpoints, as those of an optimizer with this loss scale (`kinds_of_created`).
  """
  graph = graphs.init_scope_graph()
  if graph is None:  # in eager mode
    yield
    return
  existing = {variable.op.name for variable in _global_variables(graph)}
  yield
  dynamic = (DynamicLossScale,) + native.DYNAMIC_LOSS_SCALES
  is_dynamic = isinstance(scale, dynamic)
  kind = naming_schemes.DYNAMIC if is_dynamic else naming_schemes.FIXED
  kinds = kinds_of_created(graph)
  slots = tf_variables.ids_of_get_variable()
  for variable in _global_variables(graph):
    name = variable.op.name
    if name not in existing and id(variable) not in slots:
      kinds[name] = kind


def _global_variables(graph: tf.Graph) -> List[tf.Variable]:
  """Returns the global variables of a graph."""
  found: List[tf.Variable] = graph.get_collection(tf.GraphKeys.GLOBAL_VARIABLES)
  return found


class FiniteLossScale(LossScale):
  """A loss scale whose update (`_update_scale`) depends only on whether all gradients
  of a step are finite.
  """

  @abc.abstractmethod
  def _update_scale(self, finite: tf.Tensor) -> Optional[tf.Operation]:
    """Returns an op that changes the scale after a step; None in eager mode. `finite`
    is a scalar bool tensor.
    """

  @autograph.do_not_convert
  def update(self, grads: Any) -> Tuple[Optional[tf.Tensor], tf.Tensor]:
    """Updates the scale; the step is applied if all gradients on all replicas are
    finite. See `LossScale.update`.
    """

    def check(*replica_grads: object) -> tf.Tensor:
      converted = [gradients.convert(grad) for grad in replica_grads]
      passed = gradients.values_of(converted)
      return finite_check.all_finite(passed + lineage.trace(converted).hidden_values)

    finite_by_replica = distribute.call_for_each_replica(check, *tf.nest.flatten(grads))
    finite = distribute.reduce_all_replicas(finite_by_replica)
    update_op = self._update_scale(finite)
    # TensorFlow's class returns a tensor, which programs fetch and pass on
    if update_op is not None:
      with tf.control_dependencies([update_op]):
        update_op = tf.identity(finite)
    return update_op, finite


def is_updated_by_check(loss_scale: AnyLossScale) -> bool:
  """Returns whether `loss_scale.update` is `FiniteLossScale.update`, so that it need
  not check the gradients again.
  """
  update = loss_scale.update
  return inspect.ismethod(update) and update.__func__ is FiniteLossScale.update


def constant(value: float) -> tf.Tensor:
  """Returns a float32 scalar; in a graph always the same tensor, which waits for
  nothing and is outside of branches and loops.
  """
  graph = graphs.default_graph()
  if graph is None:
    return tf.constant(value, tf.float32)
  made = records.record_in(graph, "constants")
  if value not in made:
    with tf.control_dependencies(None), tf.device(None):
      made[value] = tf.constant(value, tf.float32)
  return made[value]


def _local_constant(value: float) -> tf.Tensor:
  """Returns `constant(value)`, but in branches and loops of control flow v1 another
  tensor in each call; records it in `_constants`.

  Only what is made in them is a constant to graph optimizers, which draw it together
  with those of the model, as they do with TensorFlow's class.
  """
  graph = graphs.default_graph()
  if graph is None or graph_internals.context_of(graph) is None:
    tensor = constant(value)
  else:
    tensor = tf.constant(value, tf.float32)
  if graph is not None:
    _constants(value).add(tensor.op)
  return tensor


def _constants(value: float) -> Set[tf.Operation]:
  """Returns the set of the constants of this value that `_local_constant` made: in the
  graph that a Session runs and its functions; in a function that eager code calls, only
  those in it.
  """
  graph = graphs.init_scope_graph() or tf.get_default_graph()
  made = records.record_in(graph, "constants_of_scales")
  return made.setdefault(value, set())


def constants_of(scale: AnyLossScale) -> Set[tf.Operation]:
  """Returns the constants that reads of a fixed scale made in this graph and its
  functions, those of other scales of the same value included; none for another kind of
  loss scale.
  """
  if not isinstance(scale, FixedLossScale):
    return set()
  return set(_constants(scale._loss_scale_value))


class FixedLossScale(LossScale):
  """A constant loss scale. Its `update` checks nothing and applies every step.

  Source: `tf.compat.v1.train.experimental.FixedLossScale`.
  """

  def __init__(self, loss_scale_value: float) -> None:
    """Makes a loss scale from a number from 1 to 2**126 (see `DynamicLossScale`), else
    raises a ValueError.
    """
    message = "loss_scale_value must be {}, but got {!r}."
    if not arguments.is_number(loss_scale_value):
      raise ValueError(message.format("a Python int or float", loss_scale_value))
    if not loss_scale_value >= 1:
      raise ValueError(message.format("at least 1", loss_scale_value))
    self._loss_scale_value = arguments.scale("loss_scale_value", loss_scale_value)

  def __call__(self) -> tf.Tensor:
    # waits for the current control dependencies
    return tf.identity(_local_constant(self._loss_scale_value))

  @autograph.do_not_convert
  def update(self, grads: Any) -> Tuple[Optional[tf.Operation], bool]:
    """Returns `(no_op, True)`, in eager mode `(None, True)`: nothing to update. See
    `LossScale.update`.
    """
    del grads
    return tf.no_op(), True

  def __repr__(self) -> str:
    return "FixedLossScale({})".format(self._loss_scale_value)

  def get_config(self) -> Dict[str, Any]:
    return {"loss_scale_value": self._loss_scale_value}


class _Default:
  """A descriptor: computes an attribute, until a subclass sets an attribute of that
  name instead.
  """

  def __init__(self, compute: Callable[[Any], Any]) -> None:
    self._compute = compute

  def __get__(self, instance: object, owner: type) -> Any:
    """Returns the attribute of `instance`, computed each time."""
    if instance is None:  # read from the class
      return self
    return self._compute(instance)


def weight(name: str) -> _Default:
  """Returns an attribute of a loss scale: its variable of this name in the current
  graph.
  """
  return _Default(operator.methodcaller("_weight", name))


def _rule_field(name: str) -> _Default:
  """Returns an attribute of a DynamicLossScale: a field of its update rule."""
  return _Default(operator.attrgetter("_mp_compat_rule." + name))


class DynamicLossScale(FiniteLossScale):
  """A dynamic loss scale: grows after a number of finite steps, backs off on overflow.

  In each step, `update(grads)` does this (`mp_compat.core.update_rule`):

      finite = all values of grads, on all replicas, are finite
      if finite:
        good_steps += 1
        if good_steps >= increment_period:
          if current_loss_scale * multiplier <= max_loss_scale:
            current_loss_scale *= multiplier
          good_steps = bad_steps = 0
      else:
        good_steps = 0
        bad_steps += 1
        if bad_steps >= overflow_tolerance:
          current_loss_scale = max(current_loss_scale / backoff, min_loss_scale)
          bad_steps = 0
      should_apply = finite

  A restored scale may be out of bounds: one above `max_loss_scale` is lowered to it
  when it would grow, one below `min_loss_scale` is not raised.

  The state is two variables, `current_loss_scale` (float32) and `good_steps` (int64).
  With an `overflow_tolerance` above 1 there is a third, `bad_steps` (int64): the
  overflows since the last growth or backoff was due. Each argument can be read as an
  attribute of its name.

      >>> import tensorflow.compat.v1 as tf
      >>> import mp_compat
      >>> with tf.Graph().as_default(), tf.Session() as sess:
      ...   gradient = tf.placeholder(tf.float32, [])
      ...   loss_scale = mp_compat.DynamicLossScale(8.0, increment_period=2)
      ...   update_op, should_apply = loss_scale.update([gradient])
      ...   current = loss_scale()
      ...   sess.run(tf.global_variables_initializer())
      ...   for value in (0.5, 0.5, float("inf")):
      ...     applied, _ = sess.run([should_apply, update_op], {gradient: value})
      ...     print(applied, sess.run(current))
      True 8.0
      True 16.0
      False 8.0

  Source: `tf.compat.v1.train.experimental.DynamicLossScale`; Micikevicius et al.,
  "Mixed Precision Training", 2018.
  """

  def __init__(
    self,
    initial_loss_scale: float = 2**15,
    increment_period: int = 2000,
    multiplier: float = 2.0,
    *,
    backoff: Optional[float] = None,
    overflow_tolerance: int = 1,
    min_loss_scale: float = 1.0,
    max_loss_scale: float = arguments.LARGEST_SCALE,
  ) -> None:
    """Makes a dynamic loss scale.

    Args:
      initial_loss_scale: the first scale. Prefer a high value: the scale falls faster
        than it rises.
      increment_period: the growth interval (`growth_interval` in torch.amp), from 1 to
        2**63 - 1 steps.
      multiplier: the growth factor, above 1. The scale does not change if the product
        is above `max_loss_scale`.
      backoff: the divisor on overflow, above 1: 2 is torch.amp's `backoff_factor=0.5`.
        None means `multiplier`.
      overflow_tolerance: the number of overflows before each backoff, from 1 to 2**63 -
        1. The hysteresis of Megatron-LM and DeepSpeed counts before the first backoff
        only.
      min_loss_scale: the lower bound of backoff; above 0, may be below 1.
      max_loss_scale: the upper bound of growth; at most 2**126, above which TensorFlow
        flushes `1 / scale` to 0, and gradients vanish. A larger restored scale is
        lowered to it when it would grow.

    Raises:
      ValueError: If an argument is not a number in its range, or `initial_loss_scale`
        is not between the bounds.
    """
    self._initial_loss_scale = arguments.scale("initial_loss_scale", initial_loss_scale)
    self._multiplier = arguments.scale("multiplier", multiplier, above=1.0)
    if backoff is not None:
      backoff = arguments.scale("backoff", backoff, above=1.0)
    floor = arguments.scale("min_loss_scale", min_loss_scale)
    ceiling = arguments.scale("max_loss_scale", max_loss_scale)
    message = "initial_loss_scale must be at {}, {}, but got {!r}."
    if self._initial_loss_scale < floor:
      bound = "least min_loss_scale"
      raise ValueError(message.format(bound, floor, initial_loss_scale))
    if self._initial_loss_scale > ceiling:
      bound = "most max_loss_scale"
      raise ValueError(message.format(bound, ceiling, initial_loss_scale))
    self._increment_period = arguments.truncated_int(
      "increment_period", increment_period
    )
    tolerance = arguments.truncated_int("overflow_tolerance", overflow_tolerance)
    # Subclasses set attributes of any name; this name is unlikely to collide.
    self._mp_compat_parameters = update_rule.Rule(
      increment_period=self._increment_period,
      multiplier=self._multiplier,
      backoff=backoff,
      overflow_tolerance=tolerance,
      floor=floor,
      ceiling=ceiling,
    )
    self._add_weight("current_loss_scale", self._initial_loss_scale, tf.float32)
    self._add_weight("good_steps", 0, tf.int64)
    if tolerance > 1:
      self._add_weight("bad_steps", 0, tf.int64)

  @property
  def _mp_compat_rule(self) -> update_rule.Rule:
    """Returns the update rule, with `_increment_period` and `_multiplier` as a subclass
    may have set them.
    """
    rule = self._mp_compat_parameters._replace(
      increment_period=self._increment_period, multiplier=self._multiplier
    )
    return rule._replace(backoff=rule.backoff or rule.multiplier)

  @property
  def initial_loss_scale(self) -> float:
    return self._initial_loss_scale

  increment_period = _rule_field("increment_period")
  multiplier = _rule_field("multiplier")
  backoff = _rule_field("backoff")
  overflow_tolerance = _rule_field("overflow_tolerance")
  min_loss_scale = _rule_field("floor")
  max_loss_scale = _rule_field("ceiling")

  _current_loss_scale = weight("current_loss_scale")
  _num_good_steps = weight("good_steps")

  def __call__(self) -> tf.Tensor:
    return tf.convert_to_tensor(self._current_loss_scale)

  def _update_scale(self, finite: tf.Tensor) -> Optional[tf.Operation]:
    variables = [self._current_loss_scale, self._num_good_steps]
    if self._mp_compat_rule.overflow_tolerance > 1:
      variables.append(self._weight("bad_steps"))
    return update_rule.transition(variables, finite, self._mp_compat_rule)

  def __repr__(self) -> str:
    values = self.get_config()
    if tf.executing_eagerly():
      state = {
        "current_loss_scale": self._current_loss_scale.numpy(),
        "num_good_steps": self._num_good_steps.numpy(),
      }
      values = {**state, **values}
    shown = ["{}={}".format(name, value) for name, value in values.items()]
    return "DynamicLossScale({})".format(", ".join(shown))

  def get_config(self) -> Dict[str, Any]:
    """Returns the keyword arguments of an equal instance; omits defaults of arguments
    that TensorFlow's class lacks.
    """
    rule = self._mp_compat_rule
    config: Dict[str, Any] = {
      "initial_loss_scale": self.initial_loss_scale,
      "increment_period": rule.increment_period,
      "multiplier": rule.multiplier,
    }
    extensions = (
      ("backoff", rule.backoff, rule.multiplier),
      ("overflow_tolerance", rule.overflow_tolerance, 1),
      ("min_loss_scale", rule.floor, 1.0),
      ("max_loss_scale", rule.ceiling, arguments.LARGEST_SCALE),
    )
    for name, value, default in extensions:
      if value != default:
        config[name] = value
    return config


# Keras policies up to TensorFlow 2.4 accept only instances of TensorFlow's classes.
for _class, _native_classes in (
  (LossScale, native.LOSS_SCALES),
  (FixedLossScale, native.FIXED_LOSS_SCALES),
  (DynamicLossScale, native.DYNAMIC_LOSS_SCALES),
):
  for _native_class in _native_classes:
    _native_class.register(_class)


@overload
def get_loss_scale(identifier: None) -> None: ...


@overload
def get_loss_scale(identifier: Any) -> LossScale: ...


def get_loss_scale(identifier: Any) -> Optional[LossScale]:
  """Returns the loss scale that `identifier` describes; None for None.

  It is an int, float or NumPy scalar from 1 to 2**126 for a `FixedLossScale`; "dynamic"
  for a `DynamicLossScale` with its defaults; a LossScale, ours or TensorFlow's, which
  is returned as it is; or None. Raises a ValueError for others.

  Source: `get` of TensorFlow's module `loss_scale`.
  """
  if identifier is None or isinstance(identifier, (LossScale,) + native.LOSS_SCALES):
    return identifier
  if arguments.is_number(identifier):
    return FixedLossScale(identifier)
  if isinstance(identifier, str) and identifier == "dynamic":
    return DynamicLossScale()
  raise ValueError(
    "Could not interpret loss scale identifier: {0}. Expected a number of at least 1, "
    '"dynamic", or a LossScale, but got {0!r}.'.format(identifier)
  )
