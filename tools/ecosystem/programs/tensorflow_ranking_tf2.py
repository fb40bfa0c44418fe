# SPDX-License-Identifier: Apache-2.0
"""TensorFlow Ranking: a groupwise scoring function and a ranking head, in an
Estimator.
"""

import comparison
import numpy as np


def train(tools, directory):
  import tensorflow.compat.v1 as tf
  import tensorflow_ranking as tfr

  random = np.random.RandomState(1)
  # 32 queries, 6 documents each
  features = {"document": random.normal(size=[32, 6, 4]).astype(np.float32)}
  relevance = random.randint(0, 3, [32, 6]).astype(np.float32)

  def score(_, group, mode, params, config):
    kernels = [
      tf.glorot_uniform_initializer(seed=1),
      tf.glorot_uniform_initializer(seed=2),
    ]
    hidden = tf.layers.dense(
      tf.reshape(group["document"], [-1, 8]),
      8,
      tf.nn.relu,
      kernel_initializer=kernels[0],
    )
    return tf.layers.dense(hidden, 2, kernel_initializer=kernels[1])

  def model_fn(features, labels, mode, params, config):
    # called after all random operations: their seeds are numbers of operations
    def train_op_fn(loss):
      return tools.wrap(tf.train.AdagradOptimizer(0.1)).minimize(
        loss, tf.train.get_global_step()
      )

    head = tfr.head.create_ranking_head(
      tfr.losses.make_loss_fn("approx_ndcg_loss"), train_op_fn=train_op_fn
    )
    model = tfr.model.make_groupwise_ranking_fn(
      score, 2, head, lambda features, mode, params: ({}, features)
    )
    return model(features, labels, mode, params, config)

  estimator = tf.estimator.Estimator(
    model_fn, directory, tf.estimator.RunConfig(tf_random_seed=1)
  )
  estimator.train(comparison.batches(features, relevance), steps=comparison.STEPS)
