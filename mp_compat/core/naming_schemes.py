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
schemes. A scheme writes names: it is a function from the place where an optimizer
creates a variable to the name scope (`WriteScope`), and a table of the loss scale's own
variables. A further one is one more entry of `SCHEMES`; if it adds another scope than
"cond", that is one of `ADDED_SCOPES`, too. Which scheme a checkpoint has is
found by trying all: `core.matching` compares what they write for a graph, and
`core.translation` writes the names of another.
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

# The name scopes that schemes add: conditionals, which TensorFlow numbers.
ADDED_SCOPES = ("cond",)

# Returns the name scope of a variable that an optimizer creates when it applies
# gradients, from its name scope without loss scaling, and the kind of the optimizer's
# loss scale (None without).
WriteScope = Callable[[str, Optional[str]], str]


class StateVariable(NamedTuple):
  """A scalar variable of a loss scale, in one naming scheme.

  Attributes:
    name: Its name, without name scopes and number.
    dtype: Its dtype.
    initial: Its value in a program that starts anew.
    is_optional: Whether loss scales may lack it.
  """

  name: str
  dtype: str = "int64"
  initial: float = 0.0
  is_optional: bool = False


class NamingScheme(NamedTuple):
  """The names that programs of one kind give to variables.

  Attributes:
    name: The name of the scheme.
    write: The function that names the variables of optimizers.
    state: The variables of a loss scale, by their names in this package (roles).
    signature: The names of those that every dynamic loss scale has, by which it is
      recognized.
  """

  name: str
  write: WriteScope
  state: Mapping[str, StateVariable] = {}
  signature: Sequence[str] = ()

  def variable(self, role: str) -> StateVariable:
    """Returns a variable of a loss scale; one that only this package has is as here."""
    return self.state.get(role) or MP_COMPAT.state[role]

  def form(self, alone: str, loss_scale: Optional[str]) -> str:
    """Returns the form of a name in the scheme; see `write` and `Name.form`."""
    return parse(join(self.write(alone, loss_scale), "variable")).form


class Name(NamedTuple):
  """A variable's name, parsed.

  Attributes:
    form: Its name scopes, without the numbers of conditionals, which only tell the
      order (other conditionals of the program count, too): "head/cond" of
      "head/cond_1/beta1_power_2".
    stem: The last part, without its number: "beta1_power".
    numbers: The numbers of the conditionals, and that of the last part: (1, 2). They
      sort variables of one form and stem in the order of creation.
  """

  form: str
  stem: str
  numbers: Tuple[int, ...]

  @property
  def scope(self) -> str:
    """Returns the name scopes without conditionals: "head"."""
    scopes = self.form.split("/")
    return "/".join(scope for scope in scopes if scope not in ADDED_SCOPES)


def parse(name: str) -> Name:
  """Returns a name in parts."""
  *scopes, stem = name.split("/")
  numbers: List[int] = []
  for index, scope in enumerate(scopes):
    added = re.fullmatch(r"({})(?:_(\d+))?".format("|".join(ADDED_SCOPES)), scope)
    if added:
      scopes[index] = added.group(1)
      numbers.append(int(added.group(2) or 0))
  numbered = re.fullmatch(r"(.+)_(\d+)", stem)
  number = 0
  if numbered:
    stem, number = numbered.group(1), int(numbered.group(2))
  return Name("/".join(scopes), stem, (*numbers, number))


def join(scope: str, stem: str, number: int = 0) -> str:
  """Returns the name of a variable from its parts; number 0 is not written."""
  last = stem
  if number:
    last = "{}_{}".format(stem, number)
  if not scope:
    return last
  return "{}/{}".format(scope, last)


def keep_scope(scope: str, loss_scale: Optional[str]) -> str:
  """Returns the name scope: loss scaling does not change it. See `WriteScope`."""
  del loss_scale
  return scope


def _in_second_conditional(scope: str, loss_scale: Optional[str]) -> str:
  """Returns that of the conditional in which TensorFlow's class applies; the first one
  updates the scale. A fixed scale is not checked.
  """
  if loss_scale != DYNAMIC:
    return scope
  return join(scope, "cond_1")


def _without_scope(scope: str, loss_scale: Optional[str]) -> str:
  """Returns that of TensorFlow's class under control flow v2, in whose conditionals a
  name loses its scope.
  """
  if loss_scale != DYNAMIC:
    return scope
  return ""


def _in_first_conditional(scope: str, loss_scale: Optional[str]) -> str:
  """Returns that of the conditional in which contrib's class applies."""
  if loss_scale is None:
    return scope
  return join(scope, "cond")


_SCALE = StateVariable("current_loss_scale", "float32", 2.0**15)
_GOOD_STEPS = StateVariable("good_steps")
_STATE = {"current_loss_scale": _SCALE, "good_steps": _GOOD_STEPS}
_SIGNATURE = ["current_loss_scale"]

MP_COMPAT = NamingScheme(
  "mp_compat",
  keep_scope,
  {**_STATE, "bad_steps": StateVariable("bad_steps", is_optional=True)},
  _SIGNATURE,
)
TENSORFLOW = NamingScheme("tensorflow", _in_second_conditional, _STATE, _SIGNATURE)
TENSORFLOW_V2 = NamingScheme("tensorflow_v2", _without_scope, _STATE, _SIGNATURE)
CONTRIB = NamingScheme(
  "contrib",
  _in_first_conditional,
  {
    "current_loss_scale": _SCALE._replace(name="loss_scale"),
    "good_steps": StateVariable("good_steps", "int32"),
    "bad_steps": StateVariable("bad_steps", "int32"),
  },
  ["loss_scale", "good_steps"],
)
PLAIN = NamingScheme("plain", keep_scope)

# In the order in which their signatures are looked for; the last has none.
SCHEMES = {
  scheme.name: scheme
  for scheme in (MP_COMPAT, TENSORFLOW, TENSORFLOW_V2, CONTRIB, PLAIN)
}

_STATE_NAMES = {
  variable.name for scheme in SCHEMES.values() for variable in scheme.state.values()
}


def is_state_name(name: str) -> bool:
  """Returns whether loss scales give this name to their variables; a program may have
  other variables of that name.
  """
  return parse(name).stem in _STATE_NAMES


def state(shapes: Shapes) -> Dict[str, str]:
  """Returns the names of loss scales' variables, sorted, each with its role.

  They are scalars of the first naming scheme whose signature is in the same name scope.
  Other variables of these names belong to the program, such as the weight `loss_scale`
  of a task.
  """
  stems: Dict[str, Set[str]] = collections.defaultdict(set)
  scalars = [name for name in sorted(shapes) if not tuple(shapes[name])]
  candidates = [name for name in scalars if is_state_name(name)]
  for name in candidates:
    parsed = parse(name)
    stems[parsed.scope].add(parsed.stem)
  result: Dict[str, str] = {}
  for name in candidates:
    parsed = parse(name)
    for role, variable in _signed(stems[parsed.scope]).state.items():
      if variable.name == parsed.stem:
        result[name] = role
  return result


def _signed(stems: Set[str]) -> NamingScheme:
  """Returns the first naming scheme whose signature is among the stems of names."""
  return next(each for each in SCHEMES.values() if stems.issuperset(each.signature))


def recognize(shapes: Shapes) -> NamingScheme:
  """Returns the naming scheme of a checkpoint: the first that has the variables of its
  loss scale; of those of this package and of TensorFlow's class, which have the same,
  the latter if powers are in conditionals. Under control flow v2, names do not tell.
  """
  signed = _signed({parse(name).stem for name in state(shapes)})
  powers = [name for name in map(parse, shapes) if name.stem in POWERS]
  is_conditional = any(name.form != name.scope for name in powers)
  if signed is MP_COMPAT and is_conditional:
    return TENSORFLOW
  return signed
