# SPDX-License-Identifier: Apache-2.0
"""Finds the places in a source that cannot be rewritten automatically and must be reviewed by hand."""

import re
from typing import Dict, List, NamedTuple, Optional, Set

import libcst as cst

from mp_compat.migration import old_names
from mp_compat.migration.source import parsed_source
from mp_compat.migration.source.parsed_source import Place
from mp_compat.migration.source.rewriting import OPTIMIZERS
from mp_compat.migration.source.rewriting import PUBLIC_EQUIVALENTS
from mp_compat.migration.source.rewriting import has_public_equivalent
from mp_compat.migration.source.rewriting import is_shadowed
from mp_compat.migration.source.rewriting import new_name
from mp_compat.migration.source.rewriting import top_level

# The remedies by kind of decision. Each kind is also a heading of docs/migration.md.
REMEDIES: Dict[str, str] = {
  "clipped-gradients": "the program changes gradients between compute_gradients and apply_gradients; mp_compat also "
  "detects an overflow that this hides, and skips the step; keep the code, unless it is a "
  "finite check of the program",
  "own-global-step": "the program increments this counter itself, also in skipped steps; to count applied steps "
  "only, pass it to apply_gradients(..., global_step)",
  "horovod": "put hvd.DistributedOptimizer inside: MixedPrecisionLossScaleOptimizer(hvd.DistributedOptimizer(opt), "
  "scale); outside only with backward_passes_per_step",
  "sync-replicas": "put SyncReplicasOptimizer outside; mp_compat raises an error for the other order",
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
  "shared-scale": "every apply_gradients updates a shared LossScale; mp_compat.apply_gradients_together updates it "
  "once",
  "fixed-scale": "mp_compat skips steps that overflow with a fixed scale, too; skip_nonfinite=False applies them, as "
  "TensorFlow's class does",
  "keras": "this name is TensorFlow's current Keras class and is not changed; mp_compat.keras.LossScaleOptimizer "
  "replaces it",
  "optional-import": "the rewritten source always imports mp_compat, and its code for a missing mp_compat never "
  "runs; import mp_compat outside of the try statement",
  "name-taken": "the name mp_compat may not be the module here (None after a failed import), so the old name is not "
  "changed; import mp_compat without an alternative and migrate again",
  "guard": "the program tests whether TensorFlow has a name; mp_compat always has it, so keep the branch that uses it",
  "unresolved": "this looks like an old name, but this file does not show where it comes from; rewrite it by hand",
  "text": "a string names an old module; if it is code, a configuration or a patch target, rewrite it by hand",
}
DOCS = "docs/migration.md#"

_PRIVATE = {"_current_loss_scale", "_num_good_steps", "_num_bad_steps", "_doing_dynamic_loss_scaling"}
_KERAS_OPTIMIZERS = {"mp_compat.keras.LossScaleOptimizer", "mp_compat.keras.experimental.LossScaleOptimizer"}
_WRAPPERS = OPTIMIZERS | _KERAS_OPTIMIZERS
_LOSS_SCALES = {"mp_compat.LossScale", "mp_compat.FixedLossScale", "mp_compat.DynamicLossScale"}
_LEAVES = {name.rpartition(".")[2] for name in old_names.OLD_NAMES} - {
  "LossScale",
  "LossScaleOptimizer",
  "get",
  "loss_scale",
  "loss_scale_optimizer",
  "loss_scale_manager",
  "mixed_precision",
}
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

  @property
  def remedy(self) -> str:
    return REMEDIES[self.kind]

  @property
  def docs(self) -> str:
    return DOCS + self.kind


class DecisionFinder(cst.CSTVisitor):
  """Finds the decisions of one source.

  Attributes:
    decisions: A list of `Decision`, in the order of the text. Rewriting the source does not change them.
  """

  def __init__(self, source: parsed_source.ParsedSource) -> None:
    super().__init__()
    self._source = source
    self._scaling = False  # whether this source wraps an optimizer; otherwise decisions about gradients do not apply
    self._inside: Set[cst.CSTNode] = set()  # calls that made the inner optimizer of a loss scaling optimizer
    self._scales: Dict[cst.CSTNode, int] = {}  # for each call that made a scale, the number of optimizers that use it
    self._found: List[Decision] = []
    self._about_gradients: List[Decision] = []
    self._horovod: List[cst.Call] = []
    self._optional: List[cst.Import] = []  # imports of mp_compat that may fail
    self._imports_ours = any(map(_imports_ours, top_level(source.module)))  # after rewriting
    source.module.visit(self)
    for call in self._horovod:
      if call not in self._inside:
        self._add(self._about_gradients, call.func, "horovod")
    for node in self._optional if self._imports_ours else ():
      self._add(self._found, node, "optional-import")
    self.decisions = sorted(set(self._found + (self._about_gradients if self._scaling else [])))

  def _add(self, decisions: List[Decision], node: cst.CSTNode, kind: str) -> None:
    text = " ".join(self._source.text(node).split())
    decisions.append(Decision(self._source.place(node), kind, text if len(text) <= 80 else text[:77] + "..."))

  def visit_Import(self, node: cst.Import) -> bool:
    statement = self._source.enclosing(node, cst.Try)
    if statement and statement.handlers and self._source.end(node) <= self._source.start(statement.handlers[0]):
      self._optional.extend([node] if "mp_compat" in parsed_source.imported(node) else [])
    return False

  def visit_ImportFrom(self, node: cst.ImportFrom) -> bool:
    module = parsed_source.dotted(node.module)
    for alias in parsed_source.aliases(node):
      full = "{}.{}".format(module, parsed_source.dotted(alias.name))
      if parsed_source.replacement(full):
        self._scaling |= parsed_source.replacement(full) in OPTIMIZERS
      elif parsed_source.replacement(module):
        self._add(self._found, alias, "private-state")
      elif _is_keras(full):
        self._add(self._found, alias, "keras")
    if isinstance(node.names, cst.ImportStar) and module in _MODULES and not parsed_source.replacement(module):
      self._add(self._found, node, "unresolved")
    return False

  def visit_ClassDef(self, node: cst.ClassDef) -> None:
    methods = {part.name.value for part in node.body.body if isinstance(part, cst.FunctionDef)}
    if any(self._source.replacements(base.value) & _LOSS_SCALES for base in node.bases) and any(
      name == "__call__" or not name.startswith("__") for name in methods - {"get_config", "from_config"}
    ):
      self._add(self._found, node.name, "subclass")

  def visit_Attribute(self, node: cst.Attribute) -> bool:
    full, leaf = self._source.full_names(node), node.attr.value
    self._check_old_name(node)
    if self._source.replacements(node):
      if leaf.startswith("_") and any(name.startswith("mp_compat.") for name in full):
        self._add(self._found, node, "private-state")  # of a rewritten module, which lacks it
      return False
    if any(_is_keras(name) for name in full):
      self._add(self._found, node, "keras")
    elif leaf in _LEAVES or leaf == "LossScaleOptimizer" and "mixed_precision" in self._source.text(node.value):
      self._add(self._found, node, "unresolved")
    elif leaf in _PRIVATE or leaf in PUBLIC_EQUIVALENTS and self._is_scaling_optimizer(node):
      self._add(self._found, node, "private-state")
    elif any(parsed_source.replacement(name.rpartition(".")[0]) for name in full):
      self._add(self._found, node, "private-state")  # a member that this package's module lacks
    node.value.visit(self)
    return False

  def _check_old_name(self, node: cst.BaseExpression) -> None:
    if new_name(self._source, node) is not None:
      if is_shadowed(self._source, node):
        self._add(self._found, node, "name-taken")
      else:
        self._imports_ours = True

  def _is_scaling_optimizer(self, node: cst.Attribute) -> bool:
    """Returns whether `node` is `self._...` in a subclass, or `opt._... = value`, which is not rewritten."""
    if has_public_equivalent(self._source, node):
      return False
    class_def = self._source.enclosing(node, cst.ClassDef)
    is_self = isinstance(node.value, cst.Name) and node.value.value == "self"
    return bool(
      self._source.callables_producing(node.value) & OPTIMIZERS
      or class_def
      and is_self
      and any(self._source.replacements(base.value) & _WRAPPERS for base in class_def.bases)
    )

  def visit_Call(self, node: cst.Call) -> None:
    full = self._source.full_names(node.func)
    replacements = self._source.replacements(node.func)
    self._check_old_name(node)
    if self._scales_loss(node):
      self._check_wrapping(node)
    if replacements & OPTIMIZERS:
      self._scaling = True
      self._check_loss_scale(node, replacements)
    elif any(name.startswith("horovod.") and name.endswith(".DistributedOptimizer") for name in full):
      self._horovod.append(node)
    elif isinstance(node.func, cst.Name) and node.func.value == "hasattr" and len(node.args) == 2:
      if self._source.replacements(node.args[0].value) or _tests_for_old_name(self._source, node):
        self._add(self._found, node, "guard")
    elif isinstance(node.func, cst.Name) and node.func.value in ("isinstance", "issubclass") and len(node.args) == 2:
      if self._may_be_of_tensorflow(*(argument.value for argument in node.args)):
        self._add(self._found, node, "isinstance")
    elif any(_CLIPS.fullmatch(name) for name in full) and self._is_near_gradients(node):
      self._add(self._about_gradients, node, "clipped-gradients")
    elif self._increments_global_step(node):
      self._add(self._about_gradients, node, "own-global-step")

  def _scales_loss(self, call: cst.Call) -> bool:
    return bool(self._source.replacements(call.func) & _WRAPPERS) or any(
      map(_is_keras, self._source.full_names(call.func))
    )

  def _check_wrapping(self, node: cst.Call) -> None:
    arguments = _arguments(node, "opt")
    opt = arguments.get("opt", arguments.get("optimizer", arguments.get("inner_optimizer")))
    inner_calls = set() if opt is None else self._source.calls_nested_in(opt)
    self._inside |= inner_calls
    if any(map(self._scales_loss, inner_calls)):
      self._add(self._found, node.func, "wrapped-twice")
    if self._source.replacements(node.func) & OPTIMIZERS and any(
      name.endswith(".SyncReplicasOptimizer") for call in inner_calls for name in self._source.full_names(call.func)
    ):
      self._add(self._found, node.func, "sync-replicas")

  def _check_loss_scale(self, node: cst.Call, replacements: Set[str]) -> None:
    scale = _arguments(node, "opt", "loss_scale").get("loss_scale")
    if scale is not None and "mp_compat.contrib.mixed_precision.LossScaleOptimizer" not in replacements:
      is_number = isinstance(scale, (cst.Integer, cst.Float))
      if is_number or "mp_compat.FixedLossScale" in self._source.callables_producing(scale):
        self._add(self._found, node.func, "fixed-scale")
    for call in self._source.calls_producing(scale) if scale is not None else ():
      self._scales[call] = self._scales.get(call, 0) + 1
      if self._scales[call] > 1:
        self._add(self._found, node.func, "shared-scale")

  def _may_be_of_tensorflow(self, value: cst.BaseExpression, classes: cst.BaseExpression) -> bool:
    """Returns whether a type test names classes of mp_compat, and the object may be TensorFlow's.

    Classes of contrib do not count: TensorFlow 2 has none.
    """
    elements = [element.value for element in classes.elements] if isinstance(classes, cst.Tuple) else [classes]
    tested = {new for element in elements for new in self._source.replacements(element)}
    callables = self._source.callables_producing(value)
    return any(not new.startswith("mp_compat.contrib.") for new in tested) and not (
      callables and all(name.startswith("mp_compat.") for name in callables)
    )

  def _is_near_gradients(self, node: cst.CSTNode) -> bool:
    """Returns whether the enclosing function (or the module) computes or applies gradients."""
    scope = self._source.enclosing(node, cst.FunctionDef) or self._source.module
    return bool(re.search(r"\.(compute|apply)_gradients\(", self._source.text(scope)))

  def _increments_global_step(self, node: cst.Call) -> bool:
    """Returns whether `node` assigns a value other than 0 (a reset) to a global step.

    Covers `tf.assign(global_step, value)`, `global_step.assign_add(value)` and the like.
    """
    if not isinstance(node.func, cst.Attribute) or node.func.attr.value not in ("assign", "assign_add"):
      return False
    values = [self._source.text(argument.value) for argument in node.args]
    if len(values) == 1:
      values.insert(0, self._source.text(node.func.value))
    return len(values) > 1 and "global_step" in values[0] and values[1] != "0"

  def visit_SimpleString(self, node: cst.SimpleString) -> None:
    self._check_text(node, parsed_source.literal(node))

  def visit_FormattedStringText(self, node: cst.FormattedStringText) -> None:
    self._check_text(node, node.value)

  def visit_ConcatenatedString(self, node: cst.ConcatenatedString) -> bool:
    value = parsed_source.literal(node)
    self._check_text(node, value)
    return value is None  # It contains an f-string.

  def _check_text(self, node: cst.CSTNode, value: Optional[str]) -> None:
    parent = self._source.parents[node]  # Skips docstrings, and strings in calls that are rewritten.
    rewritten = isinstance(parent, cst.Arg) and self._source.replacements(self._source.parents[parent])
    if value and _TEXT.search(value) and not isinstance(parent, cst.Expr) and not rewritten:
      self._add(self._found, node, "text")


def _arguments(call: cst.Call, *positional: str) -> Dict[str, cst.BaseExpression]:
  """Returns the arguments of a call by name."""
  arguments = dict(zip(positional, (argument.value for argument in call.args if not argument.keyword)))
  arguments.update((argument.keyword.value, argument.value) for argument in call.args if argument.keyword)
  return arguments


def _imports_ours(statement: cst.BaseSmallStatement) -> bool:
  """Returns whether a statement imports this package, now or after rewriting."""
  return isinstance(statement, (cst.Import, cst.ImportFrom)) and any(
    name == "mp_compat" or parsed_source.replacement(name)
    for names in parsed_source.imported(statement).values()
    for name in names
  )


def _is_keras(name: str) -> bool:
  return bool(
    re.fullmatch(
      r"(.*\.)?(tf|tensorflow)\.(.*\.)?keras\.mixed_precision\.(loss_scale_optimizer\.)?"
      r"LossScaleOptimizer(V1)?",
      name,
    )
  )


def _tests_for_old_name(source: parsed_source.ParsedSource, call: cst.Call) -> bool:
  """Returns whether `hasattr(module, "name")` asks for an old name."""
  leaf = parsed_source.literal(call.args[1].value)
  return any(parsed_source.replacement("{}.{}".format(name, leaf)) for name in source.full_names(call.args[0].value))
