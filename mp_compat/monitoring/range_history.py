# SPDX-License-Identifier: Apache-2.0
"""Accumulates the gradient ranges of a run, and derives from them which loss scales
fit.
"""

import collections
import json
import math
from typing import Any, Counter, Dict, Iterable, List, NamedTuple, Optional, Tuple

from mp_compat._tensorflow import tf

FILE_NAME = "gradient_ranges.jsonl"
# a line of the file, as the docstring of GradientRangesHook describes it, or a tensor
# in it
Record = Dict[str, Any]
# of float32: index e of a histogram counts magnitudes in [2**(e - 127), 2**(e - 126))
BIAS = 127

# the share of a tensor's sum of magnitudes that may be below the smallest number; each
# magnitude is rounded down to a power of 2, so that the real share is up to twice this
TOLERATED = 0.01
# powers of two between the advised scale and the largest one, for steps that were not
# recorded
MARGIN = 2
# the number of powers of two above float16's smallest number in which values indicate
# that others are lost
CUT_OFF = 3
# the number of tensors that the advice names where it is for several
MOST_NAMED = 5
LARGEST_SCALE = 126  # the exponent of the largest loss scale
# the share of a tensor's values that may vanish at a scale of 1, if none is needed
VANISHING = 2.0**-10
# the exponent of the smallest scale at which zeros of float16 tensors do not count as
# values that vanished: others show that they vanish at 1
SHOWN = 4


class Format(NamedTuple):
  """The range of a number format, as binary exponents.

  Attributes:
    name: The name of its dtype.
    lowest: The exponent of the smallest number, a subnormal one.
    highest: The exponent of the largest number.
  """

  name: str
  lowest: int
  highest: int


FLOAT16 = Format("float16", lowest=-24, highest=15)
BFLOAT16 = Format("bfloat16", lowest=-133, highest=127)


class Bounds(NamedTuple):
  """The loss scales that fit: from 2**low to 2**high, at least 1; none if `low` is
  above `high`.

  Attributes:
    low: Below 2**low, more than 1% of the sum of magnitudes of the tensor `smallest`,
      each rounded down to a power of 2, is below the smallest number.
    high: Above 2**high, the tensor `largest` is not finite.
    smallest: The name of the tensor that needs the largest scale; "" for none.
    largest: The name of the tensor that needs the smallest scale.
    step: The step of the record; that of `low` if they are of several.
  """

  low: int
  high: int
  smallest: str
  largest: str
  step: int


class Advice(NamedTuple):
  """What the recorded gradients say about loss scaling.

  Attributes:
    kind: "none", "fixed", "dynamic"; "float32" if no scale fits; "unknown" if the
      records do not suffice.
    low: From 2**low to 2**high, all records are finite, and at most 2% of each tensor's
      magnitude is below the smallest number.
    high: See `low`; if `low` is above `high`, no scale does so.
    text: What to do; the range; what else is to be considered.
    named: The names of the tensors in `text`, and of those that give `low` and `high`.
  """

  kind: str
  low: int
  high: int
  text: str
  named: Tuple[str, ...]


class _Choice(NamedTuple):
  """What to do about the loss scale: fields of `Advice`.

  Attributes:
    kind: See `Advice`.
    text: What to do, and why: two sentences.
    named: The names in `text`.
  """

  kind: str
  text: str
  named: Tuple[str, ...]


class Tensor:
  """One tensor in all records. Its values count where all of them are finite, divided
  by the loss scale.

  Attributes:
    is_selected: Whether the advice is for the tensor.
    is_recorded: Whether all of its values were finite in any record.
    format: The number format that is to represent its values: bfloat16 where that is
      its dtype.
    is_lost_unscaled: Whether the values vanish when they are rounded to float16 without
      a loss scale, as the gradient of a float16 variable is before it is applied.
    may_vanish: Whether some values vanish at a scale of 1, or may do so.
    exponents: The number of nonzero values by binary exponent, without a scale.
    bounds: The scales that fit all records; None without nonzero values.
  """

  def __init__(self) -> None:
    self.is_selected = False
    self.is_recorded = False
    self.format = FLOAT16
    self.is_lost_unscaled = False
    self.may_vanish = False
    self.exponents: Counter[int] = collections.Counter()
    self.bounds: Optional[Bounds] = None
    # The exponents of the largest scales at which float16 values were at the lower end
    # of its range, at which all of them were zeros, and at which neither was so; -1 if
    # there is none that is at least 1.
    self._cut_off = -1
    self._zero = -1
    self._complete = -1

  def add(self, name: str, values: Record, scale: float, step: int) -> Optional[Bounds]:
    """Adds the values of one step.

        if values are not finite: they do not count
        note whether values may vanish at a scale of 1
        note at which scale all are zeros, or the smallest are cut off
        exponents += exponents of the values divided by `scale`
        bounds = those that fit these values, too

    Args:
      name: the name of the tensor.
      values: the tensor in a record.
      scale: the loss scale of the values, positive and finite.
      step: the step of the record.

    Returns:
      The scales that fit the values; None if they are not finite, or all zeros.
    """
    exponents = _counts(values["exponents"])
    exact_shift = math.log2(scale)
    shift = round(exact_shift)
    self.is_selected = bool(values["selected"])
    self.format = BFLOAT16 if values["dtype"] == "bfloat16" else FLOAT16
    if int(values["nonfinite"]):
      return None  # What is finite is what an overflow happened to leave.
    self.is_recorded = True
    is_float16 = values["dtype"] == "float16"
    zeros = int(values["zeros"]) if is_float16 else 0
    is_noise = bool(values["noise"])  # then no scale is too small
    if not is_noise:
      self._note_vanishing(exponents, zeros, shift)
    if not exponents:
      return None
    # the exponent of the smallest values that must not vanish
    kept = math.inf if is_noise else _lowest_kept(exponents)
    is_cut_off = is_float16 and _is_cut_off(exponents, kept)
    if is_cut_off:
      self._cut_off = max(self._cut_off, shift)
    else:
      self._complete = max(self._complete, shift)
    unscaled = {exponent - shift: count for exponent, count in exponents.items()}
    self.exponents.update(unscaled)
    low, high = self._fitting_scales(kept, max(exponents), exact_shift)
    # Old files do not say in which dtype a gradient is applied.
    if low > 0 and values.get("applied") == "float16":
      self.is_lost_unscaled = True
    found = Bounds(low, high, smallest=name, largest=name, step=step)
    self.bounds = _intersection([self.bounds, found])
    return found

  def _fitting_scales(
    self, lowest: float, highest: int, exact_shift: float
  ) -> Tuple[int, int]:
    """Returns the exponents of the smallest and the largest scale that fit values.

    Args:
      lowest: the exponent of the smallest values to keep; inf to keep none.
      highest: the exponent of the largest values.
      exact_shift: the binary logarithm of the scale that these values have.
    """
    low = self.format.lowest - lowest + math.ceil(exact_shift)
    low = int(min(max(low, 0), LARGEST_SCALE))
    high = self.format.highest - highest + math.floor(exact_shift)
    return low, min(high, LARGEST_SCALE)

  def _note_vanishing(self, exponents: Dict[int, int], zeros: int, shift: int) -> None:
    """Notes whether values at a scale of 2**shift may vanish at a scale of 1, and
    whether all of them are zeros.
    """
    if zeros and not exponents:
      self._zero = max(self._zero, shift)
    smallest = self.format.lowest + shift
    vanishing = sum(n for exponent, n in exponents.items() if exponent < smallest)
    if shift < SHOWN:
      vanishing += zeros
    number_of_values = sum(exponents.values()) + zeros
    if vanishing > VANISHING * number_of_values:
      self.may_vanish = True

  def doubtful_scale(self) -> Optional[int]:
    """Returns the exponent of the largest scale at which values may have become zeros;
    None if there is none, or if a record at a larger scale is complete.

        with values in any record    the largest scale at which values were cut off
        otherwise                    the largest scale at which all were zeros

    A complete record at the same scale does not show what another one has lost. Zeros
    are right where there are other values in any record, as after a layer of zeros was
    trained.
    """
    doubtful = self._cut_off if self.exponents else self._zero
    return doubtful if doubtful >= max(self._complete, 0) else None


def _counts(exponents: Record) -> Dict[int, int]:
  """Returns the counts by exponent; JSON has exponents as strings."""
  return {int(exponent): int(count) for exponent, count in exponents.items()}


def _is_cut_off(exponents: Dict[int, int], kept: float) -> bool:
  """Returns whether values are at the lower end of float16's range, so that smaller
  ones may have become zeros; `kept` is the lowest exponent that matters.
  """
  return min(exponents) >= FLOAT16.lowest and kept < FLOAT16.lowest + CUT_OFF


def _lowest_kept(exponents: Dict[int, int]) -> int:
  """Returns the largest exponent below which there is at most 1% of the sum of
  magnitudes.
  """
  magnitudes = {
    exponent: math.ldexp(count, exponent) for exponent, count in exponents.items()
  }
  tolerated = TOLERATED * sum(magnitudes.values())
  found = []
  for lowest in exponents:
    below = sum(value for other, value in magnitudes.items() if other < lowest)
    if below <= tolerated:
      found.append(lowest)
  return max(found)


def _intersection(bounds: Iterable[Optional[Bounds]]) -> Optional[Bounds]:
  """Returns the scales that fit all of the given bounds; None without any."""
  known = [each for each in bounds if each is not None]
  if not known:
    return None
  lower = max(known, key=lambda each: each.low)
  upper = min(known, key=lambda each: each.high)
  return Bounds(lower.low, upper.high, lower.smallest, upper.largest, lower.step)


class History:
  """The ranges of a run.

  Attributes:
    tensors: By name, from the loss to the inputs.
    steps: The steps of the records, without those between them.
    scale: The loss scale of the last record; 1 without any.
    run: The number of the run that wrote the last record.
    is_complete: Whether all of the backward pass was measured.
    overflows: Of each record that was not finite, the scales below its scale.
    below_skipped: The scales below the smallest one at which a step between the records
      overflowed; None if none did.
    bounds: The scales that fit all selected tensors of all finite records; None without
      nonzero values.
    conflict: Of the records that no scale fits, the one whose bounds are farthest
      apart; None if there is none.
  """

  def __init__(self) -> None:
    self.tensors: Dict[str, Tensor] = collections.OrderedDict()
    self.steps: List[int] = []
    self.scale = 1.0
    self.run = 0
    self.is_complete = True
    self.overflows: List[Bounds] = []
    self.below_skipped: Optional[Bounds] = None
    self.bounds: Optional[Bounds] = None
    self.conflict: Optional[Bounds] = None

  @property
  def format(self) -> Format:
    """The number format that the advice is for: bfloat16 if all selected tensors are in
    it, otherwise float16.
    """
    formats = {tensor.format for _, tensor in self.selected()}
    return BFLOAT16 if formats == {BFLOAT16} else FLOAT16

  def selected(self) -> List[Tuple[str, Tensor]]:
    """Returns the tensors that the advice is for, with their names."""
    return [
      (name, tensor) for name, tensor in self.tensors.items() if tensor.is_selected
    ]

  def add(self, record: Record) -> None:
    """Adds a record, as GradientRangesHook makes it.

    Ignores tensors whose scale is neither None nor a positive number. Values without a
    scale count as if they were at a scale of 1. A record without tensors is of a step
    between the others, with the scale at which it overflowed.
    """
    self.run = record["run"]
    if not record["tensors"]:
      self._add_skipped(record["step"], float(record["overflow_scale"]))
      return
    self.steps.append(record["step"])
    self.is_complete = self.is_complete and bool(record["complete"])
    of_selected: List[Optional[Bounds]] = []
    overflows: List[Bounds] = []
    for name, values in record["tensors"].items():
      is_scaled = values["scale"] is not None
      scale = float(values["scale"]) if is_scaled else 1.0
      if not 0 < scale < math.inf:
        continue
      tensor = self.tensors.setdefault(name, Tensor())
      bounds = tensor.add(name, values, scale, record["step"])
      if values["selected"]:
        of_selected.append(bounds)
      if int(values["nonfinite"]):
        high = _exponent_below(scale) if is_scaled else LARGEST_SCALE
        overflows.append(Bounds(0, high, "", name, record["step"]))
      if is_scaled:
        self.scale = scale
    self.overflows.extend(overflows[:1])  # one for each record
    fitting = _intersection(of_selected)
    if fitting is None:
      return
    self.bounds = _intersection([self.bounds, fitting])
    conflict = self.conflict or Bounds(0, 0, "", "", 0)
    if fitting.low - fitting.high > conflict.low - conflict.high:
      self.conflict = fitting

  def _add_skipped(self, step: int, scale: float) -> None:
    """Adds a step between the records, which overflowed at `scale`."""
    if self.is_smallest_overflow(scale):
      name = "step {}, which overflowed".format(step)
      high = _exponent_below(scale)
      self.below_skipped = Bounds(0, high, "", name, step)

  def is_smallest_overflow(self, scale: float) -> bool:
    """Returns whether a step that overflowed at a scale, a positive number or inf, is
    an upper bound below those that are known.
    """
    if not 0 < scale < math.inf:
      return False
    known = [bounds.high for bounds in self.upper_bounds()]
    return _exponent_below(scale) < min(known, default=LARGEST_SCALE)

  def upper_bounds(self) -> List[Bounds]:
    """Returns the scales below those at which steps overflowed."""
    below_skipped = [] if self.below_skipped is None else [self.below_skipped]
    return self.overflows + below_skipped


def _exponent_below(scale: float) -> int:
  """Returns the exponent of the largest power of two below a scale."""
  return math.ceil(math.log2(scale)) - 1


def read_text(path: str) -> str:
  """Returns the text of a file of records; replaces bytes that are not UTF-8, which a
  damaged file may contain.
  """
  with tf.gfile.GFile(path, "rb") as file:
    return file.read().decode("utf-8", errors="replace")


def read(text: str) -> History:
  """Returns the history in lines of JSON, one for each record.

  A later run may begin at an earlier step, because it restored a checkpoint, or is
  another one: the earlier runs' records from that step on are dropped. Damaged lines
  are skipped; a job that is killed leaves one.

  Raises:
    ValueError: If there are lines, but no record.
  """
  records: List[Record] = []
  lines = text.splitlines()
  for line in lines:
    record = _parse(line)
    if record is None:
      continue
    if records and records[-1]["run"] != record["run"]:
      records = [earlier for earlier in records if earlier["step"] < record["step"]]
    records.append(record)
  if lines and not records:
    raise ValueError(
      "none of the {} lines is a record of GradientRangesHook".format(len(lines))
    )
  history = History()
  for record in records:
    history.add(record)
  return history


def _parse(line: str) -> Optional[Record]:
  """Returns the record in a line of JSON; None if it is damaged."""
  try:
    record: Record = json.loads(line)
    record.update(run=int(record["run"]), step=int(record["step"]))
    History().add(record)  # shows whether all of its fields can be read
  except (
    ArithmeticError,
    AttributeError,
    KeyError,
    RecursionError,
    TypeError,
    ValueError,
  ):
    return None
  return record


def advise(history: History) -> Optional[Advice]:
  """Returns advice on the loss scale; None without any record of nonzero values.

  docs/gradient_ranges.md says how it is derived.

      >>> from mp_compat.monitoring import range_history
      >>> values = {"selected": True, "dtype": "float16", "scale": 1024.0,
      ...           "noise": False, "zeros": 0, "nonfinite": 0,
      ...           "exponents": {"-20": 80, "-15": 20}}
      >>> history = range_history.History()
      >>> history.add(
      ...   {"run": 1, "step": 7, "complete": True, "tensors": {"kernel": values}}
      ... )
      >>> advice = range_history.advise(history)
      >>> print(advice.kind, advice.low, advice.high)
      fixed 6 40
  """
  bounds = _intersection([history.bounds, *history.upper_bounds()])
  if bounds is None:
    return None
  kind, text, names = _choose(history, bounds)
  named = list(names)
  if history.overflows:
    text += _describe_overflows(history)
    named.append(history.overflows[-1].largest)
  if history.below_skipped is not None:
    text += " Between the records, {} at 2**{}; such steps must be skipped.".format(
      history.below_skipped.largest, history.below_skipped.high + 1
    )
  if not history.is_complete:
    text += (
      " What functions and loops compute was not measured, and may need a larger scale."
    )
  # A bound that a step between the records gives is not that of a tensor.
  tensors = tuple(name for name in named if name in history.tensors)
  return Advice(kind, bounds.low, bounds.high, text, tensors)


def advise_on_zeros(history: History) -> Optional[Advice]:
  """Returns advice if all recorded values are zeros; None if others were recorded, or
  none at all.
  """
  selected = history.selected()
  if not selected or history.overflows:
    return None
  if any(tensor.exponents for _, tensor in selected):
    return None
  doubtful = _doubtful_scales(history)
  text = (
    "All gradients are zeros, and none of them in float16, where smaller values "
    "vanish. Does the loss depend on the variables?"
  )
  if doubtful:
    text = (
      "Record with a loss scale above 2**{}. At 2**{}, all gradients are zeros, and in "
      "float16, smaller values vanish: in {}. If they are zeros at every scale, the "
      "loss does not depend on the variables."
    )
    largest = max(doubtful.values())
    text = text.format(largest, largest, enumeration(list(doubtful), MOST_NAMED))
  named = tuple(doubtful)[:MOST_NAMED]
  return Advice("unknown", 0, LARGEST_SCALE, text, named)


def _describe_overflows(history: History) -> str:
  """Returns a sentence on the records that were not finite."""
  steps = list(dict.fromkeys(str(overflow.step) for overflow in history.overflows))
  text = (
    " Not finite: {} of {} records (step{} {}), first in {}; such steps must be "
    "skipped."
  )
  return text.format(
    len(history.overflows),
    len(history.steps),
    "s" if len(steps) > 1 else "",
    enumeration(steps, 5),
    history.overflows[-1].largest,
  )


def _choose(history: History, bounds: Bounds) -> _Choice:
  """Returns what to do about the loss scale, and why.

      no record was finite            -> "unknown", or "float32" if no scale is left
      values are lost without a scale -> "float32"
      no scale fits one of the steps  -> "float32"
      smaller values may be lost      -> "unknown": record with a larger scale
      otherwise                       -> "none", "fixed" or "dynamic"

  Args:
    history: the records.
    bounds: the scales that fit all of them, steps that overflowed included.
  """
  if history.bounds is None or len(history.overflows) == len(history.steps):
    return _without_finite_records(bounds)
  lost = [name for name, tensor in history.selected() if tensor.is_lost_unscaled]
  if lost:
    text = (
      "Store {} in float32, with "
      "custom_getter=mp_compat.float32_variable_storage_getter. At any scale, more "
      "than 0.5% of the magnitude of these gradients is below float16's smallest "
      "number, because they are rounded to float16 after they are divided by the scale."
    )
    names = enumeration(lost, MOST_NAMED)
    return _Choice("float32", text.format(names), tuple(lost[:MOST_NAMED]))
  if history.conflict:
    return _without_fitting_scale(history.conflict)
  doubtful = _doubtful_scales(history)
  largest_doubtful = max(doubtful.values(), default=None)
  wanted = bounds.high - MARGIN
  if largest_doubtful is not None and largest_doubtful < wanted:
    text = (
      "Record with a loss scale of 2**{}. At 2**{}, values at the lower end of "
      "float16's range, or only zeros, indicate that smaller ones were lost in {}."
    )
    names = enumeration(list(doubtful), MOST_NAMED)
    text = text.format(wanted, largest_doubtful, names)
    return _Choice("unknown", text, tuple(doubtful)[:MOST_NAMED])
  return _choose_scale(history, bounds)


def _without_finite_records(bounds: Bounds) -> _Choice:
  """Returns what to do if no record was finite."""
  if bounds.high >= 0:
    action = "Record more steps, or with a smaller loss scale."
    return _Choice("unknown", action + " No record was finite.", ())
  action = "Make the loss smaller, for example a mean instead of a sum."
  return _Choice("float32", action + " No record was finite at 2**0.", ())


def _without_fitting_scale(conflict: Bounds) -> _Choice:
  """Returns what to do about a step that no scale fits."""
  action = "Compute {smallest} in float32, or with a larger weight of its loss."
  if conflict.high < 0:
    action = (
      "Compute {largest} in float32, or make the loss smaller, for example a mean "
      "instead of a sum."
    )
  facts = (
    " No scale fits step {step}: {smallest} needs at least 2**{low}, and {largest} "
    "overflows above 2**{high}."
  )
  text = (action + facts).format(**conflict._asdict())
  return _Choice("float32", text, (conflict.smallest, conflict.largest))


def _choose_scale(history: History, bounds: Bounds) -> _Choice:
  """Returns what to do if a scale fits each record.

      nothing needs a scale, and there is room above 1 -> "none"
      there is room between all bounds                 -> "fixed", with a margin
      otherwise                                        -> "dynamic"

  A step that overflowed is an upper bound, too.
  """
  low, high, smallest, largest, _ = bounds
  has_overflowed = bool(history.upper_bounds())
  kept = (
    "leave at most 2% of each tensor's magnitude below {}'s smallest number, and "
    "overflow in no {}record"
  ).format(history.format.name, "finite " if has_overflowed else "")
  vanishing = [name for name, tensor in history.selected() if tensor.may_vanish]
  is_needed = low > 0 or has_overflowed or bool(vanishing)
  if not is_needed and high >= MARGIN:
    text = "No loss scaling is needed. Scales up to 2**{} {}.".format(high, kept)
    return _Choice("none", text, ())
  fits = " From {} to 2**{} (for {}), scales {}; larger ones lose less{}.".format(
    "2**{} (for {})".format(low, smallest) if low > 0 else "1",
    high,
    largest,
    kept,
    _reason_for_scale(low, vanishing),
  )
  if high - low >= MARGIN and high > MARGIN:
    action = "Use a fixed loss scale of 2**{}.".format(high - MARGIN)
    return _Choice("fixed", action + fits, (smallest, largest))
  if low > high:
    fits = (
      " No scale fits all records: {} needs at least 2**{}, and {} overflows above "
      "2**{}.".format(smallest, low, largest, high)
    )
  # Steps that overflowed do not count: they lower a dynamic scale.
  of_records = bounds if history.bounds is None else history.bounds
  start = max(of_records.high, 0)
  action = "Use a dynamic loss scale that starts at 2**{}.".format(start)
  return _Choice("dynamic", action + fits, (smallest, largest))


def _reason_for_scale(low: int, vanishing: List[str]) -> str:
  """Returns why a scale is needed where 2**low is 1; "" for another reason."""
  if low > 0 or not vanishing:
    return ""
  return ": at 1, more than one in 1024 values of {} may vanish".format(
    enumeration(vanishing, MOST_NAMED)
  )


def _doubtful_scales(history: History) -> Dict[str, int]:
  """Returns the exponents of scales at which smaller values may have been lost, by
  tensor.
  """
  scales = {name: tensor.doubtful_scale() for name, tensor in history.selected()}
  return {name: scale for name, scale in scales.items() if scale is not None}


def enumeration(names: List[str], most: int) -> str:
  """Returns the first `most` names, with commas, and the number of the others."""
  text = ", ".join(names[:most])
  if len(names) > most:
    text += " and {} more".format(len(names) - most)
  return text
