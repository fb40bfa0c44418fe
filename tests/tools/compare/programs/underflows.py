"""Trains two variables in one run of the session. In the second step, the gradient of w
overflows, and that of v, in float16, underflows without loss scaling.
"""

import numpy as np
import tensorflow.compat.v1 as tf

tf.disable_v2_behavior()
x = tf.placeholder(tf.float32, [])
y = tf.placeholder(tf.float16, [])
w, v = [tf.get_variable(name, [2]) for name in ("w", "v")]
small = tf.cast(tf.cast(v, tf.float16) * y, tf.float32) * 2.0**-14
train_ops = []
for loss, variable in ((x * w, w), (small, v)):
  opt = tf.train.experimental.MixedPrecisionLossScaleOptimizer(
    tf.train.GradientDescentOptimizer(2.0**20), "dynamic"
  )
  train_ops.append(opt.minimize(loss, var_list=[variable]))
with tf.Session() as sess:
  sess.run(tf.global_variables_initializer())
  for values in ((1.0, 1.0), (np.inf, 2.0**-12), (1.0, 1.0)):
    sess.run(train_ops, dict(zip((x, y), values)))
