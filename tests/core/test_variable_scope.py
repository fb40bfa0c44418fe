"""Tests of float32_variable_storage_getter: float32 master weights, and the casts that
the model reads.
"""

import numpy as np
import pytest
import tensorflow

import mp_compat
from tests import testing
from tests.testing import tf

pytestmark = pytest.mark.usefixtures("graph")


def scope(**kwargs):
  """Returns the variable scope "m" with the custom getter."""
  return tf.variable_scope(
    "m", custom_getter=mp_compat.float32_variable_storage_getter, **kwargs
  )


@pytest.mark.parametrize("use_resource", [True, False], ids=["resource", "reference"])
@pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16], ids=lambda d: d.name)
def test_master_weights_are_trained(dtype, use_resource):
  with scope(use_resource=use_resource):
    w = tf.get_variable(
      "w", [2], dtype, initializer=tf.constant_initializer(1.0 + 2.0**-12)
    )
  (stored,) = tf.trainable_variables()
  assert (
    w.dtype == dtype
    and stored.dtype.base_dtype == tf.float32
    and stored.name == "m/w:0"
  )
  loss = tf.reduce_sum(
    tf.cast(w, tf.float32) * tf.placeholder_with_default([1.0, 2.0], [2])
  )
  train_op = tf.train.GradientDescentOptimizer(2.0**-13).minimize(loss)
  with testing.initialized_session() as sess:
    np.testing.assert_array_equal(sess.run(w).astype(np.float32), [1.0, 1.0])
    sess.run(train_op)
    np.testing.assert_array_equal(sess.run(stored), np.float32([1.0 + 2.0**-13, 1.0]))


ON_READ = dict(
  synchronization=tf.VariableSynchronization.ON_READ,
  aggregation=tf.VariableAggregation.SUM,
)


@pytest.mark.parametrize(
  "dtype, kwargs",
  [
    (tf.float32, dict(shape=[2], dtype=tf.float32)),
    (tf.float64, dict(shape=[2], dtype=tf.float64)),
    (
      tf.int32,
      dict(
        shape=[2], dtype=tf.int32, initializer=tf.zeros_initializer(), trainable=False
      ),
    ),
    (tf.float16, dict(shape=[2], dtype=tf.float16, trainable=False)),
    (tf.float16, dict(shape=[2], dtype=tf.float16, **ON_READ)),
    (tf.float32, dict(initializer=[1.5, 2.5])),
    (tf.float32, dict(initializer=lambda: [1.5, 2.5])),
    (tf.float32, dict(initializer=lambda: np.float32([1.5, 2.5]))),
  ],
)
def test_other_variables_keep_dtype(dtype, kwargs):
  with scope():
    w = tf.get_variable("w", **kwargs)
  assert isinstance(w, tensorflow.Variable) and w.dtype.base_dtype == dtype


@pytest.mark.parametrize("use_resource", [True, False], ids=["resource", "reference"])
def test_each_step_casts_variable_once(use_resource):
  x = tf.placeholder(tf.float16, [7])
  with scope(use_resource=use_resource):
    w = tf.get_variable("w", [7], tf.float16, initializer=tf.ones_initializer())
  loss = tf.reduce_sum(tf.cast(tf.sin(w) * x + w * w, tf.float32))
  train_op = mp_compat.MixedPrecisionLossScaleOptimizer(
    tf.train.GradientDescentOptimizer(1.0), 8.0
  ).minimize(loss)
  with testing.initialized_session() as sess:
    ran = testing.executed(sess, train_op, {x: np.ones(7)})
  casts = [dtype for kind, dtype, shape in ran if kind == "Cast" and shape == [7]]
  # the weights, and their gradient
  assert sorted(casts, key=str) == [tf.float16, tf.float32]


def test_getter_uses_dtype_of_scope():
  with scope(dtype=tf.float16):
    assert tf.get_variable("w", [2]).dtype == tf.float16
    assert tf.global_variables()[0].dtype.base_dtype == tf.float32


def test_eager_variables_are_cast():
  with testing.eager_mode(), scope():
    w = tf.get_variable("w", [2], tf.float16, initializer=tf.ones_initializer())
    assert w.dtype == tf.float16
    np.testing.assert_array_equal(w.numpy(), [1.0, 1.0])


def test_reuse_returns_same_variable():
  for reuse in [False, True]:
    with scope(reuse=reuse):
      assert tf.get_variable("w", [2], tf.float16).dtype == tf.float16
  assert [v.name for v in tf.global_variables()] == ["m/w:0"]


def test_partitions_are_cast_together():
  with scope(partitioner=tf.fixed_size_partitioner(2)):
    w = tf.get_variable("w", [4, 3], tf.float16, initializer=tf.ones_initializer())
  assert w.shape == [4, 3] and w.dtype == tf.float16
  assert [(v.op.name, v.dtype.base_dtype) for v in tf.trainable_variables()] == [
    ("m/w/part_0", tf.float32),
    ("m/w/part_1", tf.float32),
  ]


def test_regularizer_gets_master_weights():
  seen = []
  with scope(
    regularizer=lambda v: seen.append(v.dtype.base_dtype) or tf.reduce_sum(v * v)
  ):
    tf.get_variable("w", [2], tf.float16)
  assert set(seen) == {tf.float32}
  assert [loss.dtype for loss in tf.losses.get_regularization_losses()] == [tf.float32]


HALF_VALUES = {
  "array": lambda: np.float16([1.5, 2.5]),
  "tensor": lambda: tf.constant([1.5, 2.5], tf.float16),
  "bfloat16": lambda: tf.constant([1.5, 2.5], tf.bfloat16),
  "function": lambda: lambda: tf.constant([1.5, 2.5], tf.float16),
  "function of an array": lambda: lambda: np.float16([1.5, 2.5]),
}


@pytest.mark.parametrize(
  "with_dtype", [False, True], ids=["without dtype", "with dtype"]
)
@pytest.mark.parametrize("initializer", list(HALF_VALUES))
def test_half_initial_values_become_float32(initializer, with_dtype):
  dtype = tf.bfloat16 if initializer == "bfloat16" else tf.float16
  with scope():
    w = tf.get_variable(
      "w", dtype=dtype if with_dtype else None, initializer=HALF_VALUES[initializer]()
    )
  (stored,) = tf.trainable_variables()
  assert (
    w.dtype == dtype
    and stored.dtype.base_dtype == tf.float32
    and stored.name == "m/w:0"
  )
  with testing.initialized_session() as sess:
    np.testing.assert_array_equal(
      sess.run([tf.cast(w, tf.float32), stored]), [[1.5, 2.5]] * 2
    )


@pytest.mark.parametrize("trainable", [True, False])
def test_inner_getter_may_pass_by_position(trainable):
  def inner(getter, name, shape=None, dtype=None, initializer=None, **kwargs):
    return getter(name, shape, dtype, initializer, None, None, kwargs["trainable"])

  with scope(), tf.variable_scope("inner", custom_getter=inner):
    w = tf.get_variable("w", [2], tf.float16, trainable=trainable)
  (stored,) = tf.global_variables()
  assert w.dtype.base_dtype == tf.float16 and stored.dtype.base_dtype == (
    tf.float32 if trainable else tf.float16
  )


def regression(dtype, use_resource=True, partitioner=None):
  """Builds a loss of two layers; returns it with what `tf.get_variable` returned."""
  x = tf.placeholder_with_default(tf.ones([3, 4], dtype), [None, 4])
  with scope(dtype=dtype, use_resource=use_resource, partitioner=partitioner):
    initial = tf.constant_initializer(0.5)
    weights = [
      tf.get_variable(name, shape, initializer=initial)
      for name, shape in [("w1", [4, 4]), ("w2", [4, 2])]
    ]
  hidden = tf.matmul(tf.matmul(x, weights[0]), weights[1])
  return tf.reduce_mean(tf.square(tf.cast(hidden, tf.float32))), weights


def momentum():
  return mp_compat.MixedPrecisionLossScaleOptimizer(
    tf.train.MomentumOptimizer(2.0**-10, 0.5), 2.0**7
  )


def clipped(opt, loss, weights):
  grads, _ = zip(*opt.compute_gradients(loss, weights))
  grads, _ = tf.clip_by_global_norm(grads, 100.0)
  return opt.apply_gradients(zip(grads, weights))


def accumulated(opt, loss, weights):
  window = mp_compat.GradientAccumulator(opt)
  add = window.add(opt.compute_gradients(loss, weights))
  with tf.control_dependencies([add]):
    return window.apply_gradients(window.mean())


STEPS = {
  "minimize": lambda opt, loss, weights: opt.minimize(loss, var_list=weights),
  "tuple": lambda opt, loss, weights: opt.minimize(loss, var_list=tuple(weights)),
  "nested": lambda opt, loss, weights: opt.minimize(
    loss, var_list=[weights[:1], weights[1]]
  ),
  "pairs": clipped,
  "accumulated": accumulated,
}


@pytest.mark.each_choice
@pytest.mark.parametrize("partitioned", [False, True], ids=["whole", "partitioned"])
@pytest.mark.parametrize("use_resource", [True, False], ids=["resource", "reference"])
def test_step_takes_casts_for_their_variables(use_resource, partitioned):
  partitioner = tf.fixed_size_partitioner(2) if partitioned else None

  def trained(by_casts):
    with tf.Graph().as_default():
      loss, weights = regression(tf.float16, use_resource, partitioner)
      train_op = momentum().minimize(loss, var_list=weights if by_casts else None)
      with testing.initialized_session() as sess:
        sess.run(train_op)
        return testing.values(sess)

  testing.assert_same([trained(True)], [trained(False)])


@pytest.mark.parametrize("step", list(STEPS))
def test_each_call_takes_casts_for_their_variables(step):
  def trained(build, by_casts):
    with tf.Graph().as_default():
      loss, weights = regression(tf.float16)
      build(momentum(), loss, weights if by_casts else tf.trainable_variables())
      train_op = tf.get_collection(tf.GraphKeys.TRAIN_OP)[0]
      with testing.initialized_session() as sess:
        sess.run(train_op)
        return testing.values(sess)

  expected = trained(STEPS[step], by_casts=False)
  testing.assert_same([trained(STEPS[step], by_casts=True)], [expected])
  assert (expected["m/w1:0"] != 0.5).all()


def test_cast_of_a_reused_variable_is_its_variable():
  with scope():
    tf.get_variable("w", [2], tf.float16)
  with scope(reuse=True):
    second = tf.get_variable("w", [2], tf.float16)
  ((grad, variable),) = momentum().compute_gradients(
    tf.reduce_sum(tf.cast(second, tf.float32)), [second]
  )
  assert variable is tf.trainable_variables()[0] and grad.dtype == tf.float32


def test_other_tensors_are_not_variables():
  _, (w1, _) = regression(tf.float16)
  other = tf.identity(w1)
  loss = tf.reduce_sum(tf.cast(other, tf.float32))
  with pytest.raises(NotImplementedError, match="Trying to update a Tensor"):
    momentum().minimize(loss, var_list=[other])


def test_cast_in_each_replica_is_its_variable():
  strategy = tf.distribute.MirroredStrategy(testing.TWO_CPUS)

  def step():
    loss, weights = regression(tf.float16)
    return momentum().minimize(loss, var_list=weights)

  with strategy.scope():
    train_op = strategy.extended.call_for_each_replica(step)
  (before,) = set(variable.dtype.base_dtype for variable in tf.trainable_variables())
  with testing.initialized_session() as sess:
    sess.run(train_op)
    changed = [sess.run(variable) for variable in tf.trainable_variables()]
  assert before == tf.float32 and all((value != 0.5).all() for value in changed)
