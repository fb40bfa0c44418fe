# SPDX-License-Identifier: Apache-2.0
"""Checks what is passed as arguments."""

import math
import numbers
import os
from typing import Optional, Sequence, Union

# The largest scale whose reciprocal is a normal float32; TensorFlow flushes smaller
# reciprocals to 0.
LARGEST_SCALE = 2.0**126


def is_number(value: object) -> bool:
  """Returns whether `value` is a Python or NumPy real number; False for bools."""
  return isinstance(value, numbers.Real) and not isinstance(value, bool)


def scale(name: str, value: float, above: float = 0.0) -> float:
  """Returns `value` as a float.

  Args:
    name: the name of the argument, for the error.
    value: a Python or NumPy real number above `above` and at most 2**126.
    above: the bound, which `value` must not reach.

  Raises:
    ValueError: If `value` is anything else.
  """
  number = math.nan  # compares as False with every bound
  if is_number(value):
    number = float(value)
  if not above < number <= LARGEST_SCALE:
    raise ValueError(
      "{} must be a number above {:g} and at most 2**126, but got {!r}.".format(
        name, above, value
      )
    )
  return number


def positive_int(name: str, value: object) -> int:
  """Returns `value` as an int.

  Raises:
    ValueError: If `value` is not a Python or NumPy int from 1 to below 2**63.
  """
  number = 0
  if is_number(value) and isinstance(value, numbers.Integral):
    number = int(value)
  if not 1 <= number < 2**63:
    raise ValueError(
      "{} must be an int of at least 1, but got {!r}.".format(name, value)
    )
  return number


def choice(name: str, value: object, choices: Sequence[object]) -> None:
  """Checks an argument that is one of several values.

  Args:
    name: the name of the argument, for the error.
    value: what was passed.
    choices: what may be passed.

  Raises:
    ValueError: If `value` is not one of `choices`.
  """
  if value not in choices:
    expected = ", ".join(map(repr, choices))
    raise ValueError(
      "{} must be one of {}, but got {!r}.".format(name, expected, value)
    )


def optional_path(
  name: str, value: Union[str, "os.PathLike[str]", None]
) -> Optional[str]:
  """Returns a path as a string; None for None.

  Raises:
    ValueError: If `value` is anything else.
  """
  if value is None:
    return None
  try:
    return os.fspath(value)
  except TypeError as error:
    raise ValueError(
      "{} must be a path or None, but got {!r}.".format(name, value)
    ) from error


def truncated_int(name: str, value: float) -> int:
  """Returns `value` without its fraction, as an int.

  Raises:
    ValueError: If `value` is not a Python or NumPy real number from 1 to below 2**63.
  """
  if not is_number(value) or not 1 <= value < 2**63:
    raise ValueError(
      "{} must be a whole number of at least 1, but got {!r}.".format(name, value)
    )
  return int(value)
