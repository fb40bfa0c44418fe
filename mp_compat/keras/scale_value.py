# SPDX-License-Identifier: Apache-2.0
"""The value of `opt.loss_scale`: a LossScale for code of TensorFlow 2.0 to 2.3, a float32 tensor for later code."""

from typing import Any, Optional

import numpy as np

from mp_compat._tensorflow import autograph
from mp_compat._tensorflow import tf

_AnyTensor: Any = object  # for type checkers, which assume that it has all operators


@autograph.exclude_from_autograph
class LossScaleValue(_AnyTensor):
  """A float32 scalar tensor, the value of a loss scale when it was read, that is called as the loss scale is.

  opt.loss_scale * x, float(opt.loss_scale)   as a tensor
  opt.loss_scale(), opt.loss_scale.update(g)  as the LossScale, to which it is equal
  """

  def __init__(self, tensor: tf.Tensor, loss_scale: Any) -> None:
    self._tensor, self._loss_scale = tensor, loss_scale

  def __call__(self) -> tf.Tensor:
    return self._loss_scale()

  def _as_graph_element(self) -> tf.Tensor:  # called by `session.run`
    return self._tensor

  def __getattr__(self, name: str) -> Any:
    if name.startswith("__"):  # looked up by copy and pickle
      raise AttributeError(name)
    return getattr(self._tensor if hasattr(self._tensor, name) else self._loss_scale, name)

  def __array__(self, dtype: Any = None, copy: Optional[bool] = None) -> np.ndarray:
    del copy  # The array is always a copy.
    return np.array(self._tensor.numpy(), dtype)

  def __eq__(self, other: Any) -> Any:  # compared by `compile` up to TensorFlow 2.3
    other = other._loss_scale if isinstance(other, LossScaleValue) else other
    return self._loss_scale is other if callable(other) else self._tensor == other

  def __ne__(self, other: Any) -> Any:
    return not self == other if callable(other) else self._tensor != other

  def __hash__(self) -> int:
    return hash(self._loss_scale)


for _name in tf.Tensor.OVERLOADABLE_OPERATORS | {"__float__", "__int__", "__format__", "__repr__"}:
  if _name not in vars(LossScaleValue):
    setattr(LossScaleValue, _name, lambda self, *args, name=_name: getattr(self._tensor, name)(*args))

tf.register_tensor_conversion_function(
  LossScaleValue, lambda value, dtype=None, name=None, as_ref=False: tf.convert_to_tensor(value._tensor, dtype, name)
)
