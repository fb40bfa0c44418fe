# SPDX-License-Identifier: Apache-2.0
"""Code shared by the programs that train in several processes: the task, a record of
every step, process control.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import zlib

from absl import flags
import common_flags
import numpy as np

FLAGS = flags.FLAGS
FLAGS.set_default("steps", 12)
FLAGS.set_default("overflow_at", [3, 8])
flags.adopt_module_key_flags(common_flags)
flags.DEFINE_integer("workers", 2, "Processes that train.", lower_bound=1)
flags.DEFINE_integer("batch", 64, "Examples for each process and step.", lower_bound=1)
flags.DEFINE_enum(
  "dtype", "float16", ["float16", "float32"], "In which the model computes."
)
flags.DEFINE_integer(
  "control_flow", 1, "Conditionals as Switch and Merge (1) or as functions (2).", 1, 2
)
flags.DEFINE_string(
  "record", None, "Directory for the variables after every step, as .npz."
)
flags.DEFINE_float(
  "timeout", 240.0, "Seconds until all processes are ended.", lower_bound=0.0
)
flags.DEFINE_integer(
  "task", None, "Index of this process. By default, the program starts all processes."
)

LEARNING_RATE = 0.05
INITIAL_SCALE = 2.0**15
INCREMENT_PERIOD = (
  5  # 2000 is usual; with 5, a run of about ten steps shows the growth.
)


def tensorflow():
  """Imports and configures TensorFlow; returns it."""
  # Read while TensorFlow is imported. On a CPU with AVX512-FP16, oneDNN's float16
  # convolutions are slow to train.
  os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")
  import tensorflow.compat.v1 as tf

  tf.disable_eager_execution()
  (
    tf.enable_control_flow_v2 if FLAGS.control_flow == 2 else tf.disable_control_flow_v2
  )()
  tf.logging.set_verbosity(tf.logging.ERROR)
  return tf


class Digits:
  """scikit-learn's digits in batches, which depend only on the attempt and the
  process.
  """

  def __init__(self, batch, overflow_at):
    from sklearn.datasets import load_digits

    self._data, self._batch, self._overflow_at = load_digits(), batch, overflow_at

  def feed(self, model, attempt, rank, ranks):
    """Returns the feeds for one attempt of one process. The last process overflows at
    `overflow_at`.
    """
    rows = ((attempt * ranks + rank) * self._batch + np.arange(self._batch)) % len(
      self._data.target
    )
    overflow = attempt in self._overflow_at and rank == ranks - 1
    return {
      model.images: self._data.data[rows] / 16,
      model.labels: self._data.target[rows],
      model.weight: np.inf if overflow else 1.0,
    }


class Model:
  """A small network, in float16 with float32 variables or in float32, and its loss.
  Build it once per graph.
  """

  def __init__(self, tf, mp_compat, dtype):
    self._tf, self._dtype, self._getter = (
      tf,
      dtype,
      mp_compat.float32_variable_storage_getter,
    )
    self.images = tf.placeholder(tf.float32, [None, 64], "images")
    self.labels = tf.placeholder(tf.int32, [None], "labels")
    self.weight = tf.placeholder(tf.float32, [], "weight")

  def loss(self):
    """Returns the mean cross entropy times the weight, a float32 scalar."""
    tf = self._tf
    with tf.variable_scope("network", custom_getter=self._getter):
      hidden = tf.nn.relu(self._dense(tf.cast(self.images, self._dtype), "hidden", 32))
      logits = tf.cast(self._dense(hidden, "logits", 10), tf.float32)
    return self.weight * tf.reduce_mean(
      tf.nn.sparse_softmax_cross_entropy_with_logits(labels=self.labels, logits=logits)
    )

  def _dense(self, x, name, units):
    tf = self._tf
    with tf.variable_scope(name):
      initial = tf.random_uniform_initializer(-0.25, 0.25, seed=1)
      return tf.matmul(
        x, tf.get_variable("weights", [x.shape.as_list()[-1], units], x.dtype, initial)
      ) + (tf.get_variable("biases", [units], x.dtype, tf.zeros_initializer()))


class Record:
  """Prints the state after every step, and stores it for `--record`."""

  def __init__(self, name):
    self._name, self._steps = name, []

  def add(self, attempt, values):
    """Prints and stores the state after an attempt: arrays by name."""
    self.tell(attempt, values)
    self._steps.append(values)

  def tell(self, attempt, values):
    """Prints one line."""
    digest = zlib.crc32(
      b"".join(np.asarray(values[name]).tobytes() for name in sorted(values))
    )
    fields = [
      ("attempt", attempt),
      ("global_step", values["global_step"]),
      ("loss_scale", "{:g}".format(values["current_loss_scale"])),
      ("good_steps", values["good_steps"]),
      ("variables", "{:08x}".format(digest)),
    ]
    # A single write for the line, since processes share the terminal.
    sys.stdout.write(
      " ".join([self._name] + ["{}={}".format(*pair) for pair in fields]) + "\n"
    )
    sys.stdout.flush()

  def save(self):
    if FLAGS.record:
      np.savez(
        os.path.join(FLAGS.record, self._name + ".npz"),
        **{
          name: np.stack([step[name] for step in self._steps])
          for name in self._steps[0]
        },
      )


def leave():
  """Exits with status 0 without shutting down Python, because threads of servers and
  queue runners may still write.
  """
  sys.stdout.flush()
  os._exit(0)


def free_addresses(count):
  """Returns `count` loopback addresses with ports that were free when they were
  tried.
  """
  with contextlib.ExitStack() as stack:
    sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
    for bound in sockets:
      bound.bind(("127.0.0.1", 0))
    return ["127.0.0.1:{}".format(bound.getsockname()[1]) for bound in sockets]


class Processes:
  """Starts processes, reads their output, and ends them all when the `with` block
  exits, also after an error.
  """

  def __init__(self, timeout):
    self._deadline, self._running = time.monotonic() + timeout, []
    self._lines = []

  def __enter__(self):
    return self

  def __exit__(self, *exc):
    # mpirun ends its ranks on SIGTERM
    for end_signal, timeout in [(signal.SIGTERM, 5.0), (signal.SIGKILL, None)]:
      for process, _ in self._running:
        with contextlib.suppress(ProcessLookupError):
          os.killpg(process.pid, end_signal)
      for process, _ in self._running:
        with contextlib.suppress(subprocess.TimeoutExpired):
          process.wait(timeout)
    for _, listener in self._running:
      listener.join()

  def start(self, *command, **environment):
    """Starts a command with additional environment variables; prints its lines about
    steps; returns the process.
    """
    process = subprocess.Popen(
      command,
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      universal_newlines=True,
      start_new_session=True,
      env=dict(os.environ, TF_CPP_MIN_LOG_LEVEL="3", **environment),
    )
    listener = threading.Thread(target=self._listen, args=(process,))
    listener.start()
    self._running.append((process, listener))
    return process

  def _listen(self, process):
    for line in process.stdout:
      self._lines.append(line.rstrip("\n"))
      if " attempt=" in line:
        print(line, end="", flush=True)

  def wait(self, process):
    """Waits until the process ends. Raises SystemExit if its exit status is not 0 or
    the timeout has passed.
    """
    self._wait_until(lambda: process.poll() is not None)
    if process.returncode:
      # Reads its last output; with a limit, as a child may keep the pipe open.
      dict(self._running)[process].join(5.0)
      raise SystemExit(
        "\n".join(
          self._lines[-50:]
          + ["A process ended with status {}.".format(process.returncode)]
        )
      )

  def wait_for_line(self, start):
    """Waits until a process has written a line that begins with `start`."""
    self._wait_until(lambda: any(line.startswith(start) for line in self._lines))

  def _wait_until(self, done):
    while not done():
      if time.monotonic() > self._deadline:
        raise SystemExit(
          "\n".join(self._lines[-50:] + ["Time is up; all processes are ended."])
        )
      time.sleep(0.05)
