# SPDX-License-Identifier: Apache-2.0
"""Parses a source, and answers where its nodes are and what its expressions refer to."""

import bisect
import re
from typing import Iterator, NamedTuple, Optional, Set, Tuple, Type, TypeVar, Union

import libcst as cst
from libcst import metadata

from mp_compat.migration import old_names
from mp_compat.migration.source import values

_TENSORFLOW = re.compile(r"tensorflow(?:_core)?(?:\._api\.v[12])?(?:\.compat\.v[12])*\.(.+)")
_LIKE_TENSORFLOW = re.compile(r"(?:.*\.)?(?:tf|tf1|tf_v1|tensorflow|tensorflow_core)(?:\.compat\.v[12])*\.(.+)")

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
  return _replacement_below(_TENSORFLOW.fullmatch(name))


def resembles_old_name(name: str) -> bool:
  """Returns whether a name whose beginning is not known is an old name if that is TensorFlow, as in `self.tf.train`."""
  return _replacement_below(_LIKE_TENSORFLOW.fullmatch(name)) is not None


def _replacement_below(match: "Optional[re.Match[str]]") -> Optional[str]:
  rest = match and match.group(1)
  return old_names.OLD_NAMES.get("tensorflow.{}".format(rest)) or old_names.OLD_NAMES.get(
    "tensorflow.compat.v1.{}".format(rest)
  )


class ParsedSource:
  """A parsed source, and the values of its expressions.

  Attributes:
    module: The syntax tree; all methods take nodes of it.
    code: The text in UTF-8; offsets are in bytes.
    parents: The parent of each node.
  """

  def __init__(self, source: Union[str, bytes]) -> None:
    """Parses a source.

    Raises:
      libcst.ParserSyntaxError: If it is not Python 3.
      SyntaxError: If its declared encoding is unknown.
      UnicodeDecodeError: If it is not in the declared encoding.
      ValueError: If LibCST would change it, and offsets would be wrong.
    """
    wrapper = metadata.MetadataWrapper(cst.parse_module(source))
    self.module = wrapper.module
    if self.module.bytes != (source.encode("utf-8") if isinstance(source, str) else source):
      raise ValueError("LibCST would drop characters of it; remove form feeds before code, and end all lines with \\n")
    self.code = self.module.code.encode("utf-8")
    self.parents = wrapper.resolve(metadata.ParentNodeProvider)
    self._spans = wrapper.resolve(metadata.ByteSpanPositionProvider)
    self._evaluation = values.Evaluation(wrapper)
    self._kept = {module for module, name in self._members_used() if replacement(module) and not replacement(name)}
    self._newlines = [match.start() for match in re.finditer(b"\n", self.code)]

  def start(self, node: cst.CSTNode) -> int:
    decorators = node.decorators if isinstance(node, (cst.ClassDef, cst.FunctionDef)) else ()
    return self._spans[decorators[0] if decorators else node].start

  def end(self, node: cst.CSTNode) -> int:
    return self._spans[node].start + self._spans[node].length

  def text(self, node: cst.CSTNode) -> str:
    return self.code[self.start(node) : self.end(node)].decode("utf-8")

  def text_before(self, node: cst.CSTNode) -> str:
    """Returns the text between the start of the line and a node."""
    start = self.start(node)
    return self.code[self.code.rfind(b"\n", 0, start) + 1 : start].decode("utf-8")

  def place(self, node: cst.CSTNode) -> Place:
    return Place(0, bisect.bisect(self._newlines, self.start(node)) + 1, len(self.text_before(node)) + 1)

  def enclosing(self, node: cst.CSTNode, *kinds: Type[_Node]) -> Optional[_Node]:
    """Returns the innermost node of the given kinds that is or contains `node`; None if there is none."""
    return next((ancestor for ancestor in self._ancestors(node) if isinstance(ancestor, kinds)), None)

  def _ancestors(self, node: Optional[cst.CSTNode]) -> Iterator[cst.CSTNode]:
    while node is not None:
      yield node
      node = self.parents.get(node)

  def handlers(self, node: cst.CSTNode) -> Iterator[cst.ExceptHandler]:
    """Yields the handlers, in the same function, of exceptions that `node` raises."""
    for ancestor in self._ancestors(node):
      parent = self.parents.get(ancestor)
      if isinstance(parent, cst.Try) and ancestor is parent.body:
        yield from parent.handlers
      elif isinstance(ancestor, (cst.FunctionDef, cst.Lambda)):
        return

  def values_of(self, node: cst.CSTNode) -> values.Values:
    """Returns all values that an expression may have; at least one."""
    return self._evaluation.of(node)

  def full_names(self, node: cst.CSTNode) -> Set[str]:
    """Returns the full names that an expression may refer to; those that begin with "?" are not known."""
    return {value for value in self.values_of(node) if isinstance(value, str)}

  def _members_used(self) -> Iterator[Tuple[str, str]]:
    for node, found in self._evaluation.values.items():
      for name in found if node not in self._evaluation.starred else ():
        if isinstance(name, str):
          yield name.rpartition(".")[0], name

  def new_name(self, name: str) -> Optional[str]:
    """Returns this package's name for a full name; None for other names, and for a module of which more is used."""
    return None if name in self._kept else replacement(name)

  def replacements(self, node: cst.CSTNode) -> Set[str]:
    """Returns the names of this package that an expression may refer to, or will after rewriting."""
    return {new for new in map(self.new_name, self.full_names(node)) if new}

  def calls_nested_in(self, node: cst.CSTNode) -> Set[cst.Call]:
    """Returns the calls that made an expression's value, the calls that made their arguments, and so on."""
    calls: Set[cst.Call] = set()
    pending = [node]
    while pending:
      found = {value for value in self.values_of(pending.pop()) if isinstance(value, cst.Call)} - calls
      calls |= found
      pending += [argument.value for call in found for argument in call.args]
    return calls

  def origins(self, node: cst.CSTNode) -> Set[str]:
    """Returns the names of the callables that may have made an expression's value, "?" if it may be another value.

    Names that this package replaces are those of this package.
    """
    return self._origins(self.values_of(node))

  def origins_elsewhere(self, node: cst.CSTNode) -> Set[str]:
    """Returns the origins of all values that the source assigns to an attribute, such as `self.opt`."""
    return self._origins(self._evaluation.assigned_anywhere(values.dotted(node)))

  def _origins(self, found: values.Values) -> Set[str]:
    return {
      replacement(name) or name
      for value in found
      for name in (self.full_names(value.func) or {"?"} if isinstance(value, cst.Call) else {"?"})
    }

  def decide_name(self, node: cst.BaseExpression) -> Tuple[str, str]:
    """Decides whether an expression is an old name.

    Returns:
      The name of this package that replaces the expression, or ""; and the kind of decision that it needs, or "".
      Both are "" if it is not an old name, or if the place that binds its first part is rewritten, which is enough.
    """
    names = self.full_names(node)
    old = {name for name in names if self.new_name(name) not in (None, name)}
    if not old:
      unknown = [values.dotted(node)] + [name for name in names if name.startswith("?")]
      return "", "unresolved" if any(map(resembles_old_name, unknown)) and not self.replacements(node) else ""
    if self._follows_from_binding(node, old):
      return "", ""
    new_names = {self.new_name(name) for name in old}
    if len(new_names) > 1 or old != self.values_of(node) or "#" in self.text(node):
      return "", "unresolved"
    if self._evaluation.is_taken:
      return "", "name-taken"
    return str(new_names.pop()), ""

  def _follows_from_binding(self, node: cst.BaseExpression, old: Set[str]) -> bool:
    """Returns whether `old`, the old names of `name.attribute`, become right where `name` is bound to a new module."""
    prefix = node
    while isinstance(prefix, cst.Attribute):
      prefix = prefix.value
      text, names = values.dotted(prefix), self.full_names(prefix)
      is_variable = isinstance(prefix, cst.Name) and prefix not in self._evaluation.starred
      if is_variable or "?." + text in names:
        rest = values.dotted(node)[len(text) :]
        if old <= {
          name + rest for name in names if self.new_name(name + rest) == "{}{}".format(self.new_name(name), rest)
        }:
          return True
    return False
