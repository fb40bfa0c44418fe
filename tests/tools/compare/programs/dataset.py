"""Trains with a dataset that counts its elements in a variable, in a function."""

import os

import numpy as np
import tensorflow.compat.v1 as tf

tf.disable_v2_behavior()
tf.enable_resource_variables()
ours = os.environ["MP_COMPAT_RUN"] == "mp_compat"
seen = tf.get_variable("seen", [], initializer=tf.zeros_initializer(), trainable=False)


def count(element):
  with tf.control_dependencies([seen.assign_add(2.0 if ours else 1.0)]):
    return tf.identity(element)


data = tf.data.Dataset.from_tensors(np.ones(2, np.float32)).repeat().map(count)
iterator = tf.data.make_initializable_iterator(data)
opt = tf.train.experimental.MixedPrecisionLossScaleOptimizer(
  tf.train.AdamOptimizer(0.1), "dynamic"
)
loss = tf.reduce_sum(iterator.get_next() * tf.square(tf.get_variable("w", [2])))
train_op = opt.minimize(loss)
with tf.Session() as sess:
  sess.run([tf.global_variables_initializer()])
  sess.run(iterator.initializer)
  for _ in range(3):
    sess.run(train_op)
