"""Tests of eager mode and tf.function: callable losses, tapes, and equality with
TensorFlow's class.
"""

import contextlib
import copy
import functools

import numpy as np
import pytest
import tensorflow

import mp_compat
from tests import testing
from tests.programs.table import VERSION
from tests.testing import Optimizer
from tests.testing import tf

pytestmark = pytest.mark.usefixtures("eager")
OVERFLOWS = (1, 4, 5)


def sgd(loss_scale="dynamic", rate=1.0):
  return Optimizer(tf.train.GradientDescentOptimizer(rate), loss_scale)


def train(api, name, as_function, steps=9):
  """Trains two variables. Returns the variables, the global step and the loss scale
  state after every step.
  """
  opt = api.MixedPrecisionLossScaleOptimizer(
    testing.OPTIMIZERS[name](), api.DynamicLossScale(8.0, increment_period=2)
  )
  w, table = (
    tensorflow.Variable([1.0, -2.0, 3.0]),
    tensorflow.Variable(np.ones([4, 3], np.float32)),
  )
  global_step = tensorflow.Variable(0, dtype=tf.int64, trainable=False)

  def step(x):
    opt.minimize(
      lambda: tf.reduce_sum(x * w * w) + tf.reduce_sum(tf.gather(table, [1, 3, 1]) * x),
      global_step=global_step,
      var_list=[w, table],
    )

  if as_function:
    step = tensorflow.function(step)
  history = []
  for x in testing.feeds(steps, OVERFLOWS):
    step(tf.constant(x))
    state = {
      "w": w,
      "table": table,
      "global_step": global_step,
      **opt._loss_scale._weights,
    }
    history.append({str(key): variable.numpy() for key, variable in state.items()})
  return history, opt


@pytest.mark.each_choice
@pytest.mark.parametrize("as_function", [False, True], ids=["eager", "function"])
@pytest.mark.parametrize("name", ["GradientDescent", "Momentum", "Adam"])
def test_eager_training_matches_tensorflow(name, as_function):
  ours, opt = train(mp_compat, name, as_function)
  theirs, _ = train(testing.native, name, as_function)
  testing.assert_same(ours, theirs)
  assert ours[-1]["global_step"] == 9 - len(OVERFLOWS)
  assert len(opt.loss_scale.variables()) == 2 and "current_loss_scale=" in repr(
    opt.loss_scale
  )


def test_minimize_returns_none():
  opt = sgd(8.0)
  w = tensorflow.Variable([1.0, 2.0])
  for x, finite in [(1.0, True), (np.nan, False)]:
    assert opt.minimize(lambda x=x: tf.reduce_sum(w) * x, var_list=[w]) is None
    assert bool(opt.gradients_finite) == finite
    np.testing.assert_array_equal(w.numpy(), [0.0, 1.0])


@pytest.mark.parametrize(
  "decorate",
  [
    lambda step: step,
    tensorflow.function,
    pytest.param(
      functools.partial(tensorflow.function, jit_compile=True),
      marks=pytest.mark.skipif(VERSION < (2, 5), reason="no jit_compile before 2.5"),
    ),
  ],
  ids=["eager", "function", "compiled"],
)
def test_steps_with_use_locking_train(decorate):
  opt = Optimizer(tf.train.GradientDescentOptimizer(1.0, use_locking=True), "dynamic")
  w = tensorflow.Variable([1.0, 2.0])

  @decorate
  def step(x):
    opt.minimize(lambda: tf.reduce_sum(w) * x, var_list=[w])

  for x in (np.inf, 1.0):
    step(tf.constant(x))
  np.testing.assert_array_equal(w.numpy(), [0.0, 1.0])
  assert float(opt.loss_scale()) == 2.0**14


@pytest.mark.parametrize("as_function", [False, True], ids=["eager", "function"])
@pytest.mark.parametrize(
  "wrap, warnings",
  [
    (lambda opt: opt, 0),
    (lambda opt: testing.native.MixedPrecisionLossScaleOptimizer(opt, 4.0), 1),
    (lambda opt: testing.native.MixedPrecisionLossScaleOptimizer(opt, "dynamic"), 1),
  ],
)
def test_loss_scaled_twice_warns_once(as_function, wrap, warnings, caplog):
  opt = wrap(sgd())
  w = tensorflow.Variable([1.0, 2.0])

  def step():
    opt.minimize(lambda: tf.reduce_sum(w * w), var_list=[w])

  if as_function:
    step = tensorflow.function(step)
  with caplog.at_level("WARNING", "tensorflow"):
    step()
    step()
  assert caplog.text.count("seems to be scaled already") == warnings


def test_eager_unscaling_uses_current_scale():
  """The loss is scaled in a function, and once in eager mode, while the scale
  changes.
  """
  opt = sgd(mp_compat.DynamicLossScale(8.0, 1), rate=0.0)
  w = tensorflow.Variable([1.0, 2.0])

  def compute():
    with tf.GradientTape() as tape:
      loss = opt.scale_loss(tf.reduce_sum(w * w))
    return tape.gradient(loss, [w])

  in_function = tensorflow.function(compute)
  for step_compute in [in_function, in_function, compute, in_function]:
    scale, scaled = opt.loss_scale().numpy(), step_compute()
    assert scaled[0].numpy().tolist() == [2.0 * scale, 4.0 * scale]
    grads = opt.unscale_gradients(scaled)
    opt.apply_gradients(zip(grads, [w]))
    assert grads[0].numpy().tolist() == [2.0, 4.0]
  assert opt.loss_scale().numpy() == 128.0


@pytest.mark.parametrize("skip_nonfinite", [False, True])
@pytest.mark.parametrize("applies", [False, True])
@pytest.mark.parametrize("divides", [False, True])
def test_function_takes_eager_loss_scale(divides, applies, skip_nonfinite, warnings):
  opt = Optimizer(
    tf.train.GradientDescentOptimizer(1.0),
    testing.EagerTensors(applies),
    skip_nonfinite=skip_nonfinite,
  )
  w = tensorflow.Variable([1.0, 2.0])

  @tensorflow.function
  def step(x):
    with tf.GradientTape() as tape:
      scaled = opt.scale_loss(tf.reduce_sum(w * x))
    grad = tape.gradient(scaled, w)
    if divides:
      grad = grad / opt.loss_scale()
    opt.apply_gradients([(grad, w)])

  step(tf.constant([0.25, 0.5]))
  factor = (1.0 if divides else 8.0) * applies
  np.testing.assert_array_equal(w.numpy(), [1.0 - 0.25 * factor, 2.0 - 0.5 * factor])
  warning = "unscale_gradients() was not called"
  assert [warning in each for each in warnings] == ([] if divides else [True])


@pytest.mark.parametrize("as_function", [False, True], ids=["eager", "function"])
def test_gradients_of_tensors_are_computed(as_function):
  w, x = tensorflow.Variable([1.0, 2.0]), tf.constant([3.0, 4.0])
  opt = testing.Optimizer(tf.train.GradientDescentOptimizer(0.5), 8.0)

  def step(x):
    pairs = [
      opt.compute_gradients(lambda: tf.reduce_sum(w * x), var_list)
      for var_list in ([x], [w, x])
    ]
    opt.apply_gradients(pairs[1][:1])
    return [[grad for grad, _ in each] for each in pairs]

  (alone,), (of_w, beside) = (tensorflow.function(step) if as_function else step)(x)
  assert [each.numpy().tolist() for each in (alone, beside, of_w)] == [
    [1.0, 2.0],
    [1.0, 2.0],
    [3.0, 4.0],
  ]
  assert w.numpy().tolist() == [-0.5, 0.0]


def test_non_callable_loss_raises():
  expected = "(?s)`loss` passed to Optimizer.compute_gradients should be a function.*one that.*disable_v2_behavior"
  with pytest.raises(RuntimeError, match=expected):
    sgd().compute_gradients(tf.constant(1.0), [tensorflow.Variable(1.0)])


def test_eager_scale_has_graph_variables():
  """So has its copy, as Estimator makes of its params."""
  loss_scale = mp_compat.DynamicLossScale(8.0, 1)
  loss_scale.update([tf.constant(1.0)])
  with tf.Graph().as_default(), testing.session() as sess:
    scales = [loss_scale(), copy.deepcopy({"loss_scale": loss_scale})["loss_scale"]()]
    sess.run(tf.global_variables_initializer())
    assert sess.run(scales) == [8.0, 8.0]
  assert loss_scale().numpy() == copy.deepcopy(loss_scale)().numpy() == 16.0


def together(opt, w, x):
  """Only the second optimizer's gradients overflow."""
  other = sgd(opt.loss_scale, rate=0.0)
  pairs = [(opt, opt.compute_gradients(lambda: tf.reduce_sum(w * [0.25, 0.5]), [w]))]
  pairs.append((other, other.compute_gradients(lambda: tf.reduce_sum(w * x), [w])))
  result = mp_compat.apply_gradients_together(pairs)
  assert not tf.executing_eagerly() or result is None


def clipped(opt, w, x):
  grads = [grad for grad, _ in opt.compute_gradients(lambda: tf.reduce_sum(w * x), [w])]
  opt.apply_gradients(
    zip(mp_compat.finite_or_zero(mp_compat.clip_by_global_norm(grads, 100.0)[0]), [w])
  )


def reported(opt, w, x):
  opt.apply_gradients(opt.compute_gradients(lambda: tf.reduce_sum(w * x), [w]))
  mp_compat.nonfinite_gradients(opt)


def taped(opt, w, x):
  with tf.GradientTape() as tape:
    scaled = opt.scale_loss(tf.reduce_sum(w * x))
  opt.apply_gradients(zip(opt.unscale_gradients([tape.gradient(scaled, w)]), [w]))


def updated_by_hand(opt, w, x):
  grads = [grad for grad, _ in opt.compute_gradients(lambda: tf.reduce_sum(w * x), [w])]
  _, apply = opt.loss_scale.update(grads)
  w.assign_sub(tf.where(apply, x, tf.zeros_like(x)))


@pytest.mark.parametrize(
  "step, as_function",
  [(step, True) for step in (together, clipped, reported, taped, updated_by_hand)]
  + [(together, False)],
)
def test_function_calls_public_functions(step, as_function):
  """AutoGraph of TensorFlow 1.15 rewrites functions, wrongly where a comprehension has
  two loops.
  """
  opt = sgd()
  w = tensorflow.Variable([1.0, 2.0])
  for_w = functools.partial(step, opt, w)
  function = tensorflow.function(for_w) if as_function else for_w
  for x in [[0.25, 0.5], [np.inf, 0.5], [0.25, 0.5]]:
    function(tf.constant(x))
  np.testing.assert_array_equal(w.numpy(), [0.5, 1.0])
  assert opt.loss_scale().numpy() == 2.0**14


class WithRate(tf.train.AdamOptimizer):
  """Makes variables in name scopes of its own."""

  def apply_gradients(self, grads_and_vars, global_step=None, name=None):
    with tf.name_scope("schedule"), tf.init_scope():
      self.made = self.__dict__.get("made") or [tensorflow.Variable(1.0, name="rate")]
    return super().apply_gradients(grads_and_vars, global_step, name)


def names_made(wrap, as_function, strategy, scope):
  """Returns the names of the variables that the inner optimizer makes, without slots,
  whose numbers rise.
  """
  inner = WithRate(0.1)
  opt = wrap(inner)

  def step():
    with tf.name_scope(scope) if scope else contextlib.nullcontext():
      opt.minimize(lambda: w * w, var_list=[w])
    return 0

  def train():
    return (getattr(strategy, "run", None) or strategy.experimental_run_v2)(step)

  with strategy.scope():
    w = tensorflow.Variable(1.0, name="w")
    (tensorflow.function(train) if as_function else train)()
  return sorted(
    variable.name
    for variable in inner.variables() + inner.made
    if not variable.name.startswith("w/")
  )


@pytest.mark.each_choice
@pytest.mark.parametrize("scope", [None, "head"])
@pytest.mark.parametrize("replicas", [False, True], ids=["alone", "replicas"])
@pytest.mark.parametrize("as_function", [False, True], ids=["eager", "function"])
def test_variables_have_names_of_inner_optimizer(as_function, replicas, scope):
  strategy = (
    tf.distribute.MirroredStrategy(["/cpu:0"])
    if replicas
    else tf.distribute.get_strategy()
  )
  expected, names = [
    names_made(wrap, as_function, strategy, scope)
    for wrap in (lambda opt: opt, lambda opt: Optimizer(opt, "dynamic"))
  ]
  assert names == expected and names[-1].endswith("schedule/rate:0")


def test_restores_checkpoint_of_session(tmp_path):
  path = str(tmp_path / "model")
  with tf.Graph().as_default(), testing.session() as sess:
    w = tf.get_variable("w", initializer=[1.0, 2.0], use_resource=True)
    train_op = Optimizer(tf.train.AdamOptimizer(0.1), "dynamic").minimize(
      tf.reduce_sum(w * w), var_list=[w]
    )
    sess.run(tf.global_variables_initializer())
    for _ in range(3):
      sess.run(train_op)
    tf.train.Saver().save(sess, path)
  w = tensorflow.Variable([1.0, 2.0], name="w")
  inner = tf.train.AdamOptimizer(0.1)
  opt = Optimizer(inner, "dynamic")
  opt.minimize(lambda: tf.reduce_sum(w * w), var_list=[w])
  powers = list(inner._get_beta_accumulators())
  tf.train.Saver([w] + powers).restore(None, path)
  assert [float(power.numpy()) for power in powers] == pytest.approx([0.9**4, 0.999**4])
