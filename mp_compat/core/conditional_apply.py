# SPDX-License-Identifier: Apache-2.0
"""Applies or skips all updates of a step."""

import contextlib
from typing import Callable, Dict, List, Optional, Sequence, Union

from mp_compat._tensorflow import ops
from mp_compat._tensorflow import tf
from mp_compat.core import distribute
from mp_compat.graph import control_flow
from mp_compat.graph import graphs

SCOPE = "apply_or_skip"  # the name scope of the ops of this package


def apply_in_each_replica(
  should_apply: Union[bool, tf.Tensor],
  apply: Callable[..., object],
  args: Sequence[distribute.PerReplica],
  kwargs: Dict[str, distribute.PerReplica],
  scope: distribute.PerReplica,
  data: List[tf.Tensor],
  skip: Optional[Callable[[], Optional[tf.Operation]]] = None,
) -> Optional[graphs.Element]:
  """Calls `apply(*args, **kwargs)` in each replica if `should_apply`, else `skip()`;
  called once for all replicas.

  `apply` builds what it builds without a condition: with the same names of variables,
  of which none is in a branch. `scope` is the name scope of the replica. `data` are the
  gradients, of all local replicas. Returns an op, in eager mode None.
  """
  # Each call in a cross-replica context opens the name scope of the variable scope
  # again. The scope that is opened for the inner optimizer gets the name of the current
  # one.
  replica_scope, merge_scope = distribute.local_results(scope)[0], graphs.name_scope()
  reopened = [replica_scope, tf.get_variable_scope().name.rpartition("/")[2]]
  is_reopened = merge_scope != replica_scope and not tf.executing_eagerly()
  names = {"/".join(filter(None, reopened)): merge_scope} if is_reopened else {}

  def apply_in_scope(
    own_scope: str, *replica_args: object, **replica_kwargs: object
  ) -> object:
    # `tf.cond` opens a name scope, and a call in replicas that of the current variable
    # scope.
    is_other = graphs.name_scope() != own_scope
    with (
      tf.name_scope(own_scope + "/" if own_scope else None)
      if is_other
      else contextlib.nullcontext()
    ):
      return apply(*replica_args, **replica_kwargs)

  def apply_in_all() -> distribute.PerReplica:
    with graphs.replace_next_names(names):
      return distribute.call_for_each_replica(apply_in_scope, scope, *args, **kwargs)

  with tf.name_scope(SCOPE) as gate_scope:
    pass
  if (
    tf.is_tensor(should_apply)
    and not tf.executing_eagerly()
    and not ops.may_be_compiled()
  ):
    return control_flow.gate(
      should_apply, lambda: distribute.ops_of(apply_in_all()), skip, data, gate_scope
    )

  def apply_as_one_op() -> Optional[tf.Operation]:
    applied = apply_in_all()
    with tf.name_scope(gate_scope):
      return distribute.group(applied)

  return control_flow.cond(should_apply, apply_as_one_op, skip or tf.no_op)
