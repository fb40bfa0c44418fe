# SPDX-License-Identifier: Apache-2.0
"""Gives the variables of a checkpoint the names of another naming scheme. Does not
import TensorFlow.
"""

from typing import Dict, Hashable, List, Mapping, Optional

from mp_compat.core import arguments
from mp_compat.core import matching
from mp_compat.core import naming_schemes
from mp_compat.core.matching import HaveEqualValues
from mp_compat.core.matching import Members
from mp_compat.core.matching import Variables
from mp_compat.core.naming_schemes import CONTRIB
from mp_compat.core.naming_schemes import DYNAMIC
from mp_compat.core.naming_schemes import NamingScheme


def translate(
  found: Variables, to: str, have_equal_values: HaveEqualValues
) -> Dict[str, Optional[str]]:
  """Returns the names that a checkpoint has in another naming scheme, each with the
  name to copy from, if any. A loss scale is added where there is none.

      variables of loss scales   the names of the scheme
      those of one optimizer     its names under both versions of control flow
      those of several           without conditionals, in the order of creation
      all others                 the same names

  Raises a ValueError if `to` is not the name of a scheme, a variable of the program has
  a name to write, the order of creation is not certain, or TensorFlow's or contrib's
  names of several optimizers depend on which of them have a loss scale.
  """
  arguments.choice("to", to, list(naming_schemes.SCHEMES))
  scheme = naming_schemes.SCHEMES[to]
  state = naming_schemes.state(found.shapes)
  groups = _groups_of_optimizers(found, have_equal_values)
  translated: Dict[str, Optional[str]] = dict(_translate_state(state, scheme))
  translated.update(_translate_groups(groups, found, scheme, have_equal_values))
  result = _names_of_others(found)
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


def plain_names(found: Variables, have_equal_values: HaveEqualValues) -> Dict[str, str]:
  """Returns the names in a checkpoint by those that an optimizer alone gives the same
  variables; omits those whose order of creation is not certain.
  """
  result: Dict[str, str] = {}
  for members in _groups_of_optimizers(found, have_equal_values):
    result.update(_names_without_conditionals(members, have_equal_values))
  result.update(_lost_scopes(result, found))
  for name in _names_of_others(found):
    result[name] = name
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


def _groups_of_optimizers(
  found: Variables, have_equal_values: HaveEqualValues
) -> List[Members]:
  """Returns the variables that optimizers created when they applied gradients, as far
  as names tell, without second names: those of one kind and scope in a group.
  """
  groups: List[Members] = []
  for members in _renamed_kinds(found).values():
    members = matching.without_second_names(members, have_equal_values)
    groups += matching.grouped(members, lambda member: member.scope).values()
  return groups


def _renamed_kinds(found: Variables) -> Dict[Hashable, Members]:
  """Returns the kinds of variables of which naming schemes can have other names."""
  kinds = matching.kinds(found)
  return {kind: kinds[kind] for kind in kinds if matching.is_renamed(kind, kinds[kind])}


def _names_of_others(found: Variables) -> Dict[str, Optional[str]]:
  """Returns the names that are the same in each scheme, each with itself."""
  renamed = set(naming_schemes.state(found.shapes))
  for members in _renamed_kinds(found).values():
    renamed.update(member.name for member in members)
  return {name: name for name in found.shapes if name not in renamed}


def _translate_groups(
  groups: List[Members],
  found: Variables,
  scheme: NamingScheme,
  have_equal_values: HaveEqualValues,
) -> Dict[str, str]:
  """Returns the names of optimizers' variables in a scheme, each with that in the
  checkpoint. Raises a ValueError if the checkpoint does not tell them.
  """
  is_same = scheme is naming_schemes.recognize(found.shapes)
  own_names = {member.name: member.name for group in groups for member in group}
  stems = [group[0].parsed.stem for group in groups for _ in group]
  is_single = len(stems) == len(set(stems))
  if scheme.conditionals and not is_single:
    if is_same:
      return own_names
    raise ValueError(
      "The names in the naming scheme {!r} depend on which optimizers have a loss "
      "scale, and the checkpoint has these variables of several: {}. Pass `like`, a "
      "checkpoint of the program that will restore this one (--like).".format(
        scheme.name, ", ".join(sorted(own_names))
      )
    )
  result: Dict[str, str] = {}
  for group in groups:
    names = _names_without_conditionals(group, have_equal_values)
    if not names:
      raise ValueError(
        "{} are variables of different optimizers, but their names do not tell in "
        "which order the program creates them. Expected the .meta file beside the "
        "checkpoint, or `like`: pass a checkpoint of the program that will restore "
        "this one (--like).".format(", ".join(member.name for member in group))
      )
    result.update(names)
  result.update(_lost_scopes(result, found))
  if scheme.conditionals:
    result.update(_names_of_single_optimizer(result, scheme))
    if is_same:
      result.update(own_names)
  return result


def _names_without_conditionals(
  members: Members, have_equal_values: HaveEqualValues
) -> Dict[str, str]:
  """Returns the names that optimizers alone give to variables of one kind and scope,
  each with that in the checkpoint; {} if their order is not certain.
  """
  names = [member.name for member in members]
  if not any(member.form.depth for member in members):
    return {name: name for name in names}
  if not matching.is_ordered(members) and not have_equal_values(names):
    return {}
  scope, stem = members[0].scope, members[0].parsed.stem
  numbered = enumerate(names)
  return {naming_schemes.join(scope, stem, number): name for number, name in numbered}


def _lost_scopes(names: Mapping[str, str], found: Variables) -> Dict[str, str]:
  """Returns further names of a single optimizer's variables: in the scope of the loss
  scale, which TensorFlow's class drops under control flow v2.
  """
  parsed = {name: naming_schemes.parse(name) for name in names}
  stems = [each.stem for each in parsed.values()]
  scopes = {
    naming_schemes.parse(name).scope for name in naming_schemes.state(found.shapes)
  }
  if len(scopes) != 1 or len(stems) != len(set(stems)):
    return {}
  (scope,) = scopes
  result: Dict[str, str] = {}
  for name, source in names.items():
    if not parsed[name].scope:
      result[naming_schemes.join(scope, parsed[name].stem)] = source
  return result


def _names_of_single_optimizer(
  plain: Mapping[str, str], scheme: NamingScheme
) -> Dict[str, str]:
  """Returns the names of one optimizer's variables in TensorFlow's or contrib's class:
  in its first conditionals under control flow v1, without a scope under v2.
  """
  result: Dict[str, str] = {}
  for name, source in plain.items():
    parsed = naming_schemes.parse(name)
    number = scheme.conditionals[DYNAMIC].applying
    conditional = naming_schemes.join(parsed.scope, "cond", number)
    result["{}/{}".format(conditional, parsed.stem)] = source
    result[parsed.stem] = source
  return result
