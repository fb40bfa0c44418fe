# SPDX-License-Identifier: Apache-2.0
"""Replaces what gives seeds to random ops and generators."""

from typing import Any, Callable, Optional, Tuple

from tensorflow.python.framework import random_seed  # pyright: ignore[reportAttributeAccessIssue]
from tensorflow.python.ops import stateful_random_ops

# From the seed that an op was given, if any: the seeds of the graph and of the op.
GetSeed = Callable[[Optional[int]], Tuple[Optional[int], Optional[int]]]

get_seed: GetSeed = random_seed.get_seed  # TensorFlow's own, also if it is replaced


def replace_get_seed(function: GetSeed) -> None:
  """Replaces `get_seed`, which all ops call that draw random numbers."""
  random_seed.get_seed = function


def replace_seed_of_generators(make_seed: Callable[[], Optional[int]]) -> None:
  """Makes a `tf.random.Generator` that asks for a state from the system's entropy get
  one from `make_seed()`.
  """

  def from_seed(cls: Any, alg: object = None) -> object:
    return cls.from_seed(make_seed(), alg)

  generator = stateful_random_ops.Generator
  generator.from_non_deterministic_state = classmethod(from_seed)
