"""Trains a model as programs with absl do: flags with validators, and `app.run`."""

from absl import app
from absl import flags
from absl import logging
import numpy as np
import tensorflow.compat.v1 as tf

FLAGS = flags.FLAGS
flags.DEFINE_integer("steps", 6, "Training steps.", lower_bound=1)
flags.DEFINE_enum("optimizer", "adam", ["adam", "momentum"], "Which optimizer trains.")
flags.DEFINE_multi_integer("overflow_at", [], "Step whose gradients overflow.")
flags.DEFINE_float("learning_rate", None, "Learning rate of the optimizer.")
flags.mark_flag_as_required("learning_rate")
flags.register_validator("learning_rate", lambda rate: rate > 0, "must be positive")


def make_optimizer():
  if FLAGS.optimizer == "adam":
    opt = tf.train.AdamOptimizer(FLAGS.learning_rate)
  else:
    opt = tf.train.MomentumOptimizer(FLAGS.learning_rate, 0.9)
  scale = tf.train.experimental.DynamicLossScale(2.0**10, 4)
  return tf.train.experimental.MixedPrecisionLossScaleOptimizer(opt, scale)


def main(argv):
  if len(argv) > 1:
    raise app.UsageError("Expected only flags.")
  tf.disable_v2_behavior()
  x = tf.placeholder(tf.float32, [2])
  w = tf.get_variable("w", [2])
  train_op = make_optimizer().minimize(
    tf.reduce_sum(x * tf.square(w)), tf.train.get_or_create_global_step()
  )
  with tf.train.MonitoredSession() as sess:
    for step in range(FLAGS.steps):
      sess.run(
        train_op, {x: np.full([2], np.inf if step in FLAGS.overflow_at else 1.0)}
      )
  logging.info("Trained %d steps.", FLAGS.steps)


if __name__ == "__main__":
  app.run(main)
