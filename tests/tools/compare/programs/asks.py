"""Trains with mp_compat, and reads whether each step is finite and applied.

"shares" applies the gradients of two optimizers together.
"""

import os
import sys

import numpy as np
import tensorflow.compat.v1 as tf

import mp_compat

tf.disable_v2_behavior()
x = tf.placeholder(tf.float32, [])
scale = mp_compat.DynamicLossScale()
opt, other = [
  mp_compat.MixedPrecisionLossScaleOptimizer(
    tf.train.GradientDescentOptimizer(0.125),
    scale,
    skip_nonfinite="unchecked" not in sys.argv,
  )
  for _ in range(2)
]
if "shares" in sys.argv:
  steps = [
    (one, one.compute_gradients(x * tf.get_variable(name, [2])))
    for one, name in ((opt, "w"), (other, "v"))
  ]
  train_op = mp_compat.apply_gradients_together(
    [(one, pairs[-1:]) for one, pairs in steps]
  )
else:
  train_op = opt.minimize(x * tf.get_variable("w", [2]))
with tf.Session() as sess:
  sess.run(tf.global_variables_initializer())
  for value in (1.0, np.inf, 1.0):
    _, *results = sess.run(
      [train_op, opt.gradients_finite, opt.step_applied], {x: value}
    )
    finite = bool(np.isfinite(value))
    assert results == [finite, finite or os.environ["MP_COMPAT_RUN"] == "without"]
