"""tools/mutants.py fits the package: each mutant changes one place, and its tests
exist.
"""

import ast
import os
import runpy
import subprocess
import sys

import pytest

from tests import testing

SCRIPT = runpy.run_path(os.path.join(testing.ROOT, "tools", "mutants.py"))


@pytest.mark.parametrize("module", sorted(SCRIPT["TESTS"]))
def test_mutants_change_their_module(module):
  with open(SCRIPT["source_file"](testing.ROOT, module), encoding="utf-8") as file:
    source = file.read()
  mutants = [mutant for mutant in SCRIPT["MUTANTS"] if mutant.module == module]
  assert mutants
  own = ast.dump(ast.parse(source))
  for mutant in mutants:
    mutated = mutant.mutate(source)
    assert ast.dump(mutated) != own, mutant
    compile(mutated, module, "exec")


@pytest.mark.parametrize("module", sorted(SCRIPT["TESTS"]))
def test_test_files_of_mutants_exist(module):
  paths = [
    "tests/{}/test_{}.py".format(*test.rsplit("/", 1))
    for test in SCRIPT["TESTS"][module]
  ]
  assert not [
    path for path in paths if not os.path.exists(os.path.join(testing.ROOT, path))
  ]


SOURCE = "def f(a):\n  if a and b(c):\n    return d([a, 2])\n  return a + e"


@pytest.mark.parametrize(
  "unit, name, new, old_text, new_text",
  [
    ("call", "d", "_[:1]", "d([a, 2])", "d([a, 2])[:1]"),
    ("name", "+", "-", "a + e", "a - e"),
    ("name", "b(c)", "True", "b(c)", "True"),
    ("operand", "b", "", "a and b(c)", "a"),
    ("operand", "e", "", "a + e", "a"),
    ("operand", "2", "", "[a, 2]", "[a]"),
    ("result", "d", "None", "d([a, 2])", "None"),
    ("statement", "d", "pass; pass", "return d([a, 2])", "pass; pass"),
    ("test", "b", "False", "a and b(c)", "False"),
  ],
)
def test_mutant_changes_innermost_unit(unit, name, new, old_text, new_text):
  mutated = SCRIPT["Mutant"]("", "f", unit, name, new).mutate(SOURCE)
  assert ast.dump(mutated) == ast.dump(ast.parse(SOURCE.replace(old_text, new_text)))


@pytest.mark.parametrize("definition, name", [("f", "x"), ("f", "a"), ("g", "b")])
def test_mutant_without_one_place_is_an_error(definition, name):
  mutant = SCRIPT["Mutant"]("", definition, "name", name, "c")
  with pytest.raises(ValueError, match="Expected one"):
    mutant.mutate(SOURCE)


def test_name_without_mutants_is_an_error():
  command = [sys.executable, "tools/mutants.py", "training", "monitor"]
  process = subprocess.run(
    command, cwd=testing.ROOT, stderr=subprocess.PIPE, timeout=60
  )
  assert process.returncode == 2
  assert b"no mutants of 'monitor'; there are of: graph/gate, " in process.stderr


def test_nightly_runs_mutants_of_all_folders():
  with open(os.path.join(testing.ROOT, "noxfile.py"), encoding="utf-8") as file:
    values = {
      node.targets[0].id: node.value
      for node in ast.parse(file.read()).body
      if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
  folders = {module.split("/")[0] for module in SCRIPT["TESTS"]}
  assert sorted(folders) == ast.literal_eval(values["MUTATED"])
