"""The optimizer: scales the loss, unscales the gradients, and applies a step everywhere or nowhere."""

from typing import Any, Dict, Iterable, List, Optional, Tuple

from absl import logging

from mp_compat import _compat
from mp_compat import conditional_apply
from mp_compat import diagnosis
from mp_compat import distribute
from mp_compat import gradients
from mp_compat import hooks
from mp_compat import horovod
from mp_compat import loss_scale as loss_scale_module
from mp_compat import step
from mp_compat._compat import tf

# Only other values are passed on: optimizers of one's own may take fewer arguments.
_COMPUTE_DEFAULTS = dict(var_list=None, gate_gradients=tf.train.Optimizer.GATE_OP, aggregation_method=None,
                         colocate_gradients_with_ops=False, grad_loss=None)


# A program that asks for TensorFlow's class gets the right answer. Nothing is inherited from it but that.
_Native = (_compat.NATIVE_LOSS_SCALE_OPTIMIZERS + (tf.train.Optimizer,))[0]


class MixedPrecisionLossScaleOptimizer(_Native):
  """Trains in float16 with another optimizer: small gradients survive, and overflows never reach the weights.

      scale = loss_scale()                                   read once
      grads = inner.compute_gradients(loss * scale) / scale
      update_op, should_apply = loss_scale.update(grads)     of what is passed to apply_gradients
      if should_apply and all gradients are finite:          on all replicas
        inner.apply_gradients(grads)                         variables, slots, counters and global_step

  A step is applied as a whole or not at all. The names of variables, slots and counters are those that the inner
  optimizer alone would give them; `DynamicLossScale` adds `current_loss_scale` and `good_steps`.

  Everything else that is public is the inner optimizer's: `get_slot`, `get_slot_names`, `get_name`, and any attribute
  that this class lacks.

  What is passed to `apply_gradients` is what is checked and applied. In graphs the check also covers the gradients that
  `compute_gradients` returned, where those passed in derive from them (`check_computed_gradients`).

  Source: `tf.compat.v1.train.experimental.MixedPrecisionLossScaleOptimizer`; Micikevicius et al., "Mixed Precision
  Training", 2018 (arXiv:1710.03740).
  """

  def __init__(self,
               opt: tf.train.Optimizer,
               loss_scale: Any,
               *,
               skip_nonfinite: bool = True,
               check_computed_gradients: bool = True,
               finite_reducer: Optional[step.FiniteReducer] = None,
               add_summaries: bool = False,
               **kwargs: Any) -> None:
    """Wraps an optimizer.

    Args:
      opt: the inner optimizer, any `tf.compat.v1.train.Optimizer`. With its `use_locking`, steps that several threads
        run at the same time move the loss scale one after the other, too.
      loss_scale: a number of at least 1 for a fixed scale, "dynamic", or a LossScale, ours or TensorFlow's.
      skip_nonfinite: whether steps with non-finite gradients are skipped whatever the loss scale says. False builds
        no check and no conditional of its own: with a fixed scale, every step is applied.
      check_computed_gradients: whether the finite check also covers the gradients as `compute_gradients` returned
        them, where those passed to `apply_gradients` derive from them: an overflow that clipping hid is then noticed.
        That check reads them, so a run that feeds a clipped gradient (`feed_dict`) needs the model's inputs, too, or
        fails with "You must feed a value for placeholder tensor". Pass False for such programs: then only what is
        passed to `apply_gradients` is checked. Feeding what `compute_gradients` returned needs no such setting.
      finite_reducer: agrees with other processes that train together by other means than `tf.distribute`: a callable
        from a scalar bool tensor, True if the gradients are finite here, to one that is True if they are in all
        processes. It is called once for a train op, outside of every branch; with a vector of bools, of which each is
        to be reduced, by `apply_gradients_together(skip="each")` and `GradientAccumulator(skip="micro_batch")`. None
        means `mp_compat.horovod.all_ranks_finite` where Horovod's ranks could disagree, else nothing.
      add_summaries: whether `apply_gradients` adds scalar summaries, in graph mode: `loss_scale/scale` (with which the
        step began), `loss_scale/good_steps`, `loss_scale/applied` (1 or 0) and `loss_scale/skipped_steps` (so far, in a
        local variable: from 0 again after a restart, and not in checkpoints).
      **kwargs: what this TensorFlow's `Optimizer.__init__` takes beyond `use_locking` and `name`.

    Raises:
      ValueError: `opt` is no `tf.compat.v1.train.Optimizer`, or scales the loss already; `loss_scale` is None or means
        no loss scale; `finite_reducer` is given together with `skip_nonfinite=False`.
    """
    _check_inner(opt)
    if loss_scale is None:
      raise ValueError("loss_scale cannot be None. Expected a number of at least 1, \"dynamic\", or a LossScale; to "
                       "train without loss scaling, use the inner optimizer alone.")
    if finite_reducer is not None and not skip_nonfinite:
      raise ValueError("finite_reducer reduces the result of the finite check, but skip_nonfinite=False makes none. "
                       "Leave one of them out.")
    self._optimizer = opt
    # An optimizer that never called its base class's constructor has neither.
    name = opt.get_name() if hasattr(opt, "_name") else type(opt).__name__
    base = super() if _Native is tf.train.Optimizer else super(_Native, self)
    base.__init__(getattr(opt, "_use_locking", False), name, **kwargs)
    self._loss_scale = loss_scale_module.get_loss_scale(loss_scale)
    _warn_of_scaled_gradients(opt, name, self._doing_dynamic_loss_scaling())
    self._skip_nonfinite = skip_nonfinite
    self._check_computed_gradients = check_computed_gradients
    self._finite_reducer = finite_reducer
    self._add_summaries = add_summaries
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
  def step_settings(self) -> step.Settings:
    """How this optimizer makes its steps, for code that makes them of several micro-batches or optimizers."""
    return step.Settings(
        name=self.get_name(), inner_optimizer=self._optimizer, loss_scale=self._loss_scale,
        skip_nonfinite=self._skip_nonfinite, check_computed_gradients=self._check_computed_gradients,
        finite_reducer=self._finite_reducer, add_summaries=self._add_summaries, use_locking=self._use_locking)

  @property
  def gradients_finite(self) -> tf.Tensor:
    """A scalar bool tensor of the last `apply_gradients` in this graph: True if all gradients are finite.

    It covers all replicas. Fetched together with the train op, it belongs to the same step.

    Raises:
      RuntimeError: if there was no `apply_gradients` in this graph, or nothing was checked (`skip_nonfinite=False`).
    """
    last = _compat.state_of(self, _compat.current_graph()).get("step")
    if last is None or last.finite is None:
      raise RuntimeError(
          "gradients_finite is the result of the finite check in apply_gradients (or minimize), but this graph has "
          "none yet. Build the train op first, in this graph, and with skip_nonfinite=True.")
    return last.finite

  def _doing_dynamic_loss_scaling(self) -> bool:
    """Whether the loss scale can move, as TensorFlow's class is asked; nothing here depends on it."""
    return isinstance(self._loss_scale, (loss_scale_module.DynamicLossScale,) + _compat.NATIVE_DYNAMIC_LOSS_SCALES)

  @conditional_apply.do_not_convert
  def minimize(self, *args: Any, **kwargs: Any) -> Optional[tf.Operation]:
    """`apply_gradients(compute_gradients(...))`; arguments and errors as `tf.compat.v1.train.Optimizer.minimize`."""
    return super().minimize(*args, **kwargs)

  @conditional_apply.do_not_convert
  def compute_gradients(self,
                        loss: gradients.Loss,
                        var_list: Optional[Iterable[tf.Variable]] = None,
                        gate_gradients: int = tf.train.Optimizer.GATE_OP,
                        aggregation_method: Optional[int] = None,
                        colocate_gradients_with_ops: bool = False,
                        grad_loss: Optional[tf.Tensor] = None) -> List[gradients.GradAndVar]:
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
    options = dict(var_list=var_list, gate_gradients=gate_gradients, aggregation_method=aggregation_method,
                   colocate_gradients_with_ops=colocate_gradients_with_ops, grad_loss=grad_loss)
    given = {name: value for name, value in options.items() if value is not _COMPUTE_DEFAULTS[name]}
    grads_and_vars = list(self._optimizer.compute_gradients(gradients.scale_loss(loss, scale), **given))
    grads, variables = [g for g, _ in grads_and_vars], [v for _, v in grads_and_vars]
    grads = gradients.unscale(grads, scale)
    if gate_gradients == self.GATE_GRAPH and not tf.executing_eagerly():
      grads = gradients.gate(grads)
    self._record_computed(grads, [variable.name for variable in variables])
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
    scale = self._scale()
    _compat.state_of(self, _compat.current_graph())["scale"] = scale
    self._state["scaled"] = True
    return gradients.scale_loss(loss, scale)

  def unscale_gradients(self, grads: Iterable[gradients.Gradient]) -> List[gradients.Gradient]:
    """`g * (1 / scale)` for gradients of a loss that `scale_loss` scaled.

    Args:
      grads: gradients of any shapes and floating dtypes, dense, `tf.IndexedSlices` or None.

    Returns:
      As many, of the same kinds, shapes and dtypes. The finite check of `apply_gradients` covers them, whatever is done
      to them in between (`check_computed_gradients`).

    Raises:
      RuntimeError: `scale_loss` was not called before, in this graph.
    """
    if "scaled" not in self._state:
      raise RuntimeError("unscale_gradients() is for gradients of a loss that scale_loss() scaled, but scale_loss() "
                         "was not called in this graph. Call tf.gradients(opt.scale_loss(loss), variables).")
    grads = gradients.unscale(grads, self._recorded_scale())
    self._record_computed(grads, ["gradient {}".format(i) for i in range(len(grads))])
    return grads

  def _scale(self) -> tf.Tensor:
    return tf.cast(self._loss_scale(), tf.float32)

  def _recorded_scale(self) -> tf.Tensor:
    """Returns the scale that `scale_loss` read, where that can be read here; else reads it again."""
    if tf.executing_eagerly():
      return _compat.state_of(self, None)["scale"]
    for graph in _compat.enclosing_graphs():
      scale = _compat.state_of(self, graph).get("scale")
      if scale is not None and _compat.is_readable(scale):
        return scale
    return self._scale()

  @property
  def _state(self) -> Dict[str, Any]:
    """What this optimizer knows of the graph that variables made now belong to."""
    return _compat.state_of(self, _compat.home_graph())

  def _record_computed(self, grads: List[gradients.Gradient], names: List[str]) -> None:
    self._state["unscaled_any"] = True
    gradients.record_computed(grads, names)

  @conditional_apply.do_not_convert
  def apply_gradients(self,
                      grads_and_vars: Iterable[gradients.GradAndVar],
                      global_step: Optional[tf.Variable] = None,
                      name: Optional[str] = None,
                      **kwargs: Any) -> Optional[tf.Operation]:
    """Applies the gradients everywhere, or, if one of them is not finite on some replica, nothing at all.

    Args:
      grads_and_vars: pairs as `compute_gradients` returns them, in any iterable; clipped, averaged, fed or replaced. A
        gradient is a tensor, `tf.IndexedSlices`, a variable, a NumPy array, a list, a number, or None.
      global_step: a variable to increment by one with every applied step.
      name: the name of the returned op; the inner optimizer's by default.
      **kwargs: what the inner optimizer's `apply_gradients` takes beyond these.

    Returns:
      One op that does the step and updates the loss scale; None in eager mode.

    Raises:
      ValueError: in a cross-replica context; under a strategy that cannot work (TPUs); without any gradient; if
        `finite_reducer` does not return a bool tensor of the shape that it is given.
      TypeError: if a gradient is not floating.
    """
    distribute.check_replica_context()
    settings = self.step_settings
    checked = step.check(grads_and_vars, settings.skip_nonfinite, settings.check_computed_gradients)
    self.warn_if_never_scaled()
    return distribute.merge_call(self._apply_on_all_replicas, tuple(checked), global_step, name, **kwargs)

  def _apply_on_all_replicas(self,
                             strategy: tf.distribute.Strategy,
                             checked: Tuple[Any, ...],
                             global_step: Optional[tf.Variable],
                             name: Optional[str],
                             **kwargs: Any) -> Optional[tf.Operation]:
    del strategy  # It is the current one.
    checked = step.Checked(*checked)
    return self.apply_decision(checked, step.decide(self.step_settings, checked), global_step, name, **kwargs)

  def apply_decision(self,
                     checked: step.Checked,
                     decision: step.Decision,
                     global_step: Optional[tf.Variable] = None,
                     name: Optional[str] = None,
                     **kwargs: Any) -> Optional[tf.Operation]:
    """Applies gradients if `decision` says so; called once for all replicas.

    Args:
      checked: of `step.check`, per-replica values.
      decision: of `step.decide`.
      global_step: see `apply_gradients`.
      name: see `apply_gradients`.
      **kwargs: see `apply_gradients`.

    Returns:
      See `apply_gradients`.
    """
    built = step.apply(self.step_settings, checked, decision, global_step, name, **kwargs)
    diagnosis.record(self, built)
    return built.train_op

  def warn_if_never_scaled(self) -> None:
    """Logs a warning, once per graph, if this optimizer applies gradients that it did not unscale."""
    if not self._state.setdefault("unscaled_any", False):
      self._state["unscaled_any"] = True
      logging.warning(
          "%s applies gradients that were never scaled: neither compute_gradients() nor unscale_gradients() of this "
          "optimizer was called. They may have vanished in float16. Compute them with its compute_gradients(), or with "
          "opt.unscale_gradients(tf.gradients(opt.scale_loss(loss), variables)).", self.get_name())

  def make_session_run_hook(self, *args: Any, **kwargs: Any) -> tf.train.SessionRunHook:
    """A `mp_compat.LossScaleHook` that follows this optimizer; arguments as its constructor's, after the first."""
    return hooks.LossScaleHook(self, *args, **kwargs)

  def get_name(self) -> str:
    """The inner optimizer's name."""
    return self._name

  def get_slot(self, var: tf.Variable, name: str) -> Optional[tf.Variable]:
    """Returns the inner optimizer's slot `name` for `var`, or None."""
    return _compat.slot_of_inner(self._optimizer, var, name)

  def get_slot_names(self) -> List[str]:
    """Returns the names of the inner optimizer's slots."""
    return [_compat.SlotName(name) for name in self._optimizer.get_slot_names()]

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


def _warn_of_scaled_gradients(opt: tf.train.Optimizer, name: str, dynamic: bool) -> None:
  """Logs a warning if `opt` does to scaled gradients what must be done to unscaled ones."""
  if dynamic and horovod.adds_up_passes(opt):
    logging.warning(
        "%s adds up the gradients of several passes before they are unscaled: where the loss scale moves between two "
        "of them, they are weighted wrongly. Put it outside: hvd.DistributedOptimizer("
        "MixedPrecisionLossScaleOptimizer(opt, loss_scale), backward_passes_per_step=...).", name)
  if any(hasattr(layer, "_dp_sum_query") for layer in _compat.layers(opt)):  # tensorflow-privacy
    logging.warning(
        "%s clips gradients in its compute_gradients(), before they are unscaled: its l2_norm_clip applies to "
        "gradients that are as many times too large as the loss scale says. Put it outside: "
        "make_optimizer_class(mp_compat.MixedPrecisionLossScaleOptimizer)(..., opt, loss_scale).", name)


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
