# SPDX-License-Identifier: Apache-2.0
"""Rewrites old names in the text of a source. All other text is unchanged, byte for byte."""

from typing import Dict, List, NamedTuple, Optional

import libcst as cst

from mp_compat.migration.source import parsed_source
from mp_compat.migration.source.parsed_source import Place
from mp_compat.migration.source.parsed_source import replacement

# Private attributes of TensorFlow's optimizers, and the equivalent public ones.
PUBLIC_EQUIVALENTS = {
  "_optimizer": "inner_optimizer",
  "_opt": "inner_optimizer",
  "_loss_scale": "loss_scale",
  "_loss_scale_manager": "loss_scale",
}
OPTIMIZERS = {
  "mp_compat.MixedPrecisionLossScaleOptimizer",
  "mp_compat.contrib.mixed_precision.LossScaleOptimizer",
  "mp_compat.enable_mixed_precision_graph_rewrite",
}


class Change(NamedTuple):
  """A rewritten name or import: `old`, at `place` in the old text, becomes `new`."""

  place: Place
  old: str
  new: str


class _Edit(NamedTuple):
  start: int
  end: int
  text: str


class Rewriter(cst.CSTVisitor):
  """Collects the edits of one source.

  Attributes:
    changes: A list of `Change`, in the order of the text.
  """

  def __init__(self, source: parsed_source.ParsedSource) -> None:
    super().__init__()
    self._source = source
    self._edits: List[_Edit] = []
    self._importer: Optional[cst.CSTNode] = None  # the import of the first name now written `mp_compat.`
    self._used = False
    self.changes: List[Change] = []
    source.module.visit(self)
    if self._used and not self._is_imported():
      self._insert_import()

  def code(self) -> bytes:
    """Returns the new text, in the encoding of the old text."""
    code = self._source.code
    for edit in sorted(self._edits, reverse=True):
      code = code[: edit.start] + edit.text.encode("utf-8") + code[edit.end :]
    return code.decode("utf-8").encode(self._source.module.encoding)

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
    new = new_name(self._source, node)
    if new is None or is_shadowed(self._source, node):
      return False
    self._replace(node, new)
    self._used = True
    root = _root(node)
    if self._importer is None and isinstance(root, cst.Name):
      self._importer = next(
        (
          binding.node
          for binding in self._source.bindings(root, root.value)
          if isinstance(getattr(binding, "node", None), (cst.Import, cst.ImportFrom))
        ),
        None,
      )
    return True

  # Imports.

  def visit_Import(self, node: cst.Import) -> bool:
    for alias in node.names:
      new = replacement(parsed_source.dotted(alias.name))
      if new and parsed_source.dotted(alias.name) != new:
        self._replace(alias.name, new if alias.asname else "tensorflow")
    return False

  def visit_ImportFrom(self, node: cst.ImportFrom) -> bool:
    module = parsed_source.dotted(node.module)
    if node.module is None or node.relative or module.startswith("mp_compat"):
      return False
    if isinstance(node.names, cst.ImportStar):
      new_module = replacement(module)
      if new_module:
        self._replace(node.module, new_module)
      return False
    new_names = {alias: replacement("{}.{}".format(module, parsed_source.dotted(alias.name))) for alias in node.names}
    renamed = {alias: new.rpartition(".") for alias, new in new_names.items() if new}
    parents = {parent for parent, _, _ in renamed.values()}
    if len(renamed) == len(new_names) and len(parents) == 1 and any(parents):
      self._replace(node.module, parents.pop())
      for alias, (_, _, leaf) in renamed.items():
        self._rename(alias, leaf)
    elif renamed:
      self._split(node, new_names)
    return False

  def _rename(self, alias: cst.ImportAlias, leaf: str) -> None:
    old = parsed_source.dotted(alias.name)
    if leaf != old:
      self._replace(alias.name, leaf if alias.asname else "{} as {}".format(leaf, old))

  def _split(self, node: cst.ImportFrom, new_names: Dict[cst.ImportAlias, Optional[str]]) -> None:
    """Moves this package's names to separate import statements, before the remaining names."""
    statements = []
    for alias, new in new_names.items():
      if new:
        parent, _, leaf = new.rpartition(".")
        local = parsed_source.bound_as(alias) or parsed_source.dotted(alias.name)
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
      self._edits.append(_Edit(start, end, separator.join(statements)))
      return
    self._edits.append(_Edit(start, start, "".join(statement + separator for statement in statements)))
    elements = list(new_names)
    last = elements.index(kept[-1])
    for alias, following in zip(elements[:last], elements[1:]):
      if new_names[alias]:
        self._edits.append(_Edit(self._source.start(alias), self._source.start(following), ""))
    if last + 1 < len(elements):
      self._edits.append(_Edit(self._source.end(kept[-1]), self._source.end(elements[-1]), ""))

  def _is_imported(self) -> bool:
    return any(
      isinstance(part, cst.Import) and "mp_compat" in parsed_source.imported(part)
      for part in top_level(self._source.module)
    )

  def _insert_import(self) -> None:
    """Inserts `import mp_compat` before the import that it replaces, if at the top level; else before all imports."""
    body = list(self._source.module.body)
    while body and _comes_first(body[0]):
      body.pop(0)
    importers = [line for line in body if isinstance(line, cst.SimpleStatementLine) and self._importer in line.body]
    imports = [
      line
      for line in body
      if isinstance(line, cst.SimpleStatementLine) and isinstance(line.body[0], (cst.Import, cst.ImportFrom))
    ]
    start = self._source.start((importers + imports + body)[0])
    newline = self._source.module.default_newline
    self._edits.append(_Edit(start, start, "import mp_compat" + (newline if importers + imports else 3 * newline)))


def top_level(module: cst.Module) -> List[cst.BaseSmallStatement]:
  """Returns the simple statements at the top level of a module."""
  return [part for line in module.body if isinstance(line, cst.SimpleStatementLine) for part in line.body]


def _comes_first(statement: cst.CSTNode) -> bool:
  """Returns whether a statement is a docstring or an import from __future__."""
  first = statement.body[0] if isinstance(statement, cst.SimpleStatementLine) else None
  if isinstance(first, cst.ImportFrom):
    return parsed_source.dotted(first.module) == "__future__"
  return isinstance(first, cst.Expr) and isinstance(first.value, (cst.SimpleString, cst.ConcatenatedString))


def new_name(source: parsed_source.ParsedSource, node: cst.BaseExpression) -> Optional[str]:
  """Returns the full name of this package that replaces an expression; None if the expression stays."""
  new_names = source.replacements(node)
  if len(new_names) != 1 or source.full_names(node) <= new_names or new_names == {source.text(node)}:
    return None
  (new,) = new_names
  root = _root(node)
  if (
    isinstance(node, cst.Attribute)
    and isinstance(root, cst.Name)
    and new in {new + source.text(node)[len(root.value) :] for new in source.replacements(root)}
  ):
    return None  # Rewriting the import of the root is enough.
  return new


def _root(node: cst.BaseExpression) -> cst.BaseExpression:
  """Returns the first node of a chain of attributes; for `getattr(chain, name)`, that of the chain."""
  if isinstance(node, cst.Call) and node.args:
    node = node.args[0].value
  while isinstance(node, cst.Attribute):
    node = node.value
  return node


def is_shadowed(source: parsed_source.ParsedSource, node: cst.CSTNode) -> bool:
  """Returns whether the name `mp_compat` may not be this package at `node`."""
  return any(
    not isinstance(binding.node, cst.Import) or set(parsed_source.imported(binding.node)["mp_compat"]) != {"mp_compat"}
    for binding in source.bindings(node, "mp_compat")
  )


def has_public_equivalent(source: parsed_source.ParsedSource, node: cst.Attribute) -> bool:
  """Returns whether `node` reads a private attribute with a public equivalent, of a known loss scaling optimizer."""
  is_read = not isinstance(source.parents[node], (cst.AssignTarget, cst.AugAssign, cst.AnnAssign, cst.Del))
  callables = source.callables_producing(node.value)
  return node.attr.value in PUBLIC_EQUIVALENTS and is_read and bool(callables) and callables <= OPTIMIZERS
