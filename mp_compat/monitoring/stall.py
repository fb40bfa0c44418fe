# SPDX-License-Identifier: Apache-2.0
"""Explains why all steps are skipped, from the values of a step: its gradients, loss, variables and both passes."""

from typing import Any, Dict, Iterable, List, NamedTuple, Tuple

import numpy as np

from mp_compat._tensorflow import contexts
from mp_compat._tensorflow import dead_tensors
from mp_compat._tensorflow import graphs
from mp_compat._tensorflow import tf
from mp_compat.core import dataflow
from mp_compat.monitoring import range_history
from mp_compat.monitoring import reports
from mp_compat.training import step as step_module

PARTS = ("gradient", "loss", "variable", "forward", "backward")
_READS = ("ReadVariableOp", "Variable", "VariableV2")


class Observed(NamedTuple):
  """A tensor that shows why a step is skipped."""

  part: str  # one of PARTS
  name: str
  tensor: tf.Tensor
  fetch: tf.Tensor  # the tensor, or zeros if it is in a branch that is not executed


def observed(step: step_module.Step) -> List[Observed]:
  """Returns the gradients of a step, its loss, and the tensors that they are computed from, in order of creation.

  Tensors in loops and functions are left out, and those that only move values. Builds ops for tensors in branches only.
  """
  checked, order = reports.checked_tensors(step), graphs.creation_order()
  scales = {each.scale.name: each.scale for one in step.lineages for each in one.computed if each.scale is not None}
  losses = [loss for scale in scales.values() for loss in _losses(scale, order)]
  found = [("gradient", name, tensor) for name, tensor in checked.items()] + [("loss", "", loss) for loss in losses]
  read_by = dataflow.readers([tensor for _, _, tensor in found])
  backward = dataflow.descendants(read_by, scales.values())
  in_order = sorted(read_by, key=lambda key: (order.get(key[0], 0), key[1]))
  for op, index in in_order if scales else ():  # Without a scale, neither pass is known.
    # Further outputs of an op may be uninitialized memory, such as the reserved space of batch normalization.
    is_initialized = index == 0 or not len(op.inputs) or op.type in dataflow.HIDING
    is_readable = contexts.is_in_branches_only(op) and op.type not in dataflow.MOVING
    if is_initialized and is_readable and op.outputs[index].dtype.is_floating:
      source = op.inputs[0].op if op.type == "ReadVariableOp" else op
      part = "variable" if op.type in _READS else "backward" if (op, index) in backward else "forward"
      found.append((part, source.name, op.outputs[index]))
  ops = [op for op, _ in read_by] + [tensor.op for _, _, tensor in found]
  has_branches = any(op.type in ("Switch", "RefSwitch") or contexts.of_outputs(op) is not None for op in ops)
  are_dead = dead_tensors.may_be_dead(each[-1] for each in found) if has_branches else [False] * len(found)
  fetches = [dead_tensors.merge_out_of_branches(each[-1], 0, is_dead) for each, is_dead in zip(found, are_dead)]
  return [Observed(*each, fetch) for each, fetch in zip(found, fetches)]


def _losses(scale: tf.Tensor, order: Dict[tf.Operation, int]) -> List[tf.Tensor]:
  """Returns the loss that is multiplied by a loss scale, before all gradients are, if it can be read."""
  casts = [op for op in scale.consumers() if op.type == "Cast"]
  products = [op for read in [scale, *[op.outputs[0] for op in casts]] for op in read.consumers() if op.type == "Mul"]
  first = min(products, key=lambda op: order.get(op, 0), default=None)
  return [first.inputs[0]] if first is not None and contexts.is_in_branches_only(first.inputs[0].op) else []


def describe(values: Iterable[Tuple[Observed, Any]], float16_variables: List[str], scale_reason: str) -> str:
  """Returns text on what is not finite, and on what to do; `scale_reason` begins the latter if the loss is finite."""
  backward = (
    scale_reason + "an op of the backward pass overflows in float16 or has no finite gradient, as tf.sqrt at 0."
  )
  real = [(each, _real(value)) for each, value in values]
  wrong = [(each, value) for each, value in real if not np.isfinite(value).all()]
  names = {part: [each.name for each, _ in wrong if each.part == part] for part in PARTS}
  if not names["gradient"]:
    return "All gradients are finite here: the loss scale itself or another process decided to skip."
  text = "Gradients that are not finite:"
  for each, value in [pair for pair in wrong if pair[0].part == "gradient"]:
    counts = np.isnan(value).sum(), np.isinf(value).sum(), np.abs(value[np.isfinite(value)]).max(initial=0)
    text += "\n  {}: {} NaN, {} inf, the largest of the others {:.3g}".format(each.name, *counts)
  losses = [each for each, _ in real if each.part == "loss"]
  if losses:
    text += "\nThe loss ({}) is {}finite.".format(losses[0].tensor.dtype.name, "not " if names["loss"] else "")
  if names["variable"]:
    text += "\nVariables that are not finite: {}.".format(range_history.enumeration(names["variable"], 5))
  for part in ("forward", "backward"):
    if names[part]:
      text += "\nThe first value of the {} pass that is not finite is {}.".format(part, names[part][0])
  first = next((each.tensor for each, _ in wrong if each.part == "forward"), None)
  if names["variable"] and float16_variables:
    advice = (
      "Restart from a checkpoint in which the variables are finite, and create the float16 ones with "
      "mp_compat.float32_variable_storage_getter: in float16 they lose small updates, and Adam's epsilon of 1e-8 is 0."
    )
  elif names["variable"]:
    advice = "Restart from a checkpoint in which the variables are finite, with a lower learning rate."
  elif not losses:
    advice = (
      "Fetch the loss. If it is not finite, look at the inputs and the learning rate. If it is finite, " + backward
    )
  elif not names["loss"]:
    advice = "As the loss is finite, " + backward
  elif first is not None and first.op.type != "Const" and not any(each.dtype.is_floating for each in first.op.inputs):
    advice = "No scale makes the loss finite: correct the input {}.".format(first.op.name)
  elif tf.float16 in (losses[0].tensor.dtype, first if first is None else first.dtype.base_dtype):
    advice = (
      "No scale makes the loss finite, because float16 ends at 65504: compute {} in float32, or with smaller values, "
      "such as a mask of -1e4 instead of -1e9.".format("the loss" if first is None else first.op.name)
    )
  else:
    advice = "No scale makes the loss finite: look at the inputs and the learning rate."
  return text + "\n" + advice


def _real(value: Any) -> np.ndarray:
  """Returns an array of one dimension, of a dtype that NumPy itself has."""
  value = np.asarray(value).ravel()
  if value.dtype.kind == "c":
    return np.concatenate([value.real, value.imag])
  return value if value.dtype.kind == "f" else value.astype(np.float32)  # bfloat16
