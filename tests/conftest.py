"""Configures Hypothesis for all tests: deterministic examples, whose number is set with
`--examples`; fixtures.
"""

import collections
import gc

import hypothesis
import pytest


def pytest_addoption(parser):
  parser.addoption(
    "--examples",
    type=int,
    default=6,
    help="graphs for test_fuzzing.py; default: %(default)s",
  )


def pytest_configure(config):
  hypothesis.settings.register_profile(
    "mp_compat",
    max_examples=config.getoption("examples"),
    deadline=None,
    database=None,
    derandomize=config.getoption("hypothesis_seed") is None,
    suppress_health_check=[
      hypothesis.HealthCheck.too_slow,
      hypothesis.HealthCheck.data_too_large,
    ],
  )
  hypothesis.settings.load_profile("mp_compat")


def pytest_collection_finish():
  """Makes Python collect garbage less often: TensorFlow's modules are a million objects,
  and graphs are cycles of many.
  """
  gc.collect()
  gc.freeze()
  gc.set_threshold(50000, 20, 50)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
  """Leaves the rows out of `each_choice` tests, as `matrix`, in which no value of a
  parameter occurs for the first time (each-choice coverage).
  """
  rows = collections.defaultdict(list)
  for item in items:
    is_left_out = item.get_closest_marker("matrix") or item.get_closest_marker("slow")
    if item.get_closest_marker("each_choice") and not is_left_out:
      rows[item.nodeid.partition("[")[0]].append(item)
  for of_test in rows.values():
    for item in choose_rows(of_test):
      of_test.remove(item)
    for item in of_test:
      item.add_marker("matrix")


def choose_rows(rows):
  """Returns rows of a test in which each value of each parameter occurs: each time the
  row with the most values that do not occur yet, and with those that occur least.
  """
  values = {}
  for row in rows:
    parameters = row.callspec.params.items()
    values[row] = [(name, repr(value)) for name, value in parameters]
  chosen, counts = [], collections.Counter()

  def order(row):
    occurrences = [counts[value] for value in values[row]]
    return -occurrences.count(0), sum(occurrences)

  while not all(counts[value] for row in rows for value in values[row]):
    row = min(rows, key=order)
    chosen.append(row)
    counts.update(values[row])
  return chosen


# Tests of types run without TensorFlow, so the fixtures import it.


@pytest.fixture(name="graph")
def _graph():
  """Runs the test in a new graph."""
  from tests.testing import tf

  with tf.Graph().as_default() as graph:
    yield graph


@pytest.fixture(
  name="control_flow", params=[1, 2], ids=["control_flow_v1", "control_flow_v2"]
)
def _control_flow(request):
  """Runs the test with control flow v1 and v2."""
  from tests import testing

  with testing.control_flow(request.param):
    yield request.param


@pytest.fixture(name="eager")
def _eager():
  """Runs the test in eager mode."""
  from tests import testing

  with testing.eager_mode():
    yield


@pytest.fixture(name="warnings")
def _warnings(monkeypatch):
  """Returns a list of the warnings that are logged."""
  from tests.testing import tf

  lines = []
  monkeypatch.setattr(
    tf.logging, "warning", lambda text, *args: lines.append(text % args)
  )
  return lines
