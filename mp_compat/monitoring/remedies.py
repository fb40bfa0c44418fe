# SPDX-License-Identifier: Apache-2.0
"""Says what to do about the first op of a pass whose result is not finite."""

from typing import Dict, Iterable, List, NamedTuple, Optional, Sequence, Set

import numpy as np

from mp_compat._tensorflow import tf
from mp_compat.graph import contexts
from mp_compat.monitoring import dataflow
from mp_compat.monitoring import nonfinite_ops
from mp_compat.monitoring import range_history
from mp_compat.monitoring import recomputation

_MOST_NAMED = 8
_LARGEST_FLOAT32 = float(np.finfo(np.float32).max)
_OF_SHAPES = frozenset(["Rank", "Shape", "ShapeN", "Size"])
# The largest numbers of narrow dtypes.
_ENDS = {"float16": "65504", "bfloat16": "3.39e38"}


class Failure(NamedTuple):
  """The first result of a pass that is not finite.

  Attributes:
    tensor: The result.
    explanation: Why it is not finite.
    has_infinities: Whether it contains inf.
    forward: The ops of the forward pass.
  """

  tensor: tf.Tensor
  explanation: nonfinite_ops.Explanation
  has_infinities: bool
  forward: Set[tf.Operation]

  @property
  def name(self) -> str:
    return str(self.tensor.op.name)

  @property
  def dtype(self) -> str:
    return str(self.tensor.dtype.base_dtype.name)


def on_forward(failure: Failure, result: str) -> str:
  """Returns what to do about an op of the forward pass; `result` is what it makes not
  finite: "loss" or "gradients".
  """
  text = "No scale makes the {} finite{}"
  cause = failure.explanation.cause
  if cause == nonfinite_ops.INPUT:
    return text.format(result, _about_input(failure))
  if cause == nonfinite_ops.UNDEFINED:
    correct = "correct its inputs, also where tf.where does not select its result."
    return text.format(result, _about_undefined(failure, correct))
  if cause == nonfinite_ops.RECEIVED:
    return text.format(result, ": " + _other_process(failure.name))
  if cause == nonfinite_ops.OVERFLOW:
    return text.format(result, _about_overflow(failure))
  if failure.dtype in _ENDS:
    return text.format(result, _ROUNDED.format(failure.name, _end(failure)))
  return text.format(result, _ROUNDED_BEFORE.format(failure.name))


_ROUNDED = (
  ". If {} overflows, because {}, or values were rounded to 0, compute it and what "
  "comes before it in float32. If nothing changes, correct its inputs."
)
_ROUNDED_BEFORE = (
  ". If values are rounded to float16 or bfloat16 before {}, compute them in float32. "
  "If nothing changes, look at the inputs and the learning rate."
)
_EITHER = "{} overflows in {} or has no finite gradient, as tf.sqrt at 0."


def on_backward(failure: Optional[Failure], scale_reason: str) -> str:
  """Returns what to do about an op of the backward pass, to follow a comma.

  Args:
    failure: the op; None if it is not known.
    scale_reason: the beginning, if a scale may help; "" for nothing.
  """
  if failure is None:
    return scale_reason + _EITHER.format("an op of the backward pass", "float16")
  name, dtype, explanation = failure.name, failure.dtype, failure.explanation
  if explanation.cause == nonfinite_ops.UNDEFINED:
    correct = (
      "keep the input of the op whose gradient it is away from there, also where "
      "tf.where does not select its result."
    )
    return "no scale helps" + _about_undefined(failure, correct)
  if explanation.cause == nonfinite_ops.RECEIVED:
    return _other_process(name)
  if explanation.cause == nonfinite_ops.OVERFLOW:
    remedy = "compute it in float32, or make the loss smaller"
    if dtype == "float32" or explanation.largest > _LARGEST_FLOAT32:
      remedy = "make the loss smaller"
    return scale_reason + "{} overflows in {}: {}.".format(name, dtype, remedy)
  return scale_reason + _EITHER.format(name, dtype)


def _about_input(failure: Failure) -> str:
  """Returns what to do about an input or a constant."""
  text = ": correct the input {}.".format(failure.name)
  if failure.dtype not in _ENDS or not failure.has_infinities:
    return text
  if failure.tensor.op.type != "Const":
    return text + (
      " If its values are finite before they are {}, because {}, pass them in float32, "
      "or make them smaller.".format(failure.dtype, _end(failure))
    )
  return (
    ": {} contains infinities. If the program has finite numbers there, they overflow, "
    "because {}: compute {} in float32, or with smaller ones, such as a mask of -1e4 "
    "instead of -1e9. Otherwise correct what reads it, such as a row that a mask of "
    "-inf removes as a whole.".format(failure.name, _end(failure), failure.name)
  )


def _end(failure: Failure) -> str:
  """Returns a clause on the largest number of the dtype of a result, a narrow one."""
  return "{} ends at {}".format(failure.dtype, _ENDS[failure.dtype])


def _other_process(name: str) -> str:
  """Returns what to do about an op that receives values of other processes."""
  return (
    "what this process computed is finite, but not what {} receives from other ranks "
    "or workers. The LossScaleHook of such a process names the first value that is not "
    "finite: run one in each.".format(name)
  )


def _about_overflow(failure: Failure) -> str:
  """Returns what to do about an op whose exact result is finite."""
  op, name = failure.tensor.op, failure.name
  largest = failure.explanation.largest
  if largest > _LARGEST_FLOAT32:
    return (
      ", nor does float32, which ends at 3.4e38: the exact result of {} is up to "
      "{:.3g}. Make its inputs smaller, with a lower learning rate if they grew during "
      "training, or compute its logarithm.".format(name, largest)
    )
  if failure.dtype not in _ENDS:
    return (
      ": {} overflows in {}, although its exact result is up to {:.3g}. Compute it in "
      "float64.".format(name, failure.dtype, largest)
    )
  if op.type != "Cast":
    return (
      ", because {}: compute {} in float32, and what reads it as far as values are so "
      "large: its exact result is up to {:.6g}.".format(_end(failure), name, largest)
    )
  source = dataflow.origin(op.inputs[0]).op
  variable = dataflow.variable_read_by(source)
  if variable is None:
    return (
      ": {} casts values of up to {:.6g} to {}, which ends at {}. Compute what reads "
      "it in float32, or make {} smaller, as a mask of -1e4.".format(
        name, largest, failure.dtype, _ENDS[failure.dtype], source.name
      )
    )
  return (
    ": {} casts the variable {}, whose largest value is {:.6g}, to {}, which ends at "
    "{}. If training made it so large, restart from a checkpoint with a lower learning "
    "rate. If it is right, compute what reads {} in float32.".format(
      name, variable, largest, failure.dtype, _ENDS[failure.dtype], name
    )
  )


def _about_undefined(failure: Failure, correct: str) -> str:
  """Returns what to do about an op whose exact result is not finite.

  Args:
    failure: the op.
    correct: what to do if no rounding is the reason, a sentence.
  """
  explanation = failure.explanation
  fact = ": {} {}".format(failure.name, explanation.text)
  ops = _names_of_ops(explanation.ops, failure)
  if explanation.finite_in == "float32":
    return (
      "{} because of rounding to {}. Compute {} in float32: with the values of this "
      "step, {} is finite then.".format(
        fact, _narrow(explanation.ops), ops, failure.name
      )
    )
  forward = [each for each in explanation.begin if each.op in failure.forward]
  results = _names_of_tensors(filter(_is_result, forward))
  otherwise = correct
  if explanation.finite_in == "float64":
    otherwise = (
      "replace {} by a formula in which nothing cancels or underflows, such as "
      "tf.nn.log_softmax for the logarithm of a softmax: in float64, {} is finite, but "
      "not in float32.".format(ops, failure.name)
    )
  elif results:
    otherwise = (
      "compute {} and what comes before in float32, too. If nothing changes, {}".format(
        range_history.enumeration(results, 3), correct
      )
    )
  if explanation.constants:
    return _CONSTANTS.format(
      fact,
      _values(explanation.constants),
      _names_of_ops(explanation.with_constants, failure),
      otherwise,
    )
  otherwise = otherwise[0].upper() + otherwise[1:]
  if explanation.finite_in == "float64":
    return "{} because of rounding. {}".format(fact, otherwise)
  begin = _names_of_tensors(filter(_is_rounded, explanation.begin))
  constants = nonfinite_ops.rounded_constants(explanation.begin, failure.forward)
  return "{}. Computed in a wider dtype{}{}, it is not finite either. {}".format(
    fact,
    " from {} on".format(range_history.enumeration(begin, 3)) if begin else "",
    ", with the same constants" if constants else "",
    otherwise,
  )


_CONSTANTS = (
  "{}. In float16 and bfloat16, a constant stands for every number that rounds to it: "
  "{}. If the program has another one there, such as 1e-8 or 1 - 1e-7, compute {} in "
  "float32, or use one that the dtype has: float16 has 1e-3 and 1 - 1e-3, bfloat16 has "
  "1 - 1e-2. Otherwise {}"
)


def _names_of_ops(ops: Sequence[tf.Operation], failure: Failure) -> str:
  """Returns the names of ops to compute in a wider dtype, without those that only move
  values. Gradients have the dtypes of the forward pass, whose ops are named.
  """
  computing = {op for op in ops if op.type not in dataflow.MOVING}
  wanted = computing & failure.forward
  graph = failure.tensor.graph
  names = [op.name for op in graph.get_operations() if op in wanted]
  if len(names) > _MOST_NAMED:
    names = ["the {} ops from {} to {}".format(len(names), names[0], names[-1])]
  several = [", ".join(names)] if names else []
  if failure.tensor.op not in failure.forward:
    several.append("the op whose gradient it is")
  return " and ".join(several)


def _names_of_tensors(tensors: Iterable[tf.Tensor]) -> List[str]:
  """Returns the names of what computes tensors, or of the variables, each once."""
  names = []
  for tensor in tensors:
    names.append(dataflow.variable_read_by(tensor.op) or tensor.op.name)
  return list(dict.fromkeys(names))


def _is_rounded(tensor: tf.Tensor) -> bool:
  """Returns whether the values of a tensor are rounded, or depend on values that are,
  as a mask does; those of constants and shapes do not.
  """
  if tensor.op.type == "Const":
    return False
  return any(each.dtype.is_floating for each in contexts.search_back([tensor], _inputs))


def _inputs(tensor: tf.Tensor) -> List[tf.Tensor]:
  """Returns the inputs on whose values those of a tensor depend."""
  if tensor.op.type in _OF_SHAPES:
    return []
  return contexts.tensor_inputs(tensor)


def _is_result(tensor: tf.Tensor) -> bool:
  """Returns whether the values of a tensor would be others in float32: it has inputs,
  and is float16 or bfloat16, or what it depends on is.
  """
  if not len(tensor.op.inputs):
    return False
  before = contexts.search_back([tensor], _inputs)
  return any(each.dtype.base_dtype in recomputation.NARROW for each in before)


def _narrow(ops: Sequence[tf.Operation]) -> str:
  """Returns the name of the dtype in which the first of the ops computes."""
  return str(ops[0].outputs[0].dtype.base_dtype.name)


def _values(constants: Dict[str, np.ndarray]) -> str:
  """Returns constants with their numbers."""
  texts = []
  for name, numbers in constants.items():
    several = range_history.enumeration(["{:g}".format(each) for each in numbers], 3)
    texts.append("{} is {}".format(name, several))
  return ", ".join(texts)
