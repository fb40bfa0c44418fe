"""Skips a step, and goes on from a checkpoint, or ends after a number of applied steps."""

import sys

import numpy as np
import tensorflow.compat.v1 as tf

tf.disable_v2_behavior()
x = tf.placeholder(tf.float32, [2])
w = tf.get_variable("w", [2])
global_step = tf.train.get_or_create_global_step()
opt = tf.train.experimental.MixedPrecisionLossScaleOptimizer(
  tf.train.MomentumOptimizer(0.1, 0.9), "dynamic"
)
train_op = opt.minimize(tf.reduce_sum(w * w * x), global_step)
saver = tf.train.Saver()
with tf.Session() as sess:
  sess.run(tf.global_variables_initializer())
  values = [1.0, 2.0, 3.0, 4.0, 5.0, np.inf, 7.0, 8.0]
  for value in values:
    sess.run(train_op, {x: [value, 1.0]})
    if "resumes" not in sys.argv and sess.run(global_step) == 6:
      break
  saver.save(sess, "./model")
if "resumes" in sys.argv:
  with tf.Session() as sess:
    saver.restore(sess, "./model")
    for value in values[:4]:
      sess.run(train_op, {x: [value, 1.0]})
