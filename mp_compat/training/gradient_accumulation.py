# SPDX-License-Identifier: Apache-2.0
"""Accumulates the gradients of micro-batches, each computed in a separate
`session.run`; applies them as one step.
"""

import dataclasses
from typing import Any, Iterable, List, Optional, Union
import weakref

from mp_compat._tensorflow import autograph
from mp_compat._tensorflow import tf
from mp_compat._tensorflow import variables
from mp_compat.core import arguments
from mp_compat.core import distribute
from mp_compat.core import gradients
from mp_compat.core import lineage
from mp_compat.graph import contexts
from mp_compat.graph import control_flow
from mp_compat.graph import gate
from mp_compat.graph import graphs
from mp_compat.graph import records
from mp_compat.training import advice
from mp_compat.training import step
from mp_compat.training.optimizer import MixedPrecisionLossScaleOptimizer

GradAndVar = gradients.GradAndVar


@dataclasses.dataclass
class Window:
  """What a GradientAccumulator keeps in a graph that a Session runs; the lists are in
  the order passed to `add`.

  Attributes:
    var_list: The variables that gradients are accumulated for; empty before the first
      `add`.
    dtypes: The dtypes of their gradients; None for None.
    sums: The local variables with the sums of their gradients; None for None.
    finite_count: Counts the micro-batches that were finite, an int64 scalar.
    overflow_count: Counts those that were not, an int64 scalar.
    means: All gradients that `mean` returned, which are read before the window is
      cleared.
    adding_graphs: The graphs that called `add`: this one, or functions inside of it.
  """

  var_list: List[tf.Variable] = dataclasses.field(default_factory=list)
  dtypes: List[Optional[tf.DType]] = dataclasses.field(default_factory=list)
  sums: List[Optional[tf.Variable]] = dataclasses.field(default_factory=list)
  finite_count: tf.Variable = None
  overflow_count: tf.Variable = None
  means: List[tf.Tensor] = dataclasses.field(default_factory=list)
  adding_graphs: "weakref.WeakSet[tf.Graph]" = dataclasses.field(
    default_factory=weakref.WeakSet
  )


class GradientAccumulator:
  """Accumulates unscaled gradients over a window of micro-batches, one per
  `session.run`; applies them as one step.

      add(grads):                            # each micro-batch
        if all_finite(grads):
          finite += 1
          sums += grads
        else:
          overflowed += 1
      mean():
        if skip == "window" and overflowed > 0: NaN
        else: sums / finite
      apply_gradients(mean()):               # each window
        the step of the optimizer, not finite if overflowed > 0
        finite = overflowed = sums = 0

  In a program:

      window = mp_compat.GradientAccumulator(opt)
      add_op = window.add(opt.compute_gradients(loss))
      train_op = window.apply_gradients(window.mean(), global_step)
      ...
      sess.run(tf.local_variables_initializer())
      for batches in windows:
        for batch in batches:
          sess.run(add_op, batch)  # a backward pass
        sess.run(train_op)  # no backward pass; empties the window

  Every micro-batch is checked when it is added. One that is not finite is counted but
  not added. The loss scale is updated once for each window; the window counts as finite
  if all of its micro-batches are finite. With `skip="window"`, an overflow skips the
  window; with `skip="micro_batch"`, the other micro-batches are applied.

  The sums are local variables, float32, or of the gradient's dtype if it is float64 or
  complex: checkpoints do not contain them, and a restored run begins with an empty
  window. Sparse gradients are summed in a dense variable.
  """

  def __init__(
    self, optimizer: MixedPrecisionLossScaleOptimizer, skip: str = "window"
  ) -> None:
    """Makes an accumulator for gradients that `optimizer` computes and applies.

    Raises a ValueError if `optimizer` is not a MixedPrecisionLossScaleOptimizer or was
    made with `skip_nonfinite=False`, or if `skip` is neither "window" nor
    "micro_batch".
    """
    if not isinstance(optimizer, MixedPrecisionLossScaleOptimizer):
      raise ValueError(
        "optimizer must be a MixedPrecisionLossScaleOptimizer, but got {!r}.".format(
          optimizer
        )
      )
    if not optimizer._mp_compat_settings.skip_nonfinite:
      raise ValueError(
        "GradientAccumulator needs the finite check; make the optimizer without "
        "skip_nonfinite=False."
      )
    arguments.choice("skip", skip, ("window", "micro_batch"))
    self._optimizer = optimizer
    self._skip = skip

  @autograph.do_not_convert
  def add(
    self, grads_and_vars: Iterable[GradAndVar], name: Optional[str] = None
  ) -> tf.Operation:
    """Returns an op that checks the gradients of a micro-batch and adds them to the
    window.

    Args:
      grads_and_vars: pairs as the optimizer's `compute_gradients` returns them; the
        variables have static shapes.
      name: a name for the op; "accumulate" by default.

    Raises:
      ValueError: If all gradients are None, a variable has no static shape, or `add`
        was already called in this graph. A function may be traced again: its traces add
        to one window if they pass the same variables and dtypes.
      TypeError: See `MixedPrecisionLossScaleOptimizer.apply_gradients`.
      RuntimeError: In eager mode, outside of functions.
      tf.errors.InvalidArgumentError: If `tf.local_variables_initializer()` was not run,
        in `session.run`.
    """
    if tf.executing_eagerly():
      raise RuntimeError(
        "GradientAccumulator works in graphs only. Use it in a tf.Graph or a "
        "tf.function."
      )
    built_before = len(tf.get_default_graph().get_operations())
    part = step.prepare(grads_and_vars, self._optimizer._mp_compat_settings)
    advice.on_gradients(self._optimizer, [grad for grad, _ in part.grads_and_vars])
    window = self._window(part.grads_and_vars)

    def add() -> tf.Operation:
      additions = [window.finite_count.assign_add(1, read_value=False)]
      for total, (grad, _) in zip(window.sums, part.grads_and_vars):
        if total is not None:
          additions.append(_add_to(total, grad))
      return tf.group(*additions)

    def count_overflow() -> tf.Operation:
      return tf.group(window.overflow_count.assign_add(1, read_value=False))

    initialized = tf.debugging.Assert(
      # not tf.is_variable_initialized, which fails in functions of TensorFlow 2.0
      window.finite_count.is_initialized(),
      [
        "The variables of this GradientAccumulator are not initialized. Run "
        "tf.local_variables_initializer()."
      ],
    )
    with tf.control_dependencies([initialized]):
      finite = tf.identity(part.finite)
    added = control_flow.cond(finite, add, count_overflow)
    accumulated = tf.group(added, name=name or "accumulate")
    gate.check_reads([accumulated], built_before)
    return accumulated

  @autograph.do_not_convert
  def mean(self) -> List[GradAndVar]:
    """Returns the mean gradients of the window's finite micro-batches, to be clipped,
    reduced and applied.

    The result is a list of (gradient, variable) pairs, in the order passed to `add`. A
    gradient is None if None was passed to `add`; otherwise a dense tensor with the
    variable's shape and the dtype passed to `add`, whose values are NaN if the window
    must be skipped.

    Raises:
      RuntimeError: If `add` was not called in this graph.
      tf.errors.InvalidArgumentError: If the window is empty, in `session.run`.
    """
    window = self._added()
    finite, overflowed = (
      window.finite_count.read_value(),
      window.overflow_count.read_value(),
    )
    added = tf.debugging.Assert(
      finite + overflowed > 0,
      [
        "This window is empty. Run the op that GradientAccumulator.add() returned "
        "before the train op."
      ],
    )
    with tf.control_dependencies([added]):
      count = tf.cast(finite, tf.float64)  # 0 makes 0 / 0
    if self._skip == "window":
      count = tf.where_v2(overflowed > 0, tf.cast(float("nan"), tf.float64), count)
    means: List[Optional[tf.Tensor]] = []
    for total, dtype in zip(window.sums, window.dtypes):
      mean = None
      if total is not None:
        mean = tf.cast(total.read_value() / tf.cast(count, total.dtype), dtype)
        window.means.append(mean)
      means.append(mean)
    names = [variable.name for variable in window.var_list]
    lineage.record(means, names, are_window_means=True)
    return list(zip(means, window.var_list))

  @autograph.do_not_convert
  @step.collected
  def apply_gradients(
    self,
    grads_and_vars: Iterable[GradAndVar],
    global_step: Optional[tf.Variable] = None,
    name: Optional[str] = None,
  ) -> tf.Operation:
    """Applies a window as one step of the optimizer and empties it.

    Arguments and errors are those of
    `MixedPrecisionLossScaleOptimizer.apply_gradients`, with pairs as `mean` returns
    them, possibly clipped or reduced; a RuntimeError if `add` was not called in this
    graph. The result is one op, which runs no backward pass. It empties the window
    after `mean` has read it: results of calls before this one can be fetched in the
    same `session.run`.
    """
    window = self._added()
    micro_batches_finite = None
    if self._skip == "micro_batch":
      micro_batches_finite = tf.equal(window.overflow_count.read_value(), 0)
    parts = [self._optimizer._prepare_part(grads_and_vars)]
    if micro_batches_finite is not None:
      # No gradients: it is only checked, so that an overflow lowers the loss scale.
      checked = step.Part((), micro_batches_finite, lineage.Lineage(), parts[0].scope)
      parts.append(checked)
    applied = distribute.merge_call(step.apply_first, parts, global_step, name)
    read: List[tf.Tensor] = []
    for mean in window.means:
      if mean.graph is tf.get_default_graph() and contexts.is_readable(mean):
        read.append(mean)
    # one op: each assignment would wait for each mean
    with tf.control_dependencies([tf.group(applied, *read)]):
      cleared: List[tf.Operation] = []
      for total in [window.finite_count, window.overflow_count] + window.sums:
        if total is not None:
          cleared.append(total.assign(tf.zeros_like(total), read_value=False))
    return tf.group(applied, *cleared)

  def _window(self, grads_and_vars: Iterable[GradAndVar]) -> Window:
    """Returns the window of this graph, whose variables the first `add` makes."""
    window = records.state_of(self, graphs.init_scope_graph(), Window)
    graph = graphs.default_graph()
    dtypes = [None if grad is None else grad.dtype for grad, _ in grads_and_vars]
    var_list = [variable for _, variable in grads_and_vars]
    if not window.var_list:
      with tf.name_scope("accumulate"):
        own_device = tf.no_op().device
      devices = []
      for grad, variable in grads_and_vars:
        total = None
        if grad is not None:
          devices.append(_device_of_sum(grad, own_device))
          total = _sum_for(grad, variable, devices[-1])
        window.sums.append(total)
      window.finite_count = _local([], tf.int64, "finite_micro_batches", devices[0])
      window.overflow_count = _local(
        [], tf.int64, "overflowed_micro_batches", devices[0]
      )
      window.var_list, window.dtypes = var_list, dtypes
    if graph in window.adding_graphs:
      raise ValueError(
        "add() was already called in this graph. Run the op that it returned once per "
        "micro-batch."
      )
    window.adding_graphs.add(graph)
    # eager variables may share a name
    same_variables = list(map(id, var_list)) == list(map(id, window.var_list))
    if not same_variables or dtypes != window.dtypes:
      raise ValueError(
        "add() must get gradients for the same variables, of the same dtypes, as in "
        "the first trace of this function: expected {}, but got {}. Use another "
        "GradientAccumulator for other variables.".format(
          _describe(window.var_list, window.dtypes), _describe(var_list, dtypes)
        )
      )
    return window

  def _added(self) -> Window:
    """Returns the window to which `add` has added in this graph; raises a RuntimeError
    if there is none.
    """
    window = records.state_of(self, graphs.init_scope_graph(), Window)
    if not window.var_list:
      raise RuntimeError(
        "This GradientAccumulator has no gradients in this graph. Call "
        "add(opt.compute_gradients(loss)) first."
      )
    return window


def _describe(var_list: List[tf.Variable], dtypes: List[Optional[tf.DType]]) -> str:
  """Returns variables with the dtypes of their gradients, for messages: "w:0 (float32),
  b:0 (None)".
  """
  return ", ".join(
    "{} ({})".format(v.name, dtype.name if dtype else None)
    for v, dtype in zip(var_list, dtypes)
  )


def _device_of_sum(grad: Union[tf.Tensor, tf.IndexedSlices], own_device: str) -> str:
  """Returns the device for the sum of a gradient: that of the gradient, or
  `own_device`, on which ops are placed now, if the gradient is in another task.

  On a parameter server, workers would share the sum by its name.
  """
  device = tf.DeviceSpec.from_string(grad.device)
  own = tf.DeviceSpec.from_string(own_device)
  if device.job is None or (device.job, device.task) == (own.job, own.task):
    return grad.device
  return own_device


def _sum_for(
  grad: Union[tf.Tensor, tf.IndexedSlices], variable: tf.Variable, device: str
) -> tf.Variable:
  """Makes a variable of zeros for the sum of a gradient."""
  if not variable.shape.is_fully_defined():
    raise ValueError(
      "Gradients can only be accumulated for variables of static shape, but {} has the "
      "shape {}.".format(variable.name, variable.shape)
    )
  is_wide = grad.dtype.is_complex or grad.dtype == tf.float64
  dtype = grad.dtype if is_wide else tf.float32
  return _local(variable.shape, dtype, "accumulated_gradient", device)


def _local(shape: Any, dtype: tf.DType, name: str, device: str) -> tf.Variable:
  """Makes a local variable of zeros for this replica in this process; checkpoints do
  not contain it.
  """
  # A parameter server's device function would share it among workers.
  with graphs.init_scope(), tf.device(device):
    return variables.replica_variable(
      lambda: tf.zeros(shape, dtype),
      name=name,
      trainable=False,
      collections=[tf.GraphKeys.LOCAL_VARIABLES],
    )


def _add_to(
  total: tf.Variable, grad: Union[tf.Tensor, tf.IndexedSlices]
) -> tf.Operation:
  """Returns an op that adds a gradient, in the dtype of `total`, to this variable; of a
  sparse one, only the rows that it has.
  """
  grad = gradients.map_values(lambda values: tf.cast(values, total.dtype), grad)
  if isinstance(grad, tf.IndexedSlices):
    return total.scatter_add(grad)
  return total.assign_add(grad, read_value=False)
