# SPDX-License-Identifier: Apache-2.0
"""Trains on several workers with MultiWorkerMirroredStrategy, in graph mode, while one
of them overflows.

    python examples/train_workers.py --workers 2

Starts the workers itself, on loopback. Every worker prints its state after every
attempt. If a step overflows on one worker, all workers skip it. Their states are equal
to the bit.
"""

import json
import os
import sys

from absl import flags
import cluster
import common_flags

FLAGS = flags.FLAGS
flags.adopt_module_key_flags(cluster)


def work():
  """Runs one worker: trains, and prints the state after every step."""
  import mp_compat

  tf = cluster.tensorflow()

  strategy = tf.distribute.experimental.MultiWorkerMirroredStrategy()  # reads TF_CONFIG
  config = strategy.update_config_proto(tf.ConfigProto())
  server = tf.train.Server(
    json.loads(os.environ["TF_CONFIG"])["cluster"], "worker", FLAGS.task, config=config
  )

  model = cluster.Model(tf, mp_compat, FLAGS.dtype)

  def step():
    global_step = tf.train.get_or_create_global_step()
    scale = mp_compat.DynamicLossScale(cluster.INITIAL_SCALE, cluster.INCREMENT_PERIOD)
    opt = mp_compat.MixedPrecisionLossScaleOptimizer(
      tf.train.MomentumOptimizer(cluster.LEARNING_RATE, 0.9), scale
    )
    # gradients are summed over replicas
    return opt.minimize(model.loss() / strategy.num_replicas_in_sync, global_step)

  with strategy.scope():
    train_op = strategy.extended.call_for_each_replica(step)
  state = {
    v.op.name: strategy.experimental_local_results(v)[0] for v in tf.global_variables()
  }
  digits = cluster.Digits(FLAGS.batch, FLAGS.overflow_at)
  record = cluster.Record("worker-{}".format(FLAGS.task))
  with tf.Session(server.target, config=config) as sess:
    sess.run(tf.global_variables_initializer())
    for attempt in range(FLAGS.steps):
      sess.run(train_op, digits.feed(model, attempt, FLAGS.task, FLAGS.workers))
      record.add(attempt, sess.run(state))
  record.save()
  cluster.leave()


def launch():
  """Starts all workers, and waits for them."""
  addresses = cluster.free_addresses(FLAGS.workers)
  with cluster.Processes(FLAGS.timeout) as processes:
    workers = [
      processes.start(
        sys.executable,
        *sys.argv,
        "--task",
        str(task),
        TF_CONFIG=json.dumps(
          {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": task}}
        ),
      )
      for task in range(FLAGS.workers)
    ]
    for worker in workers:
      processes.wait(worker)


def main(argv):
  common_flags.no_arguments(argv)
  (launch if FLAGS.task is None else work)()


if __name__ == "__main__":
  common_flags.run(main)
