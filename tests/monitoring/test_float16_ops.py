"""Tests of float16_ops, and of the warning that names the same ops."""

import numpy as np
import pytest

import mp_compat
from tests import testing
from tests.testing import Optimizer
from tests.testing import sgd
from tests.testing import tf

pytestmark = pytest.mark.usefixtures("graph")


def normalized(h):
  """Returns a layer normalization in the dtype of h."""
  mean, variance = tf.nn.moments(h, [1], keep_dims=True)
  return (h - mean) / tf.sqrt(variance + 1e-3)


def normalized_by_hand(h):
  centered = h - tf.reduce_mean(h, 1, keepdims=True)
  variance = tf.reduce_mean(centered * centered, 1, keepdims=True)
  return centered / tf.sqrt(variance + 1e-3)


def difference_of_squares(h):
  """Returns a variance in the dtype of h, computed as `tf.nn.moments` does from
  TensorFlow 2.22 on.
  """
  wide = tf.cast(h, tf.float32)
  mean_of_squares = tf.reduce_mean(tf.square(wide), 1)
  variance = mean_of_squares - tf.square(tf.reduce_mean(wide, 1))
  return tf.cast(tf.maximum(variance, 0.0), h.dtype)


# A function of h, and the types of the ops that are listed if h is float16.
OPS = {
  "exponential": (tf.exp, ["Exp"]),
  "sigmoid by hand": (lambda h: 1.0 / (1.0 + tf.exp(-h)), ["Exp"]),
  "loss of squares": (tf.nn.l2_loss, ["L2Loss"]),
  "norm": (tf.norm, ["Sum"]),
  "mean of squares": (lambda h: tf.reduce_mean(tf.square(h)), ["Mean"]),
  "by hand": (normalized_by_hand, ["Mean"]),
  "moments": (normalized, ["Cast"]),
  "moments of 2.22": (difference_of_squares, ["Cast"]),
  "softmax": (tf.nn.softmax, []),
  "sigmoid": (tf.sigmoid, []),
  "mean": (tf.reduce_mean, []),
  "product": (lambda h: tf.reduce_sum(h * (h + 1.0)), []),
  "square": (tf.square, []),
}


@pytest.mark.parametrize("case", sorted(OPS))
def test_ops_that_are_likely_to_overflow(case):
  function, types = OPS[case]
  x = tf.placeholder(tf.float32, [4, 3])
  listed = mp_compat.float16_ops(function(tf.cast(x, tf.float16)))
  assert [op.type for op in listed] == types
  assert [x.graph.get_operation_by_name(op.name).type for op in listed] == types
  assert not mp_compat.float16_ops(function(x))
  wide = tf.cast(tf.cast(x, tf.float16), tf.float32)
  assert not mp_compat.float16_ops(function(wide))


def train(normalize, dtype, warnings):
  """Trains a layer with activations of 400; returns its losses and warnings."""
  random = np.random.RandomState(0)
  x, y = np.sign(random.normal(size=[8, 4])), random.normal(size=[8, 4])
  x = x[np.abs(x.sum(axis=1)) < 4]  # not rows of equal signs
  y = y[: len(x)]
  with tf.variable_scope("", custom_getter=mp_compat.float32_variable_storage_getter):
    w = tf.get_variable("w", [4, 4], dtype, tf.constant_initializer(400.0 * np.eye(4)))
  h = tf.matmul(tf.cast(tf.placeholder_with_default(x, x.shape), dtype), w)
  outputs = tf.cast(normalize(h), tf.float32)
  loss = tf.reduce_mean(tf.square(outputs - y))
  opt = Optimizer(tf.train.AdamOptimizer(1.0), "dynamic")
  train_op = opt.minimize(loss)
  hook = mp_compat.LossScaleHook(opt)
  with tf.train.MonitoredTrainingSession(hooks=[hook]) as sess:
    losses = [sess.run([loss, train_op])[0] for _ in range(20)]
  return losses, [text for text in warnings if "Compute them in float32" in text]


@pytest.mark.parametrize("normalize", [normalized, normalized_by_hand])
def test_layer_that_stands_still_is_named(normalize, warnings):
  """All steps are applied, without an error."""
  losses, named = train(normalize, tf.float16, warnings)
  name = "Mean" if normalize is normalized_by_hand else "moments/Cast"
  assert losses[-1] == losses[0] and len(named) == 1 and name in named[0]


def test_float32_layers_are_not_named(warnings):
  losses, named = train(
    lambda h: normalized_by_hand(tf.cast(h, tf.float32)), tf.float16, warnings
  )
  assert min(losses) < losses[0] and not named


def test_loss_must_be_tensor_of_graph():
  with pytest.raises(ValueError, match="loss must be a tensor of a graph, but got 1.0"):
    mp_compat.float16_ops(1.0)
  with testing.eager_mode(), pytest.raises(
    ValueError, match="Call float16_ops in graph"
  ):
    mp_compat.float16_ops(tf.constant(1.0))


def test_unused_ops_are_not_named(warnings):
  x = tf.placeholder(tf.float16, [2])
  tf.exp(x)
  w = tf.get_variable("w", [2])
  opt = Optimizer(sgd(), 8.0)
  opt.minimize(tf.reduce_sum(w * tf.cast(x, tf.float32)))
  mp_compat.LossScaleHook(opt).begin()
  assert not [text for text in warnings if "Compute them in float32" in text]
