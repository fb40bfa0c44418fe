"""One of two workers that train with MultiWorkerMirroredStrategy in eager mode;
tests/keras/test_processes.py runs it.

Prints, as JSON, the weights, the loss scale and the iterations after every step: in a
custom loop and in Model.fit, for every family of optimizers. On the second worker the
second step overflows.
"""

import json
import os

import numpy as np
import tensorflow

from tests.keras import cases as keras_cases

STEPS = 4


def make_batches(worker):
  """Returns the inputs of all steps of a worker: an array [STEPS, 1, 2]."""
  xs = np.random.RandomState(worker).uniform(0.5, 1.5, [STEPS, 1, 2]).astype(np.float32)
  if worker == 1:
    xs[1, 0, 0] = np.inf
  return xs


def record(weights, opt):
  """Returns [weights, loss scale, iterations]."""
  return [
    np.asarray(weights).ravel().tolist(),
    float(keras_cases.scale_of(opt)),
    int(keras_cases.to_numpy(opt.iterations)),
  ]


def loop(strategy, family, xs):
  """Trains in a custom loop; yields a record after every step."""
  with strategy.scope():
    w, opt = (
      tensorflow.Variable([1.0, 2.0]),
      keras_cases.wrap(family.optimizers.SGD(0.1)),
    )

  def replica(x):
    with tensorflow.GradientTape() as tape:
      loss = opt.get_scaled_loss(tensorflow.reduce_sum(w * x))
    opt.apply_gradients(zip(opt.get_unscaled_gradients(tape.gradient(loss, [w])), [w]))

  step = tensorflow.function(lambda x: strategy.run(replica, args=(x,)))
  for x in xs:
    step(tensorflow.constant(x))
    yield record(w.numpy(), opt)


def fit(strategy, family, xs):
  """Trains with Model.fit; yields a record after every step."""
  with strategy.scope():
    model = family.keras.Sequential(
      [
        family.keras.layers.Input((2,)),
        family.keras.layers.Dense(1, use_bias=False, kernel_initializer="ones"),
      ]
    )
    opt = keras_cases.wrap(family.optimizers.SGD(0.1))
    model.compile(loss=family.keras.losses.MeanSquaredError(), optimizer=opt)
  options = tensorflow.data.Options()
  options.experimental_distribute.auto_shard_policy = (
    tensorflow.data.experimental.AutoShardPolicy.OFF
  )
  for x in xs:
    # Keras gives each worker half of the batch.
    both = (np.repeat(x, 2, axis=0), np.ones([2, 1], np.float32))
    data = tensorflow.data.Dataset.from_tensors(both).with_options(options)
    model.fit(data, verbose=0)
    yield record(model.get_weights()[0], opt)


def main():
  worker = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
  kind = getattr(tensorflow.distribute, "MultiWorkerMirroredStrategy", None)
  strategy = (kind or tensorflow.distribute.experimental.MultiWorkerMirroredStrategy)()
  records = {}
  for family in keras_cases.FAMILIES:
    # Keras 3's fit fails with this strategy and any optimizer.
    for train in (loop, fit) if family.name != "keras3" else (loop,):
      records["{} {}".format(family, train.__name__)] = list(
        train(strategy, family, make_batches(worker))
      )
  print("\n" + json.dumps(records), flush=True)
  os._exit(0)  # TensorFlow's collectives can crash in a normal exit.


if __name__ == "__main__":
  main()
