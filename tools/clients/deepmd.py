# SPDX-License-Identifier: Apache-2.0
"""Trains a force field with DeePMD-kit, which wraps its optimizer in TensorFlow's
class, and then in mp_compat's.

    scripts/nox -s client-deepmd

DeePMD-kit is not modified. `dp --tf train` computes in float16 and calls
`tf.mixed_precision.enable_mixed_precision_graph_rewrite`, a name that refers to
mp_compat in the run with mp_compat. This program exits with an error unless

- two trainings with TensorFlow's class and one with mp_compat have the same variables
  after each step, to the bit, and the same learning curve, to the letter;
- so have three that continue: each class from the checkpoint of the other, and
  TensorFlow's from its own.

The data is a Lennard-Jones crystal with random displacements of its atoms. The first
steps overflow, and both classes skip them.
"""

import argparse
import itertools
import json
import os
import tempfile

import client
import numpy as np

from mp_compat import checkpoints

# One thread, so that sums have the same order in every run.
os.environ.update(
  DP_INTERFACE_PREC="low",
  DP_INTRA_OP_PARALLELISM_THREADS="1",
  DP_INTER_OP_PARALLELISM_THREADS="1",
)
EPSILON, SIGMA, LATTICE, CUTOFF = 0.0104, 3.405, 5.26, 5.2  # argon, in eV and Angstrom
FRAMES = 40


def lennard_jones(positions, side):
  """Returns the energy and the forces [n, 3] of atoms at `positions` [n, 3] in a
  periodic cube.
  """
  apart = positions[:, None] - positions[None]
  apart -= side * np.round(apart / side)
  square = (apart**2).sum(-1)
  np.fill_diagonal(square, np.inf)
  sixth = np.where(square < CUTOFF**2, SIGMA**6 / square**3, 0)
  forces = (24 * EPSILON * (2 * sixth**2 - sixth) / square)[..., None] * apart
  return 2 * EPSILON * (sixth**2 - sixth).sum(), forces.sum(1)


def write_data(directory):
  """Writes a face-centred cubic crystal, two cells in each direction, in DeePMD-kit's
  format.
  """
  random = np.random.RandomState(0)
  cell = np.array([[0, 0, 0], [0, 0.5, 0.5], [0.5, 0, 0.5], [0.5, 0.5, 0]])
  places = LATTICE * np.concatenate(
    [cell + corner for corner in itertools.product(range(2), repeat=3)]
  )
  coords = [places + random.normal(0, 0.2, places.shape) for _ in range(FRAMES)]
  energies, forces = zip(*[lennard_jones(coord, 2 * LATTICE) for coord in coords])
  os.makedirs(os.path.join(directory, "set.000"))
  for name, value in [
    ("coord", coords),
    ("energy", energies),
    ("force", forces),
    ("box", [2 * LATTICE * np.eye(3)] * FRAMES),
  ]:
    np.save(
      os.path.join(directory, "set.000", name + ".npy"),
      np.reshape(value, [FRAMES, -1]).astype(np.float32),
    )
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
    "learning_rate": {
      "type": "exp",
      "start_lr": 1e-2,
      "stop_lr": 1e-3,
      "decay_steps": 20,
    },
    "loss": {
      "start_pref_e": 0.02,
      "limit_pref_e": 1,
      "start_pref_f": 1000,
      "limit_pref_f": 1000,
    },
    "training": {
      "training_data": {"systems": [data], "batch_size": 4},
      "seed": 3,
      "numb_steps": steps,
      "disp_freq": 1,
      "save_freq": steps,
      "mixed_precision": {"compute_prec": "float16", "output_prec": "float32"},
    },
  }


def train(top, steps, *restart):
  """Trains up to a step with either class, and compares; prints the learning curve in
  short.
  """
  with open(os.path.join(top, "input.json"), "w") as file:
    json.dump(settings(os.path.join(top, "data"), steps), file)
  program = [
    "-m",
    "deepmd",
    "--tf",
    "train",
    "--skip-neighbor-stat",
    os.path.join(top, "input.json"),
    *restart,
  ]
  client.check(client.compare(top, *program)["skipped"], "no step overflowed.")
  curves, made_by = [], []
  for run in ("original", "mp_compat", "again"):
    with open(os.path.join(top, run, "lcurve.out")) as file:
      curves.append(file.read())
    found = checkpoints.inspect(os.path.join(top, run, "model.ckpt-{}".format(steps)))
    # TensorFlow's class writes only cond_3/...
    made_by.append("beta1_power" in found.variables)
  client.check(
    made_by == [False, True, False],
    "the checkpoints are not of TensorFlow's class, mp_compat and it again.",
  )
  client.check(len(set(curves)) == 1, "the learning curves differ.")
  # One row per attempt: a skipped step is repeated.
  errors = np.loadtxt(curves[0].splitlines())[:, 3]
  print(
    "error of forces: {:.3f} to {:.3f}\n".format(
      errors[:20].mean(), errors[-20:].mean()
    ),
    flush=True,
  )


def main():
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument(
    "--steps",
    type=int,
    default=200,
    help="steps of each training; default: %(default)s",
  )
  parser.add_argument(
    "--more",
    type=int,
    default=200,
    help="steps after the restart; default: %(default)s",
  )
  arguments = parser.parse_args()
  with tempfile.TemporaryDirectory() as top:
    write_data(os.path.join(top, "data"))
    train(top, arguments.steps)
    client.exchange(top)
    train(
      top,
      arguments.steps + arguments.more,
      "--restart",
      "model.ckpt-{}".format(arguments.steps),
    )


if __name__ == "__main__":
  main()
