"""Tests of the Keras wrapper in graph mode: get_updates, get_gradients, Model.fit,
variable names.
"""

import functools

import numpy as np
import pytest

from mp_compat import keras as mp_keras
from tests import testing
from tests.keras import cases as keras_cases
from tests.testing import tf

V2 = keras_cases.V2
OVERFLOWS = (1, 4, 5)
SCALE = ["current_loss_scale:0", "good_steps:0"]


def train(make, xs, method="get_updates"):
  """Trains on the inputs `xs`; returns the values of all variables after every step,
  and the variables' names.

  Without graph optimizers, which draw constants of the model and of the optimizer
  together, but not across the gate: on TensorFlow 1.15 the product of a sparse gradient
  and `1 - beta_1` (docs/guarantees.md).
  """
  with tf.Graph().as_default():
    x = tf.placeholder(tf.float32, [3])
    loss = testing.model(x, use_resource=True)
    opt = make()
    variables = [
      variable for variable in tf.trainable_variables() if "unused" not in variable.name
    ]
    if method == "get_updates":
      train_ops = opt.get_updates(loss, variables)
    else:
      train_ops = opt.apply_gradients(
        zip(opt.get_gradients(loss, variables), variables)
      )
    config = testing.config()
    config.graph_options.rewrite_options.disable_meta_optimizer = True
    with tf.Session(config=config) as sess:
      sess.run(tf.global_variables_initializer())
      history = []
      for value in xs:
        sess.run(train_ops, {x: value})
        history.append(testing.values(sess))
      names = [variable.name for variable in tf.global_variables()]
  return history, names


@pytest.mark.each_choice
@pytest.mark.parametrize("method", ["get_updates", "get_gradients"])
@pytest.mark.parametrize("name", sorted(keras_cases.OPTIMIZERS))
def test_finite_steps_equal_inner_optimizer(name, method):
  make = functools.partial(keras_cases.OPTIMIZERS[name], V2.optimizers)
  xs = list(testing.feeds(9, OVERFLOWS))
  wrapped, names = train(
    lambda: mp_keras.LossScaleOptimizer(
      make(), initial_scale=8.0, dynamic_growth_steps=2, count_skipped_steps=False
    ),
    xs,
    method,
  )
  alone, names_alone = train(
    make, [x for i, x in enumerate(xs) if i not in OVERFLOWS], method
  )
  assert sorted(names) == sorted(names_alone + SCALE)
  scale, _ = zip(*[[state.pop(name) for name in SCALE] for state in wrapped])
  assert scale == (8.0, 4.0, 4.0, 8.0, 4.0, 2.0, 2.0, 4.0, 4.0)
  testing.assert_same(
    [state for i, state in enumerate(wrapped) if i not in OVERFLOWS], alone
  )


@pytest.mark.skipif(
  keras_cases.VERSION < (2, 3),
  reason="TensorFlow's class before 2.3 makes slices dense",
)
def test_graph_mode_trains_as_tensorflow():
  xs = list(testing.feeds(9, OVERFLOWS))
  make = functools.partial(V2.optimizers.Adam, 0.1)
  ours, _ = train(lambda: keras_cases.wrap(make()), xs)
  theirs, _ = train(lambda: V2.native_dynamic(make(), 8.0, 2), xs)
  testing.assert_same(ours, theirs)


def test_fit_skips_step_on_overflow():
  with tf.Graph().as_default(), testing.session() as sess:
    model = V2.keras.Sequential(
      [V2.keras.layers.Dense(1, input_shape=(2,), kernel_initializer="ones")]
    )
    opt = keras_cases.wrap(V2.optimizers.SGD(0.1))
    model.compile(loss="mse", optimizer=opt)
    assert model.optimizer is opt
    steps = []  # (weights finite, loss scale, iterations)
    for x in ([1.0, 2.0], [np.inf, 2.0], [1.0, 1.0], [2.0, 1.0]):
      model.fit(np.array([x]), np.array([[1.0]]), verbose=0)
      steps.append(
        (
          np.isfinite(model.get_weights()[0]).all(),
          sess.run(keras_cases.scale_of(opt)),
          sess.run(opt.iterations),
        )
      )
    are_finite, scales, iterations = zip(*steps)
    assert all(are_finite) and scales == (8.0, 4.0, 4.0, 8.0)
    assert iterations == ((1, 2, 3, 4) if V2.counts_skipped else (1, 1, 2, 3))
    assert [value.tolist() for value in sess.run(opt.weights)] == [iterations[-1]]


def test_inner_optimizer_may_make_variables_when_it_applies():
  class Counting(V2.optimizers.SGD):
    def apply_gradients(self, *args, **kwargs):
      count = tf.Variable(0.0, trainable=False, name="count", use_resource=True)
      with tf.control_dependencies([super().apply_gradients(*args, **kwargs)]):
        return count.assign_add(1.0).op

  with tf.Graph().as_default():
    x, w = tf.placeholder(tf.float32, []), tf.Variable([1.0, 2.0], use_resource=True)
    train_ops = keras_cases.wrap(Counting(1.0)).get_updates(tf.reduce_sum(w * x), [w])
    with testing.initialized_session() as sess:
      for value in (np.inf, 1.0):
        sess.run(train_ops, {x: value})
      (count,) = [v for v in tf.global_variables() if v.name == "count:0"]
      assert sess.run([w, count])[0].tolist() == [0.0, 1.0] and sess.run(count) == 1.0


def test_scale_is_read_once():
  with tf.Graph().as_default():
    opt = mp_keras.LossScaleOptimizer(V2.optimizers.SGD(0.1), "dynamic")
    handle = opt._loss_scale._current_loss_scale.handle
    reads = len([op for op in handle.consumers() if op.type == "ReadVariableOp"])
    w = tf.Variable([1.0, 2.0], use_resource=True)
    opt.get_unscaled_gradients(
      tf.gradients(opt.get_scaled_loss(tf.reduce_sum(w * w)), [w])
    )
    assert (
      len([op for op in handle.consumers() if op.type == "ReadVariableOp"]) == reads + 1
    )


@pytest.mark.usefixtures("control_flow")
def test_branches_may_scale_loss():
  with tf.Graph().as_default(), testing.session() as sess:
    opt = mp_keras.LossScaleOptimizer(V2.optimizers.SGD(0.25), "dynamic")
    w, flag = tf.Variable([1.0, 2.0], use_resource=True), tf.placeholder(tf.bool, [])
    loss = tf.cond(
      flag,
      lambda: opt.get_scaled_loss(tf.reduce_sum(w * w)),
      lambda: opt.get_scaled_loss(tf.reduce_sum(w)),
    )
    train_op = opt.apply_gradients(
      zip(opt.get_unscaled_gradients(tf.gradients(loss, [w])), [w])
    )
    sess.run(tf.global_variables_initializer())
    for value, expected in [(True, [0.5, 1.0]), (False, [0.25, 0.75])]:
      sess.run(train_op, {flag: value})
      assert sess.run(w).tolist() == expected


def test_each_graph_has_its_own_loss_scale():
  for _ in range(2):
    with tf.Graph().as_default():
      scale = keras_cases.scale_of(
        mp_keras.LossScaleOptimizer(V2.optimizers.SGD(0.1), "dynamic")
      )
      with testing.initialized_session() as sess:
        assert sess.run(scale) == 2.0**15
      assert [variable.name for variable in tf.global_variables()] == SCALE
