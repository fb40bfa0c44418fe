# SPDX-License-Identifier: Apache-2.0
"""Checks the tests by mutation: puts one defect (a mutant) at a time into the package,
for which a test must fail.

    python tools/mutants.py                          all mutants, on the installed TensorFlow
    python tools/mutants.py training/optimizer -v    the mutants of one module, with the output of the tests
    python tools/mutants.py training                 the mutants of one folder

A mutant replaces one piece of a module's text, for each kind of defect once. It is
killed if one of that module's tests (`TESTS`) fails. The exit status is 1 if a mutant
survives, or if the tests fail without a mutant.
"""

import argparse
import concurrent.futures
import os
import re
import shutil
import subprocess
import sys
import tempfile
from typing import Sequence

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
  "training/step": (
    "training/finite_reducer training/shared_loss_scale training/gradient_accumulation "
    "training/skipped_ops monitoring/reports training/threads training/optimizer "
    "equivalence/tensorflow_defects training/eager"
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

MUTANTS = [
  # module, text, replacement
  ("graph/gate", "return loop is None or loop.pivot.op in new", "return False"),
  ("graph/gate", "return loop is None or loop.pivot.op in new", "return True"),
  ("graph/gate", "must_wait = effects.changing(needed, graph)", "must_wait = set()"),
  ("graph/gate", "op in gated.passed or _waits", "_waits"),
  (
    "graph/gate",
    "graph_internals.replace_input(op, index, tensor.op.inputs[0])",
    "pass",
  ),
  ("graph/gate", " or op in gated.merges", ""),
  (
    "graph/control_flow",
    "tf.raw_ops.Merge(inputs=[output]).output for",
    "tf.identity(output) for",
  ),
  ("graph/gate", 'op.type == "ControlTrigger" or ', ""),
  ("graph/gate", "if graph_internals.context_of(graph) is None:", "if True:"),
  ("core/conditional_apply", "[passed_by_key[key] for key in keys]", "passed"),
  ("training/step", "readable.own | readable.earlier.results", "readable.own"),
  ("graph/gate", " and contexts.loop_around_inputs(op) is frame:", ":"),
  (
    "graph/gate",
    "op.type in calls if waits else op in must_wait",
    "not waits and op in must_wait",
  ),
  ("graph/gate", "waiting.issuperset(read)", "not waiting.isdisjoint(read)"),
  ("graph/gate", "(reads.pop(), None)", "(reads[-1], None)"),
  ("graph/gate", "if its is not predicate", ""),
  ("graph/gate", "if op not in new]", "]"),
  ("graph/gate", "read = [_op_of(end) for end in ends]", "read = []"),
  ("graph/gate", "found = set(skipped)", "return skipped"),
  ("graph/gate", "results + summaries + update_ops", "results + update_ops"),
  ("graph/gate", "+ summaries + update_ops", "+ summaries"),
  ("graph/gate", "if not runs_always and not found.isdisjoint(reads):", "if False:"),
  ("graph/effects", "op_type in _PASSING or ", ""),
  (
    "graph/effects",
    "return any(argument.is_ref for argument in definition.input_arg)",
    "return False",
  ),
  ("graph/effects", " or _runs_dataset(called.op):", ":"),
  (
    "graph/effects",
    "definition is None or _runs_dataset(op_type)",
    "definition is None",
  ),
  ("graph/effects", 'op.type == "PrintV2" or', ""),
  ("graph/effects", "called is None or _of_type(called)", "True"),
  ("graph/effects", "pending += _function_names(called, graph)", "pass"),
  ("graph/effects", "_takes_functions(op_type) or graph", "graph"),
  ("graph/effects", " or op_type.startswith(_OF_ONE_RUN)", ""),
  (
    "graph/dead_tensors",
    "return common | {_Condition(merge, None, None)}",
    "return common",
  ),
  ("graph/dead_tensors", "return found[tensor.op] | {", "return found[tensor.op] or {"),
  (
    "graph/dead_tensors",
    "tf.control_dependencies([decided])",
    "tf.control_dependencies([])",
  ),
  ("graph/graphs", "graph is None and init_scopes.is_eager_by_mistake()", "False"),
  (
    "graph/graphs",
    "if graph is not None and tf.executing_eagerly():",
    "if False:",
  ),
  (
    "graph/graphs",
    "if graph is None or graph is default:",
    "if True:",
  ),
  ("graph/runs", " and element.name not in fed", ""),
  ("graph/op_names", " + reserved.scope + inner", ' + reserved.given + "/" + inner'),
  ("graph/op_names", " or not current.startswith(", " or current.startswith("),
  ("core/conditional_apply", "{reopened: merge_scope}", "{}"),
  ("core/conditional_apply", "replaced[after.op.name] = before.op.name", "pass"),
  (
    "core/conditional_apply",
    "scopes = lineage.unscaled_names(distinct)",
    "scopes = [tensor.op.name for tensor in values]",
  ),
  ("core/conditional_apply", "if op_names.name_scope() == name:", "if True:"),
  (
    "core/update_rule",
    "good_steps >= rule.increment_period",
    "good_steps > rule.increment_period",
  ),
  ("core/update_rule", "product <= rule.ceiling", "product < rule.ceiling"),
  ("core/arguments", "LARGEST_SCALE = 2.0**126", "LARGEST_SCALE = 2.0**127"),
  ("core/update_rule", "operations.maximum(lower, floor)", "lower"),
  ("core/update_rule", "select(grow, grown, state.scale)", "grown()"),
  (
    "core/update_rule",
    "select(grow, 0, good_steps), 0)",
    "select(grow, 0, good_steps), state.good_steps)",
  ),
  ("core/update_rule", "select(grow, 0, state.bad_steps)", "0"),
  (
    "core/naming_schemes",
    "scheme.state_names() if found else scheme.signature_names()",
    "scheme.signature_names()",
  ),
  ("core/matching", 'or found_scopes == [""]', ""),
  ("core/translation", "if source and target in result:", "if False:"),
  ("core/matching", "    if len(members) != len(others[key]):\n", "    if False:\n"),
  ("core/matching", " or not is_ordered(others[key])", ""),
  ("core/matching", "if is_known or not _are_copies", "if not _are_copies"),
  (
    "core/matching",
    "if unused and is_complete and have_equal_values(sources):",
    "if unused and is_complete:",
  ),
  ("core/matching", "bool(fits) or len(found) >= len(members)", "True"),
  ("core/matching", " and not _may_have_lost_scope(members, found)", ""),
  (
    "core/matching",
    "return _have_conditionals(part) == _have_conditionals(whole)",
    "return True",
  ),
  ("core/naming_schemes", 'return Form("", 0)', "return alone"),
  ("core/translation", "    if is_same:\n      return own_names\n", ""),
  (
    "core/gradients",
    "return loss * tf.cast(scale, dtype)",
    "return loss / tf.cast(scale, dtype)",
  ),
  ("core/gradients", "1 / tf.cast(scale, dtype)", "tf.cast(1 / scale, dtype)"),
  (
    "core/gradients",
    'tf.where_v2(finite, 0.0, float("nan"))',
    "tf.where_v2(finite, 0.0, 0.0)",
  ),
  (
    "core/gradients",
    "norm = control_flow.cond(tf.is_finite(norm), lambda: norm, norm_of_large)",
    "pass",
  ),
  ("core/gradients", "if dtype not in _DTYPES:", "if False:"),
  ("core/gradients", 'hasattr(grad[1], "assign")', "False"),
  ("core/variable_scope", "[contexts.tensor_key(cast)] = variable", ""),
  ("core/variable_scope", "list(variable) if is_partitioned else ", ""),
  ("core/variable_scope", "if variables is values:", "if False:"),
  ("core/variable_scope", "if not isinstance(value, tf.Tensor):", "if False:"),
  ("core/lineage", '["Cast", "Identity"', '["Cast", "Mul", "Identity"'),
  (
    "core/lineage",
    "return [value for value in inputs if value.dtype.is_floating]",
    "return []",
  ),
  ("core/lineage", " or not tensor.dtype.is_floating:", ":"),
  ("graph/contexts", "return inputs[:1]\n  return inputs", "return inputs[:1]"),
  ("graph/contexts", "return inputs[:1]\n", "return inputs\n"),
  ("core/lineage", "if check_computed and is_readable and", "if check_computed and"),
  ("core/lineage", "if check_computed and is_readable", "if is_readable"),
  ("core/lineage", "if sums.control_inputs or squares.control_inputs:", "if False:"),
  ("core/lineage", ' and sums.inputs[1].op.type == "Const"', ""),
  ("core/lineage", "if is_square and first", "if first"),
  ("monitoring/dataflow", 'if tensor.op.type == "StopGradient":', "if False:"),
  ("monitoring/dataflow", "value.dtype.size <= tensor.dtype.size", "True"),
  (
    "monitoring/dataflow",
    '_TERM_BY_TERM = ("BiasAddGrad", "Sum")',
    '_TERM_BY_TERM = ("Sum",)',
  ),
  (
    "_tensorflow/optimizers",
    "if name in not_taken and value is defaults",
    "if value is defaults",
  ),
  (
    "_tensorflow/optimizers",
    " and value is defaults[name].default:",
    ":",
  ),
  ("_tensorflow/optimizers", "return hasattr(inner, name)", "return True"),
  (
    "core/finite_check",
    "lambda: _exact(_stack_small(tensors)))",
    "lambda: sums_finite)",
  ),
  (
    "core/finite_check",
    "_sum(tensor) for tensor in summands]",
    "_sum(tensor) for tensor in summands[:1]]",
  ),
  (
    "core/finite_check",
    "for group in _groups_to_check(tensors, computed):",
    "for group in _groups_to_check(tensors, computed)[:1]:",
  ),
  (
    "core/finite_check",
    "if sums_of_squares and not ops.is_fast_math():",
    "if sums_of_squares:",
  ),
  ("core/finite_check", "_SMALL = 2**16", "_SMALL = 2**20"),
  ("core/distribute", "strategy.num_replicas_in_sync)", "1)"),
  ("core/distribute", "tf.distribute.ReduceOp.SUM", "tf.distribute.ReduceOp.MEAN"),
  (
    "core/distribute",
    "check_supported(by_replica)\n  if tf.distribute.in_cross_replica_context():",
    "check_supported(by_replica)\n  if False:",
  ),
  ("core/loss_scale", "__func__ is FiniteLossScale.update", "__func__ is None"),
  ("core/loss_scale", " + lineage.trace(converted).hidden_values", ""),
  (
    "core/loss_scale",
    "if graph is None or graph._get_control_flow_context() is None:",
    "if True:",
  ),
  (
    "core/loss_scale",
    "if not isinstance(scale, FixedLossScale):",
    "if False:",
  ),
  (
    "core/loss_scale",
    "trainable=False, use_resource=True",
    "trainable=True, use_resource=True",
  ),
  (
    "core/loss_scale",
    "with graphs.init_scope(), tf.name_scope(None):",
    "with graphs.init_scope():",
  ),
  ("core/loss_scale", "if value != default", "if True"),
  (
    "core/loss_scale",
    "if self._initial_loss_scale < floor:",
    "if self._initial_loss_scale <= floor:",
  ),
  (
    "monitoring/float16_ops",
    "return _is_variance(dataflow.origin(op.inputs[0]).op)",
    "return False",
  ),
  (
    "monitoring/float16_ops",
    "contexts.tensor_key(first) == contexts.tensor_key(second)",
    "True",
  ),
  ("monitoring/dataflow", " if op in executed]", "]"),
  ("monitoring/float32_ops", " if source.kind == lowest)", ")"),
  (
    "monitoring/float32_ops",
    "found[op] = sources\n        is_complete = False",
    "found[op] = sources",
  ),
  ("monitoring/float32_ops", " in (tf.float32, tf.variant)", " in (tf.float32,)"),
  ("monitoring/float32_ops", '"EmptyTensorList", "TensorArrayV3"', '"EmptyTensorList"'),
  (
    "monitoring/gradient_ranges",
    "if contexts.is_in_branches_only(each.scaled.op):",
    "if True:",
  ),
  (
    "monitoring/gradient_ranges",
    "_LARGEST_CANCELLATION = 2.0**-7",
    "_LARGEST_CANCELLATION = 1.0",
  ),
  ("monitoring/gradient_ranges", "/ total\n  by_chance", "* 0.0\n  by_chance"),
  ("monitoring/gradient_ranges", " & (terms > 0.0)", ""),
  ("monitoring/gradient_ranges", " or is_behind_loss", " or True"),
  (
    "monitoring/gradient_ranges",
    "(wanted, [tf.bfloat16], [tf.float32])",
    "(wanted, [tf.float32])",
  ),
  ("monitoring/gradient_ranges", "tf.cast(fraction > 0x7FE000, tf.int32)", "0"),
  ("monitoring/gradient_ranges", "narrowest = min(", "narrowest = max("),
  ("monitoring/gradient_ranges", "not passed and not has_hidden", "not has_hidden"),
  (
    "monitoring/range_history",
    "if below <= tolerated:",
    "if True:",
  ),
  (
    "monitoring/range_history",
    'BFLOAT16 if values["dtype"] == "bfloat16" else FLOAT16',
    "FLOAT16",
  ),
  ("monitoring/range_history", " and kept < FLOAT16.lowest + CUT_OFF", ""),
  ("monitoring/range_history", "doubtful >= max(self._complete, 0)", "doubtful >= 0"),
  ("monitoring/range_history", 'errors="replace"', 'errors="strict"'),
  ("monitoring/range_history", "formats == {BFLOAT16}", "BFLOAT16 in formats"),
  (
    "monitoring/range_history",
    "if is_scaled:\n        self.scale",
    "if True:\n        self.scale",
  ),
  (
    "monitoring/range_history",
    "if bounds.low - bounds.high > worst:",
    "if bounds.low > bounds.high:",
  ),
  (
    "monitoring/range_history",
    'if earlier["step"] < record["step"]]',
    'if earlier["step"] <= record["step"]]',
  ),
  (
    "monitoring/range_history",
    " or len(history.overflows) == len(history.steps):",
    ":",
  ),
  ("monitoring/range_history", "if worst.high < 0:", "if False:"),
  ("monitoring/range_history", "low > 0 or has_overflowed or", "low > 0 or"),
  ("monitoring/range_history", "has_overflowed or bool(vanishing)", "has_overflowed"),
  ("monitoring/range_history", "if shift < SHOWN:", "if False:"),
  ("monitoring/range_history", "if low > 0 and values.get(", "if values.get("),
  ("monitoring/range_history", "    if not is_noise:\n", "    if True:\n"),
  ("monitoring/range_history", "found.append(self.below_skipped)", "pass"),
  (
    "monitoring/range_history",
    " for name in named if name in history.tensors",
    " for name in named",
  ),
  (
    "tools/migrate/decisions",
    "source.enclosing(node, cst.Try)",
    "source.enclosing(node, cst.Try)[:1]",
  ),
  ("tools/ranges_chart", "found.append(min(row, limit))", "found.append(row)"),
  ("tools/ranges_chart", "set(advice.named)", "set(advice.text.split())"),
  (
    "monitoring/ranges_hook",
    "if all(run.computes(item.tensor) for item in self._report.measured.values()):",
    "if True:",
  ),
  (
    "monitoring/ranges_hook",
    "until_next = min(until_next, _STEPS_AFTER_OVERFLOW)",
    "pass",
  ),
  (
    "monitoring/ranges_hook",
    "if self._history.is_smallest_overflow(scale):",
    "if False:",
  ),
  ("monitoring/ranges_hook", "if self._history.run != self._run:", "if False:"),
  ("keras/keras2", "functools.partial(tf.logical_and, finite_before)", "None"),
  ("keras/keras2", "return aggregated + missing", "return aggregated"),
  ("keras/keras2", "tf.as_dtype(variable.dtype).base_dtype", "None"),
  ("keras/keras2", "if keras_features.BUILDS_WHEN_APPLYING:", "if False:"),
  ("keras/keras3", "if outer.has_unscaled:", "if False:"),
  ("keras/keras3", "if outer.divides_others:", "if False:"),
  ("keras/keras3", 'if self._overrides("apply", Keras3Mixin):', "if False:"),
  ("keras/keras3", "self._scaled(grads, variables)", "grads"),
  ("keras/keras3", "which(known.get(id(grad)) is grad for grad in present)", "False"),
  ("keras/keras3", '"inner_optimizer" in names', "True"),
  ("keras/keras3", "functions or [graphs.default_graph()]", "[graphs.default_graph()]"),
  (
    "keras/loss_scale_optimizer",
    "LossScaleOptimizer.get_scaled_loss(self, loss())",
    "self.get_scaled_loss(loss())",
  ),
  (
    "keras/loss_scale_optimizer",
    "if identifier is None or is_dynamic:",
    "if identifier is None:",
  ),
  ("keras/loss_scale_optimizer", "variable.assign(value)", "pass"),
  ("keras/loss_scale_optimizer", "scale = self.loss_scale", "scale = self._loss_scale"),
  ("keras/optimizer_kinds", "metaclass(name, (combined,), attributes)", "combined"),
  ("monitoring/hooks", "elif self._steps.may_still_fall()", "elif False"),
  ("monitoring/hooks", "if reports.is_run_by_queue(step):", "if False:"),
  ("monitoring/hooks", " if run.computes(each.tensor)]", "]"),
  ("monitoring/hooks", " + native.FIXED_LOSS_SCALES", ""),
  ("monitoring/stall", " or op.type in dataflow.HIDING", ""),
  (
    "monitoring/stall",
    "dead_tensors.zeros_if_dead(tensors)",
    "tensors",
  ),
  ("monitoring/stall", " if contexts.tensor_key(each) not in finite", ""),
  ("monitoring/stall", '("gradient", "loss")', '("loss",)'),
  ("monitoring/nonfinite_ops", " & ~is_finite(exact)", ""),
  ("monitoring/nonfinite_ops", "exact - difference]", "exact]"),
  ("monitoring/nonfinite_ops", "too_short = middle", "long_enough = middle"),
  (
    "monitoring/recomputation",
    "attribute.type = _wider_enum(attribute.type, dtype)",
    "pass",
  ),
  ("monitoring/remedies", "  if largest > _LARGEST_FLOAT32:", "  if False:"),
  ("monitoring/remedies", " - failure.backward or computing", ""),
  ("monitoring/step_counter", "bool(self._changes) and self._written", "self._written"),
  ("monitoring/step_counter", " or steps > 1", ""),
  (
    "monitoring/step_counter",
    "    if attempted is not None or self._is",
    "    if self._is",
  ),
  ("monitoring/hooks", "self._steps.restart()", "pass"),
  ("monitoring/step_counter", "self._is_stall_reported = False\n    is_due", "is_due"),
  ("monitoring/stall", "first = min(products", "first = max(products"),
  (
    "_tensorflow/event_files",
    "except Exception as error:",
    "except OSError as error:",
  ),
  ("_tensorflow/event_files", ", filename_suffix=suffix", ""),
  (
    "training/step",
    "zeros_if_dead(traced.hidden_values)",
    "zeros_if_dead([])",
  ),
  ("training/step", "reducer is not None or _may", "False and _may"),
  ("training/step", "tf.reduce_all(tf.stack(finite))", "finite[0]"),
  ("training/step", "if settings.use_locking:", "if False:"),
  (
    "training/step",
    "tf.logical_and(condition, finite)",
    "tf.logical_or(condition, finite)",
  ),
  (
    "training/step",
    "tf.get_collection_ref(tf.GraphKeys.TRAIN_OP)[:] = others + [train_op]",
    "pass",
  ),
  ("training/step", "tf.logical_or(should_apply, tf.logical_not(all_finite))", "True"),
  ("training/step", "lineage.cut, grads", "list, grads"),
  ("training/optimizer", "settings.skip_nonfinite or ", ""),
  ("training/step", "reduced.dtype != tf.bool or", "False and"),
  ("training/step", "    stacked = reduced\n", ""),
  (
    "training/step",
    "for optimizer in optimizers_of_replicas:",
    "for optimizer in optimizers_of_replicas[:1]:",
  ),
  (
    "training/step",
    "tf.logical_or(should_apply, tf.logical_not(all_finite))",
    "should_apply",
  ),
  ("training/gradient_accumulation", "[tf.group(applied, *read)]", "[applied]"),
  (
    "training/step",
    '_mp_compat_settings, skip="each"',
    '_mp_compat_settings, skip="all"',
  ),
  ("training/gradient_accumulation", 'if self._skip == "window":', "if False:"),
  (
    "training/gradient_accumulation",
    "tf.equal(window.overflow_count.read_value(), 0)",
    "tf.constant(True)",
  ),
  (
    "training/shared_loss_scale",
    "tf.reduce_any(tf.stack(decision.apply))",
    "tf.reduce_all(tf.stack(decision.apply))",
  ),
  (
    "training/shared_loss_scale",
    "or opt.loss_scale is not optimizers[0].loss_scale",
    "",
  ),
  (
    "training/shared_loss_scale",
    "step.set_accumulator_steps(lineages, global_step, counted)",
    "None",
  ),
  ("training/step", "should_apply = gradients.readable(should_apply)", "pass"),
  (
    "training/optimizer",
    "if isinstance(layer, tf.train.SyncReplicasOptimizer)",
    "if False",
  ),
  ("training/optimizer", "scales = self._state_in(graph).scales", "scales = []"),
  ("training/optimizer", "if state.has_unscaled:", "if False:"),
  ("training/optimizer", "elif is_behind_scale is not None:", "else:"),
  ("training/optimizer", "& _ops_behind(self._scale())", ""),
  ("training/optimizer", "shared |= constants", "pass"),
  ("training/optimizer", "any(op.graph not in enclosing for op in constants)", "False"),
  ("training/optimizer", "scale = tf.identity(scale)", "pass"),
  ("training/step", "any(each.use_locking for", "all(each.use_locking for"),
  (
    "training/gradient_accumulation",
    "return own_device",
    "return grad.device",
  ),
  ("core/lineage", "not is_factor and any(", "False and any("),
  ("core/lineage", "has_computed and argument.shape.rank == 0", "False"),
  ("core/lineage", "pending += reversed(contexts.data_inputs(found))", "pass"),
  (
    "graph/contexts",
    "return all(inner.op is not tensor.op",
    "return True or all(inner.op is not tensor.op",
  ),
  ("training/optimizer", "self.GATE_GRAPH and not tf", "self.GATE_OP and not tf"),
  ("training/optimizer", "lineage.record(grads, (variable.name", "len((variable.name"),
  (
    "training/optimizer",
    "if finite_reducer is not None and not skip_nonfinite",
    "if False",
  ),
  ("training/optimizer", "[trackable.SlotName(name) for name in", "[name for name in"),
  ("tools/compare/recorder", "return zlib.crc32(bits, kind)", "return kind"),
  (
    "tools/compare/recording",
    "return self.starts and not self.step",
    "return self.starts",
  ),
  ("tools/compare/recording", 'return "assignment" in self.kinds', "return False"),
  (
    "tools/compare/report",
    'result["trained"] if result["scaled"] else result["trained_without"]',
    'result["trained"] or result["trained_without"]',
  ),
  ("tools/compare/report", "> arguments.LARGEST_SCALE", "> 0"),
  ("tools/compare/report", " and not _applied_too(found)", ""),
  ("tools/compare/report", "found.has_trained and ", ""),
  ("tools/compare/servers", ' or not _is_local(address.hostname or "")', ""),
  ("tools/compare/step_building", "step.decisions.update(around.decisions)", "pass"),
  (
    "tools/compare/step_building",
    "  open_steps.append(step)\n",
    "  open_steps.append(step)\n  steps.steps_in(graph).append(step)\n",
  ),
  (
    "tools/compare/steps",
    "if op.type != op_type or op in own",
    "if op.type != op_type",
  ),
  ("tools/compare/run_effects", "op not in in_steps and _applies", "_applies"),
  ("tools/compare/run_effects", "    if not step.is_marked:\n", "    if True:\n"),
  (
    "tools/compare/training",
    "execution.variables - self._others",
    "execution.variables",
  ),
  ("tools/compare/training", "if execution.applied:\n", "if execution.is_scaled:\n"),
  ("tools/compare/training", "if execution.is_scaled and", "if"),
  (
    "tools/compare/training",
    "self._counts[STEP] or not change.is_initialization",
    "not change.is_initialization",
  ),
  ("tools/compare/training", "(self.due == START) == change.is", "change.is"),
]


def spans(text, old):
  """Returns where `text` has `old`, however its lines are broken, as a list of (start,
  end).
  """
  pattern = re.sub(r"(\\\s)+", r"\\s+", re.escape(old))
  pattern = re.sub(r"\\([(\[{])", r"\\\1\\s*", pattern)
  pattern = re.sub(r"\\([)\]}])", r",?\\s*\\\1", pattern)
  return [match.span() for match in re.finditer(pattern, text)]


def copy_with(directory, module, old, new):
  """Copies the project to `directory`, with `new` in place of `old` in the module; what
  tests read beside the package, such as goldens, docs and scripts, is linked.
  """
  for name in os.listdir(ROOT):
    if name == "mp_compat":
      shutil.copytree(os.path.join(ROOT, name), os.path.join(directory, name))
    elif not name.startswith(".") and not name.endswith(".egg-info"):
      os.symlink(os.path.join(ROOT, name), os.path.join(directory, name))
  path = os.path.join(directory, "mp_compat", module + ".py")
  with open(path, encoding="utf-8") as file:
    text = file.read()
  found = spans(text, old)
  if len(found) != 1:
    raise ValueError(
      "Expected once in {}.py, but found {} times: {}".format(module, len(found), old)
    )
  start, end = found[0]
  with open(path, "w", encoding="utf-8") as file:
    file.write(text[:start] + new + text[end:])


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


def is_killed(module, old, new, verbose):
  """Returns whether a test of the module fails with `new` in place of `old`."""
  with tempfile.TemporaryDirectory() as directory:
    copy_with(directory, module, old, new)
    failed, output = run_tests(directory, TESTS[module])
  if verbose:
    print("{}: {} -> {}\n{}".format(module, old, new, output))
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
  modules = [module for module in TESTS if is_selected(module, arguments.modules)]
  tests = sorted({test for module in modules for test in TESTS[module]})
  failed, output = run_tests(ROOT, tests, "--numprocesses=auto")
  if failed:
    sys.exit("The tests fail without any mutant:\n" + output)
  mutants = [mutant for mutant in MUTANTS if mutant[0] in modules]
  survivors = 0
  with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
    killed = pool.map(lambda row: is_killed(*row, verbose=arguments.verbose), mutants)
    for row, dead in zip(tqdm.tqdm(mutants), killed):
      if not dead:
        survivors += 1
        tqdm.tqdm.write("survived, {}: {!r} -> {!r}".format(*row))
  print("{} killed, {} survived".format(len(mutants) - survivors, survivors))
  sys.exit(bool(survivors))


if __name__ == "__main__":
  main()
