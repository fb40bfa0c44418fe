# SPDX-License-Identifier: Apache-2.0
"""Translates the names that different programs give the same variables in checkpoints.
Does not import TensorFlow.

    mp_compat             current_loss_scale  good_steps          beta1_power, as without loss scaling
    TensorFlow's class    current_loss_scale  good_steps          cond_1/beta1_power under control flow v1, and without
                                                                  its name scope under v2
    tf.contrib            loss_scale          good_steps, bad_steps (int32)           cond/beta1_power under v1
    plain                                                                             beta1_power

All other variables (weights, slots, global_step) have the same name in each of these
naming schemes (`DIALECTS`). The names of variables created in a name scope are prefixed
with that scope.
"""

import collections
import re
from types import MappingProxyType
from typing import (
  Callable,
  Dict,
  Hashable,
  Iterable,
  List,
  Mapping,
  NamedTuple,
  Optional,
  Sequence,
  Set,
  Tuple,
)

DIALECTS = ("mp_compat", "tensorflow", "contrib", "plain")

Shapes = Mapping[str, Sequence[int]]


class Role(NamedTuple):
  """A scalar variable of the loss scales of TensorFlow, contrib, Keras 3 and this
  package.
  """

  names: Mapping[str, str]  # in each of `DIALECTS` that has it
  initial: float = 0.0
  dtype: str = "int64"
  contrib_dtype: str = "int32"
  keras_3: Optional[str] = None


# By name in this package. Further variables of a LossScale are known in its graph
# (`loss_scale.state_names`).
ROLES = {
  "current_loss_scale": Role(
    {
      "mp_compat": "current_loss_scale",
      "tensorflow": "current_loss_scale",
      "contrib": "loss_scale",
    },
    2.0**15,
    "float32",
    "float32",
    "dynamic_scale",
  ),
  "good_steps": Role(dict.fromkeys(DIALECTS[:3], "good_steps"), keras_3="step_counter"),
  "bad_steps": Role({"mp_compat": "bad_steps", "contrib": "bad_steps"}),
}
_STATE = {name: role for role, row in ROLES.items() for name in row.names.values()}
_POWERS = ("beta1_power", "beta2_power")
# Name scopes of conditionals: of `tf.cond`, and those that this package once added in
# eager mode and functions.
_CONDITIONAL = re.compile(r"(?:cond|apply_or_skip|apply_if_finite)(?:_(\d+))?")
# other stems may end in a number
_NUMBERED = re.compile(r"({})_(\d+)".format("|".join([*_STATE, *_POWERS])))


class Name(NamedTuple):
  """A variable's name, parsed: "head/cond_1/beta1_power_2". Names sort in the order of
  creation.
  """

  scope: str  # "head", without conditionals
  conditionals: Tuple[int, ...]  # (1,)
  stem: str  # "beta1_power"
  number: int  # 2


def parse(name: str) -> Name:
  *scopes, last = name.split("/")
  conditionals = [_CONDITIONAL.fullmatch(scope) for scope in scopes]
  numbered = _NUMBERED.fullmatch(last)
  stem, number = numbered.groups() if numbered else (last, 0)
  return Name(
    "/".join(
      scope for scope, conditional in zip(scopes, conditionals) if not conditional
    ),
    tuple(
      int(conditional.group(1) or 0) for conditional in conditionals if conditional
    ),
    stem,
    int(number),
  )


def _join(scope: str, stem: str, number: int = 0) -> str:
  return "/".join(
    filter(None, [scope, stem + ("_{}".format(number) if number else "")])
  )


def is_state_name(name: str) -> bool:
  """Returns whether loss scales give this name to their variables; a program may have
  other variables of that name.
  """
  return parse(name).stem in _STATE


def state(shapes: Shapes) -> Dict[str, str]:
  """Returns the names of loss scales' variables, sorted, each with its stem in
  mp_compat's spelling.

  They are scalars beside `current_loss_scale`, or `loss_scale` beside `good_steps`.
  Other variables of these names belong to the program, such as the weight `loss_scale`
  of a task.
  """
  scalars = {
    name: parse(name)
    for name in sorted(shapes)
    if is_state_name(name) and not tuple(shapes[name])
  }
  stems: Dict[str, Set[str]] = collections.defaultdict(set)
  for parsed in scalars.values():
    stems[parsed.scope].add(parsed.stem)

  def is_state(name: Name) -> bool:
    others = stems[name.scope]
    if name.stem == "loss_scale":
      return "good_steps" in others and (
        "bad_steps" in others or "current_loss_scale" not in others
      )
    return "current_loss_scale" in others or {"loss_scale", "good_steps"} <= others

  return {
    name: _STATE[parsed.stem] for name, parsed in scalars.items() if is_state(parsed)
  }


def dialect(shapes: Shapes) -> str:
  """Returns which of `DIALECTS` the names belong to: "mp_compat" also if TensorFlow's
  class writes the same names.
  """
  stems = {parse(name).stem for name in state(shapes)}
  if "current_loss_scale" in stems:
    parsed = [parse(name) for name in shapes if "apply_or_skip" not in name]
    return (
      "tensorflow"
      if any(name.conditionals and name.stem in _POWERS for name in parsed)
      else "mp_compat"
    )
  return "contrib" if stems else "plain"


# of a name, its role and shape; None for no match
_KeyOf = Callable[[Name, Optional[str], Tuple[int, ...]], Hashable]

# What variables that match have in common, most specific first.
_KEYS: Sequence[_KeyOf] = (
  lambda name, role, shape: (name.scope, role or name.stem, name.number, shape),
  lambda name, role, shape: role and (name.scope, role),
  lambda name, role, shape: role,
)


def match(
  wanted: Shapes, found: Shapes, recorded: Mapping[str, str] = MappingProxyType({})
) -> Dict[str, str]:
  """Returns the names that a checkpoint of any naming scheme has for the variables of a
  graph that match.

  Looks for the same name first, then for a name that differs only in conditionals
  (`cond_1/beta1_power`) or in spelling; without loss scaling, `cond` is a scope of the
  program, and only Adam's powers match without it. Then matches the state of loss
  scales, and Adam's powers, with those of the same role: first in the same scope, in
  order of creation; then in another scope, if that is clear. Names that are not
  identical match only if the checkpoint has as many of a kind as are wanted, with or
  without second names (`aliases`).

  A checkpoint with all names, apart from those of a loss scale, was written by this
  package or without loss scaling. In others `beta1_power` may belong to an optimizer
  without loss scaling: the names in `recorded` have precedence.

  Args:
    wanted: The shapes of all variables by name, in the order in which they were
      created.
    found: The shapes in the checkpoint by name.
    recorded: The names that TensorFlow's class would give to variables, by their names
      in `wanted`.
  """
  result = {name: name for name in wanted if name in found}
  if not set(wanted) <= {*found, *state(wanted)}:
    result.update(
      (name, recorded[name]) for name in wanted if recorded.get(name) in found
    )
  for key_of in _KEYS:
    unused = sorted(set(found).difference(result.values()), key=parse)
    candidates_by_key = _grouped(unused, found, key_of)
    for key, names in _grouped(
      [name for name in wanted if name not in result], wanted, key_of
    ).items():
      candidates = candidates_by_key[key]
      if len(names) != len(candidates):
        second_names = aliases(candidates)
        candidates = [name for name in candidates if name not in second_names]
      if len(names) == len(candidates) and _scopes_fit(names, candidates):
        result.update(zip(names, candidates))
  return result


def _grouped(
  names: Iterable[str], shapes: Shapes, key_of: _KeyOf
) -> Dict[Hashable, List[str]]:
  """Returns those of `names` that may match others, by their keys."""
  roles = state(shapes)
  has_conditionals = bool(roles)
  roles.update(
    (name, parse(name).stem)
    for name in shapes
    if parse(name).stem in _POWERS and not tuple(shapes[name])
  )
  groups: Dict[Hashable, List[str]] = collections.defaultdict(list)
  for name in names:
    key = key_of(parse(name), roles.get(name), tuple(shapes[name]))
    if key and (has_conditionals or name in roles or not parse(name).conditionals):
      groups[key].append(name)
  return groups


def _scopes_fit(wanted: List[str], found: List[str]) -> bool:
  """Returns whether variables of one role can be those of a checkpoint: in the same
  scopes, or clearly in another one.

  TensorFlow's class drops the scope of Adam's powers under control flow v2. A loss
  scale is in whatever scope its program creates it.
  """
  wanted_scopes, found_scopes = [
    {parse(name).scope for name in names} for names in (wanted, found)
  ]
  if wanted_scopes == found_scopes or found_scopes == {""}:
    return True
  is_power = parse(wanted[0]).stem in _POWERS
  return len(found_scopes) == 1 and (
    wanted_scopes == {""} or (len(wanted_scopes) == 1 and not is_power)
  )


def aliases(names: Iterable[str]) -> Dict[str, str]:
  """Returns the second names of Adam's powers, `cond_1/beta1_power` beside
  `beta1_power`, each with the first one.

  A Saver writes both after `install()`. A scope that has more of the former than of the
  latter has no second names.
  """
  groups: Dict[Tuple[str, str], Tuple[List[str], List[str]]] = collections.defaultdict(
    lambda: ([], [])
  )
  for name in sorted(names, key=parse):
    parsed = parse(name)
    if parsed.stem in _POWERS:
      groups[parsed.scope, parsed.stem][bool(parsed.conditionals)].append(name)
  return {
    second: first
    for firsts, seconds in groups.values()
    if len(seconds) <= len(firsts)
    for second, first in zip(seconds, firsts)
  }


def translate(shapes: Shapes, to: str) -> Dict[str, Optional[str]]:
  """Returns the names that a checkpoint has in another naming scheme, each with the
  name to copy from, if any.

  A loss scale is added where there is none. For "tensorflow" and "contrib", Adam's
  powers get the names of both control flow versions. Raises a ValueError if `to` is not
  one of `DIALECTS`, or a variable of the program has a name to write.
  """
  if to not in DIALECTS:
    raise ValueError(
      "The naming scheme must be one of {}, but got {!r}.".format(
        ", ".join(map(repr, DIALECTS)), to
      )
    )
  own_state, plain = state(shapes), without_conditionals(shapes)
  result: Dict[str, Optional[str]] = {
    name: source for name, source in plain.items() if source not in own_state
  }
  if to == "plain":
    return result
  for target, copied in _state_in(to, own_state).items():
    if copied and target in result:
      raise ValueError(
        "{} would be written as {}, which is the name of another variable. Expected no "
        "variable of that name, or another naming scheme than {!r}.".format(
          copied, target, to
        )
      )
    result.setdefault(target, copied)
  if to != "mp_compat":
    result.update(_powers_in(to, plain))
  return result


def _state_in(dialect: str, own_state: Mapping[str, str]) -> Dict[str, Optional[str]]:
  """Returns the names of the loss scales' state in a naming scheme, each with that in
  `own_state`, if any.
  """
  names = {
    role: row.names[dialect] for role, row in ROLES.items() if dialect in row.names
  }
  scale = names["current_loss_scale"]
  targets: Dict[str, Optional[str]] = (
    {} if own_state else dict.fromkeys([scale, names["good_steps"]])
  )
  for source, role in own_state.items():
    name = parse(source)
    if role in names:
      targets[_join(name.scope, names[role], name.number)] = source
  if dialect == "contrib":
    scales = [name for name in map(parse, targets) if name.stem == scale]
    targets = {
      **dict.fromkeys(
        _join(name.scope, names["bad_steps"], name.number) for name in scales
      ),
      **targets,
    }
  return targets


def _powers_in(dialect: str, plain: Mapping[str, str]) -> Dict[str, str]:
  """Returns the names of Adam's powers in conditionals, each with that in the
  checkpoint; `plain` has all variables.
  """
  result = {}
  powers = [
    (parse(name), source)
    for name, source in plain.items()
    if parse(name).stem in _POWERS
  ]
  for name, source in powers:
    # Under control flow v1, each optimizer builds two conditionals. TensorFlow's class
    # applies in the second of them, contrib's in the first.
    conditional = _join("", "cond", 2 * name.number + (dialect == "tensorflow"))
    result["/".join(filter(None, [name.scope, conditional, name.stem]))] = source
    if [other.stem for other, _ in powers].count(name.stem) == 1:
      result[name.stem] = source
  return result


def without_conditionals(shapes: Shapes) -> Dict[str, str]:
  """Returns the names in a checkpoint by the names in this package: Adam's powers
  without conditionals.
  """
  plain = {
    name: name
    for name in shapes
    if not parse(name).conditionals or parse(name).stem not in _POWERS
  }
  numbers: collections.Counter[Tuple[str, str]] = collections.Counter()
  for name in sorted(set(shapes) - set(plain), key=parse):
    scope, _, stem, number = parse(name)
    # has both names: keep one
    plain.setdefault(_join(scope, stem, number or numbers[scope, stem]), name)
    numbers[scope, stem] += 1
  scopes = list({parse(name).scope for name in state(shapes)})
  # under control flow v2 TensorFlow's class drops the optimizer's scope
  for power in _POWERS:
    if len(scopes) == 1 and [name for name in plain if parse(name).stem == power] == [
      power
    ]:
      plain.setdefault(_join(scopes[0], power), plain[power])
  return plain
