"""Several optimizers that share one loss scale, applied as one step of it."""

from typing import Iterable, List, Optional, Tuple

from mp_compat import distribute
from mp_compat import gating
from mp_compat import gradients
from mp_compat import loss_scale
from mp_compat import optimizer as optimizer_module
from mp_compat._compat import tf

Step = Tuple[optimizer_module.MixedPrecisionLossScaleOptimizer, Iterable[gating.GradAndVar]]

_SKIP = ("all", "each")


def apply_gradients_together(steps: Iterable[Step],
                             global_step: Optional[tf.Variable] = None,
                             skip: str = "all",
                             name: str = "apply_together") -> Optional[tf.Operation]:
  """Applies the gradients of several optimizers that share a loss scale, which moves once.

      scale = mp_compat.DynamicLossScale()
      d_opt, g_opt = (mp_compat.MixedPrecisionLossScaleOptimizer(tf.train.AdamOptimizer(), scale) for _ in range(2))
      train_op = mp_compat.apply_gradients_together(
          [(d_opt, d_opt.compute_gradients(d_loss, d_vars)), (g_opt, g_opt.compute_gradients(g_loss, g_vars))])

  Where each optimizer's `apply_gradients` is called by itself, the scale moves with every one of them.

  Args:
    steps: pairs of an optimizer and its `(gradient, variable)` pairs.
    global_step: a variable to increment by one if something was applied.
    skip: what gradients that are not finite cost: the step of "all" optimizers, or the step of "each" optimizer that
      has some. The loss scale hears of them in both cases.
    name: the name of the op.

  Returns:
    One op; None in eager mode.

  Raises:
    ValueError: there are no steps; the optimizers do not share one loss scale, or make no verdict
      (`skip_nonfinite=False`); another `skip`; a cross-replica context.
  """
  steps = [(opt, tuple(grads_and_vars)) for opt, grads_and_vars in steps]
  if not steps:
    raise ValueError("There is nothing to apply. Expected (optimizer, grads_and_vars) pairs, but got none.")
  optimizers, pairs = zip(*steps)
  if skip not in _SKIP:
    raise ValueError("skip must be one of {}, but got {!r}.".format(", ".join(map(repr, _SKIP)), skip))
  first = optimizers[0]
  for opt in optimizers:
    if not isinstance(opt, optimizer_module.MixedPrecisionLossScaleOptimizer) or opt.loss_scale is not first.loss_scale:
      raise ValueError("Optimizers can only be applied together if they are MixedPrecisionLossScaleOptimizers with the "
                       "same loss scale, but got {}. Give one LossScale to all of them.".format(list(optimizers)))
    if not opt._skip_nonfinite:
      raise ValueError("Optimizers that are applied together need a verdict, but {} was made with "
                       "skip_nonfinite=False.".format(opt.get_name()))
  distribute.check_replica_context()

  def merged(strategy: tf.distribute.Strategy,
             pairs: Tuple[Tuple[gating.GradAndVar, ...], ...],
             global_step: Optional[tf.Variable]) -> Optional[tf.Operation]:
    judgements = _judge(first, [[grad for grad, _ in own] for own in pairs], skip)
    train_ops = tf.get_collection(tf.GraphKeys.TRAIN_OP)
    applied = [opt._distributed_apply(strategy, own, None, None, judgement=judgement)
               for opt, own, judgement in zip(optimizers, pairs, judgements)]
    counted = None
    if global_step is not None:
      anything = tf.reduce_any(tf.stack([judgement.should_apply for judgement in judgements]))
      with tf.control_dependencies([op for op in applied if op is not None]):
        counted = gating.cond(anything, lambda: distribute.group(
            strategy.extended.update(global_step, lambda variable: tf.assign_add(variable, 1))))
    train_op = distribute.group(*applied, counted, name=name)
    if train_op is not None:
      tf.get_collection_ref(tf.GraphKeys.TRAIN_OP)[:] = train_ops + [train_op]
    return train_op

  return distribute.merge(merged, pairs, global_step)


def _judge(optimizer: optimizer_module.MixedPrecisionLossScaleOptimizer,
           grads: List[List[gradients.Gradient]],
           skip: str) -> List[gating.Judgement]:
  """What is to become of each step."""
  whole = optimizer._judge([grad for own in grads for grad in own])
  if skip == "all":
    return [whole] * len(grads)
  judged = [loss_scale.step_gradients(own, optimizer._reducer(own)) for own in grads]
  return [gating.Judgement(own.finite, whole.update_op, own.finite, own.ready) for own in judged]
