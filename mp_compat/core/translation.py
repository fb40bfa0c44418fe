# SPDX-License-Identifier: Apache-2.0
"""Gives the variables of a checkpoint the names of another naming scheme. Does not
import TensorFlow.
"""

from typing import Dict, Iterable, List, Mapping, Optional, Tuple

from mp_compat.core import arguments
from mp_compat.core import naming_schemes
from mp_compat.core import non_slots
from mp_compat.core.naming_schemes import CONTRIB
from mp_compat.core.naming_schemes import DYNAMIC
from mp_compat.core.naming_schemes import POWERS
from mp_compat.core.naming_schemes import TENSORFLOW
from mp_compat.core.naming_schemes import Conditionals
from mp_compat.core.naming_schemes import NamingScheme
from mp_compat.core.naming_schemes import Shape
from mp_compat.core.non_slots import HaveEqualValues
from mp_compat.core.non_slots import NonSlot
from mp_compat.core.non_slots import Variables


def translate(
  found: Variables, to: str, have_equal_values: HaveEqualValues
) -> Dict[str, Optional[str]]:
  """Returns the names that a checkpoint has in another naming scheme, each with the
  name to copy from, if any. A loss scale is added where there is none.

  Adam's powers of a single optimizer get the names of both control flow versions.
  Raises a ValueError if `to` is not the name of a scheme, a variable of the program has
  a name to write, or the names of Adam's powers are not certain.
  """
  arguments.choice("to", to, list(naming_schemes.SCHEMES))
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
  named: Dict[str, Shape] = {}
  for name in found.shapes:
    if naming_schemes.parse(name).stem in POWERS:
      named[name] = ()  # as if it were a scalar
  second = non_slots.second_names(found, have_equal_values)
  members: List[NonSlot] = []
  for group in non_slots.by_kind(found._replace(shapes=named)).values():
    members += non_slots.without_second_names(group, second)
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
  return max(
    non_slots.sizes(non_slots.grouped(powers, lambda one: one.parsed.stem)).values(),
    default=0,
  )


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
  for members in non_slots.grouped(
    powers, lambda one: (one.scope, one.parsed.stem)
  ).values():
    if not any(member.has_conditional for member in members):
      result.update((member.name, member.name) for member in members)
      continue
    names = _in_order_of_creation(members, have_equal_values)
    if not names:
      unordered += [member.name for member in members]
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
  places = non_slots.possible_places(members)
  names = sorted(places, key=lambda name: places[name])
  is_ordered = all(first == last for first, last in places.values())
  if is_ordered or have_equal_values(names):
    return names
  return []


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
  """Returns the names of several optimizers' powers under control flow v1 in
  TensorFlow's or contrib's class, each with that in the checkpoint.

      if `source` is `scheme`: the same names
      elif no power is in a conditional, and there are as many optimizers with powers as
          loss scales:
        beta1_power_1 -> cond_3/beta1_power    each optimizer builds the conditionals of
                                               a dynamic loss scale
      elif all conditionals are those of dynamic loss scales:
        cond_1/beta1_power -> cond/beta1_power    another of its conditionals applies
      else: raise a ValueError

  The second case assumes that each loss scale is that of one of the optimizers. If one
  of these has none, the program finds no variable of its name, and restoring fails.

  Args:
    powers: Adam's powers of at least two optimizers, without second names.
    state: the names of the loss scales' variables, each with its role.
    source: the naming scheme of the checkpoint.
    scheme: the naming scheme to write, of TensorFlow's or contrib's class.

  Raises:
    ValueError: If the checkpoint does not tell which optimizers have a loss scale.
  """
  if source is scheme:
    return {member.name: member.name for member in powers}
  groups = non_slots.grouped(powers, lambda member: member.has_conditional)
  inside, outside = groups[True], groups[False]
  roles = list(state.values())
  scales = roles.count("current_loss_scale")
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
  for members in non_slots.grouped(
    powers, lambda one: (one.scope, one.parsed.stem)
  ).values():
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
