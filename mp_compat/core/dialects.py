# SPDX-License-Identifier: Apache-2.0
"""Translates the names that different programs give the same variables in checkpoints. Does not import TensorFlow.

    mp_compat             current_loss_scale  good_steps          beta1_power, as without loss scaling
    TensorFlow's class    current_loss_scale  good_steps          cond_1/beta1_power under control flow v1, and without
                                                                  its name scope under v2
    tf.contrib            loss_scale          good_steps, bad_steps (int32)           cond/beta1_power under v1
    plain                                                                             beta1_power

All other variables (weights, slots, global_step) have the same name in each of these naming schemes (`DIALECTS`). The
names of variables created in a name scope are prefixed with that scope.
"""

import collections
import re
from types import MappingProxyType
from typing import Any, Callable, Counter, Dict, Iterable, List, Mapping, NamedTuple, Optional, Sequence, Set, Tuple

DIALECTS = ("mp_compat", "tensorflow", "contrib", "plain")

Shapes = Mapping[str, Sequence[int]]

_STATE = {
  "current_loss_scale": "current_loss_scale",
  "loss_scale": "current_loss_scale",
  "good_steps": "good_steps",
  "bad_steps": "bad_steps",
}
_POWERS = ("beta1_power", "beta2_power")
_NUMBERED = re.compile(r"({})_(\d+)".format("|".join([*_STATE, *_POWERS])))  # other stems may end in a number


class _Name(NamedTuple):
  """A variable's name, parsed: "head/cond_1/beta1_power_2"."""

  scope: str  # "head", without conditionals
  conditionals: Tuple[int, ...]  # (1,)
  stem: str  # "beta1_power"
  number: int  # 2

  @property
  def role(self) -> str:
    """Returns the stem in mp_compat's spelling."""
    return _STATE.get(self.stem, self.stem)

  @property
  def plain(self) -> str:
    """Returns the name without conditionals."""
    return _join(self.scope, self.stem, self.number)


def _parse(name: str) -> _Name:
  *scopes, last = name.split("/")
  conditionals = [re.fullmatch(r"cond(?:_(\d+))?", scope) for scope in scopes]
  numbered = _NUMBERED.fullmatch(last)
  stem, number = numbered.groups() if numbered else (last, 0)
  return _Name(
    "/".join(scope for scope, conditional in zip(scopes, conditionals) if not conditional),
    tuple(int(conditional.group(1) or 0) for conditional in conditionals if conditional),
    stem,
    int(number),
  )


def _join(scope: str, stem: str, number: int = 0) -> str:
  return "/".join(filter(None, [scope, stem + ("_{}".format(number) if number else "")]))


def is_state_name(name: str) -> bool:
  """Returns whether loss scales give this name to their variables; a program may have other variables of that name."""
  return _parse(name).stem in _STATE


def state(shapes: Shapes) -> "collections.OrderedDict[str, str]":
  """Returns the variables of loss scales: scalars beside `current_loss_scale`, or `loss_scale` beside `good_steps`.

  Other variables of these names belong to the program, such as the weight `loss_scale` of a task.

  Args:
    shapes: The shapes of all variables by name.

  Returns:
    The names, sorted, each with its stem in mp_compat's spelling.
  """
  scalars = [(name, _parse(name)) for name in sorted(shapes) if is_state_name(name) and not tuple(shapes[name])]
  stems: Dict[str, Set[str]] = collections.defaultdict(set)
  for _, parsed in scalars:
    stems[parsed.scope].add(parsed.stem)

  def is_state(name: _Name) -> bool:
    others = stems[name.scope]
    if name.stem == "loss_scale":
      return "good_steps" in others and ("bad_steps" in others or "current_loss_scale" not in others)
    return "current_loss_scale" in others or {"loss_scale", "good_steps"} <= others

  return collections.OrderedDict((name, parsed.role) for name, parsed in scalars if is_state(parsed))


def dialect(shapes: Shapes) -> str:
  """Returns which of `DIALECTS` these names belong to: "mp_compat" also if TensorFlow's class writes the same names."""
  stems = {_parse(name).stem for name in state(shapes)}
  if "current_loss_scale" in stems:
    parsed = [_parse(name) for name in shapes]
    return "tensorflow" if any(name.conditionals and name.stem in _POWERS for name in parsed) else "mp_compat"
  return "contrib" if stems else "plain"


def match(wanted: Shapes, found: Shapes, matched: Mapping[str, str] = MappingProxyType({})) -> Dict[str, str]:
  """Returns the names that a checkpoint of any naming scheme has for the variables of a graph.

  Looks for the same name first, then for a name that differs only in conditionals (`cond_1/beta1_power`) or in
  spelling; without loss scaling, `cond` is a scope of the program, and only Adam's powers match without it. Then
  matches the state of loss scales, and Adam's powers, with those of the same role: first in the same scope, in order of
  creation; then in another scope, if that is clear. Names that are not identical match only if the checkpoint has as
  many of a kind as are wanted, with or without second names (`aliases`).

  Args:
    wanted: The shapes of all variables by name, in the order in which they were created.
    found: The shapes in the checkpoint by name.
    matched: Names in `found` by names in `wanted`, of variables that are matched already.

  Returns:
    Names in `found` by names in `wanted`, without the names that have no match.
  """
  result = dict({name: name for name in wanted if name in found}, **matched)
  wanted_roles, found_roles = _roles(wanted), _roles(found)

  def pair(key_of: Callable[[_Name, Optional[str], Tuple[int, ...]], Any]) -> None:
    """Matches variables for which `key_of(name, role, shape)` returns the same; it returns None for no match."""
    wanted_groups: Dict[Any, List[str]] = collections.OrderedDict()
    found_groups: Dict[Any, List[str]] = collections.OrderedDict()
    unused = sorted(set(found) - set(result.values()), key=creation_order)
    missing = [name for name in wanted if name not in result]
    for groups, names, roles, shapes in [
      (wanted_groups, missing, wanted_roles, wanted),
      (found_groups, unused, found_roles, found),
    ]:
      has_conditionals = bool(state(shapes))
      for name in names:
        parsed = _parse(name)
        if has_conditionals or roles.get(name) or not parsed.conditionals:
          groups.setdefault(key_of(parsed, roles.get(name), tuple(shapes[name])), []).append(name)
    for key, names in wanted_groups.items():
      candidates = found_groups.get(key, [])
      if len(names) != len(candidates):
        second_names = aliases(candidates)
        candidates = [name for name in candidates if name not in second_names]
      if key and len(names) == len(candidates) and _scopes_fit(names, candidates):
        result.update(zip(names, candidates))

  pair(lambda name, role, shape: (name.scope, role or name.stem, name.number, shape))
  pair(lambda name, role, shape: role and (name.scope, role))
  pair(lambda name, role, shape: role)
  return result


def aliases(names: Iterable[str]) -> Dict[str, str]:
  """Returns the second names of Adam's powers, `cond_1/beta1_power` beside `beta1_power`, each with the first one.

  A Saver writes both after `install()`. A scope that has more of the former than of the latter has no second names.
  """
  groups: Dict[Tuple[str, str], Tuple[List[str], List[str]]] = collections.defaultdict(lambda: ([], []))
  for name in sorted(names, key=creation_order):
    parsed = _parse(name)
    if parsed.stem in _POWERS:
      groups[parsed.scope, parsed.stem][bool(parsed.conditionals)].append(name)
  return {
    second: first
    for firsts, seconds in groups.values()
    if len(seconds) <= len(firsts)
    for second, first in zip(seconds, firsts)
  }


def names_without_conditionals(shapes: Shapes) -> Dict[str, str]:
  """Returns the names that Adam's powers in a checkpoint do not have there, but in this package, with those there."""
  return {name: source for name, source in _without_conditionals(shapes).items() if name not in shapes}


def _roles(shapes: Shapes) -> Dict[str, str]:
  """Returns the variables of loss scales and Adam's powers, each with its stem in mp_compat's spelling."""
  powers = {name: _parse(name).stem for name in shapes if _parse(name).stem in _POWERS and not tuple(shapes[name])}
  return dict(state(shapes), **powers)


def _scopes_fit(wanted: List[str], found: List[str]) -> bool:
  """Returns whether variables of one role can be those of a checkpoint: in the same scopes, or clearly in another one.

  TensorFlow's class drops the scope of Adam's powers under control flow v2. A loss scale is in whatever scope its
  program creates it.
  """
  wanted_scopes, found_scopes = [{_parse(name).scope for name in names} for names in (wanted, found)]
  if wanted_scopes == found_scopes or found_scopes == {""}:
    return True
  is_power = _parse(wanted[0]).stem in _POWERS
  return len(found_scopes) == 1 and (wanted_scopes == {""} or (len(wanted_scopes) == 1 and not is_power))


def translate(shapes: Shapes, to: str) -> "collections.OrderedDict[str, Optional[str]]":
  """Returns the names that a checkpoint has in another naming scheme, each with the name to copy from.

  Args:
    shapes: The shapes of the variables in the checkpoint by name.
    to: One of `DIALECTS`. For "tensorflow" and "contrib", Adam's powers get the names of both control flow versions.

  Returns:
    For each name to write, the name in the checkpoint to copy from; None for state that starts anew.

  Raises:
    ValueError: If `to` is not one of `DIALECTS`, or a variable of the program has a name to write.
  """
  if to not in DIALECTS:
    raise ValueError("The naming scheme must be one of {}, but got {!r}.".format(", ".join(map(repr, DIALECTS)), to))
  own_state, plain = state(shapes), _without_conditionals(shapes)
  result: collections.OrderedDict[str, Optional[str]] = collections.OrderedDict(
    (name, source) for name, source in plain.items() if source not in own_state
  )
  for target, source in _state_as(own_state, to).items():
    if source and target in result:
      raise ValueError(
        "{} would be written as {}, which is the name of another variable. Expected no variable of that name, or "
        "another naming scheme than {!r}.".format(source, target, to)
      )
    result.setdefault(target, source)
  if to in ("tensorflow", "contrib"):
    result.update(_powers_in_conditionals(plain, to))
  return result


def _state_as(own_state: Iterable[str], to: str) -> Dict[str, Optional[str]]:
  """Returns the names of the loss scales' variables in another naming scheme, each with the name to copy from, if any.

  Args:
    own_state: Their names in the checkpoint. Without any, a loss scale is added.
    to: One of `DIALECTS`.
  """
  if to == "plain":
    return {}
  scale = "loss_scale" if to == "contrib" else "current_loss_scale"
  result: Dict[str, Optional[str]] = {}
  for source in own_state:
    name = _parse(source)
    if to != "tensorflow" or name.role != "bad_steps":
      result[_join(name.scope, scale if name.role == "current_loss_scale" else name.role, name.number)] = source
  if not result:
    result = dict.fromkeys([scale, "good_steps"])
  if to == "contrib":
    for name in map(_parse, list(result)):
      if name.stem == scale:
        result.setdefault(_join(name.scope, "bad_steps", name.number), None)
  return result


def _powers_in_conditionals(plain: Mapping[str, str], to: str) -> Dict[str, str]:
  """Returns the names of Adam's powers under both control flow versions, each with the name to copy from."""
  powers = [(_parse(name), source) for name, source in plain.items() if _parse(name).stem in _POWERS]
  stems = collections.Counter(name.stem for name, _ in powers)
  return dict(
    {name.stem: source for name, source in powers if stems[name.stem] == 1},
    **{_in_conditional(name, to): source for name, source in powers},
  )


def _in_conditional(name: _Name, to: str) -> str:
  """Returns the name under control flow v1, where each optimizer builds two conditionals.

  TensorFlow's class applies in the second of them, contrib's in the first.
  """
  number = 2 * name.number + (to == "tensorflow")
  return _join(name.scope, _join("", "cond", number)) + "/" + name.stem


def _without_conditionals(shapes: Shapes) -> Dict[str, str]:
  """Returns the original names by the names without conditionals, sorted by the latter."""
  plain = {name: name for name in shapes if not _parse(name).conditionals or _parse(name).stem not in _POWERS}
  numbers: Counter[Tuple[str, str]] = collections.Counter()
  for name in sorted(set(shapes) - set(plain), key=creation_order):
    parsed = _parse(name)
    number = parsed.number or numbers[parsed.scope, parsed.stem]
    numbers[parsed.scope, parsed.stem] += 1
    plain.setdefault(_join(parsed.scope, parsed.stem, number), name)  # has both names: keep one
  scopes = {_parse(name).scope for name in state(shapes)}
  for power in _POWERS:  # under control flow v2 TensorFlow's class drops the optimizer's scope
    if len(scopes) == 1 and [_parse(name).plain for name in plain if _parse(name).stem == power] == [power]:
      plain.setdefault(_join(next(iter(scopes)), power), plain[power])
  return collections.OrderedDict(sorted(plain.items()))


def creation_order(name: str) -> Tuple[str, Tuple[int, ...], str, int]:
  """Returns a sort key for the order of creation: scope, conditionals, stem, number."""
  parsed = _parse(name)
  return parsed.scope, parsed.conditionals, parsed.stem, parsed.number
