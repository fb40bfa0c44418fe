# SPDX-License-Identifier: Apache-2.0
"""Sets the layout of the Keras wrapper in a `tf.train.Checkpoint`. Two layouts exist:

    up to 2.2                         from 2.3 on
    wrapper                           wrapper, as if it were the inner optimizer
      base_optimizer: the inner one     iter, learning_rate, slots, ...
        iter, learning_rate, slots      loss_scale
      loss_scale                        base_optimizer: for reading the earlier layout

In each TensorFlow version, the wrapper writes the layout of TensorFlow's own class and reads both layouts.
"""

from typing import Any, Dict, List

from mp_compat._tensorflow import trackable


def delegates_to_inner(wrapper: Any) -> bool:
  """Returns whether the wrapper has the later layout, where its native base class delegates to `_trackable`."""
  return any(base.__name__.endswith("DelegatingTrackableMixin") for base in type(wrapper).__mro__)


def track(wrapper: Any, inner: Any, loss_scale: Any, earlier_exists: bool = True) -> None:
  """Sets a wrapper's layout; `earlier_exists` is False if the earlier layout was never written for its kind."""
  inner._maybe_initialize_trackable()
  if not delegates_to_inner(wrapper):
    wrapper._track_trackable(inner, "base_optimizer")
  else:
    wrapper._trackable = inner
    if earlier_exists:
      wrapper._track_trackable(_EarlierLayout(inner), "base_optimizer")
  wrapper._track_trackable(loss_scale, "loss_scale")


# A base class for mixins. Type checkers assume that it has all attributes, such as those of the Keras classes.
AnyBase: Any = object


class InnerLookupMixin(AnyBase):
  """Looks up checkpoint dependencies in the inner optimizer, too."""

  @property
  def _deferred_dependencies(self) -> Dict[str, List[Any]]:
    return self._optimizer._deferred_dependencies  # values to restore into variables that do not exist yet

  def _lookup_dependency(self, name: str, *args: Any, **kwargs: Any) -> Any:
    dependency = super()._lookup_dependency(name, *args, **kwargs)
    return self._optimizer._lookup_dependency(name) if dependency is None else dependency

  def _create_or_restore_slot_variable(self, *args: Any, **kwargs: Any) -> Any:
    return self._optimizer._create_or_restore_slot_variable(*args, **kwargs)


class _EarlierLayout(InnerLookupMixin, trackable.Trackable):
  """Represents the inner optimizer in the earlier layout, for reading; has no variables."""

  def __init__(self, optimizer: Any) -> None:
    super().__init__()
    self._optimizer = optimizer

  def get_slot_names(self) -> List[str]:
    """Returns the inner optimizer's slot names, for reading. Nothing is written, because `get_slot` is missing."""
    return self._optimizer.get_slot_names()
