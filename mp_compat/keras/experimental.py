# SPDX-License-Identifier: Apache-2.0
"""The earlier interface alone, as in `tf.keras.mixed_precision.experimental` of
TensorFlow 2.0 to 2.3.
"""

from typing import Any, Optional

from mp_compat._tensorflow import keras_features
from mp_compat.keras import loss_scale_optimizer


class LossScaleOptimizer(loss_scale_optimizer.LossScaleOptimizer):
  """A subclass of `mp_compat.keras.LossScaleOptimizer` that has only the earlier
  constructor.

  Source: `tf.keras.mixed_precision.experimental.LossScaleOptimizer`.
  """

  _stands_for_native = True

  def __init__(
    self,
    optimizer: Any = None,
    loss_scale: Any = None,
    *,
    opt: Any = None,
    count_skipped_steps: Optional[bool] = None,
    name: Optional[str] = None,
  ) -> None:
    """Wraps a Keras optimizer; arguments and errors as for
    `mp_compat.keras.LossScaleOptimizer`.

    Raises:
      ValueError: Also if `loss_scale` is None or a bool.
    """
    if loss_scale is None or isinstance(loss_scale, bool):
      raise ValueError(
        "Invalid value passed to loss_scale: it cannot be None or a bool, but got "
        '{!r}. Expected a number of at least 1, "dynamic", or a LossScale.'.format(
          loss_scale
        )
      )
    super().__init__(
      optimizer, loss_scale, opt=opt, count_skipped_steps=count_skipped_steps, name=name
    )

  @property
  def loss_scale(self) -> Any:
    """Returns what TensorFlow's experimental class does; from 2.9 on, where there is
    none, the LossScale.
    """
    if keras_features.EXPERIMENTAL_SCALE_IS_TENSOR:
      return super().loss_scale
    return self._loss_scale
