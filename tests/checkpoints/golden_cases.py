"""Writes the checkpoints in tests/checkpoints/goldens/.

    python -m tests.checkpoints.golden_cases      writes the subdirectory of the installed TensorFlow version

Every case trains a few steps, some of which overflow, saves a checkpoint, and trains
the remaining steps. expected.npz holds the values of all variables at both times:
"saved" and "after".
"""

import os
import shutil
from typing import NamedTuple

import numpy as np
import tensorflow

import mp_compat
from tests import testing
from tests.testing import tf

GOLDENS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "goldens")
VERSION = ".".join(tf.__version__.split(".")[:2])

BEFORE, AFTER = 7, 4  # steps before the checkpoint is written, and after it
FEEDS = list(testing.feeds(BEFORE + AFTER, overflow_at={3, 5, 8}))
INCREMENT_PERIOD = 2

OPTIMIZERS = {
  "momentum": lambda: tf.train.MomentumOptimizer(0.1, 0.9),
  "adam": lambda: tf.train.AdamOptimizer(0.1),
}


class Case(NamedTuple):
  """A golden checkpoint: what wrote it, and which program trained."""

  writer: str  # "mp_compat", "tensorflow", "contrib", "mp_compat.contrib" or "plain"
  optimizer: str
  control_flow: int = 1
  scope: str = ""
  # or "two" optimizers, "objects": tf.train.Checkpoint, or "estimator", of old versions
  # only
  kind: str = "session"

  @property
  def name(self):
    return "-".join(
      [
        self.writer,
        self.optimizer,
        "v{}".format(self.control_flow),
        self.scope or "root",
        self.kind,
      ]
    )


def list_cases(version):
  """Returns the cases of a TensorFlow version ("1.15", ...)."""
  # contrib fails in v2
  writers = [("tensorflow", 1), ("tensorflow", 2)] + [("contrib", 1)] * (
    version == "1.15"
  )
  optimizers = sorted(OPTIMIZERS)
  found = [
    Case(name, opt, flow, scope)
    for name, flow in writers
    for opt in optimizers
    for scope in ("", "head")
  ]
  found += [
    Case(writer, optimizer)
    for writer in ("mp_compat", "plain")
    for optimizer in optimizers
  ]
  found += [
    Case("tensorflow", "adam", control_flow, kind="two") for control_flow in (1, 2)
  ]
  found += [
    Case(writer, "adam", kind="objects") for writer in ("mp_compat", "tensorflow")
  ]
  return found + [Case("tensorflow", "adam", kind="estimator")] * (
    version in ("1.15", "2.4", "2.10", "2.15")
  )


def wrap(writer, optimizer):
  """Returns the inner optimizer with the writer's loss scaling."""
  opt = OPTIMIZERS[optimizer]()
  if writer in ("mp_compat", "tensorflow"):
    api = mp_compat if writer == "mp_compat" else testing.native
    return api.MixedPrecisionLossScaleOptimizer(
      opt, api.DynamicLossScale(increment_period=INCREMENT_PERIOD)
    )
  if writer in ("contrib", "mp_compat.contrib"):
    api = (
      mp_compat if writer == "mp_compat.contrib" else tensorflow
    ).contrib.mixed_precision
    return api.LossScaleOptimizer(
      opt, api.ExponentialUpdateLossScaleManager(2.0**15, INCREMENT_PERIOD)
    )
  return opt


class GoldenTraining:
  """A program that trains two variables; build it in a new graph."""

  def __init__(self, case):
    self.x = tf.placeholder(tf.float32, [3], "x")
    self.w = tf.get_variable(
      "w", initializer=np.array([1.0, -2.0, 3.0], np.float32), use_resource=True
    )
    self.b = tf.get_variable(
      "b", initializer=np.array([[0.5, 0.25, 0.125]], np.float32), use_resource=True
    )
    with tf.variable_scope("", use_resource=True):
      self.global_step = tf.train.get_or_create_global_step()
    losses = [
      tf.reduce_sum(self.x * tf.square(self.w)),
      tf.reduce_sum(tf.sin(self.b) * self.x),
    ]
    with tf.name_scope(case.scope or None):
      if case.kind == "two":
        self.optimizers = [wrap(case.writer, case.optimizer) for _ in losses]
        self.train_op = tf.group(
          self.optimizers[0].minimize(losses[0], self.global_step, [self.w]),
          self.optimizers[1].minimize(losses[1], var_list=[self.b]),
        )
      else:
        self.optimizers = [wrap(case.writer, case.optimizer)]
        self.train_op = self.optimizers[0].minimize(tf.add_n(losses), self.global_step)

  def run(self, sess, feeds):
    """Trains on the inputs `feeds`; returns the values of all variables, by name."""
    for x in feeds:
      sess.run(self.train_op, {self.x: x})
    return sess.run({variable.op.name: variable for variable in tf.global_variables()})

  def checkpoint(self):
    return tf.train.Checkpoint(
      w=self.w, b=self.b, global_step=self.global_step, optimizer=self.optimizers[0]
    )


def make(case, directory):
  """Writes the checkpoint of a case; returns the values of all variables at saving and
  after the remaining steps.
  """
  path = os.path.join(directory, case.name)
  with testing.control_flow(case.control_flow), tf.Graph().as_default():
    training = GoldenTraining(case)
    plain_saver = tf.train.Saver()
    checkpoint = training.checkpoint() if case.kind == "objects" else None
    with testing.initialized_session() as sess:
      saved = training.run(sess, FEEDS[:BEFORE])
      if checkpoint:
        written = checkpoint.save(path, session=sess)
        # removes the number that save() appends
        for part in (".index", ".data-00000-of-00001"):
          os.replace(written + part, path + part)
      else:
        plain_saver.save(
          sess,
          path,
          write_meta_graph=case.writer == "mp_compat" and VERSION == "1.15",
          write_state=False,
        )
      return saved, training.run(sess, FEEDS[BEFORE:])


def main():
  directory = os.path.join(GOLDENS, VERSION)
  shutil.rmtree(directory, ignore_errors=True)
  os.makedirs(directory)
  expected = {}
  for case in list_cases(VERSION):
    for when, values in zip(["saved", "after"], make(case, directory)):
      expected.update(
        {
          "{}/{}/{}".format(case.name, when, name): value
          for name, value in values.items()
        }
      )
  if os.path.exists(os.path.join(directory, "checkpoint")):
    os.remove(os.path.join(directory, "checkpoint"))
  np.savez_compressed(os.path.join(directory, "expected.npz"), **expected)


if __name__ == "__main__":
  tf.disable_eager_execution()
  main()
