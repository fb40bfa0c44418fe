"""A process of a cluster with a parameter server, whose hooks count the steps of all workers in the graph.

    python -m tests.processes.counting_workers CLUSTER JOB TASK

A worker trains for two steps, the second of which overflows, and prints the counts; then it waits for a line.
"""

import json
import os
import sys

import numpy as np
import tensorflow.compat.v1 as tf

import mp_compat


def main(cluster, job, task):
  tf.disable_eager_execution()
  server = tf.train.Server(json.loads(cluster), job, int(task))
  if job == "ps":
    server.join()
  worker, spec = "/job:worker/task:" + task, tf.train.ClusterSpec(json.loads(cluster))
  with tf.device(tf.train.replica_device_setter(worker_device=worker, cluster=spec)):
    global_step = tf.train.get_or_create_global_step()
    x = tf.placeholder(tf.float32, [])
    w = tf.get_variable("w", [], initializer=tf.zeros_initializer())
    opt = mp_compat.MixedPrecisionLossScaleOptimizer(tf.train.GradientDescentOptimizer(1.0), 8.0)
    train_op = opt.minimize(w * x, global_step)
  hook = mp_compat.LossScaleHook(opt, counters_in_graph=True)
  with tf.train.MonitoredTrainingSession(
    server.target,
    is_chief=task == "0",
    hooks=[hook],
    config=tf.ConfigProto(device_filters=["/job:ps", worker]),
    log_step_count_steps=None,
    max_wait_secs=10,
  ) as sess:
    for value in (1.0, np.inf):
      sess.run(train_op, {x: value})
    print(json.dumps([hook.attempted, hook.skipped]), flush=True)
    sys.stdin.readline()
    os._exit(0)  # Threads of the server may still run.


if __name__ == "__main__":
  main(*sys.argv[1:])
