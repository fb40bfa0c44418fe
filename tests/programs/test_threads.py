"""Tests of programs that several threads build at the same time."""

import threading

import pytest

import mp_compat
from tests import testing
from tests.programs import table as programs
from tests.programs import test_control_flow  # noqa: F401 -- adds programs to PROGRAMS
from tests.programs import test_optimizers  # noqa: F401
from tests.programs import test_training  # noqa: F401
from tests.testing import tf


@pytest.mark.parametrize("version", [1, 2])
def test_building_keeps_other_threads(version):
  observed, stop = set(), threading.Event()

  def watch():
    while not stop.is_set():
      with tf.Graph().as_default() as graph:
        tf.cond(tf.placeholder(tf.bool, []), lambda: tf.constant(1.0), lambda: tf.constant(2.0))
        conditional_is_a_function = not any(op.type == "Switch" for op in graph.get_operations())
        observed.add((tf.control_flow_v2_enabled(), conditional_is_a_function))

  with testing.control_flow(version):
    thread = threading.Thread(target=watch)
    thread.start()
    try:
      for _ in range(3):
        with tf.Graph().as_default():
          w = tf.get_variable("w", initializer=[1.0, 2.0])
          testing.Optimizer(tf.train.AdamOptimizer(0.1), "dynamic").minimize(
            tf.reduce_sum(w * tf.placeholder(tf.float32, [2]))
          )
    finally:
      stop.set()
      thread.join()
  assert observed == {(version == 2, version == 2)}


def test_threads_build_same_programs():
  names = ["trained_by_adam", "both_in_cond", "compute_in_while_loop", "averaged_over_towers"]
  alone, together = {}, {}
  for name in names:
    train_finite_steps(name, alone)
  threads = [threading.Thread(target=train_finite_steps, args=(name, together)) for name in names]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  for name in names:
    testing.assert_same(together[name], alone[name])


def train_finite_steps(name, histories):
  """Adds the history of a program under the current control flow version, which all threads share."""
  version = 2 if tf.control_flow_v2_enabled() else 1
  histories[name] = programs.train(programs.PROGRAMS[name], programs.Variant(version, True), mp_compat).clean
