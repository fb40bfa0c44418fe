"""Tests of programs whose loss scaling `compare` turns off."""

import mp_compat
from mp_compat._tensorflow import log
from mp_compat.tools.compare import loss_scaling
from mp_compat.training import step
from tests import testing
from tests.testing import Optimizer
from tests.testing import tf


def test_steps_that_are_always_applied_may_read_gradients_of_each_other(monkeypatch):
  monkeypatch.setattr(step, "decide", loss_scaling._always_applying(step.decide))
  scale = mp_compat.FixedLossScale(1)
  with tf.Graph().as_default():
    v, w = [
      tf.get_variable(name, initializer=[1.0], use_resource=True) for name in "vw"
    ]
    x = tf.placeholder(tf.float32, [1])
    first = Optimizer(tf.train.GradientDescentOptimizer(1.0), scale)
    pairs = first.compute_gradients(tf.reduce_sum(v * x), [v])
    rate = 1.0 / tf.norm(pairs[0][0])
    second = Optimizer(tf.train.GradientDescentOptimizer(rate), scale)
    others = second.compute_gradients(tf.reduce_sum(w * x), [w])
    train_op = mp_compat.apply_gradients_together([(first, pairs), (second, others)])
    with testing.initialized_session() as sess:
      sess.run(train_op, {x: [2.0]})
      assert sess.run([v, w]) == [[-1.0], [0.0]]


def test_warnings_are_noted_as_they_are_logged(monkeypatch):
  noted = []
  monkeypatch.setattr(log, "warn", log.warn)
  loss_scaling._observe_warnings(lambda **notes: noted.append(notes["warnings"]))
  log.warn("%s has %d%% zeros.", "w", 50)
  log.warn("100% are.")
  assert noted == [["w has 50% zeros."], ["100% are.", "w has 50% zeros."]]
