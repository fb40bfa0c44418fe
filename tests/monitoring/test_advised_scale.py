"""Tests that a program trains with the advised loss scale, in a process of its own.

What it applies is compared with gradients that the same graph computes in float64.
"""

import json
import re

import pytest

from tests import testing

# The arguments are the model and the scale: 0 records the ranges and prints the advice;
# otherwise, the result is the smallest share of the magnitude that was applied, over the
# columns of all variables.
PROGRAM = """
import json, sys
import numpy as np
import tensorflow.compat.v1 as tf
import mp_compat
from mp_compat.monitoring import range_history
tf.disable_v2_behavior()
kind, scale = sys.argv[1], float(sys.argv[2])
own_dtype = tf.float16 if kind == "float16 variables" else tf.float32
weights = {"outputs": [1.0, 1.0, 1.0, 2.0**-22]}.get(kind, [2.0**-22] * 4)
if kind == "float16 variables":
  weights = [2.0**-27] * 4
tf.set_random_seed(1)
x, y = tf.placeholder(tf.float64, [32, 8]), tf.placeholder(tf.float64, [32, 4])
shapes = {"one": [8, 16], "two": [16, 4]}
variables = {
  name: tf.get_variable(name, shape, own_dtype, tf.glorot_uniform_initializer(seed=1))
  for name, shape in shapes.items()
}
def loss_in(dtype, wide):
  hidden = tf.nn.relu(tf.matmul(tf.cast(x, dtype), tf.cast(variables["one"], dtype)))
  output = tf.cast(tf.matmul(hidden, tf.cast(variables["two"], dtype)), wide)
  errors = tf.reduce_mean(tf.square(output - tf.cast(y, wide)), 0)
  return tf.reduce_sum(errors * tf.constant(weights, wide))
given = mp_compat.DynamicLossScale(2.0**15) if scale == 0 else scale
inner = tf.train.AdamOptimizer(0.01, epsilon=1e-30)
if kind == "float16 variables":  # in which Adam's epsilon is 0
  inner = tf.train.GradientDescentOptimizer(0.01)
opt = mp_compat.MixedPrecisionLossScaleOptimizer(inner, given)
pairs = opt.compute_gradients(loss_in(tf.float16, tf.float32))
train_op = opt.apply_gradients(pairs, tf.train.get_or_create_global_step())
hook = mp_compat.GradientRangesHook(opt, 10)
exact = tf.gradients(loss_in(tf.float64, tf.float64), [v for _, v in pairs])
fetches = [train_op, opt.step_applied, [tf.cast(grad, tf.float64) for grad, _ in pairs], exact]
random = np.random.RandomState(0)
applied = wanted = 0.0
with tf.train.MonitoredTrainingSession(hooks=[] if scale else [hook]) as sess:
  for _ in range(50):
    feed = {x: random.normal(size=[32, 8]), y: random.normal(size=[32, 4])}
    if scale == 0:
      sess.run(train_op, feed)
      continue
    _, is_applied, ours, theirs = sess.run(fetches, feed)
    sums = lambda grads: np.concatenate([np.abs(grad).sum(0) for grad in grads])
    applied, wanted = applied + (sums(ours) if is_applied else 0.0), wanted + sums(theirs)
if scale == 0:
  print(json.dumps(range_history.advise(hook._history)._asdict()))
else:
  print(json.dumps((applied / wanted).min()))
"""


def run(kind, scale):
  return json.loads(testing.run_python("-c", PROGRAM, kind, scale).stdout)


@pytest.mark.matrix
@pytest.mark.parametrize("kind", ["outputs", "small loss"])
def test_program_trains_with_advised_scale(kind):
  """Also the output that makes up less than 1% of the magnitude."""
  advice = run(kind, 0)
  assert advice["kind"] == "fixed", advice
  scale = re.search(r"a fixed loss scale of 2\*\*(\d+)\.", advice["text"])
  exponent = int(scale.group(1))
  assert run(kind, 2.0**exponent) >= 0.9


@pytest.mark.matrix
def test_float16_variables_get_advice_on_storage():
  advice = run("float16 variables", 0)
  assert advice["kind"] == "float32", advice
  assert advice["text"].startswith("Store ") and "float32_variable" in advice["text"]
