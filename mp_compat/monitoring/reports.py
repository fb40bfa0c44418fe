# SPDX-License-Identifier: Apache-2.0
"""Reads the record of a step: whether it was applied, with which scale, and which
gradients are not finite.
"""

import collections
from typing import (
  Counter,
  Dict,
  Iterable,
  List,
  NamedTuple,
  Optional,
  Tuple,
  TypeVar,
  Union,
)

import numpy as np

from mp_compat._tensorflow import autograph
from mp_compat._tensorflow import ops
from mp_compat._tensorflow import tf
from mp_compat.core import gradients
from mp_compat.graph import contexts
from mp_compat.graph import dead_tensors
from mp_compat.graph import runs
from mp_compat.training import recorded
from mp_compat.training.optimizer import MixedPrecisionLossScaleOptimizer

_Value = TypeVar("_Value")


class GradientReport(NamedTuple):
  """Counts the non-finite values of one gradient: scalar tensors, or their values
  fetched by a Session.

  The real and the imaginary part of a complex value count as two values.

  Attributes:
    nans: The number of NaNs, int64.
    infs: The number of infinite values, int64.
    largest: The largest magnitude of a finite value, float32 or float64; 0 if no value
      is finite.
  """

  nans: Union[tf.Tensor, np.int64]
  infs: Union[tf.Tensor, np.int64]
  largest: Union[tf.Tensor, np.floating]


def train_steps(optimizer: MixedPrecisionLossScaleOptimizer) -> List[recorded.Step]:
  """Returns what each `apply_gradients` of this optimizer built in the current graph,
  at least one.
  """
  checked_optimizer(optimizer)
  steps = [
    record for record in recorded.steps_of(optimizer) if record.train_op is not None
  ]
  if not steps:
    raise RuntimeError(
      "The optimizer {} has no train op in the current graph. Expected a "
      "MixedPrecisionLossScaleOptimizer whose minimize() or apply_gradients() was "
      "called in this graph.".format(optimizer.get_name())
    )
  return steps


def checked_optimizer(
  optimizer: MixedPrecisionLossScaleOptimizer,
) -> MixedPrecisionLossScaleOptimizer:
  """Returns the optimizer; raises a ValueError if it is of another kind."""
  if not isinstance(optimizer, MixedPrecisionLossScaleOptimizer):
    raise ValueError(
      "optimizer must be the MixedPrecisionLossScaleOptimizer that built the train op, "
      "but got {!r}.".format(optimizer)
    )
  return optimizer


def counts(record: recorded.Step) -> tf.Tensor:
  """Returns whether a run attempted and skipped a readable step, int32 [2]; zeros if
  its branch was not executed.

  A train op is dead if one of its updates is (`dead_tensors`). A ControlTrigger runs
  after it all the same.
  """
  with contexts.enter(contexts.of_outputs(record.train_op)):
    with tf.control_dependencies([record.train_op]):
      decided = tf.raw_ops.ControlTrigger()
    with tf.control_dependencies([decided]):
      attempted_and_skipped = tf.where_v2(record.applied, [1, 0], [1, 1])
  return dead_tensors.merge_out_of_branches(attempted_and_skipped, 0)


def overflow_scale(record: recorded.Step) -> Optional[tf.Tensor]:
  """Returns the loss scale of a readable step whose gradients are not finite, float32
  []; inf if they are finite, or if its branch was not executed.

  Returns None if the step has no check, or its scale is unknown.
  """
  if record.finite is None:
    return None
  with contexts.enter(contexts.of_outputs(record.train_op)):
    readable = [tensor for tensor in scales(record) if contexts.is_readable(tensor)]
    if not readable:
      return None
    known = [tf.cast(tensor, tf.float32) for tensor in readable]
    smallest = tf.reduce_min(tf.stack(known))
    scale = tf.where_v2(record.finite, np.float32(np.inf), smallest)
  return dead_tensors.merge_out_of_branches(scale, np.inf)


def is_run_by_queue(record: recorded.Step) -> bool:
  """Returns whether an op that fills a queue waits for the train op: a queue runner
  runs both, and not the Session runs of the program, as with `SyncReplicasOptimizer`.
  """
  graph = record.train_op.graph
  fills = [op for op in graph.get_operations() if op.type.startswith("QueueEnqueue")]
  return record.train_op in runs.executed_ops(fills)


def is_readable(record: recorded.Step) -> bool:
  """Returns whether the current graph can read the tensors of the step: False inside a
  loop, a function or XLA.
  """
  return contexts.is_in_branches_only(record.train_op)


@autograph.do_not_convert
def nonfinite_gradients(
  optimizer: MixedPrecisionLossScaleOptimizer,
) -> "collections.OrderedDict[str, GradientReport]":
  """Returns a report on each gradient of the last `apply_gradients` that the finite
  check covers.

  Fetch it with the train op to get the same step.

      report = mp_compat.nonfinite_gradients(optimizer)
      _, values = sess.run([train_op, report])
      for name, gradient in values.items():
        if gradient.nans or gradient.infs:
          print(name, gradient.nans, gradient.infs)

  A report that is not fetched has no cost.

  Args:
    optimizer: a `MixedPrecisionLossScaleOptimizer` whose train op is in the current
      graph.

  Returns:
    An ordered dictionary from variable names to `GradientReport`s of scalar tensors.
    Gradients that were clipped or changed otherwise come first, as `compute_gradients`
    returned them: their names end in " (computed)". If a variable has several gradients
    (replicas, towers), the later names end in " (2)", " (3)" and so on. If the train op
    is in a branch of `tf.cond`, the values are zeros whenever that branch is not
    executed.

  Raises:
    ValueError: If `optimizer` is not a `MixedPrecisionLossScaleOptimizer`.
    RuntimeError: If the current graph has no train op of this optimizer, or has it
      inside a loop or a function.
  """
  record = readable_step(optimizer)
  tensors = checked_tensors(record)
  with contexts.enter(contexts.of_outputs(record.train_op)):
    reports = [_report(values) for values in tensors.values()]
  merged: collections.OrderedDict[str, GradientReport] = collections.OrderedDict()
  are_dead = dead_tensors.may_be_dead(report.nans for report in reports)
  for name, report, is_dead in zip(tensors, reports, are_dead):
    counts = [dead_tensors.merge_out_of_branches(each, 0, is_dead) for each in report]
    merged[name] = GradientReport(*counts)
  return merged


@autograph.do_not_convert
def loss_scale_summaries(
  optimizer: MixedPrecisionLossScaleOptimizer,
) -> List[tf.Tensor]:
  """Adds scalar summaries of the last `apply_gradients` to the graph, for
  `tf.summary.merge_all()` and Estimator.

      train_op = opt.minimize(loss, global_step)
      mp_compat.loss_scale_summaries(opt)
      _, summary = sess.run([train_op, tf.summary.merge_all()])

  `loss_scale/scale` is the loss scale with which the gradients were computed.
  `loss_scale/applied` is 1 if the step is applied and 0 if it is skipped, or if the
  train op is in a branch of `tf.cond` that is not executed. Summaries run the backward
  pass, but not the train op: fetch them in the same `session.run` to get the same step.
  To count skipped steps, use `mp_compat.LossScaleHook(output_dir=...)`.

  Args:
    optimizer: a `MixedPrecisionLossScaleOptimizer` whose train op is in the current
      graph.

  Returns:
    The summaries, scalar string tensors in the collection `tf.GraphKeys.SUMMARIES`.
    `loss_scale/scale` is missing if the gradients were not computed in this graph, or
    inside of a branch.

  Raises:
    ValueError: If `optimizer` is not a `MixedPrecisionLossScaleOptimizer`.
    RuntimeError: If the current graph has no train op of this optimizer, or has it
      inside a loop or a function.
  """
  record = readable_step(optimizer)
  with contexts.enter(contexts.of_outputs(record.train_op)):
    applied = tf.cast(record.applied, tf.int64)
  values = {"applied": dead_tensors.merge_out_of_branches(applied, 0)}
  first_scale = next(iter(scales(record)), None)
  if first_scale is not None and contexts.is_readable(first_scale):
    values["scale"] = first_scale
  with tf.name_scope(None), tf.name_scope("loss_scale/"):
    return [tf.summary.scalar(name, value) for name, value in values.items()]


def readable_step(optimizer: MixedPrecisionLossScaleOptimizer) -> recorded.Step:
  """Returns the last step of `train_steps`; raises an error if the current graph cannot
  read its tensors.
  """
  record = train_steps(optimizer)[-1]
  if not is_readable(record):
    raise RuntimeError(
      "The train op {} is inside a loop or a function, so its gradients cannot be read "
      "from outside. Call nonfinite_gradients() or gradient_ranges() inside it.".format(
        record.train_op.name
      )
    )
  return record


def checked_tensors(record: recorded.Step) -> "collections.OrderedDict[str, tf.Tensor]":
  """Returns the gradients of a step by the names that `nonfinite_gradients` gives them,
  those before clipping first.
  """
  named: List[Tuple[str, tf.Tensor]] = []
  for of_replica in record.lineages:
    for computed in of_replica.hidden:
      named.append((computed.name + " (computed)", computed.values))
  return by_unique_names(named + passed_gradients(record))


def passed_gradients(record: recorded.Step) -> List[Tuple[str, tf.Tensor]]:
  """Returns the names of the variables and the values of the gradients that were passed
  in, without None. The values of a sparse gradient are those of its rows.
  """
  found = []
  for grad, name in record.gradients:
    if grad is not None:
      values = gradients.values_of([grad])[0]
      found.append((name, values))
  return found


def scales(record: recorded.Step) -> List[tf.Tensor]:
  """Returns the loss scales with which the gradients of a step were computed, each
  once.
  """
  found: Dict[contexts.TensorKey, tf.Tensor] = {}
  for of_replica in record.lineages:
    for computed in of_replica.computed:
      if computed.scale is not None:
        found[contexts.tensor_key(computed.scale)] = computed.scale
  return list(found.values())


def by_unique_names(
  pairs: Iterable[Tuple[str, _Value]],
) -> "collections.OrderedDict[str, _Value]":
  """Returns the values by name: the second, third and later of the same name end in "
  (2)", " (3)" and so on.
  """
  found: collections.OrderedDict[str, _Value] = collections.OrderedDict()
  occurrences: Counter[str] = collections.Counter()
  for name, value in pairs:
    occurrences[name] += 1
    unique = name
    if occurrences[name] > 1:
      unique = "{} ({})".format(name, occurrences[name])
    found[unique] = value
  return found


def _report(values: tf.Tensor) -> GradientReport:
  """Builds the counts of a gradient; of float64 in its dtype, of others in float32."""
  (values,) = ops.real_parts([values])
  dtype = tf.float64 if values.dtype == tf.float64 else tf.float32
  values = tf.cast(values, dtype)
  finite = tf.where_v2(tf.is_finite(values), tf.abs(values), tf.zeros_like(values))
  nans = tf.math.count_nonzero(tf.is_nan(values), dtype=tf.int64)
  infs = tf.math.count_nonzero(tf.is_inf(values), dtype=tf.int64)
  # A zero, so that there is a largest value in an empty gradient, too.
  magnitudes = tf.concat([tf.reshape(finite, [-1]), tf.zeros([1], dtype)], axis=0)
  return GradientReport(nans=nans, infs=infs, largest=tf.reduce_max(magnitudes))
