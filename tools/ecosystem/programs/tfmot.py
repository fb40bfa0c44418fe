# SPDX-License-Identifier: Apache-2.0
"""The Model Optimization Toolkit: gradual pruning of the weights while Keras trains
with `fit`.
"""

import comparison
import numpy as np


def train(tools, directory):
  import tensorflow as tf
  import tensorflow_model_optimization as tfmot

  random = np.random.RandomState(1)
  inputs, labels = (
    random.normal(size=[64, 8]).astype(np.float32),
    random.randint(0, 3, [64]),
  )
  tf.keras.utils.set_random_seed(1)
  sparsity = tfmot.sparsity.keras
  model = sparsity.prune_low_magnitude(
    tf.keras.Sequential(
      [tf.keras.layers.Dense(32, "relu", input_shape=[8]), tf.keras.layers.Dense(3)]
    ),
    sparsity.PolynomialDecay(
      0.2, 0.8, begin_step=0, end_step=2 * comparison.STEPS, frequency=3
    ),
  )
  opt = tools.wrap_keras(
    tf.keras.optimizers.legacy.SGD(0.1, momentum=0.9, nesterov=True)
  )
  model.compile(
    opt,
    lambda y, p: tools.inject(
      tf.keras.losses.sparse_categorical_crossentropy(y, p, True)
    ),
  )
  with comparison.checkpoint(directory, model=model, optimizer=opt):
    model.fit(
      inputs,
      labels,
      batch_size=16,
      epochs=comparison.STEPS // 4,
      verbose=0,
      callbacks=[sparsity.UpdatePruningStep()],
    )
  return comparison.read_eager(model.variables, opt)
