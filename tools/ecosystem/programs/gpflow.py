# SPDX-License-Identifier: Apache-2.0
"""GPflow 1: a sparse variational Gaussian process in float64, trained by its
AdamOptimizer; saves by tf.train.Saver.
"""

import comparison
import numpy as np


def train(tools, directory):
  import gpflow
  import tensorflow.compat.v1 as tf

  random = np.random.RandomState(1)
  inputs = random.uniform(size=[32, 1])
  targets = np.sin(12.0 * inputs) + 0.1 * random.normal(size=[32, 1])
  model = gpflow.models.SVGP(
    inputs,
    targets,
    gpflow.kernels.RBF(1, name="kernel"),
    gpflow.likelihoods.Gaussian(name="likelihood"),
    inputs[:8].copy(),
    minibatch_size=16,
    name="model",
  )
  opt = gpflow.train.AdamOptimizer(0.01)
  opt._optimizer = tools.wrap(opt.optimizer)
  action = opt.make_optimize_action(model)
  session, saver = model.enquire_session(), tf.train.Saver()
  latest = tf.train.latest_checkpoint(directory)
  if latest:
    saver.restore(session, latest)
  for _ in range(comparison.STEPS):
    action()
  saver.save(session, directory + "/model", 2 if latest else 1)
