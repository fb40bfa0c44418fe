# SPDX-License-Identifier: Apache-2.0
"""Finds the names that TensorFlow's own classes take in the name scope of a step, for
`install()`.

TensorFlow's class multiplies, divides and checks in the current name scope, so that
later ops get the next numbers: `mul_3`, `cond_1`, `IsFinite_2`. This package builds its
ops in name scopes of their own. After `install()`, it takes the names of TensorFlow's
class as well, without ops, so that what a program builds later has the names that it
has with that class, such as those of moving averages.

Which names these are depends on the version, and on the number and types of the
gradients. So TensorFlow's class itself builds the step in a graph that is dropped, for
placeholders, with an inner optimizer that builds nothing.
"""

import importlib
from typing import Any, Callable, Iterable, List, NamedTuple, Optional, Tuple

from mp_compat._tensorflow import native
from mp_compat._tensorflow import tf
from mp_compat.contrib import mixed_precision as contrib
from mp_compat.core import loss_scale

# begins the names that the inner optimizer's caller gives
_STEP = "step_of_native_class"
# an optimizer of TensorFlow's class, and a function that reads its loss scale
_Native = Tuple[tf.train.Optimizer, Callable[[], Any]]
_OWN_UPDATES = (
  loss_scale.DynamicLossScale.update,
  loss_scale.FixedLossScale.update,
  contrib.ExponentialUpdateLossScaleManager.update_loss_scale,
  contrib.FixedLossScaleManager.update_loss_scale,
)


# What TensorFlow's class raises for a step that it cannot build: TypeError for
# gradients that are not float32, ValueError for IndexedSlices without a shape, and
# AttributeError for a loss that is None.
_CANNOT_BUILD = (TypeError, ValueError, AttributeError)


class Requests(NamedTuple):
  """The names that are requested in the current name scope, in order.

  Attributes:
    reading: Those of a read of the loss scale.
    before: Those before the inner optimizer is called; the last is that of the
      conditional that calls it, if any.
    after: Those after that.
  """

  reading: List[str]
  before: List[str]
  after: List[str]

  @property
  def has_conditional(self) -> bool:
    """Returns whether the inner optimizer is called in a conditional."""
    return self.before[-1:] == ["cond"]


class _Inner(tf.train.Optimizer):
  """An inner optimizer that builds nothing, and calls `called()` when it is called.

  It takes the place of the program's optimizer in TensorFlow's class, so that names
  are noted as requested before it, or after it. `compute_gradients` returns `grads`.
  """

  def __init__(self, grads: List[Any], called: Callable[[], None]) -> None:
    super().__init__(False, _STEP)
    self._grads, self._called = grads, called

  def compute_gradients(self, loss: Any, *args: object, **kwargs: object) -> List[Any]:
    """Notes the call; returns the gradients with themselves in place of variables."""
    if callable(loss):
      loss()
    self._called()
    return [(grad, grad) for grad in self._grads]

  def apply_gradients(self, *args: object, **kwargs: object) -> tf.Operation:
    """Notes the call; returns an op whose name does not count."""
    self._called()
    return tf.no_op(_STEP)


def of_compute_gradients(
  scale: loss_scale.AnyLossScale, loss: Any, grads: Iterable[Any] = ()
) -> Optional[Requests]:
  """Returns the names that `compute_gradients` requests for a loss and its gradients;
  None if this TensorFlow has no such class.

  What a callable loss returns is not known before it is called: it is taken for
  float32, which the names do not depend on.
  """
  if callable(loss):

    def build_with_callable(optimizer: tf.train.Optimizer, twins: List[Any]) -> None:
      (twin,) = twins
      optimizer.compute_gradients(lambda: twin)

    return _requests(scale, [0.0], grads, build_with_callable)

  def build(optimizer: tf.train.Optimizer, twins: List[Any]) -> None:
    (twin,) = twins
    optimizer.compute_gradients(twin)

  return _requests(scale, [loss], grads, build)


def of_apply_gradients(
  scale: loss_scale.AnyLossScale, grads: Iterable[Any]
) -> Optional[Requests]:
  """Returns the names that `apply_gradients` requests for gradients; None if this
  TensorFlow has no such class.
  """

  def build(optimizer: tf.train.Optimizer, twins: List[Any]) -> None:
    optimizer.apply_gradients([(twin, twin) for twin in twins], name=_STEP)

  return _requests(scale, grads, (), build)


def without(names: Iterable[str], taken: Iterable[str]) -> List[str]:
  """Returns names without those that are already taken, as often as they are."""
  remaining = list(names)
  for name in taken:
    if name in remaining:
      remaining.remove(name)
  return remaining


def take(names: Iterable[str]) -> List[str]:
  """Takes names in the current name scope of the default graph; returns the full names
  that an op of each would have.
  """
  graph = tf.get_default_graph()
  return [graph.unique_name(name) for name in names]


def _requests(
  scale: loss_scale.AnyLossScale,
  arguments: Iterable[Any],
  grads: Iterable[Any],
  build: Callable[[tf.train.Optimizer, List[Any]], None],
) -> Optional[Requests]:
  """Returns the names that `build(optimizer, twins of arguments)` requests at the root
  of a new graph; the inner optimizer computes twins of `grads`.

      make TensorFlow's class, in a graph that is dropped
      note each name that is requested at the root
      read the loss scale                       -> reading
      build(...), until the inner optimizer     -> before
      the rest of build(...)                    -> after

  Names within a name scope do not count: the scope itself is requested at the root.

  Args:
    scale: the loss scale of the program, which decides on the class and its scale.
    arguments: gradients or a loss, of whose types and shapes `build` gets placeholders.
    grads: what the inner optimizer's `compute_gradients` returns, by type and shape.
    build: calls a method of the optimizer.

  Returns:
    The names; None if this TensorFlow has no such class, or its class cannot build the
    step.
  """
  requests = Requests([], [], [])
  current = requests.reading

  def called() -> None:
    """Ends `before`: further names belong to `after`."""
    nonlocal current
    current = requests.after

  # The loss scale of `tf.contrib` has a variable of the kind that the program uses.
  use_resource = tf.get_variable_scope().use_resource
  with tf.Graph().as_default() as graph, tf.variable_scope(
    "", use_resource=use_resource
  ):
    inner = _Inner([_twin(grad) for grad in grads], called)
    twins = [_twin(argument) for argument in arguments]
    made = _make_native(inner, scale)
    if made is None:
      return None
    optimizer, read = made
    unique_name = graph.unique_name

    def note_name(name: str, mark_as_used: bool = True) -> str:
      """Returns what `unique_name` of the graph returns; notes names of the root."""
      is_at_root = not graph.get_name_scope()
      if mark_as_used and is_at_root and not name.startswith(_STEP):
        current.append(name)
      return unique_name(name, mark_as_used)

    graph.unique_name = note_name
    try:
      tf.convert_to_tensor(read())
      current = requests.before
      build(optimizer, twins)
    except _CANNOT_BUILD:
      return None
  return requests


def _twin(value: Any) -> Any:
  """Returns a placeholder of the same type and shape as a gradient or a loss; None for
  None.
  """
  if value is None:
    return None
  if isinstance(value, tf.IndexedSlices):
    return tf.IndexedSlices(
      _twin(value.values), _twin(value.indices), _twin(value.dense_shape)
    )
  dtype = getattr(value, "dtype", tf.float32)
  shape = getattr(value, "shape", None)
  return tf.placeholder(tf.as_dtype(dtype).base_dtype, shape)


def _make_native(
  inner: tf.train.Optimizer, scale: loss_scale.AnyLossScale
) -> Optional[_Native]:
  """Returns an optimizer of TensorFlow's own class with a loss scale like `scale`, and
  a function that reads this; None if this TensorFlow has no such class.

  Only what the names depend on is alike: whether the scale is dynamic, and whether its
  `update` is TensorFlow's. Its value is not.
  """
  if isinstance(scale, contrib.LossScaleManager):
    return _make_contrib(inner, scale)
  if not native.LOSS_SCALE_OPTIMIZERS:
    return None
  is_dynamic = isinstance(
    scale, (loss_scale.DynamicLossScale,) + native.DYNAMIC_LOSS_SCALES
  )
  if not is_dynamic:  # TensorFlow's class calls no other `update`.
    twin = native.FIXED_LOSS_SCALES[0](8.0)
  elif type(scale).update in _OWN_UPDATES:
    twin = native.DYNAMIC_LOSS_SCALES[0]()
  else:
    twin = _make_silent()
  return native.LOSS_SCALE_OPTIMIZERS[0](inner, twin), twin


def _make_silent() -> Any:
  """Returns a dynamic loss scale whose update builds nothing: the program's own one
  does.
  """
  decision, update_op = tf.placeholder(tf.bool, []), tf.no_op()
  base: Any = native.DYNAMIC_LOSS_SCALES[0]

  class Silent(base):
    def update(self, grads: object) -> Tuple[tf.Operation, tf.Tensor]:
      return update_op, decision

  return Silent()


def _make_contrib(
  inner: tf.train.Optimizer, manager: contrib.LossScaleManager
) -> Optional[_Native]:
  """Returns what `_make_native` does, of `tf.contrib`; None also if the program
  overrides the update.
  """
  is_own = type(manager).update_loss_scale in _OWN_UPDATES
  if not is_own or not native.HAS_CONTRIB:
    return None
  path = "tensorflow.contrib.mixed_precision.python.loss_scale_{}"
  managers = importlib.import_module(path.format("manager"))
  optimizers = importlib.import_module(path.format("optimizer"))
  if isinstance(manager, contrib.FixedLossScaleManager):
    twin = managers.FixedLossScaleManager(8.0)
  else:
    twin = managers.ExponentialUpdateLossScaleManager(8.0, 2)
  return optimizers.LossScaleOptimizer(inner, twin), twin.get_loss_scale
