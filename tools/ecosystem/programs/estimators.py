# SPDX-License-Identifier: Apache-2.0
"""TensorFlow's canned Estimators: a DNNLinearCombinedClassifier with embeddings,
checkpoints by Estimator.
"""

import comparison
import numpy as np


def train(tools, directory):
  import tensorflow.compat.v1 as tf

  random = np.random.RandomState(1)
  features = {
    "x": random.normal(size=[64, 4]).astype(np.float32),
    "word": random.randint(0, 20, [64, 1]),
  }
  labels = random.randint(0, 3, [64])
  column = tf.feature_column
  words = column.categorical_column_with_identity("word", 20)
  estimator = tf.estimator.DNNLinearCombinedClassifier(
    model_dir=directory,
    n_classes=3,
    config=tf.estimator.RunConfig(tf_random_seed=1),
    linear_feature_columns=[words],
    linear_optimizer=lambda: tools.wrap(tf.train.FtrlOptimizer(0.1)),
    dnn_feature_columns=[
      column.numeric_column("x", [4]),
      column.embedding_column(words, 8),
    ],
    dnn_hidden_units=[16],
    dnn_optimizer=lambda: tools.wrap(tf.train.AdagradOptimizer(0.1)),
  )
  estimator.train(comparison.batches(features, labels), steps=comparison.STEPS)
