"""Tests of conditionals under control flow v1 and v2, in graphs and in functions."""

import pytest
import tensorflow

from mp_compat.graph import contexts
from tests import testing
from tests.testing import tf

# A program for TensorFlow 1 that only disables eager execution to run on TensorFlow 2.
# Control flow v2 stays enabled.
PROGRAM = """
import numpy as np, tensorflow
tf = tensorflow.compat.v1
tf.disable_eager_execution()
from {} import DynamicLossScale, MixedPrecisionLossScaleOptimizer
w, x = tf.get_variable("w", [2], initializer=tf.zeros_initializer()), tf.placeholder(tf.float32, [2])
opt = MixedPrecisionLossScaleOptimizer(tf.train.AdamOptimizer(.5), DynamicLossScale())
train_op = opt.minimize(tf.reduce_sum(w * x), tf.train.get_or_create_global_step())
with tf.Session() as sess:
  sess.run(tf.global_variables_initializer())
  for value in [[1., 2.], [1., np.inf]]:
    sess.run(train_op, {{x: value}})
  print(tensorflow.__version__, np.round(sess.run(w), 3), sess.run(tf.train.get_global_step()), end="")
"""


def run_program(module):
  return testing.run_python("-W", "ignore", "-c", PROGRAM.format(module), check=False)


def test_disabling_eager_execution_suffices():
  done = run_program("mp_compat")
  assert done.stdout == "{} [-0.5 -0.5] 1".format(tf.__version__), done.stderr


@pytest.mark.skipif(
  not (2, 4) <= tuple(map(int, tf.__version__.split(".")[:2])) <= (2, 10),
  reason="only in TensorFlow 2.4 to 2.10 does init_scope ignore disable_eager_execution()",
)
def test_disabling_eager_execution_fails_tensorflow_class():
  assert (
    "Attempting to capture an EagerTensor"
    in run_program("tensorflow.compat.v1.train.experimental").stderr
  )


def conditionals(graph):
  return [op for op in graph.get_operations() if op.type in ("If", "StatelessIf")]


def test_graphs_have_no_branch_functions(graph):
  training = testing.Training()
  with testing.control_flow(2):
    testing.Optimizer(tf.train.AdamOptimizer(), "dynamic").minimize(
      training.loss, training.global_step
    )
    assert tf.control_flow_v2_enabled()
  assert not conditionals(graph)


@pytest.mark.usefixtures("eager")
def test_functions_have_branch_functions():
  opt = testing.Optimizer(tf.train.GradientDescentOptimizer(1.0), 8.0)
  w = tensorflow.Variable([0.0, 0.0])

  @tensorflow.function
  def step(x):
    opt.minimize(lambda: tf.reduce_sum(w * x), var_list=[w])

  with testing.control_flow(2):
    assert conditionals(
      step.get_concrete_function(tensorflow.TensorSpec([2], tf.float32)).graph
    )


def test_contains_op_searches_branches(graph):
  x = tf.placeholder(tf.float32, [2])
  with testing.control_flow(2):
    tf.cond(x[0] > 0, lambda: tf.sin(x), lambda: x)
  (conditional,) = conditionals(graph)
  assert contexts.contains_op(conditional, "Sin") and not contexts.contains_op(
    conditional, "Cos"
  )
  assert not contexts.contains_op(x.op, "Sin") and contexts.contains_op(
    x.op, "Placeholder"
  )
