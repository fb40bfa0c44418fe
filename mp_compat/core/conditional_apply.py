# SPDX-License-Identifier: Apache-2.0
"""The conditional that applies or skips all updates of a step."""

import contextlib
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

from mp_compat._tensorflow import contexts
from mp_compat._tensorflow import control_flow
from mp_compat._tensorflow import dead_tensors
from mp_compat._tensorflow import graphs
from mp_compat._tensorflow import tf
from mp_compat.core import distribute

SCOPE = "apply_or_skip"  # the name scope of the conditional


def cond(should_apply: Any, apply: Callable[[], Any], skip: Callable[[], Any] = tf.no_op) -> Any:
  """Returns `apply()` if `should_apply` (a bool, or a scalar bool tensor), else `skip()`: ops, in eager mode None."""
  if not tf.is_tensor(should_apply) or tf.executing_eagerly():
    return apply() if should_apply else skip()
  return control_flow.cond(should_apply, apply, skip)


def apply_in_each_replica(
  should_apply: Any,
  apply: Callable[..., Any],
  args: Sequence[Any],
  kwargs: Dict[str, Any],
  scope: str,
  skip: Callable[[], Any] = tf.no_op,
  opened: Optional[Dict[str, str]] = None,
) -> Any:
  """Calls `apply(*args, **kwargs)` in each replica if `should_apply`, else `skip()`; called once for all replicas.

  The variables of `apply` are created outside of the conditional, under the names of a direct call in the replica.
  `args`, `kwargs` and `scope`, the name scope of the replica, are per-replica values. `opened` are name scopes, with a
  final "/", that stand for those that `apply` opens, by the names that it asks for.
  """
  names = _OutsideNames(distribute.local_results(scope)[0], opened or {})

  def apply_in_scope(*replica_args: Any, **replica_kwargs: Any) -> Any:
    with tf.name_scope("apply_if_finite") as branch_scope:
      names.add_branch(branch_scope)
      return apply(*replica_args, **replica_kwargs)

  def apply_branch() -> Optional[tf.Operation]:
    with contextlib.ExitStack() as creators:
      creators.enter_context(tf.variable_creator_scope(names.create_variable))
      if graphs.init_scope_graph() is not graphs.default_graph():  # in functions: optimizers create variables outside
        with tf.init_scope():
          creators.enter_context(tf.variable_creator_scope(names.create_variable))
      return distribute.group(distribute.call_for_each_replica(apply_in_scope, *args, **kwargs))

  summaries = tf.get_collection_ref(tf.GraphKeys.SUMMARIES)
  existing = len(summaries)
  with tf.name_scope(SCOPE), graphs.observe_names(names.add_name):
    applied = cond(should_apply, apply_branch, skip)
  # Summaries of the inner optimizer are empty in skipped steps; inside control flow they cannot be read, so drop them.
  readable = [] if contexts.is_in_control_flow() else summaries[existing:]
  summaries[existing:] = [
    dead_tensors.merge_out_of_branches(summary, b"") for summary in readable if contexts.is_in_branches_only(summary.op)
  ]
  return applied


class Created(NamedTuple):
  """A variable whose name contains the name scope in which an optimizer created it."""

  variable: tf.Variable
  before: str  # what its name has before that scope, such as a variable scope
  name: str  # what its name has after it


def created(graph: tf.Graph) -> List[Created]:
  """Returns the variables that optimizers created in conditionals, under names that depend on that."""
  return graphs.record_in(graph, "created_in_conditional", list)


class _OutsideNames:
  """Creates the variables of an optimizer outside of the conditional that it is called in, under the names without it.

  Adam in the scope "tower", with a learning rate that is a variable in a scope of its own:

      the optimizer asks for     in the branch's scope                         it would be named     here
      beta1_power                tower/apply_or_skip/cond/apply_if_finite/     tower/beta1_power     the same
      rate                       .../apply_if_finite/schedule/                 tower/schedule/rate   the same
      w/Adam                     "", chosen by the optimizer                   w/Adam                the same

  Each name that an op or a scope gets in the branch is also used outside, and is numbered there as without the
  conditional: "tower/schedule_1/" if "tower/schedule/" exists. Variables named after tensors of the branch, such as
  moving averages, then have the same names, too.
  """

  def __init__(self, replica_scope: str, opened: Dict[str, str]) -> None:
    self._replica_scope = replica_scope  # outside of the conditional; "" for the root
    self._opened = opened
    self._branches: Tuple[str, ...] = ()  # the branch's name scope for each replica, with a final "/", as all below
    self._outside: Dict[str, str] = {}  # names outside of the branch, "" for the root, by those in it, with a final "/"

  def add_branch(self, scope: str) -> None:
    self._branches += (scope,)
    self._outside[scope] = self._replica_scope + "/" if self._replica_scope else ""
    self._outside.update((scope + name + "/", outside) for name, outside in self._opened.items())

  def add_name(self, scope: str, name: str, use: Callable[[str], str]) -> None:
    """For `graphs.observe_names`."""
    if scope.startswith(self._branches) and name + "/" not in self._outside and not tf.distribute.has_strategy():
      self._outside[name + "/"] = use(self._outside_of(scope)) + "/"

  def create_variable(self, next_creator: Callable[..., tf.Variable], **kwargs: Any) -> tf.Variable:
    """For `tf.variable_creator_scope`."""
    if graphs.init_scope_graph() is None:
      return next_creator(**kwargs)
    if tf.is_tensor(kwargs.get("initial_value")):
      kwargs["initial_value"] = control_flow.copy_out_of_branches(kwargs["initial_value"])
    asked = None
    scope_of_name, separator, last = (kwargs.get("name") or "").rpartition("/")
    for branch in self._branches:  # a tensor's slot, such as a moving average, has the tensor's name
      around, found, inside = (scope_of_name + separator).partition(branch)
      if found:
        kwargs["name"], asked = around + self._outside_of(branch + inside) + last, (around, (inside + last).rstrip("/"))
    current = graphs.name_scope() + "/"
    scopes = contextlib.ExitStack()
    for branch in filter(current.startswith, self._branches):  # tf.get_variable creates its variables in the root scope
      asked = ("", current[len(branch) :] + (kwargs.get("name") or "Variable"))
      scopes.enter_context(tf.init_scope())
      scopes.enter_context(tf.name_scope(self._outside_of(current) or None))
    with scopes:
      variable = next_creator(**kwargs)
    if asked:
      created(graphs.init_scope_graph()).append(Created(variable, *asked))
    return variable

  def _outside_of(self, inside: str) -> str:
    """Returns the name scope that the optimizer would have opened without the conditional."""
    if inside not in self._outside:  # Calls in replicas open the current variable scope's name scope again.
      parent, _, name = inside[:-1].rpartition("/")
      self._outside[inside] = self._outside_of(parent + "/") + name + "/"
    return self._outside[inside]
