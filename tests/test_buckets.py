"""Gradients in buckets: one verdict, exact to the last value, and the very bits of `g * (1 / scale)`."""

import subprocess
import sys

import numpy as np
import pytest

import mp_compat
from mp_compat import buckets
from mp_compat import gradients
from tests import keras_cases
from tests import testing
from tests.testing import tf

DTYPES = [tf.float16, tf.bfloat16, tf.float32, tf.float64]
CHECKS = ("IsFinite", "DebugNumericSummaryV2")


def run(fetches, feed):
  with testing.session() as sess:
    return sess.run(fetches, feed)


def as_numpy(dtype, array):
  return np.asarray(array, np.float64).astype(dtype.as_numpy_dtype)


def finite_of(grads):
  return buckets.Buckets(grads).all_finite()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("kind", ["dense", "sparse"])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.name)
def test_one_bad_value_among_many_is_seen_and_the_largest_finite_ones_are_not_bad(dtype, kind, bad):
  largest = {"float16": 65504., "bfloat16": 3.38e38, "float32": 3.4e38, "float64": 1.7e308}[dtype.name]
  good = as_numpy(dtype, np.full([50, 2], largest))
  spoilt = good.copy()
  spoilt[37, 1] = bad
  with tf.Graph().as_default():
    values = tf.placeholder(dtype, [50, 2])
    grad = values if kind == "dense" else tf.IndexedSlices(values, tf.range(50), tf.constant([50, 2]))
    finite = finite_of([None, tf.placeholder_with_default([1.], [1]), grad])
    assert run(finite, {values: good}) and not run(finite, {values: spoilt})


def test_empty_gradients_and_no_gradients_are_finite():
  with tf.Graph().as_default():
    empty = tf.placeholder(tf.float32, [0, 3])
    assert run([finite_of([empty]), finite_of([None]), finite_of([])], {empty: np.zeros([0, 3])}) == [True] * 3


def test_an_integer_gradient_is_refused_in_tensorflows_words():
  with tf.Graph().as_default():
    with pytest.raises(TypeError, match="has DataType int32 not in list of allowed values: bfloat16, float16"):
      finite_of([tf.placeholder(tf.int32, [2])])


HIDING = {
    "clip_by_value": lambda g: tf.clip_by_value(g, -1., 1.),
    "where": lambda g: tf.where(tf.is_finite(g), g, tf.zeros_like(g)),
    "tf.cond": lambda g: tf.cond(tf.reduce_all(tf.is_finite(g)), lambda: g, lambda: tf.zeros_like(g)),
    "while_loop": lambda g: tf.while_loop(
        lambda i, h: i < 2, lambda i, h: (i + 1, tf.clip_by_value(h, -1., 1.)), [0, g])[1],
}


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("how", sorted(HIDING))
def test_a_hidden_overflow_is_traced_to_the_raw_gradient(how, version):
  with tf.Graph().as_default(), testing.control_flow(version):
    raw = tf.placeholder(tf.float32, [2])
    gradients.mark_raw([raw], ["v"])
    shown = HIDING[how](raw)
    finite = finite_of([shown])
    revealed = gradients.reveal([None, shown, shown], finite)
    for value, expected in [(1., True), (np.inf, False)]:
      got_finite, got_shown, (first, second) = run([finite, shown, revealed[1:]], {raw: [.5, value]})
      assert got_finite == expected and np.isfinite(got_shown).all()
      assert np.isfinite(first).all() == expected
      np.testing.assert_array_equal(second, got_shown)
      if expected:
        np.testing.assert_array_equal(first, got_shown)


def test_a_gradient_inside_a_function_is_traced_through_what_the_function_captured():
  with tf.Graph().as_default(), testing.control_flow(2):
    raw = tf.placeholder(tf.float32, [2])
    gradients.mark_raw([raw], ["v"])

    def verdict():
      return finite_of([tf.clip_by_value(raw, -1., 1.)])

    finite = tf.cond(tf.placeholder_with_default(True, []), verdict, lambda: tf.constant(True))
    assert run(finite, {raw: [1., 2.]}) and not run(finite, {raw: [1., np.inf]})


def test_gradients_read_from_variables_bring_no_raw_gradient_along():
  with tf.Graph().as_default():
    raw = tf.placeholder(tf.float32, [2])
    gradients.mark_raw([raw], ["v"])
    for use_resource in [False, True]:
      accumulator = tf.Variable([0., 0.], use_resource=use_resource)
      tf.assign_add(accumulator, raw)
      finite = finite_of([tf.convert_to_tensor(accumulator) / 2.])
      with testing.session() as sess:
        sess.run(tf.global_variables_initializer())
        assert sess.run(finite)  # raw was not fed


def test_gradients_that_are_raw_themselves_are_looked_at_once_and_not_copied():
  with tf.Graph().as_default() as graph:
    raw = [tf.placeholder(tf.float32, [2 + i]) for i in range(3)]
    gradients.mark_raw(raw, ["a", "b", "c"])
    finite = finite_of(raw)
    assert len([op for op in graph.get_operations() if op.type in CHECKS]) == 3
    assert all(a is b for a, b in zip(gradients.reveal(raw, finite), raw))


SCALES = [3., 2. ** 15, 1., .3, 1e-3]


def scaled_grads(dtype):
  """Gradients to be packed, alone in their shape, large, sparse, of unknown shape; their placeholders and values."""
  random = np.random.RandomState(0)
  shapes = [(7,), (7,), (3, 5), (7,), (2 ** 16,), (3, 5), (4, 2), ()]
  placeholders = [tf.placeholder(dtype, shape) for shape in shapes] + [tf.placeholder(dtype, None)]
  values = [as_numpy(dtype, random.normal(size=shape)) for shape in shapes + [(7,)]]
  grads = list(placeholders)
  grads[6] = tf.IndexedSlices(grads[6], tf.constant([5, 1, 5, 0]), tf.constant([6, 2]))
  return [None] + grads, placeholders, values


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("gate", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.name)
def test_unscaled_in_a_branch_they_have_the_bits_of_the_product(dtype, gate, version):
  with tf.Graph().as_default(), testing.control_flow(version):
    grads, placeholders, values = scaled_grads(dtype)
    scale = tf.placeholder(tf.float32, [])
    outside = gradients.unscale(grads, scale, deferrable=True)
    outside = gradients.gate(outside) if gate else outside
    ready = buckets.Buckets(outside)
    within = tf.cond(ready.all_finite(), lambda: gradients.values_of(ready.unscaled(outside)),
                     lambda: [tf.zeros_like(one) for one in placeholders])
    wide = np.float64 if dtype == tf.float64 else np.float32
    for one in SCALES:
      reciprocal = wide(1.) / wide(np.float32(one))
      got, same = run([within, gradients.values_of(outside)], {**dict(zip(placeholders, values)), scale: one})
      for value, mine, other in zip(values, got, same):
        expected = (value.astype(wide) * reciprocal).astype(value.dtype)
        assert mine.tobytes() == other.tobytes() == expected.tobytes() and mine.dtype == expected.dtype


@pytest.mark.parametrize("number", [1, 3], ids=["alone", "packed"])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.name)
def test_what_overflows_by_unscaling_alone_is_seen(dtype, number):
  largest = {"float16": 65504., "bfloat16": 3.38e38, "float32": 3.4e38, "float64": 1.7e308}[dtype.name]
  with tf.Graph().as_default():
    placeholders = [tf.placeholder(dtype, [2]) for _ in range(number)]
    scale = tf.placeholder(tf.float32, [])
    finite = finite_of(gradients.unscale(placeholders, scale, deferrable=True))
    feed = {one: as_numpy(dtype, [1., -largest]) for one in placeholders}
    for one, expected in [(1., True), (.5, False), (2., True), (0., False), (np.nan, False), (-1., True), (-.5, False)]:
      with np.errstate(all="ignore"):
        wide = np.float64 if dtype == tf.float64 else np.float32
        reference = (feed[placeholders[0]].astype(wide) * (wide(1.) / wide(one))).astype(dtype.as_numpy_dtype)
      assert np.isfinite(reference.astype(np.float64)).all() == expected
      assert run(finite, {**feed, scale: one}) == expected


def test_gradients_of_two_scales_are_each_unscaled_by_their_own():
  with tf.Graph().as_default():
    x = tf.placeholder(tf.float32, [2])
    grads = gradients.unscale([x], tf.placeholder_with_default(4., []), deferrable=True) + gradients.unscale(
        [x], tf.placeholder_with_default(.5, []), deferrable=True) + [x + 0.]
    ready = buckets.Buckets(grads)
    within = tf.cond(ready.all_finite(), lambda: ready.unscaled(grads), lambda: [tf.zeros([2])] * 3)
    np.testing.assert_array_equal(run(within, {x: [1., 2.]}), [[.25, .5], [2., 4.], [1., 2.]])
    assert not run(ready.all_finite(), {x: [1., 3e38]})


class Tenth(tf.train.GradientDescentOptimizer):
  """An inner optimizer that computes with its gradients, so that TensorFlow could draw both factors together."""

  def apply_gradients(self, grads_and_vars, global_step=None, name=None):
    return super().apply_gradients([(grad * tf.constant(.1), var) for grad, var in grads_and_vars], global_step, name)


@pytest.mark.parametrize("use_resource", [True, False], ids=["resource", "reference"])
def test_graph_optimization_leaves_the_product_alone(use_resource):
  value = np.random.RandomState(0).normal(size=[1, 1000]).astype(np.float32)
  with tf.Graph().as_default():
    with tf.variable_scope("", use_resource=use_resource):
      w = tf.get_variable("w", [1000, 1], initializer=tf.zeros_initializer())
    x = tf.placeholder(tf.float32, [1, 1000])
    scale = mp_compat.DynamicLossScale(3 ** 5, 2000)
    train_op = mp_compat.MixedPrecisionLossScaleOptimizer(Tenth(1.), scale).minimize(tf.matmul(x, w))
    with testing.session() as sess:
      sess.run(tf.global_variables_initializer())
      sess.run(train_op, {x: value})
      reciprocal = np.float32(1.) / np.float32(3 ** 5)
      np.testing.assert_array_equal(sess.run(w).T, -(value * np.float32(3 ** 5) * reciprocal * np.float32(.1)))


def test_gradients_of_one_shape_and_several_dtypes_are_not_mixed():
  with tf.Graph().as_default():
    inputs = [tf.placeholder(dtype, [2]) for dtype in DTYPES * 2]
    grads = gradients.unscale(inputs, tf.placeholder_with_default(4., []), deferrable=True)
    ready = buckets.Buckets(grads)
    within = tf.cond(ready.all_finite(), lambda: ready.unscaled(grads), lambda: inputs)
    got = run(within, {x: as_numpy(x.dtype, [i, 2.]) for i, x in enumerate(inputs)})
    for i, (x, value) in enumerate(zip(inputs, got)):
      assert value.dtype == x.dtype.as_numpy_dtype and value.tolist() == [i / 4., .5]


def many_small(number, gate=tf.train.Optimizer.GATE_NONE):
  """`number` variables of one shape, the placeholders of their gradients, and a train op."""
  with tf.variable_scope("", use_resource=True):
    variables = [tf.get_variable("v{}".format(i), [3], initializer=tf.zeros_initializer()) for i in range(number)]
  inputs = [tf.placeholder(tf.float32, [3]) for _ in variables]
  loss = tf.add_n([tf.reduce_sum(v * x) for v, x in zip(variables, inputs)])
  opt = mp_compat.MixedPrecisionLossScaleOptimizer(tf.train.GradientDescentOptimizer(1.), 8.)
  grads_and_vars = opt.compute_gradients(loss, gate_gradients=gate)
  return variables, inputs, grads_and_vars, opt.apply_gradients(grads_and_vars)


@pytest.mark.parametrize("gate", [tf.train.Optimizer.GATE_NONE, tf.train.Optimizer.GATE_GRAPH])
def test_small_gradients_are_looked_at_and_unscaled_by_one_op(gate):
  with tf.Graph().as_default():
    variables, inputs, _, train_op = many_small(50, gate)
    with testing.session() as sess:
      sess.run(tf.global_variables_initializer())
      feed = {x: [1., 2., i] for i, x in enumerate(inputs)}
      ran = [kind for kind, _, _ in testing.executed(sess, train_op, feed)]
      assert sum(ran.count(check) for check in CHECKS) == 1 and ran.count("Unpack") == 1
      # The backward pass (with a gate also the gradient of the loss by the scale), and unscaling.
      assert ran.count("Mul") - 50 in (1, 2)
      np.testing.assert_array_equal(sess.run(variables), [[-1., -2., -i] for i in range(50)])
      sess.run(train_op, {**feed, inputs[17]: [1., np.nan, 2.]})
      np.testing.assert_array_equal(sess.run(variables), [[-1., -2., -i] for i in range(50)])


def test_gradients_above_64_kb_are_not_copied_into_one_buffer():
  for values, packed in [(2 ** 14, True), (2 ** 14 + 1, False)]:
    with tf.Graph().as_default() as graph:
      finite_of([tf.placeholder(tf.float32, [values]) for _ in range(2)])
      assert any(op.type == "Pack" and op.inputs[0].shape.rank == 1 for op in graph.get_operations()) == packed


def test_one_gradient_alone_asks_for_nothing_of_the_others():
  with tf.Graph().as_default():
    _, inputs, grads_and_vars, _ = many_small(3)
    with testing.session() as sess:
      sess.run(tf.global_variables_initializer())
      np.testing.assert_array_equal(sess.run(grads_and_vars[1][0], {inputs[1]: [1., 2., 3.]}), [1., 2., 3.])


@pytest.mark.skipif(keras_cases.VERSION < (2, 4) or (2, 13) <= keras_cases.VERSION <= (2, 17),
                    reason="no op looks in one pass before TensorFlow 2.4; that of 2.13 to 2.17 is slow, and not used")
def test_no_bool_of_the_size_of_a_gradient_is_made():
  with tf.Graph().as_default():
    job = testing.Job()
    train_op = mp_compat.MixedPrecisionLossScaleOptimizer(tf.train.GradientDescentOptimizer(1.), "dynamic").minimize(
        job.loss)
    with testing.session() as sess:
      sess.run(tf.global_variables_initializer())
      made = testing.executed(sess, train_op, {job.x: [1., 2.]})
  assert ("ResourceApplyGradientDescent" in [kind for kind, _, _ in made]
          and not [kind for kind, dtype, shape in made if dtype == tf.bool and shape == [2]])


def test_gradients_on_several_devices_stay_where_they_are():
  with tf.Graph().as_default() as graph, testing.control_flow(1):
    inputs, grads = [tf.placeholder(tf.float32, [3]) for _ in range(4)], []
    for one, device in zip(inputs, testing.TWO_CPUS * 2):
      with tf.device(device):
        grads.append(one * 2.)
    with tf.device("/cpu:1"):
      unscaled = gradients.unscale(grads, tf.placeholder_with_default(4., []), deferrable=True)
      ready = buckets.Buckets(unscaled)
      within = tf.cond(ready.all_finite(), lambda: ready.unscaled(unscaled), lambda: [tf.zeros([3])] * 4)
    packs = [op for op in graph.get_operations() if op.type == "Pack" and op.inputs[0].shape.rank == 1 and
             op.inputs[0].shape[0] == 3]
    assert sorted(pack.device for pack in packs) == sorted({grad.device for grad in grads})
    assert all(one.device == pack.device for pack in packs for one in pack.inputs)
    unpacks = [op.device for op in graph.get_operations() if op.type == "Unpack"]
    assert sorted(unpacks) == sorted({grad.device for grad in grads})
    checks = [op.device for op in graph.get_operations() if op.type in CHECKS]
    assert sorted(checks) == sorted([grad.device for grad in grads])  # of each, scaled and unscaled
    np.testing.assert_array_equal(run(within, {one: [i, 1., 2.] for i, one in enumerate(inputs)}),
                                  [[i / 2., .5, 1.] for i in range(4)])


def test_xla_is_given_no_op_that_it_lacks_and_no_conditional():

  def verdict(x, y):
    return finite_of(gradients.unscale([x, y], tf.constant(2.), deferrable=True))

  with tf.Graph().as_default() as graph:
    x, y = tf.placeholder(tf.float32, [2]), tf.placeholder(tf.float32, [2])
    compiled, = tf.xla.experimental.compile(verdict, [x, y])
    assert run(compiled, {x: [1., 2.], y: [1., 2.]}) and not run(compiled, {x: [1., 2.], y: [1., np.inf]})
    assert not [op for op in graph.get_operations() if op.type in ("Switch", "If", "StatelessIf")]


CLUSTERED = """
import numpy as np
import mp_compat
from tests import testing
from tests.testing import tf

tf.disable_eager_execution()
x = tf.placeholder(tf.float32, [4, 50])
hidden = x
with tf.variable_scope("model", use_resource=True):
  for i in range(3):
    weights = tf.get_variable("w{}".format(i), [50, 50], initializer=tf.glorot_uniform_initializer(seed=i))
    hidden = tf.tanh(tf.matmul(hidden, weights) + tf.get_variable("b{}".format(i), [50]))
opt = mp_compat.MixedPrecisionLossScaleOptimizer(tf.train.MomentumOptimizer(.1, .9), mp_compat.DynamicLossScale(8., 3))
train_op = opt.minimize(tf.reduce_mean(tf.square(hidden)))
with testing.session() as sess:
  sess.run(tf.global_variables_initializer())
  for step in range(6):
    metadata = tf.RunMetadata()
    finite, scale, _ = sess.run([opt.gradients_finite, opt.loss_scale(), train_op],
                                {x: np.full([4, 50], np.nan if step == 2 else .5)},
                                options=tf.RunOptions(output_partition_graphs=True), run_metadata=metadata)
    print(finite, scale, np.isfinite(sess.run(tf.trainable_variables()[0])).all())
print(any(node.op.startswith("_Xla") for part in metadata.partition_graphs for node in part.node))
"""


def test_under_xlas_auto_clustering_a_step_is_judged_as_ever():
  flags = "--tf_xla_auto_jit=2 --tf_xla_cpu_global_jit --tf_xla_min_cluster_size=2"
  done = subprocess.run([sys.executable, "-c", CLUSTERED], env=dict(testing.environment(), TF_XLA_FLAGS=flags),
                        stdout=subprocess.PIPE, text=True, check=True)
  scales = [(True, 8.), (True, 8.), (False, 8.), (True, 4.), (True, 4.), (True, 4.)]
  assert done.stdout.splitlines() == ["{} {} True".format(*one) for one in scales] + ["True"]
