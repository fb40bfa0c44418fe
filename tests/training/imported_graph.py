"""Resumes training from a MetaGraph without mp_compat; test_export.py runs this in a new process.

Usage: python imported_graph.py META_GRAPH CHECKPOINT OUTPUT.npz
"""

import sys

import numpy as np
import tensorflow.compat.v1 as tf


def main():
  meta_graph, checkpoint, output = sys.argv[1:]
  tf.disable_eager_execution()
  saver = tf.train.import_meta_graph(meta_graph)
  (train_op,) = tf.get_collection(tf.GraphKeys.TRAIN_OP)
  state = {v.op.name: v for v in tf.global_variables()}
  after = []
  with tf.Session() as sess:
    saver.restore(sess, checkpoint)
    for x in np.load(checkpoint + ".feeds.npy"):
      sess.run(train_op, {"x:0": x})
      after.append(sess.run(state))
  np.savez(output, **{name: np.stack([values[name] for values in after]) for name in state})
  assert "mp_compat" not in sys.modules


if __name__ == "__main__":
  main()
