# SPDX-License-Identifier: Apache-2.0
"""The base class of hooks that observe the steps of an optimizer."""

from typing import Any, Dict, List, NamedTuple, Optional

from mp_compat._tensorflow import log
from mp_compat._tensorflow import tf
from mp_compat.graph import runs
from mp_compat.monitoring import reports
from mp_compat.training import recorded
from mp_compat.training.optimizer import MixedPrecisionLossScaleOptimizer


class AttemptedStep(NamedTuple):
  """A step that a Session run attempted.

  Attributes:
    number: The number of attempted steps that the hook has observed, with this one.
    train_op: The name of the train op.
    is_skipped: Whether the step was skipped; otherwise it was applied.
    scale: The loss scale after the step.
  """

  number: int
  train_op: str
  is_skipped: bool
  scale: float


class StepHook(tf.train.SessionRunHook):
  """Calls `after_step` for each step that an optimizer attempts: the base class of the
  other hooks, and of those of a program.

      for each Session run that executes a train op:  # an evaluation does not count
        fetch whether the step is attempted and skipped, and the scale after it
        if it is attempted:  # a branch of `tf.cond` may not be executed
          after_step(run_context, step)

  A subclass that overrides `begin`, `before_run` or `after_run` calls that of this
  class, too. What else it fetches with these runs, it adds under a name of its own to
  the dictionary `fetches` of what `before_run` returns, if that is not None.

      >>> import tensorflow.compat.v1 as tf
      >>> import mp_compat
      >>> class ScalePrinter(mp_compat.StepHook):
      ...   def after_step(self, run_context, step):
      ...     print(step.number, step.is_skipped, step.scale)
      >>> with tf.Graph().as_default(), tf.Session() as sess:
      ...   factor = tf.placeholder(tf.float32, [])
      ...   weight = tf.get_variable("weight", [], use_resource=True)
      ...   opt = mp_compat.MixedPrecisionLossScaleOptimizer(
      ...     tf.train.GradientDescentOptimizer(0.1), "dynamic"
      ...   )
      ...   train_op = opt.minimize(factor * weight)
      ...   hook = ScalePrinter(opt)
      ...   hook.begin()
      ...   sess.run(tf.global_variables_initializer())
      ...   for value in (1.0, float("inf")):
      ...     _ = hook.run(sess, train_op, {factor: value})
      1 False 32768.0
      2 True 16384.0
  """

  def __init__(self, optimizer: MixedPrecisionLossScaleOptimizer) -> None:
    """Makes a hook for `MonitoredTrainingSession(hooks=...)` or an Estimator's
    `training_hooks`.

    Args:
      optimizer: the `MixedPrecisionLossScaleOptimizer` whose steps to observe.

    Raises:
      ValueError: If the optimizer is of another kind.
    """
    self._optimizer = reports.checked_optimizer(optimizer)
    self._number = 0
    self._has_begun = False
    self._is_stop_requested = False

  def begin(self) -> None:
    """Finds the train ops of the optimizer, and builds what to fetch with each.

    Raises:
      RuntimeError: If the current graph has no train op of this optimizer.
    """
    self._observed = self._steps_to_observe()
    self._statuses: Dict[str, tf.Tensor] = {}  # by the name of the train op
    for each in self._observed:
      self._statuses[each.train_op.name] = self._status(each)
    self._has_begun = True
    self._is_stop_requested = False

  def _steps_to_observe(self) -> List[recorded.Step]:
    """Returns the steps to observe, of which the current graph can read the tensors."""
    readable = []
    for each in reports.train_steps(self._optimizer):
      if reports.is_readable(each):
        readable.append(each)
      else:
        log.warn(
          "The train op %s is inside a loop or a function, where hooks cannot count "
          "its steps or see that they are skipped. If the global step stands still "
          "while the loss scale falls, all steps are skipped.",
          each.train_op.name,
        )
    return readable

  def _status(self, record: recorded.Step) -> tf.Tensor:
    """Builds what to fetch with a train op, float32 [3]: 1 if the step is attempted, 1
    if it is skipped, the loss scale after it.
    """
    counts = reports.counts(record)
    with tf.control_dependencies([counts]):
      scale = tf.cast(self._optimizer.loss_scale(), tf.float32)
    return tf.concat([tf.cast(counts, tf.float32), [scale]], axis=0)

  def after_step(
    self, run_context: tf.train.SessionRunContext, step: AttemptedStep
  ) -> None:
    """Does what the subclass does after an attempted step; nothing here.

    Args:
      run_context: that of the run, with the session and `request_stop`.
      step: the step.
    """

  def before_run(
    self, run_context: tf.train.SessionRunContext
  ) -> Optional[tf.train.SessionRunArgs]:
    """Returns what to fetch with a run; None if it executes no train op.

    Raises a RuntimeError without `begin()`.
    """
    if not self._has_begun:
      raise RuntimeError(
        "{}.begin() was not called. Call it after minimize(), before the session runs; "
        "a subclass that overrides it calls super().begin().".format(
          type(self).__name__
        )
      )
    run = runs.executed_by(run_context)
    statuses = {}
    for each in self._observed:
      if each.train_op in run.ops:
        statuses[each.train_op.name] = self._statuses[each.train_op.name]
    return tf.train.SessionRunArgs({"statuses": statuses}) if statuses else None

  def after_run(
    self, run_context: tf.train.SessionRunContext, run_values: tf.train.SessionRunValues
  ) -> None:
    """Calls `after_step` for each step that a run attempted."""
    results = run_values.results or {"statuses": {}}
    for train_op, (attempted, skipped, scale) in results["statuses"].items():
      if attempted:
        self._number += 1
        step = AttemptedStep(self._number, train_op, bool(skipped), float(scale))
        self.after_step(run_context, step)

  def run(
    self, session: tf.Session, fetches: Any, feed_dict: Optional[Dict[Any, Any]] = None
  ) -> Any:
    """Returns `session.run(fetches, feed_dict)` of a plain Session, and observes the
    run as in a MonitoredSession.

    Call `begin()` after `minimize` and before the session runs, and at the end
    `end(session)`, which writes the last values. One hook observes such a run: several
    need a MonitoredSession.
    """
    context = tf.train.SessionRunContext(
      tf.train.SessionRunArgs(fetches, feed_dict), session
    )
    requested = self.before_run(context) or tf.train.SessionRunArgs([])
    values, results = session.run([fetches, requested.fetches], feed_dict)
    self.after_run(context, tf.train.SessionRunValues(results, None, None))
    self._is_stop_requested = self._is_stop_requested or context.stop_requested
    return values

  def should_stop(self) -> bool:
    """Returns whether the hook requested a stop in `run` since `begin`."""
    return self._is_stop_requested
