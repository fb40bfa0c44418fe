# SPDX-License-Identifier: Apache-2.0
"""Runs a program as the interpreter does: its module is `__main__` until the process
ends, unlike runpy's.
"""

import builtins
import importlib.machinery
import os
import runpy
import sys
import types
from typing import List, Optional, Tuple, cast


class NotFoundError(ValueError):
  """Says that there is no such program, or that it is not in Python."""


def load(argv: List[str]) -> Tuple[types.ModuleType, types.CodeType]:
  """Compiles a program; sets `sys.argv` and the first entry of `sys.path` for it, as
  the interpreter does.

  Args:
    argv: a script, or a directory or zip file with `__main__.py`, and its arguments; or
      "-m", a module or package, and its arguments.

  Returns:
    A module to execute it in, and its code.

  Raises:
    NotFoundError: If there is no such program, or it is not in Python; says what was
      expected.
    Exception: What compiling it raises, or importing the packages that contain the
      module.
  """
  try:
    return _load(argv)
  except NotFoundError as error:
    expected = (
      "expected a script, a directory or zip file with __main__.py, or -m and a module"
    )
    passed = argv[0]
    if passed == "-m":
      passed = " ".join(argv[:2])
    raise NotFoundError("{}, but got {}: {}".format(expected, passed, error)) from error


def _load(argv: List[str]) -> Tuple[types.ModuleType, types.CodeType]:
  """Does what `load` does; its NotFoundError says only what is wrong.

      remove the entry that the interpreter added to sys.path for this command
      -m MODULE                    sys.path[0] = the current directory
      a directory or a zip file    sys.path[0] = itself; the code of its __main__.py
      a script                     sys.path[0] = its directory, without links
      sys.argv = what the program would have

  In the interpreter's safe mode, only a directory or zip file is added to `sys.path`.
  """
  # With -P, PYTHONSAFEPATH or -I, the interpreter adds no directory.
  is_safe = bool(getattr(sys.flags, "safe_path", False) or sys.flags.isolated)
  if not is_safe:
    del sys.path[0]  # what it added for this command
  details = vars(runpy)  # The interpreter uses these private functions, too.
  if argv[0] == "-m":
    sys.argv = argv[1:]
    if not is_safe:
      sys.path.insert(0, os.getcwd())
    _, spec, code = details["_get_module_details"](argv[1], NotFoundError)
    sys.argv[0] = spec.origin or argv[1]
    return _make_main(spec.origin, spec.loader, spec), code
  # as in Python 3.9 and later, for programs that change the directory
  path = os.path.abspath(argv[0])
  sys.argv = argv
  if importlib.machinery.PathFinder.find_spec("__main__", [path]):
    sys.path.insert(0, path)
    _, spec, code = details["_get_main_module_details"](NotFoundError)
    return _make_main(spec.origin, spec.loader, spec), code
  if not is_safe:
    sys.path.insert(0, os.path.dirname(os.path.realpath(path)))
  try:
    return _load_script(path)
  except OSError as error:
    raise NotFoundError(str(error)) from error


def execute(main: types.ModuleType, code: types.CodeType) -> None:
  """Makes a module `__main__` and executes a program in it."""
  sys.modules["__main__"] = main
  exec(code, vars(main))


def _load_script(path: str) -> Tuple[types.ModuleType, types.CodeType]:
  """Returns a module and the code of a script, or of a compiled one.

  Raises:
    OSError: If the file cannot be read.
    Exception: What compiling it raises.
  """
  if path.endswith(".pyc"):
    compiled = importlib.machinery.SourcelessFileLoader("__main__", path)
    main = _make_main(path, compiled)
    return main, cast(types.CodeType, compiled.get_code("__main__"))
  loader = importlib.machinery.SourceFileLoader("__main__", path)
  # `get_code` would write a .pyc file
  code = loader.source_to_code(loader.get_data(path), path)
  return _make_main(path, loader), code


def _make_main(
  path: Optional[str],
  loader: object,
  spec: Optional[importlib.machinery.ModuleSpec] = None,
) -> types.ModuleType:
  """Returns an empty module with the attributes that the interpreter gives to
  `__main__`; `spec` is None for a script.
  """
  main = types.ModuleType("__main__")
  vars(main).update(
    __annotations__={},
    __builtins__=builtins,
    __cached__=None,
    __file__=path,
    __loader__=loader,
  )
  if spec:
    vars(main).update(__cached__=spec.cached, __package__=spec.parent, __spec__=spec)
  return main
