"""What TensorFlow's own Keras wrapper leaves behind: checkpoints and whole models, for tests/keras/goldens.

    python -m tests.keras.golden_cases        writes those of the TensorFlow that runs it

A run trains to the middle, saves, and goes on: `expected.npz` holds what a faithful restoration must come to.
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
SCALE, GROWTH, BEFORE, AFTER = 8., 3, 5, 4


def inputs():
  xs = list(testing.feeds(BEFORE + AFTER, (1,)))
  return xs[:BEFORE], xs[BEFORE:]


def checkpoint(run):
  return tensorflow.train.Checkpoint(optimizer=run.optimizer, w=run.w, table=run.table)


def go_on(run):
  """The state after the rest of the steps; the scale is part of it."""
  for x in inputs()[1]:
    run.step(tf.constant(x))
  scale = run.optimizer.loss_scale
  return dict(run.state(), scale=keras_cases.numpy(scale() if callable(scale) else scale))


def model(family, optimizer):
  """A compiled model after a step."""
  keras = family.keras
  made = keras.Sequential([keras.layers.Dense(2, input_shape=(3,), kernel_initializer="ones")])
  made.compile(loss=keras.losses.MeanSquaredError(), optimizer=optimizer)
  made.fit(np.ones([4, 3], np.float32), np.ones([4, 2], np.float32), verbose=0)
  return made


def write(folder, family):
  """Writes one folder of files, of TensorFlow's class."""
  shutil.rmtree(folder, ignore_errors=True)
  os.makedirs(folder)
  run = keras_cases.Run(family.native_dynamic(family.optimizers.Adam(0.1), SCALE, GROWTH), sparse=False)
  for x in inputs()[0]:
    run.step(tf.constant(x))
  checkpoint(run).save(os.path.join(folder, "ckpt"))
  np.savez(os.path.join(folder, "expected.npz"), **go_on(run))
  if (2, 0) <= keras_cases.VERSION < (2, 11):  # 1.15's has no configuration; later ones write what 2.10 does
    model(family, family.native_dynamic(family.optimizers.Adam(0.1), SCALE, GROWTH)).save(
        os.path.join(folder, "model.h5"))


def folders():
  """The folders there are, by name."""
  return {os.path.basename(folder): folder for folder in sorted(glob.glob(os.path.join(FOLDER, "*")))}


if __name__ == "__main__":
  with testing.eager_mode():
    write(os.path.join(FOLDER, "{}.{}".format(*keras_cases.VERSION)), keras_cases.V2)
