"""Functions that restore the golden checkpoints and load the values that their writers
recorded.
"""

import os

import numpy as np
import pytest

from mp_compat import checkpoints
from tests import testing
from tests.checkpoints import golden_cases
from tests.testing import tf

# the inputs of the steps after saving
FEEDS_AFTER = golden_cases.FEEDS[golden_cases.BEFORE :]
VERSIONS = sorted(
  name for name in os.listdir(golden_cases.GOLDENS) if name[0].isdigit()
)
ENDS = ("1.15", "2.21")  # versions between them write the same


def _is_by_default(version, case):
  """Returns whether the tests read a golden by default: Momentum's variables have no
  names that scopes change.
  """
  return version in ENDS and not (case.optimizer == "momentum" and case.scope)


GOLDENS = [
  pytest.param(
    version,
    case,
    id=version + "-" + case.name,
    marks=[] if _is_by_default(version, case) else [pytest.mark.matrix],
  )
  for version in VERSIONS
  for case in golden_cases.list_cases(version)
]
BY_NAME = [param for param in GOLDENS if param.values[1].kind != "objects"]
SESSIONS = [
  param
  for param in GOLDENS
  if param.values[0] in ENDS and param.values[1].kind == "session"
]


def golden_path(version, case):
  return os.path.join(golden_cases.GOLDENS, version, case.name)


def to_our_name(name, case):
  """Returns our name of the writer's variable `name`. Adam's powers have the same names
  as without loss scaling.
  """
  scope, last = case.scope + "/" if case.scope else "", name.split("/")[-1]
  if last.startswith("beta"):
    return (
      scope
      + last[: len("beta1_power")]
      + ("_1" if name.startswith("cond_3/") or last.endswith("_1") else "")
    )
  return scope + "current_loss_scale" if last == "loss_scale" else name


def rename_to_ours(values, case):
  """Returns {our name: value} for {writer's name: value}."""
  return {to_our_name(name, case): value for name, value in values.items()}


def assert_equal(values, expected):
  assert sorted(values) == sorted(expected)
  for name, value in expected.items():
    assert values[name].tobytes() == value.tobytes(), (name, values[name], value)


def restore(*args):
  """Returns the values of all variables after restoring; see `restore_and_continue`."""
  return restore_and_continue(*args)[0]


def restore_and_continue(writer, case, path, saver=checkpoints.Saver, control_flow=1):
  """Restores into a graph with the writer's optimizer and trains the steps after
  saving.

  Returns the values of all variables after restoring, and after these steps.
  """
  with testing.control_flow(control_flow), tf.Graph().as_default():
    training = golden_cases.GoldenTraining(case._replace(writer=writer))
    restorer = saver()
    with testing.session() as sess:
      restorer.restore(sess, path)
      return training.run(sess, ()), training.run(sess, FEEDS_AFTER)


def copy_golden(case, prefix):
  """Copies a checkpoint that TensorFlow 1.15 wrote to the path `prefix`."""
  for part in (".index", ".data-00000-of-00001"):
    tf.gfile.Copy(golden_path("1.15", case) + part, prefix + part, overwrite=True)


def save_variables(path, values):
  """Saves variables with these values, by name."""
  with tf.Graph().as_default():
    variables = {
      name: tf.Variable(value, use_resource=True) for name, value in values.items()
    }
    with testing.initialized_session() as sess:
      tf.train.Saver(variables).save(sess, path)


def load_expected(version, case, when):
  """Returns the recorded values of the writer's variables, by name; `when` is "saved"
  or "after".
  """
  prefix = "{}/{}/".format(case.name, when)
  recorded = np.load(os.path.join(golden_cases.GOLDENS, version, "expected.npz"))
  return {
    key[len(prefix) :]: recorded[key]
    for key in recorded.files
    if key.startswith(prefix)
  }


def load_expected_renamed(version, case, when):
  """Returns the recorded values by our names; see `load_expected`."""
  return rename_to_ours(load_expected(version, case, when), case)
