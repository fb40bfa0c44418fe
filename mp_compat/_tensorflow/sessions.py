# SPDX-License-Identifier: Apache-2.0
"""Observes the runs of all sessions, finds the variables that a run may change, and makes op seeds repeatable."""

import itertools
import threading
from typing import Any, Callable, Dict, FrozenSet, Iterable, Iterator, List, NamedTuple

from tensorflow.python.client import session as session_module
from tensorflow.python.eager import imperative_grad
from tensorflow.python.framework import random_seed  # pyright: ignore[reportAttributeAccessIssue]
from tensorflow.python.ops import gradients_util

from mp_compat._tensorflow import control_flow
from mp_compat._tensorflow import graphs
from mp_compat._tensorflow import tf

_VARIABLES = ("VarHandleOp", "Variable", "VariableV2")
_READS = ("ReadVariableOp", "ResourceGather", "ResourceGatherNd")
_QUERIES = ("VarIsInitializedOp", "IsVariableInitialized", "VariableShape", "DisableCopyOnRead")
_ASSIGNMENTS = ("Assign", "AssignVariableOp")  # of initializers and of Saver.restore


class Effects(NamedTuple):
  """What a run may do to variables; local variables and metrics do not count."""

  written: FrozenSet[str]  # the names of the variables' ops
  gated: FrozenSet[str]  # those that ops behind a gate, or inside a conditional or a loop, may write
  trains: bool  # whether new values may depend on old ones; False for initializers and Saver.restore


def observe(around: Callable[[Any, List[Any], Callable[[], Any]], Any]) -> None:
  """Makes each run of any session call `around(session, elements, run)`, with the ops and tensors that it runs.

  `around` calls `run()` and returns its result. Runs of the same session in it are not observed.
  """
  base, inside = session_module.BaseSession, threading.local()
  do_run, make_callable, from_options = base._do_run, base.make_callable, base._make_callable_from_options

  def call(sess: Any, elements: List[Any], run: Callable[[], Any]) -> Any:
    outer = getattr(inside, "session", None)
    if outer is sess:
      return run()
    inside.session = sess
    try:
      return around(sess, elements, run)
    finally:
      inside.session = outer

  def observed_do_run(self: Any, handle: Any, targets: Any, fetches: Any, *args: Any) -> Any:
    return call(self, [*targets, *fetches], lambda: do_run(self, handle, targets, fetches, *args))

  def observed_make_callable(self: Any, fetches: Any, *args: Any, **kwargs: Any) -> Any:
    run, elements = make_callable(self, fetches, *args, **kwargs), graphs.fetched_elements(self.graph, fetches)
    return lambda *values, **options: call(self, elements, lambda: run(*values, **options))

  def observed_from_options(self: Any, options: Any) -> Any:  # Keras calls this
    run = from_options(self, options)
    elements = [self.graph.as_graph_element(name) for name in [*options.target, *options.fetch]]
    return lambda *values, **keywords: call(self, elements, lambda: run(*values, **keywords))

  base._do_run, base.make_callable = observed_do_run, observed_make_callable
  base._make_callable_from_options = observed_from_options


def on_eager_gradients(report: Callable[[], None]) -> None:
  """Calls `report()` whenever gradients are computed in eager mode, or in a function that eager code calls."""

  def reporting(compute: Callable[..., Any]) -> Callable[..., Any]:
    def compute_and_report(*args: Any, **kwargs: Any) -> Any:
      if graphs.init_scope_graph() is None:
        report()
      return compute(*args, **kwargs)

    return compute_and_report

  imperative_grad.imperative_grad = reporting(imperative_grad.imperative_grad)
  gradients_util._GradientsHelper = reporting(gradients_util._GradientsHelper)


def make_seeds_repeatable() -> None:
  """Gives each op without a seed the number of its call in the graph, not that of its op, and always a graph seed."""
  get_seed, eager_seeds = random_seed.get_seed, itertools.count()

  def get_repeatable_seed(op_seed: Any) -> Any:
    graph = graphs.init_scope_graph()
    if op_seed is None:
      op_seed = next(graphs.record_in(graph, "op_seeds", itertools.count) if graph is not None else eager_seeds)
    return get_seed(op_seed)

  random_seed.get_seed = get_repeatable_seed


def effects(graph: tf.Graph, elements: Iterable[Any]) -> Effects:
  """Returns what a run of ops and tensors may do to variables, from the ops that it executes."""
  local, written, gated, trains = _local_names(graph), set(), set(), False
  for op in graphs.executed_ops(elements):
    for index, handle in enumerate(op.inputs):
      if not _is_handle(handle) or op.type in _QUERIES:
        continue
      names = {source.name for source in _variables_behind(handle)} - local
      if not _may_write(op, index):
        trains |= bool(names) and not any(_is_handle(tensor) for tensor in op.outputs)
      else:
        written |= names
        in_branch = op.type.endswith(("If", "While")) or op._get_control_flow_context() is not None
        gated |= names if in_branch or control_flow.is_gated(op) else set()
        trains |= bool(names) and op.type not in _ASSIGNMENTS
  # Keras's metrics are in no collection, and in a graph without collections this is true of all variables.
  global_names = _names_in(graph, tf.GraphKeys.GLOBAL_VARIABLES) or written
  return Effects(frozenset(written), frozenset(gated), trains and not written.isdisjoint(global_names))


def variable_values(graph: tf.Graph) -> Dict[str, tf.Tensor]:
  """Returns the existing tensors that read the variables of a graph, by name; without variables that none reads."""
  local = _local_names(graph)
  tensors = {}
  for op in graph.get_operations():
    if op.type in _VARIABLES and op.name not in local:
      reads = [op] if op.type != "VarHandleOp" else [read for read in op.outputs[0].consumers() if _only_reads(read)]
      if reads:
        tensors[op.name] = reads[0].outputs[0]
  return tensors


def read(sess: Any, tensors: Dict[str, tf.Tensor]) -> Dict[str, Any]:
  """Returns the values of variables by name, without those that are not initialized."""
  try:
    return session_module.BaseSession.run(sess, tensors)
  except (tf.errors.FailedPreconditionError, tf.errors.NotFoundError):
    names = list(tensors)
    halves = [names[: len(names) // 2], names[len(names) // 2 :]] if len(names) > 1 else []
    values = [read(sess, {name: tensors[name] for name in half}) for half in halves]
    return {name: value for part in values for name, value in part.items()}


def _local_names(graph: tf.Graph) -> FrozenSet[str]:
  return _names_in(graph, tf.GraphKeys.LOCAL_VARIABLES, tf.GraphKeys.METRIC_VARIABLES)


def _names_in(graph: tf.Graph, *collections: str) -> FrozenSet[str]:
  return frozenset(variable.name.rpartition(":")[0] for key in collections for variable in graph.get_collection(key))


def _is_handle(tensor: tf.Tensor) -> bool:
  return tensor.dtype == tf.resource or tensor.dtype._is_ref_dtype


def _variables_behind(handle: tf.Tensor) -> Iterator[tf.Operation]:
  """Yields the ops of the variables that a resource or reference may refer to, through conditionals and loops."""
  seen, pending = set(), [handle.op]
  while pending:
    op = pending.pop()
    if op.type in _VARIABLES:
      yield op
    elif op not in seen:
      seen.add(op)
      pending += [tensor.op for tensor in op.inputs if _is_handle(tensor)]


def _may_write(op: tf.Operation, index: int) -> bool:
  """Returns whether an op may change the variable behind an input; before TensorFlow 2.3, functions always may."""
  if op.inputs[index].dtype != tf.resource:
    return any(argument.is_ref for argument in op.op_def.input_arg) and not op.type.startswith("Ref")
  try:
    if index in op.get_attr("_read_only_resource_inputs"):  # Conditionals, loops and functions have it.
      return False
  except ValueError:
    pass
  return op.type not in (*_READS, "Enter", "Exit", "Identity", "IdentityN", "Merge", "NextIteration", "Switch")


def _only_reads(op: tf.Operation) -> bool:
  return op.type == "ReadVariableOp" and not op.control_inputs and op._get_control_flow_context() is None
