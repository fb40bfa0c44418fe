"""Hooks in real MonitoredSessions: what they log, when they stop, what they say, what they cost."""

import re

from absl import logging
import numpy as np
import pytest

import mp_compat
from tests import testing
from tests.testing import tf

GOOD, BAD = [1., 2.], [np.inf, 2.]


class Job:
  """`w` and its train op, with the gradient fed, and what is logged."""

  def __init__(self, loss_scale, monkeypatch):
    self.w = tf.get_variable("w", [2], initializer=tf.zeros_initializer(), use_resource=True)
    self.global_step = tf.train.get_or_create_global_step()
    self.x = tf.placeholder(tf.float32, [2])
    self.opt = mp_compat.MixedPrecisionLossScaleOptimizer(tf.train.GradientDescentOptimizer(1.), loss_scale)
    self.train_op = self.opt.minimize(tf.reduce_sum(self.w * self.x), self.global_step)
    self.lines = []
    for level in ["info", "warning"]:
      monkeypatch.setattr(logging, level, lambda text, *args: self.lines.append(text % args))

  def run(self, hooks, xs, fetch=None, **kwargs):
    """Runs until the inputs or the hooks end it; gives how many runs there were."""
    runs = 0
    with tf.train.MonitoredTrainingSession(hooks=hooks, log_step_count_steps=None, **kwargs) as sess:
      for x in xs:
        if sess.should_stop():
          break
        sess.run(self.train_op if fetch is None else fetch, {self.x: x})
        runs += 1
    return runs


@pytest.fixture(name="job", params=[1, 2], ids=["control_flow_v1", "control_flow_v2"])
def _job(request, monkeypatch):
  with tf.Graph().as_default(), testing.control_flow(request.param):
    yield lambda loss_scale: Job(loss_scale, monkeypatch)


def test_it_logs_every_change_of_the_scale_and_a_line_once_in_a_while(job):
  job = job(mp_compat.DynamicLossScale(8., 4))
  hook = mp_compat.LossScaleHook(job.opt, every_n_steps=3)
  job.run([hook], [GOOD, BAD, GOOD, GOOD, GOOD, GOOD, GOOD])
  assert (hook.attempted, hook.skipped) == (7, 1)
  # SecondOrStepTimer is due at its first step, then every third.
  assert job.lines == [
      "loss scale 8 after 1 attempted steps: 0 of the last 1 skipped, 0 (0.00%) of all",
      "loss scale 4 after 2 attempted steps: 1 of the last 1 skipped, 1 (50.00%) of all",
      "loss scale 4 after 4 attempted steps: 0 of the last 2 skipped, 1 (25.00%) of all",
      "loss scale 8 after 6 attempted steps: 0 of the last 2 skipped, 1 (16.67%) of all",
      "loss scale 8 after 7 attempted steps: 0 of the last 1 skipped, 1 (14.29%) of all",
  ]


def test_without_a_period_it_logs_changes_and_the_end_only(job):
  job = job(mp_compat.DynamicLossScale(8., 100))
  job.run([mp_compat.LossScaleHook(job.opt, every_n_steps=None)], [GOOD, GOOD, BAD, GOOD, GOOD])
  assert [line.split(":")[0] for line in job.lines] == [
      "loss scale 4 after 3 attempted steps", "loss scale 4 after 5 attempted steps"]


def test_it_logs_by_the_clock_where_asked(job):
  job = job(8.)
  job.run([mp_compat.LossScaleHook(job.opt, every_n_secs=1000.)], [GOOD] * 5)
  assert [line.split(":")[0] for line in job.lines] == [
      "loss scale 8 after 1 attempted steps", "loss scale 8 after 5 attempted steps"]


@pytest.mark.parametrize("loss_scale, kwargs, runs", [
    (lambda: "dynamic", dict(max_consecutive_skips=4), 4),
    (lambda: "dynamic", dict(), 25),  # 2**15 falls to 1 in 15 steps, then 10 do not lower it
    (lambda: mp_compat.DynamicLossScale(2., 100), dict(min_scale_patience=3), 4),
    (lambda: 8., dict(min_scale_patience=3), 3),
])
def test_a_stall_raises_at_the_step_that_completes_it_and_says_what_is_known(job, loss_scale, kwargs, runs):
  job = job(loss_scale())
  hook = mp_compat.LossScaleHook(job.opt, **kwargs)
  with pytest.raises(mp_compat.LossScaleStalledError) as raised:
    job.run([hook], [GOOD, GOOD] + [BAD] * 100)
  assert hook.attempted == 2 + runs and hook.skipped == runs
  text = str(raised.value)
  assert "{} steps in a row were skipped".format(runs) in text and "the last applied step was attempt 2" in text
  assert re.search(r"w:0: 0 NaN, 1 inf, the largest of the others 2\b", text)
  if runs == 4 and not kwargs.get("min_scale_patience"):
    assert "32768 (attempt 0) -> 16384 (attempt 3) -> 8192 (attempt 4) -> 4096 (attempt 5) -> 2048 (attempt 6)" in text


def test_a_run_that_never_applies_a_step_says_so(job):
  job = job(8.)
  with pytest.raises(mp_compat.LossScaleStalledError, match="no step was ever applied"):
    job.run([mp_compat.LossScaleHook(job.opt, min_scale_patience=2)], [BAD] * 9)


def test_an_applied_step_ends_a_row_of_skips(job):
  job = job(8.)
  hook = mp_compat.LossScaleHook(job.opt, max_consecutive_skips=3, min_scale_patience=3)
  assert job.run([hook], [BAD, BAD, GOOD] * 5) == 15


def test_a_stall_can_end_the_run_instead(job):
  job = job(8.)
  assert job.run([mp_compat.LossScaleHook(job.opt, min_scale_patience=3, on_stall="stop")], [BAD] * 50) == 3
  assert "The loss scale is stalled: 3 steps in a row" in job.lines[1]


def test_a_stall_can_be_a_warning_once_for_each(job):
  job = job(8.)
  hook = mp_compat.LossScaleHook(job.opt, None, min_scale_patience=2, on_stall="warn")
  assert job.run([hook], [BAD] * 5 + [GOOD] + [BAD] * 5) == 11
  assert len([line for line in job.lines if "is stalled" in line and "w:0: 0 NaN, 1 inf" in line]) == 2


def test_runs_without_the_train_op_are_not_looked_at(job):
  job = job(8.)
  hook = mp_compat.LossScaleHook(job.opt)
  with tf.control_dependencies([job.train_op]):
    after = tf.identity(job.x)
  with tf.train.MonitoredTrainingSession(hooks=[hook], log_step_count_steps=None) as sess:
    sess.run(job.w)  # without x: the backward pass would fail
    sess.run([job.w, {"step": job.global_step}])
    assert hook.attempted == 0
    sess.run({"a": [after]}, {job.x: GOOD})
    assert hook.attempted == 1
    sess.run([job.train_op, "w:0"], {job.x: GOOD})
    assert hook.attempted == 2


def test_the_report_is_fetched_in_the_last_step_only(job):
  job = job(8.)
  fetched = []

  class Spy(mp_compat.LossScaleHook):

    def before_run(self, run_context):
      args = super().before_run(run_context)
      fetched.append(sorted(args.fetches))
      assert args.fetches["status"].shape == [2]
      return args

  with pytest.raises(mp_compat.LossScaleStalledError):
    job.run([Spy(job.opt, min_scale_patience=3)], [BAD] * 9)
  assert fetched == [["status"], ["status"], ["report", "status"]]


def test_by_default_it_makes_no_variable(job):
  job = job("dynamic")
  before = tf.global_variables() + tf.local_variables()
  job.run([mp_compat.LossScaleHook(job.opt)], [GOOD])
  assert tf.global_variables() + tf.local_variables() == before


def test_counters_in_the_graph_survive_a_restore(job, monkeypatch, tmp_path):
  del job
  for attempted, skipped in [(3, 1), (6, 2)]:
    with tf.Graph().as_default():
      job = Job(8., monkeypatch)
      hook = mp_compat.LossScaleHook(job.opt, counters_in_graph=True)
      job.run([hook], [GOOD, BAD, GOOD], checkpoint_dir=str(tmp_path))
      assert (hook.attempted, hook.skipped) == (attempted, skipped)


def test_it_writes_event_files_over_attempted_steps(job, tmp_path):
  job = job(mp_compat.DynamicLossScale(8., 3))
  job.run([mp_compat.LossScaleHook(job.opt, None, output_dir=str(tmp_path))], [GOOD, BAD, GOOD, GOOD, GOOD, BAD])
  seen = testing.events(str(tmp_path))
  assert seen["loss_scale/scale"] == [(0, 8.), (2, 4.), (5, 8.), (6, 4.)]
  assert seen["loss_scale/skipped_steps"] == [(0, 0.), (2, 1.), (5, 1.), (6, 2.)]


def test_event_files_are_complete_when_a_stall_raises(job, tmp_path):
  job = job(mp_compat.DynamicLossScale(8., 3))
  with pytest.raises(mp_compat.LossScaleStalledError):
    job.run([mp_compat.LossScaleHook(job.opt, max_consecutive_skips=3, output_dir=str(tmp_path))], [GOOD] + [BAD] * 5)
  assert testing.events(str(tmp_path))["loss_scale/skipped_steps"][-1] == (4, 3.)


def test_a_run_that_never_trains_is_mentioned(job):
  job = job(8.)
  job.run([mp_compat.LossScaleHook(job.opt)], [GOOD], fetch=job.w)
  assert job.lines == ["LossScaleHook: no run executed the train op GradientDescent."]


def test_the_optimizer_makes_its_hook(job):
  job = job(8.)
  hook = job.opt.make_session_run_hook(every_n_steps=None, min_scale_patience=2)
  assert isinstance(hook, mp_compat.LossScaleHook)
  with pytest.raises(mp_compat.LossScaleStalledError):
    job.run([hook], [BAD] * 3)


def test_a_run_is_bounded_by_attempts_where_stop_at_step_would_wait_for_ever(job):
  job = job(8.)
  hooks = [mp_compat.StopAtAttemptHook(job.opt, 7), tf.train.StopAtStepHook(last_step=5)]
  assert job.run(hooks, [BAD] * 50) == 7


def test_attempts_are_runs_of_the_train_op(job):
  job = job(8.)
  with tf.train.MonitoredTrainingSession(hooks=[mp_compat.StopAtAttemptHook(job.opt, 2)],
                                         log_step_count_steps=None) as sess:
    for _ in range(5):
      sess.run(job.w)
    sess.run(job.train_op, {job.x: GOOD})
    assert not sess.should_stop()
    sess.run(job.train_op, {job.x: BAD})
    assert sess.should_stop()


def test_a_hook_without_a_train_op_is_told_so(job):
  job(8.)
  opt = mp_compat.MixedPrecisionLossScaleOptimizer(tf.train.GradientDescentOptimizer(1.), 8.)
  for hook in [mp_compat.LossScaleHook(opt), mp_compat.StopAtAttemptHook(opt, 1)]:
    with pytest.raises(RuntimeError, match="has no train op in this graph yet"):
      hook.begin()


class InControlFlow:
  """A train op that runs where `go` says so: a branch, a branch in a branch, or three times in a loop."""

  def __init__(self, kind, **kwargs):
    self.w = tf.get_variable("w", [2], initializer=tf.zeros_initializer(), use_resource=True)
    with tf.variable_scope("", use_resource=True):
      tf.train.get_or_create_global_step()
    self.x, self.go = tf.placeholder(tf.float32, [2]), tf.placeholder_with_default(True, [])
    self.opt = mp_compat.MixedPrecisionLossScaleOptimizer(
        tf.train.GradientDescentOptimizer(1.), mp_compat.DynamicLossScale(8., 100), **kwargs)
    if kind == "while_loop":
      self.train_op = tf.while_loop(lambda i: i < 3, self._step, [0])
    else:
      branch = self._step if kind == "cond" else lambda: tf.cond(self.go, self._step, lambda: 0)
      self.train_op = tf.cond(self.go, branch, lambda: 0)

  def _step(self, i=0):
    with tf.control_dependencies([self.opt.minimize(tf.reduce_sum(self.w * self.x), tf.train.get_global_step())]):
      return tf.add(i, 1)

  def run(self, hooks, steps, fetch=()):
    fetched = []
    with tf.train.MonitoredTrainingSession(hooks=hooks, log_step_count_steps=None) as sess:
      for x, go in steps:
        if sess.should_stop():
          break
        fetched.append(sess.run({"train": self.train_op, 0: fetch}, {self.x: x, self.go: go})[0])
    return fetched


BRANCHES = [(GOOD, True), (BAD, False), (BAD, True), (GOOD, False), (BAD, True), (GOOD, True)]


@pytest.mark.parametrize("kind", ["cond", "nested cond"])
def test_hooks_count_executed_branches_only(kind):
  with tf.Graph().as_default(), testing.control_flow(1):
    job = InControlFlow(kind)
    hook = mp_compat.LossScaleHook(job.opt, counters_in_graph=True)
    runs = job.run([hook, mp_compat.StopAtAttemptHook(job.opt, 3)], BRANCHES)
    assert (hook.attempted, hook.skipped, len(runs)) == (3, 2, 5)


@pytest.mark.parametrize("kind", ["cond", "nested cond"])
def test_a_stall_in_a_branch_names_its_gradients(kind):
  with tf.Graph().as_default(), testing.control_flow(1):
    job = InControlFlow(kind)
    hook = mp_compat.LossScaleHook(job.opt, max_consecutive_skips=2)
    with pytest.raises(mp_compat.LossScaleStalledError, match=r"w:0: 0 NaN, 1 inf, the largest of the others 2\b"):
      job.run([hook], BRANCHES)
    assert (hook.attempted, hook.skipped) == (3, 2)


@pytest.mark.parametrize("version", [1, 2])
def test_hooks_count_steps_in_loops_with_summaries(version):
  with tf.Graph().as_default(), testing.control_flow(version):
    job = InControlFlow("while_loop", add_summaries=True)
    hook = mp_compat.LossScaleHook(job.opt)
    runs = job.run([hook, mp_compat.StopAtAttemptHook(job.opt, 6)], [(GOOD, True), (BAD, True), (GOOD, True)])
    assert (hook.attempted, hook.skipped, len(runs)) == (6, 3, 2)


def test_hooks_count_steps_in_branch_functions_with_summaries():
  with tf.Graph().as_default(), testing.control_flow(2):
    job = InControlFlow("cond", add_summaries=True)
    hook = mp_compat.LossScaleHook(job.opt, max_consecutive_skips=2)
    with pytest.raises(mp_compat.LossScaleStalledError, match="unknown, because the train op is inside a loop"):
      job.run([hook], BRANCHES)
    assert (hook.attempted, hook.skipped) == (3, 2)


@pytest.mark.parametrize("version", [1, 2])
def test_hooks_say_that_loops_cannot_be_counted(version, monkeypatch):
  lines = []
  monkeypatch.setattr(logging, "warning", lambda text, *args: lines.append(text % args))
  with tf.Graph().as_default(), testing.control_flow(version):
    job = InControlFlow("while_loop")
    assert len(job.run([mp_compat.LossScaleHook(job.opt)], [(GOOD, True)] * 2)) == 2
    assert len(lines) == 1 and "add_summaries=True" in lines[0]
    with pytest.raises(ValueError, match="cannot count the steps .* add_summaries=True"):
      mp_compat.StopAtAttemptHook(job.opt, 1).begin()


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("kind", ["cond", "while_loop"])
def test_summaries_in_control_flow_show_the_last_step(kind, version):
  with tf.Graph().as_default(), testing.control_flow(version):
    job = InControlFlow(kind, add_summaries=True)
    merged = tf.summary.merge_all()
    with testing.session() as sess:
      sess.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
      for x, go in [(GOOD, True), (BAD, True)]:
        sess.run(job.train_op, {job.x: x, job.go: go})
      values = {value.tag: value.simple_value for value in tf.Summary.FromString(sess.run(merged)).value}
  assert values["loss_scale/applied"] == 0.
  assert values["loss_scale/skipped_steps"] == (1. if kind == "cond" else 3.)
  assert values["loss_scale/scale"] == (8. if kind == "cond" else 2.)


def test_fetches_may_be_any_structure(job):
  job = job(8.)
  hook = mp_compat.LossScaleHook(job.opt)
  with tf.train.MonitoredTrainingSession(hooks=[hook], log_step_count_steps=None) as sess:
    for fetch in [{"a": job.train_op, 1: job.w}, (job.w, [{2: [job.train_op.name], "b": "w:0"}])]:
      sess.run(fetch, {job.x: GOOD})
    sess.run({"a": job.w, 1: job.w})
  assert hook.attempted == 2


class NeverApplies(mp_compat.DynamicLossScale):
  """Skips steps that are finite."""

  def update(self, grads):
    return super().update(grads)[0], tf.constant(False)


def test_a_stall_by_the_loss_scale_is_named(job):
  job = job(NeverApplies(8.))
  with pytest.raises(mp_compat.LossScaleStalledError, match="none; the loss scale itself decided to skip"):
    job.run([mp_compat.LossScaleHook(job.opt, min_scale_patience=2)], [GOOD] * 9)
