"""Trains with MirroredStrategy, or on a parameter server."""

import sys

import numpy as np
import tensorflow.compat.v1 as tf

tf.disable_v2_behavior()
if "server" in sys.argv:
  server = tf.train.Server.create_local_server()
  config, target, strategy = None, server.target, tf.distribute.get_strategy()
  placement = tf.device(
    tf.train.replica_device_setter(
      cluster=server.server_def.cluster,
      ps_device="/job:local/task:0",
      worker_device="/job:local/task:0",
    )
  )
else:
  config, target = tf.ConfigProto(device_count={"CPU": 2}), ""
  strategy, placement = (
    tf.distribute.MirroredStrategy(["/cpu:0", "/cpu:1"]),
    tf.device(None),
  )

with strategy.scope(), placement:
  x, w = tf.placeholder(tf.float32, [None, 3]), tf.get_variable("w", [3, 2])
  global_step = tf.train.get_or_create_global_step()
  opt = tf.train.experimental.MixedPrecisionLossScaleOptimizer(
    tf.train.MomentumOptimizer(0.1, 0.9), "dynamic"
  )

  def minimize():
    return opt.minimize(tf.reduce_mean(tf.square(tf.matmul(x, w))), global_step)

  train_op = strategy.group(strategy.extended.call_for_each_replica(minimize))
with tf.train.MonitoredTrainingSession(target, config=config) as sess:
  for step in range(6):
    sess.run(
      train_op, {x: np.random.normal(size=[4, 3]) * (np.inf if step == 3 else 1)}
    )
