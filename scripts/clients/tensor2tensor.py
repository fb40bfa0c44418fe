# SPDX-License-Identifier: Apache-2.0
"""Trains tensor2tensor's transformer with its own loss scaling, which is TensorFlow's, and then with mp_compat's.

    scripts/nox -s client-tensor2tensor

tensor2tensor is not modified. `t2t-trainer` scales the loss in two ways:

    half     activations in float16, with `tf.contrib.mixed_precision`
    rewrite  --gpu_automatic_mixed_precision, with `tf.train.experimental.enable_mixed_precision_graph_rewrite`

`python -m mp_compat run t2t-trainer` is the same program, but these names refer to mp_compat. This program exits
with an error unless, for each way,

- both print the same losses and write the same last checkpoint, to the bit;
- (half) each continues the checkpoint of the other, with equal results.

The task is to reverse binary numbers. The scale of `half` begins too high: its first steps overflow and are skipped.
The rewrite needs a GPU to change a graph; on CPUs the loss is scaled, and computed in float32.
"""

import argparse
import os
import re
import sys
import tempfile
import time

import client

TRAINER = os.path.join(os.path.dirname(sys.executable), "t2t-trainer")
SIZE = "batch_size=128,max_length=64,num_hidden_layers=1"
HALF = (
  "activation_dtype=float16,weight_dtype=float32,mixed_precision_optimizer_loss_scaler=exponential,"
  "mixed_precision_optimizer_init_loss_scale={}".format(2**28)
)
WAYS = {
  "half": ["--hparams={},{}".format(SIZE, HALF)],
  "rewrite": ["--hparams=" + SIZE, "--gpu_automatic_mixed_precision"],
}
# The name of Adam's power shows whose class built the train op.
POWER = {
  ("half", "tensorflow"): "training/cond/beta1_power",
  ("rewrite", "tensorflow"): "training/cond_1/beta1_power",
  ("half", "mp_compat"): "training/beta1_power",
  ("rewrite", "mp_compat"): "training/beta1_power",
}


def parse_arguments():
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--steps", type=int, default=20, help="applied steps of each training; default: %(default)s")
  return parser.parse_args()


def train(top, way, whose, name, first, last):
  """Runs tensor2tensor from step `first` to `last`; returns its printed losses and the path of its last checkpoint."""
  began, directory = time.time(), os.path.join(top, way, name)
  usr = os.path.join(os.path.dirname(os.path.abspath(__file__)), "t2t_usr")
  printed = client.run(
    client.PYTHON[whose]
    + [
      TRAINER,
      "--t2t_usr_dir=" + usr,
      "--problem=reverse_in_order",
      "--model=quick_transformer",
      "--schedule=train",
      "--hparams_set=transformer_test",
      "--generate_data",
      "--data_dir=" + os.path.join(top, "data"),
      "--tmp_dir=" + os.path.join(top, "tmp"),
      "--output_dir=" + directory,
      "--train_steps={}".format(last),
      "--random_seed=1",
      "--inter_op_parallelism_threads=1",
      "--intra_op_parallelism_threads=1",
      "--log_step_count_steps=1",
      "--iterations_per_loop={}".format(last),
    ]
    + WAYS[way]
  )
  losses = re.findall(r"INFO:tensorflow:loss = (\S+), step", printed)  # one per attempt
  path = os.path.join(directory, "model.ckpt-{}".format(last))
  found = client.variables(path)
  client.check(POWER[way, whose] in found, "{} has no {}: it is not of {}.".format(path, POWER[way, whose], whose))
  (scale,) = [value for name, value in found.items() if name in ("loss_scale", "current_loss_scale")]
  print(
    "{:<8} {:<28} {:>8} {:>9} {:>12g} {:>12} {} to {} {:>5.0f} s".format(
      way,
      name,
      len(losses),
      len(losses) - (last - first),
      scale,
      found["good_steps"],
      losses[0],
      losses[-1],
      time.time() - began,
    ),
    flush=True,
  )
  return losses, path


def main():
  steps = parse_arguments().steps
  with tempfile.TemporaryDirectory() as top:
    print(
      "{:<8} {:<28} {:>8} {:>9} {:>12} {:>12} loss".format(
        "way", "training", "attempts", "skipped", "loss scale", "good steps"
      ),
      flush=True,
    )
    for way in WAYS:
      losses, path = train(top, way, "tensorflow", "tensorflow", 0, steps)
      our_losses, our_path = train(top, way, "mp_compat", "mp_compat", 0, steps)
      client.check(losses == our_losses, "the losses differ:\n{}\n{}".format(losses, our_losses))
      count = client.check_same(path, our_path)
      print("The losses are the same text, the {} variables the same bits.".format(count), flush=True)
      if way == "rewrite":
        continue
      continued = []
      for source, whose, name in [
        (path, "mp_compat", "mp_compat after tensorflow"),
        (our_path, "tensorflow", "tensorflow after mp_compat"),
      ]:
        client.copy(source, os.path.join(top, way, name, os.path.basename(source)))
        continued.append(train(top, way, whose, name, steps, 2 * steps))
      client.check(
        continued[0][0] == continued[1][0],
        "the losses differ after the restart:\n{}\n{}".format(continued[0][0], continued[1][0]),
      )
      client.check_same(continued[0][1], continued[1][1])
      print("The losses are the same text, the variables the same bits.", flush=True)


if __name__ == "__main__":
  main()
