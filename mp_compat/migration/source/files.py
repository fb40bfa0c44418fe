# SPDX-License-Identifier: Apache-2.0
"""Extracts the code of notebooks and scripts as one source, and puts changed code back."""

import json
import re
from typing import Any, Dict, Iterator, List, NamedTuple, Sequence, Tuple

import libcst as cst

from mp_compat.migration.source.parsed_source import Place
from mp_compat.migration.source.rewriting import Edit

MAGIC = "# mp_compat: magic: "
# Lines that IPython accepts but Python does not: `%magic`, `!command`, `?help`, `name?`, `names = !command`.
_NOT_PYTHON = re.compile(r"[%!?].*|[\w.]+\?{1,2}|[\w, ]+=\s*[%!].*")
_MAGICS_AROUND_PYTHON = ("%%capture", "%%prun", "%%time", "%%timeit")
_CHARACTER = re.compile(r"\\u[dD][89abAB]..\\u[dD][c-fC-F]..|\\u....|\\.|[^\\]", re.S)  # in a JSON string
_DECODER = json.JSONDecoder()
_SEPARATORS = re.compile(r"[ \t\r\n,:]*")


class Script:
  """A Python file, with the same interface as Notebook."""

  def __init__(self, content: bytes) -> None:
    self.source = content

  def place(self, place: Place) -> Place:
    return place

  def edited(self, code: bytes, edits: Sequence[Edit], encoding: str) -> bytes:
    """Returns the file with edits of `code`, which is the source in UTF-8."""
    pieces, position = [], 0
    for edit in edits:
      pieces += [code[position : edit.start], edit.text.encode("utf-8")]
      position = edit.end
    return b"".join(pieces + [code[position:]]).decode("utf-8").encode(encoding)


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
    self._spans: List[Tuple[int, int]] = []  # for each character of `source`, where it is in the file
    self._lines: List[_Line] = []  # of `source`
    self._texts: List[str] = []  # the lines
    kernel = tree.get("metadata", {}).get("kernelspec", {})
    if str(kernel.get("language", "python")).lower() == "python":
      start, _ = _members(self._text, len(self._text) - len(self._text.lstrip()))["cells"]
      for number, (cell, _) in enumerate(_elements(self._text, start), 1):
        self._add_cell(number, _members(self._text, cell))
    self.source = "".join(self._texts)

  def _add_cell(self, number: int, members: Dict[str, Tuple[int, int]]) -> None:
    start, end = members.get("source", (0, 0))
    if self._value(members, "cell_type") != "code" or not self._value(members, "source"):
      return
    strings, separator = [(start, end)], ""
    if self._text[start] == "[":
      strings = list(_elements(self._text, start))
      following = strings[1][0] if len(strings) > 1 else 0
      space = self._text[start + 1 : strings[0][0]]
      separator = self._text[strings[0][1] - 1 : following + 1] if following else '",{}"'.format(space)
    characters = [match for span in strings for match in _CHARACTER.finditer(self._text, span[0] + 1, span[1] - 1)]
    code = "".join(json.loads('"{}"'.format(match.group())) for match in characters)
    begin = 0
    for line, (prefix, skipped) in enumerate(_prefixes(code), 1):
      end = code.find("\n", begin) + 1 or len(code)
      spans = [match.span() for match in characters[begin + skipped : end]]
      margin = json.dumps(code[begin : begin + skipped])[1:-1]
      text, begin = code[begin + skipped : end], end
      if not text.endswith("\n"):
        text, spans = text + "\n", spans + [(0, 0)]
      self._texts.append(prefix + text)
      self._spans += [(0, 0)] * len(prefix) + spans
      self._lines.append(_Line(number, line, len(prefix) - skipped, separator + margin))

  def _value(self, members: Dict[str, Tuple[int, int]], key: str) -> Any:
    start, end = members.get(key, (0, 0))
    return json.loads(self._text[start:end] or "null")

  def place(self, place: Place) -> Place:
    """Returns the place in the notebook (cell, line, column) of a place in `source`."""
    line = self._lines[place.line - 1]
    return Place(line.cell, line.number, max(place.column - line.shift, 1))

  def edited(self, code: bytes, edits: Sequence[Edit], encoding: str) -> bytes:
    """Returns the notebook with edits of `code`, which is `source` in UTF-8. All other bytes stay as they are."""
    pieces, position, ascii_only = [], 0, self._text.isascii()
    for edit in edits:
      before, old = code[: edit.start].decode("utf-8"), code[edit.start : edit.end].decode("utf-8")
      start = self._spans[len(before)][0]
      newline = "\\n" + self._lines[before.count("\n")].separator
      new = newline.join(json.dumps(line, ensure_ascii=ascii_only)[1:-1] for line in edit.text.split("\n"))
      pieces += [self._text[position:start], new]
      position = self._spans[len(before) + len(old) - 1][1] if old else start
    return "".join(pieces + [self._text[position:]]).encode("utf-8")


class _Line(NamedTuple):
  """A line of a notebook's source: its cell and number, the shift of its columns, and how a new line begins in JSON."""

  cell: int
  number: int
  shift: int
  separator: str


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


def _prefixes(code: str) -> List[Tuple[str, int]]:
  """Returns for each line of a cell what makes it Python: a text before it, and a number of characters to leave out."""
  lines = code.split("\n")
  if code.lstrip().startswith("%%") and code.split(None, 1)[0] not in _MAGICS_AROUND_PYTHON:
    return [(MAGIC, 0)] * len(lines)
  margin = re.match(r"\s*?([ \t]*)(?=\S|\Z)", code).group(1)  # type: ignore[union-attr]  # IPython leaves it out.
  skipped = [len(margin) if line.startswith(margin) else 0 for line in lines]
  lines = [line[skip:] for line, skip in zip(lines, skipped)]
  prefixes = [""] * len(lines)
  try:
    cst.parse_module("\n".join(lines))
  except cst.ParserSyntaxError:
    indent, continues = "", False
    for index, line in enumerate(lines):
      is_magic = continues or bool(_NOT_PYTHON.fullmatch(line.strip()))
      if not continues:
        indent = line[: len(line) - len(line.lstrip())]
      prefixes[index] = indent + "pass  " + MAGIC if is_magic else ""
      continues = is_magic and line.rstrip("\r").endswith("\\")
  return list(zip(prefixes, skipped))
