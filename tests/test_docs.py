"""Runs the Python code of documentation pages, each page as one program."""

import os
import re
import subprocess
import sys

import pytest

from tests import testing

PAGES = ["choosing.md", "troubleshooting.md"]


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_code_of_a_page_runs_as_pasted(page, tmp_path):
  with open(os.path.join(testing.ROOT, "docs", page), encoding="utf-8") as file:
    blocks = re.findall(r"^```python\n(.*?)^```", file.read(), re.M | re.S)
  assert blocks
  done = subprocess.run([sys.executable, "-c", "\n".join(blocks)], cwd=str(tmp_path), env=testing.environment(),
                        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
  assert done.returncode == 0, done.stdout[-3000:]
