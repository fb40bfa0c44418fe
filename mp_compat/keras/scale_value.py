"""What `opt.loss_scale` is: a LossScale to code of TensorFlow 2.0 to 2.3, a float32 scalar tensor to later code."""

import copy
from typing import Any, Dict, Optional

import numpy as np

from mp_compat import _compat
from mp_compat._compat import tf


@_compat.kept_from_autograph
class LossScaleValue:
  """A LossScale that is its own value.

      opt.loss_scale()                      as a LossScale: called, updated, asked for its configuration or its type
      opt.loss_scale * x                    as a float32 scalar tensor: in arithmetic, in any op, among the fetches of
      session.run(opt.loss_scale)           `session.run`, for its attributes; in eager mode float() and numpy() too

  `isinstance` finds the LossScale's class. `==` compares LossScales by identity, everything else as a tensor would.
  """

  def __init__(self, loss_scale: Any, owner: Any) -> None:
    """Makes the value of `loss_scale` for `owner`, an optimizer that outlives it."""
    self._loss_scale = loss_scale
    self._owner = owner
    if _compat.home_graph() is not None:
      self._as_graph_element()  # while the graph can still take an op

  @property
  def __class__(self) -> type:  # what isinstance asks
    return type(self._loss_scale)

  def __call__(self) -> tf.Tensor:
    return self._as_tensor()

  def _as_tensor(self) -> tf.Tensor:
    return tf.cast(self._loss_scale(), tf.float32)

  def _as_graph_element(self) -> tf.Tensor:
    """What `session.run` fetches: one tensor a graph, however often."""
    with tf.init_scope():
      state = _compat.state_of(self._owner, tf.get_default_graph())
      if "loss_scale" not in state:
        state["loss_scale"] = self._as_tensor()
      return state["loss_scale"]

  def __getattr__(self, name: str) -> Any:
    return getattr(self._loss_scale if hasattr(self._loss_scale, name) else self._as_tensor(), name)

  def __copy__(self) -> "LossScaleValue":
    return LossScaleValue(copy.copy(self._loss_scale), self._owner)

  def __deepcopy__(self, memo: Dict[int, Any]) -> "LossScaleValue":
    return LossScaleValue(copy.deepcopy(self._loss_scale, memo), self._owner)

  def __float__(self) -> float:
    return float(self._as_tensor())

  def __int__(self) -> int:
    return int(self._as_tensor())

  def __array__(self, dtype: Any = None, copy: Optional[bool] = None) -> np.ndarray:
    del copy  # It is always one.
    return np.array(self._as_tensor().numpy(), dtype)

  def __format__(self, spec: str) -> str:
    return format(float(self), spec) if spec else str(self)

  def __repr__(self) -> str:
    return repr(self._loss_scale)

  def __hash__(self) -> int:
    return hash(self._loss_scale)

  def __eq__(self, other: Any) -> Any:
    if callable(other):  # a LossScale, bare or as here
      return self._loss_scale is getattr(other, "_loss_scale", other)
    return self._as_tensor() == other

  def __ne__(self, other: Any) -> Any:
    if callable(other):
      return not self == other
    return self._as_tensor() != other


def _operator(name: str) -> Any:
  return lambda self, *args: getattr(self._as_tensor(), name)(*args)


for _name in set(tf.Tensor.OVERLOADABLE_OPERATORS) - set(vars(LossScaleValue)):
  setattr(LossScaleValue, _name, _operator(_name))


def _to_tensor(value: LossScaleValue,
               dtype: Optional[tf.DType] = None,
               name: Optional[str] = None,
               as_ref: bool = False) -> tf.Tensor:
  del as_ref  # It is no variable.
  return tf.convert_to_tensor(value(), dtype, name)


tf.register_tensor_conversion_function(LossScaleValue, _to_tensor)
