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
    attributes = vars(optimizer)
    optimizer = attributes.get("_optimizer", attributes.get("_opt"))


def inner_attribute(wrapper: Any, name: str) -> Any:
  """Returns a public attribute of `wrapper._optimizer`.

  Raises:
    AttributeError: If the inner optimizer lacks it, or if it is private: base classes
      and `copy` look up many private attributes, which the wrapper lacks on purpose.
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
  function = method
  if inspect.ismethod(method):
    function = method.__func__
  parameters = _parameters(function)
  if name in parameters:
    return True
  kinds = [parameter.kind for parameter in parameters.values()]
  return inspect.Parameter.VAR_KEYWORD in kinds


def arguments_for(
  method: Callable[..., object],
  base: Callable[..., object],
  given: Mapping[str, object],
) -> Tuple[List[object], Dict[str, object]]:
  """Returns how to pass arguments to a method that custom optimizers override.

  By keyword, as `tf.train.Optimizer.minimize` passes all of them: a custom optimizer
  may have another order, and defaults of its own. An argument that the method does not
  take is omitted if it is the default of `base`. If the method has another name for one
  of `_POSITIONAL`, that argument and those before it are passed by position, as in a
  direct call.

  Args:
    method: the method, bound or not.
    base: the method of `tf.train.Optimizer` that it overrides, with the defaults.
    given: the arguments after the first, by the names that `base` has for them, and in
      its order.

  Returns:
    `(positional, keywords)`: the arguments after the first to pass by position, and
    those to pass by keyword.

  Raises:
    TypeError: If neither the method nor `base` takes an argument.
  """
  defaults = _parameters(base)
  taken = {name for name in given if takes_argument(method, name)}
  unknown = [name for name in given if name not in taken and name not in defaults]
  if unknown:
    raise _unexpected_arguments(method, unknown)
  passed = {}
  last_renamed = None
  for name, value in given.items():
    if name in taken:
      passed[name] = value
    elif value is not defaults[name].default:
      passed[name] = value
      if name in _POSITIONAL:
        last_renamed = name
  positional = []
  if last_renamed is not None:
    for name in given:
      positional.append(given[name])
      passed.pop(name, None)
      if name == last_renamed:
        break
  return positional, passed


def _unexpected_arguments(method: Callable[..., object], names: List[str]) -> TypeError:
  return TypeError(
    "{}() got an unexpected keyword argument {}. minimize() and apply_gradients() "
    "pass on what the inner optimizer's apply_gradients() takes. Pass others to its "
    "constructor or to its own methods.".format(
      method.__qualname__, ", ".join(map(repr, names))
    )
  )


@functools.lru_cache(maxsize=1000)  # read in every eager step
def _parameters(function: Callable[..., object]) -> Mapping[str, inspect.Parameter]:
  return inspect.signature(function).parameters
