# SPDX-License-Identifier: Apache-2.0
"""Checks the advice of GradientRangesHook: trains real tasks with the advised loss
scales, and with others.

    scripts/nox -s program -- tools/check_advice.py        # half an hour on two cores

The tasks are those of TASKS; scikit-learn contains their data. Each is trained in
float16 with a dynamic loss scale and the hook, which gives the advice, and then with
fixed loss scales: the smallest and the largest that fit all records, the one that is
advised, one 2**6 below the smallest and one 2**6 above the largest. Prints the result
of each training on test data, the mean over seeds, and how many of the steps were
skipped. A result is "inf" or "nan" if the training diverged.
"""

import argparse
import collections
import os
import sys
import tempfile

# Both are read once, while TensorFlow is imported. On a CPU with AVX512-FP16, oneDNN's
# float16 convolutions are slow to train.
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

sys.path.append(
  os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "examples")
)

import numpy as np
from sklearn import datasets
import tensorflow.compat.v1 as tf
import train_digits

import mp_compat
from mp_compat.monitoring import range_history
from mp_compat.tools import ranges_chart


class Masks:
  """The demo: ten masks of 64x64 pixels for a digit. Share of ink pixels whose class
  has the largest logit.
  """

  steps, result = 160, "accuracy"

  def __init__(self):
    self._digits = train_digits.Digits()
    self._images = tf.placeholder(tf.float32, [None, 8, 8, 1])
    self._masks = tf.placeholder(tf.int32, [None, 64, 64])

  def optimizer(self, step):
    return tf.train.AdamOptimizer(
      tf.train.polynomial_decay(train_digits.LEARNING_RATE, step, self.steps, 0.0)
    )

  def build(self, dtype):
    logits, _ = train_digits.network(self._images, dtype)
    return train_digits.mean_loss(logits, self._masks), train_digits.ink_accuracy(
      logits, self._masks
    )

  def feed(self, rng):
    indices = (
      self._digits.test
      if rng is None
      else rng.choice(self._digits.train, train_digits.BATCH)
    )
    images, masks = self._digits.examples(indices, rng or np.random.RandomState(0))
    return {self._images: images, self._masks: masks}


class Task:
  """What most tasks share: Adam with a fixed learning rate."""

  rate = 0.004

  def optimizer(self, step):
    del step
    return tf.train.AdamOptimizer(self.rate)


class Text(Task):
  """Predicts the next character of descriptions of data, with a recurrent network. Bits
  per character.
  """

  steps, result, length, units = 300, "bits per character", 24, 96

  def __init__(self):
    loaders = [
      datasets.load_iris,
      datasets.load_wine,
      datasets.load_breast_cancer,
      datasets.load_diabetes,
    ]
    text = "\n".join(
      loader().DESCR
      for loader in loaders + [datasets.load_digits, datasets.load_linnerud]
    )
    self._symbols = sorted(set(text))
    codes = np.array([self._symbols.index(symbol) for symbol in text], np.int32)
    self._train, self._test = (
      codes[: len(codes) * 9 // 10],
      codes[len(codes) * 9 // 10 :],
    )
    self._codes = tf.placeholder(tf.int32, [None, self.length + 1])

  def build(self, dtype):
    depth = len(self._symbols)
    state = tf.zeros([tf.shape(self._codes)[0], self.units], dtype)
    hidden = []
    for position in range(self.length):
      symbol = tf.one_hot(self._codes[:, position], depth, dtype=dtype)
      state = tf.tanh(dense(tf.concat([state, symbol], axis=1), self.units, "cell"))
      hidden.append(state)
    logits = tf.cast(dense(tf.concat(hidden, axis=0), depth, "logits"), tf.float32)
    labels = tf.concat(tf.unstack(self._codes[:, 1:], axis=1), axis=0)
    loss = tf.reduce_mean(
      tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)
    )
    return loss, loss / np.log(2.0)

  def feed(self, rng):
    codes, starts = self._train, None
    if rng is None:
      codes, starts = self._test, np.arange(0, len(self._test) - self.length - 1, 7)
    else:
      starts = rng.randint(0, len(codes) - self.length - 1, 32)
    return {
      self._codes: np.stack(
        [codes[start : start + self.length + 1] for start in starts]
      )
    }


class Attention(Text):
  """Predicts the next character of the same text, with attention. Bits per character.

  The bias of the keys does not change the loss: its gradient is zero.
  """

  steps, units = 300, 48

  def build(self, dtype):
    depth = len(self._symbols)
    inputs = tf.one_hot(self._codes[:, :-1], depth, dtype=dtype)
    places = tf.get_variable(
      "places",
      [self.length, self.units],
      dtype,
      tf.random_normal_initializer(stddev=0.1, seed=1),
    )
    hidden = rows(inputs, self.units, "embedding") + places
    for layer in ("one", "two"):
      with tf.variable_scope(layer):
        query, key, value = [
          rows(hidden, self.units, name) for name in ("query", "key", "value")
        ]
        scores = (
          tf.cast(tf.matmul(query, key, transpose_b=True), tf.float32) / self.units**0.5
        )
        future = np.triu(np.full([self.length, self.length], -1e4, np.float32), 1)
        attended = tf.matmul(tf.cast(tf.nn.softmax(scores + future), dtype), value)
        hidden = normalize(hidden + rows(attended, self.units, "attended"), -1)
        wide = tf.nn.relu(rows(hidden, 2 * self.units, "wide"))
        hidden = normalize(hidden + rows(wide, self.units, "narrow"), -1)
    logits = tf.cast(rows(hidden, depth, "logits"), tf.float32)
    loss = tf.reduce_mean(
      tf.nn.sparse_softmax_cross_entropy_with_logits(
        labels=self._codes[:, 1:], logits=logits
      )
    )
    return loss, loss / np.log(2.0)


class Photographs(Task):
  """Removes noise from patches of photographs, with convolutions. Decibels of the
  largest value over the error.
  """

  steps, size, result = 150, 48, "PSNR, dB"

  def __init__(self):
    china, flower = (
      image.astype(np.float32) / 255 for image in datasets.load_sample_images().images
    )
    self._train, self._test = china, flower
    self._clean, self._noisy = (
      tf.placeholder(tf.float32, [None, self.size, self.size, 3]) for _ in range(2)
    )

  def build(self, dtype):
    hidden = tf.cast(self._noisy, dtype) - 0.5
    for layer, filters in enumerate([16, 16, 16, 3]):
      with tf.variable_scope("convolution{}".format(layer)):
        kernel = tf.get_variable(
          "kernel",
          [3, 3, hidden.shape[-1], filters],
          dtype,
          tf.variance_scaling_initializer(2.0, seed=layer),
        )
        hidden = tf.nn.conv2d(hidden, kernel, [1, 1, 1, 1], "SAME")
        hidden = hidden if filters == 3 else tf.nn.relu(hidden)
    error = tf.reduce_mean(
      tf.square(self._noisy - tf.cast(hidden, tf.float32) - self._clean)
    )
    return error, -10.0 * tf.log(error) / np.log(10.0)

  def feed(self, rng):
    image = self._test if rng is None else self._train
    rng = rng or np.random.RandomState(0)
    corners = [rng.randint(0, length - self.size, 16) for length in image.shape[:2]]
    clean = np.stack(
      [
        image[top : top + self.size, left : left + self.size]
        for top, left in zip(*corners)
      ]
    )
    return {self._clean: clean, self._noisy: clean + 0.1 * rng.randn(*clean.shape)}


class Measurements(Task):
  """A task whose inputs are rows of normalized measurements."""

  def __init__(self, data, dtype):
    inputs = (data.data - data.data.mean(axis=0)) / data.data.std(axis=0)
    order = np.random.RandomState(0).permutation(len(inputs))
    self._inputs, self._targets = inputs[order], data.target[order]
    self._x, self._y = (
      tf.placeholder(tf.float32, [None, inputs.shape[1]]),
      tf.placeholder(dtype, [None]),
    )

  def feed(self, rng):
    part = (
      slice(self.train, None) if rng is None else rng.randint(0, self.train, self.batch)
    )
    return {self._x: self._inputs[part], self._y: self._targets[part]}


class Tumors(Measurements):
  """Classifies breast tumors by 30 measurements, with dense layers. Accuracy."""

  steps, result, train, batch = 300, "accuracy", 400, 32

  def __init__(self):
    super().__init__(datasets.load_breast_cancer(), tf.int32)

  def optimizer(self, step):
    del step
    return tf.train.GradientDescentOptimizer(0.1)

  def build(self, dtype):
    return self.loss(tf.nn.relu(dense(tf.cast(self._x, dtype), 32, "one")))

  def loss(self, hidden):
    """Returns the loss of a last layer, and the accuracy."""
    logits = tf.cast(dense(hidden, 2, "two"), tf.float32)
    right = tf.equal(tf.argmax(logits, -1, output_type=tf.int32), self._y)
    loss = tf.reduce_mean(
      tf.nn.sparse_softmax_cross_entropy_with_logits(labels=self._y, logits=logits)
    )
    return loss, tf.reduce_mean(tf.cast(right, tf.float32))


class Normalized(Tumors):
  """Classifies breast tumors, with batch normalization after each dense layer and an
  auxiliary loss. Accuracy.

  The biases do not change the loss: their gradients are zero.
  """

  def build(self, dtype):
    hidden = tf.nn.relu(normalize(dense(tf.cast(self._x, dtype), 32, "one"), 0))
    with tf.variable_scope("auxiliary"):
      auxiliary, _ = self.loss(tf.nn.relu(normalize(dense(hidden, 16, "three"), 0)))
    loss, accuracy = self.loss(tf.nn.relu(normalize(dense(hidden, 16, "three"), 0)))
    return loss + 0.01 * auxiliary, accuracy


class Diabetes(Measurements):
  """Predicts the progress of diabetes, 25 to 346, with dense layers; the loss is not
  normalized. R squared.
  """

  steps, result, train, batch, rate = 400, "R squared", 300, 64, 0.05

  def __init__(self):
    super().__init__(datasets.load_diabetes(), tf.float32)

  def build(self, dtype):
    hidden = tf.nn.relu(dense(tf.cast(self._x, dtype), 32, "one"))
    predicted = 100.0 * tf.cast(dense(hidden, 1, "two"), tf.float32)[:, 0]
    variance = tf.reduce_mean(tf.square(self._y - tf.reduce_mean(self._y)))
    error = tf.reduce_mean(tf.square(predicted - self._y))
    return tf.reduce_sum(tf.square(predicted - self._y)), 1.0 - error / variance


TASKS = [Masks, Text, Attention, Photographs, Tumors, Normalized, Diabetes]


def dense(x, size, name):
  """Returns a dense layer of `x` in its dtype; calls with one name share the
  variables.
  """
  with tf.variable_scope(name, reuse=tf.AUTO_REUSE):
    kernel = tf.get_variable(
      "kernel",
      [x.shape[-1], size],
      x.dtype,
      tf.glorot_uniform_initializer(seed=len(name)),
    )
    bias = tf.get_variable("bias", [size], x.dtype, tf.zeros_initializer())
  return tf.nn.bias_add(tf.matmul(x, kernel), bias)


def rows(x, size, name):
  """Returns `dense` of the last dimension of `x`, of static shape but for the batch."""
  return tf.reshape(
    dense(tf.reshape(x, [-1, x.shape[-1]]), size, name), [-1, *x.shape[1:-1], size]
  )


def normalize(x, axis):
  """Returns `x` with a mean of 0 and a variance of 1 along an axis, computed in
  float32, in its dtype.
  """
  mean, variance = tf.nn.moments(tf.cast(x, tf.float32), [axis], keep_dims=True)
  return tf.cast((tf.cast(x, tf.float32) - mean) * tf.rsqrt(variance + 1e-3), x.dtype)


Result = collections.namedtuple("Result", "test skipped")


def train(make_task, scale, seed, dtype=tf.float16, directory=None):
  """Trains a task with a loss scale; records gradient ranges in `directory`, if there
  is one. Returns a `Result`.
  """
  with tf.Graph().as_default():
    tf.set_random_seed(seed)
    task = make_task()
    step = tf.train.get_or_create_global_step()
    with tf.variable_scope("", custom_getter=mp_compat.float32_variable_storage_getter):
      loss, result = task.build(dtype)
    opt = mp_compat.MixedPrecisionLossScaleOptimizer(task.optimizer(step), scale)
    train_op = opt.minimize(loss, step)
    hooks = [mp_compat.GradientRangesHook(opt, 10, directory)] if directory else []
    rng = np.random.RandomState(seed)
    with tf.train.MonitoredSession(hooks=hooks) as session:
      for _ in range(task.steps):
        session.run(train_op, task.feed(rng))
      test, applied = session.run([result, step], task.feed(None))
  return Result(float(test), 1.0 - applied / task.steps)


def check(make_task, seeds):
  """Trains one task with all loss scales, and prints the table of its results."""
  with tempfile.TemporaryDirectory() as directory:
    train(make_task, mp_compat.DynamicLossScale(2.0**15, 50), 0, directory=directory)
    _, advice = ranges_chart.read(directory)
  print("\n{}\n{}\n".format(make_task.__doc__, advice.text))
  low, high = advice.low, max(advice.high, advice.low)
  advised = max(high - range_history.MARGIN, low)
  scales = collections.OrderedDict([("float32, 1", 1.0)])
  for exponent in (max(low - 6, 0), low, advised, high, high + 6):
    scales["float16, 2**{}".format(exponent)] = 2.0**exponent
  scales["float16, dynamic"] = "dynamic"
  print(
    "| {} | {} | steps skipped |\n|---|---|---|".format(
      "dtype, loss scale", make_task.result
    )
  )
  for name, scale in scales.items():
    dtype = tf.float32 if name.startswith("float32") else tf.float16
    results = [train(make_task, scale, seed, dtype) for seed in range(seeds)]
    test, skipped = np.mean(results, axis=0)
    print("| {} | {:.3f} | {:.1%} |".format(name, test, skipped), flush=True)


def main():
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument(
    "--task",
    choices=[task.__name__ for task in TASKS],
    action="append",
    help="only this one",
  )
  parser.add_argument(
    "--seeds",
    type=int,
    default=3,
    help="trainings with each loss scale; default: %(default)s",
  )
  arguments = parser.parse_args()
  tf.disable_v2_behavior()
  tf.logging.set_verbosity(tf.logging.ERROR)
  for task in TASKS:
    if not arguments.task or task.__name__ in arguments.task:
      check(task, arguments.seeds)


if __name__ == "__main__":
  sys.exit(main())
