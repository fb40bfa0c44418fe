# SPDX-License-Identifier: Apache-2.0
"""Migrates the sources of programs of 2019 to 2025, from the package index, and
compiles the results.

    scripts/nox -s client-sources

This program exits with an error unless, for each of them, exactly the names that were
counted by hand are rewritten, the results compile, all other files are unchanged, and a
second migration finds nothing. `--diff` prints the changes.
"""

import argparse
import collections
import contextlib
import glob
import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile

import client

from mp_compat import __main__ as command_line

# The number of rewritten names, and of decisions of each kind, counted by hand in the
# diffs and the sources.
EXPECTED = {
  "tensor2tensor==1.15.7": (1, {"checkpoints": 1, "unresolved": 3}),
  "OpenNMT-tf==2.8.1": (2, {"automatic-casts": 2, "isinstance": 1}),
  "tf-models-official==2.2.2": (
    8,
    {"checkpoints": 3, "isinstance": 2, "wrapped-twice": 2, "text": 1},
  ),
  "finetune==0.10.0": (2, {"checkpoints": 1, "clipped-gradients": 1}),
  "neurst==0.1.2": (
    5,
    {"isinstance": 2, "keras": 1, "private-state": 2, "subclass": 1},
  ),
  "deepmd-kit==3.2.0": (0, {"checkpoints": 2, "unresolved": 4}),
}


def fetch(package, top):
  """Downloads and unpacks a package; returns the directory."""
  command = [
    sys.executable,
    "-m",
    "pip",
    "download",
    "--quiet",
    "--no-deps",
    "--disable-pip-version-check",
  ]
  subprocess.run([*command, "--dest", top, package], check=True)
  (archive,) = (
    path for path in glob.glob(os.path.join(top, "*")) if os.path.isfile(path)
  )
  sources = os.path.join(top, "sources")
  shutil.unpack_archive(archive, sources, "zip" if archive.endswith(".whl") else None)
  return sources


def migrate(*arguments):
  """Runs `mp_compat migrate` in this process; returns its exit code and its output on
  stderr.
  """
  said = io.StringIO()
  with contextlib.redirect_stderr(said):
    return command_line.main(["migrate"] + list(arguments)), said.getvalue()


def digests(sources):
  found = {}
  for path in glob.glob(os.path.join(sources, "**"), recursive=True):
    if os.path.isfile(path):
      with open(path, "rb") as content:
        found[path] = hashlib.sha256(content.read()).hexdigest()
  return found


def examine(package, expected, show):
  with tempfile.TemporaryDirectory() as top:
    sources = fetch(package, top)
    before, report = digests(sources), os.path.join(top, "report.json")
    code, said = migrate(
      "--json", report, *([sources] if show else ["--check", sources])
    )
    client.check(code == (1 if expected[0] and not show else 0), said)
    with open(report) as file:
      found = json.load(file)
    kinds = collections.Counter(decision["kind"] for decision in found["decide"])
    client.check(
      (len(found["rewritten"]), kinds) == expected,
      "{}: expected {}, got {}.\n{}".format(
        package, expected, (len(found["rewritten"]), dict(kinds)), said
      ),
    )
    code, said = migrate("--write", sources)
    client.check(code == 0, said)
    after, files = digests(sources), {change["path"] for change in found["rewritten"]}
    client.check(
      {path for path in before if before[path] != after.get(path)} == files
      and set(before) == set(after),
      "{}: other files changed than {}.".format(package, sorted(files)),
    )
    for path in files:
      with open(path, "rb") as content:
        compile(content.read(), path, "exec")
    code, said = migrate("--check", sources)
    client.check(
      code == (3 if found["problems"] else 0), "a second migration finds more:\n" + said
    )
    print(
      "{:<26}  {:>5} files, {:>2} names rewritten in {:>2}, {} places to decide, {} "
      "not Python 3".format(
        package,
        found["files"],
        len(found["rewritten"]),
        len(files),
        len(found["decide"]),
        len(found["problems"]),
      ),
      flush=True,
    )


def main():
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--diff", action="store_true", help="print the changes")
  arguments = parser.parse_args()
  for package, expected in EXPECTED.items():
    examine(package, expected, arguments.diff)


if __name__ == "__main__":
  main()
