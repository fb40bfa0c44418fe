# SPDX-License-Identifier: Apache-2.0
"""Observes how steps of optimizers are built, so that graphs record them (`steps`).

A call of `apply_gradients` is one step, and so is each call of this package that
applies a part of one. While a step is being built, the methods that decide whether it
is applied are observed, too.
"""

import functools
import types
from typing import Any, Callable, List, Optional, Set, Tuple

from mp_compat._tensorflow import autograph
from mp_compat._tensorflow import graph_internals
from mp_compat._tensorflow import tf
from mp_compat._tensorflow import trackable
from mp_compat.graph import contexts
from mp_compat.graph import graphs
from mp_compat.tools.compare import servers
from mp_compat.tools.compare import steps
from mp_compat.tools.compare.steps import BuiltStep

_Function = Callable[..., Any]
_ScalesLoss = Callable[[trackable.Trackable], bool]
_Know = Callable[[steps.KnownStep], object]


def _ignore(step: steps.KnownStep) -> None:
  """Does nothing."""


def observe_optimizers(scales_loss: _ScalesLoss, know: _Know = _ignore) -> None:
  """Makes graphs record what `apply_gradients` of each optimizer builds, Keras's
  included; calls `know` with each step.

  Classes that are defined later are observed, too. In control flow, it adds an op that
  tells when a step runs.

  Args:
    scales_loss: `scales_loss(optimizer)` returns whether an optimizer scales the loss;
      called before each `apply_gradients` in a graph.
    know: gets each step when it is built, by names.
  """
  base: Any = trackable.Trackable

  def observe_class(cls: Any) -> None:
    """Replaces `apply_gradients` of a class, if it defines a step."""
    if _defines_step(cls):
      cls.apply_gradients = _recording(cls.apply_gradients, scales_loss, know)

  def observe_subclass(cls: Any, **kwargs: object) -> None:
    """Replaces `__init_subclass__`, which Python calls for each later class."""
    super(base, cls).__init_subclass__(**kwargs)
    observe_class(cls)

  for cls in _with_subclasses(base):
    observe_class(cls)
  base.__init_subclass__ = classmethod(observe_subclass)  # type: ignore[arg-type]


def _with_subclasses(cls: type) -> Set[type]:
  """Returns a class and all classes that derive from it."""
  found = {cls}
  subclass: type
  for subclass in type.__subclasses__(cls):
    found |= _with_subclasses(subclass)
  return found


def _defines_step(cls: type) -> bool:
  """Returns whether a class is an optimizer with an `apply_gradients` that no observed
  class has: its own, or that of a mixin.

  An `apply_gradients` that the class inherits from another observed class is recorded
  there, and would otherwise be recorded twice.
  """
  for definer in cls.__mro__:
    if "apply_gradients" not in vars(definer):
      continue
    if definer is not cls and issubclass(definer, trackable.Trackable):
      return False  # It is inherited, and recorded in that class.
    is_method = isinstance(vars(definer)["apply_gradients"], types.FunctionType)
    return is_method and hasattr(cls, "minimize")
  return False


def _recording(apply: _Function, scales_loss: _ScalesLoss, know: _Know) -> _Function:
  """Returns a wrapper of `apply_gradients` that records what it builds in a graph.

  In eager mode, it only calls `apply_gradients`.

  Args:
    apply: the `apply_gradients` of a class of optimizers.
    scales_loss: see `observe_optimizers`.
    know: see `observe_optimizers`.
  """

  @autograph.do_not_convert
  @functools.wraps(apply)
  def apply_and_record(
    self: trackable.Trackable, grads_and_vars: Any, *args: object, **kwargs: object
  ) -> object:
    if graphs.init_scope_graph() is None:
      return apply(self, grads_and_vars, *args, **kwargs)
    pairs = list(grads_and_vars)
    is_scaled = scales_loss(self)
    build = functools.partial(apply, self, pairs, *args, **kwargs)
    return _record(pairs, is_scaled, [], build, know)

  return apply_and_record


def observe_parts(
  owner: object,
  method: str,
  part_of: Callable[..., Tuple[List[Any], object]],
  know: _Know,
) -> None:
  """Makes graphs record what a function of `owner` builds that applies a part of a step
  with loss scaling; calls `know` with each.

  Args:
    owner: the module, or class, that has the function.
    method: the name of the function.
    part_of: gets the arguments of the function; returns pairs of gradients and
      variables, and whether to apply them: a scalar bool tensor, or a bool.
    know: gets each step when it is built, by names.
  """
  apply = vars(owner)[method]

  @functools.wraps(apply)
  def apply_and_record(*args: Any, **kwargs: Any) -> object:
    if graphs.init_scope_graph() is None:
      return apply(*args, **kwargs)
    pairs, should_apply = part_of(*args, **kwargs)
    build = functools.partial(apply, *args, **kwargs)
    return _record(pairs, True, [should_apply], build, know)

  setattr(owner, method, apply_and_record)


def _record(
  pairs: List[Any],
  is_scaled: bool,
  decisions: List[object],
  build: Callable[[], object],
  know: _Know,
) -> object:
  """Returns `build()`, and records it as a step that applies gradients to the variables
  of `pairs` if `decisions` and those made meanwhile are True.

      step.decisions = those of the steps around this one, and `decisions`
      result = build()            inner steps, and observed decisions, are recorded
      step.ops = ops in result, and the mark, which runs before those ops

  The step is open during `build()`: `observe_decisions` adds to open steps, and a step
  that `build` records finds the decisions of this one. If `build` fails, nothing is
  recorded of this step.

  Args:
    pairs: gradients, some None, and variables.
    is_scaled: whether the optimizer scales the loss.
    decisions: what decides whether the step is applied; only tensors count.
    build: calls the observed function, with its arguments.
    know: gets the step, by names.
  """
  graph = graphs.init_scope_graph()
  pairs = [(grad, variable) for grad, variable in pairs if grad is not None]
  names = [variable.name.rpartition(":")[0] for _, variable in pairs]
  step = BuiltStep(names, is_scaled, is_called=graph is not tf.get_default_graph())
  open_steps = steps.open_steps_in(graph)
  for around in open_steps:  # They skip this step, too.
    step.decisions.update(around.decisions)
  step.add_decisions(decisions)
  open_steps.append(step)
  try:
    result = build()
  finally:
    open_steps.remove(step)
  mark = _mark(step, [grad for grad, _ in pairs])
  for element in tf.nest.flatten(result):
    op = getattr(element, "op", element)
    if isinstance(op, tf.Operation):
      step.ops.add(op)
      if mark is not None and _place(op) == _place(mark):
        graph_internals.add_control_input(op, mark)
  steps.steps_in(graph).append(step)
  know(step.named(graph))
  return result


def _place(op: tf.Operation) -> Tuple[tf.Graph, contexts.Context]:
  """Returns the graph and the control-flow context of an op."""
  return op.graph, graph_internals.context_of(op)


def _mark(step: BuiltStep, grads: List[Any]) -> Optional[tf.Operation]:
  """Returns an op that tells that a step runs and whether it is applied, built in the
  current branch, loop or function.

      mark(first number of a gradient, decisions):
        step.told += [whether all decisions are True]     None if they are not readable

  What a run executes does not show whether such a step ran, or how often: `told` does.

  Args:
    step: the step, with its decisions; the mark is added to its ops.
    grads: its gradients.

  Returns:
    The op. None outside of control flow, where a run shows it, and in code that XLA
    compiles, which cannot contain such an op.
  """
  if not contexts.is_in_control_flow() or _is_compiled():
    return None
  decisions = list(step.decisions.values())
  are_readable = _are_readable(decisions)
  if not are_readable:
    decisions = []

  def tell(*values: Any) -> None:
    """Notes an execution; the last `values` are those of `decisions`."""
    applied = None
    if are_readable:
      applied = all(values[len(values) - len(decisions) :])
    step.told.append(applied)

  # The function is of this process, and other devices may have no kernel for it.
  with tf.device("/device:CPU:0"), tf.name_scope("step_runs"):
    mark = tf.py_func(tell, _first_number(grads) + decisions, [], name="tell")
  servers.add_local(mark)
  step.ops.add(mark)
  step.is_marked = True
  return mark


def _is_compiled() -> bool:
  """Returns whether XLA compiles ops that are built now."""
  for graph in graphs.enclosing_graphs():
    for context in contexts.enclosing(graph_internals.context_of(graph)):
      if context.IsXLAContext():
        return True
  return False


def _first_number(grads: List[Any]) -> List[tf.Tensor]:
  """Returns a list of the first number of a gradient, of shape [1], or [0] if it is
  empty; [] if no gradient is a tensor.

  A mark has such an input, so that it runs only if the step does: if TensorFlow inlines
  a function that is not called, its ops without input run, and ops such as Size and
  Shape become constants.
  """
  for grad in grads:
    values = grad
    if isinstance(grad, tf.IndexedSlices):
      values = grad.values
    if tf.is_tensor(values):
      return [tf.reshape(values, [-1])[:1]]
  return []


def _are_readable(tensors: List[tf.Tensor]) -> bool:
  """Returns whether ops that are built now can read all tensors."""
  enclosing = list(graphs.enclosing_graphs())
  for tensor in tensors:
    if tensor.graph not in enclosing or not contexts.is_readable(tensor):
      return False
  return True


def observe_decisions(
  owner: object, method: str, decisions_of: Callable[[Any, Any], List[Any]]
) -> None:
  """Makes graphs record whether steps are applied.

  What further observed methods return that it calls does not count: their decisions
  are replaced by that of the outermost one.

  Args:
    owner: the class or module that has the method.
    method: the name of a method or function that decides.
    decisions_of: `decisions_of(argument, result)` returns the decisions, from the last
      argument of the method and its result, for the steps with loss scaling that are
      being built.
  """
  decide = vars(owner)[method]
  if "is_observed" in vars(decide):
    return

  @functools.wraps(decide)
  def decide_and_record(*args: Any, **kwargs: Any) -> Any:
    """Calls the method, and then sets the decisions of the open steps: to those of
    before the call, and those of `decisions_of`.
    """
    graph = graphs.init_scope_graph()
    if graph is None:
      return decide(*args, **kwargs)
    scaled = [step for step in steps.open_steps_in(graph) if step.is_scaled]
    before = [dict(step.decisions) for step in scaled]
    result = decide(*args, **kwargs)
    decisions = decisions_of(args[-1], result)
    for step, earlier in zip(scaled, before):
      step.decisions = earlier
      step.add_decisions(decisions)
    return result

  decide_and_record.is_observed = True  # type: ignore[attr-defined]
  setattr(owner, method, decide_and_record)
