"""Tests of defects of TensorFlow's class, as one table: each row passes with our class
and fails with TensorFlow's.

A row is a function of an API, `mp_compat` or `tf.compat.v1.train.experimental`. It
asserts the correct behaviour. Its decorator gives the error that TensorFlow's class
raises.
"""

import copy

import numpy as np
import pytest

import mp_compat
from tests import testing
from tests.testing import tf

pytestmark = pytest.mark.usefixtures("graph")
NO_ERROR = pytest.fail.Exception  # of pytest.raises
ANY_ERROR = (AssertionError, AttributeError, RuntimeError, TypeError, ValueError)
DEFECTS = []


def defect(error, control_flow=1):
  """Adds a row, with the error that TensorFlow's class raises and the control flow
  version under which it does.
  """
  return lambda row: DEFECTS.append(
    pytest.param(row, error, control_flow, id=row.__name__)
  )


class TrainingWithApi:
  """Trains `w` [2], initially zeros, with the API's class. Its gradient is the
  placeholder `x`, the learning rate 1.
  """

  def __init__(
    self,
    api,
    loss_scale,
    inner=None,
    dtype=tf.float32,
    use_resource=True,
    change=lambda grad: grad,
  ):
    with tf.variable_scope("", use_resource=use_resource):
      self.w = tf.get_variable("w", [2], dtype, initializer=tf.zeros_initializer())
    self.x = tf.placeholder(dtype, [2])
    self.opt = api.MixedPrecisionLossScaleOptimizer(
      inner or tf.train.GradientDescentOptimizer(1.0), loss_scale
    )
    ((grad, _),) = self.opt.compute_gradients(tf.reduce_sum(self.w * self.x))
    self.train_op = self.opt.apply_gradients([(change(grad), self.w)])

  def after(self, *xs):
    """Runs these steps. Returns `w`, as a list."""
    with testing.initialized_session() as sess:
      for x in xs:
        sess.run(self.train_op, {self.x: x})
      return list(sess.run(self.w))


FINITE, OVERFLOW = [1.0, 2.0], [np.inf, 2.0]


@defect(AssertionError)
def fixed_scale_skips_overflow(api):
  assert TrainingWithApi(api, 8.0).after(FINITE, OVERFLOW) == [-1.0, -2.0]


@defect(AssertionError)
def clip_by_value_cannot_hide_an_overflow(api):
  training = TrainingWithApi(
    api, "dynamic", change=lambda grad: tf.clip_by_value(grad, -4.0, 4.0)
  )
  assert training.after(FINITE, OVERFLOW) == [-1.0, -2.0]


@defect(AssertionError)
def masking_cannot_hide_an_overflow(api):
  training = TrainingWithApi(
    api,
    "dynamic",
    change=lambda grad: tf.where(tf.is_finite(grad), grad, tf.zeros([2])),
  )
  assert training.after(FINITE, OVERFLOW) == [-1.0, -2.0]


@defect(ANY_ERROR)
def copied_loss_scale_works_in_another_graph(api):
  with tf.Graph().as_default():
    params = {"loss_scale": api.DynamicLossScale()}
  for copied in (params, copy.deepcopy(params)):
    with tf.Graph().as_default():
      assert TrainingWithApi(api, **copied).after(FINITE, OVERFLOW) == [-1.0, -2.0]


@defect(AssertionError)
def inner_optimizer_counters_keep_their_names(api):
  TrainingWithApi(api, "dynamic", tf.train.AdamOptimizer())
  assert {"beta1_power", "beta2_power"} <= {v.op.name for v in tf.global_variables()}


@defect(TypeError, control_flow=2)
def reference_variables_train_under_control_flow_v2(api):
  assert TrainingWithApi(api, "dynamic", use_resource=False).after(
    FINITE, OVERFLOW
  ) == [-1.0, -2.0]


@defect(TypeError)
def float16_variables_train(api):
  assert TrainingWithApi(api, 8.0, dtype=tf.float16).after(FINITE) == [-1.0, -2.0]


@defect(NO_ERROR)
def wrapping_twice_raises_value_error(api):
  opt = api.MixedPrecisionLossScaleOptimizer(
    tf.train.GradientDescentOptimizer(1.0), 8.0
  )
  with pytest.raises(ValueError):
    api.MixedPrecisionLossScaleOptimizer(opt, 8.0)


@defect(NO_ERROR)
def invalid_fixed_scale_raises_value_error(api):
  for value in [float("nan"), float("inf"), True]:
    with pytest.raises(ValueError):
      api.FixedLossScale(value)


@defect(NO_ERROR)
def invalid_dynamic_scale_raises_value_error(api):
  for arguments in [
    dict(initial_loss_scale=0.0),
    dict(multiplier=1.0),
    dict(increment_period=0),
  ]:
    with pytest.raises(ValueError):
      api.DynamicLossScale(**arguments)


@defect(AssertionError)
def scale_growth_keeps_gradients_nonzero(api):
  assert TrainingWithApi(api, api.DynamicLossScale(2.0**126, 1)).after(
    [0.5, 0.25], [0.5, 0.25]
  ) == [-1.0, -0.5]


@defect(AssertionError)
def invalid_gate_adds_no_ops(api):
  opt = api.MixedPrecisionLossScaleOptimizer(
    tf.train.GradientDescentOptimizer(1.0), "dynamic"
  )
  w = tf.get_variable("w", [2])
  loss = tf.reduce_sum(w)
  before = len(w.graph.get_operations())
  with pytest.raises(ValueError):
    opt.compute_gradients(loss, gate_gradients=7)
  assert len(w.graph.get_operations()) == before


@pytest.mark.parametrize("row, error, control_flow", DEFECTS)
def test_our_class_behaves_correctly(row, error, control_flow):
  del error
  with testing.control_flow(control_flow):
    row(mp_compat)


@pytest.mark.parametrize("row, error, control_flow", DEFECTS)
def test_tensorflow_class_still_has_defect(row, error, control_flow):
  with testing.control_flow(control_flow), pytest.raises(error):
    row(testing.native)


def test_both_classes_pass_without_defect():
  """Checks TrainingWithApi itself: training without a defect passes with both
  classes.
  """
  for api in [mp_compat, testing.native]:
    with tf.Graph().as_default():
      assert TrainingWithApi(api, "dynamic").after(FINITE, OVERFLOW, FINITE) == [
        -2.0,
        -4.0,
      ]
