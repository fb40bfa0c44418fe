# SPDX-License-Identifier: Apache-2.0
"""Trains an Estimator with finetune's mixed precision, which wraps its optimizer in
TensorFlow's, then mp_compat's.

    scripts/nox -s client-finetune

finetune is not modified. Its `optimize_loss` makes a
`tf.compat.v1.train.experimental.MixedPrecisionLossScaleOptimizer`, a name that refers
to mp_compat in the run with mp_compat. This program exits with an error unless

- two trainings with TensorFlow's class and one with mp_compat have the same variables
  after each step, to the bit, over steps that overflow and are skipped;
- so have three that continue: each class from the checkpoint of the other, and
  TensorFlow's from its own;
- mp_compat logs a warning: finetune's gradients come from `tf.gradients` and were never
  scaled.
"""

import argparse
import os
import tempfile

import client

PROGRAM = os.path.join(client.PROGRAMS, "finetune_estimator.py")


def main():
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument(
    "--steps",
    type=int,
    default=160,
    help="steps of each training; default: %(default)s",
  )
  steps = parser.parse_args().steps
  with tempfile.TemporaryDirectory() as top:
    found = client.compare(top, PROGRAM, "model", str(steps))
    client.check(found["skipped"], "no step overflowed.")
    client.check(
      "gradients that seem never to have been scaled" in str(found.get("warnings")),
      "no warning of mp_compat.",
    )
    client.exchange(top, "model")
    client.compare(top, PROGRAM, "model", str(2 * steps))


if __name__ == "__main__":
  main()
