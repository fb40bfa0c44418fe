# SPDX-License-Identifier: Apache-2.0
"""Reads the record of a step: whether it was applied, with which scale, and which gradients are not finite."""

import collections
import itertools
from typing import Any, DefaultDict, Iterator, List, NamedTuple

from mp_compat._tensorflow import autograph
from mp_compat._tensorflow import contexts
from mp_compat._tensorflow import dead_tensors
from mp_compat._tensorflow import ops
from mp_compat._tensorflow import tf
from mp_compat.core import gradients
from mp_compat.training import step as step_module
from mp_compat.training.optimizer import MixedPrecisionLossScaleOptimizer


class GradientReport(NamedTuple):
  """Counts the non-finite values of one gradient: scalar tensors, or their values fetched by a Session.

  The real and the imaginary part of a complex value count as two values.

  Attributes:
    nans: the number of NaNs, int64.
    infs: the number of infinite values, int64.
    largest: the largest magnitude of a finite value, float32 or float64; 0 if no value is finite.
  """

  nans: Any
  infs: Any
  largest: Any


def train_steps(optimizer: MixedPrecisionLossScaleOptimizer) -> List[step_module.Step]:
  """Returns what each `apply_gradients` of this optimizer built in the current graph, at least one."""
  if not isinstance(optimizer, MixedPrecisionLossScaleOptimizer):
    raise ValueError(
      "optimizer must be the MixedPrecisionLossScaleOptimizer that built the train op, but got {!r}.".format(optimizer)
    )
  steps = [step for step in step_module.recorded(optimizer) if step.train_op is not None]
  if not steps:
    raise RuntimeError(
      "The optimizer {} has no train op in the current graph. Expected a MixedPrecisionLossScaleOptimizer whose "
      "minimize() or apply_gradients() was called in this graph.".format(optimizer.get_name())
    )
  return steps


def counts(step: step_module.Step) -> tf.Tensor:
  """Returns whether a run attempted and skipped a readable step, int32 [2]; zeros if its branch was not executed."""
  with contexts.enter(contexts.of_outputs(step.train_op)), tf.control_dependencies([step.train_op]):
    attempted_and_skipped = tf.where_v2(step.applied, [1, 0], [1, 1])
  return dead_tensors.merge_out_of_branches(attempted_and_skipped, 0)


def is_readable(step: step_module.Step) -> bool:
  """Returns whether the current graph can read the tensors of the step: False inside a loop, a function or XLA."""
  return contexts.is_in_branches_only(step.train_op)


@autograph.do_not_convert
def nonfinite_gradients(optimizer: MixedPrecisionLossScaleOptimizer) -> "collections.OrderedDict[str, GradientReport]":
  """Returns a report on each gradient of the last `apply_gradients` that the finite check covers.

  Fetch it with the train op to get the same step.

      report = mp_compat.nonfinite_gradients(optimizer)
      _, values = sess.run([train_op, report])
      print([name for name, gradient in values.items() if gradient.nans or gradient.infs])

  A report that is not fetched has no cost.

  Args:
    optimizer: a `MixedPrecisionLossScaleOptimizer` whose train op is in the current graph.

  Returns:
    An ordered dictionary from variable names to `GradientReport`s of scalar tensors. Gradients that were clipped or
    changed otherwise come first, as `compute_gradients` returned them: their names end in " (computed)". If a variable
    has several gradients (replicas, towers), the later names end in " (2)", " (3)" and so on. If the train op is in a
    branch of `tf.cond`, the values are zeros whenever that branch is not executed.

  Raises:
    ValueError: If `optimizer` is not a `MixedPrecisionLossScaleOptimizer`.
    RuntimeError: If the current graph has no train op of this optimizer, or has it inside a loop or a function.
  """
  step = readable_step(optimizer)
  tensors = checked_tensors(step)
  with contexts.enter(contexts.of_outputs(step.train_op)):
    reports = [_report(values) for values in tensors.values()]
  return collections.OrderedDict(
    (name, GradientReport(*[dead_tensors.merge_out_of_branches(count, 0) for count in report]))
    for name, report in zip(tensors, reports)
  )


@autograph.do_not_convert
def loss_scale_summaries(optimizer: MixedPrecisionLossScaleOptimizer) -> List[tf.Tensor]:
  """Adds scalar summaries of the last `apply_gradients` to the graph, for `tf.summary.merge_all()` and Estimator.

      train_op = opt.minimize(loss, global_step)
      mp_compat.loss_scale_summaries(opt)
      _, summary = sess.run([train_op, tf.summary.merge_all()])

  `loss_scale/scale` is the loss scale with which the gradients were computed. `loss_scale/applied` is 1 if the step is
  applied and 0 if it is skipped, or if the train op is in a branch of `tf.cond` that is not executed. Summaries run the
  backward pass, but not the train op: fetch them in the same `session.run` to get the same step. To count skipped
  steps, use `mp_compat.LossScaleHook(output_dir=...)`.

  Args:
    optimizer: a `MixedPrecisionLossScaleOptimizer` whose train op is in the current graph.

  Returns:
    The summaries, scalar string tensors in the collection `tf.GraphKeys.SUMMARIES`. `loss_scale/scale` is missing if
    the gradients were not computed in this graph, or inside of a branch.

  Raises:
    ValueError: If `optimizer` is not a `MixedPrecisionLossScaleOptimizer`.
    RuntimeError: If the current graph has no train op of this optimizer, or has it inside a loop or a function.
  """
  step = readable_step(optimizer)
  with contexts.enter(contexts.of_outputs(step.train_op)):
    applied = tf.cast(step.applied, tf.int64)
  values = {"applied": dead_tensors.merge_out_of_branches(applied, 0)}
  scales = [computed.scale for lineage in step.lineages for computed in lineage.computed if computed.scale is not None]
  if scales and contexts.is_readable(scales[0]):
    values["scale"] = scales[0]
  with tf.name_scope(None), tf.name_scope("loss_scale/"):
    return [tf.summary.scalar(name, value) for name, value in values.items()]


def readable_step(optimizer: MixedPrecisionLossScaleOptimizer) -> step_module.Step:
  """Returns the last step of `train_steps`; raises an error if the current graph cannot read its tensors."""
  step = train_steps(optimizer)[-1]
  if not is_readable(step):
    raise RuntimeError(
      "The train op {} is inside a loop or a function, so its gradients cannot be read from outside. "
      "Call nonfinite_gradients() or gradient_ranges() inside it.".format(step.train_op.name)
    )
  return step


def checked_tensors(step: step_module.Step) -> "collections.OrderedDict[str, tf.Tensor]":
  """Returns the gradients of a step by the names that `nonfinite_gradients` gives them, those before clipping first."""
  found = [
    (computed.name + " (computed)", computed.values) for lineage in step.lineages for computed in lineage.replaced
  ]
  found += [(name, values) for grad, name in step.gradients for values in gradients.values_of([grad])]
  return collections.OrderedDict(zip(number_repeated([name for name, _ in found]), [values for _, values in found]))


def number_repeated(names: List[str]) -> List[str]:
  """Returns the names, each once: the second, third and later of the same name end in " (2)", " (3)" and so on."""
  counters: DefaultDict[str, Iterator[int]] = collections.defaultdict(lambda: itertools.count(1))
  return [name if count == 1 else "{} ({})".format(name, count) for name in names for count in [next(counters[name])]]


def _report(values: tf.Tensor) -> GradientReport:
  values = ops.real_parts(values)
  values = tf.cast(values, tf.float64 if values.dtype == tf.float64 else tf.float32)
  finite = tf.where_v2(tf.is_finite(values), tf.abs(values), tf.zeros_like(values))
  return GradientReport(
    nans=tf.math.count_nonzero(tf.is_nan(values), dtype=tf.int64),
    infs=tf.math.count_nonzero(tf.is_inf(values), dtype=tf.int64),
    largest=tf.reduce_max(tf.concat([tf.reshape(finite, [-1]), tf.zeros([1], values.dtype)], axis=0)),
  )
