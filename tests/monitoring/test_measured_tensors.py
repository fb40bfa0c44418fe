"""Tests of which tensors gradient_ranges measures, in which dtypes, and what it cannot
measure.
"""

import signal

import numpy as np
import pytest

import mp_compat
from mp_compat.monitoring import dataflow
from mp_compat.monitoring import gradient_ranges
from mp_compat.monitoring import reports
from tests import testing
from tests.monitoring.test_gradient_ranges import X
from tests.monitoring.test_gradient_ranges import check
from tests.monitoring.test_gradient_ranges import dense
from tests.monitoring.test_gradient_ranges import measure_with_numpy
from tests.monitoring.test_gradient_ranges import network
from tests.testing import Optimizer
from tests.testing import sgd
from tests.testing import tf

pytestmark = pytest.mark.usefixtures("graph")


def describe(opt, dtypes=tf.float16):
  """Returns for each tensor whether its scale is known, its narrowest dtype, and
  whether the advice is for it.
  """
  measured = gradient_ranges.report(opt, dtypes).measured
  return {
    name: (item.scale is not None, item.dtype, item.is_selected)
    for name, item in measured.items()
  }


@pytest.mark.each_choice
@pytest.mark.parametrize("rewrite", [False, True], ids=["float32", "graph_rewrite"])
@pytest.mark.parametrize(
  "dtypes", [tf.float16, [tf.float32]], ids=["default", "explicit"]
)
def test_float32_pass_begins_behind_loss(dtypes, rewrite, request):
  """Its tensors are measured whichever dtype was asked for: the graph rewrite leaves
  the graph in float32.
  """
  x, loss = network(tf.float32)
  opt = Optimizer(tf.train.AdamOptimizer(), 1.0)
  if rewrite:
    request.addfinalizer(mp_compat.disable_mixed_precision_graph_rewrite)
    opt = mp_compat.enable_mixed_precision_graph_rewrite(tf.train.AdamOptimizer(), 1.0)
  opt.minimize(loss)
  ranges = mp_compat.gradient_ranges(opt, dtypes)
  (first,) = [
    name for name in ranges if "xent" in name.lower() or "SparseSoftmax" in name
  ]
  assert (
    list(ranges)[0] == first
    and "gradients/two/MatMul_grad/MatMul" in ranges
    and len(ranges) == 7
  )
  assert all(described[-1] for described in describe(opt, dtypes).values())
  if not rewrite:
    with testing.initialized_session() as sess:
      assert all(values.exponents.sum() for values in sess.run(ranges, {x: X}).values())


def test_bfloat16_is_measured_before_float32():
  _, loss = network(tf.bfloat16)
  opt = Optimizer(tf.train.AdamOptimizer(), 1.0)
  opt.minimize(loss)
  described = describe(opt)
  assert "gradients/two/MatMul_grad/MatMul" in described and set(
    described.values()
  ) == {(True, "bfloat16", True)}


def test_stopped_gradients_are_not_followed():
  x, loss = network()
  opt = Optimizer(sgd(), 2.0**4)
  (grad,) = tf.gradients(opt.scale_loss(loss), [x])
  forward = tf.cast(x + 1e-9 * tf.stop_gradient(grad), tf.float16, name="recomputed")
  kernel = tf.get_variable("kernel", [3, 2])
  opt.apply_gradients(
    [
      (
        opt.unscale_gradients([tf.cast(tf.reduce_sum(forward), tf.float32) * kernel])[
          0
        ],
        kernel,
      )
    ]
  )
  assert not [name for name in mp_compat.gradient_ranges(opt) if "recomputed" in name]


@pytest.mark.parametrize("last", ["broadcast", "reshaped", "concatenated"])
def test_gradient_of_logits_of_float32_model(last):
  x = tf.placeholder(tf.float32, [4, 6])
  if last == "broadcast":
    logits = x * tf.get_variable("gamma", [6], initializer=tf.ones_initializer())
  elif last == "reshaped":
    logits = tf.matmul(x, tf.reshape(tf.get_variable("w", [3, 2, 6]), [6, 6]))
  else:
    parts = tf.split(tf.get_variable("w", [6, 6]), 2)
    logits = tf.matmul(x[:, :3], parts[0]) + tf.matmul(x[:, 3:], parts[1])
  loss = tf.reduce_mean(
    tf.nn.softmax_cross_entropy_with_logits_v2(labels=tf.eye(4, 6), logits=logits)
  )
  opt = Optimizer(sgd(), 1.0)
  train_op = opt.minimize(loss)
  (grad,) = tf.gradients(loss, logits)
  ranges = mp_compat.gradient_ranges(opt, "float32")
  with testing.initialized_session() as sess:
    measured, values, _ = sess.run(
      [ranges, grad, train_op], {x: np.random.RandomState(0).normal(size=[4, 6])}
    )
  expected = measure_with_numpy(values, 1.0).exponents
  assert any(gradient.exponents.tolist() == expected for gradient in measured.values())
  # No tensor is measured a second time beside its variable.
  shapes = [int(gradient.exponents.sum()) for gradient in measured.values()]
  assert shapes.count(6 if last == "broadcast" else 36) == 1


def test_fed_gradients_without_backward_pass():
  v = tf.get_variable("v", [2], initializer=tf.zeros_initializer())
  x = tf.placeholder(tf.float32, [2])
  opt = Optimizer(sgd(), 2.0**4, check_computed_gradients=False)
  ((grad, _),) = opt.compute_gradients(tf.reduce_sum(v * x), [v])
  train_op = opt.apply_gradients([(tf.clip_by_norm(grad, 1.0), v)])
  ranges = mp_compat.gradient_ranges(opt)
  assert describe(opt) == {"v:0": (False, "float32", True)}
  assert not gradient_ranges.report(opt, tf.float16).is_complete
  with testing.initialized_session() as sess:
    measured, _ = sess.run([ranges, train_op], {grad: [0.25, 0.5]})
  check(measured["v:0"], [0.25, 0.5], 1.0)


@pytest.mark.usefixtures("control_flow")
def test_tensors_in_loops_are_left_out():
  x = tf.placeholder(tf.float32, [6, 4, 3])

  def cell(state, step):
    return tf.tanh(dense(tf.concat([state, step], axis=1), 5, "cell", tf.float16))

  with tf.variable_scope("rnn", reuse=tf.AUTO_REUSE):
    states = tf.scan(cell, tf.cast(x, tf.float16), tf.zeros([4, 5], tf.float16))
  logits = tf.cast(dense(states[-1], 2, "top", tf.float16), tf.float32)
  opt = Optimizer(tf.train.AdamOptimizer(), 2.0**4)
  train_op = opt.minimize(tf.reduce_mean(tf.square(logits)))
  ranges = mp_compat.gradient_ranges(opt)
  assert {v.name for v in tf.trainable_variables()} <= set(ranges)
  assert any(name.endswith("MatMul_grad/MatMul") and "top" in name for name in ranges)
  with testing.initialized_session() as sess:
    _, measured = sess.run([train_op, ranges], {x: np.ones([6, 4, 3])})
  assert all(
    0 < values.exponents.sum() and not values.nonfinite for values in measured.values()
  )


@pytest.mark.usefixtures("control_flow")
def test_loops_are_measured_as_passed():
  x = tf.placeholder(tf.float32, [3])
  w = tf.get_variable("w", [], initializer=tf.zeros_initializer())
  opt = Optimizer(sgd(), 2.0**4)
  grads = tf.map_fn(lambda value: opt.compute_gradients(w * value)[0][0], x)
  opt.apply_gradients([(tf.reduce_sum(grads), w)])
  ranges = mp_compat.gradient_ranges(opt)
  with testing.initialized_session() as sess:
    (values,) = sess.run(ranges, {x: [1.0, 2.0, 5.0]}).values()
    check(values, [8.0], 1.0)


def test_dtypes_of_values_are_known():
  """A gradient is selected if its values, or its summands, were float16, even if it is
  float32 itself.
  """
  x = tf.placeholder(tf.float32, [4, 3])
  shapes = {"shared": [3, 3], "broadcast": [3], "head": [3, 2], "gain": []}
  shared, broadcast, head, gain = [
    tf.get_variable(name, shape) for name, shape in shapes.items()
  ]
  hidden = tf.matmul(tf.cast(x, tf.float16), tf.cast(shared, tf.float16))
  hidden = tf.matmul(tf.tanh(hidden), tf.cast(shared, tf.float16)) * tf.cast(
    broadcast, tf.float16
  )
  opt = Optimizer(sgd(), 2.0**4)
  opt.minimize(
    tf.reduce_sum(tf.square(gain * tf.matmul(tf.cast(hidden, tf.float32), head)))
  )
  float16, float32 = (True, "float16", True), (True, "float32", False)
  described = describe(opt)
  variables = {
    name: values for name, values in described.items() if name.endswith(":0")
  }
  assert variables == {
    "shared:0": float16,
    "broadcast:0": float16,
    "head:0": float32,
    "gain:0": float32,
  }
  assert {values for name, values in described.items() if name not in variables} == {
    float16
  }
  assert gradient_ranges.report(opt, tf.float16).is_complete
  all_dtypes = describe(opt, [tf.float16, tf.float32])
  assert len(all_dtypes) > len(described) and all(
    is_selected for _, _, is_selected in all_dtypes.values()
  )
  assert all_dtypes["head:0"][1] == "float32" and all_dtypes["shared:0"][1] == "float16"


@pytest.mark.matrix
def test_residual_steps_take_linear_time():
  """Each doubles the number of paths, and 1200 are more than Python's recursion
  limit.
  """
  steps, w = 1200, tf.get_variable("w", [2], initializer=tf.ones_initializer())
  state = tf.cast(w, tf.float16)
  for _ in range(steps):
    state += tf.tanh(state)
  opt = Optimizer(sgd(), 2.0**4)
  opt.minimize(tf.reduce_sum(tf.cast(state, tf.float32)))
  # raises KeyboardInterrupt
  previous = signal.signal(signal.SIGALRM, signal.default_int_handler)
  signal.alarm(30)
  try:
    mp_compat.LossScaleHook(opt).begin()
    computed = reports.train_steps(opt)[0].lineages[0].computed
    sources = dataflow.sources_of([each.scaled for each in computed])
  finally:
    signal.alarm(0)
    signal.signal(signal.SIGALRM, previous)
  sums = [
    op.outputs[0] for op in tf.get_default_graph().get_operations() if op.type == "AddN"
  ]
  assert len(sums) == steps and {len(dataflow.terms_of(each)) for each in sums} == {2}
  assert len(sources) >= 2 * steps and set(sources.values()) == {
    frozenset([tf.float16]),
    frozenset([tf.float16, tf.float32]),
  }


CALLS = {
  "plain": lambda layer, value: layer(value),
  "cond": lambda layer, value: tf.cond(
    value[0, 0] < 9.0, lambda: layer(value), lambda: value
  ),
  "function": lambda layer, value: tf.function(layer)(value),
  "loop": lambda layer, value: tf.while_loop(
    lambda step, _: step < 2, lambda step, state: (step + 1, layer(state)), [0, value]
  )[1],
}


@pytest.mark.each_choice
@pytest.mark.usefixtures("control_flow")
@pytest.mark.parametrize("call", sorted(CALLS))
def test_hidden_parts_are_noticed(call):
  x = tf.placeholder(tf.float32, [4, 3])
  w = tf.get_variable("w", [3, 3], use_resource=True)
  hidden = CALLS[call](
    lambda value: tf.tanh(tf.matmul(value, tf.cast(w, tf.float16))),
    tf.cast(x, tf.float16),
  )
  opt = Optimizer(sgd(), 2.0**4)
  opt.minimize(tf.reduce_sum(tf.cast(hidden, tf.float32)))
  report = gradient_ranges.report(opt, tf.float16)
  assert report.is_complete == (
    call == "plain" or call == "cond" and not tf.control_flow_v2_enabled()
  )
  # whichever dtype the function or the loop returns
  assert report.measured["w:0"].is_selected
