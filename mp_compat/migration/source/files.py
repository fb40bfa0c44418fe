# SPDX-License-Identifier: Apache-2.0
"""Extracts the code of notebooks and scripts as one source, and puts changed code back."""

import json
import re
from typing import Dict, Iterator, List, Tuple

import libcst as cst

from mp_compat.migration.source.parsed_source import Place

MAGIC = "# mp_compat: magic: "
_END = "\n'mp_compat: end of the cell'\n"  # A statement: no other statement contains parts of two cells.
_MAGIC_PREFIX = re.compile(r"^[ \t]*(?:pass  )?" + MAGIC, re.M)
# Lines that IPython accepts but Python does not: `%magic`, `!command`, `?help`, `name?`, `names = !command`.
_NOT_PYTHON = re.compile(r"[%!?].*|[\w.]+\?{1,2}|[\w, ]+=\s*[%!].*")
_MAGICS_AROUND_PYTHON = ("%%capture", "%%prun", "%%time", "%%timeit")
_DECODER = json.JSONDecoder()
_SEPARATORS = re.compile(r"[ \t\r\n,:]*")


class Script:
  """A Python file, with the same interface as Notebook."""

  def __init__(self, content: bytes) -> None:
    self.source = content

  def place(self, place: Place) -> Place:
    return place

  def replaced(self, code: str, encoding: str) -> bytes:
    return code.encode(encoding)


class Notebook:
  """The code cells of a Jupyter notebook (nbformat 4).

  Attributes:
    source: The code of all Python cells as one module. Lines that are not Python are in comments.
  """

  def __init__(self, content: bytes) -> None:
    """Parses a notebook; raises a ValueError if it is not one."""
    self._text = content.decode("utf-8")
    tree = json.loads(self._text)
    if not isinstance(tree, dict) or not isinstance(tree.get("cells"), list):
      raise ValueError("expected a notebook of nbformat 4, with cells")
    self._spans: List[Tuple[int, int]] = []  # for each Python cell, where its source is in the file
    self._lines: List[Tuple[int, int, int]] = []  # for each line of `source`: its cell and number, characters added
    self.source = ""
    kernel = tree.get("metadata", {}).get("kernelspec", {})
    if str(kernel.get("language", "python")).lower() == "python":
      start, _ = _members(self._text, len(self._text) - len(self._text.lstrip()))["cells"]
      for number, (cell, (position, _)) in enumerate(zip(tree["cells"], _elements(self._text, start)), 1):
        if cell.get("cell_type") == "code" and cell.get("source"):
          self._spans.append(_members(self._text, position)["source"])
          self._add_cell(number, "".join(cell["source"]))

  def _add_cell(self, number: int, code: str) -> None:
    if MAGIC in code or _END.strip() in code:
      raise ValueError("cell {} contains {!r} or {!r}, which migrate inserts for itself".format(number, MAGIC, _END))
    prefixes = _prefixes(code)
    self.source += "\n".join(map(str.__add__, prefixes, code.split("\n"))) + _END
    self._lines += [(number, line, len(prefix)) for line, prefix in enumerate([*prefixes, ""], 1)]

  def place(self, place: Place) -> Place:
    """Returns the place in the notebook (cell, line, column) of a place in `source`."""
    cell, line, added = self._lines[place.line - 1]
    return Place(cell, line, max(place.column - added, 1))

  def replaced(self, code: str, encoding: str) -> bytes:
    """Returns the notebook with a changed `source`. Only the lines that change are written anew."""
    del encoding  # JSON is in UTF-8.
    pieces, position = [], 0
    for span, old, new in zip(self._spans, self.source.split(_END), code.split(_END)):
      if old != new:
        pieces += [self._text[position : span[0]], self._as_json(_MAGIC_PREFIX.sub("", new), *span)]
        position = span[1]
    return "".join(pieces + [self._text[position:]]).encode("utf-8")

  def _as_json(self, code: str, start: int, end: int) -> str:
    """Returns the code of a cell as JSON, in the format of its source from `start` to `end`."""
    ascii_only = self._text.isascii()
    if self._text[start] == '"':
      return json.dumps(code, ensure_ascii=ascii_only)
    spans = list(_elements(self._text, start))
    texts = [self._text[slice(*span)] for span in spans]
    known = {json.loads(text): text for text in texts}
    head = self._text[start + 1 : spans[0][0]]
    separator = self._text[spans[0][1] : spans[1][0]] if len(spans) > 1 else "," + head
    lines = re.findall(r".*\n|.+", code)
    new_texts = [known.get(line) or json.dumps(line, ensure_ascii=ascii_only) for line in lines]
    return "[" + head + separator.join(new_texts) + self._text[spans[-1][1] : end]


def _elements(text: str, start: int) -> Iterator[Tuple[int, int]]:
  """Yields the start and end of the elements of the JSON array, or of the keys and values of the object, at `start`."""
  position = start + 1
  while True:
    position = _SEPARATORS.match(text, position).end()  # type: ignore[union-attr]  # it matches an empty text
    if text[position] in "]}":
      return
    _, end = _DECODER.raw_decode(text, position)
    yield position, end
    position = end


def _members(text: str, start: int) -> Dict[str, Tuple[int, int]]:
  """Returns the start and end of the values of a JSON object, by key."""
  parts = list(_elements(text, start))
  return {json.loads(text[slice(*key)]): value for key, value in zip(parts[::2], parts[1::2])}


def _prefixes(code: str) -> List[str]:
  """Returns for each line of a cell the text before it that makes it Python."""
  lines = code.split("\n")
  if code.lstrip().startswith("%%") and code.split(None, 1)[0] not in _MAGICS_AROUND_PYTHON:
    return [MAGIC] * len(lines)
  prefixes = [""] * len(lines)
  try:
    cst.parse_module(code)
  except cst.ParserSyntaxError:
    indent, continues = "", False
    for index, line in enumerate(lines):
      is_magic = continues or bool(_NOT_PYTHON.fullmatch(line.strip()))
      if not continues:
        indent = line[: len(line) - len(line.lstrip())]
      prefixes[index] = indent + "pass  " + MAGIC if is_magic else ""
      continues = is_magic and line.rstrip("\r").endswith("\\")
  return prefixes
