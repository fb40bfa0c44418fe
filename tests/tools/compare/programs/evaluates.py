"""Trains, and evaluates in other sessions. Each argument switches something on."""

import os
import sys
import threading

import numpy as np
import tensorflow.compat.v1 as tf

tf.disable_v2_behavior()
args, ours = set(sys.argv[1:]), os.environ["MP_COMPAT_RUN"] == "mp_compat"
differs = "otherwise" in args and ours
x = tf.placeholder(tf.float32, [2])
w = tf.get_variable("w", [2], use_resource="ref" not in args)
rate = tf.get_variable("rate", initializer=0.0 if "warms" in args else 0.1)
loss = tf.reduce_sum(tf.square(w) * x)
if "py_function" in args:
  loss *= tf.ensure_shape(
    tf.py_function(lambda value: value * value, [w[0]], "float"), []
  )


def train_eagerly(value):
  with tf.GradientTape() as tape:
    tape.watch(value)
    result = value * value
  return tape.gradient(result, value)


if "tape" in args:  # of the function
  loss *= tf.ensure_shape(tf.py_function(train_eagerly, [w[0]], "float"), [])
if "box" in args:
  begin, _, _ = tf.image.sample_distorted_bounding_box([64, 64, 3], [[[0.0, 0, 1, 1]]])
  loss *= tf.cast(begin[0] + 1, tf.float32)
opt = tf.train.experimental.MixedPrecisionLossScaleOptimizer(
  tf.train.MomentumOptimizer(rate, 0.9), "dynamic"
)
train_op = opt.minimize(loss, tf.train.get_or_create_global_step(), [w])
saver = tf.train.Saver([w])
with tf.control_dependencies([train_op]):
  train_and_fail = tf.debugging.check_numerics(x / 0.0, "fails")
increment = rate.assign_add(1.0 + differs)


def evaluate(folder):
  with tf.Graph().as_default():
    v = tf.get_variable("w", [2])
    tf.get_variable("other", [2])  # is not initialized
    sess = tf.Session()
    tf.train.Saver([v]).restore(sess, folder + "/model")
    if "loads" in args:
      v.load(np.float32([1.0, 2.0 + differs]), sess)
    sess.run(v.read_value() if "resource" in args else tf.identity(v))
    if "closes" in args:
      v.load(np.float32([3.0, 4.0 + differs]), sess)
      sess.close()


def evaluate_again():
  for _ in range(5):
    evaluate(".")


with tf.Session() as sess:
  sess.run(tf.global_variables_initializer())
  name = os.environ["MP_COMPAT_RUN"] if "renamed" in args else None
  thread = threading.Thread(target=evaluate_again, name=name)
  if "thread" in args:
    saver.save(sess, "./model")
    thread.start()
  for step in range(4):
    feed = np.abs(np.random.normal(size=2)) + (differs and "warms" in args)
    sess.run(train_op, {x: feed})
    if "between" in args and step == 0:
      sess.run(increment)
  if "thread" in args:
    thread.join()
  elif "loads" in args or "closes" in args:
    saver.save(sess, "./model")
    evaluate(".")
  if "fails" in args:
    try:
      sess.run(train_and_fail, {x: [1.0, 2.0 + differs]})
    except tf.errors.InvalidArgumentError:
      pass
  if "increments" in args:  # after the last step
    sess.run(increment)
  if "forks" in args:
    for end in (sys.exit, lambda: os.execv(sys.executable, [sys.executable, "-V"])):
      child = os.fork()
      if not child:
        end()
      assert os.waitpid(child, 0) == (child, 0)
