# SPDX-License-Identifier: Apache-2.0
"""Trains on several devices, with XLA and with the graph rewrite, with loss scaling and without (see gpu_parts.py)."""

import collections
import contextlib
import functools
from typing import Any, Callable, NamedTuple

import gpu_rows
import numpy as np
import tensorflow
import tensorflow.compat.v1 as tf

import mp_compat


class Program(NamedTuple):
  """A program that trains.

  Attributes:
    step: runs a step with the loss multiplied by its argument; returns the loss.
    read: returns the values of all variables as ({name: array}, loss scale or None).
    count_ops: returns how many ops of a step a predicate of NodeDefs accepts.
  """

  step: Callable[[float], Any]
  read: Callable[[], Any]
  count_ops: Callable[[Any], int]


def make_train_step(opt, width, weight):
  """Builds a step of the benchmark's dense model; returns its loss, which waits for the step."""
  import benchmark

  with tf.variable_scope("", reuse=tf.AUTO_REUSE, use_resource=True):
    loss = weight * benchmark.model_loss("model-dense", width)
    train_op = opt.minimize(loss)
  with tf.control_dependencies([train_op]):
    return tf.identity(loss)


def call_directly(train_step, weight):
  return train_step(weight)


def build_in_session(make_optimizer, device, width, call=call_directly, make_scope=contextlib.nullcontext, config=None):
  """Builds a program in a new graph and the context `make_scope()`; returns a Program.

  `call(train_step, weight)` returns the loss; `train_step` is a function of the weight.
  """
  with tf.Graph().as_default(), tf.device(device), make_scope():
    weight = tf.placeholder(tf.float32, [])
    opt = make_optimizer(tf.train.MomentumOptimizer(1e-6, 0.9))
    loss = call(functools.partial(make_train_step, opt, width), weight)
    session = tf.Session(config=config)
    session.run(tf.global_variables_initializer())
    variables = {}
    for variable in tf.global_variables():
      strategy = getattr(variable, "distribute_strategy", None)
      for number, copy in enumerate(strategy.experimental_local_results(variable) if strategy else [variable]):
        variables["{} on replica {}".format(variable.name, number)] = copy

  def read():
    values = session.run(variables)
    scales = [values.pop(name) for name in sorted(values) if "current_loss_scale" in name]
    for name in [name for name in values if "good_steps" in name]:
      del values[name]
    return values, scales[0] if scales else None

  def count_ops(predicate):
    metadata = tf.RunMetadata()
    session.run(loss, {weight: 1.0}, tf.RunOptions(output_partition_graphs=True), metadata)
    return sum(predicate(node) for part in metadata.partition_graphs for node in part.node)

  return Program(lambda value: session.run(loss, {weight: value}), read, count_ops)


def check_training(program):
  """Runs a step that overflows, and one that does not; returns what is wrong, as a list of strings."""
  before, scale = program.read()
  program.step(np.inf)
  after, lowered = program.read()
  wrong = ["an overflow changed " + name for name in before if before[name].tobytes() != after[name].tobytes()]
  if not lowered < scale:
    wrong.append("an overflow left the loss scale at {:g}".format(lowered))
  loss = float(np.mean(program.step(1.0)))
  changed, _ = program.read()
  if not np.isfinite(loss):
    wrong.append("the loss is {}".format(loss))
  if all(changed[name].tobytes() == after[name].tobytes() for name in after):
    wrong.append("a step without overflow changed no variable")
  return wrong


def compare_training(label, programs, rounds, seconds, op=None, is_op=None):
  """Measures programs in turn and checks the last one, which has loss scaling; yields a row for each.

  Args:
    label: what the programs have in common, for the names of the rows.
    programs: {name: Program}.
    rounds: the number of steps of each.
    seconds: the time after which the measurement stops.
    op: the name of ops that the last program must have: otherwise what is to be tested was not in use.
    is_op: a predicate of NodeDefs: whether it is such an op.
  """
  import benchmark

  steps = collections.OrderedDict((name, functools.partial(program.step, 1.0)) for name, program in programs.items())
  times = benchmark.take_turns(steps, rounds, seconds, label)
  names = list(programs)
  for name in names[:-1]:
    yield gpu_rows.make_row("{}, {}".format(label, name), gpu_rows.median(times[name]))
  last = programs[names[-1]]
  wrong, found = check_training(last), ""
  if op:
    count = last.count_ops(is_op)
    found = ", {} {}".format(count, op)
    wrong += ["no {}".format(op)] * (not count)
  yield gpu_rows.make_row(
    "{}, {}".format(label, names[-1]),
    gpu_rows.median(times[names[-1]]),
    "; ".join(wrong) or "loss finite, overflow skipped, scale lowered" + found,
    bool(wrong),
  )


def with_and_without(build):
  return collections.OrderedDict([("unwrapped", build(lambda opt: opt)), ("mp_compat", build(gpu_rows.wrap))])


def train_mirrored(devices=("/gpu:0", "/gpu:1"), width=1024, rounds=60, seconds=20):
  """Trains with MirroredStrategy on two devices, which may be parts of one GPU: NCCL does not work on those."""

  def make_scope():
    reduction = tensorflow.distribute.ReductionToOneDevice()
    return tf.distribute.MirroredStrategy(list(devices), cross_device_ops=reduction).scope()

  def call(train_step, weight):
    strategy = tf.distribute.get_strategy()
    losses = strategy.extended.call_for_each_replica(train_step, args=(weight,))
    return strategy.experimental_local_results(losses)

  programs = with_and_without(lambda wrapper: build_in_session(wrapper, devices[0], width, call, make_scope))
  return compare_training(
    "MirroredStrategy",
    programs,
    rounds,
    seconds,
    "ops on " + devices[1],
    lambda node: gpu_rows.is_on(node.device, devices[1]),
  )


def train_clustered(device=gpu_rows.GPU, width=1024, rounds=60, seconds=20):
  """Trains with XLA's auto-clustering."""
  config = tf.ConfigProto(allow_soft_placement=True)
  config.graph_options.optimizer_options.global_jit_level = tf.OptimizerOptions.ON_1
  programs = with_and_without(lambda wrapper: build_in_session(wrapper, device, width, config=config))
  return compare_training(
    "auto-clustering", programs, rounds, seconds, "XLA clusters", lambda node: node.op in ("_XlaRun", "XlaLaunch")
  )


def train_compiled(device=gpu_rows.GPU, width=1024, rounds=60, seconds=20):
  """Trains in a function that XLA compiles."""
  import benchmark

  option = "experimental_compile" if tf.VERSION.startswith("2.4.") else "jit_compile"

  def call(train_step, weight):
    with tf.variable_scope("", use_resource=True):  # A compiled function makes no variables.
      benchmark.model_loss("model-dense", width)
    return tensorflow.function(train_step, **{option: True})(weight)

  programs = with_and_without(lambda wrapper: build_in_session(wrapper, device, width, call))
  return compare_training("jit_compile", programs, rounds, seconds)


def rewrite_session(device=gpu_rows.GPU, width=1024, rounds=60, seconds=20):
  """Trains in Sessions: in float32, with the graph rewrite alone, and with the graph rewrite and loss scaling."""
  programs = collections.OrderedDict(float32=build_in_session(lambda opt: opt, device, width))
  with mp_compat.mixed_precision_graph_rewrite():
    programs["rewrite"] = build_in_session(lambda opt: opt, device, width)
    programs["rewrite and mp_compat"] = build_in_session(mp_compat.enable_mixed_precision_graph_rewrite, device, width)
  half = tf.float16.as_datatype_enum
  yield from compare_training(
    "Session",
    programs,
    rounds,
    seconds,
    "MatMul ops in float16",
    lambda node: "MatMul" in node.op and node.attr["T"].type == half,
  )


def build_keras(make_optimizer, device, width):
  """Builds a Keras model of four dense layers that trains eagerly; returns a Program, whose ops are not counted."""
  keras = tensorflow.keras
  x = np.random.RandomState(0).normal(size=[width, width]).astype(np.float32)
  with tf.device(device):
    model = keras.Sequential([keras.layers.Dense(width, "relu") for _ in range(3)] + [keras.layers.Dense(1)])
    opt = make_optimizer(keras.optimizers.SGD(1e-3, momentum=0.9))
    # Keras 3 compiles with XLA by default, which excludes the rewrite.
    model.compile(opt, "mse", **({"jit_compile": False} if hasattr(model, "jit_compile") else {}))

  def step(weight):
    model.reset_metrics()  # Keras 3 returns the mean of the losses since then.
    with tf.device(device):
      return model.train_on_batch(x, np.float32(weight) * x[:, :1])

  def read():
    values = {"weight {}".format(number): value for number, value in enumerate(model.get_weights())}
    return values, float(opt.loss_scale) if hasattr(opt, "loss_scale") else None

  return Program(step, read, lambda predicate: 0)


def rewrite_keras(device=gpu_rows.GPU, width=1024, rounds=60, seconds=20):
  """Trains a Keras model: in float32, with the graph rewrite alone, and with the graph rewrite and loss scaling."""
  import benchmark

  program = build_keras(lambda opt: opt, device, width)
  times = benchmark.take_turns({"float32": functools.partial(program.step, 1.0)}, rounds, seconds, "Keras")
  yield gpu_rows.make_row("Keras, float32", gpu_rows.median(times["float32"]))
  with mp_compat.mixed_precision_graph_rewrite():
    programs = collections.OrderedDict(rewrite=build_keras(lambda opt: opt, device, width))
    programs["rewrite and mp_compat"] = build_keras(mp_compat.enable_mixed_precision_graph_rewrite, device, width)
    yield from compare_training("Keras", programs, rounds, seconds)
