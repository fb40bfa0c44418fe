"""Restores the golden checkpoints, and compares them with what their writers recorded."""

import os

import numpy as np
import pytest

from mp_compat import checkpoints
from tests import testing
from tests.checkpoints import golden_cases
from tests.testing import tf

FEEDS_AFTER = golden_cases.FEEDS[golden_cases.BEFORE:]  # of the steps after saving
VERSIONS = sorted(name for name in os.listdir(golden_cases.GOLDENS) if name[0].isdigit())
GOLDENS = [pytest.param(version, case, id=version + "-" + case.name)
           for version in VERSIONS for case in golden_cases.cases(version)]
BY_NAME = [param for param in GOLDENS if param.values[1].kind != "objects"]
# The first and the last version: what those between them write is the same.
SESSIONS = [param for param in GOLDENS if param.values[0] in ("1.15", "2.21") and param.values[1].kind == "session"]


def golden(version, case):
  return os.path.join(golden_cases.GOLDENS, version, case.name)


def here(name, case):
  """What a variable of the writer's is called here. Adam's powers are as they were without loss scaling."""
  scope, last = case.scope + "/" if case.scope else "", name.split("/")[-1]
  if last.startswith("beta"):
    return scope + last[:len("beta1_power")] + ("_1" if name.startswith("cond_3/") or last.endswith("_1") else "")
  return scope + "current_loss_scale" if last == "loss_scale" else name


def renamed(values, case):
  """Returns values by the names that their variables have here."""
  return {here(name, case): value for name, value in values.items()}


def assert_equal(values, expected):
  assert sorted(values) == sorted(expected)
  for name, value in expected.items():
    assert values[name].tobytes() == value.tobytes(), (name, values[name], value)


def restored(writer, case, path, saver=checkpoints.Saver, feeds=(), control_flow=1):
  """All variables after restoring into a graph with this writer's optimizer, and going on for some steps."""
  with testing.control_flow(control_flow), tf.Graph().as_default():
    training = golden_cases.Training(case._replace(writer=writer))
    restorer = saver()
    with testing.session() as sess:
      restorer.restore(sess, path)
      return training.run(sess, feeds)


def copy_golden(case, prefix):
  """Copies a checkpoint that TensorFlow 1.15 wrote."""
  for part in (".index", ".data-00000-of-00001"):
    tf.gfile.Copy(golden("1.15", case) + part, prefix + part, overwrite=True)


def expected(version, case, when):
  """Returns the values of the writer's variables by name; `when` is "saved" or "after"."""
  prefix = "{}/{}/".format(case.name, when)
  recorded = np.load(os.path.join(golden_cases.GOLDENS, version, "expected.npz"))
  return {key[len(prefix):]: recorded[key] for key in recorded.files if key.startswith(prefix)}


def expected_here(version, case, when):
  """Returns what `expected` returns, by the names that the variables have here."""
  return renamed(expected(version, case, when), case)
