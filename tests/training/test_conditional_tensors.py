"""Tests of tensors that the inner optimizer builds in apply_gradients and that are used
elsewhere.
"""

import functools
import time

import numpy as np
import pytest

import mp_compat
from tests import testing
from tests.testing import Optimizer
from tests.testing import tf

pytestmark = pytest.mark.usefixtures("graph", "control_flow")


class StartingWeights(tf.train.GradientDescentOptimizer):
  """Keeps a value that `initial` computes in `apply_gradients`, like elastic averaging
  keeps the starting weights.
  """

  def __init__(self, initial):
    super().__init__(1.0)
    self._initial = initial

  def apply_gradients(self, grads_and_vars, *args, **kwargs):
    grads_and_vars = list(grads_and_vars)
    self.kept = tf.Variable(
      self._initial(grads_and_vars[0][1]),
      trainable=False,
      name="kept",
      use_resource=True,
    )
    return super().apply_gradients(grads_and_vars, *args, **kwargs)


def kept_after_assignment(training, inner):
  """Returns what `inner` keeps if `w` is [7, 8] when `kept` is initialized."""
  for op in (
    training.w.initializer,
    training.w.assign([7.0, 8.0]),
    inner.kept.initializer,
  ):
    training.session.run(op)
  return training.session.run(inner.kept)


def current_or_initial(variable):
  return tf.cond(
    tf.is_variable_initialized(variable),
    variable.read_value,
    lambda: variable.initial_value,
  )


def constant_of_a_branch(variable):
  del variable
  flag = tf.placeholder_with_default(True, [])
  return tf.cond(flag, lambda: tf.constant([3.0, 4.0]), lambda: tf.constant([0.0, 0.0]))


def nested_branches(variable):
  flag = tf.placeholder_with_default(False, [])

  def inner():
    return tf.cond(
      flag, lambda: variable.initial_value, lambda: 2.0 * variable.read_value()
    )

  return 1.0 + tf.cond(
    tf.placeholder_with_default(True, []), inner, lambda: tf.constant([0.0, 0.0])
  )


def loop(variable):
  return tf.map_fn(lambda x: 2.0 * x, variable.read_value())


def case_of_three(variable):
  flags = [tf.placeholder_with_default(value, []) for value in (False, True)]
  return tf.case(
    [
      (flags[0], lambda: tf.constant([1.0, 1.0])),
      (flags[1], lambda: variable.read_value() - 2.0),
    ],
    default=lambda: tf.constant([0.0, 0.0]),
  )


@pytest.mark.parametrize(
  "initial, expected",
  [
    (current_or_initial, [7.0, 8.0]),
    (constant_of_a_branch, [3.0, 4.0]),
    (nested_branches, [15.0, 17.0]),
    (case_of_three, [5.0, 6.0]),
    (loop, [14.0, 16.0]),
    (lambda variable: lambda: 2.0 * variable.read_value(), [14.0, 16.0]),
  ],
)
@pytest.mark.parametrize(
  "wrap",
  [
    pytest.param(lambda opt: opt, id="unwrapped", marks=pytest.mark.matrix),
    pytest.param(lambda opt: Optimizer(opt, "dynamic"), id="wrapped"),
  ],
)
def test_initial_value_takes_right_branch(wrap, initial, expected):
  training = testing.Training()
  inner = StartingWeights(initial)
  wrap(inner).minimize(training.loss)
  for _ in range(3):  # with both branches alive, either value could arrive
    np.testing.assert_array_equal(kept_after_assignment(training, inner), expected)


def built_once(build):
  """Returns a learning rate that builds its tensor when it is first called."""
  return functools.lru_cache(maxsize=None)(build)


def in_a_nested_branch(number, factor):
  factor = factor.read_value()
  return tf.cond(number < 1.0, lambda: tf.constant(1.0), lambda: tf.pow(factor, number))


@pytest.mark.parametrize("in_loop", [False, True], ids=["graph", "loop"])
@pytest.mark.parametrize("use_resource", [True, False], ids=["resource", "reference"])
@pytest.mark.parametrize(
  "build",
  [
    lambda number, factor: tf.pow(factor.read_value(), number),
    in_a_nested_branch,
    # with an Assert
    lambda number, _: tf.train.piecewise_constant(number, [0.5, 1.5], [1.0, 0.5, 0.25]),
  ],
)
def test_step_uses_tensor_of_skipped_step(build, use_resource, in_loop):
  """The first optimizer builds the learning rate; its overflow must not skip the second
  one's steps.
  """
  if in_loop and tf.control_flow_v2_enabled():
    pytest.skip("in functions, TensorFlow raises an error: the tensor is out of scope")
  with tf.variable_scope("", use_resource=use_resource):
    d, g, factor = [
      tf.get_variable(name, initializer=value)
      for name, value in [("d", 0.0), ("g", 0.0), ("f", 0.5)]
    ]
  x, number = tf.placeholder(tf.float32, []), tf.placeholder(tf.float32, [])
  rate = built_once(lambda: build(number, factor))

  def step(i):
    with tf.control_dependencies([tf.no_op()]):  # such as UPDATE_OPS
      d_op = Optimizer(tf.train.GradientDescentOptimizer(rate), "dynamic").minimize(
        d * x, var_list=[d]
      )
    g_op = Optimizer(tf.train.GradientDescentOptimizer(rate), "dynamic").minimize(
      -1.0 * g, var_list=[g]
    )
    with tf.control_dependencies([d_op, g_op]):
      return tf.add(i, 1)

  train_op = tf.while_loop(lambda i: i < 1, step, [0]) if in_loop else step(0)
  with testing.initialized_session() as sess:
    for index, value in enumerate([1.0, np.inf, np.nan]):
      sess.run(train_op, {x: value, number: index})
    assert sess.run([d, g]) == [-1.0, 1.75]


def test_shared_tensor_is_built_once():
  variables = [tf.get_variable("v{}".format(i), initializer=0.0) for i in range(5)]
  number = tf.placeholder(tf.float32, [])
  rate = built_once(lambda: tf.pow(0.5, number))
  for _ in range(2):
    Optimizer(tf.train.GradientDescentOptimizer(rate), 8.0).minimize(
      tf.add_n(variables)
    )
  assert sum(op.type == "Pow" for op in tf.get_default_graph().get_operations()) == 1


class Waiting(tf.train.GradientDescentOptimizer):
  """Applies gradients after an op that is built when `rate` is first called."""

  def __init__(self, rate, waits_for):
    super().__init__(rate)
    self._waits_for = waits_for

  def apply_gradients(self, grads_and_vars, *args, **kwargs):
    with tf.control_dependencies([self._waits_for()]):
      return super().apply_gradients(
        [(1.0 * grad, variable) for grad, variable in grads_and_vars], *args, **kwargs
      )


def train_both(first, second, xs, number=None):
  """Trains `d` with `first` on the gradients `xs`, and `g` with `second` on the
  gradient -1. Returns both.

  The placeholder `number` gets the index of the step.
  """
  d, g = [tf.get_variable(name, initializer=0.0) for name in "dg"]
  x = tf.placeholder(tf.float32, [])
  train_ops = [
    Optimizer(first, "dynamic").minimize(d * x, var_list=[d]),
    Optimizer(second, "dynamic").minimize(-1.0 * g, var_list=[g]),
  ]
  with testing.initialized_session() as sess:
    for index, value in enumerate(xs):
      sess.run(train_ops, {x: value} if number is None else {x: value, number: index})
    return sess.run([d, g])


def halved_slowly(factor):
  time.sleep(0.2)
  return np.float32(factor / 2)


def test_shared_tensor_waits_for_ops_outside():
  with tf.variable_scope("", use_resource=True):
    factor = tf.get_variable("factor", initializer=1.0, trainable=False)
    halved = tf.assign(
      factor,
      tf.reshape(tf.py_func(halved_slowly, [factor.read_value()], tf.float32), []),
    )

    def build():
      with tf.control_dependencies([halved]):
        return factor.read_value()

    rate = built_once(build)
    first, second = [tf.train.GradientDescentOptimizer(rate) for _ in "dg"]
    assert train_both(first, second, [1.0, np.inf]) == [-0.5, 0.75]


@pytest.mark.parametrize(
  "change",
  [tf.identity, lambda tensor: tf.Print(tensor, [tensor])],
  ids=["pow", "print"],
)
def test_step_waits_for_skipped_step(change):
  number = tf.placeholder(tf.float32, [])
  shared = built_once(lambda: change(tf.pow(0.5, number)))
  xs = [1.0, np.inf, np.nan]
  assert train_both(Waiting(1.0, shared), Waiting(shared, shared), xs, number) == [
    -1.0,
    1.75,
  ]


def test_step_does_not_wait_for_empty_ops():
  shared = built_once(tf.no_op)
  assert train_both(Waiting(1.0, shared), Waiting(1.0, shared), [np.inf]) == [0.0, 1.0]


def counted():
  with tf.control_dependencies([incremented()]):
    return tf.constant(1.0) * 2.0


def incremented():
  return tf.group(tf.assign_add(tf.train.get_or_create_global_step(), 1))


def computed_by_a_loop():
  return tf.reduce_sum(
    tf.map_fn(tf.square, tf.placeholder_with_default([1.0, 2.0], [2]))
  )


@pytest.mark.parametrize(
  "make, build",
  [
    (tf.train.GradientDescentOptimizer, lambda: tf.random_uniform([])),
    (
      tf.train.GradientDescentOptimizer,
      lambda: tf.cond(
        tf.placeholder_with_default(True, []),
        lambda: tf.random_uniform([]),
        lambda: tf.constant(1.0),
      ),
    ),
    (tf.train.GradientDescentOptimizer, counted),
    (tf.train.GradientDescentOptimizer, computed_by_a_loop),
    (lambda shared: Waiting(1.0, shared), incremented),
  ],
)
def test_tensor_that_may_be_skipped_raises(make, build):
  if build is computed_by_a_loop and tf.control_flow_v2_enabled():
    pytest.skip("one op, which changes no state")
  global_step = tf.train.get_or_create_global_step()
  w, shared = tf.get_variable("w", initializer=0.0), built_once(build)
  Optimizer(make(shared), 8.0).minimize(w * w, global_step)
  with pytest.raises(ValueError, match="which an earlier apply_gradients.. built"):
    Optimizer(make(shared), 8.0).minimize(w * w, global_step)


def test_steps_skipped_together_share_counter():
  global_step, shared, scale = (
    tf.train.get_or_create_global_step(),
    built_once(incremented),
    mp_compat.DynamicLossScale(),
  )
  x = tf.placeholder(tf.float32, [])
  pairs = []
  for name in "dg":
    variable, opt = (
      tf.get_variable(name, initializer=0.0),
      Optimizer(Waiting(1.0, shared), scale),
    )
    pairs.append((opt, opt.compute_gradients(variable * x, [variable])))
  train_op = mp_compat.apply_gradients_together(pairs)
  with testing.initialized_session() as sess:
    for value in [1.0, np.inf, 1.0]:
      sess.run(train_op, {x: value})
    assert sess.run(tf.trainable_variables() + [global_step]) == [-2.0, -2.0, 2]
