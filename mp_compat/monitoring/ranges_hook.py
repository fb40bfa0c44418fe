# SPDX-License-Identifier: Apache-2.0
"""A SessionRunHook that records gradient ranges during training."""

import collections
import json
import os
from typing import Dict, Iterable, List, Optional, Tuple

import numpy as np

from mp_compat._tensorflow import event_files
from mp_compat._tensorflow import log
from mp_compat._tensorflow import tf
from mp_compat.core import arguments
from mp_compat.graph import runs
from mp_compat.monitoring import gradient_ranges
from mp_compat.monitoring import range_history
from mp_compat.monitoring import reports
from mp_compat.monitoring import step_hook
from mp_compat.training import recorded
from mp_compat.training.optimizer import MixedPrecisionLossScaleOptimizer

# the largest number of steps from a record with values that are not finite to the next
_STEPS_AFTER_OVERFLOW = 10


class GradientRangesHook(step_hook.StepHook):
  """Records the ranges of the gradients now and then, and logs advice on the loss scale
  whenever it changes.

      for each run that executes the train op:
        if every_n_steps steps passed since the last record, or 10 after an overflow:
          record the ranges of its gradients
        else if it overflowed at a smaller loss scale than all before:
          record its scale
        log the advice (`mp_compat ranges` prints it) if it changed

  Writes for TensorBoard a histogram of binary exponents for each tensor,
  `gradient_ranges/<name>`, and for `mp_compat ranges` the file `gradient_ranges.jsonl`,
  which a run that resumes continues. If a file cannot be written, the hook logs a
  warning once, and the run goes on. A line of the file is a record:

      {"run": ..., "step": ..., "complete": ..., "tensors": {name: {
        "selected": ..., "dtype": ..., "applied": ..., "scale": ..., "noise": ...,
        "zeros": ..., "nonfinite": ..., "largest": ..., "exponents": {exponent: count}
      }}}

  or, for a step between the records that overflows at a smaller scale than all before:

      {"run": ..., "step": ..., "complete": true, "tensors": {}, "overflow_scale": ...}

  The fields of a record:

    run: the number of the run.
    step: the global step, or the number of attempted steps without one.
    complete: whether all of the backward pass was measured.
    selected: whether the advice is for the tensor: for those of the measured dtypes, or
      for all if there are none.
    dtype: the narrowest floating dtype that the values have had.
    applied: the dtype of a variable's gradient after it was divided by the scale; null
      for other tensors.
    scale: the loss scale of the values; null for a gradient that was measured as it was
      passed.
    noise, zeros, nonfinite, largest, exponents: as in `GradientRange`, but `zeros` is a
      number, and `exponents` are without a bias, without zeros, and without 0 counts.

  An example, with a Session of the program's own; `factor` is the gradient:

      >>> import json, tempfile
      >>> import tensorflow.compat.v1 as tf
      >>> import mp_compat
      >>> directory = tempfile.mkdtemp()
      >>> with tf.Graph().as_default(), tf.Session() as sess:
      ...   factor = tf.placeholder(tf.float32, [2])
      ...   weight = tf.get_variable("weight", [2], use_resource=True)
      ...   opt = mp_compat.MixedPrecisionLossScaleOptimizer(
      ...     tf.train.GradientDescentOptimizer(0.1), 1024.0
      ...   )
      ...   train_op = opt.minimize(tf.reduce_sum(factor * weight))
      ...   hook = mp_compat.GradientRangesHook(opt, output_dir=directory)
      ...   hook.begin()
      ...   sess.run(tf.global_variables_initializer())
      ...   _ = hook.run(sess, train_op, {factor: [1e-9, 1e-8]})
      ...   hook.end(sess)
      >>> with open(directory + "/gradient_ranges.jsonl") as file:
      ...   record = json.load(file)
      >>> print(record["step"], record["tensors"]["weight:0"]["exponents"])
      1 {'-20': 1, '-17': 1}
  """

  def __init__(
    self,
    optimizer: MixedPrecisionLossScaleOptimizer,
    every_n_steps: int = 1000,
    output_dir: Optional[str] = None,
    dtypes: gradient_ranges.Dtypes = tf.float16,
  ) -> None:
    """Makes a hook for `MonitoredTrainingSession(hooks=...)` or an Estimator's
    `training_hooks`.

    Args:
      optimizer: the `MixedPrecisionLossScaleOptimizer` whose gradients to record.
      every_n_steps: the number of attempted steps from one record to the next, an int
        of at least 1. The first step is recorded. After a record with values that are
        not finite, the next one follows after at most 10 steps.
      output_dir: the directory of the files, which is created; None writes no files.
        Each hook needs its own.
      dtypes: the dtypes of the tensors of the backward pass to record; see
        `gradient_ranges`.

    Raises:
      ValueError: If an argument is out of its range or of another kind.
    """
    super().__init__(optimizer)
    self._output_dir = arguments.optional_path("output_dir", output_dir)
    self._every_n_steps = arguments.positive_int("every_n_steps", every_n_steps)
    self._dtypes = gradient_ranges.floating(dtypes)
    # of the last advice: kind, low, high, and whether a step overflowed
    self._logged: Optional[Tuple[str, int, int, bool]] = None
    self._has_warned = False

  def begin(self) -> None:
    """Builds the measurement, and reads the records of earlier runs."""
    super().begin()
    (step,) = self._observed
    self._train_op = step.train_op
    self._overflow_scale = reports.overflow_scale(step)
    self._report = gradient_ranges.report(self._optimizer, self._dtypes)
    self._global_step = tf.train.get_global_step()
    self._history = range_history.History()
    self._events = event_files.EventFile("GradientRangesHook", self._output_dir)
    self._path = ""
    if self._output_dir:
      self._path = os.path.join(self._output_dir, range_history.FILE_NAME)
    text = self._read_file()
    self._until_due = 0  # the number of steps to attempt before the next record
    self._attempted = 0
    if self._history.steps:
      self._attempted = self._history.steps[-1]
    self._run = self._history.run + 1
    if text and not text.endswith("\n"):
      # after the line that a killed job left
      self._events.write(lambda writer: self._append("\n"))

  def _steps_to_observe(self) -> List[recorded.Step]:
    return [reports.readable_step(self._optimizer)]

  def before_run(
    self, run_context: tf.train.SessionRunContext
  ) -> Optional[tf.train.SessionRunArgs]:
    """Returns what to fetch with a run of the train op: the ranges, if a record is due
    and the run computes them, and the scale at which the step overflows.
    """
    requested = super().before_run(run_context)
    if requested is None:
      return None
    if self._overflow_scale is not None:
      requested.fetches["overflow_scale"] = self._overflow_scale
    if not self._until_due and self._can_be_recorded(runs.executed_by(run_context)):
      requested.fetches["ranges"] = self._report.ranges
    return requested

  def _can_be_recorded(self, run: runs.Run) -> bool:
    """Returns whether a run computes what is recorded; logs a warning if not."""
    if all(run.computes(item.tensor) for item in self._report.measured.values()):
      return True
    if not self._has_warned:
      self._has_warned = True
      log.warn(
        "GradientRangesHook: runs that feed a gradient cannot be recorded, because "
        "they do not compute it. Make the optimizer with "
        "check_computed_gradients=False to record the gradients that are passed to "
        "apply_gradients."
      )
    return False

  def after_run(
    self, run_context: tf.train.SessionRunContext, run_values: tf.train.SessionRunValues
  ) -> None:
    """Adds a record if its values were fetched, or if the step overflowed."""
    super().after_run(run_context, run_values)
    results = run_values.results or {}
    if "ranges" in results:
      self._record(run_context.session, results["ranges"])
    scale = float(results.get("overflow_scale", np.inf))
    if self._history.is_smallest_overflow(scale):
      record: range_history.Record = {"run": self._run, "complete": True, "tensors": {}}
      record.update(step=self._step(run_context.session), overflow_scale=scale)
      self._add(record)

  def after_step(
    self, run_context: tf.train.SessionRunContext, step: step_hook.AttemptedStep
  ) -> None:
    """Counts a step until the next record."""
    del run_context, step
    self._attempted += 1
    self._until_due = max(self._until_due - 1, 0)

  def _step(self, session: tf.Session) -> int:
    """Returns the global step, or the number of attempted steps without one."""
    if self._global_step is None:
      return self._attempted
    # A separate run: fetched with the train op, the global step could be the one before
    # or after the update.
    return int(session.run(self._global_step))

  def _record(self, session: tf.Session, ranges: Iterable[np.ndarray]) -> None:
    """Records fetched ranges, unless the branch of the train op was not executed."""
    record = record_of(self._run, self._step(session), ranges, self._report)
    if not record["tensors"]:
      return
    until_next = self._every_n_steps
    if any(tensor["nonfinite"] for tensor in record["tensors"].values()):
      until_next = min(until_next, _STEPS_AFTER_OVERFLOW)
    self._until_due = until_next - 1
    self._add(record)

  def _add(self, record: range_history.Record) -> None:
    """Adds a record to the history and the files, and logs the advice if it changes."""
    is_new_run = self._history.run != self._run
    self._history.add(record)
    self._events.write(lambda writer: self._write(writer, record, is_new_run))
    advice = range_history.advise(self._history)
    advice = advice or range_history.advise_on_zeros(self._history)
    if advice is None:
      return
    has_overflowed = bool(self._history.upper_bounds())
    news = advice.kind, advice.low, advice.high, has_overflowed
    if news != self._logged:
      self._logged = news
      text = "Gradient ranges of %s at step %d: %s"
      tf.logging.info(text, self._train_op.name, record["step"], advice.text)

  def end(self, session: tf.Session) -> None:
    del session
    if self._history.run != self._run:
      log.warn(
        "GradientRangesHook recorded nothing: no Session run executed the train op %s "
        "and computed its gradients.",
        self._train_op.name,
      )
    self._events.write(lambda writer: writer.close())

  def _write(
    self, writer: tf.summary.FileWriter, record: range_history.Record, is_new_run: bool
  ) -> None:
    """Writes a record to both files; the first of a run also drops the records that it
    replaces.
    """
    self._append(json.dumps(record) + "\n")
    values = []
    for name, tensor in record["tensors"].items():
      if tensor["exponents"]:
        histogram = _histogram(tensor["exponents"])
        values.append(tf.Summary.Value(tag="gradient_ranges/" + name, histo=histogram))
    writer.add_summary(tf.Summary(value=values), record["step"])
    writer.flush()
    if is_new_run:
      self._read_file()  # without the records that this run replaces

  def _read_file(self) -> str:
    """Reads the history from the file, if there is one; returns the file's text."""
    if not tf.gfile.Exists(self._path):
      return ""
    text = range_history.read_text(self._path)
    try:
      self._history = range_history.read(text)
    except ValueError as error:
      log.warn("%s: %s; they are ignored.", self._path, error)
    return text

  def _append(self, text: str) -> None:
    with tf.gfile.GFile(self._path, "a") as file:
      file.write(text)


def record_of(
  run: int, step: int, ranges: Iterable[np.ndarray], report: gradient_ranges.Report
) -> range_history.Record:
  """Returns a record for JSON, as the docstring of `GradientRangesHook` describes it;
  leaves out tensors that were not computed.

  Args:
    run: the number of the run.
    step: the step.
    ranges: the fetched `report.ranges`.
    report: what was measured.
  """
  tensors = collections.OrderedDict()
  for (name, item), row in zip(report.measured.items(), zip(*ranges)):
    values = gradient_ranges.GradientRange(*row)
    counts = values.exponents.tolist()
    total = sum(counts)
    if not total:
      continue  # empty, or in a branch that was not executed
    zeros = int(round(values.zeros * total))
    counts[0] -= zeros
    exponents: Dict[str, int] = {}
    for index, count in enumerate(counts[:255]):
      if count:
        exponents[str(index - range_history.BIAS)] = count
    tensors[name] = {
      "selected": item.is_selected,
      "dtype": item.dtype,
      "applied": item.applied,
      "scale": None if item.scale is None else float(values.scale),
      "noise": bool(values.noise),
      "zeros": zeros,
      "nonfinite": counts[255],
      "largest": float(values.largest),
      "exponents": exponents,
    }
  return {"run": run, "step": step, "complete": report.is_complete, "tensors": tensors}


def _histogram(exponents: Dict[str, int]) -> tf.HistogramProto:
  """Returns a histogram with one bar around each binary exponent."""
  counts = {int(exponent): count for exponent, count in exponents.items()}
  bars = range(min(counts), max(counts) + 1)
  total = 0
  total_of_squares = 0
  for exponent, count in counts.items():
    total += exponent * count
    total_of_squares += exponent**2 * count
  return tf.HistogramProto(
    min=bars[0] - 0.5,
    max=bars[-1] + 0.5,
    num=sum(counts.values()),
    sum=total,
    sum_squares=total_of_squares,
    bucket_limit=[exponent + 0.5 for exponent in bars],
    bucket=[counts.get(exponent, 0) for exponent in bars],
  )
