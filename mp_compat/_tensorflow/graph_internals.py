# SPDX-License-Identifier: Apache-2.0
"""Private attributes of graphs, ops and dtypes."""

from typing import Any, Union

from tensorflow.python.framework import op_def_registry  # pyright: ignore[reportAttributeAccessIssue]

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


def is_in_custom_gradient(op: tf.Operation) -> bool:
  """Returns whether an op was built by the gradient of a program's own
  (`tf.custom_gradient`, `Graph.gradient_override_map`).
  """
  forward = op._original_op
  return forward is not None and "_gradient_op_type" in forward.node_def.attr


def set_device(op: tf.Operation, device: str) -> None:
  """Places `op` on a device."""
  op._set_device(device)


def calls_function(op_type: str, graph: tf.Graph) -> bool:
  """Returns whether a type of ops is the name of a function of a graph."""
  return graph._is_function(op_type)


def function_named(name: str, graph: tf.Graph) -> Any:
  """Returns a function of a graph, which has a `definition`; None if it has none of
  this name.
  """
  return graph._get_function(name)


def key_of(graph: tf.Graph) -> str:
  """Returns the key of a graph in the dicts of TensorFlow's objects."""
  return graph._graph_key


def is_reference(dtype: tf.DType) -> bool:
  """Returns whether tensors of a dtype are references to variables."""
  return dtype._is_ref_dtype


def op_definition(op_type: str) -> Any:
  """Returns the `OpDef` of a type of ops; None if it has no known definition."""
  if hasattr(op_def_registry, "get"):
    return op_def_registry.get(op_type)
  return op_def_registry.get_registered_ops().get(op_type)  # TensorFlow 1.15
