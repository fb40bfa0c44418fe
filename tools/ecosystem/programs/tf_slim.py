# SPDX-License-Identifier: Apache-2.0
"""TF-Slim: slim.learning.train with a convolution, batch normalization and clipping of
gradients.
"""

import comparison
import numpy as np


def train(tools, directory):
  import tensorflow.compat.v1 as tf
  import tf_slim

  tf.disable_v2_behavior()
  random = np.random.RandomState(1)
  images, labels = (
    random.normal(size=[32, 8, 8, 1]).astype(np.float32),
    random.randint(0, 3, [32]),
  )
  tf.set_random_seed(1)
  hidden = tf_slim.conv2d(tf.constant(images), 4, 3, normalizer_fn=tf_slim.batch_norm)
  logits = tf_slim.fully_connected(tf_slim.flatten(hidden), 3, activation_fn=None)
  loss = tf.losses.sparse_softmax_cross_entropy(labels, logits)
  train_op = tf_slim.learning.create_train_op(
    loss, tools.wrap(tf.train.RMSPropOptimizer(0.01)), clip_gradient_norm=5.0
  )
  done = 0 if tf.train.latest_checkpoint(directory) is None else comparison.STEPS
  tf_slim.learning.train(
    train_op, directory, number_of_steps=done + comparison.STEPS, log_every_n_steps=1000
  )
