# SPDX-License-Identifier: Apache-2.0
"""Runs a client's program with TensorFlow's loss scaling or mp_compat's, and compares the results."""

import glob
import os
import re
import shutil
import subprocess
import sys

import numpy as np

PYTHON = {"tensorflow": [sys.executable], "mp_compat": [sys.executable, "-m", "mp_compat", "run", "--"]}

# One thread and no GPU, so that sums have the same order in every run.
ENVIRONMENT = {
  "CUDA_VISIBLE_DEVICES": "-1",
  "OMP_NUM_THREADS": "1",
  "PYTHONHASHSEED": "0",
  "TF_CPP_MIN_LOG_LEVEL": "2",
  "TF_DETERMINISTIC_OPS": "1",
}


def check(promise, otherwise):
  if not promise:
    sys.exit("Failed: " + otherwise)


def run(command, cwd=None, **environment):
  """Runs a command and returns its output; exits with an error if the command fails."""
  everything = dict(os.environ, **dict(ENVIRONMENT, **environment))
  done = subprocess.run(command, cwd=cwd, env=everything, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
  check(
    not done.returncode, "{}\n{} ended with code {}.".format(done.stdout[-5000:], " ".join(command), done.returncode)
  )
  return done.stdout


def copy(source, target):
  """Copies a checkpoint, unchanged, to a new directory in which an Estimator finds it."""
  os.makedirs(os.path.dirname(target))
  for path in glob.glob(source + ".*"):
    shutil.copy(path, target + path[len(source) :])
  with open(os.path.join(os.path.dirname(target), "checkpoint"), "w") as file:
    file.write('model_checkpoint_path: "{}"\n'.format(os.path.basename(target)))


def variables(path):
  """Returns the values in a checkpoint by name."""
  os.environ.update(ENVIRONMENT)  # TensorFlow reads it when imported.
  import tensorflow.compat.v1 as tf

  reader = tf.train.load_checkpoint(path)
  return {name: np.asarray(reader.get_tensor(name)) for name in reader.get_variable_to_shape_map()}


def without_conditional(name):
  """Returns the name of one of Adam's powers without the conditional in which TensorFlow's classes create it."""
  return re.sub(r"\bcond(_\d+)?/(?=beta\d_power$)", "", name)


def check_same(path, other, spelling=without_conditional, except_for=()):
  """Checks that two checkpoints have the same names, dtypes, shapes and bits; exits with an error if not.

  Args:
    path: A checkpoint.
    other: Another checkpoint.
    spelling: A function that makes the names of both comparable.
    except_for: Names that are not compared.

  Returns:
    The number of variables compared.
  """
  one, two = [
    {
      spelling(name): (value.dtype, value.shape, value.tolist() if value.dtype == object else value.tobytes())
      for name, value in variables(one).items()
      if name not in except_for
    }
    for one in (path, other)
  ]
  different = sorted(name for name in set(one) | set(two) if one.get(name) != two.get(name))
  check(not different, "{} and {} differ in {}.".format(path, other, ", ".join(different)))
  return len(one)
