"""Compares random training graphs with TensorFlow's class after every step. `--examples
N` sets their number.
"""

import hypothesis
import pytest

from tests.equivalence import fuzzing


# Coverage would double the time, and other tests cover the same lines.
@pytest.mark.no_cover
@hypothesis.given(fuzzing.cases())
def test_random_graphs_match_tensorflow(case):
  try:
    fuzzing.check(case)
  except AssertionError:
    hypothesis.note("Program that reproduces the failure:\n\n" + fuzzing.program(case))
    raise
