# SPDX-License-Identifier: Apache-2.0
"""SessionRunHooks that report skipped steps and end runs that apply no steps."""

from typing import Iterable, List, NamedTuple, Optional, Tuple

import numpy as np

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
from mp_compat.monitoring import plain_session
from mp_compat.monitoring import range_history
from mp_compat.monitoring import reports
from mp_compat.monitoring import stall
from mp_compat.monitoring import step_counter
from mp_compat.training.optimizer import MixedPrecisionLossScaleOptimizer

ON_STALL = ("raise", "stop", "warn")


class _Default(int):
  """The default of an argument, which is not the same number that is passed."""


_EVERY_100 = _Default(100)


class LossScaleStalledError(RuntimeError):
  """An error for a stalled run: steps are attempted, but all of them are skipped."""


class _Watched(NamedTuple):
  """A train op, and what to fetch with it.

  Attributes:
    train_op: The train op.
    status: float32 [3]: 1 if the step is attempted, 1 if it is skipped, the loss scale
      after it.
    observed: The tensors that show why a step is skipped.
  """

  train_op: tf.Operation
  status: tf.Tensor
  observed: List[stall.Observed]

  def computed_by(self, run: runs.Run) -> List[stall.Observed]:
    """Returns what is observed and computed in a run."""
    return [each for each in self.observed if run.computes(each.tensor)]

  def of_part(self, part: str) -> List[tf.Tensor]:
    """Returns the observed tensors of a part, such as "forward"."""
    return [each.tensor for each in self.observed if each.part == part]


class LossScaleHook(plain_session.PlainSessionHook):
  """Logs the loss scale, counts skipped steps, and ends a run that no longer applies
  any steps.

  Warns if the backward pass is in float32 only, where loss scaling has no use, unless
  `auto_mixed_precision` is on; if trained variables are float16; and of exponentials
  and sums of squares in float16 (`float16_ops`).

      for each Session run that executes a train op:  # an evaluation does not count
        fetch whether the step is attempted and skipped, and the scale after it
        count it; log a line if the scale changed or the interval ends
        if it may complete a stall: fetch the values of both passes to the host, too
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
    super().__init__(optimizer, output_dir)
    arguments.choice("on_stall", on_stall, ON_STALL)
    if not isinstance(counters_in_graph, (bool, np.bool_)):
      raise ValueError(
        "counters_in_graph must be True or False, but got {!r}.".format(
          counters_in_graph
        )
      )
    is_passed = every_n_steps is not None and every_n_steps is not _EVERY_100
    if every_n_secs is not None and is_passed:
      raise ValueError(
        "Expected every_n_steps or every_n_secs, but got both, {!r} and {!r}. Remove "
        "one of them.".format(every_n_steps, every_n_secs)
      )
    interval = step_counter.Interval()
    if every_n_secs is not None:
      seconds = arguments.scale("every_n_secs", every_n_secs)
      interval = step_counter.Interval(seconds=seconds)
    elif every_n_steps is not None:
      every_n_steps = arguments.positive_int("every_n_steps", every_n_steps)
      interval = step_counter.Interval(steps=every_n_steps)
    self._steps = step_counter.StepCounter(
      max_consecutive_skips=arguments.positive_int(
        "max_consecutive_skips", max_consecutive_skips
      ),
      min_scale_patience=arguments.positive_int(
        "min_scale_patience", min_scale_patience
      ),
      interval=interval,
    )
    self._on_stall = on_stall
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
    steps = reports.train_steps(self._optimizer)
    self._name = steps[0].train_op.name  # of the first one
    readable = [step for step in steps if reports.is_readable(step)]
    self._float16_variables: List[str] = []
    for step in readable:
      for name, values in reports.passed_gradients(step):
        if values.dtype == tf.float16:
          self._float16_variables.append(name)
    overflow_tolerance = getattr(self._optimizer.loss_scale, "overflow_tolerance", 1)
    patience = max(self._steps.min_scale_patience, overflow_tolerance)
    self._steps.min_scale_patience = patience
    self._counters: List[tf.Variable] = []
    if self._counters_in_graph and readable:
      self._counters = self._make_counters()
    self._watched: List[_Watched] = []
    for step in readable:
      status = self._make_status(reports.counts(step))
      self._watched.append(_Watched(step.train_op, status, stall.observed(step)))
    self._scale = self._optimizer.loss_scale()
    self._events = event_files.EventFile("LossScaleHook", self._output_dir)
    for step in steps:
      if not reports.is_readable(step):
        _warn_of_unreadable(step.train_op)
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
    for watched in self._watched:
      _warn_of_float16_ops(watched)
    if auto_mixed_precision.is_enabled():
      return
    for watched in self._watched:
      _warn_of_float32_backward(watched)

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

  def _make_status(self, counts: tf.Tensor) -> tf.Tensor:
    """Builds what to fetch with a train op, the `status` of `_Watched`; updates the
    counters in the graph.

    Args:
      counts: int32 [2], whether the step is attempted and skipped.
    """
    updates = []
    for counter, count in zip(self._counters, tf.unstack(counts)):
      added = tf.cast(count, tf.int64)
      updates.append(counter.assign_add(added, read_value=False))
    with tf.control_dependencies([counts] + updates):
      scale = tf.cast(self._optimizer.loss_scale(), tf.float32)
    return tf.concat([tf.cast(counts, tf.float32), [scale]], axis=0)

  def before_run(
    self, run_context: tf.train.SessionRunContext
  ) -> Optional[tf.train.SessionRunArgs]:
    """Returns what to fetch with a run: the status of each train op that it executes,
    and the values of both passes if it may complete a stall.
    """
    run = runs.executed_by(run_context)
    executed = [each for each in self._watched if each.train_op in run.ops]
    if not executed:
      if any(each.computed_by(run) for each in self._watched):
        self._warn_if_unattempted(is_attempted=False)
      return None
    if run_context.session is not self._session:
      self._session = run_context.session
      self._read_state(run_context.session)
    fetches = {"statuses": [each.status for each in executed]}
    if self._steps.may_report_stall(len(executed)):
      self._fetched: List[stall.Observed] = []
      for each in executed:
        self._fetched += each.computed_by(run)
      fetches["diagnoses"] = [each.fetch for each in self._fetched]
    return tf.train.SessionRunArgs(fetches)

  def _read_state(self, session: tf.Session) -> None:
    """Reads counts and scale at the first step of a session: other hooks, as Horovod's,
    may set them before it.
    """
    counts, scale = session.run([self._counters, self._scale])
    self._steps.begin_session(float(scale), *[int(count) for count in counts])
    self._write()

  def after_run(
    self, run_context: tf.train.SessionRunContext, run_values: tf.train.SessionRunValues
  ) -> None:
    """Counts the steps of a run; reports a stall that it completes."""
    results = run_values.results or {"statuses": []}
    statuses = results["statuses"]
    if len(statuses):
      self._warn_if_unattempted(any(attempted for attempted, _, _ in statuses))
    for attempted, skipped, scale in statuses:
      if attempted:
        self._count(float(scale), bool(skipped))
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
      for watched in self._watched:
        log.warn(
          "LossScaleHook: no Session run executed the train op %s.",
          watched.train_op.name,
        )
    elif self._steps.has_unlogged_steps():
      self._log()
    self._write()
    self._events.write(lambda writer: writer.close())

  def _warn_if_unattempted(self, is_attempted: bool) -> None:
    """Logs a warning after many runs in a row that computed gradients and attempted no
    step.
    """
    if self._steps.count_run(is_attempted):
      log.warn(
        "LossScaleHook: %d runs in a row computed the gradients of %s, but attempted "
        "no step. If the program itself checks whether they are finite, the loss scale "
        "never falls: remove this check.",
        self._steps.unattempted_runs,
        self._name,
      )

  def _count(self, scale: float, is_skipped: bool) -> None:
    due = self._steps.count(scale, is_skipped)
    if due.log:
      self._log()
    if due.write:
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
    text = self._steps.describe_stall(self._name)
    return text + stall.describe(values, self._float16_variables, reason)


def _warn_of_unreadable(train_op: tf.Operation) -> None:
  """Logs a warning of a train op whose steps cannot be counted."""
  log.warn(
    "The train op %s is inside a loop or a function, where hooks cannot count its "
    "steps or see that they are skipped. If the global step stands still while the "
    "loss scale falls, all steps are skipped.",
    train_op.name,
  )


def _warn_of_float16_ops(watched: _Watched) -> None:
  """Logs a warning of ops of the forward pass that are likely to overflow."""
  forward = [tensor.op for tensor in watched.of_part("forward")]
  names = [op.name for op in float16_ops.likely_to_overflow(forward)]
  if names:
    log.warn(
      "LossScaleHook: the forward pass of %s computes exponentials, or sums of "
      "squares, in float16: %s. They overflow from 11.1 on, and from 256 on, also "
      "without an error: a layer normalization then returns zeros. Compute them in "
      "float32.",
      watched.train_op.name,
      range_history.enumeration(names, 5),
    )


def _warn_of_float32_backward(watched: _Watched) -> None:
  """Logs a warning if a backward pass is known, and is in float32 only."""
  backward = watched.of_part("backward")
  for tensor in backward:
    if tensor.dtype != tf.float32 or tensor.op.type in dataflow.HIDING:
      return
  if backward:
    log.warn(
      "LossScaleHook: the backward pass of %s has no float16 tensor. A program that "
      "computes in float32 needs no loss scaling, unless TensorFlow's graph rewrite "
      "casts it. Are the inputs and the variables of the model cast to float16?",
      watched.train_op.name,
    )


class StopAtAttemptHook(tf.train.SessionRunHook):
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
    self._optimizer = reports.checked_optimizer(optimizer)
    self._remaining = arguments.positive_int("num_attempts", num_attempts)

  def begin(self) -> None:
    steps = reports.train_steps(self._optimizer)
    for step in steps:
      if reports.is_run_by_queue(step):
        raise ValueError(
          "StopAtAttemptHook cannot count the steps of {}: a queue runner runs it, as "
          "that of SyncReplicasOptimizer. Count the Session runs of each worker "
          "instead, or watch opt.loss_scale().".format(step.train_op.name)
        )
      if not reports.is_readable(step):
        raise ValueError(
          "StopAtAttemptHook cannot count the steps of {}, which is inside a loop or a "
          "function. Count the Session runs instead.".format(step.train_op.name)
        )
    self._counts = [(step.train_op, reports.counts(step)) for step in steps]

  def before_run(
    self, run_context: tf.train.SessionRunContext
  ) -> Optional[tf.train.SessionRunArgs]:
    run = runs.executed_by(run_context)
    counts = [each for train_op, each in self._counts if train_op in run.ops]
    return tf.train.SessionRunArgs(counts) if counts else None

  def after_run(
    self, run_context: tf.train.SessionRunContext, run_values: tf.train.SessionRunValues
  ) -> None:
    for attempted, _ in run_values.results or []:
      self._remaining -= int(attempted)
    if self._remaining <= 0:
      run_context.request_stop()
