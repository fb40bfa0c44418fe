# SPDX-License-Identifier: Apache-2.0
"""Finds the places in a source that must be reviewed by hand.

Each has a kind, such as these; `REMEDIES` has what to do about all kinds:

    checkpoints         saver.restore(sess, path); or the first wrapper, if nothing in
                        the source restores
    clipped-gradients   tf.clip_by_global_norm(grads, 1.), tf.is_finite(grad)
    horovod             hvd.DistributedOptimizer(opt)
    wrapped-twice       enable_mixed_precision_graph_rewrite(opt), beside a wrapper
    subclass            class Mine(tf.train.experimental.LossScale): ...
    isinstance          isinstance(scale, tf.train.experimental.LossScale)
    private-state       opt._loss_scale, scale._num_good_steps
    fixed-scale         tf.train.experimental.FixedLossScale(128)
    sparse-gradients    tf.contrib.mixed_precision.LossScaleOptimizer(opt, manager)
    automatic-casts     os.environ["TF_ENABLE_AUTO_MIXED_PRECISION"] = "1"
    name-taken          mp_compat = None
    guard               try: tf.train.experimental.LossScale; except AttributeError: ...
    unresolved          import tensorflow.contrib.mixed_precision as mp
    text                mock.patch("tensorflow.train.experimental.LossScale")
"""

import collections
import itertools
import re
from typing import Dict, Iterator, List, NamedTuple, Optional, Sequence, Set, Union

import libcst as cst
from libcst import matchers as m

from mp_compat.tools.migrate import names
from mp_compat.tools.migrate import rewriting
from mp_compat.tools.migrate.names import ParsedSource
from mp_compat.tools.migrate.names import Place

# The remedies by kind of decision. docs/migration.md has what a kind needs besides,
# under its name.
REMEDIES: Dict[str, str] = {
  "checkpoints": (
    "TensorFlow's classes stored Adam's powers under names (cond_1/beta1_power) that "
    "the new program does not look for; convert old checkpoints of Adam once: python "
    "-m mp_compat checkpoint convert IN OUT --to mp_compat (--to contrib for the "
    "optimizer of mp_compat.contrib); or restore with mp_compat.checkpoints.Saver"
  ),
  "clipped-gradients": (
    "mp_compat also skips a step whose overflow this hides; keep it, unless it is a "
    "finite check"
  ),
  "horovod": (
    "hvd.DistributedOptimizer belongs inside, "
    "MixedPrecisionLossScaleOptimizer(hvd.DistributedOptimizer(opt), scale); outside "
    "only with backward_passes_per_step"
  ),
  "wrapped-twice": (
    "enable_mixed_precision_graph_rewrite(opt) also adds loss scaling, and this file "
    "uses a wrapper; an optimizer needs one of the two"
  ),
  "subclass": (
    "mp_compat calls update() of every LossScale subclass, obeys its should_apply, "
    "and also skips every step with non-finite gradients; pass skip_nonfinite=False "
    "if update() alone should decide"
  ),
  "isinstance": (
    "objects of TensorFlow's own class are not instances of this class of mp_compat; "
    "if TensorFlow can make the object, test for TensorFlow's class, of which "
    "mp_compat's objects are instances, too"
  ),
  "private-state": (
    "mp_compat has the private attributes that its classes share with TensorFlow's, "
    "and no others; use inner_optimizer, loss_scale, variables(), or call the loss "
    "scale"
  ),
  "fixed-scale": (
    "mp_compat skips steps that overflow with a fixed scale, too; "
    "skip_nonfinite=False applies them"
  ),
  "sparse-gradients": (
    "this class makes sparse gradients dense, as contrib's does, so that the numbers "
    "stay; mp_compat.MixedPrecisionLossScaleOptimizer keeps them sparse, which takes "
    "less memory, but optimizers such as Momentum and RMSProp then update only the "
    "rows that have gradients"
  ),
  "keras": (
    "TensorFlow's current Keras class is not changed; "
    "mp_compat.keras.LossScaleOptimizer replaces it"
  ),
  "automatic-casts": (
    "this lets TensorFlow cast the graph to float16, and only NVIDIA's "
    "TF_ENABLE_AUTO_MIXED_PRECISION scales the loss, too; remove it and call "
    "mp_compat.enable_mixed_precision_graph_rewrite(opt), which does both"
  ),
  "name-taken": (
    "the name mp_compat may be something else here; import it without an alternative "
    "and migrate again"
  ),
  "guard": (
    "the program handles the absence of a name that mp_compat always has; keep the "
    "branch that uses it"
  ),
  "unresolved": (
    "this may be an old name, but this file does not show that it is one on every "
    "path; rewrite it by hand"
  ),
  "text": (
    "a string has an old name; if it is code, a configuration or a patch target, "
    "rewrite it by hand"
  ),
}

_ABSENCE = re.compile(
  r"\b(ImportError|ModuleNotFoundError|AttributeError|NameError|Exception)\b"
)
_TEXT = re.compile(
  r"\b(tf|tensorflow)\.(compat\.v[12]\.)?({})\b".format(
    "|".join(map(re.escape, names.MODULES))
  )
)
# Settings that let TensorFlow cast the graph: in the environment or a RewriterConfig.
_AUTOMATIC_CASTS = re.compile(r"TF_ENABLE_AUTO_MIXED_PRECISION\w*|auto_mixed_precision")
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
_CONTRIB = "mp_compat.contrib.mixed_precision.LossScaleOptimizer"
_OPTIMIZERS = {_OPTIMIZER, _REWRITE, _CONTRIB}
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
    r"(.*\.)?(restore|load_checkpoint|NewCheckpointReader|init_from_checkpoint"
    r"|assign_from_checkpoint(_fn)?"
    r"|(Singular)?Monitored(Training)?Session|Supervisor|(TPU)?Estimator)"
  ),
}


class Decision(NamedTuple):
  """A place to review by hand.

  Attributes:
    place: Where it is.
    kind: A key of `REMEDIES`.
    text: The text of the source, in one line of at most 80 characters.
    new: What to write instead; "" if that is not known.
  """

  place: Place
  kind: str
  text: str
  new: str


class _Found(NamedTuple):
  """A node that needs a decision; its kind and `new` are those of `Decision`."""

  node: cst.CSTNode
  kind: str
  new: str = ""


def find(source: ParsedSource, texts: Dict[cst.CSTNode, str]) -> List[Decision]:
  """Returns the decisions of a source, in the order of the text.

  Several nodes may give the same decision, which is returned once.

  Args:
    source: the source before it is rewritten.
    texts: the new texts of what is rewritten, by node, as `rewriting.new_texts` returns
      them.
  """
  searches = (
    _in_names(source, texts),
    _in_imports(source, texts),
    _in_guards(source, texts),
    _in_strings(source),
    _in_classes(source),
    _in_type_tests(source),
    _in_calls(source),
    _in_private_names(source),
    _in_contrib(source),
    _in_settings(source),
  )
  decisions = set()
  for found in itertools.chain(*searches):
    text = " ".join(source.text(found.node).split())
    if len(text) > 80:
      text = text[:77] + "..."
    place = source.place(found.node)
    decisions.add(Decision(place, found.kind, text, found.new))
  return sorted(decisions)


def _in_names(source: ParsedSource, texts: Dict[cst.CSTNode, str]) -> Iterator[_Found]:
  """Finds what may be an old name, and modules with old names that are used otherwise
  than for a member.
  """
  for node in source.expressions:
    if node not in texts:
      found = _in_name(source, node)
      if found is not None:
        yield found


def _in_name(source: ParsedSource, node: names.Expression) -> Optional[_Found]:
  """Returns the decision that a name needs which is not rewritten; None for none.

      a name of this package            None
      certainly an old name             name-taken, which prevented rewriting
      attributes that may be one        unresolved; for Keras's class, keras
      part of a longer name, or bound   None
      a module with old names           unresolved
      anything else                     None

  The first line that applies decides.
  """
  full_names = source.full_names(node)
  if any(name.startswith("mp_compat.") for name in full_names):
    return None
  new_name = source.new_name(node)
  if new_name:
    return _Found(node, "name-taken", new_name)
  meanings = source.meanings(node)
  if isinstance(node, cst.Attribute) and meanings:
    kind = "unresolved"
    if names.KERAS in meanings:
      kind = "keras"
    return _Found(node, kind, " or ".join(sorted(meanings)))
  if isinstance(source.parents[node], cst.Attribute) or not source.is_read(node):
    return None  # a part of a longer name, or a name that is bound
  modules = {names.module_replacement(name) for name in full_names} - {""}
  if modules:
    return _Found(node, "unresolved", " or ".join(sorted(modules)))
  return None


def _in_imports(
  source: ParsedSource, texts: Dict[cst.CSTNode, str]
) -> Iterator[_Found]:
  """Finds imports of old names that stay because of a comment, of whole modules, and of
  Keras's class.

      from tensorflow.train.experimental import (LossScale)  # with a comment inside
      import tensorflow.contrib.mixed_precision as mp
      from tensorflow.keras.mixed_precision import LossScaleOptimizer
      from tensorflow.train.experimental import *

  Args:
    source: the source.
    texts: the new texts of what is rewritten.
  """
  imports: List[Union[cst.Import, cst.ImportFrom]] = [
    *source.find(cst.Import),
    *source.find(cst.ImportFrom),
  ]
  for node in imports:
    new_import = rewriting.new_import(source, node)
    if new_import and node not in texts:
      yield _Found(node, "unresolved", new_import)
    module = names.module_of(node)
    for imported in names.imported(node):
      full_name = imported.name
      if module:
        full_name = "{}.{}".format(module, imported.name)
      new_module = names.module_replacement(full_name)
      if ".contrib." in full_name and new_module:  # TensorFlow 2 lacks the module.
        yield _Found(node, "unresolved", new_module)
      elif full_name == "tensorflow.keras.mixed_precision.LossScaleOptimizer":
        yield _Found(node, "keras", names.KERAS)
    if isinstance(node.names, cst.ImportStar) and names.contains_old_names(module):
      yield _Found(node, "unresolved")


def _in_guards(source: ParsedSource, texts: Dict[cst.CSTNode, str]) -> Iterator[_Found]:
  """Finds names that are rewritten, in a `try` that handles their absence.

      try:
        scale = tf.train.experimental.FixedLossScale(128)
      except AttributeError:  # TensorFlow 1.13
        scale = None

  Every `try` around a name counts.
  """
  for node in texts:
    for block in source.enclosing(node, cst.Try):
      if _handles_absence(source, block):
        yield _Found(node, "guard")


def _handles_absence(source: ParsedSource, block: cst.Try) -> bool:
  """Returns whether a `try` handles errors for names that do not exist."""
  for handler in block.handlers:
    # `except:` handles everything.
    if handler.type is None or _ABSENCE.search(source.text(handler.type)):
      return True
  return False


def _in_strings(source: ParsedSource) -> Iterator[_Found]:
  """Finds strings, and texts of formatted strings, that have an old name; no
  docstrings.

  A string has one if a module with old names is in it, or if its last part is a name
  such as "DynamicLossScale", which hardly anything else has.
  """
  strings: List[Union[cst.SimpleString, cst.FormattedStringText]] = [
    *source.find(cst.SimpleString),
    *source.find(cst.FormattedStringText),
  ]
  for node in strings:
    if isinstance(source.parents[node], cst.Expr):  # a docstring
      continue
    value = node.value
    if isinstance(node, cst.SimpleString):
      value = node.raw_value
    last = value.rpartition(".")[2]
    if _TEXT.search(value) or last in names.DISTINCTIVE:
      yield _Found(node, "text")


def _in_classes(source: ParsedSource) -> Iterator[_Found]:
  """Finds subclasses of loss scales."""
  for node in source.find(cst.ClassDef):
    for base in node.bases:
      if source.meanings(base.value) & _LOSS_SCALES:
        yield _Found(node.name, "subclass")
        break


def _in_type_tests(source: ParsedSource) -> Iterator[_Found]:
  """Finds `isinstance` and `issubclass` with classes of this package."""
  for call in source.find(cst.Call):
    for name in _tested(call):
      if source.meanings(name) & _CLASSES:
        yield _Found(call, "isinstance")
        break


def _tested(call: cst.Call) -> Sequence[cst.CSTNode]:
  """Returns the names in a type test; none for another call."""
  if names.dotted(call.func) not in ("isinstance", "issubclass"):
    return ()
  return m.findall(call, m.Name() | m.Attribute())


def _optimizers(source: ParsedSource) -> List[cst.CSTNode]:
  """Returns the names of wrappers, without those in type tests."""
  tested: Set[cst.CSTNode] = set()
  for call in source.find(cst.Call):
    tested.update(_tested(call))
  found: List[cst.CSTNode] = []
  for node in source.expressions:
    if node not in tested and source.meanings(node) & _OPTIMIZERS:
      found.append(node)
  return found


def _in_contrib(source: ParsedSource) -> Iterator[_Found]:
  """Finds contrib's optimizer, which makes sparse gradients dense."""
  for node in _optimizers(source):
    if _CONTRIB in source.meanings(node):
      yield _Found(node, "sparse-gradients")


def _in_settings(source: ParsedSource) -> Iterator[_Found]:
  """Finds settings that make TensorFlow cast the graph.

  os.environ["TF_ENABLE_AUTO_MIXED_PRECISION"] = "1"
  config.graph_options.rewrite_options.auto_mixed_precision = 1
  RewriterConfig(auto_mixed_precision=1)
  tf.config.optimizer.set_experimental_options({"auto_mixed_precision": True})
  """
  for string in source.find(cst.SimpleString):
    if _AUTOMATIC_CASTS.fullmatch(string.raw_value):
      yield _Found(string, "automatic-casts")
  for attribute in source.find(cst.Attribute):
    if attribute.attr.value == "auto_mixed_precision":
      yield _Found(attribute, "automatic-casts")
  for argument in source.find(cst.Arg):
    if argument.keyword and argument.keyword.value == "auto_mixed_precision":
      yield _Found(argument, "automatic-casts")


def _kinds_of(source: ParsedSource, call: cst.Call) -> Iterator[str]:
  """Yields the kinds of decisions that a call needs: keys of `_CALLS`.

  What is called matches by its full name, or by the name of this package that it has
  or will have. MixedPrecisionLossScaleOptimizer(opt, 128) has a fixed scale, too.
  """
  called = source.full_names(call.func) | source.meanings(call.func)
  for kind, pattern in _CALLS.items():
    if any(pattern.fullmatch(name) for name in called):
      yield kind
  if _OPTIMIZER not in called:
    return
  for argument in call.args[:2]:  # the optimizer and its loss scale
    if isinstance(argument.value, (cst.Integer, cst.Float)):
      yield "fixed-scale"
      return


def _in_calls(source: ParsedSource) -> Iterator[_Found]:
  """Finds calls that behave otherwise with this package.

      wrapper             no decision
      wrapped-twice       only beside a wrapper
      clipped-gradients   only if the source computes or applies gradients itself
      checkpoints         if no call restores, at the first wrapper

  A source that makes no optimizer with loss scaling has decisions on fixed scales only.
  """
  calls: Dict[str, List[cst.CSTNode]] = collections.defaultdict(list)
  for call in source.find(cst.Call):
    for kind in _kinds_of(source, call):
      calls[kind].append(call.func)
  has_wrappers = bool(calls.pop("wrapper", None))
  if not has_wrappers:
    calls.pop("wrapped-twice", None)
  if not re.search(rb"\.(compute|apply)_gradients\(", source.code):
    calls.pop("clipped-gradients", None)
  optimizers = _optimizers(source)
  for kind, called in calls.items():
    if optimizers or kind == "fixed-scale":
      for node in called:
        yield _Found(node, kind)
  # The program may restore checkpoints elsewhere.
  if optimizers and not calls["checkpoints"]:
    yield _Found(min(optimizers, key=source.start), "checkpoints")


def _in_private_names(source: ParsedSource) -> Iterator[_Found]:
  """Finds private attributes of TensorFlow's classes for loss scaling.

  Those of `_PRIVATE` count everywhere, because nothing else is likely to have them.
  Those of `_PUBLIC_EQUIVALENTS` count only in a source with a wrapper of an optimizer,
  and not on `self`.
  """
  has_optimizers = any(
    source.meanings(node) & _OPTIMIZERS for node in source.expressions
  )
  for node in source.find(cst.Attribute):
    name = node.attr.value
    if name in _PRIVATE:
      yield _Found(node, "private-state")
    elif has_optimizers and name in _PUBLIC_EQUIVALENTS:
      if names.dotted(node.value) != "self":  # of a class of the program
        yield _Found(node, "private-state", _PUBLIC_EQUIVALENTS[name])
