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
  Container,
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


class Variables(NamedTuple):
  """The variables of a graph or of a checkpoint.

  Attributes:
    shapes: The shape of each variable, by name.
    order: Names of variables in the order of creation, as far as it is known.
    loss_scales: The kinds of loss scales, by the names of the variables that optimizers
      with these loss scales created when they applied gradients. Only graphs of this
      package have them.
    scopes: The name scopes in which optimizers apply gradients, by the names of
      variables whose names have lost them.
    weights: The names of trainable variables, as far as they are known.
  """

  shapes: naming_schemes.Shapes
  order: Sequence[str] = ()
  loss_scales: Mapping[str, str] = MappingProxyType({})
  scopes: Mapping[str, str] = MappingProxyType({})
  weights: Container[str] = frozenset()


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
  """A variable of a kind. Names that differ in numbers only sort in the order of
  creation.

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

  @property
  def has_lost_scope(self) -> bool:
    """Returns whether its name lacks its scope (`Variables.scopes`)."""
    return bool(self.scope) and "/" not in self.name


Members = List[Member]
_KeyOf = Callable[[Member], Hashable]  # what variables of one group have in common


def match(
  wanted: Iterable[str],
  graph: Variables,
  found: Variables,
  have_equal_values: HaveEqualValues,
) -> Match:
  """Returns which variable in a checkpoint each wanted variable of a graph is.

      kinds of variables that optimizers and loss scales create (`is_renamed`):
        names = each way in which graph and checkpoint can be those of one program
        if one fits, or all that fit agree: these names
        elif one is a part of the other: the same names
        elif all that a variable may be have equal values: one of these
        else: ambiguous
      all others: by name

  Args:
    wanted: the names of the variables to restore.
    graph: all variables of the graph.
    found: the variables in the checkpoint.
    have_equal_values: compares variables in the checkpoint. It does not matter which of
      several equal ones is restored.
  """
  matched = Match({name: name for name in graph.shapes if name in found.shapes}, {})
  found_kinds = kinds(found)
  for kind, members in kinds(graph).items():
    others = found_kinds.get(kind, [])
    # The graph of this package tells what optimizers created; of others, names do.
    if is_renamed(kind, members if graph.loss_scales else members + others):
      for member in members:
        matched.names.pop(member.name, None)
      _match_kind(kind, members, others, have_equal_values, matched)
  return Match(
    {name: matched.names[name] for name in wanted if name in matched.names},
    {name: matched.ambiguous[name] for name in wanted if name in matched.ambiguous},
  )


def kinds(variables: Variables) -> Dict[Kind, Members]:
  """Returns the variables that optimizers and loss scales may create, by kind, sorted
  by the order of creation, as far as it is known.

  Those are the variables of loss scales, Adam's powers, and others that are no weights
  with their slots, whose conditionals are those of loss scaling only if there is a loss
  scale.
  """
  roles = naming_schemes.state(variables.shapes)
  with_slots = {name.rpartition("/")[0] for name in variables.shapes}
  positions = {name: index for index, name in enumerate(variables.order)}
  result: Dict[Kind, Members] = collections.defaultdict(list)
  for name, shape in variables.shapes.items():
    parsed = naming_schemes.parse(name)
    loss_scale = variables.loss_scales.get(name)
    if name in roles:
      parsed, loss_scale = parsed._replace(stem=roles[name]), None
    elif _is_of_model(name, variables, with_slots):
      continue
    elif parsed.stem not in POWERS or shape:
      if not roles:
        parsed = parsed._replace(scope=name.rpartition("/")[0], conditionals=())
      parsed = _with_number(parsed)
    if name in variables.scopes and name not in roles:
      parsed = parsed._replace(scope=variables.scopes[name])
    alone = parsed.form
    if alone.depth and not variables.loss_scales:  # in a conditional of loss scaling
      alone, loss_scale = alone._replace(depth=alone.depth - 1), DYNAMIC
    member = Member(positions.get(name, -1), parsed, name, alone, loss_scale)
    result[Kind(parsed.stem, tuple(shape), name in roles)].append(member)
  for members in result.values():
    members.sort(key=lambda member: member[:3])
    if members[0].position < 0:  # It is not known of all: only names tell the order.
      members[:] = sorted(member._replace(position=-1) for member in members)
  return result


def _is_of_model(name: str, variables: Variables, with_slots: Container[str]) -> bool:
  """Returns whether a variable is a weight, or a slot that is named after another
  variable, as far as that is known.
  """
  if name in variables.weights:
    return naming_schemes.parse(name).stem not in POWERS
  return name in with_slots or name.rpartition("/")[0] in variables.shapes


def _with_number(parsed: Name) -> Name:
  """Returns a name whose last part is divided into stem and number."""
  numbered = re.fullmatch(r"(.+)_(\d+)", parsed.stem)
  if numbered is None:
    return parsed
  return parsed._replace(stem=numbered.group(1), number=int(numbered.group(2)))


def is_renamed(kind: Kind, members: Members) -> bool:
  """Returns whether naming schemes can have other names for a kind of variables."""
  if kind.is_state or (kind.stem in POWERS and not kind.shape):
    return True
  return any(member.loss_scale or member.form.depth for member in members)


def _same_names(members: Members, found: Members) -> Dict[str, str]:
  """Returns the names of the variables whose names a checkpoint has, too."""
  names = {member.name for member in found}
  return {member.name: member.name for member in members if member.name in names}


def _match_kind(
  kind: Kind,
  members: Members,
  found: Members,
  have_equal_values: HaveEqualValues,
  matched: Match,
) -> None:
  """Adds to `matched` which of `found` each of the variables of a kind is.

  Args:
    kind: the kind.
    members: those of the graph.
    found: those in the checkpoint.
    have_equal_values: compares variables in the checkpoint.
    matched: what is known of other kinds.
  """
  fits = _fits(kind, members, found)
  if not fits and (_is_part(members, found) or _is_extended(members, found)):
    fits = [_same_names(members, found)]
  used: List[str] = []
  for member in members:
    sources = [names[member.name] for names in fits if member.name in names]
    if not fits:
      sources = _in_scope_of(member, found)
      if kind.is_state and not sources:  # A loss scale does not start anew unnoticed.
        sources = [other.name for other in found]
    sources = list(dict.fromkeys(sources))
    unused = [source for source in sources if source not in used]
    is_complete = bool(fits) or len(found) >= len(members)
    if unused and is_complete and have_equal_values(sources):
      matched.names[member.name] = unused[0]
      used.append(unused[0])
    elif sources:
      matched.ambiguous[member.name] = sources


def _fits(kind: Kind, members: Members, found: Members) -> List[Dict[str, str]]:
  """Returns each way in which a graph and a checkpoint can be those of one program: the
  names in the checkpoint by those in the graph.

      the names are the same
      or, in each group, there are as many, in an order of creation that is certain:
        the graph's names as each naming scheme writes them, by form
        by scope: then it does not matter who has a loss scale
      or, for loss scales, which a program creates in any scope: all in one group
  """
  same = _same_names(members, found)
  if len(same) == len(members) == len(found):
    return [same]
  fits = [_pair(members, found, scope_of, scope_of)]
  for write in naming_schemes.FORMS:
    fits.append(_pair(members, found, _form_in(write), _form))
  if kind.is_state and not any(fits):
    fits = [_pair(members, found, _anywhere, _anywhere)]
  return [pairs for pairs in fits if pairs]


def _form_in(write: naming_schemes.WriteForm) -> _KeyOf:
  """Returns a key: the form of a variable of the graph in a naming scheme."""
  return lambda member: write(member.alone, member.loss_scale)


def _form(member: Member) -> Form:
  """Returns a key: the form of the name."""
  return member.form


def scope_of(member: Member) -> str:
  """Returns a key: the name scope without conditionals; "" for none."""
  return member.scope


def _anywhere(member: Member) -> str:
  """Returns one key for all variables."""
  del member
  return ""


def grouped(members: Iterable[Member], key_of: _KeyOf) -> Dict[Hashable, Members]:
  """Returns the variables that have the same key, in groups by this key."""
  groups: Dict[Hashable, Members] = collections.defaultdict(list)
  for member in members:
    groups[key_of(member)].append(member)
  return groups


def _pair(
  members: Members, found: Members, key_of: _KeyOf, found_key_of: _KeyOf
) -> Dict[str, str]:
  """Returns the names in a checkpoint by those in the graph, each by its place in the
  group with its key; {} if there are not as many in each, or their order is not
  certain.
  """
  groups, others = grouped(members, key_of), grouped(found, found_key_of)
  if set(groups) != set(others):
    return {}
  pairs: Dict[str, str] = {}
  for key, group in groups.items():
    other = others[key]
    if len(group) != len(other) or not (is_ordered(group) and is_ordered(other)):
      return {}
    for member, source in zip(group, other):
      pairs[member.name] = source.name
  return pairs


def is_ordered(members: Members) -> bool:
  """Returns whether the order of creation is certain: it is known of each, or their
  names differ in numbers only, which tell it.
  """
  if all(member.position >= 0 for member in members):
    return True
  return len({naming_schemes.without_numbers(member.name) for member in members}) < 2


def _is_part(part: Members, whole: Members) -> bool:
  """Returns whether all names of one side are among those of the other.

  Names that have lost their scopes prove nothing, and those without conditionals if the
  other side has some.
  """
  if any(member.has_lost_scope for member in part + whole):
    return False
  if len(_same_names(part, whole)) < len(part):
    return False
  return _have_conditionals(part) == _have_conditionals(whole)


def _is_extended(members: Members, found: Members) -> bool:
  """Returns whether the graph has all names in the checkpoint, and others.

  A name without scope is no proof if one that the checkpoint lacks has a scope, which
  it may have lost.
  """
  same = _same_names(members, found)
  missing = [member for member in members if member.name not in same]
  may_be_lost = any(map(scope_of, missing)) and not all(map(scope_of, found))
  return _is_part(found, members) and not may_be_lost


def _have_conditionals(members: Members) -> bool:
  """Returns whether one of the names has a conditional."""
  return any(member.form.depth for member in members)


def _in_scope_of(member: Member, found: Iterable[Member]) -> List[str]:
  """Returns the variables in the scope of `member`; those outside of scopes have lost
  theirs, or `member` has.
  """
  names: List[str] = []
  for other in found:
    if member.scope == other.scope or "" in (member.scope, other.scope):
      names.append(other.name)
  return names
