# SPDX-License-Identifier: Apache-2.0
"""SessionRunHooks that report skipped steps and end runs that apply no steps."""

import collections
from typing import Any, Callable, Deque, Dict, FrozenSet, List, NamedTuple, Optional, Set, Tuple

from mp_compat._tensorflow import auto_mixed_precision
from mp_compat._tensorflow import graphs
from mp_compat._tensorflow import log
from mp_compat._tensorflow import tf
from mp_compat.core import arguments
from mp_compat.monitoring import reports
from mp_compat.monitoring import stall
from mp_compat.monitoring import summaries
from mp_compat.training import step as step_module
from mp_compat.training.optimizer import MixedPrecisionLossScaleOptimizer

ON_STALL = ("raise", "stop", "warn")
_EVERY_N_STEPS = 100
_FLOAT32 = (
  "LossScaleHook: the backward pass of %s has no float16 tensor. A program that computes in float32 needs no loss "
  "scaling, unless TensorFlow's graph rewrite casts it. Are the inputs and the variables of the model cast to float16?"
)


class LossScaleStalledError(RuntimeError):
  """An error for a stalled run: steps are attempted, but all of them are skipped."""


class LossScaleHook(tf.train.SessionRunHook):
  """Logs the loss scale, counts skipped steps, and ends a run that no longer applies any steps.

  A run is stalled after `max_consecutive_skips` skipped steps in a row, or after `min_scale_patience` skipped steps in
  a row that did not lower the scale, because it is fixed or at its minimum. `global_step` does not change in a stalled
  run, so a hook that waits for it (`tf.train.StopAtStepHook`) never stops the run.

  Warns if the backward pass is in float32 only, where loss scaling has no use, unless `auto_mixed_precision` is on.

  The hook counts the Session runs that execute a train op of the optimizer, and ignores evaluations. Each
  counted run fetches three more numbers. The run that completes a stall also fetches which gradients are not finite.

  Attributes:
    attempted: the number of attempted steps, an int.
    skipped: the number of skipped steps among them, an int.
  """

  def __init__(
    self,
    optimizer: MixedPrecisionLossScaleOptimizer,
    every_n_steps: Optional[int] = _EVERY_N_STEPS,
    every_n_secs: Optional[float] = None,
    max_consecutive_skips: int = 50,
    on_stall: str = "raise",
    min_scale_patience: int = 10,
    output_dir: Optional[str] = None,
    counters_in_graph: bool = False,
  ) -> None:
    """Makes a hook for `MonitoredTrainingSession(hooks=...)` or an Estimator's `training_hooks`.

    Args:
      optimizer: the `MixedPrecisionLossScaleOptimizer` to follow.
      every_n_steps: the number of attempted steps between log lines, 100 by default; None for no such lines. A change
        of the scale is always logged.
      every_n_secs: the number of seconds between log lines, instead of `every_n_steps`.
      max_consecutive_skips: the number of consecutive skipped steps that is a stall; an int of at least 1. With the
        default backoff of 2, 15 skipped steps lower the scale from 2**15 to 1.
      on_stall: "raise" a `LossScaleStalledError`, "stop" the run (`request_stop`), or "warn", once for each stall.
      min_scale_patience: the number of consecutive skipped steps without a lower scale that is a stall; an int of at
        least 1. If the loss scale's `overflow_tolerance` is larger, that is used.
      output_dir: the directory for event files, for TensorBoard and `mp_compat plot`: `loss_scale/scale` and
        `loss_scale/skipped_steps` over attempted steps. None writes no files. If one cannot be written, the hook logs a
        warning, and the run goes on.
      counters_in_graph: whether to store the counts of attempted and skipped steps in two int64 variables of the graph,
        under `loss_scale_hook/`, or `loss_scale_hook_1/` for a second hook. Checkpoints then include the counts,
        and a checkpoint without them cannot be restored.

    Raises:
      ValueError: If an argument is out of its range, or both intervals between log lines are passed.
    """
    if on_stall not in ON_STALL:
      raise ValueError("on_stall must be one of {}, but got {!r}.".format(", ".join(map(repr, ON_STALL)), on_stall))
    if every_n_secs is not None and every_n_steps not in (None, _EVERY_N_STEPS):
      raise ValueError(
        "Expected every_n_steps or every_n_secs, but got both, {!r} and {!r}. Remove one of them.".format(
          every_n_steps, every_n_secs
        )
      )
    self._optimizer = optimizer
    self._timer = None
    if every_n_secs is not None:
      self._timer = tf.train.SecondOrStepTimer(every_secs=arguments.scale("every_n_secs", every_n_secs))
    elif every_n_steps is not None:
      self._timer = tf.train.SecondOrStepTimer(every_steps=arguments.positive_int("every_n_steps", every_n_steps))
    self._max_consecutive_skips = arguments.positive_int("max_consecutive_skips", max_consecutive_skips)
    self._on_stall = on_stall
    self._min_scale_patience = arguments.positive_int("min_scale_patience", min_scale_patience)
    self._output_dir = output_dir
    self._counters_in_graph = counters_in_graph
    self.attempted = 0
    self.skipped = 0
    self._consecutive_skips = 0  # skipped steps since the last applied one
    self._skipped_without_backoff = 0  # skipped steps since the scale last changed or a step was applied
    self._logged = (0, 0)  # attempted and skipped when the last line was logged
    self._written: Optional[int] = None  # the attempted step last written to output_dir
    self._last_applied: Optional[int] = None
    self._warned = False
    self._changes: Deque[Tuple[int, float]] = collections.deque(maxlen=20)

  def begin(self) -> None:
    self._train_ops = count_steps(self._optimizer)
    overflow_tolerance = getattr(self._optimizer.loss_scale, "overflow_tolerance", 1)
    self._min_scale_patience = max(self._min_scale_patience, overflow_tolerance)
    self._readable = [train_op for train_op in self._train_ops if train_op.counts is not None]
    self._counters = self._make_counters() if self._counters_in_graph and self._readable else []
    self._statuses = [self._make_status(train_op.counts) for train_op in self._readable]
    self._diagnoses = [stall.Diagnosis(train_op.step) for train_op in self._readable]
    for train_op, diagnosis in zip(self._readable, self._diagnoses):
      if diagnosis.is_float32 and not auto_mixed_precision.is_enabled():
        log.warn(_FLOAT32, train_op.name)
    self._scale = self._optimizer.loss_scale()
    self._writer = None
    if self._output_dir:
      self._writer = summaries.file_writer(self._output_dir)
      self._try = summaries.FileAccess("LossScaleHook", self._output_dir)

  def _make_counters(self) -> List[tf.Variable]:
    """Makes the variables that count attempted and skipped steps."""
    with tf.name_scope(None), tf.variable_scope(None, "loss_scale_hook"):
      return [
        tf.get_variable(name, [], tf.int64, tf.zeros_initializer(), trainable=False, use_resource=True)
        for name in ("attempted_steps", "skipped_steps")
      ]

  def _make_status(self, counts: tf.Tensor) -> tf.Tensor:
    """Returns what to fetch with a train op: the counts of its step, and the scale after the step."""
    updates = [
      counter.assign_add(tf.cast(count, tf.int64), read_value=False)
      for counter, count in zip(self._counters, tf.unstack(counts))
    ]
    with tf.control_dependencies([counts] + updates):
      scale = tf.cast(self._optimizer.loss_scale(), tf.float32)
    return tf.concat([tf.cast(counts, tf.float32), [scale]], axis=0)

  def after_create_session(self, session: tf.Session, coord: Any) -> None:
    del session, coord
    self._is_new_session = True

  def _read_state(self, session: tf.Session) -> None:
    """Reads the counts and the scale before the first step of a session; other hooks, as Horovod's, may set them."""
    if self._counters:
      self.attempted, self.skipped = [int(value) for value in session.run(self._counters)]
      self._logged = (self.attempted, self.skipped)
    self._changes.append((self.attempted, float(session.run(self._scale))))
    self._write()

  def before_run(self, run_context: Any) -> Any:
    executed = [index for index, train_op in enumerate(self._readable) if train_op.is_run_by(run_context)]
    if not executed:
      return None
    if self._is_new_session:
      self._is_new_session = False
      self._read_state(run_context.session)
    fetches: Dict[str, Any] = {"statuses": [self._statuses[index] for index in executed]}
    if self._is_stalled(more_skips=len(executed)) and (not self._warned or len(executed) > 1):
      run = executed_by(run_context)
      fetches["diagnoses"] = [self._diagnoses[index].fetches(run.computes) for index in executed]
    return tf.train.SessionRunArgs(fetches)

  def after_run(self, run_context: Any, run_values: Any) -> None:
    results = run_values.results or {}
    counted = [status.tolist() for status in results.get("statuses", [])]
    for attempted, skipped, scale in counted:
      if attempted:
        self._count(float(scale), int(attempted), int(skipped))
    if any(attempted for attempted, _, _ in counted) and self._is_stalled() and not self._warned:
      self._handle_stall(self._stall_text(results["diagnoses"]), run_context)

  def end(self, session: tf.Session) -> None:
    del session
    if not self.attempted:
      for train_op in self._readable:
        log.warn("LossScaleHook: no Session run executed the train op %s.", train_op.name)
    elif self._logged[0] < self.attempted:
      self._log()
    self._write()
    if self._writer:
      self._try(self._writer.close)

  def _count(self, scale: float, attempted: int, skipped: int) -> None:
    self.attempted += attempted
    self.skipped += skipped
    changed = scale != self._changes[-1][1]
    if changed:
      self._changes.append((self.attempted, scale))
    if skipped < attempted:
      self._consecutive_skips = self._skipped_without_backoff = 0
      self._last_applied, self._warned = self.attempted, False
    else:
      self._consecutive_skips += skipped
      self._skipped_without_backoff = 0 if changed else self._skipped_without_backoff + skipped
    due = False
    if self._timer is not None and self._timer.should_trigger_for_step(self.attempted):
      due = True
      self._timer.update_last_triggered_step(self.attempted)
    if changed or due:
      self._log()
    if changed or due or skipped:
      self._write()

  def _is_stalled(self, more_skips: int = 0) -> bool:
    """Returns whether the run is stalled, or would be after so many more skipped steps."""
    return (
      self._consecutive_skips + more_skips >= self._max_consecutive_skips
      or self._skipped_without_backoff + more_skips >= self._min_scale_patience
    )

  def _log(self) -> None:
    attempted, skipped = self.attempted - self._logged[0], self.skipped - self._logged[1]
    tf.logging.info(
      "%s: loss scale %g after %d attempted steps: %d of the last %d skipped, %d (%.2f%%) of all",
      self._train_ops[0].name,
      self._changes[-1][1],
      self.attempted,
      skipped,
      attempted,
      self.skipped,
      100.0 * self.skipped / self.attempted,
    )
    self._logged = (self.attempted, self.skipped)

  def _write(self) -> None:
    if self._writer and self._changes and self._written != self.attempted:
      self._try(
        self._writer.add_summary,
        tf.Summary(
          value=[
            tf.Summary.Value(tag="loss_scale/scale", simple_value=self._changes[-1][1]),
            tf.Summary.Value(tag="loss_scale/skipped_steps", simple_value=self.skipped),
          ]
        ),
        self.attempted,
      )
      self._written = self.attempted

  def _stall_text(self, diagnoses: List[Dict[str, Any]]) -> str:
    last = (
      "no step was ever applied"
      if self._last_applied is None
      else ("the last applied step was attempt {}".format(self._last_applied))
    )
    return (
      "The loss scale of {} is stalled: {} steps in a row were skipped, {} of them without lowering the scale; {} of "
      "{} attempted. The scale went {}. {}".format(
        self._train_ops[0].name,
        self._consecutive_skips,
        self._skipped_without_backoff,
        last,
        self.attempted,
        " -> ".join("{:g} (attempt {})".format(scale, attempt) for attempt, scale in self._changes),
        stall.describe(
          diagnoses,
          self._optimizer.loss_scale,
          is_falling=self._skipped_without_backoff < self._min_scale_patience,
        ),
      )
    )

  def _handle_stall(self, text: str, run_context: Any) -> None:
    if self._writer:
      self._try(self._writer.flush)  # end() is not called after an error
    if self._on_stall == "raise":
      raise LossScaleStalledError(text)
    self._warned = True
    log.warn("%s", text)
    if self._on_stall == "stop":
      run_context.request_stop()


class StopAtAttemptHook(tf.train.SessionRunHook):
  """Ends a run after a number of attempted steps, applied or skipped.

  `tf.train.StopAtStepHook` counts applied steps (`global_step`) and never ends a run that skips all steps.
  """

  def __init__(self, optimizer: MixedPrecisionLossScaleOptimizer, num_attempts: int) -> None:
    """Makes the hook.

    Args:
      optimizer: the `MixedPrecisionLossScaleOptimizer` whose steps to count.
      num_attempts: the number of attempted steps, counted since the hook was made, after which the run stops; an int
        of at least 1.

    Raises:
      ValueError: If `num_attempts` is out of its range. `begin` raises it if a train op is inside a loop or a function.
    """
    self._optimizer = optimizer
    self._remaining = arguments.positive_int("num_attempts", num_attempts)

  def begin(self) -> None:
    self._train_ops = count_steps(self._optimizer)
    for train_op in self._train_ops:
      if train_op.counts is None:
        raise ValueError(
          "StopAtAttemptHook cannot count the steps of {}, which is inside a loop or a function. Count the Session "
          "runs instead.".format(train_op.name)
        )

  def before_run(self, run_context: Any) -> Any:
    counts = [train_op.counts for train_op in self._train_ops if train_op.is_run_by(run_context)]
    return tf.train.SessionRunArgs(counts) if counts else None

  def after_run(self, run_context: Any, run_values: Any) -> None:
    self._remaining -= sum(int(attempted) for attempted, _ in run_values.results or [])
    if self._remaining <= 0:
      run_context.request_stop()


class CountedTrainOp:
  """Counts the steps that Session runs execute with one train op of an optimizer.

  If the train op is inside a loop or a function, the counts cannot be read.
  """

  def __init__(self, step: step_module.Step) -> None:
    self.step = step
    assert step.train_op is not None  # None only in eager mode
    train_op = step.train_op
    self.name: str = train_op.name
    self.counts = reports.counts(step) if reports.is_readable(step) else None  # to fetch with the train op, or None
    if self.counts is None:
      log.warn(
        "The train op %s is inside a loop or a function, where hooks cannot count its steps or see that they are "
        "skipped. If the global step stands still while the loss scale falls, all steps are skipped.",
        self.name,
      )
    self.is_run_by = RunTest(lambda run: train_op in run.ops)


def count_steps(optimizer: MixedPrecisionLossScaleOptimizer) -> List[CountedTrainOp]:
  """Returns a counter for each train op of the optimizer in the current graph."""
  return [CountedTrainOp(step) for step in reports.train_steps(optimizer)]


class Run(NamedTuple):
  """What a Session run executes."""

  ops: Set[tf.Operation]
  fed: FrozenSet[str]  # the names of the tensors that are fed

  def computes(self, tensor: tf.Tensor) -> bool:
    """Returns whether the run computes `tensor` or feeds it, so that fetching it as well executes nothing else."""
    return tensor.name in self.fed or tensor.op in self.ops


class RunTest:
  """Tests Session runs; remembers the results by what a run fetches and feeds."""

  def __init__(self, test: Callable[[Run], bool]) -> None:
    self._test = test
    self._results: Dict[Any, bool] = {}

  def __call__(self, run_context: Any) -> bool:
    key = tuple(tuple(element.name for element in elements) for elements in _elements(run_context))
    if key not in self._results:
      self._results[key] = self._test(executed_by(run_context))
    return self._results[key]


def executed_by(run_context: Any) -> Run:
  """Returns what a run executes, as far as the caller of `run` requests it."""
  fetched, fed = _elements(run_context)
  fed_names = frozenset(tensor.name for tensor in fed)
  return Run(set(graphs.executed_ops(fetched, fed_names)), fed_names)


def _elements(run_context: Any) -> Tuple[List[Any], List[Any]]:
  """Returns the tensors and ops that a run fetches, and the tensors that it feeds."""
  graph, arguments_of_run = run_context.session.graph, run_context.original_args
  return (
    list(graphs.fetched_elements(graph, arguments_of_run.fetches)),
    graphs.fetched_elements(graph, list(arguments_of_run.feed_dict or {})),
  )
