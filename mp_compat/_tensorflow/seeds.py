# SPDX-License-Identifier: Apache-2.0
"""Replaces what gives seeds to random ops and generators."""

import functools
import types
from typing import Any, Callable, Dict, Optional, Tuple

from tensorflow.python.framework import ops  # pyright: ignore[reportAttributeAccessIssue]
from tensorflow.python.framework import random_seed  # pyright: ignore[reportAttributeAccessIssue]
from tensorflow.python.ops import image_ops_impl
from tensorflow.python.ops import stateful_random_ops

_SEEDS = ("seed", "seed2")  # attributes of random ops; both are 0 without a seed

# From the seed that an op was given, if any: the seeds of the graph and of the op.
GetSeed = Callable[[Optional[int]], Tuple[Optional[int], Optional[int]]]

get_seed: GetSeed = random_seed.get_seed  # TensorFlow's own, also if it is replaced


def replace_get_seed(function: GetSeed) -> None:
  """Replaces `get_seed`, which most functions call that build random ops; and makes ops
  of graphs that get no seed otherwise, such as
  `tf.image.sample_distorted_bounding_box`, get one from `function(None)`.
  """
  random_seed.get_seed = function
  if hasattr(image_ops_impl, "config"):
    # Up to 2.21, this module reads it only to refuse ops without a seed.
    image_ops_impl.config = types.SimpleNamespace(
      is_op_determinism_enabled=lambda: False
    )
  create = ops.Graph._create_op_internal

  @functools.wraps(create)
  def create_with_seed(
    self: ops.Graph,
    op_type: str,
    inputs: Any,
    dtypes: Any = None,
    input_types: Any = None,
    name: Optional[str] = None,
    attrs: Optional[Dict[str, Any]] = None,
    *args: Any,
    **kwargs: Any,
  ) -> ops.Operation:
    if _lacks_seed(attrs or {}):
      attrs = dict(attrs or {})
      for key, seed in zip(_SEEDS, function(None)):
        attrs[key] = type(attrs[key])(i=seed)
    return create(
      self, op_type, inputs, dtypes, input_types, name, attrs, *args, **kwargs
    )

  ops.Graph._create_op_internal = create_with_seed


def _lacks_seed(attrs: Dict[str, Any]) -> bool:
  """Returns whether attributes are those of a random op without a seed, which takes
  one: those of fractional pooling do so only if it is not random.
  """
  if "deterministic" in attrs:
    return False
  return all(key in attrs and not attrs[key].i for key in _SEEDS)


def replace_seed_of_generators(make_seed: Callable[[], Optional[int]]) -> None:
  """Makes a `tf.random.Generator` that asks for a state from the system's entropy get
  one from `make_seed()`.
  """

  def from_seed(cls: Any, alg: object = None) -> object:
    return cls.from_seed(make_seed(), alg)

  generator = stateful_random_ops.Generator
  generator.from_non_deterministic_state = classmethod(from_seed)
