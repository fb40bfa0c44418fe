"""Tests of the hooks of train ops that are in branches and loops."""

import numpy as np
import pytest

import mp_compat
from tests import testing
from tests.monitoring.test_hooks import FINITE
from tests.monitoring.test_hooks import OVERFLOW
from tests.monitoring.test_hooks import run
from tests.testing import Optimizer
from tests.testing import sgd
from tests.testing import tf


class TrainingInControlFlow(testing.Training):
  """Builds the train op inside a branch, a nested branch (executed if `executed`), or a
  loop of three steps.
  """

  def __init__(self, kind):
    super().__init__()
    self.executed = tf.placeholder_with_default(True, [])
    self.opt = Optimizer(sgd(), mp_compat.DynamicLossScale(8.0, 100))
    if kind == "while_loop":
      self.train_op = tf.while_loop(lambda i: i < 3, self._step, [0])
    else:
      branch = (
        self._step
        if kind == "cond"
        else lambda: tf.cond(self.executed, self._step, lambda: 0)
      )
      self.train_op = tf.cond(self.executed, branch, lambda: 0)

  def _step(self, i=0):
    with tf.control_dependencies(
      [self.opt.minimize(tf.reduce_sum(self.w * self.x), self.global_step)]
    ):
      return tf.add(i, 1)

  def run(self, hooks, steps):
    return run(
      hooks,
      self.train_op,
      [{self.x: x, self.executed: executed} for x, executed in steps],
    )


# The input of each step, and whether its branch is executed.
BRANCHES = [
  (FINITE, True),
  (OVERFLOW, False),
  (OVERFLOW, True),
  (FINITE, False),
  (OVERFLOW, True),
  (FINITE, True),
]


@pytest.fixture(name="training_in_branch", params=["cond", "nested cond"])
def _training_in_branch(request, graph):
  del graph
  with testing.control_flow(1):
    yield TrainingInControlFlow(request.param)


def test_hooks_count_executed_branches_only(training_in_branch):
  hook = mp_compat.LossScaleHook(training_in_branch.opt, counters_in_graph=True)
  runs = training_in_branch.run(
    [hook, mp_compat.StopAtAttemptHook(training_in_branch.opt, 3)], BRANCHES
  )
  assert (hook.attempted, hook.skipped, runs) == (3, 2, 5)


def test_stall_in_branch_is_reported(training_in_branch):
  hook = mp_compat.LossScaleHook(training_in_branch.opt, max_consecutive_skips=2)
  with pytest.raises(
    mp_compat.LossScaleStalledError,
    match=r"w:0: 0 NaN, 1 inf, the largest of the others 2\b",
  ):
    training_in_branch.run([hook], BRANCHES)
  assert (hook.attempted, hook.skipped) == (3, 2)


def masked(x, w):
  return tf.where_v2(x > 0.0, x * w, w)


def in_branch(version):
  """Returns a function with a mask in a branch, for a version of control flow."""

  def function(x, w):
    with testing.control_flow(version):
      return tf.cond(
        tf.placeholder_with_default(True, []), lambda: masked(x, w), lambda: w
      )

  return function


def experts(x, w):
  """Returns what one of two variables makes of `x`; the other is not updated."""
  v = tf.get_variable("v", [2], use_resource=True, initializer=tf.ones_initializer())
  low, high = tf.raw_ops.Switch(data=x, pred=x[0] > 1.0)
  return tf.raw_ops.Merge(inputs=[low * v, high * w]).output


@pytest.mark.parametrize(
  "function",
  [in_branch(1), in_branch(2), experts],
  ids=["cond v1", "cond v2", "experts"],
)
def test_hooks_change_no_variables(function, warnings):
  """Hooks also read what cannot be fetched, or is not computed in a run."""

  def trained(*hook_types):
    with tf.Graph().as_default():
      x = tf.placeholder(tf.float32, [2])
      w = tf.get_variable(
        "w", [2], use_resource=True, initializer=tf.ones_initializer()
      )
      opt = Optimizer(sgd(), mp_compat.DynamicLossScale(8.0, 3))
      train_op = opt.minimize(tf.reduce_sum(function(x, w)))
      variables = tf.global_variables()
      hooks = [make(opt) for make in hook_types]
      with tf.train.MonitoredSession(hooks=hooks) as sess:
        for value in (FINITE, [3.0, 1.0], OVERFLOW, OVERFLOW, [3.0, 1.0], FINITE):
          sess.run(train_op, {x: value})
        return [values.tolist() for values in sess.run(variables)], hooks

  def stalling(opt):
    return mp_compat.LossScaleHook(opt, max_consecutive_skips=2, on_stall="warn")

  def reporting(opt):
    return mp_compat.GradientRangesHook(opt, every_n_steps=1)

  expected, _ = trained()
  values, (hook, _) = trained(stalling, reporting)
  assert values == expected
  assert (hook.attempted, hook.skipped) == (6, 2)
  assert "correct the input Placeholder" in warnings[-1]


@pytest.mark.usefixtures("graph")
def test_report_of_dead_gradient_is_zero():
  x = tf.placeholder(tf.float32, [2])
  w = tf.get_variable("w", [2], use_resource=True, initializer=tf.ones_initializer())
  opt = Optimizer(sgd(), 8.0)
  opt.minimize(tf.reduce_sum(experts(x, w)))
  report = mp_compat.nonfinite_gradients(opt)
  with tf.Session() as sess:
    sess.run(tf.global_variables_initializer())
    for values, dead in [(OVERFLOW, "v:0"), ([-np.inf, 3.0], "w:0")]:
      counts = sess.run(report, {x: values})
      (alive,) = {"v:0", "w:0"} - {dead}
      assert (counts[alive].infs, counts[dead]) == (1, (0, 0, 0))


@pytest.mark.usefixtures("graph", "control_flow")
def test_loops_are_not_counted(warnings):
  training = TrainingInControlFlow("while_loop")
  assert (
    training.run([mp_compat.LossScaleHook(training.opt)], [(FINITE, True)] * 2) == 2
  )
  assert len(warnings) == 1 and "hooks cannot count its steps" in warnings[0]
  with pytest.raises(ValueError, match="cannot count the steps of .* inside a loop"):
    mp_compat.StopAtAttemptHook(training.opt, 1).begin()


@pytest.mark.usefixtures("graph")
def test_steps_of_queue_runner_cannot_be_counted():
  """The chief's queue runner runs the step, and no Session run of the program."""
  training = testing.Training()
  opt = Optimizer(sgd(), mp_compat.DynamicLossScale(8.0))
  sync = tf.train.SyncReplicasOptimizer(opt, replicas_to_aggregate=1)
  sync.minimize(training.loss, training.global_step)
  with pytest.raises(ValueError, match="cannot count the steps of .*: a queue runner"):
    mp_compat.StopAtAttemptHook(opt, 3).begin()


@pytest.mark.usefixtures("graph")
def test_queues_of_inputs_are_no_queue_runners_of_steps():
  x = tf.train.batch([tf.train.input_producer([[1.0, 2.0]]).dequeue()], 1)[0]
  w = tf.get_variable("w", [2], initializer=tf.zeros_initializer())
  opt = Optimizer(sgd(), 8.0)
  train_op = opt.minimize(tf.reduce_sum(w * x))
  assert run([mp_compat.StopAtAttemptHook(opt, 3)], train_op, [{}] * 9) == 3
