"""Trains all cases on one rank and records all variables after every step;
test_horovod.py runs it on every rank.

Usage: mpirun -np 2 python horovod_ranks.py DIRECTORY
"""

import os
import sys

import horovod.tensorflow as hvd
import horovod.tensorflow.keras as keras_hvd
import numpy as np
import tensorflow.compat.v1 as tf

import mp_compat
from mp_compat.graph import gate

STEPS = 12
SCALE = dict(initial_loss_scale=2.0**10, increment_period=4)


def x_of(rank, step):
  """Returns the input of a step. It is not finite on the last rank in steps 3 and 8."""
  if rank == hvd.size() - 1 and step in (3, 8):
    return [np.inf if step == 3 else np.nan, 1.0]
  return [1.0 + rank, 2.0]


def scaled(opt, **kwargs):
  return mp_compat.MixedPrecisionLossScaleOptimizer(
    opt, mp_compat.DynamicLossScale(**SCALE), **kwargs
  )


def clip(grads_and_vars):
  return [
    (tf.clip_by_value(tf.convert_to_tensor(g), -1.0, 1.0), v) for g, v in grads_and_vars
  ]


def densify(grads_and_vars):
  return [(tf.convert_to_tensor(g), v) for g, v in grads_and_vars]


def adasum(grads_and_vars):
  return [(hvd.allreduce(g, op=hvd.Adasum), v) for g, v in densify(grads_and_vars)]


# The first function creates the optimizer. The second, if any, changes the gradients
# before apply_gradients.
CASES = {
  "outside": (lambda opt: scaled(hvd.DistributedOptimizer(opt)),),
  "inside": (lambda opt: hvd.DistributedOptimizer(scaled(opt)),),
  "outside, fp16": (
    lambda opt: scaled(hvd.DistributedOptimizer(opt, compression=hvd.Compression.fp16)),
  ),
  "inside, fp16": (
    lambda opt: hvd.DistributedOptimizer(scaled(opt), compression=hvd.Compression.fp16),
  ),
  "outside, dense": (
    lambda opt: scaled(hvd.DistributedOptimizer(opt, sparse_as_dense=True)),
  ),
  "inside, dense": (
    lambda opt: hvd.DistributedOptimizer(scaled(opt), sparse_as_dense=True),
  ),
  "outside, clipped": (lambda opt: scaled(hvd.DistributedOptimizer(opt)), clip),
  "inside, clipped": (lambda opt: hvd.DistributedOptimizer(scaled(opt)), clip),
  "outside, two passes": (
    lambda opt: scaled(
      hvd.DistributedOptimizer(opt, backward_passes_per_step=2, sparse_as_dense=True)
    ),
  ),
  "inside, two passes": (
    lambda opt: hvd.DistributedOptimizer(
      scaled(opt), backward_passes_per_step=2, sparse_as_dense=True
    ),
  ),
  # Adasum requires the number of ranks to be a power of 2.
  "adasum of gradients": (scaled, adasum),
  "adasum of updates": (
    lambda opt: scaled(hvd.DistributedOptimizer(opt, op=hvd.Adasum)),
    densify,
  ),
  "unreduced": (
    lambda opt: scaled(opt, finite_reducer=mp_compat.horovod.all_ranks_finite),
    densify,
  ),
}


def train(case):
  """Trains a case. Returns {name: values after every step} of all variables.

  Each rank initializes the variables differently; rank 0 broadcasts its values.
  """
  wrap, between = (CASES[case] + (list,))[:2]
  with tf.Graph().as_default() as graph:
    x = tf.placeholder(tf.float32, [2])
    w = tf.get_variable(
      "w", [2], initializer=tf.constant_initializer(float(hvd.rank()))
    )
    table = tf.get_variable(
      "table", [5, 2], initializer=tf.constant_initializer(float(hvd.rank()))
    )
    global_step = tf.train.get_or_create_global_step()
    opt = wrap(tf.train.MomentumOptimizer(0.5, 0.9))
    loss = tf.reduce_sum(w * x) + tf.reduce_sum(
      tf.gather(table, [1, 1, 4 - hvd.rank()]) * x
    )
    train_op = opt.apply_gradients(between(opt.compute_gradients(loss)), global_step)
    gated = [
      op.name
      for op in graph.get_operations()
      if op.type.startswith("Horovod") and op in gate.gated_ops(op.graph).predicates
    ]
    assert not gated, gated
    state = {v.op.name: v for v in tf.global_variables()}
    after = []
    with tf.train.MonitoredTrainingSession(
      hooks=[hvd.BroadcastGlobalVariablesHook(0)], log_step_count_steps=None
    ) as sess:
      for step in range(STEPS):
        sess.run(train_op, {x: x_of(hvd.rank(), step)})
        after.append(sess.run(state))
  return {name: np.stack([values[name] for values in after]) for name in state}


def keras_scaled(opt):
  return mp_compat.keras.LossScaleOptimizer(opt, mp_compat.DynamicLossScale(**SCALE))


# Keras optimizers. "outside" is loss scaling around Horovod, as above.
KERAS_CASES = {
  "keras outside": lambda opt: keras_scaled(keras_hvd.DistributedOptimizer(opt)),
  "keras inside": lambda opt: keras_hvd.DistributedOptimizer(keras_scaled(opt)),
}


def train_keras(case):
  """Trains with a Keras optimizer's get_updates. Returns {name: values after every
  step} of all variables.
  """
  with tf.Graph().as_default():
    x = tf.placeholder(tf.float32, [2])
    w = tf.Variable([0.0, 0.0], name="w", use_resource=True)
    opt = KERAS_CASES[case](tf.keras.optimizers.SGD(0.5, momentum=0.9))
    train_ops = opt.get_updates(tf.reduce_sum(w * x), [w])
    state, after = {v.op.name: v for v in tf.global_variables()}, []
    with tf.Session() as sess:
      sess.run(tf.global_variables_initializer())
      for step in range(STEPS):
        sess.run(train_ops, {x: x_of(hvd.rank(), step)})
        after.append(sess.run(state))
  return {name: np.stack([values[name] for values in after]) for name in state}


def main():
  tf.logging.set_verbosity(tf.logging.ERROR)
  hvd.init()
  (directory,) = sys.argv[1:]
  runs = {
    case: train(case) for case in CASES if hvd.size() == 2 or "adasum" not in case
  }
  runs.update((case, train_keras(case)) for case in KERAS_CASES)
  np.savez(
    os.path.join(directory, "rank-{}.npz".format(hvd.rank())),
    **{
      case + "/" + name: values
      for case, variables in runs.items()
      for name, values in variables.items()
    },
  )


if __name__ == "__main__":
  main()
