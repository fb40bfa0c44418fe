# SPDX-License-Identifier: Apache-2.0
"""Measures the cost of loss scaling: compares its variants in one process.

    scripts/benchmark            # every workload; about half an hour on two cores
    scripts/benchmark --quick    # three of them, in two minutes

For each workload and optimizer, each variant has its own graph and Session. The
variants take turns after every step:

    plain             the optimizer alone
    barrier           a conditional whose predicate only waits for all unscaled gradients: the minimum cost of a check
    check             the optimizer alone, and the finite check of every gradient, for which nothing waits
    tensorflow        TensorFlow's class with its dynamic scale
    contrib           contrib's class with its exponential manager (TensorFlow 1.15)
    dynamic, fixed    mp_compat with a dynamic and a fixed scale
    unchecked         mp_compat with a fixed scale and skip_nonfinite=False: no check, no conditional
    accumulated       mp_compat with a dynamic scale and a GradientAccumulator: adds and applies one micro-batch

The workloads whose names end in +norm and +global_norm clip their gradients by each
gradient's norm and by the norm of all; there, a variant more

    as passed         mp_compat with a dynamic scale and check_computed_gradients=False: the least that a check reads

The workloads whose names end in +monitoring run in a MonitoredSession with a dynamic
scale, and compare what observes it: `plain` with nothing, the hooks (GradientRangesHook
with a record in every step and in none but the first), and what is fetched with the
train op. Hooks count as built with the graph.

The workloads whose names end in +dtypes compare float32 (`plain`) with float16 and a
dynamic scale: small models, because old versions of TensorFlow take long for float16
on CPUs.

Prints for each variant:

    ms, quartiles           the median and the quartiles of the time of a step
    overhead                the median of the differences to `plain` in the same round, in ms
    /tensorflow, /barrier   the ratios of the overhead to those of TensorFlow's class and of the barrier
    built, run              the number of ops in the graph and its functions, and after TensorFlow's optimizations
    build, first            the time to build the graph after the loss, and the time of the first step
    memory                  with --memory: the peak resident memory of a separate process that runs the first steps

Gradients are the sums of a variable and a scalar, so that each one is in a buffer of
its own, as after a backward pass; the workloads model-... train a model. Writes
benchmark.json to --output.
"""

import functools
import json
import os
import platform
import resource
import subprocess
import sys
import time

sys.path.append(
  os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "examples")
)

from absl import app
from absl import flags
import common_flags
import numpy as np
import processor
import tensorflow.compat.v1 as tf
import tqdm

import mp_compat
from mp_compat.core import finite_check
from mp_compat.core import gradients

NATIVE = tf.train.experimental
OPTIMIZERS = {
  "sgd": lambda base: base(tf.train.GradientDescentOptimizer)(1e-6),
  "momentum": lambda base: base(tf.train.MomentumOptimizer)(1e-6, 0.9),
  "adam": lambda base: base(tf.train.AdamOptimizer)(1e-6),
}


def resnet50():
  shapes, width = [(7, 7, 3, 64), (64,), (64,)], 64
  for blocks, inner in zip((3, 4, 6, 3), (64, 128, 256, 512)):
    for block in range(blocks):
      kernels = [(1, 1, width, inner), (3, 3, inner, inner), (1, 1, inner, 4 * inner)]
      kernels += [(1, 1, width, 4 * inner)] * (block == 0)
      shapes += [
        shape for kernel in kernels for shape in (kernel, kernel[-1:], kernel[-1:])
      ]
      width = 4 * inner
  return shapes + [(2048, 1000), (1000,)]


def bert_base():
  layer = [(768, 768), (768,)] * 4 + [
    (768,),
    (768,),
    (768, 3072),
    (3072,),
    (3072, 768),
    (768,),
    (768,),
    (768,),
  ]
  return (
    [(30522, 768), (512, 768), (2, 768), (768,), (768,)]
    + layer * 12
    + [(768, 768), (768,)]
  )


SHAPES = {
  "resnet50": resnet50,
  "bert-base": bert_base,
  "small-100": lambda: [(1024,)] * 100,
  "small-1000": lambda: [(1024,)] * 1000,
  "small-4000": lambda: [(1024,)] * 4000,
  "float16": lambda: [(1024,)] * 500,
  "large-1": lambda: [(25 * 10**6,)],
}
CLIPS = {
  "norm": lambda grads: [tf.clip_by_norm(grad, 1.0) for grad in grads],
  "global_norm": lambda grads: tf.clip_by_global_norm(grads, 1.0)[0],
}
ROWS = 4096  # rows of the embedding that have a gradient
WORKLOADS = list(SHAPES) + ["embedding", "model-dense", "model-convolutions"]
WORKLOADS += ["model-dense+monitoring", "model-layers+monitoring"]
WORKLOADS += ["model-small-dense+dtypes", "model-small-convolutions+dtypes"]
WORKLOADS += [
  name + "+" + clip
  for name in ("resnet50", "bert-base", "small-1000", "small-4000")
  for clip in CLIPS
]
RATIOS = {"to_tensorflow": "tensorflow", "to_barrier": "barrier"}
FLAGS = flags.FLAGS
flags.DEFINE_bool("quick", False, "Three workloads, in two minutes.")
flags.DEFINE_multi_enum("workload", None, WORKLOADS, "Only this one.")
flags.DEFINE_multi_enum("optimizer", None, sorted(OPTIMIZERS), "Only this one.")
flags.DEFINE_integer("rounds", 200, "Steps of each variant.", lower_bound=1)
flags.DEFINE_float("seconds", 40, "For a workload at most.", lower_bound=0.0)
flags.DEFINE_integer("threads", os.cpu_count(), "Of a Session.", lower_bound=1)
flags.DEFINE_bool(
  "memory", False, "Measure memory, too, in a process for each variant."
)
flags.DEFINE_string("output", "runs", "Directory for benchmark.json.")
flags.DEFINE_list(
  "peak",
  None,
  "For processes that the program starts: workload, optimizer and variant.",
)

QUICK = {
  "resnet50": ["sgd"],
  "resnet50+global_norm": ["sgd"],
  "small-1000": ["sgd"],
  "model-dense": ["sgd"],
}


def standing_in(grads):
  """Returns a function that extends an optimizer class so that `grads()` are its
  gradients.
  """

  def extend(optimizer):
    class StandIn(optimizer):
      """Returns the given gradients; computes none."""

      def compute_gradients(self, loss, var_list=None, **kwargs):
        del loss, kwargs
        return list(zip(grads(), var_list))

    return StandIn

  return extend


def model_loss(workload):
  """Returns the loss of a model with a real backward pass: of more than 100 ms on two
  cores, or of 100 small layers.
  """
  if workload == "model-layers":
    hidden = tf.random_normal([32, 64], seed=1, dtype=tf.float16)
    with tf.variable_scope("", custom_getter=mp_compat.float32_variable_storage_getter):
      for index in range(100):
        kernel = tf.get_variable(
          "kernel_{}".format(index),
          [64, 64],
          tf.float16,
          tf.glorot_uniform_initializer(seed=1),
        )
        hidden += 0.1 * tf.nn.relu(tf.matmul(hidden, kernel))
    return tf.reduce_mean(tf.square(tf.cast(hidden, tf.float32)))
  small = workload.startswith("model-small-")
  if workload.endswith("dense"):
    width = 256 if small else 1024
    inputs, shape, layer = [width, width], [width, width], tf.matmul
  else:
    inputs, shape = [4, 32, 32, 32] if small else [16, 64, 64, 32], [3, 3, 32, 32]
    layer = functools.partial(tf.nn.conv2d, strides=1, padding="SAME")
  hidden = tf.random_normal(inputs, seed=1, dtype=tf.get_variable_scope().dtype)
  for index in range(8):
    kernel = tf.get_variable(
      "kernel_{}".format(index),
      shape,
      initializer=tf.glorot_uniform_initializer(seed=index),
    )
    bias = tf.get_variable(
      "bias_{}".format(index), shape[-1:], initializer=tf.zeros_initializer()
    )
    hidden = tf.nn.relu(layer(hidden, kernel) + bias)
  return tf.reduce_mean(tf.square(tf.cast(hidden, tf.float32)))


def make_task(workload):
  """Returns the variables of a workload, its loss, and a function that extends an
  optimizer class for it.
  """
  if workload.startswith("model-"):
    loss = model_loss(workload)
    return tf.trainable_variables(), loss, lambda optimizer: optimizer
  loss = tf.placeholder_with_default(1.0, [])
  offset = tf.get_variable("offset", initializer=0.0)
  if workload == "embedding":
    table = tf.get_variable("table", [10**6, 64], initializer=tf.zeros_initializer())
    rows = tf.get_variable("rows", [ROWS, 64], initializer=tf.zeros_initializer())
    indices = tf.constant(np.random.RandomState(0).choice(10**6, ROWS, replace=False))
    return (
      [table],
      loss,
      standing_in(lambda: [tf.IndexedSlices(rows + offset, indices, tf.shape(table))]),
    )
  dtype = tf.float16 if workload == "float16" else tf.float32
  variables, sources = [
    [
      tf.get_variable(
        "{}_{}".format(name, i),
        shape,
        dtype if i % 2 else tf.float32,
        tf.zeros_initializer(),
      )
      for i, shape in enumerate(SHAPES[workload]())
    ]
    for name in ("variable", "source")
  ]
  return (
    variables,
    loss,
    standing_in(lambda: [source + tf.cast(offset, source.dtype) for source in sources]),
  )


class Barrier:
  """An optimizer that waits for all gradients and applies them, finite or not."""

  def __init__(self, opt):
    self._opt = opt

  def minimize(self, loss, var_list):
    reciprocal = 1 / tf.get_variable("scale", initializer=np.float32(8))
    pairs = [
      (
        gradients.map_values(
          lambda values: values * tf.cast(reciprocal, values.dtype), grad
        ),
        variable,
      )
      for grad, variable in self._opt.compute_gradients(loss, var_list=var_list)
    ]
    with tf.control_dependencies(gradients.values_of([grad for grad, _ in pairs])):
      arrived = reciprocal > 0
    with tf.variable_scope("", use_resource=True):
      return tf.cond(arrived, lambda: self._opt.apply_gradients(pairs), tf.no_op)


class CheckedInParallel:
  """An optimizer that checks its gradients and applies them, finite or not, without
  waiting for the check.
  """

  def __init__(self, opt):
    self._opt = opt

  def minimize(self, loss, var_list):
    pairs = self._opt.compute_gradients(loss, var_list=var_list)
    seen = tf.get_variable("seen", initializer=False)
    recorded = seen.assign(
      finite_check.all_finite(gradients.values_of([grad for grad, _ in pairs]))
    )
    return tf.group(self._opt.apply_gradients(pairs), recorded)


class Accumulated:
  """An optimizer that adds the gradients to a window and applies the window, in two
  runs.
  """

  def __init__(self, opt):
    self._opt = opt
    self._window = mp_compat.GradientAccumulator(opt)

  def minimize(self, loss, var_list):
    add = self._window.add(self._opt.compute_gradients(loss, var_list=var_list))
    return [add, self._window.apply_gradients(self._window.mean())]


class Observed:
  """An optimizer whose steps are observed by a hook, or by what is fetched with the
  train op.
  """

  def __init__(self, opt, make_hook=None, fetch=None):
    self._opt, self._make_hook, self._fetch = opt, make_hook, fetch

  def minimize(self, loss, var_list):
    train_op = self._opt.minimize(loss, var_list=var_list)
    self.hooks = [self._make_hook(self._opt)] if self._make_hook else []
    for hook in self.hooks:
      hook.begin()
      hook.begin = lambda: None  # the session would call it again
    return [[train_op, self._fetch(self._opt)]] if self._fetch else train_op


HOOKS = {
  "LossScaleHook": mp_compat.LossScaleHook,
  "StopAtAttemptHook": lambda opt: mp_compat.StopAtAttemptHook(opt, 10**9),
  "GradientRangesHook": lambda opt: mp_compat.GradientRangesHook(opt, 10**9),
  "recording": lambda opt: mp_compat.GradientRangesHook(opt, 1),
}
FETCHES = {
  "step_applied": lambda opt: opt.step_applied,
  "loss_scale": lambda opt: opt.loss_scale(),
  "summaries": mp_compat.loss_scale_summaries,
  "nonfinite_gradients": mp_compat.nonfinite_gradients,
  "gradient_ranges": mp_compat.gradient_ranges,
}


def observed_variants():
  """Returns functions of an optimizer that wrap and observe it, by name."""

  def observe(**how):
    return lambda opt: Observed(
      mp_compat.MixedPrecisionLossScaleOptimizer(opt, "dynamic"), **how
    )

  hooks = {name: observe(make_hook=make_hook) for name, make_hook in HOOKS.items()}
  return {
    "plain": observe(),
    **hooks,
    **{name: observe(fetch=fetch) for name, fetch in FETCHES.items()},
  }


class Clipped:
  """An optimizer whose gradients are clipped between `compute_gradients` and
  `apply_gradients`.
  """

  def __init__(self, opt, clip):
    self._opt, self._clip = opt, clip

  def minimize(self, loss, var_list):
    grads, clipped_variables = zip(
      *self._opt.compute_gradients(loss, var_list=var_list)
    )
    return self._opt.apply_gradients(
      list(zip(CLIPS[self._clip](grads), clipped_variables))
    )


def variants(workload):
  """Returns functions of an optimizer that wrap it, by name."""
  if workload.endswith("+monitoring"):
    return observed_variants()
  if workload.endswith("+dtypes"):
    return {
      "plain": lambda opt: opt,
      "float16": lambda opt: mp_compat.MixedPrecisionLossScaleOptimizer(opt, "dynamic"),
    }
  made = {
    "plain": lambda opt: opt,
    "barrier": Barrier,
    "check": CheckedInParallel,
    "tensorflow": lambda opt: NATIVE.MixedPrecisionLossScaleOptimizer(
      opt, NATIVE.DynamicLossScale()
    ),
    "dynamic": lambda opt: mp_compat.MixedPrecisionLossScaleOptimizer(opt, "dynamic"),
    "fixed": lambda opt: mp_compat.MixedPrecisionLossScaleOptimizer(opt, 8.0),
    "unchecked": lambda opt: mp_compat.MixedPrecisionLossScaleOptimizer(
      opt, 8.0, skip_nonfinite=False
    ),
    "accumulated": lambda opt: Accumulated(
      mp_compat.MixedPrecisionLossScaleOptimizer(opt, "dynamic")
    ),
  }
  if tf.VERSION.startswith("1."):
    from tensorflow.contrib import mixed_precision

    made["contrib"] = lambda opt: mixed_precision.LossScaleOptimizer(
      opt, mixed_precision.ExponentialUpdateLossScaleManager(8.0, 2000)
    )
  clip = workload.partition("+")[2]
  if not clip:
    return made
  made["as passed"] = lambda opt: mp_compat.MixedPrecisionLossScaleOptimizer(
    opt, "dynamic", check_computed_gradients=False
  )
  names = ["plain", "tensorflow", "dynamic", "as passed", "fixed"] + ["contrib"] * (
    "contrib" in made
  )
  return {name: lambda opt, make=made[name]: Clipped(make(opt), clip) for name in names}


class Built:
  """A variant's graph and Session, with their costs: `ops`, `ops_run`, `build_seconds`
  and `first_seconds`.
  """

  def __init__(self, workload, optimizer, variant, threads):
    with tf.Graph().as_default() as graph:
      tf.set_random_seed(1)
      with tf.variable_scope(
        "",
        use_resource=True,
        dtype=tf.float16 if variant == "float16" else tf.float32,
        custom_getter=mp_compat.float32_variable_storage_getter,
      ):
        variables, loss, extend = make_task(workload.partition("+")[0])
        began = time.perf_counter()
        wrapped = variants(workload)[variant](OPTIMIZERS[optimizer](extend))
        train_op = wrapped.minimize(loss, var_list=variables)
        self.build_seconds = time.perf_counter() - began
      definition = graph.as_graph_def()
      self.ops = len(definition.node) + sum(
        len(function.node_def) for function in definition.library.function
      )
      config = tf.ConfigProto(
        intra_op_parallelism_threads=threads, inter_op_parallelism_threads=threads
      )
      if hasattr(wrapped, "hooks"):
        session = tf.train.MonitoredSession(
          tf.train.ChiefSessionCreator(config=config), wrapped.hooks
        )
      else:
        session = tf.Session(config=config)
        session.run(
          [tf.global_variables_initializer(), tf.local_variables_initializer()]
        )
      self._session, self._runs = (
        session,
        train_op if isinstance(train_op, list) else [train_op],
      )
      began = time.perf_counter()
      self.step()
      self.first_seconds = time.perf_counter() - began
      metadata = tf.RunMetadata()
      self.step(
        options=tf.RunOptions(output_partition_graphs=True), run_metadata=metadata
      )
      self.ops_run = sum(len(part.node) for part in metadata.partition_graphs)

  def step(self, **kwargs):
    for run in self._runs:
      self._session.run(run, **kwargs)


def peak_memory():
  """Returns the peak resident memory of this process in MB."""
  return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def peak_of_process(workload, optimizer, variant, threads):
  """Returns the peak memory, in MB, of a separate process that runs the first steps;
  None if the process fails.
  """
  done = subprocess.run(
    [
      sys.executable,
      __file__,
      "--threads",
      str(threads),
      "--peak",
      ",".join([workload, optimizer, variant]),
    ],
    stdout=subprocess.PIPE,
    stderr=subprocess.DEVNULL,
    check=False,
  )
  return float(done.stdout) if done.returncode == 0 else None


def measure(workload, optimizer, rounds, seconds, threads, with_memory):
  """Measures the variants of one workload; returns a dict of results for each.

  They take turns. Three further rounds come first. After `seconds`, and at least nine
  rounds, the current one is the last.
  """
  built = {}
  for variant in variants(workload):
    try:
      built[variant] = Built(workload, optimizer, variant, threads)
    except TypeError as error:  # TensorFlow's class does not support float16 gradients.
      print("  {}: {}".format(variant, str(error).split("\n")[0][:100]))
  times = {variant: [] for variant in built}
  end = time.perf_counter() + seconds
  for turn in tqdm.trange(
    rounds + 3, desc="{} {}".format(workload, optimizer), disable=None, leave=False
  ):
    for variant, program in built.items():
      began = time.perf_counter()
      program.step()
      if turn >= 3:
        times[variant].append(1e3 * (time.perf_counter() - began))
    if time.perf_counter() > end and turn > 10:
      break
  rows = {}
  for variant, program in built.items():
    low, middle, high = np.percentile(times[variant], [25, 50, 75]).tolist()
    rows[variant] = dict(
      milliseconds=middle,
      quartiles=[low, high],
      overhead=float(np.median(np.subtract(times[variant], times["plain"]))),
      ops=program.ops,
      ops_run=program.ops_run,
      build_seconds=program.build_seconds,
      first_seconds=program.first_seconds,
      rounds=len(times[variant]),
      memory=peak_of_process(workload, optimizer, variant, threads)
      if with_memory
      else None,
    )
  for row in rows.values():
    for ratio, other in RATIOS.items():
      row[ratio] = row["overhead"] / rows[other]["overhead"] if other in rows else None
  return rows


def show(workload, optimizer, rows):
  print("{} {}, {} rounds".format(workload, optimizer, rows["plain"]["rounds"]))
  line = "  {:<20}{:>9}  {:<17}{:>9}{:>12}{:>9}{:>8}{:>8}{:>8}{:>8}{:>9}"
  titles = [
    "ms",
    "quartiles",
    "overhead",
    "/tensorflow",
    "/barrier",
    "built",
    "run",
    "build",
    "first",
    "memory",
  ]
  print(line.format("", *titles))
  for variant, row in rows.items():
    numbers = [
      "{:.2f}".format(row["milliseconds"]),
      "{:.2f} to {:.2f}".format(*row["quartiles"]),
      "{:.2f}".format(row["overhead"]),
      *(
        "" if row[ratio] is None or variant == "plain" else "{:.2f}".format(row[ratio])
        for ratio in RATIOS
      ),
      row["ops"],
      row["ops_run"],
      "{:.2f}s".format(row["build_seconds"]),
      "{:.2f}s".format(row["first_seconds"]),
      "" if row["memory"] is None else "{:.0f} MB".format(row["memory"]),
    ]
    print(line.format(variant, *numbers), flush=True)


def main(argv):
  common_flags.no_arguments(argv)
  tf.disable_eager_execution()
  tf.logging.set_verbosity(tf.logging.ERROR)
  if FLAGS.peak:
    built = Built(*FLAGS.peak, FLAGS.threads)
    for _ in range(5):
      built.step()
    print(peak_memory())
    return
  plan = (
    QUICK
    if FLAGS.quick
    else {
      workload: FLAGS.optimizer or sorted(OPTIMIZERS)
      for workload in FLAGS.workload or WORKLOADS
    }
  )
  machine = "{}, {} threads, TensorFlow {}, Python {}".format(
    processor.describe(), FLAGS.threads, tf.VERSION, platform.python_version()
  )
  print(machine)
  results, seconds = [], 12 if FLAGS.quick else FLAGS.seconds
  os.makedirs(FLAGS.output, exist_ok=True)
  for workload, optimizers in plan.items():
    for optimizer in optimizers:
      rows = measure(
        workload, optimizer, FLAGS.rounds, seconds, FLAGS.threads, FLAGS.memory
      )
      show(workload, optimizer, rows)
      results.append(dict(workload=workload, optimizer=optimizer, variants=rows))
      with open(os.path.join(FLAGS.output, "benchmark.json"), "w") as file:
        json.dump(dict(machine=machine, results=results), file, indent=2)


if __name__ == "__main__":
  app.run(main)
