# SPDX-License-Identifier: Apache-2.0
"""Where gradients come from: records of the gradients that were computed, and the
search back to them.

The finite check also reads the computed gradients that are passed on changed, whatever
changed them: TensorFlow's graph optimizers and XLA rewrite products, sums and
selections so that an overflow is lost which each op alone would show (docs/design.md).
Whether they run depends on the Session.
"""

import collections
from typing import Dict, Iterable, List, Mapping, NamedTuple, Optional

from mp_compat._tensorflow import tf
from mp_compat.core import gradients
from mp_compat.graph import contexts
from mp_compat.graph import graphs
from mp_compat.graph.contexts import TensorKey
from mp_compat.graph.contexts import tensor_key

# Ops whose output shows each inf and NaN of the input, if the dtypes of both are
# floating. A Placeholder is what a function captures.
_COPIES = frozenset(["Cast", "Identity", "Placeholder", "PlaceholderWithDefault"])


class Computed(NamedTuple):
  """The record of a gradient that `compute_gradients` or `GradientAccumulator.mean`
  returned.
  """

  name: str  # of its variable
  values: tf.Tensor  # the values of the gradient, of its shape and dtype
  scaled: Optional[tf.Tensor]  # the same of the scaled loss; None if they are unknown
  scale: Optional[tf.Tensor]  # the loss scale, a float32 scalar; None if it is unknown
  is_window_mean: bool  # of a GradientAccumulator


class Lineage:
  """What gradients derive from, by data. An opaque object: `tf.distribute` passes it on
  as a per-replica value.
  """

  def __init__(self) -> None:
    self.computed: List[Computed] = []  # the nearest computed gradients
    # those passed on changed, if ops built now can read them
    self.replaced: List[Computed] = []
    # those that `grads` derive from, by what is squared
    self.sums_of_squares: Dict[TensorKey, tf.Tensor] = {}
    # ops that took gradients from a `tf.ConditionalAccumulator`
    self.accumulator_takes: List[tf.Operation] = []
    self.is_reduced_by_horovod = (
      False  # whether ops of Horovod reduced them after they were computed
    )

  @property
  def hidden_values(self) -> List[tf.Tensor]:
    """Returns the tensors of `replaced`, in which there may be an overflow that the
    gradients do not show.
    """
    return [computed.values for computed in self.replaced]

  def is_origin_of(self, tensors: List[tf.Tensor]) -> bool:
    """Returns whether tensors derive from one of the computed gradients."""
    if not tensors:  # in most steps
      return False
    own = contexts.keys_of(computed.values for computed in self.computed)
    found = contexts.search_back(tensors, contexts.data_inputs, _records())
    return not own.isdisjoint(contexts.keys_of(found))


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
    for values, scaled_values in zip(
      gradients.values_of([grad]), gradients.values_of([before])
    ):
      _records_in(values.graph)[tensor_key(values)] = Computed(
        name, values, None if scaled is None else scaled_values, scale, are_window_means
      )


def trace(grads: Iterable[gradients.Gradient], check_computed: bool = True) -> Lineage:
  """Searches back from gradients to the nearest computed ones, along data inputs; finds
  nothing in eager mode.

  Clipping can turn an inf into a finite number (`tf.clip_by_value`), and masking can
  remove a NaN. The finite check therefore covers the computed gradients, too
  (`replaced`), unless `grads` are copies of them, or ops built now cannot read them,
  because they are in a branch, a loop, a function or an XLA computation that the
  current context is not in. With `check_computed=False`, it covers none of them.
  """
  found = Lineage()
  if graphs.default_graph() is None:
    return found
  values, records = gradients.values_of(grads), _records()
  passed = contexts.keys_of(contexts.search_back(values, _copied))
  for tensor in contexts.search_back(values, contexts.data_inputs, records):
    computed, is_readable = (
      records.get(tensor_key(tensor)),
      contexts.is_readable(tensor),
    )
    squared = _squared_in(tensor) if is_readable else []
    if squared:
      copied = contexts.keys_of(contexts.search_back(squared, _copied))
      found.sums_of_squares.update(dict.fromkeys(copied, tensor))
    if computed is None:
      found.accumulator_takes += (
        [tensor.op] if tensor.op.type.endswith("AccumulatorTakeGradient") else []
      )
      found.is_reduced_by_horovod = found.is_reduced_by_horovod or contexts.contains_op(
        tensor.op, "Horovod"
      )
      continue
    found.computed.append(computed)
    if check_computed and is_readable and tensor_key(tensor) not in passed:
      found.replaced.append(computed)
  return found


def _copied(tensor: tf.Tensor) -> List[tf.Tensor]:
  """Returns the floating tensor of which a floating one is a copy, as a list of one;
  else [].
  """
  inputs = (
    contexts.tensor_inputs(tensor)
    if tensor.op.type in _COPIES and tensor.dtype.is_floating
    else []
  )
  return [value for value in inputs if value.dtype.is_floating]


def _squared_in(tensor: tf.Tensor) -> List[tf.Tensor]:
  """Returns the tensor, as a list of one, of which a tensor is the sum of squares, for
  clipping by a norm; else [].
  """
  sums, squares = tensor.op, tensor.op
  if sums.type == "Sum" and sums.inputs[1].op.type == "Const":
    squares = sums.inputs[0].op
  elif sums.type != "L2Loss":
    return []
  if (
    squares.type not in ("L2Loss", "Mul", "Square")
    or sums.control_inputs
    or squares.control_inputs
  ):
    return []
  first, last = squares.inputs[0], squares.inputs[-1]
  return (
    [first] if tensor_key(first) == tensor_key(last) and first.dtype.is_floating else []
  )


def cut(grads: Iterable[gradients.Gradient]) -> List[gradients.Gradient]:
  """Returns the same gradients as new tensors, from which `trace` does not search
  further back.
  """
  grads = [gradients.map_values(tf.identity, grad) for grad in grads]
  record(grads, [""] * len(grads))
  return grads


def _records() -> Mapping[TensorKey, Computed]:
  """Returns the records of the current graph and, in a function, of the graphs around
  it, whose tensors it reads.
  """
  return collections.ChainMap(*map(_records_in, graphs.enclosing_graphs()))


def _records_in(graph: tf.Graph) -> Dict[TensorKey, Computed]:
  return graphs.record_in(graph, "computed_gradients")
