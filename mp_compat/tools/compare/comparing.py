# SPDX-License-Identifier: Apache-2.0
"""Runs a program as it is and with this package, and says whether it trains the
same.
"""

import os
import tempfile
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Tuple

import numpy as np

from mp_compat.core import naming_schemes
from mp_compat.tools.compare import processes
from mp_compat.tools.compare import recorder

SAME, DIFFERENT, UNKNOWN = 0, 1, 2  # exit codes
ORIGINAL, SCALED, UNSCALED = recorder.ORIGINAL, recorder.SCALED, recorder.UNSCALED
# Both repeat the first run; ONCE_MORE only before other runs are blamed.
AGAIN, ONCE_MORE = ("again", "once_more")
RUNS = {
  ORIGINAL: "as it is",
  SCALED: "with mp_compat",
  UNSCALED: "without loss scaling",
  AGAIN: "{}, again",  # the first run
  ONCE_MORE: "{}, once more",
}

Report = Dict[str, Any]  # a JSON object
_Arrays = Dict[str, np.ndarray]  # by the names of variables

_UNKNOWN_REASON = "The reason is not known."
_OVERFLOW = "The first run skipped it: its gradients overflowed. Before it, the bits are the same."


def compare(
  argv: Sequence[str],
  runs: Sequence[str],
  steps: int,
  every: int,
  restore: Sequence[str],
  tell: Callable[[str], None],
) -> Report:
  """Runs a program several times and compares all variables after its train steps;
  docs/migration.md has the options.

  `runs` are of RUNS: the others are compared with the first, which AGAIN repeats. Calls
  `tell` with each line of the report. Returns it for JSON: `status` (SAME, DIFFERENT or
  UNKNOWN), `conclusion`, `program` and `runs`.
  """
  results: Dict[str, recorder.Notes] = {}
  directory = os.getcwd()

  def make(run: str) -> None:
    copy_back()
    differences = filter(None, map(recorder.difference_in, results.values()))
    settings = recorder.Settings(
      run=runs[0] if run in (AGAIN, ONCE_MORE) else run,
      recording=os.path.join(folder, run),
      steps=steps,
      every=every,
      reference=os.path.join(folder, runs[0]) if results else None,
      keep={
        str(found.index): list(filter(None, found.names[0])) for found in differences
      },
    )
    label = RUNS[run].format(RUNS[runs[0]])
    try:
      processes.run(settings._asdict(), run, argv, directory, folder)
      result = recorder.read_notes(settings.recording)
      problem = _problem(run, runs, result)
      if problem:
        raise processes.CannotRunError(problem)
    except processes.CannotRunError as error:
      hint = (
        _hint(run, runs, settings.recording)
        if isinstance(error, processes.ProgramFailedError)
        else ""
      )
      raise processes.CannotRunError("{}: {}{}".format(label, error, hint)) from error
    if not results:
      tell(
        "{} on TensorFlow {}".format(
          " ".join(argv[: 1 + (argv[0] == "-m")]), result["tensorflow"]
        )
      )
    results[run] = result
    first = results[runs[0]]["steps"]
    result["ends"] = (
      []
      if result["difference"] or result["steps"] == first
      else [first, result["steps"]]
    )
    tell("  {}. {:<21} {}".format(len(results), label, _describe(run, result, every)))

  try:
    with tempfile.TemporaryDirectory() as folder, processes.kept(restore) as copy_back:
      processes.read_standard_input(os.path.join(folder, "input"))
      for run in runs:
        make(run)
      status, conclusion = _conclude(results, folder)
      if status == DIFFERENT and AGAIN in runs:
        make(ONCE_MORE)
        status, conclusion = _conclude(results, folder)
  except (processes.CannotRunError, OSError) as error:
    status, conclusion = UNKNOWN, ["Could not be compared: {}".format(error)]
  for line in ["", *conclusion]:
    tell(line)
  return {
    "program": list(argv),
    "status": status,
    "conclusion": conclusion,
    "runs": results,
  }


def _hint(run: str, runs: Sequence[str], recording: str) -> str:
  """Returns what to try after a program failed."""
  steps = (
    recorder.read_notes(recording).get("steps") if os.path.exists(recording) else 0
  )
  if steps:
    return "\nIt had run {0} train steps: --steps {0} ends it after them.".format(steps)
  if run == ORIGINAL and SCALED in runs:
    return "\nIf TensorFlow's own loss scaling is what fails, run it with mp_compat alone: python -m mp_compat run."
  return ""


def _problem(run: str, runs: Sequence[str], result: recorder.Notes) -> Optional[str]:
  """Returns why a run does not show the training of the program, or not with mp_compat
  where it should be used.
  """
  found = recorder.difference_in(result)
  if found and found.is_of_initial_values:
    return _describe_other_start(found)
  if "unseen" in result:
    return "{} was seen, which is not compared.".format(result["unseen"])
  if "unreadable" in result:
    return "No tensor of the graph reads {}.".format(", ".join(result["unreadable"]))
  if not result["steps"] or (not result["trained"] and not found):
    return _describe_untrained(result)
  if run in (SCALED, UNSCALED) and "uses" not in result:
    return (
      "The program made no optimizer of mp_compat, so nothing would be compared: it "
      "uses none of TensorFlow's public names for loss scaling."
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


def _describe_untrained(result: recorder.Notes) -> str:
  if not result["steps"]:
    return (
      "No train step was seen: no session of this process ran what apply_gradients() "
      "of an optimizer returned. Let the program run until it trains. Eager training, "
      "functions that eager code calls, and other processes are not compared."
    )
  if result["skipped"] == result["steps"]:
    return (
      "Each of its {} train steps was skipped, so nothing trained. Let the program run "
      "until its loss scale fits, with a larger --steps.".format(result["steps"])
    )
  return "None of its {} train steps was compared, or they changed no variable.".format(
    result["steps"]
  )


def _first_name(found: recorder.Difference) -> str:
  """Returns the name of the first variable of a difference."""
  return next(filter(None, found.names[1] + found.names[0]))


def _describe_other_start(found: recorder.Difference) -> str:
  theirs, ours = found.global_step
  steps = "" if theirs == ours else "; global_step {}, not {}".format(ours, theirs)
  return (
    "It starts from other values than the first run: first {}{}. If it goes on from a "
    "checkpoint of an earlier run, name its folder with --restore, or use "
    "$MP_COMPAT_RUN in the folder's name. Otherwise its initial values are random in a "
    "way that cannot be repeated."
  ).format(_first_name(found), steps)


def _describe(run: str, result: recorder.Notes, every: int) -> str:
  """Returns what the report says on a run, in one line."""
  found, text = recorder.difference_in(result), "{} train steps".format(result["steps"])
  if result["skipped"] is not None:
    text += ", {} skipped".format(result["skipped"])
  for name, scales in result["scales"].items() if run != UNSCALED else []:
    label = "loss scale" if len(result["scales"]) == 1 else name
    text += ", {} {:g} -> {:g}".format(label, scales[0], scales[-1])
  if found:
    ours = found.names[1]
    variables = result["variables"] + ours.count(None)
    return "differs at step {}, in {} of {} variables; {}".format(
      found.step, len(ours), variables, text
    )
  if not result["compared"]:
    return text
  if result["ends"]:
    return "{}; the first run: {}. Until then the same bits".format(
      text, result["ends"][0]
    )
  if run == AGAIN:
    return "the same bits in both runs"
  if run == ONCE_MORE:
    return "the same bits in all three runs"
  each = "each" if every == 1 else "every {}".format(every)
  return "the same bits: {} variables after {} of {} steps".format(
    result["variables"], each, result["steps"]
  )


def _conclude(results: Dict[str, recorder.Notes], folder: str) -> Tuple[int, List[str]]:
  """Returns the exit code and the sentences at the end of the report."""
  status = SAME
  lines: List[str] = []
  for run, result in results.items():
    found, ends = recorder.difference_in(result), result["ends"]
    if (found or ends) and run in (AGAIN, ONCE_MORE):
      return UNKNOWN, [_describe_other_self(found, ends)]
    if found:
      is_scaled_twice = any(
        "already scales the loss" in warning for warning in result.get("warnings", [])
      )
      is_explained, description = _describe_difference(
        run, found, is_scaled_twice, folder
      )
      status, lines = status if is_explained else DIFFERENT, lines + description
    if ends:
      status = DIFFERENT
      lines.append(
        "{}: it ended after {} train steps, the first run after {}.".format(
          RUNS[run], *ends[::-1]
        )
      )
      lines.append("  {} {}".format(_UNKNOWN_REASON, _describe_ends(ends)))
    lines += [
      "{}: a warning of mp_compat: {}".format(RUNS[run], warning)
      for warning in result.get("warnings", [])
    ]
  if status == DIFFERENT and AGAIN not in results:
    lines.append(
      "Whether the program differs from itself is not known: this needs the run "
      "{!r}.".format(AGAIN)
    )
  if any("processes" in result for result in results.values()):
    lines.append("The program ran other processes, which are not compared.")
  verdict = (
    "The program trains differently."
    if status
    else "The program trains the same, in the steps that were compared."
  )
  return status, [verdict, *lines]


def _describe_difference(
  run: str, found: recorder.Difference, is_scaled_twice: bool, folder: str
) -> Tuple[bool, List[str]]:
  """Returns whether a difference is what mp_compat does otherwise after an overflow,
  and sentences about it.
  """
  theirs, ours = [
    _values(os.path.join(folder, name), found.index) for name in (AGAIN, run)
  ]
  reason = _reason(run, found, is_scaled_twice, theirs)
  first = "{}: step {} is the first that differs.".format(RUNS[run], found.step)
  return reason == _OVERFLOW and found.step > 1, [
    first,
    "  " + reason,
    *_amounts(found, theirs, ours),
  ]


def _describe_ends(ends: List[int]) -> str:
  return "Until then the bits are the same. If a time limit ends the program, pass --steps {}.".format(
    min(ends)
  )


def _describe_other_self(found: Optional[recorder.Difference], ends: List[int]) -> str:
  """Returns what the report says if two runs of the program as it is differ."""
  if found is None:
    return "The program differs from itself: it ended after {} train steps, then after {}. {}".format(
      *ends, _describe_ends(ends)
    )
  if found.starts:
    return _describe_other_start(found)
  return (
    "The program differs from itself: at step {}, first in {}. It has other randomness "
    "than that of Python, NumPy and TensorFlow's ops, or threads that compete. Other "
    "differences may be due to that. Try it with one thread: TF_NUM_INTRAOP_THREADS=1 "
    "TF_NUM_INTEROP_THREADS=1 in the environment if its ConfigProto sets no numbers, "
    "and one thread for its input. --runs original,again shows whether that is enough."
  ).format(found.step, _first_name(found))


def _reason(
  run: str, found: recorder.Difference, is_scaled_twice: bool, theirs: _Arrays
) -> str:
  """Returns what the report says on the reason of a difference; `theirs` are values of
  the reference.
  """
  they_skipped, we_skipped = found.skipped
  if is_scaled_twice and all(
    name and naming_schemes.is_state_name(name) for name in found.names[1]
  ):
    return "Only the state of loss scales differs: the first run scales the loss twice, mp_compat uses one scale."
  if None in found.names[0] + found.names[1]:
    return "The runs do not have the same variables."
  if found.starts:
    return "A session starts from other values. If it restores a checkpoint, name its folder with --restore."
  if run == UNSCALED and we_skipped < they_skipped:
    return _OVERFLOW
  if we_skipped <= they_skipped:
    return _UNKNOWN_REASON
  if "finite" not in theirs:
    return "mp_compat skipped it. Why the first run applied it is not known: this needs the run 'again'."
  if np.all(theirs["finite"]):
    return (
      "mp_compat skipped it: clipping or masking hid its overflow, or update() of the "
      "program's LossScale returned False."
    )
  return "mp_compat skipped it: its gradients overflowed, and a fixed loss scale of TensorFlow's class applies them."


def _amounts(
  found: recorder.Difference, theirs: _Arrays, ours: _Arrays
) -> Iterator[str]:
  """Yields lines on the first variables that differ, and by how much, for those whose
  values were kept.
  """
  for one, two in list(zip(*found.names))[: recorder.SHOWN]:
    if one in theirs and two in ours and theirs[one].shape == ours[two].shape:
      same = (theirs[one] == ours[two]) | (np.isnan(theirs[one]) & np.isnan(ours[two]))
      with np.errstate(all="ignore"):
        apart = np.abs(theirs[one] - ours[two])[~same]
      finite = apart[np.isfinite(apart)]
      most = (
        "by up to {:.3g}".format(finite.max())
        if finite.size
        else "not finite in one of the runs"
      )
      # The bits of 0 and -0, of large integers and of strings differ although these
      # numbers are the same.
      yield "  {}: {}".format(
        two,
        "{} of {} values differ, {}".format(apart.size, same.size, most)
        if apart.size
        else "differs",
      )
    else:
      yield "  {}: {}".format(
        two or one, "differs" if one and two else "is missing in one of the runs"
      )


def _values(path: str, index: int) -> _Arrays:
  """Returns the values that a run kept of a record, by the names of the variables."""
  path = "{}.{}.npz".format(path, index)
  if not os.path.exists(path):
    return {}
  with np.load(path) as arrays:
    return {name.partition(":")[0]: arrays[name] for name in arrays}
