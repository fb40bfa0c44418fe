# SPDX-License-Identifier: Apache-2.0
"""Objects in a `tf.train.Checkpoint`: slots of wrapped optimizers, and variables that
belong to a graph.
"""

import abc
import sys
from typing import TYPE_CHECKING, Any, Dict, List, Optional

from mp_compat._tensorflow import tf

# The base class of objects in checkpoints. Its module moved twice; in every version it
# is the base of Optimizer.
if TYPE_CHECKING:

  class Trackable:  # the methods that this package uses
    @property
    def _checkpoint_dependencies(self) -> List[object]: ...
    def _trackable_children(
      self, *args: object, **kwargs: object
    ) -> Dict[str, object]: ...
    def _lookup_dependency(self, name: str, *args: object, **kwargs: object) -> Any: ...
    def _handle_deferred_dependencies(self, name: str, trackable: object) -> None: ...
else:
  Trackable = tf.train.Optimizer.__bases__[0]


def track(owner: Any, child: object, name: str) -> None:
  """Saves and restores `child` under `name` in checkpoints of `owner`."""
  owner._track_trackable(child, name)


class SlotName(str):
  """The name of a slot of the inner optimizer, as the `get_slot_names` of a wrapper
  returns it.

  If a name was used for an object that is neither a variable nor a tensor, the
  checkpoint writer uses it, and `slot_of_inner` returns None; docs/design.md says why.
  """

  used_by_checkpoint_writer = False


def slot_of_inner(optimizer: Any, variable: object, name: str) -> Optional[tf.Variable]:
  """Returns the slot `name` of the inner optimizer for `variable`; None for the
  checkpoint writer (`SlotName`), which saves it as the inner optimizer's.

  Args:
    optimizer: the inner optimizer, of which `get_slot` is called.
    variable: a variable or a tensor. The checkpoint writer passes each object of the
      checkpoint, the root first, and the same `name` object for all of them: at the
      root, which has no `assign`, the name is marked.
    name: the name of a slot. One that is not a `SlotName`, such as "momentum" in a
      program, is never the checkpoint writer's.
  """
  if isinstance(name, SlotName):
    if not hasattr(variable, "assign") and not tf.is_tensor(variable):
      name.used_by_checkpoint_writer = True
    if name.used_by_checkpoint_writer:
      return None
  return optimizer.get_slot(variable, name)


class GraphStateTrackable(Trackable):
  """A Trackable whose dependencies are its variables in the current graph.

  TensorFlow up to 2.8 reads the dependencies from a property, later versions call a
  method. `_lookup_dependency` takes one argument or two.
  """

  @abc.abstractmethod
  def _graph_variables(self) -> Dict[str, tf.Variable]:
    """Returns the variables in the current graph by their keys in checkpoints."""

  def __getstate__(self) -> Dict[str, object]:
    """Returns the attributes to copy; in a graph, without the eager variables."""
    state = dict(self.__dict__)
    if not tf.executing_eagerly():
      # Estimator copies its params inside a graph, where eager variables cannot be
      # copied and have no use.
      state.pop("_eager_state", None)
    return state

  @property
  def _checkpoint_dependencies(self) -> List[object]:
    """Returns TensorFlow's references to the objects that this one contains, its
    variables included.
    """
    reference = sys.modules[Trackable.__module__].TrackableReference
    dependencies = list(super()._checkpoint_dependencies)
    for name, variable in sorted(self._graph_variables().items()):
      dependencies.append(reference(name, variable))
    return dependencies

  def _trackable_children(self, *args: object, **kwargs: object) -> Dict[str, object]:
    """Returns the objects that this one contains by key, its variables included."""
    children = super()._trackable_children(*args, **kwargs)
    return {**children, **self._graph_variables()}

  def _lookup_dependency(self, name: str, *args: object, **kwargs: object) -> Any:
    """Returns the contained object, or else the variable, of a key; None for none."""
    dependency = super()._lookup_dependency(name, *args, **kwargs)
    if dependency is not None:
      return dependency
    return self._graph_variables().get(name)
