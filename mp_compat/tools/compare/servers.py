# SPDX-License-Identifier: Apache-2.0
"""Places ops of Python functions in this process, if a session is one of a cluster."""

import functools
import socket
from typing import Dict, Optional
import urllib.parse

from mp_compat._tensorflow import graph_internals
from mp_compat._tensorflow import tf
from mp_compat.graph import records

# The CPU of each `tf.train.Server` that this process started, by the server's port.
_cpus: Dict[Optional[int], str] = {}


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
    _cpus[_parse(self.target).port] = device

  tf.train.Server.__init__ = construct_and_note


def add_local(op: tf.Operation) -> None:
  """Notes an op that `place` places."""
  _local_ops(op.graph)[op] = op.device


def _local_ops(graph: tf.Graph) -> Dict[tf.Operation, str]:
  """Returns the ops of a graph that `place` places, with their own devices."""
  return records.record_in(graph, "local_ops")


def place(sess: tf.Session) -> None:
  """Places the local ops of a session's graph in this process; called before each run.

  Otherwise, a session of one of this process's servers may run them in another process.
  The session of a server is known only now, and the graph may have sessions of several.
  """
  cpu = _find_cpu(tf.compat.as_str(sess.sess_str))
  for op, own_device in _local_ops(sess.graph).items():
    device = cpu or own_device
    if op.device != device:  # An op that changes fails in the sessions that ran it.
      graph_internals.set_device(op, device)


def _find_cpu(target: str) -> Optional[str]:
  """Returns the CPU of the server of this process that `target` addresses, by whatever
  name; None if it is none of them.
  """
  address = _parse(target)
  if address.port not in _cpus or not _is_local(address.hostname or ""):
    return None
  return _cpus[address.port]


def _parse(target: str) -> urllib.parse.ParseResult:
  """Returns the parts of a target, such as "grpc://localhost:2222"."""
  return urllib.parse.urlparse(target)


@functools.lru_cache(maxsize=None)
def _is_local(host: str) -> bool:
  """Returns whether a host is this one: sockets can be bound to its address."""
  try:
    family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    with socket.socket(family) as bound:
      bound.bind(address)
  except OSError:
    return False
  return True
