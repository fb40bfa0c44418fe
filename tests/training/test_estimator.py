"""Tests of Estimators on inputs that overflow, against results computed in NumPy.

tools/ecosystem/programs/estimators.py trains a canned Estimator,
tests/migration/test_restoring.py starts warm.

All numbers are sums of few powers of two, so float32 represents them exactly.
"""

import numpy as np
import pytest
import tensorflow

import mp_compat
from mp_compat.core import update_rule
from tests import testing
from tests.testing import Optimizer
from tests.testing import tf

pytestmark = pytest.mark.skipif(
  not hasattr(tf, "estimator"),
  reason="TensorFlow after 2.15 has no Estimator; run on 1.15 and 2.15 in CI",
)

FINITE, OVERFLOW = [1.0, 2.0], [np.inf, 2.0]
# finite, as is the loss, but overflows at a loss scale of 8 or more
HUGE = [2.0**126, 2.0]
RATE, MOMENTUM = 0.25, 0.5


class Expected:
  """Computes Momentum on `w`, initially ones, and a dynamic loss scale, for the
  gradients `grads`.
  """

  def __init__(self, grads, scale=64.0, period=2, steps=None):
    self.w, self.accumulator = np.ones(2), np.zeros(2)
    self.global_step, self.attempted = 0, 0
    self.state = update_rule.State(scale, 0, 0)
    for grad in grads:
      if self.global_step == steps:
        break
      self.attempted += 1
      finite = bool(np.all(np.abs(grad) * self.state.scale < np.finfo(np.float32).max))
      self.state = update_rule.next_state(
        self.state, finite, update_rule.Rule(period, 2.0, 2.0, 1, 1.0)
      )
      if finite:
        self.global_step += 1
        self.accumulator = MOMENTUM * self.accumulator + grad
        self.w = self.w - RATE * self.accumulator

  def check(self, estimator):
    """Checks that the last checkpoint of the Estimator has exactly these variables and
    values.
    """
    got = {
      name: estimator.get_variable_value(name)
      for name in estimator.get_variable_names()
    }
    assert sorted(got) == [
      "current_loss_scale",
      "global_step",
      "good_steps",
      "w",
      "w/Momentum",
    ]
    np.testing.assert_array_equal(got["w"], self.w)
    np.testing.assert_array_equal(got["w/Momentum"], self.accumulator)
    assert (got["current_loss_scale"], got["good_steps"]) == self.state[:2]
    assert got["global_step"] == self.global_step


def make_optimizer(loss_scale):
  return Optimizer(tf.train.MomentumOptimizer(RATE, MOMENTUM), loss_scale)


class Model:
  """A model_fn with the loss `sum(w * x)`, so the gradient of `w` is `x`.

  Records the modes of its calls, and the hooks that it creates.
  """

  def __init__(self, masks_loss=False):
    self._masks_loss = masks_loss
    self.modes, self.hooks = [], []

  def __call__(self, features, labels, mode, params):
    self.modes.append(mode)
    w = tf.get_variable("w", [2], initializer=tf.ones_initializer())
    y = tf.reduce_sum(w * features["x"], axis=1)
    if mode == tf.estimator.ModeKeys.PREDICT:
      return tf.estimator.EstimatorSpec(mode, predictions={"y": y})
    loss = tf.reduce_sum(y)
    if mode == tf.estimator.ModeKeys.EVAL:
      return tf.estimator.EstimatorSpec(
        mode, loss=loss, eval_metric_ops={"y": tf.metrics.mean(y)}
      )
    optimizer = params.get("optimizer") or make_optimizer(params["loss_scale"])
    hook = mp_compat.LossScaleHook(optimizer)
    self.hooks.append(hook)
    train_op = optimizer.minimize(loss, tf.train.get_global_step())
    if self._masks_loss:
      loss = tf.where_v2(optimizer.gradients_finite, loss, 0.0)
    return tf.estimator.EstimatorSpec(
      mode, loss=loss, train_op=train_op, training_hooks=[hook]
    )


def inputs(xs, repeat=False):
  """Returns an input_fn with batches of one example."""

  def input_fn():
    dataset = tf.data.Dataset.from_tensor_slices({"x": np.array(xs, np.float32)}).batch(
      1
    )
    return dataset.repeat() if repeat else dataset

  return input_fn


def dynamic():
  """Returns params with a dynamic loss scale of 64 that grows after two finite
  steps.
  """
  return {"loss_scale": mp_compat.DynamicLossScale(64.0, 2)}


@pytest.mark.parametrize(
  "api, params",
  [
    (tf, dynamic),
    (tensorflow, dynamic),
    (tf, lambda: {"optimizer": make_optimizer(**dynamic())}),
  ],
  ids=["compat.v1", "tensorflow", "optimizer in params"],
)
def test_estimator_trains_and_predicts(tmp_path, api, params):
  model = Model()
  estimator = api.estimator.Estimator(model, str(tmp_path), params=params())
  xs = [FINITE, OVERFLOW, FINITE, FINITE, FINITE, HUGE, FINITE]
  estimator.train(inputs(xs))
  expected = Expected(xs)
  assert (expected.attempted, expected.global_step, expected.state.scale) == (
    7,
    5,
    32.0,
  )
  expected.check(estimator)
  assert (model.hooks[0].attempted, model.hooks[0].skipped) == (7, 2)

  metrics = estimator.evaluate(inputs([FINITE, [3.0, 0.0]]))
  assert (
    metrics["y"] == np.mean([np.dot(expected.w, FINITE), 3 * expected.w[0]])
    and metrics["global_step"] == 5
  )
  predictions = [
    prediction["y"] for prediction in estimator.predict(inputs([FINITE, [3.0, 0.0]]))
  ]
  assert predictions == [np.dot(expected.w, FINITE), 3 * expected.w[0]]

  # The second call of train builds another graph, with a copy of the params, and
  # restores the checkpoint.
  estimator.train(inputs(xs))
  Expected(xs + xs).check(estimator)
  assert len(model.hooks) == 2 and (
    model.hooks[1].attempted,
    model.hooks[1].skipped,
  ) == (7, 2)


def test_train_and_evaluate_counts_applied_steps(tmp_path):
  model = Model()
  config = tf.estimator.RunConfig(save_checkpoints_steps=2)
  estimator = tf.estimator.Estimator(model, str(tmp_path), config, dynamic())
  xs = [FINITE, OVERFLOW, FINITE, HUGE, FINITE]
  metrics, _ = tf.estimator.train_and_evaluate(
    estimator,
    tf.estimator.TrainSpec(inputs(xs, repeat=True), max_steps=6),
    tf.estimator.EvalSpec(
      inputs([FINITE]), steps=1, start_delay_secs=0, throttle_secs=0
    ),
  )
  expected = Expected(xs * 9, steps=6)
  expected.check(estimator)
  assert expected.attempted == 10 and [hook.attempted for hook in model.hooks] == [10]
  assert metrics["global_step"] == 6 and metrics["y"] == np.dot(expected.w, FINITE)
  assert model.modes.count(tf.estimator.ModeKeys.EVAL) == 3  # at 2, 4 and 6


@pytest.mark.parametrize(
  "loss_scale",
  [lambda: dynamic()["loss_scale"], lambda: "dynamic"],
  ids=["object", "dynamic"],
)
def test_overflow_on_one_replica_skips_all(tmp_path, loss_scale):
  model = Model()
  config = tf.estimator.RunConfig(
    train_distribute=tf.distribute.MirroredStrategy(testing.TWO_CPUS),
    session_config=tf.ConfigProto(device_count={"CPU": 2}),
  )
  estimator = tf.estimator.Estimator(
    model, str(tmp_path), config, {"loss_scale": loss_scale()}
  )
  other = [3.0, 1.0]
  # Each replica takes one input. The first replica overflows in step 2, the second in
  # step 4.
  pairs = [
    [FINITE, other],
    [OVERFLOW, other],
    [other, FINITE],
    [FINITE, HUGE],
    [FINITE, FINITE],
  ]
  estimator.train(inputs([x for pair in pairs for x in pair]))
  start, period = (2.0**15, 2000) if loss_scale() == "dynamic" else (64.0, 2)
  expected = Expected([np.mean(pair, axis=0) for pair in pairs], start, period)
  assert (expected.global_step, expected.state.scale) == (3, start / 4)
  expected.check(estimator)
  assert {(hook.attempted, hook.skipped) for hook in model.hooks if hook.attempted} == {
    (5, 2)
  }


def test_nan_loss_raises_unless_masked(tmp_path):
  """Estimator's NanTensorHook also checks the loss of skipped steps."""
  xs = [FINITE, [np.nan, 2.0], FINITE]
  estimator = tf.estimator.Estimator(Model(), str(tmp_path / "plain"), params=dynamic())
  with pytest.raises(tf.train.NanLossDuringTrainingError):
    estimator.train(inputs(xs))
  estimator = tf.estimator.Estimator(
    Model(masks_loss=True), str(tmp_path / "masked"), params=dynamic()
  )
  estimator.train(inputs(xs))
  Expected(xs).check(estimator)
