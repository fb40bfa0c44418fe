# SPDX-License-Identifier: Apache-2.0
"""Finds out why the steps of a stalled run are skipped."""

from typing import Any, Callable, Dict, List

from mp_compat._tensorflow import contexts
from mp_compat._tensorflow import dead_tensors
from mp_compat._tensorflow import native
from mp_compat._tensorflow import ops
from mp_compat._tensorflow import tf
from mp_compat.core import loss_scale as loss_scale_module
from mp_compat.monitoring import gradient_ranges
from mp_compat.monitoring import reports
from mp_compat.training import step as step_module


class Diagnosis:
  """Says which gradients of a step are not finite, and where in the backward pass values cease to be finite.

  Attributes:
    is_float32: whether the backward pass is known to compute in float32 only.
  """

  def __init__(self, step: step_module.Step) -> None:
    """Adds ops to the graph; they are executed only in runs that fetch them.

    Args:
      step: a step for which `reports.is_readable` holds.
    """
    self._gradients = reports.checked_tensors(step)
    self._reports = reports.report_on(step, self._gradients)
    self._backward, is_complete = gradient_ranges.backward_tensors(step)
    tensors = list(self._backward.values())
    self.is_float32 = is_complete and {tensor.dtype.base_dtype for tensor in tensors} == {tf.float32}
    self._finite = [_all_finite(tensor, around) for tensor, around in zip(tensors, dead_tensors.branches_of(tensors))]

  def fetches(self, is_computed: Callable[[tf.Tensor], bool]) -> Dict[str, Any]:
    """Returns what to fetch in a run.

    Args:
      is_computed: whether the run computes a tensor. What it does not, because gradients are fed, is left out.
    """
    return {
      "reports": {name: self._reports[name] for name, tensor in self._gradients.items() if is_computed(tensor)},
      "finite": {
        name: finite for (name, tensor), finite in zip(self._backward.items(), self._finite) if is_computed(tensor)
      },
    }


def _all_finite(tensor: tf.Tensor, branches: List[dead_tensors.Branch]) -> tf.Tensor:
  with contexts.enter(contexts.of_outputs(tensor.op)):
    finite = tf.reduce_all(ops.is_finite(tensor))
  return dead_tensors.merge_out_of_branches(finite, True, branches)


def describe(diagnoses: List[Dict[str, Any]], loss_scale: Any, is_falling: bool) -> str:
  """Returns text on what is not finite in a skipped step, and on what may be the reason.

  Args:
    diagnoses: what a run fetched of the diagnosis of each train op.
    loss_scale: the LossScale of the optimizer.
    is_falling: whether the last skipped steps lowered the scale.
  """
  lines = [line for each in diagnoses for line in reports.describe_nonfinite(each["reports"])]
  if not lines:
    return "All gradients are finite here: the loss scale itself or another process decided to skip."
  first = next((name for each in diagnoses for name, finite in each["finite"].items() if not finite), None)
  if isinstance(loss_scale, (loss_scale_module.FixedLossScale,) + native.FIXED_LOSS_SCALES):
    reason = 'the fixed loss scale may be too large: lower it, or use "dynamic". Otherwise an'
  elif is_falling:
    reason = "the scale may still be too large: begin with a lower one, or allow more skips. Otherwise an"
  else:
    reason = "an"
  return (
    "Gradients that are not finite:\n  {}\n{}Fetch the loss. If it is not finite, look at the inputs and the learning "
    "rate. If it is finite, {} op of the backward pass overflows in float16 or has no finite gradient, as tf.sqrt at "
    "0.".format(
      "\n  ".join(lines),
      "The first value of the backward pass that is not finite is {}.\n".format(first) if first else "",
      reason,
    )
  )
