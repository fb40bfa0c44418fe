"""Tests of what LossScaleStalledError says of the reason."""

import re

import numpy as np
import pytest

import mp_compat
from mp_compat.monitoring import reports
from mp_compat.monitoring import stall
from tests import testing
from tests.testing import Optimizer
from tests.testing import tf

pytestmark = pytest.mark.usefixtures("graph")


def stall_text(opt, train_op, feed=None, **kwargs):
  """Runs the train op until a hook raises an error; returns its text."""
  with pytest.raises(mp_compat.LossScaleStalledError) as raised:
    with tf.train.MonitoredTrainingSession(
      hooks=[mp_compat.LossScaleHook(opt, **kwargs)]
    ) as sess:
      for _ in range(200):
        sess.run(train_op, feed)
  return str(raised.value)


def two_layers(x):
  """Returns the logits of two layers."""
  with tf.variable_scope("", initializer=tf.ones_initializer(), use_resource=True):
    return tf.matmul(
      tf.matmul(x, tf.get_variable("one", [2, 2], x.dtype)),
      tf.get_variable("two", [2, 1], x.dtype),
    )


def masked_softmax(logits):
  """Returns a softmax from which a mask of ones removes nothing."""
  return tf.nn.softmax(
    logits + tf.zeros_like(logits) * tf.constant(-(2.0**32), logits.dtype, name="mask")
  )


def masked_by_infinity(logits):
  """Returns a softmax of which a mask of -inf removes one value, as attention does."""
  mask = tf.placeholder_with_default(
    tf.constant([[0.0, -np.inf]], logits.dtype), [1, 2], name="mask"
  )
  return tf.nn.softmax(tf.concat([logits, logits], axis=1) + mask)[:, :1] * logits


def root_and_mask(x):
  logits = two_layers(x)
  return tf.sqrt(logits) + masked_by_infinity(logits)


def softmax_by_hand(logits):
  exponential = tf.exp(logits)
  return exponential / tf.reduce_sum(exponential)


def twice(x):
  """Returns two values, of which only the sum may overflow."""
  return tf.concat([two_layers(x)] * 2, axis=1)


def by_itself(value):
  return value / value


def in_function(function, value):
  """Returns what a function computes; what its ops do is not known outside."""
  return tf.function(function)(value)


def root_in_branch(x):
  with testing.control_flow(1):
    return tf.cond(
      tf.placeholder_with_default(True, []),
      lambda: tf.sqrt(two_layers(x)),
      lambda: tf.zeros([1, 1]),
    )


# The input, its dtype, the loss scale, the values of which the sum is the loss, and
# texts of the error.
REASONS = {
  "infinite gradient": (
    (
      [1.0, -1.0],
      tf.float32,
      lambda: mp_compat.DynamicLossScale(2.0),
      lambda x: tf.sqrt(two_layers(x)),
    ),
    "one:0: ",
    "The first value of the backward pass that is not finite is gradients/Sqrt_grad/",
    "The loss (float32) is finite.",
    "SqrtGrad computes the gradient of a root at zero.",
    "As the loss is finite, no scale helps: gradients/Sqrt_grad/SqrtGrad computes the ",
  ),
  "fixed scale": (
    (
      [1.0, 1.0],
      tf.float16,
      lambda: 2.0**20,
      lambda x: tf.cast(two_layers(x), tf.float32),
    ),
    "not finite is gradients/Cast_grad/Cast.",
    'the fixed loss scale may be too large: lower it, or use "dynamic"',
    "no step was ever applied of 2 attempted",
  ),
  "fixed scale of float16 loss": (
    (
      [1.0, 1.0],
      tf.float16,
      lambda: testing.native.FixedLossScale(2.0**20),
      two_layers,
    ),
    "not finite is scale_loss/Cast.",
    "the fixed loss scale may be too large",
  ),
  "falling scale": (
    (
      [1.0, 1.0],
      tf.float16,
      lambda: mp_compat.DynamicLossScale(2.0**40),
      lambda x: tf.cast(two_layers(x), tf.float32),
    ),
    "the scale may still be too large: begin with a lower one, or allow more skips.",
  ),
  "input": (
    ([np.inf, 1.0], tf.float32, lambda: "dynamic", two_layers),
    "The loss (float32) is not finite.\nThe first value of the forward pass that is not finite is Placeholder.",
    "No scale makes the loss finite: correct the input Placeholder.",
  ),
  "float32 forward pass": (
    ([3e38, 3e38], tf.float32, lambda: 1.0, lambda x: tf.square(two_layers(x))),
    "The first value of the forward pass that is not finite is MatMul.",
    "nor does float32, which ends at 3.4e38: the exact result of MatMul is up to 6e+38.",
  ),
  "mask": (
    (
      [1.0, 1.0],
      tf.float16,
      lambda: "dynamic",
      lambda x: tf.cast(masked_softmax(two_layers(x)), tf.float32),
    ),
    "The first value of the forward pass that is not finite is mask.",
    "because float16 ends at 65504: compute mask in float32, or with smaller ones, such as a mask of -1e4 instead",
  ),
  "mask that is no reason": (
    (
      [np.nan, 1.0],
      tf.float16,
      lambda: "dynamic",
      lambda x: tf.cast(masked_by_infinity(two_layers(x)), tf.float32),
    ),
    "The first value of the forward pass that is not finite is Placeholder.",
    "No scale makes the loss finite: correct the input Placeholder.",
  ),
  "mask before overflow": (
    (
      [1.0, 1.0],
      tf.float32,
      lambda: "dynamic",
      lambda x: tf.exp(1e4 * masked_by_infinity(two_layers(x))),
    ),
    "The first value of the forward pass that is not finite is Exp.",
  ),
  "mask beside infinite gradient": (
    ([0.0, 0.0], tf.float32, lambda: "dynamic", root_and_mask),
    "The loss (float32) is finite.\nThe first value of the backward pass that is not finite is gradients/Sqrt_grad/",
  ),
  "float16 loss": (
    (
      [6.0, 6.0],
      tf.float16,
      lambda: "dynamic",
      lambda x: softmax_by_hand(two_layers(x)),
    ),
    "The loss (float16) is not finite.\nThe first value of the forward pass that is not finite is Exp.",
    "because float16 ends at 65504: compute Exp in float32",
  ),
  "float16 sum": (
    ([1e4, 1e4], tf.float16, lambda: "dynamic", twice),
    "The loss (float16) is not finite.",
    "The first value of the forward pass that is not finite is Sum.",
    "No scale makes the loss finite, because float16 ends at 65504: compute Sum in float32",
  ),
  "float32 sum": (
    ([7e37, 7e37], tf.float32, lambda: "dynamic", twice),
    "The loss (float32) is not finite.",
    "nor does float32, which ends at 3.4e38: the exact result of Sum is up to 5.6e+38.",
    "Make its inputs smaller, with a lower learning rate if they grew during training",
  ),
  "float32 backward pass": (
    ([1.0, 1.0], tf.float32, lambda: 2.0**120, lambda x: 1e30 * two_layers(x)),
    "As the loss is finite, the fixed loss scale may be too large",
    " overflows in float32: make the loss smaller.",
  ),
  "bfloat16": (
    (
      [1.0, -1.0],
      tf.bfloat16,
      lambda: "dynamic",
      lambda x: tf.cast(by_itself(two_layers(x)), tf.float32),
    ),
    "No scale makes the loss finite: truediv divides by zero. Computed in a wider dtype ",
  ),
  "bfloat16 beyond float32": (
    (
      [100.0, 100.0],
      tf.bfloat16,
      lambda: "dynamic",
      lambda x: tf.cast(tf.exp(two_layers(x)), tf.float32),
    ),
    "The first value of the forward pass that is not finite is Exp.",
    "nor does float32, which ends at 3.4e38: the exact result of Exp is up to 5.22e+173.",
  ),
  "backward pass of bfloat16": (
    (
      [1.0, 1.0],
      tf.bfloat16,
      lambda: 2.0**120,
      lambda x: tf.cast(1e30 * two_layers(x), tf.float32),
    ),
    " overflows in bfloat16: make the loss smaller.",
  ),
  "function": (
    (
      [200.0, 200.0],
      tf.float16,
      lambda: "dynamic",
      lambda x: tf.cast(in_function(tf.square, two_layers(x)), tf.float32),
    ),
    "No scale makes the loss finite. If ",
    "PartitionedCall overflows, because float16 ends at 65504, or values were rounded to 0, compute it and what comes before it in float32. If nothing changes, correct its inputs.",
  ),
  "function in float32": (
    (
      [1e20, 1e20],
      tf.float32,
      lambda: "dynamic",
      lambda x: in_function(tf.square, two_layers(x)),
    ),
    "compute them in float32. If nothing changes, look at the inputs and the learning rate.",
  ),
  "gradient of function": (
    (
      [1.0, -1.0],
      tf.float32,
      lambda: 2.0,
      lambda x: in_function(tf.sqrt, two_layers(x)),
    ),
    "The loss (float32) is finite.",
    "PartitionedCall overflows in float32 or has no finite gradient, as tf.sqrt at 0.",
  ),
  "skipped by loss scale": (
    ([1.0, 1.0], tf.float32, lambda: testing.SkipsFiniteSteps(8.0), two_layers),
    "All gradients of this process are finite: the loss scale itself or another process decided to skip.",
  ),
  "value in branch": (
    ([1.0, -1.0], tf.float32, lambda: 2.0, root_in_branch),
    "not finite is gradients/cond/Sqrt_grad/",
  ),
}


@pytest.mark.parametrize("reason", sorted(REASONS))
def test_stall_error_names_reason(reason):
  (value, dtype, make_scale, outputs), *texts = REASONS[reason]
  x = tf.placeholder(dtype, [1, 2])
  opt = Optimizer(tf.train.GradientDescentOptimizer(1.0), make_scale())
  train_op = opt.minimize(tf.reduce_sum(outputs(x)))
  error = stall_text(
    opt, train_op, {x: [value]}, max_consecutive_skips=4, min_scale_patience=2
  )
  assert not [text for text in texts if text not in error]


def normalized(h):
  return h / tf.sqrt(tf.reduce_sum(tf.square(h)))


def selected(h):
  """Returns 1 / h where that is finite; its gradient is not."""
  return tf.where_v2(tf.equal(h, 0.0), tf.zeros_like(h), 1.0 / h)


# A value h, a function of it, and what the message says of the op that is named.
UNDEFINED = {
  "zero by zero": (0.0, lambda h: h / h, "divides by zero"),
  "one by zero": (0.0, lambda h: 1.0 / h, "divides by zero"),
  "reciprocal": (0.0, tf.math.reciprocal, "divides by zero"),
  "logarithm of zero": (0.0, tf.log, "computes the logarithm of zero"),
  "log1p": (-1.0, tf.math.log1p, "computes the logarithm of zero or of a negative"),
  "root of -1": (-1.0, tf.sqrt, "computes the root of a negative number"),
  "root at zero": (0.0, tf.sqrt, "computes the gradient of a root at zero"),
  "reciprocal root": (0.0, tf.rsqrt, "computes the reciprocal root of zero"),
  "power": (0.0, lambda h: h**-1.5, "computes a power of zero or of a negative number"),
  "norm of zeros": (0.0, normalized, "divides by zero"),
  "cross-entropy by hand": (0.0, lambda h: -h * tf.log(h), "the logarithm of zero"),
  "selected": (0.0, selected, "divides by zero"),
}
# A value h, a function of it, and the name of the op that overflows; an exponential
# makes the gradients not finite, too.
OVERFLOWS = {
  "exponential": (12.0, lambda h: h, "Exp"),
  "square": (300.0, tf.square, "Square"),
  "quotient": (2.0**-12, lambda h: 60.0 / h, "truediv"),
  "product": (300.0, lambda h: h * h, "mul"),
  "matrix product": (200.0, lambda h: tf.matmul(h, h, transpose_b=True), "MatMul_1"),
  "sum": (6e4, tf.reduce_sum, "Sum"),
  "convolution": (
    6e3,
    lambda h: tf.nn.conv2d(
      tf.reshape(h, [1, 1, 1, 2]), tf.fill([1, 1, 2, 1], tf.cast(9, h.dtype)), 1, "SAME"
    ),
    "Conv2D",
  ),
}


def injected(function, value, dtype):
  """Returns the message of a stall from a function of a layer whose result is `value`."""
  x = tf.placeholder(dtype, [1, 2])
  w = tf.get_variable("w", [2, 2], tf.float32, tf.ones_initializer())
  hidden = tf.matmul(x, tf.cast(w, dtype))
  opt = Optimizer(tf.train.GradientDescentOptimizer(1.0), "dynamic")
  train_op = opt.minimize(tf.reduce_mean(tf.cast(function(hidden), tf.float32)))
  return stall_text(
    opt, train_op, {x: [[value / 2, value / 2]]}, max_consecutive_skips=17
  )


@pytest.mark.parametrize("case", sorted(UNDEFINED))
@pytest.mark.parametrize(
  "dtype", [tf.float16, pytest.param(tf.float32, marks=pytest.mark.matrix)]
)
def test_undefined_results_are_no_overflow(case, dtype):
  """They are not finite in float64 either, so that float32 would stall again."""
  value, function, does = UNDEFINED[case]
  text = injected(function, value, dtype).splitlines()[-1]
  assert does in text and "Computed in a wider dtype from " in text, text
  assert "float16" not in text and "float32" not in text, text


@pytest.mark.parametrize("case", sorted(OVERFLOWS))
def test_overflow_of_float16_is_named(case):
  """The exact result is finite."""
  value, function, name = OVERFLOWS[case]
  text = injected(lambda h: tf.exp(function(h)), value, tf.float16).splitlines()[-1]
  assert "because float16 ends at 65504: compute {} in float32".format(name) in text


def test_rounding_of_float32_needs_formula():
  text = injected(lambda h: tf.log(1.0 - tf.tanh(h)), 12.0, tf.float32)
  assert text.splitlines()[-1] == (
    "No scale makes the loss finite: Log computes the logarithm of zero because of "
    "rounding. Replace Tanh, sub, Log by a formula in which nothing cancels or "
    "underflows, such as tf.nn.log_softmax for the logarithm of a softmax: in float64, "
    "Log is finite, but not in float32."
  )


def underflowing(h):
  """Returns the logarithm of 1e-4 h, which is computed in 22 products."""
  h = 1e-4 * h
  for factor in [0.25] * 7 + [2.0] * 14:
    h = factor * h
  return tf.log(h)


def test_many_ops_are_named_by_first_and_last():
  text = injected(underflowing, 1.0, tf.float16).splitlines()[-1]
  ops = re.search(r"Compute the (\d+) ops from (\w+) to Log in float32", text)
  assert int(ops.group(1)) > 8 and ops.group(2).startswith("mul_"), text


def sigmoid_by_hand(h):
  return 1.0 / (1.0 + tf.exp(-h))


def test_forward_overflow_is_named_behind_finite_loss():
  text = injected(sigmoid_by_hand, -20.0, tf.float16)
  assert "The loss (float32) is finite." in text
  assert "The first value of the forward pass that is not finite is Exp." in text
  assert text.splitlines()[-1].startswith(
    "No scale makes the gradients finite, because float16 ends at 65504: compute Exp in"
  )


@pytest.mark.parametrize("stateful", [True, False])
def test_python_functions_are_not_called_again(stateful):
  """They may have effects."""
  calls = []

  def function(values):
    calls.append(values.dtype)
    return values * np.float16(np.inf)

  def with_gradient(h):
    return tf.custom_gradient(
      lambda t: (
        tf.identity(t),
        lambda dy: tf.py_func(function, [dy], tf.float16, stateful=stateful),
      )
    )(h)

  text = injected(with_gradient, 1.0, tf.float16)
  assert set(calls) == {np.dtype(np.float16)} and len(calls) == 17
  assert "float64" not in text and "gradients/IdentityN_grad/PyFunc" in text


def rewritten_product(hooks_of):
  """Trains with a product that overflows if Grappler computes it in float16, which it
  does on this CPU if a release can; returns which of 30 steps are applied.
  """
  config = tf.ConfigProto()
  rewrites = config.graph_options.rewrite_options
  if not hasattr(rewrites, "auto_mixed_precision_cpu"):
    pytest.skip("This TensorFlow rewrites graphs for GPUs only.")
  rewrites.auto_mixed_precision_cpu = 1
  rewrites.min_graph_nodes = -1  # also of small graphs
  with tf.Graph().as_default():
    x = tf.placeholder(tf.float32, [8, 8])
    w = tf.get_variable("w", [8, 8], initializer=tf.ones_initializer())
    product = tf.matmul(tf.matmul(x, w), w) * 1e-5
    opt = Optimizer(tf.train.GradientDescentOptimizer(1e-9), "dynamic")
    train_op = opt.minimize(tf.sqrt(tf.reduce_mean(tf.square(product)) + 1.0))
    creator = tf.train.ChiefSessionCreator(config=config)
    with tf.train.MonitoredSession(creator, hooks=hooks_of(opt)) as sess:
      fetches, feed = [train_op, opt.step_applied], {x: np.full([8, 8], 3e3)}
      return [step for step in range(30) if sess.run(fetches, feed)[1]]


def test_stall_of_rewritten_graph_is_reported():
  if rewritten_product(lambda opt: []):
    pytest.skip("This TensorFlow does not rewrite graphs for this processor.")
  with pytest.raises(mp_compat.LossScaleStalledError) as raised:
    rewritten_product(lambda opt: [mp_compat.LossScaleHook(opt)])
  assert (
    "the session rewrites the graph to a narrower dtype (auto_mixed_precision)"
    in str(raised.value)
  )


def test_infinite_data_are_named_behind_finite_loss():
  text = injected(tf.tanh, np.inf, tf.float16)
  assert "The loss (float32) is finite." in text
  last = "No scale makes the gradients finite: correct the input Placeholder. If its "
  assert text.splitlines()[-1].startswith(last)


def trained_with(learning_rate, use_resource):
  """Returns the message of a stall of float16 squares of a variable; "" without."""
  with tf.Graph().as_default():
    w = tf.get_variable(
      "w", [2], initializer=tf.ones_initializer(), use_resource=use_resource
    )
    half = tf.cast(w, tf.float16, name="half")
    factor = tf.placeholder_with_default(tf.ones([2], tf.float16), [2])
    loss = tf.reduce_sum(tf.square(tf.cast(half * factor, tf.float32)))
    opt = Optimizer(tf.train.GradientDescentOptimizer(learning_rate), 1.0)
    train_op = opt.minimize(loss)
    hook = mp_compat.LossScaleHook(opt, max_consecutive_skips=3)
    try:
      with tf.train.MonitoredTrainingSession(hooks=[hook]) as sess:
        for _ in range(9):
          sess.run(train_op)
    except mp_compat.LossScaleStalledError as error:
      return str(error)
    return ""


@pytest.mark.parametrize("use_resource", [False, True], ids=["reference", "resource"])
def test_cast_of_large_variable_names_it(use_resource):
  """A learning rate is too large: the weights leave the range of float16."""
  text = trained_with(5e4, use_resource).splitlines()[-1]
  assert text.startswith(
    "No scale makes the loss finite: half casts the variable w, whose largest value is "
    "99999, to float16, which ends at 65504."
  )
  assert "restart from a checkpoint with a lower learning rate" in text
  assert trained_with(0.1, use_resource) == ""


@pytest.mark.usefixtures("control_flow")
def test_loops_are_not_blamed():
  """What a loop computes is not known, so nothing is said of the reason."""
  text = injected(
    lambda h: tf.while_loop(lambda i, _: i < 4, lambda i, y: (i + 1, y * y), [0, h])[1],
    20.0,
    tf.float16,
  )
  last = text.splitlines()[-1]
  assert "overflow" in last and ("if" in last.lower() or " or " in last), last


def test_first_value_of_replicas():
  """The first replica is finite: the op of the second one is named."""
  strategy = tf.distribute.MirroredStrategy(testing.TWO_CPUS)
  with strategy.scope():
    w = tf.get_variable("w", [2], initializer=tf.ones_initializer())
    opt = Optimizer(tf.train.GradientDescentOptimizer(1.0), "dynamic")
  x = tf.placeholder(tf.float32, [2])

  def step():
    index = tf.distribute.get_replica_context().replica_id_in_sync_group
    own = tf.gather(x, tf.cast(tf.convert_to_tensor(index), tf.int32))
    return opt.minimize(tf.reduce_sum(tf.sqrt(w * own)))

  run = getattr(strategy, "run", None) or strategy.experimental_run_v2
  train_op = tf.group(strategy.experimental_local_results(run(step)))
  hook = mp_compat.LossScaleHook(opt, max_consecutive_skips=2)
  config = testing.config()
  with pytest.raises(mp_compat.LossScaleStalledError) as raised:
    with tf.train.MonitoredTrainingSession(hooks=[hook], config=config) as sess:
      for _ in range(9):
        sess.run(train_op, {x: [1.0, 0.0]})
  lines = str(raised.value).splitlines()
  named = "The first value of the backward pass that is not finite is replica_1/"
  assert any(line.startswith(named) for line in lines)
  assert "computes the gradient of a root at zero" in lines[-1]


def test_unclipped_gradients_come_first():
  x = tf.placeholder(tf.float32, [1, 2])
  opt = Optimizer(tf.train.GradientDescentOptimizer(1.0), 2.0)
  variables = [tf.get_variable(name, [2]) for name in "ab"]
  loss = tf.reduce_sum(variables[0] * x) + tf.reduce_sum(variables[1])
  grads, variables = zip(*opt.compute_gradients(loss, variables))
  clipped, _ = mp_compat.clip_by_global_norm(grads, 1.0)
  text = stall_text(
    opt,
    opt.apply_gradients(zip(clipped, variables)),
    {x: [[np.inf, 1.0]]},
    min_scale_patience=2,
  )
  lines = [line.split(", ")[0] for line in text.splitlines() if "NaN" in line]
  assert lines == ["  a:0 (computed): 0 NaN", "  a:0: 2 NaN", "  b:0: 2 NaN"]


def test_fed_gradients_need_no_backward_pass():
  x = tf.placeholder(tf.float32, [1, 2])
  opt = Optimizer(
    tf.train.GradientDescentOptimizer(1.0), 2.0, check_computed_gradients=False
  )
  grads, variables = zip(*opt.compute_gradients(tf.reduce_sum(two_layers(x))))
  clipped, _ = tf.clip_by_global_norm(grads, 1.0)
  train_op = opt.apply_gradients(zip(clipped, variables))
  text = stall_text(
    opt,
    train_op,
    {clipped[0]: np.full([2, 2], np.nan), clipped[1]: np.ones([2, 1])},
    min_scale_patience=2,
  )
  assert (
    "one:0: 4 NaN" in text and "(computed)" not in text and "first value" not in text
  )


@pytest.mark.parametrize(
  "name, value, reason",
  [
    ("one", 0.0, ": log computes the logarithm of zero. Computed in a wider dtype "),
    ("log", -np.inf, ": correct the input log. If its values are finite before they "),
  ],
)
def test_values_that_are_fed_are_not_computed_again(name, value, reason):
  x = tf.placeholder(tf.float16, [])
  w = tf.get_variable("w", [], use_resource=True, initializer=tf.ones_initializer())
  default = tf.constant(1.0, tf.float16)
  one = tf.placeholder_with_default(default, [], name="one")
  result = tf.log(tf.nn.relu(x * tf.cast(w, tf.float16)) + one, name="log")
  opt = Optimizer(tf.train.GradientDescentOptimizer(1.0), 2.0)
  train_op = opt.minimize(tf.cast(tf.square(result * default), tf.float32))
  text = stall_text(opt, train_op, {x: -1.0, name + ":0": value}, min_scale_patience=2)
  assert "No scale makes the loss finite" + reason in text, text


def test_run_goes_on_beside_branches_of_control_flow_v2(warnings):
  x = tf.placeholder(tf.float32, [])
  w = tf.get_variable("w", [], use_resource=True, initializer=tf.ones_initializer())
  with testing.control_flow(2):
    chosen = tf.cond(x > 0.0, lambda: x * w, lambda: w)
  opt = Optimizer(tf.train.GradientDescentOptimizer(1.0), "dynamic")
  train_op = opt.minimize(tf.sqrt(chosen))
  hook = mp_compat.LossScaleHook(opt, max_consecutive_skips=5, on_stall="warn")
  with tf.train.MonitoredTrainingSession(hooks=[hook]) as sess:
    for value in 4 * [np.inf] + [1.0]:
      sess.run(train_op, {x: value})
  assert (hook.attempted, hook.skipped, warnings) == (5, 4, [])


def test_gradients_that_were_never_scaled_are_counted_in_branches():
  x, w = tf.placeholder(tf.float32, [2]), tf.get_variable("w", [2], use_resource=True)
  opt = Optimizer(tf.train.GradientDescentOptimizer(1.0), 2.0)
  with testing.control_flow(1):
    train_op = tf.cond(
      tf.placeholder_with_default(True, []),
      lambda: opt.apply_gradients([(tf.gradients(tf.reduce_sum(w * x), w)[0], w)]),
      tf.no_op,
    )
  assert "w:0: 0 NaN, 1 inf, the largest of the others 1" in stall_text(
    opt, train_op, {x: [np.inf, 1.0]}
  )


def in_cond(make):
  """Returns a function that makes a tensor in a branch."""
  return lambda: tf.cond(
    tf.placeholder_with_default(True, []), make, lambda: tf.zeros([2])
  )


@pytest.mark.parametrize("place", [in_cond, tf.function], ids=["cond", "function"])
def test_scale_that_was_read_elsewhere_does_not_tell_the_passes(place):
  """Gradients are unscaled outside of the function that scales the loss, with another
  read of the scale: nothing derives from it but them.
  """
  x, w = tf.placeholder(tf.float32, [2]), tf.get_variable("w", [2], use_resource=True)
  opt = Optimizer(tf.train.GradientDescentOptimizer(1.0), 2.0**120)
  with testing.control_flow(1):
    grad = place(
      lambda: tf.gradients(opt.scale_loss(tf.reduce_sum(w * x * 1e30)), w)[0]
    )()
  train_op = opt.apply_gradients([(opt.unscale_gradients([grad])[0], w)])
  text = stall_text(opt, train_op, {x: [1.0, 1.0]}, max_consecutive_skips=2)
  assert "w:0: 0 NaN, 2 inf" in text and "pass that is not finite" not in text
  last = text.splitlines()[-1]
  assert last.startswith("Fetch the loss.")
  assert "If it is finite, the fixed loss scale may be too large" in last


def test_parts_of_complex_gradients_are_counted():
  v = tf.get_variable("v", initializer=tf.zeros([3], tf.complex64), use_resource=True)
  grad = tf.placeholder(tf.complex64, [3])
  opt = Optimizer(testing.ComplexDescent(1.0), 4.0)
  train_op = opt.apply_gradients([(grad, v)])
  values = [complex(1.0, np.nan), complex(np.inf, -np.inf), complex(2.0, -5.0)]
  text = stall_text(opt, train_op, {grad: values}, max_consecutive_skips=2)
  assert "v:0: 1 NaN, 2 inf, the largest of the others 5\n" in text


def test_colocated_gradients_are_computed_again():
  """The op that overflows names another op, which the graph that computes it lacks."""
  x = tf.placeholder(tf.float16, [1, 2])
  opt = Optimizer(tf.train.GradientDescentOptimizer(1.0), 2.0**14)
  loss = tf.reduce_sum(tf.cast(300.0 * two_layers(x), tf.float32))
  train_op = opt.minimize(loss, colocate_gradients_with_ops=True)
  text = stall_text(opt, train_op, {x: [[1.0, 1.0]]}, max_consecutive_skips=2)
  assert " overflows in float16: compute it in float32" in text.splitlines()[-1]


def test_stall_between_applied_steps(warnings):
  w = tf.get_variable("w", [2])
  xs = [tf.placeholder(tf.float32, [2]) for _ in range(2)]
  opt = Optimizer(tf.train.GradientDescentOptimizer(1.0), 2.0)
  train_ops = [opt.minimize(tf.reduce_sum(w * x)) for x in xs]
  hook = mp_compat.LossScaleHook(opt, max_consecutive_skips=1, on_stall="warn")
  with tf.train.MonitoredTrainingSession(hooks=[hook]) as sess:
    for first in [np.inf, 1.0]:
      sess.run(train_ops, {xs[0]: [first, 1.0], xs[1]: [np.inf, 1.0]})
  assert len([line for line in warnings if "w:0: 0 NaN, 1 inf" in line]) == 2


@pytest.mark.parametrize("has_getter", [False, True], ids=["float16", "float32"])
def test_variables_not_finite_are_named(has_getter, warnings):
  """In float16, Adam's epsilon is 0: an update of a gradient of zero is 0 / 0. In
  float32, the initial value is NaN.
  """
  x = tf.placeholder(tf.float16, [1, 2])
  getter = mp_compat.float32_variable_storage_getter if has_getter else None
  with tf.variable_scope(
    "model", dtype=tf.float16, custom_getter=getter, use_resource=True
  ):
    w = tf.get_variable(
      "w", [2, 1], initializer=tf.constant_initializer(np.nan if has_getter else 1.0)
    )
    other = tf.get_variable("other", [1], initializer=tf.zeros_initializer())
  opt = Optimizer(tf.train.AdamOptimizer(), 2.0)
  train_op = opt.minimize(
    tf.reduce_sum(tf.square(tf.cast(tf.matmul(x, w) + other, tf.float32)))
  )
  text = stall_text(opt, train_op, {x: [[1.0, 0.0]]}, min_scale_patience=2)
  assert (
    "The loss (float32) is not finite.\nVariables that are not finite: model/w." in text
  )
  assert "Restart from a checkpoint in which the variables are finite" in text
  assert ("mp_compat.float32_variable_storage_getter" in text) != has_getter
  assert ("with a lower learning rate" in text) == has_getter
  expected = [
    "LossScaleHook: Adam trains float16 variables: model/w:0, model/other:0. They lose small updates."
  ]
  found = [line[: len(expected[0])] for line in warnings if "float16 variables" in line]
  assert found == ([] if has_getter else expected)


def test_embeddings_not_finite_are_named():
  ids = tf.placeholder(tf.int32, [2])
  table = tf.get_variable(
    "table", initializer=[[1.0, 2.0], [np.nan, 3.0], [4.0, 5.0]], use_resource=True
  )
  product = (
    tf.gather(table, ids)
    * tf.nn.embedding_lookup(table, ids)
    * tf.gather_nd(table, ids[:, tf.newaxis])
  )
  opt = Optimizer(tf.train.GradientDescentOptimizer(1.0), 2.0)
  text = stall_text(opt, opt.minimize(tf.reduce_sum(product)), {ids: [0, 1]})
  assert (
    "Variables that are not finite: table.\n" in text
    and "Restart from a checkpoint" in text
  )


def test_values_of_step_are_those_of_numpy():
  """Fetches what the text rests on, in one run with the train op."""
  x = tf.placeholder(tf.float16, [1, 2])
  opt = Optimizer(tf.train.GradientDescentOptimizer(1.0), 8.0)
  outputs = two_layers(x)
  train_op = opt.minimize(tf.reduce_sum(tf.cast(outputs, tf.float32)))
  (step,) = reports.train_steps(opt)
  observed = stall.observed(step)
  with testing.initialized_session() as sess:
    _, values = sess.run(
      [train_op, [each.fetch for each in observed]], {x: [[3.0, 4.0]]}
    )
  found = {(each.part, each.name): value for each, value in zip(observed, values)}
  np.testing.assert_array_equal(found["gradient", "two:0"], [[7.0], [7.0]])
  np.testing.assert_array_equal(found["loss", ""], 14.0)
  np.testing.assert_array_equal(found["variable", "one"], np.ones([2, 2]))
  np.testing.assert_array_equal(found["forward", x.op.name], [[3.0, 4.0]])
  np.testing.assert_array_equal(
    found["backward", "gradients/MatMul_1_grad/MatMul"], [[8.0, 8.0]]
  )
