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


def records(runs, every=1, is_initialized=False):
  """Returns the records that a session makes around runs, and at its end."""
  session = training.Session(every, is_initialized)
  made = []

  def record(kind):
    if kind is not None:
      session.end_record(set())
      made.append(kind)

  for change, executions in runs:
    record(session.due_before(change))
    record(session.add(change, executions, W))
  record(session.due)
  return made


@pytest.mark.parametrize(
  "runs, expected",
  [
    ([], []),
    ([(READS, []), (READS, [])], []),
    # Initializations are one record, before a run of another kind or at the end.
    ([(READS, []), (INITIALIZES, []), (INITIALIZES, [])], [START]),
    ([(INITIALIZES, []), (READS, []), (READS, [])], [START]),
    ([(INITIALIZES, []), (READS, []), (INITIALIZES, []), (READS, [])], [START, START]),
    ([(INITIALIZES, []), (TRAINS, [scaled()])], [START, STEP]),
    ([(TRAINS, [scaled()]), (TRAINS, [scaled()])], [STEP, STEP]),
    # A step that skips is one; a branch that is not taken is none.
    ([(TRAINS, [scaled(False)])], [STEP]),
    # Its other branch may have changed the variable.
    ([(TRAINS, [])], [ASSIGNMENT]),
    ([(Change(may_train=True), [])], []),
    # Assignments, also to variables that are not trained.
    ([(INITIALIZES, []), (EXPLORES, []), (EXPLORES, [])], [START] + [ASSIGNMENT] * 2),
    ([(CLIPS, []), (TRAINS, [scaled()])], [ASSIGNMENT, STEP]),
    # What is restored or fed later.
    (
      [(TRAINS, [scaled()]), (INITIALIZES, []), (TRAINS, [scaled()])],
      [STEP, START, STEP],
    ),
    ([(TRAINS, [scaled()]), (INITIALIZES, [])], [STEP, START]),
  ],
)
def test_records_are_made_by_what_runs_do(runs, expected):
  assert records(runs) == expected


def test_shared_variables_are_recorded_at_first():
  assert records([(READS, []), (TRAINS, [scaled()])], is_initialized=True) == [
    START,
    STEP,
  ]


def test_every_leaves_out_records():
  runs = [(TRAINS, [scaled()]), (CLIPS, [])] * 5
  assert records(runs, every=2) == [STEP, ASSIGNMENT] * 2 + [ASSIGNMENT]
  assert records(runs[:3], every=4) == [STEP]
  # What is due is recorded before it is initialized again.
  assert records([runs[0], (INITIALIZES, [])], every=4) == [STEP, START]


@pytest.mark.parametrize(
  "runs, expected",
  [
    ([(CLIPS, [])], W),
    ([(EXPLORES, [])], set()),
    ([(INITIALIZES, [])], set()),  # before the first step
    ([(TRAINS, [scaled()]), (INITIALIZES, [])], W),
  ],
)
def test_assignments_to_trained_variables_are_known(runs, expected):
  session = training.Session(1)
  for change, executions in runs:
    session.add(change, executions, W)
  assert session.assigned == expected


@pytest.mark.parametrize(
  "change, executions, changed, expected",
  [
    (TRAINS, [scaled()], W, (False, True)),
    (TRAINS, [scaled()], V, (False, False)),
    # Slots are trained, too.
    (TRAINS, [scaled()], {"w/Momentum"}, (False, True)),
    (TRAINS, [scaled()], {"Adam/w/m"}, (False, True)),
    (TRAINS, [scaled()], {"w1/Momentum", "global_step"}, (False, False)),
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
