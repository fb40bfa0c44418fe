# SPDX-License-Identifier: Apache-2.0
"""The mixin of the Keras wrapper for newer Keras 2 optimizers: `tf.keras` of TensorFlow 2.11 to 2.15, and tf_keras."""

import contextlib
from typing import Any, FrozenSet, Iterable, List, Optional

from mp_compat._tensorflow import autograph
from mp_compat._tensorflow import keras_trackable
from mp_compat._tensorflow import tf
from mp_compat.core import gradients


class OptimizerV3Mixin(keras_trackable.AnyBase):
  """Makes the wrapper an `Optimizer` of Keras 2.11 to 2.15."""

  _own_attributes: FrozenSet[str] = frozenset()
  _writes_later_config = True

  def _initialize(self, name: Optional[str]) -> None:
    del name  # The inner optimizer has a name.
    keras_trackable.track(self, self._optimizer, self._loss_scale, earlier_exists=False)

  @autograph.do_not_convert
  def minimize(self, loss: Any, var_list: Any, tape: Optional[tf.GradientTape] = None) -> None:
    """Computes gradients of the scaled loss, unscales and applies them; arguments as for Keras's `minimize`."""
    self.apply_gradients(self.compute_gradients(loss, var_list, tape))

  def compute_gradients(
    self, loss: Any, var_list: Any, tape: Optional[tf.GradientTape] = None
  ) -> List[gradients.GradAndVar]:
    """Returns unscaled gradients of the scaled loss.

    Args:
      loss: a floating tensor that was computed under `tape`, or a callable that returns one.
      var_list: variables, or a callable that returns them.
      tape: a `tf.GradientTape`; optional for a callable.

    Returns:
      A list of (gradient, variable) pairs.

    Raises:
      ValueError: If the loss is not floating, or is a tensor without a tape.
    """
    with contextlib.ExitStack() as stack:
      if tape is not None:
        stack.enter_context(tape)
      loss = self.get_scaled_loss(loss)
    pairs = self._optimizer.compute_gradients(loss, var_list, tape)
    unscaled = self.get_unscaled_gradients(grad for grad, _ in pairs)
    return [(grad, variable) for grad, (_, variable) in zip(unscaled, pairs)]

  @autograph.do_not_convert
  def apply_gradients(
    self,
    grads_and_vars: Iterable[gradients.GradAndVar],
    name: Optional[str] = None,
    skip_gradients_aggregation: bool = False,
    experimental_aggregate_gradients: bool = True,
  ) -> None:
    """Applies the gradients on all replicas, or on none if any is not finite, and updates the loss scale.

    Args:
      grads_and_vars: (gradient, variable) pairs with unscaled gradients; with no pairs, nothing is done.
      name: ignored, as in Keras.
      skip_gradients_aggregation: whether the gradients are already sums over all replicas.
      experimental_aggregate_gradients: the opposite of `skip_gradients_aggregation`, under its older name.

    Raises:
      ValueError: If called in a cross-replica context or under an unsupported strategy, or if all gradients are None.
      TypeError: If a gradient is not floating.
    """
    del name
    self._check_step()
    inner = self._optimizer
    grads_and_vars = list(grads_and_vars)
    if not grads_and_vars:  # Nothing to train.
      return
    grads_and_vars = gradients.convert_pairs(grads_and_vars)
    with tf.init_scope():
      inner.build([variable for _, variable in grads_and_vars])
    grads_and_vars = [pair for pair in grads_and_vars if pair[0] is not None]
    if experimental_aggregate_gradients and not skip_gradients_aggregation:
      # The check then covers sums that overflow, and no worker waits in a branch that another did not take.
      grads_and_vars = inner.aggregate_gradients(grads_and_vars)
    self._apply(grads_and_vars, lambda pairs: inner.apply_gradients(pairs, skip_gradients_aggregation=True))

  def set_weights(self, weights: List[Any]) -> None:
    """Sets the inner optimizer's variables, in the order of `variables`; called by `load_model` for HDF5."""
    self._optimizer.set_weights(weights)

  def exclude_from_weight_decay(self, *args: Any, **kwargs: Any) -> None:
    """Excludes variables from the inner optimizer's weight decay; arguments as for Keras's method."""
    self._optimizer.exclude_from_weight_decay(*args, **kwargs)
