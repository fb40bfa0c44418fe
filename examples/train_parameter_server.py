# SPDX-License-Identifier: Apache-2.0
"""Trains with a parameter server and several workers, asynchronous or synchronous,
while one of them overflows.

    python examples/train_parameter_server.py --workers 2
    python examples/train_parameter_server.py --workers 2 --sync     SyncReplicasOptimizer around the loss scaling

Starts the server and the workers itself, on loopback. The workers share the variables,
including those of the loss scale. `--kill STEP` kills the last worker with SIGKILL
after that attempt, and starts it again.
"""

import json
import signal
import sys
import time

from absl import flags
import cluster
import common_flags

FLAGS = flags.FLAGS
flags.adopt_module_key_flags(cluster)
flags.DEFINE_bool(
  "sync", False, "Aggregate the gradients of all workers for every step."
)
flags.DEFINE_integer(
  "kill",
  None,
  "Kill the last worker after this attempt, and start it again.",
  lower_bound=0,
)
flags.DEFINE_string(
  "cluster", None, "For processes that the program starts: the addresses, as JSON."
)


@flags.multi_flags_validator(["kill", "steps"], "--kill must be less than --steps")
def _kill_before_last_step(values):
  return values["kill"] is None or values["kill"] < values["steps"]


STARTED, FINISHED = 1, 2
UNLIMITED = 10**9


def serve():
  """Runs the parameter server, which holds the variables, until it is killed."""
  tf = cluster.tensorflow()
  tf.train.Server(json.loads(FLAGS.cluster), "ps", 0).join()


def work():
  """Runs one worker: trains, and prints the state after every step."""
  import mp_compat

  tf, spec = cluster.tensorflow(), json.loads(FLAGS.cluster)
  server = tf.train.Server(spec, "worker", FLAGS.task)
  chief = FLAGS.task == 0

  model = cluster.Model(tf, mp_compat, FLAGS.dtype)
  with tf.device(tf.train.replica_device_setter(cluster=tf.train.ClusterSpec(spec))):
    global_step = tf.train.get_or_create_global_step()
    scale = mp_compat.DynamicLossScale(cluster.INITIAL_SCALE, cluster.INCREMENT_PERIOD)
    opt = scaled = mp_compat.MixedPrecisionLossScaleOptimizer(
      tf.train.MomentumOptimizer(cluster.LEARNING_RATE, 0.9), scale
    )
    hooks = []
    if FLAGS.sync:
      opt = tf.train.SyncReplicasOptimizer(scaled, replicas_to_aggregate=FLAGS.workers)
    train_op = opt.minimize(model.loss(), global_step)
    if FLAGS.sync:
      # no worker runs ahead
      hooks.append(opt.make_session_run_hook(chief, num_tokens=0))
    stage = tf.get_variable(
      "stage", [FLAGS.workers], tf.int32, tf.zeros_initializer(), trainable=False
    )
    stages = [tf.assign(stage[FLAGS.task], number) for number in (STARTED, FINISHED)]
  state = {v.op.name: v for v in tf.global_variables() if v is not stage}
  uninitialized = tf.report_uninitialized_variables(tf.global_variables())
  # With --sync the chief's queue runner computes the finite check: fetching it would
  # consume other workers' gradients.
  fetched = {} if FLAGS.sync else {"applied": scaled.gradients_finite}

  digits = cluster.Digits(FLAGS.batch, FLAGS.overflow_at)
  record = cluster.Record("worker-{}".format(FLAGS.task))
  config = tf.ConfigProto(
    device_filters=["/job:ps", "/job:worker/task:{}".format(FLAGS.task)]
  )
  with tf.Session(server.target, config=config) as sess:
    # MonitoredTrainingSession would check every 30 s.
    while not chief and len(sess.run(uninitialized)):
      time.sleep(0.1)
  # With --sync the chief's queue runner waits for gradients until its session is
  # closed, after the grace period.
  with tf.train.MonitoredTrainingSession(
    server.target,
    chief,
    hooks=hooks,
    config=config,
    stop_grace_period_secs=1,
    log_step_count_steps=None,
  ) as sess:

    def reach(number):
      """Waits until all workers have reached a stage."""
      sess.run(stages[number - 1])
      while (sess.run(stage) < number).any():
        time.sleep(0.05)

    reach(STARTED)
    for attempt in range(FLAGS.steps):
      _, applied = sess.run(
        [train_op, fetched], digits.feed(model, attempt, FLAGS.task, FLAGS.workers)
      )
      record.add(attempt, dict(sess.run(state), **applied))
    reach(FINISHED)
    if chief:
      record.tell("end", sess.run(state))
  record.save()
  cluster.leave()


def launch():
  """Starts the parameter server and all workers, and waits for the workers."""
  addresses = cluster.free_addresses(FLAGS.workers + 1)
  spec = json.dumps({"ps": addresses[:1], "worker": addresses[1:]})

  with cluster.Processes(FLAGS.timeout) as processes:

    def start(*which):
      return processes.start(sys.executable, *sys.argv, "--cluster", spec, *which)

    start("--task", "-1")
    last = FLAGS.workers - 1
    workers = [start("--task", str(task)) for task in range(last)]
    if FLAGS.kill is not None:
      # does not end before it is killed
      killed = start("--task", str(last), "--steps", str(UNLIMITED))
      processes.wait_for_line("worker-{} attempt={} ".format(last, FLAGS.kill))
      killed.send_signal(signal.SIGKILL)
      killed.wait()
      print("worker-{} killed, and started anew".format(last), flush=True)
    workers.append(start("--task", str(last)))
    for worker in workers:
      processes.wait(worker)


def main(argv):
  common_flags.no_arguments(argv)
  (launch if FLAGS.task is None else serve if FLAGS.task < 0 else work)()


if __name__ == "__main__":
  common_flags.run(main)
