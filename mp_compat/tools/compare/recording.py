# SPDX-License-Identifier: Apache-2.0
"""What `compare` records of a run of the program: its file, and the first difference
between two of them. Needs no TensorFlow.

A recording has one JSON object in a line: the variables of a graph, a step that was
built, a record of values, or notes on the run.
"""

import dataclasses
import functools
import json
import os
import re
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Set, Tuple

import numpy as np

ORIGINAL, SCALED, UNSCALED = "original", "mp_compat", "without"
SHOWN = 3  # variables whose values are kept where they differ

# What is known of a run, by kind:
#   steps, scaled, applied, skipped
#                    as in `training.Totals`
#   records          the numbers of records by the names of threads; see `Record`
#   trained          whether applied steps with loss scaling changed a variable
#   trained_without  whether steps without loss scaling did
#   variables        the largest number of variables in a record
#   scales           the first and the last value of each loss scale, by its name
#   difference       the fields of a `Difference`; None if none was found
#   compared         whether there was a reference; `tensorflow`: the version
#   uses, warnings   whether this package was used, and what it warned of
#   unseen, replaced, unreadable, processes
#                    are there if the recording is not complete
Notes = Dict[str, Any]
Arrays = Dict[str, np.ndarray]  # by the names of variables


class Settings(NamedTuple):
  """What the parent passes, as JSON.

  Attributes:
    run: ORIGINAL, SCALED or UNSCALED.
    recording: The file to write; values of variables go to files beside it.
    steps: The number of train steps after which the program ends.
    every: After how many train steps of a session records are made.
    reference: The recording to compare with; None for the first run.
    keep: The variables whose values are kept, by the index of the record.
  """

  run: str
  recording: str
  steps: int
  every: int
  reference: Optional[str]
  keep: Dict[str, List[str]]


@dataclasses.dataclass(frozen=True)
class Difference:
  """The first record that differs from that of the reference. Pairs have the
  reference's value first.

  Attributes:
    index: The index of the record; see `Record`.
    step: The number of steps before it.
    is_of_step: Whether both runs have a train step since the record before.
    names: The variables that differ, side by side; None for one that a run lacks.
    skipped: How many decisions were to skip a step, since the record before.
    changed: The variables of the reference that something else than these may have
      changed, since the record before; see `Record`.
    has_trained: Whether an earlier record, which is the same, is of training with loss
      scaling.
  """

  index: str
  step: int
  is_of_step: bool
  names: Tuple[List[Optional[str]], List[Optional[str]]]
  skipped: Tuple[int, int]
  changed: List[str]
  has_trained: bool


@dataclasses.dataclass(eq=False)
class Variables:
  """The variables of a graph.

  Attributes:
    shapes: Their shapes by name, in the order in which they were created; -1 for an
      unknown dimension or shape.
    state: The variables of loss scales, and their roles.
  """

  shapes: Dict[str, List[int]]
  state: Dict[str, str]


Line = Dict[str, Any]  # of a recording


class Record(NamedTuple):
  """The values of a graph's variables in a session.

  Attributes:
    variables: The variables of the graph.
    line: The line of the recording, with `index`: the thread that ran the session
      first, the number of the session there, and that of the record; and `digests`,
      checksums in the order of the variables, None for one that is not initialized.
      Of the time since the record before, it has the number of train `steps`, how many
      decisions `skipped` one, and the variables `changed` by applied steps with loss
      scaling, or by runs that are no steps, or perhaps.
  """

  variables: Variables
  line: Line


# Names of the same variable in two graphs, the reference's first; None where it lacks.
_Pairs = List[Tuple[Optional[str], Optional[str]]]
# What variables have in common that an optimizer creates in either run: the last part
# of their names, without a number, and the shape.
_Kind = Tuple[str, Tuple[int, ...]]


def read_notes(path: str) -> Notes:
  """Returns the last note of each kind in a recording; {} if there is no recording."""
  notes: Notes = {}
  if os.path.exists(path):
    for line in read_lines(path):
      notes.update(line.get("notes", {}))
  return notes


def difference_in(notes: Notes) -> Optional[Difference]:
  """Returns the first difference that a run noted; None if it found none."""
  if not notes.get("difference"):
    return None
  return Difference(**notes["difference"])


def read_records(path: str) -> Iterator[Record]:
  """Yields the records in a recording, each with the variables of its graph."""
  variables: Dict[int, Variables] = {}
  for line in read_lines(path):
    if "variables" in line:
      variables[line["graph"]] = Variables(**line["variables"])
    elif "digests" in line:
      yield Record(variables[line["graph"]], line)


class Reference:
  """Finds the records of a recording, in whatever order its threads made them."""

  def __init__(self, path: str) -> None:
    """Begins to read a recording."""
    self._records = read_records(path)
    self._passed: Dict[str, Record] = {}
    self._threads: Set[str] = set()  # of which records were read

  def take(self, index: str) -> Optional[Record]:
    """Returns the record with an index, once; None if there is none."""
    while index not in self._passed:
      record = next(self._records, None)
      if record is None:
        return None
      self._passed[record.line["index"]] = record
      self._threads.add(_thread(record.line["index"]))
    return self._passed.pop(index)

  def lacks_thread(self, index: str) -> bool:
    """Returns whether there is no record of a thread, after `take` found none with this
    index of it.
    """
    return _thread(index) not in self._threads


def _thread(index: str) -> str:
  """Returns the name of the thread in the index of a record."""
  return index.rsplit(".", 2)[0]


def read_lines(path: str) -> Iterator[Line]:
  """Yields the lines of a recording."""
  with open(path, encoding="utf-8") as file:
    for line in file:
      yield json.loads(line)


def read_values(recording: str, index: str) -> Arrays:
  """Returns the values that a run kept of a record, by the names of the variables;
  {} if it kept none.
  """
  path = values_path(recording, index)
  if not os.path.exists(path):
    return {}
  with np.load(path) as arrays:
    return {name.partition(":")[0]: arrays[name] for name in arrays}


def values_path(recording: str, index: str) -> str:
  """Returns the name of the file for the values of a record."""
  return "{}.{}.npz".format(recording, re.sub(r"[^\w.]", "_", index))


def difference(
  reference: Record,
  record: Record,
  index: str,
  step: int,
  has_trained: bool,
  state: bool,
) -> Optional[Difference]:
  """Returns the difference between two records at the same place of their recordings;
  None if there is none.

  `state` says whether the variables of loss scales count; the other arguments are those
  of a `Difference`.
  """
  pairs = _differing_pairs(reference, record, state)
  if not pairs:
    return None
  return Difference(
    index,
    step,
    is_of_step=reference.line["steps"] > 0 and record.line["steps"] > 0,
    names=([name for name, _ in pairs], [name for _, name in pairs]),
    skipped=(reference.line["skipped"], record.line["skipped"]),
    changed=reference.line["changed"],
    has_trained=has_trained,
  )


def _differing_pairs(reference: Record, record: Record, state: bool) -> _Pairs:
  """Returns the pairs of variables that differ in two records."""
  theirs = dict(zip(reference.variables.shapes, reference.line["digests"]))
  ours = dict(zip(record.variables.shapes, record.line["digests"]))
  differing = []
  for one, two in _pairs(reference.variables, record.variables, state):
    if not one or not two or theirs[one] != ours[two]:
      differing.append((one, two))
  return differing


@functools.lru_cache(maxsize=16)
def _pairs(reference: Variables, variables: Variables, state: bool) -> _Pairs:
  """Returns pairs of names, None for a variable that only one has; `state`: whether
  those of loss scales count.

      for variables of a kind:
        as many in both graphs, of other names: by the order of creation
        else: by name

  A program creates its variables in the same order in each run. Loss scaling changes
  the scopes and numbers in the names of those that an optimizer creates when it applies
  gradients, so that one name can be that of two optimizers' variables.
  """
  their_kinds = _by_kind(reference)
  matched: Dict[str, str] = {}
  for kind, names in _by_kind(variables).items():
    others = their_kinds.get(kind, [])
    sources = names
    if len(others) == len(names) and set(others) != set(names):
      sources = others
    for name, source in zip(names, sources):
      if source in others:
        matched[name] = source
  pairs: _Pairs = [(matched.get(name), name) for name in variables.shapes]
  missing = set(reference.shapes) - set(matched.values())
  pairs += [(name, None) for name in sorted(missing)]
  if state:
    return pairs
  # One graph can know that a variable is a loss scale's, and the other not.
  without_state: _Pairs = []
  for one, two in pairs:
    if one not in reference.state and two not in variables.state:
      without_state.append((one, two))
  return without_state


def _by_kind(variables: Variables) -> Dict[_Kind, List[str]]:
  """Returns the names of variables by kind, each in the order of creation."""
  kinds: Dict[_Kind, List[str]] = {}
  for name, shape in variables.shapes.items():
    _, _, last_part = name.rpartition("/")
    stem = re.sub(r"_\d+$", "", last_part)
    kinds.setdefault((stem, tuple(shape)), []).append(name)
  return kinds
