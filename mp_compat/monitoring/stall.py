# SPDX-License-Identifier: Apache-2.0
"""Explains why all steps are skipped, from the values of a step: its gradients, loss,
variables and both passes.
"""

from typing import Dict, Iterable, List, NamedTuple, Optional, Tuple, Union

import numpy as np

from mp_compat._tensorflow import tf
from mp_compat.graph import contexts
from mp_compat.graph import dead_tensors
from mp_compat.graph import graphs
from mp_compat.monitoring import dataflow
from mp_compat.monitoring import nonfinite_ops
from mp_compat.monitoring import range_history
from mp_compat.monitoring import reports
from mp_compat.training import step

Fetched = Union[np.ndarray, np.generic]


class Observed(NamedTuple):
  """A tensor that shows why a step is skipped."""

  # "gradient", "loss", "variable", "forward", "backward", or "input" for a tensor of any
  # numeric dtype that an op of the passes reads beside these
  part: str
  name: str
  tensor: tf.Tensor
  fetch: tf.Tensor  # the tensor, or zeros if it is in a branch that is not executed


class _Values(NamedTuple):
  """The values of a tensor, in one dimension and a dtype that NumPy itself has."""

  observed: Observed
  values: np.ndarray
  is_finite: bool
  fetched: Fetched  # the values as they were fetched


def observed(record: step.Step) -> List[Observed]:
  """Returns the gradients of a step, its loss, and the tensors that they are computed
  from, in order of creation.

  Tensors in loops and functions are left out, and those that only move values. Builds
  ops for tensors in branches only.
  """
  order, scales = graphs.creation_order(), reports.scales(record)
  found = [
    ("gradient", name, tensor)
    for name, tensor in reports.checked_tensors(record).items()
  ]
  found += [("loss", "", loss) for scale in scales for loss in _losses(scale, order)]
  read_by = dataflow.readers([tensor for _, _, tensor in found])
  backward = dataflow.descendants(read_by, scales)
  for op, index in sorted(read_by, key=lambda key: (order.get(key[0], 0), key[1])):
    if scales and _has_values(op, index):  # Without a scale, neither pass is known.
      variable = dataflow.variable_read_by(op)
      part = "backward" if (op, index) in backward else "forward"
      if variable:
        part = "variable"
      found.append((part, variable or op.name, op.outputs[index]))
  found += _further_inputs([tensor for _, _, tensor in found])
  fetches = dead_tensors.zeros_if_dead([tensor for _, _, tensor in found])
  return [Observed(*each, fetch) for each, fetch in zip(found, fetches)]


def _further_inputs(tensors: List[tf.Tensor]) -> List[Tuple[str, str, tf.Tensor]]:
  """Returns what the ops of tensors read beside these: moved values, indices, shapes."""
  known = contexts.keys_of(tensors)
  found = []
  for op in dict.fromkeys(tensor.op for tensor in tensors):
    for value in op.inputs:
      key, dtype = contexts.tensor_key(value), value.dtype.base_dtype
      is_numeric = dtype.is_floating or dtype.is_integer or dtype.is_complex
      is_bool = dtype == tf.bool
      if key in known or not (is_numeric or is_bool):
        continue
      if contexts.is_in_branches_only(value.op):
        known.add(key)
        found.append(("input", value.name, value))
  return found


def _has_values(op: tf.Operation, index: int) -> bool:
  """Returns whether an output of an op has values of its own, of a floating dtype, that
  can be read.
  """
  # Further outputs of an op may be uninitialized memory, such as the reserved space of
  # batch normalization.
  is_initialized = index == 0 or not len(op.inputs) or op.type in dataflow.HIDING
  is_computed = op.outputs[index].dtype.is_floating and op.type not in dataflow.MOVING
  return is_initialized and is_computed and contexts.is_in_branches_only(op)


def _losses(scale: tf.Tensor, order: Dict[tf.Operation, int]) -> List[tf.Tensor]:
  """Returns the loss that is multiplied by a loss scale, before all gradients are, if
  it can be read.
  """
  casts = [op for op in scale.consumers() if op.type == "Cast"]
  products = [
    op
    for read in [scale, *[op.outputs[0] for op in casts]]
    for op in read.consumers()
    if op.type == "Mul"
  ]
  first = min(products, key=lambda op: order.get(op, 0), default=None)
  return (
    [first.inputs[0]]
    if first is not None and contexts.is_in_branches_only(first.inputs[0].op)
    else []
  )


def describe(
  values: Iterable[Tuple[Observed, Fetched]],
  float16_variables: List[str],
  scale_reason: str,
) -> str:
  """Returns text on what is not finite, and on what to do; `scale_reason` begins the
  latter if the loss is finite.
  """
  read = [_read(each, value) for each, value in values]
  wrong = [each for each in read if not each.is_finite]
  gradients, variables = _of_part(wrong, "gradient"), _of_part(wrong, "variable")
  if not gradients:
    return (
      "All gradients of this process are finite: the loss scale itself or another "
      "process decided to skip. Gradients that are not finite are named by the "
      "LossScaleHook of the process that computed them."
    )
  lines = ["Gradients that are not finite:", *map(_count, gradients)]
  loss = min(_of_part(read, "loss"), key=lambda each: each.is_finite, default=None)
  if loss is not None:
    dtype = loss.observed.tensor.dtype.name
    lines.append(
      "The loss ({}) is {}finite.".format(dtype, "" if loss.is_finite else "not ")
    )
  if variables:
    names = range_history.enumeration(
      list(dict.fromkeys(each.observed.name for each in variables)), 5
    )
    lines.append("Variables that are not finite: {}.".format(names))
  forward = _first(read, "forward", ("gradient", "loss"))
  backward = _first(read, "backward", ("gradient",))
  for first in filter(None, [forward, backward]):
    lines.append(
      "The first value of the {} pass that is not finite is {}.".format(
        first.observed.part, first.observed.name
      )
    )
  if not variables:
    lines.append(_advice(loss, forward, backward, read, scale_reason))
  elif float16_variables:
    lines.append(
      "Restart from a checkpoint in which the variables are finite, and create the "
      "float16 ones with mp_compat.float32_variable_storage_getter: in float16 they "
      "lose small updates, and Adam's epsilon of 1e-8 is 0."
    )
  else:
    lines.append(
      "Restart from a checkpoint in which the variables are finite, with a lower "
      "learning rate."
    )
  return "\n".join(lines)


def _of_part(values: Iterable[_Values], part: str) -> List[_Values]:
  return [each for each in values if each.observed.part == part]


def _count(gradient: _Values) -> str:
  values = gradient.values
  counts = (
    np.isnan(values).sum(),
    np.isinf(values).sum(),
    np.abs(values[np.isfinite(values)]).max(initial=0),
  )
  return "  {}: {} NaN, {} inf, the largest of the others {:.3g}".format(
    gradient.observed.name, *counts
  )


def _read(tensor: Observed, value: Fetched) -> _Values:
  values = np.ravel(value)
  if values.dtype.kind == "c":
    values = np.concatenate([np.real(values), np.imag(values)])
  elif values.dtype.kind != "f":  # bfloat16, integers
    values = values.astype(np.float32)
  return _Values(tensor, values, bool(np.isfinite(values).all()), value)


def _first(read: List[_Values], part: str, ends: Tuple[str, ...]) -> Optional[_Values]:
  """Returns the first value of a pass that is not finite and makes one of the parts
  `ends` so; None for none.

  Between them, no value is finite: a softmax of -inf is, so that a mask of -inf is no
  reason.
  """
  wrong = [each for each in read if not each.is_finite]
  finite = contexts.keys_of(each.observed.tensor for each in read if each.is_finite)

  def reasons(tensor: tf.Tensor) -> List[tf.Tensor]:
    inputs = contexts.tensor_inputs(tensor)
    return [each for each in inputs if contexts.tensor_key(each) not in finite]

  last = [each.observed.tensor for each in wrong if each.observed.part in ends]
  found = contexts.keys_of(contexts.search_back(last, reasons))
  for each in _of_part(wrong, part):
    if contexts.tensor_key(each.observed.tensor) in found:
      return each
  return None


def _advice(
  loss: Optional[_Values],
  forward: Optional[_Values],
  backward: Optional[_Values],
  read: List[_Values],
  scale_reason: str,
) -> str:
  """Returns what to do if the variables are finite; `forward` and `backward` are the
  first values of both passes that are not.
  """
  if forward is not None:
    is_finite = loss is not None and loss.is_finite
    return _advice_on_forward(forward, read, "gradients" if is_finite else "loss")
  if loss is None:
    return (
      "Fetch the loss. If it is not finite, look at the inputs and the learning rate. "
      "If it is finite, " + _advice_on_backward(backward, read, scale_reason)
    )
  if loss.is_finite:
    advice = _advice_on_backward(backward, read, scale_reason)
    return "As the loss is finite, " + advice
  if loss.observed.tensor.dtype == tf.float16:
    return (
      "No scale makes the loss finite. float16 ends at 65504: compute it in float32."
    )
  return _LOOK_AT_INPUTS.format("loss")


_LOOK_AT_INPUTS = (
  "No scale makes the {} finite: look at the inputs and the learning rate."
)


def _advice_on_forward(first: _Values, read: List[_Values], result: str) -> str:
  """Returns what to do about an op of the forward pass; `result` is what it makes not
  finite: "loss" or "gradients".
  """
  name, explanation = first.observed.name, _explain(first, read)
  if explanation.cause == nonfinite_ops.INPUT:
    return "No scale makes the {} finite: correct the input {}.".format(result, name)
  if explanation.cause == nonfinite_ops.UNDEFINED:
    return (
      "No scale makes the {} finite, nor does another dtype: {} {}. Correct its inputs, "
      "also where tf.where does not select its result.".format(
        result, name, explanation.text
      )
    )
  if explanation.cause == nonfinite_ops.RECEIVED:
    return "No scale makes the {} finite: {}".format(result, _other_process(name))
  if first.observed.tensor.dtype != tf.float16:
    return _LOOK_AT_INPUTS.format(result)
  if explanation.cause == nonfinite_ops.UNKNOWN:
    return (
      "No scale makes the {} finite. If {} overflows, because float16 ends at 65504, "
      "compute it in float32. Otherwise correct its inputs.".format(result, name)
    )
  return (
    "No scale makes the {} finite, because float16 ends at 65504: compute {} in "
    "float32, or with smaller values, such as a mask of -1e4 instead of -1e9.".format(
      result, name
    )
  )


def _advice_on_backward(
  first: Optional[_Values], read: List[_Values], scale_reason: str
) -> str:
  """Returns what to do about an op of the backward pass, to follow a comma."""
  if first is None:
    return scale_reason + _EITHER.format("an op of the backward pass", "float16")
  name, explanation = first.observed.name, _explain(first, read)
  dtype = first.observed.tensor.dtype.base_dtype.name
  if explanation.cause == nonfinite_ops.UNDEFINED:
    return (
      "no scale helps, nor does another dtype: {} {}. Keep the input of the op whose "
      "gradient it is away from there, also where tf.where does not select its "
      "result.".format(name, explanation.text)
    )
  if explanation.cause == nonfinite_ops.RECEIVED:
    return _other_process(name)
  if explanation.cause == nonfinite_ops.OVERFLOW:
    remedy = "compute it in float32, or make the loss smaller"
    if dtype == "float32":
      remedy = "make the loss smaller"
    return scale_reason + "{} overflows in {}: {}.".format(name, dtype, remedy)
  return scale_reason + _EITHER.format(name, dtype)


_EITHER = "{} overflows in {} or has no finite gradient, as tf.sqrt at 0."


def _other_process(name: str) -> str:
  return (
    "what this process computed is finite, but not what {} receives from other ranks or "
    "workers. The LossScaleHook of such a process names the first value that is not "
    "finite: run one in each.".format(name)
  )


def _explain(first: _Values, read: List[_Values]) -> nonfinite_ops.Explanation:
  """Returns why a value is not finite, from the values that its op reads."""
  fetched = {
    contexts.tensor_key(each.observed.tensor): np.asarray(each.fetched) for each in read
  }
  tensor = first.observed.tensor
  inputs = [fetched.get(contexts.tensor_key(value)) for value in tensor.op.inputs]
  return nonfinite_ops.explain(tensor, np.asarray(first.fetched), inputs)
