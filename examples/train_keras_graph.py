# SPDX-License-Identifier: Apache-2.0
"""Trains a Keras model in a Session, in float16, while some of its steps overflow.

    python examples/train_keras_graph.py --steps 400 --overflow_at 100 --overflow_at 250

The program uses placeholders, `get_updates` of a Keras optimizer and `session.run`.
Loss scaling needs one more line, which wraps the optimizer. A batch with an extremely
large weight overflows: mp_compat skips the step and halves the scale.

Runs on TensorFlow 1.15 to 2.21. From 2.16 on it needs Keras 2 (`pip install tf_keras`),
because Keras 3 does not train in a Session.
"""

import importlib
import os

# Read while TensorFlow is imported. On a CPU with AVX512-FP16, oneDNN's float16
# convolutions are slow to train.
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")

from absl import flags
import common_flags
import numpy as np
from sklearn.datasets import load_digits
import tensorflow

import mp_compat
from mp_compat import keras as mp_keras

tf = tensorflow.compat.v1
VERSION = tuple(int(part) for part in tensorflow.__version__.split(".")[:2])
keras = importlib.import_module("tf_keras") if VERSION >= (2, 16) else tensorflow.keras
optimizers = keras.optimizers if VERSION < (2, 11) else keras.optimizers.legacy

FLAGS = flags.FLAGS
FLAGS.set_default("steps", 400)
FLAGS.set_default("overflow_at", [100, 101, 250])
flags.adopt_module_key_flags(common_flags)

BATCH = 64
TEST_DIGITS = 360
ABSURD_WEIGHT = 1e30
GROWTH_STEPS = (
  60  # 2000 is usual; with 60, a run of some hundred steps shows the growth.
)


def make_model():
  """Returns a model of two layers in float16 with float32 variables, for scikit-learn's
  digits.
  """
  half = (
    keras.mixed_precision.experimental.Policy
    if VERSION < (2, 4)
    else keras.mixed_precision.Policy
  )
  return keras.Sequential(
    [
      keras.layers.Dense(
        128, activation="relu", dtype=half("mixed_float16"), input_shape=(64,)
      ),
      keras.layers.Dense(10, dtype=half("mixed_float16")),
    ]
  )


def main(argv):
  common_flags.no_arguments(argv)
  tf.disable_eager_execution()
  digits = load_digits()
  data, target = digits.data.astype(np.float32) / 16, digits.target
  random = np.random.RandomState(0)
  order = random.permutation(len(target))
  test, train = order[:TEST_DIGITS], order[TEST_DIGITS:]

  tf.set_random_seed(0)
  images = tf.placeholder(tf.float32, [None, 64])
  labels = tf.placeholder(tf.int32, [None])
  weight = tf.placeholder(tf.float32, [])
  model = make_model()
  logits = tf.cast(model(images), tf.float32)
  loss = weight * tf.reduce_mean(
    tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)
  )
  correct = tf.reduce_mean(
    tf.cast(tf.equal(tf.argmax(logits, 1, output_type=tf.int32), labels), tf.float32)
  )

  optimizer = optimizers.SGD(0.1, momentum=0.9)
  loss_scale = mp_compat.DynamicLossScale(2.0**12, GROWTH_STEPS)
  optimizer = mp_keras.LossScaleOptimizer(optimizer, loss_scale)
  train_ops, current_scale = (
    optimizer.get_updates(loss, model.trainable_weights),
    loss_scale(),
  )

  print(
    "TensorFlow {}, {} weights in float32, computing in float16".format(
      tensorflow.__version__,
      sum(int(np.prod(variable.shape)) for variable in model.trainable_weights),
    )
  )
  print("step   loss      loss scale")
  skipped = 0
  with tf.Session() as session:
    session.run(tf.global_variables_initializer())
    scale = session.run(current_scale)
    for step in range(FLAGS.steps):
      rows = random.choice(train, BATCH)
      overflow = step in FLAGS.overflow_at
      feed = {
        images: data[rows],
        labels: target[rows],
        weight: ABSURD_WEIGHT if overflow else 1.0,
      }
      value, _ = session.run([loss, train_ops], feed)
      before, scale = scale, session.run(current_scale)
      skipped += scale < before
      if scale != before or step % 50 == 0:
        note = (
          "skipped: the gradients overflowed"
          if scale < before
          else "doubled"
          if scale > before
          else ""
        )
        print("{:>4}   {:<8.3g}  {:<8g} {}".format(step, value, scale, note).rstrip())
    accuracy = session.run(correct, {images: data[test], labels: target[test]})
    print(
      "{} of {} steps skipped, iterations {}, accuracy on digits not trained on "
      "{:.1f}%".format(
        skipped, FLAGS.steps, session.run(optimizer.iterations), 100 * accuracy
      )
    )


if __name__ == "__main__":
  common_flags.run(main)
