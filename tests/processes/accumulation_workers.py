"""Accumulates sparse gradients on one of two workers with MultiWorkerMirroredStrategy; run by test_accumulation.

Prints, as JSON, the state after every micro-batch. On the second worker the third micro-batch overflows.
"""

import json
import os

import numpy as np
import tensorflow.compat.v1 as tf

import mp_compat

OVERFLOW = 2


def inputs(worker, micro_batch):
  """Returns what the two looked-up rows are multiplied by, float32 [2]."""
  return [np.inf if (worker, micro_batch) == (1, OVERFLOW) else 1. + worker, 2.]


def main():
  tf.disable_eager_execution()
  tf.disable_control_flow_v2()
  environment = json.loads(os.environ["TF_CONFIG"])
  worker = environment["task"]["index"]
  strategy = tf.distribute.experimental.MultiWorkerMirroredStrategy()
  config = strategy.update_config_proto(tf.ConfigProto())
  server = tf.train.Server(environment["cluster"], "worker", worker, config=config)
  x, rows = tf.placeholder(tf.float32, [2]), tf.placeholder(tf.int32, [2])

  def replica():
    global_step = tf.train.get_or_create_global_step()
    table = tf.get_variable("table", initializer=np.ones([4, 2], np.float32), use_resource=True)
    opt = mp_compat.MixedPrecisionLossScaleOptimizer(
        tf.train.GradientDescentOptimizer(.125), mp_compat.DynamicLossScale(8., 100))
    window = mp_compat.GradientAccumulator(opt)
    loss = tf.reduce_sum(tf.gather(table, rows) * tf.expand_dims(x, 1)) / strategy.num_replicas_in_sync
    return window.add(opt.compute_gradients(loss)), window.apply_gradients(window.mean(), global_step)

  with strategy.scope():
    add_op, train_op = strategy.extended.call_for_each_replica(replica)
    state = [strategy.experimental_local_results(v)[0] for v in tf.global_variables()
             if v.op.name in ("table", "global_step", "current_loss_scale")]
  said = []
  with tf.Session(server.target, config=config) as sess:
    sess.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
    for micro_batch in range(6):
      sess.run(add_op, {x: inputs(worker, micro_batch), rows: [worker, 3]})
      if micro_batch % 2:
        sess.run(train_op)
        said.append({v.op.name: value.tolist() for v, value in zip(state, sess.run(state))})
  print(json.dumps(said), flush=True)
  os._exit(0)  # no barrier ends the other worker's collectives


if __name__ == "__main__":
  main()
