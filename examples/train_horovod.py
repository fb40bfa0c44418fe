# SPDX-License-Identifier: Apache-2.0
"""Trains with Horovod on several ranks, started by mpirun, while one of them overflows.

    python examples/train_horovod.py --ranks 2

Every rank prints its state after every attempt. The states are equal to the bit.
"""

import sys

from absl import flags
import cluster
import common_flags

FLAGS = flags.FLAGS
flags.adopt_module_key_flags(cluster)
flags.DEFINE_alias("ranks", "workers")
flags.DEFINE_enum(
  "order",
  "outside",
  ["outside", "inside"],
  "Put the loss scaling outside or inside hvd.DistributedOptimizer.",
)


def work():
  """Runs one rank: trains, and prints the state after every step."""
  tf = cluster.tensorflow()  # first: it sets what TensorFlow reads while it is imported

  import horovod.tensorflow as hvd

  import mp_compat

  hvd.init()

  model = cluster.Model(tf, mp_compat, FLAGS.dtype)
  global_step = tf.train.get_or_create_global_step()
  scale = mp_compat.DynamicLossScale(cluster.INITIAL_SCALE, cluster.INCREMENT_PERIOD)
  opt = tf.train.MomentumOptimizer(cluster.LEARNING_RATE, 0.9)
  if FLAGS.order == "outside":
    # Gradients are still scaled when Horovod compresses them to float16.
    opt = hvd.DistributedOptimizer(opt, compression=hvd.Compression.fp16)
    opt = mp_compat.MixedPrecisionLossScaleOptimizer(opt, scale)
  else:
    opt = mp_compat.MixedPrecisionLossScaleOptimizer(opt, scale)
    opt = hvd.DistributedOptimizer(opt)
  train_op = opt.minimize(model.loss(), global_step)
  state = {v.op.name: v for v in tf.global_variables()}

  digits = cluster.Digits(FLAGS.batch, FLAGS.overflow_at)
  record = cluster.Record("rank-{}".format(hvd.rank()))
  with tf.train.MonitoredTrainingSession(
    hooks=[hvd.BroadcastGlobalVariablesHook(0)], log_step_count_steps=None
  ) as sess:
    for attempt in range(FLAGS.steps):
      sess.run(train_op, digits.feed(model, attempt, hvd.rank(), hvd.size()))
      record.add(attempt, sess.run(state))
  record.save()


def launch():
  """Starts all ranks, and waits for them."""
  with cluster.Processes(FLAGS.timeout) as processes:
    processes.wait(
      processes.start(
        "mpirun",
        "--allow-run-as-root",
        "--oversubscribe",
        "-np",
        str(FLAGS.workers),
        sys.executable,
        *sys.argv,
        "--task",
        "0",
      )
    )


def main(argv):
  common_flags.no_arguments(argv)
  (launch if FLAGS.task is None else work)()


if __name__ == "__main__":
  common_flags.run(main)
