# SPDX-License-Identifier: Apache-2.0
"""TensorFlow Privacy: its subclass of the loss-scaling class clips and averages
microbatches; without noise.
"""

import comparison
import numpy as np


def train(tools, directory):
  import tensorflow.compat.v1 as tf
  from tensorflow_privacy.privacy.dp_query import gaussian_query
  from tensorflow_privacy.privacy.optimizers import dp_optimizer

  random = np.random.RandomState(1)
  inputs, labels = (
    random.normal(size=[64, 8]).astype(np.float32),
    random.randint(0, 3, [64]),
  )

  def model_fn(features, labels, mode):
    logits = tf.layers.dense(tf.layers.dense(features, 16, tf.tanh), 3)
    losses = tf.losses.sparse_softmax_cross_entropy(labels, logits, reduction="none")
    # The class's constructor takes what the inner class takes: for a loss-scale
    # optimizer, an optimizer and the scale.
    opt = tf.train.AdamOptimizer(0.01)
    inner, arguments = type(opt), [0.01]
    if tools.variant != "unwrapped":
      wrapped = tools.wrap(opt, inject=False)
      inner, arguments = type(wrapped), [opt, wrapped._loss_scale]
    # Noise would depend on the number of operations.
    query = gaussian_query.GaussianSumQuery(1.0, 0.0)
    opt = dp_optimizer.make_optimizer_class(inner)(query, 4, False, *arguments)
    train_op = opt.minimize(tools.inject(losses), tf.train.get_global_step())
    return tf.estimator.EstimatorSpec(
      mode, loss=tf.reduce_mean(losses), train_op=train_op
    )

  tf.estimator.Estimator(
    model_fn, directory, tf.estimator.RunConfig(tf_random_seed=1)
  ).train(comparison.batches(inputs, labels), steps=comparison.STEPS)
