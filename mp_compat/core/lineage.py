# SPDX-License-Identifier: Apache-2.0
"""Where gradients come from: records of the gradients that were computed, and the search back to them.

The finite check also reads the computed gradients that are passed on changed, whatever changed them: TensorFlow's graph
optimizers and XLA rewrite products, sums and selections so that an overflow is lost which each op alone would show
(docs/design.md). Whether they run depends on the Session.
"""

from typing import Callable, Dict, Iterable, Iterator, List, NamedTuple, Optional, Set, Tuple

from mp_compat._tensorflow import contexts
from mp_compat._tensorflow import graphs
from mp_compat._tensorflow import tf
from mp_compat.core import gradients

TensorKey = Tuple[tf.Operation, int]

# Ops whose output shows each inf and NaN of the input, if the dtypes of both are floating. A Placeholder is what a
# function captures.
_COPIES = frozenset(["Cast", "Identity", "Placeholder", "PlaceholderWithDefault"])


class Computed(NamedTuple):
  """The record of a gradient that `compute_gradients` or `GradientAccumulator.mean` returned."""

  name: str  # of its variable
  values: tf.Tensor  # the values of the gradient, of its shape and dtype
  scaled: Optional[tf.Tensor]  # the same of the scaled loss; None if they are unknown
  scale: Optional[tf.Tensor]  # the loss scale, a float32 scalar; None if it is unknown
  is_window_mean: bool  # of a GradientAccumulator


class Lineage:
  """What gradients derive from, by data. An opaque object: `tf.distribute` passes it on as a per-replica value."""

  def __init__(self) -> None:
    self.computed: List[Computed] = []  # the nearest computed gradients
    self.replaced: List[Computed] = []  # those passed on changed, if ops built now can read them
    self.sums_of_squares: Dict[TensorKey, tf.Tensor] = {}  # those that `grads` derive from, by what is squared
    self.accumulator_takes: List[tf.Operation] = []  # ops that took gradients from a `tf.ConditionalAccumulator`
    self.is_reduced_by_horovod = False  # whether ops of Horovod reduced them after they were computed

  @property
  def hidden_values(self) -> List[tf.Tensor]:
    """Returns the tensors of `replaced`, in which there may be an overflow that the gradients do not show."""
    return [computed.values for computed in self.replaced]

  def is_origin_of(self, tensors: Iterable[tf.Tensor]) -> bool:
    """Returns whether tensors derive from one of the computed gradients."""
    own = {tensor_key(computed.values) for computed in self.computed}
    return any(tensor_key(computed.values) in own for computed in trace(tensors).computed)


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

  Clipping can turn an inf into a finite number (`tf.clip_by_value`), and masking can remove a NaN. The finite check
  therefore covers the computed gradients, too (`replaced`), unless `grads` are copies of them, or ops built now cannot
  read them, because they are in a branch, a loop, a function or an XLA computation that the current context is not in.
  With `check_computed=False`, it covers none of them.
  """
  found = Lineage()
  values = [] if graphs.default_graph() is None else gradients.values_of(grads)
  passed = {key for key, _ in _search(values, _is_original)}
  for key, tensor in _search(values, lambda key: _record_of(key) is not None):
    computed, is_readable = _record_of(key), contexts.is_readable(tensor)
    if is_readable:
      found.sums_of_squares.update((squared, tensor) for squared, _ in _search(_squared_in(tensor), _is_original))
    if computed is None:
      found.accumulator_takes += [tensor.op] if tensor.op.type.endswith("AccumulatorTakeGradient") else []
      found.is_reduced_by_horovod = found.is_reduced_by_horovod or contexts.contains_op(tensor.op, "Horovod")
      continue
    found.computed.append(computed)
    if check_computed and is_readable and key not in passed:
      found.replaced.append(computed)
  return found


def _search(tensors: Iterable[tf.Tensor], is_end: Callable[[TensorKey], bool]) -> Iterator[Tuple[TensorKey, tf.Tensor]]:
  """Yields tensors and those that they derive from by data, once each, with their keys; does not search behind ends."""
  pending, seen = list(tensors)[::-1], set()
  while pending:
    tensor = pending.pop()
    key = (tensor.op, tensor.value_index)
    if key in seen:
      continue
    seen.add(key)
    yield key, tensor
    if not is_end(key):
      inputs = contexts.tensor_inputs(tensor)
      pending += inputs[:1] if tensor.op.type in ("Switch", "RefSwitch") else reversed(inputs)  # not by its predicate


def _is_original(key: TensorKey) -> bool:
  """Returns whether a tensor is not a copy of another floating one."""
  tensor = key[0].outputs[key[1]]
  inputs = contexts.tensor_inputs(tensor) if tensor.op.type in _COPIES and tensor.dtype.is_floating else []
  return not any(value.dtype.is_floating for value in inputs)


def _squared_in(tensor: tf.Tensor) -> List[tf.Tensor]:
  """Returns the tensor, as a list of one, of which a tensor is the sum of squares, for clipping by a norm; else []."""
  sums, squares = tensor.op, tensor.op
  if sums.type == "Sum" and sums.inputs[1].op.type == "Const":
    squares = sums.inputs[0].op
  elif sums.type != "L2Loss":
    return []
  if squares.type not in ("L2Loss", "Mul", "Square") or sums.control_inputs or squares.control_inputs:
    return []
  first, last = squares.inputs[0], squares.inputs[-1]
  return [first] if tensor_key(first) == tensor_key(last) and first.dtype.is_floating else []


def cut(grads: Iterable[gradients.Gradient]) -> List[gradients.Gradient]:
  """Returns the same gradients as new tensors, from which `trace` does not search further back."""
  grads = [gradients.map_values(tf.identity, grad) for grad in grads]
  record(grads, [""] * len(grads))
  return grads


def gradients_of_steps() -> Set[TensorKey]:
  """Returns the keys of all gradients that were applied in the current graph, and of those they derive from."""
  graph = graphs.default_graph()
  return set() if graph is None else graphs.record_in(graph, "gradients_of_steps", set)


def ancestors(tensors: Iterable[tf.Tensor], own: Set[TensorKey]) -> Set[TensorKey]:
  """Returns the keys of tensors and of those that they derive from by data; does not search behind `own`."""
  return {key for key, _ in _search(tensors, own.__contains__)}


def keys_of(tensors: Iterable[tf.Tensor]) -> Set[TensorKey]:
  """Returns the keys of graph tensors; none in eager mode."""
  return set() if graphs.default_graph() is None else set(map(tensor_key, tensors))


def tensor_key(tensor: tf.Tensor) -> TensorKey:
  """Returns a key that identifies a graph tensor; tensors are not hashable in all TensorFlow versions."""
  return tensor.op, tensor.value_index


def _record_of(key: TensorKey) -> Optional[Computed]:
  return _records_in(key[0].graph).get(key)  # Functions read tensors of the graphs around them.


def _records_in(graph: tf.Graph) -> Dict[TensorKey, Computed]:
  return graphs.record_in(graph, "computed_gradients")
