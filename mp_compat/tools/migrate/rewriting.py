# SPDX-License-Identifier: Apache-2.0
"""Rewrites what is certainly an old name. All other text stays, byte for byte."""

import collections
from typing import Dict, List, NamedTuple, Tuple

import libcst as cst

from mp_compat.tools.migrate import names
from mp_compat.tools.migrate.names import ParsedSource
from mp_compat.tools.migrate.names import Place

# A part of a text in UTF-8, from one offset in bytes to another, and the text that
# replaces it.
Edit = Tuple[int, int, str]


class Change(NamedTuple):
  """A rewritten name or import: `old`, at `place` in the old text, becomes `new`."""

  place: Place
  old: str
  new: str


def new_texts(source: ParsedSource) -> Dict[cst.CSTNode, str]:
  """Returns the new texts of those expressions and import statements that are certainly
  old names.
  """
  imports = [
    node for node in source.find(cst.ImportFrom) if "#" not in source.text(node)
  ]
  texts: Dict[cst.CSTNode, str] = {node: new_import(source, node) for node in imports}
  if not source.is_taken:
    texts.update((node, source.new_name(node)) for node in source.expressions)
  return {node: text for node, text in texts.items() if text}


def new_import(source: ParsedSource, node: cst.CSTNode) -> str:
  """Returns the statements that replace a `from` import with old names; "" for other
  nodes.
  """
  # by module, what to import from it
  imports: Dict[str, List[str]] = collections.defaultdict(list)
  module = names.module_of(node)
  for old, local in names.imported(node):
    new = names.replacement("{}.{}".format(module, old))
    parent, _, leaf = new.rpartition(".") if new else (module, "", old)
    imports[parent].append(leaf if leaf == local else "{} as {}".format(leaf, local))
  statements = [
    "from {} import {}".format(parent, ", ".join(found))
    for parent, found in imports.items()
  ]
  new_line = source.module.default_newline + source.text_before(node)
  separator = new_line if source.begins_line(node) else "; "
  return separator.join(statements) if set(imports) - {module} else ""


def make_edits(source: ParsedSource, texts: Dict[cst.CSTNode, str]) -> List[Edit]:
  """Returns the edits that make `new_texts`, and import `mp_compat` where they use it;
  in the order of the text.
  """
  edits = [(source.start(node), source.end(node), text) for node, text in texts.items()]
  uses = [source.start(node) for node in texts if isinstance(node, cst.Attribute)]
  return sorted(edits + (_import_before(source, min(uses)) if uses else []))


def _import_before(source: ParsedSource, first_use: int) -> List[Edit]:
  """Inserts `import mp_compat` before all other imports and uses, unless the module
  imports it before its uses.
  """
  statements: List[cst.CSTNode] = []
  for line in source.module.body:
    statements += line.body if isinstance(line, cst.SimpleStatementLine) else [line]
  statements = [node for node in statements if source.start(node) <= first_use]
  if any(
    isinstance(node, cst.Import) and ("mp_compat", "mp_compat") in names.imported(node)
    for node in statements
  ):
    return []
  imports = [
    node for node in statements if isinstance(node, (cst.Import, cst.ImportFrom))
  ]
  following = [
    *(node for node in imports if names.module_of(node) != "__future__"),
    statements[-1],
  ][0]
  gap = source.module.default_newline if source.begins_line(following) else "; "
  return [(source.start(following), source.start(following), "import mp_compat" + gap)]
