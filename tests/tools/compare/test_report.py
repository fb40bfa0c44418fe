"""Tests what the report of `compare` says of recordings; they need no TensorFlow."""

import json

import numpy as np
import pytest

from mp_compat.tools.compare import recording
from mp_compat.tools.compare import report
from tests import testing

ALL = ("original", "mp_compat", "again")


def notes(**changed):
  """Returns what is known of a run that trains, with changes."""
  known = dict(
    compared=True,
    tensorflow="2.21.0",
    steps=6,
    skipped=1,
    scaled=6,
    applied=5,
    records={"MainThread": 7},
    variables=3,
    scales={"current_loss_scale": [8.0, 4.0]},
    trained=True,
    trained_without=False,
    difference=None,
    uses="mp_compat",
    ends=[],
  )
  return {**known, **changed}


def difference(theirs="w", ours="w", step=2, **changed):
  """Returns a difference in one variable."""
  known = dict(
    index=str(step),
    step=step,
    is_of_step=True,
    names=[[theirs], [ours]],
    skipped=[0, 0],
    changed=[],
    has_trained=True,
  )
  return {**known, **changed}


ORIGINAL = notes(compared=False)
del ORIGINAL["uses"]


def conclude(values=None, **changed):
  """Returns the exit code and the text for a run with mp_compat."""
  results = {"original": ORIGINAL, "mp_compat": notes(**changed), "again": notes()}
  status, lines = report.conclude(
    results, lambda run, index: (values or {}).get(run, {})
  )
  return status, "\n".join(lines)


def test_report_needs_no_tensorflow():
  program = "import sys; sys.modules['tensorflow'] = None\nimport mp_compat.tools.compare.report"
  assert testing.run_python("-c", program).returncode == 0


def test_runs_that_train_have_no_problem():
  for run, result in [
    ("original", ORIGINAL),
    ("mp_compat", notes()),
    ("again", ORIGINAL),
  ]:
    assert report.problem(run, ALL, result, ORIGINAL) is None
  assert conclude() == (
    0,
    "The program trains the same, in the steps that were compared.",
  )


@pytest.mark.parametrize(
  "changed, words",
  [
    # Nothing was applied.
    (
      dict(trained=False, applied=0, skipped=6),
      "Each of its 6 train steps was skipped, so nothing trained. No step with loss "
      "scaling was applied.",
    ),
    (
      dict(trained=False, trained_without=True, applied=0, scaled=3, skipped=3),
      "Of its 6 train steps, 3 had loss scaling, and each of these was skipped. No step "
      "with loss scaling was applied.",
    ),
    (dict(trained=False), "None of its 6 train steps was compared, or they changed no"),
    (dict(scaled=0, trained=False), "None of its 6 train steps was compared"),
    # Nothing was seen.
    (
      dict(steps=0, scaled=0, trained=False),
      "but 6 in the first run. If it went on from",
    ),
    (dict(unseen="eager"), "Eager training was seen, which is not compared."),
    (dict(unseen="thread"), "Give threads that run sessions names that do not change."),
    (
      dict(unseen="fork"),
      "Training in a forked process was seen, which is not compared.",
    ),
    (
      dict(replaced=True),
      "another one (os.exec), which is not compared. --steps 6 ends",
    ),
    (dict(replaced=True, steps=0), "Compare that one: pass what it executes to"),
    (dict(unreadable=["w"]), "No tensor of the graph reads w."),
  ],
)
def test_runs_that_show_no_training_are_problems(changed, words):
  result = notes(**changed)
  assert words in report.problem("mp_compat", ALL, result, ORIGINAL)


def test_first_run_needs_steps():
  nothing = notes(steps=0, scaled=0, trained=False)
  problem = report.problem("original", ALL, nothing, nothing)
  assert "Let the program run until it trains" in problem


def test_training_without_loss_scaling_counts_alone():
  """As in `--runs original,again`, of a program without loss scaling."""
  result = notes(scaled=0, applied=0, trained=False, trained_without=True)
  del result["uses"]
  assert report.problem("original", ("original", "again"), result, result) is None
  assert "None of its 6 train steps was one of" in report.problem(
    "mp_compat", ALL, notes(scaled=0, trained_without=True), result
  )


def test_undone_replacements_are_no_problem():
  assert report.problem("again", ALL, notes(replaced=False), ORIGINAL) is None


@pytest.mark.parametrize(
  "changed, words",
  [
    (difference(), "at step 2.\n  The reason is not known."),
    (difference(is_of_step=False), "after step 2.\n  A run that is no train step"),
    (difference(is_of_step=False, step=0), "after step 0.\n  A run that is no train"),
    (
      difference(is_of_step=False, names=[["w", "v"], ["w", None]]),
      "The runs do not have the same variables.",
    ),
  ],
)
def test_differences_are_reported(changed, words):
  result = notes(difference=changed)
  assert report.problem("mp_compat", ALL, result, ORIGINAL) is None
  status, text = conclude(difference=changed)
  assert status == 1 and "the first difference is " in text and words in text


@pytest.mark.parametrize(
  "changed, words",
  [
    (dict(difference=difference()), "at step 2, first in w. It has other randomness"),
    (
      dict(difference=difference(is_of_step=False, step=0)),
      "after step 0, first in w. A run that is no train step initializes,",
    ),
    (dict(ends=[[6, 7], [5, 6]]), "after 5 train steps, the first run after 6. If a"),
  ],
)
def test_programs_that_differ_from_themselves_show_nothing(changed, words):
  results = {"original": ORIGINAL, "mp_compat": notes(), "again": notes(**changed)}
  status, (text,) = report.conclude(results, lambda run, index: {})
  assert status == 2 and words in text


@pytest.mark.parametrize(
  "changed, status, words",
  [
    (dict(), 0, "Before it, the bits are the same; after it, nothing was compared."),
    (dict(changed=["v"]), 0, "Before it, the bits are the same"),
    # Something else explains the difference, or may do so.
    (dict(changed=["v", "w"]), 2, "but another step or run changed w since"),
    (
      dict(names=[["w/Adam"], ["w/Adam"]], changed=["w"]),
      2,
      "but another step or run changed w since",
    ),
    (
      dict(names=[["Adam/a/w/m"], ["Adam/a/w/m"]], changed=["w", "a/w"]),
      2,
      "Whether the program trains the same without loss scaling is not known.",
    ),
    (dict(names=[["w1"], ["w1"]], changed=["w"]), 0, "Before it, the bits are"),
    (
      dict(has_trained=False),
      2,
      "so no training was compared. Let the loss scale begin",
    ),
    (dict(skipped=[1, 1]), 1, "The reason is not known."),
    (dict(is_of_step=False), 1, "initializes, restores or assigns other values"),
    (dict(names=[["w"], [None]]), 1, "The runs do not have the same variables."),
  ],
)
def test_steps_that_loss_scaling_skips_explain_difference(changed, status, words):
  found = difference(**{"skipped": [1, 0], **changed})
  results = {"original": ORIGINAL, "without": notes(difference=found), "again": notes()}
  got, lines = report.conclude(results, lambda run, index: {})
  assert got == status and words in "\n".join(lines)


SCALING_ERROR = "File 'x.py'\n  tf.train.experimental.DynamicLossScale()\nTypeError"


@pytest.mark.parametrize(
  "run, result, error, words",
  [
    ("original", notes(replaced=True), "", "--steps 6 ends it after 6 train steps"),
    ("original", notes(), "", "It had run 6 train steps: --steps 6 ends it after"),
    ("original", {}, SCALING_ERROR, "run it with mp_compat alone"),
    ("original", {}, "tf.contrib.mixed_precision\nAttributeError", "with mp_compat"),
    # The program's own error.
    ("original", {}, "File 'x.py'\n  x = (\nSyntaxError: invalid syntax", ""),
    ("mp_compat", {}, SCALING_ERROR, ""),
  ],
)
def test_failures_have_hints(run, result, error, words):
  text = report.hint(run, ALL, {run: result}, error)
  assert words in text and bool(words) == bool(text)


def test_failures_after_other_starts_name_folders():
  found = difference(is_of_step=False, step=0)
  results = {"original": ORIGINAL, "mp_compat": notes(difference=found), "again": {}}
  assert "Before, after step 0: A run" in report.hint("again", ALL, results, "")


@pytest.mark.parametrize(
  "ends, words",
  [
    ([[7, 8], [6, 7]], "it ended after 6 train steps, the first run after 7."),
    ([[6, 7], [6, 9]], "values were recorded 9 times, in the first run 7."),
  ],
)
def test_another_end_is_a_difference(ends, words):
  results = {"original": ORIGINAL, "without": notes(ends=ends)}
  got, lines = report.conclude(results, lambda run, index: {})
  assert got == 1 and words in "\n".join(lines)


@pytest.mark.parametrize(
  "changed, expected",
  [
    (dict(), []),
    (dict(steps=5, records={"MainThread": 6}), [[6, 7], [5, 6]]),
    (dict(records={"MainThread": 8}), [[6, 7], [6, 8]]),
    (dict(records={"MainThread": 7, "t": 1}), [[6, 7], [6, 8]]),
    (dict(records={"MainThread": 8}, difference=difference()), []),
  ],
)
def test_ends_differ_without_another_difference(changed, expected):
  assert report.ends(notes(**changed), ORIGINAL, 100) == expected


@pytest.mark.parametrize(
  "records, expected",
  [({"MainThread": 7, "t": 1}, []), ({"MainThread": 8}, [[6, 7], [6, 8]])],
)
def test_only_main_thread_has_all_records_at_the_limit(records, expected):
  """Other threads may have come to any place when the last step ends the program."""
  assert report.ends(notes(records=records), ORIGINAL, 6) == expected


def test_ends_are_compared_with_every():
  line = report.describe("mp_compat", notes(), 4)
  assert line.endswith("3 variables after every 4 of 6 steps, and at the end")


def test_large_scales_have_documented_reason():
  names = [["loss_scale"], ["current_loss_scale"]]
  for scale, words in [
    (2.0**127, "grew above 2**126, where 1 / scale is 0"),
    (2.0**126, "The reason is not known."),
  ]:
    values = {"again": {"loss_scale": np.float64(scale)}}
    status, text = conclude(values, difference=difference(names=names))
    assert status == 1 and words in text
  values = {"again": {"loss_scale": np.float64(2.0**127), "w": np.float64(1)}}
  names = [["loss_scale", "w"], ["current_loss_scale", "w"]]
  assert "2**126" not in conclude(values, difference=difference(names=names))[1]


def test_other_processes_are_told():
  results = {"original": ORIGINAL, "mp_compat": notes(processes=True)}
  _, lines = report.conclude(results, lambda run, index: {})
  assert lines[1:] == ["The program ran other processes, which are not compared."]


def line(digests=(1,), steps=1):
  return {"steps": steps, "digests": list(digests), "skipped": 0, "changed": []}


def test_records_differ_by_values():
  variables = recording.Variables({"w": [2]}, {})
  reference = recording.Record(variables, line())
  for other, is_of_step in [
    (line(), None),
    (line(steps=0), None),
    (line(digests=[2]), True),
    (line(digests=[2], steps=0), False),
  ]:
    record = recording.Record(variables, other)
    for pair in [(reference, record), (record, reference)]:
      found = recording.difference(*pair, "3", 2, True, True)
      assert (found and found.is_of_step) is is_of_step


@pytest.mark.parametrize(
  "theirs, ours, expected",
  [
    # In other conditionals and scopes, by the order of creation.
    ("cond_1/power cond_3/power w", "power power_1 w", "1:1 2:2 3:3"),
    ("cond_1/power power", "power power_1", "1:1 2:2"),
    ("Adam/iter w", "scope/Adam/iter w", "1:1 2:2"),
    # By name, if threads create them in another order.
    ("a/w b/w", "b/w a/w", "1:2 2:1"),
    # Those that one of the graphs lacks.
    ("w v", "w more v", "1:1 2:3 -:2"),
    ("a/w w", "w", "1:- 2:1"),
    ("w", "b/w a/w w", "-:1 -:2 1:3"),
  ],
)
def test_variables_are_paired(theirs, ours, expected):
  sides = []
  for names in (theirs.split(), ours.split()):
    shapes = {name: [] for name in names}
    sides.append((names, recording.Variables(shapes, {})))
  (names, reference), (others, variables) = sides
  pairs = recording._pairs(reference, variables, True)
  found = set()
  for one, two in pairs:
    their_place = names.index(one) + 1 if one else "-"
    our_place = others.index(two) + 1 if two else "-"
    found.add("{}:{}".format(their_place, our_place))
  assert found == set(expected.split())


def test_records_are_found_in_any_order(tmp_path):
  """Threads change the order of the records of several sessions."""
  path = tmp_path / "recording"
  variables = {"shapes": {"w": [2]}, "state": {}}
  lines = [{"graph": 0, "variables": variables}]
  lines += [
    {"graph": 0, **line(), "index": index} for index in ("a.0.0", "b.0.0", "a.0.1")
  ]
  path.write_text("\n".join(json.dumps(each) for each in lines))
  reference = recording.Reference(str(path))
  for index in ("b.0.0", "a.0.0", "a.0.1"):
    assert reference.take(index).line["index"] == index
  for index, is_lacking in [("a.0.2", False), ("c.0.0", True)]:
    assert reference.take(index) is None
    assert reference.lacks_thread(index) is is_lacking
