# SPDX-License-Identifier: Apache-2.0
"""GPflow: a sparse variational Gaussian process with float64 parameters, Keras's legacy
Adam in a tf.function.
"""

import comparison
import numpy as np


def train(tools, directory):
  import gpflow
  import tensorflow as tf

  random = np.random.RandomState(1)
  inputs = random.uniform(size=[64, 2])
  targets = np.sin(6.0 * inputs.sum(1, keepdims=True)) + 0.1 * random.normal(
    size=[64, 1]
  )
  model = gpflow.models.SVGP(
    gpflow.kernels.Matern52(lengthscales=[1.0, 1.0]),
    gpflow.likelihoods.Gaussian(0.1),
    inputs[:8],
    num_data=64,
  )
  loss = tools.inject(model.training_loss_closure((inputs, targets)))
  opt = tools.wrap_keras(tf.keras.optimizers.legacy.Adam(0.01))

  @tf.function
  def train_step():
    opt.minimize(loss, model.trainable_variables)

  with comparison.checkpoint(directory, model=model, optimizer=opt):
    for _ in range(comparison.STEPS):
      train_step()
  return comparison.read_eager(model.trainable_variables, opt)
