# SPDX-License-Identifier: Apache-2.0
"""The rule of `compare`: what is a train step, which steps are applied, and what else
may change a variable. Needs no TensorFlow.

A run of a session changes variables in these ways:

    step              it executes what `apply_gradients` of an optimizer returned
    initialization    all values that it assigns are those of initializers, or derive
                      from no variable: they were restored, or fed
    assignment        anything else that changes variables
    unseen training   an op of TensorFlow's optimizers that belongs to no step

A step with loss scaling is applied unless a decision of its loss scale skips it. What
trained is what an applied step changed.

All variables of a session are recorded as they are

    START         after initializations, before the next run of another kind
    STEP          after a train step
    ASSIGNMENT    after a run that assigns

What is due is recorded at the session's end, too: if records are made after every
several steps, or nothing follows an initialization. A run that fails counts as what it
did. The programs train the same if both make the same records.

Trained variables are those to which steps of the graph apply gradients; in a graph
without steps, all. The report tells which of them assignments change.
"""

import collections
import dataclasses
from typing import (
  Counter,
  Dict,
  FrozenSet,
  Iterable,
  NamedTuple,
  Optional,
  Sequence,
  Set,
  Tuple,
)

START, STEP, ASSIGNMENT = "start", "step", "assignment"


class Execution(NamedTuple):
  """One execution of what a call of `apply_gradients` built.

  Attributes:
    call: The number of the call.
    variables: The names of the variables to which it applies gradients.
    is_scaled: Whether its optimizer scales the loss.
    decisions: The names of the tensors that decide whether it is applied. Steps around
      each other share them.
    applied: Whether it was applied; None if its decisions could not be read.
  """

  call: int
  variables: FrozenSet[str]
  is_scaled: bool
  decisions: Tuple[str, ...] = ()
  applied: Optional[bool] = True


class Change(NamedTuple):
  """What a run may do to variables, all by name. Of local variables and metrics, only
  those count that have gradients.

  Attributes:
    written: The variables that it may change.
    others: Those of them that ops may change which belong to no step with loss scaling.
    is_initialization: Whether it only initializes, restores or feeds variables.
    may_train: Whether it may execute steps.
    unseen: The variables that an op of an optimizer changes which belongs to no step.
  """

  written: FrozenSet[str] = frozenset()
  others: FrozenSet[str] = frozenset()
  is_initialization: bool = False
  may_train: bool = False
  unseen: FrozenSet[str] = frozenset()


@dataclasses.dataclass
class Totals:
  """Counts over all sessions.

  Attributes:
    steps: The train steps.
    skipped: Those with a decision to skip; None if no decision was read.
    scaled: Those with loss scaling.
    applied: Those with loss scaling of which a part was applied, or may have been.
    assignments: The records after assignments to trained variables, those of restored
      values and the like after the first step included.
    records: All records.
  """

  steps: int = 0
  skipped: Optional[int] = None
  scaled: int = 0
  applied: int = 0
  assignments: int = 0
  records: int = 0

  def add(self, executions: Sequence[Execution]) -> None:
    """Adds a train step, which is what one run executed."""
    is_scaled = is_applied = is_decided = is_skipped = False
    for execution in executions:
      if execution.is_scaled:
        is_scaled = True
        is_applied = is_applied or execution.applied is not False
      if execution.decisions and execution.applied is not None:
        is_decided = True
        is_skipped = is_skipped or not execution.applied
    self.steps += 1
    self.scaled += is_scaled
    self.applied += is_applied
    if is_decided:
      self.skipped = (self.skipped or 0) + is_skipped


class Session:
  """What a session did, and which records of it are to be made.

  Attributes:
    due: The kind of the record that is to be made of what runs did since the last one;
      None if they did nothing.
    skipped: How many decisions were to skip a step, since the last record.
    applied: The variables that steps with loss scaling trained which were applied, or
      may have been, since the last record.
    assigned: The trained variables that runs changed which are no steps, since the last
      record; after the first step, also those that restored them.
  """

  def __init__(self, every: int, is_initialized: bool = False) -> None:
    """Begins with a session that ran nothing.

    Args:
      every: how often records are made after steps, and after assignments.
      is_initialized: whether its variables may have values, from other sessions.
    """
    self._every = every
    self._counts: Counter[str] = collections.Counter()  # of runs, by kind
    self.due: Optional[str] = START if is_initialized else None
    # Since the last record, the variables that applied steps may have changed: without
    # loss scaling, and with it.
    self._trained: Tuple[Set[str], Set[str]] = (set(), set())
    self._others: Set[str] = set()  # that anything else may have changed
    self.skipped = 0
    self.applied: Set[str] = set()
    self.assigned: Set[str] = set()

  def due_before(self, change: Change) -> Optional[str]:
    """Returns the kind of the record to make before a run, None for none: a record does
    not show both an initialization and what else runs did.
    """
    if (self.due == START) == change.is_initialization:
      return None
    return self.due

  def add(
    self, change: Change, executions: Sequence[Execution], trained: FrozenSet[str]
  ) -> Optional[str]:
    """Adds a run; returns the kind of the record to make after it, None for none.

    `trained` are the names of the graph's trained variables.
    """
    self._others |= change.others
    if executions:
      self._add_step(executions)
      return self._count(STEP)
    if not change.written:
      return None
    if self._counts[STEP] or not change.is_initialization:
      self.assigned |= change.written & trained
    if not change.is_initialization:
      return self._count(ASSIGNMENT)
    self.due = START
    return None

  def _count(self, kind: str) -> Optional[str]:
    """Counts a run of a kind; returns the kind if a record is to be made at once."""
    self.due = kind
    self._counts[kind] += 1
    if self._counts[kind] % self._every:
      return None
    return kind

  def _add_step(self, executions: Sequence[Execution]) -> None:
    """Adds a train step."""
    for execution in executions:
      trained = self._trained[execution.is_scaled]  # the second if it is
      if execution.is_scaled and execution.applied is not False:
        self.applied |= execution.variables
      if execution.applied:
        trained.update(execution.variables)
      elif execution.applied is None:
        # Only a variable that nothing else changes shows that it was applied.
        trained.update(execution.variables - self._others)
    self.skipped += skipped_decisions(executions)

  def end_record(self, changed: Set[str]) -> Tuple[bool, bool]:
    """Begins the time after a record; returns what trained before it.

    Args:
      changed: the names of the variables whose values differ from those of the record
        before.

    Returns:
      `(without, scaled)`: whether steps without loss scaling may have changed one of
      these variables, or a slot of one that they train, since the record before, and
      whether steps with it may have.
    """
    without, scaled = [changed_any(each, changed) for each in self._trained]
    self.due = None
    self._trained, self._others = (set(), set()), set()
    self.skipped, self.applied, self.assigned = 0, set(), set()
    return without, scaled


def has_state_in(variable: str, names: Iterable[str]) -> bool:
  """Returns whether a variable or a slot of it, such as "w/Momentum" or "Adam/w/m", is
  among `names`.
  """
  path = "/{}/".format(variable)
  return any(path in "/{}/".format(name) for name in names)


def changed_any(variables: Iterable[str], changed: Set[str]) -> bool:
  """Returns whether the state of one of the variables is among `changed`."""
  return any(has_state_in(variable, changed) for variable in variables)


def skipped_decisions(executions: Sequence[Execution]) -> int:
  """Returns how many decisions were to skip a step; those of steps around each other
  count once.
  """
  skipped: Dict[Tuple[str, ...], Counter[int]] = {}
  for execution in executions:
    if execution.applied is False:
      calls = skipped.setdefault(execution.decisions, collections.Counter())
      calls[execution.call] += 1
  return sum(max(calls.values()) for calls in skipped.values())
