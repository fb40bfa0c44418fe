"""Random training graphs give, after every step, the numbers of TensorFlow's own class. For more: `--examples N`."""

import hypothesis
import pytest

from tests.equivalence import fuzzing


@pytest.mark.no_cover  # It would take twice the time; other tests run the same lines.
@hypothesis.given(fuzzing.cases())
def test_random_graphs_train_as_with_tensorflows_class(case):
  try:
    fuzzing.check(case)
  except AssertionError:
    hypothesis.note("This reproduces it:\n\n" + fuzzing.program(case))
    raise
