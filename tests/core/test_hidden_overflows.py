"""Tests that every overflow is found, whatever becomes of the gradient, and whichever
graph optimizer runs.

Grappler folds products of constants and differences; XLA turns the product with a mask
into a selection. Whether XLA runs is a setting of the Session, which is unknown when
the graph is built.
"""

import itertools

import numpy as np
import pytest
import tensorflow

import mp_compat
from mp_compat.core import lineage
from tests import testing
from tests.testing import tf

VERSION = tuple(int(part) for part in tf.VERSION.split(".")[:2])
SHAPE = [2, 2]


class Inputs:
  """Placeholders, and what to feed for them."""

  FEED = {
    "grad": np.array([[1.0, -2.0], [0.5, 3.0]], np.float32),
    "mask": np.array([[True, False], [True, True]]),
    "empty": np.zeros([2, 0], np.float32),
    "number": np.float32(0.5),
  }

  def __init__(self):
    shapes = {"grad": SHAPE, "mask": SHAPE, "empty": [2, None], "number": []}
    self.placeholders = [
      tf.placeholder(value.dtype, shapes[name], name)
      for name, value in self.FEED.items()
    ]

  def feed(self, grad):
    return dict(zip(self.placeholders, dict(self.FEED, grad=grad).values()))


def repeat(times, function):
  """Returns a function that calls `function` so many times, each time with its last
  result.
  """

  def repeated(value):
    for _ in range(times):
      value = function(value)
    return value

  return repeated


def half(function):
  """Returns a function that computes in float16."""
  return lambda g: tf.cast(function(tf.cast(g, tf.float16)), tf.float32)


# Functions of a gradient that are copies, so that only their results are checked.
COPIES = {
  "cast": lambda g: tf.cast(tf.cast(g, tf.float64), tf.float32),
  "computed": lambda g: g,
  "default": lambda g: tf.placeholder_with_default(g, SHAPE),
  "float16": half(tf.identity),
  "identity": tf.identity,
}

# Functions of a gradient, a mask, an empty tensor and a number. Those in the first
# group keep every overflow if no graph optimizer runs.
CHANGES = {
  "clip_by_average_norm": lambda g, mask, empty, number: tf.clip_by_average_norm(
    g, 1.0
  ),
  "clip_by_global_norm": lambda g, mask, empty, number: tf.clip_by_global_norm(
    [g, tf.ones([3])], 1.0
  )[0][0],
  "clip_by_global_norm of this package": lambda g, mask, empty, number: (
    mp_compat.clip_by_global_norm([g], 1.0)[0][0]
  ),
  "clip_by_norm": lambda g, mask, empty, number: tf.clip_by_norm(g, 1.0),
  "constants in a factor": lambda g, mask, empty, number: (
    g * repeat(4, lambda v: v * 1e-10)(number)
  ),
  "constants in a quotient": lambda g, mask, empty, number: (
    g / repeat(4, lambda v: v * 1e10)(number)
  ),
  "divided by 2**40 four times": lambda g, mask, empty, number: repeat(
    4, lambda v: v / 2.0**40
  )(g),
  "mask": lambda g, mask, empty, number: g * tf.cast(mask, tf.float32),
  "mask after a factor": lambda g, mask, empty, number: (
    g * 2.0 * tf.cast(mask, tf.float32)
  ),
  "mask and mean": lambda g, mask, empty, number: (
    g * tf.cast(mask, tf.float32) / tf.reduce_sum(tf.cast(mask, tf.float32))
  ),
  "mask and sum": lambda g, mask, empty, number: tf.reduce_sum(
    g * tf.cast(mask, tf.float32)
  ),
  "mask first": lambda g, mask, empty, number: tf.cast(mask, tf.float32) * g,
  "mask in float16": lambda g, mask, empty, number: half(
    lambda h: h * tf.cast(mask, tf.float16)
  )(g),
  "mask of integers": lambda g, mask, empty, number: (
    g * tf.cast(tf.cast(mask, tf.int32), tf.float32)
  ),
  "mask reshaped": lambda g, mask, empty, number: (
    tf.reshape(g, [4]) * tf.reshape(tf.cast(mask, tf.float32), [4])
  ),
  "mask transposed": lambda g, mask, empty, number: (
    tf.transpose(g) * tf.cast(tf.transpose(mask), tf.float32)
  ),
  "mean of replicas": lambda g, mask, empty, number: tf.reduce_mean(
    tf.concat([g[None], g[None] * 2.0], axis=0), 0
  ),
  "small factors": lambda g, mask, empty, number: repeat(5, lambda v: v * 1e-10)(g),
  "small factors in float16": lambda g, mask, empty, number: half(
    repeat(4, lambda h: h * 0.01)
  )(g),
  "times 2**-40 four times": lambda g, mask, empty, number: repeat(
    4, lambda v: v * 2.0**-40
  )(g),
  "weight decay": lambda g, mask, empty, number: g + 0.1 * number,
  # These lose it by themselves, or through Grappler.
  "clip_by_value": lambda g, mask, empty, number: tf.clip_by_value(g, -1.0, 1.0),
  "difference": lambda g, mask, empty, number: g - g,
  "empty factor": lambda g, mask, empty, number: tf.reduce_sum(
    tf.reduce_sum(g, 1, keepdims=True) * empty
  ),
  "empty matrix": lambda g, mask, empty, number: tf.reduce_sum(tf.matmul(g, empty)),
  "factors that cancel": lambda g, mask, empty, number: g * 2.0 + g * -2.0,
  "maximum": lambda g, mask, empty, number: tf.maximum(g, 0.0),
  "minimum": lambda g, mask, empty, number: tf.minimum(g, number),
  "negative": lambda g, mask, empty, number: g + -g,
  "one zero": lambda g, mask, empty, number: g * tf.constant([[1.0, 0.0], [1.0, 1.0]]),
  "rounded to zero": lambda g, mask, empty, number: half(
    lambda h: h * tf.cast(tf.constant(1e-9), tf.float16)
  )(g),
  "select": lambda g, mask, empty, number: tf.where(
    tf.is_finite(g), g, tf.zeros_like(g)
  ),
  "select by the mask": lambda g, mask, empty, number: tf.where(
    mask, g, tf.zeros_like(g)
  ),
  "sign": lambda g, mask, empty, number: tf.sign(g),
  "slice": lambda g, mask, empty, number: g[0],
  "zero": lambda g, mask, empty, number: g * 0.0,
  "zero matrix": lambda g, mask, empty, number: tf.matmul(g, tf.zeros(SHAPE)),
}
EVERY = dict(
  {name: lambda g, *others, copy=copy: copy(g) for name, copy in COPIES.items()},
  **CHANGES,
)

# For XLA, which compiles each row: one of each kind.
SOME = [
  "identity",
  "float16",
  "clip_by_global_norm of this package",
  "constants in a factor",
  "mask",
  "mask and mean",
  "mask in float16",
  "mask transposed",
  "times 2**-40 four times",
  "difference",
  "select",
  "zero matrix",
]


def compiled(function, arguments):
  """Returns the result of a function, an op or a tensor, that XLA compiles as a
  whole.
  """

  def call(*given):
    with tf.control_dependencies([function(*given)]):
      return tf.identity(given[-1])

  if VERSION < (2, 1):
    return tf.xla.experimental.compile(call, arguments)[0]
  option = "jit_compile" if VERSION >= (2, 5) else "experimental_compile"
  # captures the placeholders
  return tensorflow.function(lambda: call(*arguments), **{option: True})()


MODES = {
  "plain": lambda function, arguments: function(*arguments),
  "grappler": lambda function, arguments: function(*arguments),
  "clustered": lambda function, arguments: function(*arguments),
  "compiled": compiled,
}


def config(mode):
  made = testing.config()
  made.graph_options.rewrite_options.disable_meta_optimizer = mode == "plain"
  made.graph_options.rewrite_options.min_graph_nodes = -1  # also of small graphs
  made.graph_options.optimizer_options.global_jit_level = (
    tf.OptimizerOptions.ON_2 if mode == "clustered" else 0
  )
  return made


class Row:
  """A variable with a gradient that the function `change` changed, its loss scale and
  its train op.
  """

  def __init__(self, change, mode, arguments):
    source = tf.Variable(tf.zeros(SHAPE), use_resource=True)
    shape = change(
      *[tf.zeros(value.shape, value.dtype) for value in Inputs.FEED.values()]
    ).shape
    self.trained = tf.Variable(tf.zeros(shape), use_resource=True)
    self.scale = mp_compat.DynamicLossScale(8.0, 100)
    optimizer = mp_compat.MixedPrecisionLossScaleOptimizer(testing.sgd(), self.scale)

    def step(grad, *others):
      ((computed, _),) = optimizer.compute_gradients(
        tf.reduce_sum(source * grad), [source]
      )
      return optimizer.apply_gradients([(change(computed, *others), self.trained)])

    self.train_op = MODES[mode](step, arguments)
    self.state = [tf.identity(self.trained), self.scale()]


def overflows():
  """Yields gradients with one value that is not finite."""
  # masked, and not
  for value, position in itertools.product([np.inf, -np.inf, np.nan], [1, 2]):
    grad = Inputs.FEED["grad"].copy()
    grad.flat[position] = value
    yield grad


def check(mode, names):
  """Asserts that these rows skip every overflow, and no other step."""
  with tf.Graph().as_default():
    inputs = Inputs()
    rows = {name: Row(EVERY[name], mode, inputs.placeholders) for name in names}
    train_op, states = (
      [row.train_op for row in rows.values()],
      {name: row.state for name, row in rows.items()},
    )
    with tf.Session(config=config(mode)) as sess:
      sess.run(tf.global_variables_initializer())
      metadata = tf.RunMetadata()
      sess.run(
        train_op,
        inputs.feed(Inputs.FEED["grad"]),
        tf.RunOptions(output_partition_graphs=True),
        metadata,
      )
      runs_xla = any(
        node.op in ("_XlaRun", "XlaLaunch")
        for part in metadata.partition_graphs
        for node in part.node
      )
      assert runs_xla == (mode == "clustered") or mode == "compiled"
      before = sess.run(states)
      for number, grad in enumerate(overflows(), 1):
        sess.run(train_op, inputs.feed(grad))
        after = sess.run(states)
        applied = [
          name
          for name, (value, _) in after.items()
          if value.tobytes() != before[name][0].tobytes()
        ]
        assert not applied
        assert [
          name
          for name, (_, scale) in after.items()
          if scale != max(8.0 / 2**number, 1.0)
        ] == []
      sess.run(train_op, inputs.feed(Inputs.FEED["grad"]))
      nonzero = [name for name, (value, _) in before.items() if value.any()]
      assert len(nonzero) > len(names) * 0.6
      assert [
        name
        for name, (value, _) in sess.run(states).items()
        if (value == before[name][0]).all()
      ] == [name for name in names if name not in nonzero]


@pytest.mark.parametrize("mode", ["plain", "grappler"])
def test_no_optimizer_hides_an_overflow(mode):
  check(mode, list(EVERY))


some_or_every = pytest.mark.parametrize(
  "names", [SOME, pytest.param(list(EVERY), marks=pytest.mark.matrix)], ids=len
)


@some_or_every
def test_compiled_step_hides_no_overflow(names):
  check("compiled", names)


@pytest.mark.matrix
@some_or_every
def test_auto_clustering_hides_no_overflow(names):
  # TensorFlow reads the flags once in a process.
  testing.run_python(
    "-c",
    "from tests.core import test_hidden_overflows; "
    "test_hidden_overflows.check('clustered', {})".format(names),
    variables={
      "TF_XLA_FLAGS": "--tf_xla_cpu_global_jit --tf_xla_min_cluster_size=1 --tf_xla_enable_lazy_compilation=false"
    },
  )


@pytest.mark.usefixtures("graph")
@pytest.mark.parametrize("name", sorted(EVERY))
def test_only_copies_are_checked_once(name):
  computed, *others = Inputs().placeholders
  lineage.record([computed], ["v"])
  found = lineage.trace([EVERY[name](computed, *others)])
  assert [each.name for each in found.computed] == ["v"]
  assert [each.name for each in found.hidden] == ([] if name in COPIES else ["v"])


@pytest.mark.usefixtures("graph")
def test_casts_that_lose_overflows_are_no_copies():
  computed = tf.placeholder(tf.float32, SHAPE)
  lineage.record([computed], ["v"])
  as_integers = tf.cast(computed, tf.int32)
  assert (
    lineage.trace([as_integers]).hidden
    and lineage.trace([tf.cast(as_integers, tf.float32)]).hidden
  )
  assert lineage.trace([tf.math.real(tf.complex(tf.ones(SHAPE), computed))]).hidden
