# SPDX-License-Identifier: Apache-2.0
"""Calls a SessionRunHook for the runs of a plain Session."""

import os
from typing import Any, Dict, Optional

from mp_compat._tensorflow import tf
from mp_compat.monitoring import reports
from mp_compat.training.optimizer import MixedPrecisionLossScaleOptimizer


class PlainSessionHook(tf.train.SessionRunHook):
  """A SessionRunHook that can observe the runs of a plain Session, too."""

  def __init__(
    self, optimizer: MixedPrecisionLossScaleOptimizer, output_dir: Optional[str]
  ) -> None:
    """Makes the hook of an optimizer, which writes to a directory.

    Raises:
      ValueError: If the optimizer is of another kind, or `output_dir` is no path.
    """
    self._optimizer = reports.checked_optimizer(optimizer)
    try:
      self._output_dir = None if output_dir is None else os.fspath(output_dir)
    except TypeError as error:
      raise ValueError(
        "output_dir must be a path or None, but got {!r}.".format(output_dir)
      ) from error
    self._has_begun = False

  def begin(self) -> None:
    self._has_begun = True

  def run(
    self, session: tf.Session, fetches: Any, feed_dict: Optional[Dict[Any, Any]] = None
  ) -> Any:
    """Returns `session.run(fetches, feed_dict)` of a plain Session, and observes the
    run as in a MonitoredSession.

    Call `begin()` after `minimize` and before the session runs, and at the end
    `end(session)`, which writes the last values. Such a run cannot be stopped by
    `request_stop`, and one hook observes it: several need a MonitoredSession. Raises a
    RuntimeError without `begin()`.
    """
    if not self._has_begun:
      raise RuntimeError(
        "Before {}.run(), call begin(): after minimize(), before the session "
        "runs.".format(type(self).__name__)
      )
    context = tf.train.SessionRunContext(
      tf.train.SessionRunArgs(fetches, feed_dict), session
    )
    requested = self.before_run(context) or tf.train.SessionRunArgs([])
    values, results = session.run([fetches, requested.fetches], feed_dict)
    self.after_run(context, tf.train.SessionRunValues(results, None, None))
    return values
