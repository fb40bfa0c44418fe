# SPDX-License-Identifier: Apache-2.0
"""The update rule of a dynamic loss scale: a pure function from one immutable state to
the next, and its transition of variables.

    if finite:
      good_steps += 1
      if good_steps >= increment_period:
        if scale * multiplier <= ceiling:
          scale *= multiplier
        else:
          scale = min(scale, ceiling)
        good_steps = bad_steps = 0
    else:
      good_steps = 0
      bad_steps += 1
      if bad_steps >= overflow_tolerance:
        scale = max(scale / backoff, min(scale, floor))
        bad_steps = 0

The scale grows only if the product is at most the ceiling. A scale above the ceiling
(for example a restored one) is lowered to it when it would grow. The floor never raises
a scale that is below it. With a `decrement_ratio`, backoff is a product, which rounds
differently. The same code runs on Python numbers and, with other operations, on tensors
and variables (`transition`).

    >>> from mp_compat.core import update_rule
    >>> rule = update_rule.Rule(
    ...   increment_period=2,
    ...   multiplier=2.0,
    ...   backoff=4.0,
    ...   overflow_tolerance=1,
    ...   floor=1.0,
    ... )
    >>> state = update_rule.State(scale=1024.0, good_steps=1, bad_steps=0)
    >>> update_rule.next_state(state, True, rule)
    State(scale=2048.0, good_steps=0, bad_steps=0)
    >>> update_rule.next_state(state, False, rule)
    State(scale=256.0, good_steps=0, bad_steps=0)

Source: Micikevicius et al., "Mixed Precision Training", 2018 (arXiv:1710.03740),
section 3.2, as implemented by `tf.compat.v1.train.experimental.DynamicLossScale` and,
with a ratio, by `tf.contrib.mixed_precision.ExponentialUpdateLossScaleManager`.
"""

import functools
from typing import Any, Callable, List, NamedTuple, Optional, Union

from mp_compat._tensorflow import tf
from mp_compat.core import arguments
from mp_compat.core import distribute

Scalar = Any  # a number, a bool or a scalar tensor
_Branch = Union[Scalar, Callable[[], Scalar]]  # what is selected, or how to compute it


class Rule(NamedTuple):
  """The constant parameters of the rule; the caller validates them.

  Attributes:
    increment_period: The number of finite steps before the scale grows, at least 1.
    multiplier: The growth factor, above 1.
    backoff: The divisor after overflows, above 1; None if there is a
      `decrement_ratio`.
    overflow_tolerance: The number of overflows before the scale is lowered, at least 1.
    floor: The lower bound of a scale that is lowered, above 0.
    ceiling: The upper bound of a scale that grows, at most `arguments.LARGEST_SCALE`.
    decrement_ratio: The factor after overflows, below 1, in place of `backoff`; or
      None.
  """

  increment_period: int
  multiplier: float
  backoff: Optional[float]
  overflow_tolerance: int
  floor: float
  ceiling: float = arguments.LARGEST_SCALE
  decrement_ratio: Optional[float] = None


class State(NamedTuple):
  """The state between two executed steps: numbers, or scalar tensors.

  Attributes:
    scale: The loss scale.
    good_steps: The number of finite steps since the last overflow or growth.
    bad_steps: The number of overflows since the last growth or backoff was due. The
      number 0 if nothing counts them: with an `overflow_tolerance` of 1, no count is
      needed.
  """

  scale: Scalar
  good_steps: Scalar
  bad_steps: Scalar


class Operations(NamedTuple):
  """The operations of the rule: on numbers by default, or on tensors.

  Attributes:
    select: Returns its second argument if the first is True, else its third. Either is
      a value, or a function without arguments that returns it.
    maximum: Returns the larger of two values.
    minimum: Returns the smaller of two values.
  """

  select: Callable[[Scalar, _Branch, _Branch], Scalar]
  maximum: Callable[[Scalar, Scalar], Scalar]
  minimum: Callable[[Scalar, Scalar], Scalar]


def _select(condition: bool, yes: _Branch, no: _Branch) -> Scalar:
  """Returns the value of the branch for `condition`; the other one is not computed."""
  if condition:
    return _value(yes)
  return _value(no)


def _select_tensor(condition: Scalar, yes: _Branch, no: _Branch) -> Scalar:
  """Returns a tensor with the value of the branch for `condition`, a bool tensor; both
  are computed. Adds no op if `condition` is a bool, or both are the same.
  """
  if isinstance(condition, bool):
    return _select(condition, yes, no)
  yes, no = _value(yes), _value(no)
  if yes is no:
    return yes
  dtype = None
  for value in (yes, no):
    if tf.is_tensor(value):
      dtype = value.dtype
  return tf.where_v2(
    condition, tf.convert_to_tensor(yes, dtype), tf.convert_to_tensor(no, dtype)
  )


def _value(branch: _Branch) -> Scalar:
  """Returns a value; of a function, what it returns."""
  if callable(branch):
    return branch()
  return branch


NUMBERS = Operations(_select, max, min)


def next_state(
  state: State, finite: Scalar, rule: Rule, operations: Operations = NUMBERS
) -> State:
  """Returns the state after one step, with values of the same kinds.

  Args:
    state: the state before the step: numbers, or scalar tensors.
    finite: a bool, or a scalar bool tensor: whether all gradients are finite.
    rule: the parameters.
    operations: those for these values.
  """
  select = operations.select
  good_steps = state.good_steps + 1
  bad_steps = state.bad_steps + 1
  grow = good_steps >= rule.increment_period
  shrink = bad_steps >= rule.overflow_tolerance

  def scale_if_finite() -> Scalar:
    grown = functools.partial(_grown, state.scale, rule, operations)
    return select(grow, grown, state.scale)

  def scale_if_overflow() -> Scalar:
    shrunk = functools.partial(_shrunk, state.scale, rule, operations)
    return select(shrink, shrunk, state.scale)

  return State(
    scale=select(finite, scale_if_finite, scale_if_overflow),
    good_steps=select(finite, select(grow, 0, good_steps), 0),
    bad_steps=select(
      finite, select(grow, 0, state.bad_steps), select(shrink, 0, bad_steps)
    ),
  )


def _grown(scale: Scalar, rule: Rule, operations: Operations) -> Scalar:
  """Returns the larger scale after `increment_period` finite steps, unless it is above
  the ceiling.
  """
  product = scale * rule.multiplier
  return operations.select(
    product <= rule.ceiling, product, operations.minimum(scale, rule.ceiling)
  )


def _shrunk(scale: Scalar, rule: Rule, operations: Operations) -> Scalar:
  """Returns the smaller scale after an overflow, at least the floor; a scale that is
  below the floor already stays as it is.
  """
  floor = operations.select(scale < rule.floor, scale, rule.floor)
  if rule.decrement_ratio is None:
    lower = scale / rule.backoff
  else:
    lower = scale * rule.decrement_ratio
  return operations.maximum(lower, floor)


def transition(
  variables: List[tf.Variable], finite: tf.Tensor, rule: Rule
) -> Optional[tf.Operation]:
  """Returns an op that changes the state of a loss scale after a step; in eager mode
  changes it, and returns None.

  Args:
    variables: the scale, good_steps and, if overflows are counted, bad_steps; scalars.
    finite: a scalar bool tensor: whether all gradients of the step are finite.
    rule: the parameters of the update rule.
  """
  with tf.name_scope("update_loss_scale"):
    scale, *counters = [tf.convert_to_tensor(variable) for variable in variables]
    select = _select_tensor
    if tf.executing_eagerly():
      # With Python numbers, the rule takes ops only in steps that change the scale.
      counters = [int(counter) for counter in counters]
      finite = bool(finite)
      select = _select
    if len(counters) == 1:
      # The number 0 for bad_steps: what the rule computes from it adds no ops.
      counters.append(0)
    before = State(scale, *counters)
    after = next_state(before, finite, rule, Operations(select, tf.maximum, tf.minimum))
    assignments = []
    for variable, value in zip(variables, after):
      assignments.append(variable.assign(value, read_value=False))
    return distribute.group(*assignments)
