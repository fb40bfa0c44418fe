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
    assignments=0,
    records=7,
    assigned=[],
    read=6,
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
    kinds=["step", "step"],
    names=[[theirs], [ours]],
    assigned=[],
    skipped=[0, 0],
    applied=[],
    has_trained=True,
    global_step=[None, None],
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
    (
      dict(unseen="fork"),
      "Training in a forked process was seen, which is not compared.",
    ),
    (
      dict(unseen="training", unseen_names=["a", "b"]),
      "applies gradients to a, b, but",
    ),
    (
      dict(replaced=True),
      "another one (os.exec), which is not compared. --steps 6 ends",
    ),
    (dict(replaced=True, steps=0), "Compare that one: pass what it executes to"),
    (dict(unreadable=["w"]), "No tensor of the graph reads w."),
    (
      dict(difference=difference(kinds=["assignment"] * 2, assigned=["w"])),
      "Training that was not seen: after 2 train steps, a run that is no train step "
      "changes w, otherwise than in the first run.",
    ),
    (
      dict(
        difference=difference(
          kinds=["step", "assignment"], names=[[], []], assigned=["w"]
        )
      ),
      "a run that is no train step changes w, otherwise than in the first run.",
    ),
    (
      dict(records=9),
      "changed variables (compared after such runs: 3 times; in the first run: 1)",
    ),
    # It starts from other values.
    (
      dict(
        difference=difference(step=0, kinds=["start"] * 2, global_step=[0, 6]), steps=0
      ),
      "It starts from other values than the first run: first w; global_step 6, not 0.",
    ),
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
  "changed",
  [
    difference(kinds=["assignment"] * 2, theirs="rate", ours="rate", assigned=["w"]),
    difference(kinds=["start"] * 2),  # of a later session
    difference(kinds=["start"] * 2, step=0, names=[["w", "v"], ["w", None]]),
    difference(step=0),
  ],
)
def test_other_differences_are_reported(changed):
  result = notes(difference=changed)
  assert report.problem("mp_compat", ALL, result, ORIGINAL) is None
  status, text = conclude(difference=changed)
  assert status == 1 and "is the first that differs" in text


@pytest.mark.parametrize(
  "changed, status, words",
  [
    (dict(), 0, "Before it, the bits are the same; after it, nothing was compared."),
    (dict(applied=["v"]), 0, "Before it, the bits are the same"),
    # Something else explains the difference, or may do so.
    (dict(applied=["v", "w"]), 2, "but applied another one that trains w, since"),
    (
      dict(names=[["w/Adam"], ["w/Adam"]], applied=["w"]),
      2,
      "but applied another one that trains w, since",
    ),
    (
      dict(names=[["Adam/a/w/m"], ["Adam/a/w/m"]], applied=["w", "a/w"]),
      2,
      "Whether the program trains the same without loss scaling is not known.",
    ),
    (dict(names=[["w1"], ["w1"]], applied=["w"]), 0, "Before it, the bits are"),
    (
      dict(has_trained=False),
      2,
      "so no training was compared. Let the loss scale begin",
    ),
    (dict(skipped=[1, 1]), 1, "The reason is not known."),
    (dict(kinds=["start", "start"]), 1, "restores or loads other values"),
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
  text = report.hint(run, ALL, result, error)
  assert words in text and bool(words) == bool(text)


def test_another_end_is_a_difference():
  results = {
    "original": notes(compared=False, steps=7),
    "without": notes(ends=[7, 6]),
  }
  got, lines = report.conclude(results, lambda run, index: {})
  assert got == 1 and "The reason is not known" in "\n".join(lines)


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


def test_other_changes_of_variables_are_told():
  results = {
    "original": notes(assignments=5, assigned=["w"]),
    "mp_compat": notes(assignments=5, processes=True),
  }
  _, lines = report.conclude(results, lambda run, index: {})
  assert lines[1:] == [
    "Runs that are no train steps changed w, too: compared after 5 of them.",
    "The program ran other processes, which are not compared.",
  ]


def line(kind="step", digests=(1,), assigned=()):
  return {
    "kind": kind,
    "digests": list(digests),
    "assigned": list(assigned),
    "skipped": 0,
    "applied": [],
    "global_step": None,
  }


def test_records_differ_by_kind_and_values():
  variables = recording.Variables({"w": [2]}, {})
  reference = recording.Record(variables, line())
  for other, is_unseen in [
    (line(), None),
    (line("start"), None),  # A session begins elsewhere, with the same values.
    (line(digests=[2]), False),
    (line("assignment", assigned=["w"]), True),
    (line("assignment"), None),  # to other variables
    (line("assignment", digests=[2]), False),
  ]:
    record = recording.Record(variables, other)
    found = recording.difference(reference, record, "3", 2, True, True)
    assert (found and found.is_unseen_training) is is_unseen


def test_records_are_found_in_any_order(tmp_path):
  """Threads change the order of the records of several sessions."""
  path = tmp_path / "recording"
  variables = {"shapes": {"w": [2]}, "state": {}}
  lines = [{"graph": 0, "variables": variables}]
  lines += [{"graph": 0, **line(), "index": index} for index in ("a.0", "b.0", "a.1")]
  path.write_text("\n".join(json.dumps(each) for each in lines))
  reference = recording.Reference(str(path))
  for index in ("b.0", "a.0", "a.1"):
    assert reference.take(index).line["index"] == index
  assert reference.take("a.2") is None
