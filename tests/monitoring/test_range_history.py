"""Tests of accumulated gradient ranges, of the advice, which hand-worked tables give, and of the layers' names."""

import collections
import json

import numpy as np
import pytest

import mp_compat
from mp_compat.monitoring import range_history


def record(step, tensors, scale=1.0, nonfinite=0, run=1, zeros=3, dtype="float16", selected=True, complete=True):
  """Returns a record: `tensors` is {name: {exponent of the scaled values: count}}."""
  values = {
    name: {
      "variable": name.endswith(":0"),
      "selected": selected,
      "dtype": dtype,
      "scale": scale,
      "zeros": zeros,
      "nonfinite": nonfinite,
      "largest": 1.0,
      "exponents": exponents,
    }
    for name, exponents in tensors.items()
  }
  return {"run": run, "step": step, "complete": complete, "tensors": values}


def together(*records):
  """Returns one record with the tensors of several."""
  tensors = collections.OrderedDict()
  for entry in records:
    tensors.update(entry["tensors"])
  return dict(records[0], tensors=tensors)


def history(*records):
  """Returns a history through its file format."""
  return range_history.read(json.dumps(entry) + "\n" for entry in records)


# Exponents and counts of tensors by name, without a scale; the advice: kind, low, high, tensors that do not fit.
ADVICE = {
  "no scaling": ({"a": {-5: 10, -20: 99}, "b": {-24: 1, 0: 1}}, ("none", 0, 13, [])),
  "no scaling, few values lost": ({"a": {-5: 1, -25: 2**13}}, ("none", 0, 18, [])),
  "lost values add up": ({"a": {-5: 1, -25: 2**14}}, ("fixed", 1, 18, [])),
  "small values": ({"a": {-30: 5, -12: 1}, "b": {-26: 1}}, ("fixed", 2, 25, [])),
  "all small": ({"a": {-40: 5}, "b": {-30: 1}}, ("fixed", 16, 43, [])),
  "far layers": ({"a": {-40: 5}, "b": {-6: 1}}, ("fixed", 16, 19, [])),
  "two far layers": ({"a": {-40: 5}, "b": {-4: 1}}, ("dynamic", 16, 17, [])),
  "layers too far": ({"a": {-40: 5}, "b": {5: 1}}, ("float32", 16, 8, ["a"])),
  "one too wide": ({"a": {-40: 2**45, 0: 1}, "b": {-30: 1}}, ("fixed", 6, 43, ["a"])),
  "one too large": ({"a": {16: 1}, "b": {-3: 1}}, ("none", 0, 16, ["a"])),
  "large values": ({"a": {14: 1}}, ("dynamic", 0, 0, [])),
  "nearly large values": ({"a": {13: 1}}, ("none", 0, 0, [])),
  "large and small values": ({"a": {14: 1}, "b": {-30: 1}}, ("float32", 6, 0, ["b"])),
  "few weights": ({"w:0": {-30: 9, 0: 91}}, ("none", 0, 13, [])),
  "many weights": ({"w:0": {-30: 11, 0: 89}}, ("fixed", 6, 13, [])),
  "many inner values": ({"w": {-30: 11, 0: 89}}, ("none", 0, 13, [])),
  "nothing fits": ({"a": {16: 1}}, ("float32", 0, 0, ["a"])),
}


@pytest.mark.parametrize("scale_exponent", [0, 10])
@pytest.mark.parametrize("case", sorted(ADVICE))
def test_advice_of_one_record(case, scale_exponent):
  """The scale of the record does not matter, because the values are divided by it."""
  tensors, expected = ADVICE[case]
  scaled = {name: {e + scale_exponent: n for e, n in counts.items()} for name, counts in tensors.items()}
  advice = range_history.advise(history(record(1, scaled, 2.0**scale_exponent)))
  assert advice[:4] == expected
  assert all(name in advice.text for name in expected[3]) and advice.text and not advice.text.endswith(".")


@pytest.mark.parametrize("scale_exponent", [0, 7, 15])
@pytest.mark.parametrize(
  "exponents, is_cut_off",
  [({-24: 5, -20: 1}, True), ({-24: 5, -22: 1, -10: 1}, False), ({-22: 5}, True), ({-21: 5}, False), ({}, True)],
)
def test_values_at_the_end_of_float16_indicate_lost_ones(scale_exponent, exponents, is_cut_off):
  scale = 2.0**scale_exponent
  advice = range_history.advise(history(record(1, {"a": exponents, "b": {0: 1}}, scale)))
  assert (advice.kind == "unknown") == is_cut_off
  if is_cut_off:
    assert (
      "record with a larger loss scale, such as 2**{}: at 2**{},".format(13 + scale_exponent, scale_exponent)
      in advice.text
    )
    assert "where the loss does not depend on a layer, zeros are right" in advice.text
  # A record at a larger scale shows all values.
  more = history(record(1, {"a": exponents, "b": {0: 1}}, scale), record(2, {"a": {-9: 1}, "b": {3: 1}}, 8 * scale))
  assert range_history.advise(more).kind != "unknown"


def test_cut_off_at_the_largest_scale_is_not_reported():
  """A larger scale would overflow, so it cannot show more."""
  assert range_history.advise(history(record(1, {"a": {}, "b": {13: 1}}))).kind == "none"


@pytest.mark.parametrize("exponents", [{-24: 5}, {}])
def test_only_float16_is_cut_off(exponents):
  for dtype, kind in (("float16", "unknown"), ("float32", "none"), ("bfloat16", "none")):
    tensors = together(record(1, {"a": exponents}, dtype=dtype), record(1, {"b": {0: 1}}))
    assert range_history.advise(history(tensors)).kind == kind


# Exponents of a tensor and the exponent of the scale, by record, and whether zeros are explained at the end.
ZEROS = {
  "trained at the same scale": ([({}, 5), ({0: 9}, 5)], True),
  "trained at a smaller scale": ([({}, 5), ({}, 5), ({0: 9}, 3)], True),
  "trained at a larger scale": ([({}, 5), ({0: 9}, 6)], True),
  "cut off": ([({}, 5), ({-23: 9}, 5)], False),
  "zeros again": ([({}, 5), ({0: 9}, 5), ({}, 5)], True),
  "zeros now and then": ([({0: 9}, 5), ({}, 5), ({0: 9}, 5), ({}, 6)], True),
  "zeros again, after values at a larger scale": ([({}, 5), ({0: 9}, 5), ({0: 9}, 6), ({}, 6)], True),
  "zeros again, after a larger scale": ([({}, 5), ({0: 9}, 6), ({}, 6)], False),
  "zeros later": ([({0: 9}, 5), ({}, 5)], False),
  "zeros later, at a smaller scale": ([({0: 9}, 5), ({}, 4)], True),
}


@pytest.mark.parametrize("case", sorted(ZEROS))
def test_zeros_before_other_values_are_explained(case):
  steps, is_explained = ZEROS[case]
  records = [record(step, {"a": exponents, "b": {1: 1}}, 2.0**n) for step, (exponents, n) in enumerate(steps)]
  assert (range_history.advise(history(*records)).kind != "unknown") == is_explained


OTHER_REASON = "in {} of {} records, gradients are not finite for another reason than the loss scale"


def test_gradients_that_are_not_finite_without_a_scale():
  finite, nan = record(1, {"a": {0: 1}}), record(2, {"a": {0: 1}}, nonfinite=5)
  advice = range_history.advise(history(finite, finite, finite, nan))
  assert advice[:4] == ("dynamic", 0, 13, []) and OTHER_REASON.format(1, 4) in advice.text
  assert "a dynamic loss scale that starts at 2**13 and skips steps that are not finite" in advice.text
  small = record(1, {"a": {-30: 1}})
  assert range_history.advise(history(small, small, nan))[:3] == ("dynamic", 6, 43)
  assert range_history.advise(history(finite, nan)).kind == "float32"
  assert range_history.advise(history(nan))[:4] == ("float32", 0, 0, [])


# The exponent of the scale of 1 of 10 records, in which values are not finite; those of the others are below 2**1
# without a scale. The advice, and whether the scale is the reason.
OVERFLOWS = {
  "no scale": (0, ("dynamic", 0, 13), False),
  "small scale": (5, ("dynamic", 0, 13), False),
  "far": (6, ("none", 0, 3), True),
  "near": (15, ("none", 0, 12), True),
  "no change": (17, ("none", 0, 13), True),
}


@pytest.mark.parametrize("case", sorted(OVERFLOWS))
def test_overflow_counts_unless_it_is_far_above_the_finite_values(case):
  exponent, expected, is_explained = OVERFLOWS[case]
  bad = record(10, {"a": {}}, 2.0**exponent, nonfinite=1)
  advice = range_history.advise(history(*[record(step, {"a": {0: 1}}) for step in range(9)], bad))
  assert advice[:3] == expected and (OTHER_REASON.format(1, 10) in advice.text) != is_explained


def test_overflow_is_of_the_first_tensor_from_the_loss():
  finite = record(1, {"a": {0: 1}, "b": {0: 1}, "c": {0: 1}})
  overflow = together(record(2, {"a": {0: 1}}, 2.0**15), record(2, {"b": {}, "c": {}}, 2.0**15, nonfinite=1))
  read = history(finite, overflow, overflow)
  assert read.overflows == {("b", 15): 2} and "b overflowed at 2**15" in range_history.advise(read).text


def test_overflow_of_a_tensor_that_does_not_fit_does_not_bound_the_scale():
  finite = record(1, {"a": {20: 1}, "b": {0: 1}})
  overflow = together(record(2, {"a": {}}, 2.0, nonfinite=1), record(2, {"b": {1: 1}}, 2.0))
  assert range_history.advise(history(finite, overflow))[:4] == ("none", 0, 13, ["a"])


def test_tensor_that_overflowed_in_every_record():
  overflow = together(record(1, {"a": {}}, 2.0**15, nonfinite=5), record(1, {"b": {-5: 1}}, 2.0**15))
  advice = range_history.advise(history(overflow))
  assert advice[:3] == ("unknown", 0, 12) and "record more steps" in advice.text
  assert "the gradients of a were not finite in any record" in advice.text
  recorded = history(overflow, record(2, {"a": {0: 1}, "b": {-5: 1}}))
  assert range_history.advise(recorded)[:3] == ("none", 0, 12)
  assert "a overflowed at 2**15" in range_history.advise(recorded).text


def test_gradients_without_a_scale_count_as_at_a_scale_of_1():
  passed = record(1, {"a": {3: 1}}, None)
  overflow = record(2, {"a": {}}, None, nonfinite=1)
  read = history(record(1, {"b": {6: 1}}, 4.0), passed, overflow, overflow)
  assert read.scale == 4.0 and read.tensors["a"].highest == 3 and not read.overflows
  assert range_history.advise(read)[:3] == ("none", 0, 9)


def test_advice_is_for_selected_tensors():
  selected, other = record(1, {"a": {0: 1}}), record(1, {"b": {-30: 1}, "c": {17: 1}}, dtype="float32", selected=False)
  both = history(together(selected, other))
  assert range_history.advise(both)[:4] == ("none", 0, 13, []) and not both.conflicts and len(both.tensors) == 3
  assert range_history.advise(history(other))[:4] == ("fixed", 6, 43, ["c"])
  # A layer that a later run computes in float32.
  assert (
    range_history.advise(history(together(record(1, {"b": {-30: 1}}), selected), together(selected, other)))[0]
    == "none"
  )


@pytest.mark.parametrize("nonzero, is_mentioned", [({0: 99, -30: 1}, False), ({0: 98, -30: 2}, True)])
@pytest.mark.parametrize("other, kind", [(-10, "none"), (-26, "fixed")])
def test_values_that_become_zeros_are_mentioned(nonzero, is_mentioned, other, kind):
  advice = range_history.advise(history(record(1, {"a": nonzero, "b": {other: 1}})))
  assert advice.kind == kind
  assert ("% of the nonzero values of a become zeros" in advice.text) == is_mentioned
  assert ("; at 2**{}, 2% of".format(advice.low) in advice.text) == is_mentioned
  assert ("prefer a scale near 2**13" in advice.text) == is_mentioned


def test_no_larger_scale_is_preferred_where_none_is_allowed():
  assert "prefer" not in range_history.advise(history(record(1, {"a": {13: 98, -30: 2}}))).text


def test_what_was_not_measured_is_mentioned():
  complete, incomplete = record(1, {"a": {0: 1}}), record(2, {"a": {0: 1}}, complete=False)
  assert "was not measured" not in range_history.advise(history(complete)).text
  assert "a part of the backward pass was not measured" in range_history.advise(history(incomplete, complete)).text


@pytest.mark.parametrize("scale", [0.0, float("inf"), float("nan"), -1.0])
def test_records_with_other_scales_are_ignored(scale):
  assert range_history.advise(history(record(1, {"a": {0: 1}}, scale), record(2, {"a": {2: 1}})))[:3] == ("none", 0, 11)


def test_scales_that_are_not_powers_of_two_are_rounded_to_be_safe():
  tensor = history(record(1, {"a": {-3: 1}}, 1.5)).tensors["a"]
  assert (tensor.lowest, tensor.highest) == (-4, -3)


def test_advice_considers_every_record():
  early, late = record(1, {"a": {-4: 100}}), record(2, {"a": {-36: 100}})
  assert range_history.advise(history(early))[:3] == ("none", 0, 17)
  assert range_history.advise(history(late))[:3] == ("fixed", 12, 49)
  both = ("fixed", 12, 17)
  assert range_history.advise(history(early, late))[:3] == both
  assert range_history.advise(history(dict(late, step=1), dict(early, step=2)))[:3] == both
  large = record(3, {"a": {5: 100}})
  assert range_history.advise(history(early, late, large))[:3] == ("dynamic", 12, 8)


def test_overflow_lowers_the_largest_scale():
  steps = [record(1, {"a": {-9: 100}}, 2.0**10), record(2, {"a": {3: 100}}, 2.0**26, nonfinite=1)]
  assert range_history.advise(history(*steps[:1]))[:3] == ("none", 0, 32)
  # Without the scale, the overflowing value was at least 2**(16 - 26), and 2**13 is left below 2**14.
  assert range_history.advise(history(*steps))[:3] == ("none", 0, 23)


def test_no_values_give_no_advice():
  assert range_history.advise(range_history.History()) is None
  assert range_history.advise(history(record(1, {"a": {}}))) is None
  assert range_history.advise(history(record(1, {"a": {}, "b": {0: 1}}, zeros=0))).kind == "none"
  assert range_history.advise(history(record(1, {"a": {1: 1}}, 2.0, nonfinite=2))) is None


@pytest.mark.parametrize("shift", [0, 7])
def test_lost_share_of_magnitude(shift):
  records = [record(1, {"a": {-24 + shift: 1, -26 + shift: 4}}, 2.0**shift), record(2, {"a": {-10: 1}})]
  both = history(*records)
  assert [both.tensors["a"].lost(exponent) for exponent in (0, 1, 2)] == [0.25, 0.25, 0.0]


def test_restored_run_replaces_later_records():
  runs = [(1, 1), (1, 5), (1, 5), (1, 9), (2, 5), (2, 7), (3, 7), (3, 7)]  # run, step
  read = history(*[record(step, {"a": {e: 1}}, run=run) for e, (run, step) in enumerate(runs)])
  assert read.steps == [1, 5, 7, 7] and sorted(read.tensors["a"].exponents) == [0, 4, 6, 7] and read.run == 3


def test_numbers_in_strings_are_read():
  lines = [dict(record(step, {"a": {0: 1}}), run=run, step=str(step)) for run, step in ((1, 1), (1, 9), ("2", 5))]
  assert history(*lines).steps == [1, 5] and history(*lines).run == 2


DAMAGED = ["", "{}", "[]", "x", '{"run": 1, "step": 1, "tensors": {"a": 1}}', "[" * 10**5]
DAMAGED += [
  json.dumps(record(1, {"a": exponents}, run=run)) for exponents, run in [({99999: 1}, 1), ({"x": 1}, 1), ({0: 1}, "x")]
]


@pytest.mark.parametrize("damaged", DAMAGED, ids=range(len(DAMAGED)))
def test_damaged_lines_are_skipped(damaged):
  line = json.dumps(record(1, {"a": {0: 1}}))
  assert range_history.read([line, damaged, line[:20], line]).steps == [1, 1]
  with pytest.raises(ValueError, match="none of the 2 lines is a record of GradientRangesHook"):
    range_history.read([damaged, damaged])


def test_record_contains_the_fetched_counts():
  counts = np.zeros(256, np.int32)
  counts[[0, 1, 127, 255]] = [7, 2, 5, 1]
  measured = mp_compat.GradientRange(counts, 5 / 15, 0.0, 0.0, np.float32(1.5), 1, -1, np.float32(8.0))
  empty = measured._replace(exponents=np.zeros(256, np.int32))
  descriptions = dict.fromkeys("ab", range_history.Description(True, True, "float16", False))
  got = range_history.record_of(2, 3, {"a": measured, "b": empty}, descriptions, True)
  tensor = {
    "variable": True,
    "selected": False,
    "dtype": "float16",
    "scale": 8.0,
    "zeros": 5,
    "nonfinite": 1,
    "largest": 1.5,
    "exponents": {"-127": 2, "-126": 2, "0": 5},
  }
  assert got == {"run": 2, "step": 3, "complete": True, "tensors": {"a": tensor}}
  assert json.loads(json.dumps(got)) == got
  descriptions["a"] = descriptions["a"]._replace(has_scale=False)
  assert range_history.record_of(2, 3, {"a": measured}, descriptions, True)["tensors"]["a"] == dict(tensor, scale=None)


@pytest.mark.parametrize(
  "name, layer",
  [
    ("dense/kernel:0", "dense"),
    ("w:0", ""),
    ("gradients/net/dense/MatMul_grad/MatMul_1", "net/dense"),
    ("tower_1/gradients_2/net/dense/MatMul_grad/tuple/control_dependency", "net/dense"),
    ("gradients_1/gradients/net/dense/MatMul_grad/MatMul_grad/MatMul", "net/dense"),
    ("gradients/AddN_3", ""),
  ],
)
def test_layer_of_a_tensor(name, layer):
  assert range_history.layer_of(name) == layer
