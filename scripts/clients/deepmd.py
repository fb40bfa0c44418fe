# SPDX-License-Identifier: Apache-2.0
"""Trains a force field with DeePMD-kit, which wraps its optimizer in TensorFlow's class, and then in mp_compat's.

    scripts/nox -s client-deepmd

DeePMD-kit is not modified. `dp --tf train` computes in float16 and calls
`tf.mixed_precision.enable_mixed_precision_graph_rewrite`; `python -m mp_compat run -m deepmd --tf train` is the same
program, but the name refers to mp_compat. This program exits with an error unless

- two trainings with TensorFlow's class agree, because otherwise they cannot be compared;
- one with mp_compat has the same learning curve, to the letter, and the same last checkpoint, to the bit;
- training continues from the checkpoints of either class with either class, with equal results.

The data is a Lennard-Jones crystal with random displacements of its atoms. The first steps
overflow, and both classes skip them.
"""

import argparse
import itertools
import json
import os
import tempfile
import time

import client
import numpy as np

from mp_compat import checkpoints

# One thread, so that sums have the same order in every run.
ENVIRONMENT = dict(DP_INTERFACE_PREC="low", DP_INTRA_OP_PARALLELISM_THREADS="1", DP_INTER_OP_PARALLELISM_THREADS="1")
EPSILON, SIGMA, LATTICE, CUTOFF = 0.0104, 3.405, 5.26, 5.2  # argon, in eV and Angstrom
FRAMES = 40


def parse_arguments():
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--steps", type=int, default=200, help="steps of each training; default: %(default)s")
  parser.add_argument("--more", type=int, default=200, help="steps after the restart; default: %(default)s")
  return parser.parse_args()


def lennard_jones(positions, side):
  """Returns the energy and the forces [n, 3] of atoms at `positions` [n, 3] in a periodic cube."""
  apart = positions[:, None] - positions[None]
  apart -= side * np.round(apart / side)
  square = (apart**2).sum(-1)
  np.fill_diagonal(square, np.inf)
  sixth = np.where(square < CUTOFF**2, SIGMA**6 / square**3, 0)
  forces = (24 * EPSILON * (2 * sixth**2 - sixth) / square)[..., None] * apart
  return 2 * EPSILON * (sixth**2 - sixth).sum(), forces.sum(1)


def write_data(directory):
  """Writes a face-centred cubic crystal, two cells in each direction, in DeePMD-kit's format."""
  random = np.random.RandomState(0)
  cell = np.array([[0, 0, 0], [0, 0.5, 0.5], [0.5, 0, 0.5], [0.5, 0.5, 0]])
  places = LATTICE * np.concatenate([cell + corner for corner in itertools.product(range(2), repeat=3)])
  coords = [places + random.normal(0, 0.2, places.shape) for _ in range(FRAMES)]
  energies, forces = zip(*[lennard_jones(coord, 2 * LATTICE) for coord in coords])
  os.makedirs(os.path.join(directory, "set.000"))
  for name, value in [
    ("coord", coords),
    ("energy", energies),
    ("force", forces),
    ("box", [2 * LATTICE * np.eye(3)] * FRAMES),
  ]:
    np.save(os.path.join(directory, "set.000", name + ".npy"), np.reshape(value, [FRAMES, -1]).astype(np.float32))
  np.savetxt(os.path.join(directory, "type.raw"), np.zeros(len(places)), "%d")
  np.savetxt(os.path.join(directory, "type_map.raw"), ["Ar"], "%s")


def settings(data, steps):
  return {
    "model": {
      "type_map": ["Ar"],
      "descriptor": {
        "type": "se_e2_a",
        "sel": [40],
        "rcut": CUTOFF,
        "rcut_smth": 3.0,
        "neuron": [8, 16],
        "axis_neuron": 4,
        "seed": 1,
      },
      "fitting_net": {"neuron": [24, 24], "seed": 2},
    },
    "learning_rate": {"type": "exp", "start_lr": 1e-2, "stop_lr": 1e-3, "decay_steps": 20},
    "loss": {"start_pref_e": 0.02, "limit_pref_e": 1, "start_pref_f": 1000, "limit_pref_f": 1000},
    "training": {
      "training_data": {"systems": [data], "batch_size": 4},
      "seed": 3,
      "numb_steps": steps,
      "disp_freq": 1,
      "save_freq": steps,
      "mixed_precision": {"compute_prec": "float16", "output_prec": "float32"},
    },
  }


def train(top, name, whose, steps, restart=None):
  """Runs DeePMD-kit in a new directory; returns its learning curve and the path of its last checkpoint."""
  began, directory = time.time(), os.path.join(top, name)
  os.makedirs(directory)
  with open(os.path.join(directory, "input.json"), "w") as file:
    json.dump(settings(os.path.join(top, "data"), steps), file)
  client.run(
    client.PYTHON[whose]
    + ["-m", "deepmd", "--tf", "train", "--skip-neighbor-stat", "input.json"]
    + (["--restart", restart] if restart else []),
    directory,
    **ENVIRONMENT,
  )
  path = os.path.join(directory, "model.ckpt-{}".format(steps))
  found = checkpoints.inspect(path)
  made_by = "mp_compat" if "beta1_power" in found.variables else "tensorflow"  # which writes only cond_3/...
  client.check(made_by == whose, "{} is a checkpoint of {}, not of {}.".format(path, made_by, whose))
  with open(os.path.join(directory, "lcurve.out")) as file:
    curve = file.read()
  rows = np.loadtxt(curve.splitlines())
  steps, errors = rows[:, 0], rows[:, 3]  # One row per attempt: a skipped step is repeated.
  print(
    "  {:<24}  {:>3.0f} to {:>3.0f}  {:>7}  {:>5g}  {:>10}  {:.3f} to {:.3f}  {:>6.0f} s".format(
      name,
      steps[0],
      steps[-1],
      (np.diff(steps) == 0).sum(),
      found.state["current_loss_scale"],
      found.state["good_steps"],
      errors[:20].mean(),
      errors[-20:].mean(),
      time.time() - began,
    ),
    flush=True,
  )
  return curve, path


def main():
  arguments = parse_arguments()
  with tempfile.TemporaryDirectory() as top:
    write_data(os.path.join(top, "data"))
    print("{:<26}  steps    skipped  scale  good_steps  error of forces    time".format("training"), flush=True)
    curve, path = train(top, "tensorflow", "tensorflow", arguments.steps)
    again, path_again = train(top, "tensorflow again", "tensorflow", arguments.steps)
    client.check(curve == again, "two trainings with TensorFlow's class differ: this machine cannot compare.")
    client.check_same(path, path_again)
    our_curve, our_path = train(top, "mp_compat", "mp_compat", arguments.steps)
    client.check(curve == our_curve, "the learning curves of TensorFlow's class and mp_compat differ.")
    count = client.check_same(path, our_path)
    print(
      "The learning curves are the same text, the {} variables of the checkpoints the same bits. Restarting\n"
      "from the checkpoints as they are:".format(count),
      flush=True,
    )

    written, continued = {"tensorflow": path, "mp_compat": our_path}, []
    for source, to in itertools.product(written, repeat=2):
      name = "{} to {}".format(source, to)
      continued.append(train(top, name, to, arguments.steps + arguments.more, written[source]))
    for other_curve, other in continued[1:]:
      client.check(other_curve == continued[0][0], "the learning curves after the restart differ: {}.".format(other))
      client.check_same(continued[0][1], other)
    print("The four learning curves are the same text, the variables of the checkpoints the same bits.")


if __name__ == "__main__":
  main()
