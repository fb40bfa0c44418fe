# SPDX-License-Identifier: Apache-2.0
"""TFLearn: a DNN with a convolution, its regression layer and clipping; it takes the
gradients of the loss itself.
"""

import os

import comparison
import numpy as np


def train(tools, directory):
  import tensorflow.compat.v1 as tf
  import tflearn

  random = np.random.RandomState(1)
  images, labels = (
    random.normal(size=[64, 8, 8, 1]),
    np.eye(3)[random.randint(0, 3, [64])],
  )
  tflearn.init_graph(seed=1, num_cores=1)
  hidden = tflearn.conv_2d(
    tflearn.input_data([None, 8, 8, 1]), 4, 3, activation="relu", regularizer="L2"
  )
  outputs = tflearn.fully_connected(
    tflearn.batch_normalization(hidden), 3, activation="softmax"
  )
  regression = tflearn.regression(
    outputs,
    optimizer=tools.wrap(tf.train.AdamOptimizer(0.01), inject=False),
    shuffle_batches=False,
    loss=lambda predictions, targets: tools.inject(
      tflearn.categorical_crossentropy(predictions, targets)
    ),
  )
  model, path = (
    tflearn.DNN(regression, tensorboard_dir=directory),
    os.path.join(directory, "model"),
  )
  if os.path.exists(path + ".index"):
    model.load(path)
  model.fit(images, labels, n_epoch=comparison.STEPS // 4, batch_size=16, run_id="run")
  model.save(path)
  # Without its averages of the loss, which contain the loss that overflowed.
  return {
    name: value
    for name, value in comparison.read_checkpoint(directory).items()
    if "moving_avg" not in name
  }
