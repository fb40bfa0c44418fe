# SPDX-License-Identifier: Apache-2.0
"""TensorFlow Recommenders: a retrieval task and a cross network, `fit` with Keras's
legacy Adagrad.
"""

import comparison
import numpy as np


def train(tools, directory):
  import tensorflow as tf
  import tensorflow_recommenders as tfrs

  class TwoTowers(tfrs.Model):
    def __init__(self):
      super().__init__()
      self.users, self.items = (
        tf.keras.layers.Embedding(20, 8),
        tf.keras.layers.Embedding(30, 8),
      )
      self.cross, self.task = (
        tfrs.layers.dcn.Cross(projection_dim=4),
        tfrs.tasks.Retrieval(),
      )

    def compute_loss(self, inputs, training=False):
      return tools.inject(
        self.task(self.cross(self.users(inputs["user"])), self.items(inputs["item"]))
      )

    def train_step(self, inputs):  # tfrs.Model's does not scale the loss
      self.optimizer.minimize(
        lambda: self.compute_loss(inputs, training=True),
        lambda: self.trainable_variables,
      )
      return {}

  random = np.random.RandomState(1)
  data = {"user": random.randint(0, 20, [64]), "item": random.randint(0, 30, [64])}
  tf.keras.utils.set_random_seed(1)
  model, opt = TwoTowers(), tools.wrap_keras(tf.keras.optimizers.legacy.Adagrad(0.1))
  model.compile(opt)
  with comparison.checkpoint(directory, model=model, optimizer=opt):
    model.fit(
      tf.data.Dataset.from_tensor_slices(data).batch(16),
      epochs=comparison.STEPS // 4,
      verbose=0,
    )
  return comparison.read_eager(model.variables, opt)
