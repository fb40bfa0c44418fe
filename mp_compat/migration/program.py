# SPDX-License-Identifier: Apache-2.0
"""Runs a program as the interpreter does: its module is `__main__` until the process ends, unlike runpy's."""

import builtins
import importlib.machinery
import importlib.util
import os
import sys
import types
from typing import Any, List, Optional, Tuple


class NotFoundError(ValueError):
  """Says that there is no such program, or that it is not in Python."""


def load(argv: List[str]) -> Tuple[types.ModuleType, Any]:
  """Compiles a program; sets `sys.argv` and the first entry of `sys.path` for it, as the interpreter does.

  Args:
    argv: A script, or a directory or zip file with `__main__.py`, and its arguments; or "-m", a module or package, and
      its arguments.

  Returns:
    A module to execute it in, and its code.

  Raises:
    NotFoundError: If there is no such program, or it is not in Python.
    Exception: What compiling it raises, or importing the packages that contain the module.
  """
  if argv[0] == "-m":
    sys.argv = argv[1:]
    _set_path([] if _is_path_safe() else [os.getcwd()])
    spec = _find_module(argv[1])
    if not spec:
      raise NotFoundError("No module named {}".format(argv[1]))
    main, code = _load(spec)
    sys.argv[0] = main.__file__ or argv[1]
    return main, code
  path = os.path.abspath(argv[0])  # as in Python 3.9 and later, for programs that change the directory
  spec = importlib.machinery.PathFinder.find_spec("__main__", [path])
  sys.argv = argv
  _set_path([path] if spec else [] if _is_path_safe() else [os.path.dirname(os.path.realpath(path))])
  try:
    return _load(spec) if spec else _load_script(path)
  except OSError as error:
    raise NotFoundError(str(error)) from error


def execute(main: types.ModuleType, code: Any) -> None:
  """Makes a module `__main__` and executes a program in it."""
  sys.modules["__main__"] = main
  exec(code, vars(main))


def _is_path_safe() -> bool:
  """Returns whether the interpreter adds no directory to `sys.path`: with `-P`, PYTHONSAFEPATH or `-I`."""
  return bool(getattr(sys.flags, "safe_path", False) or sys.flags.isolated)


def _set_path(first: List[str]) -> None:
  """Replaces what the interpreter added to the beginning of `sys.path` for this command."""
  sys.path[: 0 if _is_path_safe() else 1] = first


def _find_module(name: str) -> Optional[importlib.machinery.ModuleSpec]:
  """Returns the spec of a module, or that of the `__main__` of a package; None if there is none."""
  if name.startswith("."):
    return None
  try:
    spec = importlib.util.find_spec(name)
  except ModuleNotFoundError as error:
    if error.name and (name + ".").startswith(error.name + "."):
      return None
    raise  # by a package that contains the module
  is_package = spec is not None and spec.submodule_search_locations is not None
  return _find_module(name + ".__main__") if is_package else spec


def _load(spec: importlib.machinery.ModuleSpec) -> Tuple[types.ModuleType, Any]:
  loader: Any = spec.loader
  code = loader.get_code(spec.name) if hasattr(loader, "get_code") else None
  if not code:
    raise NotFoundError("{} is not in Python".format(spec.name))
  return _make_main(spec.origin, loader, __cached__=spec.cached, __package__=spec.parent, __spec__=spec), code


def _load_script(path: str) -> Tuple[types.ModuleType, Any]:
  if path.endswith(".pyc"):
    loader: Any = importlib.machinery.SourcelessFileLoader("__main__", path)
    code = loader.get_code("__main__")
  else:
    loader = importlib.machinery.SourceFileLoader("__main__", path)
    code = loader.source_to_code(loader.get_data(path), path)  # `get_code` would write a .pyc file
  return _make_main(path, loader), code


def _make_main(path: Optional[str], loader: Any, **attributes: Any) -> types.ModuleType:
  main = types.ModuleType("__main__")
  vars(main).update(__annotations__={}, __builtins__=builtins, __cached__=None, __file__=path, __loader__=loader)
  vars(main).update(attributes)
  return main
