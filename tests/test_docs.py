"""Tests README.md and docs/: the Python code runs as pasted, links and paths exist, public names are described.

The ```python blocks of a page are one program that runs as pasted. Fragments are ```py blocks or indented code.
"""

import glob
import os
import re

import pytest

import mp_compat
from tests import testing

PAGES = [
  "README.md",
  "docs/checkpoints.md",
  "docs/choosing.md",
  "docs/distributed.md",
  "docs/float16.md",
  "docs/gradient_ranges.md",
  "docs/keras.md",
  "docs/migration.md",
  "docs/monitoring.md",
  "docs/troubleshooting.md",
  "docs/tutorial.md",
]
DOCUMENTS = ["README.md"] + sorted(
  "docs/" + os.path.basename(path) for path in glob.glob(os.path.join(testing.ROOT, "docs", "*.md"))
)

LINK = re.compile(r"\[[^][]*\]\(([^()\s]*)\)")  # and pictures
PATH = re.compile(r"(?<![\w./*-])(?:docs/[\w-]+\.md|(?:mp_compat|scripts|tests)/[\w./*-]+)")


def read(document):
  with open(os.path.join(testing.ROOT, document), encoding="utf-8") as file:
    return file.read()


def program(document):
  """Returns the ```python blocks of a document, joined; "" if it has none."""
  return "\n".join(re.findall(r"^```python\n(.*?)^```", read(document), re.M | re.S))


def anchors(document):
  """Returns the anchors that GitHub gives to the headings of a document."""
  text = re.sub(r"^```.*?^```", "", read(document), flags=re.M | re.S)
  headings = re.findall(r"^#+ (.*)$", text, re.M)
  return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def linked_targets(document):
  """Returns the relative links of a document as (document or file, anchor) pairs, relative to the root."""
  for link in LINK.findall(read(document)):
    if "://" not in link:
      path, _, anchor = link.partition("#")
      yield os.path.normpath(os.path.join(os.path.dirname(document), path)) if path else document, anchor


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_page_code_runs_as_one_program(page, tmp_path):
  testing.run_python("-c", program(page), cwd=str(tmp_path))


def test_pages_with_runnable_code_are_listed():
  assert [document for document in DOCUMENTS if program(document)] == PAGES


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


def test_navigation_of_site_has_every_page():
  assert sorted(re.findall(r"^ +- (\S+\.md)$", read("mkdocs.yml"), re.M)) == sorted(
    os.path.basename(document) for document in DOCUMENTS if document.startswith("docs/")
  )


def test_index_links_to_every_page():
  pages = {target for target, _ in linked_targets("docs/index.md")}
  assert {document for document in DOCUMENTS if document.startswith("docs/")} - {"docs/index.md"} <= pages


@pytest.mark.parametrize("name", mp_compat.__all__)
def test_public_names_are_documented(name):
  text = "\n".join(map(read, DOCUMENTS))
  assert re.search(r"\bmp_compat\.{}\b".format(name), text)
