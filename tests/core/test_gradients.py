"""Tests of scaling, unscaling, conversion, clipping and gating."""

import numpy as np
import pytest

from mp_compat.core import gradients
from tests import testing
from tests.testing import tf

DTYPES = [tf.float16, tf.bfloat16, tf.float32, tf.float64]


def run(fetches, feed):
  with testing.session() as sess:
    return sess.run(fetches, feed)


def as_numpy(dtype, array):
  return np.asarray(array, np.float64).astype(dtype.as_numpy_dtype)


@pytest.mark.parametrize("scale", [1.0, 3.0, 2.0**15, 2.0**16, 2.0**26, 2.0**-3])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.name)
def test_unscaled_gradients_are_rounded_once(dtype, scale):
  raw = as_numpy(dtype, [1.0, -3.25, 6e4, 6.1e-5, 0.0])
  with tf.Graph().as_default():
    grad, fed_scale = tf.placeholder(dtype, [5]), tf.placeholder(tf.float32, [])
    slices = tf.IndexedSlices(grad, tf.constant([4, 1, 1, 0, 2]), tf.constant([6]))
    dense, none, sparse = gradients.unscale(iter([grad, None, slices]), fed_scale)
    assert none is None and dense.dtype == dtype and isinstance(sparse, tf.IndexedSlices)
    assert sparse.indices is slices.indices and sparse.dense_shape is slices.dense_shape
    got = run([dense, sparse.values], {grad: raw, fed_scale: scale})
  wide = np.float64 if dtype == tf.float64 else np.float32
  with np.errstate(over="ignore"):
    expected = (raw.astype(wide) * (wide(1) / wide(scale))).astype(dtype.as_numpy_dtype)
  for values in got:
    assert values.tobytes() == expected.tobytes()


def test_gradients_share_the_reciprocal_of_the_scale():
  with tf.Graph().as_default() as graph:
    gradients.unscale([tf.placeholder(dtype, [2]) for dtype in DTYPES * 3], tf.placeholder(tf.float32, []))
    assert len([op for op in graph.get_operations() if op.type == "RealDiv"]) == 2  # float32 and float64


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.name)
def test_loss_is_scaled_in_its_own_dtype(dtype):
  with tf.Graph().as_default():
    loss = tf.placeholder(dtype, [2])
    scaled = gradients.scale_loss(loss, tf.constant(512.0))
    called = gradients.scale_loss(lambda: loss, tf.constant(512.0))()
    assert scaled.dtype == called.dtype == dtype
    values = as_numpy(dtype, [1.5, -0.25])
    for got in run([scaled, called], {loss: values}):
      np.testing.assert_array_equal(got.astype(np.float64), [768.0, -128.0])


def test_python_and_variable_gradients_are_converted():
  kinds = [1.5, [1.0, 2.0], np.float32(3.0), np.ones([2, 1], np.float16)]
  with tf.Graph().as_default():
    variables = [tf.Variable([1.0, 2.0], use_resource=use_resource) for use_resource in (True, False)]
    reference = tf.assign_add(variables[1], [1.0, 1.0])
    converted = [gradients.convert(one) for one in kinds + variables + [reference]]
    assert [one.dtype for one in converted] == [tf.float32] * 3 + [tf.float16] + [tf.float32] * 3
    sparse = gradients.convert(tf.IndexedSlices([[1.0, 2.0]], [3], [5, 2]))
    assert isinstance(sparse, tf.IndexedSlices) and sparse.values.shape == [1, 2]
    tensor = tf.placeholder(tf.float32, [2])
    assert gradients.convert(tensor) is tensor and gradients.convert(None) is None
    with testing.session() as sess:
      sess.run(tf.global_variables_initializer())
      assert sess.run(converted[4]).tolist() == [1.0, 2.0] and sess.run(converted[6]).tolist() == [2.0, 3.0]


def test_nan_is_added_beside_empty_gradients():
  with tf.Graph().as_default():
    finite = tf.placeholder(tf.bool, [])
    empty = tf.IndexedSlices(tf.zeros([0, 2]), tf.zeros([0], tf.int32), tf.constant([3, 2]))
    full = tf.IndexedSlices(tf.constant([[1.0, 2.0]]), tf.constant([1]), tf.constant([3, 2]))
    grads = [None, empty, tf.constant([1, 2]), tf.constant([1.0, 2.0]), full]
    none, sparse, integer, dense, last = gradients.add_nan_unless(finite, grads)
    assert none is None and sparse is empty and integer is grads[2] and last is full
    assert run(dense, {finite: True}).tolist() == [1.0, 2.0] and np.isnan(run(dense, {finite: False})).all()
    _, last = gradients.add_nan_unless(finite, [empty, full])
    assert (
      run(last.values, {finite: True}).tolist() == [[1.0, 2.0]] and np.isnan(run(last.values, {finite: False})).all()
    )


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_clipping_by_norm_turns_non_finite_into_nan(bad):
  with tf.Graph().as_default():
    x = tf.placeholder(tf.float32, [2])
    (clipped,), norm = gradients.clip_by_global_norm([x], 1.0)
    np.testing.assert_allclose(run([clipped, norm], {x: [3.0, 4.0]})[0], [0.6, 0.8], rtol=1e-6)
    assert np.isnan(run(clipped, {x: [1.0, bad]})).all()


def test_gated_gradient_waits_for_all_gradients():
  with tf.Graph().as_default():
    first, second = tf.placeholder(tf.float32, []), tf.placeholder(tf.float32, [])
    gated = gradients.gate([first, None, second])
    assert gated[1] is None and run(gated[0], {first: 1.0, second: 2.0}) == 1.0
    with pytest.raises(tf.errors.InvalidArgumentError, match="must feed"):
      run(gated[0], {first: 1.0})
    assert gradients.gate([None, None]) == [None, None]
