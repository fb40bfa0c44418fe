# SPDX-License-Identifier: Apache-2.0
"""Replaces what runs sessions, and what computes gradients outside of them."""

from typing import Any, Callable

from tensorflow.python.client import session
from tensorflow.python.eager import imperative_grad
from tensorflow.python.ops import gradients_util

_Function = Callable[..., Any]

# The class of all sessions. `_run` is what `run` and `partial_run` call, and
# `_make_callable_from_options` what Keras calls.
Base: Any = session.BaseSession


def wrap_gradient_functions(wrap: Callable[[_Function], _Function]) -> None:
  """Replaces the functions that compute all gradients, those of a `tf.GradientTape` and
  those in graphs, by what `wrap` makes of each.
  """
  imperative_grad.imperative_grad = wrap(imperative_grad.imperative_grad)
  gradients_util._GradientsHelper = wrap(gradients_util._GradientsHelper)
