# SPDX-License-Identifier: Apache-2.0
"""Knows the devices of this process in a cluster: those of its `tf.train.Server`."""

import functools
from typing import List

from mp_compat._tensorflow import tf

_cpus: List[str] = ["/device:CPU:0"]  # without a server


def observe() -> None:
  """Notes each server that this process starts."""
  construct = tf.train.Server.__init__

  @functools.wraps(construct)
  def construct_and_note(
    self: tf.train.Server, *args: object, **kwargs: object
  ) -> None:
    construct(self, *args, **kwargs)
    task = self.server_def
    _cpus.append("/job:{0.job_name}/task:{0.task_index}/device:CPU:0".format(task))

  tf.train.Server.__init__ = construct_and_note


def cpu_of_process() -> str:
  """Returns the device name of a CPU of this process; with its task, once it has a
  server.

  Without a task, an op may be placed in another process of a cluster.
  """
  return _cpus[-1]
