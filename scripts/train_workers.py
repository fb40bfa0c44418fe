# SPDX-License-Identifier: Apache-2.0
"""Trains on several workers with MultiWorkerMirroredStrategy, in graph mode, while one of them overflows.

    python scripts/train_workers.py --workers 2

Starts the workers itself, on loopback. Every worker prints its state after every attempt. If a step overflows on one
worker, all workers skip it. Their states are equal to the bit.
"""

import argparse
import json
import os
import sys

import cluster


def work(arguments):
  """Runs one worker: trains, and prints the state after every step."""
  import mp_compat

  tf = cluster.tensorflow(arguments)

  strategy = tf.distribute.experimental.MultiWorkerMirroredStrategy()  # reads TF_CONFIG
  config = strategy.update_config_proto(tf.ConfigProto())
  server = tf.train.Server(json.loads(os.environ["TF_CONFIG"])["cluster"], "worker", arguments.task, config=config)

  model = cluster.Model(tf, mp_compat, arguments.dtype)

  def step():
    global_step = tf.train.get_or_create_global_step()
    scale = mp_compat.DynamicLossScale(cluster.INITIAL_SCALE, cluster.INCREMENT_PERIOD)
    opt = mp_compat.MixedPrecisionLossScaleOptimizer(tf.train.MomentumOptimizer(cluster.LEARNING_RATE, 0.9), scale)
    return opt.minimize(model.loss() / strategy.num_replicas_in_sync, global_step)  # gradients are summed over replicas

  with strategy.scope():
    train_op = strategy.extended.call_for_each_replica(step)
  state = {v.op.name: strategy.experimental_local_results(v)[0] for v in tf.global_variables()}
  digits = cluster.Digits(arguments)
  record = cluster.Record("worker-{}".format(arguments.task), arguments.record)
  with tf.Session(server.target, config=config) as sess:
    sess.run(tf.global_variables_initializer())
    for attempt in range(arguments.steps):
      sess.run(train_op, digits.feed(model, attempt, arguments.task, arguments.workers))
      record.add(attempt, sess.run(state))
  record.save()
  cluster.leave()


def launch(arguments):
  """Starts all workers, and waits for them."""
  addresses = cluster.free_addresses(arguments.workers)
  with cluster.Processes(arguments.timeout) as processes:
    workers = [
      processes.start(
        sys.executable,
        *sys.argv,
        "--task",
        str(task),
        TF_CONFIG=json.dumps({"cluster": {"worker": addresses}, "task": {"type": "worker", "index": task}}),
      )
      for task in range(arguments.workers)
    ]
    for worker in workers:
      processes.wait(worker)


def main():
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument("--workers", type=int, default=2, help="default: %(default)s")
  cluster.add_arguments(parser)
  arguments = parser.parse_args()
  (launch if arguments.task is None else work)(arguments)


if __name__ == "__main__":
  main()
