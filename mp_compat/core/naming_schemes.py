# SPDX-License-Identifier: Apache-2.0
"""The naming schemes of checkpoints. Does not import TensorFlow.

Programs of different kinds give different names to the variables of loss scaling, and
to those that an optimizer creates when it applies gradients, such as Adam's powers:

    mp_compat             current_loss_scale, good_steps; beta1_power
    TensorFlow's class    current_loss_scale, good_steps; cond_1/beta1_power under
                          control flow v1, beta1_power without its name scope under v2
    tf.contrib            loss_scale, good_steps, bad_steps (int32); cond/beta1_power
    plain                 beta1_power

All other variables (weights, slots, global_step) have the same name in each of these
schemes. The names of variables created in a name scope are prefixed with that scope.
`core.matching` finds the variables of one scheme in a checkpoint of another,
`core.translation` gives them the names of another.
"""

import collections
import re
from typing import (
  Callable,
  Dict,
  List,
  Mapping,
  NamedTuple,
  Optional,
  Sequence,
  Set,
  Tuple,
)

Shape = Sequence[int]
Shapes = Mapping[str, Shape]

# Kinds of loss scales, by which programs build conditionals.
DYNAMIC, FIXED = "dynamic", "fixed"

# The variables that Adam creates when it applies gradients.
POWERS = ("beta1_power", "beta2_power")


class StateVariable(NamedTuple):
  """A scalar variable of a loss scale, in one naming scheme.

  Attributes:
    name: Its name, without name scopes and number.
    dtype: Its dtype.
    initial: Its value in a program that starts anew.
  """

  name: str
  dtype: str = "int64"
  initial: float = 0.0


class Form(NamedTuple):
  """What a name tells of the place where a variable was created.

  Attributes:
    scope: Its name scopes, without those of conditionals.
    depth: In how many conditionals it is. Their numbers only tell the order: other
      conditionals of the program count, too.
  """

  scope: str
  depth: int


# Returns the form of a variable that an optimizer creates when it applies gradients,
# from its form without loss scaling and the kind of loss scale, which may be None.
WriteForm = Callable[[Form, Optional[str]], Form]


class NamingScheme(NamedTuple):
  """The names that programs of one kind give to variables.

  Attributes:
    name: The name of the scheme.
    state: The variables of a loss scale, by their names in this package (roles).
    signature: Those that every dynamic loss scale has, by which it is recognized.
    conditionals: By the kind of loss scale: which of the conditionals that
      `apply_gradients` builds applies. Under control flow v1, the names of variables
      that are created in it begin with its name: `cond_1/beta1_power`.
  """

  name: str
  state: Mapping[str, StateVariable]
  signature: Tuple[str, ...] = ()
  conditionals: Mapping[str, int] = {}

  def form(self, alone: Form, loss_scale: Optional[str]) -> Form:
    """Returns the form of a variable that an optimizer creates; see `WriteForm`."""
    if loss_scale not in self.conditionals:
      return alone
    return alone._replace(depth=alone.depth + 1)

  def variable(self, role: str) -> StateVariable:
    """Returns a variable of a loss scale; one that only this package has is as here."""
    return self.state.get(role) or MP_COMPAT.state[role]

  def state_names(self) -> Set[str]:
    """Returns the names of the variables of a loss scale."""
    return {variable.name for variable in self.state.values()}

  def signature_names(self) -> Set[str]:
    """Returns the names of the variables that every dynamic loss scale has."""
    return {self.state[role].name for role in self.signature}


_SCALE = StateVariable("current_loss_scale", "float32", 2.0**15)

MP_COMPAT = NamingScheme(
  "mp_compat",
  {
    "current_loss_scale": _SCALE,
    "good_steps": StateVariable("good_steps"),
    "bad_steps": StateVariable("bad_steps"),
  },
  signature=("current_loss_scale",),
)
TENSORFLOW = NamingScheme(
  "tensorflow",
  {"current_loss_scale": _SCALE, "good_steps": StateVariable("good_steps")},
  signature=("current_loss_scale",),
  conditionals={DYNAMIC: 1},
)
CONTRIB = NamingScheme(
  "contrib",
  {
    "current_loss_scale": _SCALE._replace(name="loss_scale"),
    "good_steps": StateVariable("good_steps", "int32"),
    "bad_steps": StateVariable("bad_steps", "int32"),
  },
  signature=("current_loss_scale", "good_steps"),
  conditionals={DYNAMIC: 0, FIXED: 0},
)
PLAIN = NamingScheme("plain", {})

# The schemes of checkpoints of names.
SCHEMES = {scheme.name: scheme for scheme in (MP_COMPAT, TENSORFLOW, CONTRIB, PLAIN)}


def form_under_control_flow_v2(alone: Form, loss_scale: Optional[str]) -> Form:
  """Returns the form in TensorFlow's class under control flow v2, in whose conditionals
  a name loses its scope.
  """
  if loss_scale not in TENSORFLOW.conditionals:
    return alone
  return Form("", 0)


# How programs write the names of variables that optimizers create. A fifth scheme adds
# its function here; `parse`, `recognize` and `translation` must know other parts of a
# name than scopes, conditionals and numbers.
FORMS: Sequence[WriteForm] = (
  PLAIN.form,  # also MP_COMPAT.form
  TENSORFLOW.form,
  CONTRIB.form,
  form_under_control_flow_v2,
)

# The names of a loss scale's variables in object-based checkpoints of Keras 3.
KERAS_3 = NamingScheme(
  "keras_3",
  {
    "current_loss_scale": _SCALE._replace(name="dynamic_scale"),
    "good_steps": StateVariable("step_counter"),
  },
)

_ROLES = {
  variable.name: role
  for scheme in SCHEMES.values()
  for role, variable in scheme.state.items()
}
_CONDITIONAL = re.compile(r"cond(?:_(\d+))?")  # the name scope of a `tf.cond`
# Other last parts may end in a number that is part of the name.
_NUMBERED = re.compile(r"({})_(\d+)".format("|".join([*_ROLES, *POWERS])))


class Name(NamedTuple):
  """A variable's name, parsed. Names that differ in numbers only sort in the order of
  creation.

  Attributes:
    scope: Its name scopes, without those of conditionals: "head" of
      "head/cond_1/beta1_power_2".
    conditionals: The numbers of the conditionals: (1,).
    stem: The last part, without its number: "beta1_power".
    number: The number that makes it unique: 2.
  """

  scope: str
  conditionals: Tuple[int, ...]
  stem: str
  number: int

  @property
  def form(self) -> Form:
    """Returns the form of the name."""
    return Form(self.scope, len(self.conditionals))


def parse(name: str) -> Name:
  """Returns a name in parts. Only names of loss scaling have a number."""
  *scopes, last = name.split("/")
  kept: List[str] = []
  conditionals: List[int] = []
  for scope in scopes:
    conditional = _CONDITIONAL.fullmatch(scope)
    if conditional:
      conditionals.append(int(conditional.group(1) or 0))
    else:
      kept.append(scope)
  numbered = _NUMBERED.fullmatch(last)
  stem, number = last, 0
  if numbered:
    stem, number = numbered.group(1), int(numbered.group(2))
  return Name("/".join(kept), tuple(conditionals), stem, number)


def without_numbers(name: str) -> str:
  """Returns a name without the numbers that tell the order of creation: "cond/a/power"
  of "cond_1/a/power_2". Those in "cond/a" and in "a/cond" are counted apart.
  """
  *scopes, last = name.split("/")
  parts: List[str] = []
  for scope in scopes:
    is_conditional = _CONDITIONAL.fullmatch(scope)
    parts.append("cond" if is_conditional else scope)
  parts.append(re.sub(r"_\d+$", "", last))
  return "/".join(parts)


def join(scope: str, stem: str, number: int = 0) -> str:
  """Returns the name of a variable from its parts; number 0 is not written."""
  last = stem
  if number:
    last = "{}_{}".format(stem, number)
  if not scope:
    return last
  return "{}/{}".format(scope, last)


def is_state_name(name: str) -> bool:
  """Returns whether loss scales give this name to their variables; a program may have
  other variables of that name.
  """
  return parse(name).stem in _ROLES


def state(shapes: Shapes) -> Dict[str, str]:
  """Returns the names of loss scales' variables, sorted, each with its role.

  They are scalars of a naming scheme whose signature is in the same name scope. Other
  variables of these names belong to the program, such as the weight `loss_scale` of a
  task.
  """
  scalars: Dict[str, Name] = {}
  stems: Dict[str, Set[str]] = collections.defaultdict(set)
  for name in sorted(shapes):
    if is_state_name(name) and not tuple(shapes[name]):
      scalars[name] = parse(name)
      stems[scalars[name].scope].add(scalars[name].stem)
  result: Dict[str, str] = {}
  for name, parsed in scalars.items():
    if parsed.stem in _state_stems(stems[parsed.scope]):
      result[name] = _ROLES[parsed.stem]
  return result


def _state_stems(stems: Set[str]) -> Set[str]:
  """Returns which of the stems in a name scope are those of loss scales.

  Where the signature of one scheme is found, another scheme counts only with all of its
  variables.
  """
  found: Set[str] = set()
  for scheme in (MP_COMPAT, CONTRIB):
    expected = scheme.state_names() if found else scheme.signature_names()
    if expected <= stems:
      found |= scheme.state_names()
  return found


def recognize(shapes: Shapes) -> NamingScheme:
  """Returns the naming scheme of a checkpoint.

  It is that of this package also if TensorFlow's class writes the same names.
  """
  stems = {parse(name).stem for name in state(shapes)}
  if MP_COMPAT.signature_names() <= stems:
    return TENSORFLOW if _has_powers_in_conditionals(shapes) else MP_COMPAT
  return CONTRIB if stems else PLAIN


def _has_powers_in_conditionals(shapes: Shapes) -> bool:
  """Returns whether Adam's powers were created in a `tf.cond`."""
  for name in shapes:
    parsed = parse(name)
    if parsed.stem in POWERS and parsed.conditionals:
      return True
  return False
