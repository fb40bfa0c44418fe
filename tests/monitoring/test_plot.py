"""The picture of a run, drawn from event files that real MonitoredTrainingSessions wrote, and the command for it."""

import glob
import os
import struct
import subprocess
import sys
import time

import numpy as np
import pytest

import mp_compat
from mp_compat import __main__ as command_line
from mp_compat.monitoring import plot
from tests import testing
from tests.testing import BAD
from tests.testing import GOOD
from tests.testing import Job
from tests.testing import tf


def train(directory, xs, hook=True, checkpoints=True):
  """Trains on these gradients: the hook's events go to `directory`/hook, checkpoints and summaries to `directory`."""
  with tf.Graph().as_default():
    job = Job()
    opt = mp_compat.MixedPrecisionLossScaleOptimizer(
        tf.train.GradientDescentOptimizer(1.), mp_compat.DynamicLossScale(8., 3), add_summaries=checkpoints)
    train_op = opt.minimize(job.loss, job.global_step)
    if checkpoints:
      tf.summary.scalar("model/loss", tf.reduce_sum(tf.where_v2(tf.is_finite(job.x), job.x, 0.)))
    hooks = [mp_compat.LossScaleHook(opt, None, output_dir=os.path.join(directory, "hook"))] if hook else []
    with tf.train.MonitoredTrainingSession(
        checkpoint_dir=directory if checkpoints else None, hooks=hooks, save_summaries_steps=1,
        save_summaries_secs=None, log_step_count_steps=None) as sess:
      for x in xs:
        sess.run(train_op, {job.x: x})
  return directory


@pytest.fixture(name="rundir")
def _rundir(tmp_path):
  return train(str(tmp_path), [GOOD, BAD, GOOD, GOOD, GOOD, BAD])


def command(*arguments):
  """Runs the command line in a process of its own."""
  return subprocess.run([sys.executable, "-W", "ignore", "-m", "mp_compat"] + list(arguments),
                        env=testing.environment(), capture_output=True, text=True, check=False)


def test_the_hooks_events_come_first_and_are_read_over_attempted_steps(rundir):
  series = plot.read(rundir)
  assert series[:4] == (True, [0, 2, 5, 6], [8., 4., 8., 4.], [0, 1, 1, 2])
  assert series.loss.tag == "model/loss" and set(series.loss.values) <= {1., 2., 3.}


def test_summaries_are_read_over_global_steps(tmp_path):
  series = plot.read(train(str(tmp_path), [GOOD, GOOD, BAD, GOOD, GOOD], hook=False))
  assert not series.attempted and series.steps == sorted(set(series.steps)) and series.steps[-1] == 4
  assert series.scales[0] == 8. and series.scales[-1] == 4. and series.skipped[-1] <= 1


def test_a_run_that_was_resumed_is_counted_on(tmp_path):
  for _ in range(2):
    train(str(tmp_path), [GOOD, BAD, GOOD], checkpoints=False)
    time.sleep(1.1)  # Event files are named by the second.
  series = plot.read(str(tmp_path))
  assert series[:4] == (True, [0, 2, 3, 5, 6], [8., 4., 8., 4., 4.], [0, 1, 1, 2, 2]) and series.loss is None


def test_a_file_is_read_up_to_a_record_that_is_incomplete(rundir):
  path, = glob.glob(os.path.join(rundir, "hook", "*tfevents*"))
  with open(path, "r+b") as file:
    file.truncate(os.path.getsize(path) - 5)
  assert plot.read(rundir).steps == [0, 2, 5]


def test_what_is_drawn_is_what_was_read(rundir):
  figure = plot.draw(plot.read(rundir))
  loss, scale = figure.axes
  steps, ticks = scale.lines
  np.testing.assert_array_equal(np.transpose(steps.get_xydata()), [[0, 2, 5, 6], [8., 4., 8., 4.]])
  assert list(ticks.get_xdata()) == [2, 6] and scale.get_yscale() == "log"
  assert scale.get_title(loc="left") == "2 of 6 attempted steps skipped (33%)"
  assert (loss.get_xlabel(), loss.get_ylabel(), scale.get_xlabel()) == (
      "global step (applied steps only)", "model/loss", "attempted step")


def test_a_long_loss_is_drawn_as_means_and_ranges():
  values = list(np.sin(np.arange(100000.)))
  series = plot.Series(False, [1, 100000], [8., 16.], [0, 0], plot.Curve("loss", list(range(100000)), values))
  line, = plot.draw(series).axes[0].lines
  assert len(line.get_xdata()) == plot.MOST_POINTS and abs(line.get_ydata()).max() < .1


def test_a_loss_that_falls_by_two_orders_has_a_logarithmic_axis():
  series = plot.Series(False, [1, 3], [8., 16.], [0, 0], plot.Curve("loss", [1, 2, 3], [500., 5., 1.]))
  assert plot.draw(series).axes[0].get_yscale() == "log"


def test_summaries_of_tensorflow_2_are_read_too(tmp_path):
  with tf.Graph().as_default(), tf.summary.FileWriter(str(tmp_path)) as writer:
    for step in range(2):
      for tag, value in [("scale", 8.), ("skipped_steps", step), ("words", b"no number")]:
        writer.add_summary(tf.Summary(value=[
            tf.Summary.Value(tag="loss_scale/" + tag, tensor=tf.make_tensor_proto(value))]), step)
  assert plot.read(str(tmp_path))[:4] == (True, [0, 1], [8., 8.], [0, 1])


def test_a_file_that_cannot_be_read_is_named(tmp_path):
  (tmp_path / "events.out.tfevents.1").symlink_to(tmp_path / "nowhere")
  with pytest.raises(plot.PlotError, match="cannot read .*events.out.tfevents.1: "):
    plot.read(str(tmp_path))


def test_without_matplotlib_the_command_that_installs_it_is_told(monkeypatch):
  monkeypatch.setitem(sys.modules, "matplotlib", None)
  monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
  with pytest.raises(plot.PlotError, match=r"needs matplotlib \(.*\): pip install mp_compat\[plot\]"):
    plot.draw(plot.Series(True, [0], [8.], [0], None))


def test_without_a_loss_there_is_one_panel():
  assert len(plot.draw(plot.Series(True, [0], [8.], [0], None)).axes) == 1


def test_the_command_writes_a_png_and_says_so(rundir, tmp_path):
  output = str(tmp_path / "scale.png")
  done = command("plot", rundir, "-o", output)
  assert (done.returncode, done.stdout) == (
      0, "Wrote {}: 2 of 6 attempted steps skipped (33%).\n".format(output)), done.stderr
  with open(output, "rb") as file:
    header = file.read(24)
  assert header[:8] == b"\x89PNG\r\n\x1a\n" and struct.unpack(">II", header[16:]) == (1920, 1080)
  assert not glob.glob(output + "*tmp")


@pytest.mark.parametrize("name, begins", [
    ("scale.pdf", b"%PDF"), ("scale.SVG", b"<?xml"), ("scale", b"\x89PNG"), ("v1.0/scale", b"\x89PNG")])
def test_the_suffix_chooses_the_format(name, begins, rundir, tmp_path):
  output = tmp_path / name
  output.parent.mkdir(exist_ok=True)
  plot.plot(os.path.join(rundir, "hook"), str(output))
  assert output.read_bytes().startswith(begins)


@pytest.mark.parametrize("arguments, words", [
    (["plot", "{run}/nowhere", "-o", "x.png"], "no such directory: "),
    (["plot", "{run}/empty", "-o", "x.png"], "no event files"),
    (["plot", "{run}/other", "-o", "x.png"],
     "expected the tags loss_scale/scale and loss_scale/skipped_steps, .* found x"),
    (["plot", "{run}", "-o", "x.png", "--loss_tag", "none"], "no scalar with the tag none .* found .*model/loss"),
    (["plot", "{run}/hook", "-o", "{run}/x.xyz"], "expected a name that ends in one of .*.pdf, .*.png, .*got .*x.xyz"),
    (["plot", "{run}/hook", "-o", "{run}/no/x.png"], "cannot write .*x.png: No such file"),
    (["plot", "{run}/hook", "-o", "{run}/empty"], "cannot write .*empty: Is a directory"),
])
def test_what_cannot_be_drawn_is_one_line_of_error(rundir, arguments, words, capsys):
  os.mkdir(os.path.join(rundir, "empty"))
  with tf.Graph().as_default(), tf.summary.FileWriter(os.path.join(rundir, "other")) as writer:
    writer.add_summary(tf.Summary(value=[tf.Summary.Value(tag="x", simple_value=1.)]))
  verbosity = tf.logging.get_verbosity()
  try:
    assert command_line.main([argument.format(run=rundir) for argument in arguments]) == 2
  finally:
    tf.logging.set_verbosity(verbosity)
  line = capsys.readouterr().err.splitlines()[-1]
  assert line.startswith("mp_compat plot: ")
  with pytest.raises(plot.PlotError, match=words):
    raise plot.PlotError(line)
  assert not glob.glob(os.path.join(rundir, "*.tmp")) and not os.path.exists(os.path.join(rundir, "x.xyz"))


def test_two_runs_are_not_mixed(tmp_path):
  for name in ["a", "b"]:
    train(str(tmp_path / name), [GOOD], checkpoints=False)
  with pytest.raises(plot.PlotError, match="more than one run below .*name one of them: .*a.hook, .*b.hook"):
    plot.read(str(tmp_path))


def test_help_names_the_commands():
  assert "plot" in command("--help").stdout
