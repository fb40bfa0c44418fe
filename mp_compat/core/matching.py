# SPDX-License-Identifier: Apache-2.0
"""Finds the variables of a graph in a checkpoint of any naming scheme.

Does not import TensorFlow. The variables that an optimizer creates when it applies
gradients (Adam's powers; TensorFlow calls them non-slot variables) have other names in
each scheme, and one name can be that of two optimizers:

    optimizers, in the order of creation   mp_compat        TensorFlow's class
    Adam with a dynamic loss scale         beta1_power      cond_1/beta1_power
    Adam without loss scaling              beta1_power_1    beta1_power

So `match` compares all variables of a kind at once, by what is known of each of them:
its name scope, whether it is created in a conditional, and its place in the order of
creation. Numbers show this order among names of one form (`beta1_power_1`, or
`cond_3/beta1_power`); a graph, or the `.meta` file of a checkpoint, shows it for all. If
several variables in the checkpoint fit, and their values differ, the match is ambiguous.
"""

import collections
import re
from types import MappingProxyType
from typing import (
  Callable,
  Dict,
  FrozenSet,
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
from mp_compat.core.naming_schemes import CONTRIB
from mp_compat.core.naming_schemes import DYNAMIC
from mp_compat.core.naming_schemes import POWERS
from mp_compat.core.naming_schemes import TENSORFLOW
from mp_compat.core.naming_schemes import Conditionals
from mp_compat.core.naming_schemes import Name
from mp_compat.core.naming_schemes import NamingScheme
from mp_compat.core.naming_schemes import Shapes

# Returns whether the variables with these names in a checkpoint have equal values.
HaveEqualValues = Callable[[Sequence[str]], bool]


def differ(names: Sequence[str]) -> bool:
  """Returns that several variables have different values: for `HaveEqualValues`, where
  values are not known.
  """
  return len(names) < 2


_NOTHING: Mapping[str, str] = MappingProxyType({})


class Variables(NamedTuple):
  """The variables of a graph or of a checkpoint.

  Attributes:
    shapes: The shape of each variable, by name.
    order: Names of variables in the order of creation, as far as it is known.
    loss_scales: The kinds of loss scales, by the names of the variables that optimizers
      with these loss scales created when they applied gradients; of graphs.
    tensorflow_names: The names that TensorFlow's class would give to variables; of
      graphs after `install()`.
    explicit: The names that a program wrote itself, which are those in the checkpoint.
    second: Names that may be second names of variables, each with the first one; of a
      checkpoint whose names are wanted (see `second_names`).
  """

  shapes: Shapes
  order: Sequence[str] = ()
  loss_scales: Mapping[str, str] = _NOTHING
  tensorflow_names: Mapping[str, str] = _NOTHING
  explicit: FrozenSet[str] = frozenset()
  second: Mapping[str, str] = _NOTHING


class Match(NamedTuple):
  """Which variable in a checkpoint each variable of a graph is.

  Attributes:
    names: The names in the checkpoint, by the names in the graph.
    ambiguous: For each variable that may be one of several in the checkpoint, or one
      that may also be another variable's, the names of these.
  """

  names: Dict[str, str]
  ambiguous: Dict[str, List[str]]


class NonSlot(NamedTuple):
  """A variable that an optimizer may have created when it applied gradients.

  Attributes:
    name: Its name.
    parsed: Its name in parts.
    position: Its place in the order of creation, if known.
    loss_scale: The kind of its optimizer's loss scale; None without, or if not known.
  """

  name: str
  parsed: Name
  position: Optional[int] = None
  loss_scale: Optional[str] = None

  @property
  def scope(self) -> str:
    """Returns its name scope, without conditionals."""
    return self.parsed.scope

  @property
  def has_conditional(self) -> bool:
    """Returns whether the name of a conditional is part of its name."""
    return bool(self.parsed.conditionals)

  def is_conditional(self, scheme: NamingScheme) -> bool:
    """Returns whether a program of `scheme` creates it in a conditional."""
    return self.has_conditional or self.loss_scale in scheme.conditionals


_Candidates = Dict[str, List[str]]  # names in the checkpoint, by the name in the graph
_KeyOf = Callable[[NonSlot], Hashable]


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
    wanted: The variables to restore.
    found: The variables in the checkpoint.
    have_equal_values: Compares variables in the checkpoint. It does not matter which of
      several equal ones is restored.
    graph: All variables of the graph, if others than `wanted` are not restored.
  """
  names = {name: name for name in wanted.shapes if name in found.shapes}
  matched = Match(names, {})
  _match_state(wanted, found.shapes, matched)
  explicit = wanted.explicit & set(names)
  wanted_by_kind, found_by_kind = _by_kind(wanted, explicit), _by_kind(found, explicit)
  graph_by_kind = _by_kind(wanted if graph is None else graph, explicit)
  second = second_names(found, have_equal_values)
  for kind, members in wanted_by_kind.items():
    in_graph, in_checkpoint = graph_by_kind.get(kind, members), found_by_kind[kind]
    if kind in POWERS or _has_conditionals(in_graph + in_checkpoint):
      variants = [members, in_graph, _without_second_names(members, wanted.second)]
      candidates = _candidates(variants, in_checkpoint, second)
      if candidates is None:
        others = _without_second_names(in_checkpoint, second)
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
  """Leaves the second names that have no candidates of their own to their first names."""
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


# -- The variables of loss scales ------------------------------------------------------


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


# -- Non-slot variables ----------------------------------------------------------------


def _by_kind(
  variables: Variables, left_out: Iterable[str] = ()
) -> Dict[Hashable, List[NonSlot]]:
  """Returns variables that may be non-slot variables, by kind.

  The kind of Adam's powers is their name without scope: TensorFlow's class drops the
  scope under control flow v2. That of others, which custom optimizers create, has scope
  and shape, too; conditionals in their names are those of loss scaling only if there
  is a loss scale.
  """
  has_loss_scale = bool(naming_schemes.state(variables.shapes))
  positions = {name: index for index, name in enumerate(variables.order)}
  kinds: Dict[Hashable, List[NonSlot]] = collections.defaultdict(list)
  for name in set(variables.shapes).difference(left_out):
    parsed, shape = naming_schemes.parse(name), tuple(variables.shapes[name])
    kind: Hashable = parsed.stem
    if parsed.stem not in POWERS or shape:
      if parsed.conditionals and not has_loss_scale:
        scope = name.rpartition("/")[0]
        parsed = parsed._replace(scope=scope, conditionals=())
      parsed = _with_number(parsed)
      kind = parsed.scope, parsed.stem, shape
    loss_scale = variables.loss_scales.get(name)
    kinds[kind].append(NonSlot(name, parsed, positions.get(name), loss_scale))
  for members in kinds.values():
    members.sort(key=_creation_order)
  return kinds


def _with_number(parsed: Name) -> Name:
  """Returns a name whose last part is divided into stem and number."""
  numbered = re.fullmatch(r"(.+)_(\d+)", parsed.stem)
  if numbered is None:
    return parsed
  return parsed._replace(stem=numbered.group(1), number=int(numbered.group(2)))


def _creation_order(member: NonSlot) -> Tuple[int, Name]:
  return (-1 if member.position is None else member.position), member.parsed


def second_names(
  found: Variables, have_equal_values: HaveEqualValues
) -> Dict[str, str]:
  """Returns the second names of variables in a checkpoint, each with the first one.

  After `install()`, a Saver writes a variable as `beta1_power` and, with its name in
  TensorFlow's class, as `cond_1/beta1_power`. The names of a scope in conditionals are
  second names if each of these conditionals has the same values as variables without
  one, in the same order. Of variables that the `.meta` file has, none is a second name.
  """
  conditionals = _by_place(found, has_conditional=True)
  others = _by_place(found, has_conditional=False)
  result: Dict[str, str] = {}
  for scope, places in conditionals.items():
    remaining = [others[scope][number] for number in sorted(others[scope])]
    pairs: Dict[str, str] = {}
    paired = 0
    for place in sorted(places):
      names = places[place]
      while remaining and not _are_equal(names, remaining[0], have_equal_values):
        remaining.pop(0)
      if remaining:
        first_names = remaining.pop(0)
        pairs.update((name, first_names[stem]) for stem, name in names.items())
        paired += 1
    if paired == len(places) and not set(pairs) & set(found.order):
      result.update(pairs)
  return result


# For each scope, the names by stem, by the numbers of conditionals or the name's own.
_Places = Dict[str, Dict[Tuple[int, ...], Dict[Hashable, str]]]


def _by_place(variables: Variables, has_conditional: bool) -> _Places:
  """Returns names by what they have in common with those of the same optimizer."""
  result: _Places = collections.defaultdict(lambda: collections.defaultdict(dict))
  for kind, members in _by_kind(variables).items():
    for member in members:
      if member.has_conditional == has_conditional:
        place = member.parsed.conditionals or (member.parsed.number,)
        result[member.scope][place][kind] = member.name
  return result


def _are_equal(
  names: Mapping[Hashable, str],
  others: Mapping[Hashable, str],
  have_equal_values: HaveEqualValues,
) -> bool:
  """Returns whether all of `names` have the values of the same kinds in `others`."""
  return all(
    kind in others and have_equal_values([name, others[kind]])
    for kind, name in names.items()
  )


def _candidates(
  variants: Sequence[List[NonSlot]], found: List[NonSlot], second: Mapping[str, str]
) -> Optional[_Candidates]:
  """Returns which variables in the checkpoint each of a kind can be, of the first of
  `variants` whose numbers agree with the checkpoint; None if none does.
  """
  for members in variants:
    for others in (found, _without_second_names(found, second)):
      candidates = _agreeing(members, others)
      if candidates is not None:
        return candidates
  return None


def _without_second_names(
  found: List[NonSlot], second: Mapping[str, str]
) -> List[NonSlot]:
  """Returns the variables without second names, which show who has a loss scale."""
  result: List[NonSlot] = []
  for member in found:
    if member.name in second.values():
      result.append(member._replace(loss_scale=DYNAMIC))
    elif member.name not in second:
      result.append(member)
  return result


def _agreeing(wanted: List[NonSlot], found: List[NonSlot]) -> Optional[_Candidates]:
  """Returns which of `found` each of `wanted` can be, if the numbers of both agree: in
  each scope with and without conditionals, in each scope, or in all if one of them has
  no scopes.
  """
  names = {member.name for member in wanted}
  if names == {member.name for member in found}:
    return {name: [name] for name in names}
  keys = list(_KEYS)
  if not _has_scopes(wanted) or not _has_scopes(found):
    keys.append((_nothing, _nothing))
  for key_of_wanted, key_of_found in keys:
    wanted_groups = _grouped(wanted, key_of_wanted)
    found_groups = _grouped(found, key_of_found)
    if _sizes(wanted_groups) == _sizes(found_groups):
      result: _Candidates = {}
      for key, group in wanted_groups.items():
        result.update(_overlapping(group, found_groups[key]))
      return result
  return None


def _has_scopes(members: Iterable[NonSlot]) -> bool:
  return any(member.scope for member in members)


def _nothing(member: NonSlot) -> str:
  """Returns what all variables have in common."""
  del member
  return ""


def _scope_and_conditional(scheme: NamingScheme) -> _KeyOf:
  return lambda member: (member.scope, member.is_conditional(scheme))


def _scope(member: NonSlot) -> str:
  return member.scope


def _scope_under_control_flow_v2(member: NonSlot) -> str:
  """Returns the scope that TensorFlow's class gives it under control flow v2."""
  return "" if member.is_conditional(TENSORFLOW) else member.scope


# What variables of a graph and of a checkpoint have in common, most specific first.
_KEYS: Sequence[Tuple[_KeyOf, _KeyOf]] = (
  (_scope_and_conditional(TENSORFLOW), _scope_and_conditional(TENSORFLOW)),
  (_scope_and_conditional(CONTRIB), _scope_and_conditional(CONTRIB)),
  (_scope, _scope),
  (_scope_under_control_flow_v2, _scope),
)


def _grouped(
  members: Iterable[NonSlot], key_of: _KeyOf
) -> Dict[Hashable, List[NonSlot]]:
  groups: Dict[Hashable, List[NonSlot]] = collections.defaultdict(list)
  for member in members:
    groups[key_of(member)].append(member)
  return groups


def _sizes(groups: Mapping[Hashable, Sequence[NonSlot]]) -> Dict[Hashable, int]:
  return {key: len(members) for key, members in groups.items()}


def _overlapping(wanted: List[NonSlot], found: List[NonSlot]) -> _Candidates:
  """Returns for each of `wanted` those of as many `found` that may have its place in the
  order of creation.
  """
  places = _possible_places(found)
  result: _Candidates = {}
  by_last_place = sorted(places, key=lambda other: places[other][::-1])
  for name, (first, last) in _possible_places(wanted).items():
    result[name] = [
      other
      for other in by_last_place
      if first <= places[other][1] and places[other][0] <= last
    ]
  return result


def _possible_places(members: List[NonSlot]) -> Dict[str, Tuple[int, int]]:
  """Returns the first and the last place that each may have in the order of creation.

  If the order is not known, it is known for each chain: of one scope, with conditionals
  or without. The variable at index 1 in a chain of 3 is at place 1 of 5 at the earliest,
  and at place 3 at the latest.
  """
  places: Dict[str, Tuple[int, int]] = {}
  if all(member.position is not None for member in members):
    for index, member in enumerate(sorted(members, key=_creation_order)):
      places[member.name] = index, index
    return places
  chains = _grouped(members, lambda member: (member.scope, member.has_conditional))
  for chain in chains.values():
    chain.sort(key=lambda member: member.parsed)
    for index, member in enumerate(chain):
      places[member.name] = index, index + len(members) - len(chain)
  return places


def _uncertain(
  wanted: List[NonSlot],
  in_graph: List[NonSlot],
  found: List[NonSlot],
  variables: Variables,
  have_equal_values: HaveEqualValues,
) -> _Candidates:
  """Returns which of `found` each of `wanted` can be where their numbers do not agree,
  because the graph or the checkpoint is that of a part of the program.

  Identical names are proof only within one naming scheme, and if one side has all names
  of the other.
  """
  names = {member.name for member in found}
  recorded = variables.tensorflow_names
  if _has_conditionals(found) and names & set(recorded.values()):
    own_names = _names_with_tensorflow(in_graph, recorded)
  else:
    own_names = {member.name: member.name for member in in_graph}
    names_in_graph = set(own_names)
    is_part = names <= names_in_graph or names_in_graph <= names
    is_same_scheme = _has_conditionals(found) == _has_conditionals(in_graph)
    if not (is_same_scheme and is_part) or _may_be_second_names(
      in_graph, found, have_equal_values
    ):
      return {member.name: _in_scope_of(member, found) for member in wanted}
  result: _Candidates = {}
  for member in wanted:
    own_name = own_names[member.name]
    result[member.name] = [own_name] if own_name in names else []
  return result


def _has_conditionals(members: Iterable[NonSlot]) -> bool:
  return any(member.has_conditional for member in members)


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
  return all(
    any(have_equal_values([name, other]) for other in inside) for name in outside
  )


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
  return [
    other.name
    for other in found
    if member.scope == other.scope or "" in (member.scope, other.scope)
  ]


# -- Conversion ------------------------------------------------------------------------


def translate(
  found: Variables, to: str, have_equal_values: HaveEqualValues
) -> Dict[str, Optional[str]]:
  """Returns the names that a checkpoint has in another naming scheme, each with the name
  to copy from, if any. A loss scale is added where there is none.

  Adam's powers of a single optimizer get the names of both control flow versions. Raises
  a ValueError if `to` is not the name of a scheme, a variable of the program has a name
  to write, or the names of Adam's powers are not certain.
  """
  if to not in naming_schemes.SCHEMES:
    schemes = ", ".join(map(repr, naming_schemes.SCHEMES))
    raise ValueError(
      "The naming scheme must be one of {}, but got {!r}.".format(schemes, to)
    )
  scheme = naming_schemes.SCHEMES[to]
  state = naming_schemes.state(found.shapes)
  powers = _powers(found, have_equal_values)
  result: Dict[str, Optional[str]] = {}
  for name in found.shapes:
    if name not in state and naming_schemes.parse(name).stem not in POWERS:
      result[name] = name
  translated: Dict[str, Optional[str]] = dict(_translate_state(state, scheme))
  translated.update(_translate_powers(powers, state, found, scheme, have_equal_values))
  for target, source in translated.items():
    if source and target in result:
      raise ValueError(
        "{} would be written as {}, which is the name of another variable. Expected no "
        "variable of that name, or another naming scheme than {!r}.".format(
          source, target, to
        )
      )
    result.setdefault(target, source)
  return result


def _translate_state(
  state: Mapping[str, str], scheme: NamingScheme
) -> Dict[str, Optional[str]]:
  """Returns the names of loss scales' variables in a scheme, each with that in `state`,
  if any.
  """
  targets: Dict[str, Optional[str]] = {}
  for source, role in state.items():
    if role in scheme.state:
      name = naming_schemes.parse(source)
      stem = scheme.state[role].name
      targets[naming_schemes.join(name.scope, stem, name.number)] = source
  if not state and scheme.state:
    for role in ("current_loss_scale", "good_steps"):
      targets[scheme.state[role].name] = None
  if scheme is CONTRIB:  # each of its loss scales has all variables
    for target in list(targets):
      name = naming_schemes.parse(target)
      if name.stem == scheme.state["current_loss_scale"].name:
        bad_steps = scheme.state["bad_steps"].name
        target = naming_schemes.join(name.scope, bad_steps, name.number)
        targets.setdefault(target, None)
  return targets


def _powers(found: Variables, have_equal_values: HaveEqualValues) -> List[NonSlot]:
  """Returns Adam's powers, without second names.

  Variables of other shapes that have such a name are among them: they count, too, where
  names get a number.
  """
  named = {
    name: () for name in found.shapes if naming_schemes.parse(name).stem in POWERS
  }
  second = second_names(found, have_equal_values)
  members: List[NonSlot] = []
  for group in _by_kind(found._replace(shapes=named)).values():
    members += _without_second_names(group, second)
  return members


def _translate_powers(
  powers: List[NonSlot],
  state: Mapping[str, str],
  found: Variables,
  scheme: NamingScheme,
  have_equal_values: HaveEqualValues,
) -> Dict[str, str]:
  """Returns the names of Adam's powers in a scheme, each with that in the checkpoint.

  Raises a ValueError if the checkpoint does not tell them.
  """
  source = naming_schemes.recognize(found.shapes)
  is_single = _count(powers) < 2
  if scheme.conditionals and not is_single:
    return _names_in_conditionals(powers, state, source, scheme)
  result, unordered = _names_without_conditionals(powers, state, have_equal_values)
  if unordered:
    raise ValueError(
      "{} are variables of different optimizers, but their names do not tell in which "
      "order the program creates them. Expected the .meta file beside the checkpoint, "
      "or `like`: pass a checkpoint of the program that will restore this one "
      "(--like).".format(", ".join(unordered))
    )
  if scheme.conditionals:
    result.update(_names_of_single_optimizer(result, scheme))
    if scheme is source:
      result.update((member.name, member.name) for member in powers)
  return result


def _count(powers: Iterable[NonSlot]) -> int:
  """Returns the number of optimizers that have these powers."""
  return max(_sizes(_grouped(powers, lambda one: one.parsed.stem)).values(), default=0)


def plain_names(found: Variables, have_equal_values: HaveEqualValues) -> Dict[str, str]:
  """Returns the names in a checkpoint by those that an optimizer alone gives the same
  variables; omits powers whose names are not certain.
  """
  powers = _powers(found, have_equal_values)
  state = naming_schemes.state(found.shapes)
  names, _ = _names_without_conditionals(powers, state, have_equal_values)
  for name in found.shapes:
    if naming_schemes.parse(name).stem not in POWERS:
      names[name] = name
  return names


def _names_without_conditionals(
  powers: List[NonSlot], state: Mapping[str, str], have_equal_values: HaveEqualValues
) -> Tuple[Dict[str, str], List[str]]:
  """Returns the names of Adam's powers that an optimizer alone gives them, each with
  that in the checkpoint; then the names of those whose order is not known.
  """
  result: Dict[str, str] = {}
  unordered: List[str] = []
  for members in _grouped(powers, lambda one: (one.scope, one.parsed.stem)).values():
    if not any(member.has_conditional for member in members):
      result.update((member.name, member.name) for member in members)
      continue
    names = _in_order_of_creation(members, have_equal_values)
    unordered += [] if names else [member.name for member in members]
    scope, stem = members[0].scope, members[0].parsed.stem
    for number, name in enumerate(names):
      result[naming_schemes.join(scope, stem, number)] = name
  scopes = {naming_schemes.parse(name).scope for name in state}
  if _count(powers) == 1 and len(scopes) == 1:
    # Under control flow v2, TensorFlow's class drops the optimizer's scope.
    (scope,) = scopes
    for power in set(POWERS) & set(result):
      result[naming_schemes.join(scope, power)] = result[power]
  return result, unordered


def _in_order_of_creation(
  members: List[NonSlot], have_equal_values: HaveEqualValues
) -> List[str]:
  """Returns names in the order of creation, of equal values in any; none if it is not
  known.
  """
  places = _possible_places(members)
  names = sorted(places, key=lambda name: places[name])
  is_ordered = all(first == last for first, last in places.values())
  return names if is_ordered or have_equal_values(names) else []


def _names_of_single_optimizer(
  plain: Mapping[str, str], scheme: NamingScheme
) -> Dict[str, str]:
  """Returns the names of one optimizer's powers in TensorFlow's or contrib's class: in
  its first conditionals under control flow v1, without a scope under v2.
  """
  result: Dict[str, str] = {}
  for name, source in plain.items():
    parsed = naming_schemes.parse(name)
    number = scheme.conditionals[DYNAMIC].applying
    conditional = naming_schemes.join(parsed.scope, "cond", number)
    result["{}/{}".format(conditional, parsed.stem)] = source
    result[parsed.stem] = source
  return result


def _names_in_conditionals(
  powers: List[NonSlot],
  state: Mapping[str, str],
  source: NamingScheme,
  scheme: NamingScheme,
) -> Dict[str, str]:
  """Returns the names of several optimizers' powers under control flow v1 in TensorFlow's
  or contrib's class, each with that in the checkpoint.

  A checkpoint of this package tells them if it has as many loss scales as optimizers
  with powers; then all have names in conditionals, and a program in which one of them
  has no loss scale finds no variable of its name. A checkpoint of TensorFlow's or
  contrib's class tells them if all conditionals are those of dynamic loss scales. Raises
  a ValueError otherwise.
  """
  if source is scheme:
    return {member.name: member.name for member in powers}
  groups = _grouped(powers, lambda member: member.has_conditional)
  inside, outside = groups[True], groups[False]
  scales = list(state.values()).count("current_loss_scale")
  dynamic = scheme.conditionals[DYNAMIC]
  if not inside and _count(outside) == scales:
    return _with_conditionals(outside, dynamic)
  # With TensorFlow's class, an optimizer with a fixed loss scale is outside, too.
  is_certain = source is CONTRIB or (source is TENSORFLOW and not outside)
  if inside and is_certain and _count(inside) == scales:
    applying = source.conditionals[DYNAMIC].applying
    return _with_shifted_conditionals(powers, dynamic.applying - applying)
  names = ", ".join(member.name for member in powers)
  raise ValueError(
    "The names in the naming scheme {!r} depend on which optimizers have a loss scale. "
    "The checkpoint does not tell: it has {} loss scales, and these variables of {} "
    "optimizers: {}. Pass `like`, a checkpoint of the program that will restore this "
    "one (--like).".format(scheme.name, scales, _count(powers), names)
  )


def _with_conditionals(
  powers: List[NonSlot], conditionals: Conditionals
) -> Dict[str, str]:
  """Returns the names of powers of optimizers that all build these conditionals."""
  result: Dict[str, str] = {}
  for members in _grouped(powers, lambda one: (one.scope, one.parsed.stem)).values():
    for index, member in enumerate(members):
      number = conditionals.total * index + conditionals.applying
      conditional = naming_schemes.join(member.scope, "cond", number)
      result["{}/{}".format(conditional, member.parsed.stem)] = member.name
  return result


def _with_shifted_conditionals(powers: List[NonSlot], shift: int) -> Dict[str, str]:
  """Returns the names of powers where another conditional of each optimizer applies;
  those outside of conditionals stay.
  """
  result: Dict[str, str] = {}
  for member in powers:
    if not member.has_conditional:
      result[member.name] = member.name
      continue
    *scopes, _, stem = member.name.split("/")
    number = member.parsed.conditionals[-1] + shift
    conditional = naming_schemes.join("/".join(scopes), "cond", number)
    result["{}/{}".format(conditional, stem)] = member.name
  return result
