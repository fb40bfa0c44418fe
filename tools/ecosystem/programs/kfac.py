# SPDX-License-Identifier: Apache-2.0
"""K-FAC: its optimizer with momentum and the empirical Fisher; covariances and inverses
are updated in every step.
"""

import comparison
import numpy as np


def train(tools, directory):
  import kfac
  import tensorflow.compat.v1 as tf

  random = np.random.RandomState(1)
  hidden, labels = (
    tf.constant(random.normal(size=[32, 8]), tf.float32),
    tf.constant(random.randint(0, 3, [32])),
  )
  tf.set_random_seed(1)
  step, layers = tf.train.get_or_create_global_step(), kfac.LayerCollection()
  for units, activation in (16, tf.tanh), (3, None):
    layer = tf.layers.Dense(units)
    inputs, outputs = hidden, layer(hidden)
    layers.register_fully_connected((layer.kernel, layer.bias), inputs, outputs)
    hidden = activation(outputs) if activation else outputs
  layers.register_categorical_predictive_distribution(hidden, targets=labels)
  loss = tf.losses.sparse_softmax_cross_entropy(labels, hidden)
  opt = kfac.KfacOptimizer(
    learning_rate=0.01,
    damping=0.1,
    layer_collection=layers,
    cov_ema_decay=0.9,
    momentum=0.9,
    estimation_mode="empirical",
  )
  # Before apply_gradients, because K-FAC names these variables by the operations, which
  # a wrapper changes.
  covariances, inverses = opt.make_vars_and_create_op_thunks()
  with tf.control_dependencies([thunk() for thunk in covariances]):
    with tf.control_dependencies([thunk() for thunk in inverses]):
      train_op = tools.wrap(opt).minimize(loss, step)
  comparison.run_monitored(train_op, directory)
  unused = [
    "KFAC/" + name
    for name in (
      "prev_loss",
      "qmodel_change",
      "qmodel_learning_rate",
      "qmodel_momentum",
      "rho",
    )
  ]
  # K-FAC initializes these to NaN.
  return {
    name: value
    for name, value in comparison.read_checkpoint(directory).items()
    if name not in unused
  }
