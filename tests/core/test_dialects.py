"""Names in checkpoints, in tables made by hand."""

import pytest

from mp_compat.core import dialects

S = ()  # the shape of what counts

OURS = ["beta1_power", "beta2_power", "current_loss_scale", "global_step", "good_steps", "w", "w/Adam", "w/Adam_1"]
TENSORFLOW_V1 = ["cond_1/beta1_power", "cond_1/beta2_power", "current_loss_scale", "global_step", "good_steps", "w",
                 "w/Adam", "w/Adam_1"]
CONTRIB_V1 = ["bad_steps", "cond/beta1_power", "cond/beta2_power", "global_step", "good_steps", "loss_scale", "w",
              "w/Adam", "w/Adam_1"]
PLAIN = ["beta1_power", "beta2_power", "global_step", "w", "w/Adam", "w/Adam_1"]


@pytest.mark.parametrize("names, dialect", [
    (OURS, "mp_compat"), (TENSORFLOW_V1, "tensorflow"), (CONTRIB_V1, "contrib"), (PLAIN, "plain"), ([], "plain"),
    (["nvidia/loss_scale", "nvidia/good_steps"], "contrib"),
    (["head/cond/cond_1/beta1_power", "head/current_loss_scale"], "tensorflow"),
    (["model/cond_1/kernel", "current_loss_scale"], "mp_compat"),  # a scope of the user's
    (["loss_scale"], "plain"),  # a weight of that name
])
def test_whose_checkpoint_it_is(names, dialect):
  assert dialects.dialect(names) == dialect


@pytest.mark.parametrize("wanted, found, matched", [
    # The same name comes first.
    (["beta1_power"], ["cond_1/beta1_power", "beta1_power"], {"beta1_power": "beta1_power"}),
    # Conditionals, nested and in scopes.
    (["beta1_power"], ["cond/cond_1/beta1_power"], {"beta1_power": "cond/cond_1/beta1_power"}),
    (["head/beta1_power"], ["head/cond_1/beta1_power"], {"head/beta1_power": "head/cond_1/beta1_power"}),
    (["cond_1/beta1_power"], ["beta1_power"], {"cond_1/beta1_power": "beta1_power"}),
    # Two optimizers: in the order in which they were made; cond_11 comes after cond_3.
    (["beta1_power", "beta1_power_1", "beta1_power_2"],
     ["cond_11/beta1_power", "cond_3/beta1_power", "cond_1/beta1_power"],
     {"beta1_power": "cond_1/beta1_power", "beta1_power_1": "cond_3/beta1_power",
      "beta1_power_2": "cond_11/beta1_power"}),
    # Each in a scope of its own.
    (["a/beta1_power", "b/beta1_power"], ["b/cond_1/beta1_power", "a/cond_1/beta1_power"],
     {"a/beta1_power": "a/cond_1/beta1_power", "b/beta1_power": "b/cond_1/beta1_power"}),
    # Without the scope, as under control flow v2.
    (["head/beta1_power", "head/beta2_power"], ["beta2_power", "beta1_power"],
     {"head/beta1_power": "beta1_power", "head/beta2_power": "beta2_power"}),
    # Other dialects' state, in other scopes.
    (["current_loss_scale", "good_steps"], ["loss_scaling/loss_scale", "loss_scaling/good_steps"],
     {"current_loss_scale": "loss_scaling/loss_scale", "good_steps": "loss_scaling/good_steps"}),
    (["loss_scale"], ["current_loss_scale"], {"loss_scale": "current_loss_scale"}),
    # Which of two is meant cannot be told.
    (["beta1_power"], ["cond_1/beta1_power", "cond_3/beta1_power"], {}),
    (["beta1_power", "beta1_power_1"], ["cond_1/beta1_power"], {"beta1_power": "cond_1/beta1_power"}),
    # Numbers that belong to the name.
    (["dense_1"], ["dense"], {}),
    (["w/Adam_1"], ["w/Adam"], {}),
])
def test_what_is_found_for_what(wanted, found, matched):
  assert dialects.match(dict.fromkeys(wanted, S), dict.fromkeys(found, S)) == matched


def test_shapes_must_agree_and_only_what_counts_is_looked_for_in_other_scopes():
  assert dialects.match({"a/kernel": [2]}, {"a/cond/kernel": [2]}) == {"a/kernel": "a/cond/kernel"}
  assert dialects.match({"a/kernel": [2]}, {"a/cond/kernel": [3]}) == {}
  assert dialects.match({"a/kernel": [2]}, {"b/kernel": [2]}) == {}
  assert dialects.match({"a/temperature": []}, {"b/temperature": []}) == {}
  assert dialects.match({"a/beta1_power": [1]}, {"beta1_power": [1]}) == {}


@pytest.mark.parametrize("names", [OURS, TENSORFLOW_V1])
def test_to_each_dialect(names):
  power = names[0]
  ours, other = dialects.translate(names, "mp_compat"), dialects.translate(names, "tensorflow")
  assert sorted(ours) == OURS and ours["beta1_power"] == power and ours["w/Adam_1"] == "w/Adam_1"
  assert sorted(other) == sorted(set(OURS) | set(TENSORFLOW_V1))
  assert other["beta1_power"] == other["cond_1/beta1_power"] == power
  contrib = dialects.translate(names, "contrib")
  assert sorted(contrib) == sorted(set(CONTRIB_V1) | {"beta1_power", "beta2_power"})
  assert contrib["loss_scale"] == "current_loss_scale" and contrib["bad_steps"] is None
  assert sorted(dialects.translate(names, "plain")) == PLAIN


def test_from_training_without_loss_scaling_the_state_begins_anew():
  added = {name: source for name, source in dialects.translate(PLAIN, "contrib").items() if source is None}
  assert added == dict.fromkeys(["loss_scale", "good_steps", "bad_steps"])
  assert dialects.translate(PLAIN, "plain") == dict(zip(PLAIN, PLAIN))


def test_a_power_without_its_scope_is_given_it_back():
  names = ["beta1_power", "head/current_loss_scale", "head/good_steps", "head/w"]
  assert dialects.translate(names, "plain") == {
      "beta1_power": "beta1_power", "head/beta1_power": "beta1_power", "head/w": "head/w"}
  assert dialects.translate(names, "tensorflow")["head/cond_1/beta1_power"] == "beta1_power"


def test_from_contrib():
  ours = dialects.translate(CONTRIB_V1, "mp_compat")
  assert sorted(ours) == sorted(OURS + ["bad_steps"])
  assert ours["current_loss_scale"] == "loss_scale" and ours["beta2_power"] == "cond/beta2_power"
  assert "bad_steps" not in dialects.translate(CONTRIB_V1, "tensorflow")
  assert dialects.translate(CONTRIB_V1, "contrib")["bad_steps"] == "bad_steps"
  assert sorted(dialects.translate(CONTRIB_V1, "plain")) == PLAIN


def test_a_second_optimizers_power_is_in_a_conditional_of_its_own():
  """Each optimizer builds two conditionals in TensorFlow's class and in contrib's."""
  names = ["beta1_power", "beta1_power_1", "current_loss_scale", "current_loss_scale_1", "good_steps", "good_steps_1"]
  assert dialects.translate(names, "tensorflow")["cond_3/beta1_power"] == "beta1_power_1"
  assert dialects.translate(names, "contrib")["cond_2/beta1_power"] == "beta1_power_1"


def test_there_and_back():
  for to in dialects.DIALECTS[:3]:
    there = dialects.translate(OURS, to)
    back = dialects.translate(there, "mp_compat")
    assert sorted(set(back) - {"bad_steps"}) == OURS
    assert all(there[back[name]] == name for name in OURS)


def test_two_optimizers_and_scopes():
  two = ["beta1_power", "beta1_power_1", "current_loss_scale", "current_loss_scale_1"]
  there = dialects.translate(two, "tensorflow")
  assert there["cond_1/beta1_power"] == "beta1_power" and there["cond_3/beta1_power"] == "beta1_power_1"
  assert there["current_loss_scale_1"] == "current_loss_scale_1"
  back = dialects.translate(["cond_3/beta1_power", "cond_1/beta1_power", "current_loss_scale"], "plain")
  assert back == {"beta1_power": "cond_1/beta1_power", "beta1_power_1": "cond_3/beta1_power"}
  head = dialects.translate(["head/beta1_power", "head/current_loss_scale"], "tensorflow")
  assert sorted(head) == ["beta1_power", "head/beta1_power", "head/cond_1/beta1_power", "head/current_loss_scale"]


def test_a_users_scope_is_left_alone():
  names = ["cond/dense/kernel", "model/cond_1/dense/kernel", "loss_scale_layer/w", "good_steps_3/w"]
  for to in dialects.DIALECTS:
    assert {name: source for name, source in dialects.translate(names, to).items() if source} == dict(zip(names, names))


def test_another_dialect_is_refused():
  with pytest.raises(ValueError, match="must be one of 'mp_compat', 'tensorflow', 'contrib', 'plain', but got 'keras'"):
    dialects.translate([], "keras")
