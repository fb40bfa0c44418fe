# SPDX-License-Identifier: Apache-2.0
"""Trains two variables by tensor2tensor's `optimize`, on TensorFlow 2; two steps in the
middle overflow.
"""

import numpy as np
from tensor2tensor.layers import common_hparams
from tensor2tensor.utils import optimize
import tensorflow.compat.v1 as tf

tf.disable_eager_execution()
random = np.random.RandomState(0)
rows = random.randn(64, 8).astype(np.float32)
targets = rows @ random.randn(8, 1).astype(np.float32)

hparams = common_hparams.basic_params1()
hparams.optimizer = "adam"
hparams.gpu_automatic_mixed_precision = True
weight = tf.placeholder(tf.float32, [])
kernel = tf.get_variable("kernel", [8, 1], initializer=tf.ones_initializer())
bias = tf.get_variable("bias", [1], initializer=tf.zeros_initializer())
loss = weight * tf.reduce_mean(tf.square(tf.matmul(rows, kernel) + bias - targets))
step = tf.train.get_or_create_global_step()
train_op = optimize.optimize(loss, tf.constant(0.05), hparams)
with tf.Session() as session:
  session.run(tf.global_variables_initializer())
  for attempt in range(30):
    session.run(train_op, {weight: 1e36 if attempt in (11, 12) else 1.0})
