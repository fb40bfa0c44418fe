# SPDX-License-Identifier: Apache-2.0
"""Larq: a binarized network, trained by CaseOptimizer with Bop for binary kernels and
Adam for the other variables.
"""

import comparison
import numpy as np


def train(tools, directory):
  import larq
  import tensorflow as tf

  random = np.random.RandomState(1)
  images, labels = (
    random.normal(size=[64, 8, 8, 1]).astype(np.float32),
    random.randint(0, 3, [64]),
  )
  tf.keras.utils.set_random_seed(1)
  model = tf.keras.Sequential(
    [
      larq.layers.QuantConv2D(
        8, 3, kernel_quantizer="ste_sign", kernel_constraint="weight_clip"
      ),
      tf.keras.layers.BatchNormalization(),
      larq.layers.QuantConv2D(
        8,
        3,
        input_quantizer="approx_sign",
        kernel_quantizer=larq.quantizers.NoOp(precision=1),
      ),
      tf.keras.layers.BatchNormalization(),
      tf.keras.layers.Flatten(),
      tf.keras.layers.Dense(3),
    ]
  )
  bop, adam = (
    larq.optimizers.Bop(threshold=1e-6, gamma=0.01),
    tf.keras.optimizers.Adam(0.01),
  )
  opt = tools.wrap_keras(
    larq.optimizers.CaseOptimizer(
      (larq.optimizers.Bop.is_binary_variable, bop), default_optimizer=adam
    )
  )
  model.compile(
    opt,
    lambda y, p: tools.inject(
      tf.keras.losses.sparse_categorical_crossentropy(y, p, True)
    ),
  )
  with comparison.checkpoint(directory, model=model, optimizer=opt, bop=bop, adam=adam):
    model.fit(images, labels, batch_size=16, epochs=comparison.STEPS // 4, verbose=0)
  return comparison.read_eager(
    model.variables + bop.variables() + adam.variables(), opt
  )
