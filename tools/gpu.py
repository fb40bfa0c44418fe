# SPDX-License-Identifier: Apache-2.0
"""Checks and measures loss scaling on a GPU, with this machine's TensorFlow (2.4 to
2.21).

    scripts/gpu                  # every part
    scripts/gpu --part trace     # one of them; may be repeated

    trace       the tensors that a full trace shows between devices: loss scaling must add none but scalars
    programs    the programs of tests/programs, with overflows: the same bits after every step without loss scaling,
                with TensorFlow's class and with mp_compat (needs pytest)
    benchmark   tools/benchmark.py with four workloads, which writes its figures to --out

The exit status is 1 if there is no GPU or a check failed.
"""

import argparse
import collections
import os
import subprocess
import sys
import time

# Read once, while TensorFlow is imported. The benchmark needs memory beside this
# process.
os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")
os.environ.setdefault("TF_DETERMINISTIC_OPS", "1")
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import graphs
import numpy as np
import tensorflow
import tensorflow.compat.v1 as tf

import mp_compat

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
# the last one needs cuBLAS
WORKLOADS = ["resnet50", "bert-base", "small-1000", "model-dense"]


class Clipping:
  """An optimizer with a dynamic loss scale that clips the gradients by their global
  norm.
  """

  def __init__(self, opt):
    self._opt = mp_compat.MixedPrecisionLossScaleOptimizer(opt, "dynamic")

  def minimize(self, loss):
    grads, variables = zip(
      *[pair for pair in self._opt.compute_gradients(loss) if pair[0] is not None]
    )
    return self._opt.apply_gradients(
      zip(mp_compat.clip_by_global_norm(grads, 1.0)[0], variables)
    )


WRAPPERS = {
  "dynamic": lambda opt: mp_compat.MixedPrecisionLossScaleOptimizer(opt, "dynamic"),
  "fixed": lambda opt: mp_compat.MixedPrecisionLossScaleOptimizer(opt, 128.0),
  "clipped": Clipping,
}


def find_transfers(wrap, device):
  """Returns the floating-point tensors that a training step sends from one device or
  memory to another.

  The model has dense gradients of up to 256 KB and an IndexedSlices. The full trace of
  a step with finite gradients and that of an overflow together contain the shapes of
  the tensors in all branches.

  Returns:
    A Counter of (dtype, shape), without scalars; the shape is None for a tensor that
    neither trace contains. And a Counter of the devices of all ops.
  """
  from tests import testing

  shapes, options = (
    {},
    tf.RunOptions(trace_level=tf.RunOptions.FULL_TRACE, output_partition_graphs=True),
  )
  with tf.Graph().as_default(), tf.device(device):
    x = tf.placeholder(tf.float32, [3])
    large = tf.get_variable(
      "large", [256, 256], initializer=tf.ones_initializer(), use_resource=True
    )
    loss = testing.model(x, use_resource=True) + x[0] * tf.reduce_sum(tf.square(large))
    # not Momentum, which has no GPU kernel for IndexedSlices
    train_op = wrap(tf.train.GradientDescentOptimizer(1e-6)).minimize(loss)
    with tf.Session() as session:
      session.run(tf.global_variables_initializer())
      for value in (1.0, np.inf):
        metadata = tf.RunMetadata()
        session.run(train_op, {x: [value] * 3}, options, metadata)
        for node in [
          node for stats in metadata.step_stats.dev_stats for node in stats.node_stats
        ]:
          for output in node.output:
            shapes[node.node_name, output.slot] = tuple(
              dim.size for dim in output.tensor_description.shape.dim
            )
  nodes = [node for part in metadata.partition_graphs for node in part.node]
  return _sent(nodes, shapes), collections.Counter(
    node.device.rpartition("device:")[2] for node in nodes
  )


def _sent(nodes, shapes):
  """Returns a Counter of (dtype, shape) of the tensors that `nodes` send; `shapes` are
  those of outputs of ops.
  """
  transfers = collections.Counter()
  for node in nodes:
    if node.op in ("_Send", "_HostSend"):
      source, _, slot = node.input[0].partition(":")
      dtype, shape = (
        tf.as_dtype(node.attr["T"].type),
        shapes.get((source, int(slot or 0))),
      )
      if dtype.is_floating and (shape is None or np.prod(shape) > 1):
        transfers[dtype.name, shape] += 1
  return transfers


def trace(device="/gpu:0", wrappers=WRAPPERS):
  """Prints what loss scaling sends between host and device; returns the names of
  wrappers that send more than scalars.

  A wrapper none of whose ops are on the device has failed, too.
  """
  unwrapped, _ = find_transfers(lambda opt: opt, device)
  failed = []
  for name, wrap in wrappers.items():
    transfers, ops = find_transfers(wrap, device)
    added = [
      "{} of {} {}".format(count, *tensor)
      for tensor, count in (transfers - unwrapped).items()
    ]
    failed += [name] * (bool(added) or device.strip("/").upper() not in ops)
    print(
      "{:<10}transfers: {} without loss scaling, added: {}; ops: {}".format(
        name,
        sum(unwrapped.values()),
        ", ".join(added) or "none",
        ", ".join(
          "{} on {}".format(count, place) for place, count in sorted(ops.items())
        ),
      )
    )
  return failed


def compare_program(row):
  """Trains a program of tests/programs three ways; returns how the results compare, and
  what differs.
  """
  import pytest

  from tests import testing
  from tests.programs import table

  variant = row.variants[0]
  try:
    table.compare_with_reference(row, variant)
  except (Exception, pytest.fail.Exception) as error:
    api = testing.native if table.resolve_reason(row.unwrapped_fails, variant) else None
    try:
      with testing.control_flow(variant.control_flow):
        testing.assert_same(*(table.train(row, variant, api).clean for _ in range(2)))
    except (Exception, pytest.fail.Exception):
      return "fail, or differ from run to run, without mp_compat", str(error)
    return "FAILED", str(error)
  try:
    table.compare_with_tensorflow(row, variant)
  except AssertionError as error:
    return "FAILED", str(error)
  except (Exception, pytest.fail.Exception) as error:
    return "same, but TensorFlow's class fails or works unexpectedly", str(error)
  return "same", ""


def compare_programs(rows=None, seconds=240):
  """Compares all programs for which `seconds` suffice, and prints how many are the
  same; returns those that failed.
  """
  rows = [row for row in rows or graphs.programs() if not row.limit]
  found, end = collections.defaultdict(list), time.monotonic() + seconds
  for row in sorted(rows, key=lambda row: row.slow):
    # If a program ends the process, it is the last one.
    print(row.name, file=sys.stderr, flush=True)
    result, text = (
      compare_program(row)
      if time.monotonic() < end
      else ("left out, for lack of time", "")
    )
    found[result].append(row.name)
    if text:
      print("{}: {}\n  {}".format(result, row.name, text))
  for result, names in found.items():
    print("{:>4} {}".format(len(names), result))
  return found["FAILED"] or ["all"] * (not found["same"])


def benchmark(folder):
  """Runs tools/benchmark.py in a process of its own; returns its name if it failed."""
  command = [
    sys.executable,
    os.path.join(ROOT, "tools", "benchmark.py"),
    "--optimizer",
    "sgd",
    "--output",
    folder,
  ]
  for workload in WORKLOADS:
    command += ["--workload", workload]
  environment = dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path))
  del environment["TF_DETERMINISTIC_OPS"]  # Some ops are slower.
  done = subprocess.run(
    [*command, "--rounds", "100", "--seconds", "20"], env=environment, check=False
  )
  return ["benchmark"] * (done.returncode != 0)


def main():
  parts = {
    "trace": trace,
    "programs": compare_programs,
    "benchmark": lambda: benchmark(arguments.out),
  }
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument(
    "--part",
    choices=list(parts),
    action="append",
    help="only this one; may be repeated",
  )
  parser.add_argument(
    "--out",
    default=os.path.join("runs", "gpu"),
    metavar="DIR",
    help="default: %(default)s",
  )
  arguments = parser.parse_args()
  gpus, details = (
    tensorflow.config.list_physical_devices("GPU"),
    tensorflow.config.experimental.get_device_details,
  )
  if not gpus:
    sys.exit(
      "No GPU is visible to TensorFlow {} (built with CUDA: {}). It needs a GPU, its "
      "driver and CUDA's libraries, and names above what is missing.".format(
        tf.VERSION, tf.test.is_built_with_cuda()
      )
    )
  print(
    "TensorFlow {}; {}".format(tf.VERSION, ", ".join(str(details(gpu)) for gpu in gpus))
  )
  failed = []
  for part in arguments.part or parts:
    print("\n" + part, flush=True)
    failed += parts[part]()
  print("\nFailed: " + ", ".join(failed) if failed else "\nNo check failed.")
  sys.exit(bool(failed))


if __name__ == "__main__":
  main()
