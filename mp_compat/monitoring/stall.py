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
from mp_compat.monitoring import range_history
from mp_compat.monitoring import reports
from mp_compat.training import step

Fetched = Union[np.ndarray, np.generic]


class Observed(NamedTuple):
  """A tensor that shows why a step is skipped."""

  part: str  # "gradient", "loss", "variable", "forward" or "backward"
  name: str
  tensor: tf.Tensor
  fetch: tf.Tensor  # the tensor, or zeros if it is in a branch that is not executed


class _Values(NamedTuple):
  """The values of a tensor, in one dimension and a dtype that NumPy itself has."""

  observed: Observed
  values: np.ndarray
  is_finite: bool


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
      part = (
        "variable" if variable else "backward" if (op, index) in backward else "forward"
      )
      found.append((part, variable or op.name, op.outputs[index]))
  fetches = dead_tensors.zeros_if_dead([tensor for _, _, tensor in found])
  return [Observed(*each, fetch) for each, fetch in zip(found, fetches)]


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
    return "All gradients of this process are finite: the loss scale itself or another process decided to skip."
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
  forward, backward = (
    _first(read, "forward", "loss"),
    _first(read, "backward", "gradient"),
  )
  for first in filter(None, [forward, backward]):
    lines.append(
      "The first value of the {} pass that is not finite is {}.".format(
        first.part, first.name
      )
    )
  if not variables:
    lines.append(_advice_on_values(loss, forward and forward.tensor.op, scale_reason))
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
  elif values.dtype.kind != "f":  # bfloat16
    values = values.astype(np.float32)
  return _Values(tensor, values, bool(np.isfinite(values).all()))


def _first(read: List[_Values], part: str, end: str) -> Optional[Observed]:
  """Returns the first value of a pass that is not finite and makes one of the part
  `end` so; None for none.

  Between them, no value is finite: a softmax of -inf is, so that a mask of -inf is no
  reason.
  """
  wrong = [each.observed for each in read if not each.is_finite]
  finite = contexts.keys_of(each.observed.tensor for each in read if each.is_finite)

  def reasons(tensor: tf.Tensor) -> List[tf.Tensor]:
    return [
      each
      for each in contexts.tensor_inputs(tensor)
      if contexts.tensor_key(each) not in finite
    ]

  found = contexts.keys_of(
    contexts.search_back([each.tensor for each in wrong if each.part == end], reasons)
  )
  return next(
    (
      each
      for each in wrong
      if each.part == part and contexts.tensor_key(each.tensor) in found
    ),
    None,
  )


def _advice_on_values(
  loss: Optional[_Values], first: Optional[tf.Operation], scale_reason: str
) -> str:
  """Returns what to do if the variables are finite; `first` is that of the forward pass
  that is not finite.
  """
  backward = (
    scale_reason
    + "an op of the backward pass overflows in float16 or has no finite gradient, as tf.sqrt at 0."
  )
  if loss is None:
    return (
      "Fetch the loss. If it is not finite, look at the inputs and the learning rate. "
      "If it is finite, " + backward
    )
  if loss.is_finite:
    return "As the loss is finite, " + backward
  if (
    first is not None
    and first.type != "Const"
    and not any(each.dtype.is_floating for each in first.inputs)
  ):
    return "No scale makes the loss finite: correct the input {}.".format(first.name)
  if tf.float16 in [
    loss.observed.tensor.dtype,
    *([] if first is None else [first.outputs[0].dtype.base_dtype]),
  ]:
    return (
      "No scale makes the loss finite, because float16 ends at 65504: compute {} in "
      "float32, or with smaller values, such as a mask of -1e4 instead of -1e9.".format(
        "the loss" if first is None else first.name
      )
    )
  return "No scale makes the loss finite: look at the inputs and the learning rate."
