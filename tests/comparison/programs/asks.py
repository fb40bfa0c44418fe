"""Trains with mp_compat, and reads whether each step is finite and applied."""

import os
import sys

import numpy as np
import tensorflow.compat.v1 as tf

import mp_compat

tf.disable_v2_behavior()
x = tf.placeholder(tf.float32, [])
opt = mp_compat.MixedPrecisionLossScaleOptimizer(
  tf.train.GradientDescentOptimizer(0.125), "dynamic", skip_nonfinite="unchecked" not in sys.argv
)
train_op = opt.minimize(x * tf.get_variable("w", [2]))
with tf.Session() as sess:
  sess.run(tf.global_variables_initializer())
  for value in (1.0, np.inf, 1.0):
    _, *results = sess.run([train_op, opt.gradients_finite, opt.step_applied], {x: value})
    finite = bool(np.isfinite(value))
    assert results == [finite, finite or os.environ["MP_COMPAT_RUN"] == "without"]
