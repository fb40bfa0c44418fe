# SPDX-License-Identifier: Apache-2.0
"""What this package keeps in a graph: records, the state of objects, and which warnings
were logged.
"""

from typing import Any, Callable, Optional, TypeVar

from mp_compat._tensorflow import identity
from mp_compat._tensorflow import log
from mp_compat._tensorflow import tf
from mp_compat.graph import graphs

_State = TypeVar("_State")


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
  states = record_in(graph, "states", identity.WeakKeyDictionary)
  return states.setdefault(owner, make())


def warn_once(owner: object, message: str, *args: object) -> None:
  """Logs `message % args` as a warning, once in the graph that a Session runs; in eager
  mode once for `owner`.
  """
  graph = graphs.init_scope_graph()
  if graph is None:
    warned = vars(owner).setdefault("_eager_warnings", set())
  else:
    warned = record_in(graph, "warnings", set)
  text = message % args
  if text not in warned:
    warned.add(text)
    log.warn(message, *args)
