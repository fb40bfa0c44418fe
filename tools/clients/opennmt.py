# SPDX-License-Identifier: Apache-2.0
"""Trains a transformer with OpenNMT-tf, whose loss scaling is a subclass of
TensorFlow's, and then of mp_compat's.

    scripts/nox -s client-opennmt

OpenNMT-tf is not modified. `onmt-main --mixed_precision train` wraps its optimizer in a
class of its own, which extends
`tf.keras.mixed_precision.experimental.LossScaleOptimizer`; `python -m mp_compat run
onmt-main` is the same program, but the name refers to mp_compat. This program exits
with an error unless

- both print the same losses;
- both write the same last checkpoint, to the bit and to the name;
- each continues the checkpoint of the other, with equal results.

The task is to reverse the words of a sentence. The rewrite needs a GPU to change a
graph; on CPUs the loss is scaled, and computed in float32. OpenNMT-tf does not save the
loss scale, which starts at its initial value after a restart.
"""

import argparse
import json
import os
import random
import re
import shutil
import sys
import tempfile

import client
import numpy as np

MAIN = os.path.join(os.path.dirname(sys.executable), "onmt-main")
MODEL = os.path.join(client.PROGRAMS, "opennmt_model.py")
WORDS = "abcdefghi"
ABSURD = "z"


def write_data(top, overflows):
  """Writes sentences, their reverses and the vocabulary; with `overflows`, some
  sentences contain ABSURD.
  """
  randomly = random.Random(0)
  sentences = [
    [randomly.choice(WORDS) for _ in range(randomly.randint(3, 8))] for _ in range(400)
  ]
  for place in range(50, 50 + 300 * overflows, 300):
    sentences[place % len(sentences)][0] = ABSURD
  texts = {
    "source": [" ".join(words) for words in sentences],
    "target": [" ".join(reversed(words)) for words in sentences],
    "vocabulary": ["<blank>", "<s>", "</s>"] + list(WORDS) + [ABSURD],
  }
  for name, lines in texts.items():
    with open(os.path.join(top, name), "w") as file:
      file.write("\n".join(lines) + "\n")


def settings(steps):
  return {
    "model_dir": "run",
    "data": {
      "train_features_file": "../source",
      "train_labels_file": "../target",
      "source_vocabulary": "../vocabulary",
      "target_vocabulary": "../vocabulary",
    },
    "params": {"optimizer": "Adam", "learning_rate": 0.002, "dropout": 0.1},
    "train": {
      "batch_size": 16,
      "batch_type": "examples",
      "length_bucket_width": 100,
      "sample_buffer_size": 0,
      "max_step": steps,
      "save_checkpoints_steps": steps,
      "save_summary_steps": 1,
    },
  }


def train(top, whose, name, last, source=None):
  """Runs OpenNMT-tf up to a step; returns its losses by step, and its directory of
  checkpoints.
  """
  directory = os.path.join(top, name.replace(" ", "_"))
  os.makedirs(directory)
  if source:
    shutil.copytree(source, os.path.join(directory, "run"))
  with open(os.path.join(directory, "config.json"), "w") as file:
    json.dump(settings(last), file)  # JSON is valid YAML.
  printed = client.run(
    client.PYTHON[whose]
    + [
      MAIN,
      "--model",
      MODEL,
      "--config",
      "config.json",
      "--mixed_precision",
      "--seed",
      "1",
    ]
    + [
      "--inter_op_parallelism_threads",
      "1",
      "--intra_op_parallelism_threads",
      "1",
      "train",
    ],
    cwd=directory,
  )
  scaled_by = re.search(r"^Loss scaling by (\S+)$", printed, re.M).group(1)
  client.check(
    scaled_by.startswith(whose + "."),
    "{} scaled the loss in {}.".format(scaled_by, name),
  )
  # Some loggers print it twice.
  losses = list(dict.fromkeys(re.findall(r"Step = (\d+) .* Loss = (\S+)", printed)))
  skipped = sum(
    step == next_step for (step, _), (next_step, _) in zip(losses, losses[1:])
  )
  line = "{:<28} {:>8} {:>9}  {} to {}".format(
    name, len(losses), skipped, losses[0][1], losses[-1][1]
  )
  print(line, flush=True)
  return losses, os.path.join(directory, "run")


def check_same(path, other):
  """Checks that two checkpoints have the same names, dtypes, shapes and bits; returns
  the number of variables.
  """
  import tensorflow.compat.v1 as tf

  found = []
  for checkpoint in (path, other):
    reader = tf.train.load_checkpoint(checkpoint)
    values = {
      name: np.asarray(reader.get_tensor(name))
      for name in reader.get_variable_to_shape_map()
    }
    found.append(
      {
        name: (
          value.dtype,
          value.shape,
          value.tolist() if value.dtype == object else value.tobytes(),
        )
        for name, value in values.items()
      }
    )
  one, two = found
  different = sorted(
    name for name in set(one) | set(two) if one.get(name) != two.get(name)
  )
  client.check(
    not different, "{} and {} differ in {}.".format(path, other, ", ".join(different))
  )
  return len(one)


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
  parser.add_argument(
    "--overflows",
    type=int,
    default=0,
    help="sentences whose batch overflows; default: %(default)s",
  )
  arguments = parser.parse_args()
  steps = arguments.steps
  with tempfile.TemporaryDirectory() as top:
    write_data(top, arguments.overflows)
    print(
      "{:<28} {:>8} {:>9}  loss".format("training", "attempts", "skipped"), flush=True
    )
    losses, path = train(top, "tensorflow", "tensorflow", steps)
    our_losses, our_path = train(top, "mp_compat", "mp_compat", steps)
    client.check(
      losses == our_losses, "the losses differ:\n{}\n{}".format(losses, our_losses)
    )
    count = check_same(
      *[os.path.join(one, "ckpt-{}".format(steps)) for one in (path, our_path)]
    )
    print(
      "The losses are the same text, the {} entries the same bits. Each continues the "
      "other's:".format(count),
      flush=True,
    )
    continued = [
      train(top, "mp_compat", "mp_compat after tensorflow", 2 * steps, path),
      train(top, "tensorflow", "tensorflow after mp_compat", 2 * steps, our_path),
    ]
    client.check(
      continued[0][0] == continued[1][0],
      "the losses differ after the restart:\n{}\n{}".format(
        continued[0][0], continued[1][0]
      ),
    )
    check_same(
      *[os.path.join(one, "ckpt-{}".format(2 * steps)) for _, one in continued]
    )
    print("The losses are the same text, the entries the same bits.", flush=True)


if __name__ == "__main__":
  main()
