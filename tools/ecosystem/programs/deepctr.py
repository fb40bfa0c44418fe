# SPDX-License-Identifier: Apache-2.0
"""DeepCTR: a DeepFMEstimator, whose linear and deep parts have an optimizer and a loss
scale each.
"""

import comparison
import numpy as np


def train(tools, directory):
  from deepctr.estimator import DeepFMEstimator
  import tensorflow.compat.v1 as tf

  random = np.random.RandomState(1)
  features = {"price": random.normal(size=[64, 1]).astype(np.float32)}
  features.update((name, random.randint(0, 10, [64])) for name in ("user", "item"))
  labels = random.randint(0, 2, [64]).astype(np.float32)
  column = tf.feature_column
  words = [
    column.categorical_column_with_identity(name, 10) for name in ("user", "item")
  ]
  numeric = column.numeric_column("price")
  estimator = DeepFMEstimator(
    words + [numeric],
    [column.embedding_column(word, 4) for word in words] + [numeric],
    dnn_hidden_units=[16, 8],
    model_dir=directory,
    config=tf.estimator.RunConfig(tf_random_seed=1),
    linear_optimizer=tools.wrap(tf.train.FtrlOptimizer(0.05)),
    dnn_optimizer=tools.wrap(tf.train.AdagradOptimizer(0.05)),
  )
  estimator.train(comparison.batches(features, labels), steps=comparison.STEPS)
