# SPDX-License-Identifier: Apache-2.0
"""Private attributes of graphs and ops."""

from typing import Any, Union

from mp_compat._tensorflow import tf


def context_of(place: Union[tf.Graph, tf.Operation]) -> Any:
  """Returns the control-flow context of an op, or of the ops that are built now in a
  graph; None outside of all of them.
  """
  return place._get_control_flow_context()


def add_control_input(op: tf.Operation, control: tf.Operation) -> None:
  """Makes `op` run after `control`, and not if `control` is not computed."""
  op._add_control_input(control)


def replace_input(op: tf.Operation, index: int, tensor: tf.Tensor) -> None:
  """Replaces one input of `op`, by a tensor of the same dtype."""
  op._update_input(index, tensor)
