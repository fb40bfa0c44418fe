# SPDX-License-Identifier: Apache-2.0
"""Adds scalar summaries of a step, for `tf.summary.merge_all` and Estimator; makes event files."""

from typing import Any, Callable, List
import uuid

from mp_compat._tensorflow import autograph
from mp_compat._tensorflow import contexts
from mp_compat._tensorflow import dead_tensors
from mp_compat._tensorflow import log
from mp_compat._tensorflow import tf
from mp_compat.monitoring import reports
from mp_compat.training.optimizer import MixedPrecisionLossScaleOptimizer


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
  step = reports.readable_step(optimizer)
  with contexts.enter(contexts.of_outputs(step.train_op)):
    applied = tf.cast(step.applied, tf.int64)
  values = {"applied": dead_tensors.merge_out_of_branches(applied, 0)}
  scales = [computed.scale for lineage in step.lineages for computed in lineage.computed if computed.scale is not None]
  if scales and contexts.is_readable(scales[0]):
    values["scale"] = scales[0]
  with tf.name_scope(None), tf.name_scope("loss_scale/"):
    return [tf.summary.scalar(name, value) for name, value in values.items()]


def file_writer(directory: str) -> tf.summary.FileWriter:
  """Returns a writer of a new event file.

  Its name is unique: TensorFlow gives the files that are created in a directory in the same second the same name.
  """
  return tf.summary.FileWriter(directory, filename_suffix="." + uuid.uuid4().hex)


class FileAccess:
  """Calls functions that read or write files; logs a warning the first time that one fails, as on a full disk."""

  def __init__(self, owner: str, directory: str) -> None:
    self._owner, self._directory = owner, directory
    self._has_failed = False

  def __call__(self, access_files: Callable[..., Any], *args: Any) -> None:
    try:
      access_files(*args)
    except Exception as error:  # the class depends on the status: OSError, OpError, RuntimeError, IndexError and others
      if not self._has_failed:
        self._has_failed = True
        log.warn("%s cannot write to %s, records are missing: %s", self._owner, self._directory, error)
