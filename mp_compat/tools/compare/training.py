# SPDX-License-Identifier: Apache-2.0
"""The rule of `compare`: when variables are recorded, what a train step is, and which
steps are applied. Needs no TensorFlow.

All variables of a session are recorded

    before its first run        if other sessions may have set them: those of a server
    after each run that may change variables, also if it raises an error
    at its end                  if runs were not recorded yet

The programs train the same if both make the same records. A run that changed nothing
leaves none, unless it is a train step. With `--every N`, runs are recorded only while
the number of train steps of the session is a multiple of N.

A train step is a run that executes what `apply_gradients` of an optimizer returned.
With loss scaling, it is applied unless a decision of its loss scale skips it. What
trained is what an applied step changed. Only the report needs this: a comparison
without an applied step says nothing on loss scaling, and a skipped step explains a
difference from training without it.
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


@dataclasses.dataclass
class Totals:
  """Counts over all sessions.

  Attributes:
    steps: The train steps.
    skipped: Those with a decision to skip; None if no decision was read.
    scaled: Those with loss scaling.
    applied: Those with loss scaling of which a part was applied, or may have been.
  """

  steps: int = 0
  skipped: Optional[int] = None
  scaled: int = 0
  applied: int = 0

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


@dataclasses.dataclass
class Interval:
  """What the runs of a session did since its last record; variables by name.

  Attributes:
    steps: The number of train steps.
    skipped: How many decisions were to skip a step.
    scaled: The variables that steps with loss scaling train which were applied, or may
      have been.
    unscaled: The variables that other steps train.
    assigned: The variables that runs may have changed which are no steps.
  """

  steps: int = 0
  skipped: int = 0
  scaled: Set[str] = dataclasses.field(default_factory=set)
  unscaled: Set[str] = dataclasses.field(default_factory=set)
  assigned: Set[str] = dataclasses.field(default_factory=set)

  def add(self, written: FrozenSet[str], executions: Sequence[Execution]) -> None:
    """Adds a run: the variables that it may have changed, and the steps that it
    executed.
    """
    if not executions:
      self.assigned |= written
      return
    self.steps += 1
    self.skipped += skipped_decisions(executions)
    for execution in executions:
      if not execution.is_scaled:
        self.unscaled |= execution.variables
      elif execution.applied is not False:
        self.scaled |= execution.variables


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
