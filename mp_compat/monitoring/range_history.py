# SPDX-License-Identifier: Apache-2.0
"""Accumulates the gradient ranges of a run, and derives advice on the loss scale from them."""

import collections
import json
import math
import re
import sys
from typing import Any, Container, Counter, Dict, Iterable, List, NamedTuple, Optional

HIGHEST, LOWEST_NORMAL, LOWEST = 15, -14, -24  # binary exponents of float16: largest, smallest normal, smallest number
BIAS = 127  # of float32: index e of a histogram counts magnitudes in [2**(e - 127), 2**(e - 126))

TOLERATED = 0.01  # the share of a tensor's sum of magnitudes that may be below float16's smallest number
TOLERATED_VARIABLE = 0.1  # the share of the nonzero values of a variable's gradient that may be
MARGIN = 2  # powers of two between the largest value seen and float16's largest, for steps that were not recorded
NARROW = 3  # the smallest number of powers of two between which a fixed scale is advised
CUT_OFF = 3  # the number of powers of two above float16's smallest number in which values indicate that others are lost
LARGEST_SCALE = 126  # the exponent of the largest loss scale


class Advice(NamedTuple):
  """What the recorded gradients say about loss scaling."""

  kind: str  # "none", "fixed", "dynamic"; "float32" if no scale does; "unknown" if the records do not suffice
  low: int  # the smallest scale is 2**low
  high: int  # the largest scale is 2**high
  unfit: List[str]  # tensors that float16 cannot represent together with the others
  text: str  # one sentence with the numbers that the advice rests on


class Tensor:
  """The values of one tensor in all records, divided by the loss scale.

  Attributes:
    exponents: the number of finite nonzero values by binary exponent. Without any, `lowest` has no meaning.
    lowest: the exponent from which on a scale must keep the values: in each record, those below make up at most 1% of
      the sum of magnitudes, and of a variable's gradient also at most 10% of the nonzero values.
    highest: the largest exponent of a finite value, or the smallest of one that overflowed because of the scale.
    overflowed: whether `highest` is of a value that overflowed.
    width: the largest number of powers of two from `lowest` to the largest value in one record.
    cut_off: the exponent of the largest scale at which values may have become zeros, and nothing shows how many.
    complete: the exponent of the largest scale at which that is not so.
    overflows: the number of records with infinite values or NaNs at a scale of 1 or less.
  """

  def __init__(self, is_variable: bool) -> None:
    self.exponents: Counter[int] = collections.Counter()
    self.lowest, self.highest, self.width = sys.maxsize, -sys.maxsize, 0
    self.cut_off = self.complete = -sys.maxsize
    self.overflows, self.overflowed = 0, False
    self._is_variable = is_variable  # whether this is the gradient of a variable
    self._shares: Counter[int] = collections.Counter()  # of the sum of magnitudes, by exponent; the sum over records

  def add(self, exponents: Dict[int, int], zeros: int, nonfinite: int, scale: float) -> None:
    """Adds the values of one step.

    Args:
      exponents: the number of finite nonzero values of the scaled loss's gradient by binary exponent.
      zeros: the number of zeros.
      nonfinite: the number of infinite values and NaNs. With any, the others are not counted: they are what an overflow
        happened to leave.
      scale: the loss scale, a positive number.
    """
    shift, floor, ceiling = round(math.log2(scale)), math.floor(math.log2(scale)), math.ceil(math.log2(scale))
    if nonfinite and floor <= 0:
      self.overflows += 1
    elif nonfinite:
      self._raise_highest(HIGHEST + 1 - floor, True)
    elif exponents:
      largest, lowest = max(exponents), self._lowest_kept(exponents)
      magnitudes = _magnitudes(exponents)
      total = sum(magnitudes.values())
      self._shares.update({exponent - shift: magnitude / total for exponent, magnitude in magnitudes.items()})
      self.exponents.update({exponent - shift: count for exponent, count in exponents.items()})
      self.lowest = min(self.lowest, lowest - ceiling)
      self._raise_highest(largest - floor, False)
      self.width = max(self.width, largest - lowest)
      self._note_scale(shift, min(exponents) >= LOWEST and lowest < LOWEST + CUT_OFF)
    elif zeros:
      self._note_scale(shift, True)

  def _lowest_kept(self, exponents: Dict[int, int]) -> int:
    """Returns the largest exponent below which there are few enough values of one record to lose them."""
    magnitudes = _magnitudes(exponents)

    def share_below(exponent: int, values: Any) -> float:
      return sum(value for own, value in values.items() if own < exponent) / sum(values.values())

    kept = [exponent for exponent in exponents if share_below(exponent, magnitudes) <= TOLERATED]
    if self._is_variable:
      kept = [exponent for exponent in kept if share_below(exponent, exponents) <= TOLERATED_VARIABLE]
    return max(kept)

  def _raise_highest(self, exponent: int, overflowed: bool) -> None:
    if exponent > self.highest:
      self.highest, self.overflowed = exponent, overflowed

  def _note_scale(self, shift: int, is_cut_off: bool) -> None:
    if is_cut_off:
      self.cut_off = max(self.cut_off, shift)
    else:
      self.complete = max(self.complete, shift)

  def lost(self, scale_exponent: int) -> float:
    """Returns the share of the sum of magnitudes that is below 2**-24 at a scale of 2**scale_exponent.

    The share is the mean over the records.
    """
    below = sum(share for exponent, share in self._shares.items() if exponent + scale_exponent < LOWEST)
    return below / sum(self._shares.values()) if self._shares else 0.0


def _magnitudes(exponents: Dict[int, int]) -> Dict[int, float]:
  """Returns the sum of magnitudes at each exponent, up to a common factor."""
  return {exponent: math.ldexp(count, exponent) for exponent, count in exponents.items()}


class History:
  """The ranges of a run.

  Attributes:
    tensors: the tensors by name, from the loss to the inputs.
    steps: the recorded steps.
    scale: the loss scale of the last record; 1 without any.
    conflicts: the number of records in which no scale is large enough for one tensor and small enough for another.
    run: the number of the run that wrote the last record.
  """

  def __init__(self) -> None:
    self.tensors: Dict[str, Tensor] = collections.OrderedDict()
    self.steps: List[int] = []
    self.scale = 1.0
    self.conflicts = self.run = 0

  def add(self, record: Dict[str, Any]) -> None:
    """Adds a record, as `record_of` returns it; ignores tensors whose scale is not a positive number."""
    self.steps.append(record["step"])
    needed, allowed = [], []
    for name, values in record["tensors"].items():
      scale = float(values["scale"])
      if not 0 < scale < math.inf:
        continue
      self.scale = scale
      exponents = {int(exponent): int(count) for exponent, count in values["exponents"].items() if count}
      of_step = Tensor(bool(values["variable"]))
      for tensor in (of_step, self.tensors.setdefault(name, Tensor(bool(values["variable"])))):
        tensor.add(exponents, int(values["zeros"]), int(values["nonfinite"]), scale)
      if of_step.exponents and of_step.width <= HIGHEST - LOWEST:
        needed.append(LOWEST - of_step.lowest)
        allowed.append(HIGHEST - of_step.highest)
    self.conflicts += bool(needed) and max(needed) > min(allowed)


def record_of(run: int, step: int, ranges: Dict[str, Any], variables: Container[str]) -> Dict[str, Any]:
  """Returns a step's fetched `GradientRange`s as a dictionary for JSON; leaves out tensors that were not computed.

  Args:
    run: the number of the run.
    step: the step.
    ranges: the ranges by name.
    variables: the names of those that are gradients of variables.
  """
  tensors = collections.OrderedDict()
  for name, values in ranges.items():
    counts = [int(count) for count in values.exponents]
    total = sum(counts)
    if not total:
      continue  # empty, or in a branch that was not executed
    zeros = int(round(float(values.zeros) * total))
    counts[0] -= zeros
    tensors[name] = {
      "variable": name in variables,
      "scale": float(values.scale),
      "zeros": zeros,
      "nonfinite": counts[255],
      "largest": float(values.largest),
      "exponents": {str(index - BIAS): count for index, count in enumerate(counts[:255]) if count},
    }
  return {"run": run, "step": step, "tensors": tensors}


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
      History().add(record)
      run, step = int(record["run"]), int(record["step"])
    except (ArithmeticError, AttributeError, KeyError, RecursionError, TypeError, ValueError):
      damaged += 1
      continue
    if records and records[-1]["run"] != run:
      records = [earlier for earlier in records if earlier["step"] < step]
    records.append(record)
  if damaged and not records:
    raise ValueError("none of the {} lines is a record of GradientRangesHook".format(damaged))
  history = History()
  for record in records:
    history.add(record)
  history.run = records[-1]["run"] if records else 0
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
  """
  seen = {name: tensor for name, tensor in history.tensors.items() if tensor.exponents}
  overflows = max((tensor.overflows for tensor in history.tensors.values()), default=0)
  if not seen and not overflows:
    return None
  wide = [name for name, tensor in seen.items() if tensor.width > HIGHEST - LOWEST]
  large = [name for name, tensor in seen.items() if tensor.highest > HIGHEST and name not in wide]
  advice = _advise_scale(history, wide + large)
  if 2 * overflows >= len(history.steps):
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
  if overflows:
    sentences.append(
      "in {} of {} records, gradients are not finite at a scale of 1: either the loss is not finite itself, or it is "
      "too large for float16 and should be, for example, a mean instead of a sum".format(overflows, len(history.steps))
    )
  return advice._replace(unfit=unfit, text="; ".join(sentences))


def _advise_scale(history: History, unfit: List[str]) -> Advice:
  """Returns advice for the tensors that fit into float16."""
  tensors = {name: tensor for name, tensor in history.tensors.items() if name not in unfit}
  seen = {name: tensor for name, tensor in tensors.items() if tensor.exponents}
  if not seen:
    return Advice("float32", 0, 0, [], "")
  smallest = min(seen, key=lambda name: seen[name].lowest)
  largest = max(tensors, key=lambda name: tensors[name].highest)
  needed, allowed = LOWEST - tensors[smallest].lowest, HIGHEST - MARGIN - tensors[largest].highest
  low, high = min(max(needed, 0), LARGEST_SCALE), min(max(allowed, 0), LARGEST_SCALE)
  cut_off = [name for name, tensor in tensors.items() if tensor.cut_off >= max(tensor.complete, 0)]
  recorded = max((tensors[name].cut_off for name in cut_off), default=0)
  limit = "the largest value, of {}, is below 2**{} without a scale".format(largest, tensors[largest].highest + 1)
  if tensors[largest].overflowed:
    limit = "{} overflowed at 2**{}".format(largest, HIGHEST + 1 - tensors[largest].highest)
  if cut_off and recorded < high:
    kind = "unknown"
    text = (
      "record with a larger loss scale, such as 2**{high}: at 2**{recorded}, the gradients of {cut_off} are at the "
      "lower end of float16's range, or zero, and smaller ones may have become zeros"
    )
  elif needed <= 0:
    kind = "none"
    text = "no loss scaling is needed: float16 keeps 99% of the magnitude of each tensor, and {limit}"
  elif high - low >= NARROW:
    kind = "fixed"
    text = (
      "a fixed loss scale between 2**{low} and 2**{high} would do: below it, float16 loses too much of {smallest}; "
      "above it, an overflow is close, because {limit}"
    )
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
  text = text.format(low=low, high=high, smallest=smallest, limit=limit, recorded=recorded, cut_off=_join(cut_off))
  return Advice(kind, low, high, [smallest] if kind == "float32" else [], text)


def _join(names: List[str]) -> str:
  return ", ".join(names[:5]) + (" and {} more".format(len(names) - 5) if len(names) > 5 else "")
