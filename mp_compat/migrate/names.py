"""What the expressions of a source stand for, as far as its text tells."""

import re
from typing import Any, Dict, Iterable, List, NamedTuple, Optional, Set

import libcst as cst
from libcst import metadata

from mp_compat import old_names

# `tf` is TensorFlow wherever a program keeps it: `from project.env import tf`, `self.tf`.
_TENSORFLOW = re.compile(
    r"(?:.*\.)?(?:tf|tf1|tf_v1|tensorflow|tensorflow_core)(?:\._api\.v[12])?(?:\.compat\.v[12])*\.(.+)")


class Place(NamedTuple):
  """Where something is, all from 1: the line, the column in characters, and in a notebook the cell (else 0)."""

  cell: int
  line: int
  column: int


def meaning(name: str) -> Optional[str]:
  """What a full name of TensorFlow's is called here; a name of ours is itself; None for all others."""
  if name.startswith("mp_compat."):
    return name
  found = _TENSORFLOW.fullmatch(name)
  rest = found and found.group(1)
  return old_names.OLD_NAMES.get("tensorflow.{}".format(rest)) or old_names.OLD_NAMES.get(
      "tensorflow.compat.v1.{}".format(rest))


class Names:
  """A parsed source, and what its names stand for.

  Attributes:
    module: the tree; all nodes that are asked about belong to it.
    code: the text, in UTF-8; offsets are in bytes of it.
  """

  def __init__(self, source: bytes) -> None:
    """Parses. Raises `libcst.ParserSyntaxError`, SyntaxError (an unknown encoding), or UnicodeDecodeError."""
    wrapper = metadata.MetadataWrapper(cst.parse_module(source))
    self.module = wrapper.module
    self.code = self.module.code.encode("utf-8")
    self._scopes = wrapper.resolve(metadata.ScopeProvider)
    self._spans = wrapper.resolve(metadata.ByteSpanPositionProvider)
    self.parents = wrapper.resolve(metadata.ParentNodeProvider)

  def start(self, node: cst.CSTNode) -> int:
    return self._spans[node].start

  def end(self, node: cst.CSTNode) -> int:
    return self._spans[node].start + self._spans[node].length

  def text(self, node: cst.CSTNode) -> str:
    return self.code[self.start(node):self.end(node)].decode("utf-8")

  def place(self, node: cst.CSTNode) -> Place:
    before = self.code[:self.start(node)].decode("utf-8")
    return Place(0, before.count("\n") + 1, len(before) - before.rfind("\n"))

  def full(self, node: cst.CSTNode) -> Set[str]:
    """The full names that an expression may stand for: those of modules and of what is in them."""
    return self._full(node, set())

  def _full(self, node: cst.CSTNode, seen: Set[cst.CSTNode]) -> Set[str]:
    if node in seen:
      return set()
    seen = seen | {node}
    if isinstance(node, cst.Attribute):
      return {"{}.{}".format(name, node.attr.value) for name in self._full(node.value, seen)}
    if isinstance(node, cst.IfExp):
      return self._full(node.body, seen) | self._full(node.orelse, seen)
    if isinstance(node, cst.Call):
      return self._looked_up(node, seen)
    if isinstance(node, cst.Name):
      return {name for binding in self.bindings(node, node.value) for name in self._bound(binding, node.value, seen)}
    return set()

  def _looked_up(self, call: cst.Call, seen: Set[cst.CSTNode]) -> Set[str]:
    """`getattr(module, "name")` and `importlib.import_module("module")`."""
    literals = [literal(argument.value) for argument in call.args]
    if len(literals) >= 2 and literals[1] and isinstance(call.func, cst.Name) and call.func.value == "getattr":
      return {"{}.{}".format(name, literals[1]) for name in self._full(call.args[0].value, seen)}
    if literals and literals[0] and self._full(call.func, seen) & {"importlib.import_module", "__import__"}:
      return {literals[0]}
    return set()

  def bindings(self, node: cst.CSTNode, name: str) -> List[Any]:
    """The assignments (LibCST's, imports too) that a name, used where a node is, may get its value from."""
    scope = self._scopes.get(node)
    return list(scope[name]) if scope else []

  def _bound(self, binding: Any, name: str, seen: Set[cst.CSTNode]) -> Set[str]:
    node = getattr(binding, "node", None)
    if isinstance(node, (cst.Import, cst.ImportFrom)):
      return set(imported(node).get(name, ()))
    value = self._value(node)
    return value is not None and self._full(value, seen) or {name}

  def _value(self, target: cst.CSTNode) -> Optional[cst.BaseExpression]:
    """The right side of `target = value`."""
    parent = self.parents.get(target)
    if isinstance(parent, cst.AnnAssign) and parent.target is target:
      return parent.value
    return self.parents[parent].value if isinstance(parent, cst.AssignTarget) else None

  def meanings(self, node: cst.CSTNode) -> Set[str]:
    """The names of this package that an expression stands for, or should."""
    return {here for here in map(meaning, self.full(node)) if here}

  def producer(self, node: cst.CSTNode) -> Optional[cst.Call]:
    """The call that an expression's value came from: itself, or the last one that was assigned to the name before."""
    if isinstance(node, cst.Call):
      return node
    if not isinstance(node, cst.Name):
      return None
    before = [binding.node for binding in self.bindings(node, node.value)
              if isinstance(getattr(binding, "node", None), cst.Name) and self.start(binding.node) < self.start(node)]
    value = self._value(max(before, key=self.start)) if before else None
    return None if value is None else self.producer(value)

  def made_by(self, node: cst.CSTNode) -> Set[str]:
    """The full names, or rather their meanings, of what made an expression's value."""
    call = self.producer(node)
    return set() if call is None else {meaning(name) or name for name in self.full(call.func)}

  def enclosing(self, node: cst.CSTNode, *kinds: type) -> Optional[cst.CSTNode]:
    """The innermost node of some kinds around a node."""
    while node is not None and not isinstance(node, kinds):
      node = self.parents.get(node)
    return node


def dotted(node: Optional[cst.CSTNode]) -> str:
  """`a.b.c`, of the nodes that the module of an import consists of."""
  if isinstance(node, cst.Attribute):
    return "{}.{}".format(dotted(node.value), node.attr.value)
  return node.value if isinstance(node, cst.Name) else ""


def aliases(node: cst.CSTNode) -> Iterable[cst.ImportAlias]:
  """The names in an import statement; of `*`, none."""
  return () if isinstance(node.names, cst.ImportStar) else node.names


def bound_as(alias: cst.ImportAlias) -> Optional[str]:
  """What follows `as`."""
  return alias.asname and dotted(alias.asname.name)


def imported(node: cst.CSTNode) -> Dict[str, List[str]]:
  """What an import statement binds, and to which full names."""
  found: Dict[str, List[str]] = {}
  for alias in aliases(node):
    name = dotted(alias.name)
    if isinstance(node, cst.ImportFrom):
      full, local = "{}.{}".format(dotted(node.module), name), name
    else:
      full = name if alias.asname else name.partition(".")[0]
      local = full
    found.setdefault(bound_as(alias) or local, []).append(full)
  return found


def literal(node: cst.CSTNode) -> Optional[str]:
  """The value of a plain string."""
  value = node.evaluated_value if isinstance(node, cst.SimpleString) else None
  return value if isinstance(value, str) else None
