"""Trains in four threads with one session; the gradients of one overflow."""

import threading

import numpy as np
import tensorflow.compat.v1 as tf

tf.disable_v2_behavior()
x = tf.placeholder(tf.float32, [])
opt = tf.train.GradientDescentOptimizer(0.125)
opt = tf.train.experimental.MixedPrecisionLossScaleOptimizer(opt, "dynamic")
train_op = opt.minimize(x * tf.get_variable("w", [4096, 64]))
with tf.Session() as sess:
  sess.run(tf.global_variables_initializer())

  def train(value):
    for _ in range(8):
      sess.run(train_op, {x: value})

  threads = [
    threading.Thread(target=train, args=[value]) for value in (1.0, 1.0, 1.0, np.inf)
  ]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
