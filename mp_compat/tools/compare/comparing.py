# SPDX-License-Identifier: Apache-2.0
"""Runs a program as it is and with this package, and says whether it trains the
same.
"""

import dataclasses
import os
import tempfile
from typing import Any, Callable, Dict, List, Sequence

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
  docs/compare.md has the options.

      keep the folders `restore`
      for run in runs:
        give the folders their contents; run the program, and record its variables
        tell whether the recording differs from that of the first run
      conclude
      if they differ, and the first run was repeated without a difference:
        repeat it ONCE_MORE, and conclude again

  `runs` are of `report.RUNS`: the others are compared with the first, which AGAIN
  repeats. Calls `tell` with each line of the report. Returns it for JSON: `status`
  (SAME, DIFFERENT or UNKNOWN), `conclusion`, `program` and `runs`.
  """
  results: Dict[str, recording.Notes] = {}
  directory = os.getcwd()
  try:
    with tempfile.TemporaryDirectory() as folder, processes.kept(restore) as copy_back:
      processes.save_standard_input(os.path.join(folder, "input"))
      program = _Program(argv, runs, steps, every, directory, folder, results, tell)
      for run in runs:
        copy_back()
        program.run(run)
      status, conclusion = report.conclude(results, program.values_of)
      if status == report.DIFFERENT and report.AGAIN in runs:
        copy_back()
        program.run(report.ONCE_MORE)
        status, conclusion = report.conclude(results, program.values_of)
  except (processes.CannotRunError, OSError) as error:
    status = report.UNKNOWN
    conclusion = ["Could not be compared: {}".format(error)]
  for line in ["", *conclusion]:
    tell(line)
  return {
    "program": list(argv),
    "status": status,
    "conclusion": conclusion,
    "runs": results,
  }


@dataclasses.dataclass
class _Program:
  """A program, and its runs.

  Attributes:
    argv: The program and its arguments.
    runs: All runs, the first one first.
    steps: The number of train steps of a run, at most.
    every: How often records are made.
    directory: The directory in which the program runs.
    folder: The folder for recordings.
    results: What is known of each run that was made.
    tell: Called with each line of the report.
  """

  argv: Sequence[str]
  runs: Sequence[str]
  steps: int
  every: int
  directory: str
  folder: str
  results: Dict[str, recording.Notes]
  tell: Callable[[str], None]

  def run(self, run: str) -> None:
    """Runs the program, and tells how its training compares with the first run's.

    Raises:
      CannotRunError: If it cannot be run or fails, or shows no training to compare;
        begins with the label of the run.
    """
    label = report.label(run, self.runs)
    try:
      result = self._make(run)
    except processes.CannotRunError as error:
      raise processes.CannotRunError("{}: {}".format(label, error)) from error
    if not self.results:
      self.tell("{} on TensorFlow {}".format(self._name(), result["tensorflow"]))
    self.results[run] = result
    result["ends"] = report.ends(result, self.results[self.runs[0]], self.steps)
    line = report.describe(run, result, self.every)
    self.tell("  {}. {:<21} {}".format(len(self.results), label, line))

  def values_of(self, run: str, index: str) -> recording.Arrays:
    """Returns the values that a run kept of a record, by the names of the variables."""
    return recording.read_values(self._recording(run), index)

  def _make(self, run: str) -> recording.Notes:
    """Runs the program; returns what is known of the run."""
    settings = self._settings(run)
    try:
      processes.run(settings._asdict(), run, self.argv, self.directory, self.folder)
    except processes.ProgramFailedError as error:
      results = {**self.results, run: recording.read_notes(settings.recording)}
      hint = report.hint(run, self.runs, results, str(error))
      raise processes.CannotRunError("{}{}".format(error, hint)) from error
    result = recording.read_notes(settings.recording)
    first = self.results.get(self.runs[0], result)
    problem = report.problem(run, self.runs, result, first)
    if problem:
      raise processes.CannotRunError(problem)
    return result

  def _settings(self, run: str) -> recording.Settings:
    """Returns what the process of a run gets."""
    first_run = self.runs[0]
    made_as = run
    if run in (report.AGAIN, report.ONCE_MORE):
      made_as = first_run
    reference = None
    if self.results:
      reference = self._recording(first_run)
    return recording.Settings(
      made_as,
      recording=self._recording(run),
      steps=self.steps,
      every=self.every,
      reference=reference,
      keep=_differing_variables(self.results),
    )

  def _recording(self, run: str) -> str:
    """Returns the name of the file for the recording of a run."""
    return os.path.join(self.folder, run)

  def _name(self) -> str:
    """Returns the program without its arguments."""
    if self.argv[0] == "-m":
      return " ".join(self.argv[:2])
    return self.argv[0]


def _differing_variables(results: Dict[str, recording.Notes]) -> Dict[str, List[str]]:
  """Returns the names of the first run's variables that another run found to differ, by
  the index of the record: the next run keeps their values.
  """
  differing = {}
  for result in results.values():
    found = recording.difference_in(result)
    if found is not None:
      names, _ = found.names
      differing[found.index] = [name for name in names if name is not None]
  return differing
