# SPDX-License-Identifier: Apache-2.0
"""Stores the state of objects in graphs, and finds the graphs in which ops and
variables are created.
"""

import contextlib
import threading
from typing import (
  Any,
  Callable,
  ContextManager,
  Dict,
  FrozenSet,
  Iterable,
  Iterator,
  List,
  NamedTuple,
  Optional,
  Set,
  TypeVar,
  Union,
)

from tensorflow.python.eager import context
from tensorflow.python.util import object_identity

from mp_compat._tensorflow import log
from mp_compat._tensorflow import tf

_MOST_RUNS = 32  # the number of different Session runs that are remembered

Element = Union[tf.Operation, tf.Tensor]  # what a Session can run

_State = TypeVar("_State")


def init_scope_graph() -> Optional[tf.Graph]:
  """Returns the graph in which variables are created now; None if they would be eager.

  This graph is outside of functions, as with `tf.init_scope`; branches and loop bodies
  can be functions, too.
  """
  # In eager mode, `tf.init_scope` changes nothing, but takes time.
  if tf.executing_eagerly():
    return None
  with tf.init_scope():
    return None if tf.executing_eagerly() else tf.get_default_graph()


def default_graph() -> Optional[tf.Graph]:
  """Returns the graph in which ops are built now, which may be a function's; None in
  eager mode.
  """
  return None if tf.executing_eagerly() else tf.get_default_graph()


def graph_of(value: object) -> Optional[tf.Graph]:
  """Returns the graph of a tensor; None for an eager one, and for another value without
  a graph.
  """
  return getattr(value, "graph", None)


def other_graph_of(tensor: object) -> Optional[tf.Graph]:
  """Returns the graph of `tensor` if it is not the default one, and neither is a
  function's; otherwise None.
  """
  graph, default = graph_of(tensor), tf.get_default_graph()
  is_other = (
    graph not in (None, default)
    and not graph.building_function
    and not default.building_function
  )
  return graph if is_other else None


def enclosing_graphs() -> Iterator[tf.Graph]:
  """Yields the graph in which ops are built now; if it is a function's, then the graphs
  around it.
  """
  graph = default_graph()
  while graph is not None:
    yield graph
    graph = getattr(graph, "outer_graph", None)


def state_of(
  owner: object, graph: Optional[tf.Graph], make: Callable[[], _State]
) -> _State:
  """Returns the state that `owner` keeps in `graph` (None: in eager mode); calls `make`
  to create it on first use.

  The graph holds the state. An owner that is used in many graphs therefore keeps none
  of them alive, and a copy of an owner has none of its variables. Owners that are
  equal, but not the same, have different states.
  """
  if graph is None:
    return vars(owner).setdefault("_eager_state", make())
  return record_in(
    graph, "states", object_identity.ObjectIdentityWeakKeyDictionary
  ).setdefault(owner, make())


def record_in(graph: tf.Graph, name: str, make: Callable[[], Any] = dict) -> Any:
  """Returns the record `name` that this package keeps in `graph`; calls `make` to
  create it on first use.
  """
  if not hasattr(graph, "_mp_compat_records"):
    graph._mp_compat_records = {}
  records = graph._mp_compat_records
  if name not in records:
    records[name] = make()
  return records[name]


def warn_once(owner: object, message: str, *args: object) -> None:
  """Logs a warning, once in the graph that a Session runs; in eager mode once for
  `owner`.
  """
  graph = init_scope_graph()
  if graph is None:
    warned = vars(owner).setdefault("_eager_warnings", set())
  else:
    warned = record_in(graph, "warnings", set)
  text = message % args
  if text not in warned:
    warned.add(text)
    log.warn(message, *args)


def name_scope() -> str:
  """Returns the current name scope; "" for the root."""
  if tf.executing_eagerly():
    return context.context().scope_name.rstrip("/")
  return tf.get_default_graph().get_name_scope() or ""  # None in TensorFlow 1.15


@contextlib.contextmanager
def replace_next_names(replacements: Dict[str, str]) -> Iterator[None]:
  """Makes a context manager: the next op or scope that asks for a name of
  `replacements` gets the value instead.

  Both are full, with the name scope. A replacement need not be unique: it may be a
  scope that exists.
  """
  graph = tf.get_default_graph()
  unique_name, pending = graph.unique_name, dict(replacements)

  def replaced(name: str, mark_as_used: bool = True) -> str:
    full = "/".join(filter(None, [graph.get_name_scope(), name]))
    if not mark_as_used or full not in pending:
      return unique_name(name, mark_as_used)
    replacement = pending.pop(full)
    if not pending:
      graph.unique_name = unique_name
    return replacement

  if pending:
    graph.unique_name = replaced
  try:
    yield
  finally:
    graph.unique_name = (
      unique_name  # the class's, or the replaced one of a step around this one
    )


@contextlib.contextmanager
def changes_exclusively() -> Iterator[List[bool]]:
  """Makes a context manager during which no Session runs ops of the current graph that
  other threads start.

  Yields a list, which is not empty after this thread, or one that was started inside,
  has run a Session.
  """
  graph, ran = tf.get_default_graph(), []
  lock, others = (
    graph._session_run_lock,
    set(threading.enumerate()) - {threading.current_thread()},
  )

  def noting_lock() -> Any:
    if threading.current_thread() in others:
      return lock()  # waits for the end of the change
    ran.append(True)
    return contextlib.nullcontext()

  with graph._mutation_lock():
    graph._session_run_lock = noting_lock
    try:
      yield ran
    finally:
      graph._session_run_lock = lock


def rename_slots(replaced: Dict[str, str], last: str) -> ContextManager[None]:
  """Returns a context manager: variables that are named after an op, as slots of a
  tensor are, are named after the op that it replaces.

  `replaced` maps names of ops, whose last part begins with `last`, to names of ops.
  """

  def create_variable(
    next_creator: Callable[..., tf.Variable], **kwargs: Any
  ) -> tf.Variable:
    parts = str(kwargs.get("name") or "").split("/")
    ends = [end for end, part in enumerate(parts, 1) if part.startswith(last)]
    for end in ends:
      for begin in range(end):
        op_name = "/".join(parts[begin:end])
        if op_name in replaced:
          parts[begin:end] = [replaced[op_name]]
          kwargs["name"] = "/".join(parts)
          return next_creator(**kwargs)
    return next_creator(**kwargs)

  return tf.variable_creator_scope(create_variable)


@contextlib.contextmanager
def reserve_name(name: str) -> Iterator[str]:
  """Makes a context manager that yields `name`, reserved and with a final "/", for an
  op that is built later.

  The next op or scope that asks for `name` gets a name of its own, as TensorFlow's
  class gives it: "train-wrapped" for "train". Variables that are made in that scope
  have the names that they have without it: "train/rate". In functions and eager mode,
  nothing is reserved: it yields `name` without a final "/".
  """
  graph, given = tf.get_default_graph(), name.rstrip("/")
  if tf.executing_eagerly() or graph.building_function:
    yield given
    return
  with tf.name_scope(name) as reserved:
    pass
  other = graph.unique_name(given + "-wrapped") + "/"

  unique_name = graph.unique_name

  def create_variable(
    next_creator: Callable[..., tf.Variable], **kwargs: Any
  ) -> tf.Variable:
    current, replaced = name_scope() + "/", graph.unique_name
    outer, found, inner = "/{}".format(kwargs.get("name")).partition("/" + other)
    # the slot of a tensor, such as a moving average, perhaps in a variable scope
    if found:
      kwargs["name"] = outer[1:] + "/" * bool(outer) + reserved + inner
    graph.unique_name = (
      unique_name  # The replacement is not for a variable of that name.
    )
    try:
      with (
        tf.name_scope(reserved + current[len(other) :])
        if current.startswith(other)
        else contextlib.nullcontext()
      ):
        return next_creator(**kwargs)
    finally:
      graph.unique_name = replaced

  asked = "/".join(filter(None, [name_scope(), given]))
  with tf.variable_creator_scope(create_variable), replace_next_names(
    {asked: other[:-1]}
  ):
    yield reserved


def executed_ops(
  elements: Iterable[Element], fed: FrozenSet[str] = frozenset()
) -> List[tf.Operation]:
  """Returns the ops that a Session executes for tensors and ops; those with names in
  `fed` are not computed.
  """
  found: Dict[tf.Operation, None] = {}
  pending = list(elements)
  while pending:
    element = pending.pop()
    op = element if isinstance(element, tf.Operation) else element.op
    if op not in found and element.name not in fed:
      found[op] = None
      pending += [*op.inputs, *op.control_inputs]
  return list(found)


def creation_order() -> Dict[tf.Operation, int]:
  """Returns the place of each op of the default graph in the order in which they were
  created.
  """
  return {op: index for index, op in enumerate(tf.get_default_graph().get_operations())}


def fetched_elements(graph: tf.Graph, fetches: object) -> List[Element]:
  """Returns the tensors and ops that `Session.run(fetches)` runs; `fetches` is any
  structure that `run` accepts.
  """
  from tensorflow.python.client import session

  if isinstance(fetches, (tf.Operation, tf.Tensor)):
    # Single fetches and lists are common; the general case takes 20 microseconds
    # longer.
    return [fetches]
  if isinstance(fetches, (list, tuple)):
    return [element for fetch in fetches for element in fetched_elements(graph, fetch)]
  with graph.as_default():
    return session._FetchMapper.for_fetch(fetches).unique_fetches()


class Run(NamedTuple):
  """What a Session run executes."""

  ops: Set[tf.Operation]
  fed: FrozenSet[str]  # the names of the tensors that are fed

  def computes(self, tensor: tf.Tensor) -> bool:
    """Returns whether the run computes `tensor` or feeds it, so that fetching it as
    well executes nothing else.
    """
    return tensor.name in self.fed or tensor.op in self.ops


def executed_by(run_context: tf.train.SessionRunContext) -> Run:
  """Returns what a run executes, as far as its caller requests it; remembers runs by
  what they fetch and feed.
  """
  graph, requested = run_context.session.graph, run_context.original_args
  fetched = fetched_elements(graph, requested.fetches)
  fed = frozenset(
    tensor.name for tensor in fetched_elements(graph, list(requested.feed_dict or {}))
  )
  runs = record_in(graph, "runs")
  key = tuple(element.name for element in fetched), fed
  run = runs.get(key)
  if run is None:
    if len(runs) == _MOST_RUNS:
      runs.clear()
    run = runs[key] = Run(set(executed_ops(fetched, fed)), fed)
  return run
