"""Who may import whom, and what importing asks for."""

import ast
import os
import subprocess
import sys

import pytest

import mp_compat

PACKAGE = os.path.dirname(mp_compat.__file__)

# What each module may import of this package, and from elsewhere.
RULES = {
    "update_rule": (set(), {"math", "typing"}),
    "_compat": (set(), {"contextlib", "functools", "sys", "typing", "weakref", "tensorflow"}),
    "gradients": ({"_compat"}, {"typing"}),
    "buckets": ({"_compat", "gradients"}, {"typing"}),
    "distribute": ({"_compat"}, {"typing"}),
    "variable_scope": ({"_compat"}, {"typing"}),
    "loss_scale": ({"_compat", "buckets", "distribute", "gradients", "update_rule"},
                   {"abc", "math", "numbers", "typing"}),
    "diagnosis": ({"_compat", "gradients"}, {"collections", "typing"}),
    "hooks": ({"_compat", "diagnosis"}, {"absl", "collections", "typing"}),
    "dialects": (set(), {"collections", "re", "typing"}),
    "checkpoints": ({"_compat", "dialects"}, {"collections", "numpy", "os", "re", "shutil", "typing"}),
    "gating": ({"_compat", "gradients", "loss_scale"}, {"typing"}),
    "together": ({"_compat", "distribute", "gating", "gradients", "loss_scale", "optimizer"}, {"typing"}),
    "contrib.__init__": ({"contrib"}, set()),
    "contrib.mixed_precision": ({"_compat", "loss_scale", "optimizer", "update_rule"}, {"abc", "typing"}),
    "keras.__init__": ({"keras"}, set()),
    "keras.experimental": ({"keras"}, {"typing"}),
    "keras.families": ({"_compat", "keras"}, {"importlib", "typing"}),
    "keras.keras3": ({"_compat", "gating", "gradients", "loss_scale"}, {"sys", "typing"}),
    "keras.layout": ({"_compat"}, {"typing"}),
    "keras.loss_scale_optimizer": ({"_compat", "distribute", "gating", "gradients", "keras", "loss_scale"},
                                   {"absl", "functools", "threading", "typing"}),
    "keras.newer": ({"_compat", "gating", "keras"}, {"contextlib", "typing"}),
    "keras.optimizer_v2": ({"_compat", "gating", "gradients", "keras"}, {"contextlib", "typing"}),
    "keras.scale_value": ({"_compat"}, {"numpy", "typing"}),
    "accumulation": ({"_compat", "buckets", "gating", "gradients", "optimizer"}, {"typing"}),
    "horovod": ({"_compat", "gradients", "loss_scale"}, {"horovod", "sys", "typing"}),
    "summaries": ({"_compat"}, {"typing"}),
    "sync_replicas": ({"_compat", "gradients"}, {"typing"}),
    "optimizer": ({"_compat", "buckets", "diagnosis", "distribute", "gating", "gradients", "hooks", "horovod",
                   "loss_scale", "summaries", "sync_replicas"}, {"absl", "typing"}),
    "plot": ({"_compat"}, {"bisect", "matplotlib", "numpy", "os", "typing"}),
    "graph_rewrite": ({"_compat", "keras", "optimizer"}, {"contextlib", "typing"}),
    "installation": ({"_compat", "old_names"}, {"importlib", "mp_compat", "operator", "re", "sys", "types", "typing"}),
    "old_names": (set(), {"typing"}),
    "migrate.__init__": ({"migrate"}, {"libcst", "os", "re", "tempfile", "typing"}),
    "migrate.containers": ({"migrate"}, {"itertools", "json", "libcst", "re", "typing"}),
    "migrate.decisions": ({"migrate", "old_names"}, {"libcst", "re", "typing"}),
    "migrate.names": ({"old_names"}, {"libcst", "re", "typing"}),
    "migrate.report": ({"migrate"}, {"difflib", "json", "os", "typing"}),
    "migrate.rewrite": ({"migrate"}, {"libcst", "typing"}),
    "__main__": ({"_compat", "checkpoints", "dialects", "installation", "migrate", "plot"},
                 {"argparse", "os", "runpy", "sys", "tqdm", "typing"}),
    "__init__": (set(), {"importlib", "pkgutil", "re", "typing"}),
    "__init__.pyi": ({"accumulation", "checkpoints", "contrib", "diagnosis", "gradients", "graph_rewrite", "hooks",
                      "horovod", "installation", "keras", "loss_scale", "optimizer", "together", "variable_scope"},
                     set()),
}


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


def test_every_module_has_a_rule():
  found = {os.path.relpath(os.path.join(folder, name), PACKAGE)[:-len(".py")].replace(os.sep, ".")
           for folder, _, names in os.walk(PACKAGE) for name in names if name.endswith(".py")}
  assert found | {"__init__.pyi"} == set(RULES)


@pytest.mark.parametrize("module", sorted(RULES))
def test_a_module_imports_what_its_rule_says(module):
  ours, others = imports(module)
  assert ours == RULES[module][0] and others <= RULES[module][1]


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
