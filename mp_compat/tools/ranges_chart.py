# SPDX-License-Identifier: Apache-2.0
"""Draws the gradient ranges that a GradientRangesHook recorded.

    history, advice = ranges_chart.read("logs")
    ranges_chart.save(ranges_chart.draw(history, advice), "ranges.png")

The figure has a row for each tensor, from the loss (top) to the inputs. On the left, a
histogram of the binary exponents of its values, between lines at the ends of the range
of the number format. On the right, the loss scales that fit all records of the tensor.
"""

import math
import os
import textwrap
from typing import Any, Dict, List, Set, Tuple

import numpy as np

from mp_compat._tensorflow import tf
from mp_compat.monitoring import range_history

# Okabe and Ito's, which are safe for all kinds of color vision
BLUE = "#0072B2"
GREEN = "#009E73"
ORANGE = "#D55E00"
RED = "#B00020"  # never finite, or no scale fits

# Of more tensors, every second, third or so is labeled, and those that decide.
MOST_LABELS = 60


class ChartError(Exception):
  """An error that the user can correct, such as missing data; the message is one
  line.
  """


def read(logdir: str) -> Tuple[range_history.History, range_history.Advice]:
  """Returns what a `GradientRangesHook` recorded, and the advice that follows.

  Args:
    logdir: the hook's `output_dir`, or a directory above it.

  Raises:
    ChartError: If no file, or more than one, is there; or if it cannot be read, or has
      no gradient that is not zero.
  """
  path = _find(logdir)
  try:
    history = range_history.read(range_history.read_text(path))
  except (ValueError, tf.errors.OpError) as error:
    raise ChartError("cannot read {}: {}".format(path, error)) from error
  advice = range_history.advise(history)
  if advice is None:
    raise ChartError("all gradients in {} are zero or empty".format(path))
  return history, advice


def _find(logdir: str) -> str:
  """Returns the path of the only recorded file in `logdir` or below."""
  if not tf.gfile.IsDirectory(logdir):
    raise ChartError("no such directory: {}".format(logdir))
  paths: Dict[str, str] = {}  # by the real path: links may lead to the same file
  for folder, _, _ in tf.gfile.Walk(logdir):
    path = os.path.join(folder, range_history.FILE_NAME)
    if tf.gfile.Exists(path):
      paths[os.path.realpath(path)] = path
  found = sorted(paths.values())
  if not found:
    message = "no {} below {}: GradientRangesHook(output_dir=...) writes it"
    raise ChartError(message.format(range_history.FILE_NAME, logdir))
  if len(found) > 1:
    message = "found several runs below {}; pass one of them: {}"
    raise ChartError(message.format(logdir, ", ".join(found)))
  return found[0]


def save(figure: Any, output: str) -> None:
  """Writes a figure in the format that the suffix of `output` names; PNG without a
  suffix. Raises a ChartError if it cannot be written.
  """
  suffix = os.path.splitext(output)[1]
  format_name = suffix[1:].lower() or "png"
  try:
    figure.savefig(output, format=format_name)
  except (OSError, ValueError) as error:
    raise ChartError("cannot write {}: {}".format(output, error)) from error


def draw(history: range_history.History, advice: range_history.Advice) -> Any:
  """Returns the figure that docs/gradient_ranges.md describes; its height depends on
  the number of tensors. Raises a ChartError without matplotlib.
  """
  try:
    from matplotlib.figure import Figure
  except ImportError as error:
    message = "needs matplotlib ({}): pip install matplotlib"
    raise ChartError(message.format(error)) from error
  rows = len(history.tensors)
  advice_lines = textwrap.wrap("Advice: " + advice.text, 130)
  height_of_rows = min(max(0.16 * rows, 1.5), 14)
  height = height_of_rows + 0.2 * len(advice_lines) + 1.6
  figure = Figure(figsize=(10, height), dpi=150, layout="constrained")
  axes, fitting = figure.subplots(
    1, 2, sharey=True, gridspec_kw={"width_ratios": [4, 1]}
  )
  _draw_histograms(axes, history)
  _draw_fitting_scales(fitting, history, advice)
  axes.set_ylim(rows - 0.5, -0.5)
  labels = _labels(history, advice)
  axes.set_yticks(list(labels))
  axes.set_yticklabels([_shortened(name) for name in labels.values()], fontsize=6)
  figure.suptitle(_title(history), fontsize="medium")
  figure.supxlabel("\n".join(advice_lines), x=0.01, ha="left", fontsize="medium")
  return figure


def _shortened(name: str) -> str:
  """Returns at most 60 characters of a tensor's name: the last ones."""
  if len(name) <= 60:
    return name
  return "..." + name[-57:]


def _title(history: range_history.History) -> str:
  """Returns the title, which explains red rows if there are some."""
  title = (
    "Gradients of {} tensors, from the loss (top) to the inputs; "
    "{} records, steps {} to {}".format(
      len(history.tensors), len(history.steps), history.steps[0], history.steps[-1]
    )
  )
  if all(tensor.is_recorded for tensor in history.tensors.values()):
    return title
  return title + "; red: never finite"


def _labels(
  history: range_history.History, advice: range_history.Advice
) -> Dict[int, str]:
  """Returns the labels of rows.

      label tensors that the advice names, and extremes; too close ones move down, at
          the last row up
      label every n-th of the others, so that there are about `MOST_LABELS`

  A label may thus stand some rows from that of its tensor. An n-th tensor has none if
  one of the first kind is less than n rows away.

  Args:
    history: the tensors, in the order of the rows.
    advice: what follows from them.

  Returns:
    The names of tensors by the row beside which they stand.
  """
  names = list(history.tensors)
  every = math.ceil(len(names) / MOST_LABELS)  # So many rows have room for one label.
  gap = (every + 1) // 2
  decisive = set(advice.named) | _extremes(history)
  labeled = [number for number, name in enumerate(names) if name in decisive]
  rows = _spread(labeled, gap, len(names) - 1)
  found = {row: names[number] for row, number in zip(rows, labeled)}
  others: Dict[int, str] = {}
  for number in range(0, len(names), every):
    if all(abs(number - row) >= every for row in found):
      others[number] = names[number]
  return dict(sorted({**found, **others}.items()))


def _spread(rows: List[int], gap: int, last: int) -> List[int]:
  """Returns ascending rows up to `last`, each moved down, or at the end up, so that
  they are at least `gap` apart.
  """
  moved_down: List[int] = []
  for row in rows:
    if moved_down:
      row = max(row, moved_down[-1] + gap)
    moved_down.append(row)
  found: List[int] = []
  limit = last
  for row in reversed(moved_down):
    found.append(min(row, limit))
    limit = found[-1] - gap
  return found[::-1]


def _extremes(history: range_history.History) -> Set[str]:
  """Returns the names of the tensors whose smallest value needs the largest scale, and
  whose largest value needs the smallest; none if no tensor was ever finite.
  """
  bounds = []
  for tensor in history.tensors.values():
    if tensor.bounds:
      bounds.append(tensor.bounds)
  if not bounds:
    return set()
  highest_low = max(bounds, key=lambda each: each.low)
  lowest_high = min(bounds, key=lambda each: each.high)
  return {highest_low.smallest, lowest_high.largest}


def _draw_histograms(axes: Any, history: range_history.History) -> None:
  """Draws a row for each tensor, with a column for each binary exponent, and lines at
  the ends of the range of the number format: without a loss scale, and at the last one.

      columns    from the lowest exponent, but at most 20 below float16's range at the
                 last scale; to 2 above the highest exponent, or float16's range
      rows       the square root of each exponent's share; red if never finite
      lines      orange: the range of the format; green: divided by the last scale

  Args:
    axes: matplotlib's Axes.
    history: the records; its exponents are those without a loss scale.
  """
  tensors = list(history.tensors.values())
  # The range of a number format in gradients that are divided by the scale.
  shift = round(math.log2(history.scale))
  exponents: List[int] = []
  for tensor in tensors:
    exponents += tensor.exponents
  last = max(exponents + [range_history.FLOAT16.highest]) + 2
  # Columns that are far lower are added to the first one.
  lowest_shown = range_history.FLOAT16.lowest - shift - 20
  first = max(min(exponents, default=0), lowest_shown)
  for row, tensor in enumerate(tensors):
    if not tensor.is_recorded:
      axes.axhspan(row - 0.5, row + 0.5, color=RED, linewidth=0)
  shares = _shares(tensors, first, last)
  # The square root shows small shares, too.
  shown = np.ma.masked_equal(shares, 0) ** 0.5
  left, right = first - 0.5, last + 0.5
  axes.imshow(
    shown,
    aspect="auto",
    interpolation="nearest",
    cmap="Blues",
    vmin=0,
    extent=(left, right, len(tensors) - 0.5, -0.5),
  )
  number_format = history.format
  _draw_range(axes, number_format, 0, ORANGE, "{} without loss scaling")
  if shift:
    label = "{{}} at scale 2**{}".format(shift)
    _draw_range(axes, number_format, shift, GREEN, label)
  axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncol=2, frameon=False)
  axes.set_xlabel("binary exponent of the gradient, without a loss scale")
  axes.set_xlim(left, right)


def _shares(tensors: List[range_history.Tensor], first: int, last: int) -> np.ndarray:
  """Returns the share of each binary exponent in each tensor.

  Args:
    tensors: the tensors of a history.
    first: the exponent of the first column, to which those below it are added.
    last: the exponent of the last column.

  Returns:
    A float64 array of shape [tensors, exponents].
  """
  shares = np.zeros([len(tensors), last - first + 1])
  for row, tensor in enumerate(tensors):
    total = sum(tensor.exponents.values())
    for exponent, count in tensor.exponents.items():
      column = max(exponent - first, 0)
      shares[row, column] += count / total
  return shares


def _draw_range(
  axes: Any, number_format: range_history.Format, shift: int, color: str, label: str
) -> None:
  """Draws lines at both ends of the range of a number format.

  Args:
    axes: matplotlib's Axes.
    number_format: the number format.
    shift: the exponent of a loss scale, by which the range moves to smaller gradients.
    color: the color of both lines.
    label: their label in the legend, with a place for the name of the format.
  """
  style = {"color": color, "linewidth": 1, "linestyle": "--"}
  low = number_format.lowest - shift - 0.5
  high = number_format.highest - shift + 0.5
  axes.axvline(low, label=label.format(number_format.name), **style)
  axes.axvline(high, **style)


def _draw_fitting_scales(
  axes: Any, history: range_history.History, advice: range_history.Advice
) -> None:
  """Draws, for each tensor, the scales that fit all of its records, and behind them
  those that fit all tensors.

  A bar is blue if the advice is for the tensor, gray if not, red if no scale fits. A
  line is at the smallest scale at which a step overflowed.
  """
  largest = 0
  for row, tensor in enumerate(history.tensors.values()):
    bounds = tensor.bounds
    if bounds is None:
      continue
    color = "0.7"
    if bounds.low > bounds.high:  # No scale fits.
      color = RED
    elif tensor.is_selected:
      color = BLUE
    width = bounds.high - bounds.low
    axes.barh(row, width, height=0.6, left=bounds.low, color=color)
    largest = max(largest, bounds.high)
  upper = [below.high for below in history.upper_bounds()]
  not_finite = min(upper, default=range_history.LARGEST_SCALE)
  if not_finite < range_history.LARGEST_SCALE:
    axes.axvline(not_finite + 1, color=RED, linewidth=1, linestyle="--")
  if advice.low <= advice.high:
    axes.axvspan(advice.low, advice.high, color=GREEN, alpha=0.3, linewidth=0, zorder=0)
  last = min(largest, max(advice.low, advice.high, 0) + 20)
  axes.set_xlim(-1, last + 1)
  axes.set_xlabel("loss scales 2**n\nthat fit all records")
