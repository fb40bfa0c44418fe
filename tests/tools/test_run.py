"""Tests that `mp_compat run` executes programs as the interpreter does."""

import os
import sys
import zipfile

import pytest

from tests import testing

# `mp_compat run` without install() and TensorFlow.
RUN = (
  "import sys; from mp_compat.tools import run; run.execute(*run.load(sys.argv[1:]))"
)

PROGRAM = '''"""A program."""
import atexit, os, pickle, sys, threading

class Point: pass

def late(where):
  main = sys.modules["__main__"]
  print(where, pickle.loads(pickle.dumps(Point())).__class__ is Point, vars(main) is globals())

def wait():
  threading.main_thread().join()
  late("thread")

values = [__name__, __doc__, os.path.abspath(__file__), os.path.basename(__cached__ or "none"), __package__]
values += [__spec__ and __spec__.name, type(__loader__).__name__, __builtins__.__name__, Point.__module__]
print(*values, os.path.abspath(sys.path[0]), *sys.argv, sep="|")
atexit.register(late, "exit")
threading.Thread(target=wait).start()
sys.exit(3)
'''

ABSL_PROGRAM = '''"""A program with flags."""
import sys
from absl import app, flags

flags.DEFINE_integer("steps", 1, "Training steps.", lower_bound=1)

def main(argv):
  print(argv[1:], flags.FLAGS.steps, sys.argv[1:])
  return 5

if __name__ == "__main__":
  app.run(main)
'''


def python(folder, *command, **environment):
  return testing.run_python(
    *command, cwd=str(folder), variables=environment, check=False
  )


@pytest.fixture(name="folder", scope="module")
def _folder(tmp_path_factory):
  """Makes the same program of every kind that the interpreter runs."""
  folder = tmp_path_factory.mktemp("programs")
  for path in [
    "script.py",
    "no_suffix",
    "directory/__main__.py",
    "package/__main__.py",
    "package/module.py",
  ]:
    (folder / path).parent.mkdir(exist_ok=True)
    (folder / path).write_text(PROGRAM)
  (folder / "package" / "__init__.py").write_text("")
  (folder / "latin.py").write_bytes(
    b"# coding: latin-1\n"
    + PROGRAM.replace("A program", "Gr\xfc\xdfe").encode("latin-1")
  )
  with zipfile.ZipFile(str(folder / "archive.zip"), "w") as archive:
    archive.writestr("__main__.py", PROGRAM)
  (folder / "links").mkdir()
  (folder / "links" / "link.py").symlink_to(os.path.join("..", "package", "module.py"))
  done = python(
    folder, "-c", "import py_compile; py_compile.compile('script.py', 'compiled.pyc')"
  )
  assert done.returncode == 0
  return folder


@pytest.mark.matrix
@pytest.mark.parametrize(
  "command",
  [
    ["script.py"],
    [os.path.join(".", "package", "module.py")],
    [os.path.join("links", "link.py")],
    ["no_suffix"],
    ["latin.py"],
    ["compiled.pyc"],
    ["directory"],
    ["archive.zip"],
    ["-m", "script"],
    ["-m", "package"],
    ["-m", "package.module"],
    ["-m", "directory"],
  ],
  ids=" ".join,
)
def test_program_runs_as_in_interpreter(command, folder):
  alone = python(folder, *command, "--option", "value")
  done = python(folder, "-c", RUN, *command, "--option", "value")
  assert (alone.returncode, alone.stderr) == (3, "")
  assert alone.stdout.splitlines()[1:] == ["thread True True", "exit True True"]
  assert (done.returncode, done.stderr) == (3, "")
  assert done.stdout == alone.stdout


@pytest.mark.matrix
@pytest.mark.parametrize(
  "arguments, status",
  [
    (["--steps", "3", "argument"], 5),
    (["--steps=0"], 1),
    (["--nothing"], 1),
    (["--helpshort"], 1),
  ],
  ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_absl_program_runs_as_in_interpreter(arguments, status, tmp_path):
  (tmp_path / "absl_program.py").write_text(ABSL_PROGRAM)
  for command in (["absl_program.py"], ["-m", "absl_program"]):
    alone = python(tmp_path, *command, *arguments)
    done = python(tmp_path, "-c", RUN, *command, *arguments)
    assert alone.returncode == status, alone.stderr
    assert (done.returncode, done.stdout, done.stderr) == (
      status,
      alone.stdout,
      alone.stderr,
    )


@pytest.mark.skipif(
  sys.version_info < (3, 11), reason="PYTHONSAFEPATH is new in Python 3.11"
)
@pytest.mark.parametrize(
  "command", [["script.py"], ["directory"], ["-m", "module"]], ids=" ".join
)
def test_safe_path_is_kept(command, tmp_path):
  for path in ("script.py", "directory/__main__.py", "first/module.py"):
    (tmp_path / path).parent.mkdir(exist_ok=True)
    (tmp_path / path).write_text(
      "import os, sys; print([os.path.abspath(path) for path in sys.path])"
    )
  variables = dict(
    PYTHONSAFEPATH="1",
    PYTHONPATH=os.pathsep.join([str(tmp_path / "first"), testing.ROOT]),
  )
  alone = python(tmp_path, *command, **variables)
  done = python(tmp_path, "-c", RUN, *command, **variables)
  assert done.stdout == alone.stdout and str(tmp_path / "first") in alone.stdout


def test_script_leaves_no_bytecode(tmp_path):
  (tmp_path / "script.py").write_text("")
  assert python(tmp_path, "-c", RUN, "script.py").returncode == 0
  assert os.listdir(str(tmp_path)) == ["script.py"]


@pytest.mark.parametrize(
  "command, expected",
  [
    (["nope.py"], "No such file"),
    (["package_without_main"], "Is a directory"),
    (["-m", "nope"], "No module named nope"),
    (["-m", "nope.nothing"], "No module named 'nope'"),
    (["-m", "package_without_main"], "No module named package_without_main"),
    (["-m", ".relative"], "Relative module names not supported"),
    (["-m", "script.py"], "Error while finding module specification for 'script.py'"),
    (["-m", "_heapq"], "No code object available for _heapq"),
  ],
  ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_missing_program_is_not_found(command, expected, tmp_path):
  (tmp_path / "package_without_main").mkdir()
  (tmp_path / "package_without_main" / "__init__.py").write_text("")
  (tmp_path / "script.py").write_text("")
  done = python(tmp_path, "-c", RUN, *command)
  assert done.stderr.splitlines()[-1].startswith("mp_compat.tools.run.NotFoundError: ")
  assert expected in done.stderr.splitlines()[-1]


@pytest.mark.parametrize(
  "init",
  ["import nope", "raise ImportError('broken')", "open('nope.txt')", "x = ="],
  ids=lambda code: code.split()[0],
)
def test_package_errors_are_its_own(init, tmp_path):
  (tmp_path / "package").mkdir()
  (tmp_path / "package" / "__init__.py").write_text(init)
  (tmp_path / "package" / "module.py").write_text("")
  done = python(tmp_path, "-c", RUN, "-m", "package.module")
  assert (
    os.path.join("package", "__init__.py") in done.stderr
    and "run.NotFoundError" not in done.stderr
  )
