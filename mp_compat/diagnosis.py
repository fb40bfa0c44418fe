"""What a step did, for those who look at it: hooks, reports, summaries."""

import collections
from typing import Any, Dict, List, NamedTuple, Optional, Tuple, Union

from mp_compat import _compat
from mp_compat import gradients
from mp_compat._compat import tf


class Step(NamedTuple):
  """What `apply_gradients` built in a graph."""

  train_op: Optional[tf.Operation]  # None in eager mode
  finite: Optional[tf.Tensor]  # a scalar bool, True if all gradients are finite; None without a check
  applied: Union[bool, tf.Tensor]  # True if the step is applied: it is finite, and the loss scale permits it
  gradients: List[Tuple[gradients.Gradient, str]]  # what was passed in, of each replica, with the variables' names
  counters: Optional["Counters"] = None


class Counters(NamedTuple):
  """Local variables that count the steps of an optimizer; int64 scalars."""

  attempted: tf.Variable
  skipped: tf.Variable


class GradientReport(NamedTuple):
  """How finite the gradient of one variable is; scalar tensors, or what a Session made of them."""

  nans: Any  # int64: how many values are NaN
  infs: Any  # int64: how many are infinite
  largest: Any  # float32 or float64: the largest magnitude among the finite ones, 0 where there is none


def record(optimizer: Any, step: Step) -> None:
  """Records the step as the optimizer's last one, in the graph it is in and in the one that a Session runs."""
  graphs = [_compat.current_graph(), _compat.home_graph()]
  for graph in graphs if None not in graphs else graphs[:1]:
    _compat.state_of(optimizer, graph)["step"] = step


def last_step(optimizer: Any) -> Step:
  """Returns what the last `apply_gradients` of this optimizer built in the current graph.

  Raises:
    RuntimeError: if there was none.
  """
  step = _compat.state_of(optimizer, _compat.current_graph()).get("step")
  if step is None or step.train_op is None:
    raise RuntimeError("The optimizer {} has no train op in this graph yet. Call minimize() or apply_gradients() "
                       "first, in the graph that is to be watched.".format(optimizer.get_name()))
  return step


def outcome(step: Step) -> tf.Tensor:
  """Returns an int32 scalar tensor: 1 if the step was applied, -1 if it was skipped, 0 if its branch was not executed.

  Args:
    step: a step for which `is_readable` holds.
  """
  with _compat.context_of(step.train_op), tf.control_dependencies([step.train_op]):
    applied_or_skipped = tf.where_v2(step.applied, 1, -1)
  return _compat.out_of_branches(applied_or_skipped, 0)


def is_readable(step: Step) -> bool:
  """Returns whether the current graph can read what the step did; not if it is inside a loop or a function."""
  return _compat.is_in_branches_only(step.train_op)


def nonfinite_gradients(optimizer: Any) -> "collections.OrderedDict[str, GradientReport]":
  """Returns a report on every gradient that the finite check covers; fetched with the train op, of the same step.

      report = mp_compat.nonfinite_gradients(optimizer)
      _, values = sess.run([train_op, report])
      print([name for name, gradient in values.items() if gradient.nans or gradient.infs])

  It costs nothing where it is not fetched.

  Args:
    optimizer: a `MixedPrecisionLossScaleOptimizer` whose train op is in the current graph.

  Returns:
    A `GradientReport` of scalar tensors by the name of the variable; where there are several gradients of one variable
    (replicas, towers, before and after clipping), the later names end in " (2)", " (3)" and so on. If the train op is
    in a branch of `tf.cond`, zeros where that branch is not executed.

  Raises:
    RuntimeError: if the current graph has no train op of this optimizer, or has it inside a loop or a function.
  """
  step = last_step(optimizer)
  if not is_readable(step):
    raise RuntimeError("The train op {} is inside a loop or a function, whose gradients cannot be read from outside. "
                       "Call nonfinite_gradients() there.".format(step.train_op.name))
  with _compat.context_of(step.train_op):
    pairs = [(name, values) for grad, name in step.gradients for values in gradients.values_of([grad])]
    pairs += gradients.hidden_sources([grad for grad, _ in step.gradients])
    reports = [_report(values) for _, values in pairs]
  unique_names = []
  seen: Dict[str, int] = collections.Counter()
  for name, _ in pairs:
    seen[name] += 1
    unique_names.append(name if seen[name] == 1 else "{} ({})".format(name, seen[name]))
  return collections.OrderedDict(
      (name, GradientReport(*[_compat.out_of_branches(one, 0) for one in report]))
      for name, report in zip(unique_names, reports))


def offenders(reports: Dict[str, GradientReport]) -> List[str]:
  """One line for each gradient that is not finite, of a fetched report."""
  return ["{}: {} NaN, {} inf, the largest of the others {:.3g}".format(name, r.nans, r.infs, r.largest)
          for name, r in reports.items() if r.nans or r.infs]


def _report(values: tf.Tensor) -> GradientReport:
  values = tf.cast(values, tf.float64 if values.dtype == tf.float64 else tf.float32)
  finite = tf.where_v2(tf.is_finite(values), tf.abs(values), tf.zeros_like(values))
  return GradientReport(
      nans=tf.math.count_nonzero(tf.is_nan(values), dtype=tf.int64),
      infs=tf.math.count_nonzero(tf.is_inf(values), dtype=tf.int64),
      largest=tf.reduce_max(tf.concat([tf.reshape(finite, [-1]), tf.zeros([1], values.dtype)], axis=0)))
