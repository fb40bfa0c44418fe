"""Tests which runs of a session are steps of optimizers, which variables they may
change, and how these are read.
"""

import numpy as np
import pytest

import mp_compat
from mp_compat._tensorflow import trackable
from mp_compat.tools.compare import sessions
from tests import testing
from tests.testing import tf


@pytest.fixture(
  name="graph", params=[True, False], ids=["resource", "reference"], autouse=True
)
def _graph(request):
  """Yields a new default graph with variables of either kind."""
  with tf.Graph().as_default() as graph, tf.variable_scope(
    "", use_resource=request.param
  ):
    yield graph


@pytest.fixture(name="recorded", autouse=True)
def _recorded():
  """Makes graphs record the steps of optimizers."""
  base, replaced = trackable.Trackable, {}
  pending = [base]
  while pending:
    cls = pending.pop()
    pending += type.__subclasses__(cls)
    if "apply_gradients" in vars(cls):
      replaced[cls] = cls.apply_gradients
  sessions.observe_optimizers(
    lambda optimizer: isinstance(optimizer, mp_compat.MixedPrecisionLossScaleOptimizer)
  )
  yield
  del base.__init_subclass__
  for cls, apply in replaced.items():
    cls.apply_gradients = apply


def effects(*elements, fed=()):
  """Returns the variables that a run may change, those that have gradients in it, and
  the decisions of its steps.
  """
  found = sessions.effects_of(
    tf.get_default_graph(), elements, frozenset(tensor.name for tensor in fed)
  )
  assert not any(step.is_marked for step in found.steps)
  return (
    found.written,
    frozenset().union(*[step.variables for step in found.steps]),
    found.decisions,
  )


def minimize(x):
  w = tf.get_variable("w", [], initializer=tf.zeros_initializer())
  return tf.train.MomentumOptimizer(0.1, 0.9).minimize(
    tf.square(w - x), tf.train.get_or_create_global_step()
  )


NAMES, TRAINED = frozenset({"w", "w/Momentum", "global_step"}), frozenset({"w"})


@pytest.mark.usefixtures("control_flow")
def test_steps_of_optimizers_train_variables():
  op = minimize(tf.placeholder(tf.float32, []))
  assert effects(op) == (NAMES, TRAINED, [])
  assert effects(tf.group(op)) == (NAMES, TRAINED, [])


class Descent(tf.train.Optimizer):
  """An optimizer that is defined before optimizers are observed, and assigns new values
  itself.
  """

  def apply_gradients(self, grads_and_vars, global_step=None, name=None):
    return tf.group(
      *[variable.assign(variable - 0.1 * grad) for grad, variable in grads_and_vars]
    )


def test_custom_optimizers_train_variables():
  class Later(Descent):
    def apply_gradients(self, grads_and_vars, global_step=None, name=None):
      return super().apply_gradients(iter(list(grads_and_vars)), global_step, name)

  class Mixin:
    def apply_gradients(self, grads_and_vars, global_step=None, name=None):
      return tf.group(
        *[variable.assign(variable - 0.1 * grad) for grad, variable in grads_and_vars]
      )

  class Mixed(Mixin, tf.train.Optimizer):
    pass

  for number, cls in enumerate([Descent, Later, Mixed]):
    name = "w{}".format(number)
    w = tf.get_variable(name, [], initializer=tf.zeros_initializer())
    op = cls(False, "Custom").minimize(
      tf.square(w - tf.placeholder(tf.float32, [])), var_list=[w]
    )
    assert effects(op) == (frozenset({name}), frozenset({name}), [])


@pytest.mark.usefixtures("control_flow")
def test_runs_tell_steps_that_they_execute(graph):
  with tf.variable_scope("", use_resource=True):
    x = tf.placeholder(tf.float32, [])
    ws = [
      tf.get_variable(name, [], initializer=tf.zeros_initializer())
      for name in ("w", "v")
    ]
  descend = tf.train.GradientDescentOptimizer(0.1)
  first, second = [
    lambda w=w: tf.group(descend.minimize(tf.square(w - x), var_list=[w])) for w in ws
  ]

  def decay():
    return tf.group(ws[0].assign(ws[0] * 0.5))

  def loop():
    def body(i):
      with tf.control_dependencies([first()]):
        return i + 1.0

    return tf.while_loop(lambda i: i < x, body, [0.0])

  def called(step):
    @testing.tensorflow.function(autograph=False)
    def function():
      with tf.control_dependencies([step()]):
        return tf.constant(1.0)

    return lambda: tf.group(function())

  rows = [
    (tf.cond(x > 0, first, second), {-1: "v", 1: "w"}),
    (
      tf.cond(x > 0, lambda: tf.group(tf.cond(x > 1, first, decay)), decay),
      {-1: "", 1: "", 2: "w"},
    ),
    (tf.cond(x > 0, called(first), decay), {-1: "", 1: "w"}),
    (tf.cond(x > 0, decay, decay), {-1: "", 1: ""}),
    (tf.case([(x > 1, first), (x > 0, second)], decay), {0: "", 1: "v", 2: "w"}),
    (loop(), {0: "", 1: "w", 2: "ww"}),
    (called(lambda: tf.cond(x > 0, first, decay))(), {-1: "", 1: "w"}),
    (tf.group(tf.cond(x > 0, first, decay), second()), {-1: "v", 1: "vw"}),
  ]
  with tf.Session() as sess:
    sess.run(tf.global_variables_initializer())
    for row, (element, expected) in enumerate(rows):
      found = sessions.effects_of(graph, tf.nest.flatten(element))
      for value, names in expected.items():
        sess.run(element, {x: value})
        steps = sessions.take_executed(found.steps)
        assert sorted(name for step in steps for name in step.variables) == sorted(
          names
        ), (row, value)
        assert any(step.is_marked for step in found.steps) or len(found.steps) == len(
          names
        )


def test_runs_tell_only_their_own_steps(graph):
  """As if two threads had run two steps at the same time."""
  x, descend = tf.placeholder(tf.float32, []), tf.train.GradientDescentOptimizer(0.1)
  with tf.variable_scope("", use_resource=True):
    variables = [
      tf.get_variable(name, [], initializer=tf.zeros_initializer())
      for name in ("w", "v")
    ]
  ops = [
    tf.cond(
      x > 0.0,
      lambda w=w: tf.group(descend.minimize(tf.square(w - x), var_list=[w])),
      tf.no_op,
    )
    for w in variables
  ]
  with tf.Session() as sess:
    sess.run(tf.global_variables_initializer())
    sess.run(ops, {x: 1.0})
  for op, name in zip(ops, ("w", "v")):
    steps = sessions.take_executed(sessions.effects_of(graph, [op]).steps)
    assert [step.variables for step in steps] == [{name}]


def test_other_assignments_do_not_train(graph):
  op = minimize(tf.placeholder(tf.float32, []))
  w = tf.global_variables("w")[0]
  init, saver = tf.global_variables_initializer(), tf.train.Saver()
  assert effects(init) == (NAMES, frozenset(), [])
  assert effects(graph.as_graph_element(saver.saver_def.restore_op_name)) == (
    NAMES,
    frozenset(),
    [],
  )
  save = graph.as_graph_element(saver.saver_def.save_tensor_name)
  assert (
    effects(save)
    == effects(tf.get_variable("other", []).read_value())
    == (frozenset(), frozenset(), [])
  )
  assert effects(tf.assign(w, w.read_value() * 2.0)) == (
    frozenset({"w"}),
    frozenset(),
    [],
  )
  assert effects(op, init)[1] == TRAINED


def test_decisions_of_executed_steps_are_found():
  class Scale:
    def update(self, apply):
      return None, apply

  class Inverted(Scale):
    def update(self, apply):
      update_op, apply = super().update(apply)
      return update_op, tf.logical_not(apply)

  for cls in (Scale, Inverted, Scale):
    sessions.observe_decisions(cls, "update", lambda _, result: [result[1]])
  apply = tf.placeholder(tf.bool, [])
  x = tf.placeholder(tf.float32, [])
  _, decision = Inverted().update(apply)
  Scale().update(tf.identity(apply))  # of a step that is not run
  with tf.control_dependencies([decision]):
    op = minimize(x)
  assert effects(op) == (NAMES, TRAINED, [decision])
  assert effects(decision)[:2] == (frozenset(), frozenset())


def test_fed_tensors_execute_nothing():
  with tf.control_dependencies([minimize(tf.placeholder(tf.float32, []))]):
    after = tf.identity(1.0)
  assert effects(after * 2.0) == (NAMES, TRAINED, [])
  assert effects(after * 2.0, fed=[after]) == (frozenset(), frozenset(), [])


def test_steps_of_this_package_are_known():
  x = tf.placeholder(tf.float32, [])
  plain = minimize(x)
  opt = mp_compat.MixedPrecisionLossScaleOptimizer(
    tf.train.AdamOptimizer(), 8.0, skip_nonfinite=False
  )
  scaled = opt.minimize(tf.square(tf.trainable_variables()[0] - x))
  found = [
    sessions.effects_of(tf.get_default_graph(), [op])
    for op in (plain, scaled, tf.group(plain, scaled))
  ]
  assert [any(step.is_scaled for step in each.steps) for each in found] == [
    False,
    True,
    True,
  ]


def test_other_methods_of_that_name_stay():
  class Helper(trackable.Trackable):
    @staticmethod
    def apply_gradients(opt, grads_and_vars):
      return opt, grads_and_vars

  class Model(trackable.Trackable):
    def apply_gradients(self, x):
      return x + 1.0

  assert Helper().apply_gradients(1, 2) == (1, 2)
  assert (
    tf.function(Model().apply_gradients).get_concrete_function(tf.constant(1.0))
    is not None
  )


def test_local_variables_do_not_count(graph):
  local = tf.get_variable(
    "local", [], collections=[tf.GraphKeys.LOCAL_VARIABLES], trainable=False
  )
  assert effects(tf.assign_add(local, 1.0)) == (frozenset(), frozenset(), [])
  assert sessions.variable_values(graph) == {}


def test_reading_keeps_graph_unchanged(graph):
  x = tf.placeholder(tf.float32, [])
  with tf.control_dependencies([minimize(x)]):
    tf.get_variable("w2", [], initializer=tf.ones_initializer()).read_value()
  with testing.session() as sess:
    graph.finalize()
    tensors = sessions.variable_values(graph)
    assert set(tensors) == {"w", "w/Momentum", "global_step", "w2"}
    assert sessions.read(sess, tensors) == {}
    sess.run(graph.get_operation_by_name("w/Assign"))
    assert sessions.read(sess, tensors) == {"w": np.float32(0)}
