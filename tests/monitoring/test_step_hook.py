"""Tests of the base class of hooks, with subclasses of a program's own."""

import csv
import os
import re
import threading

import numpy as np
import pytest

import mp_compat
from tests import testing
from tests.testing import FINITE
from tests.testing import OVERFLOW
from tests.testing import Optimizer
from tests.testing import sgd
from tests.testing import tf


class Observer(mp_compat.StepHook):
  """Keeps the steps that it observes."""

  def __init__(self, optimizer):
    super().__init__(optimizer)
    self.steps = []

  def after_step(self, run_context, step):
    self.steps.append(step)


@pytest.fixture(name="training")
def _training(graph):
  del graph
  training = testing.Training()
  training.opt = Optimizer(sgd(), mp_compat.DynamicLossScale(8.0, 2))
  training.train_op = training.opt.minimize(training.loss, training.global_step)
  return training


def steps_of(observer):
  return [(step.number, step.is_skipped, step.scale) for step in observer.steps]


def test_steps_are_those_that_the_session_shows(training):
  """The fetched scale and the variables show the same; evaluations are no steps."""
  observer, expected = Observer(training.opt), []
  scale = training.opt.loss_scale()
  with tf.train.MonitoredTrainingSession(hooks=[observer]) as sess:
    for x in (FINITE, OVERFLOW, FINITE, FINITE, FINITE, OVERFLOW):
      before = sess.run(training.w)
      sess.run(training.train_op, {training.x: x})
      after, scale_after = sess.run([training.w, scale])
      is_skipped = bool(np.all(before == after))
      expected.append((len(expected) + 1, is_skipped, scale_after))
  assert steps_of(observer) == expected
  assert {step.train_op for step in observer.steps} == {training.train_op.name}


def test_each_optimizer_has_its_own_steps(training):
  other = Optimizer(sgd(), 4.0)
  other_op = other.minimize(training.loss)
  observers = [Observer(training.opt), Observer(other), Observer(other)]
  both = [training.train_op, other_op]
  with tf.train.MonitoredTrainingSession(hooks=observers) as sess:
    for fetch, x in [(both, FINITE), (other_op, OVERFLOW), (training.train_op, FINITE)]:
      sess.run(fetch, {training.x: x})
  assert steps_of(observers[0]) == [(1, False, 8.0), (2, False, 16.0)]
  assert steps_of(observers[1]) == [(1, False, 4.0), (2, True, 4.0)]
  assert observers[1].steps == observers[2].steps


def test_hook_counts_on_in_next_session(training):
  observer = Observer(training.opt)
  for _ in range(2):
    observer.begin()
    with testing.initialized_session() as sess:
      observer.run(sess, [training.train_op], {training.x: FINITE})
  assert steps_of(observer) == [(1, False, 8.0), (2, False, 8.0)]


class LossRecorder(Observer):
  """Fetches the loss of each step, too."""

  def __init__(self, optimizer, loss):
    super().__init__(optimizer)
    self.loss, self.losses = loss, []

  def before_run(self, run_context):
    requested = super().before_run(run_context)
    if requested is not None:
      requested.fetches["loss"] = self.loss
    return requested

  def after_run(self, run_context, run_values):
    super().after_run(run_context, run_values)
    if run_values.results:
      self.losses.append(run_values.results["loss"])


def test_subclass_fetches_more(training):
  recorder = LossRecorder(training.opt, training.loss)
  with tf.train.MonitoredTrainingSession(hooks=[recorder]) as sess:
    for n in range(3):
      sess.run(training.w)
      _, loss = sess.run([training.train_op, training.loss], {training.x: FINITE})
      assert len(recorder.losses) == n + 1 and recorder.losses[-1] == loss


def test_plain_session_shows_that_hook_requests_stop(training):
  hook, runs = mp_compat.StopAtAttemptHook(training.opt, 3), 0
  hook.begin()
  with testing.initialized_session() as sess:
    while not hook.should_stop():
      hook.run(sess, training.w)
      hook.run(sess, training.train_op, {training.x: OVERFLOW})
      runs += 1
  assert runs == 3
  hook.begin()
  assert not hook.should_stop()


class Failing(Observer):
  """Raises an error at its second step."""

  def after_step(self, run_context, step):
    super().after_step(run_context, step)
    if step.number == 2:
      raise ValueError("of the program")


def test_error_of_subclass_ends_run(training):
  observer = Failing(training.opt)
  with pytest.raises(ValueError, match="of the program"):
    with tf.train.MonitoredTrainingSession(hooks=[observer]) as sess:
      for _ in range(9):
        sess.run(training.train_op, {training.x: FINITE})
  assert len(observer.steps) == 2


class WithoutBegin(Observer):
  """Overrides `begin`, and does not call that of the base class."""

  def begin(self):
    pass


def test_missing_call_of_base_class_is_named(training):
  with pytest.raises(RuntimeError, match=r"WithoutBegin.*calls super\(\).begin\(\)"):
    with tf.train.MonitoredTrainingSession(hooks=[WithoutBegin(training.opt)]) as sess:
      sess.run(training.train_op, {training.x: FINITE})


def test_threads_share_session(training):
  """The first runs of a session may be those of several threads."""
  hooks, errors = [mp_compat.LossScaleHook(training.opt), Observer(training.opt)], []

  def train():
    try:
      for _ in range(5):
        sess.run(training.train_op, {training.x: FINITE})
    except Exception as error:
      errors.append(error)

  for _ in range(3):
    with tf.train.MonitoredTrainingSession(hooks=hooks) as sess:
      threads = [threading.Thread(target=train) for _ in range(8)]
      for thread in threads:
        thread.start()
      for thread in threads:
        thread.join()
  assert not errors and len(hooks[1].steps) == 120


@pytest.mark.usefixtures("graph", "control_flow")
def test_loop_is_not_observed(warnings):
  training, opt = testing.Training(), Optimizer(sgd(), 8.0)

  def body(n):
    with tf.control_dependencies([opt.minimize(training.loss)]):
      return n + 1

  train_op = tf.while_loop(lambda n: n < 3, body, [0])
  observer = Observer(opt)
  with tf.train.MonitoredTrainingSession(hooks=[observer]) as sess:
    sess.run(train_op, {training.x: FINITE})
  assert not observer.steps
  assert len([line for line in warnings if "hooks cannot count its" in line]) == 1


def page_hook():
  """Returns the source of the hook that docs/monitoring.md shows."""
  path = os.path.join(testing.ROOT, "docs", "monitoring.md")
  with open(path, encoding="utf-8") as file:
    blocks = re.findall(r"^```\w+\n(.*?)^```", file.read(), re.M | re.S)
  (source,) = [block for block in blocks if "mp_compat.StepHook" in block]
  return source


def test_hook_of_page_writes_scales(training, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  source = page_hook()
  names = {"mp_compat": mp_compat}
  exec(source, names)  # noqa: S102 (the code of the page)
  hook = names["ScaleToCsv"](training.opt)
  with tf.train.MonitoredTrainingSession(hooks=[hook]) as sess:
    for x in (FINITE, OVERFLOW, FINITE):
      sess.run(training.train_op, {training.x: x})
  with open("scale.csv", newline="") as file:
    rows = list(csv.reader(file))
  assert rows == [["1", "8.0", "False"], ["2", "4.0", "True"], ["3", "4.0", "False"]]
