# SPDX-License-Identifier: Apache-2.0
"""What the report of `compare` says, as a function of what was recorded of each run.
Needs no TensorFlow.
"""

import re
from typing import Callable, Dict, Iterator, List, Optional, Sequence, Tuple

import numpy as np

from mp_compat.core import arguments
from mp_compat.core import naming_schemes
from mp_compat.tools.compare import recording
from mp_compat.tools.compare import training
from mp_compat.tools.compare.recording import Arrays
from mp_compat.tools.compare.recording import Difference
from mp_compat.tools.compare.recording import Notes

SAME, DIFFERENT, UNKNOWN = 0, 1, 2  # exit codes
ORIGINAL, SCALED, UNSCALED = recording.ORIGINAL, recording.SCALED, recording.UNSCALED
# Both repeat the first run; ONCE_MORE only before other runs are blamed.
AGAIN, ONCE_MORE = ("again", "once_more")
RUNS = {
  ORIGINAL: "as it is",
  SCALED: "with mp_compat",
  UNSCALED: "without loss scaling",
  AGAIN: "{}, again",  # the first run
  ONCE_MORE: "{}, once more",
}

# Returns the values that a run (its name) kept of a record (its index).
Values = Callable[[str, str], Arrays]

_UNKNOWN_REASON = "The reason is not known."
_OTHER_VALUES = (
  "A run that is no train step initializes, restores or assigns other values. If it "
  "goes on from a checkpoint of an earlier run, name its folder with --restore, or use "
  "$MP_COMPAT_RUN in the folder's name."
)
# What an error of a program says that uses loss scaling.
_LOSS_SCALING = re.compile("loss_?scal|mixed_precision", re.IGNORECASE)
_UNSEEN = {
  "eager": "Eager training was seen, which is not compared.",
  "thread": (
    "A session was run by a thread with another name than in the first run, and is not "
    "compared. Give threads that run sessions names that do not change."
  ),
  "fork": "Training in a forked process was seen, which is not compared.",
}


def label(run: str, runs: Sequence[str]) -> str:
  """Returns what the report calls a run."""
  return RUNS[run].format(RUNS[runs[0]])


def hint(run: str, runs: Sequence[str], results: Dict[str, Notes], error: str) -> str:
  """Returns what to try after a program failed.

  Args:
    run: the name of the run, of RUNS.
    runs: the names of all runs, in order.
    results: what is known of the runs that were made, and of this one, which may be
      nothing.
    error: how it failed, and what it wrote last.
  """
  if results[run].get("replaced"):
    return "\n" + _describe_replaced(results[run]["steps"])
  for earlier in results.values():
    found = recording.difference_in(earlier)
    if found and not found.is_of_step:  # It may have written another checkpoint.
      return "\nBefore, {}: {}".format(_place(found), _OTHER_VALUES)
  if results[run].get("steps"):
    return "\nIt had run {0} train steps: --steps {0} ends it after them.".format(
      results[run]["steps"]
    )
  if run == ORIGINAL and SCALED in runs and _LOSS_SCALING.search(error):
    return (
      "\nIf TensorFlow's own loss scaling is what fails, run it with mp_compat alone: "
      "python -m mp_compat run."
    )
  return ""


def problem(
  run: str, runs: Sequence[str], result: Notes, first: Notes
) -> Optional[str]:
  """Returns why a run does not show the training of the program, or not with mp_compat
  where it should be used; None if it does.

  The first of these that applies: training was not seen; nothing was trained; it was
  not the loss scaling that the run is for.

  Args:
    run: the name of the run, of RUNS.
    runs: the names of all runs, in order.
    result: what is known of the run.
    first: what is known of the first run; `result` itself for that.
  """
  return (
    _describe_unseen(result)
    or _describe_untrained(result, first)
    or _describe_unscaled(run, runs, result)
  )


def _describe_unseen(result: Notes) -> Optional[str]:
  """Returns which training was not seen, if any."""
  if "unseen" in result:
    return _UNSEEN[result["unseen"]]
  if result.get("replaced"):
    return _describe_replaced(result["steps"])
  if "unreadable" in result:
    return "No tensor of the graph reads {}.".format(", ".join(result["unreadable"]))
  return None


def _describe_replaced(steps: int) -> str:
  """Returns what to do with a program that replaced itself after some train steps."""
  text = "The program replaced itself by another one (os.exec), which is not compared."
  if steps:
    return "{0} --steps {1} ends it after {1} train steps, before that.".format(
      text, steps
    )
  return text + " Compare that one: pass what it executes to mp_compat compare."


def _describe_unscaled(run: str, runs: Sequence[str], result: Notes) -> Optional[str]:
  """Returns why a run does not show training with the loss scaling that it is for."""
  if run in (SCALED, UNSCALED) and "uses" not in result:
    return (
      "The program made no optimizer of mp_compat, so nothing would be compared: it "
      "uses none of the names for loss scaling that mp_compat.install() replaces "
      "(help(mp_compat.install) lists them). "
      "tf.keras.mixed_precision.LossScaleOptimizer is none of them."
    )
  if run in (SCALED, UNSCALED) and not result["scaled"]:
    return (
      "None of its {} train steps was one of an optimizer with loss scaling, so "
      "nothing would be compared. Let the program run until it takes such a step, with "
      "a larger --steps.".format(result["steps"])
    )
  if run == ORIGINAL and "uses" in result and SCALED in runs:
    return (
      "The program uses mp_compat as it is, so nothing would be compared. --runs "
      "original,without,again compares it with training without loss scaling."
    )
  return None


def _describe_untrained(result: Notes, first: Notes) -> Optional[str]:
  """Returns why a run shows no training, if so."""
  if not result["steps"] and first["steps"]:
    return (
      "No train step was seen, but {} in the first run. If it went on from the "
      "checkpoint of that run, which has finished, name its folder: --restore "
      "DIR.".format(first["steps"])
    )
  if not result["steps"]:
    return (
      "No train step was seen: no session of this process ran what apply_gradients() "
      "of an optimizer returned. Let the program run until it trains. Eager training, "
      "functions that eager code calls, and other processes are not compared."
    )
  has_trained = result["trained"] if result["scaled"] else result["trained_without"]
  if has_trained or result["difference"]:
    return None
  if not result["scaled"] or result["applied"]:
    return (
      "None of its {} train steps was compared, or they changed no variable.".format(
        result["steps"]
      )
    )
  until = (
    "No step with loss scaling was applied. Let the program run until its loss scale "
    "fits, with a larger --steps."
  )
  if result["scaled"] == result["steps"]:
    return "Each of its {} train steps was skipped, so nothing trained. {}".format(
      result["steps"], until
    )
  return (
    "Of its {} train steps, {} had loss scaling, and each of these was skipped. "
    "{}".format(result["steps"], result["scaled"], until)
  )


def ends(result: Notes, first: Notes, limit: int) -> List[List[int]]:
  """Returns how many steps and records the first run and another one have, if the first
  difference is that; else [].

  Of runs that `--steps` ended, after `limit` steps, only the records of the main thread
  count: other threads may have come to any place.
  """
  runs = [first, result]
  records = [run["records"] for run in runs]
  if first["steps"] == result["steps"] == limit:
    records = [{"MainThread": each.get("MainThread", 0)} for each in records]
  is_same_end = first["steps"] == result["steps"] and records[0] == records[1]
  if result["difference"] or is_same_end:
    return []
  return [[run["steps"], sum(each.values())] for run, each in zip(runs, records)]


def _first_name(found: Difference) -> str:
  """Returns the name of the first variable of a difference."""
  theirs, ours = found.names
  return next(name for name in [*ours, *theirs] if name)


def _place(found: Difference) -> str:
  """Returns where the first difference is."""
  if found.is_of_step:
    return "at step {}".format(found.step)
  return "after step {}".format(found.step)


def describe(run: str, result: Notes, every: int) -> str:
  """Returns what the report says on a run, in one line."""
  found = recording.difference_in(result)
  text = _describe_steps(run, result)
  if found:
    ours = found.names[1]
    variables = result["variables"] + ours.count(None)
    return "differs {}, in {} of {} variables; {}".format(
      _place(found), len(ours), variables, text
    )
  if not result["compared"]:
    return text
  if result["ends"]:
    return "{}; the same bits until it ended otherwise than the first run".format(text)
  if run == AGAIN:
    return "the same bits in both runs"
  if run == ONCE_MORE:
    return "the same bits in all three runs"
  text = "the same bits: {} variables after {} of {} steps"
  each = "each"
  if every > 1:
    each = "every {}".format(every)
    text += ", and at the end"
  return text.format(result["variables"], each, result["steps"])


def _describe_steps(run: str, result: Notes) -> str:
  """Returns how many steps a run took and skipped, and how its loss scales changed."""
  text = "{} train steps".format(result["steps"])
  if result["skipped"] is not None:
    text += ", {} skipped".format(result["skipped"])
  if run == UNSCALED:
    return text
  for name, scales in result["scales"].items():
    label = name
    if len(result["scales"]) == 1:
      label = "loss scale"
    text += ", {} {:g} -> {:g}".format(label, scales[0], scales[-1])
  return text


def conclude(results: Dict[str, Notes], values_of: Values) -> Tuple[int, List[str]]:
  """Returns the exit code and the sentences at the end of the report.

  The code is UNKNOWN if a repetition of the first run differs from it. It is DIFFERENT
  if another run does. If that is without loss scaling, and only the first run skipped a
  step, it is SAME or, if the skip may explain it or not, UNKNOWN.

  Args:
    results: what is known of each run, by name, the first run first.
    values_of: returns the values that a run kept of a record.
  """
  for run in (AGAIN, ONCE_MORE):
    repeated = results.get(run)
    if repeated and (repeated["difference"] or repeated["ends"]):
      found = recording.difference_in(repeated)
      return UNKNOWN, [_describe_other_self(found, repeated["ends"])]
  statuses = []
  lines: List[str] = []
  for run, result in results.items():
    status, description = _compare_with_first(run, result, values_of)
    statuses.append(status)
    lines += description
    for warning in result.get("warnings", []):
      lines.append("{}: a warning of mp_compat: {}".format(RUNS[run], warning))
  if DIFFERENT in statuses and AGAIN not in results:
    lines.append(
      "Whether the program differs from itself is not known: this needs the run "
      "{!r}.".format(AGAIN)
    )
  if any("processes" in result for result in results.values()):
    lines.append("The program ran other processes, which are not compared.")
  if DIFFERENT in statuses:
    return DIFFERENT, ["The program trains differently.", *lines]
  if UNKNOWN in statuses:
    unknown = "Whether the program trains the same without loss scaling is not known."
    return UNKNOWN, [unknown, *lines]
  return SAME, ["The program trains the same, in the steps that were compared.", *lines]


def _compare_with_first(
  run: str, result: Notes, values_of: Values
) -> Tuple[int, List[str]]:
  """Returns whether a run trains as the first one, as an exit code, and sentences on
  how they differ.
  """
  status = SAME
  lines: List[str] = []
  if result["difference"]:
    found = Difference(**result["difference"])
    status = DIFFERENT
    if _skipped_only_first(run, found):
      is_explained = found.has_trained and not _changed_too(found)
      status = SAME if is_explained else UNKNOWN
    lines = _describe_difference(run, result, values_of)
  if result["ends"]:
    status = DIFFERENT
    lines.append("{}: {}".format(RUNS[run], _describe_ends(result["ends"])))
    lines.append("  " + _UNKNOWN_REASON)
  return status, lines


def _describe_difference(run: str, result: Notes, values_of: Values) -> List[str]:
  """Returns sentences on a difference and its reason."""
  found = Difference(**result["difference"])
  theirs, ours = values_of(AGAIN, found.index), values_of(run, found.index)
  reason = _reason(run, result, theirs)
  first = "{}: the first difference is {}.".format(RUNS[run], _place(found))
  return [first, "  " + reason, *_amounts(found, theirs, ours)]


def _skipped_only_first(run: str, found: Difference) -> bool:
  """Returns whether a run without loss scaling applied a step that the first run
  skipped, in the record that differs.
  """
  if not found.is_of_step or None in found.names[0] + found.names[1]:
    return False
  theirs, ours = found.skipped
  return run == UNSCALED and ours < theirs


def _changed_too(found: Difference) -> List[str]:
  """Returns the variables that differ, or whose slots do, and that something else than
  the skipped step changed in the first run, which may explain the difference.
  """
  theirs = [name for name in found.names[0] if name]
  return [name for name in found.changed if training.has_state_in(name, theirs)]


def _describe_ends(ends: List[List[int]]) -> str:
  """Returns what the report says if two runs do not end in the same way."""
  (their_steps, their_records), (our_steps, our_records) = ends
  text = (
    "the bits are the same, but it ended after {} train steps, the first run after {}."
  )
  if their_steps == our_steps:
    text = (
      "the bits are the same, but runs that are no train steps changed variables more "
      "or less often: values were recorded {} times, in the first run {}."
    )
    return text.format(our_records, their_records)
  text += " If a time limit ends the program, pass --steps {}."
  return text.format(our_steps, their_steps, min(our_steps, their_steps))


def _describe_other_self(found: Optional[Difference], ends: List[List[int]]) -> str:
  """Returns what the report says if two runs of the program as it is differ."""
  if found is None:
    return "The program differs from itself: {}".format(_describe_ends(ends))
  place = "{}, first in {}".format(_place(found), _first_name(found))
  if not found.is_of_step:
    return (
      "The program differs from itself: {}. {} Otherwise these values are random in a "
      "way that cannot be repeated.".format(place, _OTHER_VALUES)
    )
  return (
    "The program differs from itself: {}. It has other randomness than that of Python, "
    "NumPy and TensorFlow's ops, or threads that compete. Other differences may be due "
    "to that. Try it with one thread: TF_NUM_INTRAOP_THREADS=1 "
    "TF_NUM_INTEROP_THREADS=1 in the environment if its ConfigProto sets no numbers, "
    "and one thread for its input. --runs original,again shows whether that is enough."
  ).format(place)


def _reason(run: str, result: Notes, theirs: Arrays) -> str:
  """Returns what the report says on the reason of a difference.

      only loss scales differ, and it is known why     that reason
      a variable is missing in one of the runs         the variables are not the same
      a run that is no step sets other values          perhaps it restores a checkpoint
      a run without loss scaling skips fewer steps     why the first run skips them
      this run skips more steps than the first         why the first run applied it
      otherwise                                        _UNKNOWN_REASON

  Args:
    run: the name of the run.
    result: what is known of it, with a difference.
    theirs: the values of the first run that its repetition kept; {} if there are none.
  """
  found = Difference(**result["difference"])
  they_skipped, we_skipped = found.skipped
  of_state = _reason_of_state(result, theirs)
  if of_state:
    return of_state
  if None in found.names[0] + found.names[1]:
    return "The runs do not have the same variables."
  if not found.is_of_step:
    return _OTHER_VALUES
  if _skipped_only_first(run, found):
    return _reason_of_skip(found)
  if we_skipped <= they_skipped:
    return _UNKNOWN_REASON
  if "finite" not in theirs:
    return (
      "mp_compat skipped it. Why the first run applied it is not known: this needs the "
      "run 'again'."
    )
  if np.all(theirs["finite"]):
    return (
      "mp_compat skipped it: clipping or masking hid its overflow, or update() of the "
      "program's LossScale returned False."
    )
  return (
    "mp_compat skipped it: its gradients overflowed, and a fixed loss scale of "
    "TensorFlow's class applies them."
  )


def _reason_of_skip(found: Difference) -> str:
  """Returns what the report says if only the first run, which scales the loss, skipped
  a step.
  """
  changed = _changed_too(found)
  if changed:
    return (
      "The first run skipped a step, but another step or run changed {} since the "
      "values were compared last. Which of them explains the difference is not known: "
      "a run of a session is compared as a whole, with --every several of them.".format(
        changed[0]
      )
    )
  reason = (
    "The first run skipped it: its gradients overflowed, or update() of the program's "
    "LossScale returned False."
  )
  if not found.has_trained:
    return reason + (
      " Before it, no applied step changed a variable, so no training was compared. "
      "Let the loss scale begin lower."
    )
  return reason + " Before it, the bits are the same; after it, nothing was compared."


def _reason_of_state(result: Notes, theirs: Arrays) -> Optional[str]:
  """Returns the reason of a difference in variables of loss scales only, if known."""
  found = Difference(**result["difference"])
  if not all(name and naming_schemes.is_state_name(name) for name in found.names[1]):
    return None
  warnings = result.get("warnings", [])
  if any("already scales the loss" in warning for warning in warnings):
    return (
      "Only the state of loss scales differs: the first run scales the loss twice, "
      "mp_compat uses one scale."
    )
  large = [theirs[name] for name in found.names[0] if name in theirs]
  if large and max(map(np.max, large)) > arguments.LARGEST_SCALE:
    return (
      "Only the loss scale differs: that of TensorFlow's class grew above 2**126, "
      "where 1 / scale is 0 and the weights no longer change. mp_compat's stops there."
    )
  return None


def _amounts(found: Difference, theirs: Arrays, ours: Arrays) -> Iterator[str]:
  """Yields lines on the first variables that differ, and by how much, for those whose
  values were kept.
  """
  pairs = list(zip(*found.names))
  for one, two in pairs[: recording.SHOWN]:
    if not one or not two:
      yield "  {}: is missing in one of the runs".format(two or one)
    elif one not in theirs or two not in ours or theirs[one].shape != ours[two].shape:
      yield "  {}: differs".format(two)
    else:
      yield "  {}: {}".format(two, _amount(theirs[one], ours[two]))


def _amount(theirs: np.ndarray, ours: np.ndarray) -> str:
  """Returns how many values of two arrays of the same shape differ, and how much.

  For example "2 of 10 values differ, by up to 0.25". A NaN equals a NaN. The largest
  distance is that of the values that are finite in both runs.
  """
  is_same = (theirs == ours) | (np.isnan(theirs) & np.isnan(ours))
  with np.errstate(all="ignore"):
    apart = np.abs(theirs - ours)[~is_same]
  if not apart.size:
    # The bits of 0 and -0, of large integers and of strings differ although these
    # numbers are the same.
    return "differs"
  most = "not finite in one of the runs"
  finite = apart[np.isfinite(apart)]
  if finite.size:
    most = "by up to {:.3g}".format(finite.max())
  return "{} of {} values differ, {}".format(apart.size, is_same.size, most)
