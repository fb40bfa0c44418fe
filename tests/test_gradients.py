"""Scaling, unscaling and the verdict, against NumPy."""

import numpy as np
import pytest

from mp_compat import gradients
from tests import testing
from tests.testing import tf

DTYPES = [tf.float16, tf.bfloat16, tf.float32, tf.float64]


def run(fetches, feed):
  with testing.session() as sess:
    return sess.run(fetches, feed)


def as_numpy(dtype, array):
  return np.asarray(array, np.float64).astype(dtype.as_numpy_dtype)


@pytest.mark.parametrize("scale", [1., 3., 2. ** 15, 2. ** 16, 2. ** 24, 2. ** -3])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.name)
def test_unscaled_values_are_rounded_once_in_the_gradients_own_dtype(dtype, scale):
  raw = as_numpy(dtype, [1., -3.25, 6e4, 6.1e-5, 0.])
  with tf.Graph().as_default():
    grad, fed_scale = tf.placeholder(dtype, [5]), tf.placeholder(tf.float32, [])
    slices = tf.IndexedSlices(grad, tf.constant([4, 1, 1, 0, 2]), tf.constant([6]))
    dense, none, sparse = gradients.unscale(iter([grad, None, slices]), fed_scale)
    assert none is None and dense.dtype == dtype and isinstance(sparse, tf.IndexedSlices)
    assert sparse.indices is slices.indices and sparse.dense_shape is slices.dense_shape
    got = run([dense, sparse.values], {grad: raw, fed_scale: scale})
  wide = np.float64 if dtype == tf.float64 else np.float32
  expected = (raw.astype(wide) * (wide(1) / wide(scale))).astype(dtype.as_numpy_dtype)
  for values in got:
    assert values.tobytes() == expected.tobytes()


def test_the_reciprocal_is_computed_once_for_many_gradients():
  with tf.Graph().as_default() as graph:
    gradients.unscale([tf.placeholder(dtype, [2]) for dtype in DTYPES * 3], tf.placeholder(tf.float32, []))
    assert len([op for op in graph.get_operations() if op.type == "RealDiv"]) == 2  # float32 and float64


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.name)
def test_a_loss_is_scaled_in_its_own_dtype(dtype):
  with tf.Graph().as_default():
    loss = tf.placeholder(dtype, [2])
    scaled = gradients.scale_loss(loss, tf.constant(512.))
    called = gradients.scale_loss(lambda: loss, tf.constant(512.))()
    assert scaled.dtype == called.dtype == dtype
    values = as_numpy(dtype, [1.5, -.25])
    for got in run([scaled, called], {loss: values}):
      np.testing.assert_array_equal(got.astype(np.float64), [768., -128.])


def test_an_integer_loss_is_refused_by_name():
  with tf.Graph().as_default():
    with pytest.raises(ValueError, match="Invalid type tf.int32 for .*expected.*tf.cast"):
      gradients.scale_loss(tf.placeholder(tf.int32, []), tf.constant(2.))


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
    finite = gradients.all_finite([None, tf.placeholder_with_default([1.], [1]), grad])
    assert run(finite, {values: good}) and not run(finite, {values: spoilt})


def test_empty_gradients_and_no_gradients_are_finite():
  with tf.Graph().as_default():
    empty = tf.placeholder(tf.float32, [0, 3])
    assert run([gradients.all_finite([empty]), gradients.all_finite([None]), gradients.all_finite([])],
               {empty: np.zeros([0, 3])}) == [True] * 3


def test_an_integer_gradient_is_refused_in_tensorflows_words():
  with tf.Graph().as_default():
    with pytest.raises(TypeError, match="has DataType int32 not in list of allowed values: bfloat16, float16"):
      gradients.all_finite([tf.placeholder(tf.int32, [2])])


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
    finite = gradients.all_finite([shown])
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
      return gradients.all_finite([tf.clip_by_value(raw, -1., 1.)])

    finite = tf.cond(tf.placeholder_with_default(True, []), verdict, lambda: tf.constant(True))
    assert run(finite, {raw: [1., 2.]}) and not run(finite, {raw: [1., np.inf]})


def test_gradients_read_from_variables_bring_no_raw_gradient_along():
  with tf.Graph().as_default():
    raw = tf.placeholder(tf.float32, [2])
    gradients.mark_raw([raw], ["v"])
    for use_resource in [False, True]:
      accumulator = tf.Variable([0., 0.], use_resource=use_resource)
      tf.assign_add(accumulator, raw)
      finite = gradients.all_finite([tf.convert_to_tensor(accumulator) / 2.])
      with testing.session() as sess:
        sess.run(tf.global_variables_initializer())
        assert sess.run(finite)  # raw was not fed


def test_gradients_that_are_raw_themselves_are_looked_at_once_and_not_copied():
  with tf.Graph().as_default() as graph:
    raw = [tf.placeholder(tf.float32, [2]) for _ in range(3)]
    gradients.mark_raw(raw, ["a", "b", "c"])
    finite = gradients.all_finite(raw)
    assert len([op for op in graph.get_operations() if op.type == "IsFinite"]) == 3
    assert all(a is b for a, b in zip(gradients.reveal(raw, finite), raw))


def test_a_gated_gradient_waits_for_all_the_others():
  with tf.Graph().as_default():
    first, second = tf.placeholder(tf.float32, []), tf.placeholder(tf.float32, [])
    gated = gradients.gate([first, None, second])
    assert gated[1] is None and run(gated[0], {first: 1., second: 2.}) == 1.
    with pytest.raises(tf.errors.InvalidArgumentError, match="must feed"):
      run(gated[0], {first: 1.})
    assert gradients.gate([None, None]) == [None, None]
