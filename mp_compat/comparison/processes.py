# SPDX-License-Identifier: Apache-2.0
"""Runs a program in processes of their own, each with the same contents of folders and the same standard input."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from typing import Any, Dict, Iterator, Sequence

KEPT = ".before_compare"  # the suffix of a folder while copies of it are in use
_SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
_INTERRUPTS = [number for number in _SIGNALS if signal.getsignal(number) != signal.SIG_IGN]  # nohup ignores SIGHUP
_KILL = getattr(os, "killpg", os.kill), getattr(signal, "SIGKILL", signal.SIGTERM)
_ENVIRONMENT = {"PYTHONHASHSEED": "0", "TF_CUDNN_DETERMINISTIC": "1", "TF_DETERMINISTIC_OPS": "1"}  # unless set


class CannotRunError(Exception):
  """Says why a program could not be run, or not to its end."""


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
  """Raises a KeyboardInterrupt at the first signal that ends processes, and ignores further ones."""

  def interrupt(*_: Any) -> None:
    _ignore_interrupts()
    raise KeyboardInterrupt

  previous = [signal.signal(number, interrupt) for number in _INTERRUPTS]
  try:
    yield
  finally:
    for number, handler in zip(_INTERRUPTS, previous):
      signal.signal(number, handler)


def _ignore_interrupts() -> None:
  """Ignores the signals of `_interruptible`, until that ends."""
  for number in _INTERRUPTS:
    signal.signal(number, signal.SIG_IGN)


class Folders:
  """Folders that the program writes to.

  They are renamed, and copied back before each run. The originals thus never change, and exist even if this process is
  killed.
  """

  def __init__(self, paths: Sequence[str]) -> None:
    real = sorted({os.path.realpath(path) for path in paths})
    self._paths = [path for path in real if not any(path.startswith(other + os.sep) for other in real)]

  @contextlib.contextmanager
  def kept(self) -> Iterator[None]:
    """Renames the folders; at the end, also after an interrupt, removes what the runs made, and renames them back.

    Raises:
      CannotRunError: If a path is a file, or the copy of a comparison that was killed exists.
      OSError: If a folder cannot be renamed.
    """
    for path in self._paths:
      if os.path.lexists(path + KEPT):
        raise CannotRunError(
          "{0}{1} exists: {0} as it was before a comparison that was killed. Rename it to {0}.".format(path, KEPT)
        )
      if os.path.exists(path) and not os.path.isdir(path):
        raise CannotRunError("--restore expects a folder, but {} is a file.".format(path))
    existing = [path for path in self._paths if os.path.exists(path)]
    with _interruptible():
      try:
        for path in existing:
          os.rename(path, path + KEPT)
        yield
      finally:
        try:
          _ignore_interrupts()
        finally:
          for path in self._paths:
            if path not in existing or os.path.isdir(path + KEPT):
              with _replaced(path):
                if path in existing:
                  os.rename(path + KEPT, path)

  def copy_back(self) -> None:
    """Gives each folder the contents that it had at first."""
    for path in self._paths:
      with _replaced(path):
        if os.path.isdir(path + KEPT):
          shutil.copytree(path + KEPT, path, symlinks=True)


@contextlib.contextmanager
def _replaced(path: str) -> Iterator[None]:
  """Moves away what is at `path`, and deletes it at the end: to delete it first could fail halfway."""
  if not os.path.lexists(path):
    yield
    return
  removed = tempfile.mkdtemp(dir=os.path.dirname(path))
  try:
    os.rename(path, os.path.join(removed, "removed"))
    yield
  finally:
    shutil.rmtree(removed, ignore_errors=True)


def read_standard_input(path: str) -> None:
  """Writes the standard input to a file, for each run; nothing if it is a terminal or closed."""
  with open(path, "wb") as file, contextlib.suppress(OSError):
    source = os.open(os.devnull, os.O_RDONLY) if os.isatty(0) else os.dup(0)
    with open(source, "rb") as standard_input:
      shutil.copyfileobj(standard_input, file)


def run(settings: Dict[str, Any], name: str, argv: Sequence[str], directory: str, folder: str) -> None:
  """Runs a program to its end, or to the last step; its processes end with it.

  Args:
    settings: The fields of `recorder.Settings`.
    name: What the program finds in the environment as MP_COMPAT_RUN.
    argv: The program and its arguments, as for `mp_compat run`.
    directory: The directory to run it in.
    folder: A folder for files, with the standard input as `input`.

  Raises:
    CannotRunError: If the program fails, with the end of its output.
  """
  path = os.path.join(folder, "settings")
  with open(path, "w", encoding="utf-8") as file:
    json.dump(settings, file)
  command = [sys.executable, "-m", "mp_compat.comparison.recorder", path, *argv]
  environment = {**_ENVIRONMENT, **os.environ, "MP_COMPAT_RUN": name}
  with open(os.path.join(folder, "input"), "rb") as stdin, open(os.path.join(folder, "output"), "wb+") as output:
    process = subprocess.Popen(
      command,
      cwd=directory,
      env=environment,
      stdin=stdin,
      stdout=output,
      stderr=subprocess.STDOUT,
      start_new_session=True,
    )
    try:
      code = process.wait()
    finally:
      with contextlib.suppress(OSError):
        _KILL[0](process.pid, _KILL[1])  # and the processes that it started
      process.wait()
    if code:
      output.seek(max(0, output.seek(0, os.SEEK_END) - 10000))
      lines = output.read().decode(errors="replace").splitlines()[-20:]
      ended = (
        "The program was killed by signal {}".format(-code)
        if code < 0
        else "The program ended with exit code {}".format(code)
      )
      raise CannotRunError("{}. Its last lines:\n{}".format(ended, "\n".join(lines)))
