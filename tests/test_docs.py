"""Tests README.md, docs/ and examples in docstrings: the Python code runs as pasted,
links and paths exist, public names are described.

A ```python block that begins with `import` is a program that runs as pasted, together
with the ```python blocks after it that do not. Fragments are ```py blocks or indented
code.

The tests of the site's search run in the session `docs` of nox, which builds the site,
without TensorFlow: `tests.testing` is imported where it is needed.
"""

import doctest
import glob
import importlib
import inspect
import json
import operator
import os
import re
import subprocess
import types
from typing import NamedTuple

import pytest

import mp_compat

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
PAGES = sorted(
  os.path.relpath(path, ROOT).replace(os.sep, "/")
  for pattern in ("docs/*.md", "docs/*/*.md")
  for path in glob.glob(os.path.join(ROOT, pattern))
)
DOCUMENTS = ["README.md"] + PAGES
LINK = re.compile(r"\[[^][]*\]\(([^()\s]*)\)")  # and pictures
PATH = re.compile(
  r"(?<![\w./*-])(?:docs/[\w-]+\.md|(?:examples|mp_compat|scripts|tests|tools)/[\w./*-]+)"
)


def read(document):
  with open(os.path.join(ROOT, document), encoding="utf-8") as file:
    return file.read()


def programs(document):
  """Returns the programs of a document."""
  found = []
  for block in re.findall(r"^```python\n(.*?)^```", read(document), re.M | re.S):
    found += [block] if block.startswith("import ") else [found.pop() + "\n" + block]
  return found


def program_cases():
  """Yields each program; those that need Estimator are tests for every TensorFlow."""
  for page in DOCUMENTS:
    for index, code in enumerate(programs(page)):
      mark = pytest.mark.matrix if "tf.estimator." in code else pytest.mark.slow
      yield pytest.param(code, marks=mark, id="{}-{}".format(page, index))


def anchors(document):
  """Returns the anchors that GitHub gives to the headings of a document."""
  text = re.sub(r"^```.*?^```", "", read(document), flags=re.M | re.S)
  headings = re.findall(r"^#+ (.*)$", text, re.M)
  return {
    re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings
  }


def linked_targets(document):
  """Returns the relative links of a document as (document or file, anchor) pairs,
  relative to the root.
  """
  for link in LINK.findall(read(document)):
    if "://" not in link:
      path, _, anchor = link.partition("#")
      yield (
        os.path.normpath(os.path.join(os.path.dirname(document), path))
        if path
        else document,
        anchor,
      )


@pytest.mark.parametrize("code", list(program_cases()))
def test_program_runs_as_pasted(code, tmp_path):
  from tests import testing

  if "tf.estimator." in code and not hasattr(testing.tf, "estimator"):
    pytest.skip("This TensorFlow has no Estimator.")
  done = testing.run_python(
    "-c", code, cwd=str(tmp_path), stderr=subprocess.STDOUT, check=False
  )
  assert done.returncode == 0, done.stdout[-3000:]


def fragment(document, beginning):
  """Returns the ```py block of a document that has a line that begins so."""
  blocks = re.findall(r"^```py\n(.*?)^```", read(document), re.M | re.S)
  (found,) = [block for block in blocks if "\n" + beginning in "\n" + block]
  return found


@pytest.mark.slow
def test_supervisor_loop_trains(tmp_path):
  from tests import testing

  (slim_program,) = [code for code in programs("docs/how_to.md") if "slim" in code]
  model, _, _ = slim_program.partition("\n\ndef train_step")
  loop = fragment("docs/how_to.md", "supervisor = ")
  code = "\n".join([model, loop, "print(hook.attempted - hook.skipped, step)"])
  done = testing.run_python("-c", code, cwd=str(tmp_path))
  assert done.stdout.splitlines()[-1] == "20 20"


CANNED = """
import mp_compat
import numpy as np
import tensorflow.compat.v1 as tf

tf.disable_v2_behavior()


def make_optimizer():
  opt = tf.train.GradientDescentOptimizer(0.1)
  return mp_compat.MixedPrecisionLossScaleOptimizer(opt, "dynamic")


def input_fn():
  features = np.array([[np.inf], [1.0], [2.0]], np.float32)
  dataset = tf.data.Dataset.from_tensor_slices(({"x": features}, [0, 1, 0]))
  return dataset.batch(1)


columns = [tf.feature_column.numeric_column("x")]
# Its weights are zeros at first, so the logits of inf are NaN.
canned = tf.estimator.LinearClassifier(columns, "logs", optimizer=make_optimizer)
"""
TRAIN = """
estimator.train(input_fn)
print(estimator.get_variable_value("global_step"))
"""


@pytest.mark.matrix
@pytest.mark.parametrize("with_remedy", [False, True])
def test_remedy_for_canned_estimator(with_remedy, tmp_path):
  from tests import testing

  if not hasattr(testing.tf, "estimator"):
    pytest.skip("This TensorFlow has no Estimator.")
  remedy = "estimator = canned\n"
  if with_remedy:
    remedy = fragment("docs/troubleshooting.md", "def model_fn")
  code = CANNED + remedy + TRAIN
  done = testing.run_python("-c", code, cwd=str(tmp_path), check=False)
  if with_remedy:
    assert done.stdout.splitlines()[-1:] == ["2"], done.stderr[-3000:]
  else:
    assert "NanLossDuringTrainingError" in done.stderr


def modules_with_examples():
  """Yields the names of modules whose docstrings have examples with `>>>`."""
  for folder, _, files in os.walk(os.path.join(ROOT, "mp_compat")):
    for name in files:
      path = os.path.join(folder, name)
      if name.endswith(".py") and ">>> " in read(path):
        module = os.path.relpath(path, ROOT)[: -len(".py")]
        yield module.replace(os.sep, ".")


@pytest.mark.parametrize("name", sorted(modules_with_examples()))
def test_examples_in_docstrings_print_what_they_show(name):
  tried = doctest.testmod(importlib.import_module(name))
  assert tried.attempted and not tried.failed


def test_all_programs_are_found():
  assert len(list(program_cases())) == 17


@pytest.mark.parametrize(
  "document", DOCUMENTS + ["CHANGELOG.md", "CONTRIBUTING.md", "RELEASING.md"]
)
def test_code_fits_on_the_site(document):
  """Fenced or indented code has at most 88 columns, which fit beside the sidebars of
  the site.
  """
  fenced = "".join(re.findall(r"^```.*?^```", read(document), re.M | re.S))
  assert not re.findall("^.{89,}", fenced, re.M) and not re.findall(
    "^    .{89,}", read(document), re.M
  )


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_to_files_and_headings(document):
  for target, anchor in linked_targets(document):
    assert os.path.exists(os.path.join(ROOT, target)), target
    assert not anchor or anchor in anchors(target), (target, anchor)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_mentioned_paths_exist(document):
  paths = {path.rstrip(".") for path in PATH.findall(read(document))}
  assert not [path for path in paths if not glob.glob(os.path.join(ROOT, path))]


def test_readme_has_at_most_150_lines():
  assert len(read("README.md").splitlines()) <= 150


def test_navigation_of_the_site_has_every_page():
  listed = re.findall(r"^ +- (\S+\.md)$", read("mkdocs.yml"), re.M)
  assert sorted("docs/" + page for page in listed) == PAGES


def test_site_names_version():
  assert "\ncopyright: mp_compat {}, Apache-2.0\n".format(
    mp_compat.__version__
  ) in read("mkdocs.yml")


def test_search_of_the_site_finds_parts_of_dotted_names():
  separator = re.search("separator: '(.*)'", read("mkdocs.yml")).group(1)
  words = re.split(
    separator,
    "tf.train.AdamOptimizer(0.1), `mp_compat.LossScaleHook`; python -m mp_compat",
  )
  assert {"AdamOptimizer", "LossScaleHook", "mp_compat"} < set(words)


@pytest.mark.parametrize(
  "word", ["optax", "jmp", "flax", "torch", "GradScaler", "autocast", "DynamicScale"]
)
def test_search_finds_names_of_other_libraries(word):
  separator = re.search("separator: '(.*)'", read("mkdocs.yml")).group(1)
  assert word in re.split(separator + "|\n", read("docs/if_you_know.md"))


def test_index_links_to_every_page_by_its_heading():
  headings = {
    page: re.search("^# (.*)", read(page), re.M).group(1)
    for page in PAGES
    if page != "docs/index.md"
  }
  links = re.findall(r"^- \[([^]]*)\]\((\S*)\)", read("docs/index.md"), re.M)
  assert {"docs/" + target: text for text, target in links} == headings


@pytest.mark.parametrize("name", mp_compat.__all__)
def test_public_names_are_documented(name):
  text = "\n".join(map(read, DOCUMENTS))
  assert re.search(r"\bmp_compat\.{}\b".format(name), text)


def public_names():
  """Returns the import paths of all public names but modules."""
  modules = [
    mp_compat,
    mp_compat.checkpoints,
    mp_compat.contrib.mixed_precision,
    mp_compat.keras,
  ]
  paths = [
    "{}.{}".format(module.__name__, name)
    for module in modules
    for name in module.__all__
    if not isinstance(getattr(module, name), types.ModuleType)
  ]
  return paths + [
    "mp_compat.horovod.all_ranks_finite",
    "mp_compat.keras.experimental.LossScaleOptimizer",
  ]


def test_api_reference_has_every_public_name_once():
  pages = "\n".join(read(page) for page in PAGES if page.startswith("docs/api/"))
  shown = [
    name
    for name in re.findall("^::: (.*)$", pages, re.M)
    if ".installation." not in name
  ]
  assert sorted(shown) == sorted(public_names())


@pytest.mark.parametrize(
  "record",
  ["GradientReport", "GradientRange", "Float32Op", "checkpoints.Inspection"],
)
def test_fields_of_reports_are_documented(record):
  record = operator.attrgetter(record)(mp_compat)
  attributes = inspect.getdoc(record).partition("\nAttributes:\n")[2]
  assert tuple(re.findall(r"^  (\w+): ", attributes, re.M)) == record._fields


class Question(NamedTuple):
  """What a user looks for.

  Attributes:
    typed: What they type into the search of the site.
    section: The page and the anchor of the section that must be its first hit.
    answer: The words of the section that answer them; the beginning of the answer.
  """

  typed: str
  section: str
  answer: str


QUESTIONS = [
  Question(
    "loss is NaN after thousands of steps",
    "troubleshooting#the-loss-is-nan-at-once-or-after-thousands-of-steps",
    "`LossScaleHook` names the first value that is not finite",
  ),
  Question(
    "loss scale only falls",
    "troubleshooting#the-loss-scale-only-falls-to-1-or-min_loss_scale",
    "The loss is not finite",
  ),
  Question(
    "training slower than without loss scaling",
    "troubleshooting#training-is-slower-than-without-loss-scaling",
    "all updates wait for the last gradient",
  ),
  Question(
    "Estimator train_and_evaluate parameter servers hooks",
    "how_to#estimator-train_and_evaluate-with-parameter-servers",
    "`training_hooks` run on the chief and on every worker",
  ),
  Question(
    "clip gradients before or after unscaling",
    "how_to#clip-gradients-after-unscaling",
    "Clip between `compute_gradients` and `apply_gradients`",
  ),
  Question(
    "KeyError loss scale old checkpoint",
    "troubleshooting#notfounderror-keyerror-loss-scale-not-found-in-an-old-checkpoint",
    "`tf.train.Scaffold(saver=mp_compat.checkpoints.Saver())`",
  ),
  Question(
    "NotFoundError Key current_loss_scale not found in checkpoint",
    "troubleshooting#notfounderror-keyerror-loss-scale-not-found-in-an-old-checkpoint",
    "`tf.train.Scaffold(saver=mp_compat.checkpoints.Saver())`",
  ),
  Question(
    "two optimizers GAN",
    "how_to#gan-two-optimizers-their-hooks-and-global_step",
    "give each optimizer a scale of its own",
  ),
  Question(
    "loss scale in TensorBoard",
    "monitoring#the-loss-scale-in-tensorboard",
    "`loss_scale_hook/scale`",
  ),
  Question(
    "bfloat16 on A100, loss scaling needed",
    "choosing#float16-or-bfloat16-a100-h100",
    "no: it has float32's range",
  ),
  Question(
    "batch normalization float16",
    "float16#batch-normalization-in-float16",
    "Compute it in float32",
  ),
  Question(
    "graph rewrite on TensorFlow 2.15",
    "migration#the-graph-rewrite",
    "wrap in the classes of this package",
  ),
  Question(
    "which loss scale to start with",
    "choosing#which-loss-scale-to-start-with-initial_loss_scale",
    "prefer a high value",
  ),
  # messages
  Question(
    "Tensors in list passed to 'inputs' of 'AddN' Op have types [float32, float16]",
    "float16#slim-tensors-in-list-passed-to-inputs-of-addn-op-have-types-float32-float16",
    "`weights_regularizer`",
  ),
  Question(
    "slim weights_regularizer",
    "float16#slim-tensors-in-list-passed-to-inputs-of-addn-op-have-types-float32-float16",
    "`weights_regularizer`",
  ),
  Question(
    "slim.learning.train Supervisor hooks",
    "how_to#supervisor-and-slimlearningtrain-their-hooks",
    "`train_step_fn`",
  ),
  Question(
    "underflow", "choosing#measure-do-gradients-underflow", "`GradientRangesHook`"
  ),
  Question(
    "CheckNumerics Tensor had Inf/NaN values",
    "troubleshooting#checknumerics-tensor-had-infnan-values",
    "ends at the first overflow",
  ),
  Question(
    "Nan in summary histogram",
    "troubleshooting#nan-in-summary-histogram",
    "mp_compat.finite_or_zero",
  ),
  Question(
    "NanLossDuringTrainingError",
    "troubleshooting#nanlossduringtrainingerror-nan-loss-during-training",
    "canned Estimator",
  ),
  Question(
    "TF_ENABLE_AUTO_MIXED_PRECISION",
    "if_you_know#tf_enable_auto_mixed_precision-auto_mixed_precision",
    "without loss scaling",
  ),
  Question(
    "rewrite_options.auto_mixed_precision",
    "if_you_know#tf_enable_auto_mixed_precision-auto_mixed_precision",
    "without loss scaling",
  ),
  Question(
    "float16 slow on CPU",
    "troubleshooting#float16-is-slow-on-a-cpu",
    "a current TensorFlow",
  ),
  Question(
    "train op in tf.cond branch, weights do not change",
    "troubleshooting#the-train-op-is-in-a-tfcond-weights-do-not-change",
    "attempts no step",
  ),
]


def section_text(section):
  """Returns the text of a section, without its heading, up to the next heading of its
  level or of a higher one.
  """
  page, _, anchor = section.partition("#")
  parts = re.split(r"^(#+) (.*)\n", read("docs/{}.md".format(page)), flags=re.M)
  for index in range(1, len(parts), 3):
    name = re.sub(r"[^\w\- ]", "", parts[index + 1].lower()).replace(" ", "-")
    if name == anchor:
      return parts[index + 2]
  raise AssertionError("{} has no section {}".format(page, anchor))


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda question: question.typed)
def test_answer_is_within_400_words(question):
  text = " ".join(section_text(question.section).split())
  before, found, _ = text.partition(question.answer)
  assert found and len(before.split() + found.split()) <= 400


@pytest.fixture(name="search", scope="module")
def _search():
  """Returns a function that gives the sections that the search of the built site finds,
  the first page first, in the order of each page: it runs the site's own worker.
  """
  engine = pytest.importorskip("py_mini_racer")
  index = os.path.join(ROOT, "site", "search", "search_index.json")
  if not os.path.exists(index):
    pytest.skip("There is no site/: `scripts/nox -s docs` builds it.")
  (worker,) = glob.glob(
    os.path.join(ROOT, "site/assets/javascripts/workers/search.*.js")
  )
  with engine.MiniRacer() as browser:
    browser.eval(
      "var self = this, receive, sent, console = {warn() {}};"
      "function addEventListener(type, listener) { receive = listener; }"
      "function postMessage(message) { sent = message; }"
    )
    browser.eval(read(worker))
    with open(index, encoding="utf-8") as file:
      setup = dict(json.load(file), options={})
    send = "receive({{data: {{type: {}, data: {}}}}}); 0"
    browser.eval(send.format(0, json.dumps(setup)))

    def search(typed):
      browser.eval(send.format(2, json.dumps(typed)))
      pages = browser.eval(
        "JSON.stringify(sent.data.items.map(p => p.map(s => s.location)))"
      )
      return [
        location.replace("/#", "#")
        for page in json.loads(pages)
        for location in page
        if "#" in location  # of a page: its introduction
      ]

    yield search


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda question: question.typed)
def test_search_of_the_site_finds_the_answer_first(question, search):
  assert search(question.typed)[0] == question.section
