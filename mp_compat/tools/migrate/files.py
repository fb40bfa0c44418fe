# SPDX-License-Identifier: Apache-2.0
"""Extracts the Python code of scripts and notebooks as one source, and makes edits in
the file.
"""

import json
import re
from typing import Any, Dict, List, Tuple, Union

import libcst as cst

from mp_compat.tools.migrate.names import ParsedSource
from mp_compat.tools.migrate.names import Place
from mp_compat.tools.migrate.rewriting import Edit

# A text that matches none of these has no old names.
MENTIONS = re.compile(
  r"LossScale|graph_rewrite|loss_scale_wrapper|train(ing)?(\.| +import .*)experimental|mixed_precision"
)
_STRING = re.compile(r'("(?:[^"\\]|\\.)*")')  # in JSON
_IPYTHON_LINE = re.compile(r"^([ \t]*)[%!]", re.M)
_MAGICS_AROUND_PYTHON = ("%%capture", "%%prun", "%%time", "%%timeit")


def syntax_problem(error: cst.ParserSyntaxError) -> str:
  # LibCST counts one line too many.
  return "line {}: this is not Python 3".format(error.raw_line - bool(error.raw_column))


class Script:
  """A Python file, with the same interface as Notebook."""

  problem = ""

  def __init__(self, content: bytes) -> None:
    self.parsed = ParsedSource(content)

  def place(self, place: Place) -> Place:
    return place

  def edited(self, edits: List[Edit]) -> bytes:
    return (
      _edited(self.parsed.code, edits)
      .decode("utf-8")
      .encode(self.parsed.module.encoding)
    )


class Notebook:
  """The code cells of a Jupyter notebook (nbformat 4).

  Attributes:
    parsed: The cells as one module, where lines for IPython (`%magic`, `!command`) are
      comments of the same length.
    problem: The cells and lines that are left out, because they are not Python, and may
      have old names; or "".
  """

  def __init__(self, content: bytes) -> None:
    """Parses a notebook; raises a ValueError if it is not one."""
    text = content.decode("utf-8")
    self._pieces = _STRING.split(text)  # The pieces with odd indices are strings.
    indices = iter(range(1, len(self._pieces), 2))
    tree = json.loads(  # Each string is replaced by its index.
      _STRING.sub(lambda _: '"{}"'.format(next(indices)), text),
      object_pairs_hook=lambda pairs: {
        self._string(index): value for index, value in pairs
      },
    )
    if not isinstance(tree, dict) or not isinstance(tree.get("cells"), list):
      raise ValueError("expected a notebook of nbformat 4, with cells")
    language = tree.get("metadata", {}).get("kernelspec", {}).get("language")
    is_python = language is None or self._string(language).lower() == "python"
    # number from 1, indices of the strings of the source, code
    self._cells: List[Tuple[int, List[int], bytes]] = []
    self._parse(tree["cells"] if is_python else [])

  def _parse(self, cells: List[Dict[str, Any]]) -> None:
    problems, unclear, module = [], [], ""
    for number, cell in enumerate(cells, 1):
      if self._string(cell["cell_type"]) == "code" and cell["source"]:
        source = [
          int(index)
          for index in (
            [cell["source"]] if isinstance(cell["source"], str) else cell["source"]
          )
        ]
        code = "".join(map(self._string, source))
        python, left_out = _python(code)
        problems += [
          "cell {}, {}".format(number, problem)
          for problem, part in left_out
          if MENTIONS.search(part)
        ]
        binding = [part for _, part in left_out if not part.lstrip().startswith("!")]
        unclear += re.findall(r"\b\w+\b(?!\s*\.)", "\n".join(binding))
        if python:
          self._cells.append((number, source, code.encode("utf-8")))
          module += python + "\n"
    self.problem = "; ".join(problems)
    self.parsed = ParsedSource(module, unclear)

  def _string(self, index: Union[int, str]) -> str:
    return str(json.loads(self._pieces[int(index)]))

  def place(self, place: Place) -> Place:
    """Returns the place in the notebook (cell, line, column) of a place in `parsed`."""
    line = 0
    for number, _, code in self._cells:
      if place.line <= line + code.count(b"\n") + 1:
        return Place(number, place.line - line, place.column)
      line += code.count(b"\n") + 1
    raise ValueError("expected a place in a cell, got {}".format(place))

  def edited(self, edits: List[Edit]) -> bytes:
    """Returns the notebook after edits of `parsed`. Only the lines that change are
    written anew.
    """
    pieces, offset = list(self._pieces), 0
    for _, indices, code in self._cells:
      end = offset + len(code)
      inside = [
        (start - offset, stop - offset, text)
        for start, stop, text in edits
        if offset <= start <= end
      ]
      if inside:
        first, last = indices[0], indices[-1]
        new = self._as_json(_edited(code, inside).decode("utf-8"), indices)
        pieces[first : last + 1] = [new] + [""] * (last - first)
      offset = end + 1
    return "".join(pieces).encode("utf-8")

  def _as_json(self, code: str, indices: List[int]) -> str:
    """Returns code in the format of the strings that it replaces: one string, or a list
    with one for each line.
    """
    before, after = self._pieces[indices[0] - 1], self._pieces[indices[0] + 1]
    known = {self._string(index): self._pieces[index] for index in indices}
    ascii_only = all(piece.isascii() for piece in self._pieces)
    lines = re.findall(r".*\n|.+", code) if before.rstrip().endswith("[") else [code]
    separator = after if len(indices) > 1 else "," + before.rpartition("[")[2]
    return separator.join(
      known.get(line) or json.dumps(line, ensure_ascii=ascii_only) for line in lines
    )


def _python(code: str) -> Tuple[str, List[Tuple[str, str]]]:
  """Returns the Python code of a cell, or "", and what is left out, each with the
  problem.
  """
  if (
    code.lstrip().startswith("%%")
    and code.split(None, 1)[0] not in _MAGICS_AROUND_PYTHON
  ):
    return "", [("line 1: this is not Python 3", code)]
  for python in (code, _IPYTHON_LINE.sub(r"\1#", code)):
    try:
      cst.parse_module(python)
    except cst.ParserSyntaxError as error:
      problem = syntax_problem(error)
    else:
      lines = enumerate(zip(code.split("\n"), python.split("\n")), 1)
      return python, [
        ("line {}: this is not Python 3".format(line), old)
        for line, (old, new) in lines
        if old != new
      ]
  return "", [(problem, code)]


def _edited(code: bytes, edits: List[Edit]) -> bytes:
  for start, end, text in reversed(edits):
    code = code[:start] + text.encode("utf-8") + code[end:]
  return code
