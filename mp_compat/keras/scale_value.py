# SPDX-License-Identifier: Apache-2.0
"""The value of `opt.loss_scale`: a LossScale for code of TensorFlow 2.0 to 2.3, a float32 tensor for later code."""

import dataclasses
from typing import Any, Optional

import numpy as np

from mp_compat._tensorflow import autograph
from mp_compat._tensorflow import tf


@dataclasses.dataclass
class KerasState:
  """What a LossScaleOptimizer keeps in a graph (a Session's or a function's), or in eager mode."""

  scale: Optional[tf.Tensor] = None  # that `get_scaled_loss` read, until `get_unscaled_gradients` uses it; in graphs
  fetched_scale: Optional[tf.Tensor] = None  # that `session.run(opt.loss_scale)` fetches
  # Whether Keras 3's `apply_gradients` takes scaled gradients: True after `scale_loss`; else False after
  # `get_unscaled_gradients`; else None.
  takes_scaled: Optional[bool] = None
  # For warnings, in this graph and functions inside of it: whether a loss was scaled, and whether
  # `get_unscaled_gradients` was called, with Keras 3 after the last `scale_loss`.
  has_scaled: bool = False
  has_unscaled: bool = False


_AnyNumber: Any = object  # for type checkers, which assume that it has all operators


@autograph.exclude_from_autograph
class LossScaleValue(_AnyNumber):
  """Passes calls, attributes and `isinstance` on to a LossScale, and what that lacks to a tensor of its current value.

      opt.loss_scale()                      as a LossScale: a call, `update`, `get_config`, `isinstance`
      opt.loss_scale * x                    as a float32 scalar tensor: arithmetic, inputs of ops, tensor attributes,
      session.run(opt.loss_scale)           fetches of `session.run`; in eager mode also float() and numpy()

  `==` compares LossScales by identity, and other values as tensors.
  """

  def __init__(self, loss_scale: Any, fetched: Optional[tf.Tensor]) -> None:
    """Makes the value of `loss_scale`; `fetched` is what `session.run` fetches, None in eager mode."""
    self._loss_scale = loss_scale
    self._fetched = fetched

  @property  # type: ignore[misc]  # `object` also has a setter
  def __class__(self) -> type:  # read by isinstance
    return type(self._loss_scale)

  def __call__(self) -> tf.Tensor:
    return tf.cast(self._loss_scale(), tf.float32)

  def _as_graph_element(self) -> Optional[tf.Tensor]:  # called by `session.run`
    return self._fetched

  def __getattr__(self, name: str) -> Any:
    if name.startswith("__"):  # looked up by copy and pickle
      raise AttributeError(name)
    return getattr(self._loss_scale if hasattr(self._loss_scale, name) else self(), name)

  def __array__(self, dtype: Any = None, copy: Optional[bool] = None) -> np.ndarray:
    del copy  # The array is always a copy.
    return np.array(self().numpy(), dtype)

  def __repr__(self) -> str:
    return repr(self._loss_scale)

  def __hash__(self) -> int:
    return hash(self._loss_scale)

  def __eq__(self, other: Any) -> Any:
    if callable(other):  # a LossScale or a LossScaleValue
      return self._loss_scale is getattr(other, "_loss_scale", other)
    return self() == other

  def __ne__(self, other: Any) -> Any:
    return not self == other if callable(other) else self() != other


for _name in tf.Tensor.OVERLOADABLE_OPERATORS | {"__float__", "__int__", "__format__"}:
  if _name not in vars(LossScaleValue):
    setattr(LossScaleValue, _name, lambda self, *args, name=_name: getattr(self(), name)(*args))

tf.register_tensor_conversion_function(
  LossScaleValue, lambda value, dtype=None, name=None, as_ref=False: tf.convert_to_tensor(value(), dtype, name)
)
