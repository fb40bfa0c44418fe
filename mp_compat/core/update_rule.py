# SPDX-License-Identifier: Apache-2.0
"""The update rule of a dynamic loss scale: a pure function from one immutable state to
the next.

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
differently. Uses only the standard library: the same code runs on Python numbers and,
with other operations, on tensors.

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

from typing import Any, Callable, NamedTuple, Optional, Union

# The largest scale whose reciprocal is a normal float32; TensorFlow flushes smaller
# reciprocals to 0.
LARGEST_SCALE = 2.0**126

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
    ceiling: The upper bound of a scale that grows, at most `LARGEST_SCALE`.
    decrement_ratio: The factor after overflows, below 1, in place of `backoff`; or
      None.
  """

  increment_period: int
  multiplier: float
  backoff: Optional[float]
  overflow_tolerance: int
  floor: float
  ceiling: float = LARGEST_SCALE
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


def next_state(
  state: State,
  finite: Scalar,
  rule: Rule,
  where: Optional[Callable[[Scalar, Scalar, Scalar], Scalar]] = None,
  maximum: Callable[[Scalar, Scalar], Scalar] = max,
  minimum: Callable[[Scalar, Scalar], Scalar] = min,
) -> State:
  """Returns the state after one step, with values of the same kinds.

  Args:
    state: the state before the step: numbers, or scalar tensors.
    finite: a bool, or a scalar bool tensor: whether all gradients are finite.
    rule: the parameters.
    where: for tensors, returns its second argument if the first is True, else its
      third, as `tf.where` does. None for numbers, of which only those that are selected
      are computed.
    maximum: returns the larger of two values; for tensors `tf.maximum`.
    minimum: returns the smaller of two values; for tensors `tf.minimum`.
  """

  def select(condition: Scalar, yes: _Branch, no: _Branch) -> Scalar:
    """Returns the value of `yes` if `condition`, else that of `no`: each a value, or a
    function without arguments. For tensors, both are computed.
    """
    if where is None or isinstance(condition, bool):
      chosen = yes if condition else no
      return _value(chosen)
    yes, no = _value(yes), _value(no)
    if yes is no:
      return yes
    return where(condition, yes, no)

  good_steps = state.good_steps + 1
  bad_steps = state.bad_steps + 1
  grow = good_steps >= rule.increment_period
  shrink = bad_steps >= rule.overflow_tolerance

  def grown() -> Scalar:
    product = state.scale * rule.multiplier
    return select(product <= rule.ceiling, product, minimum(state.scale, rule.ceiling))

  def shrunk() -> Scalar:
    """Returns the smaller scale after an overflow, at least the floor; a scale that is
    below the floor already stays as it is.
    """
    floor = select(state.scale < rule.floor, state.scale, rule.floor)
    if rule.decrement_ratio is None:
      lower = state.scale / rule.backoff
    else:
      lower = state.scale * rule.decrement_ratio
    return maximum(lower, floor)

  def scale_if_finite() -> Scalar:
    return select(grow, grown, state.scale)

  def scale_if_overflow() -> Scalar:
    return select(shrink, shrunk, state.scale)

  return State(
    scale=select(finite, scale_if_finite, scale_if_overflow),
    good_steps=select(finite, select(grow, 0, good_steps), 0),
    bad_steps=select(
      finite, select(grow, 0, state.bad_steps), select(shrink, 0, bad_steps)
    ),
  )


def _value(branch: _Branch) -> Scalar:
  """Returns a value; of a function, what it returns."""
  if callable(branch):
    return branch()
  return branch
