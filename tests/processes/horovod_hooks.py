"""Run on two ranks by mpirun: runs that rank 1 stalls, and one that restarts.

Arguments: a folder, in which each rank writes its results as JSON, and which is empty at
the first start.
"""

import json
import os
import sys

import horovod.tensorflow as hvd
import numpy as np
import tensorflow.compat.v1 as tf

import mp_compat


def sum_of_roots(product):
  return tf.reduce_sum(tf.sqrt(product))


def mean_of_ranks(product):
  return 0.5 * hvd.allreduce(tf.reduce_sum(product), average=False)


def build(x, loss=sum_of_roots):
  """Returns an optimizer around Horovod's, and its train op."""
  w = tf.get_variable("w", [2], initializer=tf.ones_initializer())
  opt = hvd.DistributedOptimizer(tf.train.GradientDescentOptimizer(0.1))
  opt = mp_compat.MixedPrecisionLossScaleOptimizer(opt, "dynamic")
  step = tf.train.get_or_create_global_step()
  return opt, opt.minimize(loss(w * x), step)


def stall(loss, value):
  """Returns the message of a run in which `value` of rank 1 is no good input."""
  with tf.Graph().as_default():
    x = tf.placeholder(tf.float32, [2])
    opt, train_op = build(x, loss)
    hook = mp_compat.LossScaleHook(opt, max_consecutive_skips=2)
    try:
      with tf.train.MonitoredTrainingSession(hooks=[hook]) as sess:
        for _ in range(5):
          sess.run(train_op, {x: [1.0, value if hvd.rank() else 1.0]})
    except mp_compat.LossScaleStalledError as error:
      return str(error)
  return ""


def count(folder, is_hook_first):
  """Returns the attempts after three more steps of a run that only rank 0 saves."""
  with tf.Graph().as_default():
    x = tf.placeholder(tf.float32, [2])
    opt, train_op = build(x)
    hook = mp_compat.LossScaleHook(opt, counters_in_graph=True)
    hooks = [hook, hvd.BroadcastGlobalVariablesHook(0)]
    with tf.train.MonitoredTrainingSession(
      checkpoint_dir=folder if hvd.rank() == 0 else None,
      hooks=hooks if is_hook_first else hooks[::-1],
    ) as sess:
      for _ in range(3):
        sess.run(train_op, {x: [1.0, 1.0]})
    return hook.attempted


def main():
  tf.disable_v2_behavior()
  hvd.init()
  results = {
    "stall": stall(sum_of_roots, 0.0),
    "forward stall": stall(mean_of_ranks, np.inf),
  }
  for order in ("hook first", "hook last"):
    folder = os.path.join(sys.argv[1], order)
    results[order] = [count(folder, order == "hook first") for _ in range(2)]
  with open(os.path.join(sys.argv[1], "rank{}.json".format(hvd.rank())), "w") as file:
    json.dump(results, file)


if __name__ == "__main__":
  np.seterr(all="ignore")
  main()
