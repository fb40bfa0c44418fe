# SPDX-License-Identifier: Apache-2.0
"""Trains another library's program unwrapped, with TensorFlow's loss scaling and with
mp_compat's, and compares.

    scripts/nox -s ecosystem                             # all libraries, one environment each; about an hour
    scripts/nox -s "ecosystem(tf_slim)"                 # one library

A module of programs/ has the name of a library, and contains `train(tools, directory)`,
which trains STEPS steps and saves in the library's own way; it continues from the
checkpoint in `directory`, if there is one. It returns {variable name: array}, or None:
then the variables are those of the latest TensorFlow checkpoint there. It uses `tools`
(class Tools) to wrap the optimizer, and must be deterministic. It is trained, saved,
and continued in a second process, (a) as it is, and (b) with a loss that overflows once
in each process:

    unwrapped     (a) ends with the same bits as without loss scaling
    TensorFlow    (a) and (b) end with the same bits as with TensorFlow's class
    overflow      (b) ends with finite variables and a lower loss scale than (a)
    restored      the second process continued from the checkpoint

Prints one row for each library, and all rows so far; keeps them in runs/ecosystem.
noxfile.py sets the environment in which programs can be repeated to the bit.
"""

import argparse
import contextlib
import datetime
import importlib
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import textwrap

import numpy as np

STEPS = 20  # of each process
OVERFLOW = 5  # the step of each process that overflows
SCALE, PERIOD = 2.0**10, 10
ROWS = os.path.join(
  os.path.dirname(os.path.abspath(__file__)), "..", "..", "runs", "ecosystem"
)
DISTRIBUTIONS = {  # if they have not the name of the module
  "bert": "bert-tensorflow",
  "dopamine": "dopamine-rl",
  "estimators": "tensorflow-estimator",
  "keras3": "keras",
  "sonnet": "dm-sonnet",
  "tfmot": "tensorflow-model-optimization",
}
SCALE_VARIABLES = re.compile(r"(^|.*/)(current_loss_scale|good_steps)(_\d+)?(:0)?$")


class Tools:
  """What a program gets: a function that wraps its optimizer, and one that lets its
  loss overflow.

  Attributes:
    variant: "unwrapped", "tensorflow" or "mp_compat".
  """

  def __init__(self, variant, overflow):
    self.variant = variant
    self._overflow = overflow
    self._eager_steps = itertools.count(1)

  def wrap(self, opt, inject=True):
    """Returns a `tf.train.Optimizer` with loss scaling.

    Args:
      opt: the inner optimizer.
      inject: whether its `compute_gradients` lets the loss overflow. Pass False for a
        library that does not call it, and call `inject` for the loss instead.
    """
    import tensorflow.compat.v1 as tf

    if inject:
      compute_gradients = opt.compute_gradients
      opt.compute_gradients = lambda loss, *args, **kwargs: compute_gradients(
        self.inject(loss), *args, **kwargs
      )
    if self.variant == "unwrapped":
      return opt
    if self.variant == "tensorflow":
      experimental = tf.train.experimental
      return experimental.MixedPrecisionLossScaleOptimizer(
        opt, experimental.DynamicLossScale(SCALE, PERIOD)
      )
    import mp_compat

    return mp_compat.MixedPrecisionLossScaleOptimizer(
      opt, mp_compat.DynamicLossScale(SCALE, PERIOD)
    )

  def wrap_keras(self, opt):
    """Returns a Keras optimizer with loss scaling. Call `inject` for the loss."""
    modules = {base.__module__.split(".")[0] for base in type(opt).__mro__}
    import tensorflow as tf

    keras = importlib.import_module("tf_keras") if "tf_keras" in modules else tf.keras
    arguments = {"initial_scale": SCALE, "dynamic_growth_steps": PERIOD}
    if self.variant == "unwrapped":
      return opt
    if self.variant == "tensorflow":
      return keras.mixed_precision.LossScaleOptimizer(opt, **arguments)
    from mp_compat.keras import LossScaleOptimizer

    return LossScaleOptimizer(opt, **arguments)

  def inject(self, loss):
    """Returns the loss, a tensor or a callable; in one step of an overflowing run, inf
    times the loss.

    Each call in a graph or function counts the steps of that graph; eager calls count
    together.
    """
    if callable(loss):
      return lambda: self.inject(loss())
    import tensorflow.compat.v1 as tf

    steps = self._eager_steps if tf.executing_eagerly() else itertools.count(1)
    (factor,) = tf.py_func(
      lambda: np.float32(np.inf if next(steps) == OVERFLOW and self._overflow else 1.0),
      [],
      [tf.float32],
    )
    factor.set_shape([])
    return loss * tf.cast(factor, loss.dtype)


def run_monitored(train_op, directory):
  """Runs STEPS steps in a MonitoredTrainingSession, which restores and saves
  checkpoints in `directory`.
  """
  import tensorflow.compat.v1 as tf

  stop = tf.train.StopAtStepHook(num_steps=STEPS)
  with tf.train.MonitoredTrainingSession(
    checkpoint_dir=directory, hooks=[stop]
  ) as session:
    while not session.should_stop():
      session.run(train_op)


def read_checkpoint(directory):
  """Returns the variables of the latest TensorFlow checkpoint in a directory."""
  import tensorflow.compat.v1 as tf

  reader = tf.train.load_checkpoint(tf.train.latest_checkpoint(directory))
  return {name: reader.get_tensor(name) for name in reader.get_variable_to_shape_map()}


def batches(*data):
  """Returns an input function for Estimators: repeats batches of 16 examples of the
  features and the labels.
  """
  import tensorflow.compat.v1 as tf

  return lambda: tf.data.Dataset.from_tensor_slices(data).batch(16).repeat()


@contextlib.contextmanager
def checkpoint(directory, **objects):
  """Restores a `tf.train.Checkpoint` of the objects, if there is one in the directory;
  saves another at the end.
  """
  import tensorflow as tf

  manager = tf.train.CheckpointManager(
    tf.train.Checkpoint(**objects), directory, max_to_keep=1
  )
  manager.restore_or_initialize()
  yield
  manager.save()


def read_eager(weights, opt):
  """Returns the values of a model's weights and of its optimizer's variables, and the
  loss scale, in eager mode.
  """
  import tensorflow.compat.v1 as tf

  values, inner = {}, opt
  if isinstance(opt, tf.train.experimental.MixedPrecisionLossScaleOptimizer):
    inner, values["current_loss_scale"] = opt._optimizer, np.array(opt._loss_scale())
  elif hasattr(opt, "inner_optimizer"):
    scale = opt.dynamic_scale if hasattr(opt, "dynamic_scale") else opt.loss_scale
    inner, values["current_loss_scale"] = (
      opt.inner_optimizer,
      np.array(scale() if callable(scale) else scale),
    )
  variables = inner.variables() if callable(inner.variables) else inner.variables
  for kind, of_kind in [("weight", weights), ("optimizer", variables)]:
    values.update(
      {
        "{}/{}".format(kind, index): np.array(variable)
        for index, variable in enumerate(of_kind)
      }
    )
  return values


def train_in_processes(library, variant, overflow):
  """Returns the variables after the first and after the second process, two
  dictionaries.
  """
  with tempfile.TemporaryDirectory() as parent:
    directory, results = os.path.join(parent, "model"), []
    os.mkdir(directory)
    for process in range(2):
      path = os.path.join(parent, "{}.npz".format(process))
      command = [
        sys.executable,
        "-W",
        "ignore",
        __file__,
        library,
        "--train",
        variant,
        directory,
        path,
      ]
      done = subprocess.run(
        command + ["--overflow"] * overflow,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
      )
      if done.returncode:
        raise RuntimeError(done.stdout[-4000:])
      with np.load(path) as loaded:
        results.append(dict(loaded))
  return results


def without_loss_scale(values):
  """Returns the variables of the program, named as without loss scaling.

  TensorFlow's class creates Adam's powers in conditionals. Without these, those of
  several optimizers are numbered.
  """
  renamed = {}
  for name in sorted(
    values,
    key=lambda name: [
      int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)
    ],
  ):
    if not SCALE_VARIABLES.match(name):
      plain = re.sub(r"(^|/)cond(_\d+)?/", r"\1", name)
      candidates = itertools.chain(
        [plain], ("{}_{}".format(plain, number) for number in itertools.count(1))
      )
      renamed[
        next(candidate for candidate in candidates if candidate not in renamed)
      ] = values[name]
  return renamed


def same(values, others):
  values, others = without_loss_scale(values), without_loss_scale(others)
  assert values, "no variables"
  return sorted(values) == sorted(others) and all(
    value.dtype == others[name].dtype and value.tobytes() == others[name].tobytes()
    for name, value in values.items()
  )


def loss_scale(values):
  return next(value for name, value in values.items() if "current_loss_scale" in name)


def compare(library):
  """Returns the row of a library: {column: text}."""
  _, unwrapped = train_in_processes(library, "unwrapped", overflow=False)
  first, ours = train_in_processes(library, "mp_compat", overflow=False)
  _, skipped = train_in_processes(library, "mp_compat", overflow=True)
  try:
    if not same(ours, train_in_processes(library, "tensorflow", overflow=False)[1]):
      tensorflow = "differs"
    elif not same(skipped, train_in_processes(library, "tensorflow", overflow=True)[1]):
      tensorflow = "differs after an overflow"
    else:
      tensorflow = "same bits"
  except RuntimeError as error:
    tensorflow = "fails: " + textwrap.shorten(
      error.args[0].strip().split("\n")[-1], 60, placeholder=" ..."
    )
  finite = all(
    np.isfinite(value).all() for value in skipped.values() if value.dtype.kind == "f"
  )
  import tensorflow.compat.v1 as tf

  metadata = importlib.import_module(
    "importlib_metadata" if sys.version_info < (3, 8) else "importlib.metadata"
  )
  name = re.sub("_tf2$", "", library)
  name = DISTRIBUTIONS.get(name, name)
  return {
    "library": "{} {}".format(metadata.metadata(name)["Name"], metadata.version(name)),
    "TensorFlow": tf.VERSION,
    "Python": "{}.{}".format(*sys.version_info),
    "unwrapped": "same bits" if same(ours, unwrapped) else "DIFFERS",
    "TensorFlow's class": tensorflow,
    "overflow": "skipped"
    if finite and loss_scale(skipped) < loss_scale(ours)
    else "NOT SKIPPED",
    "restored": "NOT RESTORED" if same(first, ours) else "yes",
    "date": datetime.date.today().isoformat(),
  }


def make_table():
  """Returns a Markdown table of all rows so far."""
  rows = []
  for name in sorted(os.listdir(ROWS)):
    with open(os.path.join(ROWS, name), encoding="utf-8") as file:
      rows.append(json.load(file))
  lines = [list(rows[0]), ["---"] * len(rows[0])] + [list(row.values()) for row in rows]
  return "\n".join("| {} |".format(" | ".join(cells)) for cells in lines)


def main():
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("library", help="the name of a module of programs/")
  parser.add_argument("--train", nargs=3, help=argparse.SUPPRESS)
  parser.add_argument("--overflow", action="store_true", help=argparse.SUPPRESS)
  arguments = parser.parse_args()
  if arguments.train:
    variant, directory, path = arguments.train
    program = importlib.import_module("programs." + arguments.library)
    values = program.train(Tools(variant, arguments.overflow), directory)
    np.savez(path, **(read_checkpoint(directory) if values is None else values))
    return None
  row = compare(arguments.library)
  os.makedirs(ROWS, exist_ok=True)
  with open(
    os.path.join(ROWS, arguments.library + ".json"), "w", encoding="utf-8"
  ) as file:
    json.dump(row, file, indent=2)
  print(make_table())
  wrong = [
    text for text in row.values() if text in ("DIFFERS", "NOT SKIPPED", "NOT RESTORED")
  ]
  return "{}: {}".format(arguments.library, ", ".join(wrong)) if wrong else None


if __name__ == "__main__":
  sys.exit(main())
