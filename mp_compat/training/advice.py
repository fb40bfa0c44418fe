# SPDX-License-Identifier: Apache-2.0
"""Warnings for programs that probably use an optimizer wrongly.

Nothing in a step depends on them: without these calls, each value is the same.
"""

from typing import Dict, Iterable, List, Optional, Sequence, Set

from mp_compat._tensorflow import native
from mp_compat._tensorflow import tf
from mp_compat.core import gradients
from mp_compat.core import loss_scale
from mp_compat.core import naming_schemes
from mp_compat.graph import contexts
from mp_compat.graph import graphs
from mp_compat.graph import records
from mp_compat.training import recorded

# The modules whose functions multiply the loss of a callable by a loss scale.
_SCALING_MODULES = {gradients.__name__}.union(
  cls.__module__ for cls in native.LOSS_SCALE_OPTIMIZERS
)
# The ops that pass on the value of a variable.
_READS = ("Cast", "Enter", "Identity", "Placeholder", "ReadVariableOp", "Switch")


def on_loss(optimizer: tf.train.Optimizer, loss: gradients.Loss) -> None:
  """Logs a warning for a loss that is passed to `compute_gradients` and is scaled
  already.
  """
  if _is_scaled(loss):
    records.warn_once(
      optimizer,
      "The loss passed to %s seems to be scaled already: it is a product with a loss "
      "scale. If another optimizer that scales the loss wraps this one, remove one "
      "of the two. If scale_loss() was called, call tf.gradients() and "
      "unscale_gradients() instead of compute_gradients().",
      optimizer.get_name(),
    )


def _is_scaled(loss: gradients.Loss) -> bool:
  """Returns whether a loss is the product of another loss and a loss scale.

  The product as a callable is recognized by the module that made the callable; as a
  tensor, by the name of the loss scale's variable. A tensor scaled by a fixed scale is
  not recognized.
  """
  if callable(loss):
    return getattr(loss, "__module__", None) in _SCALING_MODULES
  if graphs.graph_of(loss) is None or loss.op.type != "Mul":
    return False
  for source in contexts.search_back(loss.op.inputs, _read_by):
    is_candidate = naming_schemes.is_state_name(source.op.name)
    if is_candidate and source.op.name in _state_in(source.graph):
      return True
  return False


def _state_in(graph: tf.Graph) -> Set[str]:
  """Returns the names of the variables in a graph that are those of loss scales: of
  this package, or recognized by their names (`naming_schemes.state`).
  """
  own = loss_scale.state_names(graph)
  shapes: Dict[str, Sequence[int]] = {}
  for op in graph.get_operations():
    is_variable = op.type in ("VarHandleOp", "VariableV2") and op.name not in own
    if is_variable and naming_schemes.is_state_name(op.name):
      shape = tf.TensorShape(op.get_attr("shape"))
      shapes[op.name] = [-1] if shape.ndims is None else shape.as_list()
  return own.union(naming_schemes.state(shapes))


def _read_by(tensor: tf.Tensor) -> List[tf.Tensor]:
  """Returns the tensor of which a tensor is a read or a copy, as a list of one; else
  [].
  """
  if tensor.op.type not in _READS:
    return []
  return contexts.tensor_inputs(tensor)[:1]


def on_step(optimizer: tf.train.Optimizer, step: recorded.Step) -> None:
  """Logs the warnings for a step that was built; called once for all replicas."""
  _on_branch(optimizer, step)
  _on_arguments(optimizer, step)
  _on_scaled_reads(optimizer, step)
  for one in step.lineages:
    # The values of a window and of an accumulator were computed in other runs.
    if one.has_window_means or one.accumulator_takes:
      return
  on_gradients(optimizer, [grad for grad, _ in step.gradients])


def _on_branch(optimizer: tf.train.Optimizer, step: recorded.Step) -> None:
  """Logs a warning for a step in a branch that depends on its own gradients."""
  predicates = contexts.predicates()
  if any(one.is_origin_of(predicates) for one in step.lineages):
    records.warn_once(
      optimizer,
      "%s applies gradients in a branch of tf.cond whose predicate derives from "
      "these gradients, as a check of the program that they are finite does. After "
      "an overflow, the loss scale then never falls, and no step is applied anymore. "
      "Call apply_gradients() outside of the branch: it skips such steps itself.",
      optimizer.get_name(),
    )


def _on_arguments(optimizer: tf.train.Optimizer, step: recorded.Step) -> None:
  """Logs a warning for gradients in which an overflow may be hidden, because it is not
  known what they derive from.
  """
  if not optimizer._mp_compat_settings.check_computed_gradients:
    return
  if any(one.has_gradients_as_arguments() for one in step.lineages):
    records.warn_once(
      optimizer,
      "%s applies gradients that are arguments of a function, or variables of a "
      "loop. What they derive from is unknown: if the program clipped or masked "
      "them, an overflow that this hid is not noticed, and is applied. Let the "
      "function read the gradients that compute_gradients() returned from outside, "
      "or call compute_gradients() in it.",
      optimizer.get_name(),
    )


def _on_scaled_reads(optimizer: tf.train.Optimizer, step: recorded.Step) -> None:
  """Logs a warning for an inner optimizer that reads gradients of the scaled loss."""
  scaled: List[tf.Tensor] = []
  for one in step.lineages:
    for computed in one.computed:
      if computed.scaled is not None:
        scaled.append(computed.scaled)
  if not step.reads.isdisjoint(contexts.keys_of(scaled)):
    records.warn_once(
      optimizer,
      "apply_gradients() of %s reads gradients as its compute_gradients() computed "
      "them. They are multiplied by the loss scale: use the gradients that are passed. "
      "If it does, and differentiates them, as for a Hessian, its numbers are right: "
      "such derivatives read the others, too.",
      type(optimizer.inner_optimizer).__name__,
    )


def on_gradients(
  optimizer: tf.train.Optimizer, grads: Iterable[gradients.Gradient]
) -> None:
  """Logs a warning for gradients that were scaled and not unscaled, or never
  scaled.
  """
  state = recorded.state_of(optimizer, graphs.init_scope_graph())
  if state.has_unscaled:
    return
  is_behind_scale = _is_behind_scale(optimizer, grads)
  if is_behind_scale:
    return
  if state.has_scaled:
    records.warn_once(
      optimizer,
      "%s applies gradients of a loss that scale_loss() multiplied by the loss "
      "scale, but unscale_gradients() was not called: unless the program divides "
      "them by opt.loss_scale(), they are too large by that factor. Apply "
      "opt.unscale_gradients(tf.gradients(opt.scale_loss(loss), variables)).",
      optimizer.get_name(),
    )
  elif is_behind_scale is not None:
    records.warn_once(
      optimizer,
      "%s applies gradients that seem never to have been scaled: they do not derive "
      "from its loss scale in this graph, and neither compute_gradients() nor "
      "unscale_gradients() of this optimizer was called. In float16, small gradients "
      "may have underflowed. Call compute_gradients() of this optimizer, or "
      "opt.unscale_gradients(tf.gradients(opt.scale_loss(loss), variables)).",
      optimizer.get_name(),
    )


def _is_behind_scale(
  optimizer: tf.train.Optimizer, grads: Iterable[gradients.Gradient]
) -> Optional[bool]:
  """Returns whether the program scales or unscales the gradients by itself: whether
  they derive from the loss scale other than by `scale_loss`.

      shared = the ops behind each read of the loss scale, as behind two new ones: the
        variable's handle; or all constants of a fixed scale
      search back from the gradients, no further than the reads of `scale_loss`
      return whether an op of `shared` was found

  Returns None if that is not known: reads share nothing, as those of TensorFlow's
  FixedLossScale; a constant is in a function that is called, which the search does not
  enter; or a gradient is an argument of a function. Returns False in eager mode.
  """
  if tf.executing_eagerly():
    return False
  with tf.name_scope("is_behind_scale"):
    shared = _ops_behind(optimizer._scale()) & _ops_behind(optimizer._scale())
  constants = loss_scale.constants_of(optimizer.loss_scale)
  shared |= constants
  if not shared:
    return None
  scales: List[tf.Tensor] = []
  enclosing = graphs.enclosing_graphs()
  for graph in enclosing:
    scales += recorded.state_of(optimizer, graph).scales
  own = contexts.keys_of(scales)
  values = gradients.values_of(grads)
  found = contexts.search_back_by_key(values, contexts.tensor_inputs, own)
  if any(tensor.op in shared for tensor in found.values()):
    return True
  if any(op.graph not in enclosing for op in constants):
    return None
  if any(contexts.is_argument(value) for value in values):
    return None
  return False


def _ops_behind(tensor: tf.Tensor) -> Set[tf.Operation]:
  """Returns the ops that a tensor derives from, and its own."""
  return {found.op for found in contexts.search_back([tensor], contexts.tensor_inputs)}
