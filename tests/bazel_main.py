"""What every py_test in BUILD runs: pytest, on the files given."""

import sys

import pytest

if __name__ == "__main__":
  status = pytest.main(["-p", "no:cacheprovider"] + sys.argv[1:])
  # A file may hold slow tests only.
  sys.exit(0 if status == pytest.ExitCode.NO_TESTS_COLLECTED else status)
