# SPDX-License-Identifier: Apache-2.0
"""Rewrites old names in the text of a source. All other text is unchanged, byte for byte."""

import bisect
import re
from typing import Dict, List, NamedTuple, Optional, Sequence

import libcst as cst

from mp_compat.migration import old_names
from mp_compat.migration.source import parsed_source
from mp_compat.migration.source import values
from mp_compat.migration.source.parsed_source import Place

# Private attributes of TensorFlow's optimizers, and the equivalent public ones.
PUBLIC_EQUIVALENTS = {
  "_optimizer": "inner_optimizer",
  "_opt": "inner_optimizer",
  "_loss_scale": "loss_scale",
  "_loss_scale_manager": "loss_scale",
}
OPTIMIZER_CLASSES = {
  "mp_compat.MixedPrecisionLossScaleOptimizer",
  "mp_compat.contrib.mixed_precision.LossScaleOptimizer",
}
# `import *` from another module also binds what that module imports.
_PUBLIC_MODULES = {"tensorflow." + path for path, _ in old_names.PUBLIC}


class Change(NamedTuple):
  """A rewritten name or import: `old`, at `place` in the old text, becomes `new`."""

  place: Place
  old: str
  new: str


class Edit(NamedTuple):
  """A part of a text, from the offset `start` to the offset `end`, that `text` replaces."""

  start: int
  end: int
  text: str


class Rewriter(cst.CSTVisitor):
  """Collects the edits of one source.

  Attributes:
    changes: A list of `Change`, in the order of the text.
    edits: A list of `Edit`, in the order of the text; offsets are in bytes.
    uses: The rewritten expressions, which need `import mp_compat`.
  """

  def __init__(self, source: parsed_source.ParsedSource) -> None:
    super().__init__()
    self._source = source
    self.changes: List[Change] = []
    self.edits: List[Edit] = []
    self.uses: List[cst.BaseExpression] = []
    source.module.visit(self)
    if self.uses:
      self._ensure_import()
    self.edits.sort()

  def _replace(self, node: cst.CSTNode, new: str) -> None:
    self.changes.append(Change(self._source.place(node), self._source.text(node), new))
    self.edits.append(Edit(self._source.start(node), self._source.end(node), new))

  # Expressions: chains of attributes, and `getattr` with a literal.

  def visit_Attribute(self, node: cst.Attribute) -> bool:
    if not self._rewrite(node):
      if has_public_equivalent(self._source, node):
        self._replace(node.attr, PUBLIC_EQUIVALENTS[node.attr.value])
      node.value.visit(self)
    return False

  def visit_Call(self, node: cst.Call) -> bool:
    return not self._rewrite(node)

  def _rewrite(self, node: cst.BaseExpression) -> bool:
    new, _ = self._source.decide_name(node)
    if new:
      self._replace(node, _with_comments(new, self._source.text(node)))
      self.uses.append(node)
    return bool(new)

  # Imports.

  def visit_Import(self, node: cst.Import) -> bool:
    for alias in node.names:
      old = values.dotted(alias.name)
      new = self._source.new_name(old)
      if new and old != new and alias.asname:
        self._replace(alias.name, new)
      elif new and old.startswith("tensorflow.contrib."):  # Other modules may be used for more than loss scaling.
        self._replace(alias.name, "tensorflow")
    return False

  def visit_ImportFrom(self, node: cst.ImportFrom) -> bool:
    module = values.module_of(node)
    if node.module is None or module.startswith("mp_compat"):
      return False
    if isinstance(node.names, cst.ImportStar):
      new_module = self._source.new_name(module) if module in _PUBLIC_MODULES else None
      if new_module:
        self._replace(node.module, new_module)
      return False
    new_names = {
      alias: self._source.new_name("{}.{}".format(module, values.dotted(alias.name))) for alias in node.names
    }
    renamed = {alias: new.rpartition(".") for alias, new in new_names.items() if new}
    parents = {parent for parent, _, _ in renamed.values()}
    if len(renamed) == len(new_names) and len(parents) == 1 and parents != {""}:
      self._replace(node.module, parents.pop())
      for alias, (_, _, leaf) in renamed.items():
        self._rename(alias, leaf)
    elif renamed:
      self._split(node, new_names)
    return False

  def _rename(self, alias: cst.ImportAlias, leaf: str) -> None:
    old = values.dotted(alias.name)
    if leaf != old:
      self._replace(alias.name, leaf if alias.asname else "{} as {}".format(leaf, old))

  def _split(self, node: cst.ImportFrom, new_names: Dict[cst.ImportAlias, Optional[str]]) -> None:
    """Moves this package's names to separate import statements, before the remaining names."""
    statements = []
    for alias, new in new_names.items():
      if new:
        parent, _, leaf = new.rpartition(".")
        local = values.bound_as(alias) or values.dotted(alias.name)
        statements.append(
          "{}import {}{}".format(
            "from {} ".format(parent) if parent else "", leaf, "" if local == leaf else " as " + local
          )
        )
        self.changes.append(Change(self._source.place(alias), self._source.text(alias), statements[-1]))
    start, end = self._source.start(node), self._source.end(node)
    line = self._source.code.rfind(b"\n", 0, start) + 1
    indent = self._source.code[line:start].decode("utf-8")
    separator = "; " if indent.strip() else self._source.module.default_newline + indent
    kept = [alias for alias, new in new_names.items() if not new]
    if not kept:
      self.edits.append(Edit(start, end, separator.join(statements)))
      return
    self.edits.append(Edit(start, start, "".join(statement + separator for statement in statements)))
    elements = list(new_names)
    last = elements.index(kept[-1])
    for alias, following in zip(elements[:last], elements[1:]):
      if new_names[alias]:
        self.edits.append(Edit(self._source.start(alias), self._source.start(following), ""))
    if last + 1 < len(elements):
      self.edits.append(Edit(self._source.end(kept[-1]), self._source.end(elements[-1]), ""))

  def _ensure_import(self) -> None:
    """Inserts `import mp_compat`, unless the module imports it before the first use.

    The place is before the import that the first use needs, else before all imports, and never after a use.
    """
    statements = top_level(self._source.module)
    starts = [self._source.start(statement) for statement in statements]
    uses = [bisect.bisect(starts, self._source.start(use)) - 1 for use in self.uses]
    if any(_imports_ours(statement) for statement in statements[: min(uses)]):
      return
    imports = _imports(statements)
    first = min(imports.values(), default=next(i for i, part in enumerate(statements) if not _comes_first(part)))
    needed = [imports.get(values.dotted(parsed_source.first_part(use)), first) for use in self.uses]
    position, newline = min(uses + needed), self._source.module.default_newline
    start, gap = starts[position], newline
    if self._source.code[self._source.code.rfind(b"\n", 0, start) + 1 : start].strip():
      gap = "; "  # It is not the first statement of its line.
    elif not imports and isinstance(statements[position], (cst.ClassDef, cst.FunctionDef)):
      gap = 3 * newline
    self.edits.append(Edit(start, start, "import mp_compat" + gap))


def _imports(statements: Sequence[cst.CSTNode]) -> Dict[str, int]:
  """Returns the index of the first import of each name."""
  imports: Dict[str, int] = {}
  for index, statement in enumerate(statements):
    if isinstance(statement, (cst.Import, cst.ImportFrom)) and not _comes_first(statement):
      imports.update((name, index) for name in values.imported(statement) if name not in imports)
  return imports


def top_level(module: cst.Module) -> List[cst.CSTNode]:
  """Returns the simple and compound statements at the top level of a module."""
  return [part for line in module.body for part in (line.body if isinstance(line, cst.SimpleStatementLine) else [line])]


def _imports_ours(statement: cst.CSTNode) -> bool:
  return isinstance(statement, cst.Import) and values.imported(statement).get("mp_compat") == "mp_compat"


def _comes_first(statement: cst.CSTNode) -> bool:
  """Returns whether a statement is a docstring or an import from __future__."""
  if isinstance(statement, cst.ImportFrom):
    return values.module_of(statement) == "__future__"
  return isinstance(statement, cst.Expr) and isinstance(statement.value, (cst.SimpleString, cst.ConcatenatedString))


def _with_comments(new: str, old: str) -> str:
  """Returns a new name with the comments that the old one, in several lines, contains."""
  comments = re.findall(r"\s*#.*\n\s*", old)
  if not comments:
    return new
  parent, _, leaf = new.rpartition(".")
  commented = "{}{}.{}".format(parent, "".join(comments), leaf)
  return "({})".format(commented) if "(" in old.partition("#")[0] else commented


def has_public_equivalent(source: parsed_source.ParsedSource, node: cst.Attribute) -> bool:
  """Returns whether `node` reads a private attribute with a public equivalent of a loss scaling optimizer of ours."""
  is_read = not isinstance(source.parents[node], (cst.AssignTarget, cst.AugAssign, cst.AnnAssign, cst.Del))
  return node.attr.value in PUBLIC_EQUIVALENTS and is_read and source.origins(node.value) <= OPTIMIZER_CLASSES
