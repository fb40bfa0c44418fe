# SPDX-License-Identifier: Apache-2.0
"""Stores the state of objects in graphs, and finds the graphs in which ops and variables are created."""

import collections
import contextlib
from typing import (
  Any,
  Callable,
  Container,
  Dict,
  FrozenSet,
  Iterable,
  Iterator,
  List,
  NamedTuple,
  Optional,
  Set,
  TypeVar,
)

from tensorflow.python.util import object_identity

from mp_compat._tensorflow import tf

_MOST_RUNS = 32  # the number of different Session runs that are remembered

_State = TypeVar("_State")


def init_scope_graph() -> Optional[tf.Graph]:
  """Returns the graph in which variables are created now; None if they would be eager.

  This graph is outside of functions, as with `tf.init_scope`; branches and loop bodies can be functions, too.
  """
  with tf.init_scope():
    return None if tf.executing_eagerly() else tf.get_default_graph()


def default_graph() -> Optional[tf.Graph]:
  """Returns the graph in which ops are built now, which may be a function's; None in eager mode."""
  return None if tf.executing_eagerly() else tf.get_default_graph()


def other_graph_of(tensor: Any) -> Optional[tf.Graph]:
  """Returns the graph of `tensor` if it is not the default one, and neither is a function's; otherwise None."""
  graph, default = getattr(tensor, "graph", None), tf.get_default_graph()
  is_other = graph not in (None, default) and not graph.building_function and not default.building_function
  return graph if is_other else None


def enclosing_graphs() -> Iterator[tf.Graph]:
  """Yields the graph in which ops are built now; if it is a function's, then the graphs around it."""
  graph = default_graph()
  while graph is not None:
    yield graph
    graph = getattr(graph, "outer_graph", None)


def state_of(owner: Any, graph: Optional[tf.Graph], make: Callable[[], _State]) -> _State:
  """Returns the state that `owner` keeps in `graph` (None: in eager mode); calls `make` to create it on first use.

  The graph holds the state. An owner that is used in many graphs therefore keeps none of them alive, and a copy of an
  owner has none of its variables. Owners that are equal, but not the same, have different states.
  """
  if graph is None:
    return owner.__dict__.setdefault("_eager_state", make())
  return record_in(graph, "states", object_identity.ObjectIdentityWeakKeyDictionary).setdefault(owner, make())


def record_in(graph: tf.Graph, name: str, make: Callable[[], Any] = dict) -> Any:
  """Returns the record `name` that this package keeps in `graph`; calls `make` to create it on first use."""
  attribute = "_mp_compat_" + name
  if not hasattr(graph, attribute):
    setattr(graph, attribute, make())
  return getattr(graph, attribute)


def name_scope() -> str:
  """Returns the current name scope; "" for the root."""
  return tf.get_default_graph().get_name_scope() or ""  # None in TensorFlow 1.15


@contextlib.contextmanager
def observe_names(observer: Callable[[str, str, Callable[[str], str]], None]) -> Iterator[None]:
  """Makes a context manager: `observer(scope, name, use)` is called for each name of an op or a scope in the graph.

  `scope` is the current name scope with a final "/", `name` the unique name in it, and `use(other)` uses the name that
  was asked for in the name scope `other`, and returns the unique name there. Functions, whose names are not those of
  variables, are not observed.
  """
  graph = tf.get_default_graph()
  if tf.executing_eagerly() or graph.building_function:
    yield
    return
  unique_name = graph.unique_name

  def observed(name: str, mark_as_used: bool = True) -> str:
    scope, unique = graph._name_stack or "", unique_name(name, mark_as_used)

    def use(other: str) -> str:
      graph._name_stack = other[:-1]
      try:
        return unique_name(name)
      finally:
        graph._name_stack = scope

    if mark_as_used:
      observer(scope + "/", unique, use)
    return unique

  graph.unique_name = observed
  try:
    yield
  finally:
    graph.unique_name = unique_name  # the class's, or the observed one of a step around this one


def executed_ops(elements: Iterable[Any], fed: Container[str] = ()) -> List[tf.Operation]:
  """Returns the ops that a Session executes for tensors and ops; those with names in `fed` are not computed."""
  found, pending = collections.OrderedDict(), list(elements)
  while pending:
    element = pending.pop()
    op = getattr(element, "op", element)
    if op not in found and element.name not in fed:
      found[op] = True
      pending.extend(op.inputs)
      pending.extend(op.control_inputs)
  return list(found)


def creation_order() -> Dict[tf.Operation, int]:
  """Returns the place of each op of the default graph in the order in which they were created."""
  return {op: index for index, op in enumerate(tf.get_default_graph().get_operations())}


def fetched_elements(graph: tf.Graph, fetches: Any) -> List[Any]:
  """Returns the tensors and ops that `Session.run(fetches)` runs; `fetches` is any structure that `run` accepts."""
  from tensorflow.python.client import session

  if isinstance(fetches, (tf.Operation, tf.Tensor)):
    return [fetches]  # As lists, this is common: the general case takes 20 microseconds longer.
  if isinstance(fetches, (list, tuple)):
    return [element for fetch in fetches for element in fetched_elements(graph, fetch)]
  with graph.as_default():
    return session._FetchMapper.for_fetch(fetches).unique_fetches()


class Run(NamedTuple):
  """What a Session run executes."""

  ops: Set[tf.Operation]
  fed: FrozenSet[str]  # the names of the tensors that are fed

  def computes(self, tensor: tf.Tensor) -> bool:
    """Returns whether the run computes `tensor` or feeds it, so that fetching it as well executes nothing else."""
    return tensor.name in self.fed or tensor.op in self.ops


def executed_by(run_context: Any) -> Run:
  """Returns what a run executes, as far as its caller requests it; remembers runs by what they fetch and feed."""
  graph, requested = run_context.session.graph, run_context.original_args
  fetched = fetched_elements(graph, requested.fetches)
  fed = frozenset(tensor.name for tensor in fetched_elements(graph, list(requested.feed_dict or {})))
  runs = record_in(graph, "runs")
  key = tuple(element.name for element in fetched), fed
  run = runs.get(key)
  if run is None:
    if len(runs) == _MOST_RUNS:
      runs.clear()
    run = runs[key] = Run(set(executed_ops(fetched, fed)), fed)
  return run
