# SPDX-License-Identifier: Apache-2.0
"""Spektral: a graph attention network, trained on batches of a loader with `fit` and
the newer Adam.
"""

import comparison
import numpy as np


def train(tools, directory):
  import spektral
  import tensorflow as tf

  class Graphs(spektral.data.Dataset):
    def read(self):
      random, graphs = np.random.RandomState(1), []
      for _ in range(32):
        edges = np.triu(random.randint(0, 2, [6, 6]), 1)
        graphs.append(
          spektral.data.Graph(
            x=random.normal(size=[6, 4]).astype(np.float32),
            a=(edges + edges.T).astype(np.float32),
            y=np.eye(3)[random.randint(3)],
          )
        )
      return graphs

  class Network(tf.keras.Model):
    def __init__(self):
      super().__init__()
      self.attention, self.pool = (
        spektral.layers.GATConv(8, 2),
        spektral.layers.GlobalAttentionPool(8),
      )
      self.logits = tf.keras.layers.Dense(3)

    def call(self, inputs):
      return self.logits(self.pool(self.attention(inputs)))

  tf.keras.utils.set_random_seed(1)
  model, opt = (
    Network(),
    tools.wrap_keras(tf.keras.optimizers.Adam(0.01, global_clipnorm=1.0)),
  )
  model.compile(
    opt, lambda y, p: tools.inject(tf.keras.losses.categorical_crossentropy(y, p, True))
  )
  with comparison.checkpoint(directory, model=model, optimizer=opt):
    loader = spektral.data.BatchLoader(Graphs(), batch_size=8, shuffle=False)
    model.fit(loader.load(), steps_per_epoch=4, epochs=comparison.STEPS // 4, verbose=0)
  return comparison.read_eager(model.variables, opt)
