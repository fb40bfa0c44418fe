# SPDX-License-Identifier: Apache-2.0
"""Locks of a graph that each `Session.run` enters."""

import contextlib
import threading
from typing import ContextManager, Iterator, List

from mp_compat._tensorflow import tf


@contextlib.contextmanager
def changes_exclusively() -> Iterator[List[bool]]:
  """Makes a context manager during which no Session runs ops of the current graph that
  other threads start.

      with changes_exclusively() as sessions_ran:
        ...  # a Session.run of a thread that existed before waits for the end
      if sessions_ran:
        ...  # this thread, or one that was started inside, has run a Session

  Yields a list, which is empty as long as neither has run one. Threads that the change
  itself starts may run Sessions: waiting for the end of the change, which may wait for
  them, they would never return.
  """
  graph = tf.get_default_graph()
  lock = graph._session_run_lock
  sessions_ran: List[bool] = []
  others = set(threading.enumerate()) - {threading.current_thread()}

  def noting_lock() -> ContextManager[object]:
    """Returns the context manager that a `Session.run` of the graph enters."""
    if threading.current_thread() in others:
      return lock()  # waits for the end of the change
    sessions_ran.append(True)
    return contextlib.nullcontext()

  # It waits for the runs that have begun; no other thread changes the graph meanwhile.
  with graph._mutation_lock():
    graph._session_run_lock = noting_lock
    try:
      yield sessions_ran
    finally:
      graph._session_run_lock = lock
