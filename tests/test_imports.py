"""Who may import whom, and what importing asks for."""

import ast
import os
import subprocess
import sys

import pytest

import mp_compat

PACKAGE = os.path.dirname(mp_compat.__file__)

# A module imports only from those before it. Packages stand for all of their modules.
LAYERS = [
    "update_rule", "_compat",
    "gradients", "finite_check", "distribute", "conditional_apply", "variable_scope",
    "loss_scale", "diagnosis", "hooks", "summaries", "horovod", "sync_replicas", "step", "optimizer",
    "accumulation", "together",
    "dialects", "checkpoints", "plot", "contrib", "keras", "graph_rewrite", "conditional_names",
    "old_names", "installation", "migrate", "__main__",
    "__init__", "__init__.pyi",
]
FIRST_TO_IMPORT = {"tensorflow": {"_compat"}, "libcst": {"migrate"}, "matplotlib": {"plot"}, "horovod": {"horovod"}}


def imports(module):
  """The modules of this package that a module imports, and the top-level names of the others."""
  path = module if module.endswith(".pyi") else module.replace(".", os.sep) + ".py"
  with open(os.path.join(PACKAGE, path), encoding="utf-8") as source:
    tree = ast.parse(source.read())
  ours, others = set(), set()
  for node in ast.walk(tree):
    if isinstance(node, ast.Import):
      others |= {name.name.split(".")[0] for name in node.names}
    elif isinstance(node, ast.ImportFrom) and node.module == "mp_compat":
      ours |= {name.name for name in node.names}
    elif isinstance(node, ast.ImportFrom):
      first, _, rest = node.module.partition(".")
      (ours if first == "mp_compat" else others).add(rest.split(".")[0] if first == "mp_compat" else first)
  return ours, others


def modules():
  return sorted(os.path.relpath(os.path.join(folder, name), PACKAGE)[:-len(".py")].replace(os.sep, ".")
                for folder, _, names in os.walk(PACKAGE) for name in names if name.endswith(".py"))


def test_every_module_has_a_layer():
  assert {module.partition(".")[0] for module in modules()} | {"__init__.pyi"} == set(LAYERS)


@pytest.mark.parametrize("module", modules() + ["__init__.pyi"])
def test_imports_point_down(module):
  own = module if module in LAYERS else module.partition(".")[0]
  ours, others = imports(module)
  allowed = set(LAYERS[:LAYERS.index(own)]) | ({own} if own != module else set())
  assert ours <= allowed
  for name, importers in FIRST_TO_IMPORT.items():
    assert name not in others or own in importers


def test_the_facade_names_everything_public():
  with pytest.raises(AttributeError, match="no attribute 'nothing'"):
    assert mp_compat.nothing
  assert sorted(mp_compat.__all__) == mp_compat.__all__
  assert all(getattr(mp_compat, name).__doc__ for name in mp_compat.__all__)


def test_importing_the_facade_imports_no_tensorflow_and_asking_it_does():
  subprocess.check_call([sys.executable, "-c", """
import sys, mp_compat
assert "tensorflow" not in sys.modules and "LossScale" in dir(mp_compat)
mp_compat.install().uninstall()
assert mp_compat.contrib.mixed_precision.LossScaleManager and mp_compat.keras.experimental.LossScaleOptimizer
from mp_compat import *
assert LossScale is mp_compat.LossScale and "tensorflow" in sys.modules
"""])


@pytest.mark.parametrize("fake, words", [
    ("raise ImportError('broken build')", "TensorFlow 1.15 or later.*broken build.*pip install"),
    ("__version__ = '1.14.0'", "TensorFlow 1.15 or later, but found 1.14.0.*pip install"),
    ("", "TensorFlow 1.15 or later, but found 0.0"),
])
def test_a_tensorflow_that_is_missing_or_too_old_is_named(fake, words, tmp_path):
  (tmp_path / "tensorflow.py").write_text(fake)
  environment = dict(os.environ, PYTHONPATH=os.pathsep.join([str(tmp_path), os.path.dirname(PACKAGE)]))
  done = subprocess.run([sys.executable, "-c", "import mp_compat.loss_scale"], env=environment, stderr=subprocess.PIPE,
                        text=True, check=False)
  assert done.returncode != 0
  with pytest.raises(ImportError, match="(?s)" + words):
    raise ImportError(done.stderr)
