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
from typing import Any, Callable, Counter, Dict, Iterable, List, Mapping, NamedTuple, Optional, Sequence, Tuple

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


def is_state(name: str) -> bool:
  """Returns whether a variable of this name is part of a loss scale's state."""
  return _parse(name).stem in _STATE


def state(names: Iterable[str]) -> "collections.OrderedDict[str, str]":
  """Returns those names that are part of a loss scale's state, sorted, each with its stem in mp_compat's spelling."""
  return collections.OrderedDict((name, _parse(name).role) for name in sorted(names) if is_state(name))


def dialect(names: Iterable[str]) -> str:
  """Returns which of `DIALECTS` these names belong to: "mp_compat" also if TensorFlow's class writes the same names."""
  parsed = [_parse(name) for name in names]
  stems = {name.stem for name in parsed}
  if "current_loss_scale" in stems:
    return "tensorflow" if any(name.conditionals and name.stem in _POWERS for name in parsed) else "mp_compat"
  return "contrib" if {"loss_scale", "good_steps"} <= stems else "plain"


def match(wanted: Shapes, found: Shapes) -> Dict[str, str]:
  """Returns the names that a checkpoint of any naming scheme has for the variables of a graph.

  Looks for the same name first, then for a name that differs only in conditionals (`cond_1/beta1_power`) or in
  spelling. Then matches scalars of the loss scale's state and Adam's powers with those of the same role in any scope,
  in order of creation. Names that are not identical match only if the checkpoint has as many of a kind as are wanted.

  Args:
    wanted: The shapes of the variables by name, in the order in which they were created.
    found: The shapes in the checkpoint by name.

  Returns:
    Names in `found` by names in `wanted`, without the names that have no match.
  """
  matched = {name: name for name in wanted if name in found}

  def pair(group_of: Callable[[_Name, Tuple[int, ...]], Any]) -> None:
    wanted_groups: Dict[Any, List[str]] = collections.OrderedDict()
    found_groups: Dict[Any, List[str]] = collections.OrderedDict()
    unused = sorted(set(found) - set(matched.values()), key=creation_order)
    for groups, names in [(wanted_groups, wanted), (found_groups, unused)]:
      for name in names:
        group = group_of(_parse(name), tuple((wanted if groups is wanted_groups else found)[name]))
        if group is not None and (groups is found_groups or name not in matched):
          groups.setdefault(group, []).append(name)
    for group, names in wanted_groups.items():
      if len(names) == len(found_groups.get(group, [])):
        matched.update(zip(names, found_groups[group]))

  pair(lambda name, shape: (name.scope, name.role, name.number, shape))
  pair(lambda name, shape: (name.scope, name.role, shape) if _is_scalar_state(name, shape) else None)
  pair(lambda name, shape: name.role if _is_scalar_state(name, shape) else None)
  return matched


def translate(names: Iterable[str], to: str) -> "collections.OrderedDict[str, Optional[str]]":
  """Returns the names that a checkpoint has in another naming scheme, each with the name to copy from.

  Args:
    names: The names in the checkpoint.
    to: One of `DIALECTS`. For "tensorflow" and "contrib", Adam's powers get the names of both control flow versions.

  Returns:
    For each name to write, the name in `names` to copy from; None for state that starts anew.

  Raises:
    ValueError: If `to` is not one of `DIALECTS`.
  """
  if to not in DIALECTS:
    raise ValueError("The dialect must be one of {}, but got {!r}.".format(", ".join(map(repr, DIALECTS)), to))
  plain = _without_conditionals(names)
  result: collections.OrderedDict[str, Optional[str]] = collections.OrderedDict()
  for name, source in plain.items():
    parsed = _parse(name)
    if parsed.stem in _STATE:
      result.update(_state_as(parsed, source, to))
      continue
    result[name] = source
    if parsed.stem in _POWERS and to in ("tensorflow", "contrib"):
      result[_in_conditional(parsed, to)] = source
      if sum(_parse(other).stem == parsed.stem for other in plain) == 1:
        result.setdefault(parsed.stem, source)
  if to != "plain" and not any(is_state(name) for name in result):
    result.update(dict.fromkeys(["loss_scale" if to == "contrib" else "current_loss_scale", "good_steps"]))
  if to == "contrib":
    for parsed in [_parse(name) for name in result]:
      if parsed.stem == "loss_scale":
        result.setdefault(_join(parsed.scope, "bad_steps", parsed.number), None)
  return result


def _state_as(name: _Name, source: str, to: str) -> Dict[str, str]:
  stem = {"current_loss_scale": "loss_scale"}.get(name.role, name.role) if to == "contrib" else name.role
  if to == "plain" or (to == "tensorflow" and stem == "bad_steps"):
    return {}
  return {_join(name.scope, stem, name.number): source}


def _in_conditional(name: _Name, to: str) -> str:
  """Returns the name under control flow v1, where each optimizer builds two conditionals.

  TensorFlow's class applies in the second of them, contrib's in the first.
  """
  number = 2 * name.number + (to == "tensorflow")
  return _join(name.scope, _join("", "cond", number)) + "/" + name.stem


def _without_conditionals(names: Iterable[str]) -> Dict[str, str]:
  """Returns the original names by the names without conditionals, sorted by the latter."""
  plain = {name: name for name in names if not _parse(name).conditionals or _parse(name).stem not in _POWERS}
  numbers: Counter[Tuple[str, str]] = collections.Counter()
  for name in sorted(set(names) - set(plain), key=creation_order):
    parsed = _parse(name)
    number = parsed.number or numbers[parsed.scope, parsed.stem]
    numbers[parsed.scope, parsed.stem] += 1
    plain.setdefault(_join(parsed.scope, parsed.stem, number), name)  # has both names: keep one
  scopes = {_parse(name).scope for name in plain if is_state(name)}
  for power in _POWERS:  # under control flow v2 TensorFlow's class drops the optimizer's scope
    if len(scopes) == 1 and [_parse(name).plain for name in plain if _parse(name).stem == power] == [power]:
      plain.setdefault(_join(next(iter(scopes)), power), plain[power])
  return collections.OrderedDict(sorted(plain.items()))


def _is_scalar_state(name: _Name, shape: Tuple[int, ...]) -> bool:
  return not shape and (name.stem in _STATE or name.stem in _POWERS)


def creation_order(name: str) -> Tuple[str, Tuple[int, ...], str, int]:
  """Returns a sort key for the order of creation: scope, conditionals, stem, number."""
  parsed = _parse(name)
  return parsed.scope, parsed.conditionals, parsed.stem, parsed.number
