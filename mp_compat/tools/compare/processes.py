# SPDX-License-Identifier: Apache-2.0
"""Runs a program in processes of their own, each with the same contents of folders and
the same standard input.
"""

import contextlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from typing import (
  Any,
  BinaryIO,
  Callable,
  Dict,
  Iterator,
  List,
  NoReturn,
  Sequence,
  Tuple,
  cast,
)

KEPT = ".before_compare"  # the suffix of a folder while copies of it are in use
_INTERRUPTS = [
  number for number in signal.Signals if number.name in ("SIGINT", "SIGTERM", "SIGHUP")
]
_KILL = (os.killpg, signal.SIGKILL) if os.name == "posix" else (os.kill, signal.SIGTERM)
# unless set
_ENVIRONMENT = {
  "PYTHONHASHSEED": "0",
  "TF_CUDNN_DETERMINISTIC": "1",
  "TF_DETERMINISTIC_OPS": "1",
}

# begins a line of the output that says why this package ended a process
_REASON = "mp_compat compare: "
_SHOWN = 10000  # bytes of the output, the last ones


class CannotRunError(Exception):
  """Says why a program could not be run."""


class ProgramFailedError(CannotRunError):
  """Says how a program failed."""


def give_up(reason: object) -> NoReturn:
  """Ends the process of a program at once, for a reason that `run` raises."""
  os.write(2, "\n{}{}\n".format(_REASON, reason).encode())
  os._exit(1)


@contextlib.contextmanager
def _interruptible() -> Iterator[Callable[[], None]]:
  """Raises a KeyboardInterrupt at the first signal that ends processes; yields a
  function that ignores further ones.

  Signals that are ignored already, as by nohup, stay so. At the end, all handlers are
  those of before.
  """

  def ignore() -> None:
    for number in previous:
      signal.signal(number, signal.SIG_IGN)

  def interrupt(*_: object) -> None:
    ignore()
    raise KeyboardInterrupt

  previous = {number: signal.getsignal(number) for number in _INTERRUPTS}
  # by nohup
  previous = {
    number: handler for number, handler in previous.items() if handler != signal.SIG_IGN
  }
  try:
    for number in previous:
      signal.signal(number, interrupt)
    yield ignore
  finally:
    for number, handler in previous.items():
      signal.signal(number, handler)


@contextlib.contextmanager
def kept(paths: Sequence[str]) -> Iterator[Callable[[], None]]:
  """Keeps folders that programs write to; yields a function that gives them the
  contents that they had at first.

      with kept(["checkpoints"]) as copy_back:
        for run in runs:
          copy_back()
          ...  # the program writes to checkpoints

  They are renamed, and copied back: the originals never change, and exist even if this
  process is killed. At the end, also after an interrupt, removes what the programs
  made, and renames them back. Folders that do not exist at first are removed.

  Raises:
    CannotRunError: If a folder cannot be renamed or copied.
  """
  folders = _outermost(paths)
  existing = [path for path in folders if os.path.exists(path)]

  def copy_back() -> None:
    """Gives the folders the contents that they had at first; removes the others."""
    for path in folders:
      _remove(path)
      if path in existing:
        try:
          shutil.copytree(path + KEPT, path, symlinks=True)
        except shutil.Error as error:
          failed, _, reason = error.args[0][0]
          raise CannotRunError(
            "{} cannot be copied, for --restore: {}".format(failed, reason)
          ) from error

  with _interruptible() as ignore_interrupts, contextlib.ExitStack() as locks:
    try:
      for path in existing:
        locks.enter_context(_locked(path))
        os.rename(path, path + KEPT)
      yield copy_back
    finally:
      try:
        ignore_interrupts()
      finally:
        for path in folders:
          if path not in existing or os.path.isdir(path + KEPT):
            _remove(path)
            if path in existing:
              os.rename(path + KEPT, path)


@contextlib.contextmanager
def _locked(folder: str) -> Iterator[None]:
  """Holds the lock of a folder, which shows other processes that this one uses it; the
  system releases it if the process is killed.

  Raises a BlockingIOError if another process holds it. Does nothing on systems, and
  file systems, without such locks.
  """
  try:
    import fcntl
  except ImportError:
    yield
    return

  descriptor = os.open(folder, os.O_RDONLY)
  try:
    try:
      fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      raise
    except OSError:
      pass  # such as NFS
    yield
  finally:
    os.close(descriptor)


def _raise_kept(path: str) -> NoReturn:
  """Raises a CannotRunError: a comparison keeps a folder, or was killed meanwhile."""
  kept = path + KEPT
  try:
    with _locked(kept):
      raise CannotRunError(
        "{0} exists: {1} as it was before a comparison that was killed. Rename it to "
        "{1}.".format(kept, path)
      )
  except BlockingIOError:
    raise CannotRunError(
      "Another comparison is running that restores {}. Wait for its end.".format(path)
    ) from None


def _outermost(paths: Sequence[str]) -> List[str]:
  """Returns the folders without those inside of others; raises a CannotRunError for one
  that cannot be renamed.
  """
  real = sorted({os.path.realpath(path) for path in paths})
  folders = [
    path for path in real if not any(path.startswith(other + os.sep) for other in real)
  ]
  for path in folders:
    if os.path.lexists(path + KEPT):
      _raise_kept(path)
    if os.path.exists(path) and not os.path.isdir(path):
      raise CannotRunError("--restore expects a folder, but {} is a file.".format(path))
  return folders


def _remove(path: str) -> None:
  """Moves away what is at `path`, if anything, and deletes it there: to delete it in
  its place could fail halfway.
  """
  if os.path.lexists(path):
    removed = tempfile.mkdtemp(dir=os.path.dirname(path))
    os.rename(path, os.path.join(removed, "removed"))
    shutil.rmtree(removed, ignore_errors=True)


def save_standard_input(path: str) -> None:
  """Saves the standard input in a file, for each run; nothing if it is a terminal or
  closed.
  """
  with open(path, "wb") as file, contextlib.suppress(OSError):
    source = os.open(os.devnull, os.O_RDONLY) if os.isatty(0) else os.dup(0)
    with open(source, "rb") as standard_input:
      shutil.copyfileobj(standard_input, file)


def run(
  settings: Dict[str, Any], name: str, argv: Sequence[str], directory: str, folder: str
) -> None:
  """Runs a program in `directory` to its end, or to the last step; its processes end
  with it.

  Args:
    settings: the fields of `recording.Settings`.
    name: the name of the run, which the program finds as MP_COMPAT_RUN in the
      environment.
    argv: the program and its arguments, as `tools.run.load` takes them.
    directory: the current directory of the program.
    folder: a folder for files, which has the standard input as `input`.

  Raises:
    ProgramFailedError: If it fails; has its last lines.
    CannotRunError: If it cannot be run or recorded.
  """
  with open(os.path.join(folder, "settings"), "w", encoding="utf-8") as file:
    json.dump(settings, file)
  recorder = [sys.executable, "-m", "mp_compat.tools.compare.recorder", file.name]
  environment = {**_ENVIRONMENT, **os.environ, "MP_COMPAT_RUN": name}
  with open(os.path.join(folder, "input"), "rb") as stdin:
    code, lines = _execute([*recorder, *argv], directory, environment, stdin)
  if code:
    raise _failure(code, lines, name)


def _execute(
  command: Sequence[str], directory: str, environment: Dict[str, str], stdin: BinaryIO
) -> Tuple[int, List[str]]:
  """Executes a command to its end, also after an interrupt; the processes that it
  started end with it.

  Args:
    command: the executable file, and its arguments.
    directory: its current directory.
    environment: its environment variables.
    stdin: its standard input.

  Returns:
    Its exit code, the negative number of a signal that killed it; and the last lines
    that it wrote.
  """
  process = subprocess.Popen(
    command,
    cwd=directory,
    env=environment,
    stdin=stdin,
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    start_new_session=True,
  )
  output = cast(io.BufferedReader, process.stdout)
  last = bytearray()

  def read_output() -> None:
    """Keeps the last bytes of the output, and lets the program write further ones."""
    for chunk in iter(lambda: output.read1(_SHOWN), b""):
      last.extend(chunk)
      del last[:-_SHOWN]

  reader = threading.Thread(target=read_output, daemon=True)
  reader.start()
  try:
    code = process.wait()
  finally:
    kill, signal_number = _KILL
    with contextlib.suppress(OSError):
      kill(process.pid, signal_number)
    process.wait()
  reader.join(timeout=5)  # A process that left the group may still have the pipe.
  return code, last.decode(errors="replace").splitlines()[-20:]


def _failure(code: int, lines: List[str], name: str) -> CannotRunError:
  """Returns the error of a run that ended with an exit code, and what it wrote last: a
  ProgramFailedError, or another CannotRunError if this package gave up.
  """
  if lines and lines[-1].startswith(_REASON):
    return CannotRunError(lines[-1][len(_REASON) :])
  ending = "ended with exit code {}".format(code)
  if code < 0:
    ending = "was killed by signal {}".format(-code)
  added = []
  for variable, value in _ENVIRONMENT.items():
    if variable not in os.environ:
      added.append("{}={}".format(variable, value))
  added.append("MP_COMPAT_RUN=" + name)
  return ProgramFailedError(
    "The program {}. Its last lines:\n{}\nIt ran with {} in the environment.".format(
      ending, "\n".join(lines), ", ".join(added)
    )
  )
