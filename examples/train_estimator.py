# SPDX-License-Identifier: Apache-2.0
"""Trains an Estimator in float16 on scikit-learn's digits, while some of its steps
overflow.

    python examples/train_estimator.py --steps 600 --overflow_every 50

Every N-th batch (`--overflow_every`) has examples with an extremely large weight. Its
loss is finite, but its gradients overflow in float16: mp_compat skips the step and
halves the loss scale, a hook logs this, and the training continues.

Estimator is part of TensorFlow 1.15 to 2.15.
"""

import logging
import os
import tempfile

# Read while TensorFlow is imported. On a CPU with AVX512-FP16, oneDNN's float16
# convolutions are slow to train.
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")

from absl import flags
import common_flags
import numpy as np
from sklearn.datasets import load_digits
import tensorflow.compat.v1 as tf

import mp_compat

FLAGS = flags.FLAGS
FLAGS.set_default("steps", 600)
flags.declare_key_flag("steps")
flags.DEFINE_string(
  "model_dir",
  None,
  "Directory for checkpoints and summaries; a temporary one by default.",
)
flags.DEFINE_integer(
  "overflow_every", 50, "Every N-th batch overflows; none with 0.", lower_bound=0
)
flags.register_validator(
  "overflow_every",
  lambda every: every != 1,
  "must be 0 or at least 2: otherwise no step is ever applied",
)

BATCH = 64
HIDDEN = 128
TEST_DIGITS = 360
ABSURD_WEIGHT = 1e30
LEARNING_RATE = 2e-3
INCREMENT_PERIOD = (
  40  # 2000 is usual; with 40, a run of some hundred steps shows the growth.
)

ATTEMPTED, SKIPPED = "loss_scale_hook/attempted_steps", "loss_scale_hook/skipped_steps"


def load():
  """Returns the training and the test data, each as (float32 images [n, 64] in 0 to 1,
  int32 classes [n]).
  """
  digits = load_digits()
  images, labels = digits.data.astype(np.float32) / 16, digits.target.astype(np.int32)
  order = np.random.RandomState(0).permutation(len(labels))
  test, train = order[:TEST_DIGITS], order[TEST_DIGITS:]
  return (images[train], labels[train]), (images[test], labels[test])


def train_input_fn(images, labels, overflow_every):
  """Returns a repeated dataset of batches. Every `overflow_every`-th batch has absurd
  weights; with 0, none.
  """

  def weigh(index, example):
    absurd = (
      tf.equal(index % overflow_every, overflow_every - 1) if overflow_every else False
    )
    weight = tf.where_v2(absurd, ABSURD_WEIGHT, 1.0)
    return {
      "image": example[0],
      "weight": tf.fill(tf.shape(example[1]), weight),
    }, example[1]

  dataset = (
    tf.data.Dataset.from_tensor_slices((images, labels))
    .shuffle(len(labels), seed=0)
    .repeat()
  )
  return dataset.batch(BATCH).enumerate().map(weigh)


def eval_input_fn(images, labels):
  """Returns a dataset with all examples in one batch."""
  return tf.data.Dataset.from_tensors(({"image": images}, labels))


def dense(x, name, units):
  """Returns the output of a dense layer without nonlinearity, in the dtype of `x`."""
  with tf.variable_scope(name):
    weights = tf.get_variable("weights", [x.shape.as_list()[-1], units], x.dtype)
    return tf.matmul(x, weights) + tf.get_variable(
      "biases", [units], x.dtype, initializer=tf.zeros_initializer()
    )


def model_fn(features, labels, mode, params):
  """Returns the EstimatorSpec of a small network in float16 with float32 variables,
  trained with loss scaling.
  """
  with tf.variable_scope(
    "network", custom_getter=mp_compat.float32_variable_storage_getter
  ):
    x = tf.cast(features["image"], tf.float16)
    logits = tf.cast(
      dense(tf.nn.relu(dense(x, "hidden", HIDDEN)), "logits", 10), tf.float32
    )
  classes = tf.argmax(logits, axis=1, output_type=tf.int32)
  if mode == tf.estimator.ModeKeys.PREDICT:
    return tf.estimator.EstimatorSpec(mode, predictions={"class": classes})
  loss = tf.losses.sparse_softmax_cross_entropy(
    labels, logits, weights=features.get("weight", 1.0)
  )
  if mode == tf.estimator.ModeKeys.EVAL:
    accuracy = tf.metrics.accuracy(labels, classes)
    return tf.estimator.EstimatorSpec(
      mode, loss=loss, eval_metric_ops={"accuracy": accuracy}
    )
  optimizer = mp_compat.MixedPrecisionLossScaleOptimizer(
    tf.train.AdamOptimizer(LEARNING_RATE), params["loss_scale"]
  )
  hook = mp_compat.LossScaleHook(optimizer, counters_in_graph=True)
  train_op = optimizer.minimize(loss, tf.train.get_global_step())
  return tf.estimator.EstimatorSpec(
    mode, loss=loss, train_op=train_op, training_hooks=[hook]
  )


def table(estimator, metrics):
  """Returns a summary of the run as text. The counts include earlier runs in the same
  directory.
  """
  attempted, skipped = (
    int(estimator.get_variable_value(ATTEMPTED)),
    int(estimator.get_variable_value(SKIPPED)),
  )
  rows = [
    ("attempted steps", attempted),
    ("applied steps", metrics["global_step"]),
    ("skipped steps", skipped),
    (
      "final loss scale",
      "{:g}".format(estimator.get_variable_value("current_loss_scale")),
    ),
    ("test accuracy", "{:.1%}".format(metrics["accuracy"])),
  ]
  return "\n".join("{:<18}{:>8}".format(*row) for row in rows)


def main(argv):
  common_flags.no_arguments(argv)
  if not hasattr(tf, "estimator"):
    raise SystemExit(
      "TensorFlow {} has no Estimator: it was removed after 2.15. Run this on 1.15 to "
      "2.15, for example with `scripts/estimator`.".format(tf.__version__)
    )
  # The hook logs at INFO. Estimator logs many more messages, which are left out.
  tf.logging.set_verbosity(tf.logging.INFO)
  package = os.path.dirname(mp_compat.__file__)
  logger = tf.get_logger()
  logger.addFilter(
    lambda record: (
      record.levelno >= logging.ERROR or record.pathname.startswith(package)
    )
  )
  logger.propagate = False  # Otherwise absl, too, writes each message.
  train, test = load()
  with tempfile.TemporaryDirectory() as directory:
    estimator = tf.estimator.Estimator(
      model_fn,
      FLAGS.model_dir or directory,
      tf.estimator.RunConfig(tf_random_seed=0),
      params={
        "loss_scale": mp_compat.DynamicLossScale(increment_period=INCREMENT_PERIOD)
      },
    )
    estimator.train(
      lambda: train_input_fn(*train, overflow_every=FLAGS.overflow_every),
      steps=FLAGS.steps,
    )
    print("\n" + table(estimator, estimator.evaluate(lambda: eval_input_fn(*test))))


if __name__ == "__main__":
  common_flags.run(main)
