# SPDX-License-Identifier: Apache-2.0
"""Reads recordings of runs and compares them.

A recording has one JSON object in a line: the variables of a graph, a record of their values, or a note on the run.
"""

import functools
import json
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Tuple

from mp_compat.core import dialects


class Variables:
  """The variables of a graph.

  Attributes:
    shapes: their shapes by name, in the order in which they were created.
    tensorflow_names: the names that TensorFlow's class gives to some of them, by name.
    state: the names of loss scales' variables, with their roles.
  """

  def __init__(self, shapes: Dict[str, List[int]], tensorflow_names: Dict[str, str]) -> None:
    self.shapes = shapes
    self.tensorflow_names = tensorflow_names
    self.state = dialects.state(shapes)


class Record(NamedTuple):
  """The values of all variables before the first train step of a session, or after a train step."""

  variables: Variables
  digests: Dict[str, Optional[str]]  # by name; None for a variable that is not initialized
  starts: bool  # whether this is before the first train step of a session
  step: int  # the number of train steps so far, in all sessions
  applied: bool  # whether the step changed more than the state of loss scales and global_step
  may_skip: bool  # whether the optimizer is in a conditional of loss scaling
  written: str  # a digest of the names of the variables that the step may change
  scales: Dict[str, float]  # the loss scales
  global_step: Any


def notes(path: str) -> Dict[str, Any]:
  """Returns the notes in a recording by kind, the last of each."""
  return {line["note"]: line["value"] for line in _lines(path) if "note" in line}


def records(path: str) -> Iterator[Record]:
  """Yields the records of a recording."""
  graphs: Dict[int, Variables] = {}
  for line in _lines(path):
    if "shapes" in line:
      graphs[line["graph"]] = Variables(line["shapes"], line["tensorflow_names"])
    elif "digests" in line:
      variables = graphs[line["variables"]]
      yield Record(**dict(line, variables=variables, digests=dict(zip(variables.shapes, line["digests"]))))


def differences(reference: Record, record: Record, state: bool = True) -> List[Tuple[Optional[str], Optional[str]]]:
  """Returns the variables that differ, as pairs of their names; None in a record that lacks the variable.

  Args:
    reference: a record.
    record: another one, at the same place of its recording.
    state: whether the variables of loss scales count.
  """
  pairs = _pairs(reference.variables, record.variables, state)
  return [(one, two) for one, two in pairs if not one or not two or reference.digests[one] != record.digests[two]]


@functools.lru_cache(maxsize=16)
def _pairs(reference: Variables, variables: Variables, state: bool) -> List[Tuple[Optional[str], Optional[str]]]:
  known = {name: theirs for name, theirs in variables.tensorflow_names.items() if theirs in reference.shapes}
  matched = dialects.match(variables.shapes, reference.shapes, known)
  missing = set(reference.shapes) - set(matched.values())
  pairs = [(matched.get(name), name) for name in variables.shapes] + [(name, None) for name in sorted(missing)]
  return [(one, two) for one, two in pairs if state or one not in reference.state and two not in variables.state]


def _lines(path: str) -> Iterator[Dict[str, Any]]:
  with open(path, encoding="utf-8") as file:
    yield from map(json.loads, file)
