"""Tests README.md, docs/ and examples in docstrings: the Python code runs as pasted,
links and paths exist, public names are described.

A ```python block that begins with `import` is a program that runs as pasted, together
with the ```python blocks after it that do not. Fragments are ```py blocks or indented
code.
"""

import doctest
import glob
import importlib
import inspect
import os
import re
import subprocess
import types

import pytest

import mp_compat
from tests import testing

PAGES = sorted(
  os.path.relpath(path, testing.ROOT).replace(os.sep, "/")
  for pattern in ("docs/*.md", "docs/*/*.md")
  for path in glob.glob(os.path.join(testing.ROOT, pattern))
)
DOCUMENTS = ["README.md"] + PAGES
LINK = re.compile(r"\[[^][]*\]\(([^()\s]*)\)")  # and pictures
PATH = re.compile(
  r"(?<![\w./*-])(?:docs/[\w-]+\.md|(?:examples|mp_compat|scripts|tests|tools)/[\w./*-]+)"
)


def read(document):
  with open(os.path.join(testing.ROOT, document), encoding="utf-8") as file:
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
  if "tf.estimator." in code and not hasattr(testing.tf, "estimator"):
    pytest.skip("This TensorFlow has no Estimator.")
  done = testing.run_python(
    "-c", code, cwd=str(tmp_path), stderr=subprocess.STDOUT, check=False
  )
  assert done.returncode == 0, done.stdout[-3000:]


def modules_with_examples():
  """Yields the names of modules whose docstrings have examples with `>>>`."""
  for folder, _, files in os.walk(os.path.join(testing.ROOT, "mp_compat")):
    for name in files:
      path = os.path.join(folder, name)
      if name.endswith(".py") and ">>> " in read(path):
        module = os.path.relpath(path, testing.ROOT)[: -len(".py")]
        yield module.replace(os.sep, ".")


@pytest.mark.parametrize("name", sorted(modules_with_examples()))
def test_examples_in_docstrings_print_what_they_show(name):
  tried = doctest.testmod(importlib.import_module(name))
  assert tried.attempted and not tried.failed


def test_all_programs_are_found():
  assert len(list(program_cases())) == 16


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
    assert os.path.exists(os.path.join(testing.ROOT, target)), target
    assert not anchor or anchor in anchors(target), (target, anchor)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_mentioned_paths_exist(document):
  paths = {path.rstrip(".") for path in PATH.findall(read(document))}
  assert not [path for path in paths if not glob.glob(os.path.join(testing.ROOT, path))]


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
    page: re.match("# (.*)", read(page)).group(1)
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
  [
    mp_compat.GradientReport,
    mp_compat.GradientRange,
    mp_compat.Float32Op,
    mp_compat.checkpoints.Inspection,
  ],
)
def test_fields_of_reports_are_documented(record):
  attributes = inspect.getdoc(record).partition("\nAttributes:\n")[2]
  assert tuple(re.findall(r"^  (\w+): ", attributes, re.M)) == record._fields
