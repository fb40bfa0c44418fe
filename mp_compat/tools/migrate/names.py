# SPDX-License-Identifier: Apache-2.0
"""Parses a source, and answers which of its expressions are old names, and where they
are.
"""

import re
from typing import (
  Any,
  Collection,
  List,
  Mapping,
  NamedTuple,
  Optional,
  Set,
  Tuple,
  Type,
  TypeVar,
  Union,
)

import libcst as cst
from libcst import helpers
from libcst import matchers as m
from libcst import metadata

from mp_compat.migration import old_names

_TENSORFLOW = re.compile(
  r"tensorflow(?:_core)?(?:\._api\.v[12])?(?:\.compat\.v[12])*\.(.+)"
)
_LIKE_TENSORFLOW = re.compile(
  r"(?:.*\.)?(?:tf|tf1|tf_v1|tensorflow|tensorflow_core)(?:\.compat\.v[12])*\.(.+)"
)

Expression = Union[cst.Name, cst.Attribute]
_Node = TypeVar("_Node", bound=cst.CSTNode)
_REBINDING = (cst.Del, cst.Nonlocal, cst.MatchAs, cst.MatchStar, cst.MatchMapping)


def _below_tensorflow(name: str, pattern: "re.Pattern[str]" = _TENSORFLOW) -> str:
  match = pattern.fullmatch(name)
  return match.group(1) if match else ""


_NEW_NAMES = {_below_tensorflow(old): new for old, new in old_names.OLD_NAMES.items()}
# TensorFlow's current Keras class, which is not an old name, and what can replace it.
KERAS = "mp_compat.keras.LossScaleOptimizer"
_LOOKALIKES = dict(_NEW_NAMES, **{"keras.mixed_precision.LossScaleOptimizer": KERAS})
MODULES = {
  old.rpartition(".")[0]: new.rpartition(".")[0] for old, new in _NEW_NAMES.items()
}
# The last parts of old names that no other class or function is likely to have as its
# name.
DISTINCTIVE = {old.rpartition(".")[2]: new for old, new in _NEW_NAMES.items()}
del DISTINCTIVE["LossScaleOptimizer"], DISTINCTIVE["get"]


def dotted(node: Optional[cst.CSTNode]) -> str:
  """Returns the dotted name, such as `a.b.c`, of a Name or of attributes of a Name; ""
  for other nodes.
  """
  if isinstance(node, cst.Attribute):
    base = dotted(node.value)
    return base and "{}.{}".format(base, node.attr.value)
  return node.value if isinstance(node, cst.Name) else ""


def imported(node: cst.CSTNode) -> List[Tuple[str, str]]:
  """Returns what an import statement imports, each with the name that it binds; [] for
  `*` and other nodes.
  """
  if not isinstance(node, (cst.Import, cst.ImportFrom)) or isinstance(
    node.names, cst.ImportStar
  ):
    return []
  return [
    (alias.evaluated_name, alias.evaluated_alias or alias.evaluated_name)
    for alias in node.names
  ]


def module_of(node: cst.CSTNode) -> str:
  """Returns the module that a `from` import names; "" for relative ones and other
  nodes.
  """
  module = (
    helpers.get_absolute_module_for_import(None, node)
    if isinstance(node, cst.ImportFrom)
    else None
  )
  return module or ""


def replacement(name: str) -> str:
  """Returns this package's name for a full name of TensorFlow's; "" for other names."""
  return _NEW_NAMES.get(_below_tensorflow(name), "")


def module_replacement(name: str) -> str:
  """Returns this package's module for the full name of a module with old names; "" for
  other modules.
  """
  return MODULES.get(_below_tensorflow(name), "")


def contains_old_names(module: str) -> bool:
  """Returns whether old names are in the module with this full name, or in modules
  below it.
  """
  path = _below_tensorflow(module)
  return bool(path) and any(name.startswith(path + ".") for name in _NEW_NAMES)


class Place(NamedTuple):
  """A position in a file, all counted from 1: line, column in characters, and cell of a
  notebook (else 0).
  """

  cell: int
  line: int
  column: int


class ParsedSource:
  """A parsed source.

  Attributes:
    module: The syntax tree; all methods take nodes of it.
    code: The text in UTF-8; offsets are in bytes.
    parents: The parent of each node.
    expressions: The names and chains of attributes, without those of import statements.
    is_taken: Whether `mp_compat` may be something else than this package.
  """

  def __init__(self, source: Union[str, bytes], unclear: Collection[str] = ()) -> None:
    """Parses a source; `unclear` are names that other code may bind.

    Raises:
      libcst.ParserSyntaxError: If it is not Python 3.
      SyntaxError: If its declared encoding is unknown.
      UnicodeDecodeError: If it is not in the declared encoding.
      ValueError: If LibCST would change it, and offsets would be wrong.
    """
    wrapper = metadata.MetadataWrapper(cst.parse_module(source))
    self.module = wrapper.module
    if self.module.bytes != (
      source.encode("utf-8") if isinstance(source, str) else source
    ):
      raise ValueError(
        "LibCST would drop characters of it; remove form feeds before code, and end "
        "all lines with \\n"
      )
    self.code = self.module.code.encode("utf-8")
    self.parents = wrapper.resolve(metadata.ParentNodeProvider)
    self._scopes: Mapping[cst.CSTNode, Any] = wrapper.resolve(metadata.ScopeProvider)
    self._contexts = wrapper.resolve(metadata.ExpressionContextProvider)
    self._spans = wrapper.resolve(metadata.ByteSpanPositionProvider)
    expressions: List[Expression] = [*self.find(cst.Name), *self.find(cst.Attribute)]
    self.expressions = [node for node in expressions if node in self._scopes]
    self._unclear = self._rebound() | set(unclear)
    self._stars = [
      self.start(node)
      for node in self.find(cst.ImportFrom)
      if isinstance(node.names, cst.ImportStar)
    ]
    self._runs_text = self._may_bind_any()
    self._assigned = self._assigned_attributes()
    scopes = set(filter(None, self._scopes.values()))
    bindings = [
      binding for scope in scopes for binding in scope.assignments["mp_compat"]
    ]
    self.is_taken = "mp_compat" in self._unclear or any(
      not isinstance(binding.scope, metadata.GlobalScope)
      or _names_by(binding, "mp_compat") != {"mp_compat"}
      for binding in bindings
    )

  def _may_bind_any(self) -> bool:
    """Returns whether the source calls what may bind any name."""
    uses_text = any(
      dotted(node) in ("exec", "globals", "locals") for node in self.expressions
    )
    return uses_text or any(
      dotted(call.func) == "vars" and not call.args for call in self.find(cst.Call)
    )

  def _rebound(self) -> Set[str]:
    """Returns names that are deleted, or bound where LibCST sees no binding or puts it
    into another scope.
    """
    nodes: List[cst.CSTNode] = [node.target for node in self.find(cst.NamedExpr)]
    nodes += [node for kind in _REBINDING for node in self.find(kind)]
    return {dotted(name) for node in nodes for name in m.findall(node, m.Name())}

  def _assigned_attributes(self) -> Set[str]:
    """Returns the attributes of TensorFlow's modules that the source assigns or
    deletes.
    """
    written = [node for node in self.find(cst.Attribute) if not self.is_read(node)]
    return {
      node.attr.value
      for node in written
      if any(
        _below_tensorflow(name, _LIKE_TENSORFLOW) for name in self.full_names(node)
      )
    }

  def find(self, kind: Type[_Node]) -> List[_Node]:
    """Returns all nodes of a kind."""
    return [node for node in self.parents if isinstance(node, kind)]

  def start(self, node: cst.CSTNode) -> int:
    decorators = (
      node.decorators if isinstance(node, (cst.ClassDef, cst.FunctionDef)) else ()
    )
    return self._spans[decorators[0] if decorators else node].start

  def end(self, node: cst.CSTNode) -> int:
    return self._spans[node].start + self._spans[node].length

  def text(self, node: cst.CSTNode) -> str:
    return self.code[self.start(node) : self.end(node)].decode("utf-8")

  def text_before(self, node: cst.CSTNode) -> str:
    """Returns the text between the start of the line and a node."""
    start = self.start(node)
    return self.code[self.code.rfind(b"\n", 0, start) + 1 : start].decode("utf-8")

  def begins_line(self, node: cst.CSTNode) -> bool:
    """Returns whether no other statement precedes a node in its line, which a backslash
    may continue.
    """
    before = self.code[: self.start(node)].rstrip(b" \t")
    return not before or (
      before.endswith(b"\n") and not before.endswith((b"\\\n", b"\\\r\n"))
    )

  def place(self, node: cst.CSTNode) -> Place:
    return Place(
      0,
      self.code.count(b"\n", 0, self.start(node)) + 1,
      len(self.text_before(node)) + 1,
    )

  def enclosing(self, node: cst.CSTNode, kind: Type[_Node]) -> Optional[_Node]:
    """Returns the innermost node of a kind around `node`; None if there is none."""
    parent = self.parents.get(node)
    return (
      parent
      if parent is None or isinstance(parent, kind)
      else self.enclosing(parent, kind)
    )

  def is_read(self, node: cst.CSTNode) -> bool:
    return self._contexts.get(node) is metadata.ExpressionContext.LOAD

  def full_names(self, node: cst.CSTNode) -> Set[str]:
    """Returns the full names that imports give a dotted name; "?.name" where something
    else, or nothing, binds it.
    """
    name, scope = dotted(node), self._scopes.get(node)
    bindings = scope[name.partition(".")[0]] if name and scope else ()
    found = {full for binding in bindings for full in _names_by(binding, name)}
    return found or {
      "?." + (node.attr.value if isinstance(node, cst.Attribute) and not name else name)
    }

  def new_name(self, node: cst.CSTNode) -> str:
    """Returns the name of this package that replaces a chain of attributes; "" if it is
    not certainly an old name.

    It certainly is if all bindings of its first part, in the whole scope and in any
    order, are imports that agree.
    """
    new_names = (
      {replacement(name) for name in self.full_names(node)}
      if isinstance(node, cst.Attribute)
      else {""}
    )
    return (
      new_names.pop()
      if len(new_names) == 1 and "" not in new_names and self._is_certain(node)
      else ""
    )

  def _is_certain(self, node: cst.CSTNode) -> bool:
    """Returns whether nothing else than the imports of `full_names` can bind the first
    name or its attributes.
    """
    first, *attributes = dotted(node).split(".")
    bindings = [
      (binding.node, type(binding.scope)) for binding in self._scopes[node][first]
    ]
    scopes = {scope for _, scope in bindings}
    # After the last star import, the module imports the name on every path, before
    # `node`.
    survives_stars = not self._stars or any(
      max(self._stars) < self.start(found) < self.start(node)
      and self.parents[self.parents[found]] is self.module
      for found, _ in bindings
    )
    formatted = self.enclosing(node, cst.FormattedStringExpression)
    return (
      self.is_read(node)
      and not (formatted and formatted.equal)  # f"{name=}" prints the name.
      and "#" not in self.text(node)
      and first not in self._unclear
      and not self._assigned.intersection(attributes)
      and metadata.ClassScope
      not in scopes  # A class body finds a name that it has not bound yet outside.
      and (metadata.GlobalScope not in scopes or survives_stars and not self._runs_text)
    )

  def meanings(self, node: cst.CSTNode) -> Set[str]:
    """Returns the names of this package that an expression is, will be after rewriting,
    or looks like.
    """
    full_names = self.full_names(node)
    found = {name for name in full_names if name.startswith("mp_compat.")}
    found |= {
      _LOOKALIKES.get(_below_tensorflow(name, _LIKE_TENSORFLOW), "")
      for name in full_names
    } - {""}
    if not found and isinstance(node, cst.Attribute) and node.attr.value in DISTINCTIVE:
      found = {DISTINCTIVE[node.attr.value]}
    return found


def _names_by(binding: metadata.BaseAssignment, name: str) -> Set[str]:
  is_import = isinstance(binding, metadata.ImportAssignment)
  return (
    {full.name for full in binding.get_qualified_names_for(name)}
    if is_import
    else {"?." + name}
  )
