# SPDX-License-Identifier: Apache-2.0
"""Explains why all steps are skipped, from the values of a step: its gradients, loss, variables and both passes."""

import collections
from typing import Any, Dict, Iterable, List, NamedTuple, Optional, Tuple

import numpy as np

from mp_compat._tensorflow import contexts
from mp_compat._tensorflow import dead_tensors
from mp_compat._tensorflow import graphs
from mp_compat._tensorflow import tf
from mp_compat.core import dataflow
from mp_compat.core import lineage
from mp_compat.monitoring import range_history
from mp_compat.monitoring import reports
from mp_compat.training import step as step_module

_READS = ("ReadVariableOp", "Variable", "VariableV2")


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


def observed(step: step_module.Step) -> List[Observed]:
  """Returns the gradients of a step, its loss, and the tensors that they are computed from, in order of creation.

  Tensors in loops and functions are left out, and those that only move values. Builds ops for tensors in branches only.
  """
  order, scales = graphs.creation_order(), _scales(step)
  found = [("gradient", name, tensor) for name, tensor in reports.checked_tensors(step).items()]
  found += [("loss", "", loss) for scale in scales for loss in _losses(scale, order)]
  read_by = dataflow.readers([tensor for _, _, tensor in found])
  ops = [op for op, _ in read_by] + [tensor.op for _, _, tensor in found]
  backward = dataflow.descendants(read_by, scales)
  for op, index in sorted(read_by, key=lambda key: (order.get(key[0], 0), key[1])):
    if scales and _has_values(op, index):  # Without a scale, neither pass is known.
      name = op.inputs[0].op.name if op.type == "ReadVariableOp" else op.name
      part = "variable" if op.type in _READS else "backward" if (op, index) in backward else "forward"
      found.append((part, name, op.outputs[index]))
  return [Observed(*each, fetch) for each, fetch in zip(found, _zeros_if_dead([each[-1] for each in found], ops))]


def _zeros_if_dead(tensors: List[tf.Tensor], ops: Iterable[tf.Operation]) -> List[tf.Tensor]:
  """Returns the tensors, with zeros for those in branches that are not executed; `ops` are those that they need."""
  if not any(op.type in ("Switch", "RefSwitch") or contexts.of_outputs(op) is not None for op in ops):
    return tensors
  are_dead = dead_tensors.may_be_dead(tensors)
  return [dead_tensors.merge_out_of_branches(tensor, 0, is_dead) for tensor, is_dead in zip(tensors, are_dead)]


def _has_values(op: tf.Operation, index: int) -> bool:
  """Returns whether an output of an op has values of its own, of a floating dtype, that can be read."""
  # Further outputs of an op may be uninitialized memory, such as the reserved space of batch normalization.
  is_initialized = index == 0 or not len(op.inputs) or op.type in dataflow.HIDING
  is_computed = op.outputs[index].dtype.is_floating and op.type not in dataflow.MOVING
  return is_initialized and is_computed and contexts.is_in_branches_only(op)


def _scales(step: step_module.Step) -> List[tf.Tensor]:
  """Returns the loss scales with which the gradients of a step were computed, each once."""
  computed = [each for one in step.lineages for each in one.computed if each.scale is not None]
  return list({lineage.tensor_key(each.scale): each.scale for each in computed}.values())


def _losses(scale: tf.Tensor, order: Dict[tf.Operation, int]) -> List[tf.Tensor]:
  """Returns the loss that is multiplied by a loss scale, before all gradients are, if it can be read."""
  casts = [op for op in scale.consumers() if op.type == "Cast"]
  products = [op for read in [scale, *[op.outputs[0] for op in casts]] for op in read.consumers() if op.type == "Mul"]
  first = min(products, key=lambda op: order.get(op, 0), default=None)
  return [first.inputs[0]] if first is not None and contexts.is_in_branches_only(first.inputs[0].op) else []


def describe(values: Iterable[Tuple[Observed, Any]], float16_variables: List[str], scale_reason: str) -> str:
  """Returns text on what is not finite, and on what to do; `scale_reason` begins the latter if the loss is finite."""
  read = [_read(each, value) for each, value in values]
  of_part: Dict[str, List[_Values]] = collections.defaultdict(list)
  for each in read:
    of_part[each.observed.part].append(each)
  gradients, variables = [[each for each in of_part[part] if not each.is_finite] for part in ("gradient", "variable")]
  if not gradients:
    return "All gradients of this process are finite: the loss scale itself or another process decided to skip."
  lines = ["Gradients that are not finite:", *map(_count, gradients)]
  loss = min(of_part["loss"], key=lambda each: each.is_finite, default=None)
  if loss is not None:
    dtype = loss.observed.tensor.dtype.name
    lines.append("The loss ({}) is {}finite.".format(dtype, "" if loss.is_finite else "not "))
  if variables:
    names = [each.observed.name for each in variables]
    lines.append("Variables that are not finite: {}.".format(range_history.enumeration(names, 5)))
  forward, backward = _first(read, "forward", of_part["loss"]), _first(read, "backward", gradients)
  for first in filter(None, [forward, backward]):
    lines.append("The first value of the {} pass that is not finite is {}.".format(first.part, first.name))
  if variables:
    lines.append(_advice_on_variables(float16_variables))
  else:
    lines.append(_advice_on_values(loss, forward and forward.tensor.op, scale_reason))
  return "\n".join(lines)


def _count(gradient: _Values) -> str:
  values = gradient.values
  counts = np.isnan(values).sum(), np.isinf(values).sum(), np.abs(values[np.isfinite(values)]).max(initial=0)
  return "  {}: {} NaN, {} inf, the largest of the others {:.3g}".format(gradient.observed.name, *counts)


def _read(tensor: Observed, value: Any) -> _Values:
  value = np.asarray(value).ravel()
  if value.dtype.kind == "c":
    value = np.concatenate([value.real, value.imag])
  elif value.dtype.kind != "f":  # bfloat16
    value = value.astype(np.float32)
  return _Values(tensor, value, bool(np.isfinite(value).all()))


def _first(read: List[_Values], part: str, ends: List[_Values]) -> Optional[Observed]:
  """Returns the first value of a pass that is not finite and makes one of `ends` so; None for none.

  Between them, no value is finite: a softmax of -inf is, so that a mask of -inf is no reason.
  """
  are_finite = {lineage.tensor_key(each.observed.tensor): each.is_finite for each in read}

  def reasons(tensor: tf.Tensor) -> List[tf.Tensor]:
    return [each for each in contexts.tensor_inputs(tensor) if not are_finite.get(lineage.tensor_key(each), False)]

  tensors = [each.observed.tensor for each in ends if not each.is_finite]
  found = {lineage.tensor_key(tensor) for tensor in dataflow.search_back(tensors, reasons)}
  wrong = (each.observed for each in read if each.observed.part == part and not each.is_finite)
  return next((each for each in wrong if lineage.tensor_key(each.tensor) in found), None)


def _advice_on_variables(float16_variables: List[str]) -> str:
  if not float16_variables:
    return "Restart from a checkpoint in which the variables are finite, with a lower learning rate."
  return (
    "Restart from a checkpoint in which the variables are finite, and create the float16 ones with "
    "mp_compat.float32_variable_storage_getter: in float16 they lose small updates, and Adam's epsilon of 1e-8 is 0."
  )


def _advice_on_values(loss: Optional[_Values], first: Optional[tf.Operation], scale_reason: str) -> str:
  """Returns what to do if the variables are finite; `first` is that of the forward pass that is not finite."""
  backward = (
    scale_reason + "an op of the backward pass overflows in float16 or has no finite gradient, as tf.sqrt at 0."
  )
  if loss is None:
    return "Fetch the loss. If it is not finite, look at the inputs and the learning rate. If it is finite, " + backward
  if loss.is_finite:
    return "As the loss is finite, " + backward
  if first is not None and first.type != "Const" and not any(each.dtype.is_floating for each in first.inputs):
    return "No scale makes the loss finite: correct the input {}.".format(first.name)
  if tf.float16 in [loss.observed.tensor.dtype, *([] if first is None else [first.outputs[0].dtype.base_dtype])]:
    return (
      "No scale makes the loss finite, because float16 ends at 65504: compute {} in float32, or with smaller values, "
      "such as a mask of -1e4 instead of -1e9.".format("the loss" if first is None else first.name)
    )
  return "No scale makes the loss finite: look at the inputs and the learning rate."
