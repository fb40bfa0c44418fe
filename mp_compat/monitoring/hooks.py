# SPDX-License-Identifier: Apache-2.0
"""SessionRunHooks that report skipped steps and end runs that apply no steps."""

import time
from typing import Dict, Iterable, List, Optional, Tuple

from mp_compat._tensorflow import auto_mixed_precision
from mp_compat._tensorflow import event_files
from mp_compat._tensorflow import log
from mp_compat._tensorflow import native
from mp_compat._tensorflow import tf
from mp_compat.core import arguments
from mp_compat.core import loss_scale
from mp_compat.graph import runs
from mp_compat.monitoring import dataflow
from mp_compat.monitoring import float16_ops
from mp_compat.monitoring import range_history
from mp_compat.monitoring import reports
from mp_compat.monitoring import stall
from mp_compat.monitoring import step_counter
from mp_compat.monitoring import step_hook
from mp_compat.training import recorded
from mp_compat.training.optimizer import MixedPrecisionLossScaleOptimizer

ON_STALL = ("raise", "stop", "warn")


class _Default(int):
  """The default of an argument, which is not the same number that is passed."""


_EVERY_100 = _Default(100)


class LossScaleStalledError(RuntimeError):
  """An error for a stalled run: steps are attempted, but all of them are skipped."""


class LossScaleHook(step_hook.StepHook):
  """Logs the loss scale, counts skipped steps, and ends a run that no longer applies
  any steps.

  Warns if the backward pass is in float32 only, where loss scaling has no use, unless
  `auto_mixed_precision` is on; if trained variables are float16; and of exponentials
  and sums of squares in float16 (`float16_ops`).

      for each Session run that executes a train op:  # an evaluation does not count
        fetch whether the step is attempted and skipped, and the scale after it
        count it; log a line if the scale changed or the interval ends
        if it may complete a stall: fetch the values of both passes to the host, too,
            unless the session rewrites graphs: what is fetched is not rewritten
        if max_consecutive_skips steps in a row were skipped, or min_scale_patience
            without a lower scale:
          raise, stop or warn, with what is not finite, and what to do

  An example, with a Session of the program's own:

      >>> import tensorflow.compat.v1 as tf
      >>> import mp_compat
      >>> with tf.Graph().as_default(), tf.Session() as sess:
      ...   factor = tf.placeholder(tf.float32, [])
      ...   weight = tf.get_variable("weight", [], use_resource=True)
      ...   opt = mp_compat.MixedPrecisionLossScaleOptimizer(
      ...     tf.train.GradientDescentOptimizer(0.1), "dynamic"
      ...   )
      ...   train_op = opt.minimize(factor * weight)
      ...   hook = mp_compat.LossScaleHook(opt)
      ...   hook.begin()
      ...   sess.run(tf.global_variables_initializer())
      ...   for value in (1.0, float("inf")):
      ...     _ = hook.run(sess, train_op, {factor: value})
      ...   hook.end(sess)
      >>> print(hook.attempted, hook.skipped)
      2 1

  Attributes:
    attempted: The number of attempted steps, an int.
    skipped: The number of skipped steps among them, an int.
  """

  def __init__(
    self,
    optimizer: MixedPrecisionLossScaleOptimizer,
    every_n_steps: Optional[int] = _EVERY_100,
    every_n_secs: Optional[float] = None,
    max_consecutive_skips: int = 50,
    on_stall: str = "raise",
    min_scale_patience: int = 10,
    output_dir: Optional[str] = None,
    counters_in_graph: bool = False,
  ) -> None:
    """Makes a hook for `MonitoredTrainingSession(hooks=...)` or an Estimator's
    `training_hooks`.

    Args:
      optimizer: the `MixedPrecisionLossScaleOptimizer` to follow.
      every_n_steps: the number of attempted steps between log lines, 100 by default;
        None for no such lines. A change of the scale is always logged.
      every_n_secs: the number of seconds between log lines, instead of `every_n_steps`.
      max_consecutive_skips: the number of consecutive skipped steps that is a stall; an
        int of at least 1.
      on_stall: "raise" a `LossScaleStalledError`, "stop" the run (`request_stop`), or
        "warn", once for each stall. A new session, or a program that goes on after the
        error, begins to count skipped steps again.
      min_scale_patience: the number of consecutive skipped steps without a lower scale
        that is a stall, too; an int of at least 1. If the loss scale's
        `overflow_tolerance` is larger, that is used.
      output_dir: the directory for event files, for TensorBoard:
        `loss_scale_hook/scale` and `loss_scale_hook/skipped_steps` over attempted
        steps. None writes no files. If one cannot be written, the hook logs a warning,
        and the run goes on.
      counters_in_graph: whether to store the counts of attempted and skipped steps in
        two int64 variables of the graph, under `loss_scale_hook/`. Checkpoints then
        include the counts, and one without them cannot be restored.

    Raises:
      ValueError: If an argument is out of its range or of another kind, or both
        intervals between log lines are passed.
    """
    super().__init__(optimizer)
    arguments.choice("on_stall", on_stall, ON_STALL)
    arguments.choice("counters_in_graph", counters_in_graph, (True, False))
    is_passed = every_n_steps is not None and every_n_steps is not _EVERY_100
    if every_n_secs is not None and is_passed:
      raise ValueError(
        "Expected every_n_steps or every_n_secs, but got both, {!r} and {!r}. Remove "
        "one of them.".format(every_n_steps, every_n_secs)
      )
    interval = None
    if every_n_secs is not None:
      seconds = arguments.scale("every_n_secs", every_n_secs)
      interval = step_counter.Interval(seconds, time.monotonic)
    elif every_n_steps is not None:
      every_n_steps = arguments.positive_int("every_n_steps", every_n_steps)
      interval = step_counter.Interval(every_n_steps)
    self._steps = step_counter.StepCounter(
      max_consecutive_skips=arguments.positive_int(
        "max_consecutive_skips", max_consecutive_skips
      ),
      min_scale_patience=arguments.positive_int(
        "min_scale_patience", min_scale_patience
      ),
      interval=interval,
    )
    self._unattempted = 0  # runs in a row that computed gradients only
    self._on_stall = on_stall
    self._output_dir = arguments.optional_path("output_dir", output_dir)
    self._counters_in_graph = counters_in_graph
    self._session: Optional[tf.Session] = None  # in which `_read_state` was last called

  @property
  def attempted(self) -> int:
    return self._steps.attempted

  @property
  def skipped(self) -> int:
    return self._steps.skipped

  def begin(self) -> None:
    """Finds the train ops of the optimizer, and builds what to fetch with each."""
    super().begin()
    self._name = reports.train_steps(self._optimizer)[0].train_op.name
    overflow_tolerance = getattr(self._optimizer.loss_scale, "overflow_tolerance", 1)
    patience = max(self._steps.min_scale_patience, overflow_tolerance)
    self._steps.min_scale_patience = patience
    self._float16_variables: List[str] = []
    self._reasons: Dict[str, List[stall.Observed]] = {}  # by train op
    for step in self._observed:
      for name, values in reports.passed_gradients(step):
        if values.dtype == tf.float16:
          self._float16_variables.append(name)
      self._reasons[step.train_op.name] = stall.observed(step)
    self._counters: List[tf.Variable] = []
    if self._counters_in_graph and self._observed:
      self._counters = self._make_counters()
    self._updates = {name: self._count_in_graph(name) for name in self._statuses}
    self._scale = self._optimizer.loss_scale()
    self._events = event_files.EventFile("LossScaleHook", self._output_dir)
    self._warn()

  def _warn(self) -> None:
    """Logs warnings of float16 variables, of float16 ops that are likely to overflow,
    and of float32 backward passes.
    """
    if self._float16_variables:
      text = (
        "LossScaleHook: %s trains float16 variables: %s. They lose small updates. "
        "Create them with custom_getter=mp_compat.float32_variable_storage_getter, "
        "which stores them in float32."
      )
      log.warn(text, self._name, range_history.enumeration(self._float16_variables, 5))
    for train_op, reasons in self._reasons.items():
      _warn_of_float16_ops(train_op, _of_part(reasons, "forward"))
      if not auto_mixed_precision.is_enabled():
        _warn_of_float32_backward(train_op, _of_part(reasons, "backward"))

  def _make_counters(self) -> List[tf.Variable]:
    """Makes the variables of the attempted and the skipped steps where all workers find
    them: with the global step.
    """
    global_step = tf.train.get_global_step()
    device = None if global_step is None else global_step.device
    with tf.device(device), tf.name_scope(None), tf.variable_scope(
      None, "loss_scale_hook", use_resource=True
    ):
      return [
        tf.get_variable(name, [], tf.int64, tf.zeros_initializer(), trainable=False)
        for name in ("attempted_steps", "skipped_steps")
      ]

  def _count_in_graph(self, train_op: str) -> List[tf.Operation]:
    """Returns the ops that add a step to the counters in the graph."""
    counts = tf.unstack(tf.cast(self._statuses[train_op][:2], tf.int64))
    return [
      counter.assign_add(count, read_value=False)
      for counter, count in zip(self._counters, counts)
    ]

  def before_run(
    self, run_context: tf.train.SessionRunContext
  ) -> Optional[tf.train.SessionRunArgs]:
    """Returns what to fetch with a run: the status of each train op that it executes,
    and the values of both passes if it may complete a stall.
    """
    requested = super().before_run(run_context)
    run = runs.executed_by(run_context)
    if requested is None:
      if any(_computed(reasons, run) for reasons in self._reasons.values()):
        self._warn_if_unattempted(is_attempted=False)
      return None
    if run_context.session is not self._session:
      self._read_state(run_context.session)
      self._session = run_context.session  # now other threads may count
    executed = list(requested.fetches["statuses"])
    requested.fetches["updates"] = [self._updates[train_op] for train_op in executed]
    if self._steps.may_report_stall(len(executed)):
      self._fetched: List[stall.Observed] = []
      for train_op in executed:
        if not self._is_rewritten:
          self._fetched += _computed(self._reasons[train_op], run)
      requested.fetches["diagnoses"] = [each.fetch for each in self._fetched]
    return requested

  def _read_state(self, session: tf.Session) -> None:
    """Reads counts and scale at the first step of a session: other hooks, as Horovod's,
    may set them before it. Reads whether the session rewrites graphs.
    """
    self._is_rewritten = auto_mixed_precision.is_enabled_in(session)
    counts, scale = session.run([self._counters, self._scale])
    self._steps.begin_session(float(scale), *[int(count) for count in counts])
    self._write()

  def after_run(
    self, run_context: tf.train.SessionRunContext, run_values: tf.train.SessionRunValues
  ) -> None:
    """Counts the steps of a run; reports a stall that it completes."""
    results = run_values.results or {}
    statuses = results.get("statuses", {}).values()
    if statuses:
      self._warn_if_unattempted(any(attempted for attempted, _, _ in statuses))
    super().after_run(run_context, run_values)
    if "diagnoses" not in results or not self._steps.reports_stall():
      return
    # end() is not called after errors
    self._events.write(lambda writer: writer.flush())
    text = self._describe_stall(zip(self._fetched, results["diagnoses"]))
    if self._on_stall == "raise":
      self._steps.restart()  # for a program that catches the error and goes on
      raise LossScaleStalledError(text)
    log.warn("%s", text)
    if self._on_stall == "stop":
      run_context.request_stop()

  def end(self, session: tf.Session) -> None:
    del session
    if not self.attempted:
      for train_op in self._statuses:
        log.warn("LossScaleHook: no Session run executed the train op %s.", train_op)
    elif self._steps.has_unlogged_steps():
      self._log()
    self._write()
    self._events.write(lambda writer: writer.close())

  def _warn_if_unattempted(self, is_attempted: bool) -> None:
    """Logs a warning after many runs in a row that computed gradients and attempted no
    step.
    """
    self._unattempted = 0 if is_attempted else self._unattempted + 1
    if self._unattempted == self._steps.max_consecutive_skips:
      log.warn(
        "LossScaleHook: %d runs in a row computed the gradients of %s, but attempted "
        "no step. If the program itself checks whether they are finite, the loss scale "
        "never falls: remove this check.",
        self._unattempted,
        self._name,
      )

  def after_step(
    self, run_context: tf.train.SessionRunContext, step: step_hook.AttemptedStep
  ) -> None:
    """Counts a step, and logs and writes what is due."""
    del run_context
    is_due = self._steps.count(step.scale, step.is_skipped)
    if is_due:
      self._log()
    if is_due or step.is_skipped:
      self._write()

  def _log(self) -> None:
    tf.logging.info("%s", self._steps.log_line(self._name))
    self._steps.note_logged()

  def _write(self) -> None:
    if not self._steps.must_write():
      return
    values = {"scale": self._steps.scale, "skipped_steps": self.skipped}
    summary = tf.Summary()
    for name, value in values.items():
      # loss_scale_summaries() writes others, over the global step: loss_scale/scale.
      summary.value.add(tag="loss_scale_hook/" + name, simple_value=value)
    self._events.write(lambda writer: writer.add_summary(summary, self.attempted))

  def _describe_stall(
    self, values: Iterable[Tuple[stall.Observed, stall.Fetched]]
  ) -> str:
    """Returns text on the skipped steps, on what is not finite in the last one, and on
    what may be the reason.
    """
    text = self._steps.describe_stall(self._name)
    if self._is_rewritten:
      return text + _REWRITTEN
    fixed_scales = (loss_scale.FixedLossScale,) + native.FIXED_LOSS_SCALES
    reason = ""
    if isinstance(self._optimizer.loss_scale, fixed_scales):
      reason = (
        'the fixed loss scale may be too large: lower it, or use "dynamic". Otherwise '
      )
    elif self._steps.may_still_fall():
      reason = (
        "the scale may still be too large: begin with a lower one, or allow more "
        "skips. Otherwise "
      )
    return text + stall.describe(values, self._float16_variables, reason)


_REWRITTEN = (
  "What is not finite is not known: the session rewrites the graph to a narrower dtype "
  "(auto_mixed_precision), but computes in float32 what is fetched to see it. Run the "
  "program without the rewrite. If it stalls, too, the error names the reason. If not, "
  "values are too large or too small for the narrower dtype, as float16 ends at 65504."
)


def _computed(observed: List[stall.Observed], run: runs.Run) -> List[stall.Observed]:
  """Returns what is observed and computed in a run, or fed to it."""
  return [
    each._replace(is_fed=each.tensor.name in run.fed)
    for each in observed
    if run.computes(each.tensor)
  ]


def _of_part(observed: List[stall.Observed], part: str) -> List[tf.Tensor]:
  """Returns the observed tensors of a part, such as "forward"."""
  return [each.tensor for each in observed if each.part == part]


def _warn_of_float16_ops(train_op: str, forward: List[tf.Tensor]) -> None:
  """Logs a warning of ops of a forward pass that are likely to overflow."""
  likely = float16_ops.likely_to_overflow(tensor.op for tensor in forward)
  if likely:
    log.warn(
      "LossScaleHook: the forward pass of %s computes exponentials, or sums of "
      "squares, in float16: %s. They overflow from 11.1 on, and from 256 on, also "
      "without an error: a layer normalization then returns zeros. Compute them in "
      "float32.",
      train_op,
      range_history.enumeration([op.name for op in likely], 5),
    )


def _warn_of_float32_backward(train_op: str, backward: List[tf.Tensor]) -> None:
  """Logs a warning if a backward pass is known, and is in float32 only."""
  for tensor in backward:
    if tensor.dtype != tf.float32 or tensor.op.type in dataflow.HIDING:
      return
  if backward:
    log.warn(
      "LossScaleHook: the backward pass of %s has no float16 tensor. A program that "
      "computes in float32 needs no loss scaling, unless TensorFlow's graph rewrite "
      "casts it. Are the inputs and the variables of the model cast to float16?",
      train_op,
    )


class StopAtAttemptHook(step_hook.StepHook):
  """Ends a run after a number of attempted steps, applied or skipped.

  `tf.train.StopAtStepHook` counts applied steps (`global_step`) and never ends a run
  that skips all steps.

      >>> import tensorflow.compat.v1 as tf
      >>> import mp_compat
      >>> with tf.Graph().as_default():
      ...   weight = tf.get_variable("weight", [], use_resource=True)
      ...   opt = mp_compat.MixedPrecisionLossScaleOptimizer(
      ...     tf.train.GradientDescentOptimizer(0.1), "dynamic"
      ...   )
      ...   global_step = tf.train.get_or_create_global_step()
      ...   train_op = opt.minimize(weight * float("inf"), global_step)
      ...   hook = mp_compat.StopAtAttemptHook(opt, 3)
      ...   attempts = 0
      ...   with tf.train.MonitoredTrainingSession(hooks=[hook]) as sess:
      ...     while not sess.should_stop():
      ...       _, applied_steps = sess.run([train_op, global_step])
      ...       attempts += 1
      >>> print(attempts, applied_steps)
      3 0
  """

  def __init__(
    self, optimizer: MixedPrecisionLossScaleOptimizer, num_attempts: int
  ) -> None:
    """Makes the hook.

    Args:
      optimizer: the `MixedPrecisionLossScaleOptimizer` whose steps to count.
      num_attempts: the number of attempted steps, counted since the hook was made,
        after which the run stops; an int of at least 1.

    Raises:
      ValueError: If `num_attempts` is out of its range, or `optimizer` is of another
        kind. `begin` raises it if a train op
        is inside a loop or a function, or if a queue runner runs it, as with
        `SyncReplicasOptimizer`.
    """
    super().__init__(optimizer)
    self._num_attempts = arguments.positive_int("num_attempts", num_attempts)

  def _steps_to_observe(self) -> List[recorded.Step]:
    found = reports.train_steps(self._optimizer)
    for each in found:
      if reports.is_run_by_queue(each):
        raise ValueError(
          "StopAtAttemptHook cannot count the steps of {}: a queue runner runs it, as "
          "that of SyncReplicasOptimizer. Count the Session runs of each worker "
          "instead, or watch opt.loss_scale().".format(each.train_op.name)
        )
      if not reports.is_readable(each):
        raise ValueError(
          "StopAtAttemptHook cannot count the steps of {}, which is inside a loop or a "
          "function. Count the Session runs instead.".format(each.train_op.name)
        )
    return found

  def after_step(
    self, run_context: tf.train.SessionRunContext, step: step_hook.AttemptedStep
  ) -> None:
    """Stops the run after the last step."""
    if step.number >= self._num_attempts:
      run_context.request_stop()
