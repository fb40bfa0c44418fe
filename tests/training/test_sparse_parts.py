"""Tests that each part of a sparse gradient may be whatever TensorFlow converts."""

import numpy as np
import pytest
import tensorflow

import mp_compat
from tests import testing
from tests.testing import Optimizer
from tests.testing import tf

VALUES = np.array([[1.0, 2.0], [4.0, 8.0], [16.0, 32.0]], np.float32)
ROWS = [2, 2, 5]
SHAPE = [6, 2]
# The table after a step of gradient descent with learning rate 1.
EXPECTED = np.zeros(SHAPE)
for row, value in zip(ROWS, VALUES):
  EXPECTED[row] -= value


def variable(use_resource):
  return lambda part: tf.Variable(part, trainable=False, use_resource=use_resource)


KINDS = {
  "tensor": tf.constant,
  "resource": variable(True),
  "reference": variable(False),
  "array": np.array,
  "list": lambda part: np.array(part).tolist(),
  "tuple": lambda part: tuple(np.array(part).tolist()),
}
GRAPH_KINDS = list(KINDS)
OTHER_KINDS = ["tensor", "array", "list", "tuple"]


def default(kinds, *selected):
  """Returns parameters of kinds, of which all but the selected are for `matrix`."""
  return [
    kind if kind in selected else pytest.param(kind, marks=pytest.mark.matrix)
    for kind in kinds
  ]


def gradient(kind, dtype=np.int64, has_shape=True):
  """Returns a sparse gradient whose parts are of one kind."""
  make = KINDS[kind]
  indices = make(np.array(ROWS, dtype))
  shape = make(np.array(SHAPE, dtype)) if has_shape else None
  return tf.IndexedSlices(make(VALUES), indices, shape)


def make_table(name="table"):
  return tf.Variable(np.zeros(SHAPE, np.float32), name=name, use_resource=True)


def values_after(train_op, variables):
  with testing.initialized_session() as sess:
    sess.run(train_op)
    return sess.run(variables)


@pytest.mark.usefixtures("graph")
@pytest.mark.parametrize("kind", GRAPH_KINDS)
@pytest.mark.parametrize(
  "dtype, has_shape",
  [
    (np.int64, True),
    pytest.param(np.int64, False, marks=pytest.mark.matrix),
    pytest.param(np.int32, True, marks=pytest.mark.matrix),
    pytest.param(np.int32, False, marks=pytest.mark.matrix),
  ],
)
def test_parts_are_converted_in_graphs(kind, has_shape, dtype):
  table = make_table()
  grad = gradient(kind, dtype, has_shape)
  train_op = Optimizer(testing.sgd(), "dynamic").apply_gradients([(grad, table)])
  np.testing.assert_array_equal(values_after(train_op, table), EXPECTED)


@pytest.mark.usefixtures("graph")
@pytest.mark.parametrize("kind", default(GRAPH_KINDS, "list"))
def test_tables_share_indices(kind):
  first, second = make_table(), make_table()
  indices = KINDS[kind](np.array(ROWS))
  pairs = [
    (tf.IndexedSlices(VALUES.tolist(), indices), first),
    (tf.IndexedSlices(tf.constant(VALUES), indices), second),
  ]
  train_op = Optimizer(testing.sgd(), 8.0).apply_gradients(pairs)
  for values in values_after(train_op, [first, second]):
    np.testing.assert_array_equal(values, EXPECTED)


@pytest.mark.usefixtures("graph")
@pytest.mark.parametrize("kind", default(GRAPH_KINDS, "list"))
def test_accumulator_converts_parts(kind):
  table = make_table()
  window = mp_compat.GradientAccumulator(Optimizer(testing.sgd(), "dynamic"))
  add = window.add([(gradient(kind), table)])
  train_op = window.apply_gradients(window.mean())
  with testing.initialized_session() as sess:
    for op in (add, add, train_op):
      sess.run(op)
    np.testing.assert_array_equal(sess.run(table), EXPECTED)


@pytest.mark.usefixtures("graph")
@pytest.mark.parametrize("kind", default(GRAPH_KINDS, "list"))
def test_shared_step_converts_parts(kind):
  first, second = make_table(), make_table()
  scale = mp_compat.DynamicLossScale()
  train_op = mp_compat.apply_gradients_together(
    [
      (Optimizer(testing.sgd(), scale), [(gradient(kind), table)])
      for table in (first, second)
    ]
  )
  for values in values_after(train_op, [first, second]):
    np.testing.assert_array_equal(values, EXPECTED)


@pytest.mark.usefixtures("graph")
@pytest.mark.parametrize("kind", default(OTHER_KINDS, "list"))
def test_functions_convert_parts(kind):
  table = make_table()
  opt = Optimizer(testing.sgd(), "dynamic")

  @tensorflow.function
  def step():
    opt.apply_gradients([(gradient(kind), table)])
    return tf.constant(0.0)

  np.testing.assert_array_equal(values_after(step(), table), EXPECTED)


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("kind", default(OTHER_KINDS, "list"))
def test_eager_steps_convert_parts(kind):
  table = make_table()
  Optimizer(testing.sgd(), "dynamic").apply_gradients([(gradient(kind), table)])
  np.testing.assert_array_equal(table.numpy(), EXPECTED)


@pytest.mark.usefixtures("graph")
@pytest.mark.parametrize("kind", default(OTHER_KINDS, "list"))
def test_replicas_convert_parts(kind):
  tables = []

  def step():
    if not tables:
      tables.append(make_table())
    grad = gradient(kind)
    return Optimizer(testing.sgd(), "dynamic").apply_gradients([(grad, tables[0])])

  strategy = tf.distribute.MirroredStrategy(testing.TWO_CPUS)
  with strategy.scope():
    tables.append(make_table())
    train_op = strategy.group(strategy.extended.call_for_each_replica(step))
  values = values_after(train_op, tables[0])
  np.testing.assert_array_equal(values, 2 * EXPECTED)  # a sum over replicas


@pytest.mark.usefixtures("graph")
@pytest.mark.parametrize("kind", default(GRAPH_KINDS, "list"))
def test_overflow_in_values_skips_step(kind):
  table = make_table()
  overflow = np.where(VALUES == 8.0, np.float32(np.inf), VALUES)
  grad = tf.IndexedSlices(KINDS[kind](overflow), KINDS[kind](np.array(ROWS)))
  train_op = Optimizer(testing.sgd(), "dynamic").apply_gradients([(grad, table)])
  np.testing.assert_array_equal(values_after(train_op, table), np.zeros(SHAPE))
