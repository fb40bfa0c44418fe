"""Tests of the finite check: it detects every non-finite value, and reads finite values
once.
"""

import itertools

import numpy as np
import pytest

from mp_compat._tensorflow import ops
from mp_compat.core import finite_check
from mp_compat.core import lineage
from tests import testing
from tests.testing import tf

pytestmark = pytest.mark.usefixtures("graph")

DTYPES = [tf.float16, tf.bfloat16, tf.float32, tf.float64]
LARGEST = {
  "float16": 65504.0,
  "bfloat16": 3.38e38,
  "float32": 3.4e38,
  "float64": 1.7e308,
}
NON_FINITE = [np.nan, np.inf, -np.inf]


def run(fetches, feed):
  with testing.session() as sess:
    return sess.run(fetches, feed)


def as_numpy(dtype, array):
  return np.asarray(array, np.float64).astype(dtype.as_numpy_dtype)


@pytest.mark.parametrize("shape", [(50, 2), (2**15, 3)], ids=["small", "large"])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.name)
def test_nonfinite_among_largest_is_detected(dtype, shape):
  """The sum of the largest finite values overflows, so the exact check decides."""
  finite_values = as_numpy(dtype, np.full(shape, LARGEST[dtype.name]))
  values = tf.placeholder(dtype, shape)
  finite = finite_check.all_finite([tf.placeholder_with_default([1.0], [1]), values])
  assert run(finite, {values: finite_values})
  for bad in NON_FINITE:
    fed = finite_values.copy()
    fed[37, 1] = bad
    assert not run(finite, {values: fed})


@pytest.mark.parametrize(
  "dtypes",
  [[dtype] * number for dtype in DTYPES for number in (1, 2, 50)] + [DTYPES * 2],
  ids=lambda d: str(len(d)),
)
def test_every_small_tensor_is_checked(dtypes):
  tensors = [tf.placeholder(dtype, [3]) for dtype in dtypes]
  finite = finite_check.all_finite(tensors)
  feed = {
    tensor: as_numpy(tensor.dtype, [1.0, -2.0, i]) for i, tensor in enumerate(tensors)
  }
  with testing.session() as sess:
    assert sess.run(finite, feed)
    for i, tensor in enumerate(tensors):
      assert not sess.run(
        finite, {**feed, tensor: as_numpy(tensor.dtype, [1.0, NON_FINITE[i % 3], 2.0])}
      )


def test_opposite_infinities_do_not_cancel():
  tensors = [tf.placeholder(tf.float32, [2]), tf.placeholder(tf.float32, [2, 1])]
  finite = finite_check.all_finite(tensors)
  assert not run(finite, {tensors[0]: [np.inf, -np.inf], tensors[1]: [[0.0], [0.0]]})
  assert not run(finite, {tensors[0]: [np.inf, 0.0], tensors[1]: [[-np.inf], [0.0]]})


@pytest.mark.parametrize("shape", [None, [None, 3], [None]])
def test_unknown_shapes_are_checked(shape):
  tensors = [tf.placeholder(tf.float32, shape) for _ in range(2)]
  finite = finite_check.all_finite(tensors)
  value = np.ones([2] if shape == [None] else [2, 3])
  assert run(finite, dict.fromkeys(tensors, value))
  assert not run(finite, {tensors[0]: value, tensors[1]: value * np.nan})


def test_empty_tensors_and_lists_are_finite():
  empty = tf.placeholder(tf.float32, [0, 3])
  assert (
    run(
      [finite_check.all_finite([empty]), finite_check.all_finite([])],
      {empty: np.zeros([0, 3])},
    )
    == [True] * 2
  )


@pytest.mark.parametrize("values, stacked", [(2**14, True), (2**14 + 1, False)])
def test_tensors_up_to_64_kb_are_stacked(values, stacked, graph):
  finite_check.all_finite([tf.placeholder(tf.float32, [values]) for _ in range(2)])
  assert (
    any(
      op.type == "Pack" and op.inputs[0].shape.rank == 1
      for op in graph.get_operations()
    )
    == stacked
  )


def test_finite_values_are_read_once():
  """The exact check, with one bool per value, runs only if the sum is not finite."""
  x = tf.placeholder(tf.float32, [2**15])
  finite = finite_check.all_finite([x * 2.0])
  with testing.session() as sess:
    for value, kinds in [
      (1.0, {"Sum": 1, "IsFinite": 1}),
      (3e38, {"Sum": 1, "IsFinite": 2}),
    ]:
      ran = testing.executed(sess, finite, {x: np.full(2**15, value, np.float32)})
      read = [kind for kind, _, shape in ran if kind in kinds]
      assert {kind: read.count(kind) for kind in kinds} == kinds, ran


@pytest.mark.parametrize("size", [2, 2**15], ids=["small", "large"])
def test_sums_of_squares_prove_that_values_are_finite(size):
  tensors = [tf.placeholder(tf.float32, [size]) for _ in range(3)]
  sums = {lineage.tensor_key(tensor): tf.nn.l2_loss(tensor) for tensor in tensors[:2]}
  finite = finite_check.all_finite(
    [tf.placeholder_with_default([1.0], [1])], tensors, sums
  )
  feed = {tensor: np.ones(size) for tensor in tensors}
  with testing.session() as sess:
    # the square of 1e30 is inf
    for tensor, value in itertools.product(tensors, [1e19, 1e30, 3e38] + NON_FINITE):
      assert sess.run(finite, {**feed, tensor: np.full(size, value)}) == np.isfinite(
        value
      )


@pytest.mark.parametrize("flags", ["", "--xla_cpu_enable_fast_math=true"])
def test_large_tensors_are_not_summed_again(flags, monkeypatch):
  monkeypatch.setenv("XLA_FLAGS", flags)
  x = tf.placeholder(tf.float32, [2**15])
  finite_check.all_finite([], [x], {lineage.tensor_key(x): tf.nn.l2_loss(x)})
  # XLA's fast math might lose a NaN.
  assert (
    sorted(op.type for op in x.consumers())
    == ["IsFinite", "L2Loss"] + ["Sum"] * ops.is_fast_math()
  )


def test_checks_run_on_own_devices(graph):
  tensors, inputs = [], [tf.placeholder(tf.float32, [3]) for _ in range(4)]
  for one, device in zip(inputs, testing.TWO_CPUS * 2):
    with tf.device(device):
      tensors.append(one * 2.0)
  with tf.device("/cpu:1"), testing.control_flow(1):
    finite = finite_check.all_finite(tensors)
  for kind in ("Pack", "Sum"):
    devices = {
      op.device
      for op in graph.get_operations()
      if op.type == kind and op.inputs[0].shape.rank
    }
    assert devices >= {tensor.device for tensor in tensors}
  feed = {one: [i, 1.0, 2.0] for i, one in enumerate(inputs)}
  assert run(finite, feed)
  assert not any(run(finite, {**feed, one: [1.0, np.nan, 2.0]}) for one in inputs)


def check_compiled(dtypes=DTYPES):
  """Asserts that the compiled finite check finds every value."""
  for dtype, shape in itertools.product(dtypes, ([2], [2, 40])):
    with tf.Graph().as_default(), testing.session() as sess:
      x = tf.placeholder(tf.float32, shape)
      (finite,) = tf.xla.experimental.compile(
        lambda x, dtype=dtype: finite_check.all_finite(
          [tf.cast(x, dtype), tf.ones([2])]
        ),
        [x],
      )
      for value in (
        1.0,
        -6e4 if dtype == tf.float16 else -3e38,
        np.nan,
        np.inf,
        -np.inf,
      ):
        fed = np.ones(shape)
        fed[1] = value
        assert sess.run(finite, {x: fed}) == np.isfinite(value), (dtype, shape, value)


def test_xla_compiles_finite_check():
  check_compiled([tf.float32])


@pytest.mark.slow
def test_fast_math_does_not_hide_nan():
  flags = "--xla_cpu_enable_fast_math=true"
  if not tf.VERSION.startswith("1."):  # 1.15 assumes by default that there are none
    flags += (
      " --xla_cpu_fast_math_honor_nans=false --xla_cpu_fast_math_honor_infs=false"
    )
  program = (
    "from tests.core import test_finite_check; test_finite_check.check_compiled()"
  )
  testing.run_python("-c", program, variables={"XLA_FLAGS": flags})


def test_finite_check_works_in_eager_mode():
  with testing.eager_mode():
    for value, finite in [(1.0, True), (3e38, True), (np.inf, False)]:
      assert (
        bool(
          finite_check.all_finite([tf.constant([value, value]), tf.constant([[1.0]])])
        )
        == finite
      )


CLUSTERED_PROGRAM = """
import numpy as np
import mp_compat
from tests import testing
from tests.testing import tf

tf.disable_eager_execution()
x = tf.placeholder(tf.float32, [4, 50])
weights, hidden = tf.get_variable("w", [50, 50], use_resource=True), x
for _ in range(3):
  hidden = tf.tanh(tf.matmul(hidden, weights) + 0.5)
opt = mp_compat.MixedPrecisionLossScaleOptimizer(tf.train.MomentumOptimizer(.1, .9), mp_compat.DynamicLossScale(8., 3))
train_op = opt.minimize(tf.reduce_mean(tf.square(hidden)))
with testing.initialized_session() as sess:
  for step in range(6):
    metadata = tf.RunMetadata()
    finite, scale, _ = sess.run([opt.gradients_finite, opt.loss_scale(), train_op],
                                {x: np.full([4, 50], np.nan if step == 2 else .5)},
                                options=tf.RunOptions(output_partition_graphs=True), run_metadata=metadata)
    print(finite, scale, np.isfinite(sess.run(weights)).all())
print(any(node.op.startswith("_Xla") for part in metadata.partition_graphs for node in part.node))
"""


@pytest.mark.matrix
def test_auto_clustering_skips_overflow():
  flags = "--tf_xla_auto_jit=2 --tf_xla_cpu_global_jit --tf_xla_min_cluster_size=2"
  done = testing.run_python("-c", CLUSTERED_PROGRAM, variables={"TF_XLA_FLAGS": flags})
  scales = [
    (True, 8.0),
    (True, 8.0),
    (False, 8.0),
    (True, 4.0),
    (True, 4.0),
    (True, 4.0),
  ]
  assert done.stdout.splitlines() == ["{} {} True".format(*one) for one in scales] + [
    "True"
  ]
