"""Tests of the table of ops that propagate inf and NaN: each entry runs with TensorFlow's graph optimizers."""

import itertools

import numpy as np
import pytest
import tensorflow

import mp_compat
from mp_compat._tensorflow import contexts
from mp_compat.core import lineage
from tests.testing import tf

pytestmark = pytest.mark.usefixtures("graph")

SHAPE = [2, 2]

# Makes another input of an op.
OTHERS = {
  "variable": lambda value: tf.Variable(np.full(SHAPE, value, np.float32), use_resource=True),
  "reference": lambda value: tf.Variable(np.full(SHAPE, value, np.float32), use_resource=False),
  "placeholder": lambda value: tf.placeholder_with_default(np.full(SHAPE, value, np.float32), SHAPE),
  "constant": lambda value: tf.constant(np.full(SHAPE, value, np.float32)),
  "computed": lambda value: tf.sqrt(tf.placeholder_with_default(np.full(SHAPE, value, np.float32), SHAPE)),
}

# Functions of a gradient.
ALONE = {
  "cast": lambda g: tf.cast(g, tf.float64),
  "complex": lambda g: tf.cast(g, tf.complex64),
  "default": lambda g: tf.placeholder_with_default(g, SHAPE),
  "clipped": lambda g: mp_compat.clip_by_global_norm([g], 1.0)[0][0],
  "clip_by_average_norm": lambda g: tf.clip_by_average_norm(g, 1.0),
  "clip_by_global_norm": lambda g: tf.clip_by_global_norm([g, OTHERS["variable"](3.0)], 1.0)[0][0],
  "clip_by_norm": lambda g: tf.clip_by_norm(g, 1.0),
  "expand_dims": lambda g: tf.expand_dims(g, 0),
  "float16": lambda g: tf.cast(g, tf.float16),
  "identity": tf.identity,
  "mean": lambda g: tf.reduce_mean(g, axis=0),
  "reshape": lambda g: tf.reshape(g, [4]),
  "squeeze": tf.squeeze,
  "sum": tf.reduce_sum,
  "transpose": tf.transpose,
}
# Functions of a gradient and another input.
WITH_OTHER = {
  "add": lambda g, other: g + other,
  "add, the second": lambda g, other: other + g,
  "add_n": lambda g, other: tf.add_n([other, g]),
  "concat": lambda g, other: tf.concat([other, g], axis=1),
  "divide": lambda g, other: g / other,
  "matmul": tf.matmul,
  "matmul, the second": lambda g, other: tf.matmul(other, g),
  "multiply": lambda g, other: g * other,
  "multiply, the second": lambda g, other: other * g,
  "old add": lambda g, other: tf.raw_ops.Add(x=g, y=other),
  "stack": lambda g, other: tf.stack([other, g]),
}
# Functions of a gradient that lose inf or NaN, also because of TensorFlow's graph optimizers.
LOSING = {
  "clip_by_value": lambda g: tf.clip_by_value(g, -1.0, 1.0),
  "large denominator": lambda g: g / 3e38,
  "denominator": lambda g: tf.ones(SHAPE) / g,
  "difference": lambda g: g - g,
  "division by inf": lambda g: g / tf.constant(np.inf),
  "imaginary part dropped": lambda g: tf.math.real(tf.complex(tf.ones(SHAPE), g)),
  "integer": lambda g: tf.cast(g, tf.int32),
  "maximum": lambda g: tf.maximum(g, 0.0),
  "minimum": lambda g: tf.minimum(g, 0.0),
  "minimum with a variable": lambda g: tf.minimum(g, OTHERS["variable"](1.0)),
  "one zero": lambda g: g * tf.constant([[1.0, 0.0], [1.0, 1.0]]),
  "select": lambda g: tf.where(tf.is_finite(g), g, tf.zeros_like(g)),
  "sign": tf.sign,
  "slice": lambda g: g[0],
  "sum with zeros in a factor": lambda g: g * (tf.zeros_like(g) + tf.zeros(SHAPE)),
  "small factors": lambda g: g * 1e-30 * 1e-30,
  "small float16 factors": lambda g: tf.cast(g, tf.float16) * tf.constant(1e-4, tf.float16) * 1e-4,
  "rounded to zero": lambda g: g * tf.cast(tf.cast(tf.constant(0.5), tf.int32), tf.float32),
  "rounded to zero in float16": lambda g: tf.cast(g, tf.float16) * tf.cast(tf.constant(1e-9), tf.float16),
  "zero constant": lambda g: g * 0.0,
  "zero called": lambda g: g * tensorflow.function(lambda: tf.constant(0.0))(),
  "zero captured": lambda g: g * tensorflow.function(lambda x: x * 0.0)(OTHERS["variable"](1.0)),
  "zero chosen": lambda g: g * tf.cond(tf.constant(False), lambda: tf.reduce_sum(g), lambda: 0.0),
  "zero flag": lambda g: g * tf.cast(tf.logical_and(g[0, 0] > 0.0, False), tf.float32),
  "zero function": lambda g: g * tf.maximum(OTHERS["variable"](1.0) * 0.0, 0.0),
  "zero negated": lambda g: g * -(OTHERS["variable"](1.0) * 0.0),
  "zero difference": lambda g: g * (OTHERS["variable"](1.0) * (lambda x: tf.identity(x) - x)(tf.sqrt(tf.abs(g) + 1.0))),
  "zero matrix": lambda g: tf.matmul(g, tf.zeros(SHAPE)),
  "zero unknown": lambda g: g * tf.cast(tf.size(g) - 4, tf.float32),
  "zeros_like": lambda g: g * tf.reshape(tf.zeros_like(OTHERS["variable"](1.0)), SHAPE),
}


def propagates(function):
  """Returns whether propagating ops lead from a gradient to `function` of it, the gradient's source, and the end."""
  source = tf.Variable(np.zeros(SHAPE, np.float32), use_resource=True)
  grad = tf.abs(source) * tf.sign(source)  # computed, with a static shape: graph optimizers fold no products of feeds
  result = function(grad)
  pending, reached, ops = [result], False, lineage.PropagatingOps(lambda tensor: tensor is grad)
  while pending:
    tensor = pending.pop()
    reached |= tensor is grad
    pending += [] if tensor is grad else ops.inputs_of(tensor, contexts.tensor_inputs(tensor))
  return reached, source, result


def inputs():
  """Yields gradients with one value that is not finite."""
  for value, position in itertools.product([np.inf, -np.inf, np.nan], range(4)):
    grad = np.array([1.0, -2.0, 0.0, 3.0], np.float32)
    grad[position] = value
    yield grad.reshape(SHAPE)


def arriving(source, result):
  """Returns for each of `inputs` whether the result is not finite, with TensorFlow's graph optimizers."""
  config = tf.ConfigProto()
  config.graph_options.rewrite_options.min_graph_nodes = -1  # also of small graphs
  parts = tf.stack([tf.math.real(result), tf.math.imag(result)]) if result.dtype.is_complex else result
  finite = tf.reduce_all(tf.is_finite(tf.cast(parts, tf.float64)))  # behind the result: what is fetched is not folded
  with tf.Session(config=config) as sess:
    sess.run(tf.global_variables_initializer())
    arrived = []
    for value in inputs():
      source.load(value, sess)
      arrived.append(not sess.run(finite))
  return arrived


@pytest.mark.parametrize("name", sorted(ALONE))
def test_ops_propagate_every_overflow(name):
  reached, source, result = propagates(ALONE[name])
  assert reached
  assert all(arriving(source, result))


@pytest.mark.parametrize("value", [0.0, 2.0, np.inf])
@pytest.mark.parametrize("other", sorted(OTHERS))
@pytest.mark.parametrize("name", sorted(WITH_OTHER))
def test_ops_propagate_beside_other_inputs(name, other, value):
  reached, source, result = propagates(lambda g: WITH_OTHER[name](g, OTHERS[other](value)))
  folds = (name.startswith("m") or name == "divide") and value != 2.0
  assert reached == (other != "constant" or not folds)
  if reached:
    assert all(arriving(source, result))


@pytest.mark.parametrize("name", sorted(LOSING))
def test_losing_ops_do_not_propagate(name):
  assert not propagates(LOSING[name])[0]


def test_placeholders_may_be_factors():
  assert propagates(lambda g: g * tf.placeholder(tf.float32, SHAPE))[0]
  assert propagates(lambda g: g / tf.placeholder(tf.float32, []))[0]


def test_cast_to_real_does_not_propagate():
  ops, grad = lineage.PropagatingOps(lambda tensor: False), tf.placeholder(tf.complex64, SHAPE)
  assert ops.inputs_of(tf.cast(grad, tf.complex128), [grad]) == [grad]
  assert ops.inputs_of(tf.cast(grad, tf.float32), [grad]) == []


def test_long_chains_do_not_propagate():
  def scaled_by_norm(g):
    total = tf.reduce_sum(tf.square(OTHERS["variable"](1.0)))
    for _ in range(1500):  # more than Python's limit for recursions
      total = tf.sqrt(total)
    return g * total

  assert not propagates(scaled_by_norm)[0]
