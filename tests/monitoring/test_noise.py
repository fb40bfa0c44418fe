"""Tests that gradients which are mathematically zero are recognized on every processor.

Their rounding errors depend on the inputs, the processor, oneDNN and the number of
threads: CI runs these tests with several settings.
"""

import collections

import numpy as np
import pytest

import mp_compat
from tests import testing
from tests.testing import Optimizer
from tests.testing import sgd
from tests.testing import tf

pytestmark = pytest.mark.usefixtures("graph")

UNITS = 6
SCALE = 2.0**10

Model = collections.namedtuple("Model", "examples weights loss variables")


def attention_model(dtype, add, examples=64):
  """Returns a model in which two of four biases do not change the loss.

  The bias "before" comes before batch normalization, "key" is that of attention's keys.
  Values are in `dtype`; the normalization, the softmax and the loss are wider. `add` is
  how the biases are added; if it is "shared", two ops use that of the keys.
  """
  wide = tf.float64 if dtype == tf.float64 else tf.float32
  x, w = tf.placeholder(dtype, [examples, UNITS]), tf.placeholder(dtype, [UNITS, UNITS])
  variables = {
    name: tf.get_variable(name, [UNITS], wide, tf.zeros_initializer())
    for name in ("before", "key", "query", "last")
  }

  def layer(value, name):
    product, bias = tf.matmul(value, w), tf.cast(variables[name], dtype)
    return product + bias if add == "plus" else tf.nn.bias_add(product, bias)

  hidden = tf.cast(layer(x, "before"), wide)
  mean, variance = tf.nn.moments(hidden, [0])
  hidden = tf.cast((hidden - mean) * tf.rsqrt(variance + 1e-3), dtype)
  keys = [layer(hidden, "key") for _ in range(2 if add == "shared" else 1)]
  queries = layer(hidden, "query")
  attended = []
  for key in keys:
    scores = tf.matmul(queries, key, transpose_b=True)
    attention = tf.nn.softmax(tf.cast(scores, wide))
    attended.append(tf.matmul(tf.cast(attention, dtype), hidden))
  output = tf.cast(layer(tf.add_n(attended), "last"), wide)
  return Model(x, w, tf.reduce_mean(tf.square(output - 1.0)), variables)


def feed(model, seed):
  random = np.random.RandomState(seed)
  return {
    model.examples: random.normal(size=model.examples.shape.as_list()),
    model.weights: random.normal(size=[UNITS, UNITS]),
  }


def noise_in(values):
  """Returns the names of the variables whose gradients are noise."""
  return sorted(name for name, gradient in values.items() if gradient.noise)


@pytest.mark.each_choice
@pytest.mark.parametrize("add", ["bias_add", "plus", "shared"])
@pytest.mark.parametrize(
  "dtype", [tf.float16, tf.float32], ids=lambda dtype: dtype.name
)
def test_gradients_of_zero_are_noise(dtype, add):
  """Whatever the inputs are."""
  model = attention_model(dtype, add)
  opt = Optimizer(sgd(), SCALE)
  opt.minimize(model.loss)
  ranges = mp_compat.gradient_ranges(opt, dtype)
  of_variables = {v.name: ranges[v.name] for v in model.variables.values()}
  with testing.initialized_session() as sess:
    for seed in range(40):
      assert noise_in(sess.run(of_variables, feed(model, seed))) == [
        "before:0",
        "key:0",
      ]


@pytest.mark.matrix
@pytest.mark.parametrize(
  "dtype", [tf.float16, tf.float32], ids=lambda dtype: dtype.name
)
def test_gradients_of_zero_over_many_examples(dtype):
  model = attention_model(dtype, "bias_add", examples=512)
  opt = Optimizer(sgd(), SCALE)
  opt.minimize(model.loss)
  ranges = mp_compat.gradient_ranges(opt, dtype)
  of_variables = {v.name: ranges[v.name] for v in model.variables.values()}
  with testing.initialized_session() as sess:
    for seed in range(100):
      assert noise_in(sess.run(of_variables, feed(model, seed))) == [
        "before:0",
        "key:0",
      ]


def test_float64_shows_which_gradients_are_zero():
  model = attention_model(tf.float64, "bias_add")
  opt = Optimizer(sgd(), SCALE)
  gradients = {v.op.name: grad for grad, v in opt.compute_gradients(model.loss)}
  with testing.initialized_session() as sess:
    found = sess.run(gradients, feed(model, 0))
  largest = {name: np.abs(values).max() for name, values in found.items()}
  assert max(largest["before"], largest["key"]) < 1e-12
  assert min(largest["query"], largest["last"]) > 1e-4


@pytest.mark.parametrize(
  "dtype", [tf.float16, tf.float32], ids=lambda dtype: dtype.name
)
def test_noise_depends_on_rounding(dtype):
  """A second backward pass, with another scale, rounds otherwise; the rule agrees."""
  model = attention_model(dtype, "bias_add")
  passes = []
  for scale in (SCALE, 1.37 * SCALE):
    opt = Optimizer(sgd(), scale)
    pairs = opt.compute_gradients(model.loss)
    opt.apply_gradients(pairs)
    passes.append({v.name: grad for grad, v in pairs})
  ranges = mp_compat.gradient_ranges(opt, dtype)
  of_variables = {v.name: ranges[v.name] for v in model.variables.values()}
  with testing.initialized_session() as sess:
    for seed in range(10):
      first, second, measured = sess.run(passes + [of_variables], feed(model, seed))
      for name, values in first.items():
        change = np.abs(values - second[name]).sum() / np.abs(values).sum()
        assert change > 0.05 if measured[name].noise else change < 0.02, name


def gradient_of_bias(terms, dtype, add):
  """Returns the ranges of a bias of which the gradient is the sum of fed terms."""
  width = int(terms.shape[1])
  bias = tf.get_variable("bias", [width], initializer=tf.zeros_initializer())
  cast = tf.cast(bias, dtype)
  zeros = tf.zeros_like(terms)
  added = tf.nn.bias_add(zeros, cast) if add == "bias_add" else zeros + cast
  opt = Optimizer(sgd(), 2.0)
  opt.minimize(tf.reduce_sum(tf.cast(terms * added, tf.float32)))
  return mp_compat.gradient_ranges(opt, dtype)["bias:0"]


@pytest.mark.each_choice
@pytest.mark.parametrize("add", ["bias_add", "plus"])
@pytest.mark.parametrize(
  "dtype", [tf.float16, tf.float32], ids=lambda dtype: dtype.name
)
@pytest.mark.parametrize("number", [4, 300, 2**16])
def test_sums_of_random_signs_are_no_noise(dtype, add, number):
  """They are right to 0.1%, however many terms there are; shifted terms cancel."""
  terms = tf.placeholder(dtype, [None, 8])
  ranges = gradient_of_bias(terms, dtype, add)
  random = np.random.RandomState(0)
  with testing.initialized_session() as sess:
    for _ in range(3):
      values = random.normal(size=[number, 8]).astype(dtype.as_numpy_dtype)
      assert not sess.run(ranges, {terms: values}).noise
      assert sess.run(ranges, {terms: values - np.roll(values, 1, axis=0)}).noise


@pytest.mark.each_choice
@pytest.mark.parametrize(
  "dtype", [tf.float16, tf.float32], ids=lambda dtype: dtype.name
)
@pytest.mark.parametrize("values", [1, 2])
def test_few_sums_are_hardly_ever_noise_by_chance(values, dtype):
  """A single sum of random signs is small now and then; shifted terms cancel."""
  terms = tf.placeholder(dtype, [100, values])
  noise = gradient_of_bias(terms, dtype, "bias_add").noise
  random = np.random.RandomState(0)
  found = []
  with testing.initialized_session() as sess:
    for _ in range(1000):
      fed = random.normal(size=[100, values]).astype(dtype.as_numpy_dtype)
      found.append(sess.run(noise, {terms: fed}))
    assert sess.run(noise, {terms: fed - np.roll(fed, 1, axis=0)})
  assert sum(found) <= 10


def test_sums_of_zeros_are_no_noise():
  """The terms may have underflowed."""
  terms = tf.placeholder(tf.float16, [4, 2])
  ranges = gradient_of_bias(terms, tf.float16, "bias_add")
  with testing.initialized_session() as sess:
    for value in (0.0, 3.0, np.inf):
      assert not sess.run(ranges, {terms: np.full([4, 2], value)}).noise
    cancelling = [[1.0, 2.0], [-1.0, -2.0], [3.0, 4.0], [-3.0, -4.0]]
    assert sess.run(ranges, {terms: cancelling}).noise


def test_few_terms_may_nearly_cancel():
  terms = tf.placeholder(tf.float32, [4, 8])
  ranges = gradient_of_bias(terms, tf.float32, "bias_add")
  with testing.initialized_session() as sess:
    # The sum is about half of `rest` of the sum of magnitudes, with a limit of 2**-7:
    # of more than four values, 0.125 / sqrt(4) is above it.
    for rest, is_noise in [(2.0**-5, False), (2.0**-7, True)]:
      ones = np.full([4, 8], 1.0)
      ones[1::2] = rest - 1.0
      assert sess.run(ranges, {terms: ones}).noise == is_noise
