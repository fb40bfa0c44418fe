# SPDX-License-Identifier: Apache-2.0
"""Computes the values that each expression of a source may have, on every path through the source.

The source is run once, in order, with sets of possible values: branches are joined, and what a loop or a `try` binds is
added to what was bound before. Functions, lambdas and comprehensions are run after the scope around them, with
all values that its names ever have. Nothing is executed.
"""

import builtins
import collections
import contextlib
from typing import Deque, Dict, FrozenSet, Iterable, Iterator, List, Optional, Sequence, Set, Tuple, Union

import libcst as cst

# A full name of a module or its member ("tensorflow.train"), an unknown value with the text of its expression
# ("?.self.opt"), a call for its result, or None for a name that is not bound.
Value = Union[str, cst.Call, None]
Values = FrozenSet[Value]

UNKNOWN: Values = frozenset(["?"])
_UNBOUND: Values = frozenset([None])
# Anything imported by these names counts as TensorFlow: `from project.env import tf`.
_TENSORFLOW = ("tf", "tf1", "tf_v1")
_SUPPRESSORS = ("suppress", "raises", "assertRaises", "assertRaisesRegex", "assertRaisesRegexp")
# Bounds that keep the time linear: characters of a name (`node = node.next`, repeated), and values of an expression.
_LONGEST = 200
_MOST = 50

Import = Union[cst.Import, cst.ImportFrom]
_Binding = Union[cst.AssignTarget, cst.AnnAssign, cst.AugAssign, cst.Del, cst.For, cst.NamedExpr]
_Comprehension = Union[cst.GeneratorExp, cst.ListComp, cst.SetComp, cst.DictComp]


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


def _union(first: Values, more: Values) -> Values:
  """Returns the values of both; if they are too many, one unknown value replaces all calls."""
  union = first | more
  if len(union) <= _MOST:
    return union
  return frozenset(value for value in union if not isinstance(value, cst.Call)) | UNKNOWN


def _targets(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
  """Yields the names, attributes and subscripts that an assignment to `node` binds."""
  if isinstance(node, (cst.Tuple, cst.List)):
    for element in node.elements:
      yield from _targets(element.value)
  else:
    yield node


class _BoundNames(cst.CSTVisitor):
  """Collects the names, and attributes such as `self.opt`, that code binds in its own scope."""

  def __init__(self, *parts: cst.CSTNode) -> None:
    super().__init__()
    self.names: Set[str] = set()
    self.declared: Set[str] = set()  # global or nonlocal
    for part in parts:
      part.visit(self)

  def _add(self, target: Optional[cst.CSTNode]) -> None:
    self.names.update(filter(None, map(dotted, _targets(target) if target else ())))

  def visit_FunctionDef(self, node: cst.FunctionDef) -> bool:
    self._add(node.name)
    return False

  def visit_ClassDef(self, node: cst.ClassDef) -> bool:
    self._add(node.name)
    return False

  def _skip(self, node: cst.CSTNode) -> bool:
    return False

  visit_Lambda = visit_GeneratorExp = visit_ListComp = visit_SetComp = visit_DictComp = _skip

  def _visit_import(self, node: Import) -> bool:
    self.names.update(imported(node))
    return False

  visit_Import = visit_ImportFrom = _visit_import

  def _visit_target(self, node: _Binding) -> None:
    self._add(node.target)

  visit_AssignTarget = visit_AnnAssign = visit_AugAssign = visit_For = visit_NamedExpr = visit_Del = _visit_target

  def _visit_name(self, node: Union[cst.AsName, cst.MatchAs, cst.MatchStar]) -> None:
    self._add(node.name)

  visit_AsName = visit_MatchAs = visit_MatchStar = _visit_name

  def visit_MatchMapping(self, node: cst.MatchMapping) -> None:
    self._add(node.rest)

  def _visit_declaration(self, node: Union[cst.Global, cst.Nonlocal]) -> None:
    self.declared.update(item.name.value for item in node.names)

  visit_Global = visit_Nonlocal = _visit_declaration


class _Rebound(cst.CSTVisitor):
  """Collects the names that functions and expressions bind in scopes around them, or in a part that may not run.

  Attributes:
    in_module: Names of the module.
    in_functions: Names of functions.
  """

  def __init__(self, module: cst.Module) -> None:
    super().__init__()
    self.in_module: Set[str] = set()
    self.in_functions: Set[str] = set()
    module.visit(self)

  def visit_Global(self, node: cst.Global) -> None:
    self.in_module.update(item.name.value for item in node.names)

  def visit_Nonlocal(self, node: cst.Nonlocal) -> None:
    self.in_functions.update(item.name.value for item in node.names)

  def visit_NamedExpr(self, node: cst.NamedExpr) -> None:
    self.in_module.add(dotted(node.target))
    self.in_functions.add(dotted(node.target))


class _State:
  """The values of names at one point of a scope, and whether the point can be reached."""

  def __init__(self, values: Dict[str, Values], reachable: bool = True) -> None:
    self.values = values
    self.reachable = reachable

  def widened(self, bound: Dict[str, Values]) -> "_State":
    """Returns a state in which names may also have the values of `bound`."""
    values = dict(self.values)
    values.update((name, _union(values.get(name, _UNBOUND), more)) for name, more in bound.items())
    return _State(values, self.reachable)


def _joined(states: Sequence[_State]) -> _State:
  first, *others = [state for state in states if state.reachable] or states[:1]
  values = dict(first.values)
  for other in others:
    for name, more in other.values.items():
      if values.get(name) is not more:
        values[name] = _union(values.get(name, _UNBOUND), more)
  return _State(values, first.reachable)


class _Scope:
  """A module, class body, function or comprehension.

  Attributes:
    parent: The scope that the names not bound here are from; None for the module.
    is_class: Whether it is a class body, which runs where it is, and may look up a name that it binds later.
    state: The values of its names at the point that is run.
    ever: All values of its names.
  """

  def __init__(
    self, parent: Optional["_Scope"], names: Iterable[str], parameters: Iterable[str] = (), is_class: bool = False
  ) -> None:
    self.parent: Optional[_Scope] = parent.parent if parent and parent.is_class else parent
    self.is_class: bool = is_class
    self.state = _State({name: _UNBOUND for name in names})
    self.state.values.update((name, _unknown(name)) for name in parameters)
    self.ever = dict(self.state.values)


class Evaluation(cst.CSTVisitor):
  """Computes the values of the names, attributes, calls and conditional expressions of a module.

  Attributes:
    values: The values of each of these nodes.
    taken: The names where `mp_compat` may be something else than this package.
    starred: The names that only a `from module import *` may bind.
    attributes: All values that the source assigns to attributes, such as `self.opt`.
  """

  def __init__(self, module: cst.Module) -> None:
    super().__init__()
    self.values: Dict[cst.CSTNode, Values] = {}
    self.taken: Set[cst.Name] = set()
    self.starred: Set[cst.Name] = set()
    self.attributes: Dict[str, Values] = {}
    self._rebound = _Rebound(module)
    self._stars: List[str] = []  # modules of `from module import *`
    self._records: List[Dict[str, Values]] = []  # what the enclosing loops, `try` and `with` bind
    self._later: Deque[Tuple[_Scope, Sequence[cst.CSTNode]]] = collections.deque()
    self._scope = _Scope(None, _BoundNames(module).names)
    module.visit(self)
    while self._later:
      self._scope, parts = self._later.popleft()
      for part in parts:
        part.visit(self)

  def of(self, node: cst.CSTNode) -> Values:
    """Returns the values of an expression, never an empty set."""
    return self.values.get(node, UNKNOWN)

  # Names.

  def _find(self, name: str) -> Tuple[Set[Value], Optional[_Scope]]:
    """Returns the values of a name, None for unbound included, and the scope that it is from; None if there is none."""
    found: Set[Value] = set()
    scope: Optional[_Scope] = self._scope
    runs_now = True
    while scope is not None:
      if name in scope.ever:
        found |= scope.state.values[name] if runs_now else scope.ever[name]
        if not scope.is_class or None not in found:
          break
        found.discard(None)
      runs_now = runs_now and scope.is_class
      scope = scope.parent
    return found, scope

  def _look_up(self, name: str) -> Values:
    found, scope = self._find(name)
    if scope is None and hasattr(builtins, name):
      found.add("builtins." + name)
    elif scope is None:
      found.update("{}.{}".format(module, name) for module in self._stars)
    elif scope is not None and name in (self._rebound.in_functions if scope.parent else self._rebound.in_module):
      found.add("?." + name)
    found.discard(None)
    return frozenset(found) or _unknown(name)

  def visit_Name(self, node: cst.Name) -> bool:
    self.values[node] = self._look_up(node.value)
    if self._find(node.value)[1] is None:
      self.starred.add(node)
    found, scope = self._find("mp_compat")
    if scope is None or scope.parent is None:
      found.discard(None)  # `import mp_compat` can be inserted before.
    if found - {"mp_compat"} or "mp_compat" in self._rebound.in_module:
      self.taken.add(node)
    return False

  def _set(self, name: str, values: Values) -> None:
    if name in self._scope.ever:  # else it is global or nonlocal, and unknown everywhere
      self._scope.state.values[name] = values
      self._scope.ever[name] = _union(self._scope.ever[name], values)
    for record in self._records:
      record[name] = _union(record.get(name, values), values)

  def _bind(self, target: cst.CSTNode, values: Optional[Values] = None) -> None:
    """Binds the names of a target to values; by default, and if there are several, to unknown ones."""
    for part in _targets(target):
      if isinstance(part, cst.Attribute):
        part.value.visit(self)
        self.values[part] = frozenset("?." + _member(base, part) for base in self.of(part.value))
      elif not isinstance(part, cst.Name):
        part.visit(self)
      name = dotted(part)
      if isinstance(part, cst.Attribute):
        self.attributes[name] = _union(self.attributes.get(name, UNKNOWN), values or UNKNOWN)
      if name:
        self._set(name, _unknown(name) if values is None or part is not target else values)

  # Expressions.

  def visit_Attribute(self, node: cst.Attribute) -> bool:
    node.value.visit(self)
    members = frozenset(_member(base, node) for base in self.of(node.value))
    assigned = self._scope.state.values.get(dotted(node), _UNBOUND) - _UNBOUND
    # Other code may have assigned to the attribute since.
    self.values[node] = assigned | _unknown(dotted(node)) if assigned else members
    return False

  def visit_Param(self, node: cst.Param) -> bool:
    for part in (node.annotation, node.default):
      if part:
        part.visit(self)
    return False

  def visit_NameItem(self, node: cst.NameItem) -> bool:
    return False  # of `global` and `nonlocal`

  def visit_Arg(self, node: cst.Arg) -> bool:
    node.value.visit(self)
    return False

  def leave_Call(self, original_node: cst.Call) -> None:
    self.values[original_node] = frozenset(self._names_looked_up(original_node)) or frozenset([original_node])

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

  def leave_IfExp(self, original_node: cst.IfExp) -> None:
    self.values[original_node] = self.of(original_node.body) | self.of(original_node.orelse)

  def leave_BooleanOperation(self, original_node: cst.BooleanOperation) -> None:
    self.values[original_node] = self.of(original_node.left) | self.of(original_node.right)

  def visit_NamedExpr(self, node: cst.NamedExpr) -> bool:
    node.value.visit(self)
    self._bind(node.target, self.of(node.value))
    self.values[node] = self.of(node.value)
    return False

  # Simple statements.

  def visit_Assign(self, node: cst.Assign) -> bool:
    node.value.visit(self)
    for target in node.targets:
      self._assign(target.target, node.value)
    return False

  def _assign(self, target: cst.BaseExpression, value: cst.BaseExpression) -> None:
    if isinstance(target, cst.Tuple) and isinstance(value, cst.Tuple) and len(target.elements) == len(value.elements):
      if all(isinstance(element, cst.Element) for element in [*target.elements, *value.elements]):
        for left, right in zip(target.elements, value.elements):
          self._assign(left.value, right.value)
        return
    self._bind(target, self.of(value))

  def visit_AnnAssign(self, node: cst.AnnAssign) -> bool:
    node.annotation.visit(self)
    if node.value:
      node.value.visit(self)
      self._bind(node.target, self.of(node.value))
    return False

  def visit_AugAssign(self, node: cst.AugAssign) -> bool:
    node.value.visit(self)
    self._bind(node.target)
    return False

  def visit_Del(self, node: cst.Del) -> bool:
    for target in _targets(node.target):
      self._bind(target, _UNBOUND)
    return False

  def _visit_import(self, node: Import) -> bool:
    for name, full in imported(node).items():
      self._set(name, frozenset([full]))
    if isinstance(node, cst.ImportFrom) and isinstance(node.names, cst.ImportStar):
      module = module_of(node)
      self._stars.append(module)
      for name, values in list(self._scope.state.values.items()):
        if name != "mp_compat" and values - _UNBOUND:
          more = "tensorflow" if name in _TENSORFLOW else "{}.{}".format(module, name)
          self._set(name, values | {more})
    return False

  visit_Import = visit_ImportFrom = _visit_import

  def _leave_end(self, original_node: cst.CSTNode) -> None:
    self._scope.state.reachable = False

  leave_Return = leave_Raise = leave_Break = leave_Continue = _leave_end

  # Compound statements.

  @contextlib.contextmanager
  def _recording(self) -> Iterator[Dict[str, Values]]:
    """Collects all values that names are bound to in the context."""
    record: Dict[str, Values] = {}
    self._records.append(record)
    yield record
    self._records.pop()

  def _after(self, part: Optional[cst.CSTNode], before: _State) -> _State:
    """Returns the state after a part that runs from the state `before`."""
    self._scope.state = before.widened({})
    if part is not None:
      part.visit(self)
    return self._scope.state

  def visit_If(self, node: cst.If) -> bool:
    ends = []
    part: Union[cst.If, cst.Else, None] = node
    while isinstance(part, cst.If):  # rather than a recursion: a source may have hundreds of `elif`
      part.test.visit(self)
      before = self._scope.state
      ends.append(self._after(part.body, before))
      self._scope.state, part = before, part.orelse
    self._scope.state = _joined(ends + [self._after(part, self._scope.state)])
    return False

  def _visit_loop(self, node: Union[cst.For, cst.While]) -> bool:
    if isinstance(node, cst.For):
      node.iter.visit(self)
    before = self._scope.state
    self._scope.state = before.widened({name: _unknown(name) for name in _BoundNames(node).names})
    with self._recording() as bound:
      if isinstance(node, cst.For):
        self._bind(node.target)
      else:
        node.test.visit(self)
      node.body.visit(self)
    self._scope.state = self._after(node.orelse, before.widened(bound))
    return False

  visit_For = visit_While = _visit_loop

  def _visit_try(self, node: Union[cst.Try, cst.TryStar]) -> bool:
    before = self._scope.state
    with self._recording() as bound:
      with self._recording() as bound_in_body:
        body = self._after(node.body, before)
      raised = before.widened(bound_in_body)
      ends = [self._after(node.orelse, body)] + [self._after(handler, raised) for handler in node.handlers]
    end = _joined(ends)
    if node.finalbody is not None:
      with self._recording() as bound_last:
        last = self._after(node.finalbody, before.widened(bound))  # It also runs after an exception.
      values = dict(end.values, **{name: last.values.get(name, _UNBOUND) for name in bound_last})
      end = _State(values, end.reachable and last.reachable)
    self._scope.state = end
    return False

  visit_Try = visit_TryStar = _visit_try

  def _visit_handler(self, node: Union[cst.ExceptHandler, cst.ExceptStarHandler]) -> None:
    if node.name:
      self._bind(node.name.name)

  visit_ExceptHandler = visit_ExceptStarHandler = _visit_handler

  def visit_With(self, node: cst.With) -> bool:
    for item in node.items:
      item.item.visit(self)
      if item.asname:
        self._bind(item.asname.name)
    before = self._scope.state
    with self._recording() as bound:
      after = self._after(node.body, before)
    self._scope.state = before.widened(bound) if any(map(_suppresses_exceptions, node.items)) else after
    return False

  def visit_Match(self, node: cst.Match) -> bool:
    node.subject.visit(self)
    before = self._scope.state
    self._scope.state = _joined([before] + [self._after(case, before) for case in node.cases])
    return False

  def _visit_pattern(self, node: Union[cst.MatchAs, cst.MatchStar]) -> None:
    if node.name:
      self._bind(node.name)

  visit_MatchAs = visit_MatchStar = _visit_pattern

  def visit_MatchMapping(self, node: cst.MatchMapping) -> None:
    if node.rest:
      self._bind(node.rest)

  # Scopes.

  def visit_ClassDef(self, node: cst.ClassDef) -> bool:
    for part in [*node.decorators, *node.bases, *node.keywords]:
      part.visit(self)
    scope, records = self._scope, self._records
    self._scope, self._records = _Scope(scope, _BoundNames(node.body).names, is_class=True), []
    node.body.visit(self)
    self._scope, self._records = scope, records
    self._bind(node.name)
    return False

  def visit_FunctionDef(self, node: cst.FunctionDef) -> bool:
    for part in [*node.decorators, node.params, *filter(None, [node.returns])]:
      part.visit(self)
    self._bind(node.name)
    self._run_later([node.body], _parameters(node.params))
    return False

  def visit_Lambda(self, node: cst.Lambda) -> bool:
    node.params.visit(self)
    self._run_later([node.body], _parameters(node.params))
    return False

  def _run_later(self, parts: Sequence[cst.CSTNode], parameters: Set[str]) -> None:
    bound = _BoundNames(*parts)
    self._later.append((_Scope(self._scope, bound.names - bound.declared, parameters), parts))

  def _visit_comprehension(self, node: _Comprehension) -> bool:
    node.for_in.iter.visit(self)
    results = [node.key, node.value] if isinstance(node, cst.DictComp) else [node.elt]
    loops = [node.for_in]
    while loops[-1].inner_for_in:
      loops.append(loops[-1].inner_for_in)
    parameters = {name for loop in loops for name in map(dotted, _targets(loop.target))}
    self._run_later([*results, *node.for_in.ifs, *loops[1:2]], parameters)
    return False

  visit_GeneratorExp = visit_ListComp = visit_SetComp = visit_DictComp = _visit_comprehension


def _parameters(parameters: cst.Parameters) -> Set[str]:
  named = [*parameters.posonly_params, *parameters.params, *parameters.kwonly_params]
  named.extend(param for param in (parameters.star_arg, parameters.star_kwarg) if isinstance(param, cst.Param))
  return {param.name.value for param in named}


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
