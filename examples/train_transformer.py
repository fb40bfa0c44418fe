# SPDX-License-Identifier: Apache-2.0
"""Trains a transformer to segment digits in a plain Session. docs/float16.md
explains how it became float16.

    python examples/train_transformer.py --out runs/transformer

The input is an 8x8 digit of scikit-learn's data, as a sequence of 64 tokens: the
intensities of its pixels, a tenth of which are hidden from attention. The output is ten
masks of 32x32 pixels; mask c marks the ink if the digit is a c. The loss is the mean
over batch, pixels and classes. The accuracy is the share of the ink pixels of test
digits at which the mask of the right class has the largest logit.

`--dtype float32 --loss_scale 1` trains as the program did before it was converted.
"""

import json
import os

# Both are read while TensorFlow is imported.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")  # the same kernels on every CPU

from absl import flags
import common_flags
import numpy as np
from sklearn.datasets import load_digits
import tensorflow.compat.v1 as tf

import mp_compat

FLAGS = flags.FLAGS
FLAGS.set_default("steps", 300)
flags.declare_key_flag("steps")
flags.DEFINE_string(
  "out",
  os.path.join("runs", "transformer"),
  "Directory for the checkpoint and the numbers.",
)
flags.DEFINE_string("restore", None, "Checkpoint to begin with.")
flags.DEFINE_integer("batch", 64, "Digits in a step.", lower_bound=1)
flags.DEFINE_integer("seed", 0, "Seed of weights and data.")
flags.DEFINE_enum("dtype", "float16", ["float16", "float32"], "Of the layers.")
flags.DEFINE_float("loss_scale", None, "1: off; default: dynamic.", lower_bound=1)

INTENSITIES, CLASSES, SIDE, PATCH = 17, 10, 8, 4
TOKENS, WIDTH, HEADS, LAYERS = SIDE * SIDE, 64, 4, 2
# The share of ones in the masks; its log-odds initialize the last bias, as in
# RetinaNet.
INK = 0.03
BACKGROUND = -1  # tf.one_hot maps it to a row of zeros.
TEST_DIGITS, HIDDEN_SHARE, LEARNING_RATE, WARMUP = 200, 0.1, 3e-3, 30


def normal():
  return tf.truncated_normal_initializer(stddev=0.05, seed=FLAGS.seed)


def dense(x, units, name, bias=0.0):
  with tf.variable_scope(name):
    weights = tf.get_variable("weights", [x.shape[-1], units], initializer=normal())
    bias = tf.get_variable("bias", [units], initializer=tf.constant_initializer(bias))
    return tf.reshape(
      tf.matmul(tf.reshape(x, [-1, x.shape[-1]]), weights) + bias, [-1, TOKENS, units]
    )


def layer_norm(x, name):
  with tf.variable_scope(name):
    gamma = tf.get_variable("gamma", [WIDTH], tf.float32, tf.ones_initializer())
    beta = tf.get_variable("beta", [WIDTH], tf.float32, tf.zeros_initializer())
  inputs = tf.cast(x, tf.float32)
  mean, variance = tf.nn.moments(inputs, [-1], keep_dims=True)
  return tf.cast((inputs - mean) * tf.rsqrt(variance + 1e-6) * gamma + beta, x.dtype)


def embedding(tokens):
  table = tf.get_variable("intensities", [INTENSITIES, WIDTH], tf.float32, normal())
  positions = tf.get_variable("positions", [TOKENS, WIDTH], initializer=normal())
  return tf.cast(tf.nn.embedding_lookup(table, tokens), positions.dtype) + positions


def attention(x, visible):
  def heads(name):
    return tf.transpose(
      tf.reshape(dense(x, WIDTH, name), [-1, TOKENS, HEADS, WIDTH // HEADS]),
      [0, 2, 1, 3],
    )

  logits = tf.matmul(heads("query"), heads("key"), transpose_b=True)
  logits = tf.cast(logits, tf.float32) * (WIDTH // HEADS) ** -0.5
  logits += (1.0 - visible[:, None, None, :]) * -1e9
  shares = tf.cast(tf.nn.softmax(logits), x.dtype)
  outputs = tf.transpose(tf.matmul(shares, heads("value")), [0, 2, 1, 3])
  return dense(tf.reshape(outputs, [-1, TOKENS, WIDTH]), WIDTH, "output")


def transformer(tokens, visible):
  getter = mp_compat.float32_variable_storage_getter
  dtype = tf.as_dtype(FLAGS.dtype)
  with tf.variable_scope("transformer", dtype=dtype, custom_getter=getter):
    x = embedding(tokens)
    for layer in range(LAYERS):
      with tf.variable_scope("layer_{}".format(layer)):
        x = layer_norm(x + attention(x, visible), "attention_norm")
        hidden = tf.nn.relu(dense(x, 4 * WIDTH, "hidden"))
        x = layer_norm(x + dense(hidden, WIDTH, "projection"), "output_norm")
    masks = dense(x, PATCH * PATCH * CLASSES, "masks", bias=np.log(INK / (1 - INK)))
    masks = tf.reshape(masks, [-1, SIDE, SIDE, PATCH * PATCH * CLASSES])
    return tf.cast(tf.depth_to_space(masks, PATCH), tf.float32)


def load():
  """Returns the training and the test data, each as (intensities [n, 64], masks [n, 32,
  32]).
  """
  digits = load_digits()
  ink = np.kron(digits.images > 6, np.ones([PATCH, PATCH]))
  masks = np.where(ink, digits.target[:, None, None], BACKGROUND)
  order = np.random.RandomState(0).permutation(len(masks))
  test, train = order[:TEST_DIGITS], order[TEST_DIGITS:]
  return (digits.data[train], masks[train]), (digits.data[test], masks[test])


def learning_rate(global_step):
  warmup = tf.minimum(1.0, (tf.cast(global_step, tf.float32) + 1.0) / WARMUP)
  return warmup * tf.train.polynomial_decay(
    LEARNING_RATE, global_step, FLAGS.steps, 0.0
  )


def main(argv):
  common_flags.no_arguments(argv)
  tf.disable_v2_behavior()
  tf.logging.set_verbosity(tf.logging.INFO)
  tf.get_logger().propagate = False  # Otherwise absl, too, writes each line.
  train, test = load()
  tokens = tf.placeholder(tf.int32, [None, TOKENS])
  visible = tf.placeholder(tf.float32, [None, TOKENS])
  masks = tf.placeholder(tf.int32, [None, SIDE * PATCH, SIDE * PATCH])
  logits = transformer(tokens, visible)
  labels = tf.one_hot(masks, CLASSES)
  loss = tf.reduce_mean(
    tf.nn.sigmoid_cross_entropy_with_logits(labels=labels, logits=logits)
  )
  right = tf.equal(tf.argmax(logits, -1, output_type=tf.int32), masks)
  accuracy = tf.reduce_mean(
    tf.cast(tf.boolean_mask(right, tf.not_equal(masks, BACKGROUND)), tf.float32)
  )

  global_step = tf.train.get_or_create_global_step()
  opt = tf.train.AdamOptimizer(learning_rate(global_step))
  opt = mp_compat.MixedPrecisionLossScaleOptimizer(opt, FLAGS.loss_scale or "dynamic")
  train_op = opt.minimize(loss, global_step)
  hook = mp_compat.LossScaleHook(opt)
  hook.begin()
  saver = mp_compat.checkpoints.Saver()
  random = np.random.RandomState(FLAGS.seed)

  def feed(data, indices):
    hidden = random.uniform(size=[len(indices), TOKENS]) < HIDDEN_SHARE
    return {tokens: data[0][indices], visible: ~hidden, masks: data[1][indices]}

  test_feed = feed(test, np.arange(TEST_DIGITS))
  numbers = {"step": [], "loss": [], "accuracy": []}
  tf.gfile.MakeDirs(FLAGS.out)
  with tf.Session() as sess:
    sess.run(tf.global_variables_initializer())
    if FLAGS.restore:
      saver.restore(sess, FLAGS.restore)
    for step in range(FLAGS.steps + 1):
      if step % max(FLAGS.steps // 20, 1) == 0:
        values = sess.run([loss, accuracy], test_feed)
        print("step {}: test loss {:.5f}, accuracy {:.1%}".format(step, *values))
        for name, value in zip(["step", "loss", "accuracy"], [step] + values):
          numbers[name].append(float(value))
      if step < FLAGS.steps:
        batch = feed(train, random.choice(len(train[0]), FLAGS.batch))
        hook.run(sess, train_op, batch)
    hook.end(sess)
    saver.save(sess, os.path.join(FLAGS.out, "model.ckpt"))
  with open(os.path.join(FLAGS.out, "numbers.json"), "w") as file:
    json.dump(numbers, file)


if __name__ == "__main__":
  common_flags.run(main)
