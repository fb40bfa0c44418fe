"""Tests of invalid input, as one table of calls, error classes and expected messages.

Each row is called with a TrainingWithOptimizer `t`. Training after all calls must give
the same variables as training without them.
"""

import pytest

import mp_compat
from mp_compat import checkpoints
from mp_compat import keras as mp_keras
from mp_compat.contrib import mixed_precision as contrib
from tests import testing
from tests.keras import cases as keras_cases
from tests.testing import FINITE
from tests.testing import OVERFLOW
from tests.testing import sgd
from tests.testing import tf

NAN, INF = float("nan"), float("inf")
ROWS = []


def rows(*table):
  """Adds rows: a function of a TrainingWithOptimizer, its error class, and a regular
  expression of the message.
  """
  ROWS.extend(
    pytest.param(*row, id="{}: {}".format(row[1].__name__, row[2])) for row in table
  )


def keras_sgd():
  return keras_cases.V2.optimizers.SGD(0.1)


def wrapped(loss_scale, opt=None, **kwargs):
  return mp_compat.MixedPrecisionLossScaleOptimizer(opt or sgd(), loss_scale, **kwargs)


def dynamic(**kwargs):
  return lambda t: mp_compat.DynamicLossScale(**kwargs)


def fixed(value):
  return lambda t: mp_compat.FixedLossScale(value)


def identified(value):
  return lambda t: mp_compat.get_loss_scale(value)


def hook(**kwargs):
  return lambda t: mp_compat.LossScaleHook(t.opt, **kwargs)


def attempts(count):
  return lambda t: mp_compat.StopAtAttemptHook(t.opt, count)


def applied(*grads, **kwargs):
  return lambda t: t.opt.apply_gradients([(grad(t), t.w) for grad in grads], **kwargs)


def shapeless():
  """Returns a variable of unknown static shape."""
  start = tf.placeholder_with_default([1.0], None)
  return tf.Variable(
    start,
    name="v",
    validate_shape=False,
    trainable=False,
    use_resource=False,
    collections=[],
  )


def together(*opts, **kwargs):
  """Returns a row's function, which applies `t.x` to `t.w` with each optimizer that a
  function of `t` returns.
  """
  return lambda t: mp_compat.apply_gradients_together(
    [(opt(t), [(t.x, t.w)]) for opt in opts], **kwargs
  )


def from_keras_config(class_name):
  """Returns a row's function, which makes a Keras optimizer from a config that names
  this class of loss scales.
  """
  scale = {"class_name": class_name, "config": {}}
  return lambda t: LossScaleOptimizer.from_config(
    {"optimizer": tf.keras.optimizers.serialize(keras_sgd()), "loss_scale": scale}
  )


# --- loss scales
# ---------------------------------------------------------------------------------------------------

rows(
  (dynamic(initial_loss_scale=0), ValueError, "initial_loss_scale.*above 0.*got 0"),
  (dynamic(initial_loss_scale=NAN), ValueError, "initial_loss_scale.*got nan"),
  (
    dynamic(initial_loss_scale=1e38),
    ValueError,
    "initial_loss_scale.*at most 2\\*\\*126.*got 1e\\+38",
  ),
  (dynamic(initial_loss_scale=True), ValueError, "initial_loss_scale.*got True"),
  (
    dynamic(initial_loss_scale=0.5),
    ValueError,
    "at least min_loss_scale, 1.0, but got 0.5",
  ),
  (
    dynamic(initial_loss_scale=8, max_loss_scale=4),
    ValueError,
    "at most max_loss_scale, 4.0, but got 8",
  ),
  (dynamic(min_loss_scale=0), ValueError, "min_loss_scale.*got 0"),
  (dynamic(max_loss_scale=INF), ValueError, "max_loss_scale.*got inf"),
  (dynamic(multiplier=1), ValueError, "multiplier.*above 1.*got 1"),
  (dynamic(backoff=1.0), ValueError, "backoff.*above 1.*got 1.0"),
  (dynamic(increment_period=0), ValueError, "increment_period.*at least 1.*got 0"),
  (
    dynamic(increment_period=2**63),
    ValueError,
    "increment_period.*got 9223372036854775808",
  ),
  (dynamic(overflow_tolerance=None), ValueError, "overflow_tolerance.*got None"),
  (fixed(True), ValueError, "must be a Python int or float.*got True"),
  (fixed(0), ValueError, "must be at least 1.*got 0"),
  (fixed(INF), ValueError, "at most 2\\*\\*126.*got inf"),
  (
    identified("static"),
    ValueError,
    "interpret loss scale identifier: static.*\"dynamic\".*got 'static'",
  ),
  (
    identified(b"dynamic"),
    ValueError,
    "interpret loss scale identifier.*got b'dynamic'",
  ),
  (lambda t: mp_compat.LossScale(), TypeError, "abstract"),
  (
    lambda t: t.opt.loss_scale._add_weight("good_steps", 0),
    RuntimeError,
    "Duplicate variables detected.*good_steps",
  ),
  (
    lambda t: mp_compat.DynamicLossScale.from_config({"initial": 8.0}),
    TypeError,
    "unexpected keyword.*initial",
  ),
  (
    lambda t: t.opt.loss_scale * 2,
    TypeError,
    "DynamicLossScale is an object, not a number. Call it .*loss_scale..",
  ),
  (lambda t: t.x * t.opt.loss_scale, TypeError, "is an object, not a number"),
  (lambda t: t.opt.loss_scale > 1.0, TypeError, "is an object, not a number"),
  (
    lambda t: "{:.1f}".format(t.opt.loss_scale),
    TypeError,
    "is an object, not a number",
  ),
  (lambda t: float(t.opt.loss_scale), TypeError, "is an object, not a number"),
  (
    lambda t: testing.session().run(t.opt.loss_scale),
    TypeError,
    "is an object, not a number",
  ),
  (
    lambda t: testing.session().run([t.x, wrapped(8.0).loss_scale]),
    TypeError,
    "FixedLossScale is an object",
  ),
  (
    lambda t: setattr(t.opt, "loss_scale", 128),
    AttributeError,
    "cannot be replaced by 128.*variables...0..assign",
  ),
)

# --- the optimizer
# ---------------------------------------------------------------------------------------------------

rows(
  (
    lambda t: wrapped(None),
    ValueError,
    "loss_scale cannot be None.*use the inner optimizer alone",
  ),
  (
    lambda t: wrapped("dynamic", "sgd"),
    ValueError,
    "must be an instance of Optimizer, but got: .*str",
  ),
  (
    lambda t: wrapped("dynamic", tf.train.AdamOptimizer),
    ValueError,
    "but got: .*AdamOptimizer.*Pass an instance",
  ),
  (
    lambda t: wrapped("dynamic", keras_sgd()),
    ValueError,
    "Keras optimizer; wrap it in mp_compat.keras",
  ),
  (
    lambda t: wrapped(8.0, testing.native.MixedPrecisionLossScaleOptimizer(sgd(), 8.0)),
    ValueError,
    "scaled twice",
  ),
  (
    lambda t: wrapped("dynamic", t.opt),
    ValueError,
    "must not scale the loss itself.*Pass its inner optimizer",
  ),
  (
    lambda t: wrapped(8.0, tf.train.SyncReplicasOptimizer(sgd(), 1, 1)),
    ValueError,
    "Wrap in the other order: Sync",
  ),
  (
    lambda t: wrapped(8.0, skip_nonfinite=False, finite_reducer=tf.identity),
    ValueError,
    "Pass only one of them",
  ),
  (
    lambda t: t.opt.compute_gradients(t.loss, gate_gradients=3),
    ValueError,
    "must be one of.*Not 3",
  ),
  (
    lambda t: t.opt.compute_gradients(tf.constant(1)),
    ValueError,
    "Invalid type tf.int32.*tf.cast",
  ),
  (
    lambda t: t.opt.compute_gradients(t.loss, []),
    ValueError,
    "No variables to optimize",
  ),
  (
    lambda t: t.opt.minimize(tf.reduce_sum(t.x)),
    ValueError,
    "No gradients provided for any variable",
  ),
  (lambda t: t.opt.apply_gradients([]), ValueError, "No variables provided"),
  (applied(lambda t: None), ValueError, "No gradients provided for any variable: .*w"),
  (
    applied(lambda t: tf.constant(["a", "b"])),
    TypeError,
    "Gradients must be numeric.*string",
  ),
  (
    applied(lambda t: object()),
    TypeError,
    "convertible to a Tensor or IndexedSlices, or None",
  ),
  (
    applied(lambda t: tf.SparseTensor([[0]], [1.0], [2])),
    TypeError,
    "convertible to a Tensor or IndexedSlices",
  ),
  (
    applied(lambda t: (t.x, t.w)),
    TypeError,
    "but got a .gradient, variable. pair: .*zip",
  ),
  (
    lambda t: mp_compat.clip_by_global_norm([(t.x, t.w)], 1.0),
    TypeError,
    "but got a .gradient, variable. pair: .*zip",
  ),
  (
    lambda t: mp_compat.clip_by_global_norm([tf.constant(1j)], 1.0),
    TypeError,
    "floating.*complex128.*tf.math.real",
  ),
  (
    lambda t: mp_compat.finite_or_zero([(None, t.w)]),
    TypeError,
    "but got a .gradient, variable. pair: .*zip",
  ),
  (
    applied(lambda t: tf.placeholder(tf.int32, [2])),
    TypeError,
    "DataType int32 not in list of allowed values",
  ),
  (
    applied(lambda t: tf.placeholder(tf.complex64, [2])),
    TypeError,
    "DataType complex64 not in list",
  ),
  (
    applied(lambda t: t.x, unknown=1),
    TypeError,
    "unexpected keyword argument 'unknown'.*inner.*apply_gradients",
  ),
  (
    lambda t: t.opt.minimize(t.loss, decay=1),
    TypeError,
    "unexpected keyword argument 'decay'.*to its constructor",
  ),
  (
    applied(lambda t: t.x, global_step="step"),
    TypeError,
    "must be a variable.*Pass the name of the op as name='step'",
  ),
  (lambda t: t.opt.scale_loss(tf.constant(1)), ValueError, "Invalid type tf.int32"),
  (
    lambda t: wrapped(8.0).unscale_gradients([t.x]),
    RuntimeError,
    "scale_loss\\(\\) was not called in this graph",
  ),
  (
    lambda t: t.opt.gradients_finite,
    RuntimeError,
    "of the finite check in apply_gradients.*First call minimize",
  ),
  (
    lambda t: t.opt.nothing,
    AttributeError,
    "'MixedPrecision\\w+' object has no attribute 'nothing'; inner.*Momentum",
  ),
)

# --- hooks, accumulation, checkpoints
# --------------------------------------------------------------------------------

Accumulator = mp_compat.GradientAccumulator

rows(
  (
    hook(on_stall="explode"),
    ValueError,
    "on_stall must be one of 'raise', 'stop', 'warn', but got 'explode'",
  ),
  (
    hook(max_consecutive_skips=0),
    ValueError,
    "max_consecutive_skips must be an int of at least 1, but got 0",
  ),
  (
    hook(min_scale_patience=2.5),
    ValueError,
    "min_scale_patience must be an int .* got 2.5",
  ),
  (attempts(-3), ValueError, "num_attempts must be an int of at least 1, but got -3"),
  (
    lambda t: mp_compat.LossScaleHook(t.opt).begin(),
    RuntimeError,
    "has no train op in the current graph",
  ),
  (
    lambda t: mp_compat.nonfinite_gradients(t.opt),
    RuntimeError,
    "has no train op in the current graph",
  ),
  (
    lambda t: mp_compat.LossScaleHook(None).begin(),
    ValueError,
    "optimizer must be .*but got None",
  ),
  (
    lambda t: mp_compat.StopAtAttemptHook("sgd", 1).begin(),
    ValueError,
    "optimizer must be .*but got 'sgd'",
  ),
  (
    lambda t: mp_compat.gradient_ranges(t.opt),
    RuntimeError,
    "has no train op in the current graph",
  ),
  (
    lambda t: mp_compat.gradient_ranges(t.opt, [tf.int32]),
    ValueError,
    "floating, such as tf.float16, but got int32",
  ),
  (
    lambda t: mp_compat.nonfinite_gradients(tf.keras.optimizers.SGD()),
    ValueError,
    "optimizer must be .*SGD",
  ),
  (
    lambda t: Accumulator(sgd()),
    ValueError,
    "must be a MixedPrecision.* but got <.*Gradient",
  ),
  (
    lambda t: Accumulator(t.opt, "step"),
    ValueError,
    "skip must be one of 'window', 'micro_batch', but got 'step'",
  ),
  (
    lambda t: Accumulator(wrapped(8.0, skip_nonfinite=False)),
    ValueError,
    "skip_nonfinite=False",
  ),
  (
    lambda t: Accumulator(t.opt).mean(),
    RuntimeError,
    "no gradients in this graph.*first",
  ),
  (
    lambda t: Accumulator(t.opt).apply_gradients([(t.x, t.w)]),
    RuntimeError,
    "no gradients in this graph.*first",
  ),
  (
    lambda t: Accumulator(t.opt).add([(None, t.w)]),
    ValueError,
    "No gradients provided for any variable",
  ),
  (
    lambda t: Accumulator(t.opt).add([(t.x, t.w), (t.x, shapeless())]),
    ValueError,
    "static shape, but v:0 has the",
  ),
  (
    lambda t: [window.add([(t.x, t.w)]) for window in [Accumulator(t.opt)] * 2],
    ValueError,
    "already called in this",
  ),
  (
    lambda t: mp_compat.apply_gradients_together([]),
    ValueError,
    "pairs of an optimizer .* but got \\[\\]",
  ),
  (
    lambda t: mp_compat.apply_gradients_together([(t.opt, [(t.x, t.w)])] * 2),
    ValueError,
    "each optimizer once.*'Momentum', 'Momentum'.*Join",
  ),
  (
    lambda t: mp_compat.apply_gradients_together(
      [
        (wrapped(t.opt.loss_scale, t.opt.inner_optimizer), [(t.x, t.w)]),
        (t.opt, [(t.x, t.w)]),
      ]
    ),
    ValueError,
    "each optimizer once",
  ),
  (
    lambda t: mp_compat.apply_gradients_together([t.opt, t.opt]),
    ValueError,
    "pairs of an optimizer .* but got \\[<",
  ),
  (
    hook(every_n_steps=0),
    ValueError,
    "every_n_steps must be an int of at least 1, but got 0",
  ),
  (
    hook(every_n_secs=0),
    ValueError,
    "every_n_secs must be a number above 0 .* but got 0",
  ),
  (
    hook(every_n_steps=10, every_n_secs=5.0),
    ValueError,
    "every_n_steps or every_n_secs, but got both, 10 and 5.0",
  ),
  (
    together(lambda t: t.opt, skip="none"),
    ValueError,
    "skip must be one of 'all', 'each', but got 'none'",
  ),
  (
    together(lambda t: t.opt, lambda t: wrapped(8.0)),
    ValueError,
    "share one LossScale, but got .*Pass the same",
  ),
  (together(lambda t: sgd()), ValueError, "MixedPrecision.*share"),
  (
    together(lambda t: wrapped(8.0, skip_nonfinite=False)),
    ValueError,
    "the finite check, but .*skip_nonfinite=False",
  ),
  (lambda t: contrib.FixedLossScaleManager(0.5), ValueError, "at least 1.*got 0.5"),
  (
    lambda t: contrib.LossScaleOptimizer(sgd(), 8),
    ValueError,
    "must be a mp_compat.contrib.*Manager, but got 8",
  ),
  (
    lambda t: contrib.LossScaleOptimizer("sgd", contrib.FixedLossScaleManager(8)),
    ValueError,
    "of Optimizer",
  ),
  (
    lambda t: checkpoints.convert("/no/such/model.ckpt", "/no/such/out"),
    ValueError,
    "naming scheme \\(`to`\\) or",
  ),
  (
    lambda t: checkpoints.convert("/no/such/model.ckpt", "/no/such/out", "plain"),
    ValueError,
    "no checkpoint at",
  ),
)

# --- Keras
# -----------------------------------------------------------------------------------------------------------

LossScaleOptimizer = mp_keras.LossScaleOptimizer

rows(
  (
    lambda t: LossScaleOptimizer(keras_sgd(), "dynamic", initial_scale=4),
    ValueError,
    "were mixed.*initial",
  ),
  (
    lambda t: LossScaleOptimizer(keras_sgd(), 4, dynamic=True),
    ValueError,
    "were mixed.*4.*, and dynamic",
  ),
  (
    lambda t: LossScaleOptimizer(keras_sgd(), "fast"),
    ValueError,
    "interpret loss scale identifier: fast",
  ),
  (lambda t: LossScaleOptimizer(keras_sgd(), 0.5), ValueError, "at least 1.*0.5"),
  (
    lambda t: LossScaleOptimizer(keras_sgd(), dynamic="yes"),
    TypeError,
    "must be a bool, but got: 'yes'",
  ),
  (
    lambda t: LossScaleOptimizer(keras_sgd(), dynamic=False),
    ValueError,
    '"initial_scale" must be specified',
  ),
  (
    lambda t: LossScaleOptimizer(keras_sgd(), False, 4, 5),
    ValueError,
    'growth_steps" must be None.*: 5',
  ),
  (
    lambda t: LossScaleOptimizer(keras_sgd(), True, -1.0),
    ValueError,
    "initial_loss_scale must be .*-1.0",
  ),
  (
    lambda t: LossScaleOptimizer(keras_sgd(), True, 8.0, 0),
    ValueError,
    "increment_period must be .*0",
  ),
  (
    lambda t: LossScaleOptimizer(LossScaleOptimizer(keras_sgd())),
    TypeError,
    "cannot wrap another",
  ),
  (
    lambda t: LossScaleOptimizer(keras_sgd(), inner_optimizer=keras_sgd()),
    TypeError,
    "several arguments",
  ),
  (
    lambda t: LossScaleOptimizer("adam"),
    TypeError,
    "must be an instance of OptimizerV2.*adam. Pass an object",
  ),
  (
    lambda t: LossScaleOptimizer(),
    TypeError,
    "must be an instance of OptimizerV2.*got: None",
  ),
  (lambda t: LossScaleOptimizer(sgd()), TypeError, "MixedPrecisionLossScaleOptimizer"),
  (
    lambda t: mp_keras.experimental.LossScaleOptimizer(keras_sgd(), True),
    ValueError,
    "passed to loss_scale.*True",
  ),
  (
    lambda t: mp_keras.experimental.LossScaleOptimizer(keras_sgd(), None),
    ValueError,
    "cannot be None",
  ),
  (
    lambda t: mp_keras.experimental.LossScaleOptimizer(keras_sgd(), dynamic=True),
    TypeError,
    "dynamic",
  ),
  (
    lambda t: LossScaleOptimizer(keras_sgd()).get_scaled_loss(tf.constant(1)),
    ValueError,
    "floating",
  ),
  (
    lambda t: LossScaleOptimizer(keras_sgd()).apply_gradients([(None, t.w)]),
    ValueError,
    "No gradients provided for",
  ),
  (from_keras_config("Odd"), ValueError, "Unknown loss scale: Odd.*custom_obj"),
  (from_keras_config("builtins.eval"), ValueError, "Unknown loss scale: builtins.eval"),
  (
    from_keras_config("mp_compat.keras.LossScaleOptimizer"),
    ValueError,
    "Unknown loss scale: mp_compat.keras",
  ),
)


class TrainingWithOptimizer(testing.Training):
  """Trains `w` with Momentum and a dynamic loss scale."""

  def __init__(self):
    super().__init__()
    self.opt = mp_compat.MixedPrecisionLossScaleOptimizer(
      tf.train.MomentumOptimizer(0.5, 0.5), mp_compat.DynamicLossScale(8.0, 2)
    )

  def trained(self):
    """Trains five steps, one of them an overflow. Returns {name: value} of all
    variables.
    """
    train_op = self.opt.minimize(self.loss, self.global_step)
    assert tf.get_collection(tf.GraphKeys.TRAIN_OP) == [train_op]
    assert [v.op.name for v in tf.trainable_variables()] == ["w"]
    names = [v.op.name for v in self.opt.variables() + [self.w, self.global_step]]
    assert not tf.get_collection(tf.GraphKeys.UPDATE_OPS) and not tf.get_collection(
      tf.GraphKeys.SUMMARIES
    )
    self.run(train_op, FINITE, FINITE, OVERFLOW, FINITE, 2 * FINITE)
    return dict(
      zip(names, self.session.run(self.opt.variables() + [self.w, self.global_step]))
    )


@pytest.mark.usefixtures("graph")
@pytest.mark.parametrize("call, error, words", ROWS)
def test_bad_input_raises(call, error, words):
  with pytest.raises(error, match=words):
    call(TrainingWithOptimizer())


def test_bad_input_has_no_effect():
  results = []
  for calls in ([row.values for row in ROWS], []):
    with tf.Graph().as_default():
      training = TrainingWithOptimizer()
      for call, error, _ in calls:
        with pytest.raises(error):
          call(training)
      results.append(training.trained())
  assert sorted(results[0]) == [
    "current_loss_scale",
    "global_step",
    "good_steps",
    "w",
    "w/Momentum",
  ]
  testing.assert_same(results[:1], results[1:])
