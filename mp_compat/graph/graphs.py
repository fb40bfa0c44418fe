# SPDX-License-Identifier: Apache-2.0
"""Which graph ops and variables are created in, and which graph a tensor is in."""

import contextlib
from typing import Dict, Iterator, List, Optional

from mp_compat._tensorflow import eager_contexts
from mp_compat._tensorflow import tf


def init_scope_graph() -> Optional[tf.Graph]:
  """Returns the graph in which variables are created now; None if they would be eager.

  This graph is outside of functions, as with `tf.init_scope`; branches and loop bodies
  can be functions, too.
  """
  # In eager mode, `tf.init_scope` changes nothing, but takes time.
  if tf.executing_eagerly():
    return None
  with tf.init_scope():
    graph = default_graph()
  if graph is None and eager_contexts.is_eager_by_mistake():
    return enclosing_graphs()[-1]
  return graph


@contextlib.contextmanager
def init_scope() -> Iterator[None]:
  """Makes a context manager as `tf.init_scope`, which enters `init_scope_graph`."""
  graph = init_scope_graph()
  with tf.init_scope(), contextlib.ExitStack() as stack:
    if graph is not None and tf.executing_eagerly():
      stack.enter_context(graph.as_default())
    yield


def default_graph() -> Optional[tf.Graph]:
  """Returns the graph in which ops are built now, which may be a function's; None in
  eager mode.
  """
  if tf.executing_eagerly():
    return None
  return tf.get_default_graph()


def graph_of(value: object) -> Optional[tf.Graph]:
  """Returns the graph of a tensor; None for an eager one, and for another value without
  a graph.
  """
  return getattr(value, "graph", None)


def other_graph_of(tensor: object) -> Optional[tf.Graph]:
  """Returns the graph of `tensor` if it is not the default one, and neither is a
  function's; otherwise None.
  """
  graph = graph_of(tensor)
  default = tf.get_default_graph()
  if graph is None or graph is default:
    return None
  if graph.building_function or default.building_function:
    return None
  return graph


def enclosing_graphs() -> List[tf.Graph]:
  """Returns the graph in which ops are built now; if it is a function's, then the
  graphs around it, from the inside out. Returns [] in eager mode.
  """
  found: List[tf.Graph] = []
  graph = default_graph()
  while graph is not None:
    found.append(graph)
    graph = getattr(graph, "outer_graph", None)
  return found


def creation_order() -> Dict[tf.Operation, int]:
  """Returns the place of each op of the default graph in the order in which they were
  created.
  """
  operations = tf.get_default_graph().get_operations()
  return {op: place for place, op in enumerate(operations)}
