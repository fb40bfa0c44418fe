"""Tests of the Keras wrapper's interface: constructors, attributes, loss_scale as an
object and as a tensor, copies.
"""

import logging
import sys
import warnings as python_warnings

import numpy as np
import pytest
import tensorflow

import mp_compat
from mp_compat import keras as mp_keras
from mp_compat.keras import optimizer_kinds
from tests import testing
from tests.keras import cases as keras_cases
from tests.testing import tf

pytestmark = pytest.mark.usefixtures("eager")


def sgd(family=keras_cases.V2, **kwargs):
  return family.optimizers.SGD(0.1, **kwargs)


@keras_cases.each_family
def test_constructor_accepts_old_arguments(family):
  new, make = mp_keras.LossScaleOptimizer, lambda: sgd(family)
  reused = make()
  with pytest.raises(ValueError):
    new(reused, "fast")  # does not wrap it
  with pytest.raises(
    ValueError if family.name == "keras3" else TypeError,
    match="Unsupported arguments: `a`, `b`",
  ):
    new(reused, a=1, b=2)  # the error of Keras's own class
  scale = mp_compat.DynamicLossScale(2048.0, increment_period=500)
  for opt, expected in [
    (new(reused, "dynamic"), (True, 2.0**15, 2000)),
    (new(make(), loss_scale=128), (False, 128.0, None)),
    (new(opt=make(), loss_scale=128.0), (False, 128.0, None)),
    (new(optimizer=make(), loss_scale=scale), (True, 2048.0, 500)),
    (new(make(), testing.native.FixedLossScale(16.0)), (False, 16.0, None)),
    (
      mp_keras.experimental.LossScaleOptimizer(make(), "dynamic"),
      (True, 2.0**15, 2000),
    ),
    (
      mp_keras.experimental.LossScaleOptimizer(optimizer=make(), loss_scale=4),
      (False, 4.0, None),
    ),
    (
      mp_keras.experimental.LossScaleOptimizer(opt=make(), loss_scale=4),
      (False, 4.0, None),
    ),
    (new(make()), (True, 2.0**15, 2000)),
    (new(make(), True), (True, 2.0**15, 2000)),
    (new(make(), False, 4), (False, 4.0, None)),
    (new(make(), True, 8.0, 3), (True, 8.0, 3)),
    (new(inner_optimizer=make(), dynamic=False, initial_scale=4), (False, 4.0, None)),
    (
      new(make(), dynamic=True, initial_scale=8.0, dynamic_growth_steps=3),
      (True, 8.0, 3),
    ),
  ]:
    assert (opt.dynamic, opt.initial_scale, opt.dynamic_growth_steps) == expected
    assert (
      float(keras_cases.scale_of(opt)) == opt.initial_scale
      and opt.inner_optimizer is opt._optimizer
    )
    assert (opt.dynamic_counter is None) == (not opt.dynamic)


@pytest.mark.skipif(
  keras_cases.VERSION < (2, 2),
  reason="experimental_aggregate_gradients needs TensorFlow 2.2",
)
@keras_cases.each_family_of_keras_2
def test_aggregated_gradients_are_accepted(family):
  opt, v = (
    mp_keras.LossScaleOptimizer(sgd(family), dynamic=False, initial_scale=8.0),
    tensorflow.Variable([1.0, 2.0]),
  )
  pairs, are_sums = [(tf.constant([5.0, 10.0]), v)], family.name == "newer"
  opt.apply_gradients(pairs, experimental_aggregate_gradients=False)
  opt.apply_gradients(pairs, None, are_sums)
  np.testing.assert_array_equal(v.numpy(), [0.0, 0.0])


@pytest.mark.skipif(
  "newer" not in map(repr, keras_cases.FAMILIES),
  reason="this Keras has no newer optimizers",
)
def test_newer_optimizer_returns_none_in_function():
  family = keras_cases.KERAS_2[-1]
  opt, v = mp_keras.LossScaleOptimizer(sgd(family)), tensorflow.Variable([1.0, 2.0])
  assert (
    tensorflow.function(lambda: opt.apply_gradients([(tf.constant([10.0, 20.0]), v)]))()
    is None
  )


@pytest.mark.skipif(
  keras_cases.VERSION < (2, 2), reason="OptimizerV2 has no _create_all_weights"
)
def test_skipped_first_step_creates_all_weights():
  class Late(keras_cases.V2.optimizers.SGD):
    def _create_all_weights(self, var_list):
      super()._create_all_weights(var_list)
      for variable in var_list:
        self.add_slot(variable, "late")

  opt, v = mp_keras.LossScaleOptimizer(Late(0.1)), tensorflow.Variable([1.0])
  opt.apply_gradients([(tf.constant([np.inf]), v)])
  assert opt.get_slot_names() == ["late"] and len(opt.inner_optimizer.variables()) == 2


@keras_cases.each_family_of_keras_2
def test_gradient_that_is_pair_raises(family):
  opt, v = (
    mp_keras.LossScaleOptimizer(sgd(family), 8.0),
    tensorflow.Variable([1.0, 2.0]),
  )
  with pytest.raises(
    TypeError, match=r"Expected a gradient, but got a \(gradient, variable\) pair"
  ):
    opt.apply_gradients([((tf.constant([10.0, 20.0]), v), v)])
  opt.apply_gradients([([10.0, 20.0], v)])
  np.testing.assert_array_equal(v.numpy(), [0.0, 0.0])


@keras_cases.each_family
def test_missing_gradients_are_logged_as_alone(family, caplog):
  caplog.set_level(logging.WARNING)
  warnings = []
  for wrap in (lambda opt: opt, lambda opt: mp_keras.LossScaleOptimizer(opt, 8.0)):
    opt, v = wrap(sgd(family)), tensorflow.Variable([1.0, 2.0], name="v")
    others = [tensorflow.Variable(1.0, name=name) for name in ("a", "b")]
    caplog.clear()
    with python_warnings.catch_warnings(record=True) as caught:  # of Keras 3
      python_warnings.simplefilter("always")
      pairs = [(None, others[0]), (tf.constant([8.0, 8.0]), v), (None, others[1])]
      opt.apply_gradients(pairs)
    texts = [each.getMessage() for each in caplog.records]
    texts += [str(each.message) for each in caught]
    warnings.append(len([text for text in texts if "Gradients do not exist" in text]))
  assert warnings[1] == 1 <= warnings[0]  # tf_keras logs it twice


@keras_cases.each_family_of_keras_2
@pytest.mark.parametrize(
  "grad",
  [np.array([10.0, 20.0]), np.array([10.0, 20.0], np.float16), [10.0, 20.0]],
  ids=["float64", "float16", "list"],
)
def test_arrays_get_dtype_of_variable(family, grad):
  opt, v = (
    mp_keras.LossScaleOptimizer(sgd(family), 8.0),
    tensorflow.Variable([1.0, 2.0]),
  )
  opt.apply_gradients([(grad, v)])
  np.testing.assert_array_equal(v.numpy(), [0.0, 0.0])


@keras_cases.each_family
@pytest.mark.parametrize("make", [tf.constant, tensorflow.Variable, np.array])
def test_scale_may_be_scalar_tensor(family, make):
  opt = mp_keras.LossScaleOptimizer(
    sgd(family), initial_scale=make(64.0), dynamic_growth_steps=make(5)
  )
  assert (opt.initial_scale, opt.dynamic_growth_steps) == (64.0, 5)
  assert float(keras_cases.scale_of(opt)) == 64.0 and opt.dynamic
  assert type(opt).from_config(opt.get_config()).get_config() == opt.get_config()
  fixed = mp_keras.LossScaleOptimizer(
    sgd(family), dynamic=False, initial_scale=make(4.0)
  )
  assert (fixed.initial_scale, fixed.dynamic) == (4.0, False)


@keras_cases.needs_keras_3
def test_keras_3_with_jax_backend_raises(monkeypatch):
  # Replaces the backend's name only: the other backends need libraries that are not
  # installed.
  inner = keras_cases.FAMILIES[-1].optimizers.SGD()
  backend = sys.modules[optimizer_kinds.kind_of(type(inner)).keras + ".backend"]
  monkeypatch.setattr(backend, "backend", lambda: "jax")
  with pytest.raises(
    RuntimeError,
    match="but the backend is jax. Set KERAS_BACKEND=tensorflow before importing keras",
  ):
    mp_keras.LossScaleOptimizer(inner)


def error_of(program):
  """Returns the output of a program whose last line raises a TypeError or a
  RuntimeError.
  """
  before, _, last = program.rpartition("; ")
  code = "{}\ntry:\n  {}\nexcept (TypeError, RuntimeError) as error:\n  print(error)\n".format(
    before, last
  )
  return testing.run_python("-c", code).stdout


@pytest.mark.matrix
@keras_cases.needs_keras_3
def test_missing_and_unusable_keras_raise():
  missing = "import sys; sys.modules['keras'] = sys.modules['tf_keras'] = None; import mp_compat.keras; "
  error = error_of(missing + "mp_compat.keras.LossScaleOptimizer(object())")
  assert (
    "From TensorFlow 2.16 on, Keras is not installed with it: `pip install keras` for "
    "Keras 3" in error
  )
  in_graph_mode = (
    "import tensorflow as tf, mp_compat; tf.compat.v1.disable_eager_execution(); "
  )
  error = error_of(
    in_graph_mode + "mp_compat.keras.LossScaleOptimizer(tf.keras.optimizers.Adam())"
  )
  assert (
    "eager execution is disabled" in error
    and "tf_keras.optimizers.legacy.Adam" in error
  )


@pytest.mark.matrix
def test_import_does_not_import_keras():
  program = (
    "import sys, tensorflow; before = set(sys.modules); import mp_compat.keras; new = "
    "set(sys.modules) - before; print([name for name in new if 'keras' in name and not "
    "name.startswith('mp_compat')])"
  )
  assert testing.run_python("-c", program).stdout.strip() == "[]"


@keras_cases.each_family
def test_loss_scale_is_as_natively(family):
  """It is a LossScale up to TensorFlow 2.3, and then a tensor."""
  opt, native = (
    mp_keras.LossScaleOptimizer(sgd(family), initial_scale=8.0),
    family.native_dynamic(sgd(family), 8.0, 2000),
  )
  if keras_cases.VERSION < (2, 4):
    assert (
      isinstance(opt.loss_scale, testing.native.DynamicLossScale)
      and opt.loss_scale is opt._loss_scale
    )
    assert opt.loss_scale.get_config() == native.loss_scale.get_config()
  else:
    assert (
      type(opt.loss_scale) is type(tf.constant(8.0))
      and opt.loss_scale.dtype == tf.float32
    )
    assert not opt.loss_scale.shape.as_list() and float(opt.loss_scale * 2 + 1) == 17.0
    assert "{:.1f} {}".format(opt.loss_scale, int(opt.loss_scale)) == "8.0 8"
    with pytest.raises(ValueError, match="Could not interpret loss scale identifier"):
      mp_keras.LossScaleOptimizer(sgd(family), opt.loss_scale)


@keras_cases.each_family
def test_experimental_loss_scale_is_as_natively(family):
  """It is a LossScale up to TensorFlow 2.3, a tensor up to 2.8, and a LossScale where
  TensorFlow has no such class.
  """
  opt = mp_keras.experimental.LossScaleOptimizer(
    sgd(family), mp_compat.DynamicLossScale(8.0, 3)
  )
  if (2, 4) <= keras_cases.VERSION < (2, 9):
    native = tf.keras.mixed_precision.experimental.LossScaleOptimizer(sgd(family), 8.0)
    assert type(opt.loss_scale) is type(native.loss_scale) and float(
      opt.loss_scale
    ) == float(native.loss_scale)
    return
  scale = opt.loss_scale
  assert (
    float(scale()),
    scale.increment_period,
    scale.get_config()["initial_loss_scale"],
  ) == (8.0, 3, 8.0)
  second = mp_keras.experimental.LossScaleOptimizer(sgd(family), scale)
  w = tensorflow.Variable(1.0)
  second.minimize(lambda: w * np.inf, [w])
  assert float(scale()) == float(keras_cases.scale_of(second)) == 4.0
  assert (
    not bool(scale.update([tf.constant(np.inf)])[1]) and float(opt.loss_scale()) == 2.0
  )


@pytest.mark.skipif(
  keras_cases.VERSION >= (2, 4),
  reason="opt.loss_scale is a tensor from TensorFlow 2.4 on",
)
def test_two_wrappers_share_loss_scale():
  first = mp_keras.LossScaleOptimizer(sgd(), "dynamic")
  second = mp_keras.LossScaleOptimizer(sgd(), first.loss_scale)
  w = tensorflow.Variable(1.0)
  second.minimize(lambda: w * np.inf, [w])
  assert float(first.loss_scale()) == 2.0**14


def test_loss_scale_can_be_fetched():
  with tf.Graph().as_default() as graph:
    opt = mp_keras.LossScaleOptimizer(sgd(), initial_scale=8.0)
    scale = keras_cases.scale_of(opt)
    twice = scale * 2.0
    with testing.initialized_session() as sess:
      graph.finalize()
      assert sess.run([scale, {"twice": twice}]) == [8.0, {"twice": 16.0}]


@pytest.mark.skipif(
  keras_cases.VERSION < (2, 2), reason="train_step is new in TensorFlow 2.2"
)
@keras_cases.each_family
def test_train_step_returns_loss_scale(family):
  """Keras converts what `train_step` returns."""

  class Model(family.keras.Model):
    def __init__(self):
      super().__init__()
      self.dense = family.keras.layers.Dense(1)

    def call(self, inputs):
      return self.dense(inputs)

    def train_step(self, data):
      return dict(
        super().train_step(data), loss_scale=keras_cases.scale_of(self.optimizer)
      )

  model = Model()
  model.compile(mp_keras.LossScaleOptimizer(sgd(family), initial_scale=8.0), "mse")
  history = model.fit(
    np.ones([4, 2], np.float32), np.ones([4, 1], np.float32), batch_size=2, verbose=0
  )
  assert history.history["loss_scale"] == [8.0]


@keras_cases.each_family
def test_hyperparameters_are_forwarded(family):
  opt = mp_keras.LossScaleOptimizer(
    family.optimizers.Adam(0.1, beta_1=0.8, epsilon=1e-5)
  )
  assert (
    keras_cases.to_numpy(opt.learning_rate)
    == keras_cases.to_numpy(opt.lr)
    == np.float32(0.1)
  )
  assert keras_cases.to_numpy(opt.beta_1) == pytest.approx(0.8) and opt.epsilon == 1e-5
  opt.lr = 0.5
  assert keras_cases.to_numpy(opt.inner_optimizer.learning_rate) == 0.5
  opt.learning_rate = 0.25
  assert keras_cases.to_numpy(opt.inner_optimizer.learning_rate) == 0.25
  opt.epsilon = 1e-3
  assert opt.inner_optimizer.epsilon == 1e-3
  opt.clipnorm = 2.0
  assert opt.clipnorm == opt.inner_optimizer.clipnorm == 2.0
  with pytest.raises(
    AttributeError,
    match="'LossScale\\w+' object has no attribute 'nothing'; inner optimizer: .*",
  ):
    _ = opt.nothing
  with pytest.raises(AttributeError):
    opt.loss_scale = 4.0


def test_slots_and_weights_are_forwarded():
  opt = mp_keras.LossScaleOptimizer(sgd(momentum=0.9), 4.0)
  w = tensorflow.Variable([1.0, 2.0])
  # missing before 2.2
  assert (
    getattr(opt, "clipnorm", None) is None and getattr(opt, "clipvalue", None) is None
  )
  opt.minimize(lambda: tf.reduce_sum(w * w), [w])
  inner = opt.inner_optimizer
  assert opt.get_slot_names() == ["momentum"]
  assert opt.get_slot(w, "momentum") is inner.get_slot(w, "momentum")
  assert opt.add_slot(w, "extra") is inner.get_slot(w, "extra")
  assert (
    opt.add_weight("count", [], tf.int64, trainable=False, initializer="zeros").numpy()
    == 0
  )
  for ours, theirs in [
    (opt.variables(), inner.variables()),
    (opt.weights, inner.weights),
  ]:
    assert [id(variable) for variable in ours] == [id(variable) for variable in theirs]
  weights = [np.asarray(value) + 1 for value in opt.get_weights()]
  opt.set_weights(weights)
  for ours, theirs in zip(opt.get_weights(), inner.get_weights()):
    assert (ours == theirs).all()
  assert opt.iterations is inner.iterations and int(opt.iterations) == 2


@pytest.mark.skipif(
  keras_cases.VERSION < (2, 4), reason="gradient_transformers need TensorFlow 2.4"
)
def test_transforms_get_unscaled_gradients():
  received = []

  def halve(grads_and_vars):
    received.extend(float(grad) for grad, _ in grads_and_vars)
    return [(grad / 2, variable) for grad, variable in grads_and_vars]

  def aggregate(grads_and_vars):
    return [(grad + 1.0, variable) for grad, variable in grads_and_vars]

  w = tensorflow.Variable(1.0)
  opt = mp_keras.LossScaleOptimizer(
    sgd(gradient_transformers=[halve], gradient_aggregator=aggregate), 1024.0
  )
  opt.minimize(lambda: 3.0 * w, [w])
  assert received == [4.0] and w.numpy() == pytest.approx(0.8)
  opt = mp_keras.LossScaleOptimizer(sgd(global_clipnorm=1.0), 1024.0)
  opt.minimize(lambda: 3.0 * w, [w])
  assert w.numpy() == pytest.approx(0.7) and opt.global_clipnorm == 1.0


@pytest.mark.skipif(
  keras_cases.VERSION < (2, 4),
  reason="earlier optimizers raise if there are no variables",
)
@keras_cases.each_family_of_keras_2
def test_minimizing_nothing_keeps_scale(family):
  opt = mp_keras.LossScaleOptimizer(sgd(family), "dynamic")
  opt.minimize(lambda: tf.constant(1.0), [])
  assert float(keras_cases.scale_of(opt)) == 2.0**15 and int(opt.dynamic_counter) == 0


def test_iterations_can_be_set_to_variable():
  opt = mp_keras.LossScaleOptimizer(sgd())
  opt.iterations = variable = tensorflow.Variable(7, dtype=tf.int64, trainable=False)
  w = tensorflow.Variable([1.0])
  opt.minimize(lambda: w * np.inf, [w])
  assert (
    opt.inner_optimizer.iterations is variable
    and variable.numpy() == 7 + keras_cases.V2.counts_skipped
  )


@keras_cases.each_family
def test_scaling_accepts_any_kind(family):
  opt = mp_keras.LossScaleOptimizer(sgd(family), 8.0)
  assert (
    float(opt.get_scaled_loss(2.0))
    == float(opt.get_scaled_loss(lambda: tf.constant(2.0))())
    == 16.0
  )
  half = opt.get_scaled_loss(tf.constant([1.0, 2.0], tf.float16))
  assert half.dtype == tf.float16 and half.numpy().tolist() == [8.0, 16.0]
  sparse = tf.IndexedSlices(tf.constant([[8.0]]), tf.constant([1]), tf.constant([3, 1]))
  dense, none, rows = opt.get_unscaled_gradients(
    iter([tf.constant([16.0]), None, sparse])
  )
  assert dense.numpy().tolist() == [2.0] and none is None
  assert isinstance(rows, tf.IndexedSlices) and rows.values.numpy().tolist() == [[1.0]]


@keras_cases.each_family
def test_unpaired_scaling_warns_once(family, caplog):
  caplog.set_level(logging.WARNING)
  w = tensorflow.Variable([1.0])

  def log_warnings(*calls):
    """Makes the calls in two steps; returns the warnings that are logged."""
    opt = mp_keras.LossScaleOptimizer(sgd(family), 2.0)
    caplog.clear()
    for _ in range(2):
      for call in calls:
        getattr(opt, call)(
          [tf.constant(1.0)] if "gradients" in call else tf.constant(1.0)
        )
      opt.apply_gradients([(tf.constant([0.0]), w)])
    return [
      record.getMessage()
      for record in caplog.records
      if "LossScaleOptimizer" in record.getMessage()
    ]

  assert log_warnings("get_scaled_loss", "get_unscaled_gradients") == []
  scaled = log_warnings("get_scaled_loss")
  if family.name == "keras3":
    assert scaled == []  # `apply` unscales
  else:
    assert len(scaled) == 1 and "without get_unscaled_gradients()" in scaled[0]
  (unscaled,) = log_warnings("get_unscaled_gradients")
  assert "without get_scaled_loss()" in unscaled
  (warning,) = log_warnings()
  assert "scale_loss()" in warning and "apply()" in warning


POLICY = """
import numpy as np
import tensorflow as tf
import mp_compat
tf.compat.v1.enable_v2_behavior()
experimental = tf.keras.mixed_precision.experimental
experimental.set_policy(experimental.Policy("mixed_float16", loss_scale=mp_compat.{}))
model = tf.keras.Sequential([tf.keras.layers.Dense(2, input_shape=(3,), kernel_initializer="ones"),
                             tf.keras.layers.Activation("linear", dtype="float32")])
model.compile(tf.keras.optimizers.SGD(.001), "mse")
for x in {}:
  model.fit(np.full([4, 3], x, np.float32), np.ones([4, 2], np.float32), verbose=0)
scale = model.optimizer.loss_scale
print(float(scale() if callable(scale) else scale), model.get_weights()[0][0, 0] < 1.)
"""


@pytest.mark.skipif(
  keras_cases.VERSION >= (2, 5),
  reason="policies have no loss scale from TensorFlow 2.5 on",
)
@pytest.mark.parametrize(
  "loss_scale, inputs, expected",
  [
    # one backoff, two growths
    ("DynamicLossScale(64., 2)", "[1., np.inf, 2., 3., 1., 2.]", "128.0 True"),
    ("FixedLossScale(8.)", "[1.]", "8.0 True"),
  ],
)
def test_keras_policy_accepts_our_loss_scale(loss_scale, inputs, expected):
  assert expected in testing.run_python("-c", POLICY.format(loss_scale, inputs)).stdout


@pytest.mark.matrix
@keras_cases.needs_keras_3
@pytest.mark.parametrize("overflow", [False, True])
@pytest.mark.parametrize("jit_compile", [False, True])
def test_keras_3_accumulation_equals_native(jit_compile, overflow):
  keras = tensorflow.keras
  states = []
  for wrap in [
    lambda opt: keras.optimizers.LossScaleOptimizer(opt, initial_scale=8.0),
    lambda opt: mp_keras.LossScaleOptimizer(opt, mp_compat.DynamicLossScale(8.0)),
  ]:
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input([3]), keras.layers.Dense(2)])
    opt = wrap(keras.optimizers.SGD(0.1, gradient_accumulation_steps=2))
    model.compile(opt, "mse", jit_compile=jit_compile)
    x = np.arange(24, dtype=np.float32).reshape([8, 3]) / 10
    x[3] = np.inf if overflow else x[3]
    model.fit(
      x, np.ones([8, 2], np.float32), batch_size=1, epochs=1, verbose=0, shuffle=False
    )
    states.append(model.get_weights() + [np.array(opt.inner_optimizer.iterations)])
  for native, ours in zip(*states):
    np.testing.assert_array_equal(ours, native)


def test_base_classes_named_like_keras_pass():
  sgd_class = keras_cases.FAMILIES[-1].optimizers.SGD
  own = type("BaseOptimizer", (sgd_class,), {"__module__": "keras_helpers.optimizers"})
  assert isinstance(mp_keras.LossScaleOptimizer(own()), mp_keras.LossScaleOptimizer)


@keras_cases.each_family
def test_isinstance_knows_all_wrappers(family):
  """Model.compile may have put a wrapper of Keras into `model.optimizer`."""

  class Subclass(mp_keras.LossScaleOptimizer):
    def get_scaled_loss(self, loss):
      return super().get_scaled_loss(loss) * 2

  native, current = (
    family.native_dynamic(sgd(family), 8.0, 4),
    mp_keras.LossScaleOptimizer(sgd(family)),
  )
  experimental = mp_keras.experimental.LossScaleOptimizer(sgd(family), 2)
  for cls in [mp_keras.LossScaleOptimizer, mp_keras.experimental.LossScaleOptimizer]:
    assert all(isinstance(opt, cls) for opt in (native, current, experimental))
    assert not any(
      isinstance(other, cls) for other in (sgd(family), family.native, None, "sgd")
    )
  for opt in (current, experimental):
    assert (
      isinstance(opt, family.native) and type(opt).__name__ == type(native).__name__
    )
  assert not issubclass(type(current), mp_keras.experimental.LossScaleOptimizer)
  assert type(mp_keras.LossScaleOptimizer(sgd(family))) is type(current)
  subclass = Subclass(sgd(family), 4)
  assert (
    isinstance(subclass, Subclass)
    and float(subclass.get_scaled_loss(tf.constant(1.0))) == 8.0
  )
  assert not isinstance(current, Subclass) and not isinstance(native, Subclass)
