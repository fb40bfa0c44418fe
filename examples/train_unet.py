# SPDX-License-Identifier: Apache-2.0
"""Trains a small U-Net to segment drawn cells in a plain Session. docs/float16.md
explains how it became float16.

    python examples/train_unet.py --out runs/unet

The input is a gray image of bytes: three discs, the cells, on a noisy background. The
output is the class of each pixel: background, inside or border of a cell. The loss is
the cross entropy, the mean over batch and pixels, and a penalty on the weights. The
accuracy is the share of the pixels of the cells in new images that get the right class.

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
import tensorflow.compat.v1 as tf

import mp_compat

FLAGS = flags.FLAGS
FLAGS.set_default("steps", 200)
flags.declare_key_flag("steps")
flags.DEFINE_string(
  "out", os.path.join("runs", "unet"), "Directory for the checkpoint and the numbers."
)
flags.DEFINE_string("restore", None, "Checkpoint to begin with.")
flags.DEFINE_integer("batch", 8, "Images in a step.", lower_bound=1)
flags.DEFINE_integer("seed", 0, "Seed of weights and data.")
flags.DEFINE_enum("dtype", "float16", ["float16", "float32"], "Of the layers.")
flags.DEFINE_float("loss_scale", None, "1: off; default: dynamic.", lower_bound=1)

SIDE, CLASSES, FEATURES, LEVELS = 32, 3, 8, 2
INSIDE, BORDER, CELLS = 1, 2, 3
LEARNING_RATE, MOMENTUM, DECAY, PENALTY = 0.1, 0.9, 0.9, 1e-4
TEST_IMAGES = 32


def weights_of(name, shape):
  """Returns the weights of a convolution, and adds them to those that are penalized."""
  initial = tf.initializers.he_normal(seed=FLAGS.seed)
  weights = tf.get_variable(name, shape, initializer=initial)
  tf.add_to_collection("penalized", weights)
  return weights


def batch_norm(x, training):
  def parameter(name, value, trainable=True):
    shape, value = x.shape[-1:], tf.constant_initializer(value)
    return tf.get_variable(name, shape, tf.float32, value, trainable=trainable)

  gamma, beta = parameter("gamma", 1), parameter("beta", 0)
  mean, variance = parameter("mean", 0, False), parameter("variance", 1, False)
  inputs = tf.cast(x, tf.float32)
  batch_mean, batch_variance = tf.nn.moments(inputs, [0, 1, 2])
  for average, value in [(mean, batch_mean), (variance, batch_variance)]:
    update = average.assign_sub((1.0 - DECAY) * (average - value))
    tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, update)
  statistics = tf.cond(
    training,
    lambda: [batch_mean, batch_variance],
    lambda: [tf.identity(mean), tf.identity(variance)],
  )
  normalized = tf.nn.batch_normalization(inputs, *statistics, beta, gamma, 1e-3)
  return tf.cast(normalized, x.dtype)


def conv(x, features, name, training):
  with tf.variable_scope(name):
    weights = weights_of("weights", [3, 3, x.shape[-1], features])
    x = tf.nn.conv2d(x, weights, strides=[1, 1, 1, 1], padding="SAME")
    return tf.nn.relu(batch_norm(x, training))


def upsample(x, features, name):
  with tf.variable_scope(name):
    weights = weights_of("weights", [2, 2, features, x.shape[-1]])
    side = 2 * x.shape[1]
    shape = tf.stack([tf.shape(x)[0], side, side, features])
    return tf.nn.conv2d_transpose(x, weights, shape, strides=[1, 2, 2, 1])


def prepare(images):
  """Returns images of bytes as numbers of mean 0 and variance 1."""
  images = tf.image.convert_image_dtype(images, tf.float32)
  return tf.map_fn(tf.image.per_image_standardization, images)


def unet(images, training):
  x = tf.cast(prepare(images), FLAGS.dtype)
  skipped = []
  for level in range(LEVELS):
    x = conv(x, FEATURES << level, "down_{}".format(level), training)
    skipped.append(x)
    x = tf.nn.max_pool(x, [1, 2, 2, 1], strides=[1, 2, 2, 1], padding="SAME")
  x = conv(x, FEATURES << LEVELS, "bottom", training)
  for level in reversed(range(LEVELS)):
    x = upsample(x, FEATURES << level, "upsample_{}".format(level))
    x = tf.concat([skipped[level], x], axis=-1)
    x = conv(x, FEATURES << level, "up_{}".format(level), training)
  weights = weights_of("output", [1, 1, FEATURES, CLASSES])
  logits = tf.nn.conv2d(x, weights, strides=[1, 1, 1, 1], padding="SAME")
  return tf.cast(logits, tf.float32)


def draw(random, count):
  """Returns `count` images [n, side, side, 1] of bytes, and their classes [n, side,
  side].
  """
  rows, columns = np.mgrid[:SIDE, :SIDE]
  images = random.normal(128.0, 10.0, size=[count, SIDE, SIDE])
  classes = np.zeros([count, SIDE, SIDE], np.int32)
  for image, labels in zip(images, classes):
    for _ in range(CELLS):
      row, column = random.randint(SIDE, size=2)
      distance = np.hypot(rows - row, columns - column)
      radius = random.uniform(4, 8)
      image[distance < radius] += random.uniform(20, 60)
      labels[distance < radius] = BORDER
      labels[distance < radius - 2] = INSIDE
  return images.clip(0, 255).astype(np.uint8)[..., None], classes


def main(argv):
  common_flags.no_arguments(argv)
  tf.disable_v2_behavior()
  tf.logging.set_verbosity(tf.logging.INFO)
  tf.get_logger().propagate = False  # Otherwise absl, too, writes each line.
  images = tf.placeholder(tf.uint8, [None, SIDE, SIDE, 1])
  labels = tf.placeholder(tf.int32, [None, SIDE, SIDE])
  training = tf.placeholder_with_default(False, [])
  getter = mp_compat.float32_variable_storage_getter
  scope = tf.get_variable_scope()
  with tf.variable_scope(scope, dtype=FLAGS.dtype, custom_getter=getter):
    logits = unet(images, training)
  entropy = tf.reduce_mean(
    tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)
  )
  penalized = [v for v in tf.trainable_variables() if v.shape.ndims > 1]
  loss = entropy + PENALTY * tf.add_n([tf.nn.l2_loss(weights) for weights in penalized])
  right = tf.equal(tf.argmax(logits, -1, output_type=tf.int32), labels)
  is_cell = tf.not_equal(labels, 0)
  accuracy = tf.reduce_mean(tf.cast(tf.boolean_mask(right, is_cell), tf.float32))

  global_step = tf.train.get_or_create_global_step()
  opt = tf.train.MomentumOptimizer(LEARNING_RATE, MOMENTUM)
  opt = mp_compat.MixedPrecisionLossScaleOptimizer(opt, FLAGS.loss_scale or "dynamic")
  with tf.control_dependencies(tf.get_collection(tf.GraphKeys.UPDATE_OPS)):
    train_op = opt.minimize(loss, global_step)
  hook = mp_compat.LossScaleHook(opt)
  hook.begin()
  saver = mp_compat.checkpoints.Saver()

  random = np.random.RandomState(FLAGS.seed)
  test_feed = dict(zip([images, labels], draw(random, TEST_IMAGES)))
  numbers = {"step": [], "loss": [], "accuracy": []}
  tf.gfile.MakeDirs(FLAGS.out)
  with tf.Session() as sess:
    sess.run(tf.global_variables_initializer())
    if FLAGS.restore:
      saver.restore(sess, FLAGS.restore)
    for step in range(FLAGS.steps + 1):
      if step % max(FLAGS.steps // 10, 1) == 0:
        values = sess.run([entropy, accuracy], test_feed)
        print("step {}: test loss {:.4f}, accuracy {:.1%}".format(step, *values))
        for name, value in zip(["step", "loss", "accuracy"], [step] + values):
          numbers[name].append(float(value))
      if step < FLAGS.steps:
        batch = dict(zip([images, labels], draw(random, FLAGS.batch)))
        batch[training] = True
        hook.run(sess, train_op, batch)
    hook.end(sess)
    saver.save(sess, os.path.join(FLAGS.out, "model.ckpt"))
  with open(os.path.join(FLAGS.out, "numbers.json"), "w") as file:
    json.dump(numbers, file)


if __name__ == "__main__":
  common_flags.run(main)
