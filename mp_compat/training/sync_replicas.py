# SPDX-License-Identifier: Apache-2.0
"""Sets the step of the accumulators of a `tf.train.SyncReplicasOptimizer` that wraps the loss scaling."""

from typing import Iterable, Optional

from mp_compat._tensorflow import tf


def set_accumulator_steps(
  takes: Iterable[tf.Operation], global_step: Optional[tf.Variable], applied: tf.Operation
) -> Optional[tf.Operation]:
  """Returns an op that sets the step of accumulators to the global step after `applied` has run.

  Taking gradients from a `tf.ConditionalAccumulator` increments its step. The accumulator then drops new gradients of
  earlier steps as stale. A skipped step leaves `global_step` unchanged, so without this op the workers would wait
  forever.

  Args:
    takes: the ops that took the gradients of this step from accumulators.
    global_step: the variable that `applied` increments; without it, the result is None.
    applied: the op that applies the step or skips it.
  """
  accumulators = {take.inputs[0].name: take for take in takes}
  if global_step is None:
    return None
  with tf.control_dependencies([applied]), tf.colocate_with(global_step, ignore_existing=True):
    current_step = tf.cast(global_step.read_value(), tf.int64)
  updates = []
  for take in accumulators.values():
    with tf.colocate_with(take, ignore_existing=True):
      set_step = (
        tf.raw_ops.ResourceAccumulatorSetGlobalStep
        if take.type.startswith("Resource")
        else tf.raw_ops.AccumulatorSetGlobalStep
      )
      updates.append(set_step(handle=take.inputs[0], new_global_step=current_step))
  return tf.group(*updates)
