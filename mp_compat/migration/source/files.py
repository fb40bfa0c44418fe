# SPDX-License-Identifier: Apache-2.0
"""Extracts the code of notebooks and scripts as one source, and puts changed code back."""

import itertools
import json
import re
from typing import Any, Dict, List

import libcst as cst

from mp_compat.migration.source.parsed_source import Place

_CELL = "# mp_compat: cell {}\n"
_MAGIC = "pass  # mp_compat: magic: "
# Lines that IPython accepts but Python does not: `%magic`, `!command`, `?help`, `name?`, `names = !command`.
_NOT_PYTHON = re.compile(r"[%!?].*|[\w.]+\?{1,2}|[\w, ]+=\s*[%!].*")
_MAGICS_AROUND_PYTHON = ("%%capture", "%%prun", "%%time", "%%timeit")
_STYLES: List[Dict[str, Any]] = [
  dict(indent=indent, ensure_ascii=ascii_only)
  for indent, ascii_only in itertools.product((1, 2, 4, "\t", None), (False, True))
]


class Script:
  """A Python file, with the same interface as Notebook."""

  def __init__(self, content: bytes) -> None:
    self.source = content

  def place(self, place: Place) -> Place:
    return place

  def content(self, source: bytes) -> bytes:
    return source


class Notebook:
  """The code cells of a Jupyter notebook (nbformat 4).

  Attributes:
    source: The code of all Python cells as one module, in UTF-8. Lines that are not Python are in comments.
  """

  def __init__(self, content: bytes) -> None:
    """Parses a notebook; raises a ValueError if it is not one, or if its JSON layout cannot be reproduced."""
    text = content.decode("utf-8")
    self._tree = json.loads(text)
    if not isinstance(self._tree, dict) or not isinstance(self._tree.get("cells"), list):
      raise ValueError("expected a notebook of nbformat 4, with cells")
    self._end = text[len(text.rstrip()) :]
    styles = [style for style in _STYLES if json.dumps(self._tree, **style) + self._end == text]
    if not styles:
      raise ValueError("its JSON layout cannot be reproduced; save it with Jupyter first")
    self._style = styles[0]
    self._codes: Dict[int, str] = {}
    for number, cell in enumerate(self._tree["cells"], 1):
      if cell.get("cell_type") == "code" and self._is_python():
        code = "".join(cell["source"])
        if not code.startswith("%%") or code.split(None, 1)[0] in _MAGICS_AROUND_PYTHON:
          self._codes[number] = _comment_magics(code)
    self.source = "".join(_CELL.format(number) + code + "\n" for number, code in self._codes.items()).encode("utf-8")

  def _is_python(self) -> bool:
    kernel = self._tree.get("metadata", {}).get("kernelspec", {})
    return str(kernel.get("language", "python")).lower() == "python"

  def place(self, place: Place) -> Place:
    """Returns the place in the notebook (cell, line, column) of a place in `source`."""
    ends = list(itertools.accumulate(1 + len((code + "\n").splitlines()) for code in self._codes.values()))
    index = sum(end < place.line for end in ends)
    return Place(list(self._codes)[index], place.line - ([0] + ends)[index] - 1, place.column)

  def content(self, source: bytes) -> bytes:
    """Returns the notebook with a new source, in which only expressions and imports have changed."""
    pieces = re.split(_CELL.format(r"(\d+)"), source.decode("utf-8"))[1:]
    for number, code in zip(pieces[::2], pieces[1::2]):
      if code[:-1] != self._codes[int(number)]:
        cell = self._tree["cells"][int(number) - 1]
        shown = _restore_magics(code[:-1])
        cell["source"] = shown if isinstance(cell["source"], str) else shown.splitlines(True)
    return (json.dumps(self._tree, **self._style) + self._end).encode("utf-8")


def _comment_magics(code: str) -> str:
  """Returns the code with lines that are not Python moved into comments."""
  try:
    cst.parse_module(code)
    return code
  except cst.ParserSyntaxError:
    lines, indent, continues = [], "", False
    for line in code.split("\n"):
      is_magic = continues or bool(_NOT_PYTHON.fullmatch(line.strip()))
      if not continues:
        indent = line[: len(line) - len(line.lstrip())]
      lines.append(indent + _MAGIC + line if is_magic else line)
      continues = is_magic and line.endswith("\\")
    return "\n".join(lines)


def _restore_magics(code: str) -> str:
  return re.sub("(?m)^[ \t]*" + _MAGIC, "", code)
