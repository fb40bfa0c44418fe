"""Compares small Keras programs with Keras's own wrapper and with the program without
the steps that overflow. `--examples N` sets the number of random ones.
"""

import tempfile

import hypothesis
import pytest

from tests.keras import cases as keras_cases
from tests.keras import programs
from tests.keras.programs import Program

pytestmark = pytest.mark.usefixtures("eager")
NEWEST = keras_cases.FAMILIES[-1].name


def slow(*values, **named):
  return pytest.param(Program(*values, **named), marks=pytest.mark.matrix)


PROGRAMS = [
  Program("v2", "Adam", "session", overflows=(0, 3), sparse=True),
  Program("v2", "SGD", "minimize", clip="clipvalue", overflows=(0, 4)),
  Program(NEWEST, "Adam", "function", overflows=(1, 3), saved="checkpoint"),
  Program(NEWEST, "RMSprop", "fit", overflows=(0, 1, 4)),
  slow("keras3", "SGD", "fit", accumulates=True, averages=True, overflows=(3,)),
  slow("keras3", "Adagrad", "two functions", overflows=(0, 4), sparse=True),
  slow(NEWEST, "Adagrad", "fit", clip="clipnorm", overflows=(0, 4), saved="model"),
]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.way)
def test_program_ends_as_references(program, tmp_path):
  if program.family not in map(repr, keras_cases.FAMILIES):
    pytest.skip("this TensorFlow has no Keras 3")
  programs.check(program, str(tmp_path))


@pytest.mark.matrix
@pytest.mark.no_cover
@hypothesis.given(programs.programs())
def test_random_program_ends_as_references(program):
  hypothesis.note("programs.check({!r}, folder)".format(program))
  with tempfile.TemporaryDirectory() as folder:
    programs.check(program, folder)
