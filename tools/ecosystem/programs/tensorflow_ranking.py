# SPDX-License-Identifier: Apache-2.0
"""TensorFlow Ranking: a groupwise ranking function with a listwise loss; checkpoints by
Estimator.
"""

import comparison
import numpy as np


def train(tools, directory):
  import tensorflow.compat.v1 as tf
  import tensorflow_ranking as tfr

  random = np.random.RandomState(1)
  features = {"x": random.normal(size=[64, 5, 4]).astype(np.float32)}
  labels = random.randint(0, 4, [64, 5]).astype(np.float32)

  def score(context_features, group_features, mode, params, config):
    hidden = tf.layers.dense(tf.layers.flatten(group_features["x"]), 16, tf.nn.relu)
    return tf.layers.dense(hidden, 2)

  head = tfr.head.create_ranking_head(
    tfr.losses.make_loss_fn("approx_ndcg_loss"),
    train_op_fn=lambda loss: tools.wrap(tf.train.AdagradOptimizer(0.1)).minimize(
      loss, tf.train.get_global_step()
    ),
  )
  model_fn = tfr.model.make_groupwise_ranking_fn(
    score, 2, transform_fn=tfr.feature.make_identity_transform_fn([]), ranking_head=head
  )
  tf.estimator.Estimator(
    model_fn, directory, tf.estimator.RunConfig(tf_random_seed=1)
  ).train(comparison.batches(features, labels), steps=comparison.STEPS)
