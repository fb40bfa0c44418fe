# SPDX-License-Identifier: Apache-2.0
"""Places ops of Python functions in this process, if a session is one of a cluster."""

import functools
from typing import Dict, List

from mp_compat._tensorflow import tf
from mp_compat.graph import records

# The CPU of each `tf.train.Server` that this process started, by the server's target.
_cpus: Dict[str, str] = {}


def observe() -> None:
  """Notes each server that this process starts."""
  construct = tf.train.Server.__init__

  @functools.wraps(construct)
  def construct_and_note(
    self: tf.train.Server, *args: object, **kwargs: object
  ) -> None:
    construct(self, *args, **kwargs)
    task = self.server_def
    device = "/job:{0.job_name}/task:{0.task_index}/device:CPU:0".format(task)
    _cpus[self.target] = device

  tf.train.Server.__init__ = construct_and_note


def local_ops(graph: tf.Graph) -> List[tf.Operation]:
  """Returns the list of the ops of a graph that `place` places."""
  return records.record_in(graph, "local_ops", list)


def place(sess: tf.Session) -> None:
  """Places the `local_ops` of a session's graph in this process; called before each
  run.

  Otherwise, a session of one of this process's servers may run them in another process.
  The session of a server is known only now. Each op is placed once.
  """
  ops = local_ops(sess.graph)
  device = _cpus.get(tf.compat.as_str(sess.sess_str))
  if device is not None:
    for op in ops:
      op._set_device(device)
  ops.clear()
