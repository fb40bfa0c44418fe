"""Tests of naming schemes, against tables."""

import pytest

from mp_compat.core import naming_schemes

SCALAR = ()  # the shape of counters and scales

OURS = """beta1_power beta2_power current_loss_scale global_step good_steps
w w/Adam w/Adam_1""".split()
TENSORFLOW_V1 = """cond_1/beta1_power cond_1/beta2_power current_loss_scale global_step
good_steps w w/Adam w/Adam_1""".split()
CONTRIB_V1 = """bad_steps cond/beta1_power cond/beta2_power global_step good_steps
loss_scale w w/Adam w/Adam_1""".split()
PLAIN = "beta1_power beta2_power global_step w w/Adam w/Adam_1".split()


@pytest.mark.parametrize(
  "names, scheme",
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
    (["loss_scale"], "plain"),  # a weight named loss_scale
    # one optimizer with a loss scale, and one without
    (["beta1_power", "cond_1/beta1_power", "current_loss_scale"], "tensorflow"),
  ],
)
def test_scheme_is_recognized_from_names(names, scheme):
  assert naming_schemes.recognize(dict.fromkeys(names, SCALAR)).name == scheme


def test_parsed_names_sort_by_creation():
  names = ["cond_11/beta1_power", "cond_3/beta1_power", "cond/beta1_power"]
  assert sorted(names, key=naming_schemes.parse) == names[::-1]
  parsed = naming_schemes.parse("head/cond_1/beta1_power_2")
  assert parsed == naming_schemes.Name("head/cond", "beta1_power", (1, 2))
  assert parsed.scope == "head"


def test_each_scheme_has_its_dtypes():
  for scheme in naming_schemes.SCHEMES.values():
    for role, variable in scheme.state.items():
      assert scheme.variable(role) is variable
  assert naming_schemes.CONTRIB.variable("good_steps").dtype == "int32"
  assert naming_schemes.TENSORFLOW.variable("bad_steps").dtype == "int64"


@pytest.mark.parametrize(
  "loss_scale, forms",
  [
    (None, ["head", "head", "head", "head", "head"]),
    ("fixed", ["head", "head", "head", "head/cond", "head"]),
    ("dynamic", ["head", "head/cond", "", "head/cond", "head"]),
  ],
)
def test_each_scheme_writes_scopes(loss_scale, forms):
  schemes = naming_schemes.SCHEMES.values()
  assert [scheme.form("head", loss_scale) for scheme in schemes] == forms
