"""Tests of `python -m mp_compat compare`, with real programs in real processes."""

import errno
import fcntl
import glob
import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

from mp_compat import __main__ as command_line
from mp_compat import _tensorflow
from mp_compat.tools.compare import processes
from tests import testing

# Arguments of `pytest.param` for the programs that need it.
NEEDS_EAGER = pytest.mark.skipif(
  testing.tf.VERSION.startswith("1."), reason="TensorFlow 1 is not eager"
)
NEEDS_KERAS = pytest.mark.skipif(
  "experimental" not in dir(getattr(testing.tf.keras, "mixed_precision", None)),
  reason="this Keras has no experimental wrapper",
)
NEEDS_CONTRIB = pytest.mark.skipif(
  not hasattr(testing.tensorflow, "contrib"),
  reason="tf.contrib is in TensorFlow 1.15 only",
)


@pytest.fixture(name="compare")
def _compare(tmp_path, monkeypatch, capfd):
  """Returns a function that compares one of `programs`, copied to `tmp_path`.

  It returns the exit code, the output and the report.
  """
  for path in glob.glob(os.path.join(os.path.dirname(__file__), "programs", "*.py")):
    shutil.copy(path, str(tmp_path))
  monkeypatch.chdir(tmp_path)
  monkeypatch.setenv("PYTHONPATH", testing.ROOT)
  monkeypatch.setenv("MP_COMPAT_RUN", "of another comparison")
  monkeypatch.delenv("TF2_BEHAVIOR", raising=False)

  def compare(*arguments):
    code = command_line.main(
      ["compare", "--json", str(tmp_path / "report.json"), *arguments]
    )
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["status"] == code
    return code, capfd.readouterr().out, report

  return compare


@pytest.mark.matrix
def test_equal_programs_are_same(compare):
  code, output, report = compare("program.py", "overflow")
  assert code == 0, output
  runs = report["runs"]
  assert list(runs) == ["original", "mp_compat", "again"]
  for run in runs.values():
    counts = [run[key] for key in ("steps", "records", "skipped", "variables")]
    assert counts == [6, {"MainThread": 7}, 1, 11]
    assert run["scales"] == {"current_loss_scale": [1024.0, 512.0]}
  lines = output.splitlines()
  assert (
    lines[1].split()
    == "1. as it is 6 train steps, 1 skipped, loss scale 1024 -> 512".split()
  )
  assert (
    lines[2].split()
    == "2. with mp_compat the same bits: 11 variables after each of 6 steps".split()
  )
  assert lines[3].split() == "3. as it is, again the same bits in both runs".split()
  assert lines[-1] == "The program trains the same, in the steps that were compared."


@NEEDS_KERAS
def test_keras_program_is_same(compare):
  code, output, report = compare(
    "--runs", "original,mp_compat,without", "keras_program.py"
  )
  assert code == 0 and output.count("after each of 8 steps") == 2, output
  assert all(run["scaled"] and run["trained"] for run in report["runs"].values())


OTHER = "the first difference is after step {}.\n  A run that is no train step"
THREE = "  4. as it is, once more   the same bits in all three runs"
W = "  w: 2 of 2 values differ, by up to "
CHANGED = "another step or run changed {} since the values were compared last"


@pytest.mark.slow
@pytest.mark.parametrize(
  "code, arguments, words",
  [
    # The program trains the same.
    (0, "program.py ref callable overflow", ["6 steps"]),
    (0, "program.py _exit", ["6 steps"]),
    (0, "program.py averages overflow", ["6 train steps, 1 skipped"]),
    (0, "program.py outer overflow", ["6 train steps, 1 skipped"]),
    (
      0,
      "program.py unscaled",
      [
        "with mp_compat: a warning of mp_compat: Adam applies gradients that seem never to have been scaled"
      ],
    ),
    (
      0,
      "several.py",
      [
        "24 train steps, 8 skipped, current_loss_scale 32768 -> 16384, current_loss_scale_1 32768 -> 16384"
      ],
    ),
    (0, "strategy.py", ["6 train steps, 1 skipped"]),
    (0, "strategy.py server", ["6 train steps, 1 skipped"]),
    (0, "strategy.py process", ["6 train steps, 1 skipped"]),
    (0, "strategy.py process unplaced", ["6 train steps, 1 skipped"]),
    (0, "strategy.py beside", ["6 train steps, 1 skipped"]),
    (0, "strategy.py servers", ["18 train steps, 3 skipped"]),
    # Forked processes that end, or that another program replaces, are not compared.
    (
      0,
      "--every 3 --runs original,again evaluates.py forks",
      ["4 train steps, 0 skipped"],
    ),
    (0, "program.py megabytes", ["6 steps"]),
    (0, "program.py generator", ["6 steps"]),
    (0, "dqn.py", ["8 train steps, 0 skipped"]),
    (0, "--steps 5 dqn.py ref", ["5 train steps, 0 skipped"]),
    (0, "dqn.py conditional fed", ["4 train steps"]),
    (0, "dqn.py conditional v2 taken", ["4 train steps"]),
    (0, "dqn.py nested v2 taken", [" 3 train steps"]),
    (0, "dqn.py local", ["8 train steps, 0 skipped", "8 variables"]),
    (0, "--steps 4 program.py crash", ["4 steps"]),
    (0, "--steps 5 --every 2 -m program overflow", ["every 2 of 5 steps"]),
    (0, "--without program.py", ["without loss scaling  the same bits"]),
    (
      0,
      "--without program.py own",
      ["without loss scaling  the same bits", "6 train steps, 0 skipped"],
    ),
    (0, "--without program.py overflow", ["Before it, the bits are the same;"]),
    (0, "--runs original,without,again program.py migrated", ["the same bits"]),
    (0, "--runs original,without,again asks.py", ["Before it, the bits are the same;"]),
    (
      0,
      "--runs original,without,again asks.py unchecked",
      ["Before it, the bits are the same;"],
    ),
    (
      0,
      "--runs original,without,again asks.py shares",
      ["Before it, the bits are the same;"],
    ),
    (0, "program.py checkpoint env", ["6 steps"]),
    (0, "--restore folder program.py checkpoint", ["6 steps"]),
    (
      0,
      "--runs original,again program.py process",
      ["The program ran other processes, which are not compared."],
    ),
    pytest.param(
      0, "--runs original,again program.py data", ["the same bits"], marks=NEEDS_EAGER
    ),
    (
      0,
      "absl_program.py --learning_rate=0.1 --overflow_at=1 --overflow_at=2",
      ["6 train steps, 2 skipped"],
    ),
    (
      0,
      "-m absl_program --learning_rate 0.1 --steps 4 --optimizer momentum",
      ["4 train steps, 0 skipped"],
    ),
    (0, "--runs original,mp_compat program.py reads", ["6 train steps, 0 skipped"]),
    # It trains differently.
    (
      1,
      "program.py averages clip overflow",
      ["the first difference is at step 4.", "clipping or masking hid its overflow", W],
    ),
    (
      1,
      "program.py averages fixed overflow",
      [
        "the first difference is at step 4.",
        "a fixed loss scale of TensorFlow's class",
        W,
      ],
    ),
    (
      1,
      "together.py",
      [
        "the first difference is at step 2.",
        "a fixed loss scale of TensorFlow's class",
        "  v: 2 of 2 values",
      ],
    ),
    (
      1,
      "program.py numbers",
      ["the first difference is at step 4.", "The reason is not known.", W, THREE],
    ),
    (
      1,
      "program.py custom",
      [
        "the first difference is at step 1.",
        "update() of the program's LossScale returned False",
        W,
      ],
    ),
    (
      1,
      "program.py variable",
      [
        "in 1 of 12 variables",
        "do not have the same",
        "more: is missing in one of the runs",
      ],
    ),
    (1, "program.py zero", ["zero: differs"]),
    (1, "--every 4 several.py clip", ["the first difference is at step 10."]),
    (
      1,
      "--runs original,mp_compat program.py fixed overflow",
      ["the first difference is at step 4.", "this needs the run 'again'"],
    ),
    (
      1,
      "program.py shorter",
      [
        "it ended after 5 train steps, the first run after 6. If",
        "pass --steps 5",
        THREE,
      ],
    ),
    (
      1,
      "dqn.py faster",
      ["the first difference is at step 1.", "  w: 2 of 2 values differ", THREE],
    ),
    (
      1,
      "dqn.py explores",
      [
        OTHER.format(2),
        "  rate: 1 of 1 values differ",
        "8 train steps, 0 skipped",
      ],
    ),
    (
      1,
      "dqn.py explores raises",
      [OTHER.format(2), "  rate: 1 of 1 values differ"],
    ),
    (
      1,
      "dqn.py local faster",
      ["the first difference is at step 1.", "  w: 2 of 2 values differ", THREE],
    ),
    (
      1,
      "--runs original,mp_compat program.py numbers",
      ["this needs the run 'again'", "w: differs"],
    ),
    # Nothing follows.
    (
      2,
      "--without --every 5 skips.py",
      ["the first difference is at step 6.", CHANGED.format("w")],
    ),
    (
      2,
      "--without --every 5 skips.py resumes",
      ["the first difference is at step 8.", CHANGED.format("w")],
    ),
    (2, "--without underflows.py", [CHANGED.format("v")]),
    (
      2,
      "--without --every 3 program.py overflow",
      ["the first difference is at step 6.", CHANGED.format("v")],
    ),
    (
      2,
      "program.py entropy",
      ["differs from itself: at step 1, first in w", "TF_NUM_INTRAOP_THREADS=1"],
    ),
    (
      2,
      "program.py crash",
      [
        "as it is: The program ended with exit code 1. Its last lines:",
        "6 train steps: --steps 6 ends it",
      ],
    ),
    (
      2,
      "program.py kill",
      ["as it is: The program was killed by signal 9.", "TF_DETERMINISTIC_OPS=1"],
    ),
    (2, "program.py exit", ["as it is: The program ended with exit code 3."]),
    (
      2,
      "program.py full",
      ["as it is: The variables cannot be recorded in ", "No space left on device"],
    ),
    (
      2,
      "nothing.py",
      [
        "as it is: expected a script, a directory or zip file with __main__.py, or -m and a module, but"
      ],
    ),
    (
      2,
      "absl_program.py --learning_rate=0",
      [
        "ended with exit code 1.",
        "--learning_rate=0.0: must be positive",
      ],
    ),
    (
      2,
      "program.py plain",
      ["with mp_compat: The program made no optimizer of mp_compat"],
    ),
    (2, "program.py untrained", ["as it is: No train step was seen"]),
    (
      2,
      "program.py pretrains",
      [
        "with mp_compat: None of its 6 train steps was one of an optimizer with loss scaling"
      ],
    ),
    (2, "dqn.py conditional", ["as it is: No train step was seen"]),
    (2, "dqn.py conditional v2", ["as it is: No train step was seen"]),
    (2, "dqn.py nested", ["as it is: No train step was seen"]),
    (0, "dqn.py conditional taken fails", ["4 train steps"]),
    (
      2,
      "dqn.py adversary",
      ["None of its 8 train steps was one of an optimizer with loss scaling"],
    ),
    (
      2,
      "program.py overflows",
      ["as it is: Each of its 6 train steps was skipped, so nothing trained."],
    ),
    (
      2,
      "dqn.py late faster",
      ["as it is: No train step was seen", "Let the program run until it trains"],
    ),
    (
      2,
      "program.py lucky",
      [
        "  4. as it is, once more   differs at step 4",
        "differs from itself: at step 4, first in w",
      ],
    ),
    (
      2,
      "program.py timed",
      [
        "the bits are the same, but it ended after 5 train steps, the first run after 6",
        "pass --steps 5",
      ],
    ),
    (2, "program.py fork", ["as it is: Training in a forked process was seen"]),
    (2, "program.py migrated", ["as it is: The program uses mp_compat as it is"]),
    (
      2,
      "--runs original,again program.py later",
      ["differs from itself: after step 6, first in", "name its folder with --restore"],
    ),
    (
      2,
      "program.py checkpoint",
      [
        "Before, after step 0: A run that is no train step initializes, restores",
        "name its folder with --restore",
      ],
    ),
    (
      2,
      "--runs original,again program.py start",
      ["differs from itself: after step 0, first in w.", "cannot be repeated."],
    ),
    (0, "--every 9 program.py", ["after every 9 of 6 steps, and at the end"]),
    (
      2,
      "program.py unreadable",
      ["as it is: No tensor of the graph reads VarHandleOp."],
    ),
    pytest.param(2, "program.py eager", ["Eager training was seen"], marks=NEEDS_EAGER),
  ],
)
def test_programs_are_compared(code, arguments, words, compare, tmp_path):
  actual, output, _ = compare(*arguments.split())
  assert actual == code and all(text in output for text in words), output
  assert code or not (tmp_path / "folder").exists()


# Every nightly version: slow tests run on the newest TensorFlow only.
@pytest.mark.matrix
@pytest.mark.parametrize(
  "code, arguments, words",
  [
    # What an applied step with loss scaling changes is what trains.
    (2, "outside.py decays overflows", ["Each of its 6 train steps was skipped"]),
    (2, "outside.py clips overflows ref", ["No step with loss scaling was applied."]),
    (2, "outside.py other overflows", ["Of its 12 train steps, 6 had loss scaling"]),
    (0, "outside.py clips", ["after each of 6 steps"]),
    (0, "outside.py decays", ["after each of 6 steps"]),
    (1, "outside.py clips otherwise", [OTHER.format(1), "  w: 2 of 2 values", THREE]),
    # What is assigned after the last step, and in a graph without steps.
    (0, "outside.py loads", ["after each of 6 steps"]),
    (
      1,
      "outside.py loads otherwise",
      [OTHER.format(6), "  w: 1 of 2", THREE],
    ),
    (1, "outside.py loads alone", ["recorded 8 times, in the first run 7.", THREE]),
    (0, "outside.py evolves", ["after each of 6 steps"]),
    (1, "outside.py evolves otherwise", [OTHER.format(6), "  v: 2 of 2 values"]),
    # The steps of an imported graph are found.
    (
      1,
      "imports.py clip",
      ["as it is              8 train", "the first difference is at step 5."],
    ),
    (
      1,
      "imports.py clip def ref",
      ["as it is              8 train", "the first difference is at step 5."],
    ),
    (0, "imports.py def", ["8 train steps, 1 skipped", "each of 8 steps"]),
    # What the train op executes, but not itself, is no step, and is compared.
    (0, "imports.py updates", ["as it is              2 train", "each of 2 steps"]),
    # Functions of tf.data change variables.
    (
      1,
      "dataset.py",
      ["the first difference is at step 1.", "  seen: 1 of 1 values differ, by up to"],
    ),
    # Only initial values can differ in a checkpoint that was restored.
    (
      1,
      "outside.py accumulates",
      [OTHER.format(0), "  total: 2 of 2 values", THREE],
    ),
    (
      2,
      "outside.py total",
      ["with mp_compat: No train step was seen, but 6 in the first"],
    ),
    (0, "--restore folder outside.py total", ["after each of 6 steps"]),
    (
      2,
      "outside.py replaces",
      ["replaced itself by another one (os.exec)", "--steps 6"],
    ),
    (0, "--steps 6 outside.py replaces", ["after each of 6 steps"]),
    (
      1,
      "outside.py grows",
      ["the first difference is at step 3.", "grew above 2**126"],
    ),
  ],
)
def test_other_changes_of_variables_are_seen(code, arguments, words, compare):
  actual, output, _ = compare(*arguments.split())
  assert actual == code and all(text in output for text in words), output


@pytest.mark.matrix
@pytest.mark.parametrize(
  "code, arguments, words",
  [
    # Sessions that only evaluate are recorded, too.
    (0, "evaluates.py loads", ["after each of 4 steps"]),
    (1, "evaluates.py loads otherwise", [OTHER.format(4), THREE]),
    (1, "evaluates.py closes otherwise", [OTHER.format(4)]),
    (0, "evaluates.py thread loads", ["after each of 4 steps"]),  # at the same time
    (2, "evaluates.py thread loads renamed", ["with mp_compat: A session was run by"]),
    # What is assigned after the last step, and is not trained.
    (1, "evaluates.py increments otherwise", [OTHER.format(4), "  rate: 1 of 1"]),
    # What is assigned between multiples of --every.
    (
      1,
      "--every 3 evaluates.py between otherwise",
      ["the first difference is at step 3.", "  rate: 1 of 1"],
    ),
    # Runs that fail.
    (0, "evaluates.py fails", ["  5 train steps", "after each of 5 steps"]),
    (
      1,
      "evaluates.py fails otherwise",
      ["the first difference is at step 5.", "  w: 1 of 2 values"],
    ),
    (
      1,
      "evaluates.py fails otherwise ref",
      ["the first difference is at step 5.", "  w: 1 of 2 values"],
    ),
    # Slots are trained.
    (0, "evaluates.py warms", ["after each of 4 steps"]),
    (
      1,
      "evaluates.py warms otherwise",
      ["the first difference is at step 1.", "  w/Momentum: 2 of 2"],
    ),
    # Each run of a tf.py_function has a tape; the program may have one inside.
    (0, "evaluates.py py_function", ["after each of 4 steps"]),
    (2, "evaluates.py tape", ["Eager training was seen"]),
    # A name that has lost its scope.
    pytest.param(
      0,
      "scoped.py",
      ["4 variables after each of 4 steps"],
      marks=pytest.mark.skipif(
        (2, 4) <= _tensorflow.VERSION <= (2, 10),
        reason="init_scope ignores disable_eager_execution(): TensorFlow's class fails",
      ),
    ),
    # An op that gets no seed otherwise.
    (0, "evaluates.py box", ["after each of 4 steps"]),
  ],
)
def test_all_that_a_program_does_is_compared(code, arguments, words, compare):
  actual, output, _ = compare(*arguments.split())
  assert actual == code and all(text in output for text in words), output


@pytest.mark.matrix
@pytest.mark.parametrize(
  "code, arguments, words",
  [
    pytest.param(
      1,
      "program.py twice",
      ["the first run scales the loss twice", "already scales the loss"],
      marks=NEEDS_CONTRIB,
    ),
    pytest.param(
      2,
      "keras_program.py migrated",
      ["as it is: The program uses mp_compat as it is"],
      marks=NEEDS_KERAS,
    ),
  ],
)
def test_programs_of_old_versions_are_compared(code, arguments, words, compare):
  actual, output, _ = compare(*arguments.split())
  assert actual == code and all(text in output for text in words), output


@pytest.mark.slow
def test_skipped_steps_of_threads_are_counted(compare):
  _, output, report = compare("--runs", "original,again", "threads.py")
  assert report["runs"]["original"]["skipped"] == 8, output


@pytest.mark.matrix
@pytest.mark.skipif(
  not hasattr(testing.tf, "estimator"), reason="this TensorFlow has no Estimator"
)
def test_estimators_are_compared(compare, tmp_path):
  (tmp_path / "folder").mkdir()
  (tmp_path / "folder" / "kept").write_text("before")
  code, output, _ = compare("--restore", "folder", "estimator.py")
  assert code == 0 and "after each of 8 steps" in output, output
  assert [path.name for path in (tmp_path / "folder").iterdir()] == ["kept"]


@pytest.mark.slow
def test_each_run_reads_standard_input(compare, tmp_path):
  command = [
    "-m",
    "mp_compat",
    "compare",
    "--runs",
    "original,mp_compat",
    "program.py",
    "input",
  ]
  assert (
    "the same bits"
    in testing.run_python(*command, input="some input", cwd=str(tmp_path)).stdout
  )


@pytest.mark.slow
def test_interrupt_puts_folders_back(tmp_path):
  kept = tmp_path / "folder" / "kept"
  kept.parent.mkdir()
  kept.write_text("before")
  (tmp_path / "program.py").write_text(
    "import os, time\nopen('folder/kept', 'w').write(str(os.getpid()))\ntime.sleep(600)\n"
  )
  with subprocess.Popen(
    [sys.executable, "-m", "mp_compat", "compare", "--restore", "folder", "program.py"],
    cwd=str(tmp_path),
    env=testing.environment(),
    preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
  ) as process:
    while not kept.exists() or not kept.read_text().isdigit():
      time.sleep(0.1)
    program = int(kept.read_text())
    process.send_signal(signal.SIGINT)
    assert process.wait() == 130
  assert kept.read_text() == "before" and os.listdir(str(kept.parent)) == ["kept"]
  with pytest.raises(ProcessLookupError):
    os.kill(program, 0)


@pytest.mark.parametrize(
  "arguments, words",
  [
    ([], "expected a script, or -m and a module"),
    (["--runs", "original", "x.py"], "expected at least two of"),
    (["--runs", "again,original", "x.py"], "in this order"),
    (["--steps", "0", "x.py"], "expected a number of at least 1"),
    (["--json", "no/such/file", "x.py"], "No such file or directory"),
    (["--json", "no/such/file", "--", "x.py"], "No such file or directory"),
    (["--"], "expected a script, or -m and a module"),
  ],
)
def test_invalid_arguments_are_rejected(arguments, words, capsys):
  try:
    assert command_line.main(["compare", *arguments]) == 2
  except SystemExit as error:
    assert error.code == 2
  printed = capsys.readouterr()
  assert words in printed.err and not printed.out  # No run was made.


def test_failure_tells_what_was_added_to_the_environment(monkeypatch):
  monkeypatch.setenv("PYTHONHASHSEED", "7")
  monkeypatch.setenv("TF_DETERMINISTIC_OPS", "0")
  monkeypatch.delenv("TF_CUDNN_DETERMINISTIC", raising=False)
  error = processes._failure(3, ["last"], "again")
  expected = "It ran with TF_CUDNN_DETERMINISTIC=1, MP_COMPAT_RUN=again in"
  assert expected in str(error)


def test_folders_are_put_back_after_errors(tmp_path):
  existing, absent = tmp_path / "existing", tmp_path / "absent"
  (existing / "inner").mkdir(parents=True)
  (existing / "inner" / "file").write_text("before")
  paths = [str(existing), str(absent), str(existing / "inner"), str(existing)]
  with pytest.raises(RuntimeError), processes.kept(paths) as copy_back:
    for _ in range(2):
      copy_back()
      assert (
        existing / "inner" / "file"
      ).read_text() == "before" and not absent.exists()
      (existing / "inner" / "file").write_text("changed")
      absent.mkdir()
    raise RuntimeError
  assert (existing / "inner" / "file").read_text() == "before"
  assert os.listdir(str(tmp_path)) == ["existing"]


@pytest.mark.parametrize("lacking", ["system", "file system"])
def test_folders_are_put_back_without_locks(lacking, tmp_path, monkeypatch):
  (tmp_path / "folder").mkdir()
  (tmp_path / "folder" / "file").write_text("before")

  def fail(descriptor, operation):
    del descriptor, operation
    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

  if lacking == "system":
    monkeypatch.setitem(sys.modules, "fcntl", None)
  else:
    monkeypatch.setattr(fcntl, "flock", fail)
  with processes.kept([str(tmp_path / "folder")]) as copy_back:
    copy_back()
    (tmp_path / "folder" / "file").write_text("changed")
  assert (tmp_path / "folder" / "file").read_text() == "before"
  assert os.listdir(str(tmp_path)) == ["folder"]


def test_folders_of_running_comparisons_stay(tmp_path):
  folder = tmp_path / "folder"
  folder.mkdir()
  program = (
    "import sys, time\nfrom mp_compat.tools.compare import processes\n"
    "with processes.kept([sys.argv[1]]):\n  print('kept', flush=True)\n  time.sleep(60)"
  )
  with subprocess.Popen(
    [sys.executable, "-c", program, str(folder)],
    env=testing.environment(),
    stdout=subprocess.PIPE,
  ) as other:
    assert other.stdout.readline() == b"kept\n"
    with pytest.raises(processes.CannotRunError, match="is running that restores"):
      processes._outermost([str(folder)])
    other.kill()
  with pytest.raises(processes.CannotRunError, match="was killed"):
    processes._outermost([str(folder)])


def test_failed_copy_states_reason(tmp_path):
  (tmp_path / "folder").mkdir()
  os.mkfifo(str(tmp_path / "folder" / "pipe"))
  with pytest.raises(
    processes.CannotRunError,
    match="pipe cannot be copied, for --restore: .*pipe.* is a named pipe$",
  ):
    with processes.kept([str(tmp_path / "folder")]) as copy_back:
      copy_back()
  assert os.listdir(str(tmp_path / "folder")) == ["pipe"]


def test_folders_that_cannot_be_kept_stay(tmp_path, monkeypatch):
  for name in ("a", "b", "left" + processes.KEPT):
    (tmp_path / name).mkdir()
    (tmp_path / name / "file").write_text("before")
  rename = os.rename

  def fail(source, target):
    if str(source).endswith("b"):
      raise PermissionError(source)
    rename(source, target)

  monkeypatch.setattr(os, "rename", fail)
  for names, error, words in [
    (["a", "b"], PermissionError, "b"),
    (["a", "left"], processes.CannotRunError, "was killed. Rename it to .*left.$"),
    (["a/file", "b"], processes.CannotRunError, "is a file"),
  ]:
    with pytest.raises(error, match=words), processes.kept(
      [str(tmp_path / name) for name in names]
    ):
      pass
    assert [(tmp_path / name / "file").read_text() for name in ("a", "b")] == [
      "before"
    ] * 2
    assert sorted(os.listdir(str(tmp_path))) == ["a", "b", "left" + processes.KEPT]
