# SPDX-License-Identifier: Apache-2.0
"""Applies the gradients of several optimizers that share one loss scale as one step."""

from typing import Iterable, List, Optional, Tuple

from mp_compat._tensorflow import autograph
from mp_compat._tensorflow import tf
from mp_compat.core import arguments
from mp_compat.core import distribute
from mp_compat.core import gradients
from mp_compat.core.lineage import Lineage
from mp_compat.graph import control_flow
from mp_compat.training import step
from mp_compat.training.optimizer import MixedPrecisionLossScaleOptimizer

OptimizerAndGradients = Tuple[
  MixedPrecisionLossScaleOptimizer, Iterable[gradients.GradAndVar]
]


@autograph.do_not_convert
def apply_gradients_together(
  steps: Iterable[OptimizerAndGradients],
  global_step: Optional[tf.Variable] = None,
  skip: str = "all",
  name: str = "apply_together",
) -> Optional[tf.Operation]:
  """Applies the gradients of several optimizers that share a loss scale, and updates
  the loss scale once.

      scale = mp_compat.DynamicLossScale()
      first, second = (
        mp_compat.MixedPrecisionLossScaleOptimizer(opt, scale)
        for opt in (adagrad, adam)
      )
      train_op = mp_compat.apply_gradients_together(
        [
          (first, first.compute_gradients(loss, embeddings)),
          (second, second.compute_gradients(loss, weights)),
        ]
      )

  If each optimizer's `apply_gradients` is called separately, every call updates the
  loss scale. The finite check is reduced with the `finite_reducer` of the first
  optimizer that has one. Returns one op; None in eager mode.

  Args:
    steps: pairs of a MixedPrecisionLossScaleOptimizer and its `(gradient, variable)`
      pairs.
    global_step: a variable to increment by one if any gradients are applied. The step
      of each `tf.ConditionalAccumulator` that gradients were taken from is then set to
      it: an accumulator drops gradients of earlier steps, and a skipped step does not
      count as one. Without `global_step`, the program sets the accumulators' steps.
    skip: which steps to skip if gradients are not finite: those of "all" optimizers, or
      that of "each" optimizer with such gradients. In both cases, the loss scale is
      updated as for a step that is not finite.
    name: the name of the op.

  Raises:
    ValueError: If there are no steps, they are not pairs, the optimizers do not share
      one loss scale, are the same or were made with `skip_nonfinite=False`, or `skip`
      is another value; see also `MixedPrecisionLossScaleOptimizer.apply_gradients`.
    TypeError: See `MixedPrecisionLossScaleOptimizer.apply_gradients`.
  """
  steps = list(steps)
  _check(steps, skip)
  optimizers = [opt for opt, _ in steps]
  settings = step.Settings.of_shared_step(
    [opt._mp_compat_settings for opt in optimizers]
  )

  @step.collected
  def apply_all(
    parts: List[step.Part], global_step: Optional[tf.Variable]
  ) -> Optional[tf.Operation]:
    decision = step.decide(optimizers[0].loss_scale, parts, settings, skip)
    applied: List[tf.Operation] = []  # empty in eager mode
    for index, part in enumerate(parts):
      op = step.apply(part, decision, index)
      if op is not None:
        applied.append(op)
    if global_step is None:
      return distribute.group(*applied, name=name)
    with tf.control_dependencies(applied):
      counted = control_flow.cond(
        tf.reduce_any(tf.stack(decision.apply)), lambda: _add_one(global_step)
      )
    lineages: List[Lineage] = []
    for part in parts:
      lineages += distribute.local_results(part.lineage)
    accumulators_set = step.set_accumulator_steps(lineages, global_step, counted)
    return distribute.group(*applied, counted, accumulators_set, name=name)

  return distribute.merge_call(
    apply_all, [opt._prepare_step(pairs) for opt, pairs in steps], global_step
  )


def _add_one(global_step: tf.Variable) -> Optional[tf.Operation]:
  """Returns an op that increments the global step of all replicas; None in eager mode,
  where it has been incremented. Called once for all replicas.
  """
  extended = tf.distribute.get_strategy().extended
  return distribute.group(
    extended.update(global_step, lambda variable: tf.assign_add(variable, 1))
  )


def _check(steps: List[OptimizerAndGradients], skip: str) -> None:
  """Raises the ValueErrors of `apply_gradients_together`."""
  if not steps or not all(_is_pair(step_of_one) for step_of_one in steps):
    raise ValueError(
      "Expected pairs of an optimizer and its (gradient, variable) pairs, but got {}. "
      "Pass [(opt, opt.compute_gradients(loss, variables)), ...].".format(steps)
    )
  _check_optimizers([opt for opt, _ in steps])
  arguments.choice("skip", skip, ("all", "each"))


def _is_pair(value: object) -> bool:
  """Returns whether a value is a tuple or a list of two."""
  return isinstance(value, (tuple, list)) and len(value) == 2


def _check_optimizers(optimizers: List[MixedPrecisionLossScaleOptimizer]) -> None:
  """Raises a ValueError for optimizers that cannot share a step."""
  for opt in optimizers:
    is_wrapper = isinstance(opt, MixedPrecisionLossScaleOptimizer)
    if not is_wrapper or opt.loss_scale is not optimizers[0].loss_scale:
      raise ValueError(
        "Expected MixedPrecisionLossScaleOptimizers that share one LossScale, but got "
        "{}. Pass the same LossScale to all of them.".format(optimizers)
      )
    if not opt._mp_compat_settings.skip_nonfinite:
      raise ValueError(
        "Optimizers that share a loss scale need the finite check, but {} was made "
        "with skip_nonfinite=False. Remove that argument.".format(opt.get_name())
      )
  if len({id(opt.inner_optimizer) for opt in optimizers}) < len(optimizers):
    raise ValueError(
      "Expected each optimizer once: its counters and slots belong to one "
      "apply_gradients(), but got {}. Join the (gradient, variable) pairs of one "
      "optimizer, or make two.".format([opt.get_name() for opt in optimizers])
    )
