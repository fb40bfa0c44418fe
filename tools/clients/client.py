# SPDX-License-Identifier: Apache-2.0
"""Runs a client's program with TensorFlow's loss scaling or mp_compat's, and compares
the results.

noxfile.py sets the environment in which programs can be repeated to the bit.
"""

import glob
import json
import os
import subprocess
import sys

PYTHON = {
  "tensorflow": [sys.executable],
  "mp_compat": [sys.executable, "-m", "mp_compat", "run", "--"],
}
PROGRAMS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "programs")


def check(promise, otherwise):
  if not promise:
    sys.exit("Failed: " + otherwise)


def run(command, cwd=None):
  """Runs a command and returns its output; exits with an error if the command fails."""
  done = subprocess.run(
    command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
  )
  check(
    not done.returncode,
    "{}\n{} ended with code {}.".format(
      done.stdout[-5000:], " ".join(command), done.returncode
    ),
  )
  return done.stdout


def compare(top, *program):
  """Runs a program under `mp_compat compare`, to its end; exits with an error unless it
  trains the same, to the bit.

  The program runs with TensorFlow's loss scaling in the folder original, with
  mp_compat's in the folder mp_compat, and with TensorFlow's in the folder again, all in
  `top`.

  Returns:
    What the report says on the run with mp_compat.
  """
  folder = os.path.join(PROGRAMS, "in_folder.py")
  report = os.path.join(top, "report.json")
  options = ["--steps", str(10**9), "--json", report]
  # Not in `top`: after `pip install -e`, Python may take the folder mp_compat there for
  # the package.
  command = [
    sys.executable,
    "-m",
    "mp_compat",
    "compare",
    *options,
    folder,
    top,
    *program,
  ]
  check(
    not subprocess.run(command, check=False).returncode,
    "the comparison failed, or the trainings differ.",
  )
  with open(report) as file:
    return json.load(file)["runs"]["mp_compat"]


def exchange(top, folder=""):
  """Exchanges the folders of `compare`: each of two classes continues from what the
  other has written. TensorFlow's class reads only the names that it writes, so it gets a
  converted checkpoint. The program writes its checkpoints to `folder`.
  """
  for source, target in [
    ("original", "exchanged"),
    ("mp_compat", "original"),
    ("exchanged", "mp_compat"),
  ]:
    os.rename(os.path.join(top, source), os.path.join(top, target))
  written = _latest(os.path.join(top, "original", folder))
  converted = os.path.join(top, "converted", os.path.basename(written))
  convert = [sys.executable, "-m", "mp_compat", "checkpoint", "convert"]
  like = _latest(os.path.join(top, "mp_compat", folder))
  run([*convert, written, converted, "--like", like])
  for path in glob.glob(glob.escape(converted) + ".*"):
    os.replace(path, os.path.join(os.path.dirname(written), os.path.basename(path)))


def _latest(folder):
  """Returns the checkpoint that was written last in a folder."""
  indices = glob.glob(os.path.join(glob.escape(folder), "*.index"))
  newest = os.path.realpath(max(indices, key=os.path.getmtime))  # DeePMD-kit links it
  return newest[: -len(".index")]
