"""Tests the rule of `compare`: steps, applied steps, other changes of variables."""

import pytest

from mp_compat.tools.compare import training
from mp_compat.tools.compare.training import Execution

W, V, RATE = (frozenset([name]) for name in ("w", "v", "rate"))


def scaled(applied=True, variables=W, call=0):
  return Execution(call, variables, True, ("finite",), applied)


PLAIN = Execution(1, V, False)


@pytest.mark.parametrize(
  "runs, expected",
  [
    ([], {}),
    ([(W, [])], dict(assigned=W)),
    ([(W, []), (RATE, [])], dict(assigned=W | RATE)),
    # What a step changes besides belongs to it.
    ([(W | RATE, [scaled()])], dict(steps=1, scaled=W)),
    ([(W, [scaled(None)])], dict(steps=1, scaled=W)),
    ([(W, [scaled(False)])], dict(steps=1, skipped=1)),
    ([(V, [PLAIN])], dict(steps=1, unscaled=V)),
    (
      [(W | V, [scaled(False), PLAIN]), (W, [scaled()]), (RATE, [])],
      dict(steps=2, skipped=1, scaled=W, unscaled=V, assigned=RATE),
    ),
    ([(W | V, [scaled(False), scaled(True, V)])], dict(steps=1, skipped=1, scaled=V)),
  ],
)
def test_intervals_hold_what_runs_did(runs, expected):
  interval = training.Interval()
  for written, executions in runs:
    interval.add(written, executions)
  assert interval == training.Interval(**expected)


@pytest.mark.parametrize(
  "changed, expected",
  [
    (W, True),
    (V, False),
    # Slots are trained, too.
    ({"w/Momentum"}, True),
    ({"Adam/w/m"}, True),
    ({"w1/Momentum", "global_step"}, False),
  ],
)
def test_slots_are_state_of_variables(changed, expected):
  assert training.changed_any(W, changed) == expected


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
