"""Accumulates sparse gradients on one of two workers with MultiWorkerMirroredStrategy.

tests/training/test_gradient_accumulation.py runs it. It prints the state after every window of two micro-batches, as
JSON. The third micro-batch of the second worker overflows.
"""

import json
import os

import numpy as np
import tensorflow.compat.v1 as tf

import mp_compat


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
      tf.train.GradientDescentOptimizer(0.125), mp_compat.DynamicLossScale(8.0, 100)
    )
    window = mp_compat.GradientAccumulator(opt)
    loss = tf.reduce_sum(tf.gather(table, rows) * tf.expand_dims(x, 1)) / strategy.num_replicas_in_sync
    return window.add(opt.compute_gradients(loss)), window.apply_gradients(window.mean(), global_step)

  with strategy.scope():
    add_op, train_op = strategy.extended.call_for_each_replica(replica)
    state = [
      strategy.experimental_local_results(v)[0]
      for v in tf.global_variables()
      if v.op.name in ("table", "global_step", "current_loss_scale")
    ]
  states = []
  with tf.Session(server.target, config=config) as sess:
    sess.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
    for micro_batch in range(6):
      first = np.inf if (worker, micro_batch) == (1, 2) else 1.0 + worker
      sess.run(add_op, {x: [first, 2.0], rows: [worker, 3]})
      if micro_batch % 2:
        sess.run(train_op)
        states.append({v.op.name: value.tolist() for v, value in zip(state, sess.run(state))})
  print(json.dumps(states), flush=True)
  os._exit(0)  # skips the shutdown of the server: the workers have no barrier before it


if __name__ == "__main__":
  main()
