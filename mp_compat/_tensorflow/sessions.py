# SPDX-License-Identifier: Apache-2.0
"""Replaces what runs sessions, and what computes gradients outside of them."""

import threading
from typing import Any, Callable, Dict, List

from tensorflow.python.client import session
from tensorflow.python.eager import imperative_grad
from tensorflow.python.ops import gradients_util
from tensorflow.python.ops import script_ops

_Function = Callable[..., Any]

Base: Any = session.BaseSession  # the class of all sessions
run: _Function = Base._run  # TensorFlow's own, also if it is replaced


def wrap_run(wrap: Callable[[_Function], _Function]) -> None:
  """Replaces what `run` and `partial_run` of sessions call, by what `wrap` makes of
  it.
  """
  Base._run = wrap(Base._run)


def wrap_make_callable_from_options(wrap: Callable[[_Function], _Function]) -> None:
  """Replaces the method of sessions that Keras calls, by what `wrap` makes of it."""
  Base._make_callable_from_options = wrap(Base._make_callable_from_options)


def unique_fetches(fetches: object) -> List[Any]:
  """Returns the tensors and ops of the default graph that `Session.run(fetches)`
  runs.
  """
  return session._FetchMapper.for_fetch(fetches).unique_fetches()


# In each thread, the tape that the gradient of a `tf.py_function` took last.
_taken = threading.local()


class _Tapes(Dict[Any, Any]):
  """The tapes of the calls of each `tf.py_function` of a graph, of which its gradient
  takes one.
  """

  def pop(self, *args: Any) -> Any:
    entry = super().pop(*args)
    _taken.tape = entry[0]._tape
    return entry


def wrap_gradient_functions(wrap: Callable[[_Function], _Function]) -> None:
  """Replaces the functions that compute all gradients, those of a `tf.GradientTape` and
  those in graphs, by what `wrap` makes of each; not for the gradient of a
  `tf.py_function`, an op whose kernel has a tape.
  """
  compute = imperative_grad.imperative_grad
  wrapped = wrap(compute)

  def compute_from_tape(tape: Any, *args: object, **kwargs: object) -> Any:
    is_of_op = vars(_taken).pop("tape", None) is tape
    function = compute if is_of_op else wrapped
    return function(tape, *args, **kwargs)

  script_ops.tape_cache = _Tapes(script_ops.tape_cache)
  imperative_grad.imperative_grad = compute_from_tape
  gradients_util._GradientsHelper = wrap(gradients_util._GradientsHelper)
