"""Bad input, as one table: what is called, the class of the error, and words that the error must contain.

Each row runs in a graph with a model and an optimizer, which then train as if the call had never been made.
"""

import numpy as np
import pytest
import tensorflow

import mp_compat
from mp_compat import checkpoints
from mp_compat import keras as mp_keras
from mp_compat.contrib import mixed_precision as contrib
from tests import testing
from tests.keras import cases as keras_cases
from tests.testing import BAD
from tests.testing import GOOD
from tests.testing import tf

NAN, INF = float("nan"), float("inf")
ROWS = []


def rows(*table):
  """Adds rows: a function of the job, the error's class, a regular expression of its words."""
  ROWS.extend(pytest.param(*row, id="{}: {}".format(row[1].__name__, row[2])) for row in table)


def sgd():
  return tf.train.GradientDescentOptimizer(1.)


def keras_sgd():
  return keras_cases.V2.optimizers.SGD(0.1)


def wrapped(loss_scale, opt=None, **kwargs):
  return mp_compat.MixedPrecisionLossScaleOptimizer(opt or sgd(), loss_scale, **kwargs)


def dynamic(**kwargs):
  return lambda job: mp_compat.DynamicLossScale(**kwargs)


def fixed(value):
  return lambda job: mp_compat.FixedLossScale(value)


def identified(value):
  return lambda job: mp_compat.get_loss_scale(value)


def hook(**kwargs):
  return lambda job: mp_compat.LossScaleHook(job.opt, **kwargs)


def attempts(count):
  return lambda job: mp_compat.StopAtAttemptHook(job.opt, count)


def applied(*grads, **kwargs):
  return lambda job: job.opt.apply_gradients([(grad(job), job.w) for grad in grads], **kwargs)


def accumulated(*grads):
  """A good gradient, then these."""
  return lambda job: mp_compat.GradientAccumulator(job.opt).add(
      [(job.x, job.w)] + [(grad(job), shapeless()) for grad in grads])


def shapeless():
  return tf.get_variable("v", initializer=tf.placeholder_with_default([1.], None), validate_shape=False,
                         trainable=False, use_resource=False, collections=[])


def added_twice(job):
  window = mp_compat.GradientAccumulator(job.opt)
  for _ in range(2):
    window.add([(job.x, job.w)])


def odd_keras_config():
  return {"optimizer": tf.keras.optimizers.serialize(keras_sgd()), "loss_scale": {"class_name": "Odd", "config": {}}}


# --- loss scales ---------------------------------------------------------------------------------------------------

rows(
    (dynamic(initial_loss_scale=0), ValueError, "initial_loss_scale.*above 0.*got 0"),
    (dynamic(initial_loss_scale=-2.), ValueError, "initial_loss_scale.*got -2.0"),
    (dynamic(initial_loss_scale=NAN), ValueError, "initial_loss_scale.*got nan"),
    (dynamic(initial_loss_scale=INF), ValueError, "initial_loss_scale.*at most 2\\*\\*126.*got inf"),
    (dynamic(initial_loss_scale=1e38), ValueError, "initial_loss_scale.*at most 2\\*\\*126.*got 1e\\+38"),
    (dynamic(initial_loss_scale=True), ValueError, "initial_loss_scale.*got True"),
    (dynamic(initial_loss_scale="8"), ValueError, "initial_loss_scale.*got '8'"),
    (dynamic(initial_loss_scale=8j), ValueError, "initial_loss_scale.*got 8j"),
    (dynamic(initial_loss_scale=.5), ValueError, "at least min_loss_scale, 1.0, but got 0.5"),
    (dynamic(initial_loss_scale=8, min_loss_scale=16), ValueError, "at least min_loss_scale, 16.0, but got 8"),
    (dynamic(initial_loss_scale=8, max_loss_scale=4), ValueError, "at most max_loss_scale, 4.0, but got 8"),
    (dynamic(min_loss_scale=0), ValueError, "min_loss_scale.*got 0"),
    (dynamic(min_loss_scale=NAN), ValueError, "min_loss_scale.*got nan"),
    (dynamic(max_loss_scale=INF), ValueError, "max_loss_scale.*got inf"),
    (dynamic(multiplier=1), ValueError, "multiplier.*above 1.*got 1"),
    (dynamic(multiplier=.5), ValueError, "multiplier.*got 0.5"),
    (dynamic(multiplier=NAN), ValueError, "multiplier.*got nan"),
    (dynamic(multiplier=False), ValueError, "multiplier.*got False"),
    (dynamic(backoff=1.), ValueError, "backoff.*above 1.*got 1.0"),
    (dynamic(backoff=-2), ValueError, "backoff.*got -2"),
    (dynamic(increment_period=0), ValueError, "increment_period.*at least 1.*got 0"),
    (dynamic(increment_period=-1), ValueError, "increment_period.*got -1"),
    (dynamic(increment_period=NAN), ValueError, "increment_period.*got nan"),
    (dynamic(increment_period=True), ValueError, "increment_period.*got True"),
    (dynamic(increment_period=2 ** 63), ValueError, "increment_period.*got 9223372036854775808"),
    (dynamic(overflow_tolerance=0), ValueError, "overflow_tolerance.*at least 1.*got 0"),
    (dynamic(overflow_tolerance=None), ValueError, "overflow_tolerance.*got None"),
    (fixed("8"), ValueError, "must be a Python int or float.*got '8'"),
    (fixed(None), ValueError, "must be a Python int or float.*got None"),
    (fixed(True), ValueError, "must be a Python int or float.*got True"),
    (fixed(0), ValueError, "must be at least 1.*got 0"),
    (fixed(.5), ValueError, "must be at least 1.*got 0.5"),
    (fixed(-8), ValueError, "must be at least 1.*got -8"),
    (fixed(NAN), ValueError, "must be at least 1.*got nan"),
    (fixed(INF), ValueError, "at most 2\\*\\*126.*got inf"),
    (fixed(1e38), ValueError, "at most 2\\*\\*126.*got 1e\\+38"),
    (identified("static"), ValueError, "interpret loss scale identifier: static.*\"dynamic\".*got 'static'"),
    (identified("8"), ValueError, "interpret loss scale identifier: 8.*got '8'"),
    (identified(True), ValueError, "interpret loss scale identifier: True"),
    (identified([]), ValueError, "interpret loss scale identifier: \\[\\]"),
    (identified({}), ValueError, "interpret loss scale identifier: {}"),
    (identified(b"dynamic"), ValueError, "interpret loss scale identifier.*got b'dynamic'"),
    (identified(object), ValueError, "interpret loss scale identifier.*got <class 'object'>"),
    (lambda job: mp_compat.LossScale(), TypeError, "abstract"),
    (lambda job: job.opt.loss_scale._add_weight("good_steps", 0), RuntimeError,
     "Duplicate variables detected.*good_steps"),
    (lambda job: mp_compat.DynamicLossScale.from_config({"initial": 8.}), TypeError, "unexpected keyword.*initial"),
)

# --- the optimizer ---------------------------------------------------------------------------------------------------

rows(
    (lambda job: wrapped(None), ValueError, "loss_scale cannot be None.*use the inner optimizer alone"),
    (lambda job: wrapped("fast"), ValueError, "interpret loss scale identifier: fast"),
    (lambda job: wrapped(.5), ValueError, "at least 1.*0.5"),
    (lambda job: wrapped("dynamic", "sgd"), ValueError, "must be an instance of Optimizer, but got: .*str"),
    (lambda job: wrapped("dynamic", sgd), ValueError, "must be an instance of Optimizer, but got: .*function"),
    (lambda job: wrapped("dynamic", keras_sgd()), ValueError, "Keras optimizer; wrap it in mp_compat.keras"),
    (lambda job: wrapped("dynamic", job.opt), ValueError, "must scale no loss itself.*Pass the optimizer inside"),
    (lambda job: wrapped(8., tf.train.SyncReplicasOptimizer(sgd(), 1, 1)), ValueError, "Put it outside: SyncReplicas"),
    (lambda job: wrapped(8., skip_nonfinite=False, finite_reducer=tf.identity), ValueError, "Leave one of them out"),
    (lambda job: job.opt.compute_gradients(job.loss, gate_gradients=3), ValueError, "must be one of.*Not 3"),
    (lambda job: job.opt.compute_gradients(job.loss, gate_gradients="OP"), ValueError, "must be one of.*Not OP"),
    (lambda job: job.opt.compute_gradients(tf.constant(1)), ValueError, "Invalid type tf.int32.*tf.cast"),
    (lambda job: job.opt.compute_gradients(tf.constant("loss")), ValueError, "Invalid type tf.string.*tf.cast"),
    (lambda job: job.opt.compute_gradients(job.loss, []), ValueError, "No variables to optimize"),
    (lambda job: job.opt.minimize(tf.reduce_sum(job.x)), ValueError, "No gradients provided for any variable"),
    (lambda job: job.opt.apply_gradients([]), ValueError, "No variables provided"),
    (applied(lambda job: None), ValueError, "No gradients provided for any variable: .*w"),
    (applied(lambda job: tf.constant(["a", "b"])), TypeError, "Gradients must be numeric.*string"),
    (applied(lambda job: object()), TypeError, "convertible to a Tensor or IndexedSlices, or None"),
    (applied(lambda job: tf.SparseTensor([[0]], [1.], [2])), TypeError, "convertible to a Tensor or IndexedSlices"),
    (applied(lambda job: tf.placeholder(tf.int32, [2])), TypeError, "DataType int32 not in list of allowed values"),
    (applied(lambda job: tf.placeholder(tf.complex64, [2])), TypeError, "DataType complex64 not in list"),
    (applied(lambda job: job.x, global_step="step"), AttributeError, "'str' object has no attribute"),
    (lambda job: wrapped(8., finite_reducer=lambda finite: tf.cast(finite, tf.float32)).apply_gradients(
        [(job.x, job.w)]), ValueError, "must return a scalar bool.*all_ranks_finite"),
    (lambda job: wrapped(8., finite_reducer=lambda finite: [finite, finite]).apply_gradients([(job.x, job.w)]),
     ValueError, "must return a scalar bool"),
    (lambda job: job.opt.scale_loss(tf.constant(1)), ValueError, "Invalid type tf.int32"),
    (lambda job: wrapped(8.).unscale_gradients([job.x]), RuntimeError, "scale_loss\\(\\) was not called in this graph"),
    (lambda job: job.opt.gradients_finite, RuntimeError, "finite check in apply_gradients.*Build the train op first"),
    (lambda job: job.opt.no_such_thing, AttributeError, "no_such_thing"),
)

# --- what goes with it -----------------------------------------------------------------------------------------------

rows(
    (hook(on_stall="explode"), ValueError, "on_stall must be one of 'raise', 'stop', 'warn', but got 'explode'"),
    (hook(max_consecutive_skips=0), ValueError, "max_consecutive_skips must be an int of at least 1, but got 0"),
    (hook(max_consecutive_skips=True), ValueError, "max_consecutive_skips must be an int .* got True"),
    (hook(min_scale_patience=2.5), ValueError, "min_scale_patience must be an int .* got 2.5"),
    (attempts(-3), ValueError, "num_attempts must be an int of at least 1, but got -3"),
    (attempts(1.), ValueError, "num_attempts must be an int of at least 1, but got 1.0"),
    (lambda job: mp_compat.LossScaleHook(job.opt).begin(), RuntimeError, "has no train op in this graph yet"),
    (lambda job: mp_compat.nonfinite_gradients(job.opt), RuntimeError, "has no train op in this graph yet"),
    (lambda job: mp_compat.GradientAccumulator(sgd()), ValueError, "must be a MixedPrecision.* but got <.*Gradient"),
    (lambda job: mp_compat.GradientAccumulator(job.opt, skip="step"), ValueError,
     "skip must be one of 'window', 'micro_batch', but got 'step'"),
    (lambda job: mp_compat.GradientAccumulator(wrapped(8., skip_nonfinite=False)), ValueError, "skip_nonfinite=False"),
    (lambda job: mp_compat.GradientAccumulator(job.opt).mean(), RuntimeError, "no gradients in this graph.*first"),
    (lambda job: mp_compat.GradientAccumulator(job.opt).apply_gradients([(job.x, job.w)]), RuntimeError,
     "no gradients in this graph.*first"),
    (lambda job: mp_compat.GradientAccumulator(job.opt).add([(None, job.w)]), ValueError,
     "No gradients provided for any variable"),
    (accumulated(lambda job: tf.placeholder(tf.float32)), ValueError, "static shape only, but v:0 has the shape"),
    (added_twice, ValueError, "added to already in this graph"),
    (lambda job: mp_compat.apply_gradients_together([]), ValueError, "nothing to apply.*but got none"),
    (lambda job: mp_compat.apply_gradients_together([(job.opt, [(job.x, job.w)])], skip="none"), ValueError,
     "skip must be one of 'all', 'each', but got 'none'"),
    (lambda job: mp_compat.apply_gradients_together([(opt, [(job.x, job.w)]) for opt in (job.opt, wrapped(8.))]),
     ValueError, "same loss scale, but got .*Give one LossScale to all"),
    (lambda job: mp_compat.apply_gradients_together([(sgd(), [(job.x, job.w)])]), ValueError, "MixedPrecision.*same"),
    (lambda job: mp_compat.apply_gradients_together([(wrapped(8., skip_nonfinite=False), [(job.x, job.w)])]),
     ValueError, "need the finite check, but .*skip_nonfinite=False"),
    (lambda job: contrib.FixedLossScaleManager(.5), ValueError, "at least 1.*got 0.5"),
    (lambda job: contrib.FixedLossScaleManager(NAN), ValueError, "at least 1.*got nan"),
    (lambda job: contrib.LossScaleOptimizer(sgd(), 8), ValueError, "must be a mp_compat.contrib.*Manager, but got 8"),
    (lambda job: contrib.LossScaleOptimizer("sgd", contrib.FixedLossScaleManager(8)), ValueError, "of Optimizer"),
    (lambda job: mp_compat.enable_mixed_precision_graph_rewrite("sgd"), ValueError, "an instance of.*Pass None"),
    (lambda job: mp_compat.enable_mixed_precision_graph_rewrite(job.opt), ValueError, "must not already be an inst"),
    (lambda job: mp_compat.enable_mixed_precision_graph_rewrite(sgd(), "fast"), ValueError, "interpret loss scale"),
    (lambda job: mp_compat.register_loss_scale_wrapper(tf.train.AdamOptimizer, wrapped), TypeError,
     "must be the class of what wrapper_fn returns.*but got <function"),
    (lambda job: checkpoints.Saver().restore(None, None), ValueError, "not a valid checkpoint: None"),
    (lambda job: checkpoints.inspect("/no/such/model.ckpt"), ValueError, "no checkpoint at /no/such/model.ckpt"),
    (lambda job: checkpoints.name_map("/no/such/model.ckpt"), ValueError, "no checkpoint at.*Expected the path"),
    (lambda job: checkpoints.convert("/no/such/model.ckpt", "/no/such/out"), ValueError, "dialect \\(to\\) or"),
    (lambda job: checkpoints.convert("/no/such/model.ckpt", "/no/such/out", "plain"), ValueError, "no checkpoint at"),
)

# --- Keras -----------------------------------------------------------------------------------------------------------

LossScaleOptimizer = mp_keras.LossScaleOptimizer

rows(
    (lambda job: LossScaleOptimizer(keras_sgd(), "dynamic", initial_scale=4), ValueError, "forms are mixed.*initial"),
    (lambda job: LossScaleOptimizer(keras_sgd(), 4, dynamic=True), ValueError, "Two forms are mixed.*4.*, and dynamic"),
    (lambda job: LossScaleOptimizer(keras_sgd(), "fast"), ValueError, "interpret loss scale identifier: fast"),
    (lambda job: LossScaleOptimizer(keras_sgd(), 0.5), ValueError, "at least 1.*0.5"),
    (lambda job: LossScaleOptimizer(keras_sgd(), dynamic="yes"), TypeError, "must be a bool, but got: 'yes'"),
    (lambda job: LossScaleOptimizer(keras_sgd(), dynamic=False), ValueError, "\"initial_scale\" must be specified"),
    (lambda job: LossScaleOptimizer(keras_sgd(), False, 4, 5), ValueError, "growth_steps\" must be None.*: 5"),
    (lambda job: LossScaleOptimizer(keras_sgd(), True, -1.), ValueError, "initial_loss_scale must be .*-1.0"),
    (lambda job: LossScaleOptimizer(keras_sgd(), True, 8., 0), ValueError, "increment_period must be .*0"),
    (lambda job: LossScaleOptimizer(LossScaleOptimizer(keras_sgd())), TypeError, "cannot wrap another"),
    (lambda job: [LossScaleOptimizer(opt) for opt in [keras_sgd()] * 2], ValueError, "already wrapped"),
    (lambda job: LossScaleOptimizer(keras_sgd(), inner_optimizer=keras_sgd()), TypeError, "several arguments name one"),
    (lambda job: LossScaleOptimizer("adam"), TypeError, "must be an instance of OptimizerV2.*adam. Pass a Keras"),
    (lambda job: LossScaleOptimizer(), TypeError, "must be an instance of OptimizerV2.*got: None"),
    (lambda job: LossScaleOptimizer(sgd()), TypeError, "MixedPrecisionLossScaleOptimizer"),
    (lambda job: mp_keras.experimental.LossScaleOptimizer(keras_sgd(), True), ValueError, "passed to loss_scale.*True"),
    (lambda job: mp_keras.experimental.LossScaleOptimizer(keras_sgd(), None), ValueError, "cannot be None"),
    (lambda job: mp_keras.experimental.LossScaleOptimizer(keras_sgd(), dynamic=True), TypeError, "dynamic"),
    (lambda job: LossScaleOptimizer(keras_sgd()).get_scaled_loss(tf.constant(1)), ValueError, "floating"),
    (lambda job: LossScaleOptimizer(keras_sgd()).apply_gradients([(None, tensorflow.Variable(1., trainable=False))]),
     ValueError, "No gradients provided for any variable"),
    (lambda job: LossScaleOptimizer.from_config(odd_keras_config()), ValueError, "Unknown loss scale: Odd.*custom_obj"),
)


class Job(testing.Job):
  """A model, and an optimizer that is there when the bad call is made."""

  def __init__(self):
    super().__init__()
    self.opt = mp_compat.MixedPrecisionLossScaleOptimizer(
        tf.train.MomentumOptimizer(.5, .5), mp_compat.DynamicLossScale(8., 2))

  def trained(self):
    """Everything that the names of this graph's variables stand for, after five steps."""
    train_op = self.opt.minimize(self.loss, self.global_step)
    assert tf.get_collection(tf.GraphKeys.TRAIN_OP) == [train_op]
    assert [v.op.name for v in tf.trainable_variables()] == ["w"]
    names = [v.op.name for v in self.opt.variables() + [self.w, self.global_step]]
    assert not tf.get_collection(tf.GraphKeys.UPDATE_OPS) and not tf.get_collection(tf.GraphKeys.SUMMARIES)
    self.run(train_op, GOOD, GOOD, BAD, GOOD, 2 * GOOD)
    return dict(zip(names, self.session.run(self.opt.variables() + [self.w, self.global_step])))


@pytest.mark.parametrize("call, error, words", ROWS)
def test_bad_input_is_named_and_training_goes_on_as_if_nothing_had_been_called(call, error, words):
  with tf.Graph().as_default():
    job = Job()
    with pytest.raises(error, match=words):
      call(job)
    after = job.trained()
  with tf.Graph().as_default():
    assert sorted(after) == ["current_loss_scale", "global_step", "good_steps", "w", "w/Momentum"]
    for name, value in Job().trained().items():
      np.testing.assert_array_equal(after[name], value, name)
