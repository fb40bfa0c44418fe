"""Tests which runs of a session are steps of optimizers, which variables they may
change, and how these are read.
"""

import numpy as np
import pytest
from tensorflow.core.protobuf import config_pb2

import mp_compat
from mp_compat._tensorflow import trackable
from mp_compat.tools.compare import loss_scaling
from mp_compat.tools.compare import run_effects
from mp_compat.tools.compare import sessions
from mp_compat.tools.compare import step_building
from mp_compat.tools.compare import steps
from mp_compat.training import step
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


KNOWN = []  # the steps that were recorded


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
  step_building.observe_optimizers(
    lambda optimizer: isinstance(
      optimizer, (mp_compat.MixedPrecisionLossScaleOptimizer, Scaled)
    ),
    KNOWN.append,
  )
  yield
  del base.__init_subclass__
  for cls, apply in replaced.items():
    cls.apply_gradients = apply


# Runs Python functions in the thread of the caller, where their coverage is measured.
SAME_THREAD = tf.RunOptions(inter_op_thread_pool=-1)


def effects(*elements, fed=()):
  """Returns the variables that a run may change, those that have gradients in it, and
  the decisions of its steps.
  """
  found = run_effects.effects_of(
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


def called(step):
  """Returns a function that calls `step` in a function of TensorFlow."""

  @testing.tensorflow.function(autograph=False)
  def function():
    with tf.control_dependencies([step()]):
      return tf.constant(1.0)

  return lambda: tf.group(function())


@pytest.mark.each_choice
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
      found = run_effects.effects_of(graph, tf.nest.flatten(element))
      for value, names in expected.items():
        sess.run(element, {x: value})
        executions = steps.take_executions(found.steps, {})
        executed = sorted(name for each in executions for name in each.variables)
        assert executed == sorted(names), (row, value)
        assert all(each.applied for each in executions), (row, value)
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
    executions = steps.take_executions(run_effects.effects_of(graph, [op]).steps, {})
    assert [each.variables for each in executions] == [{name}]


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


class Scale:
  """A loss scale that decides what it is told."""

  def update(self, apply):
    return None, apply


class Inverted(Scale):
  def update(self, apply):
    update_op, apply = super().update(apply)
    return update_op, tf.logical_not(apply)


class Scaled(tf.train.GradientDescentOptimizer):
  """An optimizer with a loss scale, which applies each step."""

  def __init__(self, scale, apply):
    super().__init__(0.1)
    self._scale, self._apply = scale, apply
    for cls in (Scale, Inverted, Scale):
      step_building.observe_decisions(cls, "update", lambda _, result: [result[1]])

  def apply_gradients(self, grads_and_vars, global_step=None, name=None):
    _, self.decision = self._scale.update(self._apply)
    with tf.control_dependencies([self.decision]):
      return super().apply_gradients(grads_and_vars, global_step, name)


def test_decisions_of_executed_steps_are_found(graph):
  apply = tf.placeholder(tf.bool, [])
  x = tf.placeholder(tf.float32, [])
  w = tf.get_variable("w", [], initializer=tf.zeros_initializer())
  Scaled(Scale(), tf.identity(apply)).minimize(x * w)  # It is not run.
  opt = Scaled(Inverted(), apply)
  op = opt.minimize(x * w)
  assert effects(op) == ({"w"}, TRAINED, [opt.decision])
  assert effects(opt.decision)[:2] == (frozenset(), frozenset())
  found = run_effects.effects_of(graph, [op])
  for decided, applied in [(True, True), (False, False)]:
    executions = steps.take_executions(found.steps, {opt.decision.name: decided})
    assert {each.applied for each in executions if each.is_scaled} == {applied}
  executions = steps.take_executions(found.steps, {})  # not read
  assert {each.applied for each in executions if each.is_scaled} == {None}


@pytest.mark.usefixtures("control_flow")
def test_steps_in_control_flow_tell_decisions(graph):
  apply = tf.placeholder(tf.bool, [])
  x = tf.placeholder(tf.float32, [])
  with tf.variable_scope("", use_resource=True):
    w = tf.get_variable("w", [], initializer=tf.zeros_initializer())

  def train():
    return tf.group(Scaled(Scale(), tf.identity(apply)).minimize(x * w))

  op = tf.cond(x > 0.0, train, tf.no_op)
  found = run_effects.effects_of(graph, [op])
  assert not found.decisions
  with tf.Session() as sess:
    sess.run(w.initializer)
    for value, decided, expected in [
      (1, True, {True}),
      (1, False, {False}),
      (-1, True, set()),
    ]:
      sess.run(op, {x: value, apply: decided}, options=SAME_THREAD)
      executions = steps.take_executions(found.steps, {})
      assert {each.applied for each in executions if each.is_scaled} == expected


class Outer(Scaled):
  """Calls an optimizer with a loss scale in a branch."""

  def apply_gradients(self, grads_and_vars, global_step=None, name=None):
    inner = Scaled(self._scale, self._apply)
    return tf.cond(
      tf.placeholder_with_default(True, []),
      lambda: tf.group(inner.apply_gradients(grads_and_vars)),
      tf.no_op,
    )


class Copied(Scale):
  """A loss scale that decides with an op of the branch in which it is called."""

  def update(self, apply):
    return None, tf.identity(apply)


@pytest.mark.usefixtures("control_flow")
def test_marks_read_no_decisions_of_branches_inside(graph):
  step_building.observe_decisions(Copied, "update", lambda _, result: [result[1]])
  apply = tf.placeholder(tf.bool, [])
  x = tf.placeholder(tf.float32, [])
  with tf.variable_scope("", use_resource=True):
    w = tf.get_variable("w", [], initializer=tf.zeros_initializer())

  def train():
    return tf.group(Outer(Copied(), apply).minimize(x * w))

  op = tf.cond(x > 0.0, train, tf.no_op)
  found = run_effects.effects_of(graph, [op])
  outer = min(step.call for step in found.steps)
  with tf.Session() as sess:
    sess.run(w.initializer)
    for decided in (True, False):
      sess.run(op, {x: 1.0, apply: decided}, options=SAME_THREAD)
      for each in steps.take_executions(found.steps, {}):
        assert each.applied == (None if each.call == outer else decided)


class Assigning(tf.train.Optimizer):
  """An optimizer that takes numbers as gradients, and returns one, too."""

  def apply_gradients(self, grads_and_vars, global_step=None, name=None):
    built = [1.0]
    for grad, variable in grads_and_vars:
      if isinstance(grad, tf.IndexedSlices):
        built.append(variable.scatter_sub(grad))
      else:
        built.append(variable.assign_sub(grad))
    return built


@pytest.mark.usefixtures("control_flow")
@pytest.mark.parametrize("kinds", ["tensor", "slices", "number tensor", "number"])
def test_steps_in_branches_tell_executions_for_all_gradients(kinds, graph):
  x = tf.placeholder(tf.float32, [])
  with tf.variable_scope("", use_resource=True):
    ws = [tf.get_variable(kind, [2]) for kind in kinds.split()]

  def train():
    grads = {
      "tensor": tf.stack([x, x]),
      "slices": tf.IndexedSlices(tf.expand_dims(x, 0), [1], [2]),
      "number": np.float32([1.0, 2.0]),
    }
    pairs = [(grads[kind], w) for kind, w in zip(kinds.split(), ws)]
    built = Assigning(False, "Assigning").apply_gradients(pairs)
    ops = tf.get_default_graph().get_operations()
    assert not any(op.type == "UnsortedSegmentSum" for op in ops)  # no dense copy
    return tf.group(*built[1:])

  # A function that is not called runs ops without input, such as a mark of numbers.
  branch = train if kinds == "number" else called(train)
  op = tf.cond(x > 0.0, branch, tf.no_op)
  found = run_effects.effects_of(graph, [op])
  with tf.Session() as sess:
    sess.run(tf.global_variables_initializer())
    for value, count in [(1.0, 1), (-1.0, 0), (2.0, 1)]:
      before = sess.run(ws)
      sess.run(op, {x: value})
      assert len(steps.take_executions(found.steps, {})) == count
      changed = np.any(np.not_equal(before, sess.run(ws)), axis=1)
      assert all(changed == bool(count))


@pytest.mark.usefixtures("control_flow")
def test_imported_steps_in_control_flow_tell_decisions(graph):
  """An imported graph has no contexts that tell which tensors cannot be fetched."""
  known = len(KNOWN)
  x = tf.placeholder(tf.float32, [], name="x")
  with tf.variable_scope("", use_resource=True):
    w = tf.get_variable("w", [], initializer=tf.zeros_initializer())

  def train():
    return tf.group(Scaled(Scale(), x > 1.0).minimize(x * w))

  op = tf.group(tf.cond(x > 0.0, train, tf.no_op))
  with tf.Graph().as_default() as imported, tf.Session() as sess:
    tf.import_graph_def(graph.as_graph_def(), name="")
    steps.find_imported(imported, KNOWN[known:])
    op = imported.get_operation_by_name(op.name)
    sess.run(w.initializer.name)
    for value, expected in [(-1, set()), (1, {False}), (2, {True})]:
      found = run_effects.effects_of(imported, [op])
      sess.run([op, found.decisions], {"x:0": value})
      executions = steps.take_executions(found.steps, {})
      assert {each.applied for each in executions if each.is_scaled} == expected


def test_imported_steps_are_found(graph):
  x = tf.placeholder(tf.float32, [])
  w = tf.get_variable("w", [], initializer=tf.zeros_initializer())
  op = Scaled(Scale(), x > 0.0).minimize(x * w, name="train")
  known = KNOWN[-2:]  # the step, and that of its base class
  for prefix in ("", "one/", "one/two/"):
    with tf.Graph().as_default() as imported:
      tf.import_graph_def(graph.as_graph_def(), name=prefix)
      fetched = imported.get_operation_by_name(prefix + op.name)
      assert not run_effects.effects_of(imported, [fetched]).steps
      for _ in range(2):  # The second finds nothing new.
        steps.find_imported(imported, known)
      found = run_effects.effects_of(imported, [fetched])
      assert [step.variables for step in found.steps] == [{prefix + "w"}] * 2
      assert len(found.decisions) == 1
      assert steps.trained_variables(imported) == {prefix + "w"}
  before = len(run_effects.effects_of(graph, [op]).steps)
  steps.find_imported(graph, known)  # They were built here.
  assert len(run_effects.effects_of(graph, [op]).steps) == before


@pytest.mark.parametrize("variables", [[], ["v", "w"]], ids=["none", "another"])
def test_steps_of_other_variables_are_not_found(graph, variables):
  """A step in a function has no ops by which it could be told from another one."""
  tf.get_variable("v", [])
  known = steps.KnownStep(
    op_types={}, variables=variables, is_scaled=True, decisions=[], told=[]
  )
  steps.find_imported(graph, [known])
  assert not steps.steps_in(graph)


def test_decisions_that_no_run_executes_are_not_read(graph):
  class Ignoring(Scaled):
    def apply_gradients(self, grads_and_vars, global_step=None, name=None):
      self._scale.update(self._apply)
      return super(Scaled, self).apply_gradients(grads_and_vars, global_step, name)

  x = tf.placeholder(tf.float32, [])
  w = tf.get_variable("w", [], initializer=tf.zeros_initializer())
  op = Ignoring(Scale(), x > 0.0).minimize(x * w)
  assert effects(op) == ({"w"}, TRAINED, [])
  assert any(step.decisions for step in steps.steps_in(graph))


@pytest.mark.usefixtures("eager")
def test_eager_steps_are_not_recorded(graph, monkeypatch):
  for name in ("apply", "decide"):
    monkeypatch.setattr(step, name, getattr(step, name))
  loss_scaling.observe_steps(KNOWN.append)
  known = len(KNOWN)
  w = tf.get_variable("w", initializer=[0.0], use_resource=True)
  for opt, expected in [
    (tf.train.GradientDescentOptimizer(0.5), -0.5),
    (
      mp_compat.MixedPrecisionLossScaleOptimizer(
        tf.train.GradientDescentOptimizer(0.5), 8.0
      ),
      -1.0,
    ),
  ]:
    opt.minimize(lambda: w * 1.0, var_list=[w])
    assert w.numpy() == [expected]
  assert len(KNOWN) == known and not steps.steps_in(graph)


class Failing(tf.train.GradientDescentOptimizer):
  """An optimizer that raises an error when it has built its ops."""

  def apply_gradients(self, grads_and_vars, global_step=None, name=None):
    tf.group(*[variable.assign(variable - grad) for grad, variable in grads_and_vars])
    raise ValueError("It cannot be applied.")


def test_steps_that_fail_to_build_are_unknown(graph):
  x = tf.placeholder(tf.float32, [])
  w = tf.get_variable("w", [], initializer=tf.zeros_initializer())
  known = len(KNOWN)
  with pytest.raises(ValueError):
    Failing(0.1).minimize(x * w)
  assert not steps.steps_in(graph) and not steps.open_steps_in(graph)
  assert not steps.trained_variables(graph) and len(KNOWN) == known


@pytest.mark.usefixtures("control_flow")
def test_marks_read_one_gradient():
  x = tf.placeholder(tf.float32, [])
  with tf.variable_scope("", use_resource=True):
    ws = [tf.get_variable(name, []) for name in "abcdefgh"]
  built = []

  def train():
    graph = tf.get_default_graph()
    opt = tf.train.GradientDescentOptimizer(0.1)
    pairs = [(x, w) for w in ws]
    before = len(graph.get_operations())
    train_op = opt.apply_gradients(pairs)
    built.append([op.type for op in graph.get_operations()[before:]])
    return tf.group(train_op)

  tf.cond(x > 0.0, train, tf.no_op)
  assert built[0].count("PyFunc") + built[0].count("EagerPyFunc") == 1
  assert built[0].count("Reshape") == built[0].count("StridedSlice") == 1


@pytest.mark.usefixtures("control_flow")
def test_steps_that_xla_compiles_have_no_mark(graph):
  """XLA compiles no Python function."""
  x = tf.placeholder(tf.float32, [])
  w = tf.get_variable("w", [], initializer=tf.zeros_initializer(), use_resource=True)

  def train():
    opt = tf.train.GradientDescentOptimizer(0.5)
    return tf.group(opt.apply_gradients([(x, w)]))

  def train_compiled():
    return tf.group(tf.xla.experimental.compile(train))

  op = tf.cond(x > 0.0, train_compiled, tf.no_op)
  assert not any(step.is_marked for step in steps.steps_in(graph))
  with tf.Session() as sess:
    sess.run(w.initializer)
    sess.run(op, {x: 2.0})
    assert sess.run(w) == -1.0


def test_functions_change_variables():
  x = tf.placeholder(tf.float32, [])
  w = tf.get_variable("w", [], use_resource=True)

  @tf.function
  def train():
    tf.raw_ops.ResourceApplyGradientDescent(var=w.handle, alpha=0.1, delta=x)
    return x

  @tf.function
  def assign():
    w.assign(x)
    return x

  assert effects(train()) == effects(assign()) == ({"w"}, frozenset(), [])


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
    run_effects.effects_of(tf.get_default_graph(), [op])
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


def observe_reads(decisions, monkeypatch):
  """Makes sessions read `decisions` with each run; returns a list that grows by the
  values of each.
  """
  base, found = sessions.sessions.Base, []
  for name in ("_run", "close", "make_callable", "_make_callable_from_options"):
    monkeypatch.setattr(base, name, getattr(base, name))

  def around(session, elements, fed, run):
    result, read = run(decisions)
    found.append(read)
    return result

  sessions.observe(around)
  return found


def test_partial_runs_read_only_what_they_feed(graph, monkeypatch):
  """They may fetch nothing that was not named before they began."""
  x = tf.placeholder(tf.float32, [])
  decisions = [x > 0.0, tf.placeholder_with_default(True, [])]
  found = observe_reads(decisions, monkeypatch)
  doubled, feeds = x * 2.0, {x: 3.0, decisions[1]: False}
  with tf.Session(graph=graph) as sess:
    assert sess.run(doubled, feeds) == 6.0
    handle = sess.partial_run_setup([doubled], list(feeds))
    assert sess.partial_run(handle, doubled, feeds) == 6.0
  first, second = [tensor.name for tensor in decisions]
  assert found == [{first: True, second: False}, {second: False}]


def test_callables_read_decisions_that_are_not_fed(graph, monkeypatch):
  x = tf.placeholder(tf.float32, [])
  decisions = [x > 0.0, tf.placeholder_with_default(True, [])]
  found = observe_reads(decisions, monkeypatch)
  doubled = x * 2.0
  options = config_pb2.CallableOptions(
    fetch=[doubled.name], feed=[x.name, decisions[1].name]
  )
  with tf.Session(graph=graph) as sess:
    call = sess._make_callable_from_options(options)
    assert call(np.float32(3.0), np.bool_(False)) == [6.0]
  assert found == [{decisions[0].name: True}]


def test_gradients_of_python_functions_are_not_eager(monkeypatch):
  for module, name in [
    (sessions.sessions.script_ops, "tape_cache"),
    (sessions.sessions.imperative_grad, "imperative_grad"),
    (sessions.sessions.gradients_util, "_GradientsHelper"),
  ]:
    monkeypatch.setattr(module, name, getattr(module, name))
  reported = []
  sessions.on_eager_gradients(lambda: reported.append(True))

  def train_eagerly(value):
    with tf.GradientTape() as tape:
      tape.watch(value)
      result = value * value
    return tape.gradient(result, value)

  x = tf.placeholder(tf.float32, [])
  square = tf.py_function(lambda value: value * value, [x], tf.float32)
  (of_square,) = tf.gradients(square, x)
  (of_other,) = tf.gradients(tf.py_function(train_eagerly, [x], tf.float32), x)
  with tf.Session() as sess:
    assert sess.run(of_square, {x: 3.0}, options=SAME_THREAD) == 6.0
    assert not reported
    assert sess.run(of_other, {x: 3.0}, options=SAME_THREAD) == 2.0
    assert reported == [True]


def test_local_variables_do_not_count(graph):
  local = tf.get_variable(
    "local", [], collections=[tf.GraphKeys.LOCAL_VARIABLES], trainable=False
  )
  assert effects(tf.assign_add(local, 1.0)) == (frozenset(), frozenset(), [])
  assert run_effects.variable_values(graph) == {}


def test_reading_keeps_graph_unchanged(graph):
  x = tf.placeholder(tf.float32, [])
  with tf.control_dependencies([minimize(x)]):
    tf.get_variable("w2", [], initializer=tf.ones_initializer()).read_value()
  with testing.session() as sess:
    graph.finalize()
    tensors = run_effects.variable_values(graph)
    assert set(tensors) == {"w", "w/Momentum", "global_step", "w2"}
    assert sessions.read(sess, tensors) == {}
    sess.run(graph.get_operation_by_name("w/Assign"))
    assert sessions.read(sess, tensors) == {"w": np.float32(0)}
