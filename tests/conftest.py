"""Configures Hypothesis for all tests: deterministic examples, whose number is set with `--examples`."""

import hypothesis


def pytest_addoption(parser):
  parser.addoption("--examples", type=int, default=10, help="graphs for test_fuzzing.py; default: %(default)s")


def pytest_configure(config):
  hypothesis.settings.register_profile(
    "mp_compat",
    max_examples=config.getoption("examples"),
    deadline=None,
    database=None,
    derandomize=config.getoption("hypothesis_seed") is None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.data_too_large],
  )
  hypothesis.settings.load_profile("mp_compat")
