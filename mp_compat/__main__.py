# SPDX-License-Identifier: Apache-2.0
"""The command line: `python -m mp_compat COMMAND`, or `mp_compat COMMAND` where the
package is installed.

Each command has a function that runs it and returns the exit code. It imports
TensorFlow and other modules that are slow to import.
"""

import argparse
import functools
import importlib
import json
import os
import re
import sys
from typing import TYPE_CHECKING, Any, Dict, List, Optional, Sequence

import mp_compat
from mp_compat.core import naming_schemes

if TYPE_CHECKING:
  from mp_compat import checkpoints
  from mp_compat.tools import migrate

_Commands = Any  # what `ArgumentParser.add_subparsers` returns; its class is private

# With these variables set, NVIDIA's builds of TensorFlow cast graphs to float16.
_AUTOMATIC_CASTS = (
  "TF_ENABLE_AUTO_MIXED_PRECISION",
  "TF_ENABLE_AUTO_MIXED_PRECISION_GRAPH_REWRITE",
)

# The runs of `compare`, as in `mp_compat.tools.compare.comparing.RUNS`.
_RUNS = ["original", "mp_compat", "without", "again"]


def main(argv: Optional[Sequence[str]] = None) -> int:
  """Runs a command.

  Args:
    argv: the arguments, without the program's name; by default those of the process.

  Returns:
    The exit code: 0, or 2 after an error, which is printed in one line on stderr. For
    `migrate --check`, 1 if a file would change, else 3 if a file could not be read or
    parsed. 130 after a keyboard interrupt, except in `run`.

  Raises:
    SystemExit: If the arguments are invalid (code 2), or after printing help or the
      version (code 0). All exceptions of the program that `run` runs are raised, too.
  """
  args = list(sys.argv[1:] if argv is None else argv)
  program = []
  if args[:1] == ["run"] and args[1:2] not in (["-h"], ["--help"]):
    # All further arguments belong to the program, options included.
    args, program = (args[:1], args[1:])
  arguments = _make_parser().parse_args(args)
  arguments.program = program
  try:
    if arguments.command != "migrate":
      # Fails early if TensorFlow is missing.
      importlib.import_module("mp_compat._tensorflow")
  except ImportError as error:
    return _fail(arguments.command, error)
  try:
    return arguments.run(arguments)
  except KeyboardInterrupt:
    if arguments.command == "run":
      raise  # It belongs to the program.
    return 130


def _make_parser() -> argparse.ArgumentParser:
  """Returns the parser of all commands. What it parses has `command`, and `run`, the
  function that runs it.
  """
  parser = argparse.ArgumentParser(
    prog="mp_compat", description="Tools for mixed-precision training with mp_compat."
  )
  parser.add_argument(
    "--version", action="version", version="mp_compat " + mp_compat.__version__
  )
  commands = parser.add_subparsers(metavar="COMMAND", dest="command")
  commands.required = True
  _add_checkpoint(commands)
  _add_compare(commands)
  _add_migrate(commands)
  _add_ranges(commands)
  _add_run(commands)
  return parser


def _add_checkpoint(commands: _Commands) -> None:
  """Adds `checkpoint`, with its two actions."""
  checkpoint = commands.add_parser(
    "checkpoint",
    help="look at a checkpoint, or convert it",
    description="Checkpoints of mp_compat, of TensorFlow's "
    "MixedPrecisionLossScaleOptimizer, of "
    "tf.contrib.mixed_precision, and of training without loss scaling.",
  )
  checkpoint.set_defaults(run=_checkpoint)
  actions = checkpoint.add_subparsers(metavar="ACTION", dest="action")
  actions.required = True
  _add_inspect(actions)
  _add_convert(actions)


def _add_inspect(actions: _Commands) -> None:
  """Adds `checkpoint inspect`.

  For example:

      mp_compat checkpoint inspect logs/model.ckpt-100
  """
  inspect = actions.add_parser(
    "inspect",
    help="list the variables, the loss scale's state, and whose checkpoint it is",
  )
  inspect.add_argument(
    "path", metavar="PATH", help="a checkpoint, such as model.ckpt-100; or a directory"
  )
  inspect.add_argument("--json", metavar="FILE", help="write it as JSON, too")


def _add_convert(actions: _Commands) -> None:
  """Adds `checkpoint convert`.

  For example:

      mp_compat checkpoint convert logs/model.ckpt-100 new/model.ckpt-100 --to mp_compat
  """
  convert = actions.add_parser(
    "convert",
    help="write it with another naming scheme, or another program's names, and read it "
    "back",
  )
  convert.add_argument(
    "source", metavar="IN", help="a checkpoint, or a directory; it stays as it is"
  )
  convert.add_argument(
    "target", metavar="OUT", help="the checkpoint to write, which must not exist"
  )
  names = convert.add_mutually_exclusive_group(required=True)
  names.add_argument(
    "--to",
    choices=list(naming_schemes.SCHEMES),
    help="whose optimizer is to restore it",
  )
  names.add_argument(
    "--like",
    metavar="PATH",
    help="a checkpoint of the program that is to restore it, for its names",
  )
  convert.add_argument(
    "--name-map",
    type=argparse.FileType(encoding="utf-8"),
    metavar="FILE",
    help="JSON: names in IN by the names to write, of variables whose names are not "
    "certain",
  )


def _add_compare(commands: _Commands) -> None:
  """Adds `compare`, whose program is in `script` or in `module`, with its arguments.

  For example:

      mp_compat compare --restore logs train.py --logdir logs
      mp_compat compare --steps 200 -m trainer.main --data data
  """
  compare = commands.add_parser(
    "compare",
    help="run a program as it is and with mp_compat, and compare all variables after "
    "each step",
    usage="mp_compat compare [OPTION ...] SCRIPT [ARGUMENT ...]\n"
    "       mp_compat compare [OPTION ...] -m MODULE ...",
    description="Runs an unmodified program several times, each time in a process of "
    "its own: as it is, after mp_compat.install(), and again. Compares the bits of all "
    "variables after each train step. Exits with 0 if they are the same, 1 if they "
    "differ, 2 if the program differs from itself or could not be compared.",
  )
  compare.set_defaults(run=_compare)
  _add_options_of_compare(compare)
  compare.add_argument(
    "script",
    metavar="SCRIPT",
    nargs=argparse.REMAINDER,
    help="the program, and its arguments",
  )


def _add_options_of_compare(compare: argparse.ArgumentParser) -> None:
  """Adds what precedes the program."""
  add = compare.add_argument
  add(
    "-m",
    dest="module",
    metavar="MODULE",
    nargs=argparse.REMAINDER,
    help="the module, and its arguments",
  )
  add(
    "--steps",
    type=_positive,
    default=100,
    metavar="N",
    help="end each run after N train steps; default: 100",
  )
  add(
    "--every",
    type=_positive,
    default=1,
    metavar="N",
    help="compare after every N train steps; default: 1",
  )
  add(
    "--restore",
    action="append",
    default=[],
    metavar="DIR",
    help="a folder that the program writes to, put back before each run and at the "
    "end; may be repeated",
  )
  add("--without", action="store_true", help="also run it without loss scaling")
  add(
    "--runs",
    type=_runs,
    metavar="RUN,...",
    help="the runs to make, of " + ",".join(_RUNS),
  )
  add("--json", metavar="FILE", help="write the report as JSON, too")


def _add_migrate(commands: _Commands) -> None:
  """Adds `migrate`, which does not need TensorFlow.

  For example:

      mp_compat migrate trainer notebooks/train.ipynb
      mp_compat migrate --write trainer
  """
  migrate = commands.add_parser(
    "migrate",
    help="rewrite TensorFlow's old names in sources and notebooks",
    description="Rewrites TensorFlow's old names for loss scaling into those of "
    "mp_compat, and lists where you have to decide. Prints the changes as a diff "
    "(standard output) and the report (standard error), and changes no file without "
    "--write. TensorFlow is not needed, LibCST is: pip install libcst tqdm.",
  )
  migrate.set_defaults(run=_migrate)
  migrate.add_argument(
    "paths",
    metavar="PATH",
    nargs="+",
    help="a file, or a directory with .py and .ipynb files",
  )
  mode = migrate.add_mutually_exclusive_group()
  mode.add_argument("--write", action="store_true", help="change the files")
  mode.add_argument(
    "--check",
    action="store_true",
    help="print no diff; exit with 1 if a file would change, else with 3 if a file "
    "could not be looked at",
  )
  migrate.add_argument("--json", metavar="FILE", help="write the report as JSON, too")


def _add_ranges(commands: _Commands) -> None:
  """Adds `ranges`, which needs matplotlib.

  For example:

      mp_compat ranges logs -o ranges.png
  """
  ranges = commands.add_parser(
    "ranges",
    help="draw the ranges of a run's gradients, with advice on the loss scale",
    description="Draws the gradient ranges that a GradientRangesHook recorded: for "
    "each tensor a histogram of binary exponents, beside float16's range, and the loss "
    "scales that fit. Prints advice on the loss scale. Needs matplotlib: pip install "
    "matplotlib.",
  )
  ranges.set_defaults(run=_ranges)
  ranges.add_argument(
    "logdir",
    metavar="LOGDIR",
    help="the output_dir of the hook, or a directory above it",
  )
  ranges.add_argument(
    "-o",
    "--output",
    required=True,
    metavar="FILE",
    help="the file to write, in the format that its suffix names: .png (also without a "
    "suffix), .pdf, .svg and others",
  )


def _add_run(commands: _Commands) -> None:
  """Adds `run`; `main` takes its program from the arguments before they are parsed.

  For example:

      mp_compat run train.py --logdir logs
      mp_compat run -m trainer.main --data data
  """
  run = commands.add_parser(
    "run",
    help="run a program for which TensorFlow's old names mean mp_compat",
    usage="mp_compat run [--] SCRIPT [ARGUMENT ...]\n"
    "       mp_compat run [--] -m MODULE [ARGUMENT ...]",
    description="Runs an unmodified Python program after mp_compat.install().",
  )
  run.set_defaults(run=_run)


def _positive(text: str) -> int:
  """Returns the number of at least 1 that an argument is."""
  if not re.fullmatch("0*[1-9][0-9]*", text):
    raise argparse.ArgumentTypeError(
      "expected a number of at least 1, but got {!r}".format(text)
    )
  return int(text)


def _runs(text: str) -> List[str]:
  """Returns the runs of an argument such as `original,mp_compat`."""
  runs = text.split(",")
  if len(runs) < 2 or runs != [name for name in _RUNS if name in runs]:
    raise argparse.ArgumentTypeError(
      "expected at least two of {}, in this order, but got {!r}".format(
        ",".join(_RUNS), text
      )
    )
  return runs


def _checkpoint(arguments: argparse.Namespace) -> int:
  """Inspects or converts a checkpoint, and prints its variables and their values."""
  from mp_compat import checkpoints
  from mp_compat._tensorflow import tf

  try:
    if arguments.action == "inspect":
      inspection = checkpoints.inspect(arguments.path)
      if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
          json.dump(_as_json(inspection), file, indent=2)
    else:
      name_map: Dict[str, str] = {}
      if arguments.name_map:
        with arguments.name_map as file:
          name_map = json.load(file)
      inspection = checkpoints.convert(
        arguments.source,
        arguments.target,
        arguments.to,
        arguments.like,
        name_map,
      )
  except (OSError, ValueError, tf.errors.OpError) as error:
    return _fail("checkpoint " + arguments.action, error)
  print("{}: {}".format(inspection.path, inspection.naming_scheme))
  for name, (dtype, shape) in inspection.variables.items():
    value = ""
    if name in inspection.state:
      value = " = {}".format(inspection.state[name])
    print("  {:<50} {:<8} {}{}".format(name, dtype.name, list(shape), value))
  return 0


def _as_json(inspection: "checkpoints.Inspection") -> Dict[str, object]:
  """Returns what `checkpoint inspect --json` writes."""
  variables = inspection.variables.items()
  return {
    "path": inspection.path,
    "naming_scheme": inspection.naming_scheme,
    "variables": {
      name: {"dtype": dtype.name, "shape": list(shape)}
      for name, (dtype, shape) in variables
    },
    "state": {name: value.tolist() for name, value in inspection.state.items()},
  }


def _compare(arguments: argparse.Namespace) -> int:
  """Compares the runs of a program; returns the exit code of the report."""
  from mp_compat.tools.compare import comparing

  argv = arguments.script
  if arguments.module:
    argv = ["-m", *arguments.module]
  if argv[:1] == ["--"]:
    argv = argv[1:]
  if not argv:
    return _fail("compare", "expected a script, or -m and a module")
  runs = arguments.runs
  if not runs:
    runs = list(_RUNS)
    if not arguments.without:
      runs.remove("without")
  try:
    if arguments.json:
      open(arguments.json, "a").close()  # fails before the program runs
    report = comparing.compare(
      argv,
      runs,
      arguments.steps,
      arguments.every,
      arguments.restore,
      functools.partial(print, flush=True),
    )
    if arguments.json:
      with open(arguments.json, "w", encoding="utf-8") as file:
        json.dump(report, file, indent=2)
  except OSError as error:
    return _fail("compare", error)
  return report["status"]


def _migrate(arguments: argparse.Namespace) -> int:
  """Computes the changes of all files, writes, checks or prints them, then prints the
  report.
  """
  try:
    import tqdm

    from mp_compat.tools.migrate import find
    from mp_compat.tools.migrate import migrate_file
    from mp_compat.tools.migrate import report
  except ImportError as error:
    return _fail(
      "migrate", "{}; expected LibCST and tqdm: pip install libcst tqdm".format(error)
    )
  try:
    paths = list(find(arguments.paths))
    migrations = []
    for path in tqdm.tqdm(paths, unit="file", disable=None):
      migrations.append(migrate_file(path))
    if arguments.json:
      with open(arguments.json, "w") as target:
        target.write(report.as_json(migrations) + "\n")
  except OSError as error:
    return _fail("migrate", error)
  changed = [migration for migration in migrations if migration.changes]
  code = 0
  if arguments.check:
    code = _check(migrations)
  elif arguments.write:
    code = max([_write(migration) for migration in changed], default=0)
  else:
    sys.stdout.buffer.write(b"".join(map(report.diff, changed)))
    sys.stdout.flush()
  for line in report.text(migrations):
    print(line, file=sys.stderr)
  return code


def _check(migrations: List["migrate.Migration"]) -> int:
  """Returns the exit code of `--check`: 1 if a file would change, else 3 if one could
  not be looked at, else 0.
  """
  if any(migration.changes for migration in migrations):
    return 1
  if any(migration.problem for migration in migrations):
    return 3
  return 0


def _write(migration: "migrate.Migration") -> int:
  """Writes the changes of a file; returns the exit code. If one fails, the other files
  are written.
  """
  from mp_compat.tools.migrate import write

  try:
    write(migration)
  except OSError as error:
    return _fail("migrate", error)
  return 0


def _ranges(arguments: argparse.Namespace) -> int:
  """Draws the recorded gradient ranges, and prints the advice."""
  from mp_compat.tools import ranges_chart

  try:
    history, advice = ranges_chart.read(arguments.logdir)
    ranges_chart.save(ranges_chart.draw(history, advice), arguments.output)
  except ranges_chart.ChartError as error:
    return _fail("ranges", error)
  print("Wrote {}. Advice: {}".format(arguments.output, advice.text))
  return 0


def _run(arguments: argparse.Namespace) -> int:
  """Runs a program after `install()`; raises what it raises, `SystemExit`, too."""
  argv = arguments.program
  if argv[:1] == ["--"]:
    argv = argv[1:]
  if not argv or argv == ["-m"]:
    return _fail("run", "expected a script, or -m and a module")
  from mp_compat.migration.installation import install
  from mp_compat.tools import run

  _warn_of_automatic_casts()
  install()
  try:
    main_module, code = run.load(argv)
  except run.NotFoundError as error:
    return _fail("run", error)
  run.execute(main_module, code)
  return 0


def _warn_of_automatic_casts() -> None:
  """Prints a line on stderr if environment variables make TensorFlow cast the graph."""
  names = [
    name for name in _AUTOMATIC_CASTS if os.environ.get(name, "0") not in ("", "0")
  ]
  if names:
    print(
      "mp_compat run: with {} set, NVIDIA's builds of TensorFlow cast the graph to "
      "float16; mp_compat scales the loss only of optimizers that the program "
      "wraps".format(" and ".join(names)),
      file=sys.stderr,
    )


def _fail(command: str, error: object) -> int:
  """Prints an error in one line on stderr; returns the exit code 2."""
  print(
    "mp_compat {}: {}".format(command, " ".join(str(error).split())), file=sys.stderr
  )
  return 2


if __name__ == "__main__":
  sys.exit(main())
