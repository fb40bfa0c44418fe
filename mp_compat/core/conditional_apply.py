# SPDX-License-Identifier: Apache-2.0
"""Applies or skips all updates of a step."""

import contextlib
from typing import (
  Callable,
  ContextManager,
  Dict,
  List,
  Optional,
  Sequence,
  Union,
)

from mp_compat._tensorflow import ops
from mp_compat._tensorflow import tf
from mp_compat.core import distribute
from mp_compat.core import gradients
from mp_compat.core import lineage
from mp_compat.graph import contexts
from mp_compat.graph import control_flow
from mp_compat.graph import gate
from mp_compat.graph import op_names
from mp_compat.graph import runs

SCOPE = "apply_or_skip"  # the name scope of the ops of this package


def apply_in_each_replica(
  should_apply: Union[bool, tf.Tensor],
  apply: Callable[..., object],
  grads: Sequence[distribute.PerReplica],
  args: Sequence[distribute.PerReplica],
  kwargs: Dict[str, distribute.PerReplica],
  scope: distribute.PerReplica,
  reserved: op_names.Reserved,
  skip: Optional[Callable[[], Optional[tf.Operation]]] = None,
) -> Optional[runs.Element]:
  """Calls `apply(grads, *args, **kwargs)` in each replica if `should_apply`, else
  `skip()`; called once for all replicas.

  `apply` builds what it builds without a condition: with the same names of variables,
  of which none is in a branch.

  Args:
    should_apply: a bool, or a scalar bool tensor.
    apply: gets the values of its replica; returns ops, in any structure.
    grads: converted gradients, with None.
    args: further positional arguments.
    kwargs: keyword arguments.
    scope: the name scope of the replica.
    reserved: the name that `apply` asks for, and that another op gets.
    skip: returns an op; None for nothing.

  Returns:
    An op or a tensor that runs either; None in eager mode.
  """
  is_graph = tf.is_tensor(should_apply) and not tf.executing_eagerly()
  has_gate = is_graph and not ops.may_be_compiled()
  with tf.name_scope(SCOPE) as gate_scope:
    should_skip = tf.logical_not(should_apply) if has_gate else None
  # of ops, by the names of those that replace them
  original_names: Dict[str, str] = {}

  def apply_in_scope(
    own_scope: str,
    own_grads: Sequence[gradients.Gradient],
    *own_args: object,
    **own_kwargs: object,
  ) -> object:
    """Returns `apply(...)` with the values of one replica, in its name scope; with a
    gate, of gradients that are not computed in a skipped step.
    """
    if has_gate:
      own_grads = _pass_unless(should_skip, own_grads, original_names)
    with _scope(own_scope):
      return apply(own_grads, *own_args, **own_kwargs)

  def apply_in_all() -> distribute.PerReplica:
    """Returns what `apply` returns, of all replicas."""
    with _reopened_scope(scope):
      return distribute.call_for_each_replica(
        apply_in_scope, scope, grads, *args, **kwargs
      )

  def build() -> List[runs.Element]:
    """Returns the ops and tensors of all replicas, for the gate."""
    with op_names.name_as_alone(reserved, original_names):
      return distribute.ops_of(apply_in_all())

  if has_gate:
    return gate.gate(should_apply, build, skip, gate_scope)
  built_before = len(tf.get_default_graph().get_operations())
  with op_names.name_as_alone(reserved, original_names):
    applied = control_flow.cond(
      should_apply, lambda: _grouped(apply_in_all(), gate_scope), skip or tf.no_op
    )
  gate.check_reads([applied], built_before)
  return applied


def _grouped(applied: distribute.PerReplica, scope: str) -> Optional[tf.Operation]:
  """Returns one op of what was built in all replicas, as a branch of `tf.cond` must;
  None in eager mode.
  """
  with tf.name_scope(scope):
    return distribute.group(applied)


def _pass_unless(
  should_skip: tf.Tensor,
  grads: Sequence[gradients.Gradient],
  original_names: Dict[str, str],
) -> List[gradients.Gradient]:
  """Returns the gradients, which are not computed if `should_skip`; adds to
  `original_names` the names of the ops that they replace, by those of their own.
  """
  values = gradients.values_of(grads)
  keys = contexts.tensor_keys(values)
  distinct = dict(zip(keys, values))  # several variables may have the same gradient
  # Graph optimizers sort the terms of a sum by name. So that they add the gradients of
  # replicas in the same order as without loss scaling, the name begins as there.
  scopes = lineage.unscaled_names(distinct)
  passed = gate.pass_unless(should_skip, list(distinct.values()), scopes, SCOPE)
  for before, after in zip(distinct.values(), passed):
    original_names[after.op.name] = before.op.name
  passed_by_key = dict(zip(distinct, passed))
  all_passed = [passed_by_key[key] for key in keys]
  return gradients.with_values(grads, all_passed)


def _scope(name: str) -> ContextManager[Optional[str]]:
  """Returns a context manager for the name scope in which a replica called.

  `tf.cond` opens a name scope, and a call in replicas that of the current variable
  scope.
  """
  if op_names.name_scope() == name:
    return contextlib.nullcontext()
  if not name:
    return tf.name_scope(None)
  return tf.name_scope(name + "/")


def _reopened_scope(scope: distribute.PerReplica) -> ContextManager[None]:
  """Returns a context manager in which the name scope that a call in replicas opens
  gets the name of the current one; without a strategy, none is opened.

  Each call in a cross-replica context opens the name scope of the variable scope again.
  """
  if not tf.distribute.has_strategy() or tf.executing_eagerly():
    return contextlib.nullcontext()
  replica_scope = distribute.local_results(scope)[0]
  merge_scope = op_names.name_scope()
  if merge_scope == replica_scope:
    return contextlib.nullcontext()
  variable_scope = tf.get_variable_scope().name.rpartition("/")[2]
  reopened = "/".join(filter(None, [replica_scope, variable_scope]))
  return op_names.replace_next_names({reopened: merge_scope})
