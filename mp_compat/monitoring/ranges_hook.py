# SPDX-License-Identifier: Apache-2.0
"""A SessionRunHook that records gradient ranges during training."""

import json
import os
from typing import Any, Dict, Optional

from absl import logging

from mp_compat._tensorflow import tf
from mp_compat.core import arguments
from mp_compat.monitoring import gradient_ranges
from mp_compat.monitoring import hooks
from mp_compat.monitoring import range_history

FILE_NAME = "gradient_ranges.jsonl"


class GradientRangesHook(tf.train.SessionRunHook):
  """Records the ranges of the gradients now and then, and logs advice on the loss scale whenever it changes.

  Writes for TensorBoard a histogram of binary exponents for each tensor, `gradient_ranges/<name>`, and for
  `mp_compat ranges` the file `gradient_ranges.jsonl`: one line for each record, `{"run": ..., "step": ..., "tensors":
  {name: {"variable": ..., "scale": ..., "zeros": ..., "nonfinite": ..., "largest": ..., "exponents": {exponent:
  count}}}}`, with the number of the run. The values are the gradients of the scaled loss. A run that resumes continues
  the file.
  """

  def __init__(
    self,
    optimizer: Any,
    every_n_steps: int = 1000,
    output_dir: Optional[str] = None,
    dtypes: Any = tf.float16,
  ) -> None:
    """Makes a hook for `MonitoredTrainingSession(hooks=...)` or an Estimator's `training_hooks`.

    Args:
      optimizer: the `MixedPrecisionLossScaleOptimizer` whose gradients to record.
      every_n_steps: the number of executed steps from one record to the next, an int of at least 1. The first step is
        recorded.
      output_dir: the directory of the files, which is created; None writes no files. Processes need separate ones.
      dtypes: the dtypes of the tensors of the backward pass to record; see `gradient_ranges`.

    Raises:
      ValueError: If `every_n_steps` is out of its range.
    """
    self._optimizer = optimizer
    self._every_n_steps = arguments.positive_int("every_n_steps", every_n_steps)
    self._output_dir = output_dir
    self._dtypes = dtypes
    self._until_due = 0  # the number of steps to execute before the next record
    self._logged: Any = None  # what was last advised

  def begin(self) -> None:
    self._train_op = hooks.count_steps(self._optimizer)[-1]
    self._ranges, self._variables = gradient_ranges.ranges_and_variables(self._optimizer, self._dtypes)
    self._global_step = tf.train.get_global_step()
    self._history, self._path, self._writer = range_history.History(), None, None
    if self._output_dir is not None:
      tf.gfile.MakeDirs(self._output_dir)
      self._path = os.path.join(self._output_dir, FILE_NAME)
      self._writer = tf.summary.FileWriter(self._output_dir)
    text = self._read_file()
    self._attempted = self._history.steps[-1] if self._history.steps else 0
    self._run = self._history.run + 1
    if text and not text.endswith("\n"):
      self._append("\n")  # after the line that a killed job left

  def before_run(self, run_context: Any) -> Any:
    self._is_running = self._train_op.is_run_by(run_context)
    return tf.train.SessionRunArgs(self._ranges) if self._is_running and not self._until_due else None

  def after_run(self, run_context: Any, run_values: Any) -> None:
    if not self._is_running:
      return
    self._attempted += 1
    self._until_due = max(self._until_due - 1, 0)
    if run_values.results is None:
      return
    # A separate run: fetched with the train op, the global step could be the one before or after the update.
    step = self._attempted if self._global_step is None else int(run_context.session.run(self._global_step))
    record = range_history.record_of(self._run, step, run_values.results, self._variables)
    if record["tensors"]:  # The branch of the train op was executed.
      self._until_due = self._every_n_steps - 1
      self._record(record)

  def end(self, session: tf.Session) -> None:
    del session
    if self._writer:
      self._writer.close()

  def _record(self, record: Dict[str, Any]) -> None:
    is_new_run = self._history.run != self._run
    self._history.add(record)
    if self._writer:
      self._append(json.dumps(record) + "\n")
      values = [
        tf.Summary.Value(tag="gradient_ranges/" + name, histo=_histogram(tensor["exponents"]))
        for name, tensor in record["tensors"].items()
        if tensor["exponents"]
      ]
      self._writer.add_summary(tf.Summary(value=values), record["step"])
      self._writer.flush()
      if is_new_run:
        self._read_file()  # without the records that this run replaces
    advice = range_history.advise(self._history)
    if advice is not None and advice[:4] != self._logged:
      self._logged = advice[:4]
      logging.info("Gradient ranges at step %d: %s.", record["step"], advice.text)

  def _read_file(self) -> str:
    """Reads the history from the file, if there is one; returns the file's text."""
    if self._path is None or not tf.gfile.Exists(self._path):
      return ""
    with tf.gfile.GFile(self._path) as file:
      text = file.read()
    try:
      self._history = range_history.read(text.splitlines())
    except ValueError as error:
      logging.warning("%s: %s; they are ignored.", self._path, error)
    return text

  def _append(self, text: str) -> None:
    with tf.gfile.GFile(self._path, "a") as file:
      file.write(text)


def _histogram(exponents: Dict[str, int]) -> tf.HistogramProto:
  """Returns a histogram with one bar around each binary exponent."""
  counts = {int(exponent): count for exponent, count in exponents.items()}
  bars = range(min(counts), max(counts) + 1)
  return tf.HistogramProto(
    min=min(counts) - 0.5,
    max=max(counts) + 0.5,
    num=sum(counts.values()),
    sum=sum(exponent * count for exponent, count in counts.items()),
    sum_squares=sum(exponent**2 * count for exponent, count in counts.items()),
    bucket_limit=[exponent + 0.5 for exponent in bars],
    bucket=[counts.get(exponent, 0) for exponent in bars],
  )
