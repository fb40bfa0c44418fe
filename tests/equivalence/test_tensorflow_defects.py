"""What is wrong with TensorFlow's own class, as one table: each row holds for ours and, still, not for TensorFlow's.

A row is a function of an API (ours, or `tf.compat.v1.train.experimental`) that asserts the right behaviour, and the
error by which TensorFlow's class misses it.
"""

import copy

import numpy as np
import pytest

import mp_compat
from tests import testing
from tests.testing import tf

ANY_ERROR = (AssertionError, AttributeError, RuntimeError, TypeError, ValueError)
DEFECTS = []


def defect(error, control_flow=1):
  """Adds a row: the error by which TensorFlow's class misses it, and the control flow under which it does."""
  return lambda row: DEFECTS.append(pytest.param(row, error, control_flow, id=row.__name__))


class Training:
  """`w` [2] from zeros, its gradient the placeholder `x`, trained with a rate of 1."""

  def __init__(self, api, loss_scale, inner=None, dtype=tf.float32, use_resource=True, between=lambda pairs: pairs):
    with tf.variable_scope("", use_resource=use_resource):
      self.w = tf.get_variable("w", [2], dtype, initializer=tf.zeros_initializer())
    self.x = tf.placeholder(dtype, [2])
    self.opt = api.MixedPrecisionLossScaleOptimizer(inner or tf.train.GradientDescentOptimizer(1.), loss_scale)
    self.train_op = self.opt.apply_gradients(between(self.opt.compute_gradients(tf.reduce_sum(self.w * self.x))))

  def after(self, *xs):
    """`w` after these steps."""
    with testing.session() as sess:
      sess.run(tf.global_variables_initializer())
      for x in xs:
        sess.run(self.train_op, {self.x: x})
      return list(sess.run(self.w))


GOOD, BAD = [1., 2.], [np.inf, 2.]


@defect(AssertionError)
def a_fixed_scale_lets_no_overflow_into_the_weights(api):
  assert Training(api, 8.).after(GOOD, BAD) == [-1., -2.]


@defect(AssertionError)
def clip_by_value_cannot_hide_an_overflow(api):

  def clip(pairs):
    return [(tf.clip_by_value(g, -4., 4.), v) for g, v in pairs]

  assert Training(api, "dynamic", between=clip).after(GOOD, BAD) == [-1., -2.]


@defect(AssertionError)
def masking_cannot_hide_an_overflow(api):

  def mask(pairs):
    return [(tf.where(tf.is_finite(g), g, tf.zeros_like(g)), v) for g, v in pairs]

  assert Training(api, "dynamic", between=mask).after(GOOD, BAD) == [-1., -2.]


@defect(AssertionError)
def a_users_subclass_is_updated_and_obeyed(api):

  class Never(api.LossScale):

    def __call__(self):
      return tf.constant(2.)

    def update(self, grads):
      return tf.no_op(), tf.placeholder_with_default(False, [])

    def get_config(self):
      return {}

  assert Training(api, Never()).after(GOOD) == [0., 0.]


@defect(ANY_ERROR)
def a_loss_scale_serves_the_graph_in_which_it_is_used(api):
  with tf.Graph().as_default():
    loss_scale = api.DynamicLossScale()
  assert Training(api, loss_scale).after(GOOD, BAD) == [-1., -2.]


@defect(ANY_ERROR)
def a_loss_scale_in_copied_params_serves_the_graph_in_which_it_is_used(api):
  with tf.Graph().as_default():
    params = {"loss_scale": api.DynamicLossScale()}
  loss_scale = copy.deepcopy(params)["loss_scale"]
  assert Training(api, loss_scale).after(GOOD, BAD) == [-1., -2.]


@defect(AssertionError)
def the_inner_optimizers_counters_keep_their_names(api):
  Training(api, "dynamic", tf.train.AdamOptimizer())
  assert {"beta1_power", "beta2_power"} <= {v.op.name for v in tf.global_variables()}


@defect(AssertionError, control_flow=2)
def the_inner_optimizers_counters_keep_their_name_scope(api):
  with tf.name_scope("head"):
    Training(api, "dynamic", tf.train.AdamOptimizer())
  assert {"head/beta1_power", "head/beta2_power"} <= {v.op.name for v in tf.global_variables()}


@defect(TypeError, control_flow=2)
def reference_variables_train_under_control_flow_v2(api):
  assert Training(api, "dynamic", use_resource=False).after(GOOD, BAD) == [-1., -2.]


@defect(TypeError)
def float16_variables_train(api):
  assert Training(api, 8., dtype=tf.float16).after(GOOD) == [-1., -2.]


@defect(TypeError)
def float64_variables_train(api):
  assert Training(api, "dynamic", dtype=tf.float64).after(GOOD, BAD) == [-1., -2.]


@defect(AssertionError)
def slots_can_be_asked_for(api):
  training = Training(api, "dynamic", tf.train.MomentumOptimizer(1., .9))
  assert training.opt.get_slot_names() == ["momentum"]
  assert training.opt.get_slot(training.w, "momentum") is not None


@defect(ANY_ERROR)
def what_is_in_the_train_op_collection_can_be_run(api):
  training = Training(api, "dynamic")
  train_op, = tf.get_collection(tf.GraphKeys.TRAIN_OP)
  assert train_op.graph.is_fetchable(train_op) and train_op is training.train_op


@defect(AssertionError)
def wrapping_twice_is_refused(api):
  opt = api.MixedPrecisionLossScaleOptimizer(tf.train.GradientDescentOptimizer(1.), 8.)
  refused(api.MixedPrecisionLossScaleOptimizer, opt, 8.)


@defect(AssertionError)
def a_scale_that_is_not_a_number_is_refused(api):
  for value in [float("nan"), float("inf"), True]:
    refused(api.FixedLossScale, value)


@defect(AssertionError)
def a_dynamic_scale_that_cannot_work_is_refused(api):
  for kwargs in [dict(initial_loss_scale=0.), dict(initial_loss_scale=-1.), dict(multiplier=1.),
                 dict(multiplier=.5), dict(increment_period=0)]:
    refused(api.DynamicLossScale, **kwargs)


@defect(AssertionError)
def a_scale_does_not_grow_to_where_all_gradients_are_zero(api):
  assert Training(api, api.DynamicLossScale(2. ** 126, 1)).after([.5, .25], [.5, .25]) == [-1., -.5]


@defect(AssertionError)
def a_wrong_gate_leaves_the_graph_as_it_was(api):
  opt = api.MixedPrecisionLossScaleOptimizer(tf.train.GradientDescentOptimizer(1.), "dynamic")
  w = tf.get_variable("w", [2])
  loss = tf.reduce_sum(w)
  before = len(w.graph.get_operations())
  refused(opt.compute_gradients, loss, gate_gradients=7)
  assert len(w.graph.get_operations()) == before


def refused(function, *args, **kwargs):
  """Asserts that this raises ValueError."""
  try:
    function(*args, **kwargs)
  except ValueError:
    return
  raise AssertionError("was not refused")


@pytest.fixture(name="graph", autouse=True)
def _graph():
  with tf.Graph().as_default():
    yield


@pytest.mark.parametrize("row, error, control_flow", DEFECTS)
def test_holds_for_ours(row, error, control_flow):
  del error
  with testing.control_flow(control_flow):
    row(mp_compat)


@pytest.mark.parametrize("row, error, control_flow", DEFECTS)
def test_is_still_missed_by_tensorflows_class(row, error, control_flow):
  with testing.control_flow(control_flow), pytest.raises(error):
    row(testing.native)


def test_where_both_work_they_agree():
  """The instrument itself: a row without a defect passes for both."""
  for api in [mp_compat, testing.native]:
    with tf.Graph().as_default():
      assert Training(api, "dynamic").after(GOOD, BAD, GOOD) == [-2., -4.]
