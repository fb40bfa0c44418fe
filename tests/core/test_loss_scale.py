"""Tests of loss scales: configs, identifiers, subclasses, and their variables in each
graph.
"""

import gc
import weakref

import numpy as np
import pytest

import mp_compat
from tests import testing
from tests.testing import tf

pytestmark = pytest.mark.usefixtures("graph")


@pytest.mark.parametrize(
  "make, config, text",
  [
    (
      lambda api: api.FixedLossScale(8),
      {"loss_scale_value": 8.0},
      "FixedLossScale(8.0)",
    ),
    (
      lambda api: api.DynamicLossScale(),
      {"initial_loss_scale": 32768.0, "increment_period": 2000, "multiplier": 2.0},
      "DynamicLossScale(initial_loss_scale=32768.0, increment_period=2000, multiplier=2.0)",
    ),
    (
      lambda api: api.DynamicLossScale(8, 3, 4),
      {"initial_loss_scale": 8.0, "increment_period": 3, "multiplier": 4.0},
      "DynamicLossScale(initial_loss_scale=8.0, increment_period=3, multiplier=4.0)",
    ),
  ],
)
def test_configs_and_reprs_match_tensorflow(make, config, text):
  for api in [mp_compat, testing.native]:
    loss_scale = make(api)
    assert loss_scale.get_config() == config and repr(loss_scale) == text
    with tf.Graph().as_default():
      assert type(loss_scale).from_config(config).get_config() == config


def test_config_includes_extra_arguments():
  ours = dict(
    backoff=4.0, overflow_tolerance=2, min_loss_scale=0.5, max_loss_scale=2.0**20
  )
  loss_scale = mp_compat.DynamicLossScale(**ours)
  assert [v.op.name for v in tf.global_variables()] == [
    "current_loss_scale",
    "good_steps",
    "bad_steps",
  ]
  assert loss_scale.get_config() == dict(
    ours, initial_loss_scale=32768.0, increment_period=2000, multiplier=2.0
  )
  again = mp_compat.DynamicLossScale.from_config(loss_scale.get_config())
  assert (
    again.get_config() == loss_scale.get_config()
    and "max_loss_scale=1048576.0" in repr(again)
  )


def test_get_loss_scale_accepts_identifiers():
  for number in [8, 8.0, np.float32(8), np.float64(8), np.int64(8)]:
    assert mp_compat.get_loss_scale(number).get_config() == {"loss_scale_value": 8.0}
  assert isinstance(mp_compat.get_loss_scale("dynamic"), mp_compat.DynamicLossScale)
  assert mp_compat.get_loss_scale(None) is None
  for api in [mp_compat, testing.native]:
    for loss_scale in [api.FixedLossScale(2.0), api.DynamicLossScale(2.0)]:
      assert mp_compat.get_loss_scale(loss_scale) is loss_scale


def test_initial_scale_may_equal_its_bounds():
  loss_scale = mp_compat.DynamicLossScale(8.0, min_loss_scale=8.0, max_loss_scale=8.0)
  assert (loss_scale.min_loss_scale, loss_scale.max_loss_scale) == (8.0, 8.0)
  assert mp_compat.FixedLossScale(2**126).get_config() == {"loss_scale_value": 2.0**126}


def test_fixed_loss_scale_has_no_state():
  loss_scale = mp_compat.FixedLossScale(3)
  update_op, should_apply = loss_scale.update([tf.placeholder(tf.float32)])
  assert (
    should_apply is True and update_op.type == "NoOp" and loss_scale.variables() == []
  )
  with testing.session() as sess:
    assert sess.run(loss_scale()) == np.float32(3)


def test_variables_match_tensorflow_class():
  for api in [mp_compat, testing.native]:
    with tf.Graph().as_default():
      with tf.name_scope("scope"):
        loss_scale = api.DynamicLossScale(8.0)
      api.DynamicLossScale(8.0)
      assert [
        (v.name, v.dtype, v.shape.as_list(), v.trainable) for v in tf.global_variables()
      ] == [
        ("scope/current_loss_scale:0", tf.float32, [], False),
        ("scope/good_steps:0", tf.int64, [], False),
        ("current_loss_scale:0", tf.float32, [], False),
        ("good_steps:0", tf.int64, [], False),
      ]
      assert {
        name: id(variable) for (name, _), variable in loss_scale._weights.items()
      } == {
        "current_loss_scale": id(loss_scale._current_loss_scale),
        "good_steps": id(loss_scale._num_good_steps),
      }


@pytest.mark.each_choice
@pytest.mark.usefixtures("control_flow")
@pytest.mark.parametrize(
  "around", ["nothing", "cond", "while", "control dependencies", "name scope"]
)
def test_first_use_creates_variables(around):
  loss_scale = mp_compat.DynamicLossScale(8.0, 1)
  for _ in range(2):
    with tf.Graph().as_default():
      assert loss_scale.variables() == []
      blocker = tf.placeholder(tf.bool, [], name="never_fed")
      if around == "cond":
        tf.cond(blocker, loss_scale, lambda: tf.constant(0.0))
      elif around == "while":
        tf.while_loop(lambda i: i < 3.0, lambda i: i + loss_scale(), [0.0])
      elif around == "control dependencies":
        with tf.control_dependencies([blocker]):
          loss_scale()
      elif around == "name scope":
        with tf.name_scope("train"):
          loss_scale()
      update_op, _ = loss_scale.update([tf.placeholder_with_default([1.0], [1])])
      assert [v.op.name for v in loss_scale.variables()] == [
        "current_loss_scale",
        "good_steps",
      ]
      assert all(v.graph is tf.get_default_graph() for v in loss_scale.variables())
      with testing.initialized_session() as sess:
        sess.run(update_op)
        assert sess.run(loss_scale()) == 16.0


@pytest.mark.usefixtures("control_flow")
def test_variables_are_outside_conditionals(graph):
  loss_scales = []

  def branch():
    with tf.control_dependencies([tf.placeholder(tf.bool, [], name="never_fed")]):
      loss_scales.append(mp_compat.DynamicLossScale(8.0, 1))
    return tf.constant(0.0)

  tf.cond(tf.placeholder(tf.bool, []), branch, lambda: tf.constant(0.0))
  assert [v.graph for v in tf.global_variables()] == [graph] * 2 and len(
    loss_scales[0].variables()
  ) == 2
  with testing.initialized_session() as sess:
    assert sess.run(loss_scales[0]()) == 8.0


def test_graphs_are_not_kept_alive():
  loss_scale = mp_compat.DynamicLossScale()
  with tf.Graph().as_default():
    loss_scale()
    gone = weakref.ref(tf.get_default_graph())
  gc.collect()
  assert gone() is None


def test_update_checks_clipped_gradients():
  training, scale = testing.Training(), mp_compat.DynamicLossScale(8.0)
  ((grad, _),) = testing.Optimizer(
    tf.train.GradientDescentOptimizer(1.0), scale
  ).compute_gradients(training.loss)
  update_op, should_apply = scale.update([tf.clip_by_value(grad, -1.0, 1.0)])
  assert training.run(
    update_op, testing.FINITE, testing.OVERFLOW, fetch=should_apply
  ) == [[True], [False]]
  assert training.session.run(scale()) == 4.0


def test_scale_is_read_once():
  calls = []

  class Counted(mp_compat.DynamicLossScale):
    def __call__(self):
      calls.append(1)
      return super().__call__()

  w = tf.get_variable("w", [2])
  opt = testing.Optimizer(tf.train.GradientDescentOptimizer(1.0), Counted())
  opt.unscale_gradients(tf.gradients(opt.scale_loss(tf.reduce_sum(w)), [w]))
  assert len(calls) == 1
  opt.compute_gradients(tf.reduce_sum(w))
  assert len(calls) == 2


def test_equal_scales_have_own_variables():

  class ComparedByConfig(mp_compat.DynamicLossScale):
    __hash__ = None

    def __eq__(self, other):
      return self.get_config() == other.get_config()

  first, second = ComparedByConfig(8.0, 3), ComparedByConfig(8.0, 3)
  update, _ = second.update([tf.constant(np.inf)])
  with testing.initialized_session() as sess:
    sess.run(update)
    assert sess.run([first(), second()]) == [8.0, 4.0]


@pytest.mark.parametrize("name", ["increment_period", "multiplier"])
def test_classes_have_the_attributes_of_instances(name):
  """As `unittest.mock.create_autospec` and help() need."""
  assert hasattr(mp_compat.DynamicLossScale, name)
