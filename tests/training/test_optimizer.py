"""The optimizer in a Session: what it computes, what it applies, what it lets through and what it refuses."""

import numpy as np
import pytest

import mp_compat
from tests import testing
from tests.testing import BAD
from tests.testing import GOOD
from tests.testing import Job
from tests.testing import tf

Optimizer = mp_compat.MixedPrecisionLossScaleOptimizer


def sgd(learning_rate=1.):
  return tf.train.GradientDescentOptimizer(learning_rate)


@pytest.fixture(name="graph", autouse=True, params=[1, 2], ids=["control_flow_v1", "control_flow_v2"])
def _graph(request):
  with tf.Graph().as_default() as graph, testing.control_flow(request.param):
    yield graph


# --- what it computes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", ["dynamic", 8.])
@pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16, tf.float32, tf.float64], ids=lambda d: d.name)
def test_variables_of_every_floating_dtype_train_as_numpy_says(dtype, scale):
  job = Job(dtype)
  opt = Optimizer(sgd(.5), scale)
  train_op = opt.minimize(job.loss, job.global_step)
  small = GOOD / 4  # 2**15 times this is a float16
  after = job.run(train_op, small, BAD, small)
  for got, expected in zip(after, [-.5 * small, -.5 * small, -small]):
    np.testing.assert_array_equal(got.astype(np.float64), expected)
  assert job.session.run(job.global_step) == 2


def test_small_float16_gradients_survive_with_a_scale_and_only_with_it():
  """2**-26 is zero in float16, 2**-26 * 2**15 is not; the weights are stored in float32."""
  with tf.variable_scope("m", custom_getter=mp_compat.float32_variable_storage_getter):
    w = tf.get_variable("w", [4], tf.float16, initializer=tf.ones_initializer())
  stored, = tf.trainable_variables()
  loss = tf.reduce_mean(tf.cast(w * tf.placeholder_with_default(np.float16([1, 1, 1, 1]), [4]), tf.float32)) * 2. ** -24
  plain, = tf.gradients(loss, [stored])
  (scaled, _), = Optimizer(sgd(), 2 ** 15).compute_gradients(loss)
  with testing.session() as sess:
    sess.run(tf.global_variables_initializer())
    np.testing.assert_array_equal(sess.run(plain), [0.] * 4)
    np.testing.assert_array_equal(sess.run(scaled), [2. ** -26] * 4)


def without_identities(tensor):
  while tensor.op.type == "Identity":
    tensor = tensor.op.inputs[0]
  return tensor


@pytest.mark.parametrize("gate, same_op, other_op", [
    (Optimizer.GATE_NONE, False, False), (Optimizer.GATE_OP, True, False), (Optimizer.GATE_GRAPH, True, True)])
def test_gates_mean_for_unscaled_gradients_what_they_mean_to_tensorflow(gate, same_op, other_op):
  a, b, c, unused = [tf.get_variable(name, [], initializer=tf.ones_initializer()) for name in "abcd"]
  loss = tf.multiply(a, b) + tf.exp(c)  # one op makes the gradients of a and b, another that of c
  grads = [g for g, _ in Optimizer(sgd(), 4.).compute_gradients(loss, [a, b, c, unused], gate_gradients=gate)]
  unscaled = [without_identities(g).op for g in grads[:3]]
  raw = [without_identities(op.inputs[0]).op for op in unscaled]
  assert testing.waits_for(grads[0], unscaled[0]) and testing.waits_for(grads[0], raw[0]) and grads[3] is None
  assert testing.waits_for(grads[0], raw[1]) == same_op
  assert testing.waits_for(grads[0], raw[2]) == testing.waits_for(grads[0], unscaled[2]) == other_op


@pytest.mark.parametrize("gate", [3, -1, None, "GATE_OP"])
def test_a_wrong_gate_is_the_known_error_and_leaves_nothing_behind(gate, graph):
  job, opt = Job(), Optimizer(sgd(), "dynamic")
  before = len(graph.get_operations())
  with pytest.raises(ValueError, match="gate_gradients must be one of: Optimizer.GATE_NONE, .*Not " + str(gate)):
    opt.minimize(job.loss, gate_gradients=gate)
  assert len(graph.get_operations()) == before


def test_a_loss_may_be_a_callable_as_for_tensorflow():
  job = Job()
  train_op = Optimizer(sgd(), "dynamic").minimize(lambda: tf.reduce_sum(job.w * job.x), var_list=[job.w])
  np.testing.assert_array_equal(job.run(train_op, GOOD, BAD), [-GOOD, -GOOD])


def test_the_scale_is_read_once_for_scaling_and_unscaling(graph):
  job = Job()
  opt = Optimizer(sgd(), "dynamic")
  scale_handle = opt.loss_scale.variables()[0].handle

  def reads():
    return [op for op in graph.get_operations() if op.type == "ReadVariableOp" and op.inputs[0] is scale_handle]

  before = len(reads())
  opt.compute_gradients(job.loss)
  assert len(reads()) == before + 1


# --- what it applies -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("use_resource", [True, False], ids=["resource", "reference"])
@pytest.mark.parametrize("scale", ["dynamic", 8.])
def test_an_overflow_changes_nothing_but_the_scale(scale, use_resource):
  job = Job(use_resource=use_resource)
  opt = Optimizer(tf.train.AdamOptimizer(), scale)
  train_op = opt.minimize(job.loss, job.global_step)
  kept = [v for v in tf.global_variables() if v not in opt.loss_scale.variables()]
  job.run(train_op, GOOD)
  before = job.session.run(kept)
  for bad in [np.inf, -np.inf, np.nan]:
    job.session.run(train_op, {job.x: [bad, 0.]})
    for value, kept_value in zip(job.session.run(kept), before):
      np.testing.assert_array_equal(value, kept_value)
  if scale == "dynamic":
    assert job.session.run(opt.loss_scale.variables()) == [2. ** 12, 0]


def test_the_verdict_of_the_step_can_be_fetched_with_it():
  job = Job()
  opt = Optimizer(sgd(), 8.)
  with pytest.raises(RuntimeError, match="gradients_finite is the result of the finite check"):
    print(opt.gradients_finite)
  train_op = opt.minimize(job.loss)
  assert opt.gradients_finite.shape == [] and opt.gradients_finite.dtype == tf.bool
  assert job.run(train_op, GOOD, BAD, GOOD, fetch=opt.gradients_finite) == [[True], [False], [True]]
  with tf.Graph().as_default(), pytest.raises(RuntimeError):
    print(opt.gradients_finite)


@pytest.mark.parametrize("scale", [8., "dynamic"])
def test_every_gradient_is_checked_once(scale, graph):
  """The optimizer and a dynamic scale share one verdict."""
  job = Job()
  Optimizer(sgd(), scale).minimize(job.loss)
  # Of the gradient there are two, of which a step takes one: scaled, and unscaled where it grows by that.
  checks = [op for op in graph.get_operations() if op.type in ("IsFinite", "DebugNumericSummaryV2")]
  assert len(checks) == 2


def test_without_skipping_a_fixed_scale_builds_no_check_and_no_conditional(graph):
  job = Job()
  opt = Optimizer(sgd(), 8., skip_nonfinite=False)
  train_op = opt.minimize(job.loss)
  types = {op.type for op in graph.get_operations()}
  assert not types & {"IsFinite", "Switch", "If", "StatelessIf"}
  np.testing.assert_array_equal(job.run(train_op, GOOD, BAD), [-GOOD, [-2., -np.inf]])
  with pytest.raises(RuntimeError, match="skip_nonfinite=True"):
    print(opt.gradients_finite)


def test_without_skipping_a_dynamic_scale_still_decides():
  job = Job()
  opt = Optimizer(sgd(), "dynamic", skip_nonfinite=False)
  train_op = opt.minimize(job.loss)
  np.testing.assert_array_equal(job.run(train_op, GOOD, BAD), [-GOOD, -GOOD])
  assert job.session.run(opt.gradients_finite, {job.x: GOOD})


class Recorder(mp_compat.LossScale):
  """A user's loss scale that counts its updates and answers as it was told."""

  def __init__(self, answer, moves=False):
    self.answer, self.moves, self.given = answer, moves, None
    self._add_weight("updates", 0, tf.int32)
    self._add_weight("finite_updates", 0, tf.int32)

  def __call__(self):
    return tf.constant(4.)

  def update(self, grads):
    self.given = list(grads)
    finite = tf.add_n([tf.reduce_sum(g) for g in grads if g is not None])
    seen = tf.cast(tf.is_finite(finite), tf.int32)
    op = tf.group(self._weight("updates").assign_add(1), self._weight("finite_updates").assign_add(seen))
    return op, self.answer() if callable(self.answer) else self.answer

  def get_config(self):
    return {}


@pytest.mark.parametrize("answer, applied", [
    (True, True), (False, False), (np.bool_(True), True), (np.bool_(False), False),
    (lambda: tf.placeholder_with_default(True, []), True), (lambda: tf.placeholder_with_default(False, []), False)])
def test_a_users_loss_scale_is_updated_at_every_step_and_its_word_is_obeyed(answer, applied):
  job = Job()
  loss_scale = Recorder(answer)
  train_op = Optimizer(sgd(), loss_scale).minimize(job.loss, job.global_step)
  after = job.run(train_op, GOOD, BAD)
  np.testing.assert_array_equal(after, [-GOOD * applied] * 2)
  assert job.session.run([job.global_step] + loss_scale.variables()) == [int(applied), 2, 1]


def test_a_users_loss_scale_is_given_the_very_gradients():
  job = Job()
  loss_scale = Recorder(True)
  opt = Optimizer(sgd(), loss_scale)
  grads_and_vars = opt.compute_gradients(job.loss, [job.w, tf.get_variable("unused", [])])
  opt.apply_gradients(grads_and_vars)
  assert len(loss_scale.given) == 2 and loss_scale.given[0] is grads_and_vars[0][0] and loss_scale.given[1] is None


@pytest.mark.parametrize("loss_scale", [mp_compat.DynamicLossScale, testing.native.DynamicLossScale])
def test_an_overflow_that_was_clipped_away_skips_the_step_and_lowers_the_scale(loss_scale):
  job = Job()
  opt = Optimizer(sgd(), loss_scale())
  grads_and_vars = [(tf.clip_by_value(g, -1., 1.), v) for g, v in opt.compute_gradients(job.loss)]
  train_op = opt.apply_gradients(grads_and_vars)
  np.testing.assert_array_equal(job.run(train_op, GOOD, BAD), [[-1., -1.]] * 2)
  assert job.session.run(opt.loss_scale()) == 2. ** 14


def test_a_users_loss_scale_sees_an_overflow_that_was_clipped_away():
  job = Job()
  loss_scale = Recorder(True)
  opt = Optimizer(sgd(), loss_scale)
  train_op = opt.apply_gradients([(tf.clip_by_value(g, -1., 1.), v) for g, v in opt.compute_gradients(job.loss)])
  job.run(train_op, GOOD, BAD)
  assert job.session.run(loss_scale.variables()) == [2, 1]


@pytest.mark.parametrize("use_resource", [True, False], ids=["resource", "reference"])
def test_gradients_read_from_accumulators_are_applied_without_a_backward_pass(use_resource):
  job = Job()
  opt = Optimizer(sgd(), "dynamic")
  (grad, _), = opt.compute_gradients(job.loss)
  total = tf.Variable([0., 0.], trainable=False, use_resource=use_resource)
  accumulate = tf.assign_add(total, grad)
  train_op = opt.apply_gradients([(tf.convert_to_tensor(total), job.w)])
  job.session.run(tf.global_variables_initializer())
  for x in [GOOD, GOOD]:
    job.session.run(accumulate, {job.x: x})
  job.session.run(train_op)  # x is not fed: the backward pass would fail
  np.testing.assert_array_equal(job.session.run(job.w), -2 * GOOD)


def test_a_conditional_around_apply_gradients_works():
  job = Job()
  opt = Optimizer(tf.train.MomentumOptimizer(1., 0.), "dynamic")
  grads_and_vars = opt.compute_gradients(job.loss)
  wanted = tf.placeholder_with_default(True, [])
  train_op = tf.cond(wanted, lambda: opt.apply_gradients(grads_and_vars, job.global_step), tf.no_op)
  np.testing.assert_array_equal(job.run(train_op, GOOD, BAD), [-GOOD, -GOOD])
  job.session.run(train_op, {job.x: GOOD, wanted: False})
  np.testing.assert_array_equal(job.session.run(job.w), -GOOD)


def test_a_loop_of_steps_inside_the_graph_works():
  job = Job()
  opt = Optimizer(sgd(), mp_compat.DynamicLossScale(8., 2))

  def step(i):
    x = tf.where(tf.equal(i, 2), tf.constant([np.inf, 1.], tf.float32), job.x)
    with tf.control_dependencies([opt.minimize(tf.reduce_sum(job.w * x), var_list=[job.w])]):
      return tf.identity(i) + 1

  loop = tf.while_loop(lambda i: i < 5, step, [0], parallel_iterations=1)
  np.testing.assert_array_equal(job.run(loop, GOOD), [-4 * GOOD])
  assert job.session.run(opt.loss_scale()) == 16.  # 8, 16, 8, 8, 16


# --- names ---------------------------------------------------------------------------------------------------------


def names():
  return [v.op.name for v in tf.global_variables()]


@pytest.mark.parametrize("use_resource", [True, False], ids=["resource", "reference"])
@pytest.mark.parametrize("scope", [None, "head"])
@pytest.mark.parametrize("name", sorted(testing.OPTIMIZERS))
def test_variables_have_the_names_that_the_inner_optimizer_alone_gives_them(name, scope, use_resource):
  seen = []
  for wrap in [lambda opt: opt, lambda opt: Optimizer(opt, 8.)]:
    with tf.Graph().as_default():
      job = Job(use_resource=use_resource)
      with tf.name_scope(scope):
        for _ in range(2):
          wrap(testing.OPTIMIZERS[name]()).minimize(job.loss, job.global_step)
      seen.append(names())
  assert seen[0] == seen[1]


@pytest.mark.parametrize("name", ["Adam", "Momentum"])
def test_scopes_with_reuse_share_weights_and_slots_but_no_scale(name):
  """A second optimizer in the scope has counters and a scale of its own, named as TensorFlow names them."""
  seen = []
  for wrap in [lambda opt: opt, lambda opt: Optimizer(opt, "dynamic"),
               lambda opt: testing.native.MixedPrecisionLossScaleOptimizer(opt, testing.native.DynamicLossScale())]:
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


def test_a_dynamic_scale_adds_its_two_variables_and_no_other():
  job = Job()
  Optimizer(tf.train.AdamOptimizer(), "dynamic").minimize(job.loss)
  assert sorted(names()) == ["beta1_power", "beta2_power", "current_loss_scale", "global_step", "good_steps", "w",
                             "w/Adam", "w/Adam_1"]


def test_the_train_op_is_one_op_of_the_given_name_and_the_only_one_in_its_collection(graph):
  job = Job()
  opt = Optimizer(tf.train.MomentumOptimizer(1., .9), "dynamic")
  train_ops = [opt.minimize(job.loss), opt.minimize(job.loss, name="second")]
  assert [op.name for op in train_ops] == ["Momentum", "second"]
  assert tf.get_collection(tf.GraphKeys.TRAIN_OP) == train_ops
  assert all(isinstance(op, tf.Operation) and graph.is_fetchable(op) for op in train_ops)


# --- what it is given ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pairs", [iter, tuple, lambda pairs: (pair for pair in pairs), lambda pairs: map(list, pairs)])
def test_pairs_come_in_any_iterable(pairs):
  job = Job()
  opt = Optimizer(sgd(), "dynamic")
  train_op = opt.apply_gradients(pairs(opt.compute_gradients(job.loss)))
  np.testing.assert_array_equal(job.run(train_op, GOOD), [-GOOD])
