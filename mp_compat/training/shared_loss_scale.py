# SPDX-License-Identifier: Apache-2.0
"""Applies the gradients of several optimizers that share one loss scale as one step."""

import functools
from typing import Iterable, List, Optional, Tuple

from mp_compat._tensorflow import autograph
from mp_compat._tensorflow import tf
from mp_compat.core import conditional_apply
from mp_compat.core import distribute
from mp_compat.core import gradients
from mp_compat.training import optimizer as optimizer_module
from mp_compat.training import step

OptimizerAndGradients = Tuple[optimizer_module.MixedPrecisionLossScaleOptimizer, Iterable[gradients.GradAndVar]]

_SKIP = ("all", "each")


@autograph.do_not_convert
def apply_gradients_together(
  steps: Iterable[OptimizerAndGradients],
  global_step: Optional[tf.Variable] = None,
  skip: str = "all",
  name: str = "apply_together",
) -> Optional[tf.Operation]:
  """Applies the gradients of several optimizers that share a loss scale, and updates the loss scale once.

      scale = mp_compat.DynamicLossScale()
      first, second = (
        mp_compat.MixedPrecisionLossScaleOptimizer(opt, scale) for opt in (adagrad, adam)
      )
      train_op = mp_compat.apply_gradients_together(
        [
          (first, first.compute_gradients(loss, embeddings)),
          (second, second.compute_gradients(loss, weights)),
        ]
      )

  If each optimizer's `apply_gradients` is called separately, every call updates the loss scale. The finite check is
  reduced with the `finite_reducer` of the first optimizer that has one.

  Args:
    steps: pairs of a MixedPrecisionLossScaleOptimizer and its `(gradient, variable)` pairs.
    global_step: a variable to increment by one if any gradients are applied.
    skip: which steps to skip if gradients are not finite: those of "all" optimizers, or that of "each" optimizer with
      such gradients. In both cases, the loss scale is updated as for a step that is not finite.
    name: the name of the op.

  Returns:
    One op; None in eager mode.

  Raises:
    ValueError: If there are no steps, they are not pairs, the optimizers do not share one loss scale or were made with
      `skip_nonfinite=False`, `skip` is another value, or `MixedPrecisionLossScaleOptimizer.apply_gradients` raises it.
    TypeError: See `MixedPrecisionLossScaleOptimizer.apply_gradients`.
  """
  optimizers, pairs = zip(*_checked_steps(steps))
  if skip not in _SKIP:
    raise ValueError("skip must be one of {}, but got {!r}.".format(", ".join(map(repr, _SKIP)), skip))
  distribute.check_replica_context()
  parts = [opt._prepare_part(grads_and_vars) for opt, grads_and_vars in zip(optimizers, pairs)]
  return distribute.merge_call(functools.partial(_apply_all, optimizers, skip), parts, global_step, name)


def _checked_steps(steps: Iterable[OptimizerAndGradients]) -> List[OptimizerAndGradients]:
  steps = list(steps)
  if not steps or not all(isinstance(pair, (tuple, list)) and len(pair) == 2 for pair in steps):
    raise ValueError(
      "Expected pairs of an optimizer and its (gradient, variable) pairs, but got {}. Pass "
      "[(opt, opt.compute_gradients(loss, variables)), ...].".format(steps)
    )
  optimizers = [opt for opt, _ in steps]
  for opt in optimizers:
    if (
      not isinstance(opt, optimizer_module.MixedPrecisionLossScaleOptimizer)
      or opt.loss_scale is not optimizers[0].loss_scale
    ):
      raise ValueError(
        "Expected MixedPrecisionLossScaleOptimizers that share one LossScale, but got {}. Pass the "
        "same LossScale object to all of them.".format(optimizers)
      )
    if not opt._mp_compat_settings.skip_nonfinite:
      raise ValueError(
        "Optimizers that share a loss scale need the finite check, but {} was made with "
        "skip_nonfinite=False. Remove that argument.".format(opt.get_name())
      )
  return steps


def _apply_all(
  optimizers: Tuple[optimizer_module.MixedPrecisionLossScaleOptimizer, ...],
  skip: str,
  strategy: tf.distribute.Strategy,
  parts: List[step.Part],
  global_step: Optional[tf.Variable],
  name: str,
) -> Optional[tf.Operation]:
  """Applies the gradients of all optimizers; called once for all replicas."""
  settings = optimizers[0]._mp_compat_settings._replace(
    finite_reducer=next(filter(None, (opt._mp_compat_settings.finite_reducer for opt in optimizers)), None),
    check_computed_gradients=all(opt._mp_compat_settings.check_computed_gradients for opt in optimizers),
    use_locking=any(opt._mp_compat_settings.use_locking for opt in optimizers),
  )
  decision = step.decide(optimizers[0].loss_scale, parts, settings, skip)
  train_ops = step.train_ops()
  applied = [step.apply(part, decision, index) for index, part in enumerate(parts)]
  counted = None
  if global_step is not None:
    with tf.control_dependencies([op for op in applied if op is not None]):
      counted = conditional_apply.cond(
        tf.reduce_any(tf.stack(decision.apply)),
        lambda: distribute.group(strategy.extended.update(global_step, lambda variable: tf.assign_add(variable, 1))),
      )
  train_op = distribute.group(*applied, counted, name=name)
  step.set_train_ops(train_ops + [train_op])
  return train_op
