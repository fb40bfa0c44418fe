"""The nox sessions of this project: checks, tests on every TensorFlow, programs,
clients, documentation, packaging.

`scripts/nox` installs nox and runs it: without arguments, the tests on the TensorFlow
versions of every commit; with `-t versions`, on the others; with `-s tests-2.4`, on
one. Arguments after `--` are passed to pytest or to the program. `.ci/run` runs the
sessions with the tag `commit`, or `nightly`, in the order of this file.
"""

import glob
import os
import re
import shutil
import sys
from typing import NamedTuple, Sequence

import nox

# The version of the Python that runs nox, which scripts/nox chooses. Sessions have a
# list of it, because then the names of their environments contain the version.
PYTHON = "{}.{}".format(*sys.version_info)


class Release(NamedTuple):
  """A minor version of TensorFlow."""

  first: str  # the first Python, from 3.7 on, that it has wheels for
  last: str  # the last one, on which the tests run
  requirement: str
  pins: Sequence[str] = ()  # what users must pin, too: keys of PINS
  alone: Sequence[str] = ()  # what pip installs without dependencies
  # further Pythons with wheels; their sessions are skipped where they are missing
  optional: Sequence[str] = ()


PINS = {
  "protobuf<3.21": "code of TensorFlow up to 2.8 raises a TypeError with protobuf 4",
  "numpy<2": "extension modules were compiled with NumPy 1",
  "protobuf<7": "`tf.io.write_graph` raises a TypeError with protobuf 7",
}

# tf_keras depends on `tensorflow`, which pip would install in addition to
# `tensorflow-cpu`.
TENSORFLOW = {
  "1.15": Release("3.7", "3.7", "tensorflow==1.15.5", ["protobuf<3.21"]),
  "2.0": Release("3.7", "3.7", "tensorflow==2.0.4", ["protobuf<3.21"]),
  "2.1": Release("3.7", "3.7", "tensorflow-cpu==2.1.4", ["protobuf<3.21"]),
  "2.2": Release("3.7", "3.8", "tensorflow-cpu==2.2.3", ["protobuf<3.21"]),
  "2.3": Release("3.7", "3.8", "tensorflow-cpu==2.3.4", ["protobuf<3.21"]),
  "2.4": Release("3.7", "3.8", "tensorflow==2.4.4", ["protobuf<3.21"]),
  "2.5": Release("3.7", "3.9", "tensorflow-cpu==2.5.3", ["protobuf<3.21"]),
  "2.6": Release("3.7", "3.9", "tensorflow-cpu==2.6.5", ["protobuf<3.21"]),
  "2.7": Release("3.7", "3.9", "tensorflow-cpu==2.7.4", ["protobuf<3.21", "numpy<2"]),
  "2.8": Release("3.7", "3.10", "tensorflow-cpu==2.8.4", ["protobuf<3.21", "numpy<2"]),
  "2.9": Release("3.7", "3.10", "tensorflow-cpu==2.9.3", ["numpy<2"]),
  "2.10": Release("3.7", "3.10", "tensorflow==2.10.1", ["numpy<2"]),
  "2.11": Release("3.8", "3.10", "tensorflow-cpu==2.11.1", ["numpy<2"]),
  "2.12": Release("3.8", "3.11", "tensorflow-cpu==2.12.1"),
  "2.13": Release("3.8", "3.11", "tensorflow-cpu==2.13.1"),
  "2.14": Release("3.9", "3.11", "tensorflow-cpu==2.14.1"),
  "2.15": Release("3.9", "3.11", "tensorflow-cpu==2.15.1"),
  "2.16": Release("3.9", "3.12", "tensorflow-cpu==2.16.2", [], ["tf_keras==2.16.*"]),
  "2.17": Release("3.9", "3.12", "tensorflow-cpu==2.17.1", [], ["tf_keras==2.17.*"]),
  "2.18": Release("3.9", "3.12", "tensorflow-cpu==2.18.1", [], ["tf_keras==2.18.*"]),
  "2.19": Release("3.9", "3.12", "tensorflow-cpu==2.19.1", [], ["tf_keras==2.19.*"]),
  "2.20": Release(
    "3.9", "3.13", "tensorflow-cpu==2.20.0", ["protobuf<7"], ["tf_keras==2.20.*"]
  ),
  "2.21": Release("3.10", "3.13", "tensorflow-cpu==2.21.0", [], ["tf_keras==2.21.*"]),
  "2.22": Release(
    "3.10", "3.13", "tensorflow-cpu==2.22.0rc0", [], ["tf_keras==2.21.*"], ["3.14"]
  ),
}
EVERY_COMMIT = ["1.15", "2.4", "2.10", "2.15", "2.21"]
NEWEST = EVERY_COMMIT[-1]

nox.options.default_venv_backend = "venv"  # virtualenv no longer supports Python 3.7.
nox.options.error_on_missing_interpreters = True
nox.options.reuse_venv = "yes"
nox.options.sessions = ["tests-" + version for version in EVERY_COMMIT]
os.environ["NOX_ENABLE_STALENESS_CHECK"] = (
  "1"  # Environments of another interpreter are made anew.
)

# pip does not compile what it installs: Python compiles what it imports, which is much
# less.
os.environ["PIP_COMPILE"] = "0"
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# The commands in pyenv's shims run only activated versions. `python3` stays the one
# that runs nox.
PYENV = os.environ.get("PYENV_ROOT", os.path.expanduser("~/.pyenv"))
os.environ["PATH"] = os.pathsep.join(
  [os.path.dirname(sys.executable)]
  + glob.glob(os.path.join(PYENV, "versions", "*", "bin"))
  + [os.environ["PATH"]]
)


# What the tests need beside TensorFlow.
TESTS = ["-e", ".[demo,migrate,test]", "tf_slim==1.1.0"]


def _install(session, version, packages, alone=()):
  """Installs TensorFlow (None: without), packages, and then packages without their
  dependencies.
  """
  release = TENSORFLOW.get(version)
  if release:
    packages, alone = (
      [release.requirement, *release.pins, *packages],
      [*release.alone, *alone],
    )
  session.install(*packages)
  if alone:
    session.install("--no-deps", *alone)


def _python(version):
  """Returns the Python version for a TensorFlow version: for the newest the one that
  runs nox, else the last.
  """
  return PYTHON if version == NEWEST else TENSORFLOW[version].last


def _pytest(session, *arguments):
  """Runs pytest, which writes its report and, with `--cov`, the lines that it ran to
  reports/.

  The name of the report's test suite contains the arguments.
  """
  report = os.path.abspath(os.path.join("reports", session.name))
  env = {"COVERAGE_FILE": report + ".coverage"}
  options = [
    "--junitxml={}.xml".format(report),
    "-o",
    "junit_suite_name=" + " ".join(arguments),
  ]
  session.run("python", "-m", "pytest", *options, *arguments, env=env)


@nox.session(python=[PYTHON], tags=["commit"])
def lint(session):
  """Runs ruff: its linter, and its formatter, which must not find anything to
  change.
  """
  session.install("ruff==0.17.6")
  session.run("ruff", "check")
  session.run("ruff", "format", "--check")


@nox.session(python="3.11", tags=["commit"])
def types(session):
  """Checks types with mypy and pyright (mypy.ini, pyrightconfig.json), without
  TensorFlow, whose names are Any.
  """
  session.install(
    "mypy==2.4.1",
    "pyright[nodejs]==1.1.414",
    "libcst==1.9.0",
    "numpy==2.4.6",
    "hypothesis",
    "pytest",
  )
  session.run("mypy")
  session.run("pyright")
  _pytest(session, "-m", "", "tests/type_checking")


@nox.session(python="3.11", tags=["commit"])
def docs(session):
  """Builds the documentation in site/; warnings, such as broken links, are errors.
  Tests its search.
  """
  session.install(
    "mkdocs-material==9.8.1",
    "mkdocstrings-python==2.0.11",
    "ruff==0.17.6",
    "mini-racer==0.14.1",  # runs the search of the site
    "hypothesis",
    "pytest",
  )
  session.run("mkdocs", "build", "--strict", env={"NO_MKDOCS_2_WARNING": "1"})
  for page in glob.glob("site/**/*.html", recursive=True):
    with open(page, encoding="utf-8") as file:
      if re.search(r"\d<strong>", file.read()):
        session.error(
          "{}: two powers such as 2**15 are bold text; put them into backticks.".format(
            page
          )
        )
  _pytest(session, "tests/test_docs.py", "-k", "search or answer")


@nox.session(python=[PYTHON], tags=["commit"])
def package(session):
  """Builds and checks the sdist and the wheel in dist/, and uses the wheel in clean
  environments.
  """
  shutil.rmtree("dist", ignore_errors=True)
  session.install("build==1.3.0", "check-wheel-contents==0.6.3", "twine==6.2.0")
  session.run("python", "-m", "build")
  wheel, sdist = sorted(glob.glob("dist/*"), key=lambda path: not path.endswith(".whl"))
  session.run("twine", "check", "--strict", wheel, sdist)
  session.run("check-wheel-contents", wheel)
  wheel, sdist, tmp = (
    os.path.abspath(path) for path in (wheel, sdist, session.create_tmp())
  )
  for python in ("3.7", "3.13"):
    environment = os.path.join(tmp, "python" + python)
    session.run("python" + python, "-m", "venv", "--clear", environment, external=True)
    command = os.path.join(environment, "bin", "python")
    session.run(
      command, "-m", "pip", "install", "--quiet", wheel, "libcst", "tqdm", external=True
    )
    with session.chdir(tmp):
      session.run(
        os.path.join(environment, "bin", "mp_compat"), "--version", external=True
      )
      session.run(
        command,
        "-c",
        "import mp_compat; assert 'LossScale' in dir(mp_compat)",
        external=True,
      )
      session.run(
        command,
        "-m",
        "mp_compat",
        "migrate",
        "--check",
        environment + "/bin",
        external=True,
      )
  # The sdist must contain the files that the commands of its README need.
  with session.chdir(tmp):
    session.run("tar", "xzf", sdist, "--strip-components=1", external=True)
    session.run("bash", "scripts/nox", "--list", external=True)


@nox.session(venv_backend="none", tags=["commit"])
def readme(session):
  """Runs README's two commands."""
  session.run("scripts/test")
  session.run("scripts/demo", "--quick", "--check")


@nox.session(venv_backend="none", tags=["nightly"])
def programs(session):
  """Runs the other programs that README names, for a few steps."""
  session.run("scripts/estimator", "--steps", "100")
  session.run("scripts/keras", "--steps", "120")
  session.run("scripts/workers", "--workers", "3")
  session.run("scripts/parameter_server")
  session.run("scripts/parameter_server", "--sync")
  session.run("scripts/horovod", "--ranks", "3")


def _tests(version, pythons, tags):
  def tests(session):
    _install(session, version, TESTS)
    options = ["--numprocesses=2", "--dist=worksteal"]
    if version in BETWEEN:  # Some lines are for them alone.
      options += ["--cov", "--cov-append", "--cov-report="]
    _pytest(session, *options, *session.posargs)

  tests.__doc__ = "Runs the tests on TensorFlow {}.".format(version)
  # nox compares names as Python expressions, where 2.1 equals 2.10. With a list, the
  # Python version is part of them.
  nox.session(tests, python=pythons, name="tests-" + version, tags=tags)


def _tests_without_python(version, python, tags):
  def tests(session):
    session.skip("Python {} is missing".format(python))

  tests.__doc__ = "Is skipped: Python {} is missing.".format(python)
  nox.session(
    tests, name="tests-{}-{}".format(version, python), tags=tags, venv_backend="none"
  )


for _version, _release in TENSORFLOW.items():
  # The session `readme` runs that of the newest.
  _tags = (
    []
    if _version == NEWEST
    else ["commit"]
    if _version in EVERY_COMMIT
    else ["nightly", "versions"]
  )
  _missing = [
    python for python in _release.optional if not shutil.which("python" + python)
  ]
  _tests(
    _version,
    [
      _python(_version),
      *(python for python in _release.optional if python not in _missing),
    ],
    _tags,
  )
  for _python_version in _missing:
    _tests_without_python(_version, _python_version, _tags)


# What the order of a sum depends on, as on the processor: oneDNN and threads. The
# tests of the newest TensorFlow run with oneDNN and all threads.
PROCESSORS = [
  {"TF_ENABLE_ONEDNN_OPTS": onednn, "TF_NUM_INTRAOP_THREADS": threads}
  for onednn, threads in (("0", "1"), ("0", "2"), ("1", "1"))
]


def _name_of(processor):
  return "onednn{TF_ENABLE_ONEDNN_OPTS}-threads{TF_NUM_INTRAOP_THREADS}".format(
    **processor
  )


# Tests of what is computed in floating point and not compared to the bit.
FLOATING_POINT = [
  "tests/core/test_finite_check.py",
  "tests/equivalence",
  "tests/monitoring/test_gradient_ranges.py",
  "tests/monitoring/test_mistakes.py",
  "tests/monitoring/test_noise.py",
  "tests/monitoring/test_ranges_hook.py",
  "tests/monitoring/test_stall.py",
]


@nox.session(python=[PYTHON], tags=["commit"])
def floating_point(session):
  """Runs tests of floating-point numbers with other orders of sums."""
  _install(session, NEWEST, TESTS)
  for processor in PROCESSORS:
    report = "--junitxml=reports/{}-{}.xml".format(session.name, _name_of(processor))
    arguments = ["--numprocesses=2", "--dist=worksteal", report, *FLOATING_POINT]
    session.run("python", "-m", "pytest", *arguments, env=processor)


@nox.session(venv_backend="none", tags=["nightly"])
@nox.parametrize("processor", PROCESSORS, [_name_of(row) for row in PROCESSORS])
def processors(session, processor):
  """Runs the tests with another order of sums."""
  report = "--junitxml=reports/tests-{}.xml".format(_name_of(processor))
  session.run("scripts/nox", "-s", "tests-" + NEWEST, "--", report, env=processor)


# More random graphs than by default, and the coverage of the package.
NIGHTLY = ["--examples", "100", "--cov", "--cov-report="]


@nox.session(venv_backend="none", tags=["nightly"])
@nox.parametrize("version", EVERY_COMMIT, EVERY_COMMIT)
def all_tests(session, version):
  """Runs all tests, the slow ones on the newest TensorFlow."""
  selection = ["-m", "not slow", "--hypothesis-seed", "1"]
  if version == NEWEST:
    selection = ["-m", ""]
  session.run("scripts/nox", "-s", "tests-" + version, "--", *NIGHTLY, *selection)


@nox.session(venv_backend="none", tags=["nightly"])
@nox.parametrize("python", ["3.10", "3.12", "3.13"], ["3.10", "3.12", "3.13"])
def pythons(session, python):
  """Runs the tests on other Pythons for the newest TensorFlow."""
  session.run("scripts/nox", "-s", "tests-" + NEWEST, "--force-python", python)


# TensorFlows between those of every commit, whose graph optimizers and control flow
# differ from theirs.
BETWEEN = ["2.2", "2.7", "2.13", "2.18"]


@nox.session(venv_backend="none", tags=["nightly"])
@nox.parametrize("version", BETWEEN, BETWEEN)
def matrix(session, version):
  """Runs the matrix tests of hidden overflows, of the gate and of ranges."""
  report = "--junitxml=reports/matrix-{}.xml".format(version)
  tests = ["tests/core/test_hidden_overflows.py", "tests/training", "tests/monitoring"]
  arguments = [report, "-m", "matrix and not slow", *tests]
  session.run("scripts/nox", "-s", "tests-" + version, "--", *arguments)


@nox.session(venv_backend="none", tags=["nightly", "versions"])
def version_table(session):
  """Writes the table of versions in CONTRIBUTING.md from the reports of the tests
  that ran, and prints it.
  """
  session.run("python", "tools/version_table.py")
  session.run("git", "diff", "CONTRIBUTING.md")


@nox.session(python="3.13", tags=["nightly"])
def bazel(session):
  """Runs the tests with Bazel, whose command $BAZEL can name, on the last Python for
  the newest TensorFlow.
  """
  command = os.environ.get("BAZEL", "bazel")
  if not shutil.which(command):
    session.skip("Bazel is not installed")
  # Bazel's tests cannot write into the environment.
  _install(session, NEWEST, TESTS + ["--compile"])
  session.run(command, "query", "//...", external=True)
  options = ["--cache_test_results=no", "--test_output=errors", "--local_test_jobs=2"]
  try:
    session.run(command, "test", "//...", *options, external=True)
  finally:
    shutil.copytree("bazel-testlogs", "reports/bazel", dirs_exist_ok=True)


@nox.session(python=[PYTHON])
def mutants(session):
  """Runs tools/mutants.py, on the modules or folders that the arguments name: a test
  must fail for each defect.
  """
  _install(session, NEWEST, TESTS)
  session.run("python", "tools/mutants.py", *session.posargs)


# The folders of mp_compat/ that tools/mutants.py has mutants for.
MUTATED = [
  "_tensorflow",
  "core",
  "graph",
  "keras",
  "monitoring",
  "tools",
  "training",
]


@nox.session(venv_backend="none", tags=["nightly"])
@nox.parametrize("folder", MUTATED, MUTATED)
def all_mutants(session, folder):
  """Runs the mutants of a folder."""
  session.run("scripts/nox", "-s", "mutants", "--", folder)


@nox.session(python=[PYTHON])
def program(session):
  """Runs a program on the newest TensorFlow: the demo, the benchmark, workers and
  parameter servers.
  """
  _install(session, NEWEST, ["-e", ".[demo]"])
  session.run("python", *session.posargs)


@nox.session(python=_python("2.15"))
def estimator(session):
  """Trains an Estimator on the digits, in float16, with overflows. TensorFlow 2.15 is
  the last that has Estimator.
  """
  _install(session, "2.15", ["-e", ".[demo]"])
  session.run("python", "examples/train_estimator.py", *session.posargs)


# Horovod 0.22 is built once, against TensorFlow and an installed MPI (Debian:
# libopenmpi-dev, openmpi-bin).
HOROVOD_BUILD = {
  "HOROVOD_WITH_TENSORFLOW": "1",
  "HOROVOD_WITH_MPI": "1",
  "HOROVOD_WITHOUT_GLOO": "1",
  "HOROVOD_WITHOUT_PYTORCH": "1",
  "HOROVOD_WITHOUT_MXNET": "1",
}


@nox.session(python=_python("1.15"), tags=["commit", "nightly"])
def horovod(session):
  """Runs the tests with Horovod, on TensorFlow 1.15; with arguments, a program."""
  if not shutil.which("mpirun"):
    session.error(
      "This needs MPI and compilers: on Debian, `apt-get install libopenmpi-dev "
      "openmpi-bin cmake g++`."
    )
  _install(session, "1.15", ["wheel", "-e", ".[demo,test]"])
  # A wheel in pip's cache may be built against another MPI.
  from_source = ["--no-build-isolation", "--no-cache-dir", "--no-binary", "horovod"]
  session.install(*from_source, "horovod==0.22.1", env=HOROVOD_BUILD)
  if session.posargs:
    session.run("python", *session.posargs)
  else:
    _pytest(session, "--cov", "--cov-report=", "tests/processes/test_horovod.py")


@nox.session(python=_python("2.10"), tags=["nightly"])
def horovod_keras(session):
  """Runs the tests of Horovod with Keras of TensorFlow 2."""
  if not shutil.which("mpirun"):
    session.error("This needs MPI and compilers, as the session horovod.")
  _install(session, "2.10", ["wheel", "setuptools<70", "-e", ".[demo,test]"])
  from_source = ["--no-build-isolation", "--no-cache-dir", "--no-binary", "horovod"]
  session.install(*from_source, "horovod==0.28.1", env=HOROVOD_BUILD)
  _pytest(session, "tests/keras/test_horovod.py")


@nox.session(python=[PYTHON], tags=["nightly"])
def coverage(session):
  """Combines the coverage of the tests that ran; fails and lists lines and branches
  that none ran.
  """
  session.install("coverage")
  session.run("coverage", "combine", "--keep", *glob.glob("reports/*.coverage"))
  session.run("coverage", "report", "--fail-under=100")


# One thread and no GPU, so that sums have the same order in every run of a program that
# is compared. Without oneDNN, whose float16 convolutions are slow to train on a CPU
# with AVX512-FP16.
REPEATABLE = {
  "CUDA_VISIBLE_DEVICES": "-1",
  "OMP_NUM_THREADS": "1",
  "PYTHONHASHSEED": "0",
  "TF_CPP_MIN_LOG_LEVEL": "2",
  "TF_DETERMINISTIC_OPS": "1",
  "TF_ENABLE_ONEDNN_OPTS": "0",
  "TF_NUM_INTEROP_THREADS": "1",
  "TF_NUM_INTRAOP_THREADS": "1",
}

# Unmodified third-party programs: the Python version, and the packages that they need.
# The packages of the last list are installed without their dependencies, which pip can
# no longer resolve.
CLIENTS = {
  "deepmd": ("3.11", ["deepmd-kit[cpu]==3.2.0"], []),
  "finetune": (
    "3.10",
    [
      "tensorflow==2.10.1",
      "numpy<1.24",
      "bs4",
      "ftfy",
      "h5py",
      "joblib",
      "lxml",
      "nltk",
      "pandas",
      "psutil",
      "regex",
      "scikit-learn",
      "scipy",
      "sentencepiece",
      "spacy>=3,<3.8",
      "tabulate<0.9",
      "tensorflow-addons==0.18.0",
      "tqdl==0.0.4",
      "tqdm",
      "transformers==4.25.1",
      "wheel",
    ],
    ["--no-build-isolation", "finetune==0.10.0"],
  ),
  "official": (
    "3.8",
    ["tensorflow==2.4.4", "protobuf<3.21", "scikit-learn"],
    ["tf-models-official==2.2.2"],
  ),
  "opennmt": (
    "3.7",
    [
      "tensorflow-cpu==2.1.4",
      "protobuf<3.21",
      "pyonmttok>=1.18.1,<2",
      "pyyaml",
      "rouge>=1,<2",
      "sacrebleu>=1.4.3,<2",
      "typeguard",
    ],
    ["OpenNMT-tf==2.8.1", "tensorflow-addons==0.8.3", "ctranslate2==1.20.1"],
  ),
  "sources": ("3.11", ["libcst", "tqdm"], []),
  "tensor2tensor": (
    "3.7",
    [
      "tensorflow==1.15.5",
      "protobuf<3.21",
      "Pillow",
      "google-api-python-client",
      "gym==0.17.3",
      "mesh-tensorflow==0.1.21",
      "oauth2client",
      "pypng",
      "requests",
      "scipy",
      "sympy",
      "tensorflow-datasets==3.2.1",
      "tensorflow-hub==0.12.0",
      "tensorflow-probability==0.7.0",
    ],
    ["tensor2tensor==1.15.7", "tensorflow-gan==2.0.0"],
  ),
  "tensor2tensor_tf2": (
    "3.10",
    [
      "tensorflow==2.10.1",
      "numpy<2",
      "tensorflow-addons==0.18.0",
      "tensorflow-probability==0.18.0",
      "tf_slim==1.1.0",
    ],
    ["tensor2tensor==1.15.7"],
  ),
}


def _client(name):
  python, requirements, alone = CLIENTS[name]

  tags = ["commit", "nightly"] if name == "deepmd" else ["nightly"]

  @nox.session(python=python, name="client-" + name, tags=tags)
  def client(session):
    _install(session, None, ["-e", "."] + requirements, alone)
    session.run(
      "python", "tools/clients/{}.py".format(name), *session.posargs, env=REPEATABLE
    )

  client.__doc__ = "Runs tools/clients/{}.py.".format(name)


for _name in CLIENTS:
  _client(_name)


# Libraries, with programs in tools/ecosystem: the TensorFlow, and what pip installs, as
# in CLIENTS.
ECOSYSTEM = {
  "adanet": ("1.15", ["adanet==0.8.0"], []),
  "bert": ("1.15", ["bert-tensorflow==1.0.1"], []),
  "deepctr": ("1.15", ["deepctr==0.9.0"], []),
  "dopamine": (
    "1.15",
    ["atari-py==0.2.6", "dopamine-rl==2.0.5", "gin-config==0.3.0", "gym==0.17.3"],
    [],
  ),
  "estimators": ("2.15", [], []),
  "gpflow": ("1.15", ["gpflow==1.5.1"], []),
  "gpflow_tf2": (
    "2.15",
    ["gpflow==2.9.2", "tensorflow==2.15.1", "tensorflow-probability==0.23.0"],
    [],
  ),
  "graph_nets": (
    "1.15",
    ["dm-sonnet==1.36", "graph-nets==1.1.0", "tensorflow-probability==0.8.0"],
    [],
  ),
  "keras3": ("2.21", [], []),
  "kfac": ("1.15", ["kfac==0.2.4", "tensorflow-probability==0.8.0"], []),
  "larq": ("2.10", ["larq==0.13.3"], []),
  "sonnet": ("1.15", ["dm-sonnet==1.36", "tensorflow-probability==0.8.0"], []),
  "sonnet_tf2": ("2.15", ["dm-sonnet==2.0.2"], []),
  "spektral": ("2.15", ["spektral==1.3.1", "tensorflow==2.15.1"], []),
  "stable_baselines": ("1.15", ["gym==0.17.3", "stable-baselines==2.10.2"], []),
  "tensorflow_addons": ("2.10", ["tensorflow-addons==0.18.0"], []),
  "tensorflow_gan": (
    "1.15",
    [
      "tensorflow-gan==2.0.0",
      "tensorflow-hub==0.12.0",
      "tensorflow-probability==0.8.0",
    ],
    [],
  ),
  "tensorflow_gan_tf2": (
    "2.10",
    [
      "tensorflow-gan==2.1.0",
      "tensorflow-hub==0.12.0",
      "tensorflow-probability==0.18.0",
    ],
    [],
  ),
  "tensorflow_lattice": ("2.15", ["tensorflow-lattice==2.0.13"], []),
  "tensorflow_privacy": (
    "1.15",
    ["dm-tree", "mpmath", "scipy"],
    ["tensorflow-privacy==0.5.1"],
  ),
  "tensorflow_probability": ("2.15", ["tensorflow-probability==0.23.0"], []),
  "tensorflow_ranking": ("1.15", [], ["tensorflow-ranking==0.2.3"]),
  "tensorflow_ranking_tf2": (
    "2.15",
    ["tensorflow-ranking==0.5.5", "tensorflow==2.15.1"],
    [],
  ),
  "tensorflow_recommenders": (
    "2.15",
    ["tensorflow-recommenders==0.7.3", "tensorflow==2.15.1"],
    [],
  ),
  "tensorpack": ("1.15", ["tensorpack==0.11"], []),
  "texar": ("1.15", ["tensorflow-probability==0.8.0", "texar==0.2.4"], []),
  "tf_agents": ("2.15", ["tf-agents==0.19.0"], []),
  "tf_keras": ("2.21", [], []),
  "tf_slim": ("1.15", ["tf_slim==1.1.0"], []),
  "tflearn": ("1.15", ["tflearn==0.5.0"], []),
  "tfmot": (
    "2.15",
    ["tensorflow-model-optimization==0.8.0", "tf_keras==2.15.1", "tensorflow==2.15.1"],
    [],
  ),
  "trfl": ("1.15", ["tensorflow-probability==0.8.0", "trfl==1.2.0"], []),
}


@nox.session(tags=["nightly"])
@nox.parametrize(
  "python,library",
  [
    nox.param(_python(version), library, id=library)
    for library, (version, _, _) in ECOSYSTEM.items()
  ],
)
def ecosystem(session, library):
  """Compares programs of other libraries, one environment each; prints the table of
  docs/ecosystem.md.
  """
  version, requirements, alone = ECOSYSTEM[library]
  _install(session, version, ["-e", "."] + requirements, alone)
  session.run("python", "tools/ecosystem/comparison.py", library, env=REPEATABLE)
