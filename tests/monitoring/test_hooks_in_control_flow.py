"""Tests of the hooks of train ops that are in branches and loops."""

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
