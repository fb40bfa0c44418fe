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
MARGIN = 2  # powers of two between the largest value seen and float16's largest, for steps that were not recorded
NARROW = 3  # the smallest number of powers of two between which a fixed scale is advised


class Advice(NamedTuple):
  """What the recorded gradients say about loss scaling."""

  kind: str  # "none", "fixed", "dynamic", or "float32" if float16 cannot represent any tensor
  low: int  # the smallest scale is 2**low
  high: int  # the largest scale is 2**high
  unfit: List[str]  # tensors that float16 cannot represent at any scale of at least 1
  text: str  # one sentence with the numbers that the advice rests on


class Tensor:
  """The values of one tensor in all records, divided by the loss scale.

  Attributes:
    exponents: the number of finite nonzero values by binary exponent. Without any, the others have no meaning.
    lowest: the exponent from which on a scale must keep the values: in each record, those below make up at most 1% of
      the sum of magnitudes.
    highest: the largest exponent, of a value that overflowed at least the one that overflows.
    width: the largest number of powers of two from `lowest` to the largest value in one record.
  """

  def __init__(self) -> None:
    self.exponents: Counter[int] = collections.Counter()
    self.lowest, self.highest, self.width = sys.maxsize, -sys.maxsize, 0
    self._shares: Counter[int] = collections.Counter()  # of the sum of magnitudes, by exponent; the sum over records

  def add(self, exponents: Dict[int, int], nonfinite: int, scale: float) -> None:
    """Adds the values of one step.

    Args:
      exponents: the number of finite nonzero values of the scaled loss's gradient by binary exponent.
      nonfinite: the number of infinite values and NaNs. With any, the others are not counted: they are what an overflow
        happened to leave.
      scale: the loss scale, which is rounded to a power of two.
    """
    shift = round(math.log2(scale))
    if nonfinite:
      self.highest = max(self.highest, HIGHEST + 1 - shift)
    elif exponents:
      counts = {exponent - shift: count for exponent, count in exponents.items()}
      total = sum(math.ldexp(count, exponent) for exponent, count in counts.items())
      shares = {exponent: math.ldexp(count, exponent) / total for exponent, count in counts.items()}
      lowest = max(exponent for exponent in shares if sum(shares[own] for own in shares if own < exponent) <= TOLERATED)
      self.exponents.update(counts)
      self._shares.update(shares)
      self.lowest = min(self.lowest, lowest)
      self.highest = max(self.highest, max(counts))
      self.width = max(self.width, max(counts) - lowest)

  def lost(self, scale_exponent: int) -> float:
    """Returns the share of the sum of magnitudes that is below 2**-24 at a scale of 2**scale_exponent.

    The share is the mean over the records.
    """
    below = sum(share for exponent, share in self._shares.items() if exponent + scale_exponent < LOWEST)
    return below / sum(self._shares.values()) if self._shares else 0.0


class History:
  """The ranges of a run.

  Attributes:
    tensors: the tensors by name, from the loss to the inputs.
    steps: the recorded steps.
    scale: the loss scale of the last record; 1 without any.
  """

  def __init__(self) -> None:
    self.tensors: Dict[str, Tensor] = collections.OrderedDict()
    self.steps: List[int] = []
    self.scale = 1.0

  def add(self, record: Dict[str, Any]) -> None:
    """Adds a record, as `record_of` returns it."""
    self.steps.append(record["step"])
    for name, values in record["tensors"].items():
      exponents = {int(exponent): count for exponent, count in values["exponents"].items()}
      self.tensors.setdefault(name, Tensor()).add(exponents, values["nonfinite"], values["scale"])
    self.scale = max((values["scale"] for values in record["tensors"].values()), default=self.scale)


def record_of(step: int, ranges: Dict[str, Any]) -> Dict[str, Any]:
  """Returns a step's fetched `GradientRange`s as a dictionary for JSON; leaves out tensors that were not computed."""
  tensors = collections.OrderedDict()
  for name, values in ranges.items():
    counts = [int(count) for count in values.exponents]
    total = sum(counts)
    if not total:
      continue  # empty, or in a branch that was not executed
    zeros = int(round(float(values.zeros) * total))
    counts[0] -= zeros
    tensors[name] = {
      "scale": float(values.scale),
      "zeros": zeros,
      "nonfinite": counts[255],
      "largest": float(values.largest),
      "exponents": {str(index - BIAS): count for index, count in enumerate(counts[:255]) if count},
    }
  return {"step": step, "tensors": tensors}


def read(lines: Iterable[str]) -> History:
  """Returns the history in lines of JSON, one for each record; skips a last line that is incomplete.

  Where the step is smaller than that of earlier records, a run was restored from a checkpoint or started anew: the
  records of later steps are dropped.

  Raises:
    ValueError: If a line is not a record.
  """
  records: List[Dict[str, Any]] = []
  for number, line in enumerate(lines, 1):
    if not line.endswith("\n"):
      break  # A running job is still writing it, or was killed while writing it.
    try:
      record = json.loads(line)
      History().add(record)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
      raise ValueError("line {} is not a record of GradientRangesHook".format(number)) from error
    while records and records[-1]["step"] > record["step"]:
      records.pop()
    records.append(record)
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
  """Returns advice on the loss scale; None without any nonzero value.

  The smallest scale keeps, in every record, all but 1% of the sum of magnitudes of each tensor at or above 2**-24,
  float16's smallest number. Values that make up less hardly change the sums over batches, pixels or words of which the
  gradient of a layer consists. The largest scale keeps all values seen below 2**14, a quarter of float16's largest
  number, because steps that were not recorded may have larger values. Tensors that float16 cannot represent are left
  out.
  """
  seen = {name: tensor for name, tensor in history.tensors.items() if tensor.exponents}
  if not seen:
    return None
  wide = [name for name, tensor in seen.items() if tensor.width > HIGHEST - LOWEST]
  large = [name for name, tensor in seen.items() if tensor.highest > HIGHEST and name not in wide]
  fit = {name: tensor for name, tensor in seen.items() if name not in wide + large}
  kind, low, high, sentences = _advise_scale(fit) if fit else ("float32", 0, 0, [])
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
  return Advice(kind, low, high, wide + large, "; ".join(sentences))


def _advise_scale(tensors: Dict[str, Tensor]) -> Tuple[str, int, int, List[str]]:
  """Returns the kind of loss scale for tensors that fit into float16, the exponents of its range, and a sentence."""
  smallest = min(tensors, key=lambda name: tensors[name].lowest)
  largest = max(tensors, key=lambda name: tensors[name].highest)
  needed = LOWEST - tensors[smallest].lowest
  low, high = max(needed, 0), max(HIGHEST - MARGIN - tensors[largest].highest, 0)
  limit = "the largest value, of {}, is below 2**{} without a scale".format(largest, tensors[largest].highest + 1)
  if needed <= 0:
    kind, text = "none", "no loss scaling is needed: float16 keeps 99% of the magnitude of each tensor, and {limit}"
  elif high - low >= NARROW:
    kind, text = (
      "fixed",
      "a fixed loss scale between 2**{low} and 2**{high} would do: below it, float16 loses more than ",
    )
    text += "1% of the magnitude of {smallest}; above it, an overflow is close, because {limit}"
  else:
    kind, text = "dynamic", "use a dynamic loss scale that starts at 2**{high}: {limit}, but {smallest} needs a scale "
    text += "of 2**{low} for float16 to keep 99% of its magnitude in every step"
  return kind, low, high, [text.format(low=low, high=high, smallest=smallest, limit=limit)]


def _join(names: List[str]) -> str:
  return ", ".join(names[:5]) + (" and {} more".format(len(names) - 5) if len(names) > 5 else "")
