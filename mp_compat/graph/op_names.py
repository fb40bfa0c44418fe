# SPDX-License-Identifier: Apache-2.0
"""Names of ops and variables: the current name scope; names that code asks for, and
gets others instead.
"""

import contextlib
from typing import Any, Callable, ContextManager, Dict, Iterator

from tensorflow.python.eager import context

from mp_compat._tensorflow import tf


def name_scope() -> str:
  """Returns the current name scope; "" for the root."""
  if tf.executing_eagerly():
    return context.context().scope_name.rstrip("/")
  return tf.get_default_graph().get_name_scope() or ""  # None in TensorFlow 1.15


@contextlib.contextmanager
def replace_next_names(replacements: Dict[str, str]) -> Iterator[None]:
  """Makes a context manager: the next op or scope that asks for a name of
  `replacements` gets the value instead.

  Both are full, with the name scope. A replacement need not be unique: it may be a
  scope that exists.
  """
  graph = tf.get_default_graph()
  # the class's, or the replaced one of a step around this one
  unique_name = graph.unique_name
  if replacements:
    _replace_names(graph, replacements)
  try:
    yield
  finally:
    graph.unique_name = unique_name


def _replace_names(graph: tf.Graph, replacements: Dict[str, str]) -> None:
  """Replaces `graph.unique_name` until each of `replacements` was asked for."""
  unique_name = graph.unique_name
  pending = dict(replacements)

  def replaced(name: str, mark_as_used: bool = True) -> str:
    """Returns what `Graph.unique_name` returns, or a replacement, each once."""
    full = _joined(graph.get_name_scope(), name)
    if not mark_as_used or full not in pending:
      return unique_name(name, mark_as_used)
    replacement = pending.pop(full)
    if not pending:
      graph.unique_name = unique_name
    return replacement

  graph.unique_name = replaced


def _joined(scope: str, name: str) -> str:
  """Returns a name in a scope, which may be empty or None for the root."""
  return "/".join(filter(None, [scope, name]))


def rename_slots(replaced: Dict[str, str], last: str) -> ContextManager[None]:
  """Returns a context manager: variables that are named after an op, as slots of a
  tensor are, are named after the op that it replaces.

  `replaced` maps names of ops, whose last part begins with `last`, to names of ops.
  """

  def renamed(name: str) -> str:
    parts = name.split("/")
    for end, part in enumerate(parts, 1):
      if not part.startswith(last):
        continue
      for begin in range(end):
        op_name = "/".join(parts[begin:end])
        if op_name in replaced:
          return "/".join([*parts[:begin], replaced[op_name], *parts[end:]])
    return name

  def create_variable(
    next_creator: Callable[..., tf.Variable], **kwargs: Any
  ) -> tf.Variable:
    if kwargs.get("name"):
      kwargs["name"] = renamed(str(kwargs["name"]))
    return next_creator(**kwargs)

  return tf.variable_creator_scope(create_variable)


@contextlib.contextmanager
def reserve_name(name: str) -> Iterator[str]:
  """Makes a context manager that yields `name`, reserved and with a final "/", for an
  op that is built later.

  The next op or scope that asks for `name` gets a name of its own, as TensorFlow's
  class gives it: "train-wrapped" for "train". Variables that are made in that scope
  have the names that they have without it: "train/rate". In functions and eager mode,
  nothing is reserved: it yields `name` without a final "/".

      with reserve_name("train") as reserved:  # "train/"
        inner.apply_gradients(..., name="train")  # its ops are in "train-wrapped/"
      tf.group(..., name=reserved)  # "train"

  `name` is relative to the current name scope, what is yielded is full. If "train" is
  taken before, it yields "train_1/".
  """
  graph = tf.get_default_graph()
  given = name.rstrip("/")
  if tf.executing_eagerly() or graph.building_function:
    yield given
    return
  with tf.name_scope(name) as reserved:
    pass
  other = graph.unique_name(given + "-wrapped") + "/"
  unique_name = graph.unique_name

  def create_variable(
    next_creator: Callable[..., tf.Variable], **kwargs: Any
  ) -> tf.Variable:
    # the slot of a tensor, such as a moving average, perhaps in a variable scope: it
    # is named after the op, and not after the current name scope
    if kwargs.get("name"):
      kwargs["name"] = _with_scope(str(kwargs["name"]), other, reserved)
    current = name_scope() + "/"
    replaced = graph.unique_name
    # The replacement is not for a variable of that name.
    graph.unique_name = unique_name
    scope: ContextManager[object] = contextlib.nullcontext()
    if current.startswith(other):
      scope = tf.name_scope(reserved + current[len(other) :])
    try:
      with scope:
        return next_creator(**kwargs)
    finally:
      graph.unique_name = replaced

  asked = _joined(name_scope(), given)
  with tf.variable_creator_scope(create_variable):
    _replace_names(graph, {asked: other[:-1]})
    try:
      yield reserved
    finally:
      graph.unique_name = unique_name


def _with_scope(name: str, scope: str, replacement: str) -> str:
  """Returns a name whose first `scope` is replaced, in any scope around it; the name
  itself if it is not in `scope`. Both scopes have a final "/".
  """
  outer, found, inner = ("/" + name).partition("/" + scope)
  if not found:
    return name
  in_outer = outer[1:]
  if in_outer:
    in_outer += "/"
  return in_outer + replacement + inner
