"""Tests of the import structure: the layers of the package, lazy imports and the public
names.
"""

import ast
import os
import re
import runpy
import sys

import pytest

import mp_compat
from tests import testing

PACKAGE = os.path.dirname(mp_compat.__file__)

# Modules and packages, lowest layer first: each imports only from those before it, and
# modules of its own package.
LAYERS = """
core.arguments core.naming_schemes
core.matching core.translation migration.old_names tools.run
monitoring.step_counter
_tensorflow.__init__ _tensorflow.native _tensorflow
graph.graphs graph.records graph.op_names graph.runs
graph.contexts graph.dead_tensors graph.effects graph.control_flow graph
core.variable_scope core.gradients core.lineage core.finite_check core.distribute core.update_rule core.conditional_apply
core.loss_scale core
horovod
training.recorded training.advice training.step training.optimizer training
monitoring
checkpoints.files checkpoints
contrib
keras
graph_rewrite
migration
tools.ranges_chart tools.migrate
tools.compare.recording tools.compare.training tools.compare.report
tools.compare.servers tools.compare.steps tools.compare.step_building tools.compare.run_effects
tools.compare.sessions tools.compare.seeds tools.compare.processes
tools.compare.loss_scaling tools.compare.recorder tools.compare tools
__main__ __init__
""".split()
# Modules that must work without TensorFlow, so they import only each other.
WITHOUT_TENSORFLOW = LAYERS[:7] + [
  "tools.migrate",
  "tools.compare.recording",
  "tools.compare.training",
  "tools.compare.report",
]
IMPORTED_ONLY_BY = {
  "tensorflow": ("_tensorflow", "graph"),
  "libcst": "tools.migrate",
  "matplotlib": "tools.ranges_chart",
  "horovod": "horovod",
}


def layer(module):
  """Returns the index of the most specific entry of LAYERS for a module."""
  entries = [
    entry for entry in LAYERS if module == entry or module.startswith(entry + ".")
  ]
  return LAYERS.index(max(entries, key=len))


def imports(module):
  """Returns the modules of this package that a module imports, and the top-level names
  of the others.
  """
  with open(
    os.path.join(PACKAGE, module.replace(".", os.sep) + ".py"), encoding="utf-8"
  ) as source:
    tree = ast.parse(source.read())
  ours, others = set(), set()
  for node in ast.walk(tree):
    if isinstance(node, ast.Import):
      others |= {name.name.split(".")[0] for name in node.names}
    elif isinstance(node, ast.ImportFrom) and node.module.split(".")[0] == "mp_compat":
      ours |= {module_of(node.module, name.name) for name in node.names}
    elif isinstance(node, ast.ImportFrom):
      others.add(node.module.split(".")[0])
  return ours, others - {"mp_compat"}


def module_of(package, name):
  """Returns the module that `from package import name` imports, relative to
  mp_compat.
  """
  folder = os.path.join(os.path.dirname(PACKAGE), package.replace(".", os.sep))
  if os.path.isdir(folder) and not os.path.exists(os.path.join(folder, name + ".py")):
    name = (
      name + ".__init__" if os.path.isdir(os.path.join(folder, name)) else "__init__"
    )
  elif not os.path.isdir(folder):
    name = ""
  return ".".join(filter(None, (package + "." + name).split(".")[1:]))


def modules():
  """Returns the names of all modules, relative to mp_compat."""
  return sorted(
    os.path.relpath(os.path.join(folder, name), PACKAGE)[: -len(".py")].replace(
      os.sep, "."
    )
    for folder, _, names in os.walk(PACKAGE)
    for name in names
    if name.endswith(".py")
  )


@pytest.mark.parametrize("module", modules())
def test_modules_import_lower_layers(module):
  ours, others = imports(module)
  package = module.rpartition(".")[0]
  same_entry = {
    name for name in ours if layer(name) == layer(module) and name.startswith(package)
  }
  assert not [name for name in ours - same_entry if layer(name) >= layer(module)]
  if module.startswith(tuple(WITHOUT_TENSORFLOW)):
    assert not [name for name in ours if not name.startswith(tuple(WITHOUT_TENSORFLOW))]
  for name, importer in IMPORTED_ONLY_BY.items():
    assert name not in others or module.startswith(importer)


def test_only_one_package_asks_for_versions():
  others = [module for module in modules() if not module.startswith("_tensorflow")]
  paths = [
    os.path.join(PACKAGE, module.replace(".", os.sep) + ".py") for module in others
  ]
  assert not [
    path
    for path in paths
    if re.search(r"\bVERSION\b", open(path, encoding="utf-8").read())
  ]


# Private names that are not TensorFlow's.
_OF_PYTHON = {"_asdict", "_exit", "_fields", "_replace"}


def tree_of(module):
  """Returns the syntax tree of a module."""
  path = os.path.join(PACKAGE, module.replace(".", os.sep) + ".py")
  with open(path, encoding="utf-8") as source:
    return ast.parse(source.read())


def names_defined_in(tree):
  """Returns the names that a module defines, and the attributes that it sets."""
  defined = set()
  for node in ast.walk(tree):
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
      defined.add(node.name)
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
      defined.add(node.id)
    elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
      if isinstance(node.value, ast.Name) and node.value.id == "self":
        defined.add(node.attr)
  return defined


def private_names_of_tensorflow(tree, own):
  """Returns the private modules of TensorFlow that a module imports, and the private
  attributes that it uses of objects, without `own`; a class may override and call those
  of its base class.
  """
  found = set()
  for node in ast.walk(tree):
    if isinstance(node, ast.ImportFrom) and node.module.startswith("tensorflow."):
      found |= {node.module + "." + name.name for name in node.names}
    elif isinstance(node, ast.Attribute) and re.match("_(?!_|mp_compat_)", node.attr):
      of_base = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
      if not of_base and node.attr not in own | _OF_PYTHON:
        found.add(node.attr)
  return found


def test_each_private_name_of_tensorflow_is_used_in_one_module():
  trees = {module: tree_of(module) for module in modules()}
  own = set().union(*map(names_defined_in, trees.values()))
  users = {}
  for module, tree in trees.items():
    for name in private_names_of_tensorflow(tree, own):
      users.setdefault(name, []).append(module)
  assert {"_get_control_flow_context", "_create_slots"} <= set(users)
  assert not {name: found for name, found in users.items() if len(found) > 1}
  # those of Keras 2 are in its class
  elsewhere = [module for found in users.values() for module in found]
  assert all(each.startswith(("_tensorflow", "keras.keras2")) for each in elsewhere)


def test_public_names_have_docstrings():
  with pytest.raises(AttributeError, match="no attribute 'nothing'"):
    assert mp_compat.nothing
  assert sorted(mp_compat.__all__) == mp_compat.__all__
  assert all(getattr(mp_compat, name).__doc__ for name in mp_compat.__all__)


def test_old_python_raises(monkeypatch):
  monkeypatch.setattr(sys, "version_info", (3, 6, 15, "final", 0))
  with pytest.raises(
    ImportError, match="needs Python 3.7 or later, but this is Python 3.6"
  ):
    runpy.run_path(mp_compat.__file__)


def test_stub_lists_public_names():
  with open(os.path.join(PACKAGE, "__init__.pyi"), encoding="utf-8") as source:
    stub = ast.parse(source.read())
  listed = {
    name.asname: node.module
    for node in stub.body
    if isinstance(node, ast.ImportFrom)
    for name in node.names
  }
  assert listed == mp_compat._MODULE_OF


def test_import_does_not_import_tensorflow():
  testing.run_python(
    "-c",
    "import sys, mp_compat; assert 'LossScale' in dir(mp_compat) and 'tensorflow' not in sys.modules",
  )


@pytest.mark.matrix
def test_names_are_imported_on_first_use():
  testing.run_python(
    "-c",
    "import mp_compat; mp_compat.install().uninstall()\n"
    "assert mp_compat.contrib.mixed_precision.LossScaleManager and mp_compat.keras.experimental.LossScaleOptimizer\n"
    "from mp_compat import *; assert LossScale is mp_compat.LossScale",
  )


@pytest.mark.parametrize(
  "fake, words",
  [
    (
      "raise ImportError('broken build')",
      "TensorFlow 1.15 or later.*broken build.*pip install",
    ),
    (
      "__version__ = '1.14.0'",
      "TensorFlow 1.15 or later, but found 1.14.0.*pip install",
    ),
    ("", "TensorFlow 1.15 or later, but found 0.0"),
  ],
)
def test_missing_or_old_tensorflow_raises(fake, words, tmp_path):
  (tmp_path / "tensorflow.py").write_text(fake)
  done = testing.run_python(
    "-c", "import mp_compat.core.loss_scale", path=[tmp_path], check=False
  )
  assert done.returncode != 0
  assert re.search("(?s)ImportError.*" + words, done.stderr)
