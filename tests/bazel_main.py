"""What every py_test in BUILD runs: pytest, on the files given."""

import os
import sys

import pytest

if __name__ == "__main__":
  del sys.path[0]  # this folder, which has a package `keras`
  report = os.environ["XML_OUTPUT_FILE"]  # where Bazel looks for it
  status = pytest.main(["-p", "no:cacheprovider", "--junitxml=" + report] + sys.argv[1:])
  # A file may hold slow tests only.
  sys.exit(0 if status == pytest.ExitCode.NO_TESTS_COLLECTED else status)
