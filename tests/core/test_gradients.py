"""Tests of scaling, unscaling, conversion, clipping and gating."""

import numpy as np
import pytest

from mp_compat.core import gradients
from tests.core.test_finite_check import DTYPES
from tests.core.test_finite_check import as_numpy
from tests.core.test_finite_check import run
from tests.testing import tf

pytestmark = pytest.mark.usefixtures("graph")


@pytest.mark.parametrize("scale", [1.0, 3.0, 2.0**15, 2.0**16, 2.0**26, 2.0**-3])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.name)
def test_unscaled_gradients_are_rounded_once(dtype, scale):
  raw = as_numpy(dtype, [1.0, -3.25, 6e4, 6.1e-5, 0.0])
  grad, fed_scale = tf.placeholder(dtype, [5]), tf.placeholder(tf.float32, [])
  slices = tf.IndexedSlices(grad, tf.constant([4, 1, 1, 0, 2]), tf.constant([6]))
  dense, none, sparse = gradients.unscale(iter([grad, None, slices]), fed_scale)
  assert none is None and dense.dtype == dtype and isinstance(sparse, tf.IndexedSlices)
  assert sparse.indices is slices.indices and sparse.dense_shape is slices.dense_shape
  wide = np.float64 if dtype == tf.float64 else np.float32
  with np.errstate(over="ignore"):
    expected = (raw.astype(wide) * (wide(1) / wide(scale))).astype(dtype.as_numpy_dtype)
  for values in run([dense, sparse.values], {grad: raw, fed_scale: scale}):
    assert values.tobytes() == expected.tobytes()


def test_gradients_share_reciprocal_of_scale(graph):
  gradients.unscale(
    [tf.placeholder(dtype, [2]) for dtype in DTYPES * 3], tf.placeholder(tf.float32, [])
  )
  # float32 and float64
  assert len([op for op in graph.get_operations() if op.type == "RealDiv"]) == 2


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.name)
def test_loss_is_scaled_in_its_own_dtype(dtype):
  loss = tf.placeholder(dtype, [2])
  scaled = gradients.scale_loss(loss, tf.constant(512.0))
  called = gradients.scale_loss(lambda: loss, tf.constant(512.0))()
  assert scaled.dtype == called.dtype == dtype
  values = as_numpy(dtype, [1.5, -0.25])
  for got in run([scaled, called], {loss: values}):
    np.testing.assert_array_equal(got.astype(np.float64), [768.0, -128.0])


def test_nan_is_added_beside_empty_gradients():
  finite = tf.placeholder(tf.bool, [])
  empty = tf.IndexedSlices(
    tf.zeros([0, 2]), tf.zeros([0], tf.int32), tf.constant([3, 2])
  )
  full = tf.IndexedSlices(
    tf.constant([[1.0, 2.0]]), tf.constant([1]), tf.constant([3, 2])
  )
  grads = [None, empty, tf.constant([1, 2]), tf.constant([1.0, 2.0]), full]
  none, sparse, integer, dense, last = gradients.add_nan_unless(finite, grads)
  assert none is None and sparse is empty and integer is grads[2] and last is full
  assert (
    run(dense, {finite: True}).tolist() == [1.0, 2.0]
    and np.isnan(run(dense, {finite: False})).all()
  )
  _, last = gradients.add_nan_unless(finite, [empty, full])
  assert (
    run(last.values, {finite: True}).tolist() == [[1.0, 2.0]]
    and np.isnan(run(last.values, {finite: False})).all()
  )
