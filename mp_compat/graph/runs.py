# SPDX-License-Identifier: Apache-2.0
"""What a Session run executes."""

from typing import Dict, FrozenSet, Iterable, List, NamedTuple, Set, Union

from mp_compat._tensorflow import sessions
from mp_compat._tensorflow import tf
from mp_compat.graph import records

_MOST_RUNS = 32  # the number of different Session runs that are remembered

Element = Union[tf.Operation, tf.Tensor]  # what a Session can run


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


def fetched_elements(graph: tf.Graph, fetches: object) -> List[Element]:
  """Returns the tensors and ops that `Session.run(fetches)` runs; `fetches` is any
  structure that `run` accepts.
  """
  if isinstance(fetches, (tf.Operation, tf.Tensor)):
    # Single fetches and lists are common; the general case takes 20 microseconds
    # longer.
    return [fetches]
  if isinstance(fetches, (list, tuple)):
    found: List[Element] = []
    for fetch in fetches:
      found += fetched_elements(graph, fetch)
    return found
  with graph.as_default():
    return sessions.unique_fetches(fetches)


class Run(NamedTuple):
  """What a Session run executes.

  Attributes:
    ops: The ops.
    fed: The names of the tensors that are fed.
  """

  ops: Set[tf.Operation]
  fed: FrozenSet[str]

  def computes(self, tensor: tf.Tensor) -> bool:
    """Returns whether the run computes `tensor` or feeds it, so that fetching it as
    well executes nothing else.
    """
    return tensor.name in self.fed or tensor.op in self.ops


def executed_by(run_context: tf.train.SessionRunContext) -> Run:
  """Returns what a run executes, as far as its caller requests it; remembers runs by
  what they fetch and feed.
  """
  graph = run_context.session.graph
  requested = run_context.original_args
  fetched = fetched_elements(graph, requested.fetches)
  fed_elements = fetched_elements(graph, list(requested.feed_dict or {}))
  fed = frozenset(element.name for element in fed_elements)
  runs = records.record_in(graph, "runs")
  key = tuple(element.name for element in fetched), fed
  run = runs.get(key)
  if run is None:
    if len(runs) == _MOST_RUNS:
      runs.clear()
    run = runs[key] = Run(set(executed_ops(fetched, fed)), fed)
  return run
