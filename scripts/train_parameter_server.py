# SPDX-License-Identifier: Apache-2.0
"""Trains with a parameter server and several workers, asynchronous or synchronous, while one of them overflows.

    python scripts/train_parameter_server.py --workers 2
    python scripts/train_parameter_server.py --workers 2 --sync     SyncReplicasOptimizer around the loss scaling

Starts the server and the workers itself, on loopback. The workers share the variables, including those of the loss
scale. `--kill STEP` kills the last worker with SIGKILL after that attempt, and starts it again.
"""

import argparse
import json
import signal
import sys
import time

import cluster

STARTED, FINISHED = 1, 2
UNLIMITED = 10**9


def serve(arguments):
  """Runs the parameter server, which holds the variables, until it is killed."""
  tf = cluster.tensorflow(arguments)
  tf.train.Server(json.loads(arguments.cluster), "ps", 0).join()


def work(arguments):
  """Runs one worker: trains, and prints the state after every step."""
  import mp_compat

  tf, spec = cluster.tensorflow(arguments), json.loads(arguments.cluster)
  server = tf.train.Server(spec, "worker", arguments.task)
  chief = arguments.task == 0

  model = cluster.Model(tf, mp_compat, arguments.dtype)
  with tf.device(tf.train.replica_device_setter(cluster=tf.train.ClusterSpec(spec))):
    global_step = tf.train.get_or_create_global_step()
    scale = mp_compat.DynamicLossScale(cluster.INITIAL_SCALE, cluster.INCREMENT_PERIOD)
    opt = scaled = mp_compat.MixedPrecisionLossScaleOptimizer(
      tf.train.MomentumOptimizer(cluster.LEARNING_RATE, 0.9), scale
    )
    hooks = []
    if arguments.sync:
      opt = tf.train.SyncReplicasOptimizer(scaled, replicas_to_aggregate=arguments.workers)
    train_op = opt.minimize(model.loss(), global_step)
    if arguments.sync:
      hooks.append(opt.make_session_run_hook(chief, num_tokens=0))  # no worker runs ahead
    stage = tf.get_variable("stage", [arguments.workers], tf.int32, tf.zeros_initializer(), trainable=False)
    stages = [tf.assign(stage[arguments.task], number) for number in (STARTED, FINISHED)]
  state = {v.op.name: v for v in tf.global_variables() if v is not stage}
  uninitialized = tf.report_uninitialized_variables(tf.global_variables())
  # With --sync the chief's queue runner computes the finite check: fetching it would consume other workers' gradients.
  fetched = {} if arguments.sync else {"applied": scaled.gradients_finite}

  digits = cluster.Digits(arguments)
  record = cluster.Record("worker-{}".format(arguments.task), arguments.record)
  config = tf.ConfigProto(device_filters=["/job:ps", "/job:worker/task:{}".format(arguments.task)])
  with tf.Session(server.target, config=config) as sess:
    while not chief and len(sess.run(uninitialized)):  # MonitoredTrainingSession would check every 30 s.
      time.sleep(0.1)
  # With --sync the chief's queue runner waits for gradients until its session is closed, after the grace period.
  with tf.train.MonitoredTrainingSession(
    server.target, chief, hooks=hooks, config=config, stop_grace_period_secs=1, log_step_count_steps=None
  ) as sess:

    def reach(number):
      """Waits until all workers have reached a stage."""
      sess.run(stages[number - 1])
      while (sess.run(stage) < number).any():
        time.sleep(0.05)

    reach(STARTED)
    for attempt in range(arguments.steps):
      _, applied = sess.run([train_op, fetched], digits.feed(model, attempt, arguments.task, arguments.workers))
      record.add(attempt, dict(sess.run(state), **applied))
    reach(FINISHED)
    if chief:
      record.tell("end", sess.run(state))
  record.save()
  cluster.leave()


def launch(arguments):
  """Starts the parameter server and all workers, and waits for the workers."""
  addresses = cluster.free_addresses(arguments.workers + 1)
  spec = json.dumps({"ps": addresses[:1], "worker": addresses[1:]})

  with cluster.Processes(arguments.timeout) as processes:

    def start(*which):
      return processes.start(sys.executable, *sys.argv, "--cluster", spec, *which)

    start("--task", "-1")
    last = arguments.workers - 1
    workers = [start("--task", str(task)) for task in range(last)]
    if arguments.kill is not None:
      killed = start("--task", str(last), "--steps", str(UNLIMITED))  # does not end before it is killed
      processes.wait_for_line("worker-{} attempt={} ".format(last, arguments.kill))
      killed.send_signal(signal.SIGKILL)
      killed.wait()
      print("worker-{} killed, and started anew".format(last), flush=True)
    workers.append(start("--task", str(last)))
    for worker in workers:
      processes.wait(worker)


def main():
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument("--workers", type=int, default=2, help="default: %(default)s")
  parser.add_argument("--sync", action="store_true", help="aggregate the gradients of all workers for every step")
  parser.add_argument("--kill", type=int, metavar="STEP", help="kill the last worker after this attempt")
  parser.add_argument("--cluster", help=argparse.SUPPRESS)
  cluster.add_arguments(parser)
  arguments = parser.parse_args()
  (launch if arguments.task is None else serve if arguments.task < 0 else work)(arguments)


if __name__ == "__main__":
  main()
