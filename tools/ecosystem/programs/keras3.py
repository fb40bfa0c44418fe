# SPDX-License-Identifier: Apache-2.0
"""Keras 3: a convolution, batch normalization and dropout, trained with `fit` and Adam,
saved as a .keras file.
"""

import os

import comparison
import numpy as np


def train(tools, directory):
  import keras

  random = np.random.RandomState(1)
  images, labels = (
    random.normal(size=[64, 8, 8, 1]).astype(np.float32),
    random.randint(0, 3, [64]),
  )

  def loss(labels, logits):
    return tools.inject(
      keras.losses.sparse_categorical_crossentropy(labels, logits, from_logits=True)
    )

  keras.utils.set_random_seed(1)
  path = os.path.join(directory, "model.keras")
  if os.path.exists(path):
    custom_objects = {"loss": loss}
    if tools.variant == "mp_compat":
      import mp_compat.keras

      custom_objects.update(mp_compat.keras.CUSTOM_OBJECTS)
    model = keras.saving.load_model(path, custom_objects)
  else:
    model = keras.Sequential(
      [
        keras.layers.Conv2D(4, 3),
        keras.layers.BatchNormalization(),
        keras.layers.ReLU(),
        keras.layers.Dropout(0.2),
        keras.layers.Flatten(),
        keras.layers.Dense(3),
      ]
    )
    opt = keras.optimizers.Adam(0.01, clipnorm=1.0, use_ema=True)
    model.compile(tools.wrap_keras(opt), loss, jit_compile=False)
  model.fit(images, labels, batch_size=16, epochs=comparison.STEPS // 4, verbose=0)
  model.save(path)
  return comparison.read_eager(model.weights, model.optimizer)
