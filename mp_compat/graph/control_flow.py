# SPDX-License-Identifier: Apache-2.0
"""Builds conditionals whose branches are ops of the same graph."""

from typing import Callable, List, Optional, Union

from mp_compat._tensorflow import ops
from mp_compat._tensorflow import tf
from mp_compat.graph.runs import Element

_Branch = Callable[[], Optional[Element]]


def cond(
  predicate: Union[bool, tf.Tensor], true_fn: _Branch, false_fn: _Branch = tf.no_op
) -> Optional[Element]:
  """Returns `true_fn()` if `predicate`, else `false_fn()`; in a graph, calls each once
  to build the branches.

  In a plain graph, the ops of a branch run after an output of a Switch, by control
  dependencies. In functions and XLA contexts, it is `tf.cond`. The branches return ops,
  or tensors of one dtype and shape; in eager mode also None.
  """
  if not tf.is_tensor(predicate) or tf.executing_eagerly():
    return true_fn() if predicate else false_fn()
  if ops.may_be_compiled():
    return tf.cond(predicate, true_fn, false_fn)
  with tf.name_scope("cond"):
    if_false, if_true = pivots(predicate, predicate)
    results = [_branch(false_fn, if_false), _branch(true_fn, if_true)]
    return tf.raw_ops.Merge(inputs=results).output


def _branch(build: _Branch, pivot: tf.Tensor) -> tf.Tensor:
  """Returns what `build()` returns, or a tensor that is computed after it; all that it
  builds runs after `pivot`.
  """
  with tf.control_dependencies([pivot]):
    result = build()
    if tf.is_tensor(result):
      return tf.identity(result)
    return after([result], pivot)


def pivots(predicate: tf.Tensor, data: tf.Tensor) -> List[tf.Tensor]:
  """Returns two copies of `data`: a run computes the first if `predicate` is False, the
  second if it is True.
  """
  outputs = tf.raw_ops.Switch(data=data, pred=predicate)
  # Grappler removes a control edge from an Identity to an op if another path implies
  # it, even through a ControlTrigger, which runs in any case; but no edge from a Merge.
  return [tf.raw_ops.Merge(inputs=[output]).output for output in outputs]


def after(elements: List[Element], pivot: tf.Tensor) -> tf.Tensor:
  """Returns a copy of `pivot` that is computed after ops or tensors."""
  with tf.control_dependencies([pivot] + elements):
    return tf.identity(pivot)
