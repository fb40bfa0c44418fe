# SPDX-License-Identifier: Apache-2.0
"""Computes the values that each expression of a source may have. Nothing is executed.

A name has the values of its bindings in the scope where LibCST finds it. Of those in the function of that scope, the
ones count that may be in effect: a binding hides the earlier ones from the rest of its block, and a later one counts
where a loop repeats both. All bindings count in other functions, and those that other functions make.
"""

import bisect
import collections
import itertools
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
_TURNS = 5  # after so many, an expression whose values would still change gets an unknown value instead

Import = Union[cst.Import, cst.ImportFrom]
_HANDLERS = (cst.ExceptHandler, cst.ExceptStarHandler)
_BINDERS = (cst.AnnAssign, cst.Assign, cst.AugAssign, cst.ClassDef, cst.CompFor, cst.For, cst.FunctionDef) + (
  (cst.Import, cst.ImportFrom, cst.NamedExpr, cst.Param, cst.WithItem) + _HANDLERS
)
_BLOCKS = (cst.IndentedBlock, cst.Module, cst.SimpleStatementSuite)
_STATEMENTS = (cst.BaseCompoundStatement, cst.SimpleStatementLine, cst.SimpleStatementSuite)


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


class _Bindings(NamedTuple):
  """Bindings that one function makes, sorted by position."""

  positions: List[int]
  bindings: List[_Binding]


class _Use(NamedTuple):
  """What a name refers to where it is used."""

  bindings: List[_Binding]  # that may be in effect
  scope: Optional[metadata.Scope]  # of the name; None if LibCST finds none
  is_bound: bool  # whether one of the bindings surely is in effect


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
    self._rebound: Dict[str, Set[cst.CSTNode]] = collections.defaultdict(set)  # by bindings that LibCST does not record
    self._groups: Dict[Tuple[Optional[metadata.Scope], str], Dict[cst.CSTNode, _Bindings]] = {}
    self._uses: Dict[Tuple[cst.CSTNode, str], _Use] = {}
    self._module = wrapper.module
    for node in self._spans:
      self._note(node)
    expressions = [node for node in self._spans if isinstance(node, cst.BaseExpression)]
    for turn in itertools.count():  # The values of what a loop repeats, or of what is bound below, come later.
      if not any([self._update(node, turn) for node in expressions]):
        break

  def _note(self, node: cst.CSTNode) -> None:
    """Notes what a node binds, as far as LibCST's scopes do not tell it."""
    if isinstance(node, cst.Assign):
      self._assigned.update(part for target in node.targets for part in _parts(target.target, node.value))
    elif isinstance(node, (cst.AnnAssign, cst.NamedExpr)):
      self._assigned[node.target] = node.value
    elif isinstance(node, cst.ImportFrom) and isinstance(node.names, cst.ImportStar):
      self._stars.append(node)
    elif isinstance(node, cst.Attribute) and self._contexts.get(node) is metadata.ExpressionContext.STORE:
      if not self._is_declaration(node):
        self._attributes[dotted(node)].append(node)
    bound: Any = None
    if isinstance(node, (cst.MatchAs, cst.MatchStar)):
      bound = node.name
    elif isinstance(node, cst.MatchMapping):
      bound = node.rest
    elif isinstance(node, cst.NamedExpr) and isinstance(self._scopes.get(node), metadata.ComprehensionScope):
      bound = node.target
    if bound:
      self._rebound[dotted(bound)].add(self._place(node).function)

  def _update(self, node: cst.BaseExpression, turn: int) -> bool:
    """Computes the values of an expression from those known so far; returns whether they changed."""
    found, before = self._compute(node), self.values.get(node, frozenset())
    if len(found) > _MOST:
      found = frozenset(value for value in found if isinstance(value, str)) | UNKNOWN
    if turn >= _TURNS:  # such as `node = node.next` in a loop
      found = before if found == before else before | UNKNOWN
    self.values[node] = found
    return found != before

  def of(self, node: cst.CSTNode) -> Values:
    """Returns the values of an expression, never an empty set."""
    return self.values.get(node) or UNKNOWN

  def assigned_anywhere(self, attribute: str) -> Values:
    """Returns all values that the source assigns to an attribute, such as `self.opt`, and an unknown one."""
    return UNKNOWN | self._union(
      [self._binding(target, attribute) for target in self._attributes[attribute]], attribute
    )

  def is_taken(self, node: cst.BaseExpression) -> bool:
    """Returns whether `mp_compat` may be something else than this package where a name is used."""
    if not isinstance(node, cst.Name):
      return False
    use = self._use("mp_compat", node)
    # At the top of the module, `import mp_compat` can be inserted before.
    is_found = use.is_bound or use.scope is None or isinstance(use.scope, metadata.GlobalScope)
    return not is_found or bool(self._union(use.bindings, "mp_compat") - {"mp_compat"}) or "mp_compat" in self._rebound

  # Expressions.

  def _compute(self, node: cst.BaseExpression) -> Values:
    """Returns the values of an expression from those known so far: an empty set if there are none."""
    if isinstance(node, cst.Name):
      return self._look_up(node)
    if isinstance(node, cst.Attribute):
      return self._of_attribute(node)
    if isinstance(node, cst.Call):
      return frozenset(self._names_looked_up(node)) or frozenset([node])
    if isinstance(node, cst.IfExp):
      return self._known(node.body) | self._known(node.orelse)
    if isinstance(node, cst.BooleanOperation):
      return self._known(node.left) | self._known(node.right)
    return self._known(node.value) if isinstance(node, cst.NamedExpr) else UNKNOWN

  def _known(self, node: cst.CSTNode) -> Values:
    return self.values.get(node, frozenset())

  def _is_read(self, node: cst.BaseExpression) -> bool:
    context = self._contexts.get(node, metadata.ExpressionContext.LOAD)  # none where LibCST does not look for names
    return context is metadata.ExpressionContext.LOAD

  def _look_up(self, node: cst.Name) -> Values:
    is_pattern = isinstance(self._parents[node], (cst.MatchAs, cst.MatchMapping, cst.MatchStar))
    if node not in self._scopes or not self._is_read(node) or is_pattern:
      return UNKNOWN
    name = node.value
    use = self._use(name, node)
    found = self._union(use.bindings, name)
    if use.scope is None:
      self.starred.add(node)
      found = found.union("{}.{}".format(module_of(star), name) for star in self._stars)
    elif isinstance(use.scope, metadata.BuiltinScope):
      found = frozenset(["builtins." + name])
    if name in self._rebound and not self._rebound[name].isdisjoint(self._functions_around(node)):
      found = found | _unknown(name)
    return found if found or use.bindings else _unknown(name)

  def _of_attribute(self, node: cst.Attribute) -> Values:
    members = frozenset(_member(base, node) for base in self._known(node.value))
    if not self._is_read(node):
      return frozenset("?." + member for member in members)
    name = dotted(node)
    if name not in self._attributes:
      return members
    if (None, name) not in self._groups:
      self._groups[None, name] = _grouped([self._binding(target, name) for target in self._attributes[name]])
    place = self._place(node)
    group = self._groups[None, name].get(place.function)
    bindings = _in_effect(group, place)[0] if group else []
    # Other code may have assigned to the attribute since.
    return self._union(bindings, name) | _unknown(name) if bindings else members

  def _names_looked_up(self, call: cst.Call) -> Iterator[str]:
    """Resolves `getattr(module, "name")`, `importlib.import_module("module")` and `__import__("module")`."""
    function, literals = self._known(call.func), [literal(argument.value) for argument in call.args]
    name = literals[-1] if len(literals) == 1 else literals[1] if literals else None
    if name is None:
      return
    if function == {"builtins.getattr"} and len(literals) > 1 and name.isidentifier():
      yield from (_member(base, call, name) for base in self._known(call.args[0].value))
    elif function == {"importlib.import_module"} and len(literals) == 1:
      yield name
    elif function == {"builtins.__import__"} and len(literals) == 1:
      yield name.partition(".")[0]

  # Names.

  def _use(self, name: str, node: cst.Name) -> _Use:
    """Returns what a name refers to where `node` is."""
    if (node, name) not in self._uses:
      self._uses[node, name] = self._find(name, self._scopes[node], self._place(node))
    return self._uses[node, name]

  def _find(self, name: str, scope: Any, place: _Place) -> _Use:
    owner = next((assignment.scope for assignment in scope[name]), None)
    if owner is None or isinstance(owner, metadata.BuiltinScope):
      return _Use([], owner, False)
    groups, bindings, is_bound = self._bindings_of(name, owner), [], False
    is_inside = isinstance(owner, (metadata.ClassScope, metadata.ComprehensionScope))
    for function, group in groups.items():
      is_own = is_inside or function is (self._module if isinstance(owner, metadata.GlobalScope) else owner.node)
      if is_own and function is place.function:
        near, is_bound = _in_effect(group, place)
        bindings += near
      else:
        bindings += group.bindings
    if isinstance(owner, metadata.ClassScope) and not is_bound:
      outside = self._find(name, owner.globals, place)  # where a class body finds names that it has not bound yet
      if outside.bindings:
        return _Use(bindings + outside.bindings, outside.scope, outside.is_bound)
    return _Use(bindings, owner, is_bound)

  def _union(self, bindings: Iterable[_Binding], name: str) -> Values:
    return frozenset(value for binding in bindings for value in self._of_binding(binding, name))

  def _of_binding(self, binding: _Binding, name: str) -> Values:
    if isinstance(binding.value, str):
      return frozenset([binding.value])
    return _unknown(name) if binding.value is None else self._known(binding.value)

  # Bindings.

  def _bindings_of(self, name: str, scope: metadata.Scope) -> Dict[cst.CSTNode, _Bindings]:
    """Returns the bindings of a name in its scope, by the function that makes them."""
    if (scope, name) not in self._groups:
      nodes: List[Any] = [assignment.node for assignment in scope.assignments[name]]  # type: ignore[attr-defined]
      bindings = [self._binding(node, name) for node in nodes if not self._is_declaration(node)]
      if isinstance(scope, metadata.GlobalScope) and name != "mp_compat" and bindings:
        first = min(binding.place.position for binding in bindings)
        bindings += [self._binding(star, name) for star in self._stars if self._spans[star].start > first]
      self._groups[scope, name] = _grouped(bindings)
    return self._groups[scope, name]

  def _binding(self, target: cst.CSTNode, name: str) -> _Binding:
    """Returns the binding of a name by the target of an assignment, a definition, a parameter, or an import."""
    binder = next((node for node in [target, *self._around(target)] if isinstance(node, _BINDERS)), target)
    if isinstance(binder, cst.Param):
      function: Any = next(node for node in self._ancestors(binder) if isinstance(node, (cst.FunctionDef, cst.Lambda)))
      return _Binding(None, self._place(function.body), function)
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
    elif isinstance(binder, cst.NamedExpr):  # The text of an expression may, too.
      end = self._spans[next((node for node in self._around(binder) if isinstance(node, _STATEMENTS)), binder)].start
    return _Binding(value, self._place(target, end), self._region(binder))

  def _region(self, binder: cst.CSTNode) -> Optional[cst.CSTNode]:
    if isinstance(binder, (cst.For, *_HANDLERS)):
      return binder.body
    is_optional = isinstance(binder, (cst.CompFor, cst.NamedExpr))
    if is_optional or isinstance(binder, cst.ImportFrom) and isinstance(binder.names, cst.ImportStar):
      return None
    blocks = [node for node in self._around(binder) if isinstance(node, _BLOCKS)]
    for block in blocks:
      statement = self._parents.get(block)
      if not isinstance(statement, cst.With) or any(map(_suppresses_exceptions, statement.items)):
        return block
    return blocks[-1]

  def _is_declaration(self, target: cst.CSTNode) -> bool:
    """Returns whether a target has only an annotation."""
    statement = self._parents.get(target)
    return isinstance(statement, cst.AnnAssign) and statement.value is None

  def _place(self, node: cst.CSTNode, position: Optional[int] = None) -> _Place:
    around = self._around(node)
    return _Place(self._spans[node].start if position is None else position, around, next(reversed(list(around)), node))

  def _around(self, node: cst.CSTNode) -> Dict[cst.CSTNode, cst.CSTNode]:
    """Returns the nodes around a node up to the function, from the inside, each with its child that contains it."""
    around: Dict[cst.CSTNode, cst.CSTNode] = {}
    for parent in self._ancestors(node):
      around[parent] = node
      is_body = isinstance(parent, (cst.FunctionDef, cst.Lambda)) and parent.body is node  # not a default, a decorator
      if is_body or isinstance(parent, cst.GeneratorExp):
        break
      node = parent
    return around

  def _ancestors(self, node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    parent = self._parents.get(node)
    while parent is not None:
      yield parent
      parent = self._parents.get(parent)

  def _functions_around(self, node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    while not isinstance(node, cst.Module):
      node = self._place(node).function
      yield node


def _grouped(bindings: List[_Binding]) -> Dict[cst.CSTNode, _Bindings]:
  """Returns bindings by the function that makes them."""
  groups: Dict[cst.CSTNode, _Bindings] = collections.OrderedDict()
  for binding in sorted(bindings, key=lambda binding: binding.place.position):
    group = groups.setdefault(binding.place.function, _Bindings([], []))
    group.positions.append(binding.place.position)
    group.bindings.append(binding)
  return groups


def _in_effect(group: _Bindings, use: _Place) -> Tuple[List[_Binding], bool]:
  """Returns the bindings of a function that may be in effect at a place in it, and whether one surely is."""
  found, last = [], None
  end = bisect.bisect(group.positions, use.position)
  for binding in itertools.islice(reversed(group.bindings), len(group.bindings) - end, None):
    if not _excludes(binding.place, use):
      found.append(binding)
      if binding.region in use.around:
        last = binding
      if last or len(found) > _MOST:
        break
  loops = [node for node in use.around if isinstance(node, (cst.For, cst.While))]
  loops = [node for node in loops if last is None or node not in last.place.around]
  if loops:
    found += [binding for binding in group.bindings if loops[-1] in binding.place.around]
  if len(found) > _MOST:
    found = [*found[:_MOST], _Binding(None, use, None)]
  return found, last is not None


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
