# SPDX-License-Identifier: Apache-2.0
"""Builds conditionals, and copies ops out of their branches."""

import itertools
from typing import Any, Callable, Dict, List, Optional, Set

from tensorflow.python.ops import control_flow_ops

from mp_compat._tensorflow import contexts
from mp_compat._tensorflow import tf

_XLA_CONTEXT = getattr(control_flow_ops, "XLAControlFlowContext", None)  # around the ops that call compiled functions


def cond(predicate: tf.Tensor, true_fn: Callable[[], Any], false_fn: Callable[[], Any]) -> Any:
  """Returns `true_fn()` if `predicate`, else `false_fn()`; in a graph, calls each once to build the branches.

  In a plain graph, the branches are part of the graph (control flow v1: Switch and Merge), even if control flow v2 is
  enabled (docs/design.md says why; v2 also creates eager variables in TensorFlow 2.0 to 2.10 despite
  `tf.disable_eager_execution()`). Inside functions and in eager mode, this is `tf.cond`. The branches return ops, or
  tensors of one dtype and shape; in eager mode also None.
  """
  graph = tf.get_default_graph()
  if tf.executing_eagerly() or graph.building_function:
    return tf.cond(predicate, true_fn, false_fn)
  with tf.name_scope("cond"):
    results = []
    switched = tf.raw_ops.Switch(data=predicate, pred=predicate)
    for branch, branch_fn in enumerate((false_fn, true_fn)):
      pivot = tf.identity(switched[branch])
      context = _BranchContext(predicate, pivot, branch)
      with contexts.enter(context):
        result = branch_fn()
        with tf.control_dependencies([pivot, result]):
          result = tf.identity(result if tf.is_tensor(result) else pivot)
        context.ExitResult([result])
      graph.add_to_collection(tf.GraphKeys.COND_CONTEXT, context)  # for MetaGraphs
      results.append(result)
    return tf.raw_ops.Merge(inputs=results).output


class _BranchContext(control_flow_ops.CondContext):
  """A branch in which ops may also use tensors that were built in the branch of another conditional.

  TensorFlow calls `AddValue` for each input of each op that is built in the branch. For example, two optimizers share a
  learning rate that is a function, `rate * decay`, which builds its tensor once, in the first one's `apply_gradients`:

                               branch of the first step    branch of the second step
      with TensorFlow's class    rate -> Mul -> Apply        Mul -> Apply
      here                       rate -> Mul -> Apply        rate -> Mul_copy -> Apply

  With TensorFlow's class, `Mul` is dead in the steps that skip the first optimizer, and the second one silently does
  not run. Here its ops are copied, once for each step, to outside of the first branch.
  """

  def __init__(self, predicate: tf.Tensor, pivot: tf.Tensor, branch: int) -> None:
    super().__init__(predicate, pivot, branch)
    self._around = list(contexts.enclosing(self))
    self._adopted: Set[tf.Operation] = set()

  def AddValue(self, val: tf.Tensor) -> tf.Tensor:
    self._adopt(val.op)
    others = self._others_around(val.op)
    if others and val.name not in self._values:
      copied = super().AddValue(_copy_out(val, others, _refuse_stateful))
      self._values.add(val.name)
      self._external_values[val.name] = copied  # for further ops that read `val`
    return super().AddValue(val)

  def AddOp(self, op: tf.Operation) -> None:
    for control in op.control_inputs:
      self._adopt(control)
    super().AddOp(op)
    if any(self._others_around(control) for control in op.control_inputs):
      controls = [self._control_outside(control) for control in op.control_inputs]
      op._remove_all_control_inputs()
      op._add_control_inputs([control for control in controls if control is not None])
    for part in _parts_of_gradient(op):
      if part._get_control_flow_context() is self:
        part._set_control_flow_context(self.outer_context)

  def AddInnerOp(self, op: tf.Operation) -> None:
    for control in op.control_inputs:
      self._adopt(control)
    super().AddInnerOp(op)

  def _adopt(self, op: tf.Operation) -> None:
    """Adds a call of a compiled function to the innermost branch; TensorFlow executes it in skipped steps, too."""
    context = op._get_control_flow_context()
    if type(context) is _XLA_CONTEXT and op not in self._adopted and self in contexts.enclosing(context):
      self._adopted.add(op)
      context.outer_context.AddOp(op)

  def _control_outside(self, control: tf.Operation) -> Optional[tf.Operation]:
    """Returns the op to wait for instead of `control`; None for none."""
    others = self._others_around(control)
    if not others:
      return control
    if control.outputs:
      return _copy_out(control.outputs[0], others, _refuse_stateful).op
    _refuse_stateful(control)
    return None

  def _others_around(self, op: tf.Operation) -> List[Any]:
    """Returns the branches of other steps that contain `op`, from the innermost on."""
    around = contexts.enclosing(op._get_control_flow_context())
    outside = itertools.takewhile(lambda context: context not in self._around, around)
    return [context for context in outside if isinstance(context, _BranchContext)]


def _parts_of_gradient(op: tf.Operation) -> List[tf.Operation]:
  """Returns the ops around which a CondContext must not be, if `op` may be a part of the gradient of a conditional.

  If that gradient is differentiated inside of the branch, TensorFlow takes the context of a Switch, and that of the ops
  that a Merge reads, for the conditional.
  """
  if op.type in ("Merge", "RefMerge"):
    return [merged.op for merged in op.inputs]
  if op.type in ("Switch", "RefSwitch") and op.inputs[0].name != op.inputs[1].name:  # not the beginning of one
    return [op]
  return []


def _refuse_stateful(op: tf.Operation) -> None:
  """Raises a ValueError for an op of another branch whose result may depend on when it is executed."""
  context = op._get_control_flow_context()
  inside = [control for control in op.control_inputs if control._get_control_flow_context() is context]
  waits = any(control.type != "Identity" for control in inside)  # not only for the pivot of the branch
  if waits or (op.op_def.is_stateful and op.type not in ("Print", "ReadVariableOp")):
    raise ValueError(
      "apply_gradients() must not use {} ({}), which an earlier apply_gradients() built in its conditional: it is not "
      "computed if that step is skipped. Build it before both, or once in each.".format(op.name, op.type)
    )


def copy_out_of_branches(tensor: tf.Tensor) -> tf.Tensor:
  """Returns a tensor of the same value outside of the current branches (control flow v1); copies its ops.

  Raises a ValueError if a loop inside the branches computes the tensor.
  """
  return _copy_out(tensor, list(contexts.enclosing(tensor.graph._get_control_flow_context())), lambda op: None)


def _copy_out(tensor: tf.Tensor, branches: List[Any], check: Callable[[tf.Operation], None]) -> tf.Tensor:
  """Returns a tensor of the same value outside of `branches`, the contexts around it from the innermost on.

  A Switch that passes a value into one of the branches is left out; any other op inside of them is copied, after a call
  of `check` with it:

      value -> Switch(predicate of a branch) -> Mul -> tensor     becomes     value -> Mul_copy
  """
  predicates = [(context.pred.op, context.pred.value_index) for context in branches if hasattr(context, "pred")]
  copies: Dict[tf.Operation, tf.Operation] = {}

  def is_inside(op: tf.Operation) -> bool:
    return any(context in branches for context in contexts.enclosing(op._get_control_flow_context()))

  def copy(value: tf.Tensor) -> tf.Tensor:
    op = value.op
    if not is_inside(op):
      return value
    if op.type in ("Switch", "RefSwitch") and (op.inputs[1].op, op.inputs[1].value_index) in predicates:
      return copy(op.inputs[0])  # passes a tensor from outside into one of the branches
    if op.type in ("Enter", "Exit", "NextIteration", "RefEnter", "RefExit", "RefNextIteration"):
      raise ValueError(
        "The initial value of a variable that apply_gradients() creates, or a tensor that several calls use, must not "
        "be computed by a loop inside apply_gradients(), but {} is. Pass a function that returns the value, or compute "
        "it before.".format(tensor)
      )
    if op not in copies:
      check(op)
      inputs = [copy(value) for value in op.inputs]
      context = op._get_control_flow_context()
      in_copied_branch = context not in branches and op is not context.pivot.op
      waits_for = [control for control in op.control_inputs if not is_inside(control)]
      waits_for += [copy(context.pivot).op] if in_copied_branch else []
      with tf.control_dependencies(waits_for):
        copies[op] = tf.get_default_graph().create_op(
          op.type,
          inputs,
          [output.dtype for output in op.outputs],
          name=op.name.rpartition("/")[2],
          attrs=op.node_def.attr,
          op_def=op.op_def,
        )
    return copies[op].outputs[value.value_index]

  around = branches[-1].outer_context if branches else None
  with tf.init_scope(), contexts.enter(around):
    return copy(tensor)
