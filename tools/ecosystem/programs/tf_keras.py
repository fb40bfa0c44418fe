# SPDX-License-Identifier: Apache-2.0
"""Keras 2 beside TensorFlow 2.21: an LSTM trained with `fit` and the newer RMSprop,
saved by CheckpointManager.
"""

import comparison
import numpy as np


def train(tools, directory):
  import tf_keras

  random = np.random.RandomState(1)
  words, labels = (
    random.randint(0, 20, [64, 6]),
    random.randint(0, 2, [64, 1]).astype(np.float32),
  )
  tf_keras.utils.set_random_seed(1)
  model = tf_keras.Sequential(
    [
      tf_keras.layers.Embedding(20, 8),
      tf_keras.layers.LSTM(8, dropout=0.2),
      tf_keras.layers.Dense(1, "sigmoid"),
    ]
  )
  opt = tools.wrap_keras(tf_keras.optimizers.RMSprop(0.01, momentum=0.9, clipnorm=1.0))
  model.compile(
    opt, lambda y, p: tools.inject(tf_keras.losses.binary_crossentropy(y, p))
  )
  with comparison.checkpoint(directory, model=model, optimizer=opt):
    model.fit(words, labels, batch_size=16, epochs=comparison.STEPS // 4, verbose=0)
  return comparison.read_eager(model.weights, opt)
