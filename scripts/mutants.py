"""Checks the tests: each mutant is a defect put into the package, which some test must fail by.

    python scripts/mutants.py                  all of them, on the TensorFlow that is installed
    python scripts/mutants.py optimizer -v     those of one module, with what the tests say

A mutant replaces one piece of a module's text. It is killed if one of that module's tests (`TESTS`) fails. The exit
status is 1 if one survives, or if the tests fail without any.
"""

import argparse
import concurrent.futures
import os
import shutil
import subprocess
import sys
import tempfile

import tqdm

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

# The tests of each module, those that fail fastest first.
TESTS = {
    "update_rule": ["update_rule", "automaton"],
    "gradients": ["gradients", "finite_check", "finite_reducer", "optimizer", "diagnosis", "bad_input"],
    "finite_check": ["finite_check", "optimizer"],
    "distribute": ["distribute", "defects", "optimizer", "bad_input"],
    "loss_scale": ["loss_scale", "bad_input", "finite_reducer", "accumulation", "optimizer", "contrib"],
    "conditional_apply": ["inner_optimizers", "distribute", "optimizer", "wrappers", "programs_unusual"],
    "step": ["finite_reducer", "together", "accumulation", "diagnosis", "threads", "optimizer", "defects"],
    "optimizer": [
        "optimizer", "diagnosis", "checkpoint_objects", "wrappers", "inner_optimizers", "bad_input", "threads",
        "defects", "loss_scale", "programs_unusual"],
}

MUTANTS = [
    # module, text, replacement
    ("update_rule", "good_steps >= rule.increment_period", "good_steps > rule.increment_period"),
    ("update_rule", "bad_steps >= rule.overflow_tolerance", "bad_steps > rule.overflow_tolerance"),
    ("update_rule", "state.good_steps + 1", "state.good_steps + 2"),
    ("update_rule", "product <= rule.ceiling", "product < rule.ceiling"),
    ("update_rule", "operations.minimum(state.scale, rule.ceiling)", "state.scale"),
    ("update_rule", "LARGEST_SCALE = 2. ** 126", "LARGEST_SCALE = 2. ** 127"),
    ("update_rule", "where(state.scale < rule.floor, state.scale, rule.floor)", "rule.floor"),
    ("update_rule", "shrunk = operations.maximum(shrunk, floor)", "del floor"),
    ("update_rule", "state.scale / rule.backoff if", "state.scale / rule.multiplier if"),
    ("update_rule", "where(grow, grown, state.scale)", "grown"),
    ("update_rule", "where(shrink, shrunk, state.scale)", "shrunk"),
    ("update_rule", "where(grow, 0, good_steps), 0)", "where(grow, 0, good_steps), state.good_steps)"),
    ("update_rule", "where(grow, 0, state.bad_steps)", "0"),
    ("update_rule", "where(grow, 0, state.bad_steps)", "state.bad_steps"),
    ("update_rule", "where(shrink, 0, bad_steps)", "bad_steps"),
    ("gradients", "return loss * tf.cast(scale, dtype)", "return loss / tf.cast(scale, dtype)"),
    ("gradients", "wide = tf.float32 if values.dtype in (tf.float16, tf.bfloat16) else values.dtype",
     "wide = tf.float32"),
    ("gradients", "1 / tf.cast(scale, wide)", "tf.cast(1 / scale, wide)"),
    ("gradients", "tf.cast(tf.cast(values, wide) * reciprocals[wide], values.dtype)",
     "values * tf.cast(reciprocals[wide], values.dtype)"),
    ("gradients", "else tf.tuple(grads)", "else grads"),
    ("gradients", "if _key(tensor) not in passed and", "if"),
    ("gradients", "and _compat.is_readable(tensor)]", "]"),
    ("gradients", "tf.where_v2(finite, 0., float(\"nan\"))", "tf.where_v2(finite, 0., 0.)"),
    ("gradients", "ahead.extend(_compat.tensor_inputs(tensor))", "ahead.extend(_compat.tensor_inputs(tensor)[:1])"),
    ("gradients", "found.append(tensor)\n    else:\n      ahead", "found.append(tensor)\n    if True:\n      ahead"),
    ("gradients", "grad.indices, grad.dense_shape)", "grad.indices, None)"),
    ("gradients", "norm = tf.cond(tf.is_finite(norm), lambda: norm, norm_of_large)", "pass"),
    ("gradients", "if any(value.dtype == tf.float64 for value in values) else tf.float32", "if False else tf.float32"),
    ("gradients", "if dtype not in _DTYPES:", "if False:"),
    ("finite_check", "lambda: tf.constant(True), lambda: _exact(stacked)", "lambda: sums_finite, lambda: sums_finite"),
    ("finite_check", "tf.is_finite(tf.stack([_sum(one) for one in stacked]))",
     "tf.is_finite(tf.stack([_sum(one) for one in stacked[:1]]))"),
    ("finite_check", "return tensor.dtype, tuple(tensor.shape.as_list()), tensor.device",
     "return tuple(tensor.shape.as_list()), tensor.device"),
    ("finite_check", "_SMALL = 2 ** 16", "_SMALL = 2 ** 20"),
    ("distribute", "strategy.num_replicas_in_sync)", "1)"),
    ("distribute", "tf.distribute.ReduceOp.SUM", "tf.distribute.ReduceOp.MEAN"),
    ("distribute", "if base.__name__ in _UNSUPPORTED", "if False"),
    ("distribute", "if in_cross_replica_context():\n    raise", "if False:\n    raise"),
    ("distribute", "for value in values if value is not None", "for value in values"),
    ("loss_scale", "is FiniteLossScale.update:", "is None:"),
    ("loss_scale", "  if hidden:\n    grads", "  if False:\n    grads"),
    ("loss_scale", "finite_check.all_finite(gradients.values_of(own) + hidden)",
     "finite_check.all_finite(gradients.values_of(own))"),
    ("loss_scale", "self._add_weight(\"good_steps\", 0, tf.int64)", "self._add_weight(\"good_steps\", 0, tf.int32)"),
    ("loss_scale", "trainable=False, use_resource=True", "trainable=True, use_resource=True"),
    ("loss_scale", "with tf.init_scope(), tf.name_scope(None):", "with tf.init_scope():"),
    ("loss_scale", "if value != default", "if True"),
    ("loss_scale", "numbers.Real) and not isinstance(value, bool)", "numbers.Real)"),
    ("loss_scale", "if not above < number", "if not above <= number"),
    ("loss_scale", "not 1 <= value", "not 0 <= value"),
    ("loss_scale", "if floor > self._initial_loss_scale", "if floor >= self._initial_loss_scale"),
    ("loss_scale", "ceiling < self._initial_loss_scale", "ceiling <= self._initial_loss_scale"),
    ("conditional_apply", "[scope, current[len(around):].strip(\"/\")]", "[current[len(around):].strip(\"/\")]"),
    ("conditional_apply", "entered.append(own_scope)", "pass"),
    ("conditional_apply", "_compat.copied_out_of_branches(creator_kwargs[\"initial_value\"])",
     "creator_kwargs[\"initial_value\"]"),
    ("conditional_apply", "summaries[made_before:] = [", "_ = ["),
    ("step", "if check_computed else []", "if False else []"),
    ("step", "reduced.dtype != tf.bool or", "False and"),
    ("step", "    together = reduced\n", ""),
    ("step", "update(settings, grads, finite, checked.hidden or reducer is not None)",
     "update(settings, grads, finite, False)"),
    ("step", "all_finite = tf.logical_and(finite, finite_before)", "all_finite = finite"),
    ("step", "locked = settings.use_locking and", "locked = False and"),
    ("step", "return finite if should_apply else False", "return should_apply"),
    ("step", "tf.logical_and(should_apply, finite)", "tf.logical_or(should_apply, finite)"),
    ("step", "train_ops + [train_op]", "train_ops"),
    ("step", "[] if scale is None else [scale]", "[]"),
    ("step", "part_to_apply(should_apply, all_finite, finite)", "finite"),
    ("step", "tf.logical_or(should_apply, tf.logical_not(all_finite))", "should_apply"),
    ("optimizer", "self.GATE_GRAPH and not tf", "self.GATE_OP and not tf"),
    ("optimizer", "self._record_computed(grads, [variable.name", "len([variable.name"),
    ("optimizer", "_compat.state_of(self, graph).get(\"scale\")", "None"),
    ("optimizer", "if not self._state.setdefault(\"unscaled_any\", False):", "if False:"),
    ("optimizer", "if finite_reducer is not None and not skip_nonfinite", "if False"),
    ("optimizer", "if isinstance(layer, tf.train.SyncReplicasOptimizer)", "if False"),
    ("optimizer", "settings.skip_nonfinite, settings.check", "True, settings.check"),
    ("optimizer", "[_compat.SlotName(name) for name in self._optimizer.get_slot_names()]",
     "self._optimizer.get_slot_names()"),
    ("optimizer", "if value is not _COMPUTE_DEFAULTS[name]", "if True"),
]


def fails(module, old, new, verbose):
  """Returns whether a test of the module fails with `new` in place of `old`."""
  with tempfile.TemporaryDirectory() as directory:
    # Tests read goldens, docs and scripts next to the package.
    for name in os.listdir(ROOT):
      if name == "mp_compat":
        shutil.copytree(os.path.join(ROOT, name), os.path.join(directory, name))
      elif not name.startswith(".") and not name.endswith(".egg-info"):
        os.symlink(os.path.join(ROOT, name), os.path.join(directory, name))
    path = os.path.join(directory, "mp_compat", module + ".py")
    with open(path, encoding="utf-8") as file:
      text = file.read()
    if text.count(old) != 1:
      raise ValueError("Expected once in {}.py, but found {} times: {}".format(module, text.count(old), old))
    with open(path, "w", encoding="utf-8") as file:
      file.write(text.replace(old, new))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-x", "-q", "--tb=line", "-p", "no:cacheprovider", "--examples=5"]
        + ["tests/test_{}.py".format(test) for test in TESTS[module]],
        cwd=directory, env=dict(os.environ, PYTHONPATH=directory), stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, check=False)
    if done.returncode not in (0, 1, 2):  # passed, failed, not collected
      raise RuntimeError(done.stdout)
    if verbose:
      print("{}: {} -> {}\n{}".format(module, old, new, done.stdout[-2000:]))
  return done.returncode != 0


def main():
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("modules", nargs="*", help="modules whose mutants to run; default: all", metavar="module")
  parser.add_argument("-v", "--verbose", action="store_true", help="print what the tests say")
  arguments = parser.parse_args()
  modules = arguments.modules or list(TESTS)
  # For each module a mutant without a change: its tests must pass.
  healthy = [(module, "from typing import", "from typing import") for module in modules]
  mutants = healthy + [mutant for mutant in MUTANTS if mutant[0] in modules]
  with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
    killed = list(tqdm.tqdm(
        pool.map(lambda mutant: fails(*mutant, verbose=arguments.verbose), mutants), total=len(mutants)))
  for module, sick in zip(modules, killed):
    if sick:
      print("the tests of {} fail without any mutant".format(module))
  survivors = [mutant for mutant, dead in list(zip(mutants, killed))[len(modules):] if not dead]
  for module, old, new in survivors:
    print("survived, {}: {!r} -> {!r}".format(module, old, new))
  print("{} killed, {} survived".format(len(mutants) - len(modules) - len(survivors), len(survivors)))
  sys.exit(bool(survivors) or any(killed[:len(modules)]))


if __name__ == "__main__":
  main()
