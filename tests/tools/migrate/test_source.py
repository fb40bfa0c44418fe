"""Tests of `mp_compat migrate`: rewritten names, reported decisions, notebooks, the
command line.
"""

import json
import operator
import os
import re
import subprocess

import pytest
import tensorflow

import mp_compat
from mp_compat import __main__ as command_line
from mp_compat.migration import old_names
from mp_compat.tools import migrate
from mp_compat.tools.migrate import decisions
from tests import testing
from tests.tools.migrate import source_cases


def migrate_text(text, tmp_path, name="source.py"):
  path = tmp_path / name
  path.write_bytes(text if isinstance(text, bytes) else text.encode("utf-8"))
  return migrate.migrate_file(str(path))


def get_kinds(found, first_line=0):
  return [
    decision.kind for decision in found.decisions if decision.place.line > first_line
  ]


def get_text_at(source, place):
  """Returns the rest of the source from a place on."""
  return source[
    sum(len(line) + 1 for line in source.split("\n")[: place.line - 1])
    + place.column
    - 1 :
  ]


@pytest.mark.parametrize("case", sorted(source_cases.REWRITTEN))
def test_migrate_rewrites_only_old_names(case, tmp_path):
  before, after = source_cases.REWRITTEN[case]
  found = migrate_text(before, tmp_path)
  assert (
    found.after.decode() == after
    and bool(found.changes) == (before != after)
    and not found.problem
  )
  assert all(
    get_text_at(before, change.place).startswith(change.old) for change in found.changes
  )
  compile(found.after, case, "exec")
  again = migrate_text(after, tmp_path)
  assert again.after.decode() == after and not again.changes


def documented_rewrites():
  """Yields the lines of docs/migration.md from "# before" and as many from "# after",
  without these comments.
  """
  with open(
    os.path.join(testing.ROOT, "docs", "migration.md"), encoding="utf-8"
  ) as page:
    blocks = re.findall(r"^```py\n(.*?)^```", page.read(), re.M | re.S)
  for block in blocks:
    before, mark, after = block.partition("  # after\n")
    if mark:
      *common, last = before.split("\n")
      start = next(
        index for index, line in enumerate(common) if line.endswith("  # before")
      )
      old = [line.replace("  # before", "") for line in common[start:] if line]
      yield (
        "\n".join(old) + "\n",
        "\n".join(([last] + after.split("\n"))[: len(old)]) + "\n",
      )


@pytest.mark.parametrize("before, after", list(documented_rewrites()))
def test_documented_rewrites_are_made(before, after, tmp_path):
  head = "import tensorflow as tf\n"
  found = migrate_text(head + before, tmp_path)
  assert found.after.decode().replace("import mp_compat\n", "") == head + after


@pytest.mark.parametrize("case", sorted(source_cases.UNCERTAIN))
def test_uncertain_names_are_reported(case, tmp_path):
  text = "import tensorflow as tf\n" + source_cases.UNCERTAIN[case]
  found = migrate_text(text, tmp_path)
  stays = [
    number
    for number, line in enumerate(text.split("\n"), 1)
    if line.endswith("# stays")
  ]
  assert sorted({decision.place.line for decision in found.decisions}) == stays
  assert (
    set(get_kinds(found)) == {"unresolved"}
    and found.after.decode() == text
    and not found.problem
  )


@pytest.mark.parametrize("code, kinds", source_cases.DECISIONS)
def test_decisions_have_place_and_persist(code, kinds, tmp_path):
  head, source = source_cases.HEAD.count("\n"), source_cases.HEAD + code + "\n"
  found = migrate_text(source, tmp_path)
  assert all(
    get_text_at(source, decision.place).startswith(decision.text[:30])
    and len(decision.text) <= 80
    for decision in found.decisions
  )
  again = migrate_text(found.after, tmp_path)
  assert (
    sorted(get_kinds(found, head)) == sorted(get_kinds(again, head)) == kinds.split()
  )
  assert ("checkpoints" in get_kinds(found)) and not again.changes


@pytest.mark.parametrize("code, kind, new", source_cases.ONE_DECISION)
def test_decision_says_what_to_write(code, kind, new, tmp_path):
  use = "tf.train.experimental.LossScale\n" if kind == "name-taken" else ""
  found = migrate_text("import tensorflow as tf\n" + code + use, tmp_path)
  assert [(decision.kind, decision.new) for decision in found.decisions] == [
    (kind, new)
  ]
  assert bool(found.changes) == (kind == "guard")


def test_docs_contain_names_and_decisions():
  with open(
    os.path.join(testing.ROOT, "docs", "migration.md"), encoding="utf-8"
  ) as docs:
    lines = docs.readlines()
  rows = "".join(line for line in lines if line.startswith("| "))
  documented = set(re.findall(r"\w+", rows))
  assert {
    re.sub("_v1$", "", name.rpartition(".")[2]) for name in old_names.OLD_NAMES
  } <= documented
  explained = "".join(lines).partition("\n## What you have to decide\n")[2]
  assert set(re.findall(r"^### (.*)$", explained, re.M)) < set(decisions.REMEDIES)


def test_old_names_are_complete():
  for old, new in old_names.OLD_NAMES.items():
    assert new == "mp_compat" or operator.attrgetter(new.partition(".")[2])(
      mp_compat
    ), old
  for path, new_names in old_names.PUBLIC:
    try:
      module = operator.attrgetter(path)(tensorflow)
    except AttributeError:  # Each module exists in some of the tested versions.
      continue
    known = set(new_names) & set(dir(module))
    assert {name for name in dir(module) if "oss" in name} <= known | {
      "LossScaleOptimizerV1"
    }, path


@pytest.mark.parametrize(
  "encoding, head",
  [
    ("utf-8", b"# -*- coding: utf-8 -*-\n"),
    ("latin-1", b"# -*- coding: latin-1 -*-\n"),
    ("utf-8", b"\xef\xbb\xbf"),
  ],
)
def test_migrate_keeps_file_encoding(encoding, head, tmp_path):
  source = (
    head
    + "import tensorflow as tf\nx = 'é', tf.train.experimental.LossScale\n".encode(
      encoding
    )
  )
  found = migrate_text(source, tmp_path)
  rewritten = (
    "import mp_compat\nimport tensorflow as tf\nx = 'é', mp_compat.LossScale\n"
  )
  assert found.after == head + rewritten.encode(encoding)
  assert found.changes[0].place.column == 10


def make_notebook(*cells, **style):
  entries = [
    dict(cell_type="code", execution_count=None, metadata={}, outputs=[], source=cell)
    for cell in cells
  ]
  entries.insert(
    0, dict(cell_type="markdown", metadata={}, source=["About LossScale é\n", "x"])
  )
  tree = dict(
    cells=entries,
    metadata=dict(kernelspec=dict(language="python")),
    nbformat=4,
    nbformat_minor=2,
  )
  return json.dumps(tree, **dict(dict(indent=1, ensure_ascii=False), **style)) + "\n"


OLD_CELL = [
  "%matplotlib inline\n",
  "!pip install a/b\n",
  "import tensorflow as tf\n",
  "x = tf.train.experimental.LossScale  # é \U0001f600\n",
  "y = (tf\n",
  "  .train.experimental.LossScale)\n",
  "z  # <é \U0001f600>\n",
]
NEW_CELL = OLD_CELL[:2] + [
  "import mp_compat\n",
  "import tensorflow as tf\n",
  "x = mp_compat.LossScale  # é \U0001f600\n",
  "y = (mp_compat.LossScale)\n",
  "z  # <é \U0001f600>\n",
]


@pytest.mark.parametrize(
  "encode",
  [
    lambda text: text,
    lambda text: text.replace("\n", "\r\n"),
    lambda text: text.replace("<", "\\u003c").replace("/", "\\/"),
    lambda text: " " + text.replace(": ", " :\t").rstrip(),
  ],
)
@pytest.mark.parametrize(
  "style", [dict(indent=3), dict(ensure_ascii=True), dict(indent=None)]
)
def test_notebooks_keep_all_other_bytes(encode, style, tmp_path):
  others = (
    [],
    ["x = 1 % 3\\\n", " % 4"],
    "%%time\ns = TF.DynamicLossScale()\ntf.clip_by_value",
  )
  before = encode(
    make_notebook(OLD_CELL, *others, **style).replace("TF", "tf.train.experimental")
  )
  after = encode(make_notebook(NEW_CELL, *others, **style).replace("TF", "mp_compat"))
  found = migrate_text(before, tmp_path, "book.ipynb")
  assert found.after.decode() == after and not found.problem
  assert [tuple(change.place) for change in found.changes] == [
    (2, 4, 5),
    (2, 5, 6),
    (5, 2, 5),
  ]


def test_cells_that_are_not_python_are_reported(tmp_path):
  old = "tf.train.experimental.LossScale"
  cells = [
    "import tensorflow as tf",
    "%time x = " + old,
    "%%bash\n" + old,
    "print '" + old + "'",
    "!x \\\n  y",
    old,
  ]
  found = migrate_text(make_notebook(*cells), tmp_path, "book.ipynb")
  assert [tuple(change.place) for change in found.changes] == [(7, 1, 1)]
  parts = ["cell 3, line 1", "cell 4, line 1", "cell 5, line 1"]
  assert found.problem == "; ".join(part + ": this is not Python 3" for part in parts)


@pytest.mark.parametrize(
  "cell", ["%time tf = x", "print '1'; tf = x", "%%x\nimport x as tf"]
)
def test_cells_that_are_left_out_may_bind_names(cell, tmp_path):
  found = migrate_text(
    make_notebook("import tensorflow as tf\ntf.train.experimental.LossScale", cell),
    tmp_path,
    "a.ipynb",
  )
  assert not found.changes and get_kinds(found) == ["unresolved"]


@pytest.mark.parametrize(
  "name, content, problem",
  [
    (
      "old.py",
      b"import tensorflow as tf\nprint 'LossScale'\n",
      "line 2: this is not Python 3",
    ),
    ("old.py", b"# coding: klingon\nLossScale\n", "unknown encoding"),
    ("old.py", b"import os\n\nLossScale = '\xe9'\n", "can't decode byte"),
    ("old.py", b"LossScale(" + b"-" * 1000 + b"1)\n", "too deeply"),
    (
      "old.py",
      b"\x0cimport tensorflow as tf\ntf.train.experimental.LossScale\n",
      "LibCST would drop",
    ),
    ("book.ipynb", '["LossScale"]', "expected a notebook"),
    (
      "book.ipynb",
      make_notebook("LossScale = '\ud800'", ensure_ascii=True),
      "surrogates not allowed",
    ),
    ("book.ipynb", "LossScale", "Expecting value"),
  ],
)
def test_unparsable_file_reports_problem(name, content, problem, tmp_path):
  found = migrate_text(content, tmp_path, name)
  assert (
    problem in found.problem
    and found.after == (tmp_path / name).read_bytes()
    and not found.changes
  )


def test_other_notebooks_are_unchanged(tmp_path):
  content = make_notebook("x <- tf.train.experimental.LossScale").replace(
    '"python"', '"R"'
  )
  found = migrate_text(content, tmp_path, "book.ipynb")
  assert not found.changes and not found.problem


OLD, NEW = (
  text.encode()
  for text in source_cases.split(
    "<<import>>import tensorflow as tf\nopt = <<old>>.MixedPrecisionLossScaleOptimizer(x, 'dynamic')\n"
  )
)


def make_tree(tmp_path):
  """Writes a package with one old file and files that must be ignored; returns the old
  file's path.
  """
  for name in (
    "pkg/old.py",
    "pkg/.git/old.py",
    "pkg/__pycache__/old.py",
    "pkg/venv/lib/old.py",
    "pkg/data.txt",
  ):
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(OLD)
  (tmp_path / "pkg" / "venv" / "pyvenv.cfg").write_text("")
  (tmp_path / "pkg" / "new.py").write_text("import os\n")
  return tmp_path / "pkg" / "old.py"


def run_migrate(*arguments, **options):
  return testing.run_python(
    "-m", "mp_compat", "migrate", *arguments, check=False, **options
  )


def test_git_apply_accepts_diff(tmp_path):
  old = make_tree(tmp_path)
  (tmp_path / "pkg" / "unfinished.py").write_bytes(OLD.rstrip())
  (tmp_path / "tensorflow.py").write_text("raise ImportError('not needed')")
  done = run_migrate("pkg", cwd=str(tmp_path), path=[tmp_path])
  assert done.returncode == 0 and old.read_bytes() == OLD
  report = done.stderr
  assert (
    "old.py:2:7: rewritten: tf.train.experimental.MixedPrecisionLossScaleOptimizer -> "
    "mp_compat." in report
  )
  assert (
    "\ncheckpoints, 2 places: " in report
    and report.count(decisions.REMEDIES["checkpoints"]) == 1
  )
  assert (
    "3 files, 2 with old names; 2 names rewritten, 2 places to decide, 0 files not "
    "looked at" in report
  )
  subprocess.run(
    ["git", "apply", "-p1", "-"],
    input=done.stdout.encode(),
    cwd=str(tmp_path),
    check=True,
  )
  assert (
    old.read_bytes() == NEW
    and (tmp_path / "pkg" / "unfinished.py").read_bytes() == NEW.rstrip()
  )


def test_write_keeps_permissions_and_links(tmp_path, capsys):
  old = make_tree(tmp_path)
  old.chmod(0o750)
  (tmp_path / "link.py").symlink_to(old)
  arguments = ["migrate", "--write", str(tmp_path / "link.py")]
  assert command_line.main(arguments) == 0
  assert (
    old.read_bytes() == NEW
    and old.stat().st_mode & 0o777 == 0o750
    and (tmp_path / "link.py").is_symlink()
  )
  assert sorted(os.listdir(str(old.parent))) == sorted(
    [".git", "__pycache__", "data.txt", "new.py", "old.py", "venv"]
  )
  changed = old.stat().st_mtime_ns
  assert command_line.main(arguments) == 0 and old.stat().st_mtime_ns == changed
  assert "0 names rewritten" in capsys.readouterr().err


def test_failed_write_keeps_file(tmp_path, capsys, monkeypatch):
  old = make_tree(tmp_path)

  def refuse(source, target, replace=os.replace):
    if target == str(old):
      raise PermissionError("no")
    replace(source, target)

  (tmp_path / "pkg" / "other.py").write_bytes(OLD)
  monkeypatch.setattr(os, "replace", refuse)
  assert command_line.main(["migrate", "--write", str(tmp_path)]) == 2
  assert old.read_bytes() == OLD and "mp_compat migrate: no" in capsys.readouterr().err
  assert (tmp_path / "pkg" / "other.py").read_bytes() == NEW
  assert not [name for name in os.listdir(str(old.parent)) if name.startswith(".old")]


def test_check_sets_exit_code(tmp_path, capsys):
  old, report = make_tree(tmp_path), tmp_path / "report.json"
  check = ["migrate", "--check", str(tmp_path)]
  assert (
    command_line.main(check) == 1
    and old.read_bytes() == OLD
    and capsys.readouterr().out == ""
  )
  assert (
    command_line.main(["migrate", "--write", str(tmp_path)]) == 0
    and command_line.main(check) == 0
  )
  os.mkfifo(str(tmp_path / "pipe.py"))
  assert (
    command_line.main(check) == 3
    and "pipe.py: not looked at: expected a regular" in capsys.readouterr().err
  )
  (tmp_path / "two.py").write_text("print 'LossScale'\n")
  old.write_bytes(OLD + b"opt._loss_scale = 3\n")
  assert command_line.main([*check, "--json", str(report)]) == 1
  problem = "line 1: this is not Python 3"
  assert (
    "{}: not looked at: {}".format(tmp_path / "two.py", problem)
    in capsys.readouterr().err
  )
  found, name = (
    json.loads(report.read_text()),
    "tf.train.experimental.MixedPrecisionLossScaleOptimizer",
  )
  place = dict(path=str(old), cell=0, line=2, column=7)
  assert (found["files"], found["problems"][1]) == (
    4,
    dict(path=str(tmp_path / "two.py"), problem=problem),
  )
  assert found["rewritten"] == [
    dict(place, old=name, new="mp_compat.MixedPrecisionLossScaleOptimizer")
  ]
  remedies = [decisions.REMEDIES[kind] for kind in ("checkpoints", "private-state")]
  assert found["decide"] == [
    dict(place, kind="checkpoints", text=name, new="", remedy=remedies[0]),
    dict(
      place,
      line=3,
      column=1,
      kind="private-state",
      text="opt._loss_scale",
      new="loss_scale",
      remedy=remedies[1],
    ),
  ]
  assert command_line.main(["migrate", str(tmp_path / "nothing")]) == 2
  assert "there is no " + str(tmp_path / "nothing") in capsys.readouterr().err


def test_unexpected_error_concerns_one_file(tmp_path, capsys, monkeypatch):
  def fail(content):
    raise IndexError("defect")

  (tmp_path / "book.ipynb").write_text(make_notebook("LossScale"))
  (tmp_path / "old.py").write_bytes(OLD)
  monkeypatch.setattr(migrate, "Notebook", fail)
  assert (
    command_line.main(["migrate", "--write", str(tmp_path)]) == 0
    and (tmp_path / "old.py").read_bytes() == NEW
  )
  assert (
    "book.ipynb: not looked at: unexpected error, please report it: IndexError"
    in capsys.readouterr().err
  )


@pytest.mark.parametrize("missing", ["libcst", "tqdm"])
def test_missing_library_is_named(missing, tmp_path):
  (tmp_path / (missing + ".py")).write_text("raise ImportError('none here')")
  done = run_migrate("x", path=[tmp_path])
  assert (
    done.returncode == 2
    and "none here" in done.stderr
    and "pip install libcst tqdm" in done.stderr
  )


# A program with most spellings of the old names. Each line that it prints depends on
# loss scaling.
PROGRAM = """
import numpy as np
import tensorflow
import tensorflow.compat.v1 as tf
from tensorflow.contrib.mixed_precision import ExponentialUpdateLossScaleManager
from tensorflow.python.training.experimental import loss_scale as scales
tf.disable_v2_behavior()


class Halving(tf.train.experimental.DynamicLossScale):
  pass


def train(wrap):
  with tf.Graph().as_default(), tf.Session() as sess:
    x = tf.placeholder(tf.float32, [2])
    w = tf.get_variable("w", initializer=np.array([1., 2.], np.float32), use_resource=True)
    opt = wrap(tf.train.MomentumOptimizer(.1, .9))
    step = tf.train.get_or_create_global_step()
    train_op = opt.minimize(tf.reduce_sum(w * w * x), step)
    sess.run(tf.global_variables_initializer())
    for value in (1., 2., 1e38, 3., 1e38, 1e38, 1.):
      sess.run(train_op, {x: [value, 1.]})
    print(type(opt).__name__, sess.run([w, step]), [sess.run(v) for v in tf.global_variables() if "scale" in v.name])


train(lambda opt: tf.train.experimental.MixedPrecisionLossScaleOptimizer(opt, Halving(8., increment_period=2)))
train(lambda opt: tf.train.experimental.MixedPrecisionLossScaleOptimizer(opt, scales.get("dynamic")))
train(lambda opt: tensorflow.contrib.mixed_precision.LossScaleOptimizer(
    opt, ExponentialUpdateLossScaleManager(init_loss_scale=64., incr_every_n_steps=2)))
"""


@pytest.mark.matrix
def test_migrated_program_prints_same_output(tmp_path):
  path = tmp_path / "program.py"
  path.write_text(PROGRAM)

  command = [] if hasattr(tensorflow, "contrib") else ["-m", "mp_compat", "run"]
  before = testing.run_python(*command, path).stdout
  assert run_migrate("--write", str(path)).returncode == 0
  assert "tensorflow.contrib" not in path.read_text()
  assert testing.run_python(path).stdout == before and len(before.splitlines()) == 3
