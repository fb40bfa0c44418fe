"""Runs pytest on the files given; the main program of every py_test in BUILD."""

import os
import sys

import pytest

if __name__ == "__main__":
  del sys.path[0]  # this folder contains a package `keras`, which would hide Keras
  report = os.environ["XML_OUTPUT_FILE"]  # where Bazel expects the report
  status = pytest.main(["-p", "no:cacheprovider", "-m", "not slow", "--junitxml=" + report] + sys.argv[1:])
  # A file may contain only slow tests.
  sys.exit(0 if status == pytest.ExitCode.NO_TESTS_COLLECTED else status)
