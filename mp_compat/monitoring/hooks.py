# SPDX-License-Identifier: Apache-2.0
"""SessionRunHooks that report skipped steps and end runs that apply no steps."""

import collections
from typing import Any, Deque, Dict, Iterable, List, NamedTuple, Optional, Tuple

from mp_compat._tensorflow import auto_mixed_precision
from mp_compat._tensorflow import event_files
from mp_compat._tensorflow import log
from mp_compat._tensorflow import native
from mp_compat._tensorflow import tf
from mp_compat.core import arguments
from mp_compat.core import loss_scale
from mp_compat.graph import graphs
from mp_compat.monitoring import dataflow
from mp_compat.monitoring import range_history
from mp_compat.monitoring import reports
from mp_compat.monitoring import stall
from mp_compat.training.optimizer import MixedPrecisionLossScaleOptimizer

ON_STALL = ("raise", "stop", "warn")


class LossScaleStalledError(RuntimeError):
  """An error for a stalled run: steps are attempted, but all of them are skipped."""


class _Watched(NamedTuple):
  """A train op, and what to fetch with it."""

  train_op: tf.Operation
  # float32 [3]: whether the step is attempted, whether it is skipped, the scale after
  # it
  status: tf.Tensor
  observed: List[stall.Observed]

  def computed_by(self, run: graphs.Run) -> List[stall.Observed]:
    """Returns what is observed and computed in a run."""
    return [each for each in self.observed if run.computes(each.tensor)]


class LossScaleHook(tf.train.SessionRunHook):
  """Logs the loss scale, counts skipped steps, and ends a run that no longer applies
  any steps.

  Warns if the backward pass is in float32 only, where loss scaling has no use, unless
  `auto_mixed_precision` is on, and if trained variables are float16. Counts the Session
  runs that execute a train op of the optimizer, and ignores evaluations. Each counted
  run fetches three more numbers. The run that completes a stall also fetches the values
  of both passes, to the host.

  Attributes:
    attempted: the number of attempted steps, an int.
    skipped: the number of skipped steps among them, an int.
  """

  def __init__(
    self,
    optimizer: MixedPrecisionLossScaleOptimizer,
    every_n_steps: Optional[int] = 100,
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
        "warn", once for each stall.
      min_scale_patience: the number of consecutive skipped steps without a lower scale
        that is a stall, too; an int of at least 1. If the loss scale's
        `overflow_tolerance` is larger, that is used.
      output_dir: the directory for event files, for TensorBoard: `loss_scale/scale` and
        `loss_scale/skipped_steps` over attempted steps. None writes no files. If one
        cannot be written, the hook logs a warning, and the run goes on.
      counters_in_graph: whether to store the counts of attempted and skipped steps in
        two int64 variables of the graph, under `loss_scale_hook/`. Checkpoints then
        include the counts, and one without them cannot be restored.

    Raises:
      ValueError: If an argument is out of its range, or both intervals between log
        lines are passed.
    """
    if on_stall not in ON_STALL:
      raise ValueError(
        "on_stall must be one of {}, but got {!r}.".format(
          ", ".join(map(repr, ON_STALL)), on_stall
        )
      )
    if every_n_secs is not None and every_n_steps not in (None, 100):  # the default
      raise ValueError(
        "Expected every_n_steps or every_n_secs, but got both, {!r} and {!r}. Remove "
        "one of them.".format(every_n_steps, every_n_secs)
      )
    self._optimizer = optimizer
    self._timer = None
    if every_n_secs is not None:
      self._timer = tf.train.SecondOrStepTimer(
        every_secs=arguments.scale("every_n_secs", every_n_secs)
      )
    elif every_n_steps is not None:
      self._timer = tf.train.SecondOrStepTimer(
        every_steps=arguments.positive_int("every_n_steps", every_n_steps)
      )
    self._max_consecutive_skips = arguments.positive_int(
      "max_consecutive_skips", max_consecutive_skips
    )
    self._on_stall = on_stall
    self._min_scale_patience = arguments.positive_int(
      "min_scale_patience", min_scale_patience
    )
    self._output_dir = output_dir
    self._counters_in_graph = counters_in_graph
    self.attempted = 0
    self.skipped = 0
    self._last_applied = 0  # the attempted step that was last applied, or restored
    # attempted steps, and scales after them
    self._changes: Deque[Tuple[int, float]] = collections.deque(maxlen=20)
    self._logged = (0, 0)  # attempted and skipped when the last line was logged
    self._written: Optional[int] = None  # the attempted step last written to output_dir
    self._warned = False
    self._unattempted = 0  # runs in a row that computed gradients and attempted no step
    self._session: Optional[tf.Session] = None  # in which `_read_state` was last called
    self._name: Optional[str] = None  # of the first train op, from `begin` on

  def begin(self) -> None:
    steps = reports.train_steps(self._optimizer)
    self._name = steps[0].train_op.name
    readable = [step for step in steps if reports.is_readable(step)]
    self._float16_variables = [
      name
      for step in readable
      for name, values in reports.passed_gradients(step)
      if values.dtype == tf.float16
    ]
    overflow_tolerance = getattr(self._optimizer.loss_scale, "overflow_tolerance", 1)
    self._min_scale_patience = max(self._min_scale_patience, overflow_tolerance)
    self._counters = (
      self._make_counters() if self._counters_in_graph and readable else []
    )
    self._watched = [
      _Watched(
        step.train_op, self._make_status(reports.counts(step)), stall.observed(step)
      )
      for step in readable
    ]
    self._scale = self._optimizer.loss_scale()
    self._events = event_files.EventFile("LossScaleHook", self._output_dir)
    self._warn([step.train_op.name for step in steps if not reports.is_readable(step)])

  def _warn(self, not_readable: Iterable[str]) -> None:
    """Logs warnings of train ops that cannot be observed, of float16 variables, and of
    float32 backward passes.
    """
    for name in not_readable:
      log.warn(
        "The train op %s is inside a loop or a function, where hooks cannot count its "
        "steps or see that they are skipped. If the global step stands still while the "
        "loss scale falls, all steps are skipped.",
        name,
      )
    if self._float16_variables:
      text = (
        "LossScaleHook: %s trains float16 variables: %s. They lose small updates. "
        "Create them with custom_getter=mp_compat.float32_variable_storage_getter, "
        "which stores them in float32."
      )
      log.warn(text, self._name, range_history.enumeration(self._float16_variables, 5))
    if auto_mixed_precision.is_enabled():
      return
    for train_op, _, observed in self._watched:
      backward = [each.tensor for each in observed if each.part == "backward"]
      if backward and all(
        each.dtype == tf.float32 and each.op.type not in dataflow.HIDING
        for each in backward
      ):
        log.warn(
          "LossScaleHook: the backward pass of %s has no float16 tensor. A program "
          "that computes in float32 needs no loss scaling, unless TensorFlow's graph "
          "rewrite casts it. Are the inputs and the variables of the model cast to "
          "float16?",
          train_op.name,
        )

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
    """Returns what to fetch with a train op: the counts of its step, and the scale
    after the step.
    """
    updates = [
      counter.assign_add(tf.cast(count, tf.int64), read_value=False)
      for counter, count in zip(self._counters, tf.unstack(counts))
    ]
    with tf.control_dependencies([counts] + updates):
      scale = tf.cast(self._optimizer.loss_scale(), tf.float32)
    return tf.concat([tf.cast(counts, tf.float32), [scale]], axis=0)

  def before_run(
    self, run_context: tf.train.SessionRunContext
  ) -> Optional[tf.train.SessionRunArgs]:
    run = graphs.executed_by(run_context)
    executed = [each for each in self._watched if each.train_op in run.ops]
    if not executed:
      if any(each.computed_by(run) for each in self._watched):
        self._warn_if_unattempted(is_attempted=False)
      return None
    if run_context.session is not self._session:
      self._session = run_context.session
      self._read_state(run_context.session)
    fetches = {"statuses": [each.status for each in executed]}
    if self._is_stalled(more_skips=len(executed)) and (
      not self._warned or len(executed) > 1
    ):
      self._fetched = [
        observed for each in executed for observed in each.computed_by(run)
      ]
      fetches["diagnoses"] = [each.fetch for each in self._fetched]
    return tf.train.SessionRunArgs(fetches)

  def _read_state(self, session: tf.Session) -> None:
    """Reads counts and scale at the first step of a session: other hooks, as Horovod's,
    may set them before it.
    """
    counts, scale = session.run([self._counters, self._scale])
    if counts:
      self.attempted, self.skipped = map(int, counts)
      self._logged, self._last_applied = (self.attempted, self.skipped), self.attempted
      self._changes.clear()  # at counts that were not restored
    self._has_changed(float(scale))
    self._write()

  def after_run(
    self, run_context: tf.train.SessionRunContext, run_values: tf.train.SessionRunValues
  ) -> None:
    results = run_values.results or {"statuses": []}
    if results["statuses"]:
      self._warn_if_unattempted(
        any(attempted for attempted, _, _ in results["statuses"])
      )
    for attempted, skipped, scale in results["statuses"]:
      if attempted:
        self._count(float(scale), bool(skipped))
    if "diagnoses" not in results or not self._is_stalled() or self._warned:
      return
    # end() is not called after an error
    self._events.write(lambda writer: writer.flush())
    text = self._describe_stall(zip(self._fetched, results["diagnoses"]))
    if self._on_stall == "raise":
      raise LossScaleStalledError(text)
    self._warned = True
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
    elif self._logged[0] < self.attempted:
      self._log()
    self._write()
    self._events.write(lambda writer: writer.close())

  def _warn_if_unattempted(self, is_attempted: bool) -> None:
    """Logs a warning after many runs in a row that computed gradients and attempted no
    step.
    """
    self._unattempted = 0 if is_attempted else self._unattempted + 1
    if self._unattempted == self._max_consecutive_skips:
      log.warn(
        "LossScaleHook: %d runs in a row computed the gradients of %s, but attempted "
        "no step. If the program itself checks whether they are finite, the loss scale "
        "never falls: remove this check.",
        self._unattempted,
        self._name,
      )

  def run(
    self, session: tf.Session, fetches: Any, feed_dict: Optional[Dict[Any, Any]] = None
  ) -> Any:
    """Returns `session.run(fetches, feed_dict)` of a plain Session, and observes the
    run as in a MonitoredSession.

    Call `begin()` after `minimize` and before the session runs, and at the end
    `end(session)`, which writes the last values. `on_stall="stop"` does not stop such a
    run. Raises a RuntimeError without `begin()`.
    """
    if self._name is None:
      raise RuntimeError(
        "Before LossScaleHook.run(), call begin(): after minimize(), before the "
        "session runs."
      )
    context = tf.train.SessionRunContext(
      tf.train.SessionRunArgs(fetches, feed_dict), session
    )
    requested = self.before_run(context) or tf.train.SessionRunArgs([])
    values, results = session.run([fetches, requested.fetches], feed_dict)
    self.after_run(context, tf.train.SessionRunValues(results, None, None))
    return values

  def _count(self, scale: float, is_skipped: bool) -> None:
    self.attempted += 1
    self.skipped += is_skipped
    changed = self._has_changed(scale)
    if not is_skipped:
      self._last_applied, self._warned = self.attempted, False
    due = False
    if self._timer is not None and self._timer.should_trigger_for_step(self.attempted):
      due = True
      self._timer.update_last_triggered_step(self.attempted)
    if changed or due:
      self._log()
    if changed or due or is_skipped:
      self._write()

  def _has_changed(self, scale: float) -> bool:
    """Returns whether the scale is another than before; remembers it."""
    changed = not self._changes or scale != self._changes[-1][1]
    if changed:
      self._changes.append((self.attempted, scale))
    return changed

  def _skips(self) -> Tuple[int, int]:
    """Returns the number of steps skipped in a row, and how many of them did not change
    the scale.
    """
    return self.attempted - self._last_applied, self.attempted - max(
      self._last_applied, self._changes[-1][0]
    )

  def _is_stalled(self, more_skips: int = 0) -> bool:
    """Returns whether the run is stalled, or would be after so many more skipped
    steps.
    """
    skips, without_backoff = self._skips()
    return (
      skips + more_skips >= self._max_consecutive_skips
      or without_backoff + more_skips >= self._min_scale_patience
    )

  def _log(self) -> None:
    tf.logging.info(
      "%s: loss scale %g after %d attempted steps: %d of the last %d skipped, %d "
      "(%.2f%%) of all",
      self._name,
      self._changes[-1][1],
      self.attempted,
      self.skipped - self._logged[1],
      self.attempted - self._logged[0],
      self.skipped,
      100.0 * self.skipped / self.attempted,
    )
    self._logged = (self.attempted, self.skipped)

  def _write(self) -> None:
    if self._changes and self._written != self.attempted:
      values = {
        "loss_scale/scale": self._changes[-1][1],
        "loss_scale/skipped_steps": self.skipped,
      }
      summary = tf.Summary(
        value=[
          tf.Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()
        ]
      )
      self._events.write(lambda writer: writer.add_summary(summary, self.attempted))
      self._written = self.attempted

  def _describe_stall(
    self, values: Iterable[Tuple[stall.Observed, stall.Fetched]]
  ) -> str:
    """Returns text on the skipped steps, on what is not finite in the last one, and on
    what may be the reason.
    """
    skips, without_backoff = self._skips()
    last = (
      "the last applied step was attempt {}"
      if self._last_applied
      else "no step was ever applied"
    )
    scales = " -> ".join(
      "{:g} (attempt {})".format(scale, attempt) for attempt, scale in self._changes
    )
    text = (
      "The loss scale of {} is stalled: {} steps in a row were skipped, {} of them "
      "without lowering the scale; {} of {} attempted. The scale went {}. "
    ).format(
      self._name,
      skips,
      without_backoff,
      last.format(self._last_applied),
      self.attempted,
      scales,
    )
    reason = ""
    if isinstance(
      self._optimizer.loss_scale,
      (loss_scale.FixedLossScale,) + native.FIXED_LOSS_SCALES,
    ):
      reason = (
        'the fixed loss scale may be too large: lower it, or use "dynamic". Otherwise '
      )
    elif without_backoff < self._min_scale_patience:
      reason = "the scale may still be too large: begin with a lower one, or allow more skips. Otherwise "
    return text + stall.describe(values, self._float16_variables, reason)


class StopAtAttemptHook(tf.train.SessionRunHook):
  """Ends a run after a number of attempted steps, applied or skipped.

  `tf.train.StopAtStepHook` counts applied steps (`global_step`) and never ends a run
  that skips all steps.
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
      ValueError: If `num_attempts` is out of its range. `begin` raises it if a train op
        is inside a loop or a function.
    """
    self._optimizer = optimizer
    self._remaining = arguments.positive_int("num_attempts", num_attempts)

  def begin(self) -> None:
    steps = reports.train_steps(self._optimizer)
    for step in steps:
      if not reports.is_readable(step):
        raise ValueError(
          "StopAtAttemptHook cannot count the steps of {}, which is inside a loop or a "
          "function. Count the Session runs instead.".format(step.train_op.name)
        )
    self._counts = [(step.train_op, reports.counts(step)) for step in steps]

  def before_run(
    self, run_context: tf.train.SessionRunContext
  ) -> Optional[tf.train.SessionRunArgs]:
    run = graphs.executed_by(run_context)
    counts = [each for train_op, each in self._counts if train_op in run.ops]
    return tf.train.SessionRunArgs(counts) if counts else None

  def after_run(
    self, run_context: tf.train.SessionRunContext, run_values: tf.train.SessionRunValues
  ) -> None:
    self._remaining -= sum(int(attempted) for attempted, _ in run_values.results or [])
    if self._remaining <= 0:
      run_context.request_stop()
