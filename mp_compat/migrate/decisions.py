"""What no rewriting can decide: places in a source at which somebody has to look."""

import re
from typing import Dict, List, NamedTuple, Set

import libcst as cst

from mp_compat import old_names
from mp_compat.migrate import names as names_module
from mp_compat.migrate.names import Place
from mp_compat.migrate.rewrite import OPTIMIZERS
from mp_compat.migrate.rewrite import PUBLIC_TWINS
from mp_compat.migrate.rewrite import is_made_public

# Kind: the remedy, in a line. Each is a heading of docs/migration.md, too.
REMEDIES: Dict[str, str] = {
    "clipped-gradients": "gradients change between compute_gradients and apply_gradients: an overflow that this hid is "
                         "seen now, and skips the step; nothing to do, unless the program had its own check",
    "own-global-step": "a counter that the program moves itself goes on in skipped steps; hand it to "
                       "apply_gradients(..., global_step) if it is to count applied steps",
    "horovod": "put hvd.DistributedOptimizer inside: MixedPrecisionLossScaleOptimizer(hvd.DistributedOptimizer(opt), "
               "scale); outside only with backward_passes_per_step",
    "sync-replicas": "put SyncReplicasOptimizer outside: the other order is refused",
    "private-state": "private attributes that TensorFlow's classes share with these are readable, others are missing; "
                     "use inner_optimizer, loss_scale, variables(), or call the scale",
    "shared-scale": "one LossScale moves with every apply_gradients; mp_compat.apply_gradients_together moves it once",
    "fixed-scale": "steps that overflow are skipped with a fixed scale, too; skip_nonfinite=False applies them, as "
                   "TensorFlow's class does",
    "keras": "this is TensorFlow's Keras class of today, and stays; mp_compat.keras.LossScaleOptimizer takes its place "
             "where its behaviour is wanted",
    "guard": "this asks whether TensorFlow has a name, and mp_compat always has it; keep the branch that uses it",
    "unresolved": "this looks like an old name, but where it comes from is not in this file; rewrite it by hand",
    "text": "a text names an old module; if it is code, a configuration or a patch target, rewrite it by hand",
}
DOCS = "docs/migration.md#"

_PRIVATE = {"_current_loss_scale", "_num_good_steps", "_num_bad_steps", "_doing_dynamic_loss_scaling"}
_BASES = OPTIMIZERS | {"mp_compat.keras.experimental.LossScaleOptimizer"}
_LEAVES = {name.rpartition(".")[2] for name in old_names.OLD_NAMES} - {
    "LossScale", "LossScaleOptimizer", "get", "loss_scale", "loss_scale_optimizer", "loss_scale_manager",
    "mixed_precision"}
_CLIPS = re.compile(r".*\.(clip_by_(value|norm|global_norm|average_norm)|is_finite|is_nan|is_inf)")
_MODULES = sorted({name.rpartition(".")[0] for name in old_names.OLD_NAMES} - {"tensorflow.contrib"}, key=len)
_TEXT = re.compile("|".join(re.escape(module) for module in _MODULES) + r"|\btf\.(contrib\.mixed_precision|"
                   r"train\.experimental\.(?!PythonState)\w+|keras\.mixed_precision\.experimental\.LossScaleOptimizer)")


class Decision(NamedTuple):
  """A place to look at: `text` of the source, `kind` of REMEDIES."""

  place: Place
  kind: str
  text: str

  @property
  def remedy(self) -> str:
    return REMEDIES[self.kind]

  @property
  def docs(self) -> str:
    return DOCS + self.kind


class Deciding(cst.CSTVisitor):
  """The decisions of one source.

  Attributes:
    decisions: in the order of the text. Before and after rewriting they are the same.
  """

  def __init__(self, names: names_module.Names) -> None:
    super().__init__()
    self._names = names
    self._scaling = False  # whether this source wraps an optimizer; the kinds that are about gradients need it
    self._inside: Set[cst.CSTNode] = set()  # calls of hvd.DistributedOptimizer whose results are wrapped
    self._scales: Dict[cst.CSTNode, int] = {}  # calls that made a scale: how often it was given to an optimizer
    self._found: List[Decision] = []
    self._about_gradients: List[Decision] = []
    self._horovod: List[cst.Call] = []
    names.module.visit(self)
    for call in self._horovod:
      if call not in self._inside:
        self._note(self._about_gradients, call.func, "horovod")
    self.decisions = sorted(set(self._found + (self._about_gradients if self._scaling else [])))

  def _note(self, found: List[Decision], node: cst.CSTNode, kind: str) -> None:
    text = " ".join(self._names.text(node).split())
    found.append(Decision(self._names.place(node), kind, text if len(text) <= 80 else text[:77] + "..."))

  def visit_Import(self, node: cst.Import) -> bool:
    return False

  def visit_ImportFrom(self, node: cst.ImportFrom) -> bool:
    module = names_module.dotted(node.module)
    for alias in names_module.aliases(node):
      full = "{}.{}".format(module, names_module.dotted(alias.name))
      if names_module.meaning(full):
        self._scaling |= names_module.meaning(full) in OPTIMIZERS
      elif names_module.meaning(module):
        self._note(self._found, alias, "private-state")
      elif _is_keras(full):
        self._note(self._found, alias, "keras")
    if isinstance(node.names, cst.ImportStar) and module in _MODULES and not names_module.meaning(module):
      self._note(self._found, node, "unresolved")
    return False

  def visit_Attribute(self, node: cst.Attribute) -> bool:
    full, leaf = self._names.full(node), node.attr.value
    if self._names.meanings(node):
      if leaf.startswith("_") and any(name.startswith("mp_compat.") for name in full):
        self._note(self._found, node, "private-state")  # of a module that was rewritten, and has it no more
      return False
    if any(_is_keras(name) for name in full):
      self._note(self._found, node, "keras")
    elif leaf in _LEAVES or leaf == "LossScaleOptimizer" and "mixed_precision" in self._names.text(node.value):
      self._note(self._found, node, "unresolved")
    elif leaf in _PRIVATE or leaf in PUBLIC_TWINS and self._is_scaling_optimizer(node):
      self._note(self._found, node, "private-state")
    elif any(names_module.meaning(name.rpartition(".")[0]) for name in full):
      self._note(self._found, node, "private-state")  # something of a module of ours that ours has not
    node.value.visit(self)
    return False

  def _is_scaling_optimizer(self, node: cst.Attribute) -> bool:
    """Whether it is `self._...` of a subclass, or `opt._... = value`, which is not rewritten."""
    if is_made_public(self._names, node):
      return False
    around = self._names.enclosing(node, cst.ClassDef)
    is_self = isinstance(node.value, cst.Name) and node.value.value == "self"
    return bool(self._names.made_by(node.value) & OPTIMIZERS or around and is_self and any(
        self._names.meanings(base.value) & _BASES for base in around.bases))

  def visit_Call(self, node: cst.Call) -> None:
    full = self._names.full(node.func)
    meanings = self._names.meanings(node.func)
    if meanings & OPTIMIZERS:
      self._scaling = True
      self._wrapping(node, meanings)
    elif any(name.startswith("horovod.") and name.endswith(".DistributedOptimizer") for name in full):
      self._horovod.append(node)
    elif isinstance(node.func, cst.Name) and node.func.value == "hasattr" and len(node.args) == 2:
      if self._names.meanings(node.args[0].value) or _names_old(self._names, node):
        self._note(self._found, node, "guard")
    elif any(_CLIPS.fullmatch(name) for name in full) and self._is_between(node):
      self._note(self._about_gradients, node, "clipped-gradients")
    elif self._moves_global_step(node):
      self._note(self._about_gradients, node, "own-global-step")

  def _wrapping(self, node: cst.Call, meanings: Set[str]) -> None:
    arguments = dict(zip(("opt", "loss_scale"), (argument.value for argument in node.args if not argument.keyword)))
    arguments.update((argument.keyword.value, argument.value) for argument in node.args if argument.keyword)
    opt = arguments.get("opt", arguments.get("optimizer"))
    if opt is not None:
      self._inside.add(self._names.producer(opt))
      if any(name.endswith(".SyncReplicasOptimizer") for name in self._names.made_by(opt)):
        self._note(self._found, node.func, "sync-replicas")
    scale = arguments.get("loss_scale")
    if scale is not None and "mp_compat.contrib.mixed_precision.LossScaleOptimizer" not in meanings:
      if isinstance(scale, (cst.Integer, cst.Float)) or "mp_compat.FixedLossScale" in self._names.made_by(scale):
        self._note(self._found, node.func, "fixed-scale")
    maker = scale is not None and self._names.producer(scale)
    if maker:
      self._scales[maker] = self._scales.get(maker, 0) + 1
      if self._scales[maker] > 1:
        self._note(self._found, node.func, "shared-scale")

  def _is_between(self, node: cst.CSTNode) -> bool:
    """Whether the function around (or the module) computes or applies gradients."""
    around = self._names.enclosing(node, cst.FunctionDef, cst.Module)
    return bool(re.search(r"\.(compute|apply)_gradients\(", self._names.text(around)))

  def _moves_global_step(self, node: cst.Call) -> bool:
    """Whether it is `tf.assign(global_step, value)`, `global_step.assign_add(value)` or like these; 0 begins anew."""
    if not isinstance(node.func, cst.Attribute) or node.func.attr.value not in ("assign", "assign_add"):
      return False
    values = [self._names.text(argument.value) for argument in node.args]
    if len(values) == 1:
      values.insert(0, self._names.text(node.func.value))
    return len(values) > 1 and "global_step" in values[0] and values[1] != "0"

  def visit_SimpleString(self, node: cst.SimpleString) -> None:
    value = names_module.literal(node) or ""
    if _TEXT.search(value) and not isinstance(self._names.parents[node], cst.Expr):  # docstrings may say what they like
      self._note(self._found, node, "text")


def _is_keras(name: str) -> bool:
  return bool(re.fullmatch(r"(.*\.)?(tf|tensorflow)\.(.*\.)?keras\.mixed_precision\.(loss_scale_optimizer\.)?"
                           r"LossScaleOptimizer(V1)?", name))


def _names_old(names: names_module.Names, call: cst.Call) -> bool:
  """Whether `hasattr(module, "name")` asks for an old name."""
  leaf = names_module.literal(call.args[1].value)
  return any(names_module.meaning("{}.{}".format(name, leaf)) for name in names.full(call.args[0].value))
