"""Tests of towers as in the CIFAR-10 multi-GPU tutorial: the gradients of all towers are averaged and applied once."""

import numpy as np
import pytest

import mp_compat
from tests import testing
from tests.testing import FINITE
from tests.testing import OVERFLOW
from tests.testing import tf


@pytest.fixture(autouse=True, params=[1, 2], ids=["control_flow_v1", "control_flow_v2"])
def _control_flow(request):
  with testing.control_flow(request.param), tf.Graph().as_default():
    yield


def average_gradients(towers):
  """Returns `[(gradient, variable)]`, each gradient the mean over the towers."""
  return [(tf.reduce_mean(tf.stack([grad for grad, _ in pairs]), 0), pairs[0][1]) for pairs in zip(*towers)]


def train(make_optimizer, inputs, use_resource=True, between=lambda gradient: gradient):
  """Trains two towers. Returns the values of all variables, initially and after every step.

  Each element of `inputs` holds the inputs of both towers. `between` is applied to each gradient before averaging.
  """
  with tf.variable_scope("", use_resource=use_resource):
    w = tf.get_variable("w", [2], initializer=tf.zeros_initializer())
    global_step = tf.train.get_or_create_global_step()
  opt = make_optimizer()
  xs, towers = [], []
  for device in testing.TWO_CPUS:
    with tf.device(device), tf.name_scope("tower"):
      xs.append(tf.placeholder(tf.float32, [2]))
      loss = tf.reduce_sum(tf.square(w - 1.0) * xs[-1])
      towers.append([(between(g), v) for g, v in opt.compute_gradients(loss)])
  train_op = opt.apply_gradients(average_gradients(towers), global_step)
  with testing.session() as sess:
    sess.run(tf.global_variables_initializer())
    history = [testing.values(sess)]
    for values in inputs:
      sess.run(train_op, dict(zip(xs, values)))
      history.append(testing.values(sess))
  return history


@pytest.mark.parametrize("use_resource", [False, True])
@pytest.mark.parametrize("clip", [False, True])
def test_overflow_in_one_tower_skips_the_step(use_resource, clip):
  between = (lambda g: tf.clip_by_value(g, -9.0, 9.0)) if clip else (lambda g: g)
  history = train(
    lambda: mp_compat.MixedPrecisionLossScaleOptimizer(tf.train.MomentumOptimizer(0.1, 0.9), "dynamic"),
    [[FINITE, FINITE], [FINITE, OVERFLOW], [OVERFLOW, FINITE], [FINITE, 2 * FINITE]],
    use_resource,
    between,
  )
  assert [values["global_step:0"] for values in history] == [0, 1, 1, 1, 2]
  assert [values["current_loss_scale:0"] for values in history] == [2.0**15, 2.0**15, 2.0**14, 2.0**13, 2.0**13]
  for name in ["w:0", "w/Momentum:0"]:
    assert history[1][name].tobytes() == history[3][name].tobytes()
    assert (history[4][name] != history[3][name]).all()


def test_tower_training_matches_tensorflow_class():
  native = testing.native
  inputs = [[FINITE, 3 * FINITE], [FINITE, OVERFLOW], [2 * FINITE, FINITE], [OVERFLOW, OVERFLOW], [FINITE, FINITE]]
  ours = train(
    lambda: mp_compat.MixedPrecisionLossScaleOptimizer(tf.train.MomentumOptimizer(0.1, 0.9), "dynamic"), inputs
  )
  with tf.Graph().as_default():
    theirs = train(
      lambda: native.MixedPrecisionLossScaleOptimizer(tf.train.MomentumOptimizer(0.1, 0.9), native.DynamicLossScale()),
      inputs,
    )
  testing.assert_same(ours, theirs)
  assert np.isfinite(ours[-1]["w:0"]).all()
