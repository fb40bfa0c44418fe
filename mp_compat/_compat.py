"""TensorFlow as it is installed here: the one module that knows versions and private names.

Everything else imports `tf` from here: it is `tensorflow.compat.v1`, whose public names are the same from
TensorFlow 1.15 to 2.21. What those names cannot do is done below, once.
"""

import contextlib
import functools
import sys
from typing import Any, Callable, ContextManager, Dict, FrozenSet, Iterator, List, Optional, Tuple
import weakref

try:
  import tensorflow
except ImportError as error:
  raise ImportError(
      "mp_compat needs TensorFlow 1.15 or later, and importing tensorflow failed: {}. Install it under the name that "
      "fits your machine, for example `pip install tensorflow` or `pip install tensorflow-cpu`."
      .format(error)) from error

MINIMUM_VERSION = (1, 15)

_found = getattr(tensorflow, "__version__", "0.0")  # absent from an empty folder of that name
_version = tuple(int(part) for part in _found.split(".")[:2])
if _version < MINIMUM_VERSION:
  raise ImportError("mp_compat needs TensorFlow 1.15 or later, but found {}. Upgrade it, for example with "
                    "`pip install 'tensorflow>=1.15'`.".format(_found))

tf = tensorflow.compat.v1

# What checkpoints can hold. Its module moved twice; the base of Optimizer is the same class everywhere.
Trackable = tf.train.Optimizer.__bases__[0]

# TensorFlow's own classes, as long as it ships them; tuples, for isinstance.
_experimental = getattr(tf.train, "experimental", None)
NATIVE_LOSS_SCALES, NATIVE_FIXED_LOSS_SCALES, NATIVE_DYNAMIC_LOSS_SCALES, NATIVE_LOSS_SCALE_OPTIMIZERS = (
    (getattr(_experimental, name),) if hasattr(_experimental, name) else ()
    for name in ("LossScale", "FixedLossScale", "DynamicLossScale", "MixedPrecisionLossScaleOptimizer"))


# --- state that belongs to a graph ---------------------------------------------------------------------------------


def home_graph() -> Optional[tf.Graph]:
  """The graph in which variables made now would live; None when they would be eager.

  Branches, loop bodies and functions are lifted out of, as `tf.init_scope` does.
  """
  with tf.init_scope():
    return None if tf.executing_eagerly() else tf.get_default_graph()


def graph_key(graph: Optional[tf.Graph]) -> Optional[str]:
  """The key under which TensorFlow's LossScale files its weights: one per graph, None for eager."""
  return None if graph is None else graph._graph_key


def state_of(owner: Any, graph: Optional[tf.Graph]) -> Dict[str, Any]:
  """The dictionary that `owner` keeps in `graph` (None: outside every graph).

  It hangs on the graph, so an owner that serves many graphs keeps none of them alive, and copying an owner copies
  no variables of any graph.
  """
  if graph is None:
    return owner.__dict__.setdefault("_eager_state", {})
  return _hung_on(graph, "_mp_compat_states", weakref.WeakKeyDictionary).setdefault(owner, {})


def current_graph() -> Optional[tf.Graph]:
  """The graph in which ops made now are built, a function's too; None in eager mode."""
  return None if tf.executing_eagerly() else tf.get_default_graph()


def marked_tensors(graph: tf.Graph) -> Dict[str, str]:
  """What somebody wrote beside the tensors of `graph`, by their names; the dictionary is the graph's own."""
  return _hung_on(graph, "_mp_compat_marked", dict)


def scaled_tensors(graph: tf.Graph) -> Dict[str, Any]:
  """What the tensors of `graph` were before they were unscaled, by their names; the dictionary is the graph's own."""
  return _hung_on(graph, "_mp_compat_scaled", dict)


def _hung_on(graph: tf.Graph, name: str, make: Callable[[], Any]) -> Any:
  if not hasattr(graph, name):
    setattr(graph, name, make())
  return getattr(graph, name)


def copies_of(variable: tf.Variable) -> Tuple[tf.Variable, ...]:
  """The variable itself, or with `tf.distribute` what it is on each local device."""
  strategy = getattr(variable, "distribute_strategy", None) or tf.distribute.get_strategy()
  return strategy.experimental_local_results(variable)


def slice_of(variable: tf.Variable) -> Optional[Any]:
  """Which part of a partitioned variable this is: `full_name`, `full_shape`, `var_offset`, `var_shape`; or None."""
  return getattr(variable, "_get_save_slice_info", lambda: None)()


def name_scope() -> str:
  """The current name scope, "" for the root."""
  return tf.get_default_graph().get_name_scope() or ""  # 1.15 says None


@contextlib.contextmanager
def conditionals_in_graph() -> Iterator[None]:
  """A context in which `tf.cond` builds its branches into the graph (control flow v1); in functions it never does.

  Branches that are functions of their own (v2) cannot take reference variables, nor be split between parameter
  servers before TensorFlow 2.15; optimizers that keep variables by `tf.get_default_graph()` lose them there; and
  variables made in them become eager in TensorFlow 2.0 to 2.10, in spite of `tf.disable_eager_execution()`.
  """
  switch = tf.control_flow_v2_enabled()
  if switch:
    tf.disable_control_flow_v2()
  try:
    yield
  finally:
    if switch:
      tf.enable_control_flow_v2()


def tensor_inputs(tensor: tf.Tensor) -> List[tf.Tensor]:
  """The graph tensors that `tensor` is computed from; a function's argument leads to what the function captured."""
  op = tensor.op
  if op.type != "Placeholder":
    return list(op.inputs)
  captures = getattr(op.graph, "captures", ())
  return [outer for outer, inner in captures if inner.name == tensor.name and hasattr(outer, "graph")]


def contains_op(op: tf.Operation, prefix: str) -> bool:
  """Whether this is an op whose type begins so, or a conditional with one in a branch that is a function."""
  if op.type.startswith(prefix):
    return True
  if op.type not in ("If", "StatelessIf"):
    return False
  branches = [op.graph._get_function(op.get_attr(branch).name) for branch in ("then_branch", "else_branch")]
  return any(node.op.startswith(prefix) for branch in branches for node in branch.definition.node_def)


def may_be_compiled() -> bool:
  """Whether ops made now belong to a function, or to a part of a graph, that XLA may be asked to compile."""
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
  """A context in which ops are placed where `tensor` is asked to be; if it is not, where those around are."""
  return tf.device(tensor.device) if tensor.device else contextlib.nullcontext()


def kept_from_grappler(tensor: tf.Tensor) -> tf.Tensor:
  """The same tensor, whose value no graph optimization changes: `(g * r) * c` would become `g * (r * c)`."""
  tensor.op._set_attr("_grappler_do_not_remove", tf.AttrValue(b=True))
  return tensor


# --- finite or not -------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=None)
def _device_types(op_type: str, dtype: tf.DType) -> FrozenSet[str]:
  """The types of devices on which this op takes a `T` of this dtype; XLA's, which come up late, do not count."""
  from tensorflow.python.framework import kernels
  return frozenset(kernel.device_type for kernel in kernels.get_registered_kernels_for_op(op_type).kernel
                   for constraint in kernel.constraint
                   if constraint.name == "T" and dtype.as_datatype_enum in constraint.allowed_values.list.type
                   and not kernel.device_type.startswith("XLA"))


def _looks_in_one_pass(dtype: tf.DType) -> bool:
  """Whether DebugNumericSummaryV2 runs on every device that IsFinite runs on, and is not slower, as in 2.13 to 2.17."""
  able = _device_types("DebugNumericSummaryV2", dtype)
  return bool(able) and _device_types("IsFinite", dtype) <= able and not (2, 13) <= _version <= (2, 17)


def is_finite(value: tf.Tensor) -> tf.Tensor:
  """`tf.is_finite`, which 1.15 lacks for bfloat16; float32 holds every bfloat16 value."""
  return tf.is_finite(tf.cast(value, tf.float32) if value.dtype == tf.bfloat16 else value)


def all_finite(values: List[tf.Tensor]) -> tf.Tensor:
  """Whether all values are finite, a scalar bool tensor: in one pass where TensorFlow has a fast op for it.

  That op was made for debugging. XLA lacks it, and so may devices that TensorFlow itself does not ship.

  Args:
    values: one tensor at least, of any shapes; float16, bfloat16, float32 or float64.
  """
  summaries, verdicts = [], []
  for value in values:
    with on_device_of(value):
      if _looks_in_one_pass(value.dtype) and not may_be_compiled():
        summaries.append(tf.raw_ops.DebugNumericSummaryV2(  # 0., and 1. where some value is not finite
            input=value, output_dtype=tf.float32, tensor_debug_mode=2, tensor_id=0))
      else:
        verdicts.append(tf.reduce_all(is_finite(value)))
  if summaries:
    verdicts.append(tf.reduce_all(tf.equal(tf.stack(summaries), 0.)))
  return tf.reduce_all(tf.stack(verdicts))


# --- the rewriting of graphs to float16 ---------------------------------------------------------------------------


_enable_graph_rewrite, _disable_graph_rewrite = (  # before mp_compat.install() gives these names another meaning
    getattr(_experimental, name, None)
    for name in ("enable_mixed_precision_graph_rewrite", "disable_mixed_precision_graph_rewrite"))


class _NoLossScale(NATIVE_LOSS_SCALES[0] if NATIVE_LOSS_SCALES else object):
  """For an optimizer of TensorFlow's that nobody will use: what a loss scale must have, and no variables."""

  __call__ = update = get_config = None


def graph_rewrite_is_on() -> bool:
  """Whether new Sessions and functions are rewritten to float16."""
  return bool(tf.config.optimizer.get_experimental_options().get("auto_mixed_precision"))


def switch_graph_rewrite_on() -> None:
  """Has new Sessions and functions rewritten, with TensorFlow's own switch: it warns of Sessions, refuses policies."""
  _enable_graph_rewrite(tf.train.GradientDescentOptimizer(0.), _NoLossScale())


def switch_graph_rewrite_off() -> None:
  """Has new Sessions and functions left alone."""
  _disable_graph_rewrite()


# --- modules of TensorFlow's -----------------------------------------------------------------------------------------


def kept_from_autograph(cls: type) -> type:
  """Marks a class whose instances AutoGraph calls as they are; TensorFlow 2.0 to 2.2 compare all others to strings."""
  cls.autograph_info__ = {}
  return cls


def delete_attribute(module: Any, name: str) -> None:
  """`delattr`, also for 1.15's modules, which stand before others and remember what they were given."""
  delattr(module, name)
  vars(module).pop(name, None)
  vars(module).get("_tfmw_attr_map", {}).pop(name, None)
  if name in getattr(module, "__all__", ()):
    module.__all__.remove(name)


# --- optimizers around optimizers -----------------------------------------------------------------------------------


def layers(optimizer: Any) -> Iterator[Any]:
  """This optimizer, the one that it wraps, and so on; wrappers keep theirs as `_optimizer` or `_opt`."""
  while optimizer is not None:
    yield optimizer
    optimizer = vars(optimizer).get("_optimizer", vars(optimizer).get("_opt"))


# --- what tf.train.Checkpoint sees ----------------------------------------------------------------------------------


def called_by_checkpoint_writer() -> bool:
  """Whether the caller's caller is TensorFlow collecting slot variables for `tf.train.Checkpoint`.

  It asks every optimizer in the object graph and takes a slot that two of them name for an error; a wrapper must
  then leave the slots to the optimizer that owns them.
  """
  return sys._getframe(2).f_code.co_name.endswith("serialize_slot_variables")


class GraphStateTrackable(Trackable):
  """A Trackable whose dependencies are the variables that it has in the current graph.

  TensorFlow up to 2.8 reads a property, later versions call a method; the look-up has one argument or two.
  """

  def _graph_variables(self) -> Dict[str, tf.Variable]:
    """Variables of the current graph by the key under which checkpoints hold them; a subclass knows them."""

  def __getstate__(self) -> Dict[str, Any]:
    # Estimator copies its params inside a graph, where eager variables refuse to be copied, and are of no use.
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
