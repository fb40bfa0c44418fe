"""Writes the table of TensorFlow versions in CONTRIBUTING.md, from noxfile.py and
the reports of nox in reports/.

A version keeps its last full run in the table until there is a report of a later one. A
run is full if its arguments, which are the name of the report's test suite, select no
tests by their names or paths. A part is named as such, and written only if there was no
full run. The session `version_table` of noxfile.py runs this, with the interpreter of
nox.
"""

import collections
import glob
import os
import re
import sys
import xml.etree.ElementTree

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
PAGE = os.path.join(ROOT, "CONTRIBUTING.md")
sys.path.insert(0, ROOT)

import noxfile  # noqa: E402

HEADER = "| TensorFlow | Python | pins | last full run | date |"
ROW = re.compile(r"^\| (\d+\.\d+) \|.*\| (.*) \| (.*) \|$", re.M)
TABLE = re.compile("^" + re.escape(HEADER) + r"\n.*?\n(?!\|)", re.M | re.S)
SELECTION = re.compile(r"(?:^| )(-k \S+|tests/\S+)")
PART = "a part, "


def read_report(path, number):
  """Returns (result, date) of a run on TensorFlow `number`; the result begins with PART
  if it did not run all tests.
  """
  suite = xml.etree.ElementTree.parse(path).getroot().find("testsuite")
  counts = collections.Counter()
  for case in suite.iter("testcase"):
    tags = {child.tag for child in case}
    counts[
      "failed"
      if tags & {"failure", "error"}
      else "skipped"
      if "skipped" in tags
      else "passed"
    ] += 1
  result = ", ".join(
    "{:,} {}".format(counts[kind], kind) for kind in ("passed", "failed", "skipped")
  )
  selection = SELECTION.findall(suite.get("name"))
  part = PART + "`{}`, ".format(" ".join(selection)) if selection else ""
  python = re.search(r"-(3\.\d+)\.xml$", path).group(1)
  return "{}{}, Python {}: {}".format(part, number, python, result), suite.get(
    "timestamp"
  )[:10]


def find_last_run(version, number, last_run):
  """Returns (result, date) of the last runs on a TensorFlow version; `last_run` is that
  of the present table.
  """
  reports = sorted(
    glob.glob(os.path.join(ROOT, "reports", "tests-{}-3.*.xml".format(version)))
  )
  runs = [read_report(path, number) for path in reports]
  runs = [run for run in runs if not run[0].startswith(PART)] or runs
  if not runs or (
    runs[0][0].startswith(PART) and last_run and not last_run[0].startswith(PART)
  ):
    return last_run or ("none", "")
  return "<br>".join(result for result, _ in runs), max(date for _, date in runs)


def make_row(version, release, last_run):
  """Returns the cells of a version; `last_run` is (result, date) in the present table,
  or None.
  """
  last = (release.optional or [release.last])[-1]
  pythons = last if release.first == last else "{} to {}".format(release.first, last)
  pins = ", ".join("`{}`".format(pin) for pin in release.pins)
  return [
    version,
    pythons,
    pins,
    *find_last_run(version, release.requirement.partition("==")[2], last_run),
  ]


def main():
  with open(PAGE, encoding="utf-8") as file:
    text = file.read()
  last_runs = {
    version: (result, date)
    for version, result, date in ROW.findall(text)
    if result != "none"
  }
  rows = [
    make_row(*item, last_runs.get(item[0])) for item in noxfile.TENSORFLOW.items()
  ]
  lines = [HEADER, "|---" * HEADER.count(" | ") + "|---|"] + [
    "| {} |".format(" | ".join(row)) for row in rows
  ]
  with open(PAGE, "w", encoding="utf-8") as file:
    file.write(TABLE.sub(lambda _: "\n".join(lines) + "\n", text))


if __name__ == "__main__":
  main()
