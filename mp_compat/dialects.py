"""How variables are called in checkpoints of one and the same training, by who wrote them. Names only, no TensorFlow.

    mp_compat             current_loss_scale  good_steps          beta1_power, as without loss scaling
    TensorFlow's class    current_loss_scale  good_steps          cond_1/beta1_power under control flow v1, and without
                                                                  its name scope under v2
    tf.contrib            loss_scale          good_steps, bad_steps (int32)           cond/beta1_power under v1
    plain                                                                             beta1_power

Everything else (weights, slots, global_step) has the same name in all of them. What was made under a name scope has its
name after that scope.
"""

import collections
import re
from typing import Dict, Iterable, NamedTuple, Optional, Sequence, Tuple

DIALECTS = ("mp_compat", "tensorflow", "contrib", "plain")

Shapes = Dict[str, Sequence[int]]

_STATE = {"current_loss_scale": "current_loss_scale", "loss_scale": "current_loss_scale",
          "good_steps": "good_steps", "bad_steps": "bad_steps"}
_POWERS = ("beta1_power", "beta2_power")


class _Name(NamedTuple):
  """A variable's name, taken apart: "head/cond_1/beta1_power_2"."""

  scope: str  # "head", without conditionals
  conditionals: Tuple[int, ...]  # (1,)
  stem: str  # "beta1_power"
  number: int  # 2

  @property
  def role(self) -> str:
    """The stem, in one spelling for all dialects."""
    return _STATE.get(self.stem, self.stem)

  @property
  def plain(self) -> str:
    """The name without conditionals."""
    return _join(self.scope, self.stem, self.number)


def _parse(name: str) -> _Name:
  *scopes, last = name.split("/")
  conditionals = [re.fullmatch(r"cond(?:_(\d+))?", scope) for scope in scopes]
  stem, number = re.fullmatch(r"(.*?)(?:_(\d+))?", last).groups()
  if stem not in _STATE and stem not in _POWERS:  # what ends in a number may be called so
    stem, number = last, None
  return _Name("/".join(scope for scope, found in zip(scopes, conditionals) if not found),
               tuple(int(found.group(1) or 0) for found in conditionals if found), stem, int(number or 0))


def _join(scope: str, stem: str, number: int = 0) -> str:
  return "/".join(filter(None, [scope, stem + ("_{}".format(number) if number else "")]))


def is_state(name: str) -> bool:
  """Whether a variable of this name is part of a loss scale's state."""
  return _parse(name).stem in _STATE


def state(names: Iterable[str]) -> "collections.OrderedDict[str, str]":
  """Which of these names are a loss scale's state, and what they are in mp_compat's spelling."""
  return collections.OrderedDict((name, _parse(name).role) for name in sorted(names) if is_state(name))


def dialect(names: Iterable[str]) -> str:
  """Which of `DIALECTS` these names are of; "mp_compat" also for TensorFlow's class where the two write the same."""
  parsed = [_parse(name) for name in names]
  stems = {name.stem for name in parsed}
  if "current_loss_scale" in stems:
    return "tensorflow" if any(name.conditionals and name.stem in _POWERS for name in parsed) else "mp_compat"
  return "contrib" if {"loss_scale", "good_steps"} <= stems else "plain"


def match(wanted: Shapes, found: Shapes) -> Dict[str, str]:
  """For variables of a graph, the names under which a checkpoint of any dialect has them.

  A variable is found under its own name; else under one that differs by conditionals (`cond_1/beta1_power`); else, if
  it is a scalar that loss scaling or Adam counts with, under one that plays the same part in another scope or dialect,
  the first for the first, if there are as many as are wanted.

  Args:
    wanted: shapes of the variables by name, in the order in which they were made.
    found: shapes of what is in the checkpoint by name.

  Returns:
    Names in `found` by names in `wanted`; those that were not found are missing.
  """
  matched = {name: name for name in wanted if name in found}

  def pair(group_of) -> None:
    ours, theirs = collections.OrderedDict(), collections.OrderedDict()
    for groups, names in [(ours, wanted), (theirs, sorted(set(found) - set(matched.values()), key=in_order))]:
      for name in names:
        group = group_of(_parse(name), tuple((wanted if groups is ours else found)[name]))
        if group is not None and (groups is theirs or name not in matched):
          groups.setdefault(group, []).append(name)
    for group, names in ours.items():
      if len(names) == len(theirs.get(group, [])):
        matched.update(zip(names, theirs[group]))

  pair(lambda name, shape: (name.scope, name.role, name.number, shape))
  pair(lambda name, shape: (name.scope, name.role, shape) if _counts(name, shape) else None)
  pair(lambda name, shape: name.role if _counts(name, shape) else None)
  return matched


def translate(names: Iterable[str], to: str) -> "collections.OrderedDict[str, Optional[str]]":
  """What a checkpoint of these names contains in another dialect.

  Args:
    names: the names in the checkpoint.
    to: one of `DIALECTS`. For "tensorflow" and "contrib", Adam's powers get the names of both control flows.

  Returns:
    For each name to be written the name that it is to be copied from; None for state that begins anew.

  Raises:
    ValueError: there is no such dialect.
  """
  if to not in DIALECTS:
    raise ValueError("The dialect must be one of {}, but got {!r}.".format(", ".join(map(repr, DIALECTS)), to))
  plain = _without_conditionals(names)
  result = collections.OrderedDict()
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
        result.setdefault(_join(parsed.scope, "bad_steps", parsed.number))
  return result


def _state_as(name: _Name, source: str, to: str) -> Dict[str, str]:
  stem = {"current_loss_scale": "loss_scale"}.get(name.role, name.role) if to == "contrib" else name.role
  if to == "plain" or (to == "tensorflow" and stem == "bad_steps"):
    return {}
  return {_join(name.scope, stem, name.number): source}


def _in_conditional(name: _Name, to: str) -> str:
  """TensorFlow's class makes two conditionals for each optimizer and applies in the second; contrib's in the first."""
  number = 2 * name.number + 1 if to == "tensorflow" else name.number
  return _join(name.scope, _join("", "cond", number)) + "/" + name.stem


def _without_conditionals(names: Iterable[str]) -> Dict[str, str]:
  """The names as mp_compat spells them, and what each was."""
  plain = {name: name for name in names if not _parse(name).conditionals or _parse(name).stem not in _POWERS}
  numbers = collections.Counter()
  for name in sorted(set(names) - set(plain), key=in_order):
    parsed = _parse(name)
    number = parsed.number or numbers[parsed.scope, parsed.stem]
    numbers[parsed.scope, parsed.stem] += 1
    plain.setdefault(_join(parsed.scope, parsed.stem, number), name)  # in both spellings, it is kept once
  scopes = {_parse(name).scope for name in plain if is_state(name)}
  for power in _POWERS:  # TensorFlow's class under control flow v2 drops the scope of its one optimizer
    if len(scopes) == 1 and [_parse(name).plain for name in plain if _parse(name).stem == power] == [power]:
      plain.setdefault(_join(*scopes, power), plain[power])
  return collections.OrderedDict(sorted(plain.items()))


def _counts(name: _Name, shape: Tuple[int, ...]) -> bool:
  return not shape and (name.stem in _STATE or name.stem in _POWERS)


def in_order(name: str) -> Tuple[str, Tuple[int, ...], str, int]:
  """Names as they were made: by scope, conditional and number."""
  parsed = _parse(name)
  return parsed.scope, parsed.conditionals, parsed.stem, parsed.number
