# SPDX-License-Identifier: Apache-2.0
"""Adds scalar summaries of a step, for `tf.train.SummarySaverHook`, Estimator and TensorBoard; makes event files."""

from typing import Any, Optional, Tuple, Union
import uuid

from mp_compat._tensorflow import contexts
from mp_compat._tensorflow import tf
from mp_compat.monitoring import reports


def add(
  scale: tf.Tensor, good_steps: Optional[tf.Variable], applied: Union[bool, tf.Tensor]
) -> Tuple[tf.Operation, Optional[reports.Counters]]:
  """Adds the summaries of one train op to the graph; called once for all replicas.

  Summaries cannot read a step inside a branch, a loop or a function. There they show the last executed step.

  Args:
    scale: the loss scale before the step, a float32 scalar tensor.
    good_steps: the variable that counts finite steps, or None.
    applied: a bool or a scalar bool tensor, True if the step is applied.

  Returns:
    `(op, counters)`: an op that counts the step, to run with the train op; and the counters if the step is inside a
    branch, a loop or a function, None otherwise.
  """
  skipped_steps = _local("skipped_steps", tf.int64)
  skipped = tf.cast(tf.logical_not(applied), tf.int64)
  count_skipped = skipped_steps.assign_add(skipped, read_value=False)
  if not contexts.is_in_control_flow():
    _write(scale, good_steps, 1 - skipped, skipped_steps)
    return count_skipped, None
  attempted_steps = _local("attempted_steps", tf.int64)
  last_scale, last_applied = _local("last_scale", tf.float32), _local("last_applied", tf.int64)
  with tf.init_scope():
    _write(last_scale, good_steps, last_applied, skipped_steps)
  updates = tf.group(
    count_skipped,
    attempted_steps.assign_add(1, read_value=False),
    last_scale.assign(scale, read_value=False),
    last_applied.assign(1 - skipped, read_value=False),
  )
  return updates, reports.Counters(attempted_steps, skipped_steps)


def file_writer(directory: str) -> tf.summary.FileWriter:
  """Returns a writer of a new event file.

  Its name is unique: TensorFlow gives the files that are created in a directory in the same second the same name.
  """
  return tf.summary.FileWriter(directory, filename_suffix="." + uuid.uuid4().hex)


def _write(scale: Any, good_steps: Optional[tf.Variable], applied: Any, skipped_steps: tf.Variable) -> None:
  with tf.name_scope(None), tf.name_scope("loss_scale/"):
    tf.summary.scalar("scale", tf.convert_to_tensor(scale))
    if good_steps is not None:
      tf.summary.scalar("good_steps", tf.convert_to_tensor(good_steps))
    tf.summary.scalar("applied", tf.convert_to_tensor(applied))
    tf.summary.scalar("skipped_steps", tf.convert_to_tensor(skipped_steps))


def _local(name: str, dtype: tf.DType) -> tf.Variable:
  """Returns a new local variable: a scalar, initially 0, that checkpoints do not contain."""
  with tf.init_scope(), tf.name_scope(None):
    return tf.Variable(
      tf.zeros([], dtype),
      name=name,
      trainable=False,
      use_resource=True,
      collections=[tf.GraphKeys.LOCAL_VARIABLES],
      aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
    )
