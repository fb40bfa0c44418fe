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

    loss scale                   conditionals of TensorFlow's class                the variables are created in the
    DynamicLossScale             one to update the scale, then one to apply        second
    tf.contrib, exponential      one to apply, then one to update the scale        first
    tf.contrib, fixed            one to apply                                      first
    any other                    none                                              (TensorFlow's class ignores `update`)

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
from typing import Any, Callable, Dict, Iterable, List, Optional, Tuple, TypeVar

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

_ApplyGradients = Callable[..., Optional[tf.Operation]]
# By name of a variable, what the name that was asked for has before the name scope in
# which it was made, and after it.
_Names = Dict[str, Tuple[str, str]]
# a variable, and the name that was asked for, with its name scope
_Made = Tuple[tf.Variable, str]
_Result = TypeVar("_Result")


def record_tensorflow_names(apply_gradients: _ApplyGradients) -> _ApplyGradients:
  """Returns a wrapper of `apply_gradients` that records TensorFlow's names for the
  variables that it creates.
  """

  @tf.autograph.experimental.do_not_convert
  def apply_and_record(
    self: tf.train.Optimizer, *args: object, **kwargs: object
  ) -> Optional[tf.Operation]:
    graph = graphs.init_scope_graph()
    if graph is None or graph is not tf.get_default_graph():
      return apply_gradients(self, *args, **kwargs)  # in eager mode or a function
    scope = graphs.name_scope()
    offsets = graphs.record_in(
      graph, "more_conditionals", lambda: collections.defaultdict(int)
    )
    number, steps = (
      _next_number(graph, "cond"),
      _next_number(graph, conditional_apply.SCOPE),
    )
    built_before, made = len(graph.get_operations()), _made_in_steps(graph)
    made.clear()
    result = apply_gradients(self, *args, **kwargs)
    created = _names_in_scope(made, scope, graph.get_operations()[built_before:])
    if _next_number(graph, conditional_apply.SCOPE) == steps:
      return (
        result  # With replicas, the conditional is in the scope of the first replica.
      )
    conditionals = _conditionals(self.loss_scale)
    if conditionals is None or offsets[scope] is None:
      offsets[scope] = None
      _warn_unknown_names(self.loss_scale, created)
      return result
    count, applying = conditionals
    number += offsets[scope]
    offsets[scope] += count
    conditional = "cond_{}".format(number + applying) if number + applying else "cond"
    scopes = [] if tf.control_flow_v2_enabled() else [scope, conditional]
    for name, (before, after) in created.items() if count else []:
      _record(graph, name, before + "/".join(filter(None, [*scopes, after])))
    return result

  return apply_and_record


def note_variables(
  apply_in_each_replica: Callable[..., _Result],
) -> Callable[..., _Result]:
  """Returns a wrapper of `conditional_apply.apply_in_each_replica` that notes what the
  inner optimizer creates.
  """

  @functools.wraps(apply_in_each_replica)
  def apply_and_note(*args: Any, **kwargs: Any) -> _Result:
    graph = graphs.init_scope_graph()

    def create_variable(
      next_creator: Callable[..., tf.Variable], **options: Any
    ) -> tf.Variable:
      asked = "/".join(
        filter(None, [graphs.name_scope(), options.get("name") or "Variable"])
      ).rstrip("/")
      variable = next_creator(**options)
      _made_in_steps(graph).append((variable, asked))
      return variable

    # With replicas, variables are created in the cross-replica context, which has
    # creator scopes of its own.
    with (
      contextlib.nullcontext()
      if graph is None
      else tf.variable_creator_scope(create_variable)
    ):
      return apply_in_each_replica(*args, **kwargs)

  return apply_and_note


def _made_in_steps(graph: tf.Graph) -> List[_Made]:
  return graphs.record_in(graph, "made_in_steps", list)


def _names_in_scope(
  made: Iterable[_Made], scope: str, built: Iterable[tf.Operation]
) -> _Names:
  """Returns the variables whose names depend on the name scope in which they were made.

  They are variables that `tf.get_variable` did not make, and slots of tensors that were
  built in the scope, which are named after the tensors.
  """
  tensors = {op.name for op in built if op.outputs}
  found = {}
  for variable, asked in made:
    name = variables.local_copies(variable)[0].op.name
    if not variables.is_made_by_get_variable(variable):
      found[name] = "", _after_scope(asked, scope)
      continue
    parts = asked.split("/")
    for first, last in itertools.combinations(range(len(parts)), 2):
      tensor = "/".join(parts[first:last])
      if tensor in tensors:
        before = "".join(part + "/" for part in parts[:first])
        found[name] = before, _after_scope("/".join(parts[first:]), scope)
  return found


def _after_scope(name: str, scope: str) -> str:
  return name[len(scope) + 1 :] if scope and name.startswith(scope + "/") else name


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
  taken, number, unique = set(names.values()), 0, tensorflow_name
  while unique in taken:
    number += 1
    unique = "{}_{}".format(tensorflow_name, number)
  names[name] = unique


def _next_number(graph: tf.Graph, name: str) -> int:
  """Returns the number of the next op `name` in the current name scope: 0 for "cond", 2
  for "cond_2".
  """
  return int(
    graph.unique_name(name, mark_as_used=False).rpartition(name)[2].lstrip("_") or 0
  )
