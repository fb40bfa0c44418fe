"""The gate: what becomes of a step, and the conditional through which every update goes."""

from typing import Any, Callable, Iterable, List, NamedTuple, Optional, Tuple, Union

from mp_compat import _compat
from mp_compat import gradients
from mp_compat import loss_scale as loss_scale_module
from mp_compat._compat import tf

GradAndVar = Tuple[gradients.Gradient, tf.Variable]

# The name scope of the branch that applies gradients; variables made under it are moved out of it.
_APPLY_SCOPE = "apply_if_finite"

# Within a tf.function, AutoGraph would rewrite what is called; here it has nothing to find.
do_not_convert = tf.autograph.experimental.do_not_convert


class Judgement(NamedTuple):
  """What is to become of a step."""

  finite: Optional[tf.Tensor]  # the verdict, where there is one
  update_op: Optional[tf.Operation]  # moves the loss scale
  should_apply: Union[bool, tf.Tensor]
  ready: Any  # the gradients that were judged, a buckets.Buckets for each replica; None where there is no verdict


def listed(grads_and_vars: Iterable[GradAndVar]) -> Tuple[GradAndVar, ...]:
  """The pairs of an iterable, one gradient among them at least; else a ValueError."""
  grads_and_vars = tuple((grad, variable) for grad, variable in grads_and_vars)
  if not grads_and_vars:
    raise ValueError("No variables provided. Expected (gradient, variable) pairs, but got none.")
  if all(grad is None for grad, _ in grads_and_vars):
    raise ValueError("No gradients provided for any variable: {}. Expected a gradient for at least one, but all are "
                     "None.".format([str(variable) for _, variable in grads_and_vars]))
  return grads_and_vars


def judge(loss_scale: Any,
          grads: List[gradients.Gradient],
          finite_reducer: Optional[loss_scale_module.FiniteReducer] = None,
          finite_before: Optional[tf.Tensor] = None,
          use_locking: bool = False) -> Judgement:
  """The verdict on the gradients of all replicas, which the loss scale is told; both must agree to a step.

  Args:
    loss_scale: a LossScale, ours or TensorFlow's.
    grads: gradients of all replicas.
    finite_reducer: makes one verdict of those of several processes.
    finite_before: tells the loss scale of gradients that were judged before and left out.
    use_locking: whether steps that run at the same time move the loss scale one after the other.
  """
  update = loss_scale.update
  if use_locking and _compat.current_graph() is not None and not _compat.may_be_compiled():
    update = _one_at_a_time(update)
  judged = loss_scale_module.step_gradients(grads, finite_reducer)
  if finite_before is None:
    update_op, should_apply = update(judged)
    return Judgement(judged.finite, update_op, _both(should_apply, judged.finite), judged.ready)
  # The loss scale hears of what was left out; these gradients are applied without it.
  update_op, _ = update(loss_scale_module.step_gradients(grads, finite_reducer, finite_before))
  return Judgement(judged.finite, update_op, judged.finite, judged.ready)


def _one_at_a_time(update: Callable[..., Any]) -> Callable[..., Any]:
  """The same `LossScale.update`, within a lock that is taken once the verdict is there."""

  def update_within_lock(judged: loss_scale_module.StepGradients) -> Tuple[Optional[tf.Operation], Any]:
    with tf.control_dependencies([judged.finite]), tf.device("/cpu:0"):
      lock = tf.raw_ops.MutexLock(mutex=tf.raw_ops.MutexV2())
    with tf.control_dependencies([lock]):
      update_op, should_apply = update(judged)
    with tf.control_dependencies([] if update_op is None else [update_op]), tf.device("/cpu:0"):
      return tf.raw_ops.ConsumeMutexLock(mutex_lock=lock), should_apply

  return update_within_lock


def _both(should_apply: Any, finite: tf.Tensor) -> Any:
  """`should_apply and finite`, without an op where one of them says it all."""
  if not tf.is_tensor(should_apply):
    return finite if should_apply else False
  return finite if should_apply is finite else tf.logical_and(should_apply, finite)


def cond(should_apply: Any, apply: Callable[[], Any], skip: Callable[[], Any] = tf.no_op) -> Any:
  """`apply()` if `should_apply`, else `skip()`; each gives an op, in eager mode nothing.

  Variables that `apply` makes are made outside the branch, under the names that they would have without it.
  """
  if not tf.is_tensor(should_apply) or tf.executing_eagerly():
    return apply() if should_apply else skip()
  scope_around = _compat.name_scope()

  def make_outside(next_creator: Callable[..., tf.Variable], **kwargs: Any) -> tf.Variable:
    # "cond_1/apply_if_finite/Adam" (control flow v1) and "apply_if_finite/Adam" (v2) stand for "Adam" around the cond.
    # Any other scope was chosen by the optimizer itself: tf.get_variable makes its variables in the root scope.
    _, marker, within = (_compat.name_scope() + "/").partition(_APPLY_SCOPE + "/")
    if not marker or _compat.home_graph() is None:
      return next_creator(**kwargs)
    scope = "/".join(filter(None, [scope_around, within.strip("/")]))
    with tf.init_scope(), tf.name_scope(scope + "/" if scope else None):
      return next_creator(**kwargs)

  def apply_branch() -> tf.Operation:
    with tf.name_scope(_APPLY_SCOPE):
      return apply()

  with _compat.conditionals_in_graph(), tf.variable_creator_scope(make_outside):
    return tf.cond(should_apply, apply_branch, skip)
