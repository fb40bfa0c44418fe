"""Tests of scaling, unscaling, conversion, clipping and gating, and of the search for computed gradients."""

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


def names_of(sources):
  """Returns the sorted names of `[(name, gradient)]`."""
  return sorted(name for name, _ in sources)


# Functions whose result may be finite though the computed gradient is not.
HIDING = {
  "clip_by_value": lambda g: tf.clip_by_value(g, -1.0, 1.0),
  "where": lambda g: tf.where(tf.is_finite(g), g, tf.zeros_like(g)),
  "tf.cond": lambda g: tf.cond(tf.reduce_all(tf.is_finite(g)), lambda: g, lambda: tf.zeros_like(g)),
  "while_loop": lambda g: tf.while_loop(
    lambda i, h: i < 2, lambda i, h: (i + 1, tf.clip_by_value(h, -1.0, 1.0)), [0, g]
  )[1],
}


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("how", sorted(HIDING))
def test_computed_gradients_are_found_behind_clipping(how, version):
  with tf.Graph().as_default(), testing.control_flow(version):
    behind, computed, other = [tf.placeholder(tf.float32, [2]) for _ in range(3)]
    computed += behind
    gradients.record_computed([behind, computed, other], ["behind", "computed", "other"])
    ((name, source),) = gradients.computed_ancestors([HIDING[how](computed)])
    assert name == "computed" and source is computed


def test_ancestors_exclude_gradients_passed_in():
  with tf.Graph().as_default():
    computed = [tf.placeholder(tf.float32, [2]) for _ in "ab"]
    gradients.record_computed(computed, "ab")
    assert names_of(gradients.computed_ancestors([computed[0], computed[1] * 2.0])) == ["b"]
    assert not gradients.computed_ancestors([None] + computed + [computed[0] + computed[1]])


def test_captured_gradients_are_found_inside_functions():
  with tf.Graph().as_default(), testing.control_flow(2):
    computed = tf.placeholder(tf.float32, [2])
    gradients.record_computed([computed], ["v"])
    found = []

    def branch():
      found.extend(gradients.computed_ancestors([tf.clip_by_value(computed, -1.0, 1.0)]))
      return tf.constant(True)

    tf.cond(tf.placeholder_with_default(True, []), branch, lambda: tf.constant(True))
    assert [(name, source is computed) for name, source in found] == [("v", True)]


@pytest.mark.parametrize("use_resource", [False, True])
def test_search_for_ancestors_stops_at_variables(use_resource):
  with tf.Graph().as_default():
    computed = tf.placeholder(tf.float32, [2])
    gradients.record_computed([computed], ["v"])
    accumulator = tf.Variable([0.0, 0.0], use_resource=use_resource)
    tf.assign_add(accumulator, computed)
    assert not gradients.computed_ancestors([tf.convert_to_tensor(accumulator) / 2.0])


# Build a tensor with `make` inside a control-flow construct, and return it outside.
CONTEXTS = {
  "cond": lambda make: tf.cond(tf.placeholder(tf.bool, []), make, lambda: tf.zeros([2])),
  "while_loop": lambda make: tf.while_loop(lambda i, g: i < 2, lambda i, g: (i + 1, make()), [0, tf.zeros([2])])[1],
  "map_fn": lambda make: tf.map_fn(lambda x: make() * x, tf.ones([3])),
  "xla": lambda make: tf.xla.experimental.compile(make)[0],
}


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("context", sorted(CONTEXTS))
def test_ancestors_are_found_only_where_readable(context, version):
  with tf.Graph().as_default(), testing.control_flow(version):
    x = tf.placeholder(tf.float32, [2])
    inside = []

    def make():
      computed = x * 2.0
      gradients.record_computed([computed], ["v"])
      clipped = tf.clip_by_value(computed, -1.0, 1.0)
      inside.extend(gradients.computed_ancestors([clipped]))
      return clipped

    outside = CONTEXTS[context](make)
    assert names_of(inside) == ["v"] and not gradients.computed_ancestors([outside, outside + 1.0])


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
