#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes the graphs of many training programs, and compares them: how a restructuring
proves that no graph changes.

    python tools/graphs.py write FOLDER             before and after the change, in the same environment
    python tools/graphs.py compare BEFORE AFTER     exit status 1 if a graph differs

The programs are those of tests/programs, each in its first variant, with a dynamic and
with a fixed loss scale, and random graphs of tests/equivalence/fuzzing.py. A graph is
written as text. A program whose construction fails is written as the error. Each graph
is built in a process of its own, so that it does not depend on the ones before.
"""

import argparse
import collections
import glob
import gzip
import importlib
import multiprocessing
import os
import re
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)

RANDOM_GRAPHS = 200


def write(folder: str) -> None:
  """Writes one compressed text file for each graph."""
  os.makedirs(folder)
  jobs = [
    (
      folder,
      "{}-{}".format(row.name, kind),
      _build_program,
      (row.name, kind == "fixed"),
    )
    for row in programs()
    for kind in ("dynamic", "fixed")
  ]
  jobs += [
    (folder, "random-{}".format(i), _build_case, (case,))
    for i, case in enumerate(_random_cases())
  ]
  with multiprocessing.get_context("fork").Pool(maxtasksperchild=1) as pool:
    pool.starmap(_write_one, jobs, chunksize=1)
  print("{} graphs in {}".format(len(jobs), folder))


def _write_one(folder, name, build, arguments):
  try:
    text = _text_of(build(*arguments))
  except Exception as error:  # what a row's `limit` expects
    text = "{}: {}".format(type(error).__name__, error)
  text = re.sub(r"0x[0-9a-f]{6,}", "0x", text)
  text = re.sub(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", "uuid", text)
  with gzip.open(
    os.path.join(folder, re.sub(r"[^\w.-]", "_", name) + ".gz"), "wt", compresslevel=1
  ) as file:
    file.write(text)


def _text_of(graph):
  definition = graph.as_graph_def()
  functions = sorted(
    definition.library.function, key=lambda function: function.signature.name
  )
  for function in functions:
    nodes = sorted(function.node_def, key=lambda node: node.name)
    del function.node_def[:]
    function.node_def.extend(nodes)
  return "\n".join(map(str, list(definition.node) + functions))


def programs():
  """Returns the rows of tests/programs that this TensorFlow can run."""
  from tests.programs import table

  for path in sorted(glob.glob(os.path.join(ROOT, "tests", "programs", "test_*.py"))):
    importlib.import_module("tests.programs." + os.path.basename(path)[: -len(".py")])
  return [row for row in table.PROGRAMS.values() if all(row.needs.values())]


def _build_program(name, fixed):
  import mp_compat
  from tests import testing
  from tests.programs import table
  from tests.testing import tf

  row = table.PROGRAMS[name]
  variant = row.variants[0]
  with testing.control_flow(variant.control_flow), tf.Graph().as_default():
    built = table.Build(mp_compat, fixed, row, variant)
    row.build(built)
    return built.graph


def _random_cases():
  import hypothesis

  from tests.equivalence import fuzzing

  cases = []

  @hypothesis.settings(
    max_examples=RANDOM_GRAPHS,
    derandomize=True,
    database=None,
    deadline=None,
    phases=[hypothesis.Phase.generate],
    suppress_health_check=list(hypothesis.HealthCheck),
  )
  @hypothesis.given(fuzzing.cases())
  def collect(case):
    cases.append(case)

  collect()
  return cases


def _build_case(case):
  import mp_compat
  from tests.equivalence import fuzzing
  from tests.testing import tf

  with tf.Graph().as_default() as graph:
    fuzzing.build(case, mp_compat, case.control_flow)
    return graph


def compare(before: str, after: str) -> int:
  """Prints which graphs differ, and how many ops of which types there are more (or
  fewer, below 0).

  Returns:
    The number of graphs that differ.
  """
  names = sorted(set(os.listdir(before)) | set(os.listdir(after)))
  different = 0
  for name in names:
    texts = [_read(os.path.join(folder, name)) for folder in (before, after)]
    if texts[0] == texts[1]:
      continue
    different += 1
    counts = [
      collections.Counter(re.findall(r'(?m)^ *op: "(\w+)"', text)) for text in texts
    ]
    changes = {
      op: counts[1][op] - counts[0][op]
      for op in counts[0] | counts[1]
      if counts[0][op] != counts[1][op]
    }
    first = next(
      (
        pair
        for pair in zip(*(text.splitlines() for text in texts))
        if pair[0] != pair[1]
      ),
      ("", ""),
    )
    print(
      "{}: {} first: {!r} -> {!r}".format(
        name[: -len(".gz")], changes or "same ops;", *first
      )
    )
  print("{} graphs, {} differ".format(len(names), different))
  return different


def _read(path):
  if not os.path.exists(path):
    return ""
  with gzip.open(path, "rt") as file:
    # The devices of a function's configuration are in a map, which TensorFlow writes in
    # any order. Savers choose names.
    return re.sub(
      r'key: "config_proto"\n\s*value {\n\s*s: ".*"|_temp_[0-9a-f]{32}', "", file.read()
    )


if __name__ == "__main__":
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  commands = parser.add_subparsers(dest="command", required=True)
  commands.add_parser("write").add_argument("folder")
  comparing = commands.add_parser("compare")
  comparing.add_argument("before")
  comparing.add_argument("after")
  options = parser.parse_args()
  if options.command == "write":
    write(options.folder)
  else:
    sys.exit(compare(options.before, options.after) > 0)
