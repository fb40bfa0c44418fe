# SPDX-License-Identifier: Apache-2.0
"""The value of `opt.loss_scale`: a LossScale for code of TensorFlow 2.0 to 2.3, a float32 tensor for later code."""

import copy
import dataclasses
from typing import Any, Dict, Optional

import numpy as np

from mp_compat._tensorflow import autograph
from mp_compat._tensorflow import graphs
from mp_compat._tensorflow import tf


@dataclasses.dataclass
class KerasState:
  """What a Keras LossScaleOptimizer keeps in a graph; float32 scalar tensors."""

  scale: Optional[tf.Tensor] = None  # that `get_scaled_loss` read, until `get_unscaled_gradients` uses it
  fetched_scale: Optional[tf.Tensor] = None  # that `session.run(opt.loss_scale)` fetches


_AnyNumber: Any = object  # for type checkers, which assume that it has all operators


@autograph.exclude_from_autograph
class LossScaleValue(_AnyNumber):
  """A LossScale that is also a tensor of its current value.

      opt.loss_scale()                      as a LossScale: a call, `update`, `get_config`, `isinstance`
      opt.loss_scale * x                    as a float32 scalar tensor: arithmetic, inputs of ops, tensor attributes,
      session.run(opt.loss_scale)           fetches of `session.run`; in eager mode also float() and numpy()

  `isinstance` checks the class of the LossScale. `==` compares LossScales by identity, and other values as tensors.
  """

  def __init__(self, loss_scale: Any, owner: Any) -> None:
    """Makes the value of `loss_scale`; `owner` is the optimizer, which must outlive it."""
    self._loss_scale = loss_scale
    self._owner = owner
    if graphs.init_scope_graph() is not None:
      self._as_graph_element()  # adds the tensor before the graph is finalized

  @property  # type: ignore[misc]  # `object` also has a setter
  def __class__(self) -> type:  # read by isinstance
    return type(self._loss_scale)

  def __call__(self) -> tf.Tensor:
    return tf.cast(self._loss_scale(), tf.float32)

  def _as_graph_element(self) -> tf.Tensor:
    """Returns the tensor that `session.run` fetches; each graph has one."""
    with tf.init_scope():
      state = graphs.state_of(self._owner, tf.get_default_graph(), KerasState)
      if state.fetched_scale is None:
        state.fetched_scale = self()
      return state.fetched_scale

  def __getattr__(self, name: str) -> Any:
    return getattr(self._loss_scale if hasattr(self._loss_scale, name) else self(), name)

  def __copy__(self) -> "LossScaleValue":
    return LossScaleValue(copy.copy(self._loss_scale), self._owner)

  def __deepcopy__(self, memo: Dict[int, Any]) -> "LossScaleValue":
    return LossScaleValue(copy.deepcopy(self._loss_scale, memo), self._owner)

  def __float__(self) -> float:
    return float(self())

  def __int__(self) -> int:
    return int(self())

  def __array__(self, dtype: Any = None, copy: Optional[bool] = None) -> np.ndarray:
    del copy  # The array is always a copy.
    return np.array(self().numpy(), dtype)

  def __format__(self, spec: str) -> str:
    return format(float(self), spec) if spec else str(self)

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


for _name in set(tf.Tensor.OVERLOADABLE_OPERATORS) - set(vars(LossScaleValue)):
  setattr(LossScaleValue, _name, lambda self, *args, name=_name: getattr(self(), name)(*args))

tf.register_tensor_conversion_function(
  LossScaleValue, lambda value, dtype=None, name=None, as_ref=False: tf.convert_to_tensor(value(), dtype, name)
)
