"""Trains as DQN does: each action changes the rate of exploration, and training begins after some of them."""

import os
import sys

import numpy as np
import tensorflow.compat.v1 as tf

tf.disable_v2_behavior()
args, ours = set(sys.argv[1:]), os.environ["MP_COMPAT_RUN"] == "mp_compat"
x = tf.placeholder(tf.float32, [2])
w, target = [tf.get_variable(name, [2], use_resource="ref" not in args) for name in ("w", "target")]
rate = tf.get_variable("rate", initializer=1.0, trainable=False)
opt = tf.train.AdamOptimizer(1.0 if "faster" in args and ours else 0.001)
opt = tf.train.experimental.MixedPrecisionLossScaleOptimizer(opt, "dynamic")
loss = tf.reduce_sum(x * tf.square(w - target - 1.0))
can_train = tf.placeholder_with_default("taken" in args, [])
if "v2" in args:
  tf.enable_control_flow_v2()
if "conditional" in args:  # Training is in a branch, and the other assigns to the variable that it trains.
  train_op = tf.cond(
    can_train, lambda: tf.group(opt.minimize(loss, var_list=[w])), lambda: tf.group(w.assign(w + tf.reduce_sum(x)))
  )
else:
  train_op = opt.minimize(loss, var_list=[w])
update_target = target.assign(w)
least = tf.placeholder_with_default(0.0625, [])
act = rate.assign(tf.maximum(rate * 0.5, least))
with tf.Session() as sess:
  sess.run(tf.global_variables_initializer())
  for step in range(12):
    sess.run(act, {least: 0.0} if "explores" in args and ours and step == 6 else {})
    if step >= (1000 if "late" in args else 4):
      fed = {can_train: "fed" in args} if step % 2 else {}
      sess.run(train_op, {x: np.random.normal(size=2), **fed})
    if step % 4 == 0:
      sess.run(update_target)
