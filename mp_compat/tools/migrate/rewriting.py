# SPDX-License-Identifier: Apache-2.0
"""Rewrites what is certainly an old name. All other text stays, byte for byte."""

import collections
from typing import Dict, List, NamedTuple, Union

import libcst as cst

from mp_compat.tools.migrate import names
from mp_compat.tools.migrate.names import ParsedSource
from mp_compat.tools.migrate.names import Place


class Edit(NamedTuple):
  """A part of a text, and what replaces it; ordered as in the text.

  Attributes:
    start: Where the part starts, in bytes of the text in UTF-8.
    end: Where it ends, in bytes; equal to `start` for an insertion.
    new: The text that replaces it.
  """

  start: int
  end: int
  new: str


class Change(NamedTuple):
  """A rewritten name or import.

  Attributes:
    place: Where it was in the old text.
    old: Its old text.
    new: Its new text.
  """

  place: Place
  old: str
  new: str


def new_texts(source: ParsedSource) -> Dict[cst.CSTNode, str]:
  """Returns the new texts of those expressions and import statements that are certainly
  old names.
  """
  texts: Dict[cst.CSTNode, str] = {}
  for statement in source.find(cst.ImportFrom):
    new = new_import(source, statement)
    # A comment inside would be lost.
    if new and "#" not in source.text(statement):
      texts[statement] = new
  if source.is_taken:
    return texts
  for expression in source.expressions:
    new = source.new_name(expression)
    if new:
      texts[expression] = new
  return texts


def new_import(source: ParsedSource, node: Union[cst.Import, cst.ImportFrom]) -> str:
  """Returns the statements that replace a `from` import with old names.

  There is one for each module that has the new names, and one for other names that the
  statement imports:

      from tensorflow.train.experimental import FixedLossScale as Fixed, Other

      from mp_compat import FixedLossScale as Fixed
      from tensorflow.train.experimental import Other

  Returns:
    The text, in which lines have the indentation of the statement; statements that
    begin no line are separated by semicolons. "" if nothing changes, and for `import`
    without `from`.
  """
  old_module = names.module_of(node)
  imports: Dict[str, List[str]] = collections.defaultdict(list)  # names by module
  for imported in names.imported(node):
    module, name = old_module, imported.name
    new = names.replacement("{}.{}".format(old_module, name))
    if new:
      module, _, name = new.rpartition(".")
    if name != imported.local:
      name = "{} as {}".format(name, imported.local)
    imports[module].append(name)
  if set(imports) <= {old_module}:
    return ""
  statements = []
  for module, found in imports.items():
    statements.append("from {} import {}".format(module, ", ".join(found)))
  separator = "; "
  if source.begins_line(node):
    separator = source.module.default_newline + source.text_before(node)
  return separator.join(statements)


def make_edits(source: ParsedSource, texts: Dict[cst.CSTNode, str]) -> List[Edit]:
  """Returns the edits that make `new_texts`, and import `mp_compat` where they use it;
  in the order of the text.
  """
  edits = []
  uses = []
  for node, text in texts.items():
    edits.append(Edit(source.start(node), source.end(node), text))
    if isinstance(node, cst.Attribute):
      uses.append(source.start(node))
  if uses:
    edits += _import_before(source, min(uses))
  return sorted(edits)


def _import_before(source: ParsedSource, first_use: int) -> List[Edit]:
  """Returns the edit that inserts `import mp_compat` before the first import, or before
  the first use; none if the module imports it before.

  Args:
    source: the source.
    first_use: where `mp_compat` is used first, in bytes.
  """
  statements = []
  for statement in _statements(source):
    if source.start(statement) <= first_use:
      statements.append(statement)
  following = statements[-1]  # the one with the first use
  for statement in reversed(statements):
    if names.imports_package(statement):
      return []
    if _is_import(statement):
      following = statement
  separator = "; "
  if source.begins_line(following):
    separator = source.module.default_newline
  start = source.start(following)
  return [Edit(start, start, "import mp_compat" + separator)]


def _statements(source: ParsedSource) -> List[cst.CSTNode]:
  """Returns the statements of a module, also those that share a line; not those in
  blocks.
  """
  statements: List[cst.CSTNode] = []
  for line in source.module.body:
    if isinstance(line, cst.SimpleStatementLine):
      statements += line.body
    else:
      statements.append(line)
  return statements


def _is_import(node: cst.CSTNode) -> bool:
  """Returns whether a statement is an import before which another may be: any but that
  of `__future__`.
  """
  if not isinstance(node, (cst.Import, cst.ImportFrom)):
    return False
  return names.module_of(node) != "__future__"
