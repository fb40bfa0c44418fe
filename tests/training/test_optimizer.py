"""Tests of the optimizer in a Session: computed gradients, applied and skipped steps,
own loss scales.
"""

import contextlib
import inspect

import numpy as np
import pytest

import mp_compat
from tests import testing
from tests.testing import FINITE
from tests.testing import OVERFLOW
from tests.testing import Optimizer
from tests.testing import Training
from tests.testing import sgd
from tests.testing import tf

pytestmark = pytest.mark.usefixtures("graph")


# --- compute_gradients
# ---------------------------------------------------------------------------------------------


def test_scaling_preserves_small_gradients():
  """In float16, 2**-26 underflows to zero and 2**-26 * 2**15 does not. The master
  weights are float32.
  """
  with tf.variable_scope("m", custom_getter=mp_compat.float32_variable_storage_getter):
    w = tf.get_variable("w", [4], tf.float16, initializer=tf.ones_initializer())
  (stored,) = tf.trainable_variables()
  loss = (
    tf.reduce_mean(
      tf.cast(
        w * tf.placeholder_with_default(np.float16([1, 1, 1, 1]), [4]), tf.float32
      )
    )
    * 2.0**-24
  )
  (plain,) = tf.gradients(loss, [stored])
  ((scaled, _),) = Optimizer(sgd(), 2**15).compute_gradients(loss)
  with testing.initialized_session() as sess:
    np.testing.assert_array_equal(sess.run(plain), [0.0] * 4)
    np.testing.assert_array_equal(sess.run(scaled), [2.0**-26] * 4)


def without_identities(tensor):
  """Returns the tensor behind a chain of Identity ops."""
  while tensor.op.type == "Identity":
    tensor = tensor.op.inputs[0]
  return tensor


@pytest.mark.parametrize(
  "gate, same_op, other_op",
  [
    (Optimizer.GATE_NONE, False, False),
    (Optimizer.GATE_OP, True, False),
    (Optimizer.GATE_GRAPH, True, True),
  ],
)
def test_gates_apply_to_unscaled_gradients(gate, same_op, other_op):
  a, b, c, unused = [
    tf.get_variable(name, [], initializer=tf.ones_initializer()) for name in "abcd"
  ]
  # one op computes the gradients of a and b, another that of c
  loss = tf.multiply(a, b) + tf.exp(c)
  grads = [
    g
    for g, _ in Optimizer(sgd(), 4.0).compute_gradients(
      loss, [a, b, c, unused], gate_gradients=gate
    )
  ]
  unscaled = [without_identities(g).op for g in grads[:3]]
  raw = [without_identities(op.inputs[0]).op for op in unscaled]
  assert (
    testing.waits_for(grads[0], unscaled[0])
    and testing.waits_for(grads[0], raw[0])
    and grads[3] is None
  )
  assert testing.waits_for(grads[0], raw[1]) == same_op
  assert (
    testing.waits_for(grads[0], raw[2])
    == testing.waits_for(grads[0], unscaled[2])
    == other_op
  )


# --- apply_gradients
# -----------------------------------------------------------------------------------------------


def test_gradients_finite_can_be_fetched():
  training = Training()
  opt = Optimizer(sgd(), 8.0)
  assert not hasattr(opt, "gradients_finite") and "gradients_finite" not in dict(
    inspect.getmembers(opt)
  )
  train_op = opt.minimize(training.loss)
  assert opt.gradients_finite.shape == [] and opt.gradients_finite.dtype == tf.bool
  assert training.run(
    train_op, FINITE, OVERFLOW, FINITE, fetch=opt.gradients_finite
  ) == [[True], [False], [True]]
  with tf.Graph().as_default(), pytest.raises(RuntimeError):
    print(opt.gradients_finite)


@pytest.mark.parametrize(
  "make_scale",
  [lambda: 8.0, lambda: testing.SkipsFiniteSteps(8.0)],
  ids=["fixed", "custom"],
)
def test_step_applied_tells_whether_weights_change(make_scale):
  """It includes the answer of the loss scale, and adds no ops."""
  training = Training()
  opt = Optimizer(sgd(), make_scale())
  assert not hasattr(opt, "step_applied")
  train_op = opt.minimize(training.loss)
  training.session.run(tf.global_variables_initializer())
  tf.get_default_graph().finalize()
  before = np.zeros([2])
  for x in (FINITE, OVERFLOW, FINITE):
    _, applied, finite = training.session.run(
      [train_op, opt.step_applied, opt.gradients_finite], {training.x: x}
    )
    after = training.session.run(training.w)
    assert applied == (after != before).any() and finite == (x is FINITE)
    before = after


def test_step_applied_needs_decision():
  training = Training()
  opt = Optimizer(sgd(), 8.0, skip_nonfinite=False)
  opt.minimize(training.loss)
  with pytest.raises(
    RuntimeError,
    match="the decision of apply_gradients.* to apply or skip a step, which this graph",
  ):
    print(opt.step_applied)


@pytest.mark.parametrize("scale", [8.0, "dynamic"])
def test_each_gradient_is_checked_once(scale, graph):
  """The optimizer and a dynamic loss scale share one finite check."""
  training = Training()
  Optimizer(sgd(), scale).minimize(training.loss)
  # Two ops check a gradient, scaled and unscaled. A step executes one of them.
  checks = [
    op
    for op in graph.get_operations()
    if op.type in ("IsFinite", "DebugNumericSummaryV2")
  ]
  assert len(checks) == 2


def test_no_skipping_adds_no_conditional(graph):
  training = Training()
  opt = Optimizer(sgd(), 8.0, skip_nonfinite=False)
  train_op = opt.minimize(training.loss)
  types = {op.type for op in graph.get_operations()}
  assert not types & {"IsFinite", "Switch", "If", "StatelessIf"}
  np.testing.assert_array_equal(
    training.run(train_op, FINITE, OVERFLOW), [-FINITE, [-2.0, -np.inf]]
  )
  with pytest.raises(RuntimeError, match="skip_nonfinite=True"):
    print(opt.gradients_finite)


class CallsSuper(mp_compat.DynamicLossScale):
  """Overrides `update` and calls it."""

  def update(self, grads):
    return super().update(grads)


@pytest.mark.parametrize(
  "check_computed, expected",
  [(True, [[0.0, 0.0]] * 2), (False, [[-1.0, -1.0], [-2.0, -3.0]])],
)
@pytest.mark.parametrize(
  "make_scale, skip_nonfinite",
  [(lambda: 8.0, True)]
  + [
    (make, skips)
    for make in (mp_compat.DynamicLossScale, CallsSuper)
    for skips in (True, False)
  ],
)
def test_computed_gradients_check_is_optional(
  make_scale, skip_nonfinite, check_computed, expected
):
  training = Training()
  opt = Optimizer(
    sgd(),
    make_scale(),
    skip_nonfinite=skip_nonfinite,
    check_computed_gradients=check_computed,
  )
  ((grad, w),) = opt.compute_gradients(training.loss)
  clipped = tf.clip_by_value(grad, -1.0, 1.0)
  train_op = opt.apply_gradients([(clipped, w)])
  after = training.run(train_op, OVERFLOW)
  fails = pytest.raises(tf.errors.InvalidArgumentError, match="must feed a value")
  with fails if check_computed else contextlib.nullcontext():
    training.session.run(train_op, {clipped: FINITE})
  np.testing.assert_array_equal(after + [training.session.run(w)], expected)


class AlwaysApplies(mp_compat.DynamicLossScale):
  """Overrides `update` and checks nothing."""

  def update(self, grads):
    return tf.no_op(), True


def test_no_check_is_added_for_own_update(graph):
  training = Training()
  opt = Optimizer(sgd(), AlwaysApplies(), skip_nonfinite=False)
  training.run(opt.minimize(training.loss), OVERFLOW)
  assert not [
    op.type for op in graph.get_operations() if op.type in ("IsFinite", "Switch", "If")
  ]
  assert np.isinf(training.session.run(training.w)[1])


def test_base_class_attributes_keep_meaning():
  """Wrappers of tf.contrib call `_prepare` of the optimizer inside them; subclasses
  have settings of their own.
  """

  class WithSettings(Optimizer):
    def __init__(self):
      super().__init__(sgd(), 8.0)
      self._settings = {}

  opt, training = WithSettings(), Training()
  assert opt._prepare() is None
  assert training.run(opt.minimize(training.loss), FINITE)[0].tolist() == [-1.0, -2.0]


class Recorder(mp_compat.LossScale):
  """Counts updates and finite updates. `answer`, or its result, is the `should_apply`
  of every update.
  """

  def __init__(self, answer=True):
    self.answer = answer
    self._add_weight("updates", 0, tf.int32)
    self._add_weight("finite_updates", 0, tf.int32)

  def __call__(self):
    return tf.constant(4.0)

  def update(self, grads):
    self.given = list(grads)
    finite = tf.add_n([tf.reduce_sum(g) for g in grads if g is not None])
    seen = tf.cast(tf.is_finite(finite), tf.int32)
    op = tf.group(
      self._weight("updates").assign_add(1),
      self._weight("finite_updates").assign_add(seen),
    )
    return op, self.answer() if callable(self.answer) else self.answer

  def get_config(self):
    return {}


@pytest.mark.parametrize("applied", [True, False])
@pytest.mark.parametrize(
  "make_answer",
  [bool, np.bool_, lambda value: lambda: tf.placeholder_with_default(value, [])],
)
def test_user_loss_scale_decides(make_answer, applied):
  training = Training()
  loss_scale = Recorder(make_answer(applied))
  opt = Optimizer(sgd(), loss_scale)
  clipped = [
    (tf.clip_by_value(g, -9.0, 9.0), v) for g, v in opt.compute_gradients(training.loss)
  ]
  train_op = opt.apply_gradients(clipped, training.global_step)
  after = training.run(train_op, FINITE, OVERFLOW)
  np.testing.assert_array_equal(after, [-FINITE * applied] * 2)
  assert training.session.run([training.global_step] + loss_scale.variables()) == [
    applied,
    2,
    1,
  ]


def test_user_loss_scale_gets_gradients():
  training = Training()
  opt = Optimizer(sgd(), Recorder())
  grads_and_vars = opt.compute_gradients(
    training.loss, [training.w, tf.get_variable("unused", [])]
  )
  opt.apply_gradients(grads_and_vars)
  grad, unused = opt.loss_scale.given
  assert grad is grads_and_vars[0][0] and unused is None
