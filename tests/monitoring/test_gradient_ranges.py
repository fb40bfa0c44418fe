"""Tests of gradient ranges in graphs, compared with NumPy on the same tensors, fetched
by name.
"""

import numpy as np
import pytest

import mp_compat
from tests import testing
from tests.testing import Optimizer
from tests.testing import sgd
from tests.testing import tf
from tests.training.test_gpu_kernels import has_gpu_kernel

pytestmark = pytest.mark.usefixtures("graph")


def measure_with_numpy(values, scale):
  """Returns the `GradientRange` of an array."""
  with np.errstate(invalid="ignore"):
    values = np.abs(np.asarray(values).ravel().astype(np.float64))
  finite = values[np.isfinite(values)]
  nonzero = finite[finite > 0]
  exponents = np.zeros(256, np.int64)
  np.add.at(exponents, np.maximum(np.frexp(nonzero)[1] - 1 + 127, 0), 1)
  exponents[0] += np.sum(finite == 0)
  exponents[255] = len(values) - len(finite)
  headroom = (
    max(n for n in range(-150, 150) if nonzero.max() * 2.0**n <= 65504)
    if len(nonzero)
    else 142
  )
  count = max(len(values), 1)
  return mp_compat.GradientRange(
    exponents=exponents.tolist(),
    zeros=np.sum(finite == 0) / count,
    subnormal=np.sum(nonzero < 2.0**-14) / count,
    vanishing=np.sum(nonzero < 2.0**-24) / count,
    largest=np.float32(nonzero.max() if len(nonzero) else 0.0),
    nonfinite=exponents[255],
    headroom=-1 if exponents[255] else headroom,
    scale=scale,
    noise=False,
  )


def check(measured, values, scale):
  expected = measure_with_numpy(values, scale)
  shares = {
    name: pytest.approx(getattr(expected, name), rel=1e-15)
    for name in ("zeros", "subnormal", "vanishing")
  }
  assert measured._replace(exponents=measured.exponents.tolist()) == expected._replace(
    **shares
  )


def measure_passed(values, dtype, inner):
  """Returns the range of gradients that are passed to `apply_gradients` of a wrapped
  optimizer.
  """
  v = tf.get_variable(
    "v", [len(values)], dtype, initializer=tf.zeros_initializer(), use_resource=True
  )
  grad = tf.placeholder(dtype, [None])
  opt = Optimizer(inner, 8.0)
  opt.apply_gradients([(grad, v)])
  with testing.session() as sess:
    return sess.run(mp_compat.gradient_ranges(opt), {grad: values})["v:0"]


@pytest.mark.each_choice
@pytest.mark.parametrize("finite", [True, False], ids=["finite", "all"])
@pytest.mark.parametrize(
  "dtype", [tf.float16, tf.bfloat16, tf.float32], ids=lambda dtype: dtype.name
)
def test_range_is_exact_for_all_values(dtype, finite):
  """Every value of a 16-bit dtype, or 10**6 float32 values."""
  random_bits = np.random.RandomState(0).randint(0, 2**32, 10**6, dtype=np.uint64)
  bits = (
    random_bits.astype(np.uint32)
    if dtype == tf.float32
    else np.arange(2**16).astype(np.uint16)
  )
  values = bits.view(dtype.as_numpy_dtype)
  with np.errstate(invalid="ignore"):
    values = values[np.isfinite(values.astype(np.float64))] if finite else values
  check(measure_passed(values, dtype, sgd()), values, 1.0)


@pytest.mark.parametrize(
  "values", [[], [0.0, 0.0], [65504.0], [65505.0], [2.0**-24], [2.0**-25, 3.0]], ids=str
)
def test_range_of_few_values(values):
  check(measure_passed(values, tf.float32, sgd()), values, 1.0)


def test_complex_range_counts_both_parts():
  measured = measure_passed(
    [2.0 - 6e4j, 1e-7j], tf.complex64, testing.ComplexDescent(1.0)
  )
  check(measured, [2.0, 6e4, 0.0, 1e-7], 1.0)


def dense(x, size, name, dtype):
  """Returns a dense layer in `dtype` of `x`, with float32 variables."""
  with tf.variable_scope(name):
    kernel = tf.get_variable(
      "kernel", [x.shape[-1], size], initializer=tf.glorot_uniform_initializer(seed=1)
    )
    bias = tf.get_variable("bias", [size], initializer=tf.zeros_initializer())
    return tf.nn.bias_add(tf.matmul(x, tf.cast(kernel, dtype)), tf.cast(bias, dtype))


def network(dtype=tf.float16):
  """Returns the input and the float32 loss of two dense layers in `dtype`."""
  x = tf.placeholder(tf.float32, [4, 3])
  hidden = tf.nn.relu(dense(tf.cast(x, dtype), 5, "one", dtype))
  logits = tf.cast(tf.identity(dense(hidden, 2, "two", dtype)), tf.float32)
  return x, tf.reduce_mean(
    tf.nn.sparse_softmax_cross_entropy_with_logits(labels=[0, 1, 0, 1], logits=logits)
  )


# The names of the ranges: of gradients of layers, in the order of the backward pass,
# and of variables.
LAYERS = [
  "gradients/Cast_1_grad/Cast",
  "gradients/two/MatMul_grad/MatMul",
  "gradients/Relu_grad/ReluGrad",
]
VARIABLES = ["one/bias:0", "one/kernel:0", "two/bias:0", "two/kernel:0"]
X = np.random.RandomState(0).normal(size=[4, 3])


@pytest.mark.each_choice
@pytest.mark.parametrize("clip", [False, True], ids=["passed", "clipped"])
@pytest.mark.parametrize("gate", [0, 1, 2], ids=["GATE_NONE", "GATE_OP", "GATE_GRAPH"])
def test_ranges_cover_backward_pass(graph, gate, clip):
  x, loss = network()
  opt = Optimizer(tf.train.AdamOptimizer(), mp_compat.DynamicLossScale(2.0**10))
  pairs = opt.compute_gradients(loss, gate_gradients=gate)
  returned = {v.name: grad for grad, v in pairs}
  if clip:
    clipped, _ = tf.clip_by_global_norm([grad for grad, _ in pairs], 0.1)
    pairs = zip(clipped, [v for _, v in pairs])
  train_op = opt.apply_gradients(pairs)
  ranges = mp_compat.gradient_ranges(opt)
  assert sorted(ranges) == sorted(LAYERS + VARIABLES)
  assert [name for name in ranges if name.startswith("gradients")] == LAYERS
  fetched = {
    name: returned[name] if name in returned else graph.get_tensor_by_name(name + ":0")
    for name in ranges
  }
  with testing.initialized_session() as sess:
    measured, values, _ = sess.run([ranges, fetched, train_op], {x: X})
  for name in ranges:
    unscaled = 2.0**10 if name in returned else 1.0  # exact
    check(measured[name], values[name] * unscaled, 2.0**10)


def test_unfetched_ranges_run_no_ops():
  x, loss = network()
  opt = Optimizer(tf.train.AdamOptimizer(), "dynamic")
  train_op = opt.minimize(loss)

  def ops_run():
    metadata = tf.RunMetadata()
    with testing.initialized_session() as sess:
      sess.run(train_op, {x: X}, tf.RunOptions(output_partition_graphs=True), metadata)
    return sorted(
      node.name for graph in metadata.partition_graphs for node in graph.node
    )

  before = ops_run()
  mp_compat.gradient_ranges(opt)
  assert ops_run() == before


@pytest.mark.parametrize(
  "batch, most",
  [(4, 0.2), (None, 13)],
  ids=["small tensors", "tensors of unknown size"],
)
def test_few_ops_are_built_for_each_tensor(batch, most):
  """Tensors of the same shape are counted together, others one by one."""
  hidden, built = tf.placeholder(tf.float16, [batch, 8]), []
  with tf.variable_scope("", custom_getter=mp_compat.float32_variable_storage_getter):
    for layer in range(9):
      hidden += tf.tanh(
        tf.matmul(hidden, tf.get_variable("w{}".format(layer), [8, 8], tf.float16))
      )
      if layer in (2, 8):
        opt = Optimizer(sgd(), "dynamic")
        opt.minimize(tf.reduce_mean(tf.cast(hidden, tf.float32)))
        before = len(tf.get_default_graph().get_operations())
        tensors = len(mp_compat.gradient_ranges(opt))
        built.append((tensors, len(tf.get_default_graph().get_operations()) - before))
  (few_tensors, few_ops), (many_tensors, many_ops) = built
  assert many_tensors >= few_tensors + 4 * 6 and many_ops - few_ops <= most * (
    many_tensors - few_tensors
  )


@pytest.mark.skipif(
  not tf.test.is_built_with_cuda(), reason="a CPU build knows no GPU kernels"
)
def test_gradients_are_counted_on_gpu(graph):
  """Nothing of the size of a gradient is copied to the host."""
  x = tf.placeholder(tf.float16, [700, 300])
  w = tf.get_variable("w", [300, 500], initializer=tf.zeros_initializer())
  b = tf.get_variable("b", [500], initializer=tf.zeros_initializer())
  opt = Optimizer(sgd(), "dynamic")
  product = tf.nn.bias_add(tf.matmul(x, tf.cast(w, tf.float16)), tf.cast(b, tf.float16))
  opt.minimize(tf.reduce_mean(tf.cast(product, tf.float32)))
  before = len(graph.get_operations())
  mp_compat.gradient_ranges(opt)
  checked = []
  for op in graph.get_operations()[before:]:
    arguments = [argument.name for argument in op.op_def.input_arg]
    large = [
      name
      for name, tensor in zip(arguments, op.inputs)
      if (tensor.shape.num_elements() or 0) >= 150000
    ]
    if large and op.type != "Shape":
      checked.append(op.type)
      assert has_gpu_kernel(op, lambda name, large=large: name in large), op.type
  assert {"Cast", "Bitcast", "Bincount", "Max", "Sum"} <= set(checked)


def test_sparse_and_accumulated_gradients():
  table = tf.get_variable("table", [4, 2], initializer=tf.zeros_initializer())
  x = tf.placeholder(tf.float32, [3, 2])
  opt = Optimizer(sgd(), 2.0**4)
  opt.minimize(tf.reduce_sum(tf.gather(table, [1, 1, 3]) * x))
  sparse = mp_compat.gradient_ranges(opt)
  other = Optimizer(sgd(), 2.0**4)
  window = mp_compat.GradientAccumulator(other)
  add_op = window.add(
    other.compute_gradients(tf.reduce_sum(tf.gather(table, [1, 1, 3]) * x))
  )
  window.apply_gradients(window.mean())
  mean = mp_compat.gradient_ranges(other)
  values = np.array([[1.0, 2.0], [3.0, 0.0], [5.0, 6.0]])
  with testing.initialized_session() as sess:
    sess.run(add_op, {x: values})
    check(sess.run(sparse, {x: values})["table:0"], 16 * values, 16.0)
    check(sess.run(mean)["table:0"], [0.0, 0.0, 4.0, 2.0, 0.0, 0.0, 5.0, 6.0], 1.0)


def test_skipped_branch_has_no_values():
  x, taken = tf.placeholder(tf.float32, []), tf.placeholder(tf.bool, [])
  w = tf.get_variable("w", [], initializer=tf.zeros_initializer(), use_resource=True)
  opt = Optimizer(sgd(), 2.0**4)
  with testing.control_flow(1):
    train_op = tf.cond(taken, lambda: opt.minimize(w * x), tf.no_op)
  ranges = mp_compat.gradient_ranges(opt)
  with testing.initialized_session() as sess:
    for is_taken in (True, False):
      _, measured = sess.run([train_op, ranges], {x: 3.0, taken: is_taken})
      values = measured[w.name]
      assert (values.exponents.sum(), values.largest) == (
        (1, 48.0) if is_taken else (0, 0.0)
      )


def test_layers_in_branches():
  """With control flow v1, gradients of layers in a branch are not computed if the other
  branch runs.
  """
  x, training, second = (
    tf.placeholder(tf.float16, [4, 3]),
    tf.placeholder(tf.bool, []),
    tf.placeholder(tf.bool, []),
  )

  def double(value):
    return tf.cond(
      tf.logical_not(second),
      lambda: value * value,
      lambda: tf.negative(tf.negative(value)),
    )

  with testing.control_flow(1):
    hidden = dense(x, 3, "one", tf.float16)
    hidden = tf.cond(training, lambda: double(tf.tanh(hidden)), lambda: hidden)
    hidden = tf.cond(second, lambda: hidden, lambda: tf.sin(hidden))
  opt = Optimizer(tf.train.GradientDescentOptimizer(0.0), 2.0**4)
  train_op = opt.minimize(
    tf.reduce_mean(tf.cast(dense(hidden, 2, "two", tf.float16), tf.float32))
  )
  ranges = mp_compat.gradient_ranges(opt)
  inner = {
    kind: [name for name in ranges if kind in name]
    for kind in ("Tanh", "Sin", "MatMul")
  }
  assert all(inner.values()), list(ranges)
  graph, executed = tf.get_default_graph(), []
  with testing.initialized_session() as sess:
    for feed in [
      {training: a, second: b} for a in (True, False) for b in (True, False)
    ]:
      _, measured = sess.run([train_op, ranges], {**feed, x: X})
      computed = {name for name, values in measured.items() if values.exponents.sum()}
      assert (set(inner["Tanh"]) <= computed) == feed[training] and (
        set(inner["Sin"]) <= computed
      ) != feed[second]
      assert {name for name in ranges if name.endswith(":0")} | set(
        inner["MatMul"]
      ) <= computed
      executed.append(computed)
      tensors = {
        name: graph.get_tensor_by_name(name + ":0")
        for name in computed
        if name.startswith("gradients")
      }
      for name, values in sess.run(tensors, {**feed, x: X}).items():
        check(measured[name], values, 16.0)
  assert len({frozenset(computed) for computed in executed}) == 4


def test_float16_loss_of_unknown_shape():
  x = tf.placeholder(tf.float16, [None, 2])
  w = tf.get_variable("w", [2], tf.float16, initializer=tf.ones_initializer())
  opt = Optimizer(sgd(), 2.0**10)
  opt.minimize(tf.reduce_sum(tf.square(w * x), axis=1))
  ranges = mp_compat.gradient_ranges(opt)
  with testing.initialized_session() as sess:
    measured = sess.run(ranges, {x: [[1.0, 2.0]]})
  # Neither the scale nor the ones with which the backward pass begins are gradients of
  # the loss.
  assert "w:0" in measured and not [
    name for name in measured if "Cast" in name or "Fill" in name or "grad_ys" in name
  ]
  assert {
    values.largest for values in measured.values() if values.exponents.sum() == 1
  } == {2.0**10}
  check(measured["w:0"], [2.0**11, 2.0**13], 2.0**10)


@pytest.mark.usefixtures("control_flow")
def test_function_reads_its_own_ranges():
  opt, found = Optimizer(sgd(), 2.0**4), []
  w = tf.get_variable("w", [2], initializer=tf.zeros_initializer(), use_resource=True)

  @tf.function
  def step(x):
    opt.minimize(lambda: tf.reduce_sum(w * x), var_list=[w])
    return mp_compat.gradient_ranges(opt)["w:0"].largest

  @tf.function
  def apply_outer():
    opt.apply_gradients(outer)
    found.append(mp_compat.gradient_ranges(opt))

  x, outer = (
    tf.placeholder(tf.float32, [2]),
    opt.compute_gradients(tf.reduce_sum(w * w), [w]),
  )
  largest = step(x)
  with pytest.raises(RuntimeError, match="inside a loop or a function"):
    mp_compat.gradient_ranges(opt)
  apply_outer()
  assert found == [{}]  # The tensors of other graphs are left out.
  with testing.initialized_session() as sess:
    assert sess.run(largest, {x: [1.0, -3.0]}) == 48.0
