# SPDX-License-Identifier: Apache-2.0
"""Gates: conditionals around ops that are built as if there were none (docs/design.md,
"The gate").
"""

import dataclasses
from typing import Callable, Container, Dict, List, Optional, Sequence, Set, Tuple

from mp_compat._tensorflow import graph_internals
from mp_compat._tensorflow import run_locks
from mp_compat._tensorflow import tf
from mp_compat.graph import contexts
from mp_compat.graph import control_flow
from mp_compat.graph import dead_tensors
from mp_compat.graph import effects
from mp_compat.graph import graphs
from mp_compat.graph import records
from mp_compat.graph.runs import Element

# Ops, each after the ops of the same dict that it needs, with all that it reads or
# waits for. Only the Merge at the beginning of a loop is before its second input.
_Reads = Dict[tf.Operation, List[tf.Operation]]


@dataclasses.dataclass
class GatedOps:
  """What the gates of a graph may skip.

  Attributes:
    predicates: The ops that a gate may skip, each with the op that computes its
      predicate.
    passed: The ops that `pass_unless` made.
    merges: The ops that `gate` returned: each runs whether its step is skipped or not.
    built_before: The number of ops that the graph had before its first gate.
  """

  predicates: Dict[tf.Operation, tf.Operation] = dataclasses.field(default_factory=dict)
  passed: Set[tf.Operation] = dataclasses.field(default_factory=set)
  merges: Set[tf.Operation] = dataclasses.field(default_factory=set)
  built_before: int = 0


def gate(
  predicate: tf.Tensor,
  build: Callable[[], List[Element]],
  skip: Optional[Callable[[], tf.Operation]],
  scope: str,
) -> tf.Tensor:
  """Returns a tensor that runs what `build()` builds if `predicate`, else `skip()`; in
  a plain graph only.

      for op in what the results of build() need:
        if op changes state, or begins a loop:
          it gets a control input that is not computed if `predicate` is False
        what reads what pass_unless computes is not computed either

  Nothing of this package is around `build`: its ops, variables and tensors have the
  names, devices and contexts of a direct call. Ops that do not wait run in any case, so
  that other code can use their tensors. Summaries that `build` collects and that would
  not run are empty then.

  Args:
    predicate: a scalar bool tensor.
    build: returns ops or tensors.
    skip: returns an op; None for nothing.
    scope: the name scope of the ops of the gate.

  Raises:
    ValueError: If an op that the results need depends on one that a gate with another
      predicate may skip, or if `build` runs a Session.
  """
  graph = tf.get_default_graph()
  with tf.name_scope(scope):
    # With `predicate` as the data, graph optimizers replace the pivot by a constant,
    # and TensorFlow up to 2.4 takes that constant for the first value of a loop that
    # waits for it: the process aborts.
    skipped, applied = control_flow.pivots(predicate, tf.logical_not(predicate))
    if skip is not None:
      with tf.control_dependencies([skipped]):
        skipped = control_flow.after([skip()], skipped)
  built_before = len(graph.get_operations())
  collections = (tf.GraphKeys.SUMMARIES, tf.GraphKeys.UPDATE_OPS)
  collected_before = {key: len(tf.get_collection(key)) for key in collections}
  with run_locks.changes_exclusively() as sessions_ran:
    results = build()
    if sessions_ran:  # A Session that has run an op does not see its later edges.
      raise ValueError(
        "apply_gradients() of the inner optimizer must not run a Session, but did: the "
        "ops that it built before would run in skipped steps, too. Initialize "
        "variables after apply_gradients()."
      )
    new = graph.get_operations()[built_before:]
    summaries, update_ops = [
      tf.get_collection(key)[before:] for key, before in collected_before.items()
    ]
    ends = results + summaries + update_ops
    skipped_ops = _add_edges(set(new), ends, predicate.op, applied.op, built_before)
  with tf.name_scope(scope):
    if summaries:
      collected = tf.get_collection_ref(tf.GraphKeys.SUMMARIES)
      collected[-len(summaries) :] = _readable(summaries, skipped_ops)
    applied = control_flow.after(results, applied)
    merged = tf.raw_ops.Merge(inputs=[skipped, applied]).output
  gated_ops(graph).merges.add(merged.op)
  return merged


def pass_unless(
  skip: tf.Tensor, tensors: Sequence[tf.Tensor], scopes: Sequence[str], name: str
) -> List[tf.Tensor]:
  """Returns tensors of the same values, which are not computed in a run in which `skip`
  is True; neither is what derives from them.

  `skip` is a scalar bool tensor. `scopes` are the full name scopes of the new ops, one
  for each tensor, and `name` is the last part of their names.

  It copies nothing. Graph optimizers do not move ops across it (outside of control
  flow), so the last bit of a result does not depend on what is before; and no fed
  tensor replaces the condition, as it can replace a control input.
  """
  gated = gated_ops(tf.get_default_graph())
  results = []
  for tensor, scope in zip(tensors, scopes):
    with tf.name_scope(scope + "/"):
      passed = _passed_unless(skip, tensor, name)
    gated.passed.add(passed.op)
    results.append(passed)
  return results


def _passed_unless(skip: tf.Tensor, tensor: tf.Tensor, name: str) -> tf.Tensor:
  """Returns one tensor of `pass_unless`: the first output of its op, as which
  TensorFlow's loops read a tensor that they wait for.
  """
  graph = tf.get_default_graph()
  with graph.colocate_with(tensor.op, ignore_existing=True):
    if graph_internals.context_of(graph) is None:
      return tf.raw_ops.Switch(data=tensor, pred=skip, name=name).output_false
    # TensorFlow differentiates a Switch in a loop or a branch as one of theirs.
    applied, _ = control_flow.pivots(skip, tf.logical_not(skip))
    with tf.control_dependencies([applied]):
      return tf.identity(tensor, name)


def gated_ops(graph: tf.Graph) -> GatedOps:
  """Returns the record of what the gates of a graph may skip."""
  return records.record_in(graph, "gated", GatedOps)


def _readable(
  summaries: List[tf.Tensor], skipped: Container[tf.Operation]
) -> List[tf.Tensor]:
  """Returns the summaries as tensors that are empty if they are not computed; drops
  those inside control flow.
  """
  readable: List[tf.Tensor] = []
  if contexts.is_in_control_flow():
    return readable
  for summary in summaries:
    if contexts.is_in_branches_only(summary.op):
      may_be_dead = summary.op in skipped
      readable.append(dead_tensors.merge_out_of_branches(summary, b"", may_be_dead))
  return readable


def _add_edges(
  new: Set[tf.Operation],
  ends: List[Element],
  predicate: tf.Operation,
  applied: tf.Operation,
  built_before: int,
) -> Set[tf.Operation]:
  """Makes ops wait for `applied`: see `gate`.

  An op whose control input is not computed does not run, and neither does what reads
  it. Exceptions are Merge, which needs one of its inputs only, and the body of a loop,
  whose ops wait for nothing outside: all inputs of the loop do.

  No edge of the program replaces one to `applied`: graph optimizers turn data that does
  not matter into control, and remove control edges.

      for op in the ops that `ends` need, inputs first:
        if op changes state, or begins a loop: it gets the control input, so it waits
        elif pass_unless made op, or op reads a tensor that is not computed:
          it waits; if it calls a function, it gets the control input, too
      record the ops that may be skipped, with `predicate`
      let the ops of `new` that `ends` do not need read the gradients as they are

  Args:
    new: the ops that were built.
    ends: the results of `build`, and the summaries and update ops that it collected; a
      run computes any of them.
    predicate: the op that computes the predicate of the gate.
    applied: an op that runs if the predicate is True.
    built_before: the number of ops that the graph had before `new`.

  Returns:
    All ops that may not run if the predicate is False. A Merge is one of them also if
    only one of its inputs is, although it runs with another.
  """
  graph = tf.get_default_graph()
  frame = contexts.loop_around(graph_internals.context_of(graph))
  gated = gated_ops(graph)
  needed = _needed(ends, new)
  _check_reads(needed, ends, new, predicate, graph)
  calls = effects.call_types(needed, graph)
  must_wait = effects.changing(needed, calls, graph)
  must_wait.update(op for op in needed if _begins_loop_of(op, new))
  waiting: Set[tf.Operation] = set()
  for op in needed:
    waits = op in gated.passed or _waits_for_data(op, waiting)
    # A call runs ops of its functions that do not read what is not computed, but none
    # if a control input is not.
    needs_edge = op in must_wait or (waits and op.type in calls)
    # An op in another loop cannot wait for `applied`.
    if needs_edge and contexts.loop_around_inputs(op) is frame:
      graph_internals.add_control_input(op, applied)
      waits = True
    if waits:
      waiting.add(op)
  skipped = _skipped(needed, waiting, gated)
  if not gated.predicates:
    gated.built_before = built_before
  gated.predicates.update(dict.fromkeys(skipped, predicate))
  _bypass_switches(new - needed.keys(), gated.passed)
  return skipped


def _bypass_switches(ops: Set[tf.Operation], passed: Set[tf.Operation]) -> None:
  """Makes ops that are not part of the step read gradients as they are, not as they
  were `passed`: they run in skipped steps, too, so that the program can fetch them.
  """
  for op in ops - passed:
    for index, tensor in enumerate(op.inputs):
      if tensor.op in passed:
        graph_internals.replace_input(op, index, tensor.op.inputs[0])


def _waits_for_data(op: tf.Operation, waiting: Set[tf.Operation]) -> bool:
  """Returns whether `op` reads what ops that wait compute: one of its inputs, or all of
  a Merge. The Merge at the beginning of a loop runs with the input of the loop.
  """
  read = [tensor.op for tensor in op.inputs]
  if op.type not in contexts.MERGES:
    return not waiting.isdisjoint(read)
  if _begins_iteration(op):
    del read[1:]
  return waiting.issuperset(read)


def _begins_iteration(op: tf.Operation) -> bool:
  """Returns whether `op` is the Merge at the beginning of a loop (control flow v1)."""
  if op.type not in contexts.MERGES:
    return False
  return op.inputs[-1].op.type in contexts.NEXT_ITERATIONS


def _skipped(
  needed: _Reads, waiting: Set[tf.Operation], gated: GatedOps
) -> Set[tf.Operation]:
  """Returns the needed ops that wait, are in a cluster with one that does, or may not
  run because of these.
  """
  clusters = set()  # XLA runs a cluster as one op.
  for op in waiting:
    if graph_internals.context_of(op) is not None:
      clusters.add(contexts.compiled_around(op))
  clusters.discard(None)
  skipped = set(waiting)
  if clusters:
    skipped.update(op for op in needed if contexts.compiled_around(op) in clusters)
  return _with_readers(skipped, needed, gated)


def _with_readers(
  skipped: Set[tf.Operation], needed: _Reads, gated: GatedOps
) -> Set[tf.Operation]:
  """Returns `skipped` and those of `needed` that may not run if `skipped` do not: also
  a Merge of which one input may be computed.
  """
  found = set(skipped)
  found_before = -1
  while len(found) > found_before:  # again for what a loop reads in its body
    found_before = len(found)
    for op, reads in needed.items():
      runs_always = op.type == "ControlTrigger" or op in gated.merges
      if not runs_always and not found.isdisjoint(reads):
        found.add(op)
  return found


def check_reads(ends: List[Element], built_before: int) -> None:
  """Raises a ValueError if something without a gate depends on an op that a gate may
  skip: it would not run if that step is skipped.

  Args:
    ends: ops and tensors of the current graph. In a function, they are not read: all
      that the function captures of a plain graph is checked.
    built_before: the number of ops that the graph had before the first that belongs to
      `ends`.
  """
  around = graphs.enclosing_graphs()
  if not around:  # eager mode
    return
  *functions, graph = around
  new: Set[tf.Operation] = set()
  if functions:
    ends = _captured_of(graph, functions)
  else:
    new.update(graph.get_operations()[built_before:])
  _check_reads(_needed(ends, new), ends, new, None, graph)


def _captured_of(graph: tf.Graph, functions: List[tf.Graph]) -> List[tf.Tensor]:
  """Returns the tensors of a graph that functions capture."""
  found: List[tf.Tensor] = []
  for function in functions:
    for tensor, _ in function.captures:
      if graphs.graph_of(tensor) is graph:
        found.append(tensor)
  return found


def _check_reads(
  needed: _Reads,
  ends: List[Element],
  new: Set[tf.Operation],
  predicate: Optional[tf.Operation],
  graph: tf.Graph,
) -> None:
  """Raises a ValueError if one of `ends`, or an op that they need, depends on an op
  that a gate with another predicate may skip.
  """
  gated = gated_ops(graph)
  others = {op for op, its in gated.predicates.items() if its is not predicate}
  if not others:
    return
  read = [_op_of(end) for end in ends]
  for reads in needed.values():
    read += reads
  outside = [op for op in read if op not in new]
  later = graph.get_operations()[gated.built_before :]
  skipped = _with_readers(others, _needed(outside, set(later)), gated)
  for op in outside:
    if op in skipped:
      raise ValueError(
        "A step must not use {} ({}), which an earlier apply_gradients() built, or "
        "which derives from what it built: it is not computed if that step is skipped, "
        "because it changes state, is computed in a loop, or derives from the "
        "gradients of that step. Build it before both, or once in each.".format(
          op.name, op.type
        )
      )


def _begins_loop_of(op: tf.Operation, new: Set[tf.Operation]) -> bool:
  """Returns whether `op` is an input of a loop (control flow v1) of `new` ops."""
  if op.type not in contexts.ENTERS:
    return False
  loop = contexts.loop_around(graph_internals.context_of(op))
  return loop is None or loop.pivot.op in new


def _op_of(element: Element) -> tf.Operation:
  """Returns an op itself; of a tensor, the op that computes it."""
  return element if isinstance(element, tf.Operation) else element.op


def _needed(ends: List[Element], among: Set[tf.Operation]) -> _Reads:
  """Returns the ops of `among` that ops or tensors need, inputs first, each with what
  it reads or waits for.

  Those are the ops of its inputs and its control inputs, in `among` or not. For a
  Merge, they are only its inputs, of which it needs one: its
  control inputs are needed, too, but not noted.

  It is written without recursion, since a graph may be deeper than Python's recursion
  limit:

      visit(op):
        if op is in `among`, and is visited for the first time:
          visit all that it reads or waits for, later what the next iteration computes
          needed[op] = what it reads
  """
  needed: _Reads = {}
  seen: Set[tf.Operation] = set()
  # Ops to visit; with what they read, once all of that was visited.
  pending: List[Tuple[tf.Operation, Optional[List[tf.Operation]]]] = []
  pending += [(_op_of(end), None) for end in ends]
  while pending:
    op, reads = pending.pop()
    if reads is not None:
      needed[op] = reads
      continue
    if op in seen or op not in among:
      continue
    seen.add(op)
    inputs = [tensor.op for tensor in op.inputs]
    controls = list(op.control_inputs)
    first = inputs + controls
    if _begins_iteration(op):
      # The last input is visited last: it is computed in the loop, from this Merge.
      first.remove(inputs[-1])
      pending.insert(0, (inputs[-1], None))
    reads = inputs if op.type in contexts.MERGES else inputs + controls
    pending.append((op, reads))
    pending += [(read, None) for read in first]
  return needed
