# SPDX-License-Identifier: Apache-2.0
"""Runs a program as it is and with this package, and says whether it trains the
same.
"""

import os
import tempfile
from typing import Any, Callable, Dict, Sequence

from mp_compat.tools.compare import processes
from mp_compat.tools.compare import recording
from mp_compat.tools.compare import report

Report = Dict[str, Any]  # a JSON object


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

  `runs` are of `report.RUNS`: the others are compared with the first, which AGAIN
  repeats. Calls `tell` with each line of the report. Returns it for JSON: `status`
  (SAME, DIFFERENT or UNKNOWN), `conclusion`, `program` and `runs`.
  """
  results: Dict[str, recording.Notes] = {}
  directory = os.getcwd()

  def path_of(run: str) -> str:
    return os.path.join(folder, run)

  def values_of(run: str, index: int) -> recording.Arrays:
    return recording.read_values(path_of(run), index)

  def make(run: str) -> None:
    copy_back()
    keep = {}
    for found in filter(None, map(recording.difference_in, results.values())):
      keep[str(found.index)] = list(filter(None, found.names[0]))
    settings = recording.Settings(
      run=runs[0] if run in (report.AGAIN, report.ONCE_MORE) else run,
      recording=path_of(run),
      steps=steps,
      every=every,
      reference=path_of(runs[0]) if results else None,
      keep=keep,
    )
    label = report.label(run, runs)
    try:
      processes.run(settings._asdict(), run, argv, directory, folder)
      result = recording.read_notes(settings.recording)
      first = results[runs[0]] if results else result
      problem = report.problem(run, runs, result, first)
      if problem:
        raise processes.CannotRunError(problem)
    except processes.ProgramFailedError as error:
      hint = report.hint(run, runs, recording.read_notes(settings.recording))
      message = "{}: {}{}".format(label, error, hint)
      raise processes.CannotRunError(message) from error
    except processes.CannotRunError as error:
      raise processes.CannotRunError("{}: {}".format(label, error)) from error
    if not results:
      program = " ".join(argv[: 1 + (argv[0] == "-m")])
      tell("{} on TensorFlow {}".format(program, result["tensorflow"]))
    results[run] = result
    result["ends"] = report.ends(result, first)
    line = report.describe(run, result, every)
    tell("  {}. {:<21} {}".format(len(results), label, line))

  try:
    with tempfile.TemporaryDirectory() as folder, processes.kept(restore) as copy_back:
      processes.read_standard_input(os.path.join(folder, "input"))
      for run in runs:
        make(run)
      status, conclusion = report.conclude(results, values_of)
      if status == report.DIFFERENT and report.AGAIN in runs:
        make(report.ONCE_MORE)
        status, conclusion = report.conclude(results, values_of)
  except (processes.CannotRunError, OSError) as error:
    status, conclusion = report.UNKNOWN, ["Could not be compared: {}".format(error)]
  for line in ["", *conclusion]:
    tell(line)
  return {
    "program": list(argv),
    "status": status,
    "conclusion": conclusion,
    "runs": results,
  }
