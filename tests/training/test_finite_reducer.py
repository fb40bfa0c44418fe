"""Tests of `finite_reducer`, which combines the finite checks of several processes.

A placeholder stands for the other processes. Several processes are in
tests/processes/test_horovod.py.
"""

import sys

import numpy as np
import pytest

import mp_compat
from tests import testing
from tests.testing import FINITE
from tests.testing import OVERFLOW
from tests.testing import Optimizer
from tests.testing import tf

pytestmark = pytest.mark.usefixtures("graph")


SCALES = {
  "ours": mp_compat.DynamicLossScale,
  "tensorflow": testing.native.DynamicLossScale,
  "fixed": lambda: 8.0,
}


@pytest.mark.each_choice
@pytest.mark.parametrize("scale", sorted(SCALES))
@pytest.mark.parametrize("clip", [False, True])
def test_step_needs_all_processes_finite(scale, clip, graph):
  training = testing.Training()
  others_are_finite = tf.placeholder(tf.bool, [])
  reduced = []

  def all_processes(finite):
    assert finite.dtype == tf.bool and finite.shape == []
    reduced.append(tf.logical_and(finite, others_are_finite, name="all_processes"))
    return reduced[-1]

  opt = Optimizer(
    tf.train.GradientDescentOptimizer(1.0),
    SCALES[scale](),
    finite_reducer=all_processes,
  )
  grads_and_vars = opt.compute_gradients(training.loss)
  if clip:
    grads_and_vars = [(tf.clip_by_value(g, -9.0, 9.0), v) for g, v in grads_and_vars]
  train_op = opt.apply_gradients(grads_and_vars, training.global_step)
  after = []
  with testing.initialized_session() as sess:
    for x, others_finite in [
      (FINITE, True),
      (FINITE, False),
      (OVERFLOW, True),
      (OVERFLOW, False),
      (FINITE, True),
    ]:
      _, finite = sess.run(
        [train_op, opt.gradients_finite],
        {training.x: x, others_are_finite: others_finite},
      )
      after.append([finite] + sess.run([training.global_step, opt.loss_scale()]))
    np.testing.assert_array_equal(sess.run(training.w), -2 * FINITE)
  scales = (
    [8.0] * 5 if scale == "fixed" else [2.0**15, 2.0**14, 2.0**13, 2.0**12, 2.0**12]
  )
  assert after == [
    list(row) for row in zip([True, False, False, False, True], [1, 1, 1, 1, 2], scales)
  ]
  # It is called once and outside the conditional. In a branch, a collective op would
  # wait for processes that skip.
  assert len(reduced) == 1 and reduced[0].graph is graph
  assert reduced[0].op._get_control_flow_context() is None


@pytest.mark.parametrize(
  "reducer",
  [
    lambda finite: tf.cast(finite, tf.float32),
    lambda finite: tf.stack([finite, finite]),
    lambda finite: 1.0,
  ],
)
def test_reducer_must_return_scalar_bool(reducer):
  training = testing.Training()
  opt = Optimizer(tf.train.GradientDescentOptimizer(1.0), 8.0, finite_reducer=reducer)
  with pytest.raises(
    ValueError,
    match="finite_reducer must return a scalar bool.*but returned .*all_ranks_finite",
  ):
    opt.minimize(training.loss)


class AdasumOptimizer(tf.train.GradientDescentOptimizer):
  """Has the name of Horovod's, without Horovod."""


def test_default_reducer_needs_horovod(graph):
  training = testing.Training()
  Optimizer(AdasumOptimizer(1.0), 8.0).minimize(training.loss)
  assert "horovod" not in sys.modules
  assert not [op.type for op in graph.get_operations() if op.type.startswith("Horovod")]
