"""Tests of the optimizer in a Session: computed gradients, applied and skipped steps, variable names, arguments."""

import contextlib
import inspect

import numpy as np
import pytest

import mp_compat
from tests import testing
from tests.testing import FINITE
from tests.testing import OVERFLOW
from tests.testing import Training
from tests.testing import tf

Optimizer = mp_compat.MixedPrecisionLossScaleOptimizer


def sgd(learning_rate=1.0):
  return tf.train.GradientDescentOptimizer(learning_rate)


@pytest.fixture(name="graph", autouse=True, params=[1, 2], ids=["control_flow_v1", "control_flow_v2"])
def _graph(request):
  with tf.Graph().as_default() as graph, testing.control_flow(request.param):
    yield graph


# --- compute_gradients ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", ["dynamic", 8.0])
@pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16, tf.float32, tf.float64], ids=lambda d: d.name)
def test_every_floating_dtype_trains_as_in_numpy(dtype, scale):
  training = Training(dtype)
  opt = Optimizer(sgd(0.5), scale)
  train_op = opt.minimize(training.loss, training.global_step)
  small = FINITE / 4  # finite in float16 when scaled by 2**15
  after = training.run(train_op, small, OVERFLOW, small)
  for got, expected in zip(after, [-0.5 * small, -0.5 * small, -small]):
    np.testing.assert_array_equal(got.astype(np.float64), expected)
  assert training.session.run(training.global_step) == 2


def test_scaling_preserves_small_float16_gradients():
  """In float16, 2**-26 underflows to zero and 2**-26 * 2**15 does not. The master weights are float32."""
  with tf.variable_scope("m", custom_getter=mp_compat.float32_variable_storage_getter):
    w = tf.get_variable("w", [4], tf.float16, initializer=tf.ones_initializer())
  (stored,) = tf.trainable_variables()
  loss = tf.reduce_mean(tf.cast(w * tf.placeholder_with_default(np.float16([1, 1, 1, 1]), [4]), tf.float32)) * 2.0**-24
  (plain,) = tf.gradients(loss, [stored])
  ((scaled, _),) = Optimizer(sgd(), 2**15).compute_gradients(loss)
  with testing.session() as sess:
    sess.run(tf.global_variables_initializer())
    np.testing.assert_array_equal(sess.run(plain), [0.0] * 4)
    np.testing.assert_array_equal(sess.run(scaled), [2.0**-26] * 4)


def without_identities(tensor):
  """Returns the tensor behind a chain of Identity ops."""
  while tensor.op.type == "Identity":
    tensor = tensor.op.inputs[0]
  return tensor


@pytest.mark.parametrize(
  "gate, same_op, other_op",
  [(Optimizer.GATE_NONE, False, False), (Optimizer.GATE_OP, True, False), (Optimizer.GATE_GRAPH, True, True)],
)
def test_gates_apply_to_unscaled_gradients(gate, same_op, other_op):
  a, b, c, unused = [tf.get_variable(name, [], initializer=tf.ones_initializer()) for name in "abcd"]
  loss = tf.multiply(a, b) + tf.exp(c)  # one op computes the gradients of a and b, another that of c
  grads = [g for g, _ in Optimizer(sgd(), 4.0).compute_gradients(loss, [a, b, c, unused], gate_gradients=gate)]
  unscaled = [without_identities(g).op for g in grads[:3]]
  raw = [without_identities(op.inputs[0]).op for op in unscaled]
  assert testing.waits_for(grads[0], unscaled[0]) and testing.waits_for(grads[0], raw[0]) and grads[3] is None
  assert testing.waits_for(grads[0], raw[1]) == same_op
  assert testing.waits_for(grads[0], raw[2]) == testing.waits_for(grads[0], unscaled[2]) == other_op


@pytest.mark.parametrize("gate", [3, -1, None, "GATE_OP"])
def test_invalid_gate_raises_without_adding_ops(gate, graph):
  training, opt = Training(), Optimizer(sgd(), "dynamic")
  before = len(graph.get_operations())
  with pytest.raises(ValueError, match="gate_gradients must be one of: Optimizer.GATE_NONE, .*Not " + str(gate)):
    opt.minimize(training.loss, gate_gradients=gate)
  assert len(graph.get_operations()) == before


def test_loss_may_be_callable():
  training = Training()
  train_op = Optimizer(sgd(), "dynamic").minimize(lambda: tf.reduce_sum(training.w * training.x), var_list=[training.w])
  np.testing.assert_array_equal(training.run(train_op, FINITE, OVERFLOW), [-FINITE, -FINITE])


def test_compute_gradients_reads_the_scale_once(graph):
  training = Training()
  opt = Optimizer(sgd(), "dynamic")
  scale_handle = opt.loss_scale.variables()[0].handle

  def reads():
    return [op for op in graph.get_operations() if op.type == "ReadVariableOp" and op.inputs[0] is scale_handle]

  before = len(reads())
  opt.compute_gradients(training.loss)
  assert len(reads()) == before + 1


# --- apply_gradients -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("use_resource", [True, False], ids=["resource", "reference"])
@pytest.mark.parametrize("scale", ["dynamic", 8.0])
def test_overflow_changes_only_the_loss_scale(scale, use_resource):
  training = Training(use_resource=use_resource)
  opt = Optimizer(tf.train.AdamOptimizer(), scale)
  train_op = opt.minimize(training.loss, training.global_step)
  other_variables = [v for v in tf.global_variables() if v not in opt.loss_scale.variables()]
  training.run(train_op, FINITE)
  before = training.session.run(other_variables)
  for bad in [np.inf, -np.inf, np.nan]:
    training.session.run(train_op, {training.x: [bad, 0.0]})
    for value, previous_value in zip(training.session.run(other_variables), before):
      np.testing.assert_array_equal(value, previous_value)
  if scale == "dynamic":
    current_scale, good_steps = training.session.run(opt.loss_scale.variables())
    assert current_scale == 2.0**12 and good_steps == 0


def test_gradients_finite_can_be_fetched_with_step():
  training = Training()
  opt = Optimizer(sgd(), 8.0)
  with pytest.raises(RuntimeError, match="gradients_finite is the result of the finite check"):
    print(opt.gradients_finite)
  train_op = opt.minimize(training.loss)
  assert opt.gradients_finite.shape == [] and opt.gradients_finite.dtype == tf.bool
  assert training.run(train_op, FINITE, OVERFLOW, FINITE, fetch=opt.gradients_finite) == [[True], [False], [True]]
  with tf.Graph().as_default(), pytest.raises(RuntimeError):
    print(opt.gradients_finite)


def test_attributes_can_be_listed_before_any_step():
  opt = Optimizer(sgd(), 8.0)
  assert not hasattr(opt, "gradients_finite")
  assert "gradients_finite" not in dict(inspect.getmembers(opt))
  opt.minimize(Training().loss)
  assert hasattr(opt, "gradients_finite")


@pytest.mark.parametrize("scale", [8.0, "dynamic"])
def test_each_gradient_is_checked_once(scale, graph):
  """The optimizer and a dynamic loss scale share one finite check."""
  training = Training()
  Optimizer(sgd(), scale).minimize(training.loss)
  # Two ops check a gradient, scaled and unscaled. A step executes one of them.
  checks = [op for op in graph.get_operations() if op.type in ("IsFinite", "DebugNumericSummaryV2")]
  assert len(checks) == 2


def test_fixed_scale_without_skipping_adds_no_conditional(graph):
  training = Training()
  opt = Optimizer(sgd(), 8.0, skip_nonfinite=False)
  train_op = opt.minimize(training.loss)
  types = {op.type for op in graph.get_operations()}
  assert not types & {"IsFinite", "Switch", "If", "StatelessIf"}
  np.testing.assert_array_equal(training.run(train_op, FINITE, OVERFLOW), [-FINITE, [-2.0, -np.inf]])
  with pytest.raises(RuntimeError, match="skip_nonfinite=True"):
    print(opt.gradients_finite)


def test_dynamic_scale_skips_despite_skip_nonfinite_false():
  training = Training()
  opt = Optimizer(sgd(), "dynamic", skip_nonfinite=False)
  train_op = opt.minimize(training.loss)
  np.testing.assert_array_equal(training.run(train_op, FINITE, OVERFLOW), [-FINITE, -FINITE])
  assert training.session.run(opt.gradients_finite, {training.x: FINITE})


class CallsSuper(mp_compat.DynamicLossScale):
  """Overrides `update` and calls it."""

  def update(self, grads):
    return super().update(grads)


@pytest.mark.parametrize("check_computed", [True, False])
@pytest.mark.parametrize(
  "make_scale, skip_nonfinite",
  [(lambda: 8.0, True), (mp_compat.DynamicLossScale, True), (mp_compat.DynamicLossScale, False)]
  + [(CallsSuper, True), (CallsSuper, False)],
)
def test_computed_gradients_are_checked_only_if_asked(make_scale, skip_nonfinite, check_computed):
  training = Training()
  opt = Optimizer(sgd(), make_scale(), skip_nonfinite=skip_nonfinite, check_computed_gradients=check_computed)
  ((grad, w),) = opt.compute_gradients(training.loss)
  clipped = tf.clip_by_value(grad, -1.0, 1.0)
  train_op = opt.apply_gradients([(clipped, w)])
  (hidden,) = training.run(train_op, OVERFLOW)
  assert hidden.tolist() == ([0.0, 0.0] if check_computed else [-1.0, -1.0])
  with contextlib.ExitStack() as stack:
    if check_computed:
      stack.enter_context(pytest.raises(tf.errors.InvalidArgumentError, match="must feed a value"))
    training.session.run(train_op, {clipped: FINITE})
  assert training.session.run(w).tolist() == ([0.0, 0.0] if check_computed else [-2.0, -3.0])


class AlwaysApplies(mp_compat.DynamicLossScale):
  """Overrides `update` and checks nothing."""

  def update(self, grads):
    return tf.no_op(), True


def test_no_check_is_added_for_an_own_update(graph):
  training = Training()
  opt = Optimizer(sgd(), AlwaysApplies(), skip_nonfinite=False)
  training.run(opt.minimize(training.loss), OVERFLOW)
  assert not [op.type for op in graph.get_operations() if op.type in ("IsFinite", "Switch", "If")]
  assert np.isinf(training.session.run(training.w)[1])


def test_attributes_of_the_base_class_keep_their_meaning():
  """Wrappers of tf.contrib call `_prepare` of the optimizer inside them; subclasses have settings of their own."""

  class WithSettings(Optimizer):
    def __init__(self):
      super().__init__(sgd(), 8.0)
      self._settings = {}

  opt, training = WithSettings(), Training()
  assert opt._prepare() is None
  assert training.run(opt.minimize(training.loss), FINITE)[0].tolist() == [-1.0, -2.0]


class Recorder(mp_compat.LossScale):
  """Counts updates and finite updates. `answer`, or its result, is the `should_apply` of every update."""

  def __init__(self, answer, moves=False):
    self.answer, self.moves, self.given = answer, moves, None
    self._add_weight("updates", 0, tf.int32)
    self._add_weight("finite_updates", 0, tf.int32)

  def __call__(self):
    return tf.constant(4.0)

  def update(self, grads):
    self.given = list(grads)
    finite = tf.add_n([tf.reduce_sum(g) for g in grads if g is not None])
    seen = tf.cast(tf.is_finite(finite), tf.int32)
    op = tf.group(self._weight("updates").assign_add(1), self._weight("finite_updates").assign_add(seen))
    return op, self.answer() if callable(self.answer) else self.answer

  def get_config(self):
    return {}


@pytest.mark.parametrize(
  "answer, applied",
  [
    (True, True),
    (False, False),
    (np.bool_(True), True),
    (np.bool_(False), False),
    (lambda: tf.placeholder_with_default(True, []), True),
    (lambda: tf.placeholder_with_default(False, []), False),
  ],
)
def test_user_loss_scale_decides_whether_steps_apply(answer, applied):
  training = Training()
  loss_scale = Recorder(answer)
  train_op = Optimizer(sgd(), loss_scale).minimize(training.loss, training.global_step)
  after = training.run(train_op, FINITE, OVERFLOW)
  np.testing.assert_array_equal(after, [-FINITE * applied] * 2)
  global_step, updates, finite_updates = training.session.run([training.global_step] + loss_scale.variables())
  assert (global_step, updates, finite_updates) == (int(applied), 2, 1)


def test_user_loss_scale_receives_the_original_gradients():
  training = Training()
  loss_scale = Recorder(True)
  opt = Optimizer(sgd(), loss_scale)
  grads_and_vars = opt.compute_gradients(training.loss, [training.w, tf.get_variable("unused", [])])
  opt.apply_gradients(grads_and_vars)
  assert len(loss_scale.given) == 2 and loss_scale.given[0] is grads_and_vars[0][0] and loss_scale.given[1] is None


@pytest.mark.parametrize("loss_scale", [mp_compat.DynamicLossScale, testing.native.DynamicLossScale])
def test_clipped_overflow_skips_step_and_lowers_scale(loss_scale):
  training = Training()
  opt = Optimizer(sgd(), loss_scale())
  grads_and_vars = [(tf.clip_by_value(g, -1.0, 1.0), v) for g, v in opt.compute_gradients(training.loss)]
  train_op = opt.apply_gradients(grads_and_vars)
  np.testing.assert_array_equal(training.run(train_op, FINITE, OVERFLOW), [[-1.0, -1.0]] * 2)
  assert training.session.run(opt.loss_scale()) == 2.0**14


def test_user_loss_scale_sees_clipped_overflow():
  training = Training()
  loss_scale = Recorder(True)
  opt = Optimizer(sgd(), loss_scale)
  train_op = opt.apply_gradients([(tf.clip_by_value(g, -1.0, 1.0), v) for g, v in opt.compute_gradients(training.loss)])
  training.run(train_op, FINITE, OVERFLOW)
  updates, finite_updates = training.session.run(loss_scale.variables())
  assert updates == 2 and finite_updates == 1


@pytest.mark.parametrize("use_resource", [True, False], ids=["resource", "reference"])
def test_accumulated_gradients_apply_without_backward_pass(use_resource):
  training = Training()
  opt = Optimizer(sgd(), "dynamic")
  ((grad, _),) = opt.compute_gradients(training.loss)
  total = tf.Variable([0.0, 0.0], trainable=False, use_resource=use_resource)
  accumulate = tf.assign_add(total, grad)
  train_op = opt.apply_gradients([(tf.convert_to_tensor(total), training.w)])
  training.session.run(tf.global_variables_initializer())
  for x in [FINITE, FINITE]:
    training.session.run(accumulate, {training.x: x})
  training.session.run(train_op)  # x is not fed, so the backward pass would raise
  np.testing.assert_array_equal(training.session.run(training.w), -2 * FINITE)


def test_apply_gradients_works_inside_a_conditional():
  training = Training()
  opt = Optimizer(tf.train.MomentumOptimizer(1.0, 0.0), "dynamic")
  grads_and_vars = opt.compute_gradients(training.loss)
  wanted = tf.placeholder_with_default(True, [])
  train_op = tf.cond(wanted, lambda: opt.apply_gradients(grads_and_vars, training.global_step), tf.no_op)
  np.testing.assert_array_equal(training.run(train_op, FINITE, OVERFLOW), [-FINITE, -FINITE])
  training.session.run(train_op, {training.x: FINITE, wanted: False})
  np.testing.assert_array_equal(training.session.run(training.w), -FINITE)


def test_minimize_works_inside_a_while_loop():
  training = Training()
  opt = Optimizer(sgd(), mp_compat.DynamicLossScale(8.0, 2))

  def step(i):
    x = tf.where(tf.equal(i, 2), tf.constant([np.inf, 1.0], tf.float32), training.x)
    with tf.control_dependencies([opt.minimize(tf.reduce_sum(training.w * x), var_list=[training.w])]):
      return tf.identity(i) + 1

  loop = tf.while_loop(lambda i: i < 5, step, [0], parallel_iterations=1)
  np.testing.assert_array_equal(training.run(loop, FINITE), [-4 * FINITE])
  assert training.session.run(opt.loss_scale()) == 16.0  # 8, 16, 8, 8, 16


# --- names ---------------------------------------------------------------------------------------------------------


def names():
  return [v.op.name for v in tf.global_variables()]


@pytest.mark.parametrize("use_resource", [True, False], ids=["resource", "reference"])
@pytest.mark.parametrize("scope", [None, "head"])
@pytest.mark.parametrize("name", sorted(testing.OPTIMIZERS))
def test_variable_names_match_the_inner_optimizer(name, scope, use_resource):
  seen = []
  for wrap in [lambda opt: opt, lambda opt: Optimizer(opt, 8.0)]:
    with tf.Graph().as_default():
      training = Training(use_resource=use_resource)
      with tf.name_scope(scope):
        for _ in range(2):
          wrap(testing.OPTIMIZERS[name]()).minimize(training.loss, training.global_step)
      seen.append(names())
  assert seen[0] == seen[1]


@pytest.mark.parametrize("name", ["Adam", "Momentum"])
def test_reused_scopes_share_weights_but_not_scales(name):
  """A second optimizer in the scope has its own counters and loss scale, with the same names as in TensorFlow."""
  seen = []
  for wrap in [
    lambda opt: opt,
    lambda opt: Optimizer(opt, "dynamic"),
    lambda opt: testing.native.MixedPrecisionLossScaleOptimizer(opt, testing.native.DynamicLossScale()),
  ]:
    with tf.Graph().as_default():
      x = tf.placeholder(tf.float32, [2])
      for _ in range(2):
        with tf.variable_scope("train", reuse=tf.AUTO_REUSE, use_resource=True):
          w = tf.get_variable("w", [2])
          wrap(testing.OPTIMIZERS[name]()).minimize(tf.reduce_sum(w * x))
      seen.append(names())
  alone, ours, theirs = seen
  scales = ["train/current_loss_scale", "train/good_steps", "train_1/current_loss_scale", "train_1/good_steps"]
  assert sorted(ours) == sorted(alone + scales)
  assert set(scales) <= set(theirs) and {"train/w", "train/train/w/" + name} <= set(ours) & set(theirs)


def test_dynamic_scale_adds_exactly_two_variables():
  training = Training()
  Optimizer(tf.train.AdamOptimizer(), "dynamic").minimize(training.loss)
  assert sorted(names()) == [
    "beta1_power",
    "beta2_power",
    "current_loss_scale",
    "global_step",
    "good_steps",
    "w",
    "w/Adam",
    "w/Adam_1",
  ]


def test_train_ops_have_given_names_and_are_collected(graph):
  training = Training()
  opt = Optimizer(tf.train.MomentumOptimizer(1.0, 0.9), "dynamic")
  train_ops = [opt.minimize(training.loss), opt.minimize(training.loss, name="second")]
  assert [op.name for op in train_ops] == ["Momentum", "second"]
  assert tf.get_collection(tf.GraphKeys.TRAIN_OP) == train_ops
  assert all(isinstance(op, tf.Operation) and graph.is_fetchable(op) for op in train_ops)


# --- arguments -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pairs", [iter, tuple, lambda pairs: (pair for pair in pairs), lambda pairs: map(list, pairs)])
def test_gradient_pairs_may_be_any_iterable(pairs):
  training = Training()
  opt = Optimizer(sgd(), "dynamic")
  train_op = opt.apply_gradients(pairs(opt.compute_gradients(training.loss)))
  np.testing.assert_array_equal(training.run(train_op, FINITE), [-FINITE])
