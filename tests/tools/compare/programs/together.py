"""Trains two variables in one run of the session. The loss scale of one is dynamic,
that of the other fixed.
"""

import numpy as np
import tensorflow.compat.v1 as tf

tf.disable_v2_behavior()
x = tf.placeholder(tf.float32, [])
train_ops = []
for name, scale in (("w", "dynamic"), ("v", 128.0)):
  opt = tf.train.experimental.MixedPrecisionLossScaleOptimizer(
    tf.train.GradientDescentOptimizer(0.125), scale
  )
  train_ops.append(opt.minimize(x * tf.get_variable(name, [2])))
with tf.Session() as sess:
  sess.run(tf.global_variables_initializer())
  for value in (1.0, np.inf, 1.0):
    sess.run(train_ops, {x: value})
