"""Tests that object-based checkpoints (`tf.train.Checkpoint`) have the keys and values
of TensorFlow's class.
"""

import contextlib

import numpy as np
import pytest
import tensorflow

import mp_compat
from tests import testing
from tests.testing import Optimizer
from tests.testing import tf


def build(api):
  """Builds a program with an API's optimizer; returns its input, train op and
  Checkpoint.
  """
  x = tf.placeholder(tf.float32, [2])
  w = tf.get_variable("w", initializer=[1.0, 2.0], use_resource=True)
  opt = api.MixedPrecisionLossScaleOptimizer(
    tf.train.AdamOptimizer(0.1), api.DynamicLossScale(8.0, 2)
  )
  train_op = opt.minimize(tf.reduce_sum(w * w * x))
  return x, train_op, tf.train.Checkpoint(w=w, optimizer=opt)


@pytest.mark.each_choice
@pytest.mark.parametrize(
  "writer, reader",
  [(mp_compat, mp_compat), (mp_compat, testing.native), (testing.native, mp_compat)],
  ids=["read_by_us", "read_by_tensorflow", "written_by_tensorflow"],
)
@pytest.mark.parametrize(
  "context", [contextlib.nullcontext, mp_compat.install], ids=["as_it_is", "installed"]
)
def test_graph_checkpoints_are_exchangeable(writer, reader, context, tmp_path):
  with tf.Graph().as_default(), testing.session() as sess:
    x, train_op, checkpoint = build(writer)
    sess.run(tf.global_variables_initializer())
    for value in [[1.0, 1.0], [1.0, np.inf], [1.0, 1.0]]:
      sess.run(train_op, {x: value})
    path = checkpoint.save(str(tmp_path / "checkpoint"), session=sess)
    saved = testing.values(sess)
  assert {
    "optimizer/base_optimizer/beta1_power/.ATTRIBUTES/VARIABLE_VALUE",
    "optimizer/loss_scale/current_loss_scale/.ATTRIBUTES/VARIABLE_VALUE",
    "optimizer/loss_scale/good_steps/.ATTRIBUTES/VARIABLE_VALUE",
    "w/.OPTIMIZER_SLOT/optimizer/base_optimizer/m/.ATTRIBUTES/VARIABLE_VALUE",
  } <= {key for key, _ in tf.train.list_variables(path)}
  with context(), tf.Graph().as_default(), testing.session() as sess:
    _, _, checkpoint = build(reader)
    sess.run(tf.global_variables_initializer())
    checkpoint.restore(
      path
    ).assert_consumed().assert_existing_objects_matched().run_restore_ops(sess)
    restored = testing.values(sess)
  del saved["save_counter:0"], restored["save_counter:0"]
  np.testing.assert_equal(restored, saved)


def test_eager_checkpoint_restores_later_variables(tmp_path):

  def build_eager():
    opt = Optimizer(
      tf.train.MomentumOptimizer(0.1, 0.9), mp_compat.DynamicLossScale(8.0, 2)
    )
    w = tensorflow.Variable([1.0, 2.0])
    return opt, w, tensorflow.train.Checkpoint(w=w, optimizer=opt)

  def step(opt, w, x):
    opt.minimize(lambda: tf.reduce_sum(w * w) * x, var_list=[w])
    return [
      v.numpy() for v in [w, opt.get_slot(w, "momentum")] + opt.loss_scale.variables()
    ]

  with testing.eager_mode():
    opt, w, checkpoint = build_eager()
    step(opt, w, 1.0)
    step(opt, w, np.inf)
    path = checkpoint.save(str(tmp_path / "checkpoint"))
    expected = step(opt, w, 2.0)
    opt, w, checkpoint = build_eager()
    checkpoint.restore(path)
    for actual, value in zip(step(opt, w, 2.0), expected):
      np.testing.assert_array_equal(actual, value)


@pytest.mark.usefixtures("graph")
def test_saver_restores_object_checkpoint(tmp_path):
  v = tf.get_variable("v", initializer=np.float32(3.0))
  with testing.initialized_session() as sess:
    path = tf.train.Checkpoint(v=v).save(str(tmp_path / "checkpoint"), session=sess)
    sess.run(v.assign(5.0))
    mp_compat.checkpoints.Saver([v]).restore(sess, path)
    assert sess.run(v) == 3.0
    with pytest.raises(tf.errors.NotFoundError, match="other"):
      mp_compat.checkpoints.Saver([v, tf.get_variable("other", [])]).restore(sess, path)


class SortsItsSlots(Optimizer):
  """A subclass that overrides `get_slot_names`."""

  def get_slot_names(self):
    return sorted(super().get_slot_names())


def wrap_get_slot_names(opt):
  """Replaces `get_slot_names` of an optimizer by a function that calls it."""
  get_slot_names = opt.get_slot_names
  opt.get_slot_names = lambda: list(get_slot_names())
  return opt


@pytest.mark.parametrize(
  "make", [SortsItsSlots, lambda *args: wrap_get_slot_names(Optimizer(*args))]
)
def test_overriding_slot_names_keeps_slots(make, tmp_path):
  with tf.Graph().as_default(), testing.session() as sess:
    w = tf.get_variable("w", initializer=[1.0, 2.0], use_resource=True)
    opt = make(tf.train.AdamOptimizer(0.1), 8.0)
    opt.minimize(tf.reduce_sum(w * w))
    names = opt.get_slot_names()
    assert names == ["m", "v"] and opt.get_slot(w, names[0]).op.name == "w/Adam"
    sess.run(tf.global_variables_initializer())
    path = tf.train.Checkpoint(w=w, optimizer=opt).save(
      str(tmp_path / "checkpoint"), session=sess
    )
    assert opt.get_slot(w, opt.get_slot_names()[1]).op.name == "w/Adam_1"
  slots = [key for key, _ in tf.train.list_variables(path) if ".OPTIMIZER_SLOT" in key]
  assert sorted(slots) == [
    "w/.OPTIMIZER_SLOT/optimizer/base_optimizer/{}/.ATTRIBUTES/VARIABLE_VALUE".format(
      name
    )
    for name in "mv"
  ]
