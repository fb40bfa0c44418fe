"""Tests of variable names in checkpoints, against tables."""

import pytest

from mp_compat.core import dialects

SCALAR = ()  # the shape of counters and scales

OURS = "beta1_power beta2_power current_loss_scale global_step good_steps w w/Adam w/Adam_1".split()
TENSORFLOW_V1 = "cond_1/beta1_power cond_1/beta2_power current_loss_scale global_step good_steps w w/Adam w/Adam_1".split()
CONTRIB_V1 = "bad_steps cond/beta1_power cond/beta2_power global_step good_steps loss_scale w w/Adam w/Adam_1".split()
PLAIN = "beta1_power beta2_power global_step w w/Adam w/Adam_1".split()


def translate(names, to):
  return dialects.translate(dict.fromkeys(names, SCALAR), to)


@pytest.mark.parametrize(
  "names, dialect",
  [
    (OURS, "mp_compat"),
    (TENSORFLOW_V1, "tensorflow"),
    (CONTRIB_V1, "contrib"),
    (PLAIN, "plain"),
    ([], "plain"),
    (["nvidia/loss_scale", "nvidia/good_steps"], "contrib"),
    (["head/cond/cond_1/beta1_power", "head/current_loss_scale"], "tensorflow"),
    # a user's scope named cond_1
    (["model/cond_1/kernel", "current_loss_scale"], "mp_compat"),
    # of an earlier version
    (
      ["apply_or_skip/cond/apply_if_finite/beta1_power", "current_loss_scale"],
      "mp_compat",
    ),
    (["loss_scale"], "plain"),  # a weight named loss_scale
  ],
)
def test_dialect_is_detected_from_names(names, dialect):
  assert dialects.dialect(dict.fromkeys(names, SCALAR)) == dialect


@pytest.mark.parametrize(
  "wanted, found, matched",
  [
    # An identical name takes precedence.
    ("beta1_power", "cond_1/beta1_power beta1_power", "beta1_power"),
    # Nested conditionals, and conditionals in scopes.
    ("beta1_power", "cond/cond_1/beta1_power", "cond/cond_1/beta1_power"),
    ("head/beta1_power", "head/cond_1/beta1_power", "head/cond_1/beta1_power"),
    # Scopes that earlier versions of this package added in functions, eager mode and
    # eager replicas.
    (
      "beta1_power",
      "apply_or_skip/cond/apply_if_finite/beta1_power",
      "apply_or_skip/cond/apply_if_finite/beta1_power",
    ),
    (
      "beta1_power",
      "apply_or_skip/apply_if_finite/beta1_power",
      "apply_or_skip/apply_if_finite/beta1_power",
    ),
    ("beta1_power", "apply_or_skip_1/beta1_power", "apply_or_skip_1/beta1_power"),
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
    # The state of other dialects, in other scopes.
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
      "- -",
    ),
    ("beta1_power beta1_power_1", "g/beta1_power d/beta1_power", "- -"),
    (
      "gen/beta1_power disc/beta1_power",
      "beta1_power beta1_power_1",
      "beta1_power beta1_power_1",
    ),
    # The powers of another optimizer, and a state that was created in another scope.
    ("finetune/beta1_power", "pretrain/beta1_power", "-"),
    ("head/beta1_power", "beta1_power", "beta1_power"),
    ("beta1_power", "head/beta1_power", "head/beta1_power"),
    ("a/current_loss_scale", "b/current_loss_scale", "b/current_loss_scale"),
    # Variables of the program that have the name of a loss scale's variable.
    ("task/loss_scale", "current_loss_scale good_steps", "-"),
    ("current_loss_scale good_steps", "task/loss_scale rl/good_steps", "- -"),
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
    # An ambiguous name is not matched.
    ("beta1_power", "cond_1/beta1_power cond_3/beta1_power", "-"),
    ("beta1_power beta1_power_1", "cond_1/beta1_power", "cond_1/beta1_power -"),
    # Second names, which install() writes, into another number, another scope, and for
    # more optimizers.
    ("cond_3/beta1_power", "beta1_power cond_1/beta1_power", "beta1_power"),
    ("head/beta1_power", "beta1_power cond_1/beta1_power", "beta1_power"),
    ("beta1_power", "head/beta1_power head/cond_1/beta1_power", "head/beta1_power"),
    (
      "cond_4/beta1_power cond_6/beta1_power",
      "beta1_power beta1_power_1 cond_1/beta1_power cond_3/beta1_power",
      "beta1_power beta1_power_1",
    ),
    # One optimizer without loss scaling, and one with it: not second names.
    (
      "beta1_power beta1_power_1",
      "beta1_power cond_1/beta1_power",
      "beta1_power cond_1/beta1_power",
    ),
    (
      "head/beta1_power head/beta1_power_1",
      "beta1_power cond_1/beta1_power",
      "beta1_power cond_1/beta1_power",
    ),
    ("head/beta1_power", "beta1_power cond_1/beta1_power cond_3/beta1_power", "-"),
    # Numbers that are part of the name.
    ("dense_1", "dense", "-"),
    ("w/Adam_1", "w/Adam", "-"),
  ],
)
def test_names_match_across_dialects(wanted, found, matched):
  """`matched` has the name in the checkpoint of each wanted variable, or "-" for
  none.
  """
  expected = {
    name: source
    for name, source in zip(wanted.split(), matched.split())
    if source != "-"
  }
  assert (
    dialects.match(
      dict.fromkeys(wanted.split(), SCALAR), dict.fromkeys(found.split(), SCALAR)
    )
    == expected
  )


def test_matching_respects_shapes_and_scopes():
  state = {"current_loss_scale": []}
  assert dialects.match({"a/kernel": [2]}, dict(state, **{"a/cond/kernel": [2]})) == {
    "a/kernel": "a/cond/kernel"
  }
  assert dialects.match({"a/kernel": [2]}, dict(state, **{"a/cond/kernel": [3]})) == {}
  assert dialects.match({"a/kernel": [2]}, {"b/kernel": [2]}) == {}
  assert dialects.match({"a/temperature": []}, {"b/temperature": []}) == {}
  assert dialects.match({"a/beta1_power": [1]}, {"beta1_power": [1]}) == {}


def test_conditionals_of_programs_are_kept():
  assert dialects.match({"a/kernel": [2]}, {"cond/a/kernel": [2]}) == {}
  assert dialects.match({"cond/a/kernel": [2]}, {"a/kernel": [2]}) == {}
  assert dialects.match({"cond/a/kernel": [2]}, {"cond/a/kernel": [2]}) == {
    "cond/a/kernel": "cond/a/kernel"
  }
  assert dialects.match({"beta1_power": []}, {"cond/beta1_power": []}) == {
    "beta1_power": "cond/beta1_power"
  }


def test_recorded_names_have_precedence_in_checkpoints_of_others():
  wanted, recorded = (
    {"beta1_power": [], "beta1_power_1": []},
    {"beta1_power": "cond_1/beta1_power"},
  )
  # of an optimizer without loss scaling, and of one with it
  theirs = {
    "beta1_power": [],
    "cond_1/beta1_power": [],
  }
  expected = {"beta1_power": "cond_1/beta1_power", "beta1_power_1": "beta1_power"}
  assert dialects.match(wanted, theirs, recorded) == expected
  assert dialects.match(wanted, {**wanted, "cond_1/beta1_power": []}, recorded) == {
    name: name for name in wanted
  }


@pytest.mark.parametrize("names", [OURS, TENSORFLOW_V1])
def test_names_translate_to_each_dialect(names):
  power = names[0]
  ours, other = translate(names, "mp_compat"), translate(names, "tensorflow")
  assert (
    sorted(ours) == OURS
    and ours["beta1_power"] == power
    and ours["w/Adam_1"] == "w/Adam_1"
  )
  assert sorted(other) == sorted(set(OURS) | set(TENSORFLOW_V1))
  assert other["beta1_power"] == other["cond_1/beta1_power"] == power
  contrib = translate(names, "contrib")
  assert sorted(contrib) == sorted(set(CONTRIB_V1) | {"beta1_power", "beta2_power"})
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


def test_missing_scope_is_restored():
  names = ["beta1_power", "head/current_loss_scale", "head/good_steps", "head/w"]
  assert translate(names, "plain") == {
    "beta1_power": "beta1_power",
    "head/beta1_power": "beta1_power",
    "head/w": "head/w",
  }
  assert translate(names, "tensorflow")["head/cond_1/beta1_power"] == "beta1_power"


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
  for to in dialects.DIALECTS[:3]:
    there = translate(OURS, to)
    back = translate(there, "mp_compat")
    assert sorted(set(back) - {"bad_steps"}) == OURS
    assert all(there[back[name]] == name for name in OURS)


def test_two_optimizers_are_translated():
  """Every optimizer of TensorFlow and of contrib builds two conditionals, which are
  numbered in the graph.
  """
  two = ["beta1_power", "beta1_power_1", "current_loss_scale", "current_loss_scale_1"]
  there = translate(two, "tensorflow")
  assert (
    there["cond_1/beta1_power"] == "beta1_power"
    and there["cond_3/beta1_power"] == "beta1_power_1"
  )
  assert there["current_loss_scale_1"] == "current_loss_scale_1"
  assert translate(two, "contrib")["cond_2/beta1_power"] == "beta1_power_1"
  back = translate(
    ["cond_3/beta1_power", "cond_1/beta1_power", "current_loss_scale"], "plain"
  )
  assert back == {
    "beta1_power": "cond_1/beta1_power",
    "beta1_power_1": "cond_3/beta1_power",
  }
  head = translate(["head/beta1_power", "head/current_loss_scale"], "tensorflow")
  assert sorted(head) == [
    "beta1_power",
    "head/beta1_power",
    "head/cond_1/beta1_power",
    "head/current_loss_scale",
  ]


def test_user_scopes_are_kept():
  names = [
    "cond/dense/kernel",
    "model/cond_1/dense/kernel",
    "loss_scale_layer/w",
    "good_steps_3/w",
  ]
  for to in dialects.DIALECTS:
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
  for to in dialects.DIALECTS:
    translated = dialects.translate(own, to)
    assert {name: source for name, source in translated.items() if source} == dict(
      zip(own, own)
    )
  with_state = dict.fromkeys(["current_loss_scale", "good_steps", "loss_scale"], SCALAR)
  assert sorted(dialects.translate(with_state, "plain")) == ["loss_scale"]
  assert sorted(dialects.translate(with_state, "tensorflow")) == sorted(with_state)
  with pytest.raises(
    ValueError,
    match="current_loss_scale would be written as loss_scale, which is the name of anoth",
  ):
    dialects.translate(with_state, "contrib")


def test_second_names_of_powers_are_found():
  assert dialects.aliases(
    ["w", "beta1_power", "cond_1/beta1_power", "a/kernel", "a/cond/kernel"]
  ) == {"cond_1/beta1_power": "beta1_power"}
  assert dialects.aliases(["cond_1/beta1_power"]) == {}


def test_plain_names_are_added():
  shapes = dict.fromkeys(
    ["a/cond_1/beta1_power", "a/w", "beta1_power", "cond_3/beta1_power"], SCALAR
  )
  assert dialects.without_conditionals(shapes) == {
    "a/beta1_power": "a/cond_1/beta1_power",
    **{name: name for name in ("a/w", "beta1_power")},
  }


def test_unknown_dialect_raises():
  expected = "naming scheme must be one of 'mp_compat', 'tensorflow', 'contrib', 'plain', but got 'keras'"
  with pytest.raises(ValueError, match=expected):
    translate([], "keras")
