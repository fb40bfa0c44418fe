# SPDX-License-Identifier: Apache-2.0
"""Computes a tensor of a step again in a wider dtype, from values that were fetched."""

from typing import AbstractSet, Any, Dict, Iterable, List, NamedTuple, Optional, Set

import numpy as np

from mp_compat._tensorflow import tf
from mp_compat.graph import contexts
from mp_compat.monitoring import dataflow

Values = Dict[contexts.TensorKey, np.ndarray]

NARROW = (tf.float16, tf.bfloat16)
# Ops of Horovod, NCCL and TensorFlow whose results depend on other processes.
RECEIVING = ("Collective", "Horovod", "Nccl")
# The most values of a chain to compute again.
_MOST_VALUES = 2**27
# By the dtype to compute in: what to compute in it, or in its complex dtype, instead.
_WIDER = {
  tf.float32: dict.fromkeys(NARROW, tf.float32),
  tf.float64: dict.fromkeys([*NARROW, tf.float32], tf.float64),
}
_WIDER[tf.float64][tf.complex64] = tf.complex128


class Chain(NamedTuple):
  """The last ops that compute a tensor.

  Attributes:
    ops: The ops, that of the tensor first.
    begin: What they read and do not compute.
  """

  ops: List[tf.Operation]
  begin: List[tf.Tensor]

  def narrow_ops(self) -> List[tf.Operation]:
    """Returns the ops that compute float16 or bfloat16 values."""
    return [op for op in self.ops if op.outputs[0].dtype.base_dtype in NARROW]


class Recomputation:
  """Computes one tensor of a step again.

  Attributes:
    tensor: The tensor.
  """

  def __init__(
    self,
    tensor: tf.Tensor,
    fetched: Values,
    fed: AbstractSet[contexts.TensorKey] = frozenset(),
  ) -> None:
    """Prepares to compute `tensor` from the values of other tensors of the step; the
    run has not computed those in `fed`.
    """
    self.tensor = tensor
    self._fetched = fetched
    self._fed = fed

  def is_input(self) -> bool:
    """Returns whether the tensor was computed from no others."""
    return (
      not len(self.tensor.op.inputs) or contexts.tensor_key(self.tensor) in self._fed
    )

  def value_of(self, tensor: tf.Tensor) -> Optional[np.ndarray]:
    """Returns the fetched values of a tensor; None if they are not known."""
    return self._fetched.get(contexts.tensor_key(tensor))

  def with_value(self, tensor: tf.Tensor, value: np.ndarray) -> "Recomputation":
    """Returns a recomputation for which a tensor has another value."""
    changed = {**self._fetched, contexts.tensor_key(tensor): value}
    return Recomputation(self.tensor, changed, self._fed)

  def chain(self, depth: int) -> Chain:
    """Returns the ops that are at most `depth` in a row before the tensor, as far as
    they can be computed again: floating-point functions of known values.
    """
    ops = [self.tensor.op]
    known = set(ops)
    last = ops
    for _ in range(depth - 1):
      last = self._functions_before(last, known)
      ops = ops + last
    begin: Dict[contexts.TensorKey, tf.Tensor] = {}  # in order, each once
    for op in ops:
      for value in op.inputs:
        if value.op not in known:
          begin[contexts.tensor_key(value)] = value
    return Chain(ops, list(begin.values()))

  def _functions_before(
    self, last: List[tf.Operation], known: Set[tf.Operation]
  ) -> List[tf.Operation]:
    """Returns the ops that compute the inputs of the ops `last` and can be computed
    again, without those in `known`; adds them to it.
    """
    found: List[tf.Operation] = []
    for op in last:
      for value in op.inputs:
        before = value.op
        is_fed = contexts.tensor_key(value) in self._fed
        if before not in known and not is_fed and self._is_function(before):
          known.add(before)
          found.append(before)
    return found

  def _is_function(self, op: tf.Operation) -> bool:
    """Returns whether an op computes floating-point values from such, and all that it
    reads was fetched.
    """
    if op.type in dataflow.HIDING or op.type in dataflow.ROUTING:
      return False
    if op.type.startswith(RECEIVING) or has_effects(op):
      return False
    if any(self.value_of(value) is None for value in op.inputs):
      return False
    # Random numbers and casts of integers have no such inputs.
    return _has_floating(op.inputs) and _has_floating(op.outputs)

  def shortest(self, dtype: tf.DType, deepest: int) -> Optional[Chain]:
    """Returns the shortest chain that gives a finite result in a dtype; None if the
    longest does not: a result of a shorter one alone mixes values with roundings of
    the same.

    if the result of the longest chain is finite:
      with chains of 1, 2, 4, 8 and so on ops in a row, until the result is finite:
        the shortest is between this chain and the one before it

    Args:
      dtype: float32 or float64.
      deepest: what `deepest(dtype)` returns.
    """
    if not self.is_finite_in(dtype, self.chain(deepest)):
      return None
    depth = 1
    while depth < deepest and not self.is_finite_in(dtype, self.chain(depth)):
      depth *= 2
    first = self._first(dtype, depth // 2, min(depth, deepest), is_finite=True)
    return self.chain(first)

  def deepest(self, dtype: tf.DType) -> int:
    """Returns the depth of the longest chain that TensorFlow can compute in a dtype."""
    depth = 1
    while self._has_more(depth):
      depth *= 2
    is_finite = self.is_finite_in(dtype, self.chain(depth))
    if is_finite is not None:
      return depth
    return self._first(dtype, 0, depth, is_finite=None) - 1

  def _has_more(self, depth: int) -> bool:
    """Returns whether a chain can be twice as long; not if it has too many values."""
    longer = self.chain(2 * depth)
    is_longer = len(longer.ops) > len(self.chain(depth).ops)
    return is_longer and self._size(longer) <= _MOST_VALUES

  def _first(
    self, dtype: tf.DType, low: int, high: int, is_finite: Optional[bool]
  ) -> int:
    """Returns the smallest depth above `low` with a result of `is_finite_in`, which it
    is at `high`.
    """
    while high - low > 1:
      middle = (low + high) // 2
      if self.is_finite_in(dtype, self.chain(middle)) is is_finite:
        high = middle
      else:
        low = middle
    return high

  def _size(self, chain: Chain) -> int:
    """Returns the number of values that a chain computes."""
    size = 0
    for op in chain.ops:
      values = self.value_of(op.outputs[0])
      size += 0 if values is None else int(np.size(values))
    return size

  def is_finite_in(self, dtype: tf.DType, chain: Chain) -> Optional[bool]:
    """Returns whether the result of a chain in a dtype is finite; None if TensorFlow
    cannot compute it.
    """
    result = self.compute(dtype, chain)
    return None if result is None else bool(is_finite(result).all())

  def compute(self, dtype: tf.DType, chain: Chain) -> Optional[np.ndarray]:
    """Computes the tensor again on the CPU, in a graph of its own.

    Args:
      dtype: float32 or float64: what is narrower is computed in it.
      chain: the ops to compute again.

    Returns:
      The values; None if TensorFlow has no such kernel.
    """
    inputs: Dict[str, tf.Tensor] = {}
    feeds: Dict[tf.Tensor, np.ndarray] = {}
    with tf.Graph().as_default():
      for tensor in chain.begin:
        values = self._fetched[contexts.tensor_key(tensor)]
        wide = _wider(tensor.dtype.base_dtype, dtype)
        placeholder = tf.placeholder(wide, np.shape(values))
        inputs[tensor.name] = placeholder
        feeds[placeholder] = np.asarray(values).astype(wide.as_numpy_dtype)
      try:
        return self._run(_definition(chain, dtype), inputs, feeds)
      except (tf.errors.OpError, TypeError, ValueError):
        return None

  def _run(
    self,
    definition: tf.GraphDef,
    inputs: Dict[str, tf.Tensor],
    feeds: Dict[tf.Tensor, np.ndarray],
  ) -> np.ndarray:
    """Returns the value of the tensor in a graph definition.

    Args:
      definition: the ops of a chain.
      inputs: by the names of what they read, the placeholders for it.
      feeds: the values of the placeholders.
    """
    config = tf.ConfigProto(device_count={"GPU": 0})
    config.graph_options.rewrite_options.disable_meta_optimizer = True
    name = self.tensor.name
    (result,) = tf.import_graph_def(definition, inputs, [name], name="again")
    with tf.Session(config=config) as sess:
      return sess.run(result, feeds)


def has_effects(op: tf.Operation) -> bool:
  """Returns whether an op may have effects, as a Python function, also one that the
  program calls stateless, or a state of its own.
  """
  return op.op_def.is_stateful or op.type == "PyFuncStateless"


def is_finite(values: np.ndarray) -> np.ndarray:
  """Returns whether values of any dtype are finite."""
  values = np.asarray(values)
  if values.dtype.kind in "fc":
    return np.isfinite(values)
  if values.dtype.kind in "iub":
    return np.ones(values.shape, bool)
  return np.isfinite(values.astype(np.float32))  # bfloat16


def _has_floating(tensors: Iterable[tf.Tensor]) -> bool:
  """Returns whether one of the tensors has a floating or complex dtype."""
  return any(each.dtype.is_floating or each.dtype.is_complex for each in tensors)


def _definition(chain: Chain, dtype: tf.DType) -> tf.GraphDef:
  """Returns a graph definition with copies of ops, with wider dtypes; without what they
  wait for, their devices, and attributes of their graph.
  """
  definition = tf.GraphDef()
  definition.versions.CopyFrom(chain.ops[0].graph.graph_def_versions)
  for op in chain.ops:
    node = definition.node.add()
    node.CopyFrom(op.node_def)
    node.device = ""
    del node.input[:]
    node.input.extend(value.name for value in op.inputs)
    for key in list(node.attr):
      if key.startswith("_"):
        del node.attr[key]
    for attribute in node.attr.values():
      _widen(attribute, dtype)
  return definition


def _widen(attribute: Any, dtype: tf.DType) -> None:
  """Makes the dtypes in an attribute of a node wider."""
  if attribute.HasField("type"):
    attribute.type = _wider_enum(attribute.type, dtype)
  for place, narrow in enumerate(attribute.list.type):
    attribute.list.type[place] = _wider_enum(narrow, dtype)


def _wider(dtype: tf.DType, wide: tf.DType) -> tf.DType:
  """Returns what to compute in instead of a dtype: `wide`, or its complex dtype; the
  dtype itself if it is no narrower.
  """
  return _WIDER[wide].get(dtype, dtype)


def _wider_enum(enum: int, wide: tf.DType) -> int:
  """Returns the same for the enums of dtypes."""
  return _wider(tf.as_dtype(enum), wide).as_datatype_enum
