# SPDX-License-Identifier: Apache-2.0
"""The optimizer wrapper: scales the loss, unscales the gradients, and applies a step on
all replicas or on none.
"""

from typing import Any, Dict, Iterable, List, NoReturn, Optional

from mp_compat import horovod
from mp_compat._tensorflow import autograph
from mp_compat._tensorflow import log
from mp_compat._tensorflow import native
from mp_compat._tensorflow import optimizers
from mp_compat._tensorflow import tf
from mp_compat._tensorflow import trackable
from mp_compat.core import distribute
from mp_compat.core import gradients
from mp_compat.core import lineage
from mp_compat.core import variable_scope
from mp_compat.core.loss_scale import DynamicLossScale
from mp_compat.core.loss_scale import LossScale
from mp_compat.core.loss_scale import get_loss_scale
from mp_compat.core.loss_scale import is_updated_by_check
from mp_compat.graph import contexts
from mp_compat.graph import graphs
from mp_compat.graph import records
from mp_compat.training import advice
from mp_compat.training import recorded
from mp_compat.training import step

# The base is TensorFlow's class, if there is one, so that isinstance checks for it
# succeed. Nothing else of it is used.
_Native: Any = (native.LOSS_SCALE_OPTIMIZERS + (tf.train.Optimizer,))[0]


class MixedPrecisionLossScaleOptimizer(_Native):
  """Wraps an optimizer for float16: scales the loss so that small gradients do not
  underflow, skips overflowed steps.

      scale = loss_scale()  # read once
      grads = inner.compute_gradients(loss * scale) / scale
      update_op, should_apply = loss_scale.update(grads)  # as passed to apply_gradients
      if should_apply and all_finite(grads):  # on all replicas
        inner.apply_gradients(grads)  # variables, slots, counters and global_step

  A step is applied completely or not at all. Variables, slots and counters have the
  names that the inner optimizer alone would give them. `DynamicLossScale` adds
  `current_loss_scale` and `good_steps`.

  `get_slot`, `get_slot_names`, `get_name` and all public attributes that this class
  lacks are those of the inner optimizer.

  Source: `tf.compat.v1.train.experimental.MixedPrecisionLossScaleOptimizer`;
  Micikevicius et al., "Mixed Precision Training", 2018 (arXiv:1710.03740).
  """

  def __init__(
    self,
    opt: tf.train.Optimizer,
    loss_scale: Any,
    *,
    skip_nonfinite: bool = True,
    check_computed_gradients: bool = True,
    finite_reducer: Optional[step.FiniteReducer] = None,
    **kwargs: object,
  ) -> None:
    """Wraps an optimizer.

    Args:
      opt: the inner optimizer, any `tf.compat.v1.train.Optimizer`. If it was made with
        `use_locking`, concurrent steps of several threads also update the loss scale
        one at a time.
      loss_scale: a number from 1 to 2**126 for a fixed scale, "dynamic", or a
        LossScale, ours or TensorFlow's.
      skip_nonfinite: whether to skip steps with non-finite gradients even if the loss
        scale's `should_apply` is True. False adds no check and no conditional to those
        of the loss scale: with a fixed scale, every step is applied.
      check_computed_gradients: whether the finite check also covers the gradients as
        `compute_gradients` returned them, if those passed to `apply_gradients` are not
        copies of them: clipping, averages and masks can hide an overflow. Then a run
        that feeds such a gradient (`feed_dict`) must also feed the model's inputs, or
        fails with "You must feed a value for placeholder tensor": pass False for such
        programs.
      finite_reducer: reduces the result of the finite check over processes that train
        together without `tf.distribute`: maps a bool tensor, True if the gradients are
        finite in this process, to one that is True if they are finite in all. Called
        once for each train op, outside of all branches, with a scalar; with a vector,
        reduced element by element, by `apply_gradients_together` and
        `GradientAccumulator(skip="micro_batch")`. None means
        `mp_compat.horovod.all_ranks_finite` if Horovod's ranks could disagree, else no
        reduction.
      **kwargs: further arguments of `Optimizer.__init__` in this TensorFlow version,
        beyond `use_locking` and `name`.

    Raises:
      ValueError: If `opt` is not a `tf.compat.v1.train.Optimizer`, already scales the
        loss, or is or wraps a `SyncReplicasOptimizer`; if `loss_scale` is None or not a
        loss scale; or if `finite_reducer` is given with `skip_nonfinite=False`.
    """
    _check_inner(opt)
    if loss_scale is None:
      raise ValueError(
        "loss_scale cannot be None. To train without loss scaling, use the inner "
        "optimizer alone."
      )
    if finite_reducer is not None and not skip_nonfinite:
      raise ValueError(
        "finite_reducer needs the check that skip_nonfinite=False disables. Pass only "
        "one of them."
      )
    self._optimizer = opt
    name = optimizers.name_of(opt)
    # Skips the constructor of TensorFlow's class, which takes other arguments and makes
    # a loss scale of its own.
    base: Any = super() if _Native is tf.train.Optimizer else super(_Native, self)
    base.__init__(optimizers.uses_locking(opt), name, **kwargs)
    self._loss_scale = get_loss_scale(loss_scale)
    _warn_if_scaled_gradients_are_used(opt, name, self._doing_dynamic_loss_scaling())
    if finite_reducer is None and horovod.leaves_gradients_unreduced(opt):
      finite_reducer = horovod.all_ranks_finite
    self._mp_compat_settings = step.Settings(
      skip_nonfinite,
      check_computed_gradients,
      finite_reducer,
      optimizers.uses_locking(self),
    )
    trackable.track(self, self._optimizer, "base_optimizer")
    trackable.track(self, self._loss_scale, "loss_scale")

  @property
  def inner_optimizer(self) -> tf.train.Optimizer:
    """Returns the wrapped optimizer."""
    return self._optimizer

  @property
  def loss_scale(self) -> LossScale:
    """Returns the LossScale; calling it returns the current loss scale, a float32
    scalar tensor.
    """
    return self._loss_scale

  @loss_scale.setter
  def loss_scale(self, value: object) -> None:
    raise AttributeError(
      "The loss scale of an optimizer cannot be replaced by {!r}. Pass it when the "
      "optimizer is made. To change the current scale of a DynamicLossScale, run "
      "opt.loss_scale.variables()[0].assign(value).".format(value)
    )

  @property
  def gradients_finite(self) -> tf.Tensor:
    """Returns a scalar bool tensor of the last `apply_gradients` in this graph: True if
    all gradients are finite.

    It covers all replicas. If fetched together with the train op, it describes the same
    step. Raises a RuntimeError if this graph has no `apply_gradients`, or one without a
    check (`skip_nonfinite=False` and a loss scale whose `should_apply` is not a
    tensor).
    """
    return step.last_tensor(
      [built.finite for built in recorded.steps_of(self)],
      "gradients_finite is the result of the finite check in apply_gradients()",
    )

  @property
  def step_applied(self) -> tf.Tensor:
    """Returns a scalar bool tensor of the last `apply_gradients` in this graph: True if
    it applies the gradients.

    Unlike `gradients_finite`, it includes the answer of the loss scale
    (`should_apply`). Fetch it together with the train op, as `gradients_finite`.
    Raises a RuntimeError if this graph has no `apply_gradients`, or one that applies
    every step (`skip_nonfinite=False` and a loss scale whose `should_apply` is not a
    tensor).
    """
    return step.last_tensor(
      [built.applied for built in recorded.steps_of(self)],
      "step_applied is the decision of apply_gradients() to apply or skip a step",
    )

  def _doing_dynamic_loss_scaling(self) -> bool:
    """Returns whether the loss scale is a DynamicLossScale, as in TensorFlow's class;
    only a warning depends on it.
    """
    return isinstance(
      self._loss_scale, (DynamicLossScale,) + native.DYNAMIC_LOSS_SCALES
    )

  @autograph.do_not_convert
  def minimize(
    self,
    loss: gradients.Loss,
    global_step: Optional[tf.Variable] = None,
    var_list: Optional[Iterable[tf.Variable]] = None,
    gate_gradients: int = tf.train.Optimizer.GATE_OP,
    aggregation_method: Optional[int] = None,
    colocate_gradients_with_ops: bool = False,
    name: Optional[str] = None,
    grad_loss: Optional[tf.Tensor] = None,
    **kwargs: object,
  ) -> Optional[tf.Operation]:
    """Calls `compute_gradients` and `apply_gradients`; the latter with `kwargs`, such
    as `decay_var_list`.

    Like TensorFlow's class, it does not call the inner optimizer's `minimize`. If that
    is its own, it logs a warning.
    """
    if type(self._optimizer).minimize is not tf.train.Optimizer.minimize:
      records.warn_once(
        self,
        "%s has a minimize() of its own, which is not called: loss scaling calls its "
        "compute_gradients() and apply_gradients(). If its minimize() does more, such "
        "as weight decay, that is missing.",
        type(self._optimizer).__name__,
      )
    grads_and_vars = self.compute_gradients(
      loss,
      var_list,
      gate_gradients,
      aggregation_method,
      colocate_gradients_with_ops,
      grad_loss,
    )
    return self.apply_gradients(grads_and_vars, global_step, name, **kwargs)

  @autograph.do_not_convert
  def compute_gradients(
    self,
    loss: gradients.Loss,
    var_list: Optional[Iterable[tf.Variable]] = None,
    gate_gradients: int = tf.train.Optimizer.GATE_OP,
    aggregation_method: Optional[int] = None,
    colocate_gradients_with_ops: bool = False,
    grad_loss: Optional[tf.Tensor] = None,
  ) -> List[gradients.GradAndVar]:
    """Returns the gradients of `loss * scale`, divided by the loss scale.

    Args:
      loss: a tensor of any shape, float16, bfloat16, float32 or float64, or a callable
        that returns one (required in eager mode).
      var_list: the variables, or their casts by `float32_variable_storage_getter`; by
        default the graph's trainable variables, for a callable those that it reads.
      gate_gradients: `GATE_NONE`, `GATE_OP` or `GATE_GRAPH`; with the last, no returned
        gradient is available before all are computed and unscaled.
      aggregation_method: see `tf.AggregationMethod`.
      colocate_gradients_with_ops: whether gradients are computed on the devices of
        their ops.
      grad_loss: the gradient with respect to `loss`, of its shape; ones by default.

    Returns:
      A list of `(gradient, variable)` pairs. A gradient has the variable's shape and
      the dtype that the inner optimizer computed it in; it is a dense tensor,
      `tf.IndexedSlices` or None.

    Raises:
      ValueError: If `gate_gradients` is another value, `loss` is not floating, there
        are no variables, or the current strategy is not supported (TPUs).
      RuntimeError: If `loss` is not callable in eager mode.
    """
    _check_arguments(loss, gate_gradients)
    distribute.check_supported()
    options: Dict[str, Any] = dict(
      var_list=variable_scope.parts_of(var_list),
      gate_gradients=gate_gradients,
      aggregation_method=aggregation_method,
      colocate_gradients_with_ops=colocate_gradients_with_ops,
      grad_loss=grad_loss,
    )
    other_graph = graphs.other_graph_of(loss)
    if other_graph is not None:
      with other_graph.as_default():
        return self.compute_gradients(loss, **options)
    advice.on_loss(self, loss)
    scale = self._scale()
    compute = self._optimizer.compute_gradients
    args, keywords = optimizers.arguments_for(
      compute, tf.train.Optimizer.compute_gradients, options
    )
    scaled_loss = gradients.scale_loss(loss, scale)
    scaled: List[gradients.Gradient] = []
    variables: List[tf.Variable] = []
    for grad, variable in list(compute(scaled_loss, *args, **keywords)):
      scaled.append(self._convert_computed(grad))
      variables.append(variable)
    grads = gradients.unscale(scaled, scale)
    if gate_gradients == self.GATE_GRAPH and not tf.executing_eagerly():
      grads = tf.tuple(grads)
    recorded.state_of(self, graphs.init_scope_graph()).has_unscaled = True
    # tensors may have no name
    lineage.record(grads, (variable.name for variable in variables), scaled, scale)
    return list(zip(grads, variables))

  @autograph.do_not_convert
  def scale_loss(self, loss: gradients.Loss) -> gradients.Loss:
    """Returns `loss * scale`, for code that calls `tf.gradients` itself and passes the
    result to `unscale_gradients`.

        grads = opt.unscale_gradients(tf.gradients(opt.scale_loss(loss), variables))
        train_op = opt.apply_gradients(zip(grads, variables), global_step)

    `loss` is a tensor of any shape, float16, bfloat16, float32 or float64 (else a
    ValueError), and so is the result; or a callable that returns one, for which the
    result is a callable.
    """
    scale = self._scale()
    if not tf.executing_eagerly():  # in eager mode, each call reads the current scale
      scale = tf.identity(scale)  # the program's own reads of the scale are others
      recorded.state_of(self, graphs.default_graph()).scales.append(scale)
    recorded.state_of(self, graphs.init_scope_graph()).has_scaled = True
    return gradients.scale_loss(loss, scale)

  @autograph.do_not_convert
  def unscale_gradients(
    self, grads: Iterable[gradients.Gradient]
  ) -> List[gradients.Gradient]:
    """Returns `g * (1 / scale)` for gradients of a loss that `scale_loss` scaled; see
    `check_computed_gradients`.

    Args:
      grads: gradients of any shapes and floating dtypes, dense, `tf.IndexedSlices` or
        None. The result is a list of as many, of the same kinds, shapes and dtypes.

    Raises:
      RuntimeError: If `scale_loss` was not called before in this graph.
      TypeError: If a gradient cannot be converted to a numeric tensor.
    """
    if not recorded.state_of(self, graphs.init_scope_graph()).has_scaled:
      raise RuntimeError(
        "unscale_gradients() needs gradients of a scaled loss, but scale_loss() was "
        "not called in this graph. Call tf.gradients(opt.scale_loss(loss), variables)."
      )
    scaled = [self._convert_computed(grad) for grad in grads]
    scale = self._recorded_scale()
    grads = gradients.unscale(scaled, scale)
    recorded.state_of(self, graphs.init_scope_graph()).has_unscaled = True
    names = ["gradient {}".format(i) for i in range(len(grads))]
    lineage.record(grads, names, scaled, scale, are_names_of_variables=False)
    return grads

  def _convert_computed(self, grad: object) -> gradients.Gradient:
    """Returns a gradient of the scaled loss as it is unscaled."""
    return gradients.convert(grad)

  def _scale(self) -> tf.Tensor:
    """Returns a new read of the loss scale, a float32 scalar."""
    return gradients.readable(tf.cast(self._loss_scale(), tf.float32))

  def _recorded_scale(self) -> tf.Tensor:
    """Returns the scale that `scale_loss` read if ops built now can read it; otherwise
    reads the scale again.
    """
    for graph in graphs.enclosing_graphs():
      scales = recorded.state_of(self, graph).scales
      if scales and contexts.is_readable(scales[-1]):
        return scales[-1]
    return self._scale()

  @autograph.do_not_convert
  def apply_gradients(
    self,
    grads_and_vars: Iterable[gradients.GradAndVar],
    global_step: Optional[tf.Variable] = None,
    name: Optional[str] = None,
    **kwargs: object,
  ) -> Optional[tf.Operation]:
    """Applies the gradients on all replicas, or skips the step if any gradient on any
    replica is not finite.

    Args:
      grads_and_vars: an iterable of pairs as `compute_gradients` returns them, possibly
        clipped, averaged, fed or replaced; exactly these are checked and applied. A
        gradient is a tensor, `tf.IndexedSlices`, a variable, a NumPy array, a list, a
        number, or None.
      global_step: a variable to increment by one with every applied step.
      name: the name of the returned op; by default the name of the inner optimizer.
      **kwargs: further arguments of the inner optimizer's `apply_gradients`.

    Returns:
      One op that applies or skips the step and updates the loss scale; None in eager
      mode.

    Raises:
      ValueError: If called in a cross-replica context or under an unsupported strategy
        (TPUs), if all gradients are None or some are means of a `GradientAccumulator`,
        or if `finite_reducer` does not return a bool tensor of the shape passed to it.
      TypeError: If a gradient cannot be converted to a numeric tensor, or is neither
        floating nor of its variable's dtype; or if `global_step` is a string.
    """
    if isinstance(global_step, str):
      raise TypeError(
        "global_step must be a variable, such as tf.train.get_or_create_global_step(), "
        "or None, but got {!r}. Pass the name of the op as name={!r}.".format(
          global_step, global_step
        )
      )
    part = self._prepare_step(grads_and_vars)
    return distribute.merge_call(step.apply_first, [part], global_step, name, **kwargs)

  def _prepare_step(self, grads_and_vars: Iterable[gradients.GradAndVar]) -> step.Part:
    """Returns the part of a step in this replica; raises a ValueError for means of a
    GradientAccumulator.
    """
    part = self._prepare_part(grads_and_vars)
    step.check_not_of_window(part)
    return part

  def _prepare_part(self, grads_and_vars: Iterable[gradients.GradAndVar]) -> step.Part:
    """Returns the part of a step in this replica, whose gradients may be means of a
    GradientAccumulator.
    """
    distribute.check_replica_context()
    settings = self._mp_compat_settings
    check = settings.skip_nonfinite or is_updated_by_check(self._loss_scale)
    return step.prepare(grads_and_vars, settings, check, self)

  def get_name(self) -> str:
    """Returns the inner optimizer's name."""
    return self._name

  def get_slot(self, var: tf.Variable, name: str) -> Optional[tf.Variable]:
    """Returns the inner optimizer's slot `name` for `var`, or None."""
    return trackable.slot_of_inner(self._optimizer, var, name)

  def get_slot_names(self) -> List[str]:
    """Returns the names of the inner optimizer's slots."""
    return [trackable.SlotName(name) for name in self._optimizer.get_slot_names()]

  def variables(self) -> List[tf.Variable]:
    """Returns the variables of the inner optimizer in the current graph, then those of
    the loss scale.
    """
    return list(self._optimizer.variables()) + list(self._loss_scale._weights.values())

  def __getattr__(self, name: str) -> Any:
    """Returns an attribute that this class lacks from the inner optimizer."""
    own = vars(MixedPrecisionLossScaleOptimizer).get(name)
    # It raised an AttributeError, which the inner optimizer's would replace.
    if isinstance(own, property):
      return own.__get__(self)
    return optimizers.inner_attribute(self, name)

  def __setattr__(self, name: str, value: object) -> None:
    owner = self._optimizer if optimizers.sets_inner_attribute(self, name) else super()
    owner.__setattr__(name, value)

  def _never_called(self, *args: object, **kwargs: object) -> NoReturn:
    """Replaces the methods that the base class calls to apply one gradient."""
    raise RuntimeError(
      "This function should never be called: the inner optimizer applies the gradients."
    )

  _apply_dense = _apply_sparse = _resource_apply_dense = _resource_apply_sparse = (
    _never_called
  )


def _check_arguments(loss: gradients.Loss, gate_gradients: int) -> None:
  """Raises the errors of `compute_gradients` for a loss, and for `gate_gradients`."""
  gates = (
    tf.train.Optimizer.GATE_NONE,
    tf.train.Optimizer.GATE_OP,
    tf.train.Optimizer.GATE_GRAPH,
  )
  if gate_gradients not in gates:
    names = "Optimizer.GATE_NONE, Optimizer.GATE_OP, Optimizer.GATE_GRAPH"
    raise ValueError(
      "gate_gradients must be one of: {}.  Not {}".format(names, gate_gradients)
    )
  if tf.executing_eagerly() and not callable(loss):
    raise RuntimeError(
      "`loss` passed to Optimizer.compute_gradients should be a function when eager "
      "execution is enabled: one that computes the loss, but got {!r}. To build a "
      "graph instead, call tf.disable_v2_behavior() first.".format(loss)
    )


def _check_inner(opt: object) -> None:
  """Raises a ValueError if `opt` is no optimizer that can be wrapped: see
  `MixedPrecisionLossScaleOptimizer.__init__`.
  """
  if not isinstance(opt, tf.train.Optimizer):
    hint = (
      "Pass an instance of a tf.compat.v1.train.Optimizer, such as "
      "tf.compat.v1.train.AdamOptimizer()."
    )
    if any(native.is_of_keras(base) for base in type(opt).__mro__):
      hint = (
        "That is a Keras optimizer; wrap it in mp_compat.keras.LossScaleOptimizer "
        "instead."
      )
    got = opt if isinstance(opt, type) else type(opt)
    raise ValueError(
      '"opt" must be an instance of Optimizer, but got: {}. {}'.format(got, hint)
    )
  for layer in optimizers.wrapper_chain(opt):
    names = type(opt).__name__, type(layer).__name__
    own = (MixedPrecisionLossScaleOptimizer,) + native.LOSS_SCALE_OPTIMIZERS
    if isinstance(layer, own) or type(layer).__name__ == "LossScaleOptimizer":
      raise ValueError(
        '"opt" must not scale the loss itself, but {} is or wraps a {}: the loss would '
        "be scaled twice. Pass its inner optimizer.".format(*names)
      )
    if isinstance(layer, tf.train.SyncReplicasOptimizer):
      raise ValueError(
        '"opt" must not aggregate the gradients of several workers itself, but {0} is '
        "or wraps a {1}: after a step that one worker skips, the others would wait "
        "forever. Wrap in the other order: "
        "{1}(MixedPrecisionLossScaleOptimizer(opt, loss_scale), ...).".format(*names)
      )


def _warn_if_scaled_gradients_are_used(
  opt: tf.train.Optimizer, name: str, dynamic: bool
) -> None:
  """Logs a warning if `opt` sums or clips gradients before they are unscaled."""
  if dynamic and horovod.aggregates_passes(opt):
    log.warn(
      "%s sums the gradients of several passes before they are unscaled. If the loss "
      "scale changes between two passes, the sum is wrong. Wrap in the other order: "
      "hvd.DistributedOptimizer(MixedPrecisionLossScaleOptimizer(opt, loss_scale), "
      "backward_passes_per_step=...).",
      name,
    )
  # tensorflow-privacy
  if any(hasattr(layer, "_dp_sum_query") for layer in optimizers.wrapper_chain(opt)):
    log.warn(
      "%s clips gradients in compute_gradients(), before they are unscaled, so its "
      "l2_norm_clip applies to scaled gradients. Wrap in the other order: "
      "make_optimizer_class(mp_compat.MixedPrecisionLossScaleOptimizer)(..., opt, "
      "loss_scale).",
      name,
    )
