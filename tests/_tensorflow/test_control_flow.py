"""What `_compat` does about differences between TensorFlow's versions."""

import subprocess
import sys

import pytest
import tensorflow

import mp_compat
from mp_compat._tensorflow import control_flow
from tests import testing
from tests.testing import tf

# What people write who move to TensorFlow 2 with one line; it leaves control flow v2 switched on.
ONE_LINE = """
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


def run_one_line(module):
  return subprocess.run([sys.executable, "-W", "ignore", "-c", ONE_LINE.format(module)], env=testing.environment(),
                        check=False, capture_output=True, text=True)


def test_a_program_that_only_disables_eager_execution_trains():
  done = run_one_line("mp_compat")
  assert done.stdout == "{} [-0.5 -0.5] 1".format(tf.__version__), done.stderr


@pytest.mark.skipif(not (2, 4) <= tuple(map(int, tf.__version__.split(".")[:2])) <= (2, 10),
                    reason="in TensorFlow 2.4 to 2.10 alone, init_scope forgets disable_eager_execution()")
def test_with_tensorflows_class_it_does_not():
  assert "Attempting to capture an EagerTensor" in run_one_line("tensorflow.compat.v1.train.experimental").stderr


def test_conditionals_are_part_of_a_graph():
  with tf.Graph().as_default() as graph, testing.control_flow(2):
    job = testing.Job()
    mp_compat.MixedPrecisionLossScaleOptimizer(tf.train.AdamOptimizer(), "dynamic").minimize(job.loss, job.global_step)
    assert tf.control_flow_v2_enabled()
    assert not {op.type for op in graph.get_operations()} & {"If", "StatelessIf"}


def test_and_functions_within_functions():
  with testing.eager_mode(), testing.control_flow(2):
    opt = mp_compat.MixedPrecisionLossScaleOptimizer(tf.train.GradientDescentOptimizer(1.), 8.)
    w = tensorflow.Variable([0., 0.])

    @tensorflow.function
    def step(x):
      opt.minimize(lambda: tf.reduce_sum(w * x), var_list=[w])

    graph = step.get_concrete_function(tensorflow.TensorSpec([2], tf.float32)).graph
    assert {op.type for op in graph.get_operations()} & {"If", "StatelessIf"}


def test_an_op_in_a_branch_that_is_a_function_is_found():
  with tf.Graph().as_default() as graph, testing.control_flow(2):
    x = tf.placeholder(tf.float32, [2])
    tf.cond(x[0] > 0, lambda: tf.sin(x), lambda: x)
    conditional, = [op for op in graph.get_operations() if op.type in ("If", "StatelessIf")]
    assert control_flow.contains_op(conditional, "Sin") and not control_flow.contains_op(conditional, "Cos")
    assert not control_flow.contains_op(x.op, "Sin") and control_flow.contains_op(x.op, "Placeholder")
