"""Trains with MirroredStrategy, or on servers in this process or another."""

import atexit
import contextlib
import json
import socket
import subprocess
import sys

import numpy as np
import tensorflow.compat.v1 as tf

PARAMETER_SERVER = """
import json, sys
import tensorflow.compat.v1 as tf
tf.train.Server(json.loads(sys.argv[1]), "ps", 0).join()
"""


def find_free_addresses(count):
  with contextlib.ExitStack() as stack:
    sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
    for each in sockets:
      each.bind(("localhost", 0))
    return ["localhost:{}".format(each.getsockname()[1]) for each in sockets]


def start_cluster():
  """Starts a parameter server, and returns the server of this process."""
  addresses = find_free_addresses(2)
  cluster = {"ps": addresses[:1], "worker": addresses[1:]}
  command = [sys.executable, "-c", PARAMETER_SERVER, json.dumps(cluster)]
  atexit.register(subprocess.Popen(command).kill)
  return tf.train.Server(cluster, "worker", 0)


def place(server, parameters, work):
  return tf.device(
    tf.train.replica_device_setter(
      cluster=server.server_def.cluster, ps_device=parameters, worker_device=work
    )
  )


tf.disable_v2_behavior()
config, strategy = None, tf.distribute.get_strategy()
placement = tf.device(None)
if "server" in sys.argv:
  server = tf.train.Server.create_local_server()
  targets, placement = [server.target], place(server, *["/job:local/task:0"] * 2)
elif "process" in sys.argv:
  server = start_cluster()
  targets, placement = [server.target], place(server, "/job:ps", "/job:worker/task:0")
  if "unplaced" in sys.argv:  # The server of this process is only the session's.
    placement = tf.device("/job:ps")
    targets = [server.target.replace("localhost", "127.0.0.1")]
elif "beside" in sys.argv:  # a server that the session does not use
  server = tf.train.Server.create_local_server()
  targets = [""]
elif "servers" in sys.argv:  # sessions of the same graph
  servers = [tf.train.Server({job: find_free_addresses(1)}, job, 0) for job in "ab"]
  targets = [each.target for each in servers] + [""]
else:
  config, targets = tf.ConfigProto(device_count={"CPU": 2}), [""]
  strategy = tf.distribute.MirroredStrategy(["/cpu:0", "/cpu:1"])

with strategy.scope(), placement:
  x, w = tf.placeholder(tf.float32, [None, 3]), tf.get_variable("w", [3, 2])
  global_step = tf.train.get_or_create_global_step()
  opt = tf.train.experimental.MixedPrecisionLossScaleOptimizer(
    tf.train.MomentumOptimizer(0.1, 0.9), "dynamic"
  )

  def minimize():
    return opt.minimize(tf.reduce_mean(tf.square(tf.matmul(x, w))), global_step)

  train_op = strategy.group(strategy.extended.call_for_each_replica(minimize))
for target in targets:
  with tf.train.MonitoredTrainingSession(target, config=config) as sess:
    for step in range(6):
      sess.run(
        train_op, {x: np.random.normal(size=[4, 3]) * (np.inf if step == 3 else 1)}
      )
