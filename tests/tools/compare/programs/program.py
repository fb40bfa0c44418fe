"""Trains a model. Each argument switches something on."""

import multiprocessing
import os
import subprocess
import sys

import numpy as np
import tensorflow
import tensorflow.compat.v1 as tf

args = set(sys.argv[1:])
# The comparison's second run, and its fourth, are odd.
with open("runs", "a+") as file:
  odd = file.tell() % 2
  file.write(".")
data = tf.random.normal([2]).numpy() if "data" in args else 0.0
if "eager" not in args:
  tf.disable_v2_behavior()


class Skips(tf.train.experimental.FixedLossScale):
  def update(self, grads):
    return tf.no_op(), tf.placeholder_with_default(False, [])


class Counts(tf.train.experimental.DynamicLossScale):
  def __init__(self):
    super().__init__(2.0**10, 4)
    self._updates = self._add_weight(
      name="updates", initial_value=0.0, dtype=tf.float32
    )

  def update(self, grads):
    update_op, should_apply = super().update(grads)
    return tf.group(update_op, self._updates.assign_add(1.0)), should_apply


class Outer(tf.train.Optimizer):
  """Calls the optimizer that it wraps, like the one of a library that scales the loss
  inside.
  """

  def __init__(self, inner):
    super().__init__(False, "Outer")
    self._inner = inner

  def compute_gradients(self, *args, **kwargs):
    return self._inner.compute_gradients(*args, **kwargs)

  def apply_gradients(self, *args, **kwargs):
    return self._inner.apply_gradients(*args, **kwargs)


def initial_value():
  return np.float32(int.from_bytes(os.urandom(4), "big")) if "start" in args else 0.0


def make_optimizer():
  opt, experimental = tf.train.AdamOptimizer(0.1), tf.train.experimental
  if "plain" in args:
    return opt
  if "migrated" in args:
    import mp_compat as experimental
  if "twice" in args:
    contrib = tensorflow.contrib.mixed_precision
    opt = experimental.enable_mixed_precision_graph_rewrite(opt)
    return contrib.LossScaleOptimizer(
      opt, contrib.ExponentialUpdateLossScaleManager(8.0, 4)
    )
  scale = (
    128.0
    if "fixed" in args
    else Skips(8.0)
    if "custom" in args
    else experimental.DynamicLossScale(2.0**10, 4)
  )
  scale = Counts() if "own" in args else scale
  opt = experimental.MixedPrecisionLossScaleOptimizer(opt, scale)
  return Outer(opt) if "outer" in args else opt


def train():
  x = tf.placeholder(tf.float32, [2])
  w = tf.get_variable(
    "w",
    [2],
    initializer=tf.constant_initializer(initial_value()),
    use_resource="ref" not in args,
  )
  v = tf.get_variable("v", [3], use_resource="ref" not in args)
  loss = tf.reduce_sum(w * x) + tf.reduce_sum(tf.nn.dropout(tf.square(v), rate=0.5))
  if "generator" in args:
    random_module = (
      tf.random if hasattr(tf.random, "Generator") else tf.random.experimental
    )
    tf.enable_resource_variables()
    loss *= random_module.Generator.from_non_deterministic_state().uniform([])
  opt, global_step = make_optimizer(), tf.train.get_or_create_global_step()
  if "unscaled" in args:
    tf.logging.set_verbosity(tf.logging.ERROR)
    grads_and_vars = list(zip(tf.gradients(loss, [w, v]), [w, v]))
  else:
    grads_and_vars = opt.compute_gradients(loss)
  if "clip" in args:
    grads_and_vars = [
      (tf.clip_by_value(grad, -1.0, 1.0), variable) for grad, variable in grads_and_vars
    ]
  train_op = opt.apply_gradients(grads_and_vars, global_step)
  # Their initializers read the variables, and they are updated in skipped steps, too.
  if "averages" in args:
    with tf.control_dependencies([train_op]):
      train_op = tf.train.ExponentialMovingAverage(0.9).apply([w, v])
  ours = os.environ["MP_COMPAT_RUN"] == "mp_compat"
  if "variable" in args and ours:
    tf.get_variable("more", initializer="a string")
  if "zero" in args:
    zero = tf.get_variable("zero", initializer=1.0)
    train_op = tf.group(train_op, zero.assign(-0.0 if ours else 0.0))
  initializers = [tf.global_variables_initializer()]
  if "unreadable" in args:
    handle = tf.raw_ops.VarHandleOp(dtype=tf.float32, shape=[], shared_name="handle")
    initializers.append(tf.raw_ops.AssignVariableOp(resource=handle, value=0.0))
    train_op = tf.group(
      train_op, tf.raw_ops.AssignAddVariableOp(resource=handle, value=1.0)
    )
  if "reads" in args:
    tf.enable_control_flow_v2()
  with tf.control_dependencies([train_op]):
    after = tf.identity(1.0)
  doubled = after * 2.0
  train_op = (
    tf.train.GradientDescentOptimizer(0.1).minimize(loss, var_list=[w])
    if "pretrains" in args
    else train_op
  )
  read = tf.cond(
    tf.placeholder_with_default(True, []), lambda: w + 1.0, lambda: w - 1.0
  )
  random = (
    np.random.RandomState(int.from_bytes(os.urandom(4), "big"))
    if "entropy" in args
    else np.random
  )
  folder = os.environ["MP_COMPAT_RUN"] if "env" in args else "folder"
  with tf.Session() as sess:
    sess.run(initializers)
    saver = tf.train.Saver()
    if "checkpoint" in args and tf.train.latest_checkpoint(folder):
      saver.restore(sess, tf.train.latest_checkpoint(folder))
    run = (
      sess.make_callable(train_op, [x])
      if "callable" in args
      else lambda value: sess.run(train_op, {x: value})
    )
    for step in range(
      0
      if "untrained" in args
      else 5
      if ("shorter" in args and ours) or ("timed" in args and odd)
      else 6
    ):
      value = random.normal(size=2) + data
      if step == 3 and "overflow" in args or "overflows" in args:
        value[0] = np.inf
      run(
        value
        + (step == 3 and (("numbers" in args and ours) or ("lucky" in args and odd)))
      )
      if "reads" in args:
        sess.run(read)
        sess.run(doubled, {after: 1.0})
    if "checkpoint" in args:
      saver.save(sess, folder + "/model", global_step)


def train_eagerly():
  w = tf.Variable([1.0])
  with tf.GradientTape() as tape:
    loss = tf.square(w)
  w.assign_sub(tape.gradient(loss, w))


if "eager" in args:
  train_eagerly()
if "full" in args:  # what is recorded is written to a full disk
  for number in os.listdir("/proc/self/fd"):
    path = os.path.realpath("/proc/self/fd/" + number)
    if path.endswith("/" + os.environ["MP_COMPAT_RUN"]):
      os.dup2(os.open("/dev/full", os.O_WRONLY), int(number))
if "fork" in args:
  child = multiprocessing.get_context("fork").Process(target=train)
  child.start()
  child.join()
with tf.Graph().as_default():
  train()
if "later" in args:
  args.add("checkpoint")
  with tf.Graph().as_default():
    train()
if "process" in args:
  subprocess.check_call(
    [sys.executable, "-c", "import time\nwhile time.process_time() < 1.5: pass"]
  )
if "input" in args:
  assert sys.stdin.read() == "some input"
if "megabytes" in args:
  assert not os.path.isfile("/dev/stdout")
  print("x" * 2**22)
if "crash" in args:
  raise ValueError("It crashes.")
if "kill" in args:
  os.kill(os.getpid(), 9)
if "exit" in args:
  sys.exit(3)
if "_exit" in args:
  os._exit(0)
