"""`finite_reducer`: one verdict for several processes. A placeholder plays the others; real ones: test_horovod.py."""

import sys

import numpy as np
import pytest

import mp_compat
from tests import testing
from tests.testing import BAD
from tests.testing import GOOD
from tests.testing import tf


@pytest.fixture(name="graph", autouse=True, params=[1, 2], ids=["control_flow_v1", "control_flow_v2"])
def _graph(request):
  with testing.control_flow(request.param), tf.Graph().as_default() as graph:
    yield graph


def scales():
  return {"ours": mp_compat.DynamicLossScale, "tensorflow's": testing.native.DynamicLossScale, "fixed": lambda: 8.}


@pytest.mark.parametrize("scale", sorted(scales()))
@pytest.mark.parametrize("clip", [False, True])
def test_a_step_is_applied_where_all_processes_say_so_and_the_scale_follows(scale, clip, graph):
  job = testing.Job()
  others = tf.placeholder(tf.bool, [])
  reduced = []

  def all_of_us(finite):
    assert finite.dtype == tf.bool and finite.shape == []
    reduced.append(tf.logical_and(finite, others, name="all_of_us"))
    return reduced[-1]

  opt = mp_compat.MixedPrecisionLossScaleOptimizer(
      tf.train.GradientDescentOptimizer(1.), scales()[scale](), finite_reducer=all_of_us)
  grads_and_vars = opt.compute_gradients(job.loss)
  if clip:
    grads_and_vars = [(tf.clip_by_value(g, -9., 9.), v) for g, v in grads_and_vars]
  train_op = opt.apply_gradients(grads_and_vars, job.global_step)
  after = []
  with testing.session() as sess:
    sess.run(tf.global_variables_initializer())
    for x, theirs in [(GOOD, True), (GOOD, False), (BAD, True), (BAD, False), (GOOD, True)]:
      _, agreed = sess.run([train_op, opt.gradients_finite], {job.x: x, others: theirs})
      after.append((agreed, sess.run(job.global_step), sess.run(opt.loss_scale())))
    np.testing.assert_array_equal(sess.run(job.w), -2 * GOOD)
  fixed = scale == "fixed"
  assert after == [(True, 1, 8. if fixed else 2. ** 15), (False, 1, 8. if fixed else 2. ** 14),
                   (False, 1, 8. if fixed else 2. ** 13), (False, 1, 8. if fixed else 2. ** 12),
                   (True, 2, 8. if fixed else 2. ** 12)]
  # Asked once, and outside of every branch: a collective op there would wait for processes that skip.
  assert len(reduced) == 1 and reduced[0].graph is graph
  assert reduced[0].op._get_control_flow_context() is None


@pytest.mark.parametrize("reducer", [
    lambda finite: tf.cast(finite, tf.float32), lambda finite: tf.stack([finite, finite]), lambda finite: 1.])
def test_a_reducer_must_return_one_bool(reducer):
  job = testing.Job()
  opt = mp_compat.MixedPrecisionLossScaleOptimizer(tf.train.GradientDescentOptimizer(1.), 8., finite_reducer=reducer)
  with pytest.raises(ValueError, match="finite_reducer must return a scalar bool.*but returned "):
    opt.minimize(job.loss)


def test_without_a_verdict_there_is_nothing_to_reduce():
  with pytest.raises(ValueError, match="skip_nonfinite=False makes none"):
    mp_compat.MixedPrecisionLossScaleOptimizer(
        tf.train.GradientDescentOptimizer(1.), 8., skip_nonfinite=False, finite_reducer=tf.identity)


def test_without_horovod_nothing_asks_for_it():
  assert "horovod" in sys.modules or mp_compat.horovod.default_reducer(tf.train.AdamOptimizer(), []) is None
