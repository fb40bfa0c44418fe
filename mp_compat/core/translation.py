# SPDX-License-Identifier: Apache-2.0
"""Gives the variables of a checkpoint the names of another naming scheme. Does not
import TensorFlow.
"""

import json
from types import MappingProxyType
from typing import Dict, Iterable, Iterator, List, Mapping, Optional, Tuple

from mp_compat.core import arguments
from mp_compat.core import matching
from mp_compat.core import naming_schemes
from mp_compat.core.matching import HaveEqualValues
from mp_compat.core.matching import Kind
from mp_compat.core.matching import Members
from mp_compat.core.matching import Variables
from mp_compat.core.naming_schemes import DYNAMIC
from mp_compat.core.naming_schemes import NamingScheme

# A name in another scheme, and that in the checkpoint; None for a variable to add.
_Pair = Tuple[str, Optional[str]]
_Kinds = Dict[Kind, Members]

_LIKE = (
  "Pass `like`, a checkpoint of the program that will restore this one (--like), or as "
  "`name_map` (--name-map FILE) these names by those to write."
)


def translate(
  found: Variables,
  to: str,
  have_equal_values: HaveEqualValues,
  name_map: Mapping[str, str] = MappingProxyType({}),
) -> Dict[str, Optional[str]]:
  """Returns the names that a checkpoint has in another naming scheme, each with the
  name to copy from, if any. A loss scale is added where there is none.

      names in `name_map`        as they are there
      variables of loss scales   the names of the scheme
      those of one optimizer     the name with a dynamic loss scale
      those of several           without conditionals, in the order of creation
      all others                 the same names

  Raises a ValueError if `to` is not the name of a scheme, a name to write is that of
  another variable, the order of creation or the name scope of a variable is not
  certain, or names depend on which of several optimizers have a loss scale.
  """
  arguments.choice("to", to, list(naming_schemes.SCHEMES))
  scheme = naming_schemes.SCHEMES[to]
  kinds = matching.kinds(found)
  kept = set(found.shapes)
  translated: List[_Pair] = []
  keeps_scopes = scheme.write is naming_schemes.keep_scope
  _check_scopes(kinds)
  for kind, members in kinds.items():
    if matching.is_renamed(kind, members):
      kept.difference_update(member.name for member in members)
      if not kind.is_state and keeps_scopes:
        translated += _names_alone(kind, members, have_equal_values)
      elif not kind.is_state:
        translated.append(_name_of_one(kind, members, scheme))
  translated += _names_of_state(kinds, scheme, name_map.values())
  result: Dict[str, Optional[str]] = dict(name_map)
  for target, source in [*zip(kept, kept), *translated]:
    is_left_out = source in found.unsaved if source else target in name_map
    if is_left_out:
      continue
    if target in result:
      raise ValueError(
        "{} would be written as {}, which is the name of another variable. Expected no "
        "variable of that name, another naming scheme than {!r}, or a name to write in "
        "the name map (nothing: it is left out).".format(
          source or "A new loss scale", target, to
        )
      )
    result[target] = source
  return result


def _names_of_state(
  kinds: _Kinds, scheme: NamingScheme, named: Iterable[str]
) -> Iterator[_Pair]:
  """Yields the names of loss scales' variables in a scheme: all that a loss scale has
  there, and those that this one has in addition, for each scale in the checkpoint, or
  else for a new one, unless `named`, the names in a map, have one. Raises a ValueError
  for a variable without a scale.
  """
  places = _by_place(kinds, "current_loss_scale")
  if not (places or any(map(naming_schemes.is_state_name, named))):
    places = {("", 0): ""}
  for role in naming_schemes.MP_COMPAT.state:
    for place, name in _by_place(kinds, role).items():
      if place not in places:
        raise ValueError(
          "{} has the name of a loss scale's variable, but there is no loss scale of "
          "that scope and number: it may be the program's own. {}".format(name, _LIKE)
        )
  for role, variable in scheme.state.items():
    sources = _by_place(kinds, role)
    for scope, number in places:
      source = sources.get((scope, number))
      if source or not variable.is_optional:
        yield naming_schemes.join(scope, variable.name, number), source


def _by_place(kinds: _Kinds, role: str) -> Dict[Tuple[str, int], str]:
  """Returns the names of loss scales' variables in a role by name scope and number."""
  members = kinds.get(Kind(role, (), is_state=True), [])
  return {(member.scope, member.numbers[-1]): member.name for member in members}


def _name_of_one(kind: Kind, members: Members, scheme: NamingScheme) -> _Pair:
  """Returns the name of the variable of a single optimizer with a dynamic loss scale;
  raises a ValueError for those of several.
  """
  if len(members) > 1:
    raise ValueError(
      "The names in the naming scheme {!r} depend on which optimizers have a loss "
      "scale, and the checkpoint has these variables of several: {}. {}".format(
        scheme.name, ", ".join(sorted(member.name for member in members)), _LIKE
      )
    )
  (member,) = members
  number = member.numbers[-1] if member.is_plain else 0
  scope = scheme.write(member.scope, DYNAMIC)
  return naming_schemes.join(scope, kind.stem, number), member.name


def _names_alone(
  kind: Kind, members: Members, have_equal_values: HaveEqualValues
) -> Iterator[_Pair]:
  """Yields the names that optimizers without loss scaling give to variables of a kind.
  Raises a ValueError if their order is not certain.
  """
  groups = matching.grouped(members, [member.scope for member in members])
  for scope, group in groups.items():
    sources = [member.name for member in group]
    targets = sources
    if not all(member.is_plain for member in group):
      if not matching.is_ordered(group) and not have_equal_values(sources):
        raise ValueError(
          "{} are variables of different optimizers, but their names do not tell in "
          "which order the program creates them. Expected the .meta file beside the "
          "checkpoint. {}".format(", ".join(sources), _LIKE)
        )
      numbers = range(len(group))
      targets = [naming_schemes.join(scope, kind.stem, number) for number in numbers]
    yield from zip(targets, sources)


def _check_scopes(kinds: _Kinds) -> None:
  """Raises a ValueError with a map if variables may have lost their scopes under
  control flow v2: all loss scales are in scopes, and these are not.
  """
  scopes = [scope for scope, _ in _by_place(kinds, "current_loss_scale")]
  scope = min(scopes, default="")
  names: Dict[str, str] = {}
  for kind, members in kinds.items():
    for member in members:
      if scope and matching.is_renamed(kind, members) and not member.form:
        names[naming_schemes.join(scope, member.name)] = member.name
  if names:
    raise ValueError(
      "It is not certain in which name scopes the program creates {}. Correct this map "
      "of names to write to names in the checkpoint, and pass it as `name_map` "
      "(--name-map FILE). {}".format(
        ", ".join(names.values()), json.dumps(names, indent=2)
      )
    )
