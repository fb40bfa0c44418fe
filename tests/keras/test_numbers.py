"""Tests that the Keras wrapper trains with exactly the numbers of TensorFlow's class
and of the inner optimizer.
"""

import contextlib

import numpy as np
import pytest
import tensorflow

import mp_compat
from mp_compat import keras as mp_keras
from tests import testing
from tests.keras import cases as keras_cases
from tests.testing import tf

pytestmark = pytest.mark.usefixtures("eager")
# the first steps of a float16 run usually overflow
STEPS, OVERFLOWS = (50, (0, 1, 4, 5, 40, 47))
SCALE, GROWTH = 1024.0, 7
OPTIMIZERS = dict(keras_cases.OPTIMIZERS, averages=keras_cases.make_averaging_sgd)
GRADIENT = 1e-9  # underflows in float16


def each_optimizer(families):
  """Returns a decorator: by default Adam of each family, others of one."""
  by_default = ("Adam", "averages-newer", "SGD-keras3")
  return pytest.mark.parametrize(
    "family,name",
    [
      pytest.param(
        family,
        name,
        id="{}-{}".format(family.name, name),
        marks=[]
        if name in by_default or "{}-{}".format(name, family.name) in by_default
        else [pytest.mark.matrix],
      )
      for family in families
      for name in sorted(OPTIMIZERS)
    ],
  )


@pytest.mark.parametrize(
  "as_function",
  [pytest.param(False, marks=pytest.mark.matrix), True],
  ids=["eager", "function"],
)
@each_optimizer(keras_cases.FAMILIES)
def test_wrapper_trains_as_native_class(family, name, as_function):
  makes_dense = keras_cases.VERSION < (2, 3)  # of sparse gradients
  make = OPTIMIZERS[name]
  ours = mp_keras.LossScaleOptimizer(
    make(family.optimizers), initial_scale=SCALE, dynamic_growth_steps=GROWTH
  )
  theirs = family.native_dynamic(make(family.optimizers), SCALE, GROWTH)
  sparse = not makes_dense and name != "averages"
  our_states, their_states = [
    keras_cases.train(
      opt, testing.feeds(STEPS, OVERFLOWS), as_function=as_function, sparse=sparse
    )
    for opt in (ours, theirs)
  ]
  # In eager mode, the native class makes slots in the first step that it applies.
  for step in (0, 1):
    our_states[step] = {name: our_states[step][name] for name in their_states[step]}
  testing.assert_same(our_states, their_states)
  assert int(ours.iterations) == int(keras_cases.to_numpy(theirs.iterations))
  assert int(ours.iterations) == (
    STEPS if family.counts_skipped else STEPS - len(OVERFLOWS)
  )
  assert float(keras_cases.scale_of(ours)) == float(keras_cases.scale_of(theirs))


@keras_cases.needs_keras_3
@pytest.mark.parametrize(
  "name",
  [
    pytest.param(name, marks=[] if name == "Adam" else pytest.mark.slow)
    for name in keras_cases.FAMILIES[-1].classes
  ],
)
def test_keras_3_fit_equals_native(name):
  """Ends with the averages of the weights, which start in iteration 0."""
  keras = tensorflow.keras
  x = np.random.RandomState(0).normal(size=[10, 3]).astype(np.float32)
  x[[0, 1, 5], 0] = np.inf
  weights = []
  for wrap in (keras.optimizers.LossScaleOptimizer, mp_keras.LossScaleOptimizer):
    model = keras.Sequential(
      [keras.layers.Input([3]), keras.layers.Dense(4, kernel_initializer="ones")]
    )
    inner = getattr(keras.optimizers, name)(use_ema=True, ema_momentum=0.5)
    model.compile(wrap(inner, initial_scale=SCALE), "mse", jit_compile=False)
    model.fit(x, np.ones([10, 4], np.float32), batch_size=1, shuffle=False, verbose=0)
    weights.append(
      [
        keras_cases.to_numpy(value).tolist()
        for value in model.weights + inner.variables
      ]
    )
  assert weights[0] == weights[1] and np.isfinite(weights[0][0]).all()


@pytest.mark.matrix
@each_optimizer(keras_cases.FAMILIES)
def test_finite_steps_equal_inner_optimizer(family, name):
  make, sparse = OPTIMIZERS[name], name != "averages"
  ours = mp_keras.LossScaleOptimizer(
    make(family.optimizers),
    initial_scale=SCALE,
    dynamic_growth_steps=GROWTH,
    count_skipped_steps=False,
  )
  xs = list(testing.feeds(30, OVERFLOWS))
  wrapped = keras_cases.train(ours, xs, sparse=sparse)
  alone = keras_cases.train(
    make(family.optimizers), [x for x in xs if np.isfinite(x).all()], sparse=sparse
  )
  testing.assert_same(
    [state for state, x in zip(wrapped, xs) if np.isfinite(x).all()], alone
  )
  assert int(ours.iterations) == 30 - 4


@keras_cases.each_family
def test_fixed_scale_skips_overflow(family):
  opt = mp_keras.LossScaleOptimizer(family.optimizers.SGD(0.1), 64)
  history = keras_cases.train(opt, testing.feeds(4, (1, 3)))
  for i in (1, 3):
    assert history[i]["w"].tobytes() == history[i - 1]["w"].tobytes()
  assert float(keras_cases.scale_of(opt)) == 64 and int(opt.iterations) == (
    4 if family.counts_skipped else 2
  )


@keras_cases.each_family_of_keras_2
def test_skipped_first_step_makes_slots(family):
  opt = mp_keras.LossScaleOptimizer(family.optimizers.Adam(0.1))
  (state,) = keras_cases.train(opt, testing.feeds(1, (0,)), sparse=False)
  assert len(state) == 7 and not any(
    value.any() for name, value in state.items() if "/m" in name or "/v" in name
  )


@keras_cases.each_family
@pytest.mark.parametrize("counts", [False, True])
def test_skipped_steps_count_on_request(family, counts):
  opt = mp_keras.LossScaleOptimizer(
    family.optimizers.SGD(0.1), "dynamic", count_skipped_steps=counts
  )
  keras_cases.train(opt, testing.feeds(4, (0, 3)))
  assert int(opt.iterations) == (4 if counts else 2)


@keras_cases.each_family
def test_custom_loss_scale_decides(family):

  class EverySecond(mp_compat.LossScale):
    """Applies every second step and skips the others."""

    def __init__(self):
      self._add_weight("calls", 0, tf.int64)

    def __call__(self):
      return tf.constant(4.0)

    def update(self, grads):
      calls = self._weight("calls")
      calls.assign_add(1)
      return None, tf.equal(calls % 2, 0)

    def get_config(self):
      return {}

  opt = mp_keras.LossScaleOptimizer(family.optimizers.SGD(0.1), EverySecond())
  history = keras_cases.train(opt, testing.feeds(4))
  weights = [[1.0, -2.0, 3.0]] + [state["w"].tolist() for state in history]
  assert [after != before for before, after in zip(weights, weights[1:])] == [
    False,
    True,
    False,
    True,
  ]


@pytest.mark.each_choice
@pytest.mark.parametrize("applies", [False, True])
@keras_cases.each_family
def test_function_takes_eager_loss_scale(family, applies):
  scale = testing.EagerTensors(applies)
  opt = mp_keras.LossScaleOptimizer(family.optimizers.SGD(1.0), scale)
  w = tensorflow.Variable([1.0, 2.0])

  @tensorflow.function
  def step(x):
    with tf.GradientTape() as tape:
      scaled = opt.get_scaled_loss(tf.reduce_sum(w * x))
    grads = opt.get_unscaled_gradients(tape.gradient(scaled, [w]))
    opt.apply_gradients(zip(grads, [w]))

  step(tf.constant([0.25, 0.5]))
  assert w.numpy().tolist() == ([0.75, 1.5] if applies else [1.0, 2.0])


@pytest.mark.parametrize("applies", [False, True])
@keras_cases.needs_keras_3
def test_fit_takes_eager_loss_scale(applies):
  keras = tensorflow.keras
  model = keras.Sequential(
    [keras.layers.Input([1]), keras.layers.Dense(1, kernel_initializer="ones")]
  )
  scale = testing.EagerTensors(applies)
  opt = mp_keras.LossScaleOptimizer(keras.optimizers.SGD(0.25), scale)
  model.compile(opt, lambda _, y: y, jit_compile=False)
  model.fit(np.ones([2, 1], np.float32), np.zeros([2, 1]), verbose=0)
  assert model.get_weights()[0].tolist() == [[0.75 if applies else 1.0]]


def test_tensorflow_loss_scale_is_updated():
  scale = testing.native.DynamicLossScale(8.0, increment_period=2)
  opt = mp_keras.LossScaleOptimizer(keras_cases.V2.optimizers.SGD(0.1), scale)
  keras_cases.train(opt, testing.feeds(5, (1, 4)))
  assert scale().numpy() == float(keras_cases.scale_of(opt)) == 4.0  # 8, 4, 4, 8, 4


@keras_cases.each_family
def test_clipped_overflow_skips_step(family):
  opt = mp_keras.LossScaleOptimizer(family.optimizers.SGD(0.1), initial_scale=8.0)
  w = tensorflow.Variable([1.0, 2.0])

  @tensorflow.function
  def step(x):
    with tf.GradientTape() as tape:
      loss = opt.get_scaled_loss(tf.reduce_sum(w * x))
    grads = opt.get_unscaled_gradients(tape.gradient(loss, [w]))
    opt.apply_gradients([(tf.clip_by_value(grads[0], -1.0, 1.0), w)])

  step(tf.constant([1.0, np.inf]))
  assert w.numpy().tolist() == [1.0, 2.0] and float(keras_cases.scale_of(opt)) == 4.0
  step(tf.constant([1.0, 5.0]))
  assert w.numpy().tolist() == pytest.approx([0.9, 1.9])


@keras_cases.each_family
@pytest.mark.parametrize("clip", [{"clipvalue": 0.5}, {"clipnorm": 0.5}], ids=str)
def test_clipping_uses_unscaled_gradients(family, clip):
  opt = family.optimizers.SGD(0.1, **clip)
  # has no gradient; the others make variables for it
  unused = [tensorflow.Variable(1.0)] * (family.name == "v2")
  alone = keras_cases.Run(opt, sparse=False)
  wrapped = keras_cases.Run(
    mp_keras.LossScaleOptimizer(type(opt)(0.1, **clip), 1024), sparse=False
  )
  for x in testing.feeds(5):
    wrapped.optimizer.minimize(
      lambda x=x: wrapped.loss(x), [wrapped.w, wrapped.table] + unused
    )
    if hasattr(alone.optimizer, "minimize"):
      alone.optimizer.minimize(lambda x=x: alone.loss(x), [alone.w, alone.table])
    else:
      alone.step(x)
    testing.assert_same([wrapped.state()], [alone.state()])


@keras_cases.each_family
@pytest.mark.parametrize("limit", ["clipvalue", "clipnorm"])
@pytest.mark.parametrize("overflow", [np.inf, -np.inf, np.nan])
def test_inner_clipping_hides_no_overflow(family, limit, overflow):
  """Keras up to TensorFlow 2.3 clips before it applies."""
  opt = mp_keras.LossScaleOptimizer(
    family.optimizers.SGD(0.1, **{limit: 0.5}), initial_scale=2.0**15
  )
  w, x = tensorflow.Variable([1.0, 2.0]), tensorflow.Variable([1.0, overflow])
  opt.minimize(lambda: tf.reduce_sum(w * x), [w])
  assert w.numpy().tolist() == [1.0, 2.0]
  assert float(keras_cases.scale_of(opt)) == 2.0**14
  x.assign([3.0, 0.0])
  opt.minimize(lambda: tf.reduce_sum(w * x), [w])
  assert w.numpy().tolist() == pytest.approx([0.95, 2.0])


@pytest.mark.parametrize("limit", ["clipvalue", "clipnorm"])
def test_sparse_overflow_is_not_clipped(limit):
  opt = mp_keras.LossScaleOptimizer(
    keras_cases.V2.optimizers.SGD(0.1, **{limit: 0.5}), initial_scale=8.0
  )
  table, x = tensorflow.Variable(np.ones([3, 2], np.float32)), tensorflow.Variable(1.0)
  for value, expected in [(np.inf, [1.0, 1.0]), (0.25, [0.975, 0.975])]:
    x.assign(value)
    opt.minimize(lambda: x * tf.reduce_sum(tf.gather(table, [1])), [table])
    assert table.numpy()[1].tolist() == pytest.approx(expected)


@pytest.mark.skipif(keras_cases.VERSION < (2, 2), reason="`fit` has no run_eagerly")
@keras_cases.each_family
def test_eager_fit_skips_clipped_overflow(family):
  keras = family.keras
  opt = mp_keras.LossScaleOptimizer(
    family.optimizers.SGD(0.1, clipvalue=0.5), "dynamic"
  )
  dense = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")
  dense.build([None, 2])
  if family.name == "v2":
    dense.add_weight("unused", [])  # has no gradient
  model = keras.Sequential([dense])
  model.compile(opt, lambda _, y: y, run_eagerly=True)
  for x in ([1.0, np.inf], [1.0, 2.0]):
    model.fit(np.array([x], np.float32), np.zeros([1, 1]), verbose=0)
  assert model.get_weights()[0].ravel().tolist() == pytest.approx([0.95, 0.95])
  assert float(keras_cases.scale_of(opt)) == 2.0**14


@pytest.mark.skipif(
  keras_cases.VERSION < (2, 4), reason="gradient_aggregator needs TensorFlow 2.4"
)
@pytest.mark.parametrize("as_function", [False, True], ids=["eager", "function"])
def test_aggregator_hides_no_overflow(as_function):
  def clip(grads_and_vars):
    return [(tf.clip_by_value(grad, -0.5, 0.5), var) for grad, var in grads_and_vars]

  opt = mp_keras.LossScaleOptimizer(
    keras_cases.V2.optimizers.SGD(0.1, gradient_aggregator=clip), 8.0
  )
  w = tensorflow.Variable([1.0, 2.0])

  def apply(grad):
    opt.apply_gradients([(grad, w)])

  apply = tensorflow.function(apply) if as_function else apply
  apply(tf.constant([1.0, np.inf]))
  assert w.numpy().tolist() == [1.0, 2.0]
  apply(tf.constant([1.0, 0.25]))
  assert w.numpy().tolist() == pytest.approx([0.95, 1.975])


@keras_cases.each_family
def test_step_that_raises_does_not_count(family):
  class Failing(family.optimizers.SGD):
    """Raises an error when it applies gradients."""

    def apply_gradients(self, grads_and_vars, *args, **kwargs):
      raise RuntimeError("not applied")

    def apply(self, *args, **kwargs):
      raise RuntimeError("not applied")

  opt = mp_keras.LossScaleOptimizer(
    Failing(0.1), initial_scale=8.0, dynamic_growth_steps=2
  )
  v = tensorflow.Variable(1.0)
  for _ in range(3):
    with pytest.raises(RuntimeError, match="not applied"):
      opt.minimize(lambda: v * v, [v])
    assert float(keras_cases.scale_of(opt)) == 8.0 and int(opt.dynamic_counter) == 0


@contextlib.contextmanager
def mixed_float16(keras):
  """Lets models compute in float16, so that `compile` scales their loss; yields the
  policy for their layers.

  Yields None if the global policy applies.
  """
  module = keras.mixed_precision
  if keras_cases.VERSION < (2, 0):  # There is no global policy.
    yield module.experimental.Policy("mixed_float16")
    return
  if keras_cases.VERSION < (2, 4):
    # after "float32", the graph rewrite would be refused
    set_policy, initial = (module.experimental.set_policy, None)
  else:
    set_policy, initial = module.set_global_policy, "float32"
  set_policy("mixed_float16")
  try:
    yield None
  finally:
    set_policy(initial)


def fit(family, optimizer):
  """Trains one step; returns the model and the decrease of its weights."""
  with mixed_float16(family.keras) as policy:
    model = family.keras.Sequential(
      [
        family.keras.layers.Dense(
          2, input_shape=(1,), use_bias=False, kernel_initializer="ones", dtype=policy
        )
      ]
    )
    model.compile(
      optimizer=optimizer,
      loss=lambda _, y: tf.reduce_sum(tf.cast(y, tf.float32), -1) * GRADIENT,
    )
    before = model.get_weights()[0]
    model.fit(np.ones([1, 1], np.float32), np.ones([1, 2], np.float32), verbose=0)
  return model, before - model.get_weights()[0]


@keras_cases.each_family
def test_mixed_float16_fit_applies_small_gradients(family):
  opt = mp_keras.LossScaleOptimizer(family.optimizers.SGD(1e6), "dynamic")
  model, decrease = fit(family, opt)
  assert model.optimizer is opt  # not wrapped again
  assert np.allclose(decrease, GRADIENT * 1e6, rtol=0.01)
  assert (
    int(keras_cases.to_numpy(opt.iterations)) == 1 and int(opt.dynamic_counter) == 1
  )
  _, decrease = fit(family, mp_keras.LossScaleOptimizer(family.optimizers.SGD(1e6), 1))
  assert (decrease == 0).all()  # underflow


def test_eager_scale_equals_scale_in_function():
  """Products round, and overflow above the ceiling. TensorFlow's graph optimizer
  replaces a division by a product.
  """
  histories = []
  for make in (lambda update: update, tensorflow.function):
    scale = mp_compat.DynamicLossScale(
      1000.3, 2, multiplier=1.1, backoff=2.0, overflow_tolerance=2
    )
    largest = mp_compat.DynamicLossScale(2.0**126, 1, multiplier=8.0)
    update = make(
      lambda x, scales=(scale, largest): [
        loss_scale.update([x])[1] for loss_scale in scales
      ]
    )
    history = []
    for step in range(20):
      update(tf.constant([1.0, np.inf if step in (3, 4, 8, 9, 10) else 2.0]))
      history.append(
        [value.numpy().tolist() for value in scale.variables() + largest.variables()]
      )
    histories.append(history)
  assert histories[0] == histories[1] and histories[0][0][0] != histories[0][-1][0]
