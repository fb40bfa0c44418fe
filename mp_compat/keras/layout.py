"""How the wrapper lies in a `tf.train.Checkpoint`; two layouts exist.

    up to 2.2                         from 2.3 on
    wrapper                           wrapper, as if it were the inner optimizer
      base_optimizer: the inner one     iter, learning_rate, slots, ...
        iter, learning_rate, slots      loss_scale
      loss_scale                        base_optimizer: for reading the earlier layout

Each is written where TensorFlow's own class writes it, and both are read everywhere.
"""

from typing import Any, Dict, List

from mp_compat import _compat


def appears_as_inner(wrapper: Any) -> bool:
  """Whether this wrapper is written in the later layout; its native base class then passes all to `_trackable`."""
  return any(base.__name__.endswith("DelegatingTrackableMixin") for base in type(wrapper).__mro__)


def track(wrapper: Any, inner: Any, loss_scale: Any, earlier_exists: bool = True) -> None:
  """Lays out a wrapper. `earlier_exists`: whether wrappers of this kind were ever written in the earlier layout."""
  inner._maybe_initialize_trackable()
  if not appears_as_inner(wrapper):
    wrapper._track_trackable(inner, "base_optimizer")
  else:
    wrapper._trackable = inner
    if earlier_exists:
      wrapper._track_trackable(_Earlier(inner), "base_optimizer")
  wrapper._track_trackable(loss_scale, "loss_scale")


class ReadsInner:
  """Looks for what a checkpoint holds in the inner optimizer too."""

  @property
  def _deferred_dependencies(self) -> Dict[str, List[Any]]:
    return self._optimizer._deferred_dependencies  # so that what the inner optimizer makes later finds its value

  def _lookup_dependency(self, name: str, *args: Any, **kwargs: Any) -> Any:
    found = super()._lookup_dependency(name, *args, **kwargs)
    return self._optimizer._lookup_dependency(name) if found is None else found

  def _create_or_restore_slot_variable(self, *args: Any, **kwargs: Any) -> Any:
    return self._optimizer._create_or_restore_slot_variable(*args, **kwargs)


class _Earlier(ReadsInner, _compat.Trackable):
  """Stands where the earlier layout has the inner optimizer; holds nothing itself."""

  def __init__(self, optimizer: Any) -> None:
    super().__init__()
    self._optimizer = optimizer

  def get_slot_names(self) -> List[str]:
    """The inner optimizer's, for the reader; it has no `get_slot`, so that nothing is written."""
    return self._optimizer.get_slot_names()
