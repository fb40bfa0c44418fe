# SPDX-License-Identifier: Apache-2.0
"""Counts the steps of a run, and decides when it is stalled and what to log."""

import collections
from typing import Callable, Deque, NamedTuple, Optional


class ScaleChange(NamedTuple):
  """A change of the loss scale.

  Attributes:
    attempt: The number of steps that were attempted before, or with, the change.
    scale: The loss scale after it.
  """

  attempt: int
  scale: float


class Interval:
  """Tells when a log line is due: after a number of steps, or of seconds."""

  def __init__(
    self, length: float, clock: Optional[Callable[[], float]] = None
  ) -> None:
    """Makes an interval of `length` steps, or of as many seconds of a clock."""
    self._length = length
    self._clock = clock
    self._begin: Optional[float] = None

  def is_due(self, step: int) -> bool:
    """Returns whether the interval ends with a step, as at the first; then begins the
    next one.
    """
    now = step if self._clock is None else self._clock()
    # A restored count may be lower.
    if self._begin is not None and self._begin <= now < self._begin + self._length:
      return False
    self._begin = now
    return True


class StepCounter:
  """Counts attempted and skipped steps, and remembers how the loss scale changed.

  A run is stalled after `max_consecutive_skips` skipped steps in a row, or after
  `min_scale_patience` skipped steps in a row without a change of the scale.

      >>> from mp_compat.monitoring import step_counter
      >>> steps = step_counter.StepCounter(
      ...   max_consecutive_skips=50,
      ...   min_scale_patience=2,
      ...   interval=step_counter.Interval(100),
      ... )
      >>> steps.begin_session(scale=2.0)
      >>> for scale, is_skipped in [(2.0, False), (1.0, True), (1.0, True)]:
      ...   is_due = steps.count(scale, is_skipped)
      ...   print(is_due, steps.skips_without_backoff, steps.is_stalled())
      True 0 False
      True 0 False
      False 1 False
      >>> steps.is_stalled(more_skips=1)
      True

  Attributes:
    attempted: The number of attempted steps.
    skipped: The number of skipped steps among them.
    max_consecutive_skips: The number of skipped steps in a row that is a stall.
    min_scale_patience: The number of those without a change of the scale that is one.
  """

  def __init__(
    self,
    max_consecutive_skips: int,
    min_scale_patience: int,
    interval: Optional[Interval],
  ) -> None:
    """Makes a counter; `interval` is the one between log lines, None for none."""
    self.attempted = 0
    self.skipped = 0
    self.max_consecutive_skips = max_consecutive_skips
    self.min_scale_patience = min_scale_patience
    self._interval = interval
    self._last_applied = 0  # the attempt that was last applied
    self._counted_from = 0  # the attempt from which on skipped steps are counted
    self._changes: Deque[ScaleChange] = collections.deque(maxlen=20)
    self._logged_attempted = 0  # when the last line was logged
    self._logged_skipped = 0
    self._written: Optional[int] = None  # the attempt whose counts were last written
    self._is_stall_reported = False

  @property
  def scale(self) -> float:
    """The loss scale after the last step."""
    return self._changes[-1].scale

  def begin_session(
    self, scale: float, attempted: Optional[int] = None, skipped: int = 0
  ) -> None:
    """Notes the scale with which a session begins, and the counts that it restored."""
    if attempted is not None:
      self.attempted, self.skipped = attempted, skipped
      self._logged_attempted, self._logged_skipped = attempted, skipped
      self._last_applied = 0  # not known
      self._changes.clear()  # They are at counts that were not restored.
    if attempted is not None or self._is_stall_reported:
      self.restart()
    self._note_scale(scale)

  def restart(self) -> None:
    """Counts skipped steps from now on, so that another stall is reported."""
    self._counted_from = self.attempted
    self._is_stall_reported = False

  def count(self, scale: float, is_skipped: bool) -> bool:
    """Counts one attempted step; `scale` is the loss scale after it.

    Returns whether a log line is due, as after each change of the scale.
    """
    self.attempted += 1
    self.skipped += is_skipped
    has_changed = self._note_scale(scale)
    if not is_skipped:
      self._last_applied = self.attempted
      self._is_stall_reported = False
    is_due = self._interval is not None and self._interval.is_due(self.attempted)
    return is_due or has_changed

  def _note_scale(self, scale: float) -> bool:
    """Remembers the scale; returns whether it is another one than before."""
    has_changed = not self._changes or scale != self.scale
    if has_changed:
      self._changes.append(ScaleChange(self.attempted, scale))
    return has_changed

  @property
  def consecutive_skips(self) -> int:
    """The number of steps that were skipped since the last applied one, or since the
    count was restored or restarted.
    """
    return self.attempted - max(self._last_applied, self._counted_from)

  @property
  def skips_without_backoff(self) -> int:
    """The number of `consecutive_skips` after the last change of the scale."""
    since_change = self.attempted - self._changes[-1].attempt
    return min(self.consecutive_skips, since_change)

  def is_stalled(self, more_skips: int = 0) -> bool:
    """Returns whether the run is stalled, or would be after so many more skips."""
    if self.consecutive_skips + more_skips >= self.max_consecutive_skips:
      return True
    return self.skips_without_backoff + more_skips >= self.min_scale_patience

  def may_report_stall(self, steps: int) -> bool:
    """Returns whether a run with so many steps may complete a stall to report."""
    # Of several steps, one may be applied, and the next ones begin another stall.
    may_be_new = not self._is_stall_reported or steps > 1
    return may_be_new and self.is_stalled(more_skips=steps)

  def reports_stall(self) -> bool:
    """Returns whether the run is stalled and this was not reported; notes that it is
    reported now.
    """
    is_new = self.is_stalled() and not self._is_stall_reported
    self._is_stall_reported = self._is_stall_reported or is_new
    return is_new

  def may_still_fall(self) -> bool:
    """Returns whether the last skipped steps still lowered the scale."""
    return self.skips_without_backoff < self.min_scale_patience

  def describe_stall(self, name: str) -> str:
    """Returns two sentences on the skipped steps and the scale of a train op."""
    last = "no step was ever applied"
    if self._last_applied:
      last = "the last applied step was attempt {}".format(self._last_applied)
    elif self._counted_from:
      last = "no step was applied since attempt {}".format(self._counted_from)
    scales = ["{:g} (attempt {})".format(scale, n) for n, scale in self._changes]
    return (
      "The loss scale of {} is stalled: {} steps in a row were skipped, {} of them "
      "without lowering the scale; {} of {} attempted. The scale went {}. "
    ).format(
      name,
      self.consecutive_skips,
      self.skips_without_backoff,
      last,
      self.attempted,
      " -> ".join(scales),
    )

  def log_line(self, name: str) -> str:
    """Returns a line on the steps of the train op `name`, and on those since
    `note_logged` was called last.
    """
    return (
      "{}: loss scale {:g} after {} attempted steps: {} of the last {} skipped, "
      "{} ({:.2f}%) of all"
    ).format(
      name,
      self.scale,
      self.attempted,
      self.skipped - self._logged_skipped,
      self.attempted - self._logged_attempted,
      self.skipped,
      100.0 * self.skipped / self.attempted,
    )

  def note_logged(self) -> None:
    """Notes that the steps up to now were logged."""
    self._logged_attempted, self._logged_skipped = self.attempted, self.skipped

  def has_unlogged_steps(self) -> bool:
    """Returns whether steps were attempted after the last log line."""
    return self._logged_attempted < self.attempted

  def must_write(self) -> bool:
    """Returns whether the counts were not written yet; notes that they are."""
    is_new = bool(self._changes) and self._written != self.attempted
    if is_new:
      self._written = self.attempted
    return is_new
