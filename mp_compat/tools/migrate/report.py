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
  name = (
    os.path.relpath(migration.path)
    .replace(os.sep, "/")
    .encode("utf-8", "surrogateescape")
  )
  lines = difflib.diff_bytes(
    difflib.unified_diff,
    _LINE.findall(migration.before),
    _LINE.findall(migration.after),
    b"a/" + name,
    b"b/" + name,
  )
  return b"".join(
    line if line.endswith(b"\n") else line + b"\n\\ No newline at end of file\n"
    for line in lines
  )


def text(migrations: Sequence[Migration]) -> Iterator[str]:
  """Yields the text report: the places, then each kind of decision once, then the
  totals.
  """
  decisions = [decision for migration in migrations for decision in migration.decisions]
  changes = sum(len(migration.changes) for migration in migrations)
  problems = sum(bool(migration.problem) for migration in migrations)
  for migration in migrations:
    for change in migration.changes:
      yield "{}: rewritten: {} -> {}".format(
        _where(migration, change.place),
        " ".join(change.old.split()),
        " ".join(change.new.split()),
      )
    for decision in migration.decisions:
      new = " -> " + " ".join(decision.new.split()) if decision.new else ""
      yield "{}: decide ({}): {}{}".format(
        _where(migration, decision.place), decision.kind, decision.text, new
      )
  for migration in migrations:
    if migration.problem:
      yield "{}: not looked at: {}".format(migration.path, migration.problem)
  for kind, places in sorted(
    collections.Counter(decision.kind for decision in decisions).items()
  ):
    yield "{}, {}: {}".format(kind, _count(places, "place"), REMEDIES[kind])
  yield "{}, {} with old names; {} rewritten, {} to decide, {} not looked at".format(
    _count(len(migrations), "file"),
    sum(bool(migration.changes) for migration in migrations),
    _count(changes, "name"),
    _count(len(decisions), "place"),
    _count(problems, "file"),
  )


def _count(number: int, noun: str) -> str:
  return "{} {}{}".format(number, noun, "" if number == 1 else "s")


def _where(migration: Migration, place: Place) -> str:
  cell = "cell {}:".format(place.cell) if place.cell else ""
  return "{}:{}{}:{}".format(migration.path, cell, place.line, place.column)


def as_json(migrations: Sequence[Migration]) -> str:
  """Returns the JSON report: count `files`, lists `rewritten`, `decide`, `problems`;
  `cell` is 0 outside notebooks.
  """
  rewritten, decide, problems = [], [], []
  for path, _, _, changes, decisions, problem in migrations:
    rewritten += [_entry(path, change) for change in changes]
    decide += [
      dict(_entry(path, decision), remedy=REMEDIES[decision.kind])
      for decision in decisions
    ]
    problems += [dict(path=path, problem=problem)] if problem else []
  return json.dumps(
    dict(files=len(migrations), rewritten=rewritten, decide=decide, problems=problems),
    indent=2,
  )


def _entry(path: str, found: Union[Change, Decision]) -> Dict[str, object]:
  fields = found._asdict()
  return dict(path=path, **dict(fields.pop("place")._asdict(), **fields))
