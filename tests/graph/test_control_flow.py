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


# Runs several programs in one process.
NEXT_PROGRAM = """
print("NEXT PROGRAM")
tf.reset_default_graph()
"""


# TensorFlow's context exists before eager execution is disabled, and functions are built
# in the default graph.
FUNCTIONS = """
import numpy as np, tensorflow
tensorflow.config.experimental.list_physical_devices("CPU")
tf = tensorflow.compat.v1
tf.disable_eager_execution()
from {} import DynamicLossScale, MixedPrecisionLossScaleOptimizer
w = tf.get_variable("w", [2], initializer=tf.zeros_initializer(), use_resource=True)
x = tf.placeholder(tf.float32, [2])
always = tf.placeholder_with_default(True, [])
scale = DynamicLossScale(1024., increment_period=2)
opt = MixedPrecisionLossScaleOptimizer(tf.train.GradientDescentOptimizer(.5), scale)
loss = lambda: tf.reduce_sum((w + 1.0) * (w + 1.0) * x)
def step():
  with tf.control_dependencies([opt.minimize(loss(), var_list=[w])]):
    return tf.constant(1.0)
def gradient():
  return opt.compute_gradients(loss(), [w])[0][0]
def apply(grad):
  return opt.apply_gradients([(grad, w)])
steps = [
  tf.cond(always, step, lambda: 0.0),
  tf.function(step)(),
  apply(tf.cond(always, gradient, lambda: tf.zeros([2]))),
  apply(tf.while_loop(lambda i, _: i < 2, lambda i, g: (i + 1, g + gradient()), (0, tf.zeros([2])))[1]),
  tf.cond(always, scale, lambda: 0.0),
]
with tf.Session() as sess:
  sess.run(tf.global_variables_initializer())
  for op in steps:
    for value in [[0.25, 0.5], [0.25, np.inf], [0.125, 0.25]]:
      fetched = sess.run(op, {{x: value}})
    print(sess.run(w), sess.run(scale()), fetched)
"""


# What else creates variables in functions of the default graph. Each is built in a
# branch, a loop and a function; Keras's optimizers alone fail in all of them.
VARIABLES = """
import numpy as np, tensorflow
tensorflow.config.experimental.list_physical_devices("CPU")
tf = tensorflow.compat.v1
tf.disable_eager_execution()
import mp_compat
w = tf.get_variable("w", [2], initializer=tf.zeros_initializer(), use_resource=True)
x = tf.placeholder(tf.float32, [2])
sgd = tf.train.GradientDescentOptimizer(1.)
def done(op):
  with tf.control_dependencies([op]):
    return tf.constant(1.0)
def add():
  return done(accumulator.add(opt.compute_gradients(tf.reduce_sum(w * x), [w])))
def step():
  scale = mp_compat.DynamicLossScale(8., increment_period=1)
  made = mp_compat.MixedPrecisionLossScaleOptimizer(sgd, scale)
  return done(made.minimize(tf.reduce_sum(w * x), var_list=[w]))
def keras_step():
  scaled = keras.get_scaled_loss(tf.reduce_sum(w * x))
  grads = keras.get_unscaled_gradients(tf.gradients(scaled, [w]))
  return done(keras.apply_gradients(zip(grads, [w])))
places = [
  lambda build: tf.cond(tf.placeholder_with_default(True, []), build, lambda: 0.0),
  lambda build: tf.while_loop(lambda i, v: i < 1, lambda i, v: (i + 1, v + build()), (0, 0.0))[1],
  lambda build: tf.function(build)(),
]
builds = [add, step]
optimizers = getattr(tensorflow.keras.optimizers, "legacy", tensorflow.keras.optimizers)
if {}:
  builds.append(keras_step)
for build in builds:
  for place in places:
    opt = mp_compat.MixedPrecisionLossScaleOptimizer(sgd, 8.)
    accumulator = mp_compat.GradientAccumulator(opt)
    if build is keras_step:
      keras = mp_compat.keras.LossScaleOptimizer(optimizers.SGD(1., .5))
    op = place(build)
    applied = accumulator.apply_gradients(accumulator.mean()) if build is add else []
    with tf.Session() as sess:
      sess.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
      overflow = [] if build is add else [[3., np.inf]]
      for value in [[1., 2.]] + overflow + [[3., 4.]]:
        sess.run(op, {{x: value}})
      sess.run(applied)
      print(build.__name__, np.round(sess.run(w), 3))
"""
# the mean of two micro-batches; two steps; two steps with a momentum of 0.5
AFTER = {"add": "[-2. -3.]", "step": "[-4. -6.]", "keras_step": "[-4.5 -7. ]"}
HAS_KERAS_2 = tuple(map(int, tf.__version__.split(".")[:2])) < (2, 16)


SCALE_OF_ANOTHER_GRAPH = """
import tensorflow
tensorflow.config.experimental.list_physical_devices("CPU")
tf = tensorflow.compat.v1
tf.disable_eager_execution()
from mp_compat import DynamicLossScale
with tf.Graph().as_default():
  scale = DynamicLossScale(8.)
read = tf.cond(tf.placeholder_with_default(True, []), scale, lambda: 0.0)
with tf.Session() as sess:
  sess.run(tf.global_variables_initializer())
  print(sess.run(read), end="")
"""


@pytest.fixture(name="printed", scope="module")
def _printed():
  """Returns what each program prints that builds functions of the default graph."""
  programs = [
    FUNCTIONS.format("mp_compat"),
    FUNCTIONS.format("tensorflow.compat.v1.train.experimental"),
    VARIABLES.format(HAS_KERAS_2),
    SCALE_OF_ANOTHER_GRAPH,
  ]
  done = testing.run_python("-W", "ignore", "-c", NEXT_PROGRAM.join(programs))
  return done.stdout.split("NEXT PROGRAM\n")


def test_functions_of_the_default_graph_use_its_loss_scale(printed):
  ours, theirs, *_ = printed
  assert len(ours.splitlines()) == 5 and ours == theirs


def test_functions_of_the_default_graph_create_variables(printed):
  expected = []
  for name in AFTER:
    if name != "keras_step" or HAS_KERAS_2:
      expected += 3 * ["{} {}".format(name, AFTER[name])]
  assert printed[2].splitlines() == expected


def test_functions_of_the_default_graph_make_variables_in_it(printed):
  assert printed[3] == "8.0"


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
