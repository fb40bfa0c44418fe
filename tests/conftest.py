"""Configures Hypothesis for all tests: deterministic examples, whose number is set with
`--examples`; fixtures.
"""

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
