# SPDX-License-Identifier: Apache-2.0
"""TensorFlow Addons: Lookahead around LAMB, with weight normalization, `fit` and
tf.train.Checkpoint.
"""

import comparison
import numpy as np


def train(tools, directory):
  import tensorflow as tf
  import tensorflow_addons as tfa

  random = np.random.RandomState(1)
  inputs, labels = (
    random.normal(size=[64, 4]).astype(np.float32),
    random.randint(0, 3, [64]),
  )
  tf.keras.utils.set_random_seed(1)
  model = tf.keras.Sequential(
    [
      tfa.layers.WeightNormalization(
        tf.keras.layers.Dense(16, "relu"), data_init=False
      ),
      tf.keras.layers.Dense(3, use_bias=False),
    ]
  )
  model.build([None, 4])
  opt = tools.wrap_keras(
    tfa.optimizers.Lookahead(
      tfa.optimizers.LAMB(0.01, weight_decay=0.01), sync_period=4
    )
  )
  model.compile(
    opt,
    lambda y, p: tools.inject(
      tf.keras.losses.sparse_categorical_crossentropy(y, p, True)
    ),
  )
  with comparison.checkpoint(directory, model=model, optimizer=opt):
    model.fit(inputs, labels, batch_size=16, epochs=comparison.STEPS // 4, verbose=0)
  return comparison.read_eager(model.variables, opt)
