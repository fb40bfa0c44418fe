"""Tests of variables in checkpoints of other naming schemes, against tables."""

import pytest

from mp_compat.core import matching
from mp_compat.core import naming_schemes
from mp_compat.core import translation
from mp_compat.core.matching import Variables
from mp_compat.core.naming_schemes import DYNAMIC
from tests.core.test_naming_schemes import CONTRIB_V1
from tests.core.test_naming_schemes import OURS
from tests.core.test_naming_schemes import PLAIN
from tests.core.test_naming_schemes import SCALAR
from tests.core.test_naming_schemes import TENSORFLOW_V1


def assume_different(names):
  """Compares values that are not known."""
  return len(names) < 2


def variables(text, **options):
  """Returns scalars with the names in `text`, where "name=value" gives a value."""
  names = [word.partition("=")[0] for word in text.split()]
  return Variables(dict.fromkeys(names, SCALAR), **options)


def compare_values(text):
  """Returns the comparison of values in a checkpoint: those without one differ."""
  values = {}
  for word in text.split():
    name, _, value = word.partition("=")
    values[name] = value or name
  return lambda names: len({values[name] for name in names}) == 1


def match(wanted, found, order=True, meta="", scaled=True, **options):
  """Returns the names in the checkpoint of a program, with a loss scale if `scaled`:
  "-" for none, "?" where several are possible.

  `order`: whether the order of `wanted` is that of creation; `meta`: that of `found`.
  """
  options["order"] = wanted.split() if order else ()
  if scaled and not naming_schemes.state(variables(found).shapes):
    found += " of_program/current_loss_scale"
  result = matching.match(
    wanted.split(),
    variables(wanted, **options),
    variables(found, order=meta.split()),
    compare_values(found),
  )
  assert not set(result.names) & set(result.ambiguous)
  return " ".join(
    "?" if name in result.ambiguous else result.names.get(name, "-")
    for name in wanted.split()
  )


def translate(names, to, meta=""):
  text = names if isinstance(names, str) else " ".join(names)
  found = variables(text, order=meta.split())
  return translation.translate(found, to, compare_values(text))


@pytest.mark.parametrize(
  "wanted, found, matched",
  [
    # An identical name is no proof.
    ("beta1_power", "cond_1/beta1_power beta1_power", "?"),
    ("beta1_power", "cond_1/beta1_power=1 beta1_power=1", "beta1_power"),
    # Nested conditionals, and conditionals in scopes.
    ("beta1_power", "cond/cond_1/beta1_power", "cond/cond_1/beta1_power"),
    ("head/beta1_power", "head/cond_1/beta1_power", "head/cond_1/beta1_power"),
    ("cond_1/beta1_power", "beta1_power", "beta1_power"),
    # Several optimizers match in the order of creation: cond_11 comes after cond_3.
    (
      "beta1_power beta1_power_1",
      "cond_11/beta1_power cond_3/beta1_power",
      "cond_3/beta1_power cond_11/beta1_power",
    ),
    # One optimizer per scope.
    (
      "a/beta1_power b/beta1_power",
      "b/cond/beta1_power a/cond/beta1_power",
      "a/cond/beta1_power b/cond/beta1_power",
    ),
    # Control flow v2 omits the scope.
    (
      "head/beta1_power head/beta2_power",
      "beta2_power beta1_power",
      "beta1_power beta2_power",
    ),
    # The state of other schemes, in other scopes.
    (
      "current_loss_scale good_steps",
      "any/loss_scale any/good_steps",
      "any/loss_scale any/good_steps",
    ),
    (
      "bad_steps good_steps loss_scale",
      "current_loss_scale good_steps",
      "- good_steps current_loss_scale",
    ),
    # In another scope, several of a role match only if the checkpoint has them in the
    # root scope.
    ("gen/beta1_power disc/beta1_power", "g/beta1_power d/beta1_power", "- -"),
    (
      "gen/current_loss_scale disc/current_loss_scale",
      "g/current_loss_scale d/current_loss_scale",
      "? ?",
    ),
    ("beta1_power beta1_power_1", "g/beta1_power d/beta1_power", "? ?"),
    ("gen/beta1_power disc/beta1_power", "beta1_power beta1_power_1", "? ?"),
    (
      "gen/current_loss_scale disc/current_loss_scale",
      "current_loss_scale current_loss_scale_1",
      "current_loss_scale current_loss_scale_1",
    ),
    ("current_loss_scale current_loss_scale_1", "loss_scale good_steps", "? ?"),
    ("current_loss_scale current_loss_scale_1", "current_loss_scale", "? ?"),
    # The powers of another optimizer, and a state that was created in another scope.
    ("finetune/beta1_power", "pretrain/beta1_power", "-"),
    ("head/beta1_power", "beta1_power", "beta1_power"),
    ("beta1_power", "head/beta1_power", "head/beta1_power"),
    ("a/current_loss_scale", "b/current_loss_scale", "b/current_loss_scale"),
    # Variables of the program that have the name of a loss scale's variable.
    ("task/loss_scale", "current_loss_scale good_steps", "-"),
    (
      "current_loss_scale good_steps loss_scale",
      "current_loss_scale good_steps",
      "current_loss_scale good_steps -",
    ),
    (
      "current_loss_scale good_steps",
      "current_loss_scale good_steps loss_scale",
      "current_loss_scale good_steps",
    ),
    # The graph or the checkpoint is that of a part of the program.
    ("beta1_power", "cond_1/beta1_power cond_3/beta1_power", "?"),
    ("beta1_power beta1_power_1", "cond_1/beta1_power", "? ?"),
    ("beta1_power", "beta1_power beta1_power_1", "?"),
    ("beta1_power beta1_power_1", "beta1_power", "? ?"),
    ("cond_3/beta1_power", "cond_1/beta1_power cond_3/beta1_power", "?"),
    ("a/beta1_power a/beta1_power_1", "a/beta1_power beta1_power x/beta1_power", "? ?"),
    # Two names for one value, as `convert --to tensorflow` writes them.
    ("cond_3/beta1_power", "beta1_power=1 cond_1/beta1_power=1", "beta1_power"),
    ("head/beta1_power", "beta1_power=1 cond_1/beta1_power=1", "beta1_power"),
    (
      "beta1_power",
      "head/beta1_power=1 head/cond_1/beta1_power=1",
      "head/beta1_power",
    ),
    (
      "beta1_power beta1_power_1",
      "beta1_power=1 beta1_power_1=2 cond_1/beta1_power=1 cond_3/beta1_power=2",
      "? ?",
    ),
    # One optimizer without loss scaling, and one with it, in an order that names do not
    # tell. Their values may be equal.
    ("beta1_power beta1_power_1", "beta1_power cond_1/beta1_power", "? ?"),
    (
      "beta1_power beta1_power_1",
      "beta1_power=1 cond_1/beta1_power=1",
      "beta1_power cond_1/beta1_power",
    ),
    ("head/beta1_power head/beta1_power_1", "beta1_power cond_1/beta1_power", "? ?"),
    ("head/beta1_power", "beta1_power cond_1/beta1_power cond_3/beta1_power", "?"),
    # In a graph of TensorFlow's class, the order is known.
    (
      "cond_1/beta1_power beta1_power",
      "beta1_power beta1_power_1",
      "beta1_power beta1_power_1",
    ),
    (
      "beta1_power cond_1/beta1_power",
      "beta1_power beta1_power_1",
      "beta1_power beta1_power_1",
    ),
    # None of three is certain if the values differ.
    (
      "beta1_power beta1_power_1 beta1_power_2",
      "cond_1/beta1_power=1 beta1_power=1 beta1_power_1=2",
      "? ? ?",
    ),
    # Other variables that an optimizer creates when it applies gradients.
    (
      "current_loss_scale rate rate_1",
      "current_loss_scale rate cond_1/rate",
      "current_loss_scale ? ?",
    ),
    (
      "current_loss_scale rate",
      "current_loss_scale rate=1 cond_1/rate=1",
      "current_loss_scale rate",
    ),
    # A part of a program. A name without scope may be that of a variable that has lost
    # its scope.
    (
      "beta1_power a/beta1_power",
      "beta1_power=1 a/beta1_power=2 b/beta1_power=3",
      "? ?",
    ),
    ("a/beta1_power", "a/beta1_power b/beta1_power", "a/beta1_power"),
    ("a/beta1_power", "a/beta1_power a_1/beta1_power", "?"),
    (
      "a/beta1_power a_1/beta1_power",
      "a/beta1_power a_1/beta1_power a_2/beta1_power",
      "? ?",
    ),
    ("a/beta1_power beta1_power", "a/beta1_power", "? ?"),
    ("a/beta1_power beta1_power", "beta1_power", "? ?"),
    # Numbers that are part of the name.
    ("dense_1", "dense", "-"),
    ("w/Adam_1", "w/Adam", "-"),
  ],
)
def test_names_match_across_schemes(wanted, found, matched):
  assert match(wanted, found) == matched


POWERS = "beta1_power beta1_power_1"
TWO = "beta1_power cond_1/beta1_power"


def test_graph_shows_which_optimizer_is_scaled():
  first = {"beta1_power": "dynamic"}
  assert match(POWERS, TWO, loss_scales=first) == "cond_1/beta1_power beta1_power"
  second = {"beta1_power_1": "dynamic"}
  assert match(POWERS, TWO, loss_scales=second) == "beta1_power cond_1/beta1_power"


def test_fixed_scales_have_conditionals_with_contrib_only():
  fixed = {"beta1_power": "dynamic", "beta1_power_1": "fixed"}
  three, theirs = POWERS + " beta1_power_2", TWO + " cond_3/beta1_power"
  assert match(three, theirs, loss_scales=fixed) == (
    "cond_1/beta1_power cond_3/beta1_power beta1_power"
  )
  theirs = TWO + " beta1_power_1"
  assert match(three, theirs, loss_scales=fixed) == (
    "cond_1/beta1_power beta1_power beta1_power_1"
  )


def test_meta_file_shows_order():
  theirs = "cond_1/beta1_power beta1_power"
  assert match(POWERS, TWO, meta=theirs) == theirs
  assert match(POWERS, TWO, meta=TWO) == TWO
  assert match(POWERS, TWO, meta="beta1_power") == "? ?"
  # Two optimizers can have powers of equal values.
  equal = "beta1_power=1 cond_1/beta1_power=1"
  for meta in ("", TWO):
    assert sorted(translate(equal, "plain", meta=meta)) == POWERS.split()


def test_scopes_dropped_by_control_flow_v2_are_found():
  wanted, scaled = "head/beta1_power beta1_power", {"head/beta1_power": "dynamic"}
  theirs = "beta1_power beta1_power_1"
  assert match(wanted, theirs, loss_scales=scaled) == theirs
  wanted = "a/beta1_power a/beta1_power_1 beta1_power"
  theirs = "beta1_power a/beta1_power beta1_power_1"
  assert match(wanted, theirs) == "? ? ?"
  scaled = {"a/beta1_power": "dynamic"}
  assert match(wanted, theirs, loss_scales=scaled) == theirs


def test_order_of_checkpoint_names_is_not_known():
  assert match(TWO, POWERS, order=False) == "? ?"
  assert match(TWO, POWERS) == POWERS


@pytest.mark.parametrize(
  "meta", ["", "beta1_power cond/cond/beta1_power cond/beta1_power"]
)
def test_scope_named_cond_is_no_conditional_of_loss_scaling(meta):
  wanted = "beta1_power cond/beta1_power beta1_power_1"
  found = "beta1_power cond/beta1_power cond/cond/beta1_power"
  loss_scales = dict.fromkeys(wanted.split()[1:], naming_schemes.FIXED)
  matched = "beta1_power cond/cond/beta1_power cond/beta1_power"
  assert match(wanted, found, meta=meta, loss_scales=loss_scales) == matched


@pytest.mark.parametrize(
  "wanted, found, matched",
  [
    ("cond_1/steps cond_2/steps", "cond/steps cond_1/steps", "? ?"),
    ("cond_1/steps", "cond/steps cond_1/steps", "cond_1/steps"),
    ("cond/steps cond_1/steps", "cond/steps", "cond/steps -"),
  ],
)
def test_variables_of_model_in_scope_named_cond_keep_numbers(wanted, found, matched):
  assert match(wanted, found) == matched


def test_number_of_own_scope_tells_no_order():
  wanted, found = (
    "cond_2/beta1_power beta1_power",
    "cond_1/beta1_power cond_2/beta1_power",
  )
  scaled = {"beta1_power": DYNAMIC}
  for meta in ("", " ".join(reversed(found.split()))):
    assert match(wanted, found, meta=meta, loss_scales=scaled) == "? ?"


def test_loss_scales_outside_of_scopes_match_in_order():
  wanted = "b/current_loss_scale a/current_loss_scale"
  theirs = "current_loss_scale current_loss_scale_1"
  assert match(wanted, theirs) == theirs
  assert match(wanted, theirs, order=False) == "? ?"


def test_part_of_graph_is_matched_with_whole_graph():
  whole = variables(
    POWERS, order=POWERS.split(), loss_scales={"beta1_power": "dynamic"}
  )
  found = variables(TWO)
  part = ["beta1_power_1"]
  matched = matching.match(part, whole, found, assume_different)
  assert matched.names == {"beta1_power_1": "beta1_power"}


def test_matching_respects_shapes_and_scopes():
  def names(wanted, found):
    return matching.match(
      wanted, Variables(wanted), Variables(found), assume_different
    ).names

  state = {"current_loss_scale": []}
  assert names({"a/kernel": [2]}, dict(state, **{"a/cond/kernel": [2]})) == {
    "a/kernel": "a/cond/kernel"
  }
  assert names({"a/kernel": [2]}, dict(state, **{"a/cond/kernel": [3]})) == {}
  assert names({"a/kernel": [2]}, {"b/kernel": [2]}) == {}
  assert names({"a/temperature": []}, {"b/temperature": []}) == {}
  assert names({"a/beta1_power": [1]}, {"beta1_power": [1]}) == {}


# Weights of a model with scopes that are called "cond", and slots of one.
WEIGHTS = dict.fromkeys(["cond/k/w", "k/w", "g/cond/w", "g/cond/w/Adam"], (2,))
SCALARS = dict.fromkeys(["cond/t", "cond/t/Adam", "cond_1/t", "cond_1/t/Adam"], SCALAR)
STATE = dict.fromkeys(["current_loss_scale", "good_steps"], SCALAR)


@pytest.mark.parametrize("to", naming_schemes.SCHEMES)
@pytest.mark.parametrize("weights", [WEIGHTS, SCALARS])
def test_weights_and_slots_keep_their_names(weights, to):
  found = Variables({**weights, **STATE})
  translated = translation.translate(found, to, assume_different)
  assert {name: translated.get(name) for name in weights} == dict(zip(weights, weights))
  assert len(translated) - len(weights) <= len(STATE) + 1


def test_weights_and_slots_match_by_name():
  saved = {name.replace("cond", "cond_7"): shape for name, shape in SCALARS.items()}
  saved["cond/t"] = SCALAR
  matched = matching.match(
    SCALARS,
    Variables({**SCALARS, **STATE}, weights={"cond/t", "cond_1/t"}),
    Variables({**saved, **STATE}),
    assume_different,
  )
  assert matched == matching.Match({"cond/t": "cond/t"}, {})


def test_numbers_of_different_scopes_tell_no_order():
  wanted, found = "a/beta1_power cond/a/beta1_power", "a/cond_1/beta1_power "
  found += "cond/a/beta1_power current_loss_scale"
  for meta in ("", "a/cond_1/beta1_power cond/a/beta1_power"):
    assert match(wanted, found, meta=meta) == "? ?"


@pytest.mark.parametrize(
  "wanted, found, matched",
  [
    ("a/kernel", "cond/a/kernel", "-"),
    ("cond/a/kernel", "a/kernel", "-"),
    ("cond/a/kernel", "cond/a/kernel", "cond/a/kernel"),
    ("beta1_power", "cond/beta1_power", "cond/beta1_power"),
    # As TensorFlow does, which has no other names.
    ("beta1_power", "beta1_power beta1_power_1", "beta1_power"),
    ("beta1_power beta1_power_1", "beta1_power", "beta1_power -"),
    ("current_loss_scale good_steps", "task/loss_scale rl/good_steps", "- -"),
  ],
)
def test_programs_without_loss_scaling_match_by_name(wanted, found, matched):
  assert match(wanted, found, scaled=False) == matched


@pytest.mark.parametrize("names", [OURS, TENSORFLOW_V1])
def test_names_translate_to_each_scheme(names):
  power = names[0]
  ours, other = translate(names, "mp_compat"), translate(names, "tensorflow")
  assert (
    sorted(ours) == OURS
    and ours["beta1_power"] == power
    and ours["w/Adam_1"] == "w/Adam_1"
  )
  assert sorted(other) == TENSORFLOW_V1 and other["cond_1/beta1_power"] == power
  assert sorted(translate(names, "tensorflow_v2")) == OURS
  contrib = translate(names, "contrib")
  assert sorted(contrib) == CONTRIB_V1
  assert contrib["loss_scale"] == "current_loss_scale" and contrib["bad_steps"] is None
  assert sorted(translate(names, "plain")) == PLAIN


def test_plain_checkpoint_gets_new_state():
  added = {
    name: source
    for name, source in translate(PLAIN, "contrib").items()
    if source is None
  }
  assert added == dict.fromkeys(["loss_scale", "good_steps", "bad_steps"])
  assert translate(PLAIN, "plain") == dict(zip(PLAIN, PLAIN))


@pytest.mark.parametrize("to", naming_schemes.SCHEMES)
def test_scope_that_may_be_lost_raises(to):
  names = "beta1_power head/current_loss_scale head/good_steps head/w"
  with pytest.raises(
    ValueError, match='(?s)--name-map FILE.*"head/beta1_power": "beta'
  ):
    translate(names, to)


def test_contrib_names_are_translated():
  ours = translate(CONTRIB_V1, "mp_compat")
  assert sorted(ours) == sorted(OURS + ["bad_steps"])
  assert (
    ours["current_loss_scale"] == "loss_scale"
    and ours["beta2_power"] == "cond/beta2_power"
  )
  assert "bad_steps" not in translate(CONTRIB_V1, "tensorflow")
  assert translate(CONTRIB_V1, "contrib")["bad_steps"] == "bad_steps"
  assert sorted(translate(CONTRIB_V1, "plain")) == PLAIN


def test_translation_is_reversible():
  for to in ["mp_compat", "tensorflow", "contrib"]:
    there = translate(OURS, to)
    text = " ".join("{}={}".format(*item) for item in there.items())
    back = translate(text, "mp_compat")
    assert set(OURS) <= set(back)
    assert all(there[back[name]] == name for name in OURS)


def test_two_optimizers_are_translated():
  back = translate(
    ["cond_3/beta1_power", "cond_1/beta1_power", "current_loss_scale"], "plain"
  )
  assert back == {
    "beta1_power": "cond_1/beta1_power",
    "beta1_power_1": "cond_3/beta1_power",
  }


def test_scheme_of_control_flow_writes_scopes():
  names = ["head/beta1_power", "head/current_loss_scale"]
  for to, power in [
    ("tensorflow", "head/cond_1/beta1_power"),
    ("tensorflow_v2", "beta1_power"),
    ("plain", "head/beta1_power"),
  ]:
    assert translate(names, to)[power] == "head/beta1_power"


def test_variables_of_other_optimizers_are_translated():
  theirs = "cond_1/own_count own_weight current_loss_scale=2"
  found = variables(theirs, created={"cond_1/own_count"})
  there = {"own_count": "cond_1/own_count", "own_weight": "own_weight"}
  assert translation.translate(found, "plain", assume_different) == there
  # Without a .meta file, it may be a weight.
  kept = ["cond_1/own_count", "own_weight"]
  assert translate(theirs, "plain") == dict(zip(kept, kept))


def test_user_scopes_are_kept():
  names = [
    "cond/dense/kernel",
    "model/cond_1/dense/kernel",
    "loss_scale_layer/w",
    "good_steps_3/w",
  ]
  for to in naming_schemes.SCHEMES:
    assert {
      name: source for name, source in translate(names, to).items() if source
    } == dict(zip(names, names))


def test_own_variables_are_kept():
  own = {
    "task/loss_scale": SCALAR,
    "rl/good_steps": SCALAR,
    "bad_steps": SCALAR,
    "head/current_loss_scale": [2],
  }
  with pytest.raises(ValueError, match="would be written as bad_steps"):
    translation.translate(Variables(own), "contrib", assume_different)
  for to in naming_schemes.SCHEMES.keys() - {"contrib"}:
    translated = translation.translate(Variables(own), to, assume_different)
    assert {name: source for name, source in translated.items() if source} == dict(
      zip(own, own)
    )
  with_state = dict.fromkeys(["current_loss_scale", "good_steps", "loss_scale"], SCALAR)
  assert sorted(translate(with_state, "plain")) == ["loss_scale"]
  assert sorted(translate(with_state, "tensorflow")) == sorted(with_state)
  with pytest.raises(
    ValueError,
    match="current_loss_scale would be written as loss_scale, which is the name of anoth",
  ):
    translate(with_state, "contrib")


def test_part_of_the_graph_matches_a_checkpoint_of_as_many():
  """An optimizer was added: its variables are not restored."""
  weights = ["w", "v"]
  graph = variables("beta1_power beta1_power_1 w v", weights=weights)
  found = variables("cond_1/beta1_power current_loss_scale w")
  own = "beta1_power"
  matched = matching.match([own, "w"], graph, found, assume_different)
  assert matched.names == {own: "cond_1/beta1_power", "w": "w"}
  # The power may be that of the other one.
  for part in ([own], ["beta1_power_1", "v"]):
    matched = matching.match(part, graph, found, assume_different)
    assert set(matched.ambiguous) == {part[0]}
  matched = matching.match(graph.shapes, graph, found, assume_different)
  assert set(matched.ambiguous) == graph.shapes.keys() - set(weights)


@pytest.mark.parametrize("shape", [SCALAR, (3,)])
def test_weight_with_the_name_of_a_new_loss_scale_raises(shape):
  found = Variables({"loss_scale": shape, "w": SCALAR})
  with pytest.raises(ValueError, match="A new loss scale would be .* as loss_scale"):
    translation.translate(found, "contrib", assume_different)
  with pytest.raises(ValueError, match="A new loss scale would be .* as good_steps"):
    translation.translate(variables("good_steps"), "mp_compat", assume_different)
  names = translation.translate(found, "mp_compat", assume_different)
  assert names["loss_scale"] == "loss_scale" and names["current_loss_scale"] is None


@pytest.mark.parametrize("to", naming_schemes.SCHEMES)
def test_names_in_a_map_are_the_loss_scales(to):
  found = variables("w")
  named = {"a/current_loss_scale": "b/current_loss_scale"}
  names = translation.translate(found, to, assume_different, named)
  assert names == {"w": "w", **named}


@pytest.mark.parametrize("to", naming_schemes.SCHEMES)
def test_count_without_loss_scale_raises(to):
  names = "current_loss_scale good_steps good_steps_1"
  with pytest.raises(ValueError, match="good_steps_1 has the name of a loss scale's"):
    translate(names, to)


def test_translation_of_unknown_order_raises():
  with pytest.raises(ValueError, match="do not tell in which order.*--like"):
    translate(TWO, "plain")
  with pytest.raises(ValueError, match="do not tell in which order.*--like"):
    translate(TWO + " current_loss_scale", "mp_compat")
  theirs = "cond_1/beta1_power beta1_power"
  assert translate(theirs, "plain", meta=theirs) == {
    "beta1_power": "cond_1/beta1_power",
    "beta1_power_1": "beta1_power",
  }


@pytest.mark.parametrize(
  "names",
  [
    "beta1_power beta1_power_1 current_loss_scale current_loss_scale_1",
    "beta1_power beta1_power_1 current_loss_scale good_steps",
    "a/beta1_power b/beta1_power current_loss_scale",
    "cond_1/beta1_power beta1_power loss_scale good_steps loss_scale_1 good_steps_1",
    "beta1_power beta1_power_1",
  ],
)
def test_translation_of_unknown_loss_scales_raises(names):
  with pytest.raises(ValueError, match="depend on which optimizers have a loss scale"):
    translate(names, "tensorflow")


def test_unknown_scheme_raises():
  expected = "to must be one of 'mp_compat', 'tensorflow', 'tensorflow_v2', 'contrib', 'plain', but got"
  with pytest.raises(ValueError, match=expected):
    translate([], "keras")


@pytest.mark.parametrize(
  "names, name_map",
  [
    ("beta1_power", {"beta1_power": "cond_1/beta1_power"}),
    ("own_count", {"own_count": "cond_1/own_count"}),
  ],
)
def test_name_map_that_drops_a_variable_raises(names, name_map):
  found = variables(names)
  with pytest.raises(ValueError, match=names + " would be written as .* name map"):
    translation.translate(found, "plain", assume_different, name_map)


def test_variable_that_was_not_saved_tells_which_one_was():
  graph = variables(POWERS, order=POWERS.split(), loss_scales={"beta1_power": DYNAMIC})
  theirs = "cond_1/beta1_power beta1_power"
  found = variables(theirs, order=theirs.split(), unsaved={"cond_1/beta1_power"})
  matched = matching.match(graph.shapes, graph, found, assume_different)
  assert matched == matching.Match({"beta1_power_1": "beta1_power"}, {})
  translated = translation.translate(found, "plain", assume_different)
  assert translated == {"beta1_power_1": "beta1_power"}
