# SPDX-License-Identifier: Apache-2.0
"""Formats the output of `mp_compat migrate`: a diff, a text report and a JSON
report.
"""

import collections
import difflib
import json
import os
import re
from typing import Dict, Iterator, Sequence, Union

from mp_compat.tools.migrate import Change
from mp_compat.tools.migrate import Decision
from mp_compat.tools.migrate import Migration
from mp_compat.tools.migrate import Place
from mp_compat.tools.migrate.decisions import REMEDIES

_LINE = re.compile(rb".*\n|.+")  # as Git sees it: only a line feed ends it


def diff(migration: Migration) -> bytes:
  """Returns a unified diff for `patch -p1` and `git apply`; b"" if nothing changes."""
  path = os.path.relpath(migration.path).replace(os.sep, "/")
  name = path.encode("utf-8", "surrogateescape")
  lines = difflib.diff_bytes(
    difflib.unified_diff,
    _LINE.findall(migration.before),
    _LINE.findall(migration.after),
    b"a/" + name,
    b"b/" + name,
  )
  ended = []
  for line in lines:
    if not line.endswith(b"\n"):
      line += b"\n\\ No newline at end of file\n"
    ended.append(line)
  return b"".join(ended)


def text(migrations: Sequence[Migration]) -> Iterator[str]:
  """Yields the text report: the places, then each kind of decision once, then the
  totals.

      a.py:3:9: rewritten: tf.train.experimental.LossScale -> mp_compat.LossScale
      a.py:8:1: decide (guard): tf.train.experimental.LossScale
      guard, 1 place: the program handles the absence of a name that ...
      1 file, 1 with old names; 1 name rewritten, 1 place to decide, ...
  """
  for migration in migrations:
    yield from _places(migration)
  for migration in migrations:
    if migration.problem:
      yield "{}: not looked at: {}".format(migration.path, migration.problem)
  kinds: collections.Counter[str] = collections.Counter()
  for migration in migrations:
    kinds.update(decision.kind for decision in migration.decisions)
  for kind, number in sorted(kinds.items()):
    yield "{}, {}: {}".format(kind, _count(number, "place"), REMEDIES[kind])
  yield _totals(migrations)


def _places(migration: Migration) -> Iterator[str]:
  """Yields a line for each rewritten name, and for each decision."""
  for change in migration.changes:
    yield "{}: rewritten: {} -> {}".format(
      _where(migration, change.place), _in_line(change.old), _in_line(change.new)
    )
  for decision in migration.decisions:
    new = ""
    if decision.new:
      new = " -> " + _in_line(decision.new)
    yield "{}: decide ({}): {}{}".format(
      _where(migration, decision.place), decision.kind, decision.text, new
    )


def _totals(migrations: Sequence[Migration]) -> str:
  """Returns the last line of the report."""
  changed = changes = decisions = problems = 0
  for migration in migrations:
    changed += bool(migration.changes)
    changes += len(migration.changes)
    decisions += len(migration.decisions)
    problems += bool(migration.problem)
  return "{}, {} with old names; {} rewritten, {} to decide, {} not looked at".format(
    _count(len(migrations), "file"),
    changed,
    _count(changes, "name"),
    _count(decisions, "place"),
    _count(problems, "file"),
  )


def _in_line(code: str) -> str:
  """Returns a text with single spaces in place of line breaks and indentation."""
  return " ".join(code.split())


def _count(number: int, noun: str) -> str:
  """Returns, for example, "1 file" or "2 files"."""
  if number == 1:
    return "1 " + noun
  return "{} {}s".format(number, noun)


def _where(migration: Migration, place: Place) -> str:
  """Returns `path:line:column`, in a notebook `path:cell N:line:column`."""
  cell = ""
  if place.cell:
    cell = "cell {}:".format(place.cell)
  return "{}:{}{}:{}".format(migration.path, cell, place.line, place.column)


def as_json(migrations: Sequence[Migration]) -> str:
  """Returns the JSON report, an object:

  - `files`: the number of files;
  - `rewritten`: a list with `path`, `cell` (0 outside notebooks), `line`, `column`,
    `old` and `new` of each rewritten name;
  - `decide`: a list with the same position, and `kind`, `text`, `new` and `remedy` of
    each decision;
  - `problems`: a list with `path` and `problem` of each file that was not looked at.
  """
  rewritten, decide, problems = [], [], []
  for migration in migrations:
    path = migration.path
    for change in migration.changes:
      rewritten.append(_entry(path, change))
    for decision in migration.decisions:
      entry = _entry(path, decision)
      entry["remedy"] = REMEDIES[decision.kind]
      decide.append(entry)
    if migration.problem:
      problems.append({"path": path, "problem": migration.problem})
  return json.dumps(
    {
      "files": len(migrations),
      "rewritten": rewritten,
      "decide": decide,
      "problems": problems,
    },
    indent=2,
  )


def _entry(path: str, found: Union[Change, Decision]) -> Dict[str, object]:
  """Returns the fields of a record with its path, and those of its place.

  The keys are `path`, `cell`, `line` and `column`, and then those of a `Change` (`old`,
  `new`) or of a `Decision` (`kind`, `text`, `new`).
  """
  fields = found._asdict()
  place = fields.pop("place")
  return {"path": path, **place._asdict(), **fields}
