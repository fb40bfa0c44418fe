# SPDX-License-Identifier: Apache-2.0
"""Trains with the mixed precision of TensorFlow's model garden, on two replicas, and
then with mp_compat's.

    scripts/nox -s client-official

The model garden is not modified (tf-models-official 2.2.2, on TensorFlow 2.4).
`performance.configure_optimizer` wraps the optimizer in
`tf.keras.mixed_precision.experimental.LossScaleOptimizer`.
`grad_utils.minimize_using_explicit_allreduce` tests for that class, as a name of
`tf.compat.v2`, and reduces the scaled gradients in float16. `python -m mp_compat run`
makes the name refer to mp_compat. This program exits with an error unless both print
the same losses, scales and weights, to the bit, over steps that overflow and are
skipped.
"""

import os
import re

import client

PROGRAM = os.path.join(client.PROGRAMS, "official_training.py")


def run(whose):
  printed = client.run(client.PYTHON[whose] + [PROGRAM])
  scaled_by = re.search(r"^class (\S+)$", printed, re.M).group(1)
  client.check(
    scaled_by.startswith(whose + "."),
    "{} scaled the loss in the run with {}.".format(scaled_by, whose),
  )
  client.check(
    "without get_scaled_loss" not in printed, "the model garden did not scale the loss."
  )
  return re.findall(r"^loss .*$", printed, re.M), re.findall(
    r"^variable .*$", printed, re.M
  )


def main():
  losses, variables = run("tensorflow")
  our_losses, our_variables = run("mp_compat")
  client.check(
    losses == our_losses,
    "the losses differ:\n{}\n{}".format("\n".join(losses), "\n".join(our_losses)),
  )
  client.check(variables == our_variables, "the weights differ.")
  scales = [line.split()[-1] for line in losses]
  client.check(
    len(losses) == 40 and len(set(scales)) == 3,
    "expected two overflows in 40 steps, but the scales are " + ", ".join(scales),
  )
  print(
    "The {} losses and scales and the {} variables are the same bits. From {} to "
    "{}.".format(len(losses), len(variables), losses[0], losses[-1])
  )


if __name__ == "__main__":
  main()
