"""Tests of `python -m mp_compat`: version, interrupts, missing programs, missing
TensorFlow.
"""

import os
import signal
import subprocess
import sys

import pytest

import mp_compat
from mp_compat import __main__ as command_line
from tests import testing


def run(*arguments, **options):
  return testing.run_python("-m", "mp_compat", *arguments, check=False, **options)


@pytest.fixture(name="bare_python", scope="module")
def _bare_python(tmp_path_factory):
  """Returns the interpreter of a virtual environment without packages."""
  folder = tmp_path_factory.mktemp("bare")
  subprocess.run(
    [sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True
  )
  return os.path.join(str(folder), "Scripts" if os.name == "nt" else "bin", "python")


@pytest.mark.parametrize(
  "command",
  [
    ["checkpoint", "inspect", "model.ckpt"],
    ["checkpoint", "convert", "a", "b", "--to", "plain"],
    ["ranges", ".", "-o", "x.png"],
    ["run", "script.py"],
  ],
  ids=" ".join,
)
def test_missing_tensorflow_is_reported(command, bare_python, tmp_path):
  (tmp_path / "script.py").write_text("import os\n")
  done = run(*command, python=bare_python, cwd=str(tmp_path))
  assert done.returncode == 2 and done.stdout == ""
  (line,) = done.stderr.splitlines()
  assert line.startswith(
    "mp_compat {}: mp_compat needs TensorFlow 1.15 or later".format(command[0])
  )
  assert "`pip install tensorflow`" in line


def test_broken_tensorflow_is_reported(tmp_path):
  (tmp_path / "tensorflow.py").write_text(
    "raise ImportError('DLL load failed.\\n\\nSee the web page.')"
  )
  done = run("ranges", ".", "-o", "x.png", path=[tmp_path])
  (line,) = done.stderr.splitlines()
  assert (
    done.returncode == 2
    and "importing tensorflow failed: DLL load failed. See the web page." in line
  )


def test_version_needs_no_tensorflow(bare_python):
  done = run("--version", python=bare_python)
  assert (done.returncode, done.stdout, done.stderr) == (
    0,
    "mp_compat {}\n".format(mp_compat.__version__),
    "",
  )


@pytest.mark.matrix
@pytest.mark.parametrize(
  "program",
  [
    ["nope.py"],
    pytest.param(["empty"], marks=pytest.mark.slow),
    ["-m", "nope"],
    pytest.param(["-m", "nope.nothing"], marks=pytest.mark.slow),
  ],
  ids=" ".join,
)
def test_missing_program_is_reported(program, tmp_path):
  (tmp_path / "empty").mkdir()
  done = run("run", *program, cwd=str(tmp_path))
  assert done.returncode == 2 and "Traceback" not in done.stderr
  expected = "mp_compat run: expected a script, a directory or zip file with __main__.py, or -m and a module, but got "
  assert done.stderr.splitlines()[-1].startswith(expected + " ".join(program) + ": ")


@pytest.mark.matrix
@pytest.mark.parametrize(
  "code, last",
  [
    pytest.param("open('nope.txt')", "FileNotFoundError", marks=pytest.mark.slow),
    ("import nope", "ModuleNotFoundError"),
    pytest.param(
      "import runpy\nrunpy.run_path('nope.py')",
      "FileNotFoundError",
      marks=pytest.mark.slow,
    ),
    ("raise KeyboardInterrupt", "KeyboardInterrupt"),
  ],
)
def test_program_errors_show_traceback(code, last, tmp_path):
  (tmp_path / "program.py").write_text(code)
  done = run("run", "program.py", cwd=str(tmp_path))
  assert (
    done.returncode not in (0, 2)
    and "Traceback" in done.stderr
    and "program.py" in done.stderr
  )
  assert (
    done.stderr.splitlines()[-1].startswith(last)
    and "mp_compat run:" not in done.stderr
  )


@pytest.mark.parametrize(
  "name, value, shown",
  [
    ("TF_ENABLE_AUTO_MIXED_PRECISION", "1", True),
    ("TF_ENABLE_AUTO_MIXED_PRECISION_GRAPH_REWRITE", "1", True),
    ("TF_ENABLE_AUTO_MIXED_PRECISION", "0", False),
  ],
)
def test_run_reports_automatic_casts(name, value, shown, tmp_path, monkeypatch, capsys):
  (tmp_path / "program.py").write_text("")
  monkeypatch.setenv(name, value)
  monkeypatch.setattr(sys, "argv", list(sys.argv))
  monkeypatch.setattr(sys, "path", list(sys.path))
  monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
  with mp_compat.install():  # so that `run` changes nothing, and this is undone
    assert command_line.main(["run", str(tmp_path / "program.py")]) == 0
  lines = capsys.readouterr().err.splitlines()
  expected = "mp_compat run: with {} set, ".format(name)
  assert [line.startswith(expected) for line in lines] == [True] * shown


def test_interrupted_migration_is_silent(tmp_path):
  # The diff is larger than the pipe's buffer, so the command blocks after its first
  # bytes are read.
  code = (
    "import tensorflow as tf\nx = tf.train.experimental.LossScale\n"
    + "#" * 2**20
    + "\n"
  )
  (tmp_path / "old.py").write_text(code)
  with subprocess.Popen(
    [sys.executable, "-m", "mp_compat", "migrate", str(tmp_path)],
    env=testing.environment(),
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
  ) as process:
    # Background processes of a shell ignore SIGINT. preexec_fn restores the default, as
    # in a terminal.
    process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate()
  assert (process.returncode, stderr) == (130, b"")


def test_run_without_program_fails(capsys):
  assert command_line.main(["run"]) == 2
  assert (
    "mp_compat run: expected a script, or -m and a module" in capsys.readouterr().err
  )
