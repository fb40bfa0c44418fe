# SPDX-License-Identifier: Apache-2.0
"""Where gradients come from: records of the gradients that were computed, and the search back to them."""

import dataclasses
from typing import Dict, Iterable, Iterator, List, NamedTuple, Optional, Tuple

from mp_compat._tensorflow import contexts
from mp_compat._tensorflow import graphs
from mp_compat._tensorflow import tf
from mp_compat.core import gradients
from mp_compat.core import propagation

TensorKey = Tuple[tf.Operation, int]


class Computed(NamedTuple):
  """The record of a gradient that `compute_gradients` or `GradientAccumulator.mean` returned."""

  name: str  # of its variable
  values: tf.Tensor  # the values of the gradient, of its shape and dtype
  scaled: Optional[tf.Tensor]  # the same of the scaled loss; None if they are unknown
  scale: Optional[tf.Tensor]  # the loss scale, a float32 scalar; None if it is unknown
  is_window_mean: bool  # of a GradientAccumulator


@dataclasses.dataclass(frozen=True, eq=False)
class Lineage:
  """What gradients derive from, by data. An opaque object: `tf.distribute` passes it on as a per-replica value."""

  computed: Tuple[Computed, ...] = ()  # the nearest computed gradients
  replaced: Tuple[Computed, ...] = ()  # those of them that are not passed as they are, and that ops built here can read
  to_check: Tuple[Computed, ...] = ()  # those of `replaced` that the finite check must read besides the gradients
  accumulator_takes: Tuple[tf.Operation, ...] = ()  # ops that took gradients from a `tf.ConditionalAccumulator`
  is_reduced_by_horovod: bool = False  # whether ops of Horovod reduced them after they were computed

  @property
  def hidden_values(self) -> List[tf.Tensor]:
    """Returns the tensors of `to_check`, in which there may be an overflow that the gradients do not show."""
    return [computed.values for computed in self.to_check]


def record(
  grads: Iterable[gradients.Gradient],
  names: Iterable[str],
  scaled: Optional[Iterable[gradients.Gradient]] = None,
  scale: Optional[tf.Tensor] = None,
  are_window_means: bool = False,
) -> None:
  """Records a `Computed` of each gradient in its graph; does nothing in eager mode."""
  if graphs.default_graph() is None:
    return
  grads = list(grads)
  for grad, name, before in zip(grads, names, grads if scaled is None else scaled):
    for values, scaled_values in zip(gradients.values_of([grad]), gradients.values_of([before])):
      _records_in(values.graph)[tensor_key(values)] = Computed(
        name, values, None if scaled is None else scaled_values, scale, are_window_means
      )


def trace(grads: Iterable[gradients.Gradient], check_computed: bool = True) -> Lineage:
  """Searches back from gradients to the nearest computed ones, along data inputs; finds nothing in eager mode.

  Clipping can turn an inf into a finite number (`tf.clip_by_value`), and masking can remove a NaN. The computed
  gradients still contain the inf or NaN, so the finite check covers them, too, unless a path of ops that propagate inf
  and NaN (`mp_compat.core.propagation`) leads from them to one of `grads`, whose check is then exact. Ops built here
  must be able to read them: a branch, loop, function or XLA computation around them must contain these ops. With
  `check_computed=False`, it covers none of them.
  """
  if graphs.default_graph() is None:
    return Lineage()
  values = gradients.values_of(grads)
  passed = {tensor_key(tensor) for tensor in values}
  computed: List[Computed] = []
  replaced: List[Computed] = []
  to_check: List[Computed] = []
  takes: List[tf.Operation] = []
  is_reduced_by_horovod = False
  for tensor, found, is_propagated in _search(values):
    if found is None:
      takes += [tensor.op] if tensor.op.type.endswith("AccumulatorTakeGradient") else []
      is_reduced_by_horovod = is_reduced_by_horovod or contexts.contains_op(tensor.op, "Horovod")
      continue
    computed.append(found)
    if check_computed and tensor_key(tensor) not in passed and contexts.is_readable(tensor):
      replaced.append(found)
      to_check += [] if is_propagated else [found]
  return Lineage(tuple(computed), tuple(replaced), tuple(to_check), tuple(takes), is_reduced_by_horovod)


def _search(values: Iterable[tf.Tensor]) -> Iterator[Tuple[tf.Tensor, Optional[Computed], bool]]:
  """Yields the tensors that `values` derive from, without those behind a computed gradient.

  With each comes its record if it is a computed gradient, and whether its inf and NaN reach `values`. Tensors whose do
  come first, because others may lead to them, too.
  """
  propagated: List[tf.Tensor] = list(values)
  others: List[tf.Tensor] = []
  ops = propagation.PropagatingOps(lambda tensor: tensor_key(tensor) in _records_in(tensor.graph))
  graph, records, seen = None, {}, set()
  while propagated or others:
    is_propagated = bool(propagated)
    tensor = (propagated or others).pop()
    key = tensor_key(tensor)
    if key in seen:
      continue
    seen.add(key)
    if tensor.graph is not graph:  # Functions read tensors of the graphs around them.
      graph, records = tensor.graph, _records_in(tensor.graph)
    yield tensor, records.get(key), is_propagated
    if key not in records:
      inputs = contexts.tensor_inputs(tensor)
      others += inputs
      if is_propagated:
        propagated += ops.inputs_of(tensor, inputs)


def cut(grads: Iterable[gradients.Gradient]) -> List[gradients.Gradient]:
  """Returns the same gradients as new tensors, from which `trace` does not search further back."""
  grads = [gradients.map_values(tf.identity, grad) for grad in grads]
  record(grads, [""] * len(grads))
  return grads


def tensor_key(tensor: tf.Tensor) -> TensorKey:
  """Returns a key that identifies a graph tensor; tensors are not hashable in all TensorFlow versions."""
  return tensor.op, tensor.value_index


def _records_in(graph: tf.Graph) -> Dict[TensorKey, Computed]:
  """Returns the computed gradients of a graph by tensor key. The graph owns the dictionary."""
  return graphs.record_in(graph, "computed_gradients")
