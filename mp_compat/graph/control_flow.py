# SPDX-License-Identifier: Apache-2.0
"""Builds conditionals, and gates: conditionals around ops that are built as if there
were none (docs/design.md).
"""

from typing import Callable, Container, Dict, List, Optional, Set, Tuple, Union

from mp_compat._tensorflow import ops
from mp_compat._tensorflow import tf
from mp_compat.graph import contexts
from mp_compat.graph import dead_tensors
from mp_compat.graph import effects
from mp_compat.graph import graphs
from mp_compat.graph.graphs import Element

_LOOP_INPUTS = ("Enter", "RefEnter")
_MERGES = ("Merge", "RefMerge")

_Branch = Callable[[], Optional[Element]]


def cond(
  predicate: Union[bool, tf.Tensor], true_fn: _Branch, false_fn: _Branch = tf.no_op
) -> Optional[Element]:
  """Returns `true_fn()` if `predicate`, else `false_fn()`; in a graph, calls each once
  to build the branches.

  In a plain graph, the ops of a branch run after the result of a Switch, by control
  dependencies. In functions and XLA contexts, it is `tf.cond`. The branches return ops,
  or tensors of one dtype and shape; in eager mode also None.
  """
  if not tf.is_tensor(predicate) or tf.executing_eagerly():
    return true_fn() if predicate else false_fn()
  if ops.may_be_compiled():
    return tf.cond(predicate, true_fn, false_fn)
  with tf.name_scope("cond"):
    results = []
    for pivot, branch_fn in zip(_pivots(predicate, predicate), (false_fn, true_fn)):
      with tf.control_dependencies([pivot]):
        result = branch_fn()
        results.append(
          tf.identity(result) if tf.is_tensor(result) else _after([result], pivot)
        )
    return tf.raw_ops.Merge(inputs=results).output


def gate(
  predicate: tf.Tensor,
  build: Callable[[], List[Element]],
  skip: Optional[Callable[[], tf.Operation]],
  data: List[tf.Tensor],
  scope: str,
) -> tf.Tensor:
  """Returns a tensor that runs what `build()` builds if `predicate`, else `skip()`; in
  a plain graph only.

  Nothing of this package is around `build`: its ops, variables and tensors have the
  names, devices and contexts of a direct call. Of the ops that its results need, those
  that change state or read `data`, and all that depend on them, do not run if
  `predicate` is False. The others run in any case, so that other code can use their
  tensors. Summaries that `build` collects and that would not run are empty then.

  Args:
    predicate: a scalar bool tensor.
    build: returns ops or tensors.
    skip: returns an op; None for nothing.
    data: tensors of any dtype.
    scope: the name scope of the ops of the gate.

  Raises:
    ValueError: If an op that the results need reads one that a gate with another
      predicate may skip.
  """
  graph = tf.get_default_graph()
  with tf.name_scope(scope):
    # With `predicate` as the data, graph optimizers replace the pivot by a constant.
    # TensorFlow up to 2.4 takes it for the first value of a loop that waits for it, and
    # the process aborts.
    skipped, applied = _pivots(predicate, tf.logical_not(predicate))
    if skip is not None:
      with tf.control_dependencies([skipped]):
        skipped = _after([skip()], skipped)
  built_before = len(graph.get_operations())
  collected_before = {
    key: len(tf.get_collection(key))
    for key in (tf.GraphKeys.SUMMARIES, tf.GraphKeys.UPDATE_OPS)
  }
  with graphs.changes_exclusively() as sessions_ran:
    results = build()
    # A Session that has run an op does not see the edges that it gets later.
    if sessions_ran:
      raise ValueError(
        "apply_gradients() of the inner optimizer must not run a Session, but did: the "
        "ops that it built before would run in skipped steps, too. Initialize "
        "variables after apply_gradients()."
      )
    summaries, update_ops = [
      tf.get_collection(key)[before:] for key, before in collected_before.items()
    ]
    skipped_ops = _close(
      graph.get_operations()[built_before:],
      results + summaries + update_ops,
      applied,
      data,
    )
  with tf.name_scope(scope):
    if summaries:
      collected = tf.get_collection_ref(tf.GraphKeys.SUMMARIES)
      collected[-len(summaries) :] = _readable(summaries, skipped_ops)
    return tf.raw_ops.Merge(inputs=[skipped, _after(results, applied)]).output


def _readable(
  summaries: List[tf.Tensor], skipped: Container[tf.Operation]
) -> List[tf.Tensor]:
  """Returns the summaries as tensors that are empty if they are not computed; drops
  those inside control flow.
  """
  if contexts.is_in_control_flow():
    return []
  readable = [
    summary for summary in summaries if contexts.is_in_branches_only(summary.op)
  ]
  return [
    dead_tensors.merge_out_of_branches(summary, b"", summary.op in skipped)
    for summary in readable
  ]


def _pivots(predicate: tf.Tensor, data: tf.Tensor) -> List[tf.Tensor]:
  """Returns copies of `data`, of which a run computes the first if `predicate` is
  False, the second if it is True.
  """
  return [
    tf.identity(output) for output in tf.raw_ops.Switch(data=data, pred=predicate)
  ]


def _after(results: List[Element], pivot: tf.Tensor) -> tf.Tensor:
  """Returns a copy of `pivot` that is computed after ops or tensors."""
  with tf.control_dependencies([pivot] + results):
    return tf.identity(pivot)


def _close(
  ops: List[tf.Operation],
  results: List[Element],
  applied: tf.Tensor,
  data: List[tf.Tensor],
) -> Set[tf.Operation]:
  """Makes those of `ops` wait for `applied` that `results` need and that change state,
  read `data` or begin a loop.

  An op whose control input is not computed does not run, and neither does what reads
  it. Exceptions are Merge, which needs one of its inputs only, and the body of a loop,
  whose ops wait for nothing outside: all inputs of the loop do. Returns all ops that
  may not run if `applied` is not computed: a Merge may read only one that does not.
  """
  new, graph = set(ops), tf.get_default_graph()
  predicate = applied.op.inputs[0].op.inputs[1].op  # of the Switch
  frame = contexts.loop_around(graph._get_control_flow_context())
  needed = _needed(results, new)
  _check_reads(needed, new, predicate)
  must_wait = effects.changing(needed, graph).union(
    *[tensor.consumers() for tensor in data]
  )
  must_wait.update(
    op for op in needed if op.type in _LOOP_INPUTS and _begins_loop_of(op, new)
  )
  gated: Set[tf.Operation] = set()
  for op, reads in needed.items():
    if op.type in _MERGES:
      waits = gated.issuperset(reads)
    else:
      waits = not gated.isdisjoint(reads)
      # An op in another loop cannot wait for `applied`.
      if not waits and op in must_wait and contexts.loop_around_inputs(op) is frame:
        op._add_control_input(applied.op)
        waits = True
    if waits:
      gated.add(op)
  skipped = _skipped(needed, gated)
  _predicates(graph).update(dict.fromkeys(skipped, predicate))
  return skipped


def _skipped(
  needed: Dict[tf.Operation, List[tf.Operation]], gated: Set[tf.Operation]
) -> Set[tf.Operation]:
  """Returns the needed ops that are gated, are in a cluster with one, or read an op
  that may be skipped.
  """
  # XLA runs a cluster as one op.
  clusters = {
    contexts.compiled_around(op)
    for op in gated
    if op._get_control_flow_context() is not None
  } - {None}
  skipped: Set[tf.Operation] = set()
  for op, reads in needed.items():
    if (
      op in gated
      or not skipped.isdisjoint(reads)
      or (clusters and contexts.compiled_around(op) in clusters)
    ):
      skipped.add(op)
  return skipped


def _check_reads(
  needed: Dict[tf.Operation, List[tf.Operation]],
  new: Set[tf.Operation],
  predicate: tf.Operation,
) -> None:
  """Raises a ValueError if a needed op reads one that a gate with another predicate may
  skip.
  """
  predicates = _predicates(tf.get_default_graph())
  for reads in needed.values():
    for read in reads:
      if read not in new and predicates.get(read, predicate) is not predicate:
        raise ValueError(
          "apply_gradients() must not use {} ({}), which an earlier apply_gradients() "
          "built: it is not computed if that step is skipped, because it changes state "
          "or derives from the gradients of that step. Build it before both, or once "
          "in each.".format(read.name, read.type)
        )


def _begins_loop_of(loop_input: tf.Operation, new: Set[tf.Operation]) -> bool:
  """Returns whether the loop that an input begins (control flow v1) consists of `new`
  ops.
  """
  loop = contexts.loop_around(loop_input._get_control_flow_context())
  return loop is None or loop.pivot.op in new


def is_gated(op: tf.Operation) -> bool:
  """Returns whether a gate may skip `op`."""
  return op in _predicates(op.graph)


def _predicates(graph: tf.Graph) -> Dict[tf.Operation, tf.Operation]:
  """Returns the ops that gates may skip, each with the op that computes the
  predicate.
  """
  return graphs.record_in(graph, "gated")


def _needed(
  results: List[Element], new: Set[tf.Operation]
) -> Dict[tf.Operation, List[tf.Operation]]:
  """Returns the ops of `new` that ops or tensors need, each after the ops that it reads
  or waits for, and with them.

  For a Merge, only those of its inputs; at the beginning of a loop, without what the
  loop computes.
  """
  needed: Dict[tf.Operation, List[tf.Operation]] = {}
  seen: Set[tf.Operation] = set()
  pending: List[Tuple[tf.Operation, Optional[List[tf.Operation]]]] = []
  pending += [
    (result if isinstance(result, tf.Operation) else result.op, None)
    for result in results
  ]
  while pending:
    op, reads = pending.pop()
    if reads is not None:  # All that it reads is in `needed`.
      needed[op] = reads
    elif op in new and op not in seen:
      seen.add(op)
      reads, controls = [tensor.op for tensor in op.inputs], list(op.control_inputs)
      if op.type in _MERGES and reads[-1].type in ("NextIteration", "RefNextIteration"):
        pending.insert(0, (reads.pop(), None))
      elif op.type not in _MERGES:
        reads += controls
      pending.append((op, reads))
      pending += [(read, None) for read in reads + controls]
  return needed
