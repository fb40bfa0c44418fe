"""What a step did, for those who look at it: hooks, reports, summaries."""

import collections
from typing import Any, Dict, List, NamedTuple, Tuple, Union

from mp_compat import _compat
from mp_compat import gradients
from mp_compat._compat import tf


class Step(NamedTuple):
  """What `apply_gradients` built in a graph."""

  train_op: tf.Operation
  applied: Union[bool, tf.Tensor]  # whether the step is applied: the verdict and the word of the loss scale
  gradients: List[Tuple[gradients.Gradient, str]]  # what it was given, of each replica, with the variables' names


class GradientReport(NamedTuple):
  """How finite the gradient of one variable is; scalar tensors, or what a Session made of them."""

  nans: Any  # int64: how many values are NaN
  infs: Any  # int64: how many are infinite
  largest: Any  # float32 or float64: the largest magnitude among the finite ones, 0 where there is none


def last_step(optimizer: Any) -> Step:
  """What the last `apply_gradients` of this optimizer built in the current graph.

  Raises:
    RuntimeError: there was none.
  """
  step = _compat.state_of(optimizer, _compat.current_graph()).get("step")
  if step is None:
    raise RuntimeError("The optimizer {} has no train op in this graph yet. Call minimize() or apply_gradients() "
                       "first, in the graph that is to be watched.".format(optimizer.get_name()))
  return step


def nonfinite_gradients(optimizer: Any) -> "collections.OrderedDict[str, GradientReport]":
  """A report on every gradient that the verdict looks at: fetched with the train op, it is that of the same step.

      report = mp_compat.nonfinite_gradients(optimizer)
      _, values = sess.run([train_op, report])
      print([name for name, gradient in values.items() if gradient.nans or gradient.infs])

  It costs nothing where it is not fetched.

  Args:
    optimizer: a `MixedPrecisionLossScaleOptimizer` whose train op is in the current graph.

  Returns:
    A `GradientReport` of scalar tensors by the name of the variable; where there are several gradients of one variable
    (replicas, towers, before and after clipping), the later names end in " (2)", " (3)" and so on.

  Raises:
    RuntimeError: the current graph has no train op of this optimizer.
  """
  reports = collections.OrderedDict()
  seen: Dict[str, int] = collections.Counter()
  for name, values in gradients.judged(*zip(*last_step(optimizer).gradients)):
    seen[name] += 1
    reports[name if seen[name] == 1 else "{} ({})".format(name, seen[name])] = _report(values)
  return reports


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
