"""Tests what a recorder writes of sessions in this process, and the checksums of
values.
"""

import itertools
import os
import threading

import numpy as np
import pytest

from mp_compat.tools.compare import recorder
from mp_compat.tools.compare import recording
from mp_compat.tools.compare import sessions
from mp_compat.tools.compare import step_building
from tests.testing import tf


def test_digests_differ_if_bits_do():
  nan = np.array([0x7FC00000, 0x7FC00001], np.uint32).view(np.float32)
  values = [
    np.float32([0.0, 1.0]),
    np.float32([-0.0, 1.0]),
    np.float32([1.0, 0.0]),
    np.float32([[0.0, 1.0]]),
    np.int32([0, 0x3F800000]),  # the bits of the first
    np.float64([0.0, 1.0]),
    nan[:1],
    nan[1:],
    np.array([b"a", b"bc"], object),
    np.array([b"ab", b"c"], object),
  ]
  for one, two in itertools.combinations_with_replacement(values, 2):
    is_same = recorder._digest(one) == recorder._digest(np.copy(two))
    assert is_same == (one is two), (one, two)


@pytest.fixture(name="make_recorder")
def _make_recorder(graph, tmp_path, monkeypatch):
  """Returns a function that makes a recorder of all sessions; it takes settings."""
  base, made = sessions.sessions.Base, []
  for name in ("_run", "close", "make_callable", "_make_callable_from_options"):
    monkeypatch.setattr(base, name, getattr(base, name))

  def make(**settings):
    defaults = recording.Settings(
      run=recording.ORIGINAL,
      recording=str(tmp_path / "recording"),
      steps=1000,
      every=1,
      reference=None,
      keep={},
    )
    made.append(recorder.Recorder(defaults._replace(**settings)))
    sessions.observe(made[-1].around, made[-1].end)
    return made[-1]

  yield make
  for each in made:
    each._file.close()


class Descent(tf.train.GradientDescentOptimizer):
  """An optimizer whose steps are recorded."""

  apply_gradients = step_building._recording(
    tf.train.GradientDescentOptimizer.apply_gradients,
    scales_loss=lambda optimizer: False,
    know=lambda step: None,
  )


def minimize(x):
  w = tf.get_variable("w", [], initializer=tf.zeros_initializer())
  return Descent(0.1).minimize(w * x)


def read_records(tmp_path):
  """Returns the index and the number of steps of each record."""
  records = recording.read_records(str(tmp_path / "recording"))
  return [(each.line["index"], each.line["steps"]) for each in records]


def test_sessions_are_recorded_before_the_next_of_their_thread(make_recorder, tmp_path):
  train_op, init = minimize(1.0), tf.global_variables_initializer()
  made = make_recorder(every=2)
  with tf.Session() as first, tf.Session() as second, tf.Session() as other:
    first.run(init)
    first.run(train_op)
    thread = threading.Thread(target=other.run, args=[init], name="other")
    thread.start()
    thread.join()
    second.run(init)
    made.finish()
  assert read_records(tmp_path) == [
    ("MainThread.0.0", 0),
    ("other.0.0", 0),
    ("MainThread.0.1", 1),
    ("MainThread.1.0", 0),
  ]


@pytest.mark.parametrize(
  "every, before, order, expected",
  [
    (1, 0, "check", [0]),  # A run that writes nothing leaves no record.
    (1, 0, "check, train", [0]),
    (1, 0, "train, check", [0, 1]),
    (2, 1, "train, check", [0, 1]),  # The step before explains the values.
  ],
)
def test_failed_runs_are_steps_if_those_ran(
  every, before, order, expected, make_recorder, tmp_path
):
  x = tf.placeholder(tf.float32, [])
  if order == "train, check":
    train_op = minimize(x)
    with tf.control_dependencies([train_op]):
      fails = tf.debugging.check_numerics(x / 0.0, "fails")
  else:
    fails = tf.debugging.check_numerics(x / 0.0, "fails")
    with tf.control_dependencies([fails]):
      train_op = minimize(tf.identity(x))
  made = make_recorder(every=every)
  with tf.Session() as sess:
    sess.run(tf.global_variables_initializer())
    for _ in range(before):
      sess.run(train_op, {x: 1.0})
    with pytest.raises(tf.errors.InvalidArgumentError):
      sess.run(train_op if order == "check, train" else fails, {x: 1.0})
  assert [steps for _, steps in read_records(tmp_path)] == expected
  assert made.notes["steps"] == expected[-1]


@pytest.mark.parametrize("error", [tf.errors.AbortedError, tf.errors.UnavailableError])
def test_lost_sessions_are_not_read(error, make_recorder, tmp_path):
  train_op = minimize(1.0)
  made = make_recorder()
  with tf.Session() as sess:
    sess.run(tf.global_variables_initializer())

    def lose(decisions):
      sessions.sessions.run(sess, None, [train_op, decisions], None, None, None)
      raise error(None, None, "The server was lost.")

    with pytest.raises(error):
      made.around(sess, [train_op], frozenset(), lose)
  assert made.notes["steps"] == 0
  assert read_records(tmp_path) == [("MainThread.0.0", 0)]


def test_sessions_of_servers_are_not_recorded_at_the_end(make_recorder, tmp_path):
  train_op = minimize(1.0)
  made = make_recorder(every=2)
  with tf.Session(tf.train.Server.create_local_server().target) as sess:
    sess.run(tf.global_variables_initializer())
    sess.run(train_op)
    made.finish()
    assert made.notes["steps"] == 1
    assert read_records(tmp_path) == [("MainThread.0.0", 0)]


def test_values_of_any_shape_and_dtype_are_kept(make_recorder, tmp_path):
  w = tf.get_variable(
    "w", initializer=tf.placeholder_with_default([1.0], None), validate_shape=False
  )
  z = tf.get_variable("z", initializer=[1.0 + 2.0j])
  make_recorder(keep={"MainThread.0.0": ["w", "z"]})
  with tf.Session() as sess:
    sess.run([w.initializer, z.initializer])
  path = str(tmp_path / "recording")
  (record,) = recording.read_records(path)
  assert record.variables.shapes == {"w": [-1], "z": [1]}
  kept = recording.read_values(path, "MainThread.0.0")
  assert kept["w"].dtype == np.float64 and kept["w"] == [1.0]
  assert kept["z"].dtype == np.complex128 and kept["z"] == [1.0 + 2.0j]


def test_program_that_was_not_replaced_goes_on(make_recorder, tmp_path, monkeypatch):
  for name in ("execv", "execve"):
    monkeypatch.setattr(os, name, getattr(os, name))
  made = make_recorder()
  recorder._observe_exec(made)
  with pytest.raises(OSError):
    os.execv(str(tmp_path / "absent"), ["absent"])
  assert made.notes["replaced"] is False


def test_recording_that_was_not_begun_has_no_notes(tmp_path):
  assert recording.read_notes(str(tmp_path / "recording")) == {}
