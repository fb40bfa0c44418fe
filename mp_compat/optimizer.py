"""The optimizer: scales the loss, unscales the gradients, and applies a step everywhere or nowhere."""

from typing import Any, Iterable, List, Optional, Tuple

from absl import logging

from mp_compat import _compat
from mp_compat import buckets
from mp_compat import diagnosis
from mp_compat import distribute
from mp_compat import gating
from mp_compat import gradients
from mp_compat import hooks
from mp_compat import horovod
from mp_compat import loss_scale as loss_scale_module
from mp_compat import summaries
from mp_compat import sync_replicas
from mp_compat._compat import tf


class MixedPrecisionLossScaleOptimizer(tf.train.Optimizer):
  """Trains in float16 with another optimizer: small gradients survive, and overflows never reach the weights.

      scale = loss_scale()                                   read once
      grads = inner.compute_gradients(loss * scale) / scale
      update_op, should_apply = loss_scale.update(grads)     moves the scale
      if should_apply and all gradients are finite:          on all replicas, as compute_gradients made them
        inner.apply_gradients(grads)                         variables, slots, counters and global_step

  A step is applied as a whole or not at all. The names of variables, slots and counters are those that the inner
  optimizer alone would give them; `DynamicLossScale` adds `current_loss_scale` and `good_steps`.

  Everything else that is public is the inner optimizer's: `get_slot`, `get_slot_names`, `get_name`, and any attribute
  that this class lacks.

  In eager mode the verdict sees only what `apply_gradients` is given: there is no graph in which an overflow that was
  clipped away in between could be traced.

  Source: `tf.compat.v1.train.experimental.MixedPrecisionLossScaleOptimizer`; Micikevicius et al., "Mixed Precision
  Training", 2018 (arXiv:1710.03740).
  """

  def __init__(self,
               opt: tf.train.Optimizer,
               loss_scale: Any,
               *,
               skip_nonfinite: bool = True,
               finite_reducer: Optional[loss_scale_module.FiniteReducer] = None,
               add_summaries: bool = False,
               **kwargs: Any) -> None:
    """Wraps an optimizer.

    Args:
      opt: the inner optimizer, any `tf.compat.v1.train.Optimizer`. With its `use_locking`, steps that several threads
        run at the same time move the loss scale one after the other, too.
      loss_scale: a number of at least 1 for a fixed scale, "dynamic", or a LossScale, ours or TensorFlow's.
      skip_nonfinite: whether steps with non-finite gradients are skipped whatever the loss scale says. False builds
        no check and no conditional of its own: with a fixed scale, every step is applied.
      finite_reducer: makes one verdict of those of several processes that train together by other means than
        `tf.distribute`: a callable from a scalar bool tensor, whether the gradients are finite here, to one that says
        whether they are in all processes. It is called outside of every branch. None means
        `mp_compat.horovod.all_ranks_finite` where Horovod's ranks could disagree, else nothing.
      add_summaries: whether `apply_gradients` adds scalar summaries, in graph mode: `loss_scale/scale` (with which the
        step began), `loss_scale/good_steps`, `loss_scale/applied` (1 or 0) and `loss_scale/skipped_steps` (so far, in a
        local variable: from 0 again after a restart, and not in checkpoints).
      **kwargs: what this TensorFlow's `Optimizer.__init__` takes beyond `use_locking` and `name`.

    Raises:
      ValueError: `opt` is no `tf.compat.v1.train.Optimizer`, or scales the loss already; `loss_scale` is None or means
        no loss scale; `finite_reducer` is given where there is no verdict.
    """
    _check_inner(opt)
    if loss_scale is None:
      raise ValueError("loss_scale cannot be None. Expected a number of at least 1, \"dynamic\", or a LossScale; to "
                       "train without loss scaling, use the inner optimizer alone.")
    if finite_reducer is not None and not skip_nonfinite:
      raise ValueError("finite_reducer reduces the verdict on the gradients, but skip_nonfinite=False makes none. "
                       "Leave one of them out.")
    self._optimizer = opt
    # An optimizer that never called its base class's constructor has neither.
    name = opt.get_name() if hasattr(opt, "_name") else type(opt).__name__
    super().__init__(getattr(opt, "_use_locking", False), name, **kwargs)
    self._loss_scale = loss_scale_module.get_loss_scale(loss_scale)
    if horovod.adds_up_passes(opt) and self._doing_dynamic_loss_scaling():
      logging.warning(
          "%s adds up the gradients of several passes before they are unscaled: where the loss scale moves between two "
          "of them, they are weighted wrongly. Put it outside: hvd.DistributedOptimizer("
          "MixedPrecisionLossScaleOptimizer(opt, loss_scale), backward_passes_per_step=...).", name)
    self._skip_nonfinite = skip_nonfinite
    self._finite_reducer = finite_reducer
    self._add_summaries = add_summaries
    self._unscaled_any = False
    self._track_trackable(self._optimizer, "base_optimizer")
    self._track_trackable(self._loss_scale, "loss_scale")

  @property
  def inner_optimizer(self) -> tf.train.Optimizer:
    """The wrapped optimizer."""
    return self._optimizer

  @property
  def loss_scale(self) -> Any:
    """The LossScale; call it for the current value as a float32 scalar tensor."""
    return self._loss_scale

  @property
  def gradients_finite(self) -> tf.Tensor:
    """The verdict of the last `apply_gradients` in the current graph, a scalar bool tensor.

    Whether all gradients of the step are finite, on all replicas. Fetched together with the train op, it is that
    step's.

    Raises:
      RuntimeError: there was no `apply_gradients` in this graph, or it made no verdict (`skip_nonfinite=False`).
    """
    verdict = _compat.state_of(self, _compat.current_graph()).get("gradients_finite")
    if verdict is None:
      raise RuntimeError("gradients_finite is the verdict of apply_gradients (or minimize), but this graph has none "
                         "yet. Build the train op first, in this graph, and with skip_nonfinite=True.")
    return verdict

  def _doing_dynamic_loss_scaling(self) -> bool:
    """Whether the loss scale can move, as TensorFlow's class is asked; nothing here depends on it."""
    return isinstance(self._loss_scale, (loss_scale_module.DynamicLossScale,) + _compat.NATIVE_DYNAMIC_LOSS_SCALES)

  @gating.do_not_convert
  def minimize(self, *args: Any, **kwargs: Any) -> Optional[tf.Operation]:
    """`apply_gradients(compute_gradients(...))`; arguments and errors as `tf.compat.v1.train.Optimizer.minimize`."""
    return super().minimize(*args, **kwargs)

  @gating.do_not_convert
  def compute_gradients(self,
                        loss: gradients.Loss,
                        var_list: Optional[Iterable[tf.Variable]] = None,
                        gate_gradients: int = tf.train.Optimizer.GATE_OP,
                        aggregation_method: Optional[int] = None,
                        colocate_gradients_with_ops: bool = False,
                        grad_loss: Optional[tf.Tensor] = None) -> List[gating.GradAndVar]:
    """Gradients of the loss, computed at the loss scale and divided by it.

    Args:
      loss: a tensor of any shape, float16, bfloat16, float32 or float64, or a callable that returns one (required in
        eager mode).
      var_list: the variables; the graph's trainable ones by default.
      gate_gradients: `GATE_NONE`, `GATE_OP` or `GATE_GRAPH`; with the last, no returned gradient is available before
        all are computed and unscaled.
      aggregation_method: see `tf.AggregationMethod`.
      colocate_gradients_with_ops: whether gradients are computed on the devices of their ops.
      grad_loss: the gradient with respect to `loss`, of its shape; ones by default.

    Returns:
      A list of `(gradient, variable)`; a gradient has the variable's shape, and is dense, `tf.IndexedSlices` or None.

    Raises:
      ValueError: a wrong gate, a loss that is not floating, no variables; a strategy that cannot work (TPUs).
      RuntimeError: a loss that is no callable, in eager mode.
    """
    if gate_gradients not in (self.GATE_NONE, self.GATE_OP, self.GATE_GRAPH):
      raise ValueError("gate_gradients must be one of: Optimizer.GATE_NONE, Optimizer.GATE_OP, Optimizer.GATE_GRAPH.  "
                       "Not {}".format(gate_gradients))
    if tf.executing_eagerly() and not callable(loss):
      raise RuntimeError("`loss` passed to Optimizer.compute_gradients should be a function when eager execution is "
                         "enabled. Pass `lambda: loss`, computed inside, but got {!r}.".format(loss))
    distribute.check_supported()
    scale = self._scale()
    grads_and_vars = list(self._optimizer.compute_gradients(
        loss=gradients.scale_loss(loss, scale), var_list=var_list, gate_gradients=gate_gradients,
        aggregation_method=aggregation_method, colocate_gradients_with_ops=colocate_gradients_with_ops,
        grad_loss=grad_loss))
    grads, variables = [g for g, _ in grads_and_vars], [v for _, v in grads_and_vars]
    grads = gradients.unscale(grads, scale, deferrable=True)
    if gate_gradients == self.GATE_GRAPH and not tf.executing_eagerly():
      grads = gradients.gate(grads)
    self._note_raw(grads, [variable.name for variable in variables])
    return list(zip(grads, variables))

  def scale_loss(self, loss: gradients.Loss) -> gradients.Loss:
    """`loss * scale`, for code that calls `tf.gradients` itself; then `unscale_gradients` what comes out.

        grads = opt.unscale_gradients(tf.gradients(opt.scale_loss(loss), variables))
        train_op = opt.apply_gradients(zip(grads, variables), global_step)

    Args:
      loss: a tensor of any shape and floating dtype, or a callable that returns one.

    Returns:
      A tensor of the same shape and dtype; a callable for a callable.

    Raises:
      ValueError: the loss is not floating.
    """
    scale = _compat.state_of(self, _compat.current_graph())["scale"] = self._scale()
    return gradients.scale_loss(loss, scale)

  def unscale_gradients(self, grads: Iterable[gradients.Gradient]) -> List[gradients.Gradient]:
    """`g * (1 / scale)` for gradients of a loss that `scale_loss` scaled.

    Args:
      grads: gradients of any shapes and floating dtypes, dense, `tf.IndexedSlices` or None.

    Returns:
      As many, of the same kinds, shapes and dtypes. The verdict of `apply_gradients` sees them, whatever is done to
      them in between.

    Raises:
      RuntimeError: `scale_loss` was not called before, in this graph.
    """
    scale = _compat.state_of(self, _compat.current_graph()).get("scale")  # read once for both
    if scale is None:
      raise RuntimeError("unscale_gradients() is for gradients of a loss that scale_loss() scaled, but scale_loss() "
                         "was not called in this graph. Call tf.gradients(opt.scale_loss(loss), variables).")
    grads = gradients.unscale(grads, scale, deferrable=True)
    self._note_raw(grads, ["gradient {}".format(i) for i in range(len(grads))])
    return grads

  def _scale(self) -> tf.Tensor:
    return tf.cast(self._loss_scale(), tf.float32)

  def _note_raw(self, grads: List[gradients.Gradient], names: List[str]) -> None:
    self._unscaled_any = True
    gradients.mark_raw(grads, names)

  @gating.do_not_convert
  def apply_gradients(self,
                      grads_and_vars: Iterable[gating.GradAndVar],
                      global_step: Optional[tf.Variable] = None,
                      name: Optional[str] = None,
                      **kwargs: Any) -> Optional[tf.Operation]:
    """Applies the gradients everywhere, or, if one of them is not finite on some replica, nothing at all.

    Args:
      grads_and_vars: pairs as `compute_gradients` returns them, in any iterable; clipped, averaged or replaced as you
        like: the verdict sees them, and the raw gradients from which they were computed.
      global_step: a variable to increment by one with every applied step.
      name: the name of the returned op; the inner optimizer's by default.
      **kwargs: what the inner optimizer's `apply_gradients` takes beyond these.

    Returns:
      One op that does the step and moves the loss scale; None in eager mode.

    Raises:
      ValueError: in a cross-replica context; under a strategy that cannot work (TPUs); without any gradient;
        `finite_reducer` returned no scalar bool.
      TypeError: a gradient that is not floating.
    """
    return self._apply_accumulated(grads_and_vars, global_step, name, None, **kwargs)

  def _apply_accumulated(self,
                         grads_and_vars: Iterable[gating.GradAndVar],
                         global_step: Optional[tf.Variable],
                         name: Optional[str],
                         finite_before: Optional[tf.Tensor],
                         **kwargs: Any) -> Optional[tf.Operation]:
    """`apply_gradients`, where `finite_before` tells the loss scale of gradients that were judged and left out."""
    distribute.check_replica_context()
    grads_and_vars = gating.listed(grads_and_vars)
    if not self._unscaled_any:
      self._unscaled_any = True  # Once is enough.
      logging.warning(
          "%s applies gradients that were never scaled: neither compute_gradients() nor unscale_gradients() of this "
          "optimizer was called. They may have vanished in float16. Compute them with its compute_gradients(), or with "
          "opt.unscale_gradients(tf.gradients(opt.scale_loss(loss), variables)).", self.get_name())
    return distribute.merge(self._distributed_apply, grads_and_vars, global_step, name, finite_before, **kwargs)

  def _distributed_apply(self,
                         strategy: tf.distribute.Strategy,
                         grads_and_vars: Tuple[gating.GradAndVar, ...],
                         global_step: Optional[tf.Variable],
                         name: Optional[str],
                         finite_before: Optional[tf.Tensor] = None,
                         judgement: Optional[gating.Judgement] = None,
                         **kwargs: Any) -> Optional[tf.Operation]:
    """`apply_gradients` in a cross-replica context: the gradients are those of all replicas."""
    del strategy  # It is the current one.
    grads = [grad for grad, _ in grads_and_vars]
    local_grads, local_names = zip(*[
        (one, variable.name) for grad, variable in grads_and_vars for one in distribute.each_local(grad)])
    scale = self._scale() if self._add_summaries else None
    with tf.control_dependencies([] if scale is None else [scale]):
      finite, update_op, should_apply, ready = judgement or self._judge(grads, finite_before)
    state = _compat.state_of(self, _compat.current_graph())
    state["gradients_finite"] = finite

    def apply_inner(ready: Optional[buckets.Buckets],
                    grads_and_vars: Tuple[gating.GradAndVar, ...],
                    *args: Any,
                    **kwargs: Any) -> Optional[tf.Operation]:
      if ready is not None:
        grads, variables = zip(*grads_and_vars)
        grads_and_vars = tuple(zip(ready.unscaled(grads), variables))
      return self._optimizer.apply_gradients(grads_and_vars, *args, **kwargs)

    def apply() -> Optional[tf.Operation]:
      return distribute.group(
          distribute.on_each_replica(apply_inner, ready, grads_and_vars, global_step, name, **kwargs))

    train_ops = tf.get_collection(tf.GraphKeys.TRAIN_OP)
    applied = gating.cond(should_apply, apply)
    followed = sync_replicas.follow_global_step(local_grads, global_step, applied)
    counted = None
    if self._add_summaries and not tf.executing_eagerly():
      counted = summaries.add(scale, getattr(self._loss_scale, "_num_good_steps", None), should_apply)
    train_op = distribute.group(applied, update_op, followed, counted, name=self.get_name() if name is None else name)
    if train_op is not None:
      # What apply() added is an op of the branch, which nobody could run.
      tf.get_collection_ref(tf.GraphKeys.TRAIN_OP)[:] = train_ops + [train_op]
      state["step"] = diagnosis.Step(train_op, should_apply, list(zip(local_grads, local_names)))
    return train_op

  def _judge(self,
             grads: List[gradients.Gradient],
             finite_before: Optional[tf.Tensor] = None) -> gating.Judgement:
    if self._skip_nonfinite:
      return gating.judge(self._loss_scale, grads, self._reducer(grads), finite_before, self._use_locking)
    update_op, should_apply = self._loss_scale.update(grads)
    return gating.Judgement(should_apply if tf.is_tensor(should_apply) else None, update_op, should_apply, None)

  def _reducer(self, grads: List[gradients.Gradient]) -> Optional[loss_scale_module.FiniteReducer]:
    return self._finite_reducer or horovod.default_reducer(
        self._optimizer, [one for grad in grads for one in distribute.each_local(grad)])

  def make_session_run_hook(self, *args: Any, **kwargs: Any) -> tf.train.SessionRunHook:
    """A `mp_compat.LossScaleHook` that follows this optimizer; arguments as its constructor's, after the first."""
    return hooks.LossScaleHook(self, *args, **kwargs)

  def get_name(self) -> str:
    """The inner optimizer's name."""
    return self._name

  def get_slot(self, var: tf.Variable, name: str) -> Optional[tf.Variable]:
    """The inner optimizer's slot `name` for `var`, or None."""
    return self._optimizer.get_slot(var, name)

  def get_slot_names(self) -> List[str]:
    """The names of the inner optimizer's slots."""
    return [] if _compat.called_by_checkpoint_writer() else self._optimizer.get_slot_names()

  def variables(self) -> List[tf.Variable]:
    """The variables of the inner optimizer in the current graph, then those of the loss scale."""
    return list(self._optimizer.variables()) + list(self._loss_scale._weights.values())

  def __getattr__(self, name: str) -> Any:
    # Called for what was not found here. Private names stay apart: base classes and copy ask for many of them.
    if name.startswith("_"):
      raise AttributeError("{!r} object has no attribute {!r}".format(type(self).__name__, name))
    return getattr(self._optimizer, name)

  def _never_called(self, *args: Any, **kwargs: Any) -> None:
    raise RuntimeError("This function should never be called: the inner optimizer applies the gradients.")

  _apply_dense = _apply_sparse = _resource_apply_dense = _resource_apply_sparse = _never_called


def _check_inner(opt: Any) -> None:
  if any("keras" in base.__module__.split(".") or base.__module__.startswith(("keras", "tf_keras"))
         for base in type(opt).__mro__):
    raise ValueError("\"opt\" must be an instance of Optimizer, but got: {}. That is a Keras optimizer; wrap it in "
                     "mp_compat.keras.LossScaleOptimizer instead.".format(type(opt)))
  if not isinstance(opt, tf.train.Optimizer):
    raise ValueError("\"opt\" must be an instance of Optimizer, but got: {}. Pass an instance of a "
                     "tf.compat.v1.train.Optimizer, such as tf.compat.v1.train.AdamOptimizer().".format(type(opt)))
  for layer in _compat.layers(opt):
    if (isinstance(layer, (MixedPrecisionLossScaleOptimizer,) + _compat.NATIVE_LOSS_SCALE_OPTIMIZERS)
        or type(layer).__name__ == "LossScaleOptimizer"):
      raise ValueError("\"opt\" must scale no loss itself, but {} is or wraps a {}: the loss would be scaled twice. "
                       "Pass the optimizer inside it.".format(type(opt).__name__, type(layer).__name__))
    if isinstance(layer, tf.train.SyncReplicasOptimizer):
      raise ValueError("\"opt\" must not aggregate the gradients of several workers itself, but {} is or wraps a {}: a "
                       "worker that skips a step would never hand in what the others wait for. Put it outside: "
                       "{}(MixedPrecisionLossScaleOptimizer(opt, loss_scale), ...)."
                       .format(type(opt).__name__, type(layer).__name__, type(layer).__name__))
