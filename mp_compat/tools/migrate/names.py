# SPDX-License-Identifier: Apache-2.0
r"""Parses a source, and answers which of its expressions are old names, and where they
are.

    >>> from mp_compat.tools.migrate import names
    >>> source = names.ParsedSource(
    ...   "import tensorflow as tf\nscale = tf.train.experimental.FixedLossScale(8)\n"
    ... )
    >>> for node in source.expressions:
    ...   if source.new_name(node):
    ...     print(source.place(node))
    ...     print(source.text(node), source.new_name(node), sep="\n")
    Place(cell=0, line=2, column=9)
    tf.train.experimental.FixedLossScale
    mp_compat.FixedLossScale

An old name is replaced only if this is certain (`ParsedSource.new_name`). Other
expressions that may be one, or look like one, have `ParsedSource.meanings`.
"""

import re
from typing import (
  Any,
  Collection,
  Dict,
  List,
  Mapping,
  NamedTuple,
  Optional,
  Set,
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

_UNKNOWN = "?."  # in a full name: what binds its first part is no import

Expression = Union[cst.Name, cst.Attribute]
_Node = TypeVar("_Node", bound=cst.CSTNode)
# Nodes that bind or delete names without an assignment in LibCST's scopes.
_REBINDING = (cst.Del, cst.Nonlocal, cst.MatchAs, cst.MatchStar, cst.MatchMapping)


def _below_tensorflow(name: str, pattern: "re.Pattern[str]" = _TENSORFLOW) -> str:
  """Returns the part of a full name after TensorFlow's package, which may be
  `tensorflow.compat.v1`; "" for names of other packages.
  """
  match = pattern.fullmatch(name)
  if match is None:
    return ""
  return match.group(1)


# This package's full names by TensorFlow's, without `tensorflow.`.
_NEW_NAMES = {_below_tensorflow(old): new for old, new in old_names.OLD_NAMES.items()}
# TensorFlow's current Keras class, which is not an old name, and what can replace it.
KERAS = "mp_compat.keras.LossScaleOptimizer"
_LOOKALIKES = {**_NEW_NAMES, "keras.mixed_precision.LossScaleOptimizer": KERAS}
# This package's modules by TensorFlow's modules with old names.
MODULES: Dict[str, str] = {}
# This package's names by the last parts of old names, if no other class or function is
# likely to have such a name.
DISTINCTIVE: Dict[str, str] = {}
for _old, _new in _NEW_NAMES.items():
  _old_module, _, _last = _old.rpartition(".")
  MODULES[_old_module] = _new.rpartition(".")[0]
  DISTINCTIVE[_last] = _new
del DISTINCTIVE["LossScaleOptimizer"], DISTINCTIVE["get"]


def dotted(node: Optional[cst.CSTNode]) -> str:
  """Returns the dotted name, such as `a.b.c`, of a Name or of attributes of a Name; ""
  for other nodes.
  """
  if isinstance(node, cst.Name):
    return node.value
  if not isinstance(node, cst.Attribute):
    return ""
  base = dotted(node.value)
  if not base:
    return ""
  return "{}.{}".format(base, node.attr.value)


class Imported(NamedTuple):
  """What an import statement imports.

  Attributes:
    name: The name in the statement; that of a module may have dots.
    local: The name after `as`; without `as`, equal to `name`.
  """

  name: str
  local: str


def imported(node: Union[cst.Import, cst.ImportFrom]) -> List[Imported]:
  """Returns what an import statement imports; [] for `*`."""
  if isinstance(node.names, cst.ImportStar):
    return []
  found = []
  for alias in node.names:
    name = alias.evaluated_name
    found.append(Imported(name, alias.evaluated_alias or name))
  return found


def imports_package(node: cst.CSTNode) -> bool:
  """Returns whether a node is a statement `import mp_compat`, by this name."""
  if not isinstance(node, cst.Import):
    return False
  return Imported("mp_compat", "mp_compat") in imported(node)


def module_of(node: cst.CSTNode) -> str:
  """Returns the module that a `from` import names; "" for relative ones and other
  nodes.
  """
  if not isinstance(node, cst.ImportFrom):
    return ""
  return helpers.get_absolute_module_for_import(None, node) or ""


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
  if not path:
    return False
  return any(name.startswith(path + ".") for name in _NEW_NAMES)


class Place(NamedTuple):
  """A position in a file, counted from 1.

  Attributes:
    cell: The cell of a notebook; 0 in other files.
    line: The line in the cell, or in the file.
    column: The character in the line.
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
    content = source
    if isinstance(source, str):
      content = source.encode("utf-8")
    if self.module.bytes != content:
      raise ValueError(
        "LibCST would drop characters of it; remove form feeds before code, and end "
        "all lines with \\n"
      )
    self.code = self.module.code.encode("utf-8")
    self.parents = wrapper.resolve(metadata.ParentNodeProvider)
    self._scopes: Mapping[cst.CSTNode, Any] = wrapper.resolve(metadata.ScopeProvider)
    self._contexts = wrapper.resolve(metadata.ExpressionContextProvider)
    self._spans = wrapper.resolve(metadata.ByteSpanPositionProvider)
    self.expressions: List[Expression] = []
    names: List[Expression] = [*self.find(cst.Name), *self.find(cst.Attribute)]
    for node in names:
      if node in self._scopes:
        self.expressions.append(node)
    # Names whose bindings are not all in LibCST's scopes.
    self._unclear = self._rebound() | set(unclear)
    self._last_star = self._last_star_import()
    # Whether code may bind or read the module's names by strings.
    self._runs_text = self._may_bind_any()
    # Such as "LossScale", if the source has `tf.train.experimental.LossScale = Mine`.
    self._assigned = self._assigned_attributes()
    self.is_taken = self._is_package_name_taken()

  def _last_star_import(self) -> int:
    """Returns where the last `import *` starts, in bytes; -1 if there is none."""
    last = -1
    for node in self.find(cst.ImportFrom):
      if isinstance(node.names, cst.ImportStar):
        last = max(last, self.start(node))
    return last

  def _is_package_name_taken(self) -> bool:
    """Returns whether `mp_compat` may be bound otherwise than by imports of this
    package in the module's scope.
    """
    if "mp_compat" in self._unclear:
      return True
    for scope in set(self._scopes.values()):
      for binding in scope.assignments["mp_compat"]:
        if not isinstance(binding.scope, metadata.GlobalScope):
          return True
        if _names_by(binding, "mp_compat") != {"mp_compat"}:
          return True
    return False

  def _may_bind_any(self) -> bool:
    """Returns whether the source uses what may bind any name: exec, globals(),
    locals(), or vars() without an argument.
    """
    for node in self.expressions:
      if dotted(node) in ("exec", "globals", "locals"):
        return True
    for call in self.find(cst.Call):
      if dotted(call.func) == "vars" and not call.args:
        return True
    return False

  def _rebound(self) -> Set[str]:
    """Returns names that are deleted, or bound where LibCST sees no binding or puts it
    into another scope.
    """
    nodes: List[cst.CSTNode] = []
    for expression in self.find(cst.NamedExpr):  # name := value
      nodes.append(expression.target)
    for kind in _REBINDING:
      nodes += self.find(kind)
    found = set()
    for node in nodes:
      for name in m.findall(node, m.Name()):
        found.add(dotted(name))
    return found

  def _assigned_attributes(self) -> Set[str]:
    """Returns the attributes of TensorFlow's modules that the source assigns or
    deletes.
    """
    found = set()
    for node in self.find(cst.Attribute):
      if self.is_read(node):
        continue
      for name in self.full_names(node):
        if _below_tensorflow(name, _LIKE_TENSORFLOW):
          found.add(node.attr.value)
    return found

  def find(self, kind: Type[_Node]) -> List[_Node]:
    """Returns all nodes of a kind."""
    return [node for node in self.parents if isinstance(node, kind)]

  def start(self, node: cst.CSTNode) -> int:
    """Returns where a node starts, with its decorators, in bytes."""
    first = node
    if isinstance(node, (cst.ClassDef, cst.FunctionDef)) and node.decorators:
      first = node.decorators[0]
    return self._spans[first].start

  def end(self, node: cst.CSTNode) -> int:
    """Returns where a node ends, in bytes."""
    span = self._spans[node]
    return span.start + span.length

  def text(self, node: cst.CSTNode) -> str:
    """Returns the text of a node."""
    return self.code[self.start(node) : self.end(node)].decode("utf-8")

  def text_before(self, node: cst.CSTNode) -> str:
    """Returns the text between the start of the line and a node."""
    start = self.start(node)
    return self.code[self.code.rfind(b"\n", 0, start) + 1 : start].decode("utf-8")

  def begins_line(self, node: cst.CSTNode) -> bool:
    """Returns whether a statement is the first in its line: whether other statements
    can be inserted as lines before it. After a backslash, a line continues.
    """
    before = self.code[: self.start(node)].rstrip(b" \t")
    if not before:
      return True
    if before.endswith((b"\\\n", b"\\\r\n")):
      return False
    return before.endswith(b"\n")

  def place(self, node: cst.CSTNode) -> Place:
    """Returns the place where a node starts, with cell 0."""
    lines_before = self.code.count(b"\n", 0, self.start(node))
    column = len(self.text_before(node)) + 1
    return Place(cell=0, line=lines_before + 1, column=column)

  def enclosing(self, node: cst.CSTNode, kind: Type[_Node]) -> List[_Node]:
    """Returns the nodes of a kind around `node`, from the inside out."""
    found: List[_Node] = []
    parent = self.parents.get(node)
    while parent is not None:
      if isinstance(parent, kind):
        found.append(parent)
      parent = self.parents.get(parent)
    return found

  def is_read(self, node: cst.CSTNode) -> bool:
    """Returns whether an expression is read, and not assigned or deleted."""
    return self._contexts.get(node) is metadata.ExpressionContext.LOAD

  def full_names(self, node: cst.CSTNode) -> Set[str]:
    """Returns the full names that a dotted name may have, one for each binding of its
    first part.

    For `tf.train`, after `import tensorflow as tf` in one branch and `tf = None` in the
    other, they are "tensorflow.train" and "?.tf.train": "?." is in place of what no
    import binds.
    """
    name = dotted(node)
    if not name:  # such as f().x
      last = ""
      if isinstance(node, cst.Attribute):
        last = node.attr.value
      return {_UNKNOWN + last}
    found: Set[str] = set()
    scope = self._scopes.get(node)
    if scope is not None:
      for binding in scope[name.partition(".")[0]]:
        found |= _names_by(binding, name)
    return found or {_UNKNOWN + name}

  def new_name(self, node: cst.CSTNode) -> str:
    """Returns the name of this package that replaces a chain of attributes; "" if it is
    not certainly an old name.

    It certainly is if all bindings of its first part, in the whole scope and in any
    order, are imports that agree.
    """
    if not isinstance(node, cst.Attribute):
      return ""
    new_names = {replacement(name) for name in self.full_names(node)}
    if len(new_names) > 1:
      return ""
    new_name = new_names.pop()
    if new_name and self._is_certain(node):
      return new_name
    return ""

  def _is_certain(self, node: cst.CSTNode) -> bool:
    """Returns whether nothing else than the imports of `full_names` can bind the first
    name or its attributes.
    """
    first, *attributes = dotted(node).split(".")
    if not self.is_read(node) or "#" in self.text(node):
      return False
    for formatted in self.enclosing(node, cst.FormattedStringExpression):
      if formatted.equal:  # f"{name=}" prints the name.
        return False
    if first in self._unclear or self._assigned.intersection(attributes):
      return False
    bindings = self._scopes[node][first]
    scopes = {type(binding.scope) for binding in bindings}
    # A class body finds a name that it has not bound yet outside.
    if metadata.ClassScope in scopes:
      return False
    if metadata.GlobalScope not in scopes:
      return True
    return not self._runs_text and self._survives_stars(node, bindings)

  def _survives_stars(
    self, node: cst.CSTNode, bindings: Collection[metadata.Assignment]
  ) -> bool:
    """Returns whether no `import *` can bind the name that `bindings` bind: after the
    last one, the module binds it on every path, before `node`.
    """
    if self._last_star < 0:
      return True
    for binding in bindings:
      is_between = self._last_star < self.start(binding.node) < self.start(node)
      statement_line = self.parents[binding.node]
      if is_between and self.parents[statement_line] is self.module:
        return True
    return False

  def meanings(self, node: cst.CSTNode) -> Set[str]:
    """Returns the names of this package that an expression is, will be after rewriting,
    or looks like.
    """
    found = set()
    for name in self.full_names(node):
      if name.startswith("mp_compat."):
        found.add(name)
      in_tensorflow = _below_tensorflow(name, _LIKE_TENSORFLOW)
      if in_tensorflow in _LOOKALIKES:
        found.add(_LOOKALIKES[in_tensorflow])
    if found or not isinstance(node, cst.Attribute):
      return found
    last = node.attr.value
    if last in DISTINCTIVE:
      found.add(DISTINCTIVE[last])
    return found


def _names_by(binding: metadata.BaseAssignment, name: str) -> Set[str]:
  """Returns the full names that a binding of its first part gives a dotted name.

      import tensorflow as tf    for "tf.train": {"tensorflow.train"}
      tf = load()                for "tf.train": {"?.tf.train"}

  Only imports bind names whose full names are known.
  """
  if not isinstance(binding, metadata.ImportAssignment):
    return {_UNKNOWN + name}
  return {full.name for full in binding.get_qualified_names_for(name)}
