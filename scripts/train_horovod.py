# SPDX-License-Identifier: Apache-2.0
"""Trains with Horovod on several ranks, started by mpirun, while one of them overflows.

    python scripts/train_horovod.py --ranks 2

Every rank prints its state after every attempt. The states are equal to the bit.
"""

import argparse
import sys

import cluster


def work(arguments):
  """Runs one rank: trains, and prints the state after every step."""
  import horovod.tensorflow as hvd

  import mp_compat

  tf = cluster.tensorflow(arguments)
  hvd.init()

  model = cluster.Model(tf, mp_compat, arguments.dtype)
  global_step = tf.train.get_or_create_global_step()
  scale = mp_compat.DynamicLossScale(cluster.INITIAL_SCALE, cluster.INCREMENT_PERIOD)
  opt = tf.train.MomentumOptimizer(cluster.LEARNING_RATE, 0.9)
  if arguments.order == "outside":
    # Gradients are still scaled when Horovod compresses them to float16.
    opt = hvd.DistributedOptimizer(opt, compression=hvd.Compression.fp16)
    opt = mp_compat.MixedPrecisionLossScaleOptimizer(opt, scale)
  else:
    opt = mp_compat.MixedPrecisionLossScaleOptimizer(opt, scale)
    opt = hvd.DistributedOptimizer(opt)
  train_op = opt.minimize(model.loss(), global_step)
  state = {v.op.name: v for v in tf.global_variables()}

  digits = cluster.Digits(arguments)
  record = cluster.Record("rank-{}".format(hvd.rank()), arguments.record)
  with tf.train.MonitoredTrainingSession(
    hooks=[hvd.BroadcastGlobalVariablesHook(0)], log_step_count_steps=None
  ) as sess:
    for attempt in range(arguments.steps):
      sess.run(train_op, digits.feed(model, attempt, hvd.rank(), hvd.size()))
      record.add(attempt, sess.run(state))
  record.save()


def launch(arguments):
  """Starts all ranks, and waits for them."""
  with cluster.Processes(arguments.timeout) as processes:
    processes.wait(
      processes.start(
        "mpirun",
        "--allow-run-as-root",
        "--oversubscribe",
        "-np",
        str(arguments.ranks),
        sys.executable,
        *sys.argv,
        "--task",
        "0",
      )
    )


def main():
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument("--ranks", type=int, default=2, help="default: %(default)s")
  parser.add_argument(
    "--order",
    choices=["outside", "inside"],
    default="outside",
    help="put the loss scaling outside or inside hvd.DistributedOptimizer; default: %(default)s",
  )
  cluster.add_arguments(parser)
  arguments = parser.parse_args()
  (launch if arguments.task is None else work)(arguments)


if __name__ == "__main__":
  main()
