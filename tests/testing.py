"""Helpers for several test files: small models, recorded training runs, sessions and
processes.

Gradients depend on placeholders: with constants, graph optimization could remove the
conditional.
"""

import collections
import contextlib
import glob
import json
import os
import re
import socket
import subprocess
import sys

import numpy as np
import tensorflow

import mp_compat

tf = tensorflow.compat.v1
native = tf.train.experimental
Optimizer = mp_compat.MixedPrecisionLossScaleOptimizer

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

# Devices for distribution strategies. `session` configures two CPUs for sessions. Some
# strategies also create variables eagerly, so eager mode needs two CPUs as well, where
# TensorFlow has the setting (2.4 and later).
TWO_CPUS = ["/cpu:0", "/cpu:1"]
if hasattr(tensorflow.config, "set_logical_device_configuration"):
  tensorflow.config.set_logical_device_configuration(
    tensorflow.config.list_physical_devices("CPU")[0],
    [tensorflow.config.LogicalDeviceConfiguration()] * 2,
  )

OPTIMIZERS = {
  "GradientDescent": lambda: tf.train.GradientDescentOptimizer(0.1),
  "Momentum": lambda: tf.train.MomentumOptimizer(0.1, 0.9),
  "Adam": lambda: tf.train.AdamOptimizer(0.1),
  "Adagrad": lambda: tf.train.AdagradOptimizer(0.1),
  "RMSProp": lambda: tf.train.RMSPropOptimizer(0.01, momentum=0.5),
  "Ftrl": lambda: tf.train.FtrlOptimizer(0.1, l1_regularization_strength=0.01),
}


def sgd():
  return tf.train.GradientDescentOptimizer(1.0)


# Gradients for `Training`, float64 [2].
FINITE, OVERFLOW = np.array([1.0, 2.0]), np.array([1.0, np.inf])


@contextlib.contextmanager
def control_flow(version):
  """Builds conditionals as Switch and Merge (1) or as functions (2)."""
  previously_enabled = tf.control_flow_v2_enabled()
  (tf.enable_control_flow_v2 if version == 2 else tf.disable_control_flow_v2)()
  try:
    yield
  finally:
    (tf.enable_control_flow_v2 if previously_enabled else tf.disable_control_flow_v2)()


def config():
  """Returns a ConfigProto with two CPU devices and one intra-op thread, or as many as
  $TF_NUM_INTRAOP_THREADS says.
  """
  threads = int(os.environ.get("TF_NUM_INTRAOP_THREADS", "1"))
  return tf.ConfigProto(device_count={"CPU": 2}, intra_op_parallelism_threads=threads)


def session():
  """Returns a Session with `config()`."""
  return tf.Session(config=config())


@contextlib.contextmanager
def initialized_session():
  """Yields a Session with `config()`, in which all variables of the default graph have
  their initial values.
  """
  with session() as sess:
    sess.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
    yield sess


def loop_twice(body, initial):
  """Returns the result of two iterations of `body`, a function of one tensor."""
  _, result = tf.while_loop(
    lambda i, _: i < 2, lambda i, value: (i + 1, body(value)), (0, initial)
  )
  return result


def plain_name(variable):
  """Returns a variable's name without the prefix of a conditional ("cond_1/beta1_power"
  in TensorFlow's class).
  """
  return re.sub(r"(^|/)cond(_\d+)?/", r"\1", variable.name)


def model(x, use_resource, sparse=True):
  """Returns a scalar loss of three variables. Its gradients are proportional to `x`
  [3].

  The gradient of `table` is an IndexedSlices if `sparse`. The variable `unused` has no
  gradient.
  """
  with tf.variable_scope("model", use_resource=use_resource):
    w = tf.get_variable("w", initializer=np.array([1.0, -2.0, 3.0], np.float32))
    b = tf.get_variable(
      "b", initializer=np.array([[0.5, 0.25, 0.125], [1.0, 1.0, 1.0]], np.float32)
    )
    table = tf.get_variable(
      "table", initializer=np.arange(12, dtype=np.float32).reshape([6, 2]) / 7
    )
    tf.get_variable("unused", initializer=np.array([1.0], np.float32))
  rows = tf.gather(table, [1, 4, 1]) if sparse else table[1:4]
  return (
    tf.reduce_sum(x * tf.square(w))
    + tf.reduce_sum(tf.sin(b) * x)
    + tf.reduce_sum(tf.square(rows) * tf.expand_dims(x, 1))
  )


def feeds(steps, overflow_at=()):
  """Yields the same inputs [3] of `model` in every call, with one non-finite value in
  the steps of `overflow_at`.
  """
  random = np.random.RandomState(0)
  for step in range(steps):
    x = random.normal(size=3).astype(np.float32)
    if step in overflow_at:
      x[step % 3] = [np.nan, np.inf, -np.inf][step % 3]
    yield x


def values(sess):
  """Returns {plain name: value} of all variables of the default graph."""
  variables = tf.global_variables()
  return dict(zip([plain_name(v) for v in variables], sess.run(variables)))


def train(make_optimizer, xs, use_resource=True, **minimize):
  """Trains `model` in a new graph. Returns the values of all variables, initially and
  after every step.

  Each argument in `minimize`, for `compute_gradients`, may be a function that makes it
  inside the graph.
  """
  with tf.Graph().as_default():
    x = tf.placeholder(tf.float32, [3])
    with tf.variable_scope("", use_resource=use_resource):
      global_step = tf.train.get_or_create_global_step()
    loss = model(x, use_resource)
    optimizer = make_optimizer()
    grads_and_vars = optimizer.compute_gradients(
      loss,
      **{key: value() if callable(value) else value for key, value in minimize.items()},
    )
    train_op = optimizer.apply_gradients(grads_and_vars, global_step)
    with session() as sess:
      sess.run(tf.global_variables_initializer())
      history = [values(sess)]
      for value in xs:
        sess.run(train_op, {x: value})
        history.append(values(sess))
  return history


def assert_same(ours, theirs):
  """Asserts that two histories have the same variables, bitwise equal after every
  step.
  """
  assert len(ours) == len(theirs)
  for step, (our, their) in enumerate(zip(ours, theirs)):
    assert sorted(our) == sorted(their)
    for name, value in our.items():
      same = (
        value.dtype == their[name].dtype and value.tobytes() == their[name].tobytes()
      )
      assert same, "{} after step {}: {!r} and {!r}".format(
        name, step, value, their[name]
      )


def executed(sess, fetch, feed):
  """Traces a run. Returns `(op type, dtype, shape)` of every executed op, with those of
  its first output, or None.
  """
  metadata = tf.RunMetadata()
  sess.run(
    fetch,
    feed,
    options=tf.RunOptions(trace_level=tf.RunOptions.FULL_TRACE),
    run_metadata=metadata,
  )
  ran = {}
  for node in [
    node for device in metadata.step_stats.dev_stats for node in device.node_stats
  ]:
    op_type = re.search(r" = (\w+)\(", node.timeline_label)
    if op_type:
      output = node.output[0].tensor_description if node.output else None
      ran[node.node_name] = (
        op_type.group(1),
        output and tf.as_dtype(output.dtype),
        output and [size.size for size in output.shape.dim],
      )
  return list(ran.values())


def environment():
  """Returns the environment for a new process that imports this package."""
  # TensorFlow sets TF2_BEHAVIOR in this process.
  inherited = {
    name: value for name, value in os.environ.items() if name != "TF2_BEHAVIOR"
  }
  # Older versions of coverage write warnings about unknown settings to standard error.
  return dict(inherited, PYTHONPATH=ROOT, PYTHONWARNINGS="ignore")


def run_python(
  *arguments, python=sys.executable, path=(), variables=(), check=True, **options
):
  """Runs Python in a new process that can import this package.

  Args:
    *arguments: the arguments of the interpreter.
    python: the interpreter.
    path: folders to prepend to its module search path.
    variables: environment variables, as a dictionary.
    check: whether to assert that it succeeds.
    **options: for `subprocess.run`, whose result is returned.
  """
  variables = dict(environment(), **dict(variables))
  variables["PYTHONPATH"] = os.pathsep.join(
    [str(folder) for folder in path] + [variables["PYTHONPATH"]]
  )
  options = dict(
    dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True), **options
  )
  done = subprocess.run(
    [python] + [str(one) for one in arguments], env=variables, check=False, **options
  )
  assert done.returncode == 0 or not check, (done.stdout, done.stderr)
  return done


def eager_mode():
  """Returns a context manager that enables eager execution, also in TensorFlow 1.15."""
  from tensorflow.python.eager import context

  return context.eager_mode()


class Training:
  """Trains one variable `w` [2], initially zeros. The gradient of the loss is the
  placeholder `x` [2].
  """

  def __init__(self, dtype=tf.float32, use_resource=True):
    with tf.variable_scope("", use_resource=use_resource):
      self.w = tf.get_variable("w", [2], dtype, initializer=tf.zeros_initializer())
      self.global_step = tf.train.get_or_create_global_step()
    self.x = tf.placeholder(dtype, [2], "x")
    self.loss = tf.reduce_sum(self.w * self.x)
    self.session = session()

  def run(self, train_op, *xs, fetch=None):
    """Initializes the variables and runs the train op once per input.

    Returns for each step what `fetch` gave, as a list of one, or `w` after the step if
    `fetch` is None.
    """
    self.session.run(tf.global_variables_initializer())
    return [
      self.session.run([train_op] + ([] if fetch is None else [fetch]), {self.x: x})[1:]
      or self.session.run(self.w)
      for x in xs
    ]


def events(directory):
  """Returns {tag: [(step, value)]} of the scalars in all event files of a directory."""
  found = collections.defaultdict(list)
  for path in sorted(glob.glob(os.path.join(directory, "events*"))):
    for event in tf.train.summary_iterator(path):
      for value in event.summary.value:
        if value.HasField("simple_value"):
          found[value.tag].append((event.step, value.simple_value))
  return found


def waits_for(later, op):
  """Returns whether the tensor or op `later` depends on `op` through data or control
  inputs.
  """
  seen, pending = set(), [getattr(later, "op", later)]
  while pending:
    current = pending.pop()
    if current not in seen:
      seen.add(current)
      pending += [t.op for t in current.inputs] + list(current.control_inputs)
  return op in seen


def call_on_replicas(step):
  """Calls a function on two replicas of a MirroredStrategy. Returns one op that groups
  the ops that it returned.
  """
  strategy = tf.distribute.MirroredStrategy(TWO_CPUS)
  with strategy.scope():
    return strategy.group(strategy.extended.call_for_each_replica(step))


def run_two_workers(module):
  """Runs a module in two processes on localhost, with TF_CONFIG. Returns the last line
  of each output, from JSON.
  """
  with contextlib.ExitStack() as opened:
    sockets = [opened.enter_context(socket.socket()) for _ in range(2)]
    for one in sockets:
      one.bind(("localhost", 0))
    workers = ["localhost:{}".format(one.getsockname()[1]) for one in sockets]
  variables = dict(environment(), TF_CPP_MIN_LOG_LEVEL="3", CUDA_VISIBLE_DEVICES="")
  processes = []
  for index in range(2):
    variables["TF_CONFIG"] = json.dumps(
      {"cluster": {"worker": workers}, "task": {"type": "worker", "index": index}}
    )
    command = [sys.executable, "-m", module]
    processes.append(
      subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=variables
      )
    )
  try:
    return [
      json.loads(process.communicate(timeout=150)[0].strip().splitlines()[-1])
      for process in processes
    ]
  finally:
    for process in processes:
      process.kill()


class ComplexDescent(tf.train.GradientDescentOptimizer):
  """Is gradient descent for complex resource variables, for which TensorFlow's
  optimizers have no kernels.
  """

  def _valid_dtypes(self):
    return {tf.float32, tf.complex64, tf.complex128}

  def _resource_apply_dense(self, grad, handle):
    return handle.assign_sub(grad)


class SkipsFiniteSteps(mp_compat.DynamicLossScale):
  """Updates like a dynamic loss scale, but skips every step."""

  def update(self, grads):
    update_op, should_apply = super().update(grads)
    return update_op, tf.logical_and(
      should_apply, tf.placeholder_with_default(False, [])
    )


class EagerTensors(mp_compat.LossScale):
  """A loss scale whose methods return tensors that its constructor made."""

  def __init__(self, applies):
    self.scale, self.applies = tf.constant(8.0), tf.constant(applies)

  def __call__(self):
    return self.scale

  def update(self, grads):
    return None, self.applies

  def get_config(self):
    return {}
