# SPDX-License-Identifier: Apache-2.0
"""Creates variables of one replica; tells which variables are slots, and slices of
others.
"""

from typing import Any, Optional, Set

from tensorflow.core.framework import variable_pb2

from mp_compat._tensorflow import tf


def replica_variable(*args: object, **kwargs: object) -> tf.Variable:
  """Returns a resource variable of this replica that no strategy manages; arguments as
  for `tf.Variable`.
  """
  from tensorflow.python.ops import resource_variable_ops

  return resource_variable_ops.ResourceVariable(*args, **kwargs)


def is_made_by_get_variable(variable: tf.Variable) -> bool:
  """Returns whether `tf.get_variable` made the variable in the current graph, as it
  also makes slots.
  """
  return id(variable) in ids_of_get_variable()


def ids_of_get_variable() -> Set[int]:
  """Returns the ids of the variables that `tf.get_variable` made in the current graph.
  Variables have no hash, and == may compare their values.
  """
  from tensorflow.python.ops import variable_scope

  store = variable_scope._get_default_variable_store()
  return {id(variable) for variable in store._vars.values()}


def save_slice_info(variable: tf.Variable) -> Optional[Any]:
  """Returns the slice of a partitioned variable, with the attributes `full_name`,
  `full_shape`, `var_offset` and `var_shape`; None for other variables.
  """
  return variable._get_save_slice_info()


def names_of_model(meta_graph: tf.MetaGraphDef) -> Set[str]:
  """Returns the names of the trainable variables of a graph, and of its global step."""
  names: Set[str] = set()
  for key in (tf.GraphKeys.TRAINABLE_VARIABLES, tf.GraphKeys.GLOBAL_STEP):
    for variable in meta_graph.collection_def[key].bytes_list.value:
      definition = variable_pb2.VariableDef.FromString(variable)
      names.add(definition.variable_name.rpartition(":")[0])
  return names
