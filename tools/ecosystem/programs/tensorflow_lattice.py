# SPDX-License-Identifier: Apache-2.0
"""TensorFlow Lattice: monotonic calibrators and a lattice in an Estimator, whose head
calls Keras's `get_updates`.
"""

import comparison
import numpy as np


def train(tools, directory):
  import tensorflow as tf
  import tensorflow_lattice as tfl

  random = np.random.RandomState(1)
  inputs = {"x": random.uniform(size=[64, 2]).astype(np.float32)}
  targets = inputs["x"].sum(1, keepdims=True) ** 2

  def model_fn(features, labels, mode):
    calibrate = tfl.layers.PWLCalibration(
      np.linspace(0.0, 1.0, 5),
      units=2,
      output_min=0.0,
      output_max=1.0,
      monotonicity="increasing",
    )
    lattice = tfl.layers.Lattice(
      [2, 2],
      monotonicities=["increasing", "none"],
      kernel_initializer="linear_initializer",
    )
    predicted = lattice(calibrate(features["x"]))
    opt = tools.wrap_keras(tf.keras.optimizers.legacy.Adam(0.02))
    opt.iterations = tf.compat.v1.train.get_or_create_global_step()
    head = tf.estimator.RegressionHead(
      loss_fn=lambda labels, logits: tools.inject((logits - labels) ** 2)
    )
    return head.create_estimator_spec(
      features,
      mode,
      predicted,
      labels,
      opt,
      calibrate.trainable_variables + lattice.trainable_variables,
    )

  estimator = tf.estimator.Estimator(
    model_fn, directory, tf.estimator.RunConfig(tf_random_seed=1)
  )
  estimator.train(comparison.batches(inputs, targets), steps=comparison.STEPS)
  # With TensorFlow's class, names of the optimizer's variables lack the prefix.
  return {
    name.replace("training/", ""): value
    for name, value in comparison.read_checkpoint(directory).items()
  }
