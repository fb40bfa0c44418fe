# SPDX-License-Identifier: Apache-2.0
"""Extracts the Python code of scripts and notebooks as one source, and makes edits in
the file.
"""

import json
import re
from typing import Any, Dict, List, NamedTuple, Tuple, Union

import libcst as cst

from mp_compat.tools.migrate.names import ParsedSource
from mp_compat.tools.migrate.names import Place
from mp_compat.tools.migrate.rewriting import Edit

# A text that matches none of these has no old names.
MENTIONS = re.compile(
  r"LossScale|graph_rewrite|loss_scale_wrapper|train(ing)?(\.| +import .*)experimental"
  r"|mixed_precision|AUTO_MIXED_PRECISION"
)
_STRING = re.compile(r'("(?:[^"\\]|\\.)*")')  # in JSON
_IPYTHON_LINE = re.compile(r"^([ \t]*)[%!]", re.M)
_MAGICS_AROUND_PYTHON = ("%%capture", "%%prun", "%%time", "%%timeit")
_NAME = re.compile(r"\b\w+\b(?!\s*\.)")  # that is not followed by an attribute


def syntax_problem(error: cst.ParserSyntaxError) -> str:
  """Returns the problem of a text that LibCST cannot parse, with the line."""
  line = error.raw_line
  if error.raw_column:  # LibCST counts one line too many.
    line -= 1
  return "line {}: this is not Python 3".format(line)


class Script:
  """A Python file, with the same interface as Notebook."""

  problem = ""

  def __init__(self, content: bytes) -> None:
    self.parsed = ParsedSource(content)

  def place(self, place: Place) -> Place:
    """Returns a place in `parsed`, which is that in the file."""
    return place

  def edited(self, edits: List[Edit]) -> bytes:
    """Returns the file after edits of `parsed`, in its encoding."""
    text = _edited(self.parsed.code, edits).decode("utf-8")
    return text.encode(self.parsed.module.encoding)


class _Cell(NamedTuple):
  """A code cell with Python.

  Attributes:
    number: Its number in the notebook, from 1.
    indices: The strings of its source: indices into `Notebook._pieces`.
    code: Its text in UTF-8.
    line: The line of `Notebook.parsed` where it starts, from 1.
  """

  number: int
  indices: List[int]
  code: bytes
  line: int


class Notebook:
  r"""The code cells of a Jupyter notebook (nbformat 4).

  All bytes but those of changed lines stay as they are. So the JSON text is taken apart
  at its strings, and parsed with the number of each string in its place:

      text      {"source": ["a\n", "b"]}
      pieces    0: {   1: "source"   2: : [   3: "a\n"   4: ,   5: "b"   6: ]}
      tree      {"source": ["3", "5"]}

  Attributes:
    parsed: The cells as one module, where lines for IPython (`%magic`, `!command`) are
      comments of the same length.
    problem: The cells and lines that are left out, because they are not Python, and may
      have old names; or "".
  """

  def __init__(self, content: bytes) -> None:
    """Parses a notebook; raises a ValueError if it is not one."""
    # The text in pieces: those with odd indices are strings, with their quotes.
    self._pieces = _STRING.split(content.decode("utf-8"))
    tree = self._tree()
    if not isinstance(tree, dict) or not isinstance(tree.get("cells"), list):
      raise ValueError("expected a notebook of nbformat 4, with cells")
    self._cells: List[_Cell] = []
    kernel = tree.get("metadata", {}).get("kernelspec", {})
    language = kernel.get("language")
    cells = tree["cells"]
    if language is not None and self._string(language).lower() != "python":
      cells = []
    self._parse(cells)

  def _tree(self) -> Any:
    """Returns the value of the JSON text, in which a string, but not a key, is the
    index of its piece.

    The index is a string of digits, so that it cannot be taken for a number of the
    notebook; `_string` returns the text for it.

    Raises:
      ValueError: If the text is not JSON.
    """
    numbered = list(self._pieces)
    for index in range(1, len(numbered), 2):
      numbered[index] = '"{}"'.format(index)
    return json.loads("".join(numbered), object_pairs_hook=self._with_keys)

  def _with_keys(self, pairs: List[Tuple[str, Any]]) -> Dict[str, Any]:
    """Returns a JSON object with its keys, from pairs with their indices."""
    return {self._string(index): value for index, value in pairs}

  def _string(self, index: Union[int, str]) -> str:
    """Returns the string at an index of the pieces."""
    return str(json.loads(self._pieces[int(index)]))

  def _parse(self, cells: List[Dict[str, Any]]) -> None:
    """Sets `parsed` and `problem`, and keeps the cells with Python."""
    problems = []
    module = ""
    unclear: List[str] = []  # names that what is left out may bind
    for number, cell in enumerate(cells, 1):
      indices = self._source(cell)
      code = "".join(self._string(index) for index in indices)
      python, left_out = _python(code)
      for part in left_out:
        if MENTIONS.search(part.text):
          problems.append("cell {}, {}".format(number, part.problem))
        if not part.text.lstrip().startswith("!"):  # A command binds no names.
          unclear += _NAME.findall(part.text)
      if python:
        line = module.count("\n") + 1
        self._cells.append(_Cell(number, indices, code.encode("utf-8"), line))
        module += python + "\n"
    self.problem = "; ".join(problems)
    self.parsed = ParsedSource(module, unclear)

  def _source(self, cell: Dict[str, Any]) -> List[int]:
    """Returns the indices of the strings of a code cell; [] for other cells."""
    if self._string(cell["cell_type"]) != "code":
      return []
    source = cell["source"]
    if isinstance(source, str):  # one string for all lines
      return [int(source)]
    return [int(index) for index in source]

  def place(self, place: Place) -> Place:
    """Returns the place in the notebook (cell, line, column) of a place in `parsed`."""
    cell = [each for each in self._cells if each.line <= place.line][-1]
    return Place(cell.number, place.line - cell.line + 1, place.column)

  def edited(self, edits: List[Edit]) -> bytes:
    """Returns the notebook after edits of `parsed`. Only the lines that change are
    written anew.

        for each cell with edits:
          code = the text of the cell after the edits
          the piece of its first string = code as JSON
          all pieces from there to its last string = ""

    `parsed` has the cells one after the other, each with a line feed at its end. Edits
    are in the order of the text, and each is in one cell.
    """
    pieces = list(self._pieces)
    start = 0  # where the cell starts in `parsed`
    for cell in self._cells:
      end = start + len(cell.code)
      edits_of_cell = []
      for edit in edits:
        if start <= edit.start <= end:
          in_cell = Edit(edit.start - start, edit.end - start, edit.new)
          edits_of_cell.append(in_cell)
      if edits_of_cell:
        code = _edited(cell.code, edits_of_cell).decode("utf-8")
        first, last = cell.indices[0], cell.indices[-1]
        # One piece has the new strings; those of the old ones become empty.
        for index in range(first, last + 1):
          pieces[index] = ""
        pieces[first] = self._as_json(code, cell.indices)
      start = end + 1  # the end of the line between cells
    return "".join(pieces).encode("utf-8")

  def _as_json(self, code: str, indices: List[int]) -> str:
    r"""Returns code in the format of the strings that it replaces: one string, or a
    list with one for each line.

        "source": "a\nb"          one string: no "[" is before it
        "source": [               a list: what is between its first strings separates
         "a\n",                   the new ones, so that the layout stays
         "b"
        ]

    Lines that do not change keep their JSON text, with its escapes. New ones have only
    ASCII characters if the notebook has.

    Args:
      code: the new text of a cell.
      indices: the pieces of the strings of its source, at least one.
    """
    first = indices[0]
    before = self._pieces[first - 1]
    after = self._pieces[first + 1]
    lines = [code]
    if before.rstrip().endswith("["):
      lines = re.findall(r".*\n|.+", code)
    separator = after
    if len(indices) == 1:  # as before the only string
      _, _, space = before.rpartition("[")
      separator = "," + space
    known = {self._string(index): self._pieces[index] for index in indices}
    ascii_only = all(piece.isascii() for piece in self._pieces)
    strings = []
    for line in lines:
      if line not in known:
        known[line] = json.dumps(line, ensure_ascii=ascii_only)
      strings.append(known[line])
    return separator.join(strings)


class _LeftOut(NamedTuple):
  """A part of a cell that is not Python.

  Attributes:
    problem: Which line it is, and what is wrong.
    text: The part: a line for IPython, or the cell.
  """

  problem: str
  text: str


def _python(code: str) -> Tuple[str, List[_LeftOut]]:
  """Returns the Python code of a cell, or "", and the parts that it leaves out.

      the cell has a magic around other code     ""
      it is Python                               the cell
      it is, with lines for IPython as comments  that, which has the same length
      otherwise                                  ""

  `%%time` and other magics around Python count as lines for IPython.
  """
  if code.lstrip().startswith("%%"):
    magic = code.split()[0]
    if magic not in _MAGICS_AROUND_PYTHON:
      return "", [_LeftOut("line 1: this is not Python 3", code)]
  for python in (code, _IPYTHON_LINE.sub(r"\1#", code)):
    try:
      cst.parse_module(python)
    except cst.ParserSyntaxError as error:
      problem = syntax_problem(error)
    else:
      return python, _different_lines(code, python)
  return "", [_LeftOut(problem, code)]


def _different_lines(code: str, python: str) -> List[_LeftOut]:
  """Returns the lines of a cell that are comments in `python`."""
  found = []
  lines = zip(code.split("\n"), python.split("\n"))
  for number, (line, line_of_python) in enumerate(lines, 1):
    if line != line_of_python:
      problem = "line {}: this is not Python 3".format(number)
      found.append(_LeftOut(problem, line))
  return found


def _edited(code: bytes, edits: List[Edit]) -> bytes:
  """Returns a text in UTF-8 after edits, which are in its order.

  The edits do not overlap. Two may be at the same place if the first is an insertion.
  """
  for edit in reversed(edits):  # The offsets of earlier edits stay right.
    code = code[: edit.start] + edit.new.encode("utf-8") + code[edit.end :]
  return code
