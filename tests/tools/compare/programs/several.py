"""Trains two parts of a model, in two graphs with two sessions each."""

import sys

import numpy as np
import tensorflow.compat.v1 as tf

tf.disable_v2_behavior()


def build():
  x = tf.placeholder(tf.float32, [None, 3])
  generator = tf.get_variable("generator", [3, 2])
  discriminator = tf.get_variable("discriminator", [2, 1])
  loss = tf.reduce_mean(
    tf.matmul(tf.matmul(x, generator), discriminator)
  ) + tf.nn.l2_loss(discriminator)
  train_ops = []
  for variable in (generator, discriminator):
    opt = tf.train.experimental.MixedPrecisionLossScaleOptimizer(
      tf.train.MomentumOptimizer(0.1, 0.9), "dynamic"
    )
    ((grad, _),) = opt.compute_gradients(loss, [variable])
    train_ops.append(
      opt.apply_gradients(
        [(tf.clip_by_value(grad, -1, 1) if "clip" in sys.argv else grad, variable)]
      )
    )
  return x, train_ops, tf.global_variables_initializer()


sessions = []
for _ in range(2):
  with tf.Graph().as_default() as graph:
    x, train_ops, initializer = build()
  for sess in [tf.Session(graph=graph), tf.Session(graph=graph)]:
    sess.run(initializer)
    sessions.append((sess, x, train_ops))
for step in range(3):
  for sess, x, train_ops in sessions:
    for train_op in train_ops:
      value = np.abs(np.random.normal(size=[4, 3]))
      if step == 1 and "clip" not in sys.argv:
        value *= np.inf
      elif step == 1 and sess is sessions[0][0]:
        value *= 1e36  # The generator's gradients are infinite, not NaN.
      sess.run(train_op, {x: value})
