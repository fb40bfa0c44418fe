# SPDX-License-Identifier: Apache-2.0
"""Where gradients come from: records of the gradients that were computed, and the
search back to them.

The finite check also reads the computed gradients that are passed on changed, whatever
changed them: TensorFlow's graph optimizers and XLA rewrite products, sums and
selections so that an overflow is lost which each op alone would show (docs/design.md).
Whether they run depends on the Session.
"""

import collections
from typing import Dict, Iterable, List, Mapping, NamedTuple, Optional, Set

from mp_compat._tensorflow import tf
from mp_compat.core import gradients
from mp_compat.graph import contexts
from mp_compat.graph import graphs
from mp_compat.graph import records
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
  is_name_of_variable: bool  # otherwise `name` is a position in a list


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
    # whether ops of Horovod reduced them after they were computed
    self.is_reduced_by_horovod = False
    # whether gradients may be arguments of a function, or variables of a loop that is
    # a function, whose origin is unknown
    self.has_unknown_arguments = False

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
  are_names_of_variables: bool = True,
) -> None:
  """Records a `Computed` of each gradient in its graph; does nothing in eager mode."""
  if graphs.default_graph() is None:
    return
  grads = list(grads)
  before = grads if scaled is None else scaled
  for grad, name, scaled_grad in zip(grads, names, before):
    if grad is None:
      continue
    (values,) = gradients.values_of([grad])
    (scaled_values,) = gradients.values_of([scaled_grad])
    _records_in(values.graph)[tensor_key(values)] = Computed(
      name=name,
      values=values,
      scaled=None if scaled is None else scaled_values,
      scale=scale,
      is_window_mean=are_window_means,
      is_name_of_variable=are_names_of_variables,
    )


def name_computed(pairs: Iterable[gradients.GradAndVar]) -> None:
  """Names computed gradients, of which only the position is known, after the variable
  to which a gradient that derives from them is applied.
  """
  if graphs.default_graph() is None:
    return
  records = _records()
  if all(computed.is_name_of_variable for computed in records.values()):
    return
  for grad, variable in pairs:
    for values in gradients.values_of([grad]):
      computed = _nearest(values, records)
      if computed is not None and not computed.is_name_of_variable:
        named = computed._replace(name=variable.name, is_name_of_variable=True)
        _records_in(computed.values.graph)[tensor_key(computed.values)] = named


def _nearest(
  tensor: tf.Tensor, records: Mapping[TensorKey, Computed]
) -> Optional[Computed]:
  """Returns the first computed gradient that a search back from a tensor finds, along
  first inputs first: for `g * factor` that of `g`.
  """
  seen: Set[TensorKey] = set()
  pending = [tensor]
  while pending:
    found = pending.pop()
    key = tensor_key(found)
    if key in records:
      return records[key]
    if key not in seen:
      seen.add(key)
      pending += reversed(contexts.data_inputs(found))
  return None


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
  values = gradients.values_of(grads)
  records = _records()
  passed = contexts.keys_of(contexts.search_back(values, _copied))
  arguments: List[tf.Tensor] = []
  for tensor in contexts.search_back(values, contexts.data_inputs, records):
    computed = records.get(tensor_key(tensor))
    is_readable = contexts.is_readable(tensor)
    squared = _squared_in(tensor) if is_readable else []
    if squared:
      copied = contexts.keys_of(contexts.search_back(squared, _copied))
      found.sums_of_squares.update(dict.fromkeys(copied, tensor))
    if computed is not None:
      found.computed.append(computed)
      is_passed = tensor_key(tensor) in passed
      if check_computed and is_readable and not is_passed:
        found.replaced.append(computed)
      continue
    if contexts.is_argument(tensor):
      arguments.append(tensor)
    if tensor.op.type.endswith("AccumulatorTakeGradient"):
      found.accumulator_takes.append(tensor.op)
    if contexts.contains_op(tensor.op, "Horovod"):
      found.is_reduced_by_horovod = True
  found.has_unknown_arguments = check_computed and _may_be_gradients(
    arguments, bool(found.computed)
  )
  return found


def _may_be_gradients(arguments: List[tf.Tensor], has_computed: bool) -> bool:
  """Returns whether one of the arguments of functions may be a gradient that was
  computed outside of the function. A scalar is a factor of other gradients, if any.
  """
  around = list(graphs.enclosing_graphs())
  for argument in arguments:
    is_factor = has_computed and argument.shape.rank == 0
    outside = around[around.index(argument.graph) + 1 :]
    if not is_factor and any(_records_in(graph) for graph in outside):
      return True
  return False


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


def unscaled_name(values: tf.Tensor) -> str:
  """Returns the name of the op that would compute a gradient without loss scaling: for
  one that `compute_gradients` returned that of the scaled gradient, else its own.
  """
  computed = _records().get(tensor_key(values))
  if computed is None or computed.scaled is None:
    return values.op.name
  return computed.scaled.op.name


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
  return records.record_in(graph, "computed_gradients")
