# SPDX-License-Identifier: Apache-2.0
"""Names of ops and variables: the current name scope; names that code asks for, and
gets others instead.
"""

import contextlib
from typing import (
  Any,
  Callable,
  ContextManager,
  Dict,
  Iterator,
  Mapping,
  NamedTuple,
  Optional,
)

from mp_compat._tensorflow import eager_contexts
from mp_compat._tensorflow import tf


def name_scope() -> str:
  """Returns the current name scope; "" for the root."""
  if tf.executing_eagerly():
    return eager_contexts.scope_name()
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
  _replace_names(graph, replacements)
  try:
    yield
  finally:
    graph.unique_name = unique_name


def _replace_names(graph: tf.Graph, replacements: Dict[str, str]) -> None:
  """Replaces `graph.unique_name` by one that returns each of `replacements` once."""
  unique_name = graph.unique_name
  pending = dict(replacements)

  def replaced(name: str, mark_as_used: bool = True) -> str:
    """Returns what `Graph.unique_name` returns, or a replacement, each once."""
    full = _joined(graph.get_name_scope(), name)
    if not mark_as_used or full not in pending:
      return unique_name(name, mark_as_used)
    replacement = pending.pop(full)
    if not pending and graph.unique_name is replaced:
      graph.unique_name = unique_name
    return replacement

  graph.unique_name = replaced


def _joined(scope: str, name: str) -> str:
  """Returns a name in a scope, which may be empty or None for the root."""
  return "/".join(filter(None, [scope, name]))


class Reserved(NamedTuple):
  """A name that is reserved for an op that is built later (`reserve`).

  Attributes:
    scope: The full name, with a final "/"; the name as it is, without "/", if nothing
      is reserved.
    asked: The full name that an optimizer asks for: that without loss scaling.
    given: The full name that it gets instead; None if nothing is reserved.
  """

  scope: str
  asked: str
  given: Optional[str]


NOTHING = Reserved("", "", None)


def reserve(name: str) -> Reserved:
  """Reserves a name for an op that is built later; in functions and eager mode reserves
  nothing.

      reserved = reserve("train")  # its scope is "train/"
      with name_as_alone(reserved, {}):
        inner.apply_gradients(..., name="train")  # its ops are in "train-wrapped/"
      tf.group(..., name=reserved.scope)  # "train"

  `name` is relative to the current name scope. If "train" is taken before, the scope is
  "train_1/".
  """
  graph = tf.get_default_graph()
  name = name.rstrip("/")
  if tf.executing_eagerly() or graph.building_function:
    return Reserved(name, name, None)
  with tf.name_scope(name) as scope:
    pass
  given = graph.unique_name(name + "-wrapped")
  return Reserved(scope, _joined(name_scope(), name), given)


@contextlib.contextmanager
def name_as_alone(
  reserved: Reserved, replaced_ops: Mapping[str, str]
) -> Iterator[None]:
  """Makes a context manager in which the variables of an optimizer have the names that
  they have without loss scaling, and its ops those that TensorFlow's class gives them;
  in functions and eager mode it changes nothing.

  The next op or scope that asks for the `reserved` name gets a name of its own:
  "train-wrapped" for "train". Variables that are made in that scope are called as in
  the scope that was asked for: "train/rate". Variables that are named after an op, as
  slots of a tensor are, are named after the op that it replaces.

  Args:
    reserved: the name, or `NOTHING`.
    replaced_ops: the names of the ops that others replace, by the names of these. Ops
      may be added inside.
  """
  graph = tf.get_default_graph()
  if tf.executing_eagerly() or graph.building_function:
    yield
    return
  # the class's, or the replaced one of a step around this one
  unique_name = graph.unique_name
  if reserved.given is not None:
    _replace_names(graph, {reserved.asked: reserved.given})

  def create_variable(
    next_creator: Callable[..., tf.Variable], **kwargs: Any
  ) -> tf.Variable:
    if kwargs.get("name"):
      # The slot of a tensor, such as a moving average, perhaps in a variable scope, is
      # named after the op, and not after the current name scope.
      name = _of_replaced(str(kwargs["name"]), replaced_ops)
      kwargs["name"] = _in_scope_asked_for(name, reserved)
    replaced = graph.unique_name
    # The replacement is not for a variable of that name.
    graph.unique_name = unique_name
    try:
      with _scope_asked_for(reserved):
        return next_creator(**kwargs)
    finally:
      graph.unique_name = replaced

  with tf.variable_creator_scope(create_variable):
    try:
      yield
    finally:
      graph.unique_name = unique_name


def _of_replaced(name: str, replaced_ops: Mapping[str, str]) -> str:
  """Returns the name of a variable; if a part of it is the name of an op that replaces
  another, with that of the other.
  """
  parts = name.split("/")
  for end in range(1, len(parts) + 1):
    for begin in range(end):
      op_name = "/".join(parts[begin:end])
      if op_name in replaced_ops:
        return "/".join([*parts[:begin], replaced_ops[op_name], *parts[end:]])
  return name


def _in_scope_asked_for(name: str, reserved: Reserved) -> str:
  """Returns a name with the reserved scope in place of the given one, in any scope
  around it; the name itself if it is not in that.
  """
  if reserved.given is None:
    return name
  outer, found, inner = ("/" + name).partition("/" + reserved.given + "/")
  if not found:
    return name
  in_outer = outer[1:]
  if in_outer:
    in_outer += "/"
  return in_outer + reserved.scope + inner


def _scope_asked_for(reserved: Reserved) -> ContextManager[object]:
  """Returns a context manager for the name scope in the reserved one, if the current
  one is in the given one.
  """
  current = name_scope() + "/"
  if reserved.given is None or not current.startswith(reserved.given + "/"):
    return contextlib.nullcontext()
  return tf.name_scope(reserved.scope + current[len(reserved.given) + 1 :])
