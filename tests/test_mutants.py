"""tools/mutants.py fits the package: each mutant replaces a text that is there once,
and its tests exist.
"""

import os
import runpy

import pytest

from tests import testing

SCRIPT = runpy.run_path(os.path.join(testing.ROOT, "tools", "mutants.py"))


@pytest.mark.parametrize("module", sorted(SCRIPT["TESTS"]))
def test_mutated_texts_occur_once(module):
  with open(
    os.path.join(testing.ROOT, "mp_compat", module + ".py"), encoding="utf-8"
  ) as source:
    text = source.read()
  mutated = [old for name, old, _ in SCRIPT["MUTANTS"] if name == module]
  assert mutated
  assert not [old for old in mutated if len(SCRIPT["spans"](text, old)) != 1]


@pytest.mark.parametrize("module", sorted(SCRIPT["TESTS"]))
def test_test_files_of_mutants_exist(module):
  paths = [
    "tests/{}/test_{}.py".format(*test.rsplit("/", 1))
    for test in SCRIPT["TESTS"][module]
  ]
  assert not [
    path for path in paths if not os.path.exists(os.path.join(testing.ROOT, path))
  ]
