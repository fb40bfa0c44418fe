# SPDX-License-Identifier: Apache-2.0
"""Trains tensor2tensor's transformer with its own loss scaling, which is TensorFlow's,
and then with mp_compat's.

    scripts/nox -s client-tensor2tensor

tensor2tensor is not modified. `t2t-trainer` scales the loss in two ways:

    half     activations in float16, with `tf.contrib.mixed_precision`
    rewrite  --gpu_automatic_mixed_precision, with `tf.train.experimental.enable_mixed_precision_graph_rewrite`

In the run with mp_compat, these names refer to it. This program exits with an error
unless, for each way,

- two trainings with TensorFlow's class and one with mp_compat have the same variables
  after each step, to the bit;
- (half) so have three that continue: each class from the checkpoint of the other, and
  TensorFlow's from its own.

The task is to reverse binary numbers. The scale of `half` begins too high: its first
steps overflow and are skipped. The rewrite needs a GPU to change a graph; on CPUs the
loss is scaled, and computed in float32.
"""

import argparse
import os
import sys
import tempfile

import client

TRAINER = os.path.join(os.path.dirname(sys.executable), "t2t-trainer")
SIZE = "batch_size=128,max_length=64,num_hidden_layers=1"
HALF = "activation_dtype=float16,weight_dtype=float32,mixed_precision_optimizer_loss_scaler=exponential,mixed_precision_optimizer_init_loss_scale={}".format(
  2**28
)
WAYS = {
  "half": ["--hparams={},{}".format(SIZE, HALF)],
  "rewrite": ["--hparams=" + SIZE, "--gpu_automatic_mixed_precision"],
}


def train(top, way, steps):
  """Runs tensor2tensor up to a step with either class, and compares; returns the number
  of skipped steps.
  """
  return client.compare(
    top,
    TRAINER,
    "--t2t_usr_dir="
    + os.path.join(os.path.dirname(os.path.abspath(__file__)), "t2t_usr"),
    "--problem=reverse_in_order",
    "--model=quick_transformer",
    "--schedule=train",
    "--hparams_set=transformer_test",
    "--generate_data",
    "--data_dir=" + os.path.join(top, "data"),
    "--tmp_dir=" + os.path.join(top, "tmp"),
    "--output_dir=" + way,
    "--train_steps={}".format(steps),
    "--random_seed=1",
    "--inter_op_parallelism_threads=1",
    "--intra_op_parallelism_threads=1",
    "--iterations_per_loop={}".format(steps),
    *WAYS[way],
  )["skipped"]


def main():
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument(
    "--steps",
    type=int,
    default=20,
    help="applied steps of each training; default: %(default)s",
  )
  steps = parser.parse_args().steps
  with tempfile.TemporaryDirectory() as top:
    for way in WAYS:
      skipped = train(top, way, steps)
      client.check(
        bool(skipped) == (way == "half"),
        "{} steps of {} were skipped.".format(skipped, way),
      )
    client.exchange(top, "half")
    train(top, "half", 2 * steps)


if __name__ == "__main__":
  main()
