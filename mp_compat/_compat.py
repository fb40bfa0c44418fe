"""Differences between TensorFlow versions, and private names of TensorFlow, in one module.

All other modules import `tf` from here: `tensorflow.compat.v1`, whose public names are the same from TensorFlow 1.15 to
2.21. This module implements what those names cannot do.
"""

import collections
import contextlib
import sys
from typing import Any, Callable, ContextManager, Dict, Iterator, List, Optional, Tuple
import weakref

try:
  import tensorflow
except ImportError as error:
  raise ImportError(
      "mp_compat needs TensorFlow 1.15 or later, and importing tensorflow failed: {}. Install it under the name that "
      "fits your machine, for example `pip install tensorflow` or `pip install tensorflow-cpu`."
      .format(error)) from error

MINIMUM_VERSION = (1, 15)

_found = getattr(tensorflow, "__version__", "0.0")  # missing if `tensorflow` is an empty folder
_version = tuple(int(part) for part in _found.split(".")[:2])
if _version < MINIMUM_VERSION:
  raise ImportError("mp_compat needs TensorFlow 1.15 or later, but found {}. Upgrade it, for example with "
                    "`pip install 'tensorflow>=1.15'`.".format(_found))

tf = tensorflow.compat.v1

# The base class of objects in checkpoints. Its module moved twice; in every version it is the base of Optimizer.
Trackable = tf.train.Optimizer.__bases__[0]

# TensorFlow's classes, in tuples for isinstance; empty if this version lacks them.
_experimental = getattr(tf.train, "experimental", None)
NATIVE_LOSS_SCALES, NATIVE_FIXED_LOSS_SCALES, NATIVE_DYNAMIC_LOSS_SCALES, NATIVE_LOSS_SCALE_OPTIMIZERS = (
    (getattr(_experimental, name),) if hasattr(_experimental, name) else ()
    for name in ("LossScale", "FixedLossScale", "DynamicLossScale", "MixedPrecisionLossScaleOptimizer"))


# --- state that belongs to a graph ---------------------------------------------------------------------------------


def home_graph() -> Optional[tf.Graph]:
  """Returns the graph in which variables are created now; None if they would be eager.

  It is outside of branches, loop bodies and functions, as with `tf.init_scope`.
  """
  with tf.init_scope():
    return None if tf.executing_eagerly() else tf.get_default_graph()


def graph_key(graph: Optional[tf.Graph]) -> Optional[str]:
  """Returns the key of a graph that TensorFlow's LossScale uses for its weights; None for eager mode."""
  return None if graph is None else graph._graph_key


def state_of(owner: Any, graph: Optional[tf.Graph]) -> Dict[str, Any]:
  """Returns the dictionary that `owner` keeps in `graph` (None: in eager mode).

  The graph holds the dictionary, so an owner used in many graphs keeps none of them alive, and copying an owner copies
  no variables of a graph.
  """
  if graph is None:
    return owner.__dict__.setdefault("_eager_state", {})
  return record_in(graph, "states", weakref.WeakKeyDictionary).setdefault(owner, {})


def record_in(graph: tf.Graph, name: str, make: Callable[[], Any] = dict) -> Any:
  """Returns the record `name` that this package keeps in `graph`; calls `make` to create it on first use."""
  attribute = "_mp_compat_" + name
  if not hasattr(graph, attribute):
    setattr(graph, attribute, make())
  return getattr(graph, attribute)


def current_graph() -> Optional[tf.Graph]:
  """Returns the graph in which ops are built now, which may be a function's; None in eager mode."""
  return None if tf.executing_eagerly() else tf.get_default_graph()


def enclosing_graphs() -> Iterator[tf.Graph]:
  """Yields the graph in which ops are built now; if it is a function's, then the graphs around it."""
  graph = current_graph()
  while graph is not None:
    yield graph
    graph = getattr(graph, "outer_graph", None)


def replica_variable(*args: Any, **kwargs: Any) -> tf.Variable:
  """Returns a resource variable of this replica that no strategy manages; arguments as for `tf.Variable`."""
  from tensorflow.python.ops import resource_variable_ops
  return resource_variable_ops.ResourceVariable(*args, **kwargs)


def copies_of(variable: tf.Variable) -> Tuple[tf.Variable, ...]:
  """Returns the copies of a variable on the local devices of its strategy; without a strategy, the variable itself."""
  strategy = getattr(variable, "distribute_strategy", None) or tf.distribute.get_strategy()
  return strategy.experimental_local_results(variable)


def slice_of(variable: tf.Variable) -> Optional[Any]:
  """Returns the slice of a partitioned variable: `full_name`, `full_shape`, `var_offset`, `var_shape`; else None."""
  return getattr(variable, "_get_save_slice_info", lambda: None)()


def name_scope() -> str:
  """Returns the current name scope; "" for the root."""
  return tf.get_default_graph().get_name_scope() or ""  # None in TensorFlow 1.15


# --- control flow ----------------------------------------------------------------------------------------------------


def cond(predicate: tf.Tensor, true_fn: Callable[[], Any], false_fn: Callable[[], Any]) -> Any:
  """Returns `true_fn()` if `predicate`, else `false_fn()`; in a graph, calls each once to build the branches.

  In a plain graph, the branches are part of the graph (control flow v1: Switch and Merge), even if control flow v2 is
  enabled. Branches that are functions (v2) cannot take reference variables, cannot be split between parameter servers
  before TensorFlow 2.15, and in TensorFlow 2.0 to 2.10 create eager variables despite `tf.disable_eager_execution()`.
  Inside functions and in eager mode, this is `tf.cond`.

  Args:
    predicate: a scalar bool tensor.
    true_fn: returns an op or a scalar bool tensor; in eager mode also None.
    false_fn: returns the same kind as `true_fn`.

  Returns:
    A scalar bool tensor, or an op; None in eager mode if the branches return None.
  """
  graph = tf.get_default_graph()
  if tf.executing_eagerly() or graph.building_function:
    return tf.cond(predicate, true_fn, false_fn)
  from tensorflow.python.ops import control_flow_ops
  with tf.name_scope("cond"):
    results = []
    for branch, (pivot, branch_fn) in enumerate(zip(tf.raw_ops.Switch(data=predicate, pred=predicate),
                                                    (false_fn, true_fn))):
      pivot = tf.identity(pivot)
      context = control_flow_ops.CondContext(predicate, pivot, branch)
      context.Enter()
      try:
        result = branch_fn()
        with tf.control_dependencies([pivot, result]):
          result = tf.identity(result if tf.is_tensor(result) else pivot)
        context.ExitResult([result])
      finally:
        context.Exit()
      graph.add_to_collection(tf.GraphKeys.COND_CONTEXT, context)  # for MetaGraphs
      results.append(result)
    return tf.raw_ops.Merge(inputs=results).output


def is_readable(tensor: tf.Tensor) -> bool:
  """Returns whether ops built now may read `tensor`: its control-flow context is the current one or encloses it.

  Args:
    tensor: a tensor of the current graph, or of a graph around it.
  """
  wanted, context = _context_of(tensor.op), tensor.graph._get_control_flow_context()
  while context is not wanted and context is not None:
    context = context.outer_context
  return context is wanted


def _context_of(op: tf.Operation) -> Any:
  """Returns the control-flow context in which the outputs of `op` can be read."""
  context = op._get_control_flow_context()
  return context.outer_context if context is not None and op.type in ("Exit", "RefExit") else context


@contextlib.contextmanager
def context_of(op: tf.Operation) -> Iterator[None]:
  """Makes a context manager: ops built inside belong to the control-flow context of `op`, such as its branch."""
  with _inside(_context_of(op)):
    yield


@contextlib.contextmanager
def _inside(context: Any) -> Iterator[None]:
  if context is None:
    yield
    return
  context.Enter()
  try:
    yield
  finally:
    context.Exit()


def is_in_control_flow() -> bool:
  """Returns whether ops built now belong to a branch, a loop, a function or an XLA computation."""
  graph = tf.get_default_graph()
  return graph is not home_graph() or graph._get_control_flow_context() is not None


def is_in_branches_only(op: tf.Operation) -> bool:
  """Returns whether `out_of_branches` can read outputs of `op`: in the current graph, only branches are around it."""
  context = _context_of(op)
  while hasattr(context, "pred"):
    context = context.outer_context
  return context is None and op.graph is tf.get_default_graph()


def fetched_elements(graph: tf.Graph, fetches: Any) -> List[Any]:
  """Returns the tensors and ops that `Session.run(fetches)` runs: the elements of a structure of any accepted kind."""
  from tensorflow.python.client import session
  with graph.as_default():
    return session._FetchMapper.for_fetch(fetches).unique_fetches()


def out_of_branches(tensor: tf.Tensor, default: Any) -> tf.Tensor:
  """Returns a tensor outside of branches: `tensor` if the branches (control flow v1) around it run, else `default`.

  Args:
    tensor: a tensor for whose op `is_in_branches_only` returns True.
    default: a Python value for a tensor of the same dtype and shape.
  """
  context = _context_of(tensor.op)
  while context is not None:
    with _inside(context.outer_context):
      other = tf.raw_ops.Switch(data=tf.constant(default, tensor.dtype, tensor.shape), pred=context.pred)
      tensor = tf.raw_ops.Merge(inputs=[tensor, other[1 - context.branch]]).output
    context = context.outer_context
  return tensor


def copied_out_of_branches(tensor: tf.Tensor) -> tf.Tensor:
  """Returns a tensor of the same value outside of the branches (control flow v1) around `tensor`; copies its ops.

  For initial values of variables. A tensor outside of all branches is returned unchanged.
  """
  op = tensor.op
  if not hasattr(_context_of(op), "pred"):
    return tensor
  if op.type in ("Switch", "RefSwitch"):  # the value enters the branch here
    return copied_out_of_branches(op.inputs[0])
  inputs = [copied_out_of_branches(one) for one in op.inputs]
  copy = tf.get_default_graph().create_op(
      op.type, inputs, [output.dtype for output in op.outputs], name=op.name.rpartition("/")[2], attrs=op.node_def.attr,
      op_def=op.op_def)
  return copy.outputs[tensor.value_index]


def tensor_inputs(tensor: tf.Tensor) -> List[tf.Tensor]:
  """Returns the graph tensors that `tensor` is computed from; for an argument of a function, the captured tensor."""
  op = tensor.op
  if op.type != "Placeholder":
    return list(op.inputs)
  captures = getattr(op.graph, "captures", ())
  return [outer for outer, inner in captures if inner.op is op and hasattr(outer, "graph")]


def contains_op(op: tf.Operation, prefix: str) -> bool:
  """Returns whether the type of `op` begins with `prefix`, or `op` is a conditional with such an op in a function."""
  if op.type.startswith(prefix):
    return True
  if op.type not in ("If", "StatelessIf"):
    return False
  branches = [op.graph._get_function(op.get_attr(branch).name) for branch in ("then_branch", "else_branch")]
  return any(node.op.startswith(prefix) for branch in branches for node in branch.definition.node_def)


def may_be_compiled() -> bool:
  """Returns whether ops built now belong to a function or an XLA context, which XLA may compile."""
  if tf.executing_eagerly():
    return False
  graph = tf.get_default_graph()
  context = graph._get_control_flow_context()
  while context is not None:
    if context.IsXLAContext():
      return True
    context = context.outer_context
  return graph.building_function


def on_device_of(tensor: tf.Tensor) -> ContextManager[None]:
  """Returns a context manager that places ops on the requested device of `tensor`; without one, it changes nothing."""
  return tf.device(tensor.device) if tensor.device else contextlib.nullcontext()


def is_finite(value: tf.Tensor) -> tf.Tensor:
  """Returns `tf.is_finite(value)`, also where TensorFlow's op is missing or wrong.

  For bfloat16, TensorFlow 1.15 has no op, and up to 2.10 there is none for GPUs. In XLA computations on CPUs,
  TensorFlow up to 2.1 assumes that there are no NaNs; here the bits of the exponent are tested instead.
  """
  if value.dtype == tf.bfloat16:
    value = tf.cast(value, tf.float32)
  if _version >= (2, 2) or not may_be_compiled():
    return tf.is_finite(value)
  bits, exponent = {tf.float16: (tf.uint16, 0x7c00), tf.float32: (tf.int32, 0x7f800000),
                    tf.float64: (tf.int64, 0x7ff << 52)}[value.dtype]
  exponent = tf.constant(exponent, bits)
  return tf.not_equal(tf.bitwise.bitwise_and(tf.bitcast(value, bits), exponent), exponent)


# --- the graph rewrite to float16 -----------------------------------------------------------------------------------


_enable_graph_rewrite, _disable_graph_rewrite = (  # read before mp_compat.install() replaces these names
    getattr(_experimental, name, None)
    for name in ("enable_mixed_precision_graph_rewrite", "disable_mixed_precision_graph_rewrite"))


class _NoLossScale(NATIVE_LOSS_SCALES[0] if NATIVE_LOSS_SCALES else object):
  """A loss scale without variables, for the unused optimizer in `switch_graph_rewrite_on`."""

  __call__ = update = get_config = None


def graph_rewrite_is_on() -> bool:
  """Returns whether new Sessions and functions are rewritten to float16."""
  return bool(tf.config.optimizer.get_experimental_options().get("auto_mixed_precision"))


def switch_graph_rewrite_on() -> None:
  """Enables the rewrite through TensorFlow: it logs a warning about existing Sessions, and rejects Keras policies."""
  _enable_graph_rewrite(tf.train.GradientDescentOptimizer(0.), _NoLossScale())


def switch_graph_rewrite_off() -> None:
  """Disables the rewrite of new Sessions and functions."""
  _disable_graph_rewrite()


# --- classes and modules ---------------------------------------------------------------------------------------------


def kept_from_autograph(cls: type) -> type:
  """Marks a class so that AutoGraph does not convert its instances; TensorFlow 2.0 to 2.2 compare others to strings."""
  cls.autograph_info__ = {}
  return cls


def delete_attribute(module: Any, name: str) -> None:
  """Deletes an attribute of a module, and from `__all__` and the caches of TensorFlow 1.15's module wrappers."""
  delattr(module, name)
  vars(module).pop(name, None)
  vars(module).get("_tfmw_attr_map", {}).pop(name, None)
  if name in getattr(module, "__all__", ()):
    module.__all__.remove(name)


# --- wrapped optimizers ---------------------------------------------------------------------------------------------


def layers(optimizer: tf.train.Optimizer) -> Iterator[tf.train.Optimizer]:
  """Yields this optimizer, its inner optimizer, and so on; wrappers keep theirs as `_optimizer` or `_opt`."""
  while isinstance(optimizer, tf.train.Optimizer):
    yield optimizer
    optimizer = vars(optimizer).get("_optimizer", vars(optimizer).get("_opt"))


# --- tf.train.Checkpoint --------------------------------------------------------------------------------------------


class SlotName(str):
  """The name of a slot of the inner optimizer, as the `get_slot_names` of a wrapper returns it.

  `tf.train.Checkpoint` asks each optimizer of the object graph for a slot of each object in it, beginning at the root,
  and rejects a slot that two optimizers have. A wrapper must therefore leave the slots to its inner optimizer. If a
  name was used for an object that is not a variable, the checkpoint writer uses it, and `slot_of_inner` returns None.
  """

  used_by_checkpoint_writer = False


def slot_of_inner(optimizer: Any, variable: Any, name: str) -> Optional[tf.Variable]:
  """Returns a slot of the inner optimizer; None for the checkpoint writer (`SlotName`)."""
  if isinstance(name, SlotName):
    name.used_by_checkpoint_writer |= not hasattr(variable, "assign")
    if name.used_by_checkpoint_writer:
      return None
  return optimizer.get_slot(variable, name)


class GraphStateTrackable(Trackable):
  """A Trackable whose dependencies are its variables in the current graph.

  TensorFlow up to 2.8 reads a property, later versions call a method; the lookup takes one argument or two.
  """

  def _graph_variables(self) -> Dict[str, tf.Variable]:
    """Returns the variables in the current graph by their keys in checkpoints; a subclass implements this."""

  def __getstate__(self) -> Dict[str, Any]:
    # Estimator copies its params inside a graph, where eager variables cannot be copied and have no use.
    return {key: value for key, value in self.__dict__.items() if key != "_eager_state" or tf.executing_eagerly()}

  @property
  def _checkpoint_dependencies(self) -> List[Any]:
    reference = sys.modules[Trackable.__module__].TrackableReference
    own = [reference(name, variable) for name, variable in sorted(self._graph_variables().items())]
    return super()._checkpoint_dependencies + own

  def _trackable_children(self, *args: Any, **kwargs: Any) -> Dict[str, Any]:
    return dict(super()._trackable_children(*args, **kwargs), **self._graph_variables())

  def _lookup_dependency(self, name: str, *args: Any, **kwargs: Any) -> Optional[Any]:
    found = super()._lookup_dependency(name, *args, **kwargs)
    return self._graph_variables().get(name) if found is None else found


# --- records of mp_compat.install() in a graph, and tf.train.Saver ---------------------------------------------------


def names_elsewhere(graph: tf.Graph) -> Dict[str, str]:
  """Returns the record in `graph` of the names that TensorFlow's class would give to variables, by their names here."""
  return record_in(graph, "names_elsewhere")


def conditionals_elsewhere(graph: tf.Graph) -> Dict[str, Optional[int]]:
  """Returns how many more conditionals TensorFlow's classes would have built, by name scope; None if not known."""
  return record_in(graph, "conditionals_elsewhere", lambda: collections.defaultdict(int))


def non_slot_variables(optimizer: Any) -> List[Tuple[str, tf.Variable]]:
  """Returns (name, variable) for the non-slot variables of an optimizer and its inner ones, in the current graph."""
  return [(name, variable) for layer in layers(optimizer)
          for (name, graph), variable in vars(layer).get("_non_slot_dict", {}).items()
          if graph is tf.get_default_graph()]


def variables_of_saver(saver: tf.train.Saver) -> Any:
  """Returns the `var_list` of a Saver that is not built yet: None, a list or a dict."""
  return saver._var_list


def give_variables_to_saver(saver: tf.train.Saver, var_list: Any) -> None:
  """Sets the `var_list` of a Saver that is not built yet."""
  saver._var_list = var_list


_saver_module = sys.modules[tf.train.Saver.__module__]


class SavedAgain(_saver_module.BaseSaverBuilder.SaveableObject):
  """Saves a variable a second time, under another name; does not restore it from that name."""

  def __init__(self, variable: tf.Variable, name: str) -> None:
    variable = copies_of(variable)[0]
    with tf.device(variable.device):
      value = tf.identity(variable)
    super().__init__(value, [_saver_module.BaseSaverBuilder.SaveSpec(value, "", name, value.dtype)], name)

  def restore(self, restored_tensors: List[tf.Tensor], restored_shapes: Any) -> tf.Operation:
    """Returns an op that does nothing: the variable is restored from its usual name."""
    del restored_tensors, restored_shapes
    return tf.no_op()
