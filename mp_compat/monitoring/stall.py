# SPDX-License-Identifier: Apache-2.0
"""Explains why all steps are skipped, from the values of a step: its gradients, loss,
variables and both passes.
"""

from typing import Dict, Iterable, List, NamedTuple, Optional, Set, Tuple, Union

import numpy as np

from mp_compat._tensorflow import tf
from mp_compat.graph import contexts
from mp_compat.graph import dead_tensors
from mp_compat.graph import graphs
from mp_compat.graph import runs
from mp_compat.monitoring import dataflow
from mp_compat.monitoring import nonfinite_ops
from mp_compat.monitoring import range_history
from mp_compat.monitoring import recomputation
from mp_compat.monitoring import remedies
from mp_compat.monitoring import reports
from mp_compat.training import recorded

Fetched = Union[np.ndarray, np.generic]


class Observed(NamedTuple):
  """A tensor that shows why a step is skipped.

  Attributes:
    part: "gradient", "loss", "variable", "forward", "backward", or "input" for a tensor
      of any numeric dtype that an op of the passes reads beside these.
    name: The name of the variable, or of the op; "" for the loss.
    tensor: The tensor.
    fetch: What to fetch for its values: the tensor, or what contains them, or zeros if
      it is in a branch that is not executed; None before that is known.
    is_fed: Whether the run feeds it.
  """

  part: str
  name: str
  tensor: tf.Tensor
  fetch: Optional[tf.Tensor] = None
  is_fed: bool = False


class _Values(NamedTuple):
  """The fetched values of a tensor.

  Attributes:
    observed: The tensor.
    values: Its values in one dimension and a dtype that NumPy itself has; the real
      parts of complex values, then the imaginary ones.
    is_finite: Whether all of them are finite.
    fetched: The values as they were fetched.
  """

  observed: Observed
  values: np.ndarray
  is_finite: bool
  fetched: Fetched


def observed(record: recorded.Step) -> List[Observed]:
  """Returns the tensors that show why a step is skipped.

      gradients that the finite check covers
      the loss that is multiplied by each loss scale
      variables and values of both passes, in order of creation: "backward" derives
          from a loss scale, "forward" does not
      what else the ops of all these read

  Tensors in loops and functions are left out, and those that only move values. Builds
  ops only for tensors that a Session cannot fetch, as in branches.
  """
  order = graphs.creation_order()
  scales = reports.scales(record)
  found: List[Observed] = []
  for name, tensor in reports.checked_tensors(record).items():
    found.append(Observed("gradient", name, tensor))
  for scale in scales:
    loss = _loss(scale, order)
    if loss is not None:
      found.append(Observed("loss", "", loss))
  # Without the loss, it is not known where the scale enters, and so neither pass.
  if any(each.part == "loss" for each in found):
    found += _values_of_passes([each.tensor for each in found], scales, order)
  found += _further_inputs([each.tensor for each in found])
  tensors = [each.tensor for each in found]
  fetches = map(_fetchable, dead_tensors.zeros_if_dead(tensors))
  return [each._replace(fetch=fetch) for each, fetch in zip(found, fetches)]


def _fetchable(tensor: tf.Tensor) -> tf.Tensor:
  """Returns a tensor with the same values that a Session can fetch: it does not fetch
  those of a `tf.cond` of control flow v2.
  """
  return tensor if tensor.graph.is_fetchable(tensor) else tf.identity(tensor)


def _values_of_passes(
  ends: List[tf.Tensor], scales: List[tf.Tensor], order: Dict[tf.Operation, int]
) -> List[Observed]:
  """Returns the variables and the values of the passes that compute `ends`, in order of
  creation; `order` has the place of each op in it.
  """

  def place(key: contexts.TensorKey) -> Tuple[int, int]:
    op, index = key
    return order.get(op, 0), index

  read_by = dataflow.readers(ends)
  backward = dataflow.descendants(read_by, scales)
  found = []
  for op, index in sorted(read_by, key=place):
    if not _has_values(op, index):
      continue
    part = "backward" if (op, index) in backward else "forward"
    name = op.name
    variable = dataflow.variable_read_by(op)
    if variable:
      part, name = "variable", variable
    found.append(Observed(part, name, op.outputs[index]))
  return found


def _further_inputs(tensors: List[tf.Tensor]) -> List[Observed]:
  """Returns what the ops of tensors read beside these, such as indices, and what the
  ops that only move such values read.
  """
  known = contexts.keys_of(tensors)
  found = []
  ops = list(dict.fromkeys(tensor.op for tensor in tensors))
  for op in ops:  # grows
    for value in op.inputs:
      key = contexts.tensor_key(value)
      if key in known or not _is_numeric(value.dtype.base_dtype):
        continue
      if contexts.is_in_branches_only(value.op):
        known.add(key)
        found.append(Observed("input", value.name, value))
        if value.op.type in dataflow.MOVING - dataflow.ROUTING:
          ops.append(value.op)
  return found


def _is_numeric(dtype: tf.DType) -> bool:
  """Returns whether values of a dtype are numbers or bools."""
  if dtype.is_floating or dtype.is_complex:
    return True
  return dtype.is_integer or dtype == tf.bool


def _has_values(op: tf.Operation, index: int) -> bool:
  """Returns whether an output of an op has values of its own, of a floating dtype, that
  can be read.
  """
  # Further outputs of an op may be uninitialized memory, such as the reserved space of
  # batch normalization.
  is_initialized = index == 0 or not len(op.inputs) or op.type in dataflow.HIDING
  is_computed = op.outputs[index].dtype.is_floating and op.type not in dataflow.MOVING
  return is_initialized and is_computed and contexts.is_in_branches_only(op)


def _loss(scale: tf.Tensor, order: Dict[tf.Operation, int]) -> Optional[tf.Tensor]:
  """Returns the loss that is multiplied by a loss scale; None if it cannot be read.

  The scale is read, perhaps cast, to multiply the loss, and later all gradients: the
  first product is that of the loss. `order` has the place of each op in the order of
  creation.
  """
  reads = [scale]
  for op in scale.consumers():
    if op.type == "Cast":
      reads.append(op.outputs[0])
  products: List[tf.Operation] = []
  for read in reads:
    products += [op for op in read.consumers() if op.type == "Mul"]
  first = min(products, key=lambda op: order.get(op, 0), default=None)
  if first is None:
    return None
  loss = first.inputs[0]
  return loss if contexts.is_in_branches_only(loss.op) else None


def describe(
  values: Iterable[Tuple[Observed, Fetched]],
  float16_variables: List[str],
  scale_reason: str,
) -> str:
  """Returns text on what is not finite in a step, and on what to do.

  Args:
    values: what `observed` returns and was computed, with the fetched values.
    float16_variables: the names of trained float16 variables.
    scale_reason: the beginning of what to do if the loss is finite: what may be wrong
      with the scale; "" for nothing.

  Returns:
    Lines on the gradients, the loss, the variables, and the first value of each pass
    that is not finite; the last one is the advice. One sentence if all gradients are
    finite.
  """
  read = [_read(each, value) for each, value in values]
  wrong = [each for each in read if not each.is_finite]
  gradients = _of_part(wrong, "gradient")
  variables = _of_part(wrong, "variable")
  if not gradients:
    return (
      "All gradients of this process are finite: the loss scale itself or another "
      "process decided to skip. Gradients that are not finite are named by the "
      "LossScaleHook of the process that computed them."
    )
  lines = ["Gradients that are not finite:"]
  lines += [_count(gradient) for gradient in gradients]
  # Of several losses, one that is not finite explains more.
  loss = min(_of_part(read, "loss"), key=lambda each: each.is_finite, default=None)
  if loss is not None:
    dtype = loss.observed.tensor.dtype.name
    negation = "" if loss.is_finite else "not "
    lines.append("The loss ({}) is {}finite.".format(dtype, negation))
  if variables:
    names = list(dict.fromkeys(each.observed.name for each in variables))
    text = "Variables that are not finite: {}."
    lines.append(text.format(range_history.enumeration(names, 5)))
  forward = _first(read, "forward", ("gradient", "loss"))
  if forward is None and loss is not None and not loss.is_finite:
    forward = loss
  backward = _first(read, "backward", ("gradient",))
  for of_pass, first in [("forward", forward), ("backward", backward)]:
    if first is not None:
      lines.append(
        "The first value of the {} pass that is not finite is {}.".format(
          of_pass, first.observed.tensor.op.name
        )
      )
  if variables:
    lines.append(_advice_on_variables(float16_variables))
  else:
    lines.append(_advice(loss, forward, backward, read, scale_reason))
  return "\n".join(lines)


def _advice_on_variables(float16_variables: List[str]) -> str:
  """Returns what to do if variables are not finite."""
  if not float16_variables:
    return (
      "Restart from a checkpoint in which the variables are finite, with a lower "
      "learning rate."
    )
  return (
    "Restart from a checkpoint in which the variables are finite, and create the "
    "float16 ones with mp_compat.float32_variable_storage_getter: in float16 they "
    "lose small updates, and Adam's epsilon of 1e-8 is 0."
  )


def _of_part(values: Iterable[_Values], part: str) -> List[_Values]:
  return [each for each in values if each.observed.part == part]


def _count(gradient: _Values) -> str:
  """Returns a line on what is not finite in a gradient."""
  values = gradient.values
  finite = values[np.isfinite(values)]
  return "  {}: {} NaN, {} inf, the largest of the others {:.3g}".format(
    gradient.observed.name,
    np.isnan(values).sum(),
    np.isinf(values).sum(),
    np.abs(finite).max(initial=0),
  )


def _read(tensor: Observed, fetched: Fetched) -> _Values:
  """Returns the values of a tensor as they were fetched, and as NumPy can test them."""
  values = np.ravel(fetched)
  if values.dtype.kind == "c":
    values = np.concatenate([np.real(values), np.imag(values)])
  elif values.dtype.kind != "f":  # bfloat16, integers
    values = values.astype(np.float32)
  return _Values(tensor, values, bool(np.isfinite(values).all()), fetched)


def _first(read: List[_Values], part: str, ends: Tuple[str, ...]) -> Optional[_Values]:
  """Returns the first value of a pass that is not finite and makes others so.

      search back from the values of the parts `ends` that are not finite,
          not through values that are, or are fed
      the first of the searched values that belongs to the pass `part` and is computed
          from finite ones, else the first

  A softmax of -inf is finite, for example, so that a mask of -inf is no reason. The
  search goes on through tensors that were not fetched, such as those in loops.

  Args:
    read: all values; those of a pass are in the order in which they were created.
    part: "forward" or "backward".
    ends: the parts that the pass makes not finite: "gradient", "loss".
  """
  wrong = [each for each in read if not each.is_finite]
  finite = contexts.keys_of(each.observed.tensor for each in read if each.is_finite)

  def reasons(tensor: tf.Tensor) -> List[tf.Tensor]:
    inputs = contexts.tensor_inputs(tensor)
    return [each for each in inputs if contexts.tensor_key(each) not in finite]

  last = [each.observed.tensor for each in wrong if each.observed.part in ends]
  searched = contexts.search_back_by_key(last, reasons, _fed(read))
  found = [
    each
    for each in _of_part(wrong, part)
    if contexts.tensor_key(each.observed.tensor) in searched
  ]

  def is_input(each: _Values) -> bool:
    inputs = each.observed.tensor.op.inputs
    return not len(inputs) or not contexts.keys_of(inputs).isdisjoint(searched)

  return min(found, key=is_input, default=None)


def _fed(read: List[_Values]) -> Set[contexts.TensorKey]:
  """Returns the keys of the tensors that the run feeds."""
  return contexts.keys_of(each.observed.tensor for each in read if each.observed.is_fed)


def _advice(
  loss: Optional[_Values],
  forward: Optional[_Values],
  backward: Optional[_Values],
  read: List[_Values],
  scale_reason: str,
) -> str:
  """Returns what to do if the variables are finite.

  Args:
    loss: the loss; None if it is not known.
    forward: the first value of the forward pass that is not finite; None for none.
    backward: the same of the backward pass.
    read: all values.
    scale_reason: see `describe`.
  """
  if forward is not None:
    is_loss_finite = loss is not None and loss.is_finite
    result = "gradients" if is_loss_finite else "loss"
    return remedies.on_forward(_failure(forward, read), result)
  failure = None if backward is None else _failure(backward, read)
  advice = remedies.on_backward(failure, scale_reason)
  if loss is not None:
    return "As the loss is finite, " + advice
  return (
    "Fetch the loss. If it is not finite, look at the inputs and the learning rate. "
    "If it is finite, " + advice
  )


def _failure(first: _Values, read: List[_Values]) -> remedies.Failure:
  """Returns an op whose result is not finite, explained from all values."""
  fetched: recomputation.Values = {}
  for each in read:
    fetched[contexts.tensor_key(each.observed.tensor)] = np.asarray(each.fetched)
  again = recomputation.Recomputation(first.observed.tensor, fetched, _fed(read))
  losses = [each.observed.tensor for each in _of_part(read, "loss")]
  forward = set(runs.executed_ops(losses))
  explanation = nonfinite_ops.explain(again, forward)
  has_infinities = bool(np.isinf(first.values).any())
  return remedies.Failure(again.tensor, explanation, has_infinities, forward)
