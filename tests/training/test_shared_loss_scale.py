"""Two optimizers with one loss scale, as generators and discriminators have them."""

import numpy as np
import pytest
import tensorflow

import mp_compat
from tests import testing
from tests.testing import BAD
from tests.testing import GOOD
from tests.testing import tf


@pytest.fixture(autouse=True, params=[1, 2], ids=["control_flow_v1", "control_flow_v2"])
def _control_flow(request):
  with testing.control_flow(request.param), tf.Graph().as_default():
    yield


class Pair:
  """`d` and `g`, whose gradients are placeholders, and their optimizers."""

  def __init__(self, scale=None, use_resource=True, **kwargs):
    with tf.variable_scope("", use_resource=use_resource):
      self.variables = [tf.get_variable(name, [2], initializer=tf.zeros_initializer()) for name in "dg"]
      self.global_step = tf.train.get_or_create_global_step()
    self.inputs = [tf.placeholder(tf.float32, [2]) for _ in "dg"]
    self.scale = scale or mp_compat.DynamicLossScale(2. ** 10, increment_period=2)
    self.opts = [mp_compat.MixedPrecisionLossScaleOptimizer(tf.train.AdamOptimizer(1.), self.scale, **kwargs)
                 for _ in "dg"]
    self.pairs = [opt.compute_gradients(tf.reduce_sum(v * x), [v])
                  for opt, v, x in zip(self.opts, self.variables, self.inputs)]

  def together(self, **kwargs):
    return mp_compat.apply_gradients_together(zip(self.opts, self.pairs), self.global_step, **kwargs)

  def run(self, train_op, steps):
    """How many steps each optimizer has made, the global step and the scale, after each step."""
    powers = [opt.inner_optimizer._get_beta_accumulators()[0] for opt in self.opts]
    after = []
    with testing.session() as sess:
      sess.run(tf.global_variables_initializer())
      for values in steps:
        sess.run(train_op, dict(zip(self.inputs, values)))
        made = [round(np.log(power) / np.log(.9)) - 1 for power in sess.run(powers)]
        assert [(v == 0).all() for v in sess.run(self.variables)] == [count == 0 for count in made]
        after.append(tuple(made) + tuple(sess.run([self.global_step, self.scale()])))
    return after


STEPS = [(GOOD, GOOD), (GOOD, BAD), (BAD, GOOD), (BAD, BAD), (GOOD, GOOD), (GOOD, GOOD)]


@pytest.mark.parametrize("use_resource", [False, True])
@pytest.mark.parametrize("skip, expected", [
    ("all", [(1, 1, 1, 1024.), (1, 1, 1, 512.), (1, 1, 1, 256.), (1, 1, 1, 128.), (2, 2, 2, 128.), (3, 3, 3, 256.)]),
    ("each", [(1, 1, 1, 1024.), (2, 1, 2, 512.), (2, 2, 3, 256.), (2, 2, 3, 128.), (3, 3, 4, 128.), (4, 4, 5, 256.)]),
])
def test_the_scale_moves_once_and_all_skip_or_each_its_own(skip, expected, use_resource):
  pair = Pair(use_resource=use_resource)
  train_op = pair.together(skip=skip)
  assert pair.run(train_op, STEPS) == expected
  assert tf.get_collection(tf.GraphKeys.TRAIN_OP) == [train_op]


def test_each_obeys_a_loss_scale_that_skips_finite_steps():
  pair = Pair(scale=testing.SkipsFiniteSteps(2. ** 10, increment_period=2))
  assert pair.run(pair.together(skip="each"), STEPS) == [
      (0, 0, 0, 1024.), (1, 0, 1, 512.), (1, 1, 2, 256.), (1, 1, 2, 128.), (1, 1, 2, 128.), (1, 1, 2, 256.)]


def test_apart_the_scale_moves_with_each():
  pair = Pair()
  train_op = tf.group(*[opt.apply_gradients(pairs) for opt, pairs in zip(pair.opts, pair.pairs)])
  first, second, *_ = pair.run(train_op, STEPS[:1] + [(BAD, BAD)])
  assert first[:2] == (1, 1) and first[3] in (1024., 2048.)  # whether both read before either writes is left open
  assert second[:2] == (1, 1) and second[3] < first[3]


def test_names_are_those_of_two_optimizers_and_one_scale():
  Pair().together()
  assert sorted(v.op.name for v in tf.global_variables()) == sorted(
      ["d", "g", "global_step", "current_loss_scale", "good_steps", "beta1_power", "beta2_power", "beta1_power_1",
       "beta2_power_1", "d/Adam", "d/Adam_1", "g/Adam", "g/Adam_1"])


def test_replicas_apply_together():
  strategy = tf.distribute.MirroredStrategy(testing.TWO_CPUS)
  x = tf.placeholder(tf.float32, [2, 2])
  scale = mp_compat.DynamicLossScale()

  def step():
    own = x[tf.distribute.get_replica_context().replica_id_in_sync_group]
    variables = [tf.get_variable(name, [2], initializer=tf.zeros_initializer()) for name in "dg"]
    opts = [mp_compat.MixedPrecisionLossScaleOptimizer(tf.train.GradientDescentOptimizer(1.), scale) for _ in "dg"]
    return mp_compat.apply_gradients_together(
        [(opts[0], opts[0].compute_gradients(tf.reduce_sum(variables[0] * own), variables[:1])),
         (opts[1], opts[1].compute_gradients(tf.reduce_sum(variables[1] * 2.), variables[1:]))],
        tf.train.get_or_create_global_step())

  with strategy.scope():
    train_op = strategy.group(strategy.extended.call_for_each_replica(step))
    step_count = tf.train.get_global_step()
  d, g = [strategy.experimental_local_results(v)[1] for v in tf.trainable_variables()]
  with testing.session() as sess:
    sess.run(tf.global_variables_initializer())
    for values in ([GOOD, GOOD], [GOOD, BAD]):
      sess.run(train_op, {x: values})
    np.testing.assert_array_equal(sess.run([d, g]), [-2 * GOOD, [-4., -4.]])
    assert sess.run([strategy.experimental_local_results(step_count)[0], scale()]) == [1, 2. ** 14]


def test_without_a_global_step_nothing_is_counted():
  pair = Pair()
  train_op = mp_compat.apply_gradients_together(zip(pair.opts, pair.pairs))
  assert pair.run(train_op, STEPS[:2]) == [(1, 1, 0, 1024.), (1, 1, 0, 512.)]


def test_in_eager_mode_the_step_is_made_at_once():
  with testing.eager_mode():
    scale = mp_compat.DynamicLossScale(8.)
    variables = [tensorflow.Variable([1., 2.]) for _ in "dg"]
    opts = [mp_compat.MixedPrecisionLossScaleOptimizer(tf.train.GradientDescentOptimizer(1.), scale) for _ in "dg"]
    for last in (GOOD, BAD):
      assert mp_compat.apply_gradients_together(
          [(opt, opt.compute_gradients(lambda v=v, x=x: tf.reduce_sum(v * np.float32(x)), [v]))
           for opt, v, x in zip(opts, variables, (GOOD, last))]) is None
    assert [list(v.numpy()) for v in variables] == [[0., 0.]] * 2 and float(scale()) == 4.


@pytest.mark.parametrize("skip", ["all", "each"])
def test_updates_wait_for_the_gradients_of_all(skip, monkeypatch):
  """A loss that reads the variables of the other optimizer sees them as they were before the step."""
  pair = Pair()
  d, g = pair.variables
  pair.pairs[1] = pair.opts[1].compute_gradients(tf.reduce_sum(g * d * pair.inputs[1]), [g])
  updates = []
  inner = pair.opts[0].inner_optimizer
  apply_gradients = inner.apply_gradients
  monkeypatch.setattr(inner, "apply_gradients", lambda *args, **kwargs: updates.append(
      apply_gradients(*args, **kwargs)) or updates[0])
  pair.together(skip=skip)
  assert testing.waits_for(updates[0], pair.pairs[1][0][0].op)


def test_a_reducer_is_called_once_for_all():
  calls = []

  def reducer(finite):
    calls.append(finite.shape.as_list())
    return tf.identity(finite)

  for skip, shape in [("all", [2]), ("each", [2])]:
    with tf.Graph().as_default():
      pair = Pair(finite_reducer=reducer)
      train_op = pair.together(skip=skip)
      assert calls == [shape]
      calls.clear()
      assert pair.run(train_op, STEPS[:2])[-1][:2] == ((1, 1) if skip == "all" else (2, 1))
