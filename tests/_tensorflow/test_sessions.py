"""Tests which runs of a session count as train steps, which variables they may change, and how these are read."""

import numpy as np
import pytest

from mp_compat._tensorflow import sessions
from tests import testing
from tests.testing import tf


@pytest.fixture(name="graph", params=[True, False], ids=["resource", "reference"], autouse=True)
def _graph(request):
  """Yields a new default graph with variables of either kind."""
  with tf.Graph().as_default() as graph, tf.variable_scope("", use_resource=request.param):
    yield graph


def effects(*elements):
  return sessions.effects(tf.get_default_graph(), elements)


def train_op(x):
  w = tf.get_variable("w", [], initializer=tf.zeros_initializer())
  return tf.train.MomentumOptimizer(0.1, 0.9).minimize(tf.square(w - x), tf.train.get_or_create_global_step())


@pytest.mark.usefixtures("control_flow")
def test_train_steps_write_variables():
  op = train_op(tf.placeholder(tf.float32, []))
  assert effects(op) == (frozenset({"w", "w/Momentum", "global_step"}), frozenset(), True)


def test_branches_and_loops_are_train_steps(control_flow):
  x = tf.placeholder(tf.float32, [])
  w = tf.get_variable("w", [], initializer=tf.zeros_initializer())
  if control_flow == 2 and w.dtype._is_ref_dtype:
    pytest.skip("functions cannot take reference variables")
  branch = tf.cond(x > 0, lambda: tf.assign_add(w, x) + 0.0, lambda: x)
  loop = tf.while_loop(lambda i: i < 3, lambda i: tf.cast(tf.assign_add(w, x) * 0, tf.int32) + i + 1, [0])
  assert effects(branch) == effects(loop) == (frozenset({"w"}), frozenset({"w"}), True)


def test_initializers_are_no_train_steps(graph):
  op = train_op(tf.placeholder(tf.float32, []))
  init, saver = tf.global_variables_initializer(), tf.train.Saver()
  written = effects(op).written
  assert effects(init) == (written, frozenset(), False)
  assert effects(graph.as_graph_element(saver.saver_def.restore_op_name)) == (written, frozenset(), False)
  save = graph.as_graph_element(saver.saver_def.save_tensor_name)
  assert effects(save) == effects(tf.get_variable("other", []).read_value()) == (frozenset(), frozenset(), False)


def test_assigned_functions_are_train_steps():
  w = tf.get_variable("w", [], initializer=tf.zeros_initializer())
  assert effects(tf.assign(w, w.read_value() * 2.0)).trains
  assert not effects(tf.assign(w, tf.placeholder(tf.float32, []))).trains


def test_local_variables_do_not_count(graph):
  local = tf.get_variable("local", [], collections=[tf.GraphKeys.LOCAL_VARIABLES], trainable=False)
  assert effects(tf.assign_add(local, 1.0)) == (frozenset(), frozenset(), False)
  assert sessions.variable_values(graph) == {}


def test_reading_keeps_graph_unchanged(graph):
  x = tf.placeholder(tf.float32, [])
  with tf.control_dependencies([train_op(x)]):
    tf.get_variable("w2", [], initializer=tf.ones_initializer()).read_value()
  with testing.session() as sess:
    graph.finalize()
    tensors = sessions.variable_values(graph)
    assert set(tensors) == {"w", "w/Momentum", "global_step", "w2"}
    assert sessions.read(sess, tensors) == {}
    sess.run(graph.get_operation_by_name("w/Assign"))
    assert sessions.read(sess, tensors) == {"w": np.float32(0)}
