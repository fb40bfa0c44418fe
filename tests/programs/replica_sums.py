"""A program for test_replica_sums.py: trains on several CPU devices of one process, and
prints the rows whose variables differ after a step, as JSON.

    python -m tests.programs.replica_sums REPLICAS KINDS OPTIMIZER [OPTIMIZER ...]

KINDS is a part of "dense,sparse,clipped".
"""

import json
import sys

import numpy as np

from tests import testing
from tests.testing import native
from tests.testing import tf

STEPS = 4
# Which classes to wrap with, and their loss scales.
WRAPPERS = {
  "alone": lambda opt: opt,
  "dynamic": lambda opt: testing.Optimizer(opt, "dynamic"),
  "fixed": lambda opt: testing.Optimizer(opt, 1024.0),
  "tensorflow": lambda opt: native.MixedPrecisionLossScaleOptimizer(
    opt, native.DynamicLossScale()
  ),
}


def train(replicas, optimizer, sparse, clip, wrap):
  """Returns the values of all variables but those of the loss scale after each step."""
  random = np.random.RandomState(0)
  config = tf.ConfigProto(device_count={"CPU": replicas})
  with tf.Graph().as_default(), tf.Session(config=config) as sess:
    devices = ["/cpu:{}".format(index) for index in range(replicas)]
    strategy = tf.distribute.MirroredStrategy(devices)
    x = tf.placeholder(tf.float32, [replicas, 8, 5])
    rows = tf.placeholder(tf.int32, [replicas, 8])
    with strategy.scope():
      w, b, table = [
        tf.get_variable(name, initializer=random.normal(size=shape).astype(np.float32))
        for name, shape in [("w", [5, 4]), ("b", [4]), ("table", [9, 5])]
      ]
      opt = wrap(testing.OPTIMIZERS[optimizer]())

      def step():
        context = tf.distribute.get_replica_context()
        own = context.replica_id_in_sync_group
        inputs, variables = tf.gather(x, own), [w, b]
        if sparse:
          inputs += tf.nn.embedding_lookup(table, tf.gather(rows, own))
          variables.append(table)
        hidden = tf.tanh(tf.matmul(inputs, w) + b)
        # Graph optimizers reorder products of constants that are no powers of two,
        # unless a factor between them is a variable, such as a dynamic loss scale.
        pairs = opt.compute_gradients(tf.reduce_mean(hidden * hidden), variables)
        if clip:
          grads, variables = zip(*pairs)
          pairs = zip(tf.clip_by_global_norm(grads, 0.1)[0], variables)
        return opt.apply_gradients(pairs)

      train_op = strategy.group(strategy.extended.call_for_each_replica(step))
    sess.run(tf.global_variables_initializer())
    own = ("current_loss_scale", "good_steps")
    trained = {
      testing.plain_name(variable): variable
      for variable in tf.global_variables()
      if not variable.op.name.split("/")[0].startswith(own)
    }
    history = []
    for _ in range(STEPS):
      ids = random.randint(0, 9, size=[replicas, 8])
      sess.run(train_op, {x: random.normal(size=[replicas, 8, 5]), rows: ids})
      history.append(
        {name: value.tobytes() for name, value in sess.run(trained).items()}
      )
    return history


def main():
  tf.disable_v2_behavior()  # TensorFlow's class adds in another order in functions
  tf.enable_resource_variables()
  replicas, kinds, optimizers = int(sys.argv[1]), sys.argv[2].split(","), sys.argv[3:]
  different = []
  for optimizer in optimizers:
    for kind in kinds:
      alone, *others = [
        train(replicas, optimizer, kind != "dense", kind == "clipped", wrap)
        for wrap in WRAPPERS.values()
      ]
      for name, history in zip(list(WRAPPERS)[1:], others):
        if history != alone:
          different.append([optimizer, kind, name])
  print(json.dumps(different))


if __name__ == "__main__":
  main()
