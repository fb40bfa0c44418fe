"""Tests of accumulated gradient ranges, of the advice, which hand-worked tables give, and of the layers' names."""

import json

import numpy as np
import pytest

import mp_compat
from mp_compat.monitoring import range_history


def record(step, tensors, scale=1.0, nonfinite=0, run=1, zeros=3):
  """Returns a record: `tensors` is {name: {exponent of the scaled values: count}}."""
  values = {
    name: {
      "variable": name.endswith(":0"),
      "scale": scale,
      "zeros": zeros,
      "nonfinite": nonfinite,
      "largest": 1.0,
      "exponents": exponents,
    }
    for name, exponents in tensors.items()
  }
  return {"run": run, "step": step, "tensors": values}


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
  "large values": ({"a": {14: 1}}, ("none", 0, 0, [])),
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
  # A record at a larger scale shows all values.
  more = history(record(1, {"a": exponents, "b": {0: 1}}, scale), record(2, {"a": {-9: 1}, "b": {3: 1}}, 8 * scale))
  assert range_history.advise(more).kind != "unknown"


def test_cut_off_at_the_largest_scale_is_not_reported():
  """A larger scale would overflow, so it cannot show more."""
  assert range_history.advise(history(record(1, {"a": {}, "b": {13: 1}}))).kind == "none"


def test_gradients_that_are_not_finite_without_a_scale():
  finite, nan = record(1, {"a": {0: 1}}), record(2, {"a": {0: 1}}, nonfinite=5)
  advice = range_history.advise(history(finite, finite, finite, nan))
  assert (
    advice[:4] == ("none", 0, 13, []) and "in 1 of 4 records, gradients are not finite at a scale of 1" in advice.text
  )
  assert range_history.advise(history(finite, nan)).kind == "float32"
  assert range_history.advise(history(nan))[:4] == ("float32", 0, 0, [])


def test_overflow_of_one_tensor_bounds_the_scale():
  overflow = record(1, {"a": {}}, 2.0**15, nonfinite=5)
  overflow["tensors"]["b"] = record(1, {"b": {-5: 1}}, 2.0**15)["tensors"]["b"]
  advice = range_history.advise(history(overflow))
  assert advice[:3] == ("none", 0, 12) and "a overflowed at 2**15" in advice.text


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


def test_overflow_lowers_the_largest_scale():
  steps = [record(1, {"a": {-9: 100}}, 2.0**10), record(2, {"a": {3: 100}}, 2.0**22, nonfinite=1)]
  assert range_history.advise(history(*steps[:1]))[:3] == ("none", 0, 32)
  # Without the scale, the overflowing value was at least 2**(16 - 22), and 2**13 is left below 2**14.
  assert range_history.advise(history(*steps))[:3] == ("none", 0, 19)


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
  got = range_history.record_of(2, 3, {"a": measured, "b": empty}, {"a"})
  tensor = {
    "variable": True,
    "scale": 8.0,
    "zeros": 5,
    "nonfinite": 1,
    "largest": 1.5,
    "exponents": {"-127": 2, "-126": 2, "0": 5},
  }
  assert got == {"run": 2, "step": 3, "tensors": {"a": tensor}} and json.loads(json.dumps(got)) == got


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
