"""Tests that ops of the inner optimizer that change state do not run in skipped steps,
wherever it builds them.
"""

import functools
import glob
import importlib
import os
import re
import threading
import time

import hypothesis
from hypothesis import strategies as st
import numpy as np
import pytest
import tensorflow
from tensorflow.python.framework import function
from tensorflow.python.ops import functional_ops

import mp_compat
from mp_compat.graph import effects
from mp_compat.graph import gate
from mp_compat.graph import runs
from mp_compat.training import step
from tests import testing
from tests.programs import table
from tests.testing import Optimizer
from tests.testing import tf

# A program in apply_gradients: ("count", what) or (kind, program, ...).
COUNTS = [("count", what) for what in ("constant", "gradient", "variable", "either")]
PROGRAMS = st.recursive(
  st.sampled_from(COUNTS),
  lambda inner: st.one_of(
    st.tuples(st.sampled_from(["loop", "function", "compiled"]), inner),
    st.tuples(st.sampled_from(["branches", "sequence"]), inner, inner),
  ),
  max_leaves=4,
)


class Running(tf.train.GradientDescentOptimizer):
  """Runs a program, which counts in variables, in addition to its step."""

  def __init__(self, program, flag, counters):
    super().__init__(1.0)
    self._program, self._flag, self._counters = program, flag, counters

  def apply_gradients(self, grads_and_vars, *args, **kwargs):
    counters, grads_and_vars = iter(self._counters), list(grads_and_vars)
    counted = build(
      self._program, functools.partial(next, counters), self._flag, grads_and_vars[0][0]
    )
    return tf.group(super().apply_gradients(grads_and_vars, *args, **kwargs), counted)


def build(program, next_counter, flag, grad):
  """Builds a program; returns a scalar float32 tensor that needs all of its counts."""
  kind, *inner = program
  if kind == "count":
    counter, number = next_counter()
    amount = {
      "constant": lambda: 1.0,
      "gradient": lambda: tf.reduce_max(grad),
      "variable": lambda: number + 1.0,
      "either": lambda: tf.cond(
        flag, lambda: tf.reduce_max(grad), lambda: tf.constant(1.0)
      ),
    }[inner[0]]
    with tf.control_dependencies([counter.assign_add(amount())]):
      return tf.constant(1.0)
  parts = [functools.partial(build, part, next_counter, flag, grad) for part in inner]
  if kind == "branches":
    return tf.cond(flag, *parts)
  if kind == "loop":
    return tf.while_loop(
      lambda i, total: i < 2, lambda i, total: (i + 1, total + parts[0]()), [0, 0.0]
    )[1]
  if kind == "sequence":
    with tf.control_dependencies([parts[0]()]):
      return parts[1]()
  if kind == "compiled" and table.VERSION >= (2, 5):
    return tensorflow.function(parts[0], jit_compile=True)()
  return tensorflow.function(parts[0])()


def train(program, wrap, steps):
  """Trains with the inputs and flags `steps`; returns the values of the counters and of
  `w` after each step.
  """
  with tf.Graph().as_default():
    flag = tf.placeholder(tf.bool, [])
    number, *counters = [
      tf.Variable(0.0, trainable=False, use_resource=True) for _ in range(5)
    ]
    training = testing.Training()
    inner = Running(program, flag, [(counter, number) for counter in counters])
    train_op = wrap(inner).minimize(training.loss, training.global_step)
    variables, values = [*counters, training.w, training.global_step], []
    with testing.initialized_session() as sess:
      for x, is_true in steps:
        sess.run(train_op, {training.x: x, flag: is_true})
        values.append(
          np.concatenate([np.ravel(value) for value in sess.run(variables)]).tolist()
        )
    return values


FINITE = [([1.0, 2.0], True), ([4.0, 2.0], False), ([2.0, 8.0], True)]
OVERFLOWS = [([np.inf, 1.0], True), ([1.0, np.nan], False)]


@pytest.mark.usefixtures("control_flow")
@hypothesis.given(program=PROGRAMS)
@hypothesis.example(
  ("loop", ("branches", ("count", "constant"), ("loop", ("count", "variable"))))
)
@hypothesis.example(("count", "either"))
@hypothesis.example(
  ("branches", ("loop", ("count", "constant")), ("function", ("count", "constant")))
)
@hypothesis.example(
  ("sequence", ("compiled", ("count", "constant")), ("loop", ("count", "gradient")))
)
def test_skipped_step_changes_no_state(program):
  try:
    expected = train(program, lambda inner: inner, FINITE)
  except (ValueError, tf.errors.InvalidArgumentError):
    # TensorFlow cannot run some functions in loops of control flow v1.
    hypothesis.reject()
  first, second = OVERFLOWS
  steps = [first, FINITE[0], second, FINITE[1], first, second, FINITE[2]]
  values = train(program, lambda inner: Optimizer(inner, "dynamic"), steps)
  start = [0.0] * len(expected[0])
  assert values == [
    start,
    *expected[:1],
    *expected[:2],
    *expected[1:2] * 2,
    *expected[2:],
  ]


@pytest.mark.usefixtures("graph")
def test_step_leaves_no_empty_collection():
  training = testing.Training()
  Optimizer(testing.sgd(), "dynamic").minimize(training.loss)
  assert tf.GraphKeys.SUMMARIES not in tf.get_default_graph().get_all_collection_keys()


class Initializing(tf.train.AdamOptimizer):
  """Initializes its variables in a Session."""

  def apply_gradients(self, *args, **kwargs):
    applied = super().apply_gradients(*args, **kwargs)
    with testing.session() as sess:
      sess.run(tf.variables_initializer(self.variables()))
    return applied


@pytest.mark.usefixtures("graph")
def test_session_in_step_raises():
  with pytest.raises(ValueError, match="must not run a Session, but did"):
    Optimizer(Initializing(), "dynamic").minimize(testing.Training().loss)


class Slow(tf.train.GradientDescentOptimizer):
  def apply_gradients(self, *args, **kwargs):
    applied = super().apply_gradients(*args, **kwargs)
    time.sleep(0.2)
    return applied


@pytest.mark.usefixtures("graph")
def test_session_of_other_thread_waits_for_step():
  """As a queue runner that was started before `minimize`."""
  training, stopped = testing.Training(), threading.Event()
  with testing.initialized_session() as sess:

    def run():
      while not stopped.is_set():
        sess.run(training.global_step)

    thread = threading.Thread(target=run)
    thread.start()
    try:
      train_op = Optimizer(Slow(1.0), 8.0).minimize(training.loss)
    finally:
      stopped.set()
      thread.join()
    for x in (testing.FINITE, testing.OVERFLOW):
      sess.run(train_op, {training.x: x})
    np.testing.assert_array_equal(sess.run(training.w), -testing.FINITE)


@pytest.mark.usefixtures("graph")
def test_branch_of_gradient_of_earlier_step_raises():
  flag, training, rates = tf.placeholder(tf.bool, []), testing.Training(), []

  class First(tf.train.GradientDescentOptimizer):
    def apply_gradients(self, grads_and_vars, *args, **kwargs):
      norm = tf.norm(grads_and_vars[0][0])
      rates.append(tf.cond(flag, lambda: norm, lambda: tf.constant(1.0)))
      return super().apply_gradients(
        [(grad * rates[0], v) for grad, v in grads_and_vars], *args, **kwargs
      )

  with testing.control_flow(1):
    Optimizer(First(1.0), "dynamic").minimize(training.loss)
  with pytest.raises(ValueError, match="reads gradients of an earlier apply_gradients"):
    Optimizer(tf.train.GradientDescentOptimizer(rates[0]), "dynamic").minimize(
      tf.square(training.w)
    )


def may_change(build):
  """Returns whether `build()` builds an op that may change state."""
  with testing.control_flow(1), tf.Graph().as_default() as graph:
    build()
    ops = graph.get_operations()
    return any(
      "Initializer" not in op.name
      for op in effects.changing(ops, effects.call_types(ops, graph), graph)
    )


@pytest.mark.parametrize(
  "build, changes",
  [
    (lambda: tf.constant(1.0) + tf.placeholder(tf.float32), False),
    (lambda: tf.random_uniform([]), True),
    (lambda: tf.py_func(abs, [tf.constant(1.0)], tf.float32), True),
    (lambda: tf.Print(tf.constant(1.0), []), False),
    # with a TensorArray, which the run ends
    (lambda: tf.map_fn(tf.square, tf.constant([1.0])), False),
    (lambda: tf.raw_ops.VarHandleOp(dtype=tf.float32, shape=[]), False),
    (lambda: tf.raw_ops.FIFOQueueV2(component_types=[tf.float32]), False),
    (lambda: tf.raw_ops.TemporaryVariable(shape=[], dtype=tf.float32), True),
    (
      lambda: tf.raw_ops.ReadVariableOp(
        resource=tf.raw_ops.VarHandleOp(dtype=tf.float32, shape=[]), dtype=tf.float32
      ),
      False,
    ),
    (
      lambda: tf.raw_ops.AssignVariableOp(
        resource=tf.raw_ops.VarHandleOp(dtype=tf.float32, shape=[]), value=1.0
      ),
      True,
    ),
    (lambda: tf.identity(tf.raw_ops.VariableV2(dtype=tf.float32, shape=[])), False),
    (
      lambda: tf.raw_ops.RefSwitch(
        data=tf.raw_ops.VariableV2(dtype=tf.float32, shape=[]), pred=True
      ),
      False,
    ),
    (
      lambda: tf.raw_ops.Assign(
        ref=tf.raw_ops.VariableV2(dtype=tf.float32, shape=[]), value=1.0
      ),
      True,
    ),
    (lambda: call(lambda v: v.read_value()), False),
    (lambda: call(lambda v: call(lambda same: same.read_value())), False),
    (lambda: call(lambda v: v.assign(1.0)), True),
    (lambda: call(lambda v: call(lambda same: same.assign(1.0))), True),
    (lambda: tf.Assert(tf.placeholder(tf.bool), [1.0]), False),
    (lambda: functional_ops.For(0, 2, 1, [0.0], defined(increased)), False),
    (lambda: functional_ops.For(0, 2, 1, [0.0], defined(counted)), True),
    (
      lambda: tf.raw_ops.PartitionedCall(
        args=[0, 1.0], Tout=[tf.float32], f=defined(increased)
      ),
      False,
    ),
    (
      lambda: tf.raw_ops.PartitionedCall(
        args=[0, 1.0], Tout=[tf.float32], f=defined(counted)
      ),
      True,
    ),
    # ops whose types are functions
    (lambda: defined(increased)(0, 1.0), False),
    (lambda: defined(counted)(0, 1.0), True),
    (lambda: defined(calling(increased, increased))(0, 1.0), False),
    # one function twice, and another
    (lambda: defined(calling(counted, increased, increased))(0, 1.0), True),
    (lambda: call_unknown_function(), True),
  ],
)
def test_ops_that_change_state_are_known(build, changes):
  assert may_change(build) == changes


@pytest.mark.usefixtures("graph")
def test_functions_without_definition_do_not_hide_others():
  node = tf.NodeDef(op="Case")
  for name in (defined(increased).name, "unknown"):
    node.attr["branches"].list.func.add(name=name)
  called = list(effects.called_types(node, tf.get_default_graph()))
  assert None in called and "Cast" in called


def call(function):
  """Calls a function of a resource variable, in a function."""
  handle = tf.raw_ops.VarHandleOp(dtype=tf.float32, shape=[], shared_name="v")

  class Handle:
    read_value = staticmethod(
      lambda: tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.float32)
    )

    @staticmethod
    def assign(value):
      tf.raw_ops.AssignVariableOp(resource=handle, value=value)
      return tf.constant(value)

  return tensorflow.function(lambda: function(Handle))()


def increased(index, value):
  return value + tf.cast(index, tf.float32)


def counted(index, value):
  handle = tf.raw_ops.VarHandleOp(dtype=tf.float32, shape=[], shared_name="v")
  with tf.control_dependencies(
    [tf.raw_ops.AssignAddVariableOp(resource=handle, value=1.0)]
  ):
    return increased(index, value)


def calling(*bodies):
  """Returns a function that calls functions, one for each of the `bodies`."""
  made = {body: function.Defun(tf.int32, tf.float32)(body) for body in bodies}

  def calls(index, value):
    for body in bodies:
      value = made[body](index, value)
    return value

  return calls


def call_unknown_function():
  """Builds a call of a function that the graph does not have, as in an import."""
  called = tf.AttrValue(func=tf.NameAttrList(name="unknown"))
  types = tf.AttrValue(list=tf.AttrValue.ListValue(type=[]))
  node = tf.NodeDef(name="call", op="PartitionedCall")
  for name, value in [("f", called), ("Tin", types), ("Tout", types)]:
    node.attr[name].CopyFrom(value)
  tf.import_graph_def(tf.GraphDef(node=[node]), name="")


def defined(body):
  made = function.Defun(tf.int32, tf.float32)(body)
  made.add_to_graph(tf.get_default_graph())
  return made


CHANGES = re.compile(
  r"(Resource)?(Sparse)?(Apply|Scatter|Assign)|.*Enqueue|LookupTable(Insert|Import)"
)


for _path in sorted(
  glob.glob(os.path.join(testing.ROOT, "tests", "programs", "test_*.py"))
):
  # adds to the table
  importlib.import_module("tests.programs." + os.path.basename(_path)[: -len(".py")])


@pytest.mark.matrix
@pytest.mark.parametrize(
  "name", [row.name for row in table.PROGRAMS.values() if all(row.needs.values())]
)
def test_ops_that_change_state_wait_for_decision(name, monkeypatch):
  """Reads from the graph of each program that updates of the inner optimizer wait for
  its gate.
  """
  row, apply_inner, built = table.PROGRAMS[name], step._apply_inner, []
  monkeypatch.setattr(
    step,
    "_apply_inner",
    lambda *args, **kwargs: record(apply_inner, args, kwargs, built),
  )
  with testing.control_flow(
    row.variants[0].control_flow
  ), tf.Graph().as_default() as graph:
    try:
      row.build(table.Build(mp_compat, False, row, row.variants[0]))
    except ValueError:
      assert row.limit
    executed = runs.executed_ops(tf.get_collection(tf.GraphKeys.TRAIN_OP))
    for op in {
      op for op in built if op.graph is graph and CHANGES.match(op.type)
    }.intersection(executed):
      changed = [source.name + ":0" for source in runs.executed_ops(op.inputs[:1])]
      if not any(re.match(row.outside, name) for name in changed):
        assert any(map(waits_for_gate, runs.executed_ops([op]))), op.name


def record(apply_inner, args, kwargs, built):
  """Calls the inner optimizer; adds the ops that it builds to `built`."""
  graph = tf.get_default_graph()
  before = set(graph.get_operations())
  result = apply_inner(*args, **kwargs)
  built += [op for op in graph.get_operations() if op not in before]
  return result


def waits_for_gate(op):
  """Returns whether `op` is a gradient that passes the gate, or the pivot that other ops
  wait for.
  """
  if op.type == "Switch":
    return op in gate.gated_ops(op.graph).passed
  return (
    op.type == "Merge"
    and re.search(r"apply_or_skip(_\d+)?/", op.name)
    and op.inputs[0].name.endswith("Switch:1")
  )
