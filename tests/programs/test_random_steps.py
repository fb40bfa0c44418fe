"""Random inner optimizers: a skipped step leaves out all that they do, and only that.

Each program is a sequence of actions in `apply_gradients`, perhaps inside of branches,
loops and functions. Its variables after five steps, one of them an overflow, are those
of the unwrapped optimizer that leaves this step out.

`KINDS` lists what programs are made of: the edges by which an op depends on a gradient,
the ops that run although what they read is not computed, and the rest.
"""

import collections
import functools
import random

import numpy as np
import pytest
import tensorflow

from tests import testing
from tests.testing import Optimizer
from tests.testing import tf

SIZE = 2
STEPS = [[1.0, 2.0], [4.0, -1.0], [np.inf, 1.0], [0.5, 8.0], [2.0, 2.0]]


EDGES = """
  data control reference resource captured carried colocated no_edge
""".split()
LIVE_OPS = ["Switch", "Merge", "ControlTrigger"]
ACTIONS = """
  assign branch loop counting_branch function average table both py_func
""".split()
KINDS = EDGES + LIVE_OPS + ACTIONS


class Builder:
  """Builds the actions of one program; `self.state` are its variables, `self.sums`
  reads of its hash tables, and `self.drawn` counts `KINDS`.
  """

  def __init__(self, seed, shared):
    self._random = random.Random(seed)
    self._shared = shared
    self.state = []
    self.sums = []
    self.drawn = collections.Counter()

  def draw(self, kinds):
    kind = self._random.choice(kinds)
    self.drawn[kind] += 1
    return kind

  def variable(self, name, is_resource=False):
    is_reference = not is_resource and self._random.random() < 0.3
    self.drawn["reference" if is_reference else "resource"] += 1
    with tf.init_scope() if self._random.random() < 0.3 else tf.name_scope("own"):
      made = tf.Variable(
        np.zeros(SIZE, np.float32),
        trainable=False,
        name=name,
        use_resource=not is_reference,
      )
    self.state.append(made)
    return made

  def value(self, grad):
    """Returns a tensor [SIZE] that derives from the gradient or from state."""
    edge = self.draw(["data", "data", "colocated", "no_edge"])
    if edge == "data":
      derived = self._random.choice([grad, 0.25 * grad * grad])
      return self.routed(derived)
    if edge == "colocated":
      with tf.colocate_with(grad):
        return tf.fill([SIZE], 0.5)
    kinds = ["constant", "shared"] + ["state"] * bool(self.state)
    kind = self._random.choice(kinds)
    if kind == "state":
      return 0.5 * self._random.choice(self.state).read_value() + 1.0
    return {
      "constant": lambda: tf.ones([SIZE]),
      "shared": lambda: self._shared * tf.ones([SIZE]),
    }[kind]()

  def routed(self, value):
    """Returns a tensor, perhaps through a Switch or a Merge that the program makes."""
    kind = self._random.choice(["Switch", "Merge", "direct", "direct"])
    if kind == "direct":
      return value
    self.drawn[kind] += 1
    if kind == "Merge":  # runs with the input that is computed
      flag = tf.placeholder_with_default(self._random.random() < 0.5, [])
      if_false, if_true = tf.raw_ops.Switch(data=tf.ones([SIZE]), pred=flag)
      return tf.raw_ops.Merge(inputs=[if_false, if_true + 0.0 * if_true]).output + value
    flag = tf.reduce_sum(value) > self._random.choice([-100.0, 1.0])
    if_false, if_true = tf.raw_ops.Switch(data=value, pred=flag)
    return tf.raw_ops.Merge(inputs=[2.0 * if_false, tf.identity(if_true)]).output

  def awaited(self, grad):
    """Returns an op or a tensor that derives from the gradient, to wait for."""
    kind = self._random.choice(["gradient", "product", "group", "Switch"])
    kind = self._random.choice([kind, "ControlTrigger"])
    if kind == "ControlTrigger":
      self.drawn[kind] += 1
      waited = self._random.choice(["gradient", "change"])
      first = grad if waited == "gradient" else self.assign(grad, 0)
      with tf.control_dependencies([first]):
        return tf.raw_ops.ControlTrigger()
    if kind == "Switch":
      self.drawn[kind] += 1
      with tf.control_dependencies([grad]):
        switched = tf.raw_ops.Switch(
          data=tf.constant(1.0), pred=tf.placeholder_with_default(True, [])
        )
      return switched.output_true.op
    return {
      "gradient": lambda: grad,
      "product": lambda: 2.0 * grad,
      "group": lambda: tf.group(grad),
    }[kind]()

  def assign(self, grad, depth):
    del depth
    variable = self.variable("assigned")
    change = self._random.choice([variable.assign, variable.assign_add])
    return change(self.value(grad))

  def branch(self, grad, depth):
    variable, value = self.variable("branched"), self.value(grad)
    flag = tf.reduce_sum(self.value(grad)) > self._random.choice([-100.0, 1.0])
    return variable.assign_add(
      tf.cond(flag, lambda: 2.0 * value, lambda: tf.ones([SIZE]))
    )

  def loop(self, grad, depth):
    del depth
    variable, value = self.variable("looped"), self.value(grad)
    count = self._random.choice([0, 2])
    is_carried = self.draw(["carried", "captured"]) == "carried"

    def body(i, total, carried):
      return i + 1, total + (carried if is_carried else value), carried

    total = tf.while_loop(
      lambda i, total, carried: i < count,
      body,
      [0, tf.zeros([SIZE]), value if is_carried else tf.zeros([SIZE])],
    )[1]
    return variable.assign_add(total)

  def counting_branch(self, grad, depth):
    del depth
    variable, value = self.variable("counted", True), self.value(grad)
    flag = tf.reduce_sum(value) > self._random.choice([-100.0, 100.0])

    def counted():
      with tf.control_dependencies([variable.assign_add(tf.ones([SIZE]))]):
        return tf.constant(1.0)

    return tf.cond(flag, counted, lambda: tf.constant(0.0))

  def function(self, grad, depth):
    variable, value = self.variable("in_function", True), self.value(grad)

    @tensorflow.function
    def call(argument):
      variable.assign_add(argument)
      variable.assign_add(tf.ones([SIZE]))
      return tf.reduce_sum(argument)

    if self.draw(["captured", "carried"]) == "captured":
      return tensorflow.function(lambda: call(value))()
    return call(value)

  def py_func(self, grad, depth):
    """Adds what a Python function returns, which may depend on nothing."""
    del depth
    variable, value = self.variable("computed"), self.value(grad)
    arguments = self._random.choice([[], [value]])
    computed = tf.py_func(
      lambda *values: np.float32(1.0 + sum(map(np.sum, values))), arguments, tf.float32
    )
    return variable.assign_add(computed * tf.ones([SIZE]))

  def average(self, grad, depth):
    del depth
    # With control flow v2, the initial value of an average cannot read a reference.
    variable = self.variable("averaged", tf.control_flow_v2_enabled())
    averages = tf.train.ExponentialMovingAverage(0.5)
    with tf.control_dependencies([variable.assign_add(self.value(grad))]):
      applied = averages.apply([variable])
    self.state.append(averages.average(variable))
    return applied

  def table(self, grad, depth):
    """Adds to a value in a hash table: in the order of the actions, or 1.0 in none."""
    del depth
    value = tf.reduce_sum(self.value(grad))
    with tf.control_dependencies(None):
      handle = tf.raw_ops.MutableHashTableV2(
        key_dtype=tf.int64, value_dtype=tf.float32, use_node_name_sharing=True
      )
      key, zero = tf.constant([7], tf.int64), tf.constant(0.0)
      find = functools.partial(
        tf.raw_ops.LookupTableFindV2, table_handle=handle, keys=key, default_value=zero
      )
      insert = functools.partial(
        tf.raw_ops.LookupTableInsertV2, table_handle=handle, keys=key
      )
      self.sums.append(find())
      counted = insert(values=find() + 1.0)
    if self._random.random() < 0.5:
      return counted
    return insert(values=find() + value)

  def both(self, grad, depth):
    if depth == 0:
      return self.assign(grad, depth)
    with tf.control_dependencies([self.action(grad, depth - 1)]):
      return self.action(grad, depth - 1)

  def action(self, grad, depth=2):
    """Builds a random action, which may wait for the gradient without reading it."""
    build = getattr(self, self.draw(ACTIONS + ["both"]))
    if self._random.random() < 0.7:
      return build(grad, depth)
    self.drawn["control"] += 1
    with tf.control_dependencies([self.awaited(grad)]):
      return build(grad, depth)


class Random(tf.train.MomentumOptimizer):
  """Runs random actions in its step, and has a slot of its own."""

  def __init__(self, builder, count):
    super().__init__(0.5, 0.5)
    self._builder, self._count = builder, count

  def apply_gradients(self, grads_and_vars, *args, **kwargs):
    grads_and_vars = list(grads_and_vars)
    ((grad, variable),) = grads_and_vars
    own = self._zeros_slot(variable, "own", "Own")
    self._builder.state.append(own)
    action = tf.assign_add(own, self._builder.value(grad))
    for _ in range(self._count):  # one after the other: an action reads earlier state
      with tf.control_dependencies([action]):
        action = self._builder.action(grad)
    applied = super().apply_gradients(grads_and_vars, *args, **kwargs)
    return tf.group(applied, action)


def build(seed, wrap):
  """Returns the training, the variables, the builders and the train ops of two
  optimizers.
  """
  training = testing.Training()
  shared = 1.0 + tf.cast(training.global_step.read_value(), tf.float32)
  builders = [Builder(seed, shared), Builder(seed + 1, shared)]
  other = tf.get_variable("other", [SIZE], initializer=tf.zeros_initializer())
  losses = [training.loss, tf.reduce_sum(other * training.x)]
  variables, train_ops = [training.w, other], []
  for builder, loss, variable in zip(builders, losses, variables):
    opt = wrap(Random(builder, 3))
    train_ops.append(opt.minimize(loss, var_list=[variable]))
  return training, variables, builders, train_ops


def train(seed, wrap, steps):
  """Returns the values of all variables of two optimizers after each step."""
  with tf.Graph().as_default():
    training, variables, builders, train_ops = build(seed, wrap)
    values = []
    with testing.initialized_session() as sess:
      for x in steps:
        sess.run(train_ops, {training.x: x})
        read = list(variables)
        for builder in builders:
          read += builder.state + builder.sums
        values.append([sess.run(one).tolist() for one in read])
    return values


@pytest.mark.usefixtures("control_flow")
@pytest.mark.parametrize(
  "seed",
  [pytest.param(s, marks=[pytest.mark.matrix] * (s > 0)) for s in range(0, 60, 3)],
)
def test_skipped_step_leaves_out_random_actions(seed):
  finite = [x for x in STEPS if np.all(np.isfinite(x))]
  expected = train(seed, lambda opt: opt, finite)
  wrapped = train(seed, functools.partial(Optimizer, loss_scale=8.0), STEPS)
  skipped = STEPS.index([np.inf, 1.0])
  start_of_skipped = wrapped.pop(skipped)
  assert wrapped == expected
  assert start_of_skipped == wrapped[skipped - 1]


def test_ten_programs_have_all_kinds(control_flow):
  del control_flow
  drawn = collections.Counter()
  for seed in range(0, 30, 3):
    with tf.Graph().as_default():
      _, _, builders, _ = build(seed, lambda opt: opt)
    for builder in builders:
      drawn += builder.drawn
  assert not set(KINDS) - set(drawn)
