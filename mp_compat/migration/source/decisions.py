# SPDX-License-Identifier: Apache-2.0
"""Finds the places in a source that cannot be rewritten automatically and must be reviewed by hand."""

import re
from typing import Dict, List, NamedTuple, Optional, Set

import libcst as cst

from mp_compat.migration import old_names
from mp_compat.migration.source import parsed_source
from mp_compat.migration.source import values
from mp_compat.migration.source.files import MAGIC
from mp_compat.migration.source.parsed_source import Place
from mp_compat.migration.source.parsed_source import replacement
from mp_compat.migration.source.rewriting import OPTIMIZER_CLASSES
from mp_compat.migration.source.rewriting import PUBLIC_EQUIVALENTS
from mp_compat.migration.source.rewriting import has_public_equivalent

# The remedies by kind of decision. docs/migration.md has what a kind needs besides, under its name.
REMEDIES: Dict[str, str] = {
  "checkpoints": "TensorFlow's classes stored Adam's powers under names (cond_1/beta1_power) that the new program "
  "does not look for; convert old checkpoints once: python -m mp_compat checkpoint convert IN OUT --to mp_compat (--to "
  "contrib for the optimizer of mp_compat.contrib); or restore with mp_compat.checkpoints.Saver",
  "clipped-gradients": "the program changes gradients between compute_gradients and apply_gradients; mp_compat also "
  "detects an overflow that this hides, and skips the step; keep the code, unless it is a "
  "finite check of the program",
  "horovod": "put hvd.DistributedOptimizer inside: MixedPrecisionLossScaleOptimizer(hvd.DistributedOptimizer(opt), "
  "scale); outside only with backward_passes_per_step",
  "wrapped-twice": "the inner optimizer may scale the loss already; mp_compat uses the outer scale only (contrib's "
  "optimizer around the graph rewrite's) or raises an error; remove one of the two: "
  "enable_mixed_precision_graph_rewrite(opt) also adds loss scaling",
  "subclass": "mp_compat calls update() of every LossScale subclass, obeys its should_apply, and also skips every "
  "step with non-finite gradients; check what the subclass overrides, and pass skip_nonfinite=False if "
  "update() alone should decide",
  "isinstance": "objects of TensorFlow's own class are not instances of this class of mp_compat (Keras wrappers "
  "are); if TensorFlow can make the object (a mixed_float16 policy, a library that is not migrated), "
  "test for TensorFlow's class, of which mp_compat's objects are instances, too",
  "private-state": "mp_compat has the private attributes that its classes share with TensorFlow's, and no others; "
  "use inner_optimizer, loss_scale, variables(), or call the loss scale",
  "fixed-scale": "mp_compat skips steps that overflow with a fixed scale, too; skip_nonfinite=False applies them, as "
  "TensorFlow's class does",
  "keras": "this name is TensorFlow's current Keras class and is not changed; mp_compat.keras.LossScaleOptimizer "
  "replaces it",
  "name-taken": "the name mp_compat may not be the module here (None after a failed import), so the old name is not "
  "changed; import mp_compat without an alternative and migrate again",
  "guard": "the program tests whether TensorFlow has a name, or handles its absence; mp_compat always has it, so keep "
  "the branch that uses it",
  "unresolved": "this may be an old name, or a module with old names, but this file does not show that it is one on "
  "every path, or how it is used; rewrite it by hand",
  "text": "a string names an old module; if it is code, a configuration or a patch target, rewrite it by hand",
}

_PRIVATE = {"_current_loss_scale", "_num_good_steps", "_num_bad_steps", "_doing_dynamic_loss_scaling"}
_KERAS_OPTIMIZERS = {"mp_compat.keras.LossScaleOptimizer", "mp_compat.keras.experimental.LossScaleOptimizer"}
_OPTIMIZERS = OPTIMIZER_CLASSES | {"mp_compat.enable_mixed_precision_graph_rewrite"}
_WRAPPERS = _OPTIMIZERS | _KERAS_OPTIMIZERS
_LOSS_SCALES = {"mp_compat.LossScale", "mp_compat.FixedLossScale", "mp_compat.DynamicLossScale"}
_LEAVES = {name.rpartition(".")[2] for name in old_names.OLD_NAMES} - {
  "LossScaleOptimizer",
  "get",
  "loss_scale",
  "loss_scale_optimizer",
  "loss_scale_manager",
  "mixed_precision",
}
_TYPE_TESTS = {"builtins.isinstance", "builtins.issubclass"}
# Optimizers whose checkpoints have only slots, besides the variables.
_WITHOUT_POWERS = re.compile(
  r".*\.(GradientDescent|Momentum|RMSProp|Ftrl|Adadelta|Adagrad(DA)?|Proximal(GradientDescent|Adagrad))Optimizer"
)
_RESTORES = re.compile(
  r"(.*\.)?(restore|load_checkpoint|NewCheckpointReader|init_from_checkpoint|assign_from_checkpoint(_fn)?"
  r"|(Singular)?Monitored(Training)?Session|Supervisor|(TPU)?Estimator)"
)
_CLIPS = re.compile(r".*\.(clip_by_(value|norm|global_norm|average_norm)|is_finite|is_nan|is_inf)")
_MODULES = {name.rpartition(".")[0] for name in old_names.OLD_NAMES} - {"tensorflow.contrib"}
_BELOW_TENSORFLOW = {re.sub(r"^tensorflow\.(compat\.v[12]\.)?", "", module) for module in _MODULES}
_PUBLIC = ["{}.{}".format(path, name) for path, replacements in old_names.PUBLIC for name in replacements]
# Old modules, but not their other members; and public names without `tf`, as operator.attrgetter takes them.
_TEXT = re.compile(
  r"\b(tf|tensorflow)\.(compat\.v[12]\.)?({})\b(?!\.(PythonState|Policy|\w*policy)\b)|(?<![\w.])({})\b".format(
    *("|".join(map(re.escape, sorted(names))) for names in (_BELOW_TENSORFLOW, _PUBLIC))
  )
)


class Decision(NamedTuple):
  """A place to review: `text` is from the source, `kind` is a key of REMEDIES."""

  place: Place
  kind: str
  text: str


class DecisionFinder(cst.CSTVisitor):
  """Finds the decisions of one source.

  Attributes:
    decisions: A list of `Decision`, in the order of the text. Rewriting the source does not change them.
  """

  def __init__(self, source: parsed_source.ParsedSource) -> None:
    super().__init__()
    self._source = source
    self._optimizers: List[cst.CSTNode] = []  # uses of our classes; without, decisions on gradients do not apply
    self._inside: Set[cst.CSTNode] = set()  # calls that made the inner optimizer of a loss scaling optimizer
    self._found: List[Decision] = []
    self._about_gradients: List[Decision] = []
    self._horovod: List[cst.Call] = []
    self._restoring: List[cst.CSTNode] = []
    source.module.visit(self)
    for call in self._horovod:
      if call not in self._inside:
        self._add(self._about_gradients, call.func, "horovod")
    adams = list(filter(self._may_have_powers, self._optimizers))
    for place in adams and (self._restoring or adams[:1]):
      self._add(self._found, place, "checkpoints")
    if self._optimizers:
      self._found += self._about_gradients
    self.decisions = sorted(set(self._found))

  def _add(self, decisions: List[Decision], node: cst.CSTNode, kind: str) -> None:
    text = " ".join(self._source.text(node).replace(MAGIC, "").split())
    decisions.append(Decision(self._source.place(node), kind, text if len(text) <= 80 else text[:77] + "..."))

  # Imports.

  def visit_Import(self, node: cst.Import) -> bool:
    for alias in node.names:
      if replacement(values.dotted(alias.name)):
        self._check_guard(alias)
    return False

  def visit_ImportFrom(self, node: cst.ImportFrom) -> bool:
    module = values.module_of(node)
    for alias in values.aliases(node):
      full = "{}.{}".format(module, values.dotted(alias.name))
      new = replacement(full)
      if new:
        if new != full:
          self._check_guard(alias)
      elif replacement(module):
        self._add(self._found, alias, "private-state")
      elif _is_keras(full):
        self._add(self._found, alias, "keras")
    if isinstance(node.names, cst.ImportStar) and module in _MODULES and module != "tensorflow.contrib.mixed_precision":
      self._add(self._found, node, "unresolved")
    return False

  def _check_guard(self, node: cst.CSTNode) -> None:
    """Reports an old name that is imported, or looked up, in a `try` that handles its absence."""
    if any(
      isinstance(node, cst.ImportAlias) or handler.type and "AttributeError" in self._source.text(handler.type)
      for handler in self._source.handlers(node)
    ):
      self._add(self._found, node, "guard")

  def visit_ClassDef(self, node: cst.ClassDef) -> None:
    methods = {part.name.value for part in node.body.body if isinstance(part, cst.FunctionDef)}
    if any(self._source.replacements(base.value) & _LOSS_SCALES for base in node.bases) and any(
      name == "__call__" or not name.startswith("__") for name in methods - {"get_config", "from_config"}
    ):
      self._add(self._found, node.name, "subclass")

  # Names.

  def visit_Attribute(self, node: cst.Attribute) -> bool:
    kind = self._kind(node)
    if kind:
      self._add(self._found, node, kind)
    self._note_optimizer(node)
    inner = node.value
    while kind and isinstance(inner, cst.Attribute):
      inner = inner.value  # One decision for a chain is enough.
    inner.visit(self)
    return False

  def _kind(self, node: cst.Attribute) -> str:
    """Returns the kind of decision that an attribute needs, or ""."""
    new, kind = self._source.decide_name(node)
    if new:
      self._check_guard(node)
    if new or kind:
      return kind
    full, leaf = self._source.full_names(node), node.attr.value
    if self._source.replacements(node):  # `_name` of a rewritten module is missing there.
      return "private-state" if leaf.startswith("_") and any(name.startswith("mp_compat.") for name in full) else ""
    return self._kind_of_other_name(node, full)

  def _kind_of_other_name(self, node: cst.Attribute, full: Set[str]) -> str:
    leaf = node.attr.value
    if any(map(_is_keras, full)):
      return "keras"
    if leaf in _LEAVES or leaf == "LossScaleOptimizer" and "mixed_precision" in self._source.text(node.value):
      return "unresolved"
    if leaf in _PRIVATE or leaf in PUBLIC_EQUIVALENTS and self._is_scaling_optimizer(node):
      return "private-state"
    if any(replacement(name.rpartition(".")[0]) for name in full):
      return "private-state"  # a member that this package's module lacks
    return "unresolved" if full & _MODULES and self._escapes(node) else ""

  def _escapes(self, node: cst.BaseExpression) -> bool:
    """Returns whether a module is used otherwise than for a member, or as the value of a variable of this file."""
    parent = self._source.parents[node]
    while isinstance(parent, (cst.IfExp, cst.BooleanOperation, cst.NamedExpr)):
      parent = self._source.parents[parent]
    if isinstance(parent, cst.Assign):
      return not all(isinstance(target.target, cst.Name) for target in parent.targets)
    if isinstance(parent, cst.Arg):
      call = self._source.parents[parent]
      return not (
        isinstance(call, cst.Call)
        and self._source.full_names(call.func) <= {"builtins.getattr", "builtins.hasattr"}
        and len(call.args) > 1
        and values.literal(call.args[1].value) is not None
      )
    if isinstance(parent, cst.Attribute):
      return parent.attr.value == "__dict__"
    return not isinstance(parent, cst.AnnAssign)

  def visit_Name(self, node: cst.Name) -> None:
    self._note_optimizer(node)
    modules = self._source.full_names(node) & _MODULES
    if any(self._source.new_name(module) is None for module in modules) and self._escapes(node):
      self._add(self._found, node, "unresolved")

  def _note_optimizer(self, node: cst.BaseExpression) -> None:
    if self._source.replacements(node) & _OPTIMIZERS:
      call = self._source.enclosing(node, cst.Call)
      if call is None or not self._source.full_names(call.func) & _TYPE_TESTS:
        self._optimizers.append(node)

  def _is_scaling_optimizer(self, node: cst.Attribute) -> bool:
    """Returns whether `node` is `self._...` in a subclass, or may be of an optimizer of ours, and is not rewritten."""
    if has_public_equivalent(self._source, node):
      return False
    class_def = self._source.enclosing(node, cst.ClassDef)
    is_self = isinstance(node.value, cst.Name) and node.value.value == "self"
    return bool(
      (self._source.origins(node.value) | self._source.origins_elsewhere(node.value)) & _OPTIMIZERS
      or class_def
      and is_self
      and any(self._source.replacements(base.value) & _WRAPPERS for base in class_def.bases)
    )

  # Calls.

  def visit_Call(self, node: cst.Call) -> None:
    full = self._source.full_names(node.func)
    looked_up = self._source.full_names(node)  # by getattr(module, name)
    new, kind = self._source.decide_name(node)
    if kind:
      self._add(self._found, node, kind)
    elif new and len(node.args) > 2:  # getattr(module, name, default)
      self._add(self._found, node, "guard")
    elif not self._source.replacements(node) and _LEAVES & {name.rpartition(".")[2] for name in looked_up}:
      self._add(self._found, node, "unresolved")
    self._note_optimizer(node)
    if self._scales_loss(node):
      self._check_wrapping(node)
    if self._source.replacements(node.func) & _OPTIMIZERS:
      self._check_loss_scale(node)
    elif full & _TYPE_TESTS | full & {"builtins.hasattr"} and len(node.args) == 2:
      self._check_test(node)
    else:
      self._check_step(node, full)

  def _check_step(self, node: cst.Call, full: Set[str]) -> None:
    if any(name.startswith("horovod.") and name.endswith(".DistributedOptimizer") for name in full):
      self._horovod.append(node)
    elif any(map(_CLIPS.fullmatch, full)) and self._is_near_gradients(node):
      self._add(self._about_gradients, node, "clipped-gradients")
    elif any(map(_RESTORES.fullmatch, full)):
      self._restoring.append(node.func)

  def _check_test(self, node: cst.Call) -> None:
    """Checks `hasattr(module, "name")` and `isinstance(value, classes)`."""
    first, second = (argument.value for argument in node.args)
    if self._source.full_names(node.func) & _TYPE_TESTS:
      if self._may_be_of_tensorflow(first, second):
        self._add(self._found, node, "isinstance")
      return
    members = ["{}.{}".format(full, values.literal(second)) for full in self._source.full_names(first)]
    if self._source.replacements(first) or any(replacement(member) or member in _MODULES for member in members):
      self._add(self._found, node, "guard")

  def _scales_loss(self, call: cst.Call) -> bool:
    return bool(self._source.replacements(call.func) & _WRAPPERS) or any(
      map(_is_keras, self._source.full_names(call.func))
    )

  def _check_wrapping(self, node: cst.Call) -> None:
    opt = _inner_optimizer(node)
    inner_calls = set() if opt is None else self._source.calls_nested_in(opt)
    self._inside |= inner_calls
    if any(map(self._scales_loss, inner_calls)):
      self._add(self._found, node.func, "wrapped-twice")

  def _check_loss_scale(self, node: cst.Call) -> None:
    scale = _arguments(node, "opt", "loss_scale").get("loss_scale")
    is_contrib = "mp_compat.contrib.mixed_precision.LossScaleOptimizer" in self._source.replacements(node.func)
    if scale is not None and not is_contrib:
      is_number = isinstance(scale, (cst.Integer, cst.Float))
      if is_number or "mp_compat.FixedLossScale" in self._source.origins(scale):
        self._add(self._found, node.func, "fixed-scale")

  def _may_be_of_tensorflow(self, value: cst.BaseExpression, classes: cst.BaseExpression) -> bool:
    """Returns whether a type test names classes of mp_compat, and the object may be TensorFlow's.

    Classes of contrib do not count: TensorFlow 2 has none.
    """
    elements = [element.value for element in classes.elements] if isinstance(classes, cst.Tuple) else [classes]
    tested = {new for element in elements for new in self._source.replacements(element)}
    return any(not new.startswith("mp_compat.contrib.") for new in tested) and not all(
      name.startswith("mp_compat.") for name in self._source.origins(value)
    )

  def _is_near_gradients(self, node: cst.CSTNode) -> bool:
    """Returns whether the enclosing function (or the module) computes or applies gradients."""
    scope = self._source.enclosing(node, cst.FunctionDef) or self._source.module
    return bool(re.search(r"\.(compute|apply)_gradients\(", self._source.text(scope)))

  def _may_have_powers(self, optimizer: cst.CSTNode) -> bool:
    """Returns whether TensorFlow's class may have renamed variables of the inner optimizer, as Adam's powers."""
    call = self._source.parents[optimizer]
    opt = _inner_optimizer(call) if isinstance(call, cst.Call) and call.func is optimizer else None
    return opt is None or not all(map(_WITHOUT_POWERS.fullmatch, self._source.origins(opt)))

  # Texts.

  def visit_Comment(self, node: cst.Comment) -> None:
    if node.value.startswith(MAGIC) and _TEXT.search(node.value):
      self._add(self._found, node, "text")

  def visit_SimpleString(self, node: cst.SimpleString) -> None:
    self._check_text(node, values.literal(node))

  def visit_FormattedStringText(self, node: cst.FormattedStringText) -> None:
    self._check_text(node, node.value)

  def visit_ConcatenatedString(self, node: cst.ConcatenatedString) -> bool:
    value = values.literal(node)
    self._check_text(node, value)
    return value is None  # It contains an f-string.

  def _check_text(self, node: cst.CSTNode, value: Optional[str]) -> None:
    parent = self._source.parents[node]  # Skips docstrings, and strings in calls that are rewritten.
    rewritten = isinstance(parent, cst.Arg) and self._source.replacements(self._source.parents[parent])
    if value and _TEXT.search(value) and not isinstance(parent, cst.Expr) and not rewritten:
      self._add(self._found, node, "text")


def _inner_optimizer(call: cst.Call) -> Optional[cst.BaseExpression]:
  arguments = _arguments(call, "opt")
  return arguments.get("opt", arguments.get("optimizer", arguments.get("inner_optimizer")))


def _arguments(call: cst.Call, *positional: str) -> Dict[str, cst.BaseExpression]:
  """Returns the arguments of a call by name."""
  arguments = dict(zip(positional, (argument.value for argument in call.args if not argument.keyword)))
  arguments.update((argument.keyword.value, argument.value) for argument in call.args if argument.keyword)
  return arguments


def _is_keras(name: str) -> bool:
  return bool(
    re.fullmatch(
      r"(.*\.)?(tf|tensorflow)\.(.*\.)?keras\.mixed_precision\.(loss_scale_optimizer\.)?"
      r"LossScaleOptimizer(V1)?",
      name,
    )
  )
