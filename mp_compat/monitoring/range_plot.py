# SPDX-License-Identifier: Apache-2.0
"""Draws recorded gradient ranges as a heat map: tensors from the loss to the inputs over binary exponents."""

import math
import os
import textwrap
from typing import Any, List, Tuple

import numpy as np

from mp_compat._tensorflow import tf
from mp_compat.monitoring import plot
from mp_compat.monitoring import range_history
from mp_compat.monitoring import ranges_hook

MOST_LABELS = 60  # with more tensors, only layers are labeled, and of many layers only some
UNSCALED_COLOR, SCALED_COLOR = plot.SKIPPED_COLOR, plot.SCALE_COLOR


def read(logdir: str) -> Tuple[range_history.History, range_history.Advice]:
  """Returns what a `GradientRangesHook` recorded, and the advice that follows.

  Args:
    logdir: the `output_dir` of the hook, or a directory that contains it at any depth.

  Raises:
    PlotError: If there is no such directory or file, or more than one; if the file is damaged or has no finite nonzero
      value.
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
  if advice is None or not any(tensor.exponents for tensor in history.tensors.values()):
    raise plot.PlotError("all gradients in {} are zero, not finite or empty".format(paths[0]))
  return history, advice


def draw(history: range_history.History, advice: range_history.Advice) -> Any:
  """Draws the histograms of a run, the range of float16 with and without the last loss scale, and the advice.

  Args:
    history: the data.
    advice: what to write below.

  Returns:
    A `matplotlib.figure.Figure`, 10 inches wide; 4 to 16 inches high, and more for long advice.

  Raises:
    PlotError: If matplotlib is missing.
  """
  names = [name for name, tensor in history.tensors.items() if tensor.exponents]
  tensors = [history.tensors[name] for name in names]
  shift = round(math.log2(history.scale))
  lowest = min(min(tensor.exponents) for tensor in tensors)
  first = max(lowest, range_history.LOWEST - shift - 20)  # what is far below is in the first column
  last = max(max(max(tensor.exponents) for tensor in tensors), range_history.HIGHEST) + 2
  shares = np.zeros([len(names), last - first + 1])
  for row, tensor in zip(shares, tensors):
    for exponent, count in tensor.exponents.items():
      row[max(exponent - first, 0)] += count / sum(tensor.exponents.values())

  height = min(max(0.16 * len(names), 1.5), 14)
  lines = textwrap.wrap("Advice: " + advice.text + ".", 130)
  below = 0.2 * max(len(lines), 4)
  figure = plot.new_figure(10, 1.4 + height + below, dpi=150)
  ((bars, legend), (axes, lost), (text, unused)) = figure.subplots(
    3, 2, sharex="col", gridspec_kw={"width_ratios": [4, 1], "height_ratios": [0.5, height, below]}
  )
  for empty in (bars, legend, text, unused):
    empty.set_axis_off()
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
  lost.tick_params(labelbottom=True, labelleft=False, left=False)
  _label_rows(axes, names)
  scales = [
    (0, UNSCALED_COLOR, "float16 without loss scaling"),
    (shift, SCALED_COLOR, "float16 at scale 2**{}".format(shift)),
  ]
  for index, (own, color, label) in enumerate(scales if shift else scales[:1]):
    low, normal, high = (
      exponent - own - 0.5
      for exponent in (range_history.LOWEST, range_history.LOWEST_NORMAL, range_history.HIGHEST + 1)
    )
    bars.plot([max(low, first), normal], [-index, -index], ":", linewidth=2, color=color)
    bars.plot([normal, high], [-index, -index], linewidth=4, color=color, solid_capstyle="butt")
    bars.text(normal, 0.2 - index, label, color=color, fontsize="small", va="bottom")
    for end in (low, high):
      axes.axvline(end, color=color, linewidth=1, linestyle="--")
    share = [100 * tensor.lost(own) for tensor in tensors]
    lost.barh(np.arange(len(names)) - 0.2 + 0.4 * index, share, 0.4, color=color)
  bars.set_ylim(-1.2, 1.2)
  axes.set_xlim(first - 0.5, last + 0.5)
  lost.set_xlim(0, max(10, *(1.05 * 100 * tensor.lost(0) for tensor in tensors)))
  lost.set_ylim(axes.get_ylim())
  lost.set_xlabel("% of the magnitude\nthat float16 loses")
  lost.grid(axis="x", color="0.9")
  lost.set_axisbelow(True)
  figure.suptitle(
    "Gradients of {} tensors, from the loss (top) to the inputs; {} records, steps {} to {}".format(
      len(names), len(history.steps), history.steps[0], history.steps[-1]
    ),
    fontsize="medium",
  )
  figure.text(0.01, 0.01, "\n".join(lines), fontsize="medium", va="bottom")
  return figure


def _label_rows(axes: Any, names: List[str]) -> None:
  """Labels each row; if there are many, the layers that are far enough apart."""
  labels: List[Tuple[int, str]] = []
  for row, label in enumerate(names) if len(names) <= MOST_LABELS else _layers(names):
    if not labels or MOST_LABELS * (row - labels[-1][0]) >= len(names):
      labels.append((row, label))
  axes.set_yticks([row for row, _ in labels])
  axes.set_yticklabels([label if len(label) <= 60 else "..." + label[-57:] for _, label in labels], fontsize=6)


def _layers(names: List[str]) -> List[Tuple[int, str]]:
  """Returns (middle row, layer) for each run of rows of the same layer."""
  runs: List[Tuple[int, int, str]] = []
  for row, name in enumerate(names):
    layer = range_history.layer_of(name)
    if runs and layer in ("", runs[-1][2]):
      runs[-1] = (runs[-1][0], row, runs[-1][2])
    else:
      runs.append((row, row, layer))
  return [((first + last) // 2, layer) for first, last, layer in runs]
