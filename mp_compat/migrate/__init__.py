"""Old code, moved over for good: TensorFlow's old names in sources and notebooks become those of this package.

`migrate_file` looks at one file and changes nothing; `find` lists files. Imports LibCST, and no TensorFlow.
"""

import os
import re
import tempfile
from typing import Iterator, NamedTuple, Sequence, Tuple

import libcst as cst

from mp_compat.migrate.containers import Notebook
from mp_compat.migrate.containers import Script
from mp_compat.migrate.decisions import Deciding
from mp_compat.migrate.decisions import Decision
from mp_compat.migrate.names import Names
from mp_compat.migrate.names import Place
from mp_compat.migrate.rewrite import Change
from mp_compat.migrate.rewrite import Rewriting

__all__ = ["Change", "Decision", "Migration", "Place", "find", "migrate_file", "write"]

_SUFFIXES = (".py", ".ipynb")
# Without one of these, there is nothing to find.
_MENTIONS = re.compile(rb"LossScale|graph_rewrite|loss_scale_wrapper|train(ing)?\.experimental|mixed_precision")


class Migration(NamedTuple):
  """What becomes of a file.

  Attributes:
    path: the file.
    before: its content.
    after: what it should be; the same if there is nothing to rewrite.
    changes: what is rewritten, a list of `Change`.
    decisions: where somebody has to look, a list of `Decision`.
    problem: why the file could not be looked at (it is not Python 3, it is a pipe), or "".
  """

  path: str
  before: bytes
  after: bytes
  changes: Tuple[Change, ...] = ()
  decisions: Tuple[Decision, ...] = ()
  problem: str = ""


def find(paths: Sequence[str]) -> Iterator[str]:
  """The files that paths stand for: files themselves, and of directories all `.py` and `.ipynb` in and below.

  Hidden directories, `__pycache__`, and virtual environments are left out.

  Raises:
    FileNotFoundError: there is no such path.
  """
  for path in paths:
    if not os.path.exists(path):
      raise FileNotFoundError("expected a file or a directory, but there is no {}".format(path))
    if not os.path.isdir(path):
      yield path
    for folder, folders, files in os.walk(path):
      folders[:] = sorted(name for name in folders if not name.startswith(".") and name != "__pycache__"
                          and not os.path.exists(os.path.join(folder, name, "pyvenv.cfg")))
      yield from (os.path.join(folder, name) for name in sorted(files) if name.endswith(_SUFFIXES))


def migrate_file(path: str) -> Migration:
  """Looks at a file, and changes nothing. What cannot be read or parsed has a `problem`."""
  before = b""
  if os.path.exists(path) and not os.path.isfile(path):  # Reading could wait for ever.
    return Migration(path, before, before, problem="expected a regular file, but this is a pipe, a socket or a device")
  try:
    with open(path, "rb") as content:
      before = content.read()
    if not _MENTIONS.search(before):
      return Migration(path, before, before)
    source = Notebook(before) if path.endswith(".ipynb") else Script(before)
    names = Names(source.source)
    rewriting = Rewriting(names)
    return Migration(
        path, before, source.content(rewriting.code()) if rewriting.changes else before,
        tuple(change._replace(place=source.place(change.place)) for change in rewriting.changes),
        tuple(found._replace(place=source.place(found.place)) for found in Deciding(names).decisions))
  except cst.ParserSyntaxError as error:
    place = source.place(Place(0, error.raw_line, 1))
    problem = "{}line {}: this is not Python 3".format("cell {}, ".format(place.cell) if place.cell else "", place.line)
  except RecursionError:
    problem = "its expressions are nested too deeply"
  except (OSError, SyntaxError, ValueError) as error:  # not there, of an unknown encoding, or not in the one it says
    problem = str(error)
  return Migration(path, before, before, problem=problem)


def write(migration: Migration) -> None:
  """Puts the new content in the file's place, in one step, with the permissions that it had.

  Raises:
    OSError: the directory cannot be written to. The file is what it was.
  """
  path = os.path.realpath(migration.path)  # Of a link, what it points to is written.
  handle, unfinished = tempfile.mkstemp(prefix="." + os.path.basename(path), dir=os.path.dirname(path))
  try:
    with open(handle, "wb") as target:
      target.write(migration.after)
    os.chmod(unfinished, os.stat(path).st_mode & 0o7777)
    os.replace(unfinished, path)
  except BaseException:
    os.unlink(unfinished)
    raise
