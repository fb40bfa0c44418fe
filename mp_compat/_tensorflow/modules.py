# SPDX-License-Identifier: Apache-2.0
"""Changes TensorFlow's module objects."""

from typing import Any


def delete_attribute(module: Any, name: str) -> None:
  """Deletes an attribute of a module, and from `__all__` and the caches of TensorFlow
  1.15's module wrappers.
  """
  delattr(module, name)
  vars(module).pop(name, None)
  vars(module).get("_tfmw_attr_map", {}).pop(name, None)
  if name in getattr(module, "__all__", ()):
    module.__all__.remove(name)


def has_attribute(module: Any, name: str) -> bool:
  """Returns whether a module has an attribute.

  Raises:
    ImportError: If the module is TensorFlow's loader of Keras, and Keras is missing.
      The loader raises it again for the program's first attribute; by itself, it would
      raise a RecursionError from the second attribute on.
  """
  try:
    return hasattr(module, name)
  except ImportError:
    for flag in ("_initialized", "_tfll_initialized"):
      if flag in vars(module):
        vars(module)[flag] = False
    raise
