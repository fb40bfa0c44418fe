# SPDX-License-Identifier: Apache-2.0
"""Finds the inner optimizers of a wrapper, and their attributes."""

import functools
import inspect
from typing import Any, Callable, Dict, Iterator, List, Mapping, Tuple

from mp_compat._tensorflow import tf

KerasOptimizer = Any  # an optimizer of any Keras: the classes have no common base

# the first arguments of `compute_gradients` and `apply_gradients`
_POSITIONAL = ("var_list", "global_step", "name")


def wrapper_chain(optimizer: tf.train.Optimizer) -> Iterator[tf.train.Optimizer]:
  """Yields this optimizer, its inner optimizer, and so on; reads a wrapper's
  `_optimizer` or `_opt`.
  """
  while isinstance(optimizer, tf.train.Optimizer):
    yield optimizer
    optimizer = vars(optimizer).get("_optimizer", vars(optimizer).get("_opt"))


def inner_attribute(wrapper: Any, name: str) -> Any:
  """Returns a public attribute of `wrapper._optimizer`; private ones raise: base
  classes and copy look up many.
  """
  message = "{!r} object has no attribute {!r}".format(type(wrapper).__name__, name)
  if name.startswith("_"):
    raise AttributeError(message)
  try:
    return getattr(wrapper._optimizer, name)
  except AttributeError as error:
    raise AttributeError("{}; inner optimizer: {}".format(message, error)) from error


def sets_inner_attribute(wrapper: object, name: str) -> bool:
  """Returns whether `wrapper.name = value` is for the inner optimizer, which alone has
  this public attribute.
  """
  return (
    not name.startswith("_")
    and name not in vars(wrapper)
    and not hasattr(type(wrapper), name)
    and hasattr(vars(wrapper).get("_optimizer"), name)
  )


def takes_argument(method: Callable[..., object], name: str) -> bool:
  """Returns whether a method takes a keyword argument of this name."""
  parameters = _parameters(method.__func__ if inspect.ismethod(method) else method)
  return name in parameters or any(
    parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()
  )


def takes_position(constructor: Callable[..., object]) -> bool:
  """Returns whether an `__init__` takes an argument by position, after `self`."""
  by_name = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD)
  _, *parameters = _parameters(constructor).values()
  return any(parameter.kind not in by_name for parameter in parameters)


def arguments_for(
  method: Callable[..., object],
  base: Callable[..., object],
  given: Mapping[str, object],
) -> Tuple[List[object], Dict[str, object]]:
  """Returns how to pass arguments to a method that custom optimizers override: those by
  position and those by keyword.

  By keyword, as `tf.train.Optimizer.minimize` passes all of them: a custom optimizer
  may have another order, and defaults of its own. An argument that the method does not
  take is omitted if it is the default of `base`, the method of `tf.train.Optimizer`. If
  the method has another name for one of `_POSITIONAL`, it is passed by position, as in
  a direct call. `given` are the arguments after the first, in the order of `base`.
  """
  defaults = _parameters(base)
  not_taken = [name for name in given if not takes_argument(method, name)]
  unknown = [name for name in not_taken if name not in defaults]
  if unknown:
    raise TypeError(
      "{}() got an unexpected keyword argument {}. minimize() and apply_gradients() "
      "pass on what the inner optimizer's apply_gradients() takes. Pass others to its "
      "constructor or to its own methods.".format(
        method.__qualname__, ", ".join(map(repr, unknown))
      )
    )
  passed = {
    name: given[name]
    for name in given
    if name not in not_taken or given[name] is not defaults[name].default
  }
  renamed = [name for name in _POSITIONAL if name in not_taken and name in passed]
  positional = list(given)[: list(given).index(renamed[-1]) + 1] if renamed else []
  for name in positional:
    passed.pop(name, None)
  return [given[name] for name in positional], passed


@functools.lru_cache(maxsize=1000)  # read in every eager step
def _parameters(function: Callable[..., object]) -> Mapping[str, inspect.Parameter]:
  return inspect.signature(function).parameters
