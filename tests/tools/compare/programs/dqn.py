"""Trains as DQN does: each action changes the rate of exploration, and training begins
after some of them.
"""

import os
import sys

import numpy as np
import tensorflow.compat.v1 as tf

tf.disable_v2_behavior()
args, ours = set(sys.argv[1:]), os.environ["MP_COMPAT_RUN"] == "mp_compat"
x = tf.placeholder(tf.float32, [2])
collections = [
  "trainable_variables",
  "local_variables" if "local" in args else "variables",
]
w, target = [
  tf.get_variable(name, [2], use_resource="ref" not in args, collections=collections)
  for name in ("w", "target")
]
rate = tf.get_variable("rate", initializer=1.0, trainable=False)
opt = tf.train.AdamOptimizer(1.0 if "faster" in args and ours else 0.001)
opt = tf.train.experimental.MixedPrecisionLossScaleOptimizer(opt, "dynamic")
loss = tf.reduce_sum(x * tf.square(w - target - 1.0))
can_train = tf.placeholder_with_default("taken" in args, [])
if "v2" in args:
  tf.enable_control_flow_v2()
train, other = (
  lambda: tf.group(opt.minimize(loss, var_list=[w])),
  lambda: tf.group(w.assign(w + tf.reduce_sum(x))),
)
# Training is in a branch, and the other assigns to the variable that it trains.
if "conditional" in args:
  train_op = tf.cond(can_train, train, other)
elif "nested" in args:
  train_op = tf.cond(
    can_train, lambda: tf.group(tf.cond(x[0] > x[1], train, other)), other
  )
elif "adversary" in args:  # It trains without loss scaling.
  train_op = tf.cond(
    can_train,
    train,
    lambda: tf.group(tf.train.GradientDescentOptimizer(0.1).minimize(loss)),
  )
else:
  train_op = opt.minimize(loss, var_list=[w])
update_target = target.assign(w)
least = tf.placeholder_with_default(0.0625, [])
with tf.control_dependencies([rate.assign(tf.maximum(rate * 0.5, least))]):
  act = tf.debugging.check_numerics(
    rate.read_value() / (0.0 if "raises" in args else 1.0), ""
  )
with tf.control_dependencies([train_op]):
  train_and_fail = tf.debugging.check_numerics(tf.reduce_sum(x) / 0.0, "")
with tf.Session() as sess:
  sess.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
  for step in range(12):
    try:
      sess.run(act, {least: 0.0} if "explores" in args and ours and step == 6 else {})
    except tf.errors.InvalidArgumentError:
      assert "raises" in args
    if step >= (1000 if "late" in args else 4):
      fed = {can_train: "fed" in args} if step % 2 else {}
      try:
        failing = "fails" in args and step % 2 == 0
        sess.run(
          train_and_fail if failing else train_op, {x: np.random.normal(size=2), **fed}
        )
      except tf.errors.InvalidArgumentError:
        assert failing
    if step % 4 == 0:
      sess.run(update_target)
