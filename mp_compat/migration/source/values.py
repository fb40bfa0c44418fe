# SPDX-License-Identifier: Apache-2.0
"""Computes the values that each expression of a source may have. Nothing is executed.

A name has the values of its bindings in the scope where LibCST finds it. Of those in the function of that scope, the
ones count that may be in effect: a binding hides the earlier ones from the rest of its block, and a later one counts
where a loop repeats both. All bindings count in other functions, and those that other functions make.
"""

import collections
from typing import Any, Dict, FrozenSet, Iterable, Iterator, List, NamedTuple, Optional, Set, Tuple, Union

import libcst as cst
from libcst import metadata

# A full name of a module or its member ("tensorflow.train"), an unknown value with the text of its expression
# ("?.self.opt"), or a call for its result.
Value = Union[str, cst.Call]
Values = FrozenSet[Value]

UNKNOWN: Values = frozenset(["?"])
# Anything imported by these names counts as TensorFlow: `from project.env import tf`.
_TENSORFLOW = ("tf", "tf1", "tf_v1")
# Bounds that keep the time linear: characters of a name (`node = node.next`, repeated), and values of an expression.
_LONGEST = 200
_MOST = 50
_TURNS = 5  # after so many, an expression whose values would still change gets an unknown value instead

Import = Union[cst.Import, cst.ImportFrom]
_HANDLERS = (cst.ExceptHandler, cst.ExceptStarHandler)
_BINDERS = (cst.AnnAssign, cst.Assign, cst.AugAssign, cst.ClassDef, cst.For, cst.FunctionDef) + (
  (cst.Import, cst.ImportFrom, cst.Param, cst.WithItem) + _HANDLERS
)
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
  """Returns the value of a string literal; None for bytes, f-strings and other nodes."""
  value = node.evaluated_value if isinstance(node, (cst.SimpleString, cst.ConcatenatedString)) else None
  return value if isinstance(value, str) else None


def _unknown(name: str) -> Values:
  return frozenset(["?." + name])


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


_Groups = Dict[cst.CSTNode, List[_Binding]]  # bindings by the function that makes them, sorted by position


class Evaluation:
  """Computes the values of the expressions of a module.

  Attributes:
    values: The values of each expression.
    starred: The names that only a `from module import *` may bind.
    is_taken: Whether `mp_compat` may be something else than this package, where it is not imported at the top.
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
    self._rebound: Set[str] = set()  # names that patterns and `:=` bind
    self._groups: Dict[Tuple[Optional[metadata.Scope], str], _Groups] = {}
    self._uses: Dict[cst.Name, Tuple[List[_Binding], Optional[metadata.Scope]]] = {}
    self._module = wrapper.module
    for node in self._spans:
      self._note(node)
    self.is_taken = "mp_compat" in self._rebound or any(
      not isinstance(scope, metadata.GlobalScope) or binding.value != "mp_compat"
      for scope in set(self._scopes.values())
      if scope and list(scope.assignments["mp_compat"])
      for group in self._bindings_of("mp_compat", scope).values()
      for binding in group
    )
    expressions = [node for node in self._spans if isinstance(node, cst.BaseExpression)]
    turn = 0
    while any([self._update(node, turn) for node in expressions]):
      turn += 1  # The values of what a loop repeats, or of what is bound below, come later.

  def _note(self, node: cst.CSTNode) -> None:
    """Notes what a node binds, as far as LibCST's scopes do not tell it."""
    if isinstance(node, cst.Assign):
      self._assigned.update((target.target, node.value) for target in node.targets)
    elif isinstance(node, cst.AnnAssign):
      self._assigned[node.target] = node.value
    elif isinstance(node, cst.ImportFrom) and isinstance(node.names, cst.ImportStar):
      self._stars.append(node)
    elif isinstance(node, cst.Attribute) and self._contexts.get(node) is metadata.ExpressionContext.STORE:
      self._attributes[dotted(node)].append(node)
    elif isinstance(node, (cst.MatchAs, cst.MatchStar)):
      self._rebound.add(dotted(node.name))
    elif isinstance(node, cst.MatchMapping):
      self._rebound.add(dotted(node.rest))
    elif isinstance(node, cst.NamedExpr):
      self._rebound.add(dotted(node.target))

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
    if node not in self._uses:
      self._uses[node] = self._find(name, self._scopes[node], self._place(node))
    bindings, scope = self._uses[node]
    found = self._union(bindings, name)
    if scope is None:
      self.starred.add(node)
      found = found.union("{}.{}".format(module_of(star), name) for star in self._stars)
    elif isinstance(scope, metadata.BuiltinScope):
      found = frozenset(["builtins." + name])
    if name in self._rebound:
      found = found | _unknown(name)
    return found if found or bindings else _unknown(name)

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
    bindings = _in_effect(self._groups[None, name].get(place.function, []), place)
    # Other code may have assigned to the attribute since.
    return self._union(bindings, name) | _unknown(name) if bindings else members

  def _names_looked_up(self, call: cst.Call) -> Iterator[str]:
    """Resolves `getattr(module, "name")` and `importlib.import_module("module")`."""
    function, literals = self._known(call.func), [literal(argument.value) for argument in call.args]
    if function == {"builtins.getattr"} and len(literals) > 1 and literals[1] and literals[1].isidentifier():
      yield from (_member(base, call, literals[1]) for base in self._known(call.args[0].value))
    elif function == {"importlib.import_module"} and len(literals) == 1 and literals[0]:
      yield literals[0]

  # Names.

  def _find(self, name: str, scope: Any, place: _Place) -> Tuple[List[_Binding], Optional[metadata.Scope]]:
    """Returns the bindings of a name that may be in effect at a place, and its scope; None if LibCST finds none."""
    owner = next((assignment.scope for assignment in scope[name]), None)
    bindings: List[_Binding] = []
    if owner is None or isinstance(owner, metadata.BuiltinScope):
      return bindings, owner
    is_function = isinstance(owner, metadata.FunctionScope)
    node = owner.node if is_function else self._module if isinstance(owner, metadata.GlobalScope) else None
    for function, group in self._bindings_of(name, owner).items():
      bindings += _in_effect(group, place) if function is place.function is node else group
    if isinstance(owner, metadata.ClassScope):  # A class body finds a name that it has not bound yet outside.
      bindings += self._find(name, owner.globals, place)[0]
    return bindings, owner

  def _union(self, bindings: Iterable[_Binding], name: str) -> Values:
    return frozenset(value for binding in bindings for value in self._of_binding(binding, name))

  def _of_binding(self, binding: _Binding, name: str) -> Values:
    if isinstance(binding.value, str):
      return frozenset([binding.value])
    return _unknown(name) if binding.value is None else self._known(binding.value)

  # Bindings.

  def _bindings_of(self, name: str, scope: Any) -> _Groups:
    """Returns the bindings of a name in its scope, by the function that makes them."""
    if (scope, name) not in self._groups:
      bindings = [self._binding(assignment.node, name) for assignment in scope.assignments[name]]
      if isinstance(scope, metadata.GlobalScope) and name != "mp_compat" and bindings:
        first = min(binding.place.position for binding in bindings)
        bindings += [self._binding(star, name) for star in self._stars if self._spans[star].start > first]
      self._groups[scope, name] = _grouped(bindings)
    return self._groups[scope, name]

  def _binding(self, target: cst.CSTNode, name: str) -> _Binding:
    """Returns the binding of a name by the target of an assignment, a definition, a parameter, or an import."""
    binder = next((node for node in [target, *self._around(target)] if isinstance(node, _BINDERS)), target)
    value: Union[cst.CSTNode, str, None] = self._assigned.get(target)
    if isinstance(binder, cst.Param):
      function: Any = next(node for node in self._ancestors(binder) if isinstance(node, (cst.FunctionDef, cst.Lambda)))
      return _Binding(None, self._place(function.body), function)
    if isinstance(binder, (cst.For, *_HANDLERS)):
      return _Binding(None, self._place(target, self._spans[binder.body].start), binder.body)
    region = next((node for node in self._around(binder) if isinstance(node, _BLOCKS)), None)
    if isinstance(target, cst.ImportFrom) and isinstance(target.names, cst.ImportStar):
      value, region = "tensorflow" if name in _TENSORFLOW else "{}.{}".format(module_of(target), name), None
    elif isinstance(target, (cst.Import, cst.ImportFrom)):
      value = imported(target)[name]
    return _Binding(value, self._place(target, self._spans[binder].start + self._spans[binder].length), region)

  def _place(self, node: cst.CSTNode, position: Optional[int] = None) -> _Place:
    around = self._around(node)
    return _Place(self._spans[node].start if position is None else position, around, [node, *around][-1])

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


def _grouped(bindings: List[_Binding]) -> _Groups:
  groups: _Groups = collections.OrderedDict()
  for binding in sorted(bindings, key=lambda binding: binding.place.position):
    groups.setdefault(binding.place.function, []).append(binding)
  return groups


def _in_effect(bindings: List[_Binding], use: _Place) -> List[_Binding]:
  """Returns those of a function's bindings that may be in effect at a place in it."""
  found, hidden = [], {}  # what the binding that hides all earlier ones is in
  for binding in reversed(bindings):
    if binding.place.position <= use.position and not _excludes(binding.place, use):
      found.append(binding)
      if binding.region in use.around:
        hidden = binding.place.around
        break
  loops = [node for node in use.around if isinstance(node, (cst.For, cst.While)) and node not in hidden]
  if loops:
    found += [binding for binding in bindings if loops[-1] in binding.place.around]
  return found if len(found) <= _MOST else [*found[:_MOST], _Binding(None, use, None)]


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
