# SPDX-License-Identifier: Apache-2.0
"""Where gradients come from: records of the gradients that were computed, and the
search back to them.

The finite check also reads the computed gradients that are passed on changed, whatever
changed them: TensorFlow's graph optimizers and XLA rewrite products, sums and
selections so that an overflow is lost which each op alone would show (docs/design.md).
Whether they run depends on the Session.
"""

import collections
from typing import (
  Container,
  Dict,
  Iterable,
  List,
  Mapping,
  NamedTuple,
  Optional,
  Sequence,
  Set,
)

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
  """The record of a gradient that `compute_gradients`, `unscale_gradients`,
  `GradientAccumulator.mean` or `cut` returned.

  Attributes:
    name: The name of its variable.
    values: The values of the gradient, of its shape and dtype.
    scaled: The values of the gradient of the scaled loss, of the same shape and dtype;
      None if they are unknown.
    scale: The loss scale, a float32 scalar; None if it is unknown.
    is_window_mean: Whether it is a mean of a GradientAccumulator.
    is_name_of_variable: Whether `name` is that of a variable; otherwise it is a
      position in a list.
  """

  name: str
  values: tf.Tensor
  scaled: Optional[tf.Tensor]
  scale: Optional[tf.Tensor]
  is_window_mean: bool
  is_name_of_variable: bool


class Lineage:
  """What gradients derive from, by data. An opaque object: `tf.distribute` passes it on
  as a per-replica value.

  Attributes:
    computed: The nearest computed gradients.
    hidden: Those of them that are passed on changed, if ops built now can read them: in
      them there may be an overflow that the gradients do not show.
    sums_of_squares: Tensors that the gradients derive from and that are sums of
      squares, by the keys of what is squared.
    accumulator_takes: Ops that took gradients from a `tf.ConditionalAccumulator`.
    is_reduced_by_horovod: Whether ops of Horovod reduced the gradients after they were
      computed.
    passed: The keys of the gradients, and of what they are copies of.
    arguments: Arguments of functions, and variables of loops that are functions, that
      the gradients derive from: what these derive from is unknown.
  """

  def __init__(self) -> None:
    self.computed: List[Computed] = []
    self.hidden: List[Computed] = []
    self.sums_of_squares: Dict[TensorKey, tf.Tensor] = {}
    self.accumulator_takes: List[tf.Operation] = []
    self.is_reduced_by_horovod = False
    self.passed: Container[TensorKey] = ()
    self.arguments: List[tf.Tensor] = []

  @property
  def hidden_values(self) -> List[tf.Tensor]:
    """Returns the tensors of `hidden`."""
    return [computed.values for computed in self.hidden]

  @property
  def has_window_means(self) -> bool:
    """Returns whether gradients are means of a GradientAccumulator."""
    return any(computed.is_window_mean for computed in self.computed)

  def is_origin_of(self, tensors: List[tf.Tensor]) -> bool:
    """Returns whether tensors derive from one of the computed gradients."""
    own = contexts.keys_of(computed.values for computed in self.computed)
    found = contexts.search_back_by_key(tensors, contexts.data_inputs, _records())
    return not own.isdisjoint(found)

  def has_gradients_as_arguments(self) -> bool:
    """Returns whether one of `arguments` may be a gradient that was computed in a graph
    outside of the function: whether it is `passed` as one, or such gradients are known
    already. A scalar is a factor of other gradients, if any.
    """
    around = graphs.enclosing_graphs()
    for argument in self.arguments:
      outside = around[around.index(argument.graph) + 1 :]
      if outside and tensor_key(argument) in self.passed:
        return True
      is_factor = bool(self.computed) and argument.shape.rank == 0
      if not is_factor and any(_records_in(graph) for graph in outside):
        return True
    return False


def record(
  grads: Iterable[gradients.Gradient],
  names: Iterable[str],
  scaled: Optional[Iterable[gradients.Gradient]] = None,
  scale: Optional[tf.Tensor] = None,
  are_window_means: bool = False,
  are_names_of_variables: bool = True,
) -> None:
  """Records a `Computed` of each gradient in its graph; does nothing in eager mode."""
  if tf.executing_eagerly():
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


def _name_computed(
  grads: Iterable[gradients.Gradient],
  variables: Iterable[tf.Variable],
  known: Mapping[TensorKey, Computed],
) -> None:
  """Names computed gradients, of which only the position is known, after the variable
  to which a gradient that derives from them is applied.
  """
  if all(computed.is_name_of_variable for computed in known.values()):
    return
  for grad, variable in zip(grads, variables):
    for values in gradients.values_of([grad]):
      computed = _nearest(values, known)
      if computed is not None and not computed.is_name_of_variable:
        named = computed._replace(name=variable.name, is_name_of_variable=True)
        _records_in(computed.values.graph)[tensor_key(computed.values)] = named


def _nearest(
  tensor: tf.Tensor, known: Mapping[TensorKey, Computed]
) -> Optional[Computed]:
  """Returns the first computed gradient that a search back from a tensor finds, along
  first inputs first: for `g * factor` that of `g`.
  """
  seen: Set[TensorKey] = set()
  pending = [tensor]
  while pending:
    found = pending.pop()
    key = tensor_key(found)
    if key in known:
      return known[key]
    if key not in seen:
      seen.add(key)
      pending += reversed(contexts.data_inputs(found))
  return None


def trace(
  grads: Sequence[gradients.Gradient],
  check_computed: bool = True,
  variables: Sequence[tf.Variable] = (),
) -> Lineage:
  """Searches back from gradients to the nearest computed ones, along data inputs; finds
  nothing in eager mode.

      for tensor in what grads derive from, no further back than computed gradients:
        if tensor is a sum of squares: sums_of_squares[what is squared] = tensor
        if tensor is a computed gradient:
          add it to computed
          if tensor can be read, and no gradient is a copy of it: add it to hidden
        else if tensor is an argument of a function: add it to arguments
        else if an accumulator or Horovod returned it: say so

  Clipping can turn an inf into a finite number (`tf.clip_by_value`), and masking can
  remove a NaN. The finite check therefore covers the computed gradients, too
  (`hidden`), unless `grads` are copies of them, or ops built now cannot read them,
  because they are in a branch, a loop, a function or an XLA computation that the
  current context is not in. With `check_computed=False`, it covers none of them.

  If the `variables` to which gradients are applied are given, computed gradients of
  which only the position is known are named after them.

  Args:
    grads: dense gradients, `tf.IndexedSlices` and None, of any shapes and dtypes.
    check_computed: whether the caller checks `hidden`, too.
    variables: one for each of `grads`, or ().
  """
  found = Lineage()
  if tf.executing_eagerly():
    return found
  known = _records()
  _name_computed(grads, variables, known)
  values = gradients.values_of(grads)
  # the gradients, and what they are copies of: a check of them sees every overflow
  found.passed = contexts.search_back_by_key(values, _copied)
  sources = contexts.search_back_by_key(values, contexts.data_inputs, known)
  for key, tensor in sources.items():
    is_readable = contexts.is_readable(tensor)
    if is_readable:
      _add_sum_of_squares(tensor, found.sums_of_squares)
    if key in known:
      found.computed.append(known[key])
      if check_computed and is_readable and key not in found.passed:
        found.hidden.append(known[key])
    else:
      if contexts.is_argument(tensor):
        found.arguments.append(tensor)
      _add_exchange(tensor.op, found)
  return found


def _add_exchange(op: tf.Operation, found: Lineage) -> None:
  """Notes an op that exchanges gradients with other processes."""
  if op.type.endswith("AccumulatorTakeGradient"):
    found.accumulator_takes.append(op)
  if contexts.contains_op(op, "Horovod"):
    found.is_reduced_by_horovod = True


def _add_sum_of_squares(
  tensor: tf.Tensor, sums_of_squares: Dict[TensorKey, tf.Tensor]
) -> None:
  """Adds a tensor that is the sum of squares of another, by the keys of the other one
  and of what that is a copy of.
  """
  squared = _squared_in(tensor)
  if squared:
    copied = contexts.search_back_by_key(squared, _copied)
    sums_of_squares.update(dict.fromkeys(copied, tensor))


def _copied(tensor: tf.Tensor) -> List[tf.Tensor]:
  """Returns the floating tensor of which a floating one is a copy, as a list of one;
  else [].
  """
  if tensor.op.type not in _COPIES or not tensor.dtype.is_floating:
    return []
  inputs = contexts.tensor_inputs(tensor)
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
  if squares.type not in ("L2Loss", "Mul", "Square"):
    return []
  if sums.control_inputs or squares.control_inputs:
    return []
  first, last = squares.inputs[0], squares.inputs[-1]
  is_square = tensor_key(first) == tensor_key(last)
  if is_square and first.dtype.is_floating:
    return [first]
  return []


def unscaled_names(values: Mapping[TensorKey, tf.Tensor]) -> List[str]:
  """Returns, for the values of each gradient, by their keys, the name of the op that
  would compute them without loss scaling: for a gradient that `compute_gradients`
  returned that of the scaled gradient, else its own.
  """
  known = _records()
  names: List[str] = []
  for key, tensor in values.items():
    computed = known.get(key)
    if computed is None or computed.scaled is None:
      names.append(tensor.op.name)
    else:
      names.append(computed.scaled.op.name)
  return names


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
  """Returns the records that were made in `graph`, by the keys of the gradients'
  values.
  """
  return records.record_in(graph, "computed_gradients")
