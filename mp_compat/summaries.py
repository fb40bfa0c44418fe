"""Scalar summaries of a step, for `tf.train.SummarySaverHook`, Estimator and TensorBoard."""

from typing import Optional, Union

from mp_compat._compat import tf


def add(scale: tf.Tensor, good_steps: Optional[tf.Variable], applied: Union[bool, tf.Tensor]) -> tf.Operation:
  """Adds the summaries of one train op to the graph; called in a cross-replica context.

  Args:
    scale: the loss scale with which the step begins, a float32 scalar.
    good_steps: the variable that counts finite steps, if there is one.
    applied: whether the step is applied.

  Returns:
    An op that counts the step, to be run with the train op.
  """
  with tf.init_scope(), tf.name_scope(None):
    skipped_steps = tf.Variable(
        0, name="skipped_steps", dtype=tf.int64, trainable=False, use_resource=True,
        collections=[tf.GraphKeys.LOCAL_VARIABLES], aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA)
  skipped = tf.cast(tf.logical_not(applied), tf.int64)
  with tf.name_scope(None), tf.name_scope("loss_scale/"):
    tf.summary.scalar("scale", scale)
    if good_steps is not None:
      tf.summary.scalar("good_steps", tf.convert_to_tensor(good_steps))
    tf.summary.scalar("applied", 1 - skipped)
    tf.summary.scalar("skipped_steps", tf.convert_to_tensor(skipped_steps))
  return skipped_steps.assign_add(skipped, read_value=False)
