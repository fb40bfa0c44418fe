# SPDX-License-Identifier: Apache-2.0
"""Finds the variables of a graph in a checkpoint of any naming scheme. Does not import
TensorFlow.

Variables that an optimizer creates when it applies gradients, such as Adam's powers,
have other names in each naming scheme, and one name can be that of two optimizers:

    optimizers, in the order of creation   mp_compat        TensorFlow's class
    Adam with a dynamic loss scale         beta1_power      cond_1/beta1_power
    Adam without loss scaling              beta1_power_1    beta1_power

So all variables of a kind (`beta1_power`) are compared at once, and so are those of
loss scales in one role. `match` has the rule. Weights and slots have one name in all
naming schemes: a scope of a model may be called "cond", too.
"""

import collections
import re
from types import MappingProxyType
from typing import (
  Callable,
  Collection,
  Container,
  Dict,
  List,
  Mapping,
  NamedTuple,
  Optional,
  Sequence,
  Tuple,
)

from mp_compat.core import naming_schemes
from mp_compat.core.naming_schemes import POWERS

# Returns whether the variables with these names in a checkpoint have equal values.
HaveEqualValues = Callable[[Sequence[str]], bool]


class Variables(NamedTuple):
  """The variables of a graph, or of the program that wrote a checkpoint.

  Attributes:
    shapes: The shape of each variable, by name.
    order: Names of variables in the order of creation, as far as it is known: of a
      checkpoint, if it has a `.meta` file.
    loss_scales: The kinds of loss scales, by the names of the variables that optimizers
      with these loss scales created when they applied gradients. Only graphs of this
      package have them.
    created: The names of variables that are known to have been created in conditionals.
    weights: The names of trainable variables; of graphs only.
    unsaved: The names of the program's variables that are not in the checkpoint.
  """

  shapes: naming_schemes.Shapes
  order: Sequence[str] = ()
  loss_scales: Mapping[str, str] = MappingProxyType({})
  created: Container[str] = frozenset()
  weights: Container[str] = frozenset()
  unsaved: Container[str] = frozenset()


class Match(NamedTuple):
  """Which variable in a checkpoint each variable of a graph is.

  Attributes:
    names: The names in the checkpoint, by the names in the graph.
    ambiguous: For each variable that may be one of several in the checkpoint, or one
      that may also be another variable's, the names of these.
  """

  names: Dict[str, str]
  ambiguous: Dict[str, List[str]]


class Kind(NamedTuple):
  """What variables that are compared at once have in common.

  Attributes:
    stem: The last part of their names, without number; the role in a loss scale.
    shape: Their shape.
    is_state: Whether they are those of loss scales.
  """

  stem: str
  shape: Tuple[int, ...]
  is_state: bool


class Member(NamedTuple):
  """A variable of a kind. Variables sort in the order of creation if it is known, or if
  their names differ in numbers only.

  Attributes:
    position: Its place in the order of creation; -1 if it is not known.
    numbers: The numbers in its name.
    name: Its name.
    form: The form of its name.
    scope: Its name scope, without conditionals.
    loss_scale: The kind of its optimizer's loss scale; None without, or if not known.
    is_created: Whether an optimizer with a loss scale is known to have created it.
  """

  position: int
  numbers: Tuple[int, ...]
  name: str
  form: str
  scope: str
  loss_scale: Optional[str]
  is_created: bool

  @property
  def is_plain(self) -> bool:
    """Returns whether the name is in no conditional."""
    return self.form == self.scope


Members = List[Member]
_Names = Dict[str, str]  # names in a checkpoint by names in a graph


def match(
  wanted: Collection[str],
  graph: Variables,
  found: Variables,
  have_equal_values: HaveEqualValues,
) -> Match:
  """Returns which variable in a checkpoint each wanted variable of a graph is.

      kinds of variables that optimizers and loss scales create (`is_renamed`):
        names = each way in which graph and checkpoint can be those of one program, or
          else only the wanted variables, if all their weights and slots are there
        if one fits, or all that fit agree: these names
        elif all in its scope have equal values: one of these, if none is missing
        else: ambiguous
      all others: by name; with loss scaling, in conditionals, if all in the graph, or
        all in the checkpoint, are in both: else as above, without ways

  Args:
    wanted: the names of the variables to restore.
    graph: all variables of the graph.
    found: the variables of the program that wrote the checkpoint.
    have_equal_values: compares variables in the checkpoint. It does not matter which of
      several equal ones is restored.
  """
  names = {name: name for name in graph.shapes if name in found.shapes}
  ambiguous: Dict[str, List[str]] = {}
  graph_kinds = kinds(graph, graph.weights)
  found_kinds = kinds(found, graph.weights)
  has_state = any(kind.is_state for kind in (*graph_kinds, *found_kinds))
  is_scaled = has_state or bool(graph.loss_scales)
  created = {member.name for members in graph_kinds.values() for member in members}
  weights_and_slots = set(wanted) - created
  has_all = weights_and_slots <= found.shapes.keys()
  may_be_part = bool(weights_and_slots) and has_all
  for kind, members in graph_kinds.items():
    others = found_kinds.get(kind, [])
    if _keep_names(kind, members, others, is_scaled):
      continue
    fits: List[_Names] = []
    if is_renamed(kind, members + others):
      fits = _fits(kind, members, others)
      if may_be_part and not fits:
        part = [member for member in members if member.name in wanted]
        fits = _fits(kind, part, others)
    for member in members:
      names.pop(member.name, None)
    for member in members:
      sources = _sources(kind, member, others, fits)
      unused = [source for source in sources if source not in names.values()]
      is_complete = bool(fits) or len(others) >= len(members)
      if unused and is_complete and have_equal_values(sources):
        names[member.name] = unused[0]
      elif sources:
        ambiguous[member.name] = sources
  result = Match({}, {})
  for name in wanted:
    if name in ambiguous:
      result.ambiguous[name] = ambiguous[name]
    elif name in names and names[name] not in found.unsaved:
      result.names[name] = names[name]
  return result


def kinds(
  variables: Variables, weights: Container[str] = frozenset()
) -> Dict[Kind, Members]:
  """Returns variables by kind, sorted by the order of creation, as far as it is known.
  Omits slots, which are named after another variable, and `weights`, but Adam's powers.
  """
  roles = naming_schemes.state(variables.shapes)
  positions = {name: index for index, name in enumerate(variables.order)}
  result: Dict[Kind, Members] = collections.defaultdict(list)
  for name, shape in variables.shapes.items():
    parsed = naming_schemes.parse(name)
    kind = Kind(roles.get(name, parsed.stem), tuple(shape), name in roles)
    is_slot = name.rpartition("/")[0] in variables.shapes
    if is_slot or (name in weights and kind.stem not in POWERS):
      continue
    member = Member(
      positions.get(name, -1),
      parsed.numbers,
      name,
      parsed.form,
      parsed.scope,
      variables.loss_scales.get(name),
      is_created=name in variables.loss_scales or name in variables.created,
    )
    result[kind].append(member)
  for members in result.values():
    members.sort()
    if members[0].position < 0:  # It is not known of all: only names tell the order.
      members[:] = sorted(member._replace(position=-1) for member in members)
  return result


def is_renamed(kind: Kind, members: Members) -> bool:
  """Returns whether naming schemes can have other names for a kind of variables."""
  if kind.is_state or (kind.stem in POWERS and not kind.shape):
    return True
  return any(member.is_created for member in members)


def _keep_names(kind: Kind, members: Members, found: Members, is_scaled: bool) -> bool:
  """Returns whether the variables of a kind match by name.

  Those in conditionals that no optimizer is known to have created may be a model's, in
  a scope called "cond": they do if all names in the graph are in the checkpoint, or the
  reverse.
  """
  both = members + found
  is_conditional = not all(member.is_plain for member in both)
  if is_renamed(kind, both):
    return not (is_scaled or is_conditional)
  if not (is_scaled and is_conditional):
    return True
  names = {member.name for member in members}
  others = {member.name for member in found}
  return names <= others or others <= names


def _sources(
  kind: Kind, member: Member, found: Members, fits: List[_Names]
) -> List[str]:
  """Returns the names in a checkpoint that a variable of the graph may have: those in
  `fits`; without, those in its scope, which may have another number. A name without
  scope may have lost one: it fits all.
  """
  if fits:
    sources = [names[member.name] for names in fits if member.name in names]
    return list(dict.fromkeys(sources))
  sources = []
  own = _without_numbers(member.scope)
  for other in found:
    scope = _without_numbers(other.scope)
    if own == scope or "" in (own, scope):
      sources.append(other.name)
  if kind.is_state and not sources:  # A loss scale does not start anew unnoticed.
    sources = [other.name for other in found]
  return sources


def _without_numbers(scope: str) -> str:
  """Returns name scopes without the numbers that make them unique in a graph."""
  return re.sub(r"_\d+(?=/|$)", "", scope)


def _fits(kind: Kind, members: Members, found: Members) -> List[_Names]:
  """Returns each way in which a graph and a checkpoint can be those of one program: the
  names in the checkpoint by those in the graph.

      the names are the same
      or, in each group, there are as many, in an order of creation that is certain:
        the graph's names as each naming scheme writes them, by form
        by scope: then it does not matter who has a loss scale
      or, for loss scales, which a program creates in any scope: all in one group
  """
  if {member.name for member in members} == {member.name for member in found}:
    return [{member.name: member.name for member in members}]
  scopes = [member.scope for member in members]
  fits = [_pair(members, scopes, found, [member.scope for member in found])]
  for scheme in naming_schemes.SCHEMES.values():
    written = [scheme.form(member.form, member.loss_scale) for member in members]
    fits.append(_pair(members, written, found, [member.form for member in found]))
  if kind.is_state and not any(fits):
    fits.append(_pair(members, [""] * len(members), found, [""] * len(found)))
  return [pairs for pairs in fits if pairs]


def grouped(members: Members, keys: Sequence[str]) -> Dict[str, Members]:
  """Returns the variables that have the same key, in groups by this key."""
  groups: Dict[str, Members] = collections.defaultdict(list)
  for member, key in zip(members, keys):
    groups[key].append(member)
  return groups


def _pair(
  members: Members, keys: Sequence[str], found: Members, found_keys: Sequence[str]
) -> _Names:
  """Returns the names in a checkpoint by those in the graph, each by its place in the
  group with its key; {} if there are not as many in each, or their order is not
  certain.
  """
  groups, others = grouped(members, keys), grouped(found, found_keys)
  if sorted(keys) != sorted(found_keys):
    return {}
  pairs: _Names = {}
  for key, group in groups.items():
    if not (is_ordered(group) and is_ordered(others[key])):
      return {}
    if _is_mixed(group, others[key]):
      return {}
    for member, source in zip(group, others[key]):
      pairs[member.name] = source.name
  return pairs


def _is_mixed(members: Members, found: Members) -> bool:
  """Returns whether a graph and a checkpoint both have names in conditionals, but not
  only: the program may itself call a scope "cond". Which is which is not certain then.
  """
  ours = {member.is_plain for member in members}
  theirs = {member.is_plain for member in found}
  return False in ours & theirs and True in ours | theirs


def is_ordered(members: Members) -> bool:
  """Returns whether the order of creation is certain: it is known of each, or their
  names differ in numbers only, which tell it.
  """
  if all(member.position >= 0 for member in members):
    return True
  return len({member.form for member in members}) < 2
