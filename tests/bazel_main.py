"""Runs pytest on the files given; the main program of every py_test in BUILD."""

import os
import sys

import pytest

if __name__ == "__main__":
  del sys.path[0]  # this folder contains a package `keras`, which would hide Keras
  report = os.environ["XML_OUTPUT_FILE"]  # where Bazel expects the report
  status = pytest.main(
    ["-p", "no:cacheprovider", "--junitxml=" + report] + sys.argv[1:]
  )
  # A file may contain only tests that pytest.ini leaves out.
  sys.exit(0 if status == pytest.ExitCode.NO_TESTS_COLLECTED else status)
