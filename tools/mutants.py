# SPDX-License-Identifier: Apache-2.0
"""Checks the tests by mutation: puts one defect (a mutant) at a time into the package,
for which a test must fail.

    python tools/mutants.py                          all mutants, on the installed TensorFlow
    python tools/mutants.py training/optimizer -v    the mutants of one module, with the output of the tests
    python tools/mutants.py training                 the mutants of one folder

A mutant is a change of one node in the syntax tree of a definition (`Mutant`). It is
killed if one of that module's tests (`TESTS`) fails. The exit status is 1 if a mutant
survives or does not apply, or if the tests fail without a mutant.

cosmic-ray and mutmut make all mutants of a module, thousands here, where each takes up
to minutes. A single one is the number of an operator in a module, or of a mutant in a
function, and becomes another defect if an operator is added before it.
"""

import argparse
import ast
import concurrent.futures
import functools
import keyword
import os
import shutil
import subprocess
import sys
import tempfile
from typing import Any, Callable, Dict, Iterator, NamedTuple, Optional, Sequence, Tuple

import tqdm

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

# The tests of each module. The tests that fail fastest are first.
TESTS = {
  "graph/gate": (
    "training/gate training/skipped_ops training/conditional_tensors "
    "programs/built_in_steps programs/unusual programs/training"
  ),
  "graph/control_flow": "training/skipped_ops training/gate",
  "graph/effects": "training/skipped_ops training/gate",
  "graph/dead_tensors": "graph/dead_tensors monitoring/gradient_ranges programs/unusual",
  "_tensorflow/event_files": "monitoring/ranges_hook",
  "graph/graphs": "graph/control_flow programs/built_in_steps programs/unusual",
  "graph/op_names": "programs/built_in_steps programs/unusual",
  "graph/runs": "monitoring/ranges_hook",
  "core/arguments": "core/update_rule core/automaton",
  "core/update_rule": "core/update_rule core/automaton",
  "core/naming_schemes": "core/naming_schemes core/matching",
  "core/matching": "core/matching",
  "core/translation": "core/matching",
  "core/gradients": (
    "core/gradients core/finite_check training/finite_reducer training/optimizer "
    "monitoring/reports training/bad_input"
  ),
  "core/variable_scope": "core/variable_scope checkpoints/saver",
  "graph/contexts": (
    "core/lineage core/hidden_overflows training/scaled_gradients training/optimizer "
    "monitoring/reports programs/functions"
  ),
  "core/lineage": (
    "core/lineage core/hidden_overflows training/scaled_gradients training/optimizer "
    "monitoring/reports programs/functions"
  ),
  "monitoring/dataflow": (
    "monitoring/noise monitoring/measured_tensors monitoring/float32_ops "
    "monitoring/gradient_ranges"
  ),
  "monitoring/float16_ops": "monitoring/float16_ops",
  "_tensorflow/optimizers": "training/inner_optimizers programs/optimizers",
  "core/finite_check": "core/finite_check training/optimizer",
  "core/distribute": "core/distribute programs/strategies training/optimizer training/bad_input",
  "core/loss_scale": (
    "core/loss_scale training/bad_input training/finite_reducer "
    "training/gradient_accumulation training/optimizer contrib/mixed_precision "
    "equivalence/fuzzing"
  ),
  "core/conditional_apply": (
    "training/inner_optimizers training/skipped_ops training/optimizer "
    "programs/replica_sums programs/strategies programs/unusual programs/optimizers"
  ),
  "keras/keras2": "keras/subclasses keras/surface keras/numbers",
  "keras/keras3": "keras/subclasses keras/keras_3 keras/saving",
  "keras/loss_scale_optimizer": "keras/subclasses keras/keras_3 keras/numbers",
  "keras/optimizer_kinds": "keras/subclasses",
  "monitoring/float32_ops": "monitoring/float32_ops",
  "monitoring/gradient_ranges": "monitoring/gradient_ranges monitoring/measured_tensors "
  "monitoring/noise",
  "monitoring/nonfinite_ops": "monitoring/stall monitoring/mistakes",
  "monitoring/range_history": "monitoring/range_history monitoring/ranges_hook",
  "monitoring/ranges_hook": "monitoring/ranges_hook",
  "monitoring/hooks": (
    "monitoring/stall monitoring/hooks monitoring/hooks_in_control_flow "
    "monitoring/ranges_hook"
  ),
  "monitoring/recomputation": "monitoring/stall monitoring/mistakes",
  "monitoring/remedies": "monitoring/mistakes monitoring/stall",
  "monitoring/stall": "monitoring/stall monitoring/hooks",
  "monitoring/step_counter": "monitoring/step_counter",
  "monitoring/step_hook": "monitoring/step_hook monitoring/hooks_in_control_flow",
  "training/step": (
    "training/finite_reducer training/shared_loss_scale training/gradient_accumulation "
    "training/skipped_ops monitoring/reports training/threads training/optimizer "
    "equivalence/tensorflow_defects training/eager"
  ),
  "training/advice": (
    "monitoring/reports training/eager training/scaled_gradients training/optimizer "
    "core/lineage"
  ),
  "training/recorded": (
    "monitoring/reports training/optimizer training/skipped_ops "
    "equivalence/tensorflow_defects"
  ),
  "training/gradient_accumulation": "training/gradient_accumulation",
  "training/shared_loss_scale": (
    "training/shared_loss_scale training/sync_replicas training/bad_input"
  ),
  "training/optimizer": (
    "training/scaled_gradients training/optimizer monitoring/reports "
    "checkpoints/object_based programs/builders "
    "training/inner_optimizers training/bad_input training/threads "
    "equivalence/tensorflow_defects core/loss_scale programs/unusual "
    "training/gradient_accumulation"
  ),
  "tools/compare/recorder": "tools/compare/recorder",
  "tools/compare/recording": "tools/compare/report",
  "tools/compare/report": "tools/compare/report",
  "tools/compare/run_effects": "tools/compare/sessions",
  "tools/compare/step_building": "tools/compare/sessions",
  "tools/compare/servers": "tools/compare/servers",
  "tools/compare/steps": "tools/compare/sessions",
  "tools/compare/training": "tools/compare/training",
  "tools/migrate/decisions": "tools/migrate/source",
  "tools/ranges_chart": "tools/ranges_chart",
}
TESTS = {module: tests.split() for module, tests in TESTS.items()}


class Place(NamedTuple):
  """Where a node is in a syntax tree: a field of its parent, or an item of a list that
  the field is.
  """

  parent: ast.AST
  field: str
  index: Optional[int]

  @property
  def node(self) -> ast.AST:
    """Returns the node that is at this place now."""
    value = getattr(self.parent, self.field)
    return value if self.index is None else value[self.index]

  def put(self, *nodes: ast.AST) -> None:
    """Replaces the node, by one or, in a list, by any number of others."""
    if self.index is None:
      (node,) = nodes
      setattr(self.parent, self.field, node)
    else:
      getattr(self.parent, self.field)[self.index : self.index + 1] = nodes


# The places from a tree to a node in it: the last is that of the node.
Path = Tuple[Place, ...]


def paths(tree: ast.AST, above: Path = ()) -> Iterator[Path]:
  """Yields the path to each node below `tree`."""
  for field, value in ast.iter_fields(tree):
    children = list(enumerate(value)) if isinstance(value, list) else [(None, value)]
    for index, child in children:
      if isinstance(child, ast.AST):
        path = (*above, Place(tree, field, index))
        yield path
        yield from paths(child, path)


@functools.lru_cache(maxsize=None)
def dump_of(text: str) -> str:
  """Returns the tree of what `parse` returns, as text, which can be compared."""
  return ast.dump(parse(text))


def parse(text: str) -> ast.AST:
  """Returns the node of an expression, of an operator, or of a statement."""
  try:
    return ast.parse(text, mode="eval").body
  except SyntaxError:
    pass
  try:
    return ast.parse(text).body[0]
  except SyntaxError:
    operation: Any = ast.parse("a {} b".format(text), mode="eval").body
  return operation.ops[0] if isinstance(operation, ast.Compare) else operation.op


def is_named(node: ast.AST, name: str) -> bool:
  """Returns whether a node is `name`: a variable, an attribute, a keyword argument, or
  any expression, operator or statement.
  """
  if isinstance(node, ast.arg):  # a parameter
    return False
  if name.isidentifier() and not keyword.iskeyword(name):
    return name in [getattr(node, field, None) for field in ("id", "attr", "arg")]
  return ast.dump(node) == dump_of(name)


def _is_operand(place: Place) -> bool:
  """Returns whether a place is that of an operand of an operator, or can be empty."""
  if isinstance(place.parent, (ast.BoolOp, ast.BinOp)):
    return place.field != "op"
  return place.field in ("elts", "ifs", "items", "keywords")


# What a mutant changes around the node that it names: the innermost of these.
UNITS: Dict[str, Callable[[Place], bool]] = {
  "call": lambda place: isinstance(place.node, ast.Call),
  "name": lambda place: True,  # the node itself
  "operand": _is_operand,
  "result": lambda place: isinstance(place.parent, ast.Return),
  "statement": lambda place: isinstance(place.node, ast.stmt),
  "test": lambda place: place.field in ("test", "ifs"),
}


class Mutant(NamedTuple):
  """A change of one node in a definition.

  Attributes:
    module: The module's path in the package, such as "graph/gate".
    definition: The name of a function, a class or a variable, such as "Class.method".
    unit: What is changed: one of `UNITS`.
    name: What the unit contains (`is_named`), at one place of the definition only.
    new: What replaces the unit, in which `_` is the old one; "" to remove it.
  """

  module: str
  definition: str
  unit: str
  name: str
  new: str

  def mutate(self, source: str) -> ast.AST:
    """Returns the syntax tree of a module's source with the change.

    Raises:
      ValueError: If the definition has not one place that fits.
    """
    tree = ast.parse(source)
    found = {}
    for path in paths(self._definition_in(tree)):
      if is_named(path[-1].node, self.name):
        for place in reversed(path):
          if UNITS[self.unit](place):
            found[id(place.parent), place.field, place.index] = place
            break
    if len(found) != 1:
      raise ValueError("Expected one place for {}, found {}".format(self, len(found)))
    (place,) = found.values()
    if self.new:
      place.put(*self._replacements(place.node))
    elif isinstance(place.parent, (ast.BoolOp, ast.BinOp)):
      _remove_operand(tree, place)
    else:
      place.put()
    return ast.fix_missing_locations(tree)

  def _definition_in(self, tree: ast.AST) -> ast.AST:
    """Returns the definition: a tree with the only statement that defines each name."""
    found: Any = tree
    for name in self.definition.split("."):
      body = [each for each in found.body if name in _names_defined_by(each)]
      if len(body) != 1:
        raise ValueError("Expected one {}, found {}".format(self, len(body)))
      (found,) = body
    return found

  def _replacements(self, old: ast.AST) -> Sequence[ast.AST]:
    """Returns the nodes of `new`: several statements, or another node."""
    if self.unit == "statement":
      return ast.parse(self.new).body
    return [_Insert(old).visit(parse(self.new))]


class _Insert(ast.NodeTransformer):
  """Puts a node in place of each variable `_`."""

  def __init__(self, node: ast.AST) -> None:
    self._node = node

  def visit_Name(self, node: ast.Name) -> ast.AST:
    return self._node if node.id == "_" else node


def _names_defined_by(statement: ast.stmt) -> Sequence[Optional[str]]:
  """Returns the names that a statement defines: of a function, a class or variables."""
  targets = getattr(statement, "targets", [getattr(statement, "target", None)])
  names = [getattr(target, "id", None) for target in targets]
  return [*names, getattr(statement, "name", None)]


def _remove_operand(tree: ast.AST, operand: Place) -> None:
  """Removes an operand from its operation; the only one left replaces the operation."""
  operation: Any = operand.parent
  if isinstance(operation, ast.BoolOp):
    operand.put()
    left = operation.values
  else:
    left = [operation.right if operand.field == "left" else operation.left]
  if len(left) == 1:
    (place,) = [path[-1] for path in paths(tree) if path[-1].node is operation]
    place.put(*left)


# Of each module: definition, unit, name, new (`Mutant`).
_ROWS = {
  "graph/gate": [
    ("_begins_loop_of", "result", "pivot", "False"),
    ("_begins_loop_of", "result", "pivot", "True"),
    ("_add_edges", "call", "changing", "set()"),
    ("_add_edges", "operand", "passed", ""),
    ("_bypass_switches", "statement", "replace_input", "pass"),
    ("_with_readers", "operand", "merges", ""),
    ("_with_readers", "operand", '"ControlTrigger"', ""),
    ("_passed_unless", "test", "context_of", "True"),
    ("_add_edges", "operand", "loop_around_inputs", ""),
    ("_add_edges", "operand", "op in must_wait", ""),
    ("_add_edges", "operand", "op.type in calls", ""),
    ("_waits_for_data", "result", "issuperset", "not waiting.isdisjoint(read)"),
    ("_check_reads", "operand", "predicate", ""),
    ("_check_reads", "operand", "new", ""),
    ("check_reads", "statement", "_check_reads", "pass"),
    ("check_reads", "test", "functions", "False"),
    ("_check_reads", "name", "[_op_of(end) for end in ends]", "[]"),
    ("_with_readers", "statement", "set", "return skipped"),
    ("_with_readers", "test", "found_before", "found_before < 0"),
    ("_needed", "test", "_begins_iteration", "False"),
    ("gate", "name", "results + summaries", "results"),
    ("gate", "name", "results + summaries + update_ops", "results + summaries"),
    ("_with_readers", "test", "isdisjoint", "False"),
  ],
  "graph/control_flow": [
    (
      "pivots",
      "name",
      "tf.raw_ops.Merge(inputs=[output]).output",
      "tf.identity(output)",
    ),
  ],
  "core/conditional_apply": [
    ("_pass_unless", "name", "[passed_by_key[key] for key in keys]", "passed"),
    ("_reopened_scope", "name", "{reopened: merge_scope}", "{}"),
    (
      "_pass_unless",
      "statement",
      "original_names[after.op.name] = before.op.name",
      "pass",
    ),
    ("_pass_unless", "call", "unscaled_names", "[tensor.op.name for tensor in values]"),
    ("_scope", "test", "name_scope", "True"),
  ],
  "training/step": [
    ("_apply_inner", "call", "union", "step.own()"),
    ("prepare", "name", "hidden_values", "[]"),
    (
      "decide",
      "name",
      "reducer is not None or _may_be_hidden(parts, lineages)",
      "False",
    ),
    ("decide", "call", "reduce_all", "finite[0]"),
    ("decide", "test", "use_locking", "False"),
    ("_and", "name", "logical_and", "tf.logical_or"),
    ("collected.build_and_collect", "statement", "get_collection_ref", "pass"),
    ("_decisions", "call", "logical_or", "True"),
    ("_update", "name", "cut", "list"),
    (
      "_reduce_finite",
      "name",
      "reduced.dtype != tf.bool or not reduced.shape.is_compatible_with(stacked.shape)",
      "False",
    ),
    ("_reduce_finite", "statement", "stacked = reduced", "pass"),
    ("_decisions", "call", "logical_or", "should_apply"),
    ("apply_first", "name", '"each"', '"all"'),
    ("Settings.of_shared_step", "name", "any", "all"),
  ],
  "graph/effects": [
    ("_changes_state", "operand", "_PASSING", ""),
    ("_changes_state", "result", "any", "False"),
    ("called_types", "operand", "runs_dataset", ""),
    (
      "_kind_of",
      "name",
      "runs_dataset or _changes_state(definition)",
      "_changes_state(definition)",
    ),
    ("changing", "operand", '"PrintV2"', ""),
    ("_of_call", "test", "called is None", "True"),
    ("called_types", "statement", "pending += _function_names(called, graph)", "pass"),
    ("is_call", "result", "kind.takes_functions", "False"),
    ("is_call", "result", "calls_function", "False"),
    ("_changes_state", "operand", "startswith", ""),
  ],
  "graph/dead_tensors": [
    ("_conditions_of_merge", "result", "_Condition", "common"),
    (
      "_conditions_of",
      "result",
      "_condition",
      "found[tensor.op] or {_condition(predicate, tensor.value_index)}",
    ),
    ("merge_out_of_branches", "operand", "decided", ""),
  ],
  "graph/graphs": [
    ("init_scope_graph", "test", "is_eager_by_mistake", "False"),
    ("init_scope", "test", "executing_eagerly", "False"),
    ("other_graph_of", "test", "graph is None", "True"),
  ],
  "graph/runs": [
    ("executed_ops", "operand", "fed", ""),
  ],
  "graph/op_names": [
    (
      "_in_scope_asked_for",
      "operand",
      "in_outer + reserved.scope",
      'in_outer + reserved.given + "/"',
    ),
    (
      "_scope_asked_for",
      "operand",
      "startswith",
      'current.startswith(reserved.given + "/")',
    ),
  ],
  "core/update_rule": [
    (
      "next_state",
      "name",
      "good_steps >= rule.increment_period",
      "good_steps > rule.increment_period",
    ),
    ("_grown", "name", "<=", "<"),
    ("_shrunk", "result", "maximum", "lower"),
    ("next_state.scale_if_finite", "result", "grow", "grown()"),
    (
      "next_state",
      "name",
      "select(finite, select(grow, 0, good_steps), 0)",
      "select(finite, select(grow, 0, good_steps), state.good_steps)",
    ),
    ("next_state", "call", "select(grow, 0, state.bad_steps)", "0"),
  ],
  "core/arguments": [
    ("LARGEST_SCALE", "operand", "126", "127"),
  ],
  "core/naming_schemes": [
    ("state", "call", "tuple(shapes[name])", "()"),
    ("_signed", "name", "stems.issuperset(each.signature)", "True"),
    ("_without_scope", "result", '""', "scope"),
    ("_in_second_conditional", "test", "DYNAMIC", "loss_scale is None"),
    ("recognize", "operand", "is_conditional", ""),
  ],
  "core/matching": [
    ("_keep_names", "name", "is_scaled or is_conditional", "is_scaled"),
    ("_keep_names", "name", "names <= others or others <= names", "False"),
    ("_pair", "name", "_is_mixed(group, others[key])", "False"),
    ("match", "name", "bool(fits) or len(others) >= len(members)", "True"),
    ("match", "operand", "has_all", ""),
    ("match", "operand", "bool(weights_and_slots)", ""),
    ("match", "operand", "have_equal_values(sources)", ""),
    ("match", "operand", "names[name] not in found.unsaved", ""),
    ("_without_numbers", "result", "re.sub", "scope"),
    ("match", "name", "_fits(kind, part, others)", "[]"),
    ("kinds", "operand", "is_slot", ""),
    ("_fits", "test", "is_state", "False"),
    ("_sources", "test", "is_state", "False"),
    ("_pair", "operand", "is_ordered(others[key])", ""),
    ("_pair", "test", "sorted", "False"),
    ("is_ordered", "call", "len", "1"),
  ],
  "core/translation": [
    ("_names_of_state", "name", "place not in places", "False"),
    ("_names_of_state", "operand", "named", ""),
    ("translate", "test", "target in result", "False"),
    ("translate", "test", "is_left_out", "False"),
    ("_name_of_one", "test", "len", "False"),
    ("_names_alone", "operand", "have_equal_values(sources)", ""),
    ("_check_scopes", "operand", "member.form", ""),
  ],
  "core/gradients": [
    ("scale_loss", "name", "*", "/"),
    ("unscale", "name", "1 / tf.cast(scale, dtype)", "tf.cast(1 / scale, dtype)"),
    ("add_nan_unless", "call", "float", "0.0"),
    ("clip_by_global_norm", "statement", "cond", "pass"),
    ("scale_loss", "test", "_DTYPES", "False"),
    ("convert", "call", "hasattr", "False"),
  ],
  "core/variable_scope": [
    ("float32_variable_storage_getter", "statement", "tensor_key", "pass"),
    (
      "parts_of",
      "name",
      "list(variable) if is_partitioned else [variable]",
      "[variable]",
    ),
    ("parts_of", "test", "values", "False"),
    ("variable_of", "test", "Tensor", "False"),
  ],
  "core/lineage": [
    ("_COPIES", "call", "frozenset", '_ | {"Mul"}'),
    ("_copied", "result", "is_floating", "[]"),
    ("_copied", "operand", "not tensor.dtype.is_floating", ""),
    ("trace", "operand", "is_readable", ""),
    (
      "trace",
      "name",
      "check_computed and is_readable and key not in found.passed",
      "is_readable and key not in found.passed",
    ),
    ("_squared_in", "test", "control_inputs", "False"),
    ("_squared_in", "operand", '"Const"', ""),
    ("_squared_in", "operand", "is_square", ""),
    ("Lineage.has_gradients_as_arguments", "operand", "is_factor", "False"),
    (
      "Lineage.has_gradients_as_arguments",
      "name",
      "bool(self.computed) and argument.shape.rank == 0",
      "False",
    ),
    ("_nearest", "statement", "reversed", "pass"),
  ],
  "graph/contexts": [
    ("data_inputs", "test", "SWITCHES", "True"),
    ("data_inputs", "test", "SWITCHES", "False"),
    ("is_argument", "call", "all", "True or _"),
  ],
  "monitoring/dataflow": [
    ("_followed_inputs", "test", '"StopGradient"', "False"),
    ("_containing", "test", "size", "True"),
    ("_TERM_BY_TERM", "operand", '"BiasAddGrad"', ""),
    ("forward_pass", "operand", "executed", ""),
  ],
  "_tensorflow/optimizers": [
    (
      "arguments_for",
      "name",
      "name in not_taken and value is defaults[name].default",
      "value is defaults[name].default",
    ),
    ("arguments_for", "operand", "default", ""),
    ("sets_inner_attribute", "result", "hasattr", "True"),
  ],
  "core/finite_check": [
    ("_all_finite_if_sums_are", "call", "_exact", "sums_finite"),
    (
      "_all_finite_if_sums_are",
      "name",
      "[_sum(tensor) for tensor in summands]",
      "_[:1]",
    ),
    ("all_finite", "call", "_groups_to_check", "_[:1]"),
    ("all_finite", "operand", "is_fast_math", ""),
    ("_SMALL", "operand", "16", "20"),
  ],
  "core/distribute": [
    ("reduce_all_replicas", "name", "num_replicas_in_sync", "1"),
    ("reduce_all_replicas", "name", "SUM", "tf.distribute.ReduceOp.MEAN"),
    ("check_replica_context", "test", "distribute", "False"),
  ],
  "core/loss_scale": [
    ("is_updated_by_check", "name", "FiniteLossScale.update", "None"),
    ("FiniteLossScale.update.check", "operand", "trace", ""),
    ("_local_constant", "test", "context_of", "True"),
    ("constants_of", "test", "FixedLossScale", "False"),
    ("LossScale._make_weight", "name", "False", "True"),
    ("LossScale._weight", "operand", "name_scope", ""),
    ("DynamicLossScale.get_config", "test", "value", "True"),
    ("DynamicLossScale.__init__", "name", "<", "<="),
  ],
  "monitoring/float16_ops": [
    ("_may_be_large", "result", "inputs", "False"),
    ("_is_reduction_of_squares", "result", "tensor_key", "True"),
  ],
  "monitoring/float32_ops": [
    ("_sources_of_inputs", "operand", "kind", ""),
    ("_sources", "statement", "found[op] = sources", "found[op] = sources; continue"),
    ("_inputs_with_float32", "operand", "variant", ""),
    ("_EMPTY", "operand", '"TensorArrayV3"', ""),
  ],
  "monitoring/gradient_ranges": [
    ("_computed_gradients", "call", "scaled", "True"),
    ("_LARGEST_CANCELLATION", "name", "2.0 ** (-7)", "1.0"),
    (
      "_is_noise",
      "name",
      "tf.cast(counted.number_of_terms, tf.float64) / total",
      "tf.cast(counted.number_of_terms, tf.float64) * 0.0",
    ),
    ("_is_noise", "operand", "0.0", ""),
    ("_layers_to_measure", "operand", "is_behind_loss", "True"),
    ("_dtypes_to_measure", "operand", "[tf.bfloat16]", ""),
    ("_ranges", "operand", "int32", "0"),
    ("_with_dtypes", "name", "min", "max"),
    ("report", "operand", "passed", ""),
  ],
  "monitoring/range_history": [
    ("_lowest_kept", "test", "below", "True"),
    (
      "Tensor.add",
      "name",
      'BFLOAT16 if values["dtype"] == "bfloat16" else FLOAT16',
      "FLOAT16",
    ),
    ("_is_cut_off", "result", "min", "min(exponents) >= FLOAT16.lowest"),
    ("Tensor.doubtful_scale", "call", "max", "0"),
    ("read_text", "name", '"replace"', '"strict"'),
    ("History.format", "name", "formats == {BFLOAT16}", "BFLOAT16 in formats"),
    (
      "History.add",
      "statement",
      "if is_scaled: self.scale = scale",
      "self.scale = scale",
    ),
    (
      "History.add",
      "name",
      "fitting.low - fitting.high > conflict.low - conflict.high",
      "fitting.low > fitting.high",
    ),
    ("read", "name", "<", "<="),
    ("_choose", "operand", "steps", ""),
    ("_without_fitting_scale", "test", "high", "False"),
    ("_choose_scale", "operand", "has_overflowed", ""),
    ("_choose_scale", "operand", "vanishing", ""),
    ("Tensor._note_vanishing", "test", "SHOWN", "False"),
    ("Tensor.add", "operand", "0", ""),
    ("Tensor.add", "test", "not is_noise", "True"),
    ("History.upper_bounds", "result", "overflows", "self.overflows"),
    ("advise", "operand", "tensors", ""),
  ],
  "tools/migrate/decisions": [
    ("_in_guards", "call", "Try", "_[:1]"),
  ],
  "tools/ranges_chart": [
    ("_spread", "call", "min", "row"),
    ("_labels", "name", "named", "advice.text.split()"),
  ],
  "monitoring/ranges_hook": [
    ("GradientRangesHook._can_be_recorded", "test", "all", "True"),
    ("GradientRangesHook._record", "statement", "min", "pass"),
    ("GradientRangesHook.after_run", "test", "_history", "False"),
    ("GradientRangesHook.end", "test", "run", "False"),
  ],
  "keras/keras2": [
    ("_check_of_changed", "result", "partial", "None"),
    ("Keras2Mixin._aggregate_present", "operand", "missing", ""),
    ("_convert_pair", "name", "base_dtype", "None"),
    ("OptimizerV3Mixin._create_variables", "test", "BUILDS_WHEN_APPLYING", "False"),
  ],
  "keras/keras3": [
    ("Keras3Mixin._takes_scaled", "test", "has_unscaled", "False"),
    ("Keras3Mixin._record_unscaled", "test", "divides_others", "False"),
    ("Keras3Mixin.apply_gradients", "test", '"apply"', "False"),
    ("Keras3Mixin.apply_gradients", "call", "_scaled", "grads"),
    ("Keras3Mixin._are_unscaled", "operand", "id", "False"),
    ("_check_layout", "operand", '"inner_optimizer"', "True"),
    ("Keras3Mixin._states_here", "operand", "functions", ""),
  ],
  "keras/loss_scale_optimizer": [
    (
      "LossScaleOptimizer.get_scaled_loss",
      "call",
      "get_scaled_loss",
      "self.get_scaled_loss(loss())",
    ),
    ("_loss_scale_of", "operand", "is_dynamic", ""),
    ("LossScaleOptimizer._keeps_loss_scale_on_error", "statement", "assign", "pass"),
    ("LossScaleOptimizer._loss_scale_value", "name", "loss_scale", "self._loss_scale"),
  ],
  "keras/optimizer_kinds": [
    ("_concrete_of", "result", "combined", "combined"),
  ],
  "monitoring/hooks": [
    ("LossScaleHook._describe_stall", "test", "_steps", "False"),
    ("StopAtAttemptHook._steps_to_observe", "test", "is_run_by_queue", "False"),
    ("_computed", "operand", "computes", ""),
    ("LossScaleHook._describe_stall", "operand", "FIXED_LOSS_SCALES", ""),
    ("LossScaleHook.after_run", "statement", "restart", "pass"),
    ("LossScaleHook.before_run", "test", "not self._is_rewritten", "True"),
  ],
  "monitoring/stall": [
    ("_has_values", "operand", "HIDING", ""),
    ("observed", "call", "zeros_if_dead", "tensors"),
    ("_first.reasons", "operand", "finite", ""),
    ("_first.is_input", "operand", "isdisjoint", ""),
    ("_fetchable", "test", "is_fetchable", "True"),
    ("_failure", "call", "_fed", "frozenset()"),
    ("describe", "name", '("gradient", "loss")', '("loss",)'),
    ("_loss", "name", "min", "max"),
  ],
  "monitoring/nonfinite_ops": [
    ("explain", "operand", "recomputation.is_finite(exact)", ""),
    ("_numbers_that_round_to", "operand", "1 - relative", "1"),
    ("_numbers_that_round_to", "call", "copysign", "of_zero"),
    ("rounded_constants", "operand", "is_in_custom_gradient", ""),
    (
      "rounded_constants",
      "operand",
      "tensor.op in forward or graph_internals.is_in_custom_gradient(tensor.op)",
      "",
    ),
    ("_describe", "test", '"Pow"', "False"),
    (
      "_with_constants",
      "statement",
      "found = changed.shortest(tf.float32, deepest)",
      "found = near",
    ),
    (
      "_with_constants",
      "statement",
      "constants[constant.op.name] = np.unique(values)",
      "constants[constant.op.name] = np.ravel(values)",
    ),
  ],
  "monitoring/recomputation": [
    ("has_effects", "operand", '"PyFuncStateless"', ""),
    ("Recomputation.is_input", "operand", "self._fed", ""),
    ("Recomputation._functions_before", "operand", "is_fed", ""),
    ("Recomputation._first", "statement", "low = middle", "high = middle"),
    ("Recomputation._is_function", "operand", "has_effects", ""),
    ("Recomputation.deepest", "test", "is_finite is not None", "True"),
    ("Recomputation.shortest", "test", "self.chain(deepest)", "False"),
    ("_widen", "statement", "_wider_enum(attribute.type, dtype)", "pass"),
  ],
  "monitoring/remedies": [
    ("_about_overflow", "test", "_LARGEST_FLOAT32", "False"),
    ("_about_overflow", "test", "failure.dtype not in _ENDS", "False"),
    ("_names_of_ops", "name", "computing & failure.forward", "computing"),
    ("_names_of_ops", "test", "failure.tensor.op not in failure.forward", "False"),
    ("_about_undefined", "test", "each.op in failure.forward", "True"),
    ("_inputs", "test", "tensor.op.type in _OF_SHAPES", "False"),
    ("_is_result", "name", "recomputation.NARROW", "{each.dtype.base_dtype}"),
  ],
  "monitoring/step_counter": [
    ("StepCounter.must_write", "operand", "_changes", ""),
    ("StepCounter.may_report_stall", "operand", "1", ""),
    ("StepCounter.begin_session", "operand", "attempted is not None", ""),
    ("StepCounter.count", "statement", "_is_stall_reported", "pass"),
  ],
  "_tensorflow/event_files": [
    ("EventFile._try", "name", "Exception", "OSError"),
    ("EventFile.__init__", "operand", "filename_suffix", ""),
  ],
  "training/optimizer": [
    ("MixedPrecisionLossScaleOptimizer._prepare_part", "operand", "skip_nonfinite", ""),
    ("_check_inner", "test", "SyncReplicasOptimizer", "False"),
    (
      "MixedPrecisionLossScaleOptimizer._recorded_scale",
      "name",
      "recorded.state_of(self, graph).scales",
      "[]",
    ),
    ("MixedPrecisionLossScaleOptimizer.scale_loss", "statement", "identity", "pass"),
    (
      "MixedPrecisionLossScaleOptimizer.compute_gradients",
      "name",
      "GATE_GRAPH",
      "self.GATE_OP",
    ),
    (
      "MixedPrecisionLossScaleOptimizer.compute_gradients",
      "statement",
      "record",
      "pass",
    ),
    ("MixedPrecisionLossScaleOptimizer.__init__", "test", "skip_nonfinite", "False"),
    ("MixedPrecisionLossScaleOptimizer.get_slot_names", "call", "SlotName", "name"),
  ],
  "training/gradient_accumulation": [
    ("GradientAccumulator.apply_gradients", "operand", "group", "applied"),
    ("GradientAccumulator.mean", "test", "_skip", "False"),
    ("GradientAccumulator.apply_gradients", "call", "equal", "tf.constant(True)"),
    ("_device_of_sum", "result", "own_device", "grad.device"),
  ],
  "training/shared_loss_scale": [
    ("apply_gradients_together.apply_all", "name", "reduce_any", "tf.reduce_all"),
    ("_check_optimizers", "operand", "loss_scale", ""),
    ("apply_gradients_together.apply_all", "call", "set_accumulator_steps", "None"),
  ],
  "tools/compare/recorder": [
    ("_digest", "result", "crc32", "kind"),
  ],
  "tools/compare/recording": [
    ("difference", "name", 'reference.line["steps"] > 0', "True"),
  ],
  "tools/compare/report": [
    (
      "_describe_untrained",
      "name",
      'result["trained"] if result["scaled"] else result["trained_without"]',
      'result["trained"] or result["trained_without"]',
    ),
    ("_reason_of_state", "name", "LARGEST_SCALE", "0"),
    ("_compare_with_first", "operand", "_changed_too", ""),
    ("_compare_with_first", "operand", "has_trained", ""),
  ],
  "tools/compare/servers": [
    ("_find_cpu", "operand", "_is_local", ""),
  ],
  "tools/compare/step_building": [
    ("_record", "statement", "update", "pass"),
    (
      "_record",
      "name",
      "open_steps.append(step)",
      "(_, steps.steps_in(graph).append(step))",
    ),
  ],
  "tools/compare/steps": [
    ("_is_imported", "operand", "own", ""),
  ],
  "tools/compare/run_effects": [
    ("_computed_decisions", "test", "is_marked", "True"),
  ],
  "tools/compare/training": [
    ("Interval.add", "name", "execution.applied is not False", "execution.applied"),
    ("Interval.add", "statement", "written", "pass"),
  ],
  "monitoring/step_hook": [
    ("StepHook._steps_to_observe", "test", "is_readable", "True"),
    ("StepHook.after_run", "test", "attempted", "True"),
  ],
  "training/recorded": [
    ("add", "name", "optimizers_of_replicas", "_[:1]"),
  ],
  "training/advice": [
    ("on_gradients", "test", "has_unscaled", "False"),
    ("on_gradients", "test", "is_behind_scale is not None", "True"),
    (
      "_is_behind_scale",
      "name",
      "_ops_behind(optimizer._scale()) & _ops_behind(optimizer._scale())",
      "_ops_behind(optimizer._scale())",
    ),
    ("_is_behind_scale", "statement", "shared |= constants", "pass"),
    ("_is_behind_scale", "test", "constants", "False"),
  ],
}
MUTANTS = [Mutant(module, *row) for module, rows in _ROWS.items() for row in rows]


def copy_with(directory, mutant):
  """Copies the project to `directory`, with a mutant; what tests read beside the
  package, such as goldens, docs and scripts, is linked.
  """
  for name in os.listdir(ROOT):
    if name == "mp_compat":
      shutil.copytree(os.path.join(ROOT, name), os.path.join(directory, name))
    elif not name.startswith(".") and not name.endswith(".egg-info"):
      os.symlink(os.path.join(ROOT, name), os.path.join(directory, name))
  with open(source_file(directory, mutant.module), "r+", encoding="utf-8") as file:
    mutated = mutant.mutate(file.read())
    file.seek(0)
    file.truncate()
    file.write(ast.unparse(mutated))


def source_file(directory, module):
  """Returns the path of a module's source in a copy of the project."""
  return os.path.join(directory, "mp_compat", module + ".py")


def run_tests(directory, tests, *options):
  """Returns whether the tests in `directory` fail, and the end of their output."""
  command = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=line", *options]
  command += ["-p", "no:cacheprovider", "--examples=5"]
  command += ["tests/{}/test_{}.py".format(*test.rsplit("/", 1)) for test in tests]
  done = subprocess.run(
    command,
    cwd=directory,
    env=dict(os.environ, PYTHONPATH=directory),
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
    check=False,
  )
  if done.returncode not in (0, 1, 2):  # passed, failed, not collected
    raise RuntimeError(done.stdout)
  return done.returncode != 0, done.stdout[-2000:]


def is_killed(mutant, verbose):
  """Returns whether a test of the mutant's module fails with it."""
  with tempfile.TemporaryDirectory() as directory:
    copy_with(directory, mutant)
    failed, output = run_tests(directory, TESTS[mutant.module])
  if verbose:
    print("{}\n{}".format(mutant, output))
  return failed


def is_selected(module: str, names: Sequence[str]) -> bool:
  """Returns whether `names`, of modules and of folders, select `module`; no names
  select all.
  """
  return not names or any((module + "/").startswith(name + "/") for name in names)


def main():
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument(
    "modules",
    nargs="*",
    help="modules or folders whose mutants to run; default: all",
    metavar="module",
  )
  parser.add_argument(
    "-v", "--verbose", action="store_true", help="print the output of the tests"
  )
  arguments = parser.parse_args()
  for name in arguments.modules:
    if not any(is_selected(module, [name]) for module in TESTS):
      parser.error(
        "no mutants of {!r}; there are of: {}".format(name, ", ".join(TESTS))
      )
  modules = [module for module in TESTS if is_selected(module, arguments.modules)]
  tests = sorted({test for module in modules for test in TESTS[module]})
  failed, output = run_tests(ROOT, tests, "--numprocesses=auto")
  if failed:
    sys.exit("The tests fail without any mutant:\n" + output)
  mutants = [mutant for mutant in MUTANTS if mutant.module in modules]
  survivors = 0
  with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
    killed = pool.map(lambda mutant: is_killed(mutant, arguments.verbose), mutants)
    for mutant, dead in zip(tqdm.tqdm(mutants), killed):
      if not dead:
        survivors += 1
        tqdm.tqdm.write("survived: {}".format(mutant))
  print("{} killed, {} survived".format(len(mutants) - survivors, survivors))
  sys.exit(bool(survivors))


if __name__ == "__main__":
  main()
