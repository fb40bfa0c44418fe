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


def test_the_raw_gradient_that_is_nearest_is_found_and_none_behind_it():
  with tf.Graph().as_default():
    first = tf.placeholder(tf.float32, [2])
    second = first * 2.
    gradients.mark_raw([first, second], ["first", "second"])
    assert gradients.raw_sources([tf.clip_by_value(second, -1., 1.)]) == [second]


def test_a_gated_gradient_waits_for_all_the_others():
  with tf.Graph().as_default():
    first, second = tf.placeholder(tf.float32, []), tf.placeholder(tf.float32, [])
    gated = gradients.gate([first, None, second])
    assert gated[1] is None and run(gated[0], {first: 1., second: 2.}) == 1.
    with pytest.raises(tf.errors.InvalidArgumentError, match="must feed"):
      run(gated[0], {first: 1.})
    assert gradients.gate([None, None]) == [None, None]
