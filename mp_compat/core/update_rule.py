# SPDX-License-Identifier: Apache-2.0
"""The update rule of a dynamic loss scale: a pure function from one immutable state to
the next.

    finite:      good_steps + 1 < increment_period        ->  good_steps += 1
                 else                                     ->  scale *= multiplier, good_steps = bad_steps = 0
    not finite:  bad_steps + 1 < overflow_tolerance       ->  bad_steps += 1, good_steps = 0
                 else                                     ->  scale = max(scale / backoff, floor), both counters = 0

The scale grows only if the product is at most the ceiling. A scale above the ceiling
(for example a restored one) is lowered to it when it would grow. The floor never raises
a scale that is below it. With a `decrement_ratio`, backoff is a product, which rounds
differently. Uses only the standard library: the same code runs on Python numbers and,
with other operations, on tensors.

Source: Micikevicius et al., "Mixed Precision Training", 2018 (arXiv:1710.03740),
section 3.2, as implemented by `tf.compat.v1.train.experimental.DynamicLossScale` and,
with a ratio, by `tf.contrib.mixed_precision.ExponentialUpdateLossScaleManager`.
"""

from typing import Any, Callable, NamedTuple, Optional

# The largest scale whose reciprocal is a normal float32; TensorFlow flushes smaller
# reciprocals to 0.
LARGEST_SCALE = 2.0**126

# a number, a bool or a scalar tensor; as an argument of `choose`, also a function that
# returns one
Scalar = Any


class Rule(NamedTuple):
  """The constant parameters of the rule; the caller validates them."""

  increment_period: int
  multiplier: float
  backoff: Optional[float]
  overflow_tolerance: int
  floor: float
  ceiling: float = LARGEST_SCALE
  decrement_ratio: Optional[float] = None


class State(NamedTuple):
  """The state between two executed steps: numbers, or scalar tensors."""

  scale: Scalar
  good_steps: Scalar
  # 0, a number, if nothing counts them: a rule with an overflow_tolerance of 1 needs no
  # count
  bad_steps: Scalar


def choose(condition: Scalar, yes: Scalar, no: Scalar) -> Scalar:
  """Returns `yes` if `condition`, else `no`; of a function, its result."""
  chosen = yes if condition else no
  return chosen() if callable(chosen) else chosen


def next_state(
  state: State,
  finite: Scalar,
  rule: Rule,
  where: Callable[[Scalar, Scalar, Scalar], Scalar] = choose,
  maximum: Callable[[Scalar, Scalar], Scalar] = max,
  minimum: Callable[[Scalar, Scalar], Scalar] = min,
) -> State:
  """Returns the state after one step, with values of the same kinds; `finite` is a
  bool, or a scalar bool tensor.
  """
  good_steps, bad_steps = state.good_steps + 1, state.bad_steps + 1
  grow, shrink = (
    good_steps >= rule.increment_period,
    bad_steps >= rule.overflow_tolerance,
  )

  def grown() -> Scalar:
    product = state.scale * rule.multiplier
    return where(product <= rule.ceiling, product, minimum(state.scale, rule.ceiling))

  def shrunk() -> Scalar:
    floor = where(state.scale < rule.floor, state.scale, rule.floor)
    lower = (
      state.scale / rule.backoff
      if rule.decrement_ratio is None
      else state.scale * rule.decrement_ratio
    )
    return maximum(lower, floor)

  return State(
    scale=where(
      finite,
      lambda: where(grow, grown, state.scale),
      lambda: where(shrink, shrunk, state.scale),
    ),
    good_steps=where(finite, where(grow, 0, good_steps), 0),
    bad_steps=where(
      finite, where(grow, 0, state.bad_steps), where(shrink, 0, bad_steps)
    ),
  )
