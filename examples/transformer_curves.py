# SPDX-License-Identifier: Apache-2.0
"""Runs examples/train_transformer.py in three ways, and draws the curves of
docs/float16.md.

    python examples/transformer_curves.py --out docs/transformer.png

Prints the table of that page, and the machine.
"""

import json
import os
import subprocess
import sys
import tempfile

from absl import flags
import common_flags
from matplotlib.backends.backend_agg import FigureCanvasAgg
import matplotlib.figure
import matplotlib.ticker
import numpy as np
import processor

FLAGS = flags.FLAGS
FLAGS.set_default("steps", 300)
flags.declare_key_flag("steps")
flags.DEFINE_integer("seeds", 3, "Trainings of each kind.", lower_bound=1)
flags.DEFINE_string("out", os.path.join("runs", "transformer.png"), "The picture.")

PROGRAM = os.path.join(
  os.path.dirname(os.path.abspath(__file__)), "train_transformer.py"
)
RUNS = (
  ("float32", ["--dtype", "float32", "--loss_scale", "1"], "tab:blue", "-"),
  ("float16, loss scale 1", ["--loss_scale", "1"], "tab:red", "-"),
  # It should coincide with the line of float32.
  ("float16, dynamic loss scale", [], "tab:green", "--"),
)


def train(arguments, seed):
  """Returns the numbers of one run: arrays `step`, `loss` and `accuracy`, over the
  evaluations.
  """
  with tempfile.TemporaryDirectory() as out:
    fixed = ["--out", out, "--seed", str(seed), "--steps", str(FLAGS.steps)]
    subprocess.run([sys.executable, PROGRAM] + fixed + arguments, check=True)
    with open(os.path.join(out, "numbers.json")) as file:
      return {name: np.array(values) for name, values in json.load(file).items()}


def draw(results, path):
  figure = matplotlib.figure.Figure(figsize=(12, 4.5))
  FigureCanvasAgg(figure)
  for axes, key, title in zip(
    figure.subplots(1, 2), ["loss", "accuracy"], ["Test loss", "Test accuracy"]
  ):
    for name, _, color, style in RUNS:
      for numbers in results[name]:
        axes.plot(numbers["step"], numbers[key], color=color, linewidth=0.7, alpha=0.5)
      mean = np.mean([numbers[key] for numbers in results[name]], axis=0)
      axes.plot(
        results[name][0]["step"], mean, style, color=color, linewidth=2.5, label=name
      )
    axes.set_title(title)
    axes.set_xlabel("step")
    axes.grid(alpha=0.3)
    axes.legend()
  axes.yaxis.set_major_formatter(matplotlib.ticker.PercentFormatter(1, decimals=0))
  figure.tight_layout()
  figure.savefig(path, dpi=110)


def main(argv):
  common_flags.no_arguments(argv)
  results = {
    name: [train(arguments, seed) for seed in range(FLAGS.seeds)]
    for name, arguments, _, _ in RUNS
  }
  draw(results, FLAGS.out)
  print("| | test loss | test accuracy | each seed |\n|---|---|---|---|")
  for name, runs in results.items():
    loss, accuracy = [
      [numbers[key][-1] for numbers in runs] for key in ("loss", "accuracy")
    ]
    seeds = " ".join("{:.1%}".format(value) for value in accuracy)
    print(
      "| {} | {:.4f} | {:.1%} | {} |".format(
        name, np.mean(loss), np.mean(accuracy), seeds
      )
    )
  print(processor.describe())


if __name__ == "__main__":
  common_flags.run(main)
