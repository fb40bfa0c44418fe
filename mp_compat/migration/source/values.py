# SPDX-License-Identifier: Apache-2.0
"""Computes the values that each expression of a source may have. Nothing is executed.

A name has the values of its bindings in the scope where LibCST finds it. Of those in the same function, the ones count
that may be in effect: a binding hides the earlier ones from the rest of its block, and a later one counts where a loop
repeats both. Bindings in other functions all count.
"""

import collections
from typing import Any, Dict, FrozenSet, Iterable, Iterator, List, NamedTuple, Optional, Sequence, Set, Tuple, Union

import libcst as cst
from libcst import metadata

# A full name of a module or its member ("tensorflow.train"), an unknown value with the text of its expression
# ("?.self.opt"), or a call for its result.
Value = Union[str, cst.Call]
Values = FrozenSet[Value]

UNKNOWN: Values = frozenset(["?"])
# Anything imported by these names counts as TensorFlow: `from project.env import tf`.
_TENSORFLOW = ("tf", "tf1", "tf_v1")
_SUPPRESSORS = ("suppress", "raises", "assertRaises", "assertRaisesRegex", "assertRaisesRegexp")
# Bounds that keep the time linear: characters of a name (`node = node.next`, repeated), and values of an expression.
_LONGEST = 200
_MOST = 50

Import = Union[cst.Import, cst.ImportFrom]
_HANDLERS = (cst.ExceptHandler, cst.ExceptStarHandler)
_BINDERS = (cst.AnnAssign, cst.Assign, cst.AugAssign, cst.ClassDef, cst.CompFor, cst.For, cst.FunctionDef) + (
  (cst.Import, cst.ImportFrom, cst.NamedExpr, cst.Param, cst.WithItem) + _HANDLERS
)
_FUNCTIONS = (cst.FunctionDef, cst.GeneratorExp, cst.Lambda)  # which run later than what is around them
_BLOCKS = (cst.IndentedBlock, cst.Module, cst.SimpleStatementSuite)


def dotted(node: Optional[cst.CSTNode]) -> str:
  """Returns the dotted name, such as `a.b.c`, of a Name or of attributes of a Name; "" for other nodes."""
  if isinstance(node, cst.Attribute):
    base = dotted(node.value)
    return base and "{}.{}".format(base, node.attr.value)
  return node.value if isinstance(node, cst.Name) else ""


def aliases(node: Import) -> Iterable[cst.ImportAlias]:
  """Returns the names in an import statement; () for `*`."""
  return () if isinstance(node.names, cst.ImportStar) else node.names


def bound_as(alias: cst.ImportAlias) -> Optional[str]:
  """Returns the name that follows `as`; None without `as`."""
  return dotted(alias.asname.name) if alias.asname else None


def module_of(node: cst.ImportFrom) -> str:
  """Returns the name of the module that names are imported from; with its dots if it is relative."""
  return "." * len(node.relative) + dotted(node.module)


def imported(node: Import) -> Dict[str, str]:
  """Returns the full names of the names that an import statement binds."""
  full_names = {}
  for alias in aliases(node):
    name = dotted(alias.name)
    local = bound_as(alias)
    if isinstance(node, cst.ImportFrom):
      full = "{}.{}".format(module_of(node), name)
      local = local or name
      if local in _TENSORFLOW and name in _TENSORFLOW + ("tensorflow",):
        full = "tensorflow"
    else:
      full = name if local else name.partition(".")[0]
      local = local or full
    full_names[local] = full
  return full_names


def literal(node: cst.CSTNode) -> Optional[str]:
  """Returns the value of a string literal or of a sum of them; None for bytes, f-strings and other nodes."""
  if isinstance(node, cst.BinaryOperation) and isinstance(node.operator, cst.Add):
    left, right = literal(node.left), literal(node.right)
    return None if left is None or right is None else left + right
  value = node.evaluated_value if isinstance(node, (cst.SimpleString, cst.ConcatenatedString)) else None
  return value if isinstance(value, str) else None


def _unknown(name: str) -> Values:
  return frozenset(["?." + name])


def _parts(
  target: cst.BaseExpression, value: Optional[cst.BaseExpression]
) -> Iterator[Tuple[cst.BaseExpression, Optional[cst.BaseExpression]]]:
  """Yields the names, attributes and subscripts that an assignment binds, each with its value or None."""
  if not isinstance(target, (cst.List, cst.Tuple)):
    yield target, value
    return
  values: Sequence[Optional[cst.BaseExpression]] = [None] * len(target.elements)
  if isinstance(value, cst.Tuple) and len(value.elements) == len(values):
    if all(isinstance(element, cst.Element) for element in [*target.elements, *value.elements]):
      values = [element.value for element in value.elements]
  for element, part in zip(target.elements, values):
    yield from _parts(element.value, part)


class _Place(NamedTuple):
  """Where a name is used, or a binding takes effect."""

  position: int  # the offset
  around: Dict[cst.CSTNode, cst.CSTNode]  # the nodes around it, as from `_around`
  function: cst.CSTNode  # the last of them: the function, or the module


class _Binding(NamedTuple):
  """A binding of a name, or of an attribute such as `self.opt`."""

  value: Union[cst.CSTNode, str, None]  # an expression, a full name, or None if it is unknown
  place: _Place
  region: Optional[cst.CSTNode]  # the node in which nothing after the binding runs without it, if there is one


class Evaluation:
  """Computes the values of the expressions of a module.

  Attributes:
    values: The values of each expression.
    starred: The names that only a `from module import *` may bind.
  """

  def __init__(self, wrapper: metadata.MetadataWrapper) -> None:
    self.values: Dict[cst.CSTNode, Values] = {}
    self.starred: Set[cst.CSTNode] = set()
    self._parents = wrapper.resolve(metadata.ParentNodeProvider)
    self._spans = wrapper.resolve(metadata.ByteSpanPositionProvider)
    self._scopes = wrapper.resolve(metadata.ScopeProvider)
    self._contexts = wrapper.resolve(metadata.ExpressionContextProvider)
    self._assigned: Dict[cst.CSTNode, Optional[cst.BaseExpression]] = {}  # the values of targets
    self._attributes: Dict[str, List[cst.Attribute]] = collections.defaultdict(list)  # targets
    self._stars: List[cst.ImportFrom] = []
    self._rebound: Set[str] = set()  # names that are deleted, or that have bindings which LibCST does not record
    self._bindings: Dict[Tuple[cst.CSTNode, str], _Binding] = {}
    for node in self._spans:
      self._note(node)
    for node in self._spans:  # In this order, an expression seldom needs another whose values are not known yet.
      if isinstance(node, cst.BaseExpression):
        self.of(node)

  def _note(self, node: cst.CSTNode) -> None:
    if isinstance(node, cst.Assign):
      self._assigned.update(part for target in node.targets for part in _parts(target.target, node.value))
    elif isinstance(node, (cst.AnnAssign, cst.NamedExpr)):
      self._assigned[node.target] = node.value
    elif isinstance(node, cst.ImportFrom) and isinstance(node.names, cst.ImportStar):
      self._stars.append(node)
    elif isinstance(node, cst.Attribute) and self._contexts.get(node) is metadata.ExpressionContext.STORE:
      self._attributes[dotted(node)].append(node)
    bound: Any = None
    if isinstance(node, (cst.MatchAs, cst.MatchStar)):
      bound = node.name
    elif isinstance(node, cst.MatchMapping):
      bound = node.rest
    elif isinstance(node, cst.NamedExpr) and isinstance(self._scopes.get(node), metadata.ComprehensionScope):
      bound = node.target
    elif self._contexts.get(node) is metadata.ExpressionContext.DEL:
      bound = node
    self._rebound.add(dotted(bound))

  def of(self, node: cst.CSTNode) -> Values:
    """Returns the values of an expression, never an empty set."""
    if node not in self.values:
      self.values[node] = UNKNOWN  # for expressions that depend on themselves
      found = self._compute(node)
      if len(found) > _MOST:
        found = frozenset(value for value in found if isinstance(value, str)) | UNKNOWN
      self.values[node] = found
    return self.values[node]

  def assigned_anywhere(self, attribute: str) -> Values:
    """Returns all values that the source assigns to an attribute, such as `self.opt`, and an unknown one."""
    bindings = [self._binding(target, attribute) for target in self._attributes.get(attribute, ())]
    return UNKNOWN.union(self._union(bindings, attribute))

  def is_taken(self, node: cst.BaseExpression) -> bool:
    """Returns whether `mp_compat` may be something else than this package where a name is used."""
    if not isinstance(node, cst.Name):
      return False
    found, scope, is_bound = self._find("mp_compat", node)
    # At the top of the module, `import mp_compat` can be inserted before.
    return bool(found - {"mp_compat"}) or not (is_bound or isinstance(scope, (metadata.GlobalScope, type(None))))

  # Expressions.

  def _compute(self, node: cst.CSTNode) -> Values:
    if isinstance(node, cst.Name):
      return self._look_up(node)
    if isinstance(node, cst.Attribute):
      return self._of_attribute(node)
    if isinstance(node, cst.Call):
      return frozenset(self._names_looked_up(node)) or frozenset([node])
    if isinstance(node, cst.IfExp):
      return self.of(node.body) | self.of(node.orelse)
    if isinstance(node, cst.BooleanOperation):
      return self.of(node.left) | self.of(node.right)
    return self.of(node.value) if isinstance(node, cst.NamedExpr) else UNKNOWN

  def _is_read(self, node: cst.BaseExpression) -> bool:
    context = self._contexts.get(node, metadata.ExpressionContext.LOAD)  # none where LibCST does not look for names
    return context is metadata.ExpressionContext.LOAD

  def _look_up(self, node: cst.Name) -> Values:
    is_pattern = isinstance(self._parents[node], (cst.MatchAs, cst.MatchMapping, cst.MatchStar))
    if node not in self._scopes or not self._is_read(node) or is_pattern:
      return UNKNOWN
    name = node.value
    found, scope, _ = self._find(name, node)
    if scope is None:
      self.starred.add(node)
      found = found.union("{}.{}".format(module_of(star), name) for star in self._stars)
    elif name in self._rebound:
      found = found | _unknown(name)
    return found or _unknown(name)

  def _of_attribute(self, node: cst.Attribute) -> Values:
    members = frozenset(_member(base, node) for base in self.of(node.value))
    if not self._is_read(node):
      return frozenset("?." + member for member in members)
    name, place = dotted(node), self._place(node)
    bindings = [self._binding(target, name) for target in self._attributes.get(name, ())]
    bindings, _ = _in_effect([binding for binding in bindings if binding.place.function is place.function], place)
    # Other code may have assigned to the attribute since.
    return _unknown(name).union(self._union(bindings, name)) if bindings else members

  def _names_looked_up(self, call: cst.Call) -> Iterator[str]:
    """Resolves `getattr(module, "name")`, `importlib.import_module("module")` and `__import__("module")`."""
    function, literals = self.of(call.func), [literal(argument.value) for argument in call.args]
    name = literals[-1] if len(literals) == 1 else literals[1] if literals else None
    if name is None:
      return
    if function == {"builtins.getattr"} and len(literals) > 1 and name.isidentifier():
      yield from (_member(base, call, name) for base in self.of(call.args[0].value))
    elif function == {"importlib.import_module"} and len(literals) == 1:
      yield name
    elif function == {"builtins.__import__"} and len(literals) == 1:
      yield name.partition(".")[0]

  # Names.

  def _find(self, name: str, node: cst.Name) -> Tuple[Values, Optional[metadata.Scope], bool]:
    """Returns the values of a name where `node` is, the scope of the name, if any, and whether it is surely bound."""
    found: Values = frozenset()
    scope: Any = self._scopes[node]
    place = self._place(node)
    while True:
      assignments = scope[name]
      owner = next((assignment.scope for assignment in assignments), None)
      if isinstance(owner, (metadata.BuiltinScope, type(None))):
        return found | {"builtins." + name} if owner else found, owner, bool(owner)
      targets: List[cst.CSTNode] = [assignment.node for assignment in assignments]
      if isinstance(owner, metadata.GlobalScope) and name != "mp_compat":
        targets += self._stars
      bindings, is_bound = _in_effect([self._binding(target, name) for target in targets], place)
      found |= self._union(bindings, name)
      if is_bound or not isinstance(owner, metadata.ClassScope):
        return found, owner, is_bound
      scope = owner.globals  # where a class body finds names that it has not bound yet

  def _union(self, bindings: Iterable[_Binding], name: str) -> Values:
    return frozenset(value for binding in bindings for value in self._of_binding(binding, name))

  def _of_binding(self, binding: _Binding, name: str) -> Values:
    if isinstance(binding.value, str):
      return frozenset([binding.value])
    return _unknown(name) if binding.value is None else self.of(binding.value)

  # Bindings.

  def _binding(self, target: cst.CSTNode, name: str) -> _Binding:
    """Returns the binding of a name by the target of an assignment, a definition, a parameter, or an import."""
    if (target, name) not in self._bindings:
      binder = next((node for node in [target, *self._around(target)] if isinstance(node, _BINDERS)), target)
      end = self._spans[binder].start + self._spans[binder].length
      value: Union[cst.CSTNode, str, None] = self._assigned.get(target)
      if isinstance(target, cst.ImportFrom) and isinstance(target.names, cst.ImportStar):
        value = "tensorflow" if name in _TENSORFLOW else "{}.{}".format(module_of(target), name)
      elif isinstance(target, (cst.Import, cst.ImportFrom)):
        value = imported(target)[name]
      if isinstance(binder, (cst.For, *_HANDLERS)):
        end = self._spans[binder.body].start
      elif isinstance(binder, cst.CompFor):
        end = 0  # The text of a comprehension uses names before it binds them.
      self._bindings[target, name] = _Binding(value, self._place(target, end), self._region(binder))
    return self._bindings[target, name]

  def _region(self, binder: cst.CSTNode) -> Optional[cst.CSTNode]:
    if isinstance(binder, (cst.For, *_HANDLERS)):
      return binder.body
    if isinstance(binder, cst.Param):
      return self._place(binder).function
    is_optional = isinstance(binder, (cst.CompFor, cst.NamedExpr))
    if is_optional or isinstance(binder, cst.ImportFrom) and isinstance(binder.names, cst.ImportStar):
      return None
    blocks = [node for node in self._around(binder) if isinstance(node, _BLOCKS)]
    for block in blocks:
      statement = self._parents.get(block)
      if not isinstance(statement, cst.With) or any(map(_suppresses_exceptions, statement.items)):
        return block
    return blocks[-1]

  def _place(self, node: cst.CSTNode, position: Optional[int] = None) -> _Place:
    around = self._around(node)
    return _Place(self._spans[node].start if position is None else position, around, next(reversed(list(around)), node))

  def _around(self, node: cst.CSTNode) -> Dict[cst.CSTNode, cst.CSTNode]:
    """Returns the nodes around a node up to the function, from the inside, each with its child that contains it."""
    around: Dict[cst.CSTNode, cst.CSTNode] = {}
    parent = self._parents.get(node)
    while parent is not None:
      around[parent] = node
      node, parent = parent, None if isinstance(parent, _FUNCTIONS) else self._parents.get(parent)
    return around


def _in_effect(bindings: List[_Binding], use: _Place) -> Tuple[List[_Binding], bool]:
  """Returns the bindings that may be in effect at a place, and whether one surely is."""

  def is_before(place: _Place) -> bool:
    return place.function is use.function and place.position <= use.position and not _excludes(place, use)

  sure = [binding.place for binding in bindings if is_before(binding.place) and binding.region in use.around]
  last = max(sure, key=lambda place: place.position, default=None)
  loops = [node for node in use.around if isinstance(node, (cst.For, cst.While)) and not (last and node in last.around)]

  def may_be_in_effect(place: _Place) -> bool:
    if is_before(place):
      return last is None or place.position >= last.position
    return place.function is not use.function or any(loop in place.around for loop in loops)

  return [binding for binding in bindings if may_be_in_effect(binding.place)], last is not None


def _excludes(place: _Place, use: _Place) -> bool:
  """Returns whether two places are in different branches of an `if`."""
  return any(
    isinstance(node, cst.If) and use.around.get(node) not in (None, node.test, child) and child is not node.test
    for node, child in place.around.items()
  )


def _member(base: Value, node: Union[cst.Attribute, cst.Call], name: str = "") -> str:
  """Returns the full name of a member of a value; the member's name is by default that of the attribute `node`."""
  name = node.attr.value if isinstance(node, cst.Attribute) else name
  if not isinstance(base, str):
    return "?.{}".format(dotted(node) or "()." + name)
  if name in _TENSORFLOW and not base.startswith("?"):
    return "tensorflow"
  full = "{}.{}".format(base, name)
  return full if len(full) <= _LONGEST else "?." + name


def _suppresses_exceptions(item: cst.WithItem) -> bool:
  return isinstance(item.item, cst.Call) and dotted(item.item.func).rpartition(".")[2] in _SUPPRESSORS
