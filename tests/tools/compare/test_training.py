"""Tests the rule of `compare`: steps, applied steps, other changes of variables."""

import pytest

from mp_compat.tools.compare import training
from mp_compat.tools.compare.training import ASSIGNMENT
from mp_compat.tools.compare.training import START
from mp_compat.tools.compare.training import STEP
from mp_compat.tools.compare.training import Change
from mp_compat.tools.compare.training import Execution

W, V, RATE = (frozenset([name]) for name in ("w", "v", "rate"))
INITIALIZES = Change(W | V | RATE, W | V | RATE, is_initialization=True)
TRAINS = Change(W, may_train=True)
DECAYS = Change(W, W, may_train=True)  # a step and an assignment
CLIPS = Change(W, W)
EXPLORES = Change(RATE, RATE)
READS = Change()


def scaled(applied=True, variables=W, call=0):
  return Execution(call, variables, True, ("finite",), applied)


PLAIN = Execution(1, V, False)


def records(runs, every=1):
  """Returns the records that a session makes around runs, "start" before the run."""
  session = training.Session(every)
  made = []
  for change, executions in runs:
    made += ["start"] if session.starts(change) else []
    kind = session.add(change, executions, W)
    made += [kind] if kind else []
  return made


@pytest.mark.parametrize(
  "runs, expected",
  [
    ([], []),
    ([(READS, []), (INITIALIZES, [])], []),
    ([(INITIALIZES, []), (TRAINS, [scaled()])], ["start", STEP]),
    ([(TRAINS, [scaled()]), (TRAINS, [scaled()])], ["start", STEP, STEP]),
    # A step that skips is one; a branch that is not taken is none.
    ([(TRAINS, [scaled(False)])], ["start", STEP]),
    ([(Change(V, may_train=True), [])], ["start"]),
    # Its other branch may have changed the variable.
    ([(TRAINS, [])], ["start", ASSIGNMENT]),
    # What changes no trained variable is compared later.
    ([(INITIALIZES, []), (EXPLORES, []), (EXPLORES, [])], ["start"]),
    ([(CLIPS, []), (TRAINS, [scaled()])], ["start", ASSIGNMENT, STEP]),
    # Values are initial until the first step.
    (
      [(EXPLORES, []), (INITIALIZES, []), (EXPLORES, []), (TRAINS, [scaled()])],
      ["start", "start", STEP],
    ),
    (
      [(TRAINS, [scaled()]), (INITIALIZES, []), (TRAINS, [scaled()])],
      ["start", STEP, START, STEP],
    ),
    # What is restored or fed after the last step is compared, too.
    ([(TRAINS, [scaled()]), (INITIALIZES, [])], ["start", STEP, START]),
    (
      [(TRAINS, [scaled()]), (Change(RATE, RATE, is_initialization=True), [])],
      ["start", STEP],
    ),
  ],
)
def test_records_are_made_by_what_runs_do(runs, expected):
  assert records(runs) == expected


def test_every_leaves_out_records():
  runs = [(TRAINS, [scaled()]), (CLIPS, [])] * 5
  assert records(runs, every=2) == ["start", STEP, ASSIGNMENT, STEP, ASSIGNMENT]


@pytest.mark.parametrize(
  "change, executions, changed, expected",
  [
    (TRAINS, [scaled()], W, (False, True)),
    (TRAINS, [scaled()], V, (False, False)),
    (TRAINS, [scaled(False)], W, (False, False)),
    (DECAYS, [scaled(False)], W, (False, False)),
    (DECAYS, [scaled(True)], W, (False, True)),
    (TRAINS, [scaled(False), PLAIN], W | V, (True, False)),
    # Without a decision that can be read, a variable tells that nothing else changes.
    (TRAINS, [scaled(None)], W, (False, True)),
    (DECAYS, [scaled(None)], W, (False, False)),
  ],
)
def test_applied_steps_train(change, executions, changed, expected):
  session = training.Session(1)
  session.add(change, executions, W)
  assert session.end_record(changed) == expected
  assert session.end_record(changed) == (False, False)  # They are in one record.


@pytest.mark.parametrize(
  "executions, expected",
  [
    ([scaled()], W),
    ([scaled(None)], W),
    ([scaled(False)], set()),
    ([PLAIN], set()),
    ([scaled(False), scaled(True, V)], V),
  ],
)
def test_variables_of_applied_steps_are_known(executions, expected):
  session = training.Session(1)
  session.add(TRAINS, executions, W)
  assert session.applied == expected
  session.end_record(W)
  assert session.applied == set()


def test_assignments_before_step_hide_unknown_decisions():
  session = training.Session(1)
  session.add(CLIPS, [], frozenset())
  session.add(TRAINS, [scaled(None)], W)
  assert session.end_record(W) == (False, False)


def test_steps_around_each_other_skip_once():
  outer, inner = scaled(False, call=0), scaled(False, call=1)
  other = Execution(2, V, True, ("other",), False)
  assert training.skipped_decisions([]) == 0
  assert training.skipped_decisions([outer, inner]) == 1
  assert training.skipped_decisions([outer, inner, outer, inner]) == 2  # in a loop
  assert training.skipped_decisions([outer, inner, other, PLAIN]) == 2


def test_totals_count_applied_steps():
  totals = training.Totals()
  rows = [
    ([PLAIN], (1, None, 0, 0)),
    ([scaled(None)], (2, None, 1, 1)),
    ([scaled(False), PLAIN], (3, 1, 2, 1)),
    ([scaled(True)], (4, 1, 3, 2)),
    ([scaled(True), scaled(False, V)], (5, 2, 4, 3)),
  ]
  for executions, expected in rows:
    totals.add(executions)
    assert (totals.steps, totals.skipped, totals.scaled, totals.applied) == expected
