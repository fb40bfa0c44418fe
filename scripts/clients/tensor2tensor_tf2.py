# SPDX-License-Identifier: Apache-2.0
"""Runs tensor2tensor's optimizer on TensorFlow 2.10, with TensorFlow's loss scaling, and then with mp_compat's.

    scripts/nox -s client-tensor2tensor_tf2

tensor2tensor is not modified. It was written for TensorFlow 1.15: on TensorFlow 2, its Keras optimizers (`adam`) work,
with the graph rewrite; its float16 activations need `tf.contrib` and raise an error. `python -m mp_compat run` makes
TensorFlow's names refer to mp_compat. This program exits with an error unless both runs print the same losses and
variables, to the bit, over steps that overflow and are skipped.

TensorFlow's class creates the slots outside tensor2tensor's name scope `training`; mp_compat creates them inside.
"""

import os
import re

import client

PROGRAM = os.path.join(os.path.dirname(os.path.abspath(__file__)), "programs", "tensor2tensor_optimize.py")


def run(whose):
  printed = client.run(client.PYTHON[whose] + [PROGRAM])
  losses = re.findall(r"^loss (\w+)", printed, re.M)
  variables = dict(re.findall(r"^variable (\S+) (\w+)$", printed, re.M))
  scoped = [name for name in variables if name.startswith("training/")]
  client.check(bool(scoped) == (whose == "mp_compat"), "the run with {} made {}.".format(whose, sorted(variables)))
  return losses, {re.sub("^training/", "", name): value for name, value in variables.items()}


def main():
  losses, variables = run("tensorflow")
  our_losses, our_variables = run("mp_compat")
  client.check(len(losses) == 30 and losses == our_losses, "the losses differ:\n{}\n{}".format(losses, our_losses))
  client.check(
    "current_loss_scale" in variables and variables == our_variables,
    "the variables differ:\n{}\n{}".format(variables, our_variables),
  )
  print("The {} losses and the {} variables are the same bits.".format(len(losses), len(variables)))


if __name__ == "__main__":
  main()
