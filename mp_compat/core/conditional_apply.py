# SPDX-License-Identifier: Apache-2.0
"""The conditional that applies or skips all updates of a step."""

import contextlib
from typing import Any, Callable, Dict, List, Optional, Sequence

from mp_compat._tensorflow import contexts
from mp_compat._tensorflow import control_flow
from mp_compat._tensorflow import dead_tensors
from mp_compat._tensorflow import graphs
from mp_compat._tensorflow import tf
from mp_compat.core import distribute

SCOPE = "apply_or_skip"  # the name scope of the conditional


def cond(should_apply: Any, apply: Callable[[], Any], skip: Callable[[], Any] = tf.no_op) -> Any:
  """Returns `apply()` if `should_apply`, else `skip()`.

  Args:
    should_apply: a bool, or a scalar bool tensor.
    apply: returns an op, in eager mode None.
    skip: returns an op, in eager mode None.

  Returns:
    An op or a tensor; in eager mode None.
  """
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

  The variables of `apply` are created outside of the conditional. They have the names that a direct call of `apply` in
  the replica would give them.

  Args:
    should_apply: a bool, or a scalar bool tensor.
    apply: applies gradients; returns an op, in eager mode None.
    args: per-replica values.
    kwargs: per-replica values.
    scope: the name scope of the replica; a per-replica value.
    skip: returns an op, in eager mode None.
    opened: name scopes, with a final "/", that stand for those that `apply` opens, by the names that it asks for.

  Returns:
    An op or a tensor; in eager mode None.
  """
  scope = distribute.local_results(scope)[0]
  apply_scopes: List[str] = []  # for each replica, the name scope in the branch that applies gradients
  outside: Dict[str, str] = {}  # the name scopes outside of the branch, by those in it

  def create_outside(next_creator: Callable[..., tf.Variable], **creator_kwargs: Any) -> tf.Variable:
    # Variables of the scope "cond_1/apply_if_finite/" are created in the replica's scope. Any other scope was chosen by
    # the optimizer and is kept: tf.get_variable creates its variables in the root scope.
    if graphs.init_scope_graph() is None:
      return next_creator(**creator_kwargs)
    if tf.is_tensor(creator_kwargs.get("initial_value")):
      creator_kwargs["initial_value"] = control_flow.copy_out_of_branches(creator_kwargs["initial_value"])
    scope_of_name, separator, last = (creator_kwargs.get("name") or "").rpartition("/")
    if is_inside(scope_of_name + separator):  # the slot of a tensor, such as its moving average, has the tensor's name
      creator_kwargs["name"] = scope_outside(scope_of_name + separator) + last
    current = graphs.name_scope() + "/"
    if not is_inside(current):
      return next_creator(**creator_kwargs)
    with tf.init_scope(), tf.name_scope(scope_outside(current) or None):
      return next_creator(**creator_kwargs)

  def is_inside(name_scope: str) -> bool:
    return any(name_scope.startswith(apply_scope) for apply_scope in apply_scopes)

  def scope_outside(inside: str) -> str:
    """Returns the name scope, with a final "/" except for the root, that a direct call of `apply` would have opened."""
    if inside not in outside:
      inner_scope, _, name = inside[:-1].rpartition("/")
      parent = scope_outside(inner_scope + "/")
      # Calls in replicas open the current variable scope's name scope again, so that a new one would get another name.
      name = parent + name + "/" if tf.distribute.has_strategy() else name
      with tf.init_scope(), tf.name_scope(parent or None), tf.name_scope(name) as outside[inside]:
        pass
    return outside[inside]

  def apply_in_scope(*replica_args: Any, **replica_kwargs: Any) -> Any:
    with tf.name_scope("apply_if_finite") as apply_scope:
      apply_scopes.append(apply_scope)
      outside[apply_scope] = scope + "/" if scope else ""
      outside.update((apply_scope + name + "/", name_scope) for name, name_scope in (opened or {}).items())
      return apply(*replica_args, **replica_kwargs)

  def apply_branch() -> Optional[tf.Operation]:
    with contextlib.ExitStack() as creators:
      creators.enter_context(tf.variable_creator_scope(create_outside))
      with tf.init_scope():  # optimizers create their variables here; inside a function, this is another graph
        creators.enter_context(tf.variable_creator_scope(create_outside))
      return distribute.group(distribute.call_for_each_replica(apply_in_scope, *args, **kwargs))

  summaries = tf.get_collection_ref(tf.GraphKeys.SUMMARIES)
  existing = len(summaries)
  with tf.name_scope(SCOPE):
    applied = cond(should_apply, apply_branch, skip)
  # Summaries of the inner optimizer are empty in skipped steps; inside control flow they cannot be read, so drop them.
  readable = [] if contexts.is_in_control_flow() else summaries[existing:]
  summaries[existing:] = [
    dead_tensors.merge_out_of_branches(summary, b"") for summary in readable if contexts.is_in_branches_only(summary.op)
  ]
  return applied
