# SPDX-License-Identifier: Apache-2.0
"""Rewrites TensorFlow's old names for loss scaling, in sources and notebooks, to those
of this package.

`find` lists files, `migrate_file` computes the changes of one file, `write` writes
them. Imports LibCST, but not TensorFlow.
"""

import os
import tempfile
from typing import Iterator, NamedTuple, Sequence, Tuple, Union

import libcst as cst

from mp_compat.tools.migrate import decisions
from mp_compat.tools.migrate import rewriting
from mp_compat.tools.migrate.decisions import Decision
from mp_compat.tools.migrate.files import MENTIONS
from mp_compat.tools.migrate.files import Notebook
from mp_compat.tools.migrate.files import Script
from mp_compat.tools.migrate.files import syntax_problem
from mp_compat.tools.migrate.names import Place
from mp_compat.tools.migrate.rewriting import Change

__all__ = ["Change", "Decision", "Migration", "Place", "find", "migrate_file", "write"]


class Migration(NamedTuple):
  """The changes to one file.

  Attributes:
    path: The file.
    before: Its content, b"" if it could not be read.
    after: Its new content; equal to `before` if there is nothing to rewrite.
    changes: The rewritten names, a tuple of `Change`.
    decisions: The places to review by hand, a tuple of `Decision`.
    problem: Why the file, or cells of it, could not be read or parsed (not Python 3, a
      pipe), or "".
  """

  path: str
  before: bytes
  after: bytes
  changes: Tuple[Change, ...] = ()
  decisions: Tuple[Decision, ...] = ()
  problem: str = ""


def find(paths: Sequence[str]) -> Iterator[str]:
  """Yields the files in `paths`, and all `.py` and `.ipynb` files in and below the
  directories in `paths`.

  Hidden subdirectories, `__pycache__`, and virtual environments are left out.

  Raises:
    FileNotFoundError: If one of `paths` does not exist.
  """
  for path in paths:
    if not os.path.exists(path):
      raise FileNotFoundError(
        "expected a file or a directory, but there is no {}".format(path)
      )
    if not os.path.isdir(path):
      yield path
    for folder, folders, files in os.walk(path):
      # `os.walk` goes on with these.
      folders[:] = sorted(name for name in folders if _has_sources(folder, name))
      for name in sorted(files):
        if name.endswith((".py", ".ipynb")):
          yield os.path.join(folder, name)


def _has_sources(folder: str, name: str) -> bool:
  """Returns whether a subdirectory may have sources of the program."""
  if name.startswith(".") or name == "__pycache__":
    return False
  is_environment = os.path.exists(os.path.join(folder, name, "pyvenv.cfg"))
  return not is_environment


def migrate_file(path: str) -> Migration:
  """Returns the `Migration` of a file, without writing it; with a `problem` if the file
  cannot be read or parsed.
  """
  before = b""
  if os.path.exists(path) and not os.path.isfile(path):  # Reading could block forever.
    problem = "expected a regular file, but this is a pipe, a socket or a device"
    return Migration(path, before, before, problem=problem)
  try:
    with open(path, "rb") as content:
      before = content.read()
    if MENTIONS.search(before.decode("latin-1")):
      return _migrate(path, before)
    problem = ""
  except cst.ParserSyntaxError as error:
    problem = syntax_problem(error)
  except RecursionError:
    problem = "its expressions are nested too deeply"
  # for example missing, or not in its declared encoding
  except (OSError, SyntaxError, ValueError) as error:
    problem = str(error)
  except Exception as error:  # A defect of this package concerns one file only.
    problem = "unexpected error, please report it: {!r}".format(error)
  return Migration(path, before, before, problem=problem)


def _migrate(path: str, before: bytes) -> Migration:
  """Returns the `Migration` of a file with this content; raises the errors of
  `Notebook` or `Script`.
  """
  file: Union[Notebook, Script]
  if path.endswith(".ipynb"):
    file = Notebook(before)
  else:
    file = Script(before)
  source = file.parsed
  texts = rewriting.new_texts(source)
  after = before
  if texts:
    after = file.edited(rewriting.make_edits(source, texts))
  changes = []
  for node, text in texts.items():
    place = file.place(source.place(node))
    changes.append(Change(place, source.text(node), text))
  found = []
  for decision in decisions.find(source, texts):
    found.append(decision._replace(place=file.place(decision.place)))
  return Migration(
    path, before, after, tuple(sorted(changes)), tuple(found), file.problem
  )


def write(migration: Migration) -> None:
  """Replaces the file with its new content atomically, and keeps its permissions.

  Raises:
    OSError: If the directory cannot be written to. The file is not changed.
  """
  # Replaces the target of a link, not the link.
  path = os.path.realpath(migration.path)
  handle, unfinished = tempfile.mkstemp(
    prefix="." + os.path.basename(path), dir=os.path.dirname(path)
  )
  try:
    with open(handle, "wb") as target:
      target.write(migration.after)
    os.chmod(unfinished, os.stat(path).st_mode & 0o7777)
    os.replace(unfinished, path)
  except BaseException:
    os.unlink(unfinished)
    raise
