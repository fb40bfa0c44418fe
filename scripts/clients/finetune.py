# SPDX-License-Identifier: Apache-2.0
"""Trains an Estimator with finetune's mixed precision, which wraps its optimizer in TensorFlow's, then mp_compat's.

    scripts/nox -s client-finetune

finetune is not modified. Its `optimize_loss` makes a
`tf.compat.v1.train.experimental.MixedPrecisionLossScaleOptimizer`. `python -m mp_compat run` makes the name refer to
mp_compat. This program exits with an error unless

- both print the same losses, over steps that overflow and are skipped;
- both write the same last checkpoint, to the bit;
- each continues the checkpoint of the other, with equal results;
- mp_compat logs a warning: finetune's gradients come from `tf.gradients` and were never scaled.

One variable is not compared: finetune reads the step for `training_fraction` before or after it is incremented.
"""

import argparse
import os
import re
import tempfile
import time

import client

PROGRAM = os.path.join(os.path.dirname(os.path.abspath(__file__)), "programs", "finetune_estimator.py")
SCOPE = "OptimizeLoss/"
POWER = {"tensorflow": "beta1_power", "mp_compat": SCOPE + "beta1_power"}  # shows whose class built the train op
RACE = [SCOPE + "training_fraction"]


def parse_arguments():
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--steps", type=int, default=160, help="steps of each training; default: %(default)s")
  return parser.parse_args()


def spelling(name):
  """Returns the name of one of Adam's powers without the optimizer's scope, which TensorFlow's class drops."""
  return re.sub(SCOPE + r"(?=beta\d_power$)", "", name)


def train(top, whose, name, last):
  """Runs the program up to a step; returns its losses, and the path of its last checkpoint."""
  began, directory = time.time(), os.path.join(top, name)
  printed = client.run(client.PYTHON[whose] + [PROGRAM, directory, str(last)])
  losses = re.findall(r"^INFO:tensorflow:loss = (\S+), step", printed, re.M)
  path = os.path.join(directory, "model.ckpt-{}".format(last))
  found = client.variables(path)
  client.check(POWER[whose] in found, "{} has no {}: it is not of {}.".format(path, POWER[whose], whose))
  client.check(("gradients that were never scaled" in printed) == (whose == "mp_compat"), "the warning of " + whose)
  print(
    "{:<28} {:>6} {:>12g} {:>12}  {} to {} {:>5.0f} s".format(
      name,
      len(losses),
      found[SCOPE + "current_loss_scale"],
      found[SCOPE + "good_steps"],
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
    print("{:<28} {:>6} {:>12} {:>12}  loss".format("training", "steps", "loss scale", "good steps"), flush=True)
    losses, path = train(top, "tensorflow", "tensorflow", steps)
    our_losses, our_path = train(top, "mp_compat", "mp_compat", steps)
    client.check(losses == our_losses, "the losses differ:\n{}\n{}".format(losses, our_losses))
    count = client.check_same(path, our_path, spelling, RACE)
    print(
      "The losses are the same text, the {} variables the same bits. Each continues the other's:".format(count),
      flush=True,
    )
    continued = []
    for source, whose, name in [
      (path, "mp_compat", "mp_compat after tensorflow"),
      (our_path, "tensorflow", "tensorflow after mp_compat"),
    ]:
      client.copy(source, os.path.join(top, name, os.path.basename(source)))
      continued.append(train(top, whose, name, 2 * steps))
    client.check(
      continued[0][0] == continued[1][0],
      "the losses differ after the restart:\n{}\n{}".format(continued[0][0], continued[1][0]),
    )
    client.check_same(continued[0][1], continued[1][1], spelling, RACE)
    print("The losses are the same text, the variables the same bits.", flush=True)


if __name__ == "__main__":
  main()
