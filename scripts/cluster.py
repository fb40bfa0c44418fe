"""What the programs that train on several processes share: a task, a record of every step, starting processes."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import zlib

import numpy as np

LEARNING_RATE = 0.05
INITIAL_SCALE = 2. ** 15
INCREMENT_PERIOD = 5  # 2000 is what you usually want; this one shows in a run of some ten steps


def add_arguments(parser):
  """What all of these programs take."""
  parser.add_argument("--steps", type=int, default=12, help="steps that each process attempts; default: %(default)s")
  parser.add_argument("--overflow_at", type=int, nargs="*", default=[3, 8], metavar="STEP",
                      help="attempts at which the loss of one process overflows; default: 3 8")
  parser.add_argument("--batch", type=int, default=64, help="examples for each process; default: %(default)s")
  parser.add_argument("--dtype", choices=["float16", "float32"], default="float16", help="default: %(default)s")
  parser.add_argument("--control_flow", type=int, choices=[1, 2], default=1,
                      help="conditionals as Switch and Merge (1) or as functions (2); default: %(default)s")
  parser.add_argument("--record", metavar="DIR", help="where to write the variables after every step, as .npz")
  parser.add_argument("--timeout", type=float, default=240., help="seconds until all is ended; default: %(default)s")
  parser.add_argument("--task", type=int, help="run as this one of the processes, and start none")


class Digits:
  """scikit-learn's digits in batches, a function of the attempt and the process alone."""

  def __init__(self, arguments):
    from sklearn.datasets import load_digits
    self._data, self._arguments = load_digits(), arguments

  def feed(self, model, attempt, rank, ranks):
    """What to feed for this attempt of this process, the last of which overflows where it was asked for."""
    batch = self._arguments.batch
    rows = ((attempt * ranks + rank) * batch + np.arange(batch)) % len(self._data.target)
    overflow = attempt in self._arguments.overflow_at and rank == ranks - 1
    return {model.images: self._data.data[rows] / 16, model.labels: self._data.target[rows],
            model.weight: np.inf if overflow else 1.}


class Model:
  """A small network, in float16 with float32 variables or in float32, and its loss; to be built once in a graph."""

  def __init__(self, tf, mp_compat, dtype):
    self._tf, self._dtype, self._getter = tf, dtype, mp_compat.float32_variable_storage_getter
    self.images = tf.placeholder(tf.float32, [None, 64], "images")
    self.labels = tf.placeholder(tf.int32, [None], "labels")
    self.weight = tf.placeholder(tf.float32, [], "weight")

  def loss(self):
    """The mean cross entropy, times the weight."""
    tf = self._tf
    with tf.variable_scope("network", custom_getter=self._getter):
      hidden = tf.nn.relu(self._dense(tf.cast(self.images, self._dtype), "hidden", 32))
      logits = tf.cast(self._dense(hidden, "logits", 10), tf.float32)
    return self.weight * tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(
        labels=self.labels, logits=logits))

  def _dense(self, x, name, units):
    tf = self._tf
    with tf.variable_scope(name):
      initial = tf.random_uniform_initializer(-.25, .25, seed=1)
      return tf.matmul(x, tf.get_variable("weights", [x.shape.as_list()[-1], units], x.dtype, initial)) + (
          tf.get_variable("biases", [units], x.dtype, tf.zeros_initializer()))


class Record:
  """Tells how every step went, and keeps it for `--record`."""

  def __init__(self, name, directory):
    self._name, self._directory, self._steps = name, directory, []

  def add(self, attempt, values):
    """Tells of the state after this attempt, arrays by name, and keeps it."""
    self.tell(attempt, values)
    self._steps.append(values)

  def tell(self, attempt, values):
    """One line."""
    digest = zlib.crc32(b"".join(np.asarray(values[name]).tobytes() for name in sorted(values)))
    told = [("attempt", attempt), ("global_step", values["global_step"]),
            ("loss_scale", "{:g}".format(values["current_loss_scale"])), ("good_steps", values["good_steps"]),
            ("variables", "{:08x}".format(digest))]
    # One write for one line: processes share the terminal.
    sys.stdout.write(" ".join([self._name] + ["{}={}".format(*pair) for pair in told]) + "\n")
    sys.stdout.flush()

  def save(self):
    if self._directory:
      np.savez(os.path.join(self._directory, self._name + ".npz"), **{
          name: np.stack([step[name] for step in self._steps]) for name in self._steps[0]})


def leave():
  """Ends this process, well, without shutting Python down: servers' and queue runners' threads may still write."""
  sys.stdout.flush()
  os._exit(0)


def free_addresses(count):
  """That many addresses on this machine's loopback, free a moment ago."""
  with contextlib.ExitStack() as stack:
    sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
    for each in sockets:
      each.bind(("127.0.0.1", 0))
    return ["127.0.0.1:{}".format(each.getsockname()[1]) for each in sockets]


class Processes:
  """Processes that are started, listened to, and ended with the block, whatever happens in it."""

  def __init__(self, timeout):
    self._deadline, self._running = time.monotonic() + timeout, []
    self._lines = []

  def __enter__(self):
    return self

  def __exit__(self, *exc):
    for end, patience in [(signal.SIGTERM, 5.), (signal.SIGKILL, None)]:  # mpirun ends its ranks when it is asked to
      for process, _ in self._running:
        with contextlib.suppress(ProcessLookupError):
          os.killpg(process.pid, end)
      for process, _ in self._running:
        with contextlib.suppress(subprocess.TimeoutExpired):
          process.wait(patience)
    for _, listener in self._running:
      listener.join()

  def start(self, *command, **environment):
    """Starts a command, with these environment variables too; what it tells of its steps is printed."""
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, universal_newlines=True, start_new_session=True,
        env=dict(os.environ, TF_CPP_MIN_LOG_LEVEL="3", **environment))
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
    """Waits until it has ended well; raises SystemExit where it has not, or time is up."""
    self._wait_until(lambda: process.poll() is not None)
    if process.returncode:
      dict(self._running)[process].join(5.)  # its last words; a child of its own may keep the pipe open
      raise SystemExit("\n".join(self._lines[-50:] + ["A process ended with status {}.".format(process.returncode)]))

  def wait_for_line(self, start):
    """Waits until some process has written a line that starts so."""
    self._wait_until(lambda: any(line.startswith(start) for line in self._lines))

  def _wait_until(self, done):
    while not done():
      if time.monotonic() > self._deadline:
        raise SystemExit("\n".join(self._lines[-50:] + ["Time is up; all processes are ended."]))
      time.sleep(.05)
