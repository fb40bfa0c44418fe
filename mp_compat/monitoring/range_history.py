# SPDX-License-Identifier: Apache-2.0
"""Accumulates the gradient ranges of a run, and derives advice on the loss scale from them."""

import collections
import json
import math
import re
import sys
from typing import Any, Counter, Dict, Iterable, List, NamedTuple, Optional, Tuple

HIGHEST, LOWEST_NORMAL, LOWEST = 15, -14, -24  # binary exponents of float16: largest, smallest normal, smallest number
BIAS = 127  # of float32: index e of a histogram counts magnitudes in [2**(e - 127), 2**(e - 126))

TOLERATED = 0.01  # the share of a tensor's sum of magnitudes that may be below float16's smallest number
TOLERATED_VARIABLE = 0.1  # the share of the nonzero values of a variable's gradient that may be
MARGIN = 2  # powers of two between the largest value seen and float16's largest, for steps that were not recorded
NARROW = 3  # the smallest number of powers of two between which a fixed scale is advised
CUT_OFF = 3  # the number of powers of two above float16's smallest number in which values indicate that others are lost
FAR = 10  # an overflow more than so many powers of two above all finite values has another reason than the loss scale
MENTIONED = 0.01  # the share of a tensor's nonzero values that become zeros, above which the advice says so
LARGEST_SCALE = 126  # the exponent of the largest loss scale


class Advice(NamedTuple):
  """What the recorded gradients say about loss scaling."""

  kind: str  # "none", "fixed", "dynamic"; "float32" if no scale does; "unknown" if the records do not suffice
  low: int  # the smallest scale is 2**low
  high: int  # the largest scale is 2**high
  unfit: List[str]  # tensors that float16 cannot represent together with the others
  text: str  # one sentence with the numbers that the advice rests on


class Description(NamedTuple):
  """What a record says of a tensor besides its values."""

  is_variable: bool  # whether it is the gradient of a variable
  has_scale: bool  # whether its loss scale is known; it is not if the tensor was measured as it was passed
  dtype: str  # the narrowest floating dtype that its values have had
  is_selected: bool  # whether the hook's `dtypes` select it for the advice


class Tensor:
  """The finite values of one tensor in all records, divided by the loss scale.

  Attributes:
    is_selected: whether the hook's `dtypes` select the tensor for the advice.
    is_recorded: whether they were all finite in any record.
    exponents: the number of finite nonzero values by binary exponent. Without any, `lowest` has no meaning.
    lowest: the exponent from which on a scale must keep the values: in each record, those below make up at most 1% of
      the sum of magnitudes, and of a variable's gradient also at most 10% of the nonzero values.
    highest: the largest exponent.
    width: the largest number of powers of two from `lowest` to the largest value in one record.
  """

  def __init__(self) -> None:
    self.is_selected = self.is_recorded = False
    self.exponents: Counter[int] = collections.Counter()
    self.lowest, self.highest, self.width = sys.maxsize, -sys.maxsize, 0
    self._shares: Counter[int] = collections.Counter()  # of the sum of magnitudes, by exponent; the sum over records
    # Exponents of the largest scales at which values were at the lower end of float16's range, at which all were zeros,
    # and at which neither was so.
    self._cut_off = self._all_zero = self._complete = -sys.maxsize
    self._zeros_were_right = False  # whether other values followed them without a larger scale

  def add(self, values: Dict[str, Any], scale: float) -> None:
    """Adds the values of one step; those beside infinite values and NaNs are only what an overflow happened to leave.

    Args:
      values: the tensor in a record.
      scale: the loss scale, a positive number.
    """
    exponents = {int(exponent): int(count) for exponent, count in values["exponents"].items() if count}
    shift, floor, ceiling = round(math.log2(scale)), math.floor(math.log2(scale)), math.ceil(math.log2(scale))
    is_float16 = values["dtype"] == "float16"
    self.is_selected = bool(values["selected"])
    if int(values["nonfinite"]):
      return
    self.is_recorded = True
    if exponents:
      largest, lowest = max(exponents), _lowest_kept(exponents, bool(values["variable"]))
      magnitudes = _magnitudes(exponents)
      total = sum(magnitudes.values())
      self._shares.update({exponent - shift: magnitude / total for exponent, magnitude in magnitudes.items()})
      self.exponents.update({exponent - shift: count for exponent, count in exponents.items()})
      self.lowest, self.highest = min(self.lowest, lowest - ceiling), max(self.highest, largest - floor)
      self.width = max(self.width, largest - lowest)
      if is_float16 and min(exponents) >= LOWEST and lowest < LOWEST + CUT_OFF:
        self._cut_off = max(self._cut_off, shift)
      else:
        self._complete = max(self._complete, shift)
        self._zeros_were_right = self._zeros_were_right or self._all_zero >= shift
    elif is_float16 and int(values["zeros"]):
      self._all_zero = max(self._all_zero, shift)

  def doubtful_scale(self) -> Optional[int]:
    """Returns the exponent of the largest scale at which values may have become zeros; None if others show them."""
    doubtful = self._cut_off if self._zeros_were_right else max(self._cut_off, self._all_zero)
    return doubtful if doubtful >= max(self._complete, 0) else None

  def lost(self, scale_exponent: int) -> float:
    """Returns the share of the sum of magnitudes that is below 2**-24 at a scale of 2**scale_exponent.

    The share is the mean over the records.
    """
    return _share_below(LOWEST - scale_exponent, self._shares)

  def vanishing(self, scale_exponent: int) -> float:
    """Returns the share of the nonzero values that are below 2**-24 at a scale of 2**scale_exponent."""
    return _share_below(LOWEST - scale_exponent, self.exponents)


def _lowest_kept(exponents: Dict[int, int], is_variable: bool) -> int:
  """Returns the largest exponent below which there are few enough values of one record to lose them."""
  magnitudes = _magnitudes(exponents)
  kept = [exponent for exponent in exponents if _share_below(exponent, magnitudes) <= TOLERATED]
  if is_variable:
    kept = [exponent for exponent in kept if _share_below(exponent, exponents) <= TOLERATED_VARIABLE]
  return max(kept)


def _share_below(exponent: int, values: Any) -> float:
  """Returns the share of `values`, numbers by exponent, below `exponent`; 0 without values."""
  return sum(value for own, value in values.items() if own < exponent) / (sum(values.values()) or 1)


def _magnitudes(exponents: Dict[int, int]) -> Dict[int, float]:
  """Returns the sum of magnitudes at each exponent, up to a common factor."""
  return {exponent: math.ldexp(count, exponent) for exponent, count in exponents.items()}


class History:
  """The ranges of a run.

  Attributes:
    tensors: the tensors by name, from the loss to the inputs.
    steps: the recorded steps.
    scale: the loss scale of the last record; 1 without any.
    overflows: the number of records with infinite values or NaNs, by the first tensor with any from the loss, and the
      exponent of the scale, rounded down. Tensors whose scale is unknown do not count.
    conflicts: the number of records in which no scale is large enough for one tensor and small enough for another.
    is_complete: whether all of the backward pass was measured.
    run: the number of the run that wrote the last record; 0 without any.
  """

  def __init__(self) -> None:
    self.tensors: Dict[str, Tensor] = collections.OrderedDict()
    self.steps: List[int] = []
    self.scale = 1.0
    self.overflows: Counter[Tuple[str, int]] = collections.Counter()
    self.conflicts = self.run = 0
    self.is_complete = True

  def add(self, record: Dict[str, Any]) -> None:
    """Adds a record, as `record_of` returns it; ignores tensors whose scale is neither None nor a positive number.

    Values without a scale count as if they were at a scale of 1.
    """
    self.run = record["run"]
    self.steps.append(record["step"])
    self.is_complete = self.is_complete and bool(record["complete"])
    of_step: Dict[str, Tensor] = collections.OrderedDict()
    overflows = []
    for name, values in record["tensors"].items():
      scale = 1.0 if values["scale"] is None else float(values["scale"])
      if not 0 < scale < math.inf:
        continue
      for tensors in (of_step, self.tensors):
        tensors.setdefault(name, Tensor()).add(values, scale)
      if values["scale"] is not None:
        self.scale = scale
        if int(values["nonfinite"]):
          overflows.append((name, math.floor(math.log2(scale))))
    self.overflows.update(overflows[:1])
    fitting = [
      tensor for tensor in _selected(of_step).values() if tensor.exponents and tensor.width <= HIGHEST - LOWEST
    ]
    if fitting:
      needed = LOWEST - min(tensor.lowest for tensor in fitting)
      self.conflicts += needed > HIGHEST - max(tensor.highest for tensor in fitting)


def _selected(tensors: Dict[str, Tensor]) -> Dict[str, Tensor]:
  """Returns the selected tensors; all tensors if none is selected, as in a program without float16."""
  return {name: tensor for name, tensor in tensors.items() if tensor.is_selected} or tensors


def record_of(
  run: int, step: int, ranges: Dict[str, Any], descriptions: Dict[str, Description], is_complete: bool
) -> Dict[str, Any]:
  """Returns a step's fetched `GradientRange`s as a dictionary for JSON; leaves out tensors that were not computed.

  Args:
    run: the number of the run.
    step: the step.
    ranges: the ranges by name.
    descriptions: what is known of the tensors, by the same names.
    is_complete: whether all of the backward pass is measured.
  """
  tensors = collections.OrderedDict()
  for name, values in ranges.items():
    counts = [int(count) for count in values.exponents]
    total = sum(counts)
    if not total:
      continue  # empty, or in a branch that was not executed
    description = descriptions[name]
    zeros = int(round(float(values.zeros) * total))
    counts[0] -= zeros
    tensors[name] = {
      "variable": description.is_variable,
      "selected": description.is_selected,
      "dtype": description.dtype,
      "scale": float(values.scale) if description.has_scale else None,
      "zeros": zeros,
      "nonfinite": counts[255],
      "largest": float(values.largest),
      "exponents": {str(index - BIAS): count for index, count in enumerate(counts[:255]) if count},
    }
  return {"run": run, "step": step, "complete": is_complete, "tensors": tensors}


def read(lines: Iterable[str]) -> History:
  """Returns the history in lines of JSON, one for each record.

  A later run may begin at an earlier step, because it restored a checkpoint, or is another one: the earlier runs'
  records from that step on are dropped. Damaged lines are skipped; a job that is killed leaves one.

  Raises:
    ValueError: If there are lines, but none is a record.
  """
  records: List[Dict[str, Any]] = []
  damaged = 0
  for line in lines:
    try:
      record = json.loads(line)
      record.update(run=int(record["run"]), step=int(record["step"]))
      History().add(record)
    except (ArithmeticError, AttributeError, KeyError, RecursionError, TypeError, ValueError):
      damaged += 1
      continue
    if records and records[-1]["run"] != record["run"]:
      records = [earlier for earlier in records if earlier["step"] < record["step"]]
    records.append(record)
  if damaged and not records:
    raise ValueError("none of the {} lines is a record of GradientRangesHook".format(damaged))
  history = History()
  for record in records:
    history.add(record)
  return history


def layer_of(name: str) -> str:
  """Returns the layer of a recorded tensor: the name scope of the variable, or of the op in the forward pass.

  For example, `dense` for `dense/kernel:0` and for `gradients/dense/MatMul_grad/MatMul`; "" if the name has none.
  """
  while re.match(r"(.*?/)?gradients(_\d+)?/", name):
    name = re.sub(r"^(.*?/)?gradients(_\d+)?/", "", name)
    name = re.split(r"_grad(?:_\d+)?/", name, maxsplit=1)[0]
  return name.rpartition("/")[0]


def advise(history: History) -> Optional[Advice]:
  """Returns advice on the loss scale; None without any record of nonzero values.

  The smallest scale keeps, in every record, all but 1% of the sum of magnitudes of each tensor at or above 2**-24,
  float16's smallest number. Values that make up less hardly change the sums over batches, pixels or words of which the
  gradient of a layer consists. Of the gradient of a variable, each value of which changes another weight, it also keeps
  90% of the values. The largest scale keeps all values seen below 2**14, a quarter of float16's largest number, because
  steps that were not recorded may have larger values. Tensors that float16 cannot represent are left out.

  A value that was not finite counts as 2**16 at its scale, if the scale may be the reason: it was larger than 1, and
  the value is not too far above the finite ones.
  """
  seen = {name: tensor for name, tensor in _selected(history.tensors).items() if tensor.exponents}
  overflowed, others = _overflows(history)
  if not seen and not others:
    return None
  wide = [name for name, tensor in seen.items() if tensor.width > HIGHEST - LOWEST]
  large = [name for name, tensor in seen.items() if tensor.highest > HIGHEST and name not in wide]
  advice = _advise_scale(history, wide + large, overflowed, others > 0)
  if 2 * others >= len(history.steps):
    advice = Advice("float32", 0, 0, [], "")
  unfit, sentences = advice.unfit + wide + large, [advice.text] if advice.text else []
  if wide:
    sentences.append(
      "float16 cannot represent the gradients of {} at any scale, because they span more than 40 powers of two: keep "
      "these layers in float32".format(_join(wide))
    )
  if large:
    sentences.append(
      "the gradients of {} exceed 65504 without a scale: make the loss smaller, for example a mean instead of a sum, "
      "or keep these layers in float32".format(_join(large))
    )
  if others:
    sentences.append(
      "in {} of {} records, gradients are not finite for another reason than the loss scale: either the loss is not "
      "finite itself, or it is too large for float16 and should be, for example, a mean instead of a sum".format(
        others, len(history.steps)
      )
    )
  if not history.is_complete:
    sentences.append(
      "a part of the backward pass was not measured, because it is inside of a function or a loop, or only its results "
      "were passed: it may need a larger scale"
    )
  return advice._replace(unfit=unfit, text="; ".join(sentences))


def _overflows(history: History) -> Tuple[Dict[str, int], int]:
  """Returns what is known of the values that were not finite.

  Returns:
    `(overflowed, others)`: by tensor, the smallest possible exponent, without a scale, of a value that overflowed
    because of the scale; and the number of records with values that are not finite for another reason.
  """
  finite = [tensor.highest for tensor in _selected(history.tensors).values() if tensor.exponents]
  highest = max(finite, default=sys.maxsize)
  overflowed: Dict[str, int] = {}
  others = 0
  for (name, scale_exponent), records in history.overflows.items():
    exponent = HIGHEST + 1 - scale_exponent
    if scale_exponent > 0 and (exponent <= highest + FAR or not history.tensors[name].exponents):
      overflowed[name] = max(overflowed.get(name, exponent), exponent)
    else:
      others += records
  return overflowed, others


def _advise_scale(history: History, unfit: List[str], overflowed: Dict[str, int], has_others: bool) -> Advice:
  """Returns advice for the tensors that fit into float16.

  Args:
    history: the records.
    unfit: the names of the tensors that do not fit.
    overflowed: see `_overflows`.
    has_others: whether other steps will not be finite at any scale.
  """
  tensors = {name: tensor for name, tensor in _selected(history.tensors).items() if name not in unfit}
  seen = {name: tensor for name, tensor in tensors.items() if tensor.exponents}
  if not seen:
    return Advice("float32", 0, 0, [], "")
  highest = {name: tensor.highest for name, tensor in seen.items()}
  for name, exponent in overflowed.items():
    if name not in unfit:
      highest[name] = max(highest.get(name, exponent), exponent)
  smallest, largest = min(seen, key=lambda name: seen[name].lowest), max(highest, key=lambda name: highest[name])
  needed, allowed = LOWEST - seen[smallest].lowest, HIGHEST - MARGIN - highest[largest]
  low, high = min(max(needed, 0), LARGEST_SCALE), min(max(allowed, 0), LARGEST_SCALE)
  limit = "the largest value, of {}, is below 2**{} without a scale".format(largest, highest[largest] + 1)
  if highest[largest] > history.tensors[largest].highest:
    limit = "{} overflowed at 2**{}".format(largest, HIGHEST + 1 - highest[largest])
  missing = [name for name, tensor in tensors.items() if not tensor.is_recorded]
  scales = {name: tensor.doubtful_scale() for name, tensor in tensors.items()}
  doubtful = {name: scale for name, scale in scales.items() if scale is not None}
  recorded = max(doubtful.values(), default=0)
  if missing:
    kind = "unknown"
    text = "record more steps, or with a smaller loss scale: the gradients of {missing} were not finite in any record"
  elif doubtful and recorded < high:
    kind = "unknown"
    text = (
      "record with a larger loss scale, such as 2**{high}: at 2**{recorded}, the gradients of {doubtful} are at the "
      "lower end of float16's range, or zero, and smaller ones may have become zeros; where the loss does not depend "
      "on a layer, zeros are right"
    )
  elif needed <= 0 <= allowed and not has_others:
    kind = "none"
    text = "no loss scaling is needed: float16 keeps 99% of the magnitude of each tensor, and {limit}"
  elif high - low >= NARROW and not has_others:
    kind = "fixed"
    text = (
      "a fixed loss scale between 2**{low} and 2**{high} would do: below it, float16 loses too much of {smallest}; "
      "above it, an overflow is close, because {limit}"
    )
  elif needed <= high:
    kind = "dynamic"
    text = "use a dynamic loss scale that starts at 2**{high} and skips steps that are not finite: {limit}"
  elif history.conflicts:
    kind = "float32"
    text = (
      "no loss scale fits: {smallest} needs at least 2**{low}, but {limit}; compute one of the two layers in float32, "
      "or scale its loss, and use a dynamic loss scale for the others"
    )
  else:
    kind = "dynamic"
    text = (
      "use a dynamic loss scale that starts at 2**{high}: {limit}, but in other steps {smallest} needs a scale of "
      "2**{low}"
    )
  worst = max(seen, key=lambda name: seen[name].vanishing(low))
  share = seen[worst].vanishing(low)
  if kind in ("none", "fixed") and share > MENTIONED and low < high:
    text += (
      "; at 2**{low}, {share:.0%} of the nonzero values of {worst} become zeros: if these are of one output of the "
      "model, it does not train; prefer a scale near 2**{high}"
    )
  text = text.format(
    low=low,
    high=high,
    smallest=smallest,
    limit=limit,
    recorded=recorded,
    missing=_join(missing),
    doubtful=_join(list(doubtful)),
    worst=worst,
    share=share,
  )
  return Advice(kind, low, high, [smallest] if kind == "float32" else [], text)


def _join(names: List[str]) -> str:
  return ", ".join(names[:5]) + (" and {} more".format(len(names) - 5) if len(names) > 5 else "")
