# SPDX-License-Identifier: Apache-2.0
"""Rewrites old names in the text of a source. All other text is unchanged, byte for byte."""

import bisect
import re
from typing import Dict, List, NamedTuple, Optional

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


class _Edit(NamedTuple):
  """A part of a text, from the offset `start` to the offset `end` in bytes, that `text` replaces."""

  start: int
  end: int
  text: str


class Rewriter(cst.CSTVisitor):
  """Collects the edits of one source.

  Attributes:
    changes: A list of `Change`, in the order of the text.
    code: The text after them.
  """

  def __init__(self, source: parsed_source.ParsedSource) -> None:
    super().__init__()
    self._source = source
    self.changes: List[Change] = []
    self._edits: List[_Edit] = []
    self._uses: List[cst.BaseExpression] = []  # the rewritten expressions, which need `import mp_compat`
    source.module.visit(self)
    if self._uses:
      self._ensure_import()
    code = source.code
    for edit in sorted(self._edits, reverse=True):
      code = code[: edit.start] + edit.text.encode("utf-8") + code[edit.end :]
    self.code = code.decode("utf-8")

  def _replace(self, node: cst.CSTNode, new: str) -> None:
    self.changes.append(Change(self._source.place(node), self._source.text(node), new))
    self._edits.append(_Edit(self._source.start(node), self._source.end(node), new))

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
      self._replace(node, new)
      self._uses.append(node)
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
    indent = self._source.text_before(node)
    kept = [alias for alias, new in new_names.items() if not new]
    if kept:
      kept[-1] = kept[-1].with_changes(comma=cst.MaybeSentinel.DEFAULT)
      statements.append(self._source.module.code_for_node(node.with_changes(names=kept)))
    separator = "; " if indent.strip() else self._source.module.default_newline + indent
    self._edits.append(_Edit(start, end, separator.join(statements)))

  def _ensure_import(self) -> None:
    """Inserts `import mp_compat`, unless the module imports it before the first use.

    The place is before the first import that a use needs, else before all imports, and never after a use.
    """
    statements: List[cst.CSTNode] = []
    for line in self._source.module.body:
      statements += line.body if isinstance(line, cst.SimpleStatementLine) else [line]
    starts = [self._source.start(statement) for statement in statements]
    first_use = bisect.bisect(starts, min(map(self._source.start, self._uses))) - 1
    if any(map(_imports_ours, statements[:first_use])):
      return
    used = {word for use in self._uses for word in re.findall(r"\w+", self._source.text(use))}
    others = [index for index, statement in enumerate(statements) if not _comes_first(statement)]
    imports = {
      index: set(values.imported(statement))
      for index, statement in enumerate(statements)
      if isinstance(statement, (cst.Import, cst.ImportFrom)) and not _comes_first(statement)
    }
    needed = [index for index, names in imports.items() if names & used]
    position = min(first_use, [*needed, *imports, *others][0])
    gap = "; " if self._source.text_before(statements[position]).strip() else self._source.module.default_newline
    self._edits.append(_Edit(starts[position], starts[position], "import mp_compat" + gap))


def _imports_ours(statement: cst.CSTNode) -> bool:
  return isinstance(statement, cst.Import) and values.imported(statement).get("mp_compat") == "mp_compat"


def _comes_first(statement: cst.CSTNode) -> bool:
  """Returns whether a statement is a docstring or an import from __future__."""
  if isinstance(statement, cst.ImportFrom):
    return values.module_of(statement) == "__future__"
  return isinstance(statement, cst.Expr) and isinstance(statement.value, (cst.SimpleString, cst.ConcatenatedString))


def has_public_equivalent(source: parsed_source.ParsedSource, node: cst.Attribute) -> bool:
  """Returns whether `node` reads a private attribute with a public equivalent of a loss scaling optimizer of ours."""
  is_read = not isinstance(source.parents[node], (cst.AssignTarget, cst.AugAssign, cst.AnnAssign, cst.Del))
  return node.attr.value in PUBLIC_EQUIVALENTS and is_read and source.origins(node.value) <= OPTIMIZER_CLASSES
