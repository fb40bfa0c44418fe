"""Tests of the chart of gradient ranges, and of the command that draws it."""

import json
import sys

import numpy as np
import pytest

from mp_compat import __main__ as command_line
from mp_compat.monitoring import range_history
from mp_compat.tools import ranges_chart
from tests import testing
from tests.monitoring import test_range_history as recorded

RECORD = json.dumps(recorded.record(1, {"a": {0: 1}, "b": {-9: 5}}))


def draw(measured, **changes_of_advice):
  pytest.importorskip("matplotlib")
  return ranges_chart.draw(
    measured, range_history.advise(measured)._replace(**changes_of_advice)
  )


@pytest.mark.parametrize(
  "tensors, text",
  [(1, "advice "), (300, "advice ")]
  + [
    pytest.param(tensors, "", marks=pytest.mark.slow) for tensors in (20, 60, 61, 1000)
  ],
)
def test_texts_of_drawing_do_not_overlap(tensors, text):
  """The texts are within the figure, and up to 60 tensors are labeled."""
  names = [
    "gradients/model_1/block/dense_{}/MatMul_grad/MatMul".format(index)
    for index in range(tensors)
  ]
  steps = [
    recorded.record(step, {name: {-20: 5, -9: 1} for name in names}, 1024.0)
    for step in (0, 2000)
  ]
  measured = recorded.history(*steps)
  figure = draw(measured, text=text * 300 or range_history.advise(measured).text)
  figure.draw_without_rendering()
  labels = figure.axes[0].get_yticklabels()
  others = figure.axes[0].get_legend().get_texts() + [
    axes.xaxis.label for axes in figure.axes
  ]
  assert (
    min(tensors, 31) <= len(labels) <= 60
    and len(figure.texts) == 2
    and len(others) == 4
  )
  texts = figure.texts + others + labels
  boxes = [text.get_window_extent() for text in texts]
  for index, box in enumerate(boxes):
    assert figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1
    assert figure.bbox.y0 <= box.y0 and box.y1 <= figure.bbox.y1
    assert not [texts[other] for other in range(index) if box.overlaps(boxes[other])]


def test_tensors_that_decide_are_labeled():
  """Also if they are neighbors; the advice names the selected ones, and others may be
  more extreme.
  """
  exponents = {"tensor_{:03d}".format(index): {-9: 1} for index in range(319)}
  exponents.update({"tensor_100": {-30: 1}, "tensor_101": {-5: 1}})
  measured = recorded.record(1, exponents)
  unselected = recorded.record(
    1, {"tensor_201": {-60: 1}, "tensor_203": {3: 1}}, dtype="float32", selected=False
  )
  history = recorded.history(recorded.together(measured, unselected))
  figure = draw(history)
  figure.draw_without_rendering()
  axes = figure.axes[0]
  rows = labels_of(figure)
  assert {"tensor_100", "tensor_101", "tensor_201", "tensor_203"} < set(rows) and len(
    rows
  ) > 50
  # of tensor_101
  assert max(abs(row - int(name[-3:])) for name, row in rows.items()) == 2
  boxes = [label.get_window_extent() for label in axes.get_yticklabels()]
  assert not [
    one
    for index, one in enumerate(boxes)
    if any(one.overlaps(other) for other in boxes[:index])
  ]


def labels_of(figure):
  """Returns the rows of labels by their texts."""
  axes = figure.axes[0]
  labels = [label.get_text() for label in axes.get_yticklabels()]
  return dict(zip(labels, axes.get_yticks()))


def test_names_within_advice_text_are_not_labeled():
  """A tensor "a" is not what "a fixed loss scale" names."""
  exponents = {"tensor_{:03d}".format(index): {-9: 1} for index in range(300)}
  exponents.update({"tensor_002": {-30: 1}, "tensor_004": {-5: 1}})
  words = ["scale", "a", "loss", "2", "of"]
  for index, word in enumerate(words):
    exponents = rename(exponents, "tensor_{:03d}".format(11 + 5 * index), word)
  history = recorded.history(recorded.record(1, exponents))
  assert all(word in range_history.advise(history).text for word in words)
  labels = set(labels_of(draw(history)))
  assert {"tensor_002", "tensor_004"} < labels and not labels.intersection(words)


def rename(tensors, old, new):
  """Returns tensors in the same order, one of them with another name."""
  return {new if name == old else name: each for name, each in tensors.items()}


def test_ends_of_long_names_are_labels():
  name = "tower_0/" * 9 + "MatMul"
  (label,) = labels_of(draw(recorded.history(recorded.record(1, {name: {0: 1}}))))
  assert len(label) == 60 and label.startswith("...") and name.endswith(label[3:])


def test_labels_stay_within_rows():
  """Also if the last tensors decide."""
  exponents = {"tensor_{:03d}".format(index): {-9: 1} for index in range(319)}
  exponents.update({"tensor_317": {-30: 1}, "tensor_318": {-5: 1}})
  rows = labels_of(draw(recorded.history(recorded.record(1, exponents))))
  assert (rows["tensor_317"], rows["tensor_318"]) == (315, 318)
  assert max(rows.values()) == 318


def test_records_of_overflows_only_are_drawn():
  history = recorded.history(recorded.record(1, {"a": {}, "b": {}}, 4.0, nonfinite=1))
  assert set(labels_of(draw(history))) == {"a", "b"}


def test_drawing_shows_what_advice_rests_on():
  finite = {"a": {0: 5}, "wide": {-30: 2**50, 14: 1}, "b": {-10: 5}}
  records_of_step = [
    recorded.record(0, exponents, 16.0, nonfinite, zeros=0, dtype="float32")
    for exponents, nonfinite in [(finite, 0), ({"nan": {0: 1}}, 3)]
  ]
  measured = recorded.history(recorded.together(*records_of_step))
  figure = draw(measured)
  axes, fitting = figure.axes
  assert [label.get_text() for label in axes.get_yticklabels()] == [
    "a",
    "wide",
    "b",
    "nan",
  ]
  (red,) = axes.patches
  box = red.get_window_extent().transformed(axes.transData.inverted())
  np.testing.assert_allclose(sorted([box.y0, box.y1]), [2.5, 3.5])
  bars = [
    (bar.get_y() + bar.get_height() / 2, bar.get_x(), bar.get_x() + bar.get_width())
    for bar in fitting.patches
  ]
  assert bars == [
    (row, *measured.tensors[name].bounds[:2])
    for row, name in enumerate(["a", "wide", "b"])
  ]
  colors = [
    "#{:02X}{:02X}{:02X}".format(
      *[round(255 * part) for part in bar.get_facecolor()[:3]]
    )
    for bar in fitting.patches
  ]
  # No scale fits the second one.
  assert colors == [ranges_chart.BLUE, ranges_chart.RED, ranges_chart.BLUE]


@pytest.mark.matrix
def test_command_writes_chart_and_advice(tmp_path):
  pytest.importorskip("matplotlib")
  (tmp_path / "hook").mkdir()
  (tmp_path / "hook" / range_history.FILE_NAME).write_text(RECORD)
  (tmp_path / "hook" / (range_history.FILE_NAME + ".bak")).write_text(RECORD)
  (tmp_path / "latest").symlink_to("hook")
  output = tmp_path / "ranges.png"
  done = testing.run_python(
    "-W", "ignore", "-m", "mp_compat", "ranges", str(tmp_path), "-o", str(output)
  )
  assert done.stdout.startswith(
    "Wrote {}. Advice: No loss scaling is needed.".format(output)
  )
  assert done.stdout.endswith(".\n") and output.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
  "name, begins",
  [("a.pdf", b"%PDF"), ("a.SVG", b"<?xml"), ("a", b"\x89PNG"), ("v1.0/a", b"\x89PNG")],
)
def test_file_suffix_selects_format(name, begins, tmp_path):
  output = tmp_path / name
  output.parent.mkdir(exist_ok=True)
  ranges_chart.save(draw(range_history.read(RECORD)), str(output))
  assert output.read_bytes().startswith(begins)


@pytest.mark.parametrize(
  "logdir, output, text",
  [
    ("nowhere", "x.png", "no such directory: "),
    ("empty", "x.png", "no gradient_ranges.jsonl below "),
    ("no records", "x.png", "are zero or empty"),
    ("damaged", "x.png", "none of the 1 lines is a record of GradientRangesHook"),
    (".", "x.png", "found several runs below "),
    ("good", "x.xyz", "x.xyz: Format 'xyz' is not supported"),
    ("good", "no/x.png", "No such file"),
    ("good", "empty", "Is a directory"),
  ],
)
def test_command_explains_errors_in_one_line(logdir, output, text, tmp_path, capsys):
  pytest.importorskip("matplotlib")
  (tmp_path / "empty").mkdir()
  for name, content in [("no records", ""), ("damaged", "damaged\n"), ("good", RECORD)]:
    (tmp_path / name).mkdir()
    (tmp_path / name / range_history.FILE_NAME).write_text(content)
  assert (
    command_line.main(["ranges", str(tmp_path / logdir), "-o", str(tmp_path / output)])
    == 2
  )
  (line,) = capsys.readouterr().err.splitlines()
  assert line.startswith("mp_compat ranges: ") and text in line


def test_missing_matplotlib_is_named(monkeypatch):
  monkeypatch.setitem(sys.modules, "matplotlib", None)
  monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
  history = range_history.read(RECORD)
  with pytest.raises(
    ranges_chart.ChartError, match=r"needs matplotlib \(.*\): pip install matplotlib"
  ):
    ranges_chart.draw(history, range_history.advise(history))
