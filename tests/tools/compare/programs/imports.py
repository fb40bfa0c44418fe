"""Trains two steps in a graph, and six in a copy of it, which it imports."""

import sys

import numpy as np
import tensorflow.compat.v1 as tf

tf.disable_v2_behavior()
args = set(sys.argv[1:])
with tf.Graph().as_default() as graph:
  x = tf.placeholder(tf.float32, [2], name="x")
  w = tf.get_variable("w", [2], use_resource="ref" not in args)
  opt = tf.train.experimental.MixedPrecisionLossScaleOptimizer(
    tf.train.AdamOptimizer(0.1), tf.train.experimental.DynamicLossScale(2.0**10, 4)
  )
  grads_and_vars = opt.compute_gradients(tf.reduce_sum(x * tf.square(w)))
  if "clip" in args:
    grads_and_vars = [
      (tf.clip_by_value(grad, -1.0, 1.0), variable) for grad, variable in grads_and_vars
    ]
  train_op = opt.apply_gradients(grads_and_vars, name="train")
  initializer = tf.global_variables_initializer()
  with tf.Session() as sess:
    sess.run(initializer)
    for _ in range(2):
      sess.run(train_op, {x: np.random.normal(size=2)})
  meta_graph = tf.train.export_meta_graph()
with tf.Graph().as_default() as copy:
  scope = ""
  if "def" in args:
    scope = "imported/"
    tf.import_graph_def(graph.as_graph_def(), name="imported")
  else:
    tf.train.import_meta_graph(meta_graph)
  fetches = scope + "train"
  if "updates" in args:  # what the train op executes, but not itself
    fetches = [op for op in copy.get_operations() if "Apply" in op.type]
  with tf.Session() as sess:
    sess.run(scope + initializer.name)
    for step in range(6):
      value = np.random.normal(size=2)
      if step == 2:
        value[0] = np.inf
      sess.run(fetches, {scope + "x:0": value})
