# SPDX-License-Identifier: Apache-2.0
"""The parts of `scripts/gpu`, each in a process of its own: `python scripts/gpu_parts.py PART FILE`.

A part consists of pieces. Each piece yields rows. Writes each row to FILE as soon as it is known, as a line of JSON:

    name           what was measured or checked
    milliseconds   the median time of a step; null if no time was measured
    result         text
    failed         whether a check failed; an error in a piece is a row that failed, too
    details        numbers and names, different in each part

`digits`, `programs` and `benchmark` leave the placement of ops to TensorFlow, which prefers a GPU. The other pieces
take a device, so that tests can run them on a CPU.
"""

import collections
import contextlib
import functools
import glob
import importlib
import json
import os
import platform
import sys
import time
import traceback
from typing import Any, Callable, NamedTuple

import numpy as np
import tensorflow
import tensorflow.compat.v1 as tf

import mp_compat

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
GPU = "/gpu:0"


def make_row(name, milliseconds=None, result="", failed=False, **details):
  return dict(name=name, milliseconds=milliseconds, result=result, failed=failed, details=details)


def median(seconds):
  """Returns the median of times in seconds, in milliseconds."""
  return 1e3 * float(np.median(seconds))


def wrap(opt):
  return mp_compat.MixedPrecisionLossScaleOptimizer(opt, "dynamic")


# The demo's network.


class DigitsRun:
  """A run of the demo's network, with its graph and Session.

  `batches` are (images, masks). The global step selects one, so that runs with skipped steps train on the same ones.
  """

  def __init__(self, run, layers, steps, learning_rate, batches):
    import train_digits as demo

    with tf.Graph().as_default():
      tf.set_random_seed(0)
      self._images = tf.placeholder(tf.float32, [None, demo.SIZE, demo.SIZE, 1])
      self._masks = tf.placeholder(tf.int32, [None, demo.MASK_SIZE, demo.MASK_SIZE])
      logits, _ = demo.network(self._images, run.dtype, layers)
      _, train_op = demo.minimize(run, demo.mean_loss(logits, self._masks), steps, learning_rate)
      with tf.control_dependencies([train_op]):
        self._step = tf.train.get_global_step().read_value()
      self._accuracy = demo.ink_accuracy(logits, self._masks)
      self._session = tf.Session()
      self._session.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
    self._batches, self.global_step = batches, 0

  def _run(self, fetch, examples):
    return self._session.run(fetch, dict(zip((self._images, self._masks), examples)))

  def step(self):
    self.global_step = int(self._run(self._step, self._batches[self.global_step % len(self._batches)]))

  def accuracy(self, examples):
    return float(self._run(self._accuracy, examples))


def train_digits(steps=160, batch=64, width=1, seconds=60):
  """Trains the demo's network in each of its precisions, in turn; yields a row for each.

  The accuracy on test digits in float16 with mp_compat must be that in float32, with a tolerance of 0.05. float32 is
  TensorFlow's default, which uses TF32 on GPUs that have it.

  Args:
    steps: the number of steps. Skipped steps are made up for, untimed.
    batch: the number of digits in a step.
    width: a factor of the number of filters in every layer but the last, and divisor of the learning rate.
    seconds: the time after which training in turn stops.
  """
  import benchmark
  import train_digits as demo

  data, random = demo.Digits(), np.random.RandomState(0)
  batches = [data.examples(random.choice(data.train, batch), random) for _ in range(32)]
  test = data.examples(data.test, random)
  layers = [layer._replace(filters=width * layer.filters) for layer in demo.LAYERS[:-1]] + [demo.LAYERS[-1]]
  runs = collections.OrderedDict(
    (run.name, DigitsRun(run, layers, steps, demo.LEARNING_RATE / width, batches)) for run in demo.RUNS
  )
  in_turn = collections.OrderedDict((name, run.step) for name, run in runs.items())
  times = benchmark.take_turns(in_turn, steps - 3, seconds, "digits")
  last_step = runs["float32"].global_step
  for run in runs.values():
    for _ in range(2 * last_step):  # at most, if it overflows again and again
      if run.global_step < last_step:
        run.step()
  accuracies = {name: run.accuracy(test) for name, run in runs.items()}
  for run in demo.RUNS:
    yield make_row(
      "{}, batch {}, width {}".format(run.name, batch, width),
      median(times[run.name]),
      "accuracy {:.1%} after {} steps".format(accuracies[run.name], runs[run.name].global_step),
      run.loss_scaling and accuracies[run.name] < accuracies["float32"] - 0.05,
      accuracy=accuracies[run.name],
    )


# The programs of tests/programs.


def compare_program(row):
  """Trains a program of tests/programs without loss scaling, with TensorFlow's class and with mp_compat.

  Returns (status, text). The status "equal" means that all variables are equal to the bit after every step, and that
  overflows change nothing but the loss scale.
  """
  from tests import testing
  from tests.programs import table

  variant = row.variants[0]
  try:
    reference = table.run(row, variant, None)
  except Exception as error:
    if table.resolve_reason(row.unwrapped_fails, variant) is None:
      return "fails without loss scaling, too", str(error)
    reference = None
  try:
    table.compare_with_reference(row, variant)
    table.compare_with_tensorflow(row, variant)
  except AssertionError as error:
    if reference:
      with testing.control_flow(variant.control_flow):
        again = table.train(row, variant, None)
      try:
        testing.assert_same(again.clean, reference.clean)
      except AssertionError:
        return "differs from run to run without loss scaling, too", str(error)
    return "different", str(error)
  except BaseException as error:  # pytest's exceptions are no subclasses of Exception.
    try:
      table.run(row, variant, mp_compat)
    except Exception:
      return "fails", str(error)
    return "TensorFlow's class fails, or works unexpectedly", str(error)
  return "equal", ""


def compare_programs(names=None, seconds=180):
  """Compares the programs `names`; by default all for which `seconds` suffice. Yields one row."""
  for path in sorted(glob.glob(os.path.join(ROOT, "tests", "programs", "test_*.py"))):
    importlib.import_module("tests.programs." + os.path.basename(path)[: -len(".py")])
  from tests.programs import table

  rows = [table.PROGRAMS[name] for name in names or table.PROGRAMS]
  rows = [row for row in rows if all(row.needs.values()) and not row.limit]
  rows.sort(key=lambda row: row.slow)
  found, end = collections.OrderedDict(), time.perf_counter() + seconds
  for row in rows:
    if time.perf_counter() > end:
      status, text = "left out after {} s".format(seconds), ""
    else:
      print(row.name, file=sys.stderr, flush=True)  # If a program ends the process, the log names it last.
      status, text = compare_program(row)
    found.setdefault(status, collections.OrderedDict())[row.name] = text
  wrong = [name for status in ("different", "fails") for name in found.get(status, [])]
  yield make_row(
    "programs",
    result=", ".join("{} {}".format(len(programs), status) for status, programs in found.items()),
    failed=bool(wrong) or "equal" not in found,
    wrong=wrong,
    found=found,
  )


# Transfers between devices.


def clip(opt):
  """Returns an optimizer with loss scaling that clips the gradients by their global norm."""

  class Clipping:
    def __init__(self):
      self._opt = wrap(opt)

    def minimize(self, loss):
      grads, variables = zip(*[pair for pair in self._opt.compute_gradients(loss) if pair[0] is not None])
      return self._opt.apply_gradients(zip(mp_compat.clip_by_global_norm(grads, 1.0)[0], variables))

  return Clipping()


def fix(opt):
  return mp_compat.MixedPrecisionLossScaleOptimizer(opt, 128.0)


def is_on(name, device):
  """Returns whether the full name of a device, as in a NodeDef, is that of `device`, such as "/gpu:0"."""
  return name.lower().endswith("device:" + device.strip("/"))


def find_transfers(wrap, device):
  """Returns the floating-point tensors that a training step sends from one device or memory to another.

  The model has dense gradients of up to 256 KB and an IndexedSlices. The full trace of a step with finite gradients and
  that of an overflow together contain the shapes of the tensors in all branches.

  Returns:
    A Counter of (dtype, shape), without scalars; the shape is None for a tensor that neither trace contains. And a
    Counter of the devices of all ops.
  """
  import benchmark

  from tests import testing

  shapes, options = {}, tf.RunOptions(trace_level=tf.RunOptions.FULL_TRACE, output_partition_graphs=True)
  with tf.Graph().as_default(), tf.device(device):
    x = tf.placeholder(tf.float32, [3])
    loss = testing.model(x, use_resource=True) + x[0] * benchmark.model_loss("model-dense", 256)
    train_op = wrap(tf.train.MomentumOptimizer(1e-6, 0.9)).minimize(loss)
    with tf.Session() as session:
      session.run(tf.global_variables_initializer())
      for value in (1.0, np.inf):
        metadata = tf.RunMetadata()
        session.run(train_op, {x: [value] * 3}, options, metadata)
        for node in [node for stats in metadata.step_stats.dev_stats for node in stats.node_stats]:
          for output in node.output:
            shapes[node.node_name, output.slot] = tuple(dim.size for dim in output.tensor_description.shape.dim)
  nodes = [node for part in metadata.partition_graphs for node in part.node]
  transfers = collections.Counter()
  for node in nodes:
    if node.op in ("_Send", "_HostSend"):
      source, _, slot = node.input[0].partition(":")
      dtype, shape = tf.as_dtype(node.attr["T"].type), shapes.get((source, int(slot or 0)))
      if dtype.is_floating and (shape is None or np.prod(shape) > 1):
        transfers[dtype.name, shape] += 1
  return transfers, collections.Counter(node.device for node in nodes)


def trace(device=GPU, wrappers=(("dynamic", wrap), ("fixed", fix), ("clipped", clip))):
  """Checks that loss scaling sends no gradient between host and device; yields a row for each of `wrappers`."""
  unwrapped, _ = find_transfers(lambda opt: opt, device)
  for name, wrapper in wrappers:
    transfers, ops = find_transfers(wrapper, device)
    added = ["{} of {} {}".format(count, *tensor) for tensor, count in (transfers - unwrapped).items()]
    yield make_row(
      name,
      result="transfers: {} without loss scaling, {} added; ops: {}".format(
        sum(unwrapped.values()),
        ", ".join(added) or "none",
        ", ".join("{} on {}".format(count, name.rpartition("device:")[2]) for name, count in sorted(ops.items())),
      ),
      failed=bool(added) or not any(is_on(name, device) for name in ops),
      added=added,
      ops=sum(ops.values()),
    )


# The benchmark.


def measure_workload(workload, rounds=100, seconds=20):
  """Measures a workload of scripts/benchmark.py; yields a row for each variant."""
  import benchmark

  names = ("plain", "barrier", "tensorflow", "dynamic")
  for name, row in benchmark.measure(workload, "sgd", rounds, seconds, os.cpu_count(), False, names).items():
    result = "overhead {:.2f} ms".format(row["overhead"])
    if name == "dynamic" and row["to_tensorflow"] is not None:
      result += ", {to_tensorflow:.2f} of TensorFlow's class, {to_barrier:.2f} of the barrier".format(**row)
    yield make_row("{} {}".format(workload, name), row["milliseconds"], result if name != "plain" else "", measured=row)


# Devices, XLA and the graph rewrite.


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
    yield make_row("{}, {}".format(label, name), median(times[name]))
  last = programs[names[-1]]
  wrong, found = check_training(last), ""
  if op:
    count = last.count_ops(is_op)
    found = ", {} {}".format(count, op)
    wrong += ["no {}".format(op)] * (not count)
  yield make_row(
    "{}, {}".format(label, names[-1]),
    median(times[names[-1]]),
    "; ".join(wrong) or "loss finite, overflow skipped, scale lowered" + found,
    bool(wrong),
  )


def with_and_without(build):
  return collections.OrderedDict([("unwrapped", build(lambda opt: opt)), ("mp_compat", build(wrap))])


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
    "MirroredStrategy", programs, rounds, seconds, "ops on " + devices[1], lambda node: is_on(node.device, devices[1])
  )


def train_clustered(device=GPU, width=1024, rounds=60, seconds=20):
  """Trains with XLA's auto-clustering."""
  config = tf.ConfigProto(allow_soft_placement=True)
  config.graph_options.optimizer_options.global_jit_level = tf.OptimizerOptions.ON_1
  programs = with_and_without(lambda wrapper: build_in_session(wrapper, device, width, config=config))
  return compare_training(
    "auto-clustering", programs, rounds, seconds, "XLA clusters", lambda node: node.op in ("_XlaRun", "XlaLaunch")
  )


def train_compiled(device=GPU, width=1024, rounds=60, seconds=20):
  """Trains in a function that XLA compiles."""
  import benchmark

  option = "experimental_compile" if tf.VERSION.startswith("2.4.") else "jit_compile"

  def call(train_step, weight):
    with tf.variable_scope("", use_resource=True):  # A compiled function makes no variables.
      benchmark.model_loss("model-dense", width)
    return tensorflow.function(train_step, **{option: True})(weight)

  programs = with_and_without(lambda wrapper: build_in_session(wrapper, device, width, call))
  return compare_training("jit_compile", programs, rounds, seconds)


def rewrite_session(device=GPU, width=1024, rounds=60, seconds=20):
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


def rewrite_keras(device=GPU, width=1024, rounds=60, seconds=20):
  """Trains a Keras model: in float32, with the graph rewrite alone, and with the graph rewrite and loss scaling."""
  import benchmark

  program = build_keras(lambda opt: opt, device, width)
  times = benchmark.take_turns({"float32": functools.partial(program.step, 1.0)}, rounds, seconds, "Keras")
  yield make_row("Keras, float32", median(times["float32"]))
  with mp_compat.mixed_precision_graph_rewrite():
    programs = collections.OrderedDict(rewrite=build_keras(lambda opt: opt, device, width))
    programs["rewrite and mp_compat"] = build_keras(mp_compat.enable_mixed_precision_graph_rewrite, device, width)
    yield from compare_training("Keras", programs, rounds, seconds)


def describe_machine():
  """Yields a row whose details are the GPUs that TensorFlow sees, TensorFlow's build, and the processor."""
  import benchmark

  gpus = tensorflow.config.list_physical_devices("GPU")
  build = tensorflow.sysconfig.get_build_info()
  yield make_row(
    "machine",
    gpus=[tensorflow.config.experimental.get_device_details(gpu).get("device_name", gpu.name) for gpu in gpus],
    tensorflow=tf.VERSION,
    cuda_build=build["is_cuda_build"],
    cuda=build.get("cuda_version"),
    cudnn=build.get("cudnn_version"),
    python=platform.python_version(),
    processor=benchmark.processor(),
  )


PARTS = {
  "machine": [describe_machine],
  "digits": [train_digits, functools.partial(train_digits, batch=256, width=32)],
  "programs": [compare_programs],
  "trace": [trace],
  "benchmark": [
    functools.partial(measure_workload, workload) for workload in ("resnet50", "bert-base", "small-1000", "model-dense")
  ],
  "devices": [train_mirrored],
  "xla": [train_clustered, train_compiled],
  "rewrite": [rewrite_session, rewrite_keras],
}


def run_pieces(pieces):
  """Yields the rows of all pieces. An error ends its piece with a row that failed; the next piece follows."""
  for piece in pieces:
    try:
      yield from piece()
    except Exception as error:
      traceback.print_exc()
      name = getattr(piece, "func", piece).__name__
      yield make_row(
        name, result="{}: {}".format(type(error).__name__, " ".join(str(error).split())[:200]), failed=True
      )


def main():
  part, path = sys.argv[1:]
  tensorflow.config.set_soft_device_placement(True)
  if part == "devices":  # before TensorFlow uses the GPU
    (gpu, *_) = tensorflow.config.list_physical_devices("GPU")
    half = tensorflow.config.LogicalDeviceConfiguration(memory_limit=2048)  # MB
    tensorflow.config.set_logical_device_configuration(gpu, [half, half])
  with open(path, "w") as file:
    for row in run_pieces(PARTS[part]):
      print(json.dumps(row), file=file, flush=True)


if __name__ == "__main__":
  main()
