# SPDX-License-Identifier: Apache-2.0
"""Draws recorded gradient ranges as a heat map: tensors from the loss to the inputs over binary exponents."""

import math
import os
import textwrap
from typing import Any, Tuple

import numpy as np

from mp_compat._tensorflow import tf
from mp_compat.monitoring import plot
from mp_compat.monitoring import range_history
from mp_compat.monitoring import ranges_hook

MOST_LABELS = 60  # of more tensors, only every second, third or so is labeled
UNSCALED_COLOR, SCALED_COLOR, FITTING_COLOR = plot.SKIPPED_COLOR, plot.SCALE_COLOR, plot.LOSS_COLOR
RED = "#B00020"  # never finite, or no scale fits


def read(logdir: str) -> Tuple[range_history.History, range_history.Advice]:
  """Returns what a `GradientRangesHook` recorded, and the advice that follows.

  Args:
    logdir: the `output_dir` of the hook, or a directory that contains it at any depth.

  Raises:
    PlotError: If there is no such directory or file, or more than one; if the file is damaged, or all values are zero.
  """
  paths = [
    os.path.join(directory, name)
    for directory, _, names in tf.gfile.Walk(logdir)
    for name in names
    if name == ranges_hook.FILE_NAME
  ]
  if not paths:
    raise plot.PlotError(
      "no {} below {}: GradientRangesHook(output_dir=...) writes it".format(ranges_hook.FILE_NAME, logdir)
    )
  if len(paths) > 1:
    raise plot.PlotError("found several runs below {}; pass one of them: {}".format(logdir, ", ".join(sorted(paths))))
  try:
    history = range_history.read(ranges_hook.read_text(paths[0]).splitlines())
  except (ValueError, tf.errors.OpError) as error:
    raise plot.PlotError("cannot read {}: {}".format(paths[0], error)) from error
  advice = range_history.advise(history)
  if advice is None:
    raise plot.PlotError("all gradients in {} are zero or empty".format(paths[0]))
  return history, advice


def draw(history: range_history.History, advice: range_history.Advice) -> Any:
  """Draws the histograms of a run, the scales that fit each tensor, and the advice that follows from them.

  Tensors without a finite nonzero value are red rows.

  Args:
    history: the data.
    advice: what to write below.

  Returns:
    A `matplotlib.figure.Figure`, 10 inches wide; 4 to 16 inches high, and more for long advice.

  Raises:
    PlotError: If matplotlib is missing.
  """
  tensors = history.tensors
  shift = round(math.log2(history.scale))
  exponents = [exponent for tensor in tensors.values() for exponent in tensor.exponents]
  first = max(min(exponents, default=0), range_history.FLOAT16.lowest - shift - 20)  # far lower ones are added to it
  last = max(exponents + [range_history.FLOAT16.highest]) + 2

  height = min(max(0.16 * len(tensors), 1.5), 14)
  lines = textwrap.wrap("Advice: " + advice.text, 130)
  below = 0.2 * max(len(lines), 4)
  figure = plot.new_figure(10, 1.4 + height + below, dpi=150)
  ((bars, legend), (axes, fitting), (text, unused)) = figure.subplots(
    3, 2, sharex="col", gridspec_kw={"width_ratios": [4, 1], "height_ratios": [0.5, height, below]}
  )
  for empty in (bars, legend, text, unused):
    empty.set_axis_off()
  _draw_histograms(axes, history, first, last)
  number, lowest, lowest_normal, highest = history.format
  scales = [
    (0, UNSCALED_COLOR, number + " without loss scaling"),
    (shift, SCALED_COLOR, "{} at scale 2**{}".format(number, shift)),
  ]
  for index, (own, color, label) in enumerate(scales if shift else scales[:1]):
    low, normal, high = (exponent - own - 0.5 for exponent in (lowest, lowest_normal, highest + 1))
    bars.plot([low, normal], [-index, -index], ":", linewidth=2, color=color)
    bars.plot([normal, high], [-index, -index], linewidth=4, color=color, solid_capstyle="butt")
    bars.text(max(normal, first), 0.2 - index, label, color=color, fontsize="small", va="bottom")
    for end in (low, high):
      axes.axvline(end, color=color, linewidth=1, linestyle="--")
  bars.set_ylim(-1.2, 1.2)
  _draw_fitting_scales(fitting, history, advice)
  figure.suptitle(
    "Gradients of {} tensors, from the loss (top) to the inputs; {} records, steps {} to {}{}".format(
      len(tensors),
      len(history.steps),
      history.steps[0],
      history.steps[-1],
      "" if all(tensor.is_recorded for tensor in tensors.values()) else "; red: never finite",
    ),
    fontsize="medium",
  )
  figure.text(0.01, 0.01, "\n".join(lines), fontsize="medium", va="bottom")
  return figure


def _draw_histograms(axes: Any, history: range_history.History, first: int, last: int) -> None:
  """Draws a row for each tensor, with columns for the exponents from `first` to `last`."""
  names = list(history.tensors)
  shares = np.zeros([len(names), last - first + 1])
  for index, tensor in enumerate(history.tensors.values()):
    for exponent, count in tensor.exponents.items():
      shares[index, max(exponent - first, 0)] += count / sum(tensor.exponents.values())
    if not tensor.is_recorded:
      axes.axhspan(index - 0.5, index + 0.5, color=RED, linewidth=0)
  axes.imshow(
    np.ma.masked_equal(shares, 0) ** 0.5,  # The square root shows small shares, too.
    aspect="auto",
    interpolation="nearest",
    cmap="Blues",
    vmin=0,
    extent=(first - 0.5, last + 0.5, len(names) - 0.5, -0.5),
  )
  axes.set_xlabel("binary exponent of the gradient, without a loss scale")
  axes.tick_params(labelbottom=True)
  axes.set_xlim(first - 0.5, last + 0.5)
  axes.set_ylim(len(names) - 0.5, -0.5)
  labels = [name if len(name) <= 60 else "..." + name[-57:] for name in names]
  every = -(-len(names) // MOST_LABELS)
  axes.set_yticks(range(0, len(names), every))
  axes.set_yticklabels(labels[::every], fontsize=6)


def _draw_fitting_scales(axes: Any, history: range_history.History, advice: range_history.Advice) -> None:
  """Draws, for each tensor, the scales that fit all records, and behind them those that fit all tensors.

  A red bar is between the largest scale that does not overflow and the smallest that is needed, if that is larger. A
  red line is the smallest scale at which a record was not finite.
  """
  largest = 0
  for row, tensor in enumerate(history.tensors.values()):
    if tensor.bounds is not None:
      low, high = tensor.bounds[:2]
      color = RED if low > high else FITTING_COLOR if tensor.is_selected else "0.7"
      axes.barh(row, high - low, 0.6, left=low, color=color)
      largest = max(largest, high)
  not_finite = min([below.high for _, below in history.overflows], default=range_history.LARGEST_SCALE)
  if not_finite < range_history.LARGEST_SCALE:
    axes.axvline(not_finite + 1, color=RED, linewidth=1, linestyle="--")
  if advice.low <= advice.high:
    axes.axvspan(advice.low, advice.high, color=SCALED_COLOR, alpha=0.3, linewidth=0, zorder=0)
  axes.set_xlim(-1, min(largest, max(advice.low, advice.high, 0) + 20) + 1)
  axes.set_ylim(len(history.tensors) - 0.5, -0.5)
  axes.set_xlabel("loss scales 2**n\nthat fit all records")
  axes.tick_params(labelbottom=True, labelleft=False, left=False)
