# SPDX-License-Identifier: Apache-2.0
"""Plots the loss scale and the loss of a run from TensorBoard event files."""

import bisect
import io
import os
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

import numpy as np

from mp_compat._tensorflow import tf

SCALE = "loss_scale/scale"
SKIPPED = "loss_scale/skipped_steps"

# Okabe and Ito's palette, which is safe for all kinds of color vision.
LOSS_COLOR, SCALE_COLOR, SKIPPED_COLOR = "#0072B2", "#009E73", "#D55E00"

MOST_POINTS = 400  # the largest number of points of a loss curve; longer ones are drawn as means and ranges


class PlotError(Exception):
  """An error that the user can correct, such as missing data; the message is one line."""


class Curve(NamedTuple):
  """A scalar over increasing global steps."""

  tag: str
  steps: List[int]
  values: List[float]


class Series(NamedTuple):
  """The data of a plot: the loss scale and the total of skipped steps at increasing attempted steps.

  `steps` include each change of the scale and each skipped step.
  """

  steps: List[int]
  scales: List[float]
  skipped: List[int]
  loss: Optional[Curve]


_Point = Tuple[int, float, int]  # a step, the loss scale, and the total of skipped steps


class _EventFile(NamedTuple):
  """The scalars of one event file: `{tag: [(step, value)]}`."""

  directory: str
  times: List[float]  # of the first and the last event, in seconds
  scalars: Dict[str, List[Tuple[int, float]]]


def save(figure: Any, output: str) -> None:
  """Writes a `matplotlib.figure.Figure` to an image file. If it cannot be drawn, an existing file is unchanged.

  Args:
    figure: the figure.
    output: the file to write or replace. Its suffix names the format: `.png`, `.pdf`, `.svg` or any other that
      matplotlib writes; PNG without a suffix.

  Raises:
    PlotError: If matplotlib does not know the format, or `output` cannot be written.
  """
  image = io.BytesIO()
  try:
    figure.savefig(image, format=os.path.splitext(output)[1][1:].lower() or "png")
    with open(output, "wb") as file:
      file.write(image.getvalue())
  except (OSError, ValueError) as error:
    raise PlotError("cannot write {}: {}".format(output, error)) from error


def new_figure(width: float, height: float, dpi: int) -> Any:
  """Returns an empty `matplotlib.figure.Figure` of a size in inches, which arranges its panels.

  Raises:
    PlotError: If matplotlib is missing.
  """
  try:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
  except ImportError as error:
    raise PlotError("needs matplotlib ({}): pip install matplotlib".format(error)) from error
  figure = Figure(figsize=(width, height), dpi=dpi, layout="constrained")
  FigureCanvasAgg(figure)
  return figure


def read(logdir: str, loss_tag: Optional[str] = None) -> Series:
  """Reads the loss scale and the loss of one run.

  The event files of one directory are the sessions of one run, in order of time. If a session resumed before the last
  step of an earlier session, the earlier values from that step on are dropped. If a LossScaleHook counts from 0 again,
  its counts are added to the earlier ones.

  Args:
    logdir: a directory that contains event files at any depth, among them those of a LossScaleHook's `output_dir`. A
      file is read up to its first damaged record, because the last record of a running job is often incomplete.
    loss_tag: the tag of the loss. By default `loss` or a tag that ends in `/loss`; the directory of the loss scale is
      searched before all others.

  Returns:
    The series. Its `loss` is None if `loss_tag` is None and no default tag is found.

  Raises:
    PlotError: If there is no such directory, no event file, no loss scale, no `loss_tag`, or more than one run, or if
      a file cannot be read. Two LossScaleHooks that wrote to one directory at the same time count as two runs.
  """
  files = _read_files(logdir)
  by_hook = [file for file in files if file.scalars.get(SCALE) and file.scalars.get(SKIPPED)]
  if not by_hook:
    raise PlotError(
      "no loss scale below {}: expected the tags {} and {}, which LossScaleHook(output_dir=...) writes, but found "
      "{}".format(logdir, SCALE, SKIPPED, _tags(files))
    )
  directories = sorted({file.directory for file in by_hook})
  if len(directories) > 1:
    raise PlotError("found several runs below {}; pass one of them: {}".format(logdir, _enumeration(directories)))
  if any(later.times[0] < earlier.times[-1] for earlier, later in zip(by_hook, by_hook[1:])):
    raise PlotError(
      "several LossScaleHooks wrote to {} at the same time: give each its own output_dir. To plot what is there, move "
      "the event files of each into a directory of its own".format(directories[0])
    )
  loss = _find_loss(files, loss_tag, directories)
  if loss_tag is not None and loss is None:
    raise PlotError("no scalar with the tag {} below {}: found {}".format(loss_tag, logdir, _tags(files)))
  steps, scales, skipped = map(list, zip(*_join_sessions(by_hook)))
  return Series(steps, scales, skipped, loss)


def draw(series: Series) -> Any:
  """Draws the loss, if there is one, and below it the loss scale, with ticks at skipped steps.

  Args:
    series: the data to draw.

  Returns:
    A `matplotlib.figure.Figure` of 1920 by 1080 pixels.

  Raises:
    PlotError: If matplotlib is missing.
  """
  figure = new_figure(8, 4.5, dpi=240)
  from matplotlib import ticker

  panels = figure.subplots(2 if series.loss else 1, squeeze=False)[:, 0]
  if series.loss:
    _draw_loss(panels[0], series.loss)
  _draw_scale(panels[-1], series)
  panels[-1].set_xlabel("attempted step")
  for axes in panels:
    axes.xaxis.set_major_locator(ticker.MaxNLocator(8, integer=True, min_n_ticks=1))
    axes.xaxis.set_major_formatter(ticker.StrMethodFormatter("{x:,.0f}"))
    axes.margins(x=0.01)
    axes.grid(color="0.9")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
  if series.loss:  # The panels have different axes, which are therefore far from each other.
    panels[0].set_xlabel("global step (applied steps only)")
    panels[0].xaxis.tick_top()
    panels[0].xaxis.set_label_position("top")
    panels[0].spines["top"].set_visible(True)
    panels[0].spines["bottom"].set_visible(False)
    if panels[0].get_legend():
      panels[0].legend(loc="best", frameon=False)
  figure.align_ylabels(panels)
  return figure


def _draw_loss(axes: Any, loss: Curve) -> None:
  values = np.ma.masked_invalid(loss.values)
  size = -(-len(values) // MOST_POINTS)
  if size == 1:
    axes.plot(loss.steps, values, _line(loss.steps), color=LOSS_COLOR)
  else:
    padded = np.pad(np.array(loss.values, float), (0, -len(values) % size), "constant", constant_values=np.nan)
    parts = np.ma.masked_invalid(padded.reshape(-1, size))
    steps = [np.mean(loss.steps[start : start + size]) for start in range(0, len(values), size)]
    band = {"color": LOSS_COLOR, "alpha": 0.25, "linewidth": 0, "label": "range of {:,} values".format(size)}
    axes.fill_between(steps, parts.min(axis=1), parts.max(axis=1), **band)
    axes.plot(steps, parts.mean(axis=1), color=LOSS_COLOR, label="mean")
    _add_legend(axes)
  finite = values.compressed()
  if finite.size and finite.min() > 0 and finite.max() / finite.min() > 100:
    axes.set_yscale("log")
  axes.set_ylabel(loss.tag)


def _draw_scale(axes: Any, series: Series) -> None:
  axes.plot(
    series.steps, series.scales, _line(series.steps), drawstyle="steps-post", color=SCALE_COLOR, label="loss scale"
  )
  before = [0] + series.skipped
  ticks = [step for step, earlier, count in zip(series.steps, before, series.skipped) if count > earlier]
  axes.plot(
    ticks,
    [0.045] * len(ticks),
    "|",
    transform=axes.get_xaxis_transform(),
    color=SKIPPED_COLOR,
    markersize=9,
    label="skipped step",
  )
  axes.set_yscale("log", base=2)
  axes.margins(y=0.15)  # room for the ticks at the bottom
  axes.set_ylabel("loss scale")
  axes.set_title(describe(series), loc="left", fontsize="medium")
  _add_legend(axes)


def describe(series: Series) -> str:
  """Returns a short text with the number of steps and the number of skipped steps."""
  last, skipped = series.steps[-1], series.skipped[-1]
  return "{:,} of {:,} attempted steps skipped{}".format(
    skipped, last, " ({:.2g}%)".format(100.0 * skipped / last) if skipped else ""
  )


def _line(steps: List[int]) -> str:
  return "-" if len(steps) > 1 else "o"  # a line of one point is invisible


def _add_legend(axes: Any) -> None:
  """Places the legend above the axes, where it covers no data."""
  axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncol=2, frameon=False, borderaxespad=0.1)


def _read_files(logdir: str) -> List[_EventFile]:
  """Returns all event files below a directory, ordered by time."""
  if not os.path.isdir(logdir):
    raise PlotError("no such directory: {}".format(logdir))
  paths = [
    os.path.join(directory, name)
    for directory, _, names in os.walk(logdir)
    for name in sorted(names)
    if "tfevents" in name
  ]
  if not paths:
    raise PlotError("no event files (*tfevents*) below {}".format(logdir))
  return sorted((_read_file(path) for path in paths), key=lambda file: (file.times[:1], file.directory))


def _read_file(path: str) -> _EventFile:
  times: List[float] = []
  scalars: Dict[str, List[Tuple[int, float]]] = {}
  try:
    for event in tf.train.summary_iterator(path):
      times[1:] = [event.wall_time]
      for value in event.summary.value:
        if value.HasField("simple_value"):
          scalars.setdefault(value.tag, []).append((event.step, value.simple_value))
        elif value.HasField("tensor") and not value.tensor.tensor_shape.dim and _is_number(value.tensor.dtype):
          scalars.setdefault(value.tag, []).append((event.step, float(tf.make_ndarray(value.tensor))))
  except tf.errors.DataLossError:
    pass  # A job is still writing the record, or was killed while writing it.
  except tf.errors.OpError as error:
    raise PlotError("cannot read {}: {}".format(path, type(error).__name__)) from error
  return _EventFile(os.path.dirname(path), times, scalars)


def _is_number(dtype: int) -> bool:
  return tf.as_dtype(dtype).is_floating or tf.as_dtype(dtype).is_integer


def _points(file: _EventFile) -> List[_Point]:
  """Returns the points of one file. Both tags are written together; the last pair may be incomplete."""
  pairs = zip(file.scalars[SCALE], file.scalars[SKIPPED])
  return [(step, scale, int(skipped)) for (step, scale), (_, skipped) in pairs]


def _join_sessions(files: List[_EventFile]) -> List[_Point]:
  """Returns the points that LossScaleHook wrote; continues counts that start again at 0."""
  joined: List[_Point] = []
  for file in files:
    points = _points(file)
    before = joined[-1] if joined and points[0][0] == 0 else (0, 0.0, 0)
    for step, scale, skipped in points:
      _drop_from(step + before[0], joined)
      joined.append((step + before[0], scale, skipped + before[2]))
  return joined


def _drop_from(step: int, points: List[Any]) -> None:
  """Deletes the points at and after `step`, which an earlier session recorded and a restore discarded."""
  del points[bisect.bisect_left(points, (step,)) :]


def _find_loss(files: List[_EventFile], loss_tag: Optional[str], preferred: List[str]) -> Optional[Curve]:
  """Returns the loss curve of one directory, one of `preferred` if possible; None if no tag matches."""
  candidates = sorted(
    (file.directory not in preferred, file.directory.count(os.sep), file.directory, len(tag), tag)
    for file in files
    for tag in file.scalars
    if (tag == loss_tag if loss_tag is not None else tag == "loss" or tag.endswith("/loss"))
  )
  if not candidates:
    return None
  directory, tag = candidates[0][2], candidates[0][-1]
  points: List[Tuple[int, float]] = []
  for file in files:
    if file.directory == directory:
      for step, value in file.scalars.get(tag, []):
        _drop_from(step, points)
        points.append((step, value))
  return Curve(tag, [step for step, _ in points], [value for _, value in points])


def _tags(files: List[_EventFile]) -> str:
  return _enumeration(sorted({tag for file in files for tag in file.scalars})) or "no scalars"


def _enumeration(names: List[str]) -> str:
  return ", ".join(names[:10]) + (" and {} more".format(len(names) - 10) if len(names) > 10 else "")
