# SPDX-License-Identifier: Apache-2.0
"""Gives the variables of a checkpoint the names of another naming scheme. Does not
import TensorFlow.
"""

from typing import Dict, List, Optional, Set, Tuple

from mp_compat.core import arguments
from mp_compat.core import matching
from mp_compat.core import naming_schemes
from mp_compat.core.matching import HaveEqualValues
from mp_compat.core.matching import Member
from mp_compat.core.matching import Members
from mp_compat.core.matching import Variables
from mp_compat.core.naming_schemes import CONTRIB
from mp_compat.core.naming_schemes import DYNAMIC
from mp_compat.core.naming_schemes import TENSORFLOW
from mp_compat.core.naming_schemes import NamingScheme

# Names in another scheme, each with that in the checkpoint; None for a variable to add.
_Names = List[Tuple[str, Optional[str]]]

_LIKE = "Pass `like`, a checkpoint of the program that will restore this one (--like)."


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
  a name to write, the order of creation is not certain, the names of several
  optimizers depend on which of them have a loss scale, or those of the loss scales that
  are added on the program.
  """
  arguments.choice("to", to, list(naming_schemes.SCHEMES))
  scheme = naming_schemes.SCHEMES[to]
  keeps_names = scheme is naming_schemes.recognize(found.shapes)
  state: Members = []
  optimizers: List[Members] = []  # by kind
  result: Dict[str, Optional[str]] = {name: name for name in found.shapes}
  for kind, members in matching.kinds(found).items():
    if not matching.is_renamed(kind, members):
      continue
    if kind.is_state:
      state += members
    else:
      optimizers.append(members)
    for member in members:
      del result[member.name]
  scopes = {member.scope for member in state}
  translated = _names_of_state(state, scheme)
  if scheme.state and not state:
    _check_single(optimizers)
    added = CONTRIB if scheme is CONTRIB else TENSORFLOW
    translated += [(variable.name, None) for variable in added.state.values()]
  for members in optimizers:
    if scheme.conditionals and keeps_names:
      translated += [(member.name, member.name) for member in members]
    if len(members) == 1:
      translated += _names_of_one(members[0], scheme, scopes)
    elif not scheme.conditionals:
      translated += _names_without_conditionals(members, have_equal_values)
    elif not keeps_names:
      raise _unknown_loss_scales(members, scheme)
  _add_names(translated, result, scheme)
  return result


def _add_names(
  translated: _Names, result: Dict[str, Optional[str]], scheme: NamingScheme
) -> None:
  """Adds names in a scheme to those of all other variables; a variable of the program
  keeps its name. Raises a ValueError if a name would be that of two variables.
  """
  for target, source in translated:
    if source and (result.get(target) or source) != source:
      raise ValueError(
        "{} would be written as {}, which is the name of another variable. Expected no "
        "variable of that name, or another naming scheme than {!r}.".format(
          source, target, scheme.name
        )
      )
    if source or target not in result:
      result[target] = source


def _names_of_state(state: Members, scheme: NamingScheme) -> _Names:
  """Returns the names of loss scales' variables in a scheme."""
  names: _Names = []
  for member in state:
    role, number = member.parsed.stem, member.parsed.number
    if role in scheme.state:
      target = naming_schemes.join(member.scope, scheme.state[role].name, number)
      names.append((target, member.name))
    if scheme is CONTRIB and role == "current_loss_scale":  # It has all variables.
      bad_steps = scheme.state["bad_steps"].name
      names.append((naming_schemes.join(member.scope, bad_steps, number), None))
  return names


def _names_of_one(
  member: Member, scheme: NamingScheme, state_scopes: Set[str]
) -> _Names:
  """Returns the names of the variable of a single optimizer: without conditionals, and
  if the scheme has some, in its first ones (control flow v1) and without scope (v2).

  A name without scope may have lost that of the loss scale, and has it, too.
  """
  last = member.parsed.stem
  if _is_plain(member):
    last = member.name.rpartition("/")[2]
  scopes = {member.scope}
  if not member.scope:
    scopes |= state_scopes
  if member.has_lost_scope:  # A conditional of the program drops it in each scheme.
    scopes.add("")
  names: _Names = []
  for scope in sorted(scopes):
    names.append((naming_schemes.join(scope, last), member.name))
    if scheme.conditionals:
      conditional = naming_schemes.join(scope, "cond", scheme.conditionals[DYNAMIC])
      names.append((naming_schemes.join(conditional, last), member.name))
      names.append((last, member.name))
  return names


def _names_without_conditionals(
  members: Members, have_equal_values: HaveEqualValues
) -> _Names:
  """Returns the names that optimizers alone give to variables of one kind. Raises a
  ValueError if their order is not certain.
  """
  names: _Names = []
  for group in matching.grouped(members, matching.scope_of).values():
    sources = [member.name for member in group]
    targets = sources
    if not all(map(_is_plain, group)):
      if not matching.is_ordered(group) and not have_equal_values(sources):
        raise ValueError(
          "{} are variables of different optimizers, but their names do not tell in "
          "which order the program creates them. Expected the .meta file beside the "
          "checkpoint. {}".format(", ".join(sources), _LIKE)
        )
      scope, stem = group[0].scope, group[0].parsed.stem
      numbers = range(len(group))
      targets = [naming_schemes.join(scope, stem, number) for number in numbers]
    names += zip(targets, sources)
  return names


def _is_plain(member: Member) -> bool:
  """Returns whether a name has no conditionals, and has not lost its scope."""
  return member.name.rpartition("/")[0] == member.scope


def _check_single(optimizers: List[Members]) -> None:
  """Raises a ValueError if a program may have several loss scales, or one in a name
  scope, whose names the checkpoint of an unscaled program does not tell.
  """
  for members in optimizers:
    if len(members) > 1 or members[0].scope:
      raise ValueError(
        "The checkpoint has no loss scale. Which loss scales the program has, and in "
        "which name scopes, is not known from its variables {}. {}".format(
          ", ".join(member.name for member in members), _LIKE
        )
      )


def _unknown_loss_scales(members: Members, scheme: NamingScheme) -> ValueError:
  """Returns the error for variables of several optimizers."""
  return ValueError(
    "The names in the naming scheme {!r} depend on which optimizers have a loss scale, "
    "and the checkpoint has these variables of several: {}. {}".format(
      scheme.name, ", ".join(sorted(member.name for member in members)), _LIKE
    )
  )
