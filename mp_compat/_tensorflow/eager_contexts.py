# SPDX-License-Identifier: Apache-2.0
"""The eager context: its name scope, and where `tf.init_scope` is eager in a program
without eager execution.
"""

import threading
from typing import List

from tensorflow.python.eager import context


def scope_name() -> str:
  """Returns the current name scope of eager mode; "" for the root."""
  return context.context().scope_name.rstrip("/")


def is_eager_by_mistake() -> bool:
  """Returns whether `tf.init_scope`, which is eager here, should be the default graph.

  Each thread has a stack of the graphs and of the eager modes that it entered. It
  begins with eager mode if TensorFlow created its context before the program called
  `tf.disable_eager_execution`: some versions do when they are imported, such as 2.4 and
  2.10, others in `tf.config.list_physical_devices`. In a function of the default graph,
  which is on no stack, `tf.init_scope` then finds this eager mode.
  """
  if context.default_execution_mode == context.EAGER_MODE:
    return False
  entered = context.context().context_switches.stack
  outside = [entry for entry in entered if not entry.is_building_function]
  return len(outside) == 1 and _stacks_begin_eagerly()


def _stacks_begin_eagerly() -> bool:
  """Returns whether the stack of a new thread begins with eager mode."""
  lengths: List[int] = []

  def note_length() -> None:
    lengths.append(len(context.context().context_switches.stack))

  thread = threading.Thread(target=note_length)
  thread.start()
  thread.join()
  return lengths == [1]
