# SPDX-License-Identifier: Apache-2.0
"""Computes the names that TensorFlow's loss scaling gives to variables created in its
`tf.cond`, for `install()`.

TensorFlow's class lets Adam create its powers inside `tf.cond`, and custom optimizers
their variables. Under control flow v1, names that depend on the name scope begin with
that of the conditional, as in `cond_1/beta1_power`. `tf.cond` takes the next free name,
so the number counts all conditionals built earlier in the same name scope, by the
program or by the loss scaling. Under control flow v2 the name scope is dropped:
`beta1_power`, also within `head/`.

The conditionals that the class builds in `apply_gradients`, and their order, determine
the name:

    loss scale                 conditionals, in order          variables are made in
    DynamicLossScale           update the scale, apply         the second
    tf.contrib, exponential    apply, update the scale         the first
    tf.contrib, fixed          apply                           the first
    any other                  none: `update` is ignored

This package builds its conditionals in name scopes of their own. For each name scope of
a graph, it counts those that TensorFlow's class would have built, and adds their number
to the one that `tf.cond` would take. After `install()`, a Saver writes both names of a
variable and reads either.

Source: `apply_gradients` and `update` of TensorFlow 1.15, 2.4 and 2.15, and of
`tf.contrib.mixed_precision`.
"""

import collections
import contextlib
import functools
import itertools
from typing import (
  Any,
  Callable,
  ContextManager,
  Dict,
  Iterable,
  Iterator,
  List,
  Optional,
  Tuple,
  TypeVar,
)

from mp_compat._tensorflow import log
from mp_compat._tensorflow import native
from mp_compat._tensorflow import tf
from mp_compat._tensorflow import variables
from mp_compat.checkpoints import files
from mp_compat.contrib import mixed_precision as contrib
from mp_compat.core import conditional_apply
from mp_compat.core import loss_scale
from mp_compat.core.naming_schemes import CONTRIB
from mp_compat.core.naming_schemes import DYNAMIC
from mp_compat.core.naming_schemes import FIXED
from mp_compat.core.naming_schemes import TENSORFLOW
from mp_compat.core.naming_schemes import Conditionals
from mp_compat.graph import graphs
from mp_compat.graph import op_names
from mp_compat.graph import records
from mp_compat.migration import native_names

_Function = Callable[..., Any]
# By name of a variable, what the name that was asked for has before the name scope in
# which it was made, and after it.
_Names = Dict[str, Tuple[str, str]]
# a variable, and the name that was asked for, with its name scope
_Made = Tuple[tf.Variable, str]
_Result = TypeVar("_Result")


def take_names_of_scaling(compute_gradients: _Function) -> _Function:
  """Returns a wrapper of `compute_gradients` that takes the names that TensorFlow's
  class takes.
  """

  @tf.autograph.experimental.do_not_convert
  def take_and_compute(
    self: tf.train.Optimizer, loss: Any, *args: object, **kwargs: object
  ) -> List[Any]:
    """Takes the names of the scaled loss before the gradients are computed, and those
    of the division after it.
    """
    if not _is_in_plain_graph() or tf.distribute.has_strategy():
      return compute_gradients(self, loss, *args, **kwargs)
    scaling = native_names.of_compute_gradients(self.loss_scale, loss)
    if scaling:
      # This package reads the loss scale in the current name scope, too.
      names = native_names.without(scaling.before, scaling.reading)
      if callable(loss):
        loss = _taking_after(loss, names)
      else:
        native_names.take(names)
    pairs = compute_gradients(self, loss, *args, **kwargs)
    grads = [grad for grad, _ in pairs]
    unscaling = native_names.of_compute_gradients(self.loss_scale, loss, grads)
    native_names.take(unscaling.after if unscaling else ())
    return pairs

  return take_and_compute


def _taking_after(loss: Callable[[], Any], names: List[str]) -> Callable[[], Any]:
  """Returns a callable loss that takes names after it has built its ops."""

  def build_and_take() -> Any:
    """Returns the loss; takes the names once its ops have theirs."""
    built = loss()
    native_names.take(names)
    return built

  return build_and_take


def record_tensorflow_names(apply_gradients: _Function) -> _Function:
  """Returns a wrapper of `apply_gradients` that takes the names that TensorFlow's class
  takes, and records its names for the variables that are created.
  """

  @tf.autograph.experimental.do_not_convert
  def apply_and_record(
    self: tf.train.Optimizer, grads_and_vars: Any, *args: object, **kwargs: object
  ) -> Optional[tf.Operation]:
    """Takes the names before and after the inner optimizer is called, and records those
    of the variables that it creates between.

        number = that of the next conditional here
        take the names before; the last may be that of the conditional
        apply_gradients, whose variables `note_variables` notes
        take the names after
        record the names, unless no step was built
    """
    if not _is_in_plain_graph():
      return apply_gradients(self, grads_and_vars, *args, **kwargs)
    graph, scope = tf.get_default_graph(), op_names.name_scope()
    pairs = list(grads_and_vars)
    grads = [grad for grad, _ in pairs]
    number = _next_number(graph, "cond")
    steps = _next_number(graph, conditional_apply.SCOPE)
    requests = None  # With replicas, names are not taken, but recorded.
    if not tf.distribute.has_strategy():
      requests = native_names.of_apply_gradients(self.loss_scale, grads)
    before = native_names.take(requests.before if requests else ())
    built_before, made = len(graph.get_operations()), _made_in_steps(graph)
    made.clear()
    conditional = before[-1] if requests and requests.has_conditional else None
    with _inner_ops_in(graph, conditional):
      result = apply_gradients(self, pairs, *args, **kwargs)
    native_names.take(requests.after if requests else ())
    built = graph.get_operations()[built_before:]
    created = _names_in_scope(made, scope, conditional, built)
    # With replicas, the conditional is in the scope of the first replica.
    if _next_number(graph, conditional_apply.SCOPE) != steps:
      _record_names(self.loss_scale, graph, scope, number, created, bool(requests))
    return result

  return apply_and_record


def _is_in_plain_graph() -> bool:
  """Returns whether ops are built in a graph now, not in a function."""
  graph = graphs.init_scope_graph()
  return graph is not None and graph is tf.get_default_graph()


def _record_names(
  scale: loss_scale.AnyLossScale,
  graph: tf.Graph,
  scope: str,
  number: int,
  created: _Names,
  is_counted: bool,
) -> None:
  """Records the names of variables that were created in a step in a name scope, where
  `number` was that of the next conditional.

      number += conditionals of TensorFlow's class that the graph has not counted
      number += the place of the conditional in which variables are made
      name = before/scope/cond_NUMBER/after      under control flow v2: before/after

  After a loss scale whose conditionals are unknown, the numbers in this name scope
  stay unknown: `offsets[scope]` is None from then on.

  Args:
    scale: the loss scale of the step.
    graph: the graph of the step.
    scope: the name scope in which `apply_gradients` was called.
    number: the number of the next "cond" in the scope before the step.
    created: what `_names_in_scope` returns.
    is_counted: whether the graph has counted the conditionals of TensorFlow's class,
      as its own, because their names were taken.
  """
  offsets = records.record_in(
    graph, "more_conditionals", lambda: collections.defaultdict(int)
  )
  conditionals = _conditionals(scale)
  if conditionals is None or offsets[scope] is None:
    offsets[scope] = None
    _warn_unknown_names(scale, created)
    return
  count, applying = conditionals
  number += offsets[scope] + applying
  if not is_counted:
    offsets[scope] += count
  conditional = "cond"
  if number:
    conditional = "cond_{}".format(number)
  scopes = [scope, conditional]
  if tf.control_flow_v2_enabled():  # which drops the name scope
    scopes = []
  if not count:
    return
  for name, (before, after) in created.items():
    _record(graph, name, before + _joined(*scopes, after))


@contextlib.contextmanager
def _inner_ops_in(graph: tf.Graph, conditional: Optional[str]) -> Iterator[None]:
  """Makes a context manager: the inner optimizer builds its ops in the name scope of
  a conditional, as with TensorFlow's class; its variables do not get that name.

  `note_variables` reads the innermost entry of the list. `conditional` is a full name,
  such as "head/cond_1"; None if the step has no conditional.
  """
  around = records.record_in(graph, "conditionals_of_steps", list)
  around.append(conditional)
  try:
    yield
  finally:
    around.pop()


def note_variables(
  apply_in_each_replica: Callable[..., _Result],
) -> Callable[..., _Result]:
  """Returns a wrapper of `conditional_apply.apply_in_each_replica` that notes what the
  inner optimizer creates.

      in the name scope of the conditional of TensorFlow's class, if it has one:
        call the inner optimizer
      for each variable that it creates:
        remove the conditional from its name, and from the current name scope
        create it
        note it, and the name that was asked for

  So ops have the names of TensorFlow's class, and variables those that they have
  without a conditional. `record_tensorflow_names` reads what is noted.
  """

  @functools.wraps(apply_in_each_replica)
  def apply_and_note(should_apply: Any, apply: _Function, *args: Any) -> _Result:
    """Notes the variables that the inner optimizer creates in a graph.

    In eager mode, it only calls the wrapped function.
    """
    graph = graphs.init_scope_graph()
    if graph is None:
      return apply_in_each_replica(should_apply, apply, *args)
    outer = op_names.name_scope()
    conditionals = records.record_in(graph, "conditionals_of_steps", list)
    conditional = None
    if conditionals:
      conditional = conditionals[-1]

    def apply_in_conditional(*inner_args: Any, **inner_kwargs: Any) -> object:
      with _name_scope(conditional):
        return apply(*inner_args, **inner_kwargs)

    def create_variable(
      next_creator: Callable[..., tf.Variable], **options: Any
    ) -> tf.Variable:
      """Creates a variable outside of the conditional, and notes the name that was
      asked for, with its name scope.
      """
      wanted = options.get("name")
      if conditional and wanted:  # the slot of a tensor, which has the name of the op
        options["name"] = _without(conditional, outer, wanted)
      scope = None
      if conditional:
        scope = _without(conditional, outer, op_names.name_scope())
      with _name_scope(scope):
        name = options.get("name") or "Variable"
        asked = _joined(op_names.name_scope(), name).rstrip("/")
        variable = next_creator(**options)
      _made_in_steps(graph).append((variable, asked))
      return variable

    # With replicas, variables are created in the cross-replica context, which has
    # creator scopes of its own.
    with tf.variable_creator_scope(create_variable):
      if not conditional:
        return apply_in_each_replica(should_apply, apply, *args)
      return apply_in_each_replica(should_apply, apply_in_conditional, *args)

  return apply_and_note


def _name_scope(scope: Optional[str]) -> ContextManager[object]:
  """Returns a context manager for a full name scope; "" is the root, None the current
  one.
  """
  if scope is None:
    return contextlib.nullcontext()
  if not scope:
    return tf.name_scope(None)
  return tf.name_scope(scope + "/")


def _without(conditional: str, outer: str, name: str) -> str:
  """Returns a name, or name scope, without a conditional in the name scope `outer`.

      _without("head/cond", "head", "head/cond/Adam")         "head/Adam"
      _without("head/cond", "head", "tail/head/cond/mul/m")   "tail/head/mul/m"

  `conditional` is a full name. The name itself is returned if it is not in it.
  """
  head, found, tail = "/{}/".format(name).partition("/{}/".format(conditional))
  if not found:
    return name
  return _joined(head.strip("/"), outer, tail.strip("/"))


def _joined(*parts: str) -> str:
  """Returns a name from its parts, of which some may be ""."""
  return "/".join(part for part in parts if part)


def _made_in_steps(graph: tf.Graph) -> List[_Made]:
  """Returns the list of the variables that were made in the last step of a graph."""
  return records.record_in(graph, "made_in_steps", list)


def _names_in_scope(
  made: Iterable[_Made],
  scope: str,
  conditional: Optional[str],
  built: Iterable[tf.Operation],
) -> _Names:
  """Returns the variables whose names depend on the name scope in which they were made.

  They are variables that `tf.get_variable` did not make, and slots of tensors that were
  built in the scope, which are named after the tensors. In the name scope "head":

      made                            asked name            result
      tf.Variable(0., name="power")   head/power            ("", "power")
      slot Adam of tensor head/mul    tail/head/mul/Adam    ("tail/", "mul/Adam")

  Args:
    made: what the step created, with the names that were asked for.
    scope: the name scope in which `apply_gradients` was called; "" for the root.
    conditional: the full name of the conditional in which the inner optimizer built
      its ops; None without one.
    built: the ops of the step.

  Returns:
    By the name of a variable, what its asked name has before the scope, and after it.
  """
  tensors = {op.name for op in built if op.outputs}
  if conditional:
    tensors = {_without(conditional, scope, name) for name in tensors}
  found = {}
  for variable, asked in made:
    name = variables.local_copies(variable)[0].op.name
    if not variables.is_made_by_get_variable(variable):
      found[name] = "", _after_scope(asked, scope)
      continue
    parts = asked.split("/")
    # A slot has the name of its tensor and then its own, perhaps in a variable scope.
    for first, last in itertools.combinations(range(len(parts)), 2):
      tensor = "/".join(parts[first:last])
      if tensor in tensors:
        before = "".join(part + "/" for part in parts[:first])
        found[name] = before, _after_scope("/".join(parts[first:]), scope)
  return found


def _after_scope(name: str, scope: str) -> str:
  """Returns a name without the name scope in which it is, if it is in it."""
  if not scope or not name.startswith(scope + "/"):
    return name
  return name[len(scope) + 1 :]


def _conditionals(scale: loss_scale.LossScale) -> Optional[Conditionals]:
  """Returns the conditionals that TensorFlow's class builds for a loss scale; None if
  they are unknown.
  """
  if isinstance(scale, contrib.LossScaleManager):
    update = type(scale).update_loss_scale
    if update is contrib.ExponentialUpdateLossScaleManager.update_loss_scale:
      return CONTRIB.conditionals[DYNAMIC]
    if update is contrib.FixedLossScaleManager.update_loss_scale:
      return CONTRIB.conditionals[FIXED]
    return None
  dynamic = (loss_scale.DynamicLossScale,) + native.DYNAMIC_LOSS_SCALES
  if not isinstance(scale, dynamic):
    return Conditionals(total=0, applying=0)
  if type(scale).update in [cls.update for cls in dynamic]:
    return TENSORFLOW.conditionals[DYNAMIC]
  return None


def _warn_unknown_names(scale: loss_scale.LossScale, names: _Names) -> None:
  """Warns that the names of variables in TensorFlow's class are unknown, if any."""
  if names:
    log.warn(
      "The name of %s in TensorFlow's class is unknown, because %s, or a loss scale "
      "before it, overrides update() and may build conditionals. Checkpoints have the "
      "inner optimizer's names. To restore them without mp_compat, convert them: "
      "python -m mp_compat checkpoint convert --like.",
      ", ".join(names),
      type(scale).__name__,
    )


def _record(graph: tf.Graph, name: str, tensorflow_name: str) -> None:
  """Records the name of a variable in TensorFlow's class; appends a number if another
  variable has that name.
  """
  names = files.tensorflow_names(graph)
  taken = set(names.values())
  number = 0
  unique = tensorflow_name
  while unique in taken:
    number += 1
    unique = "{}_{}".format(tensorflow_name, number)
  names[name] = unique


def _next_number(graph: tf.Graph, name: str) -> int:
  """Returns the number of the next op `name` in the current name scope: 0 for "cond", 2
  for "cond_2".
  """
  _, _, number = graph.unique_name(name, mark_as_used=False).rpartition(name)
  return int(number.lstrip("_") or 0)
