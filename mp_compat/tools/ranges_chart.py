# SPDX-License-Identifier: Apache-2.0
"""Draws the gradient ranges that a GradientRangesHook recorded."""

import math
import os
import textwrap
from typing import Any, Dict, Tuple

import numpy as np

from mp_compat._tensorflow import tf
from mp_compat.monitoring import range_history

BLUE, GREEN, ORANGE = (
  "#0072B2",
  "#009E73",
  "#D55E00",
)  # Okabe and Ito's, which are safe for all kinds of color vision
RED = "#B00020"  # never finite, or no scale fits

MOST_LABELS = (
  60  # of more tensors, every second, third or so is labeled, and those that decide
)


class ChartError(Exception):
  """An error that the user can correct, such as missing data; the message is one
  line.
  """


def read(logdir: str) -> Tuple[range_history.History, range_history.Advice]:
  """Returns what a `GradientRangesHook` recorded in `logdir` or below, and the advice
  that follows.
  """
  if not tf.gfile.IsDirectory(logdir):
    raise ChartError("no such directory: {}".format(logdir))
  found = [
    os.path.join(folder, range_history.FILE_NAME)
    for folder, _, _ in tf.gfile.Walk(logdir)
  ]
  # Links may lead to the same files.
  paths = list(
    {os.path.realpath(path): path for path in found if tf.gfile.Exists(path)}.values()
  )
  if not paths:
    message = "no {} below {}: GradientRangesHook(output_dir=...) writes it"
    raise ChartError(message.format(range_history.FILE_NAME, logdir))
  if len(paths) > 1:
    raise ChartError(
      "found several runs below {}; pass one of them: {}".format(
        logdir, ", ".join(sorted(paths))
      )
    )
  try:
    history = range_history.read(range_history.read_text(paths[0]))
  except (ValueError, tf.errors.OpError) as error:
    raise ChartError("cannot read {}: {}".format(paths[0], error)) from error
  advice = range_history.advise(history)
  if advice is None:
    raise ChartError("all gradients in {} are zero or empty".format(paths[0]))
  return history, advice


def save(figure: Any, output: str) -> None:
  """Writes a figure in the format that the suffix of `output` names; PNG without a
  suffix.
  """
  try:
    figure.savefig(output, format=os.path.splitext(output)[1][1:].lower() or "png")
  except (OSError, ValueError) as error:
    raise ChartError("cannot write {}: {}".format(output, error)) from error


def draw(history: range_history.History, advice: range_history.Advice) -> Any:
  """Returns the figure that docs/gradient_ranges.md describes; its height depends on
  the number of tensors.
  """
  try:
    from matplotlib.figure import Figure
  except ImportError as error:
    raise ChartError(
      "needs matplotlib ({}): pip install matplotlib".format(error)
    ) from error
  rows = len(history.tensors)
  lines = textwrap.wrap("Advice: " + advice.text, 130)
  height = min(max(0.16 * rows, 1.5), 14) + 0.2 * len(lines) + 1.6
  figure = Figure(figsize=(10, height), dpi=150, layout="constrained")
  axes, fitting = figure.subplots(
    1, 2, sharey=True, gridspec_kw={"width_ratios": [4, 1]}
  )
  _draw_histograms(axes, history)
  _draw_fitting_scales(fitting, history, advice)
  axes.set_ylim(rows - 0.5, -0.5)
  labels = _labels(history, advice)
  axes.set_yticks(list(labels))
  axes.set_yticklabels(
    [name if len(name) <= 60 else "..." + name[-57:] for name in labels.values()],
    fontsize=6,
  )
  title = "Gradients of {} tensors, from the loss (top) to the inputs; {} records, steps {} to {}".format(
    rows, len(history.steps), history.steps[0], history.steps[-1]
  )
  is_red = not all(tensor.is_recorded for tensor in history.tensors.values())
  figure.suptitle(title + ("; red: never finite" if is_red else ""), fontsize="medium")
  figure.supxlabel("\n".join(lines), x=0.01, ha="left", fontsize="medium")
  return figure


def _labels(
  history: range_history.History, advice: range_history.Advice
) -> Dict[int, str]:
  """Returns the labels by row: of tensors that the advice names, extremes (neighbors
  move down), and some others.
  """
  names, bounds = (
    list(history.tensors),
    [tensor.bounds for tensor in history.tensors.values() if tensor.bounds],
  )
  extremes = [
    max(bounds, key=lambda each: each.low).smallest,
    min(bounds, key=lambda each: each.high).largest,
  ]
  every, row, found = -(-len(names) // MOST_LABELS), -len(names), {}
  for name in [name for name in names if name in advice.text or name in extremes]:
    row = max(names.index(name), row + (every + 1) // 2)
    found[row] = name
  others = [
    row
    for row in range(0, len(names), every)
    if all(abs(row - other) >= every for other in found)
  ]
  return {**found, **{row: names[row] for row in others}}


def _draw_histograms(axes: Any, history: range_history.History) -> None:
  """Draws a row for each tensor, with a column for each binary exponent, and lines at
  the ends of float16's range.
  """
  tensors = list(history.tensors.values())
  shift = round(math.log2(history.scale))
  exponents = [exponent for tensor in tensors for exponent in tensor.exponents]
  # far lower ones are added to it
  first = max(min(exponents, default=0), range_history.FLOAT16.lowest - shift - 20)
  last = max(exponents + [range_history.FLOAT16.highest]) + 2
  shares = np.zeros([len(tensors), last - first + 1])
  for row, tensor in enumerate(tensors):
    for exponent, count in tensor.exponents.items():
      shares[row, max(exponent - first, 0)] += count / sum(tensor.exponents.values())
    if not tensor.is_recorded:
      axes.axhspan(row - 0.5, row + 0.5, color=RED, linewidth=0)
  # The square root shows small shares, too.
  shares = np.ma.masked_equal(shares, 0) ** 0.5
  extent = (first - 0.5, last + 0.5, len(tensors) - 0.5, -0.5)
  axes.imshow(
    shares, aspect="auto", interpolation="nearest", cmap="Blues", vmin=0, extent=extent
  )
  number, lowest, highest = history.format
  scales = [
    (0, ORANGE, number + " without loss scaling"),
    (shift, GREEN, "{} at scale 2**{}".format(number, shift)),
  ]
  for own, color, label in scales if shift else scales[:1]:
    axes.axvline(
      lowest - own - 0.5, color=color, linewidth=1, linestyle="--", label=label
    )
    axes.axvline(highest - own + 0.5, color=color, linewidth=1, linestyle="--")
  axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncol=2, frameon=False)
  axes.set_xlabel("binary exponent of the gradient, without a loss scale")
  axes.set_xlim(first - 0.5, last + 0.5)


def _draw_fitting_scales(
  axes: Any, history: range_history.History, advice: range_history.Advice
) -> None:
  """Draws, for each tensor, the scales that fit all records, and behind them those that
  fit all tensors.
  """
  largest = 0
  for row, tensor in enumerate(history.tensors.values()):
    if tensor.bounds is not None:
      low, high = tensor.bounds[:2]
      color = RED if low > high else BLUE if tensor.is_selected else "0.7"
      axes.barh(row, high - low, 0.6, left=low, color=color)
      largest = max(largest, high)
  not_finite = min(
    [below.high for below in history.upper_bounds()],
    default=range_history.LARGEST_SCALE,
  )
  if not_finite < range_history.LARGEST_SCALE:
    axes.axvline(not_finite + 1, color=RED, linewidth=1, linestyle="--")
  if advice.low <= advice.high:
    axes.axvspan(advice.low, advice.high, color=GREEN, alpha=0.3, linewidth=0, zorder=0)
  axes.set_xlim(-1, min(largest, max(advice.low, advice.high, 0) + 20) + 1)
  axes.set_xlabel("loss scales 2**n\nthat fit all records")
