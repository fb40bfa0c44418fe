# SPDX-License-Identifier: Apache-2.0
"""What optimizers keep in a graph: the steps that they built, for the steps after them
and for observers (`mp_compat.monitoring`), and the scales that they read.
"""

import dataclasses
from typing import Iterable, List, NamedTuple, Optional, Set, Tuple, Union

from mp_compat._tensorflow import tf
from mp_compat.core import gradients
from mp_compat.core.lineage import Lineage
from mp_compat.graph import contexts
from mp_compat.graph import graphs
from mp_compat.graph import records

ShouldApply = Union[bool, tf.Tensor]


class Step(NamedTuple):
  """The record of a step: what `apply_gradients` built for one optimizer.

  Attributes:
    train_op: The op that applies or skips the step; None in eager mode.
    gradients: The gradients that were passed in, of each local replica, and their
      variables' names; empty in eager mode.
    lineages: What the gradients of each local replica derive from; empty in eager mode.
    finite: Whether all gradients are finite: see `Decision`.
    applied: Whether the step is applied: see `decide`.
    reads: The keys of tensors that ops of the inner optimizer derive from, no further
      back than `own` and the `results` of earlier steps; empty in eager mode.
  """

  train_op: tf.Operation
  gradients: List[Tuple[gradients.Gradient, str]]
  lineages: Tuple[Lineage, ...]
  finite: Optional[tf.Tensor]
  applied: ShouldApply
  reads: Set[contexts.TensorKey]

  def own(self) -> Set[contexts.TensorKey]:
    """Returns the keys of its gradients, and of the computed ones that they derive
    from.
    """
    own = gradients.values_of([grad for grad, _ in self.gradients])
    for one in self.lineages:
      own += [computed.values for computed in one.computed]
    return contexts.keys_of(own)

  def results(self) -> Set[contexts.TensorKey]:
    """Returns the keys of the tensors that tell whether it is finite, or applied."""
    results = (self.finite, self.applied)
    return contexts.keys_of(each for each in results if tf.is_tensor(each))


@dataclasses.dataclass
class OptimizerState:
  """What a MixedPrecisionLossScaleOptimizer keeps in a graph.

  Attributes:
    scales: The loss scales that `scale_loss` read in this graph, in order; float32
      scalars.
    has_scaled: Whether `scale_loss` was called in this graph, or in a function inside
      of it.
    has_unscaled: Whether gradients were unscaled in this graph, or in a function inside
      of it.
    steps: The steps in this graph and in functions inside of it; in eager mode only the
      last one.
  """

  scales: List[tf.Tensor] = dataclasses.field(default_factory=list)
  has_scaled: bool = False
  has_unscaled: bool = False
  steps: List[Step] = dataclasses.field(default_factory=list)


def state_of(
  optimizer: tf.train.Optimizer, graph: Optional[tf.Graph]
) -> OptimizerState:
  """Returns what an optimizer keeps in a graph; None is eager mode."""
  return records.state_of(optimizer, graph, OptimizerState)


def add(optimizers_of_replicas: Iterable[tf.train.Optimizer], step: Step) -> None:
  """Records a step of each optimizer, in the current graph and in the graph that a
  Session runs; in eager mode, in place of the step before.

  A step that is built in a function is thus in two records: ops in the function can
  read its tensors, and observers of the Session find it. A function that eager code
  calls has no such Session.
  """
  current, outermost = graphs.default_graph(), graphs.init_scope_graph()
  recording = {current, outermost}
  if outermost is None:  # a function that eager code calls
    recording = {current}
  for graph in recording:
    for optimizer in optimizers_of_replicas:
      steps = state_of(optimizer, graph).steps
      if step.train_op is None:
        steps.clear()
      steps.append(step)
  if current is not None:
    _steps_in(current).append(step)


def steps_of(optimizer: tf.train.Optimizer) -> List[Step]:
  """Returns the steps of the optimizer in the current graph and in functions inside of
  it, the newest last.
  """
  return list(state_of(optimizer, graphs.default_graph()).steps)


def earlier_steps() -> List[Step]:
  """Returns the steps of all optimizers in the current graph, the newest last; [] in
  eager mode.
  """
  graph = graphs.default_graph()
  return [] if graph is None else list(_steps_in(graph))


def _steps_in(graph: tf.Graph) -> List[Step]:
  """Returns the record of the steps that were built in a graph."""
  return records.record_in(graph, "built_steps", list)
