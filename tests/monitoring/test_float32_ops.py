"""Tests of float32_ops, on models whose ops and their inputs are known."""

import collections
import sys

import pytest

import mp_compat
from tests import testing
from tests.testing import tf


@pytest.fixture(autouse=True)
def _graph():
  with tf.Graph().as_default():
    yield


def weights(name, shape, dtype, **kwargs):
  """Returns a variable, in float16 with float32 storage."""
  with tf.variable_scope(
    "model", custom_getter=mp_compat.float32_variable_storage_getter, **kwargs
  ):
    return tf.get_variable(name, shape, dtype)


def placeholder(shape, dtype=tf.float32):
  return tf.placeholder(dtype, shape, "x")


def listed(tensor):
  return {
    op.name: (op.type,) + op.sources
    for op in mp_compat.float32_ops(tf.reduce_sum(tf.cast(tensor, tf.float32)))
  }


PRODUCTS = {
  "MatMul": ([2, 4], [4, 3], tf.matmul),
  "BatchMatMul": ([5, 2, 4], [5, 4, 3], tf.matmul),
  "Einsum": ([2, 4], [4, 3], lambda x, w: tf.einsum("ij,jk->ik", x, w)),
  "Conv2D": (
    [1, 4, 4, 2],
    [3, 3, 2, 5],
    lambda x, w: tf.nn.conv2d(x, w, [1, 1, 1, 1], "SAME"),
  ),
  "Conv1D": ([1, 4, 2], [3, 2, 5], lambda x, w: tf.nn.conv1d(x, w, 1, "SAME")),
  "Conv3D": (
    [1, 4, 4, 4, 2],
    [3, 3, 3, 2, 5],
    lambda x, w: tf.nn.conv3d(x, w, [1] * 5, "SAME"),
  ),
  "DepthwiseConv2d": (
    [1, 4, 4, 2],
    [3, 3, 2, 1],
    lambda x, w: tf.nn.depthwise_conv2d(x, w, [1] * 4, "SAME"),
  ),
  "Conv2DTranspose": (
    [1, 4, 4, 5],
    [3, 3, 2, 5],
    lambda x, w: tf.nn.conv2d_transpose(x, w, [1, 4, 4, 2], [1] * 4, "SAME"),
  ),
  "Conv3DTranspose": (
    [1, 4, 4, 4, 5],
    [3, 3, 3, 2, 5],
    lambda x, w: tf.nn.conv3d_transpose(x, w, [1, 4, 4, 4, 2], [1] * 5, "SAME"),
  ),
}


@pytest.mark.parametrize("product", list(PRODUCTS))
@pytest.mark.parametrize("use_resource", [True, False], ids=["resource", "reference"])
def test_only_float32_products_are_listed(product, use_resource):
  shape, kernel, apply = PRODUCTS[product]
  x = placeholder(shape)
  assert not listed(
    apply(
      tf.cast(x, tf.float16),
      weights("half", kernel, tf.float16, use_resource=use_resource),
    )
  )
  ((name, *sources),) = listed(
    apply(x, weights("full", kernel, tf.float32, use_resource=use_resource))
  ).values()
  assert sources == ["x (Placeholder)"], name


def test_all_layers_after_uncast_input_are_listed():
  x = placeholder([2, 4])
  hidden = tf.nn.relu(
    tf.matmul(x, weights("w1", [4, 3], tf.float32)) + weights("bias", [3], tf.float32)
  )
  hidden = tf.matmul(hidden, weights("w2", [3, 3], tf.float32))
  assert listed(hidden) == {
    "MatMul": ("MatMul", "x (Placeholder)"),
    "MatMul_1": ("MatMul", "x (Placeholder)"),
  }


def test_cast_back_to_float32_is_named():
  hidden = tf.matmul(
    tf.cast(placeholder([2, 4]), tf.float16), weights("w1", [4, 3], tf.float16)
  )
  wide = tf.cast(hidden, tf.float32, name="back")
  assert listed(tf.matmul(wide, weights("w2", [3, 3], tf.float32))) == {
    "MatMul_1": ("MatMul", "back (Cast from float16)")
  }


def test_cast_of_constant_is_no_reason():
  factor = tf.cast(tf.constant(2), tf.float32)
  product = tf.matmul(placeholder([2, 4]) * factor, weights("w", [4, 3], tf.float32))
  assert listed(product) == {"MatMul": ("MatMul", "x (Placeholder)")}


@pytest.mark.parametrize("use_resource", [True, False], ids=["resource", "reference"])
def test_embedding_outside_of_scope_is_named(use_resource):
  table = weights("table", [6, 4], tf.float32, use_resource=use_resource)
  rows = tf.nn.embedding_lookup(table, placeholder([2], tf.int32))
  rows = tf.nn.dropout(rows, rate=0.5)  # its mask is no reason
  ((_, *sources),) = listed(
    tf.matmul(rows, weights("w", [4, 3], tf.float32, use_resource=use_resource))
  ).values()
  assert sources == ["model/table (variable)", "model/w (variable)"]


def test_constants_are_named_without_other_sources():
  ((_, *sources),) = listed(
    tf.matmul(tf.ones([2, 4]), tf.constant([[1.0]] * 4, name="ones"))
  ).values()
  assert "ones (Const)" in sources and all(
    source.endswith("(Const)") for source in sources
  )


def test_backward_pass_and_other_models_are_left_out():
  x = placeholder([2, 4])
  w = weights("w", [4, 3], tf.float32)
  other = tf.matmul(x, w, name="other")
  logits = tf.matmul(x, w, name="logits")
  tf.gradients([logits, other], w)
  assert list(listed(logits)) == ["logits"]


@pytest.mark.parametrize("version", [1, 2])
def test_sources_before_loops_are_found(version):
  x = placeholder([3, 3])
  with testing.control_flow(version):
    _, product = tf.while_loop(
      lambda i, _: i < 2, lambda i, y: (i + 1, tf.matmul(y, x)), [0, x]
    )
  found = listed(tf.matmul(product, product, name="after"))
  assert found["after"] == ("MatMul", "x (Placeholder)")


def test_cast_in_loop_is_named():
  """It reaches the product from the end of the loop's body."""
  x, w = placeholder([3, 3]), weights("w", [3, 3], tf.float32)
  with testing.control_flow(1):

    def body(i, y):
      return i + 1, tf.cast(
        tf.cast(tf.matmul(y, w, name="product"), tf.float16), tf.float32, name="back"
      )

    _, product = tf.while_loop(lambda i, _: i < 2, body, [0, x])
  assert listed(product) == {
    "while/product": ("MatMul", "while/back (Cast from float16)", "x (Placeholder)")
  }


def test_sources_pass_through_loops():
  """The product "late" gets them from "first" of the iteration before."""
  x, w = placeholder([3, 3]), weights("w", [3, 3], tf.float32)

  def body(i, y, z):
    late = tf.matmul(z, w, name="late")
    first = tf.matmul(y, w, name="first")
    return i + 1, y + late, tf.tanh(first)

  with testing.control_flow(1):
    _, y, _ = tf.while_loop(lambda i, *_: i < 2, body, [0, x, tf.zeros([3, 3])])
  expected = ("MatMul", "x (Placeholder)")
  assert listed(y) == {"while/late": expected, "while/first": expected}


def dense(x, units, name="dense"):
  with tf.variable_scope(name, reuse=tf.AUTO_REUSE):
    kernel = tf.get_variable("kernel", [x.shape[-1], units], x.dtype)
  return tf.matmul(x, kernel)


def normalized(x, training):
  """Returns batch normalization that reads tensors from outside of its branches."""
  mean, variance = tf.cond(
    training, lambda: list(tf.nn.moments(x, [0])), lambda: [tf.zeros([4]), tf.ones([4])]
  )
  return (x - mean) * tf.rsqrt(variance + 1e-3)


def dropped(x, training):
  return tf.cond(training, lambda: tf.nn.dropout(x, rate=0.5), lambda: x)


def scanned(x, training):
  del training
  return tf.scan(lambda state, row: tf.tanh(dense(row[tf.newaxis] + state, 4)[0]), x)


def mapped(x, training):
  del training
  return tf.map_fn(lambda row: dense(row[tf.newaxis], 4)[0], x)


def recurrent(x, training):
  """Returns the outputs of a loop with tensor arrays, as of `tf.nn.dynamic_rnn`."""
  del training
  rows = tf.TensorArray(tf.float32, 2).unstack(x)
  outputs = tf.TensorArray(tf.float32, 2)

  def step(i, state, outputs):
    state = tf.tanh(dense(rows.read(i)[tf.newaxis], 4) + state)
    return i + 1, state, outputs.write(i, state[0])

  loop = [0, tf.zeros([1, 4]), outputs]
  return tf.while_loop(lambda i, *_: i < 2, step, loop)[2].stack()


def nested(x, training):
  return tf.cond(
    training, lambda: dropped(normalized(x, training), training), lambda: x
  )


def embedded(x, training):
  ids = tf.cast(x[:, 0], tf.int32)
  table = weights("table", [6, 4], tf.float32)
  return dropped(tf.nn.embedding_lookup(table, ids) + x, training)


MODELS = [normalized, dropped, scanned, mapped, recurrent, nested, embedded]


@pytest.mark.each_choice
@pytest.mark.usefixtures("control_flow")
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
@pytest.mark.parametrize("is_cast", [False, True], ids=["uncast", "cast"])
def test_models_with_control_flow(model, is_cast):
  """Their ops read tensors that TensorFlow makes later."""
  x, training = placeholder([2, 4]), tf.placeholder(tf.bool, [], "training")
  inputs = x
  if is_cast:
    inputs = tf.cast(tf.cast(x, tf.float16, name="half"), tf.float32, name="back")
  hidden = model(dense(inputs, 4, "first"), training)
  found = listed(dense(hidden, 3, "last"))
  source = "back (Cast from float16)" if is_cast else "x (Placeholder)"
  assert set(found.values()) == {("MatMul", source)} and len(found) >= 2


def keras_layers(name):
  """Returns a function of `tf.layers` or `tf.nn.rnn_cell`, which Keras 3 lacks."""
  try:
    return getattr(tf.layers if name.islower() else tf.nn.rnn_cell, name)
  except AttributeError:
    return pytest.skip("tf.{} is not in Keras 3".format(name))


@pytest.mark.usefixtures("control_flow")
def test_layers_with_placeholder_for_training():
  x, training = placeholder([2, 4]), tf.placeholder(tf.bool, [], "training")
  with tf.variable_scope("", use_resource=True):
    hidden = keras_layers("batch_normalization")(dense(x, 4), training=training)
    hidden = keras_layers("dropout")(hidden, training=training)
  found = listed(dense(hidden, 3, "last"))
  assert list(found.values()) == [("MatMul", "x (Placeholder)")] * 2


@pytest.mark.usefixtures("control_flow")
def test_dynamic_rnn():
  cell = keras_layers("BasicRNNCell")(4)
  outputs, _ = tf.nn.dynamic_rnn(cell, placeholder([3, 2, 4]), dtype=tf.float32)
  found = listed(dense(tf.reshape(outputs, [6, 4]), 3, "last"))
  assert set(found.values()) == {("MatMul", "x (Placeholder)")}


def test_many_branches_take_linear_time():
  """Each reads a tensor that is created after its op."""
  calls, training = [], tf.placeholder(tf.bool, [])
  with testing.control_flow(1):
    hidden = placeholder([2, 4])
    for layer in range(1, 41):
      hidden = dropped(dense(hidden, 4, "layer{}".format(layer)), training)
      if layer in (5, 40):
        calls.append(calls_in(mp_compat.float32_ops, hidden))
  assert calls[1] < 10 * calls[0]


def calls_in(function, *arguments):
  """Returns the number of Python calls in a call of a function."""
  counter = collections.Counter()
  sys.setprofile(lambda frame, event, arg: counter.update([event]))
  try:
    function(*arguments)
  finally:
    sys.setprofile(None)
  return counter["call"]


def test_deep_models_take_linear_time():
  calls, hidden, counter = [], placeholder([2, 4]), collections.Counter()
  for layer in range(1, 161):
    hidden += tf.nn.relu(
      tf.matmul(hidden, weights("w{}".format(layer), [4, 4], tf.float32))
    )
    if layer in (20, 160):
      counter.clear()
      sys.setprofile(lambda frame, event, arg: counter.update([event]))
      try:
        assert len(mp_compat.float32_ops(hidden)) == layer
      finally:
        sys.setprofile(None)
      calls.append(counter["call"])
  assert calls[1] < 10 * calls[0]


def test_loss_must_be_tensor_of_graph():
  with pytest.raises(
    ValueError, match="loss must be a tensor of a graph, but got 1.0. Call"
  ):
    mp_compat.float32_ops(1.0)
  with testing.eager_mode(), pytest.raises(
    ValueError, match="loss must be a tensor of a graph"
  ):
    mp_compat.float32_ops(tf.constant(1.0))
