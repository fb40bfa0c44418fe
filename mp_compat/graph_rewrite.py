"""TensorFlow's rewriting of graphs to float16, switched on together with loss scaling."""

import contextlib
from typing import Any, Callable, Iterator, List, NamedTuple, Optional

from mp_compat import _compat
from mp_compat import optimizer as optimizer_module
from mp_compat._compat import tf
from mp_compat.keras import families
from mp_compat.keras import loss_scale_optimizer as keras_optimizer


class _Wrapper(NamedTuple):
  """How optimizers of one kind get their loss scaling."""

  takes: Callable[[Any], bool]
  wrap: Callable[[Any, Any], Any]
  wrapped: type


# The later, the sooner it is asked.
_wrappers: List[_Wrapper] = [
    _Wrapper(lambda opt: families.of(type(opt)) is not None, keras_optimizer.LossScaleOptimizer,
             keras_optimizer.LossScaleOptimizer),
    _Wrapper(lambda opt: isinstance(opt, tf.train.Optimizer), optimizer_module.MixedPrecisionLossScaleOptimizer,
             optimizer_module.MixedPrecisionLossScaleOptimizer),
]


def enable_mixed_precision_graph_rewrite(opt: Any = None, loss_scale: Any = "dynamic") -> Any:
  """New Sessions and functions compute in float16 where that is safe, on GPUs that are good at it.

      opt = mp_compat.enable_mixed_precision_graph_rewrite(tf.train.AdamOptimizer())
      train_op = opt.minimize(loss)
      with tf.Session() as sess: ...        made after it; those made before stay as they are

  The graph stays as it is built; TensorFlow's `auto_mixed_precision` rewrites it when it is run.

  Args:
    opt: the optimizer to wrap, a `tf.compat.v1.train.Optimizer`, a Keras optimizer, or one that was told of to
      `register_loss_scale_wrapper`; None where nothing is trained.
    loss_scale: a number of at least 1 for a fixed scale, "dynamic", or a LossScale, ours or TensorFlow's.

  Returns:
    `opt` with loss scaling; None for None.

  Raises:
    ValueError: `opt` is none of these or scales the loss already; `loss_scale` means no loss scale; a Keras policy of
      mixed precision is set, which is the other way to compute in float16.

  Source: `tf.compat.v1.train.experimental.enable_mixed_precision_graph_rewrite`.
  """
  wrapper = None if opt is None else _wrapper_for(opt)
  was_on = _compat.graph_rewrite_is_on()
  _compat.switch_graph_rewrite_on()
  try:
    return None if wrapper is None else wrapper.wrap(opt, loss_scale)
  except BaseException:
    if not was_on:
      disable_mixed_precision_graph_rewrite()
    raise


def disable_mixed_precision_graph_rewrite() -> None:
  """New Sessions and functions are not rewritten any more; optimizers that were wrapped scale the loss as before.

  Source: `tf.compat.v1.train.experimental.disable_mixed_precision_graph_rewrite`.
  """
  _compat.switch_graph_rewrite_off()


@contextlib.contextmanager
def mixed_precision_graph_rewrite(opt: Any = None, loss_scale: Any = "dynamic") -> Iterator[Any]:
  """`enable_mixed_precision_graph_rewrite` for as long as a with-block lasts; gives the wrapped optimizer.

  Sessions and functions that are made in the block stay rewritten.

  Args:
    opt: the optimizer to wrap, or None.
    loss_scale: its loss scale.

  Raises:
    ValueError: as `enable_mixed_precision_graph_rewrite`.
  """
  was_on = _compat.graph_rewrite_is_on()
  try:
    yield enable_mixed_precision_graph_rewrite(opt, loss_scale)
  finally:
    if not was_on and _compat.graph_rewrite_is_on():
      disable_mixed_precision_graph_rewrite()


def register_loss_scale_wrapper(optimizer_cls: type,
                                wrapper_fn: Callable[[Any, Any], Any],
                                wrapper_cls: Optional[type] = None) -> None:
  """Lets `enable_mixed_precision_graph_rewrite` wrap optimizers of one's own.

  Args:
    optimizer_cls: the base class of the optimizers.
    wrapper_fn: gives the wrapped optimizer of an optimizer and a loss scale.
    wrapper_cls: the class of what it gives; by default `wrapper_fn`, which then is that class.

  Raises:
    TypeError: without `wrapper_cls`, `wrapper_fn` is no class.

  Source: `tf.__internal__.mixed_precision.register_loss_scale_wrapper`.
  """
  wrapped = wrapper_cls or wrapper_fn
  if not isinstance(wrapped, type):
    raise TypeError("wrapper_cls must be the class of what wrapper_fn returns, where that is a function, but got {!r}."
                    .format(wrapped))
  _wrappers.append(_Wrapper(lambda opt: isinstance(opt, optimizer_cls), wrapper_fn, wrapped))


def _wrapper_for(opt: Any) -> _Wrapper:
  wrapped = [wrapper.wrapped for wrapper in _wrappers] + list(_compat.NATIVE_LOSS_SCALE_OPTIMIZERS)
  for cls in wrapped:
    if isinstance(opt, cls) or type(opt).__name__ == "LossScaleOptimizer":
      raise ValueError("\"opt\" must not already be an instance of a {0}. `enable_mixed_precision_graph_rewrite` will "
                       "automatically wrap the optimizer with a {0}.".format(type(opt).__name__))
  for wrapper in reversed(_wrappers):
    if wrapper.takes(opt):
      return wrapper
  raise ValueError("\"opt\" must be an instance of a tf.train.Optimizer or a tf.keras.optimizers.Optimizer, but got: "
                   "{}. Pass None to compute in float16 without training.".format(opt))
