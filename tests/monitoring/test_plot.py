"""Tests of the plot of a run, from event files of a MonitoredTrainingSession, and of its command."""

import glob
import os
import re
import shutil
import struct
import sys
import time

import numpy as np
import pytest

import mp_compat
from mp_compat import __main__ as command_line
from mp_compat.monitoring import plot
from tests import testing
from tests.testing import FINITE
from tests.testing import OVERFLOW
from tests.testing import Optimizer
from tests.testing import Training
from tests.testing import tf


def train(directory, xs, checkpoints=True):
  """Trains on the gradients `xs`. Returns `directory`.

  The hook writes events to `directory`/hook, the session writes checkpoints and summaries to `directory`.
  """
  with tf.Graph().as_default():
    training = Training()
    opt = Optimizer(tf.train.GradientDescentOptimizer(1.0), mp_compat.DynamicLossScale(8.0, 3))
    train_op = opt.minimize(training.loss, training.global_step)
    if checkpoints:
      tf.summary.scalar("model/loss", tf.reduce_sum(tf.where_v2(tf.is_finite(training.x), training.x, 0.0)))
    hooks = [mp_compat.LossScaleHook(opt, None, output_dir=os.path.join(directory, "hook"))]
    with tf.train.MonitoredTrainingSession(
      checkpoint_dir=directory if checkpoints else None,
      hooks=hooks,
      save_summaries_steps=1,
      save_summaries_secs=None,
      log_step_count_steps=None,
    ) as sess:
      for x in xs:
        sess.run(train_op, {training.x: x})
  return directory


@pytest.fixture(name="rundir")
def _rundir(tmp_path):
  return train(str(tmp_path), [FINITE, OVERFLOW, FINITE, FINITE, FINITE, OVERFLOW])


def test_plot_reads_events_of_hook(rundir):
  os.symlink("hook", os.path.join(rundir, "latest"))
  series = plot.read(rundir)
  assert series._replace(loss=None) == plot.Series([0, 2, 5, 6], [8.0, 4.0, 8.0, 4.0], skipped=[0, 1, 1, 2], loss=None)
  assert series.loss.tag == "model/loss" and set(series.loss.values) <= {1.0, 2.0, 3.0}


def test_resumed_run_continues_counts(tmp_path):
  for pause in (0.0, 1.1):  # the names of event files contain the time in seconds
    time.sleep(pause)
    train(str(tmp_path), [FINITE, OVERFLOW, FINITE], checkpoints=False)
  series = plot.read(str(tmp_path))
  assert series == plot.Series([0, 2, 3, 5, 6], [8.0, 4.0, 8.0, 4.0, 4.0], skipped=[0, 1, 1, 2, 2], loss=None)
  assert len(plot.draw(series).axes) == 1


def test_restarts_within_one_second_are_ordered(tmp_path):
  """The first event of a file has a time in whole seconds, which may be before the last event of the run before."""
  while time.time() % 1 > 0.2:
    time.sleep(0.01)
  for step in range(3):
    with tf.Graph().as_default(), tf.summary.FileWriter(
      str(tmp_path), filename_suffix=".{}".format(5 - step)
    ) as writer:
      for count in range(2):
        values = {plot.SCALE: 8.0, plot.SKIPPED: step}
        summary = tf.Summary(value=[tf.Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()])
        writer.add_summary(summary, 2 * step + count)
  series = plot.read(str(tmp_path))
  assert (series.steps, series.skipped) == ([0, 1, 2, 3, 4, 5], [0, 0, 1, 1, 2, 2])


def test_truncated_file_is_read_partially(rundir):
  (path,) = glob.glob(os.path.join(rundir, "hook", "*tfevents*"))
  with open(path, "r+b") as file:
    file.truncate(os.path.getsize(path) - 5)
  assert plot.read(rundir).steps == [0, 2, 5]


def test_plot_shows_data_read(rundir):
  figure = plot.draw(plot.read(rundir))
  loss, scale = figure.axes
  steps, ticks = scale.lines
  np.testing.assert_array_equal(np.transpose(steps.get_xydata()), [[0, 2, 5, 6], [8.0, 4.0, 8.0, 4.0]])
  assert list(ticks.get_xdata()) == [2, 6] and scale.get_yscale() == "log"
  assert scale.get_title(loc="left") == "2 of 6 attempted steps skipped (33%)"
  assert (loss.get_xlabel(), loss.get_ylabel()) == ("global step (applied steps only)", "model/loss")
  assert scale.get_xlabel() == "attempted step"


def drawn_loss(values):
  """Returns the axes of a loss curve."""
  curve = plot.Curve("loss", list(range(len(values))), list(values))
  return plot.draw(plot.Series([1, len(values)], [8.0, 16.0], [0, 0], curve)).axes[0]


def test_long_loss_curves_are_drawn_as_means():
  axes = drawn_loss(np.sin(np.arange(100000.0)))
  (line,) = axes.lines
  assert len(line.get_xdata()) == plot.MOST_POINTS and abs(line.get_ydata()).max() < 0.1
  assert axes.get_legend().get_texts()[0].get_text() == "range of 250 values"


@pytest.mark.parametrize(
  "values, scale",
  [([500.0, np.nan, 1.0], "log"), ([500.0, 5.1], "linear"), ([500.0, -1.0], "linear"), ([np.inf], "linear")],
)
def test_wide_range_is_logarithmic(values, scale):
  assert drawn_loss(values).get_yscale() == scale


def test_tensor_summaries_are_read(tmp_path):
  with tf.Graph().as_default(), tf.summary.FileWriter(str(tmp_path)) as writer:
    for step in range(2):
      for tag, value in [("scale", 8.0), ("skipped_steps", step), ("words", b"no number")]:
        summary = tf.Summary.Value(tag="loss_scale/" + tag, tensor=tf.make_tensor_proto(value))
        writer.add_summary(tf.Summary(value=[summary]), step)
  assert plot.read(str(tmp_path)) == plot.Series([0, 1], [8.0, 8.0], skipped=[0, 1], loss=None)


def test_missing_matplotlib_is_named(monkeypatch):
  monkeypatch.setitem(sys.modules, "matplotlib", None)
  monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
  with pytest.raises(plot.PlotError, match=r"needs matplotlib \(.*\): pip install matplotlib"):
    drawn_loss([1.0])


@pytest.mark.matrix
def test_plot_command_writes_png(rundir, tmp_path):
  output = str(tmp_path / "scale.png")
  done = testing.run_python("-W", "ignore", "-m", "mp_compat", "plot", rundir, "-o", output)
  assert done.stdout == "Wrote {}: 2 of 6 attempted steps skipped (33%).\n".format(output)
  with open(output, "rb") as file:
    header = file.read(24)
  assert header[:8] == b"\x89PNG\r\n\x1a\n" and struct.unpack(">II", header[16:]) == (1920, 1080)


@pytest.mark.parametrize(
  "name, begins", [("scale.pdf", b"%PDF"), ("scale.SVG", b"<?xml"), ("scale", b"\x89PNG"), ("v1.0/scale", b"\x89PNG")]
)
def test_file_suffix_selects_format(name, begins, rundir, tmp_path):
  output = tmp_path / name
  output.parent.mkdir(exist_ok=True)
  plot.save(plot.draw(plot.read(os.path.join(rundir, "hook"))), str(output))
  assert output.read_bytes().startswith(begins)


@pytest.mark.parametrize(
  "arguments, words",
  [
    (["plot", "{run}/nowhere", "-o", "x.png"], "no such directory: "),
    (["plot", "{run}/empty", "-o", "x.png"], "no event files"),
    (["plot", "{other}/broken", "-o", "x.png"], "cannot read .*events.out.tfevents.1: "),
    (["plot", "{other}/two", "-o", "x.png"], "found several runs below .*pass one of them: .*two.a, .*two.b"),
    (["plot", "{run}/other", "-o", "x.png"], "tags loss_scale/scale and loss_scale/skipped_steps, .* found x"),
    (["plot", "{run}", "-o", "x.png", "--loss_tag", "none"], "no scalar with the tag none .* found .*model/loss"),
    (["plot", "{run}/hook", "-o", "{run}/x.xyz"], "cannot write .*x.xyz: .*not supported .*pdf, .*png"),
    (["plot", "{run}/hook", "-o", "{run}/no/x.png"], "cannot write .*x.png: .*No such file"),
    (["plot", "{run}/hook", "-o", "{run}/empty"], "cannot write .*empty: .*Is a directory"),
  ],
)
def test_plot_errors_are_one_line(rundir, tmp_path_factory, arguments, words, capsys):
  os.mkdir(os.path.join(rundir, "empty"))
  other = tmp_path_factory.mktemp("other")
  (other / "broken").mkdir()
  (other / "broken" / "events.out.tfevents.1").symlink_to("nowhere")
  for name in "ab":
    shutil.copytree(os.path.join(rundir, "hook"), str(other / "two" / name))
  with tf.Graph().as_default(), tf.summary.FileWriter(os.path.join(rundir, "other")) as writer:
    writer.add_summary(tf.Summary(value=[tf.Summary.Value(tag="x", simple_value=1.0)]))
  verbosity = tf.logging.get_verbosity()
  try:
    assert command_line.main([argument.format(run=rundir, other=other) for argument in arguments]) == 2
  finally:
    tf.logging.set_verbosity(verbosity)
  line = capsys.readouterr().err.splitlines()[-1]
  assert line.startswith("mp_compat plot: ") and re.search(words, line)
  assert not os.path.exists(os.path.join(rundir, "x.xyz"))


@pytest.mark.usefixtures("graph")
def test_hooks_of_one_directory_raise(tmp_path):
  """Their runs took place at the same time; those of a run that resumes follow each other."""
  training = Training()
  opts = [Optimizer(tf.train.GradientDescentOptimizer(1.0), 8.0) for _ in range(2)]
  train_ops = [opt.minimize(training.loss) for opt in opts]
  hooks = [mp_compat.LossScaleHook(opt, 1, output_dir=str(tmp_path)) for opt in opts]
  with tf.train.MonitoredTrainingSession(hooks=hooks) as sess:
    for _ in range(4):
      sess.run(train_ops, {training.x: FINITE})
  with pytest.raises(plot.PlotError, match="several LossScaleHooks wrote to .* at the same time: give each its own"):
    plot.read(str(tmp_path))


def test_help_lists_commands(capsys):
  with pytest.raises(SystemExit):
    command_line.main(["--help"])
  assert "plot" in capsys.readouterr().out
