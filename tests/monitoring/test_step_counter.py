"""Tests of counting and of stalls, without TensorFlow; runs are strings of steps."""

import pytest

from mp_compat.monitoring import step_counter

MANY = 1000


def counter(skips=MANY, patience=MANY, interval=None):
  return step_counter.StepCounter(skips, patience, interval)


def run(steps, counted, scale=8.0):
  """Counts steps: "+" is applied, "-" skipped, "v" skipped with half of the scale.

  Returns the attempts at which a stall was reported.
  """
  counted.begin_session(scale)
  reported = []
  for step in steps:
    scale = scale / 2 if step == "v" else scale
    counted.count(scale, is_skipped=step != "+")
    if counted.reports_stall():
      reported.append(counted.attempted)
  return reported


# The steps; the consecutive skips and the patience that are a stall; the attempts at
# which it is reported.
STALLS = {
  "none": ("+" * 9, 3, 3, []),
  "skips in a row": ("++---++", 3, MANY, [5]),
  "backoffs in a row": ("++vvvv", 3, MANY, [5]),
  "applied between": ("--+--+--", 3, MANY, []),
  "patience begins after a backoff": ("vv---", MANY, 3, [5]),
  "patience is not used by backoffs": ("vvvvvv", MANY, 3, []),
  "once": ("-------", 3, MANY, [3]),
  "again after an applied step": ("----+----", 3, MANY, [3, 8]),
  "at the first": ("-", 1, MANY, [1]),
}


@pytest.mark.parametrize("case", sorted(STALLS))
def test_stalls_are_reported_once(case):
  steps, skips, patience, expected = STALLS[case]
  assert run(steps, counter(skips, patience)) == expected


@pytest.mark.parametrize("case", sorted(STALLS))
def test_stall_is_expected_one_step_before(case):
  """The run that completes it fetches more."""
  steps, skips, patience, expected = STALLS[case]
  counted, expects = counter(skips, patience), []
  counted.begin_session(8.0)
  scale = 8.0
  for step in steps:
    expects.append(counted.may_report_stall(1))
    scale = scale / 2 if step == "v" else scale
    counted.count(scale, is_skipped=step != "+")
    if counted.reports_stall():
      assert expects[-1]
  assert [index + 1 for index, value in enumerate(expects) if value][:1] >= expected[:1]


def test_several_steps_may_be_new_stall():
  counted = counter(skips=2)
  assert run("---", counted) == [2]
  assert not counted.may_report_stall(1) and counted.may_report_stall(2)


def test_counts_and_log_lines():
  counted = counter(interval=step_counter.Interval(3))
  counted.begin_session(8.0)
  due = [counted.count(scale, scale != 8.0) for scale in [8.0, 8.0, 4.0, 4.0]]
  assert due == [True, False, True, True]  # a change; the third
  assert (counted.attempted, counted.skipped, counted.scale) == (4, 2, 4.0)
  line = counted.log_line("train")
  counts = "2 of the last 4 skipped, 2 (50.00%) of all"
  assert line == "train: loss scale 4 after 4 attempted steps: " + counts
  assert counted.log_line("train") == line and counted.has_unlogged_steps()
  counted.note_logged()
  assert not counted.has_unlogged_steps()
  counted.count(4.0, False)
  assert counted.has_unlogged_steps() and "0 of the last 1" in counted.log_line("train")


def test_interval_of_steps():
  interval = step_counter.Interval(3)
  assert [step for step in range(1, 11) if interval.is_due(step)] == [1, 4, 7, 10]


def test_interval_goes_on_after_lower_count():
  """A checkpoint is restored in the same process, with the counts in the graph."""
  counted = counter(interval=step_counter.Interval(100))
  counted.begin_session(8.0, attempted=5000)
  counted.count(8.0, False)
  counted.begin_session(8.0, attempted=50)
  due = [counted.attempted for _ in range(201) if counted.count(8.0, False)]
  assert due == [51, 151, 251]


def test_interval_of_seconds():
  times = iter([0.0, 1.0, 2.0, 2.5, 4.1])
  interval = step_counter.Interval(2.0, clock=lambda: next(times))
  assert [step for step in range(5) if interval.is_due(step)] == [0, 2, 4]


def test_restored_counts_are_no_skips():
  counted = counter(skips=3)
  run("--", counted)
  counted.begin_session(2.0, attempted=70, skipped=7)
  assert (counted.attempted, counted.skipped) == (70, 7)
  assert counted.consecutive_skips == counted.skips_without_backoff == 0
  counted.count(2.0, True)
  assert "71 attempted steps: 1 of the last 1 skipped, 8" in counted.log_line("train")


def test_new_session_keeps_counts():
  """Nothing was restored, so the counts of the process go on."""
  counted = counter()
  run("v", counted)
  counted.begin_session(8.0)
  counted.count(4.0, True)
  text = "8 (attempt 0) -> 4 (attempt 1) -> 8 (attempt 1) -> 4 (attempt 2)"
  assert text in counted.describe_stall("train")


def test_new_session_can_stall_again():
  """With as many skips as the first: its scale may begin anew."""
  counted = counter(skips=3)
  assert run("+---", counted) == [4]
  assert run("-----", counted) == [7]
  assert "the last applied step was attempt 1 of 9" in counted.describe_stall("train")
  counted.begin_session(8.0, attempted=20, skipped=2)
  assert "no step was applied since attempt 20" in counted.describe_stall("train")


def test_session_without_stall_keeps_skips():
  """A session that ends now and then must not hide a stall."""
  counted = counter(skips=5)
  assert [run("--", counted) for _ in range(3)] == [[], [], [5]]


def test_description_names_last_applied_step():
  counted = counter(patience=2)
  run("+v--", counted)
  assert counted.describe_stall("train") == (
    "The loss scale of train is stalled: 3 steps in a row were skipped, 2 of them "
    "without lowering the scale; the last applied step was attempt 1 of 4 attempted. "
    "The scale went 8 (attempt 0) -> 4 (attempt 2). "
  )
  assert not counted.may_still_fall()
  assert "no step was ever applied of 0 attempted" in _begun().describe_stall("train")


def _begun():
  counted = counter()
  counted.begin_session(8.0)
  return counted


def test_each_attempt_is_written_once():
  counted = counter()
  assert not counted.must_write()  # no scale is known
  counted.begin_session(8.0)
  assert counted.must_write() and not counted.must_write()
  counted.count(8.0, False)
  assert counted.must_write() and not counted.must_write()
