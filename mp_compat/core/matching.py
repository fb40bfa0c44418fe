# SPDX-License-Identifier: Apache-2.0
"""Finds the variables of a graph in a checkpoint of any naming scheme. Does not import
TensorFlow.

`match` compares all variables of a kind at once (`core.non_slots` says why). If several
variables in the checkpoint fit, and their values differ, the match is ambiguous.
"""

import collections
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
from mp_compat.core import non_slots
from mp_compat.core.naming_schemes import CONTRIB
from mp_compat.core.naming_schemes import POWERS
from mp_compat.core.naming_schemes import TENSORFLOW
from mp_compat.core.naming_schemes import NamingScheme
from mp_compat.core.naming_schemes import Shapes
from mp_compat.core.non_slots import HaveEqualValues
from mp_compat.core.non_slots import NonSlot
from mp_compat.core.non_slots import Variables


def assume_different(names: Sequence[str]) -> bool:
  """Returns False for several variables: a `HaveEqualValues` where values are not
  known.
  """
  return len(names) < 2


class Match(NamedTuple):
  """Which variable in a checkpoint each variable of a graph is.

  Attributes:
    names: The names in the checkpoint, by the names in the graph.
    ambiguous: For each variable that may be one of several in the checkpoint, or one
      that may also be another variable's, the names of these.
  """

  names: Dict[str, str]
  ambiguous: Dict[str, List[str]]


_Candidates = Dict[str, List[str]]  # names in the checkpoint, by the name in the graph


def match(
  wanted: Variables,
  found: Variables,
  have_equal_values: HaveEqualValues,
  graph: Optional[Variables] = None,
) -> Match:
  """Returns which variable in a checkpoint each wanted variable is.

      variables of loss scales   by role: in the same scope, in the order of creation;
                                 then in another scope, if that is clear
      non-slot variables         by all that is known of them (see above)
      all others                 by name

  Variables with other names match only if the checkpoint has as many of a kind as are
  wanted, or as the graph has, with or without second names (`second_names`).

  Args:
    wanted: the variables to restore.
    found: the variables in the checkpoint.
    have_equal_values: compares variables in the checkpoint. It does not matter which of
      several equal ones is restored.
    graph: all variables of the graph, if others than `wanted` are not restored.
  """
  names = {name: name for name in wanted.shapes if name in found.shapes}
  matched = Match(names, {})
  _match_state(wanted, found.shapes, matched)
  explicit = wanted.explicit & set(names)
  wanted_by_kind = non_slots.by_kind(wanted, explicit)
  found_by_kind = non_slots.by_kind(found, explicit)
  graph_by_kind = non_slots.by_kind(wanted if graph is None else graph, explicit)
  second = non_slots.second_names(found, have_equal_values)
  for kind, members in wanted_by_kind.items():
    in_graph = graph_by_kind.get(kind, members)
    in_checkpoint = found_by_kind[kind]
    if kind not in POWERS and not non_slots.have_conditionals(in_graph + in_checkpoint):
      continue  # matched by name
    variants = [
      members,
      in_graph,
      non_slots.without_second_names(members, wanted.second),
    ]
    candidates = _candidates(variants, in_checkpoint, second)
    if candidates is None:
      others = non_slots.without_second_names(in_checkpoint, second)
      candidates = _uncertain(members, in_graph, others, wanted, have_equal_values)
      if len(in_checkpoint) < len(in_graph):
        _reject_other_names(candidates, matched)
    _choose(members, candidates, have_equal_values, matched)
    _leave_second_names(wanted.second, candidates, matched)
  _add_other_names(wanted, found, matched)
  return matched


def _reject_other_names(candidates: _Candidates, matched: Match) -> None:
  """Moves candidates with other names to the ambiguous ones: the checkpoint has fewer
  variables than the graph, and each can be that of several.
  """
  for name, sources in list(candidates.items()):
    if sources and sources != [name]:
      matched.ambiguous[name] = candidates.pop(name)


def _choose(
  members: List[NonSlot],
  candidates: _Candidates,
  have_equal_values: HaveEqualValues,
  matched: Match,
) -> None:
  """Chooses one candidate for each variable, if their values are equal."""
  used: List[str] = []
  for member in members:
    name, sources = member.name, candidates.get(member.name, [])
    identical = matched.names.pop(name, None)
    unused = [source for source in sources if source not in used]
    if unused and have_equal_values(sources):
      matched.names[name] = unused[0]
      used.append(unused[0])
    elif sources or identical:
      matched.ambiguous.setdefault(name, sources or [name])


def _leave_second_names(
  second: Mapping[str, str], candidates: _Candidates, matched: Match
) -> None:
  """Leaves second names that have no candidates of their own to their first names."""
  for name in second:
    if name not in candidates:
      matched.ambiguous.pop(name, None)


def _add_other_names(wanted: Variables, found: Variables, matched: Match) -> None:
  """Adds what is known of names that are left: second names, and TensorFlow's."""
  left = set(wanted.shapes).difference(matched.names, matched.ambiguous)
  for name in left:
    first = wanted.second.get(name, "")
    tensorflow_name = wanted.tensorflow_names.get(name, "")
    if first in matched.names:
      matched.names[name] = matched.names[first]
    elif tensorflow_name in found.shapes:
      matched.names[name] = tensorflow_name


def _match_state(wanted: Variables, found: Shapes, matched: Match) -> None:
  """Adds the names in a checkpoint of the variables of loss scales.

  Variables in several scopes are those that a checkpoint has outside of scopes in the
  order of creation; without it, they are ambiguous.
  """
  wanted_roles = naming_schemes.state(wanted.shapes)
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
    for key, names in _named_by_key(left, key_of, wanted.order).items():
      sources = candidates.get(key, [])
      if len(names) == len(sources) and _scopes_fit(names, sources):
        if _is_ordered(names, wanted.order):
          result.update(zip(names, sources))
        else:
          matched.ambiguous.update(dict.fromkeys(names, sources))
  matched.names.update(result)


def _is_ordered(names: List[str], order: Sequence[str]) -> bool:
  """Returns whether the order of creation is known: by numbers within a scope."""
  scopes = {naming_schemes.parse(name).scope for name in names}
  return len(scopes) < 2 or set(names) <= set(order)


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


def _scopes_fit(wanted: List[str], found: List[str]) -> bool:
  """Returns whether variables of one role can be those of a checkpoint: in the same
  scopes, or clearly in another one. A program creates a loss scale in any scope.
  """
  wanted_scopes = {naming_schemes.parse(name).scope for name in wanted}
  found_scopes = {naming_schemes.parse(name).scope for name in found}
  if wanted_scopes == found_scopes or found_scopes == {""}:
    return True
  return len(found_scopes) == 1 and len(wanted_scopes) == 1


def _candidates(
  variants: Sequence[List[NonSlot]], found: List[NonSlot], second: Mapping[str, str]
) -> Optional[_Candidates]:
  """Returns which variables in the checkpoint each of a kind can be, of the first of
  `variants` whose numbers agree with the checkpoint; None if none does.
  """
  for members in variants:
    for others in (found, non_slots.without_second_names(found, second)):
      candidates = _agreeing(members, others)
      if candidates is not None:
        return candidates
  return None


def _agreeing(wanted: List[NonSlot], found: List[NonSlot]) -> Optional[_Candidates]:
  """Returns which of `found` each of `wanted` can be, if the numbers of both agree.

      if both have the same names: each is the one of its name
      for each pair of keys in _KEYS, then one key for all if one side has no scopes:
        group `wanted` by the first key, and `found` by the second
        if each group of `wanted` has as many members as that of `found`:
          return for each of `wanted` the members of its group that may have its place

  Args:
    wanted: variables of one kind in the graph.
    found: variables of this kind in the checkpoint.

  Returns:
    The names in `found` by each name in `wanted`; None if the numbers agree by no key.
    With "head/beta1_power" and "beta1_power" in the graph, and
    "head/cond_1/beta1_power" and "cond_3/beta1_power" in the checkpoint, each has one
    candidate: both sides have one variable in each scope.
  """
  names = {member.name for member in wanted}
  if names == {member.name for member in found}:
    return {name: [name] for name in names}
  keys = list(_KEYS)
  if not _has_scopes(wanted) or not _has_scopes(found):
    keys.append((_nothing, _nothing))
  for key_of_wanted, key_of_found in keys:
    wanted_groups = non_slots.grouped(wanted, key_of_wanted)
    found_groups = non_slots.grouped(found, key_of_found)
    if non_slots.sizes(wanted_groups) == non_slots.sizes(found_groups):
      result: _Candidates = {}
      for key, group in wanted_groups.items():
        result.update(_overlapping(group, found_groups[key]))
      return result
  return None


def _has_scopes(members: Iterable[NonSlot]) -> bool:
  """Returns whether one of the variables is in a name scope, conditionals aside."""
  return any(member.scope for member in members)


def _nothing(member: NonSlot) -> str:
  """Returns what all variables have in common."""
  del member
  return ""


def _scope_and_conditional(scheme: NamingScheme) -> non_slots.KeyOf:
  """Returns a key: the scope, and whether a program of `scheme` creates the variable in
  a conditional. It differs between schemes for a fixed loss scale: only contrib's class
  builds a conditional for it.
  """
  return lambda member: (member.scope, member.is_conditional(scheme))


def _scope(member: NonSlot) -> str:
  """Returns the name scope without conditionals; "" for none."""
  return member.scope


def _scope_under_control_flow_v2(member: NonSlot) -> str:
  """Returns the scope that TensorFlow's class gives it under control flow v2."""
  if member.is_conditional(TENSORFLOW):
    return ""
  return member.scope


# What variables of a graph and of a checkpoint have in common, most specific first:
# pairs of a key for variables of the graph and a key for those of the checkpoint. They
# are the same one unless TensorFlow's class wrote the checkpoint under control flow v2.
_KEYS: Sequence[Tuple[non_slots.KeyOf, non_slots.KeyOf]] = (
  (_scope_and_conditional(TENSORFLOW), _scope_and_conditional(TENSORFLOW)),
  (_scope_and_conditional(CONTRIB), _scope_and_conditional(CONTRIB)),
  (_scope, _scope),
  (_scope_under_control_flow_v2, _scope),
)


def _overlapping(wanted: List[NonSlot], found: List[NonSlot]) -> _Candidates:
  """Returns for each of `wanted` those of as many `found` that may have its place in
  the order of creation.
  """
  places = non_slots.possible_places(found)
  result: _Candidates = {}
  by_last_place = sorted(places, key=lambda other: places[other][::-1])
  for name, (first, last) in non_slots.possible_places(wanted).items():
    result[name] = []
    for other in by_last_place:
      first_of_other, last_of_other = places[other]
      if first <= last_of_other and first_of_other <= last:
        result[name].append(other)
  return result


def _uncertain(
  wanted: List[NonSlot],
  in_graph: List[NonSlot],
  found: List[NonSlot],
  variables: Variables,
  have_equal_values: HaveEqualValues,
) -> _Candidates:
  """Returns which of `found` each of `wanted` can be where their numbers do not agree,
  because the graph or the checkpoint is that of a part of the program.

      if `found` has conditionals, and names that TensorFlow's class would give to
          variables of the graph:
        each is the one with its name in TensorFlow's class, or none
      elif both sides have conditionals, or neither has, and one has all names of the
          other, and those of `found` outside of scopes are no second names:
        each is the one with its own name, or none
      else: each may be any in its scope

  Identical names are proof only within one naming scheme, and if one side has all names
  of the other: in another scheme, `beta1_power` may be that of another optimizer.

  Args:
    wanted: variables of one kind that are restored; a part of `in_graph`.
    in_graph: all variables of this kind in the graph.
    found: those in the checkpoint, without the second names that are certain.
    variables: the variables to restore, with their names in TensorFlow's class.
    have_equal_values: compares variables in the checkpoint.

  Returns:
    Names in `found` by each name in `wanted`; [] for a variable that is none of them.
  """
  names = {member.name for member in found}
  recorded = variables.tensorflow_names
  if non_slots.have_conditionals(found) and names & set(recorded.values()):
    own_names = _names_with_tensorflow(in_graph, recorded)
  else:
    own_names = {member.name: member.name for member in in_graph}
    names_in_graph = set(own_names)
    is_part = names <= names_in_graph or names_in_graph <= names
    is_same_scheme = non_slots.have_conditionals(found) == non_slots.have_conditionals(
      in_graph
    )
    if not (is_same_scheme and is_part) or _may_be_second_names(
      in_graph, found, have_equal_values
    ):
      return {member.name: _in_scope_of(member, found) for member in wanted}
  result: _Candidates = {}
  for member in wanted:
    own_name = own_names[member.name]
    result[member.name] = [own_name] if own_name in names else []
  return result


def _may_be_second_names(
  in_graph: List[NonSlot], found: List[NonSlot], have_equal_values: HaveEqualValues
) -> bool:
  """Returns whether variables outside of scopes may be second names of those in scopes,
  as `install()` writes them under control flow v2, in a graph that has both.
  """
  if len({bool(member.scope) for member in in_graph}) < 2:
    return False
  inside = [member.name for member in found if member.scope]
  outside = [member.name for member in found if not member.scope]
  for name in outside:
    if not any(have_equal_values([name, other]) for other in inside):
      return False
  return True


def _names_with_tensorflow(
  members: List[NonSlot], recorded: Mapping[str, str]
) -> Dict[str, str]:
  """Returns the names in TensorFlow's class: those that are recorded, and numbers that
  do not count these.
  """
  numbers: Dict[str, int] = collections.defaultdict(int)
  result: Dict[str, str] = {}
  for member in members:
    scope, stem = member.scope, member.parsed.stem
    result[member.name] = recorded.get(member.name) or naming_schemes.join(
      scope, stem, numbers[scope]
    )
    numbers[scope] += member.name not in recorded
  return result


def _in_scope_of(member: NonSlot, found: Iterable[NonSlot]) -> List[str]:
  """Returns the variables in the scope of `member`; those outside of scopes have lost
  theirs, or `member` has.
  """
  names: List[str] = []
  for other in found:
    if member.scope == other.scope or "" in (member.scope, other.scope):
      names.append(other.name)
  return names
