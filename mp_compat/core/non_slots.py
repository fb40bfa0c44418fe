# SPDX-License-Identifier: Apache-2.0
"""Non-slot variables: those that an optimizer creates when it applies gradients, such
as Adam's powers. Does not import TensorFlow.

They have other names in each naming scheme, and one name can be that of two optimizers:

    optimizers, in the order of creation   mp_compat        TensorFlow's class
    Adam with a dynamic loss scale         beta1_power      cond_1/beta1_power
    Adam without loss scaling              beta1_power_1    beta1_power

So all variables of a kind are compared at once, by what is known of each of them: its
name scope, whether it is created in a conditional, and its place in the order of
creation. Numbers show this order among names of one form (`beta1_power_1`, or
`cond_3/beta1_power`); a graph, or the `.meta` file of a checkpoint, shows it for all.
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
from mp_compat.core.naming_schemes import DYNAMIC
from mp_compat.core.naming_schemes import POWERS
from mp_compat.core.naming_schemes import Name
from mp_compat.core.naming_schemes import NamingScheme
from mp_compat.core.naming_schemes import Shapes

# Returns whether the variables with these names in a checkpoint have equal values.
HaveEqualValues = Callable[[Sequence[str]], bool]

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


KeyOf = Callable[[NonSlot], Hashable]  # what variables of one group have in common


def by_kind(
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
    parsed = naming_schemes.parse(name)
    shape = tuple(variables.shapes[name])
    kind: Hashable = parsed.stem
    is_power = parsed.stem in POWERS and not shape
    if not is_power:
      if parsed.conditionals and not has_loss_scale:
        scope = name.rpartition("/")[0]
        parsed = parsed._replace(scope=scope, conditionals=())
      parsed = _with_number(parsed)
      kind = parsed.scope, parsed.stem, shape
    member = NonSlot(
      name,
      parsed,
      position=positions.get(name),
      loss_scale=variables.loss_scales.get(name),
    )
    kinds[kind].append(member)
  for members in kinds.values():
    members.sort(key=creation_order)
  return kinds


def _with_number(parsed: Name) -> Name:
  """Returns a name whose last part is divided into stem and number."""
  numbered = re.fullmatch(r"(.+)_(\d+)", parsed.stem)
  if numbered is None:
    return parsed
  return parsed._replace(stem=numbered.group(1), number=int(numbered.group(2)))


def creation_order(member: NonSlot) -> Tuple[int, Name]:
  """Returns a sort key: by the order of creation, if it is known, else by numbers."""
  position = -1
  if member.position is not None:
    position = member.position
  return position, member.parsed


def second_names(
  found: Variables, have_equal_values: HaveEqualValues
) -> Dict[str, str]:
  """Returns the second names of variables in a checkpoint, each with the first one.

  After `install()`, a Saver writes a variable as `beta1_power` and, with its name in
  TensorFlow's class, as `cond_1/beta1_power`. The names of a scope in conditionals are
  second names if each of these conditionals has the same values as variables without
  one, in the same order. Of variables that the `.meta` file has, none is a second name.

      for each scope:
        remaining = for each optimizer, its names outside of conditionals, in order
        for each conditional, in order: its names are second names of the next ones in
          `remaining` that have the same values
        if a conditional is left, or a name is in found.order: none is a second name

  Example: {"cond_1/beta1_power": "beta1_power_1"} if the checkpoint has these two with
  the value 0.9, and "beta1_power" with 0.8.
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
        pairs.update((name, first_names[kind]) for kind, name in names.items())
        paired += 1
    # A `.meta` file lists ops of variables. A second name is only an entry of a Saver.
    if paired == len(places) and not set(pairs) & set(found.order):
      result.update(pairs)
  return result


# For each scope, and in it for each place, the names of one optimizer by their kinds
# (`by_kind`). A place is the numbers of the conditionals that the names are in, or,
# without one, the number at their end: (1,) for both "cond_1/beta1_power" and
# "beta1_power_1".
_Places = Dict[str, Dict[Tuple[int, ...], Dict[Hashable, str]]]


def _by_place(variables: Variables, has_conditional: bool) -> _Places:
  """Returns names by what they have in common with those of the same optimizer: only
  those in conditionals, or only the others (`has_conditional`).
  """
  result: _Places = collections.defaultdict(lambda: collections.defaultdict(dict))
  for kind, members in by_kind(variables).items():
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
  for kind, name in names.items():
    if kind not in others or not have_equal_values([name, others[kind]]):
      return False
  return True


def without_second_names(
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


def grouped(members: Iterable[NonSlot], key_of: KeyOf) -> Dict[Hashable, List[NonSlot]]:
  """Returns the variables that have the same key, in groups by this key."""
  groups: Dict[Hashable, List[NonSlot]] = collections.defaultdict(list)
  for member in members:
    groups[key_of(member)].append(member)
  return groups


def sizes(groups: Mapping[Hashable, Sequence[NonSlot]]) -> Dict[Hashable, int]:
  """Returns the number of variables in each group."""
  return {key: len(members) for key, members in groups.items()}


def possible_places(members: List[NonSlot]) -> Dict[str, Tuple[int, int]]:
  """Returns the first and the last place that each may have in the order of creation.

  If the order is not known, it is known for each chain: of one scope, with conditionals
  or without. The variable at index 1 in a chain of 3 is at place 1 of 5 at the
  earliest, and at place 3 at the latest. Names such as `cond/cond/beta1_power`, beside
  `cond/beta1_power`, are a chain of their own: one of the two is in a scope that the
  program itself calls `cond`.
  """
  places: Dict[str, Tuple[int, int]] = {}
  if all(member.position is not None for member in members):
    for index, member in enumerate(sorted(members, key=creation_order)):
      places[member.name] = index, index
    return places
  conditionals = {member.parsed.conditionals for member in members}
  is_nested = any(
    each[:depth] in conditionals
    for each in conditionals
    for depth in range(1, len(each))
  )

  def chain_of(member: NonSlot) -> Hashable:
    if is_nested:
      return member.scope, len(member.parsed.conditionals)
    return member.scope, member.has_conditional

  chains = grouped(members, chain_of)
  for chain in chains.values():
    chain.sort(key=lambda member: member.parsed)
    for index, member in enumerate(chain):
      places[member.name] = index, index + len(members) - len(chain)
  return places


def have_conditionals(members: Iterable[NonSlot]) -> bool:
  """Returns whether one of the names has a conditional, as those of TensorFlow's and
  contrib's class under control flow v1.
  """
  return any(member.has_conditional for member in members)
