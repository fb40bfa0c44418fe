# SPDX-License-Identifier: Apache-2.0
"""Applies the gradients of several optimizers that share one loss scale as one step."""

import functools
from typing import Any, Iterable, List, Optional, Tuple

from mp_compat._tensorflow import autograph
from mp_compat._tensorflow import tf
from mp_compat.core import conditional_apply
from mp_compat.core import distribute
from mp_compat.core import gradients
from mp_compat.training import optimizer as optimizer_module
from mp_compat.training import step

Step = Tuple[optimizer_module.MixedPrecisionLossScaleOptimizer, Iterable[gradients.GradAndVar]]

_SKIP = ("all", "each")


@autograph.do_not_convert
def apply_gradients_together(
  steps: Iterable[Step], global_step: Optional[tf.Variable] = None, skip: str = "all", name: str = "apply_together"
) -> Optional[tf.Operation]:
  """Applies the gradients of several optimizers that share a loss scale, and updates the loss scale once.

      scale = mp_compat.DynamicLossScale()
      d_opt, g_opt = (mp_compat.MixedPrecisionLossScaleOptimizer(tf.train.AdamOptimizer(), scale) for _ in range(2))
      train_op = mp_compat.apply_gradients_together(
          [(d_opt, d_opt.compute_gradients(d_loss, d_vars)), (g_opt, g_opt.compute_gradients(g_loss, g_vars))])

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
    ValueError: If there are no steps, the optimizers do not share one loss scale or were made with
      `skip_nonfinite=False`, `skip` is another value, or `MixedPrecisionLossScaleOptimizer.apply_gradients` raises it.
    TypeError: See `MixedPrecisionLossScaleOptimizer.apply_gradients`.
  """
  optimizers, pairs = zip(*_checked_steps(steps))
  if skip not in _SKIP:
    raise ValueError("skip must be one of {}, but got {!r}.".format(", ".join(map(repr, _SKIP)), skip))
  distribute.check_replica_context()
  checked = []
  for opt, grads_and_vars in zip(optimizers, pairs):
    checked.append(step.check(grads_and_vars, check_computed=opt.step_settings.check_computed_gradients))
    opt.warn_if_never_scaled()
  apply_all = functools.partial(_apply_all, optimizers, skip)
  return distribute.merge_call(apply_all, [tuple(part) for part in checked], global_step, name)


def _checked_steps(steps: Iterable[Step]) -> List[Step]:
  steps = list(steps)
  if not steps:
    raise ValueError("Expected (optimizer, grads_and_vars) pairs, but got none.")
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
    if not opt.step_settings.skip_nonfinite:
      raise ValueError(
        "Optimizers that share a loss scale need the finite check, but {} was made with "
        "skip_nonfinite=False. Remove that argument.".format(opt.get_name())
      )
  return steps


def _apply_all(
  optimizers: Tuple[optimizer_module.MixedPrecisionLossScaleOptimizer, ...],
  skip: str,
  strategy: tf.distribute.Strategy,
  checked: List[Tuple[Any, ...]],
  global_step: Optional[tf.Variable],
  name: str,
) -> Optional[tf.Operation]:
  """Applies the gradients of all optimizers; called once for all replicas."""
  settings = optimizers[0].step_settings._replace(use_locking=any(opt.step_settings.use_locking for opt in optimizers))
  steps = [step.CheckedGradients(*fields) for fields in checked]
  grads = [grad for part in steps for grad, _ in part.grads_and_vars]
  reducers = [step.finite_reducer_for(opt.step_settings, grads) for opt in optimizers]
  reducer = next(filter(None, reducers), None)
  finite = step.reduce_finite([part.finite for part in steps], reducer)
  all_finite = finite[0] if len(finite) == 1 else tf.reduce_all(tf.stack(finite))
  hidden = reducer is not None or any(part.hidden for part in steps)
  with_summaries = any(opt.step_settings.add_summaries for opt in optimizers)
  scale = tf.cast(settings.loss_scale(), tf.float32) if with_summaries else None
  with tf.control_dependencies([] if scale is None else [scale]):
    update_op, should_apply = step.update(settings, grads, all_finite, hidden)
  if skip == "each":
    # No optimizer applies its step before the gradients of all optimizers are computed.
    with tf.control_dependencies([all_finite]):
      decisions = [tf.identity(step.should_apply_part(should_apply, all_finite, part_finite)) for part_finite in finite]
  else:
    decisions = [step.logical_and(should_apply, all_finite)] * len(finite)
  train_ops = tf.get_collection(tf.GraphKeys.TRAIN_OP)
  applied = [
    opt.apply_decision(part, step.Decision(part_finite, part_should_apply, update_op, scale))
    for opt, part, part_finite, part_should_apply in zip(optimizers, steps, finite, decisions)
  ]
  counted = None
  if global_step is not None:
    with tf.control_dependencies([op for op in applied if op is not None]):
      counted = conditional_apply.cond(
        tf.reduce_any(tf.stack(decisions)),
        lambda: distribute.group(strategy.extended.update(global_step, lambda variable: tf.assign_add(variable, 1))),
      )
  train_op = distribute.group(*applied, counted, name=name)
  if train_op is not None:
    step.set_train_ops(train_ops + [train_op])
  return train_op
