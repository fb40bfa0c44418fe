"""The rule by which a dynamic loss scale moves, as a pure transition on an immutable state.

    finite:      good_steps + 1 < increment_period        ->  good_steps += 1
                 else                                     ->  scale *= multiplier, good_steps = bad_steps = 0
    not finite:  bad_steps + 1 < overflow_tolerance       ->  bad_steps += 1, good_steps = 0
                 else                                     ->  scale = max(scale / backoff, floor), both counters = 0

The product is taken only where it is not above the ceiling; a scale that is above it (restored, say) comes down to it
when it would grow. The floor never raises a scale that is below it. With a `decrement_ratio`, the scale shrinks by a
product instead, which rounds otherwise. Standard library only: the same lines run on Python numbers and, with other
`Operations`, on tensors.

Source: Micikevicius et al., "Mixed Precision Training", 2018 (arXiv:1710.03740), section 3.2, as
`tf.compat.v1.train.experimental.DynamicLossScale` and, with a ratio,
`tf.contrib.mixed_precision.ExponentialUpdateLossScaleManager` have it.
"""

from typing import Any, Callable, NamedTuple, Optional

# The largest scale whose reciprocal is a normal float32; smaller reciprocals TensorFlow takes for 0.
LARGEST_SCALE = 2. ** 126


class Rule(NamedTuple):
  """What does not change: the parameters of those who use the rule, checked there."""

  increment_period: int
  multiplier: float
  backoff: Optional[float]
  overflow_tolerance: int
  floor: float
  ceiling: float = LARGEST_SCALE
  decrement_ratio: Optional[float] = None


class State(NamedTuple):
  """What one executed step hands to the next: numbers, or scalar tensors."""

  scale: Any
  good_steps: Any
  bad_steps: Any


class Operations(NamedTuple):
  """The elementary operations that numbers and tensors do not share."""

  where: Callable[[Any, Any, Any], Any]
  maximum: Callable[[Any, Any], Any]
  minimum: Callable[[Any, Any], Any]


PYTHON = Operations(where=lambda condition, yes, no: yes if condition else no, maximum=max, minimum=min)


def next_state(state: State, finite: Any, rule: Rule, operations: Operations = PYTHON) -> State:
  """The state after one step whose gradients were all finite, or were not.

  Args:
    state: the state before the step.
    finite: bool, or a scalar bool tensor.
    rule: the parameters.
    operations: what to compute with.

  Returns:
    The state after it, of the same kinds as `state`.
  """
  where = operations.where
  good_steps, bad_steps = state.good_steps + 1, state.bad_steps + 1
  grow, shrink = good_steps >= rule.increment_period, bad_steps >= rule.overflow_tolerance

  product = state.scale * rule.multiplier
  grown = where(product <= rule.ceiling, product, operations.minimum(state.scale, rule.ceiling))
  floor = where(state.scale < rule.floor, state.scale, rule.floor)
  shrunk = state.scale / rule.backoff if rule.decrement_ratio is None else state.scale * rule.decrement_ratio
  shrunk = operations.maximum(shrunk, floor)

  return State(
      scale=where(finite, where(grow, grown, state.scale), where(shrink, shrunk, state.scale)),
      good_steps=where(finite, where(grow, 0, good_steps), 0),
      bad_steps=where(finite, where(grow, 0, state.bad_steps), where(shrink, 0, bad_steps)))
