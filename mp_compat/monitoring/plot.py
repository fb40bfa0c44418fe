# SPDX-License-Identifier: Apache-2.0
"""Draws the loss scale and the loss of a run from TensorBoard's event files, and its recorded gradient ranges."""

import bisect
import collections
import fnmatch
import math
import os
import textwrap
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

import numpy as np

from mp_compat._tensorflow import tf
from mp_compat.monitoring import range_history

SCALE = "loss_scale/scale"
SKIPPED = "loss_scale/skipped_steps"

BLUE, GREEN, ORANGE = "#0072B2", "#009E73", "#D55E00"  # Okabe and Ito's, which are safe for all kinds of color vision
RED = "#B00020"  # never finite, or no scale fits

MOST_POINTS = 400  # the largest number of points of a loss curve; longer ones are drawn as means and ranges
MOST_LABELS = 60  # of more tensors, every second, third or so is labeled, and those that decide


class PlotError(Exception):
  """An error that the user can correct, such as missing data; the message is one line."""


class Curve(NamedTuple):
  """A scalar over increasing global steps."""

  tag: str
  steps: List[int]
  values: List[float]


class Series(NamedTuple):
  """The loss scale and the total of skipped steps at increasing attempted steps, among them each change and skip."""

  steps: List[int]
  scales: List[float]
  skipped: List[int]
  loss: Optional[Curve]


class _EventFile(NamedTuple):
  """The scalars of one event file."""

  times: List[float]  # of the first and the last event with values, in seconds
  directory: str
  scalars: Dict[str, List[Tuple[int, float]]]  # steps and values by tag


def save(figure: Any, output: str) -> None:
  """Writes a figure in the format that the suffix of `output` names; PNG without a suffix."""
  try:
    figure.savefig(output, format=os.path.splitext(output)[1][1:].lower() or "png")
  except (OSError, ValueError) as error:
    raise PlotError("cannot write {}: {}".format(output, error)) from error


def _new_figure(width: float, height: float, dpi: int) -> Any:
  try:
    from matplotlib.figure import Figure
  except ImportError as error:
    raise PlotError("needs matplotlib ({}): pip install matplotlib".format(error)) from error
  return Figure(figsize=(width, height), dpi=dpi, layout="constrained")


def _files_below(logdir: str, pattern: str) -> List[str]:
  """Returns the paths of the files below a directory whose names match a pattern; one path of each file."""
  if not tf.gfile.IsDirectory(logdir):
    raise PlotError("no such directory: {}".format(logdir))
  found = [(directory, fnmatch.filter(sorted(names), pattern)) for directory, _, names in tf.gfile.Walk(logdir)]
  paths = [os.path.join(directory, name) for directory, names in found for name in names]
  return list({os.path.realpath(path): path for path in paths}.values())  # links may lead to the same files


# --- the loss scale ------------------------------------------------------------------------------------------------


def read(logdir: str, loss_tag: Optional[str] = None) -> Series:
  """Returns the loss scale and the loss of one run; raises PlotError if there is none, or more than one.

  The event files of one directory are the sessions of one run, in order of time. A session that resumed before the last
  step of an earlier one replaces its values from that step on. If a LossScaleHook counts from 0 again, its counts are
  added to the earlier ones.

  Args:
    logdir: a directory with event files at any depth, among them those of a LossScaleHook's `output_dir`.
    loss_tag: the tag of the loss. By default `loss` or one that ends in `/loss`, if there is any, of the directory of
      the loss scale before all others.
  """
  files = sorted(map(_read_file, _files_below(logdir, "*tfevents*")), key=lambda file: (file.times[:1], file.directory))
  if not files:
    raise PlotError("no event files (*tfevents*) below {}".format(logdir))
  tags = range_history.enumeration(sorted({tag for file in files for tag in file.scalars}), 10) or "no scalars"
  by_hook = [file for file in files if SCALE in file.scalars and SKIPPED in file.scalars]
  if not by_hook:
    raise PlotError(
      "no loss scale below {}: expected the tags {} and {}, which LossScaleHook(output_dir=...) writes, but found "
      "{}".format(logdir, SCALE, SKIPPED, tags)
    )
  directories = sorted({file.directory for file in by_hook})
  if len(directories) > 1:
    raise PlotError("found several runs below {}; pass one of them: {}".format(logdir, ", ".join(directories)))
  if any(later.times[0] < earlier.times[-1] for earlier, later in zip(by_hook, by_hook[1:])):
    raise PlotError(
      "several LossScaleHooks wrote to {} at the same time: give each its own output_dir. To plot what is there, move "
      "the event files of each into a directory of its own".format(directories[0])
    )
  loss = _find_loss(files, loss_tag, directories)
  if loss_tag is not None and loss is None:
    raise PlotError("no scalar with the tag {} below {}: found {}".format(loss_tag, logdir, tags))
  points: List[Tuple[int, float, int]] = []
  for file in by_hook:
    pairs = list(zip(file.scalars[SCALE], file.scalars[SKIPPED]))  # written together
    before = points[-1] if points and pairs[0][0][0] == 0 else (0, 0.0, 0)
    for (step, scale), (_, skipped) in pairs:
      _add(points, (step + before[0], scale, int(skipped) + before[2]))
  steps, scales, totals = map(list, zip(*points))
  return Series(steps, scales, totals, loss)


def _read_file(path: str) -> _EventFile:
  times: List[float] = []
  scalars: Dict[str, List[Tuple[int, float]]] = collections.defaultdict(list)
  try:
    for event in tf.train.summary_iterator(path):
      if not event.HasField("file_version"):  # the first event, whose time is in whole seconds
        times[1:] = [event.wall_time]
      for value in event.summary.value:
        if value.HasField("simple_value"):
          scalars[value.tag].append((event.step, value.simple_value))
        elif value.HasField("tensor") and not value.tensor.tensor_shape.dim:
          number = tf.make_ndarray(value.tensor)
          if number.dtype.kind in "fiu":
            scalars[value.tag].append((event.step, float(number)))
  except tf.errors.DataLossError:
    pass  # A job is still writing the record, or was killed while writing it.
  except tf.errors.OpError as error:
    raise PlotError("cannot read {}: {}".format(path, type(error).__name__)) from error
  return _EventFile(times, os.path.dirname(path), scalars)


def _add(points: List[Any], point: Any) -> None:
  """Adds a point; drops those from its step on, which an earlier session recorded and a restore discarded."""
  del points[bisect.bisect_left(points, point[:1]) :]
  points.append(point)


def _find_loss(files: List[_EventFile], loss_tag: Optional[str], preferred: List[str]) -> Optional[Curve]:
  """Returns the loss curve of one directory, one of `preferred` if possible; None if no tag matches."""
  best = min(
    (
      (file.directory not in preferred, file.directory.count(os.sep), file.directory, len(tag), tag)
      for file in files
      for tag in file.scalars
      if (tag == loss_tag if loss_tag is not None else tag == "loss" or tag.endswith("/loss"))
    ),
    default=None,
  )
  if best is None:
    return None
  _, _, directory, _, tag = best
  points: List[Tuple[int, float]] = []
  for file in files:
    for point in file.scalars.get(tag, []) if file.directory == directory else []:
      _add(points, point)
  return Curve(tag, [step for step, _ in points], [value for _, value in points])


def describe(series: Series) -> str:
  last, skipped = series.steps[-1], series.skipped[-1]
  return "{:,} of {:,} attempted steps skipped{}".format(
    skipped, last, " ({:.2g}%)".format(100.0 * skipped / last) if skipped else ""
  )


def draw(series: Series) -> Any:
  """Returns a figure of the loss, if there is one, and below it the loss scale, with ticks at skipped steps."""
  figure = _new_figure(8, 4.5, dpi=240)
  panels = figure.subplots(2 if series.loss else 1, squeeze=False)[:, 0]
  if series.loss:
    _draw_loss(panels[0], series.loss)
  axes = panels[-1]
  axes.plot(series.steps, series.scales, ".-", markersize=2, drawstyle="steps-post", color=GREEN, label="loss scale")
  skips = [step for step, count in zip(series.steps, np.diff([0] + series.skipped)) if count > 0]
  at_bottom = axes.get_xaxis_transform()
  axes.plot(skips, [0.045] * len(skips), "|", transform=at_bottom, color=ORANGE, markersize=9, label="skipped step")
  axes.set_yscale("log", base=2)
  axes.margins(y=0.15)  # room for the ticks at the bottom
  axes.set_title(describe(series), loc="left", fontsize="medium")
  axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncol=2, frameon=False)  # above the axes, where no data is
  axes.set_xlabel("attempted step")
  axes.set_ylabel("loss scale")
  for axes in panels:
    axes.locator_params(axis="x", nbins=8, integer=True, min_n_ticks=1)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.grid(alpha=0.3)
  figure.align_ylabels(panels)
  return figure


def _draw_loss(axes: Any, loss: Curve) -> None:
  """Draws the mean and the range of each part of the curve; a part is one value, if there are few."""
  size = -(-len(loss.values) // MOST_POINTS)
  padded = np.pad(np.array(loss.values, float), (0, -len(loss.values) % size), "constant", constant_values=np.nan)
  parts = np.ma.masked_invalid(padded.reshape(-1, size))
  steps = [np.mean(loss.steps[start : start + size]) for start in range(0, len(loss.steps), size)]
  axes.plot(steps, parts.mean(axis=1), ".-", markersize=2, color=BLUE)
  if size > 1:
    label = "range of {:,} values".format(size)
    axes.fill_between(steps, parts.min(axis=1), parts.max(axis=1), color=BLUE, alpha=0.25, linewidth=0, label=label)
    axes.legend(frameon=False)
  if parts.max() > 100 * parts.min() > 0:
    axes.set_yscale("log")
  axes.set_xlabel("global step (applied steps only)")
  axes.set_ylabel(loss.tag)


# --- gradient ranges -----------------------------------------------------------------------------------------------


def read_ranges(logdir: str) -> Tuple[range_history.History, range_history.Advice]:
  """Returns what a `GradientRangesHook` recorded in `logdir` or below, and the advice that follows."""
  paths = _files_below(logdir, range_history.FILE_NAME)
  if not paths:
    message = "no {} below {}: GradientRangesHook(output_dir=...) writes it"
    raise PlotError(message.format(range_history.FILE_NAME, logdir))
  if len(paths) > 1:
    raise PlotError("found several runs below {}; pass one of them: {}".format(logdir, ", ".join(sorted(paths))))
  try:
    history = range_history.read(range_history.read_text(paths[0]))
  except (ValueError, tf.errors.OpError) as error:
    raise PlotError("cannot read {}: {}".format(paths[0], error)) from error
  advice = range_history.advise(history)
  if advice is None:
    raise PlotError("all gradients in {} are zero or empty".format(paths[0]))
  return history, advice


def draw_ranges(history: range_history.History, advice: range_history.Advice) -> Any:
  """Returns the figure that docs/gradient_ranges.md describes; its height depends on the number of tensors."""
  rows = len(history.tensors)
  lines = textwrap.wrap("Advice: " + advice.text, 130)
  figure = _new_figure(10, min(max(0.16 * rows, 1.5), 14) + 0.2 * len(lines) + 1.6, dpi=150)
  axes, fitting = figure.subplots(1, 2, sharey=True, gridspec_kw={"width_ratios": [4, 1]})
  _draw_histograms(axes, history)
  _draw_fitting_scales(fitting, history, advice)
  axes.set_ylim(rows - 0.5, -0.5)
  labels = _labels(history, advice)
  axes.set_yticks(list(labels))
  axes.set_yticklabels([name if len(name) <= 60 else "..." + name[-57:] for name in labels.values()], fontsize=6)
  title = "Gradients of {} tensors, from the loss (top) to the inputs; {} records, steps {} to {}".format(
    rows, len(history.steps), history.steps[0], history.steps[-1]
  )
  is_red = not all(tensor.is_recorded for tensor in history.tensors.values())
  figure.suptitle(title + ("; red: never finite" if is_red else ""), fontsize="medium")
  figure.supxlabel("\n".join(lines), x=0.01, ha="left", fontsize="medium")
  return figure


def _labels(history: range_history.History, advice: range_history.Advice) -> Dict[int, str]:
  """Returns the labels by row: of tensors that the advice names, extremes (neighbors move down), and some others."""
  names, bounds = list(history.tensors), [tensor.bounds for tensor in history.tensors.values() if tensor.bounds]
  extremes = [max(bounds, key=lambda each: each.low).smallest, min(bounds, key=lambda each: each.high).largest]
  every, row, found = -(-len(names) // MOST_LABELS), -len(names), {}
  for name in [name for name in names if name in advice.text or name in extremes]:
    row = max(names.index(name), row + (every + 1) // 2)
    found[row] = name
  others = [row for row in range(0, len(names), every) if all(abs(row - other) >= every for other in found)]
  return {**found, **{row: names[row] for row in others}}


def _draw_histograms(axes: Any, history: range_history.History) -> None:
  """Draws a row for each tensor, with a column for each binary exponent, and lines at the ends of float16's range."""
  tensors = list(history.tensors.values())
  shift = round(math.log2(history.scale))
  exponents = [exponent for tensor in tensors for exponent in tensor.exponents]
  first = max(min(exponents, default=0), range_history.FLOAT16.lowest - shift - 20)  # far lower ones are added to it
  last = max(exponents + [range_history.FLOAT16.highest]) + 2
  shares = np.zeros([len(tensors), last - first + 1])
  for row, tensor in enumerate(tensors):
    for exponent, count in tensor.exponents.items():
      shares[row, max(exponent - first, 0)] += count / sum(tensor.exponents.values())
    if not tensor.is_recorded:
      axes.axhspan(row - 0.5, row + 0.5, color=RED, linewidth=0)
  shares = np.ma.masked_equal(shares, 0) ** 0.5  # The square root shows small shares, too.
  extent = (first - 0.5, last + 0.5, len(tensors) - 0.5, -0.5)
  axes.imshow(shares, aspect="auto", interpolation="nearest", cmap="Blues", vmin=0, extent=extent)
  number, lowest, highest = history.format
  scales = [(0, ORANGE, number + " without loss scaling"), (shift, GREEN, "{} at scale 2**{}".format(number, shift))]
  for own, color, label in scales if shift else scales[:1]:
    axes.axvline(lowest - own - 0.5, color=color, linewidth=1, linestyle="--", label=label)
    axes.axvline(highest - own + 0.5, color=color, linewidth=1, linestyle="--")
  axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncol=2, frameon=False)
  axes.set_xlabel("binary exponent of the gradient, without a loss scale")
  axes.set_xlim(first - 0.5, last + 0.5)


def _draw_fitting_scales(axes: Any, history: range_history.History, advice: range_history.Advice) -> None:
  """Draws, for each tensor, the scales that fit all records, and behind them those that fit all tensors.

  A red bar is between the largest scale that does not overflow and the smallest that is needed, if that is larger. A
  red line is the smallest scale at which a record was not finite.
  """
  largest = 0
  for row, tensor in enumerate(history.tensors.values()):
    if tensor.bounds is not None:
      low, high = tensor.bounds[:2]
      color = RED if low > high else BLUE if tensor.is_selected else "0.7"
      axes.barh(row, high - low, 0.6, left=low, color=color)
      largest = max(largest, high)
  not_finite = min([below.high for _, below in history.overflows], default=range_history.LARGEST_SCALE)
  if not_finite < range_history.LARGEST_SCALE:
    axes.axvline(not_finite + 1, color=RED, linewidth=1, linestyle="--")
  if advice.low <= advice.high:
    axes.axvspan(advice.low, advice.high, color=GREEN, alpha=0.3, linewidth=0, zorder=0)
  axes.set_xlim(-1, min(largest, max(advice.low, advice.high, 0) + 20) + 1)
  axes.set_xlabel("loss scales 2**n\nthat fit all records")
