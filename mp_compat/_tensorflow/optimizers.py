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


def name_of(optimizer: tf.train.Optimizer) -> str:
  """Returns the name of an optimizer; that of its class if it never called its base
  class's constructor.
  """
  if hasattr(optimizer, "_name"):
    return optimizer.get_name()
  return type(optimizer).__name__


def uses_locking(optimizer: tf.train.Optimizer) -> bool:
  """Returns whether an optimizer locks variables to update them."""
  return bool(getattr(optimizer, "_use_locking", False))


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

  A new attribute, which neither has, is the wrapper's, and so are private ones.
  """
  if name.startswith("_"):
    return False
  if name in vars(wrapper) or hasattr(type(wrapper), name):
    return False
  # While a wrapper is constructed, it has no inner optimizer yet.
  inner = vars(wrapper).get("_optimizer")
  return hasattr(inner, name)


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
  """Returns how to pass arguments to a method that custom optimizers override.

  By keyword, as `tf.train.Optimizer.minimize` passes all of them: a custom optimizer
  may have another order, and defaults of its own. An argument that the method does not
  take is omitted if it is the default of `base`. If the method has another name for one
  of `_POSITIONAL`, that argument and those before it are passed by position, as in a
  direct call.

  Args:
    method: the method, bound or not.
    base: the method that it overrides, of `tf.train.Optimizer` or a class of Keras,
      with the defaults.
    given: the arguments after the first, by the names that `base` has for them, and in
      its order.

  Returns:
    `(positional, keywords)`: the arguments after the first to pass by position, and
    those to pass by keyword.

  Raises:
    TypeError: If neither the method nor `base` takes an argument.

  Examples, with `apply_gradients(grads_and_vars, global_step=None, name=None)` as
  `base` and `{"global_step": step, "name": None}` as `given`:

      apply_gradients(grads_and_vars, global_step, name)  [], {"global_step", "name"}
      apply_gradients(grads_and_vars, global_step)        [], {"global_step"}
      apply_gradients(grads_and_vars, counter)            [step], {}
  """
  defaults = _parameters(base)
  not_taken = [name for name in given if not takes_argument(method, name)]
  _check_known(method, [name for name in not_taken if name not in defaults])
  keywords: Dict[str, object] = {}
  by_position = 0  # how many arguments are
  for number, (name, value) in enumerate(given.items(), 1):
    if name in not_taken and value is defaults[name].default:
      continue
    keywords[name] = value
    if name in not_taken and name in _POSITIONAL:
      by_position = number
  positional = list(given)[:by_position]
  for name in positional:
    keywords.pop(name, None)
  return [given[name] for name in positional], keywords


def _check_known(method: Callable[..., object], unknown: List[str]) -> None:
  """Raises a TypeError if there are `unknown` arguments, which no method takes."""
  if unknown:
    raise TypeError(
      "{}() got an unexpected keyword argument {}. minimize() and apply_gradients() "
      "pass on what the inner optimizer's apply_gradients() takes. Pass others to its "
      "constructor or to its own methods.".format(
        method.__qualname__, ", ".join(map(repr, unknown))
      )
    )


@functools.lru_cache(maxsize=1000)  # read in every eager step
def _parameters(function: Callable[..., object]) -> Mapping[str, inspect.Parameter]:
  """Returns the parameters of a function, by name and in order."""
  return inspect.signature(function).parameters
