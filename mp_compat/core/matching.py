# SPDX-License-Identifier: Apache-2.0
"""Finds the variables of a graph in a checkpoint of any naming scheme. Does not import
TensorFlow.

Variables that an optimizer creates when it applies gradients, such as Adam's powers,
have other names in each naming scheme, and one name can be that of two optimizers:

    optimizers, in the order of creation   mp_compat        TensorFlow's class
    Adam with a dynamic loss scale         beta1_power      cond_1/beta1_power
    Adam without loss scaling              beta1_power_1    beta1_power

So all variables of a kind (`beta1_power`) are compared at once. `match` has the rule.
"""

import collections
import re
from types import MappingProxyType
from typing import (
  Callable,
  Dict,
  Hashable,
  Iterable,
  List,
  Mapping,
  NamedTuple,
  Optional,
  Sequence,
  Tuple,
)

from mp_compat.core import naming_schemes
from mp_compat.core.naming_schemes import DYNAMIC
from mp_compat.core.naming_schemes import POWERS
from mp_compat.core.naming_schemes import Form
from mp_compat.core.naming_schemes import Name

# Returns whether the variables with these names in a checkpoint have equal values.
HaveEqualValues = Callable[[Sequence[str]], bool]


def assume_different(names: Sequence[str]) -> bool:
  """Returns False for several variables: a `HaveEqualValues` where values are not
  known.
  """
  return len(names) < 2


class Variables(NamedTuple):
  """The variables of a graph or of a checkpoint.

  Attributes:
    shapes: The shape of each variable, by name.
    order: Names of variables in the order of creation, as far as it is known.
    loss_scales: The kinds of loss scales, by the names of the variables that optimizers
      with these loss scales created when they applied gradients. Only graphs of this
      package have them.
  """

  shapes: naming_schemes.Shapes
  order: Sequence[str] = ()
  loss_scales: Mapping[str, str] = MappingProxyType({})


class Match(NamedTuple):
  """Which variable in a checkpoint each variable of a graph is.

  Attributes:
    names: The names in the checkpoint, by the names in the graph.
    ambiguous: For each variable that may be one of several in the checkpoint, or one
      that may also be another variable's, the names of these.
  """

  names: Dict[str, str]
  ambiguous: Dict[str, List[str]]


class Member(NamedTuple):
  """A variable of a kind. Those of one form sort in the order of creation.

  Attributes:
    position: Its place in the order of creation; -1 if it is not known.
    parsed: Its name in parts.
    name: Its name.
    alone: The form of its name in a program without loss scaling.
    loss_scale: The kind of its optimizer's loss scale; None without, or if not known.
  """

  position: int
  parsed: Name
  name: str
  alone: Form
  loss_scale: Optional[str]

  @property
  def form(self) -> Form:
    """Returns the form of its name."""
    return self.parsed.form

  @property
  def scope(self) -> str:
    """Returns its name scope, without conditionals."""
    return self.parsed.scope


Members = List[Member]
_KeyOf = Callable[[Member], Hashable]  # what variables of one group have in common


def match(
  wanted: Iterable[str],
  graph: Variables,
  found: Variables,
  have_equal_values: HaveEqualValues,
) -> Match:
  """Returns which variable in a checkpoint each wanted variable of a graph is.

      variables of loss scales   by role: in the same scope, in the order of creation;
                                 then in another scope, if that is clear
      kinds of variables that optimizers create (`kinds`):
        names = each way in which graph and checkpoint can be those of one program
        if one fits, or all that fit agree: these names
        elif one is a part of the other: the same names
        elif all that a variable may be have equal values: one of these
        else: ambiguous
      all others                 by name

  Args:
    wanted: the names of the variables to restore.
    graph: all variables of the graph.
    found: the variables in the checkpoint.
    have_equal_values: compares variables in the checkpoint. It does not matter which of
      several equal ones is restored.
  """
  matched = Match({name: name for name in graph.shapes if name in found.shapes}, {})
  _match_state(graph, found.shapes, matched)
  found_kinds = kinds(found)
  for kind, members in kinds(graph).items():
    others = found_kinds.get(kind, [])
    if is_renamed(kind, members + others):
      for member in members:
        matched.names.pop(member.name, None)
      _match_kind(members, others, bool(graph.loss_scales), have_equal_values, matched)
  return Match(
    {name: matched.names[name] for name in wanted if name in matched.names},
    {name: matched.ambiguous[name] for name in wanted if name in matched.ambiguous},
  )


def kinds(variables: Variables) -> Dict[Hashable, Members]:
  """Returns the variables by kind: the last part of the name, without number, and the
  shape; sorted by the order of creation, as far as it is known.

  Conditionals in names are those of loss scaling only if there is a loss scale, but for
  Adam's powers, which only an optimizer creates.
  """
  has_loss_scale = bool(naming_schemes.state(variables.shapes))
  positions = {name: index for index, name in enumerate(variables.order)}
  result: Dict[Hashable, Members] = collections.defaultdict(list)
  for name, shape in variables.shapes.items():
    parsed = naming_schemes.parse(name)
    if parsed.stem not in POWERS:
      if not has_loss_scale:
        parsed = parsed._replace(scope=name.rpartition("/")[0], conditionals=())
      parsed = _with_number(parsed)
    loss_scale = variables.loss_scales.get(name)
    alone = parsed.form
    if alone.depth and not variables.loss_scales:  # in a conditional of loss scaling
      alone, loss_scale = alone._replace(depth=alone.depth - 1), DYNAMIC
    member = Member(positions.get(name, -1), parsed, name, alone, loss_scale)
    result[parsed.stem, tuple(shape)].append(member)
  for members in result.values():
    members.sort(key=lambda member: member[:3])
    if members[0].position < 0:  # It is not known of all: only names tell the order.
      members[:] = sorted(member._replace(position=-1) for member in members)
  return result


def _with_number(parsed: Name) -> Name:
  """Returns a name whose last part is divided into stem and number."""
  numbered = re.fullmatch(r"(.+)_(\d+)", parsed.stem)
  if numbered is None:
    return parsed
  return parsed._replace(stem=numbered.group(1), number=int(numbered.group(2)))


def is_renamed(kind: Hashable, members: Members) -> bool:
  """Returns whether naming schemes can have other names for a kind of variables."""
  if kind in [(power, ()) for power in POWERS]:
    return True
  return any(member.loss_scale or member.form.depth for member in members)


def _match_kind(
  members: Members,
  found: Members,
  has_kinds: bool,
  have_equal_values: HaveEqualValues,
  matched: Match,
) -> None:
  """Adds to `matched` which of `found` each of the variables of a kind is.

  Args:
    members: those of the graph.
    found: those in the checkpoint.
    has_kinds: whether the graph tells which optimizers have a loss scale.
    have_equal_values: compares variables in the checkpoint.
    matched: what is known of other kinds.
  """
  others = without_second_names(found, have_equal_values)
  fits = _fits(members, found, has_kinds) or _fits(members, others, has_kinds)
  is_extended = _is_part(found, members) and not _may_have_lost_scope(members, found)
  if not fits and (is_extended or _is_part(members, others)):
    names = {member.name for member in found}
    fits = [{member.name: member.name for member in members if member.name in names}]
  used: List[str] = []
  for member in members:
    sources = [names[member.name] for names in fits if member.name in names]
    if not fits:
      sources = _in_scope_of(member, found)
    sources = list(dict.fromkeys(sources))
    unused = [source for source in sources if source not in used]
    is_complete = bool(fits) or len(found) >= len(members)
    if unused and is_complete and have_equal_values(sources):
      matched.names[member.name] = unused[0]
      used.append(unused[0])
    elif sources:
      matched.ambiguous[member.name] = sources


def _fits(members: Members, found: Members, has_kinds: bool) -> List[Dict[str, str]]:
  """Returns each way in which a graph and a checkpoint can be those of one program: the
  names in the checkpoint by those in the graph.

      the names are the same
      or, in each group, there are as many, in an order of creation that is certain:
        the graph's names as each naming scheme writes them, by form
        by scope: then it does not matter who has a loss scale
        all in one group, if one side has lost its scopes, and who has a loss scale is
          not known
  """
  names = {member.name: member.name for member in members}
  if set(names) == {member.name for member in found}:
    return [names]
  keys: List[Tuple[_KeyOf, _KeyOf]] = [(_scope, _scope)]
  for write in naming_schemes.FORMS:
    keys.append((_form_in(write), lambda member: member.form))
  if not has_kinds and not all(any(map(_scope, side)) for side in (members, found)):
    keys.append((lambda member: "", lambda member: ""))
  paired = [_pair(grouped(members, one), grouped(found, two)) for one, two in keys]
  return [pairs for pairs in paired if pairs]


def _form_in(write: naming_schemes.WriteForm) -> _KeyOf:
  """Returns a key: the form of a variable of the graph in a naming scheme."""
  return lambda member: write(member.alone, member.loss_scale)


def _scope(member: Member) -> str:
  """Returns a key: the name scope without conditionals; "" for none."""
  return member.scope


def grouped(members: Iterable[Member], key_of: _KeyOf) -> Dict[Hashable, Members]:
  """Returns the variables that have the same key, in groups by this key."""
  groups: Dict[Hashable, Members] = collections.defaultdict(list)
  for member in members:
    groups[key_of(member)].append(member)
  return groups


def _pair(
  groups: Mapping[Hashable, Members], others: Mapping[Hashable, Members]
) -> Dict[str, str]:
  """Returns the names in `others` by those in `groups`, each by its place in its group;
  {} if there are not as many in each, or their order is not certain.
  """
  pairs: Dict[str, str] = {}
  if set(groups) != set(others):
    return {}
  for key, members in groups.items():
    if len(members) != len(others[key]):
      return {}
    if not is_ordered(members) or not is_ordered(others[key]):
      return {}
    for member, other in zip(members, others[key]):
      pairs[member.name] = other.name
  return pairs


def is_ordered(members: Members) -> bool:
  """Returns whether the order of creation is certain: it is known of each, or their
  names have one form, in which numbers tell it.
  """
  if all(member.position >= 0 for member in members):
    return True
  return len({member.form for member in members}) < 2


def _is_part(part: Members, whole: Members) -> bool:
  """Returns whether all names of one side are among those of the other.

  Names without conditionals prove nothing if the other side has some.
  """
  names = {member.name for member in whole}
  if not all(member.name in names for member in part):
    return False
  return _have_conditionals(part) == _have_conditionals(whole)


def _may_have_lost_scope(members: Members, found: Members) -> bool:
  """Returns whether a name without scope in a checkpoint may be that of a variable that
  has a scope in the graph.
  """
  names = {member.name for member in found}
  missing = [member for member in members if member.name not in names]
  return any(map(_scope, missing)) and not all(map(_scope, found))


def _have_conditionals(members: Members) -> bool:
  """Returns whether one of the names has a conditional."""
  return any(member.form.depth for member in members)


def without_second_names(found: Members, have_equal_values: HaveEqualValues) -> Members:
  """Returns the variables of a kind in a checkpoint without second names.

  Earlier versions of `install()` wrote a variable as `beta1_power` and, with the same
  value, as `cond_1/beta1_power`. A second name is no variable in the `.meta` file.
  """
  result: Members = []
  for members in grouped(found, _scope).values():
    inside = [member for member in members if member.form.depth]
    outside = [member for member in members if not member.form.depth]
    is_known = members[0].position >= 0
    if is_known or not _are_copies(inside, outside, have_equal_values):
      outside = members
    result += outside
  return result


def _are_copies(
  members: Members, others: Members, have_equal_values: HaveEqualValues
) -> bool:
  """Returns whether each variable has the value of one of the others."""
  for member in members:
    pairs = [[member.name, other.name] for other in others]
    if not any(have_equal_values(pair) for pair in pairs):
      return False
  return True


def _in_scope_of(member: Member, found: Iterable[Member]) -> List[str]:
  """Returns the variables in the scope of `member`; those outside of scopes have lost
  theirs, or `member` has.
  """
  names: List[str] = []
  for other in found:
    if member.scope == other.scope or "" in (member.scope, other.scope):
      names.append(other.name)
  return names


def _match_state(
  graph: Variables, found: naming_schemes.Shapes, matched: Match
) -> None:
  """Adds the names in a checkpoint of the variables of loss scales.

  Variables in several scopes are those that a checkpoint has outside of scopes in the
  order of creation; without it, they are ambiguous.
  """
  wanted_roles = naming_schemes.state(graph.shapes)
  found_roles = naming_schemes.state(found)
  result = {name: name for name in wanted_roles if name in found}

  def role_scope_and_number(name: str, role: str) -> Hashable:
    parsed = naming_schemes.parse(name)
    return role, parsed.scope, parsed.number

  def role_and_scope(name: str, role: str) -> Hashable:
    return role, naming_schemes.parse(name).scope

  def role_only(name: str, role: str) -> Hashable:
    del name
    return role

  for key_of in (role_scope_and_number, role_and_scope, role_only):
    left = {name: role for name, role in wanted_roles.items() if name not in result}
    unused = set(found_roles).difference(result.values())
    candidates = _named_by_key({name: found_roles[name] for name in unused}, key_of)
    for key, names in _named_by_key(left, key_of, graph.order).items():
      sources = candidates.get(key, [])
      if len(names) == len(sources) and _scopes_fit(names, sources):
        if len(_scopes(names)) < 2 or set(names) <= set(graph.order):
          result.update(zip(names, sources))
        else:
          matched.ambiguous.update(dict.fromkeys(names, sources))
  matched.names.update(result)


def _named_by_key(
  roles: Mapping[str, str],
  key_of: Callable[[str, str], Hashable],
  order: Sequence[str] = (),
) -> Dict[Hashable, List[str]]:
  """Returns the names that have the same key, in `order`, or else by their numbers."""
  places = {name: place for place, name in enumerate(order)}
  groups: Dict[Hashable, List[str]] = collections.defaultdict(list)
  for name in sorted(
    roles, key=lambda name: (places.get(name, -1), naming_schemes.parse(name))
  ):
    groups[key_of(name, roles[name])].append(name)
  return groups


def _scopes(names: Iterable[str]) -> List[str]:
  """Returns the different name scopes of variables."""
  return sorted({naming_schemes.parse(name).scope for name in names})


def _scopes_fit(wanted: List[str], found: List[str]) -> bool:
  """Returns whether variables of one role can be those of a checkpoint: in the same
  scopes, or clearly in another one. A program creates a loss scale in any scope.
  """
  wanted_scopes, found_scopes = _scopes(wanted), _scopes(found)
  if wanted_scopes == found_scopes or found_scopes == [""]:
    return True
  return len(found_scopes) == 1 and len(wanted_scopes) == 1
