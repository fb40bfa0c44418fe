# SPDX-License-Identifier: Apache-2.0
"""Stores variables in float32 that a model uses in float16 or bfloat16."""

import inspect
from typing import Any, Callable, Dict

from mp_compat._tensorflow import tf
from mp_compat.graph import contexts
from mp_compat.graph import graphs
from mp_compat.graph import records

_HALF = (tf.float16, tf.bfloat16)
# The parameters of a getter after `name`, in the order in which another custom getter
# may pass them by position.
_PARAMETERS = (
  "shape, dtype, initializer, regularizer, reuse, trainable, collections, "
  "caching_device, partitioner, validate_shape, use_resource, constraint, "
  "synchronization, aggregation"
).split(", ")


def float32_variable_storage_getter(
  getter: Callable[..., Any], name: str, *args: object, **kwargs: object
) -> Any:
  """Returns a float16 or bfloat16 variable as a cast of a float32 one; a getter for
  `tf.compat.v1.variable_scope`.

      getter = mp_compat.float32_variable_storage_getter
      with tf.compat.v1.variable_scope("model", custom_getter=getter):
        w = tf.compat.v1.get_variable("w", [3, 3], tf.float16)  # cast from float32

  Trainable variables requested in float16 or bfloat16, by their dtype or by an initial
  value, are stored, initialized, regularized and updated in float32. The result is a
  tensor of the requested dtype and the variable's shape: the model uses rounded values.
  All other variables are returned unchanged. Gradients pass through the cast, so the
  optimizer receives float32 gradients. The collections hold the float32 variables:
  `tf.trainable_variables()` has them for regularization, `assign` and `tf.gradients`.
  `compute_gradients` and `apply_gradients` of this package's optimizers, and the
  functions of `mp_compat.checkpoints`, take a cast for its variable.

  Args:
    getter: the getter that this one customizes.
    name: the variable's name.
    *args: see `tf.compat.v1.get_variable`.
    **kwargs: see `tf.compat.v1.get_variable`.

  Source: "Training With Mixed Precision", NVIDIA, the section on TensorFlow.
  """
  given: Dict[str, object] = dict(zip(_PARAMETERS, args), **kwargs)
  if (
    given.get("trainable") is False
    or given.get("synchronization") == tf.VariableSynchronization.ON_READ
  ):
    return getter(name, *args, **kwargs)
  requested = [tf.as_dtype(given.get("dtype") or tf.float32)]
  if requested[0] in _HALF:
    given["dtype"] = tf.float32

  def in_float32(value: object) -> object:
    """Returns an initial value as float32 if it is float16 or bfloat16, and notes its
    dtype; else as it is.
    """
    dtype = tf.as_dtype(getattr(value, "dtype", tf.float32)).base_dtype
    if dtype not in _HALF:
      return value
    requested.append(dtype)
    return tf.cast(value, tf.float32)

  initial = given.get("initializer")
  if not callable(initial):
    given["initializer"] = in_float32(initial)
  # a function without arguments
  elif given.get("shape") is None and not inspect.isclass(initial):
    given["initializer"] = lambda: in_float32(initial())
  variable = getter(name, **given)
  if requested[-1] not in _HALF:
    return variable
  cast = tf.cast(variable, requested[-1], name=name.rpartition("/")[2] + "_cast")
  graph = graphs.graph_of(cast)
  if graph is not None:
    _variables_by_cast(graph)[contexts.tensor_key(cast)] = variable
  return cast


def variable_of(value: Any) -> Any:
  """Returns the variable of which a tensor is the cast by
  `float32_variable_storage_getter`; any other value as it is.

  The variable is a `PartitionedVariable` if the scope has a partitioner.
  """
  # an eager tensor has no graph
  if not isinstance(value, tf.Tensor) or not hasattr(value, "graph"):
    return value
  return _variables_by_cast(value.graph).get(contexts.tensor_key(value), value)


def variables_of(values: Any) -> Any:
  """Returns a list, dict or nested structure with `variable_of` each value; `values`
  itself if it has no cast.
  """
  if all(variable_of(value) is value for value in tf.nest.flatten(values)):
    return values
  return tf.nest.map_structure(variable_of, values)


def parts_of(values: Any) -> Any:
  """Returns `variables_of` values as a flat list with each part of a partitioned
  variable; `values` itself if it has no cast.
  """
  variables = variables_of(values)
  if variables is values:
    return values
  parts = []
  for variable in tf.nest.flatten(variables):
    is_partitioned = not hasattr(variable, "op")
    parts += list(variable) if is_partitioned else [variable]
  return parts


def _variables_by_cast(graph: tf.Graph) -> Dict[contexts.TensorKey, Any]:
  """Returns the record in `graph` of the float32 variables, by the keys of the casts
  that `float32_variable_storage_getter` returned for them.
  """
  return records.record_in(graph, "variables_by_cast")
