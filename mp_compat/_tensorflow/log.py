# SPDX-License-Identifier: Apache-2.0
"""Logs the warnings of this package with TensorFlow's logger."""

from typing import Callable, List

from mp_compat._tensorflow import graphs
from mp_compat._tensorflow import tf

# Functions that are called with each warning, also with those that the program's verbosity hides.
observers: List[Callable[[str], object]] = []


def warn(message: str, *args: object) -> None:
  """Logs `message % args` as a warning."""
  for observer in observers:
    observer(message % args if args else message)
  tf.logging.warning(message, *args)


def warn_once(owner: object, message: str, *args: object) -> None:
  """Logs a warning, once in the graph that a Session runs; in eager mode once for `owner`."""
  graph = graphs.init_scope_graph()
  warned = (
    vars(owner).setdefault("_eager_warnings", set()) if graph is None else graphs.record_in(graph, "warnings", set)
  )
  if message % args not in warned:
    warned.add(message % args)
    warn(message, *args)
