"""Tests of accumulated gradient ranges, and of the advice, which hand-worked tables
give.
"""

import collections
import json

import numpy as np
import pytest

import mp_compat
from mp_compat.monitoring import gradient_ranges
from mp_compat.monitoring import range_history
from mp_compat.monitoring import ranges_hook


def record(
  step,
  tensors,
  scale=1.0,
  nonfinite=0,
  run=1,
  zeros=None,
  dtype="float16",
  selected=True,
  complete=True,
  noise=False,
  applied=None,
):
  """Returns a record: `tensors` is {name: {exponent of the scaled values: count}}.

  By default, only tensors without other values have zeros.
  """
  values = dict(
    selected=selected,
    dtype=dtype,
    applied=applied,
    scale=scale,
    noise=noise,
    nonfinite=nonfinite,
    largest=1.0,
  )
  described = {}
  for name, exponents in tensors.items():
    own = (0 if exponents else 3) if zeros is None else zeros
    described[name] = dict(values, exponents=exponents, zeros=own)
  tensors = described
  return {"run": run, "step": step, "complete": complete, "tensors": tensors}


def together(*records):
  """Returns one record with the tensors of several."""
  tensors = collections.OrderedDict()
  for entry in records:
    tensors.update(entry["tensors"])
  return dict(records[0], tensors=tensors)


def history(*records):
  """Returns a history through its file format."""
  return range_history.read("\n".join(map(json.dumps, records)))


def advise(*records):
  return range_history.advise(history(*records))


# Exponents and counts of tensors by name, without a scale; the advice: kind, low, high;
# a text that it contains.
ADVICE = {
  "no scaling": (
    {"a": {-5: 10, -20: 99}, "b": {-24: 1, 0: 1}},
    ("none", 0, 15),
    "Scales up to 2**15 leave at most 2% of each",
  ),
  "few values lost": (
    {"a": {-5: 1, -25: 2**13}},
    ("fixed", 0, 20),
    "loss scale of 2**18. From 1 to 2**20 (for a), scales leave at most 2%",
  ),
  "lost values add up": (
    {"a": {-5: 1, -25: 2**14}},
    ("fixed", 1, 20),
    "a fixed loss scale of 2**18.",
  ),
  "small values": (
    {"a": {-30: 5, -12: 1}, "b": {-26: 1}},
    ("fixed", 2, 27),
    "From 2**2 (for b) to 2**27 (for a)",
  ),
  "all small": (
    {"a": {-40: 5}, "b": {-30: 1}},
    ("fixed", 16, 45),
    "From 2**16 (for a) to 2**45 (for b)",
  ),
  "far layers": (
    {"a": {-40: 5}, "b": {-3: 1}},
    ("fixed", 16, 18),
    "a fixed loss scale of 2**16.",
  ),
  "farther layers": (
    {"a": {-40: 5}, "b": {-2: 1}},
    ("dynamic", 16, 17),
    "a dynamic loss scale that starts at 2**17.",
  ),
  "layers too far": (
    {"a": {-40: 5}, "b": {5: 1}},
    ("float32", 16, 10),
    "Compute a in float32",
  ),
  "just too far": (
    {"a": {-40: 5}, "b": {0: 1}},
    ("float32", 16, 15),
    "a needs at least 2**16, and b overflows",
  ),
  "one too wide": (
    {"a": {-40: 2**45, 0: 1}, "b": {-30: 1}},
    ("float32", 16, 15),
    "Compute a in float32",
  ),
  "one too large": (
    {"a": {16: 1}, "b": {-3: 1}},
    ("float32", 0, -1),
    "Compute a in float32, or make the loss smaller",
  ),
  "large values": (
    {"a": {14: 1}},
    ("dynamic", 0, 1),
    "a dynamic loss scale that starts at 2**1.",
  ),
  "nearly large values": (
    {"a": {13: 1}},
    ("none", 0, 2),
    "Scales up to 2**2 leave at most 2% of",
  ),
  "large and small values": (
    {"a": {14: 1}, "b": {-30: 1}},
    ("float32", 6, 1),
    "b needs at least 2**6",
  ),
}


@pytest.mark.parametrize("scale_exponent", [0, 10])
@pytest.mark.parametrize("case", sorted(ADVICE))
def test_advice_of_one_record(case, scale_exponent):
  """The scale of the record does not matter, because the values are divided by it."""
  tensors, expected, text = ADVICE[case]
  scaled = {
    name: {e + scale_exponent: n for e, n in counts.items()}
    for name, counts in tensors.items()
  }
  advice = advise(record(1, scaled, 2.0**scale_exponent))
  assert advice[:3] == expected and text in advice.text
  assert len(advice.text.split(". ")) == 2 and advice.text.endswith(".")


@pytest.mark.parametrize("seed", range(5))
def test_share_below_smallest_number_is_true(seed):
  """The smallest scale leaves at most 2% of the magnitude below 2**-24. It does not
  promise what the rest is rounded to: 1.33 * 2**-24 becomes 2**-24 in float16.
  """
  random = np.random.RandomState(seed)
  values = np.exp(random.normal(-30.0, 2.0, size=1000))
  exponents = collections.Counter(np.floor(np.log2(values)).astype(int).tolist())
  advice = advise(record(1, {"a": dict(exponents)}, dtype="float32"))
  assert advice.low > 0 and "keep" not in advice.text

  def share(scale):
    scaled = values * scale
    return scaled[scaled < 2.0**-24].sum() / scaled.sum()

  assert share(2.0**advice.low) <= 0.02
  assert share(2.0 ** (advice.low - 1)) > 0.005


@pytest.mark.parametrize("scale_exponent", [0, 7, 15])
@pytest.mark.parametrize(
  "exponents, is_cut_off",
  [
    ({-24: 5, -20: 1}, True),
    ({-24: 5, -22: 1, -10: 1}, False),
    ({-22: 5}, True),
    ({-21: 5}, False),
    ({}, True),
  ],
)
def test_lowest_values_indicate_lost_ones(scale_exponent, exponents, is_cut_off):
  scale = 2.0**scale_exponent
  advice = advise(record(1, {"a": exponents, "b": {0: 1}}, scale))
  assert (advice.kind == "unknown") == is_cut_off
  if is_cut_off:
    start = "Record with a loss scale of 2**{}. At 2**{}, ".format(
      13 + scale_exponent, scale_exponent
    )
    assert advice.text.startswith(start) and advice.text.endswith("lost in a.")
  # A record at a larger scale shows all values.
  more = history(
    record(1, {"a": exponents, "b": {0: 1}}, scale),
    record(2, {"a": {-9: 1}, "b": {3: 1}}, 8 * scale),
  )
  assert range_history.advise(more).kind != "unknown"


def test_advised_scale_fits():
  """A larger scale would overflow, so it cannot show more."""
  assert advise(record(1, {"a": {}, "b": {13: 1}})).kind == "dynamic"
  assert advise(record(1, {"a": {}, "b": {12: 1}})).kind == "unknown"


@pytest.mark.parametrize("exponents", [{-24: 5}, {}])
def test_only_float16_is_cut_off(exponents):
  for dtype, kind in (
    ("float16", "unknown"),
    ("float32", "none"),
    ("bfloat16", "none"),
  ):
    tensors = together(
      record(1, {"a": exponents}, dtype=dtype), record(1, {"b": {0: 1}})
    )
    assert advise(tensors).kind == kind


@pytest.mark.parametrize("exponents", [{-24: 5}, {-40: 5}, {}], ids=str)
@pytest.mark.parametrize("scale_exponent", [0, 60])
def test_noise_needs_no_scale(exponents, scale_exponent):
  """It neither sets the smallest scale nor indicates that other values are lost, but it
  must not overflow.
  """
  scale = 2.0**scale_exponent
  noise = record(
    1,
    {"a": {e + scale_exponent: count for e, count in exponents.items()}},
    scale,
    noise=True,
  )
  assert advise(together(noise, record(1, {"b": {scale_exponent - 9: 1}}, scale)))[
    :3
  ] == ("none", 0, 24)
  large = record(1, {"a": {14: 1}}, noise=True)
  assert advise(together(large, record(1, {"b": {-9: 1}})))[:3] == ("dynamic", 0, 1)


def test_bfloat16_has_range_of_float32():
  values = record(1, {"a": {-120: 5, 20: 1}, "b": {-60: 1}}, dtype="bfloat16")
  advice = advise(values)
  assert (
    advice[:3] == ("none", 0, 107)
    and "below bfloat16's smallest number, and" in advice.text
  )
  assert history(values).format == range_history.BFLOAT16
  mixed = history(together(values, record(1, {"c": {-30: 1}})))
  assert mixed.format == range_history.FLOAT16 and range_history.advise(mixed)[:3] == (
    "fixed",
    6,
    45,
  )


# Exponents of a tensor and the exponent of the scale, by record, and whether zeros are
# explained at the end.
ZEROS = {
  "trained at the same scale": ([({}, 5), ({0: 9}, 5)], True),
  "trained at a smaller scale": ([({}, 5), ({}, 5), ({0: 9}, 3)], True),
  "trained at a larger scale": ([({}, 5), ({0: 9}, 6)], True),
  "cut off": ([({}, 5), ({-23: 9}, 5)], False),
  "cut off later": ([({0: 9}, 5), ({-23: 9}, 5)], False),
  "cut off at a smaller scale": ([({-23: 9}, 5), ({0: 9}, 6)], True),
  "zeros now and then": ([({0: 9}, 5), ({}, 5), ({0: 9}, 5), ({}, 6)], True),
  "only zeros": ([({}, 5), ({}, 6)], False),
}


@pytest.mark.parametrize("case", sorted(ZEROS))
def test_zeros_beside_values_are_explained(case):
  steps, is_explained = ZEROS[case]
  records = [
    record(step, {"a": exponents, "b": {1: 1}}, 2.0**n)
    for step, (exponents, n) in enumerate(steps)
  ]
  assert (advise(*records).kind != "unknown") == is_explained


# The tensors of a record, its scale, and whether some values may vanish at a scale of 1.
VANISHING = {
  "one of four outputs": ({"a": {-3: 3000, -26: 1000}}, 2.0**15, True),
  "one of two thousand": ({"a": {-3: 1999, -26: 1}}, 2.0**15, False),
  "three of a thousand": ({"a": {-3: 997, -26: 3}}, 2.0**15, True),
  "of another tensor": ({"a": {-3: 1}, "b": {-9: 3, -30: 1}}, 2.0**20, True),
  "none": ({"a": {-3: 1000, -24: 1000}}, 2.0**15, False),
}


@pytest.mark.parametrize("case", sorted(VANISHING))
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_values_that_vanish_need_scale(case, dtype):
  """Their share is by number: 99% of the magnitude does not show a single output."""
  tensors, scale, may_vanish = VANISHING[case]
  shift = int(np.log2(scale))
  scaled = {
    name: {exponent + shift: count for exponent, count in counts.items()}
    for name, counts in tensors.items()
  }
  advice = advise(record(1, scaled, scale, dtype=dtype))
  assert (advice.kind, advice.low) == ("fixed" if may_vanish else "none", 0)
  reason = "larger ones lose less: at 1, more than one in 1024 values of "
  assert (reason in advice.text) == may_vanish
  noise = record(1, {"noise": {shift - 40: 9}}, scale, dtype=dtype, noise=True)
  assert advise(together(record(1, scaled, scale), noise)).kind == advice.kind


@pytest.mark.parametrize(
  "dtype, scale, kind",
  [("float16", 1.0, "fixed"), ("float16", 2.0**4, "none"), ("float32", 1.0, "none")],
)
def test_zeros_may_have_vanished(dtype, scale, kind):
  """At a scale of 1, nothing else shows them; at larger scales, others are seen."""
  advice = advise(record(1, {"a": {0: 9}}, scale, zeros=9, dtype=dtype))
  assert (advice.kind, advice.low) == (kind, 0)


def test_rounding_of_float16_variables_is_measured():
  """Their gradients are float16 again after they are divided by the scale."""
  scaled = {"a": {-18: 5, -14: 2}}  # at 2**13: 2**-31 to 2**-27
  for applied, kind in [("float32", "fixed"), (None, "fixed"), ("float16", "float32")]:
    advice = advise(record(1, scaled, 2.0**13, applied=applied))
    assert advice.kind == kind
  assert advice.text.startswith("Store a in float32, with custom_getter=mp_compat.")
  assert "At any scale, more than 0.5% of the magnitude" in advice.text
  large = {
    name: {e + 8: n for e, n in counts.items()} for name, counts in scaled.items()
  }
  assert advise(record(1, large, 2.0**13, applied="float16")).kind != "float32"
  old = record(1, scaled, 2.0**13)
  del old["tensors"]["a"]["applied"]  # as earlier versions wrote it
  assert advise(old).kind == "fixed"


def skipped(step, scale, run=1):
  """Returns the line of a step that overflowed between the records."""
  record = {"run": run, "step": step, "complete": True, "tensors": {}}
  return dict(record, overflow_scale=scale)


# The scales of steps that overflowed between the records; the advice.
SKIPPED = {
  "one": ([2.0**13], ("fixed", 0, 12), "Use a fixed loss scale of 2**10."),
  "falling": ([2.0**15, 2.0**14, 2.0**13], ("fixed", 0, 12), "2**12 (for step 3, "),
  "rising": (
    [2.0**13, 2.0**14],
    ("fixed", 0, 12),
    "step 1, which overflowed at 2**13;",
  ),
  "no power of 2": ([1025.0], ("fixed", 0, 10), "a fixed loss scale of 2**8."),
  "at 1": ([2.0, 1.0], ("dynamic", 0, -1), "No scale fits all records"),
  "far above": ([2.0**40], ("fixed", 0, 15), "Use a fixed loss scale of 2**13."),
}


@pytest.mark.parametrize("case", sorted(SKIPPED))
def test_steps_between_records_bound_scale(case):
  scales, expected, text = SKIPPED[case]
  lines = [skipped(step + 1, scale) for step, scale in enumerate(scales)]
  read = history(record(0, {"a": {0: 1}}), *lines, record(9, {"a": {0: 1}}))
  advice = range_history.advise(read)
  assert advice[:3] == expected and text in advice.text, advice.text
  assert read.steps == [0, 9] and advice.text.endswith("; such steps must be skipped.")
  assert set(advice.named) == {"a"}


def test_restored_run_replaces_skipped_steps():
  read = history(
    record(1, {"a": {0: 1}}),
    skipped(4, 2.0**5),
    record(2, {"a": {0: 1}}, run=2),
    skipped(3, 2.0**9, run=2),
  )
  assert range_history.advise(read).high == 8 and read.run == 2


@pytest.mark.parametrize(
  "scale", ["x", None, [], 0.0, -1.0, float("nan"), float("inf")]
)
def test_damaged_scales_of_skipped_steps(scale):
  assert advise(record(1, {"a": {0: 1}}), skipped(2, scale))[:3] == ("none", 0, 15)
  assert advise(record(1, {"a": {0: 1}}), dict(skipped(2, 1.0), run="x")).kind == "none"


def test_only_skipped_steps_give_no_record():
  advice = advise(skipped(3, 8.0))
  assert advice.kind == "unknown" and "No record was finite." in advice.text


# The scale of 1 of 10 records, in which values are not finite; those of the others are
# below 2**1 without a scale.
OVERFLOWS = {
  "at a scale of 1": (1.0, ("dynamic", 0, -1), "No scale fits all records"),
  "at a small scale": (4.0, ("dynamic", 0, 1), "From 1 to 2**1 (for a)"),
  "at a large scale": (2.0**10, ("fixed", 0, 9), "Use a fixed loss scale of 2**7."),
  "at a scale that is no power of 2": (
    1025.0,
    ("fixed", 0, 10),
    "Use a fixed loss scale of 2**8.",
  ),
  "at a scale above those that fit": (
    2.0**17,
    ("fixed", 0, 15),
    "Use a fixed loss scale of 2**13.",
  ),
  "without a scale": (None, ("fixed", 0, 15), "Use a fixed loss scale of 2**13."),
}


@pytest.mark.parametrize("case", sorted(OVERFLOWS))
def test_records_not_finite_bound_scale(case):
  """They are always named, and need a loss scale that skips them."""
  scale, expected, text = OVERFLOWS[case]
  bad = record(10, {"a": {}}, scale, nonfinite=1)
  advice = advise(*[record(step, {"a": {0: 1}}) for step in range(9)], bad)
  assert advice[:3] == expected and text in advice.text
  assert advice.text.endswith(
    " Not finite: 1 of 10 records (step 10), first in a; such steps must be skipped."
  )


def test_overflow_is_of_first_tensor():
  finite = record(1, {"a": {0: 1}, "b": {0: 1}, "c": {0: 1}})
  overflow = together(
    record(2, {"a": {0: 1}}, 2.0**15),
    record(2, {"b": {}, "c": {}}, 2.0**15, nonfinite=1),
  )
  read = history(finite, overflow, overflow)
  assert read.overflows == [range_history.Bounds(0, 14, "", "b", step=2)] * 2
  advice = range_history.advise(read)
  assert "2 of 3 records (step 2), first in b" in advice.text
  assert set(advice.named) == {"a", "b"}


def test_run_without_finite_record():
  overflow = together(
    record(1, {"a": {}}, 2.0**15, nonfinite=5), record(1, {"b": {-5: 1}}, 2.0**15)
  )
  advice = advise(overflow)
  assert advice[:3] == ("unknown", 0, 14) and advice.text.startswith(
    "Record more steps, or with a smaller loss scale."
  )
  unscaled = record(2, {"a": {}, "b": {}}, nonfinite=5)
  for records in ([unscaled], [overflow, unscaled]):
    advice = advise(*records)
    assert (
      advice[:3] == ("float32", 0, -1)
      and "No record was finite at 2**0." in advice.text
    )
  recorded = history(overflow, record(2, {"a": {0: 1}, "b": {-5: 1}}))
  assert (
    not history(overflow).tensors["a"].is_recorded and recorded.tensors["a"].is_recorded
  )
  assert range_history.advise(recorded)[:3] == ("fixed", 0, 14)


def test_many_records_not_finite_are_counted():
  bad = [record(step, {"a": {}}, 2.0**9, nonfinite=1) for step in range(7)]
  text = advise(record(9, {"a": {0: 1}}), *bad).text
  assert (
    "Not finite: 7 of 8 records (steps 0, 1, 2, 3, 4 and 2 more), first in a" in text
  )


def test_missing_scale_counts_as_one():
  passed = record(1, {"a": {3: 1}}, None)
  read = history(record(1, {"b": {6: 1}}, 4.0), passed)
  assert read.scale == 4.0 and read.tensors["a"].bounds == range_history.Bounds(
    0, 12, "a", "a", step=1
  )
  assert range_history.advise(read)[:3] == ("none", 0, 11)


def test_advice_is_for_selected_tensors():
  selected, other = (
    record(1, {"a": {0: 1}}),
    record(1, {"b": {-30: 1}, "c": {17: 1}}, dtype="float32", selected=False),
  )
  both = history(together(selected, other))
  assert (
    range_history.advise(both)[:3] == ("none", 0, 15)
    and not both.conflict
    and len(both.tensors) == 3
  )
  assert advise(other) is None


def test_what_was_not_measured_is_mentioned():
  complete, incomplete = (
    record(1, {"a": {0: 1}}),
    record(2, {"a": {0: 1}}, complete=False),
  )
  assert "was not measured" not in advise(complete).text
  assert (
    "What functions and loops compute was not measured"
    in advise(incomplete, complete).text
  )


@pytest.mark.parametrize("scale", [0.0, float("inf"), float("nan"), -1.0])
def test_invalid_scales_are_ignored(scale):
  assert advise(record(1, {"a": {0: 1}}, scale), record(2, {"a": {2: 1}}))[:3] == (
    "none",
    0,
    13,
  )


def test_other_scales_are_rounded_to_be_safe():
  tensor = history(record(1, {"a": {-27: 1}}, 1.5, dtype="float32")).tensors["a"]
  assert tensor.bounds[:2] == (4, 42)


def test_advice_considers_every_record():
  early, late = record(1, {"a": {-4: 100}}), record(2, {"a": {-36: 100}})
  assert advise(early)[:3] == ("none", 0, 19)
  assert advise(late)[:3] == ("fixed", 12, 51)
  both = ("fixed", 12, 19)
  assert advise(early, late)[:3] == both
  assert advise(dict(late, step=1), dict(early, step=2))[:3] == both
  large = record(3, {"a": {5: 100}})
  advice = advise(early, late, large)
  assert (
    advice[:3] == ("dynamic", 12, 10)
    and "a needs at least 2**12, and a overflows above 2**10" in advice.text
  )


def test_worst_record_that_no_scale_fits():
  steps = [
    record(step, {"a": {-40: 5}, "b": {exponent: 1}})
    for step, exponent in enumerate([-9, 1, 3, 2])
  ]
  advice = advise(*steps)
  assert (
    advice.kind == "float32"
    and "No scale fits step 2: a needs at least 2**16, and b overflows above 2**12"
    in (advice.text)
  )


def test_no_values_give_no_advice():
  assert range_history.advise(range_history.History()) is None
  assert advise(record(1, {"a": {}})) is None
  assert advise(record(1, {"a": {}, "b": {0: 1}}, zeros=0)).kind == "none"


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_zeros_are_advised_on_alone(dtype):
  zeros = record(1, {"a": {}}, 2.0**5, dtype=dtype)
  advice = range_history.advise_on_zeros(history(zeros))
  assert advice.kind == "unknown"
  assert advice.named == (("a",) if dtype == "float16" else ())
  for other in [record(2, {"a": {0: 1}}), record(2, {"a": {}}, nonfinite=1)]:
    assert range_history.advise_on_zeros(history(zeros, other)) is None
  assert range_history.advise_on_zeros(range_history.History()) is None


def test_restored_run_replaces_later_records():
  runs = [(1, 1), (1, 5), (1, 5), (1, 9), (2, 5), (2, 7), (3, 7), (3, 7)]  # run, step
  read = history(
    *[record(step, {"a": {e: 1}}, run=run) for e, (run, step) in enumerate(runs)]
  )
  assert (
    read.steps == [1, 5, 7, 7]
    and sorted(read.tensors["a"].exponents) == [0, 4, 6, 7]
    and read.run == 3
  )


DAMAGED = [
  "",
  "{}",
  "[]",
  "x",
  '{"run": 1, "step": 1, "tensors": {"a": 1}}',
  "[" * 10**5,
]
DAMAGED += [
  json.dumps(record(1, {"a": exponents}, run=run))
  for exponents, run in [({99999: 1}, 1), ({"x": 1}, 1), ({0: 1}, "x")]
]


@pytest.mark.parametrize("damaged", DAMAGED, ids=range(len(DAMAGED)))
def test_damaged_lines_are_skipped(damaged):
  line = json.dumps(record(1, {"a": {0: 1}}))
  assert range_history.read("\n".join([line, damaged, line[:20], line])).steps == [1, 1]
  with pytest.raises(
    ValueError, match="none of the 2 lines is a record of GradientRangesHook"
  ):
    range_history.read(damaged + "\n" + damaged + "\n")


def test_record_contains_fetched_counts():
  counts = np.zeros([2, 256], np.int32)
  counts[0, [0, 1, 127, 255]] = [7, 2, 5, 1]
  ones = np.ones(2, np.float32)
  measured = mp_compat.GradientRange(
    counts, 5 / 15 * ones, 0 * ones, 0 * ones, 1.5 * ones, ones, -ones, 8 * ones, [0, 0]
  )
  described = gradient_ranges.Measured(
    "", None, scale="known", dtype="float16", is_selected=False, applied="float32"
  )
  report = gradient_ranges.Report({"a": described, "empty": described}, None, True)
  got = ranges_hook.record_of(2, 3, measured, report)
  tensor = dict(
    selected=False,
    dtype="float16",
    applied="float32",
    scale=8.0,
    noise=False,
    zeros=5,
    nonfinite=1,
    largest=1.5,
  )
  tensor["exponents"] = {"-127": 2, "-126": 2, "0": 5}
  assert got == {"run": 2, "step": 3, "complete": True, "tensors": {"a": tensor}}
  assert json.loads(json.dumps(got)) == got
  report.measured["a"] = described._replace(scale=None)
  assert ranges_hook.record_of(2, 3, measured, report)["tensors"]["a"] == dict(
    tensor, scale=None
  )
