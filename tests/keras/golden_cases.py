"""Writes tests/keras/goldens: checkpoints and whole models of TensorFlow's own Keras
wrapper.

    python -m tests.keras.golden_cases        writes the folder of the installed TensorFlow

A run trains some steps, saves a checkpoint, and trains the remaining steps.
`expected.npz` holds the final state, which a run that is restored from the checkpoint
must reach.
"""

import glob
import os
import shutil

import numpy as np
import tensorflow

from tests import testing
from tests.keras import cases as keras_cases
from tests.testing import tf

FOLDER = os.path.join(os.path.dirname(__file__), "goldens")
SCALE, GROWTH = 8.0, 3  # initial loss scale, growth interval
BEFORE, AFTER = 5, 4  # steps before and after saving


def make_inputs():
  """Returns the inputs of the steps before saving and of those after it."""
  xs = list(testing.feeds(BEFORE + AFTER, (1,)))
  return xs[:BEFORE], xs[BEFORE:]


def make_checkpoint(run):
  return tensorflow.train.Checkpoint(optimizer=run.optimizer, w=run.w, table=run.table)


def finish(run):
  """Trains the steps after saving; returns the state of the run and its loss scale, as
  {name: array}.
  """
  for x in make_inputs()[1]:
    run.step(tf.constant(x))
  return dict(
    run.state(), scale=keras_cases.to_numpy(keras_cases.scale_of(run.optimizer))
  )


def train_model(family, optimizer):
  """Returns a compiled model, trained for one step."""
  keras = family.keras
  model = keras.Sequential(
    [keras.layers.Dense(2, input_shape=(3,), kernel_initializer="ones")]
  )
  model.compile(loss=keras.losses.MeanSquaredError(), optimizer=optimizer)
  model.fit(np.ones([4, 3], np.float32), np.ones([4, 2], np.float32), verbose=0)
  return model


def write(folder, family):
  """Writes the checkpoint, the expected state and the model of TensorFlow's class into
  a folder.
  """
  shutil.rmtree(folder, ignore_errors=True)
  os.makedirs(folder)
  run = keras_cases.Run(
    family.native_dynamic(family.optimizers.Adam(0.1), SCALE, GROWTH), sparse=False
  )
  for x in make_inputs()[0]:
    run.step(tf.constant(x))
  make_checkpoint(run).save(os.path.join(folder, "ckpt"))
  np.savez(os.path.join(folder, "expected.npz"), **finish(run))
  # 1.15's class has no configuration; later ones write as 2.10 does
  if (2, 0) <= keras_cases.VERSION < (2, 11):
    train_model(
      family, family.native_dynamic(family.optimizers.Adam(0.1), SCALE, GROWTH)
    ).save(os.path.join(folder, "model.h5"))


def find_folders():
  """Returns the paths of the folders of goldens, by TensorFlow version."""
  return {
    os.path.basename(folder): folder
    for folder in sorted(glob.glob(os.path.join(FOLDER, "*")))
  }


if __name__ == "__main__":
  with testing.eager_mode():
    write(os.path.join(FOLDER, "{}.{}".format(*keras_cases.VERSION)), keras_cases.V2)
