"""Tests of the Keras wrapper with MirroredStrategy: custom loops, Model.fit, and
comparisons with Keras's wrappers.
"""

import functools

import numpy as np
import pytest
import tensorflow

from mp_compat import keras as mp_keras
from tests import testing
from tests.keras import cases as keras_cases
from tests.testing import tf

eager_devices = pytest.mark.skipif(
  keras_cases.VERSION < (2, 4),
  reason="eager mode cannot have two CPUs before TensorFlow 2.4",
)


# The collectives of two strategies in one process conflict.
@functools.lru_cache(maxsize=None)
def get_mirrored_strategy():
  return tensorflow.distribute.MirroredStrategy(testing.TWO_CPUS)


# Inputs [2, 2] of two replicas, for five steps.
STEPS = [
  [[1.0, 0.0], [1.0, 2.0]],
  [[1.0, 1.0], [1.0, np.inf]],
  [[np.nan, 1.0], [1.0, 1.0]],
  [[1.0, 1.0], [0.0, 0.0]],
  [[0.0, 0.0], [1.0, 0.0]],
]


class Loop:
  """A custom training loop on two replicas; replica i trains on xs[i]."""

  def __init__(self, make, as_function=True):
    self.strategy = get_mirrored_strategy()
    with self.strategy.scope():
      self.w = tensorflow.Variable([1.0, 2.0])
      self.opt = make()
    self._step = (
      tensorflow.function(self._run_replicas) if as_function else self._run_replicas
    )

  def _replica_step(self, xs):
    x = tf.gather(xs, tf.distribute.get_replica_context().replica_id_in_sync_group)
    native_keras_3 = not hasattr(self.opt, "get_scaled_loss")
    with tf.GradientTape() as tape:
      loss = tf.reduce_sum(self.w * x)
      loss = (
        self.opt.scale_loss(loss) if native_keras_3 else self.opt.get_scaled_loss(loss)
      )
    grads = tape.gradient(loss, [self.w])
    if not native_keras_3:
      grads = self.opt.get_unscaled_gradients(grads)
    self.opt.apply_gradients(zip(grads, [self.w]))

  def _run_replicas(self, xs):
    self.strategy.run(self._replica_step, args=(xs,))

  def step(self, xs):
    """Trains one step; returns the weights, which are the same on both replicas unless
    they hold a NaN.
    """
    self._step(tf.constant(xs, tf.float32))
    copies = [
      variable.numpy().tolist()
      for variable in self.strategy.experimental_local_results(self.w)
    ]
    assert copies[0] == copies[1] or np.isnan(copies).any()
    return copies[0]


@pytest.mark.each_choice
@eager_devices
@pytest.mark.parametrize("as_function", [False, True], ids=["eager", "function"])
@keras_cases.each_family
def test_overflow_on_one_replica_skips_all(family, as_function):
  loop = Loop(lambda: keras_cases.wrap(family.optimizers.SGD(0.5)), as_function)
  steps = []  # (weights, loss scale, iterations)
  for xs in STEPS:
    steps.append(
      (
        loop.step(xs),
        float(keras_cases.scale_of(loop.opt)),
        int(keras_cases.to_numpy(loop.opt.iterations)),
      )
    )
  weights, scales, iterations = zip(*steps)
  assert weights == ([0.0, 1.0], [0.0, 1.0], [0.0, 1.0], [-0.5, 0.5], [-1.0, 0.5])
  assert scales == (8.0, 4.0, 2.0, 2.0, 4.0)
  assert iterations == ((1, 2, 3, 4, 5) if family.counts_skipped else (1, 1, 1, 2, 3))


@eager_devices
@keras_cases.each_family_of_keras_2
def test_arrays_are_summed_over_replicas(family):
  strategy = get_mirrored_strategy()
  with strategy.scope():
    w, opt = (
      tensorflow.Variable([1.0, 2.0]),
      mp_keras.LossScaleOptimizer(family.optimizers.SGD(0.25), 4.0),
    )
  strategy.run(
    lambda: opt.apply_gradients([(np.array([1.0, 2.0], np.float32), w)]) and None
  )
  assert w.numpy().tolist() == [0.5, 1.0]


@keras_cases.needs_keras_3
def test_keras_3_applies_inf():
  family = keras_cases.FAMILIES[-1]
  # Keras checks the gradients of the first replica only, before they are reduced.
  theirs = Loop(
    lambda: family.native(
      family.optimizers.SGD(0.5), initial_scale=8.0, dynamic_growth_steps=2
    )
  )
  with theirs.strategy.scope():
    theirs.opt.build([theirs.w])  # its variables cannot be made in the function
  assert not np.isfinite(theirs.step(STEPS[1])).all()  # which ours skips, as above


@pytest.mark.slow
@eager_devices
@keras_cases.each_family_of_keras_2
@pytest.mark.parametrize("name", sorted(keras_cases.OPTIMIZERS))
def test_replicas_train_as_tensorflow(family, name):
  make = keras_cases.OPTIMIZERS[name]
  ours = Loop(lambda: keras_cases.wrap(make(family.optimizers)))
  theirs = Loop(lambda: family.native_dynamic(make(family.optimizers), 8.0, 2))
  random = np.random.RandomState(0)
  for step in range(20):
    xs = random.normal(size=[2, 2])
    xs[step % 2, 0] = np.inf if step in (3, 4, 9) else 1.0
    assert ours.step(xs) == theirs.step(xs)
    assert float(keras_cases.scale_of(ours.opt)) == float(
      keras_cases.scale_of(theirs.opt)
    )


@pytest.mark.slow
@eager_devices
@keras_cases.each_family_of_keras_2  # Keras 3 reduces after the finite check
def test_overflow_of_sum_skips_step(family):
  loop = Loop(lambda: keras_cases.wrap(family.optimizers.SGD(0.5), 1.0))
  assert loop.step([[3e38, 0.0], [3e38, 0.0]]) == [1.0, 2.0]


@eager_devices
@keras_cases.newest_family
def test_fit_skips_overflow_on_one_replica(family):
  with get_mirrored_strategy().scope():
    model = family.keras.Sequential(
      [
        family.keras.layers.Input((2,)),
        family.keras.layers.Dense(1, kernel_initializer="ones"),
      ]
    )
    opt = keras_cases.wrap(family.optimizers.SGD(0.1))
    model.compile(loss="mse", optimizer=opt)
  assert model.optimizer is opt
  steps = []  # (weights changed, loss scale, iterations)
  for xs in (
    [[1.0, 2.0], [1.0, 0.0]],
    [[1.0, 1.0], [np.inf, 1.0]],
    [[1.0, 1.0], [1.0, 1.0]],
  ):
    before = model.get_weights()[0].tolist()
    model.fit(
      np.array(xs, np.float32), np.ones([2, 1], np.float32), batch_size=2, verbose=0
    )
    changed = model.get_weights()[0].tolist() != before
    steps.append(
      (
        changed,
        float(keras_cases.scale_of(opt)),
        int(keras_cases.to_numpy(opt.iterations)),
      )
    )
  assert steps == [
    (True, 8.0, 1),
    (False, 4.0, 1 + family.counts_skipped),
    (True, 4.0, 2 + family.counts_skipped),
  ]


@eager_devices
@keras_cases.each_family
def test_unsupported_strategy_context_raises(family):
  strategy = get_mirrored_strategy()
  with strategy.scope():
    w = tensorflow.Variable([1.0, 2.0])
    opt = mp_keras.LossScaleOptimizer(family.optimizers.SGD(0.1), 4.0)
    with pytest.raises(ValueError, match="must be called in a replica context"):
      opt.apply_gradients([(tf.constant([1.0, 1.0]), w)])
  outside = mp_keras.LossScaleOptimizer(family.optimizers.SGD(0.1), 4.0)
  strategy = tf.distribute.experimental.CentralStorageStrategy(testing.TWO_CPUS)
  unsupported = "not supported with the tf.distribute.Strategy: CentralStorageStrategy"
  with strategy.scope(), pytest.raises(ValueError, match=unsupported):
    mp_keras.LossScaleOptimizer(family.optimizers.SGD(0.1), 4.0)
  with pytest.raises(ValueError, match=unsupported):
    strategy.run(lambda: outside.apply_gradients([(tf.constant(1.0), 1.0)]))


def test_overflow_in_session_skips_all():
  steps = []  # (weights changed, loss scale, iterations)
  with tf.Graph().as_default():
    strategy = tf.distribute.MirroredStrategy(testing.TWO_CPUS)
    xs = tf.placeholder(tf.float32, [2, 2])
    with strategy.scope():
      w = tensorflow.Variable([1.0, 2.0])
      opt = keras_cases.wrap(keras_cases.V2.optimizers.Adam(0.5))

      def step():
        loss = tf.reduce_sum(
          w * xs[tf.distribute.get_replica_context().replica_id_in_sync_group]
        )
        return opt.apply_gradients(
          zip(
            opt.get_unscaled_gradients(tf.gradients(opt.get_scaled_loss(loss), [w])),
            [w],
          )
        )

      run = strategy.run if hasattr(strategy, "run") else strategy.experimental_run_v2
      train_op = tf.group(strategy.experimental_local_results(run(step)))
    copies = strategy.experimental_local_results(w)
    with testing.initialized_session() as sess:
      for value in STEPS[:4]:
        before = sess.run(copies)
        sess.run(train_op, {xs: value})
        after = sess.run(copies)
        assert (after[0] == after[1]).all() and np.isfinite(after).all()
        steps.append(
          (
            (after[0] != before[0]).tolist(),
            sess.run(keras_cases.scale_of(opt)),
            sess.run(opt.iterations),
          )
        )
  counted = (1, 2, 3, 4) if keras_cases.V2.counts_skipped else (1, 1, 1, 2)
  changed, scales, iterations = zip(*steps)
  assert changed == ([True, True], [False, False], [False, False], [True, True])
  assert scales == (8.0, 4.0, 2.0, 2.0) and iterations == counted
