"""Tests of the graph rewrite: switching it, wrapping optimizers, and the graph that
TensorFlow optimizes for a GPU.
"""

import logging
import os

import pytest
import tensorflow
from tensorflow.core.protobuf import device_properties_pb2
from tensorflow.python.grappler import cluster
from tensorflow.python.grappler import tf_optimizer

import mp_compat
from mp_compat import graph_rewrite
from mp_compat.contrib import mixed_precision as contrib
from tests import testing
from tests.keras import cases as keras_cases
from tests.testing import tf


@pytest.fixture(autouse=True)
def _disable_afterwards():
  yield
  if is_enabled():
    mp_compat.disable_mixed_precision_graph_rewrite()


def is_enabled():
  return tensorflow.config.optimizer.get_experimental_options().get(
    "auto_mixed_precision", False
  )


def make_device(kind, **environment):
  return device_properties_pb2.NamedDevice(
    name="/job:localhost/replica:0/task:0/device:{}:0".format(kind),
    properties=device_properties_pb2.DeviceProperties(
      type=kind, environment=environment
    ),
  )


# Describes a machine with a GPU with tensor cores to TensorFlow's graph optimizer. The
# variable lets builds of TensorFlow that cannot query this GPU rewrite the graph.
os.environ["TF_AUTO_MIXED_PRECISION_GRAPH_REWRITE_IGNORE_PERFORMANCE"] = "1"
MACHINE = [
  make_device("CPU"),
  make_device("GPU", architecture="7.0", cuda="10000", cudnn="7500"),
]


def find_float16_ops():
  """Returns the types of the ops that a new Session would run in float16 in a float32
  graph.
  """
  with tf.Graph().as_default():
    with tf.device(MACHINE[1].name):
      x, w = tf.placeholder(tf.float32, [8, 8]), tf.placeholder(tf.float32, [8, 8])
      y = tf.identity(tf.matmul(tf.nn.relu(tf.matmul(x, w)), w))
    tf.add_to_collection(tf.GraphKeys.TRAIN_OP, y)
    with tf.Session() as sess:
      config = tf.ConfigProto.FromString(sess._config.SerializeToString())
    # rewrite small graphs, too
    config.graph_options.rewrite_options.min_graph_nodes = -1
    machine = cluster.Cluster(devices=MACHINE)
    optimized = tf_optimizer.OptimizeGraph(
      config, tf.train.export_meta_graph(), cluster=machine
    )
  half = tf.float16.as_datatype_enum
  return {
    node.op
    for node in optimized.node
    if half in (node.attr["T"].type, node.attr["DstT"].type)
  }


def test_sessions_use_float16_while_enabled():
  assert not find_float16_ops() and not is_enabled()
  assert mp_compat.enable_mixed_precision_graph_rewrite() is None
  assert {"Cast", "MatMul"} <= find_float16_ops() and is_enabled()
  mp_compat.disable_mixed_precision_graph_rewrite()
  assert not find_float16_ops() and not is_enabled()


def test_context_restores_setting():
  with mp_compat.mixed_precision_graph_rewrite() as opt:
    assert opt is None and find_float16_ops()
    with mp_compat.mixed_precision_graph_rewrite():
      pass
    assert is_enabled()
  assert not find_float16_ops() and not is_enabled()
  with pytest.raises(KeyError):
    with mp_compat.mixed_precision_graph_rewrite():
      raise KeyError
  assert not is_enabled()
  with mp_compat.mixed_precision_graph_rewrite():
    mp_compat.disable_mixed_precision_graph_rewrite()
  assert not is_enabled()


def test_enabling_wraps_optimizer():
  with tf.Graph().as_default():
    opt = mp_compat.enable_mixed_precision_graph_rewrite(tf.train.AdamOptimizer(), 128)
    assert isinstance(opt, mp_compat.MixedPrecisionLossScaleOptimizer)
    assert opt.loss_scale.get_config() == {"loss_scale_value": 128.0}
    assert [variable.name for variable in tf.global_variables()] == []
    dynamic = mp_compat.enable_mixed_precision_graph_rewrite(tf.train.AdamOptimizer())
    assert isinstance(dynamic.loss_scale, mp_compat.DynamicLossScale)
    assert [variable.op.name for variable in tf.global_variables()] == [
      "current_loss_scale",
      "good_steps",
    ]
    assert is_enabled()
  with testing.eager_mode():
    for family in keras_cases.FAMILIES:
      opt = mp_compat.enable_mixed_precision_graph_rewrite(
        family.optimizers.SGD(0.1), 4
      )
      assert isinstance(opt, mp_compat.keras.LossScaleOptimizer) and isinstance(
        opt, family.native
      )
      assert float(keras_cases.scale_of(opt)) == 4.0


class Own:
  """A custom optimizer, unrelated to TensorFlow's classes."""


class OwnWrapper:
  """A custom loss scale wrapper."""

  def __init__(self, opt, loss_scale):
    self.opt, self.loss_scale = opt, loss_scale


@pytest.mark.parametrize(
  "make_optimizer,message",
  [
    (
      lambda: Own(),
      "must be an instance of a tf.train.Optimizer or a tf.keras.optimizers.Optimizer, but got: .*Own",
    ),
    (
      lambda: mp_compat.MixedPrecisionLossScaleOptimizer(tf.train.AdamOptimizer(), 2),
      "must not already be an instance of a MixedPrecisionLossScaleOptimizer",
    ),
    (
      lambda: mp_compat.keras.LossScaleOptimizer(keras_cases.V2.optimizers.SGD(), 2),
      "must not already be an instance of a LossScaleOptimizer",
    ),
    (
      lambda: contrib.LossScaleOptimizer(
        tf.train.AdamOptimizer(), contrib.FixedLossScaleManager(2)
      ),
      "must not already be an instance of a LossScaleOptimizer",
    ),
  ],
)
@pytest.mark.usefixtures("graph")
def test_unsupported_optimizer_enables_nothing(make_optimizer, message):
  with pytest.raises(ValueError, match=message):
    mp_compat.enable_mixed_precision_graph_rewrite(make_optimizer())
  assert not is_enabled()


@pytest.mark.usefixtures("graph")
@pytest.mark.parametrize("enabled", [False, True])
def test_invalid_loss_scale_keeps_setting(enabled):
  if enabled:
    mp_compat.enable_mixed_precision_graph_rewrite()
  with pytest.raises(ValueError, match="interpret loss scale"):
    mp_compat.enable_mixed_precision_graph_rewrite(tf.train.AdamOptimizer(), "fast")
  assert is_enabled() == enabled


@pytest.mark.usefixtures("graph")
@pytest.mark.parametrize(
  "cls", [mp_compat.MixedPrecisionLossScaleOptimizer, contrib.LossScaleOptimizer]
)
def test_tensorflow_rejects_our_wrappers(cls):
  opt = cls(tf.train.AdamOptimizer(), contrib.FixedLossScaleManager(2))
  assert isinstance(opt, testing.native.MixedPrecisionLossScaleOptimizer)
  with pytest.raises(
    ValueError,
    match="must not already be an instance of a MixedPrecisionLossScaleOptimizer",
  ):
    testing.native.enable_mixed_precision_graph_rewrite(opt)


def test_registered_wrapper_is_used(monkeypatch):
  monkeypatch.setattr(graph_rewrite, "_wrappers", list(graph_rewrite._wrappers))
  with pytest.raises(
    TypeError,
    match="must be the class of the objects that wrapper_fn returns.*but got <function",
  ):
    mp_compat.register_loss_scale_wrapper(
      Own, lambda opt, loss_scale: OwnWrapper(opt, loss_scale)
    )
  mp_compat.register_loss_scale_wrapper(Own, OwnWrapper)
  wrapped = mp_compat.enable_mixed_precision_graph_rewrite(Own(), 8)
  assert isinstance(wrapped, OwnWrapper) and wrapped.loss_scale == 8
  with pytest.raises(
    ValueError, match="must not already be an instance of a OwnWrapper"
  ):
    mp_compat.enable_mixed_precision_graph_rewrite(wrapped)
  mp_compat.register_loss_scale_wrapper(
    tf.train.AdamOptimizer,
    lambda opt, loss_scale: OwnWrapper(opt, [loss_scale]),
    OwnWrapper,
  )
  assert mp_compat.enable_mixed_precision_graph_rewrite(
    tf.train.AdamOptimizer(), 8
  ).loss_scale == [8]


def test_existing_session_warns(caplog):
  caplog.set_level(logging.WARNING)
  with tf.Graph().as_default(), tf.Session():
    mp_compat.enable_mixed_precision_graph_rewrite()
  assert "already have existing Sessions that do not use mixed precision" in caplog.text
  mp_compat.disable_mixed_precision_graph_rewrite()
  mp_compat.disable_mixed_precision_graph_rewrite()
  assert "called when mixed precision is already disabled" in caplog.text


@pytest.mark.skipif(
  keras_cases.VERSION < (2, 4), reason="set_global_policy needs TensorFlow 2.4"
)
def test_global_policy_raises():
  keras = keras_cases.V2.keras
  with testing.eager_mode():
    keras.mixed_precision.set_global_policy("mixed_float16")
    try:
      with pytest.raises(
        ValueError,
        match="global Keras dtype Policy has been set to a mixed precision policy",
      ):
        mp_compat.enable_mixed_precision_graph_rewrite()
    finally:
      keras.mixed_precision.set_global_policy("float32")
  assert not is_enabled()
