# SPDX-License-Identifier: Apache-2.0
"""Enables TensorFlow's graph rewrite to float16 together with loss scaling."""

import contextlib
from typing import Any, Callable, Iterator, List, NamedTuple, Optional

from mp_compat._tensorflow import auto_mixed_precision
from mp_compat._tensorflow import native
from mp_compat._tensorflow import tf
from mp_compat.keras import loss_scale_optimizer as keras_optimizer
from mp_compat.keras import optimizer_kinds
from mp_compat.training import optimizer

_Wrap = Callable[[Any, Any], Any]  # wraps an optimizer, with a loss scale

_OURS = optimizer.MixedPrecisionLossScaleOptimizer


class _Wrapper(NamedTuple):
  """How the optimizers of a class are wrapped.

  Attributes:
    optimizer_cls: The base class of the optimizers.
    wrap: Called with an optimizer and a loss scale; returns the wrapped optimizer.
    wrapped_cls: The class of the wrapped optimizers.
  """

  optimizer_cls: type
  wrap: _Wrap
  wrapped_cls: type


# Searched from last to first.
_wrappers: List[_Wrapper] = [_Wrapper(tf.train.Optimizer, _OURS, _OURS)]


def enable_mixed_precision_graph_rewrite(
  opt: Any = None, loss_scale: Any = "dynamic"
) -> Any:
  """Enables float16 in new Sessions and functions, and wraps an optimizer with loss
  scaling.

      opt = tf.train.AdamOptimizer()
      opt = mp_compat.enable_mixed_precision_graph_rewrite(opt)
      train_op = opt.minimize(loss)
      with tf.Session() as sess: ...  # made after the call; existing ones do not change

  The rewrite does not change the graph that is built. TensorFlow's
  `auto_mixed_precision` rewrites it at run time, to float16 where that is numerically
  safe, on GPUs with fast float16 arithmetic.

  Args:
    opt: the optimizer to wrap: a `tf.compat.v1.train.Optimizer`, a Keras optimizer, or
      an instance of a class that was passed to `register_loss_scale_wrapper`; None for
      programs that do not train.
    loss_scale: a number from 1 to 2**126 for a fixed scale, "dynamic", or a LossScale,
      ours or TensorFlow's.

  Returns:
    The wrapped optimizer; None if `opt` is None.

  Raises:
    ValueError: If `opt` is none of these or already scales the loss, if `loss_scale` is
      not a loss scale, or if a mixed precision policy of Keras is set, which is an
      alternative to the rewrite.

  Source: `tf.compat.v1.train.experimental.enable_mixed_precision_graph_rewrite`.
  """
  wrap = None
  if opt is not None:
    wrap = _wrapper_for(opt)
  was_on = auto_mixed_precision.is_enabled()
  auto_mixed_precision.enable()
  try:
    if wrap is None:
      return None
    return wrap(opt, loss_scale)
  except BaseException:
    if not was_on:
      disable_mixed_precision_graph_rewrite()
    raise


def disable_mixed_precision_graph_rewrite() -> None:
  """Disables the rewrite for new Sessions and functions. Wrapped optimizers still scale
  the loss.

  Source: `tf.compat.v1.train.experimental.disable_mixed_precision_graph_rewrite`.
  """
  auto_mixed_precision.disable()


@contextlib.contextmanager
def mixed_precision_graph_rewrite(
  opt: Any = None, loss_scale: Any = "dynamic"
) -> Iterator[Any]:
  """Enables the graph rewrite inside a with-block, and wraps an optimizer with loss
  scaling.

  Sessions and functions that are made in the block are still rewritten after it. If the
  rewrite was enabled before the block, it stays enabled.

  Args:
    opt: the optimizer to wrap, or None; see `enable_mixed_precision_graph_rewrite`.
    loss_scale: its loss scale; see `enable_mixed_precision_graph_rewrite`.

  Yields:
    The wrapped optimizer; None if `opt` is None.

  Raises:
    ValueError: See `enable_mixed_precision_graph_rewrite`.
  """
  was_on = auto_mixed_precision.is_enabled()
  try:
    yield enable_mixed_precision_graph_rewrite(opt, loss_scale)
  finally:
    if not was_on and auto_mixed_precision.is_enabled():
      disable_mixed_precision_graph_rewrite()


def register_loss_scale_wrapper(
  optimizer_cls: type, wrapper_fn: _Wrap, wrapper_cls: Optional[type] = None
) -> None:
  """Registers the wrapper that `enable_mixed_precision_graph_rewrite` uses for a class
  of custom optimizers.

  Later registrations take precedence.

  Args:
    optimizer_cls: the base class of the optimizers.
    wrapper_fn: a callable from an optimizer and a loss scale to the wrapped optimizer.
    wrapper_cls: the class of the wrapped optimizer; by default `wrapper_fn`, which must
      then be that class.

  Raises:
    TypeError: If `wrapper_cls`, or `wrapper_fn` without it, is not a class.

  Source: `tf.__internal__.mixed_precision.register_loss_scale_wrapper`.
  """
  wrapped = wrapper_cls or wrapper_fn
  if not isinstance(wrapped, type):
    raise TypeError(
      "wrapper_cls must be the class of the objects that wrapper_fn returns, and may "
      "be omitted only if wrapper_fn is that class. Expected a class, but got "
      "{!r}.".format(wrapped)
    )
  _wrappers.append(_Wrapper(optimizer_cls, wrapper_fn, wrapped))


def _wrapper_for(opt: object) -> _Wrap:
  """Returns what wraps an optimizer with loss scaling.

  Raises:
    ValueError: If `opt` already scales the loss, or is no optimizer.
  """
  if _scales_loss(opt):
    raise ValueError(
      '"opt" must not already be an instance of a {0}. '
      "`enable_mixed_precision_graph_rewrite` will "
      "automatically wrap the optimizer with a {0}.".format(type(opt).__name__)
    )
  for wrapper in reversed(_wrappers):
    if isinstance(opt, wrapper.optimizer_cls):
      return wrapper.wrap
  if optimizer_kinds.kind_of(type(opt)) is None:
    raise ValueError(
      '"opt" must be an instance of a tf.train.Optimizer or a '
      "tf.keras.optimizers.Optimizer, but got: {}. Pass None to compute in float16 "
      "without training.".format(opt)
    )
  return keras_optimizer.LossScaleOptimizer


def _scales_loss(opt: object) -> bool:
  """Returns whether an object is a wrapper that scales the loss: of this package, of
  TensorFlow, of Keras, or registered.
  """
  if type(opt).__name__ == "LossScaleOptimizer":
    return True
  classes = [keras_optimizer.LossScaleOptimizer, *native.LOSS_SCALE_OPTIMIZERS]
  for wrapper in _wrappers:
    classes.append(wrapper.wrapped_cls)
  return isinstance(opt, tuple(classes))
