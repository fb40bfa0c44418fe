# SPDX-License-Identifier: Apache-2.0
"""Sonnet 1: an unrolled LSTM and an MLP with batch normalization, regularized;
gradients clipped.
"""

import comparison
import numpy as np


def train(tools, directory):
  import sonnet as snt
  import tensorflow.compat.v1 as tf

  random = np.random.RandomState(1)
  inputs, targets = (
    tf.constant(random.normal(size=size), tf.float32) for size in ([6, 16, 4], [16, 2])
  )
  tf.set_random_seed(1)
  core = snt.LSTM(16)
  outputs, _ = tf.nn.dynamic_rnn(
    core, inputs, initial_state=core.initial_state(16), time_major=True
  )
  hidden = snt.BatchNorm(scale=True)(outputs[-1], is_training=True)
  predictions = snt.nets.MLP(
    [16, 2], regularizers={"w": lambda weights: 0.001 * tf.nn.l2_loss(weights)}
  )(hidden)
  loss = (
    tf.losses.mean_squared_error(targets, predictions)
    + tf.losses.get_regularization_loss()
  )
  opt = tools.wrap(tf.train.AdamOptimizer(0.01))
  grads, variables = zip(*opt.compute_gradients(loss))
  grads, _ = tf.clip_by_global_norm(grads, 1.0)
  with tf.control_dependencies(tf.get_collection(tf.GraphKeys.UPDATE_OPS)):
    train_op = opt.apply_gradients(
      zip(grads, variables), tf.train.get_or_create_global_step()
    )
  comparison.run_monitored(train_op, directory)
