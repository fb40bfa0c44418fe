"""Trains a variable that changes outside of train steps, too. Each argument switches
something on.
"""

import os
import sys

import numpy as np
import tensorflow.compat.v1 as tf

tf.disable_v2_behavior()
args, ours = set(sys.argv[1:]), os.environ["MP_COMPAT_RUN"] == "mp_compat"
experimental = tf.train.experimental
x = tf.placeholder(tf.float32, [2])
w = tf.get_variable(
  "w", [2], initializer=tf.ones_initializer(), use_resource="ref" not in args
)
total = tf.get_variable("total", [2], initializer=tf.zeros_initializer())
scale = experimental.DynamicLossScale(2.0**124, 1) if "grows" in args else "dynamic"
opt = experimental.MixedPrecisionLossScaleOptimizer(tf.train.AdamOptimizer(0.1), scale)
((grad, _),) = opt.compute_gradients(tf.reduce_sum(x * w) * 0.01, [w])
accumulate = total.assign_add(grad * (2.0 if "accumulates" in args and ours else 1.0))
pairs = [(total.read_value() if "accumulates" in args else grad, w)]
train_op = opt.apply_gradients(pairs, tf.train.get_or_create_global_step())
if "decays" in args:  # in the same run
  with tf.control_dependencies([train_op]):
    train_op = tf.group(w.assign(w * 0.5))
clip = w.assign(
  tf.clip_by_value(w, -0.5, 0.25 if "otherwise" in args and ours else 0.5)
)
other = tf.train.GradientDescentOptimizer(0.1).minimize(tf.square(w - 1.0))


def train(sess):
  value = np.random.normal(size=2)
  if "overflows" in args:
    value[0] = np.inf
  if "accumulates" in args:
    sess.run(accumulate, {x: value})
  sess.run(train_op, {x: value})
  if "clips" in args:
    sess.run(clip)
  if "other" in args:
    sess.run(other)


if "total" in args:  # of steps, with a checkpoint
  with tf.train.MonitoredTrainingSession(checkpoint_dir="folder") as sess:
    while sess.run(tf.train.get_global_step()) < 6:
      train(sess)
else:
  with tf.Session() as sess:
    sess.run(tf.global_variables_initializer())
    for _ in range(6):
      train(sess)
    if "loads" in args and (ours or "alone" not in args):  # after the last step
      w.load(np.float32([1.0, 2.0 + ("otherwise" in args and ours)]), sess)
if "evolves" in args:  # in a graph without steps
  with tf.Graph().as_default(), tf.Session() as sess:
    v = tf.get_variable("v", [2], initializer=tf.zeros_initializer())
    evolve = v.assign_add(tf.random.normal([2]) + ("otherwise" in args and ours))
    sess.run(tf.global_variables_initializer())
    for _ in range(3):
      sess.run(evolve)
if "replaces" in args:
  args.remove("replaces")
  os.execv(sys.executable, [sys.executable, sys.argv[0], *sorted(args)])
