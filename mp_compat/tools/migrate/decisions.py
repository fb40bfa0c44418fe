# SPDX-License-Identifier: Apache-2.0
"""Finds the places in a source that must be reviewed by hand."""

import collections
import itertools
import re
from typing import Dict, Iterator, List, NamedTuple, Sequence, Tuple, Union

import libcst as cst
from libcst import matchers as m

from mp_compat.tools.migrate import names
from mp_compat.tools.migrate import rewriting
from mp_compat.tools.migrate.names import ParsedSource
from mp_compat.tools.migrate.names import Place

# The remedies by kind of decision. docs/migration.md has what a kind needs besides,
# under its name.
REMEDIES: Dict[str, str] = {
  "checkpoints": "TensorFlow's classes stored Adam's powers under names (cond_1/beta1_power) that the new program does "
  "not look for; convert old checkpoints of Adam once: python -m mp_compat checkpoint convert IN OUT --to mp_compat "
  "(--to contrib for the optimizer of mp_compat.contrib); or restore with mp_compat.checkpoints.Saver",
  "clipped-gradients": "mp_compat also skips a step whose overflow this hides; keep it, unless it is a finite check",
  "horovod": "hvd.DistributedOptimizer belongs inside, MixedPrecisionLossScaleOptimizer(hvd.DistributedOptimizer(opt), "
  "scale); outside only with backward_passes_per_step",
  "wrapped-twice": "enable_mixed_precision_graph_rewrite(opt) also adds loss scaling, and this file uses a wrapper; an "
  "optimizer needs one of the two",
  "subclass": "mp_compat calls update() of every LossScale subclass, obeys its should_apply, and also skips every step "
  "with non-finite gradients; pass skip_nonfinite=False if update() alone should decide",
  "isinstance": "objects of TensorFlow's own class are not instances of this class of mp_compat; if TensorFlow can "
  "make the object, test for TensorFlow's class, of which mp_compat's objects are instances, too",
  "private-state": "mp_compat has the private attributes that its classes share with TensorFlow's, and no others; use "
  "inner_optimizer, loss_scale, variables(), or call the loss scale",
  "fixed-scale": "mp_compat skips steps that overflow with a fixed scale, too; skip_nonfinite=False applies them",
  "keras": "TensorFlow's current Keras class is not changed; mp_compat.keras.LossScaleOptimizer replaces it",
  "name-taken": "the name mp_compat may be something else here; import it without an alternative and migrate again",
  "guard": "the program handles the absence of a name that mp_compat always has; keep the branch that uses it",
  "unresolved": "this may be an old name, but this file does not show that it is one on every path; rewrite it by hand",
  "text": "a string has an old name; if it is code, a configuration or a patch target, rewrite it by hand",
}

_ABSENCE = re.compile(
  r"\b(ImportError|ModuleNotFoundError|AttributeError|NameError|Exception)\b"
)
_TEXT = re.compile(
  r"\b(tf|tensorflow)\.(compat\.v[12]\.)?({})\b".format(
    "|".join(map(re.escape, names.MODULES))
  )
)
_PUBLIC_EQUIVALENTS = {
  "_optimizer": "inner_optimizer",
  "_opt": "inner_optimizer",
  "_loss_scale": "loss_scale",
  "_loss_scale_manager": "loss_scale",
}
_PRIVATE = {
  "_current_loss_scale",
  "_num_good_steps",
  "_num_bad_steps",
  "_doing_dynamic_loss_scaling",
}
_LOSS_SCALES = {
  "mp_compat.LossScale",
  "mp_compat.FixedLossScale",
  "mp_compat.DynamicLossScale",
}
_REWRITE = "mp_compat.enable_mixed_precision_graph_rewrite"
_OPTIMIZER = "mp_compat.MixedPrecisionLossScaleOptimizer"
_OPTIMIZERS = {
  _OPTIMIZER,
  _REWRITE,
  "mp_compat.contrib.mixed_precision.LossScaleOptimizer",
}
_CLASSES = _LOSS_SCALES | {
  _OPTIMIZER,
  names.KERAS,
  "mp_compat.keras.experimental.LossScaleOptimizer",
}
# Calls that need a decision, by its kind: patterns for the full name, or this package's
# name, of what is called.
_CALLS = {
  "wrapper": re.compile(r"mp_compat\.(.*\.)?\w*LossScaleOptimizer"),
  "wrapped-twice": re.compile(re.escape(_REWRITE)),
  "fixed-scale": re.compile(r"mp_compat\.FixedLossScale"),
  "horovod": re.compile(r"horovod\..*\.DistributedOptimizer"),
  "clipped-gradients": re.compile(
    r".*\.(clip_by_(value|norm|global_norm|average_norm)|is_finite|is_nan|is_inf)"
  ),
  "checkpoints": re.compile(
    r"(.*\.)?(restore|load_checkpoint|NewCheckpointReader|init_from_checkpoint|assign_from_checkpoint(_fn)?"
    r"|(Singular)?Monitored(Training)?Session|Supervisor|(TPU)?Estimator)"
  ),
}


class Decision(NamedTuple):
  """A place to review: `text` is from the source, `new` is what to write instead or "",
  `kind` is in REMEDIES.
  """

  place: Place
  kind: str
  text: str
  new: str


# a place, the kind of its decision, and what to write instead
_Found = Iterator[Tuple[cst.CSTNode, str, str]]


def find(source: ParsedSource, texts: Dict[cst.CSTNode, str]) -> List[Decision]:
  """Returns the decisions of a source, in the order of the text; `texts` are the new
  texts of what is rewritten.
  """
  decisions = set()
  in_names = itertools.chain(
    _in_names(source, texts), _in_imports(source, texts), _in_guards(source, texts)
  )
  others = (
    search(source)
    for search in (_in_strings, _in_classes, _in_calls, _in_private_names)
  )
  for node, kind, new in itertools.chain(in_names, *others):
    text = " ".join(source.text(node).split())
    decisions.add(
      Decision(
        source.place(node), kind, text if len(text) <= 80 else text[:77] + "...", new
      )
    )
  return sorted(decisions)


def _in_names(source: ParsedSource, texts: Dict[cst.CSTNode, str]) -> _Found:
  """Finds what may be an old name, and modules with old names that are used otherwise
  than for a member.
  """
  for node in source.expressions:
    full_names, meanings = source.full_names(node), source.meanings(node)
    modules = {names.module_replacement(name) for name in full_names} - {""}
    is_member = isinstance(source.parents[node], cst.Attribute) or not source.is_read(
      node
    )
    if node in texts or any(name.startswith("mp_compat.") for name in full_names):
      continue
    if source.new_name(node):
      yield node, "name-taken", source.new_name(node)
    elif isinstance(node, cst.Attribute) and meanings:
      yield (
        node,
        "keras" if names.KERAS in meanings else "unresolved",
        " or ".join(sorted(meanings)),
      )
    elif modules and not is_member:
      yield node, "unresolved", " or ".join(sorted(modules))


def _in_imports(source: ParsedSource, texts: Dict[cst.CSTNode, str]) -> _Found:
  """Finds imports of old names that stay because of a comment, of whole modules, and of
  Keras's class.
  """
  imports: List[Union[cst.Import, cst.ImportFrom]] = [
    *source.find(cst.Import),
    *source.find(cst.ImportFrom),
  ]
  for node in imports:
    module = names.module_of(node)
    if node not in texts and rewriting.new_import(source, node):
      yield node, "unresolved", rewriting.new_import(source, node)
    for name, _ in names.imported(node):
      full_name = "{}.{}".format(module, name) if module else name
      # TensorFlow 2 lacks the module.
      if ".contrib." in full_name and names.module_replacement(full_name):
        yield node, "unresolved", names.module_replacement(full_name)
      elif full_name == "tensorflow.keras.mixed_precision.LossScaleOptimizer":
        yield node, "keras", names.KERAS
    if isinstance(node.names, cst.ImportStar) and names.contains_old_names(module):
      yield node, "unresolved", ""


def _in_guards(source: ParsedSource, texts: Dict[cst.CSTNode, str]) -> _Found:
  """Finds names that are rewritten, in a `try` that handles their absence."""
  for node in texts:
    block = source.enclosing(node, cst.Try)
    for handler in block.handlers if block else ():
      if not handler.type or _ABSENCE.search(source.text(handler.type)):
        yield node, "guard", ""


def _in_strings(source: ParsedSource) -> _Found:
  strings: List[Union[cst.SimpleString, cst.FormattedStringText]] = [
    *source.find(cst.SimpleString)
  ]
  for node in strings + source.find(cst.FormattedStringText):
    value = node.raw_value if isinstance(node, cst.SimpleString) else node.value
    is_docstring = isinstance(source.parents[node], cst.Expr)
    if not is_docstring and (
      _TEXT.search(value) or value.rpartition(".")[2] in names.DISTINCTIVE
    ):
      yield node, "text", ""


def _in_classes(source: ParsedSource) -> _Found:
  """Finds subclasses of LossScale, and type tests."""
  for node in source.find(cst.ClassDef):
    if any(source.meanings(base.value) & _LOSS_SCALES for base in node.bases):
      yield node.name, "subclass", ""
  for call in source.find(cst.Call):
    if any(source.meanings(part) & _CLASSES for part in _tested(call)):
      yield call, "isinstance", ""


def _tested(call: cst.Call) -> Sequence[cst.CSTNode]:
  """Returns the names in a type test; none for another call."""
  is_test = names.dotted(call.func) in ("isinstance", "issubclass")
  return m.findall(call, m.Name() | m.Attribute()) if is_test else ()


def _optimizers(source: ParsedSource) -> List[cst.CSTNode]:
  """Returns the names of wrappers, without those in type tests."""
  tested = {part for call in source.find(cst.Call) for part in _tested(call)}
  return [
    node
    for node in source.expressions
    if source.meanings(node) & _OPTIMIZERS and node not in tested
  ]


def _kinds_of(source: ParsedSource, call: cst.Call) -> Iterator[str]:
  called = source.full_names(call.func) | source.meanings(call.func)
  for kind, pattern in _CALLS.items():
    if any(map(pattern.fullmatch, called)):
      yield kind
  if _OPTIMIZER in called and any(
    isinstance(arg.value, (cst.Integer, cst.Float)) for arg in call.args[:2]
  ):
    yield "fixed-scale"


def _in_calls(source: ParsedSource) -> _Found:
  """Finds calls that behave otherwise with this package."""
  calls: Dict[str, List[cst.CSTNode]] = collections.defaultdict(list)
  for call in source.find(cst.Call):
    for kind in _kinds_of(source, call):
      calls[kind].append(call.func)
  optimizers = _optimizers(source)
  if not calls.pop("wrapper", None):
    calls.pop("wrapped-twice", None)
  if not re.search(rb"\.(compute|apply)_gradients\(", source.code):
    calls.pop("clipped-gradients", None)
  for kind, nodes in calls.items():
    yield from (
      (node, kind, "") for node in nodes if optimizers or kind == "fixed-scale"
    )
  if optimizers and not calls["checkpoints"]:
    yield min(optimizers, key=source.start), "checkpoints", ""


def _in_private_names(source: ParsedSource) -> _Found:
  has_optimizers = any(
    source.meanings(node) & _OPTIMIZERS for node in source.expressions
  )
  for node in source.find(cst.Attribute):
    name = node.attr.value
    if (
      name in _PRIVATE
      or has_optimizers
      and name in _PUBLIC_EQUIVALENTS
      and names.dotted(node.value) != "self"
    ):
      yield node, "private-state", _PUBLIC_EQUIVALENTS.get(name, "")
