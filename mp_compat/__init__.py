"""Loss scaling for float16 training in TensorFlow's graph mode (`tf.compat.v1`), from TensorFlow 1.15 to 2.21.

Each module, and TensorFlow with it, is imported on first use of a public name. `mp_compat migrate` needs no TensorFlow.
"""

import importlib
import pkgutil
import re
from typing import Any, List

__version__ = "0.1.0"

_HOMES = {name: module for module, name in re.findall(
    r"^from (\S+) import (\w+)", pkgutil.get_data(__name__, "__init__.pyi").decode("utf-8"), re.M)}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
  if name not in _HOMES:
    raise AttributeError("module 'mp_compat' has no attribute {!r}".format(name))
  home = _HOMES[name]
  if home == __name__:
    return importlib.import_module("{}.{}".format(home, name))
  value = getattr(importlib.import_module(home), name)
  globals()[name] = value
  return value


def __dir__() -> List[str]:
  return sorted(set(globals()) | set(__all__))
