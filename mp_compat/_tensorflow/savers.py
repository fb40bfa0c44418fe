# SPDX-License-Identifier: Apache-2.0
"""Accesses private parts of `tf.train.Saver`."""

import sys
from typing import Any, Callable, List

from mp_compat._tensorflow import tf
from mp_compat._tensorflow import variables

_saver_module: Any = sys.modules[tf.train.Saver.__module__]


def change_var_list(saver: tf.train.Saver, change: Callable[[Any], Any]) -> None:
  """Replaces the `var_list` of a Saver that is not built yet by `change(var_list)`.

  It is what the Saver was constructed with: None, a list or a dictionary.
  """
  saver._var_list = change(saver._var_list)


class AliasSaveable(_saver_module.BaseSaverBuilder.SaveableObject):
  """Saves a variable a second time, under another name; does not restore it from that
  name.
  """

  def __init__(self, variable: tf.Variable, name: str) -> None:
    """Reads the variable, of a replicated one its first local copy, to save it as
    `name`.
    """
    copy = variables.local_copies(variable)[0]
    with tf.device(copy.device):
      value = tf.identity(copy)
    spec = _saver_module.BaseSaverBuilder.SaveSpec(
      value, slice_spec="", name=name, dtype=value.dtype
    )
    super().__init__(value, [spec], name)

  def restore(
    self, restored_tensors: List[tf.Tensor], restored_shapes: object
  ) -> tf.Operation:
    """Returns an op that does nothing: the variable is restored from its usual name."""
    del restored_tensors, restored_shapes
    return tf.no_op()
