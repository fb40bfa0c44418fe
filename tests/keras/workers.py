"""One of two workers that train with MultiWorkerMirroredStrategy in eager TensorFlow; run by test_keras_processes.

Prints, as JSON, what its weights, scale and iterations were after every step: in a custom loop and under Model.fit, for
every family of optimizers. On the second worker the second step overflows.
"""

import json
import os

import numpy as np
import tensorflow

from mp_compat import keras as mp_keras
from tests.keras import cases as keras_cases

STEPS = 4


def batches(worker):
  """[STEPS, 1, 2]: the input of every step of this worker."""
  xs = np.random.RandomState(worker).uniform(.5, 1.5, [STEPS, 1, 2]).astype(np.float32)
  if worker == 1:
    xs[1, 0, 0] = np.inf
  return xs


def wrapped(family):
  return mp_keras.LossScaleOptimizer(family.optimizers.SGD(.1), initial_scale=8., dynamic_growth_steps=2)


def told(weights, opt):
  return [np.asarray(weights).ravel().tolist(), float(opt.loss_scale), int(keras_cases.numpy(opt.iterations))]


def loop(strategy, family, xs):
  with strategy.scope():
    w, opt = tensorflow.Variable([1., 2.]), wrapped(family)

  def replica(x):
    with tensorflow.GradientTape() as tape:
      loss = opt.get_scaled_loss(tensorflow.reduce_sum(w * x))
    opt.apply_gradients(zip(opt.get_unscaled_gradients(tape.gradient(loss, [w])), [w]))

  step = tensorflow.function(lambda x: strategy.run(replica, args=(x,)))
  for x in xs:
    step(tensorflow.constant(x))
    yield told(w.numpy(), opt)


def fit(strategy, family, xs):
  with strategy.scope():
    model = family.keras.Sequential([
        family.keras.layers.Input((2,)), family.keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")])
    opt = wrapped(family)
    model.compile(loss=family.keras.losses.MeanSquaredError(), optimizer=opt)
  options = tensorflow.data.Options()
  options.experimental_distribute.auto_shard_policy = tensorflow.data.experimental.AutoShardPolicy.OFF
  for x in xs:
    both = np.repeat(x, 2, axis=0), np.ones([2, 1], np.float32)  # Keras gives each worker its half of a batch.
    data = tensorflow.data.Dataset.from_tensors(both).with_options(options)
    model.fit(data, verbose=0)
    yield told(model.get_weights()[0], opt)


def main():
  worker = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
  kind = getattr(tensorflow.distribute, "MultiWorkerMirroredStrategy", None)
  strategy = (kind or tensorflow.distribute.experimental.MultiWorkerMirroredStrategy)()
  said = {}
  for family in keras_cases.FAMILIES:
    for how in (loop, fit) if family.name != "keras3" else (loop,):  # Keras 3's fit fails there with any optimizer.
      said["{} {}".format(family, how.__name__)] = list(how(strategy, family, batches(worker)))
  print("\n" + json.dumps(said), flush=True)
  os._exit(0)  # Leaving in good order, TensorFlow's collectives can crash.


if __name__ == "__main__":
  main()
