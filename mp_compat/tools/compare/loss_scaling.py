# SPDX-License-Identifier: Apache-2.0
"""Makes this package the loss scaling of a program, and makes graphs record which steps
are applied: by the decisions of TensorFlow's loss scales, contrib's and this package's.
"""

import functools
from typing import Any, Callable, List, Optional, Set, Tuple

import mp_compat
from mp_compat._tensorflow import log
from mp_compat._tensorflow import tf
from mp_compat.core import distribute
from mp_compat.core import loss_scale
from mp_compat.tools.compare import recording
from mp_compat.tools.compare import step_building
from mp_compat.tools.compare import steps
from mp_compat.training import step

# Writes notes on the run, by kind.
Note = Callable[..., None]


def replace(run: str, note: Note) -> None:
  """Makes this package the program's loss scaling; without loss scaling, with scale 1
  and every step applied.

      run       optimizers
      SCALED    of this package, as the program constructs them
      UNSCALED  of this package, with one FixedLossScale(1); no step is skipped

  Args:
    run: which run it is.
    note: notes whether the program uses the package, and its warnings.
  """
  from mp_compat.keras import loss_scale_optimizer as keras_optimizer
  from mp_compat.migration import installation

  installation.install()
  _observe_warnings(note)
  wrappers: List[Any] = [
    mp_compat.MixedPrecisionLossScaleOptimizer,
    keras_optimizer.LossScaleOptimizer,
  ]
  unscaled = None
  if run == recording.UNSCALED:
    # One loss scale for all: some share theirs.
    unscaled = mp_compat.FixedLossScale(1)
    step.decide = _always_applying(step.decide)
  for wrapper in wrappers:
    wrapper.__init__ = _noting(wrapper.__init__, note, unscaled)


def _observe_warnings(note: Note) -> None:
  """Notes the warnings of this package, also those that the program's verbosity
  hides.
  """
  messages: Set[str] = set()
  warn = log.warn

  @functools.wraps(warn)
  def note_and_warn(message: str, *args: object) -> None:
    messages.add(log.text_of(message, *args))
    note(warnings=sorted(messages))
    warn(message, *args)

  log.warn = note_and_warn


def _always_applying(
  decide: Callable[..., step.Decision],
) -> Callable[..., step.Decision]:
  """Returns a wrapper of `step.decide` that applies each step."""

  @functools.wraps(decide)
  def decide_to_apply(*args: Any, **kwargs: Any) -> step.Decision:
    decision = decide(*args, **kwargs)
    # A tensor: programs fetch it. One for all: steps with the same decision may read
    # gradients of each other.
    return decision._replace(apply=[tf.constant(True)] * len(decision.apply))

  return decide_to_apply


def _noting(
  construct: Callable[..., None],
  note: Note,
  unscaled: Optional[loss_scale.LossScale],
) -> Callable[..., None]:
  """Returns a wrapper of a constructor that notes that the program uses this package.

  Args:
    construct: the `__init__` of a wrapper of this package.
    note: takes the note.
    unscaled: replaces the loss scale of the optimizer; None to keep it.
  """

  @functools.wraps(construct)
  def construct_and_note(self: Any, *args: object, **kwargs: object) -> None:
    if unscaled is not None:
      # so that programs can read whether the gradients are finite
      kwargs.pop("skip_nonfinite", None)
    construct(self, *args, **kwargs)
    note(uses="mp_compat")
    if unscaled is not None:
      self._loss_scale = unscaled

  return construct_and_note


def _of_update(grads: object, result: Tuple[object, object]) -> List[object]:
  """Returns whether `update(grads)` of a LossScale decides to apply a step."""
  del grads
  _, should_apply = result
  return [should_apply]


def _of_manager(finite: object, result: object) -> List[object]:
  """Returns what `update_loss_scale(finite)` of contrib's managers is told."""
  del result
  return [finite]


def _of_decision(grads: object, decision: step.Decision) -> List[object]:
  """Returns whether `step.decide` of this package decides to apply a step."""
  del grads
  return list(decision.apply)


# An optimizer's attribute with a loss scale of TensorFlow, its method that decides, and
# what says how: `decisions_of` of `observe_decisions`.
_DECIDING = (
  ("_loss_scale", "update", _of_update),
  ("_loss_scale_manager", "update_loss_scale", _of_manager),
)


def _scales_loss(optimizer: object) -> bool:
  """Returns whether an optimizer scales the loss.

  Makes graphs record which steps of one of TensorFlow's optimizers its loss scale
  applies: it observes the class that defines the method of the loss scale, once. Loss
  scales of this package need none of that, because `step.decide` is observed.
  """
  is_scaled = False
  for base in type(optimizer).__mro__:
    is_scaled = is_scaled or base.__module__.startswith("mp_compat.")
  for attribute, method, decisions_of in _DECIDING:
    scale = getattr(optimizer, attribute, None)
    if hasattr(scale, method) and not isinstance(scale, mp_compat.LossScale):
      definer = next(cls for cls in type(scale).__mro__ if method in vars(cls))
      step_building.observe_decisions(definer, method, decisions_of)
      is_scaled = True
  return is_scaled


def _part_of(
  part: step.Part, decision: step.Decision, index: int = 0, *_: object, **__: object
) -> Tuple[List[Any], object]:
  """Returns the gradients and variables of what `step.apply` applies, and whether."""
  pairs = []
  for grad, variable in part.grads_and_vars:
    pairs += [(local, variable) for local in distribute.local_results(grad)]
  return pairs, decision.apply[index]


def observe_steps(know: Callable[[steps.KnownStep], None]) -> None:
  """Makes graphs record steps and whether they are applied: those of all optimizers,
  and those of this package.

  `know` gets each step that was built.
  """
  step_building.observe_optimizers(_scales_loss, know)
  step_building.observe_parts(step, "apply", _part_of, know)
  step_building.observe_decisions(step, "decide", _of_decision)
