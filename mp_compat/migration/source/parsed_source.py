# SPDX-License-Identifier: Apache-2.0
"""Resolves expressions of a source to full names, by static analysis."""

import re
from typing import Any, Dict, Iterable, Iterator, List, NamedTuple, Optional, Set, Type, TypeVar, Union

import libcst as cst
from libcst import matchers
from libcst import metadata

from mp_compat.migration import old_names

# Anything named `tf` counts as TensorFlow: `from project.env import tf`, `self.tf`.
_TENSORFLOW = re.compile(
  r"(?:.*\.)?(?:tf|tf1|tf_v1|tensorflow|tensorflow_core)(?:\._api\.v[12])?(?:\.compat\.v[12])*\.(.+)"
)

Import = Union[cst.Import, cst.ImportFrom]

_Node = TypeVar("_Node", bound=cst.CSTNode)


class Place(NamedTuple):
  """A position in a file, all counted from 1: line, column in characters, and cell of a notebook (else 0)."""

  cell: int
  line: int
  column: int


def replacement(name: str) -> Optional[str]:
  """Returns this package's name for a full name of TensorFlow's; None for other names.

  A name of this package is returned unchanged.
  """
  if name.startswith("mp_compat."):
    return name
  match = _TENSORFLOW.fullmatch(name)
  rest = match and match.group(1)
  return old_names.OLD_NAMES.get("tensorflow.{}".format(rest)) or old_names.OLD_NAMES.get(
    "tensorflow.compat.v1.{}".format(rest)
  )


class ParsedSource:
  """A parsed source, and the full names of its expressions.

  Attributes:
    module: The syntax tree; all methods take nodes of it.
    code: The text in UTF-8; offsets are in bytes.
    parents: The parent of each node.
  """

  def __init__(self, source: bytes) -> None:
    """Parses a source.

    Raises:
      libcst.ParserSyntaxError: If it is not Python 3.
      SyntaxError: If its declared encoding is unknown.
      UnicodeDecodeError: If it is not in the declared encoding.
    """
    wrapper = metadata.MetadataWrapper(cst.parse_module(source))
    self.module = wrapper.module
    self.code = self.module.code.encode("utf-8")
    self._scopes = wrapper.resolve(metadata.ScopeProvider)
    self._spans = wrapper.resolve(metadata.ByteSpanPositionProvider)
    self.parents = wrapper.resolve(metadata.ParentNodeProvider)
    self._calls_producing: Dict[cst.CSTNode, Set[cst.Call]] = {}
    self._attributes = [
      assigned.target
      for assigned in matchers.findall(self.module, matchers.AssignTarget(target=matchers.Attribute()))
      if isinstance(assigned, cst.AssignTarget)
    ]

  def start(self, node: cst.CSTNode) -> int:
    return self._spans[node].start

  def end(self, node: cst.CSTNode) -> int:
    return self._spans[node].start + self._spans[node].length

  def text(self, node: cst.CSTNode) -> str:
    return self.code[self.start(node) : self.end(node)].decode("utf-8")

  def place(self, node: cst.CSTNode) -> Place:
    before = self.code[: self.start(node)].decode("utf-8")
    return Place(0, before.count("\n") + 1, len(before) - before.rfind("\n"))

  def full_names(self, node: cst.CSTNode) -> Set[str]:
    """Returns the full names, of modules and of their members, that an expression may refer to."""
    return self._full_names(node, set())

  def _full_names(self, node: cst.CSTNode, seen: Set[cst.CSTNode]) -> Set[str]:
    if node in seen:
      return set()
    seen = seen | {node}
    if isinstance(node, cst.Attribute):
      return {"{}.{}".format(name, node.attr.value) for name in self._full_names(node.value, seen)}
    if isinstance(node, cst.IfExp):
      return self._full_names(node.body, seen) | self._full_names(node.orelse, seen)
    if isinstance(node, cst.Call):
      return self._lookup_names(node, seen)
    if isinstance(node, cst.Name):
      return {
        name for binding in self.bindings(node, node.value) for name in self._binding_names(binding, node.value, seen)
      }
    return set()

  def _lookup_names(self, call: cst.Call, seen: Set[cst.CSTNode]) -> Set[str]:
    """Resolves `getattr(module, "name")` and `importlib.import_module("module")`."""
    literals = [literal(argument.value) for argument in call.args]
    if len(literals) >= 2 and literals[1] and isinstance(call.func, cst.Name) and call.func.value == "getattr":
      return {"{}.{}".format(name, literals[1]) for name in self._full_names(call.args[0].value, seen)}
    if literals and literals[0] and self._full_names(call.func, seen) & {"importlib.import_module", "__import__"}:
      return {literals[0]}
    return set()

  def bindings(self, node: cst.CSTNode, name: str) -> List[Any]:
    """Returns LibCST's assignments, imports included, that may bind a name used at `node`."""
    scope = self._scopes.get(node)
    return list(scope[name]) if scope else []

  def _binding_names(self, binding: Any, name: str, seen: Set[cst.CSTNode]) -> Set[str]:
    node: Any = getattr(binding, "node", None)
    if isinstance(node, (cst.Import, cst.ImportFrom)):
      return set(imported(node).get(name, ()))
    value = self._assigned_value(node)
    return value is not None and self._full_names(value, seen) or {name}

  def _assigned_value(self, target: cst.CSTNode) -> Optional[cst.BaseExpression]:
    """Returns the right side of `target = value`."""
    parent = self.parents.get(target)
    if isinstance(parent, cst.AnnAssign) and parent.target is target:
      return parent.value
    statement = self.parents[parent] if isinstance(parent, cst.AssignTarget) else None
    return statement.value if isinstance(statement, cst.Assign) else None

  def replacements(self, node: cst.CSTNode) -> Set[str]:
    """Returns the names of this package that an expression refers to, or will after rewriting."""
    return {new for new in map(replacement, self.full_names(node)) if new}

  def calls_producing(self, node: cst.CSTNode) -> Set[cst.Call]:
    """Returns the calls that may have made an expression's value: the expression, or calls assigned to its name.

    The last assignment before the use counts. If it is in a branch, assignments before the branch count, too.
    """
    if isinstance(node, cst.Call):
      return {node}
    if node not in self._calls_producing:
      sources: Iterable[Optional[cst.BaseExpression]] = ()
      if isinstance(node, cst.IfExp):
        sources = (node.body, node.orelse)
      elif isinstance(node, (cst.Name, cst.Attribute)):
        # Each is before the node, so the recursion ends.
        sources = map(self._assigned_value, self._reaching_assignments(node))
      self._calls_producing[node] = {
        call for source in sources if source is not None for call in self.calls_producing(source)
      }
    return self._calls_producing[node]

  def _assignment_targets(self, use: cst.BaseExpression) -> List[cst.BaseExpression]:
    """Returns the targets of all assignments to a name; for `self.name`, of those in the same function."""
    if isinstance(use, cst.Name):
      return [
        binding.node
        for binding in self.bindings(use, use.value)
        if isinstance(getattr(binding, "node", None), cst.Name)
      ]
    function = self.enclosing(use, cst.FunctionDef)
    return [
      target
      for target in self._attributes
      if self.text(target) == self.text(use) and self.enclosing(target, cst.FunctionDef) is function
    ]

  def _reaching_assignments(self, use: cst.BaseExpression) -> Iterator[cst.BaseExpression]:
    """Yields the targets of the assignments that may reach a use of a name, the last first."""
    enclosing = set(self._ancestors(use))
    other_branches = {branch.body for branch in enclosing if isinstance(branch, cst.If) and branch.orelse in enclosing}
    for target in sorted(self._assignment_targets(use), key=self.start, reverse=True):
      blocks = [node for node in self._ancestors(target) if isinstance(node, (cst.BaseSuite, cst.Module))]
      if self._effective_from(target) <= self.start(use) and other_branches.isdisjoint(blocks):
        yield target
        if next(block for block in blocks if not isinstance(self.parents.get(block), (cst.With, cst.Try))) in enclosing:
          return

  def _effective_from(self, target: cst.BaseExpression) -> int:
    """Returns the offset where an assignment takes effect: after its statement, or at the head of a loop or `with`."""
    statement = self.enclosing(target, cst.BaseSmallStatement)  # type: ignore[type-abstract]  # for isinstance only
    return self.end(statement or target)

  def _ancestors(self, node: Optional[cst.CSTNode]) -> Iterator[cst.CSTNode]:
    while node is not None:
      yield node
      node = self.parents.get(node)

  def calls_nested_in(self, node: cst.CSTNode) -> Set[cst.Call]:
    """Returns the calls that made an expression's value, the calls that made their arguments, and so on."""
    calls: Set[cst.Call] = set()
    pending = set(self.calls_producing(node))
    while pending:
      call = pending.pop()
      calls.add(call)
      pending |= {inner for argument in call.args for inner in self.calls_producing(argument.value)} - calls
    return calls

  def callables_producing(self, node: cst.CSTNode) -> Set[str]:
    """Returns the callables that may have made the value of an expression: replacements, else names, else texts."""
    return {
      replacement(name) or name
      for call in self.calls_producing(node)
      for name in self.full_names(call.func) or {self.text(call.func)}
    }

  def enclosing(self, node: cst.CSTNode, *kinds: Type[_Node]) -> Optional[_Node]:
    """Returns the innermost node of the given kinds that is or contains `node`; None if there is none."""
    return next((ancestor for ancestor in self._ancestors(node) if isinstance(ancestor, kinds)), None)


def dotted(node: Optional[cst.CSTNode]) -> str:
  """Returns the dotted name, such as `a.b.c`, of a Name or Attribute node; "" for other nodes."""
  if isinstance(node, cst.Attribute):
    return "{}.{}".format(dotted(node.value), node.attr.value)
  return node.value if isinstance(node, cst.Name) else ""


def aliases(node: Import) -> Iterable[cst.ImportAlias]:
  """Returns the names in an import statement; () for `*`."""
  return () if isinstance(node.names, cst.ImportStar) else node.names


def bound_as(alias: cst.ImportAlias) -> Optional[str]:
  """Returns the name that follows `as`; None without `as`."""
  return dotted(alias.asname.name) if alias.asname else None


def imported(node: Import) -> Dict[str, List[str]]:
  """Returns the names that an import statement binds, each with its full names."""
  full_names: Dict[str, List[str]] = {}
  for alias in aliases(node):
    name = dotted(alias.name)
    if isinstance(node, cst.ImportFrom):
      full, local = "{}.{}".format(dotted(node.module), name), name
    else:
      full = name if alias.asname else name.partition(".")[0]
      local = full
    full_names.setdefault(bound_as(alias) or local, []).append(full)
  return full_names


def literal(node: cst.CSTNode) -> Optional[str]:
  """Returns the value of a string literal; None for bytes, f-strings and other nodes."""
  value = node.evaluated_value if isinstance(node, (cst.SimpleString, cst.ConcatenatedString)) else None
  return value if isinstance(value, str) else None
