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
import functools
import glob
import importlib
import json
import os
import platform
import sys
import time
import traceback

import gpu_rows
import gpu_training
import numpy as np
import tensorflow
import tensorflow.compat.v1 as tf

import mp_compat

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

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
    yield gpu_rows.make_row(
      "{}, batch {}, width {}".format(run.name, batch, width),
      gpu_rows.median(times[run.name]),
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
  yield gpu_rows.make_row(
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
      self._opt = gpu_rows.wrap(opt)

    def minimize(self, loss):
      grads, variables = zip(*[pair for pair in self._opt.compute_gradients(loss) if pair[0] is not None])
      return self._opt.apply_gradients(zip(mp_compat.clip_by_global_norm(grads, 1.0)[0], variables))

  return Clipping()


def fix(opt):
  return mp_compat.MixedPrecisionLossScaleOptimizer(opt, 128.0)


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


def trace(device=gpu_rows.GPU, wrappers=(("dynamic", gpu_rows.wrap), ("fixed", fix), ("clipped", clip))):
  """Checks that loss scaling sends no gradient between host and device; yields a row for each of `wrappers`."""
  unwrapped, _ = find_transfers(lambda opt: opt, device)
  for name, wrapper in wrappers:
    transfers, ops = find_transfers(wrapper, device)
    added = ["{} of {} {}".format(count, *tensor) for tensor, count in (transfers - unwrapped).items()]
    yield gpu_rows.make_row(
      name,
      result="transfers: {} without loss scaling, {} added; ops: {}".format(
        sum(unwrapped.values()),
        ", ".join(added) or "none",
        ", ".join("{} on {}".format(count, name.rpartition("device:")[2]) for name, count in sorted(ops.items())),
      ),
      failed=bool(added) or not any(gpu_rows.is_on(name, device) for name in ops),
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
    yield gpu_rows.make_row(
      "{} {}".format(workload, name), row["milliseconds"], result if name != "plain" else "", measured=row
    )


def describe_machine():
  """Yields a row whose details are the GPUs that TensorFlow sees, TensorFlow's build, and the processor."""
  import benchmark

  gpus = tensorflow.config.list_physical_devices("GPU")
  build = tensorflow.sysconfig.get_build_info()
  yield gpu_rows.make_row(
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
  "devices": [gpu_training.train_mirrored],
  "xla": [gpu_training.train_clustered, gpu_training.train_compiled],
  "rewrite": [gpu_training.rewrite_session, gpu_training.rewrite_keras],
}


def run_pieces(pieces):
  """Yields the rows of all pieces. An error ends its piece with a row that failed; the next piece follows."""
  for piece in pieces:
    try:
      yield from piece()
    except Exception as error:
      traceback.print_exc()
      name = getattr(piece, "func", piece).__name__
      yield gpu_rows.make_row(
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
