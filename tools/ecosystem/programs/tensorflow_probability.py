# SPDX-License-Identifier: Apache-2.0
"""TensorFlow Probability: a Bayesian network with DenseFlipout, its ELBO minimized in a
MonitoredTrainingSession.
"""

import comparison
import numpy as np


def train(tools, directory):
  import tensorflow.compat.v1 as tf
  import tensorflow_probability as tfp

  tf.disable_v2_behavior()
  random = np.random.RandomState(1)
  inputs, labels = (
    random.normal(size=[64, 4]).astype(np.float32),
    random.randint(0, 3, [64]),
  )
  tf.set_random_seed(1)
  model = tf.keras.Sequential(
    [
      tfp.layers.DenseFlipout(8, activation="relu", seed=1),
      tfp.layers.DenseFlipout(3, seed=2),
    ]
  )
  likelihood = tfp.distributions.Categorical(logits=model(tf.constant(inputs)))
  loss = tf.reduce_mean(-likelihood.log_prob(labels)) + tf.add_n(model.losses) / 64.0
  step = tf.train.get_or_create_global_step()
  train_op = tools.wrap(tf.train.AdamOptimizer(0.01)).minimize(loss, step)
  comparison.run_monitored(train_op, directory)
