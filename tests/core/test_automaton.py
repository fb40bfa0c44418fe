"""The rule, the variables that it moves and TensorFlow's own classes are one automaton, on histories of any kind.

Each example is a rule, a history of finite and non-finite steps, and one `tf.while_loop` that takes every
implementation through it; the rule itself goes the same way on NumPy's float32.
"""

import math
import os
import tempfile

import hypothesis
from hypothesis import strategies as st
import numpy as np
import pytest

import mp_compat
from mp_compat.contrib import mixed_precision as contrib
from mp_compat.core import update_rule
from tests import testing
from tests.testing import native
from tests.testing import tf

LONGEST = 10000
FEW = hypothesis.settings(max_examples=10)

powers_of_two = st.integers(-8, 126).map(lambda exponent: 2. ** exponent)
positive = st.floats(2. ** -8, 2. ** 126, width=32)
at_least_1 = st.floats(1., 2. ** 126, width=32)  # below their floor, TensorFlow's classes jump up to it
factors = st.one_of(st.sampled_from([2., 3., 1.5, 10., 256.]), st.floats(1.0009765625, 1e4, width=32))
counts = st.one_of(st.integers(1, 6), st.integers(1, 3000))


@st.composite
def histories(draw):
  """Stretches of finite steps, of overflows and of both at random."""
  stretches = draw(st.lists(st.tuples(
      st.sampled_from([0., 1., .5, .02]), st.one_of(st.integers(1, 20), st.integers(1, 4000))),
                            min_size=1, max_size=12))
  random = np.random.RandomState(draw(st.integers(0, 2 ** 16)))
  return np.concatenate([random.random_sample(length) >= overflows for overflows, length in stretches])[:LONGEST]


@st.composite
def rules(draw, powers=False):
  """Arguments of DynamicLossScale, all of them."""
  sizes, by = (powers_of_two, st.sampled_from([2., 4., 16.])) if powers else (positive, factors)
  floor, initial, ceiling = sorted(draw(st.tuples(sizes, sizes, sizes)))
  return dict(initial_loss_scale=initial, increment_period=draw(counts), multiplier=draw(by), backoff=draw(by),
              overflow_tolerance=draw(st.integers(1, 4)), min_loss_scale=floor,
              max_loss_scale=draw(st.sampled_from([update_rule.LARGEST_SCALE, ceiling])))


def walk(history, machines, sessions=1):
  """The variables of every machine after every step of a history: for each machine, float64 [steps, variables].

  Args:
    history: bool [steps], whether the gradients of a step are finite.
    machines: for each implementation its variables, and what makes one step from a gradient, in the loop.
    sessions: in how many sessions the history is gone through, with a checkpoint from each to the next.
  """
  finite = tf.placeholder(tf.bool, [None])
  steps = tf.size(finite)

  def body(i, *paths):
    gradient = tf.where_v2(finite[i], 1., [math.inf, -math.inf, math.nan][len(history) % 3])
    updates = [update(gradient) for _, update in machines]
    with tf.control_dependencies(updates):
      now = [tf.stack([tf.cast(variable.read_value(), tf.float64) for variable in variables])
             for variables, _ in machines]
    with tf.control_dependencies(now):
      return [i + 1] + [path.write(i, state) for path, state in zip(paths, now)]

  arrays = [tf.TensorArray(tf.float64, steps, element_shape=[len(variables)]) for variables, _ in machines]
  _, *arrays = tf.while_loop(lambda i, *_: i < steps, body, [0] + arrays)
  paths, parts = [array.stack() for array in arrays], []
  # Constant folding turns x / 3 into x * (1 / 3), in TensorFlow's class as in ours; NumPy does not.
  config = tf.ConfigProto(inter_op_parallelism_threads=1, intra_op_parallelism_threads=1)
  config.graph_options.rewrite_options.constant_folding = 2  # RewriterConfig.OFF
  saver = tf.train.Saver()
  with tempfile.TemporaryDirectory() as directory:
    for part in np.array_split(history, sessions):
      with tf.Session(config=config) as sess:
        if parts:
          saver.restore(sess, os.path.join(directory, "model"))
        else:
          sess.run(tf.global_variables_initializer())
        parts.append(sess.run(paths, {finite: part}))
        if sessions > 1:
          saver.save(sess, os.path.join(directory, "model"))
  return [np.concatenate(path) for path in zip(*parts)]


def machine(loss_scale, variables=None):
  return variables or loss_scale.variables(), lambda gradient: loss_scale.update([gradient, None])[0]


def by_the_rule(history, rule, state, columns):
  """What the pure rule makes of a history, in float32."""
  rule = rule._replace(**{
      name: np.float32(value) for name, value in rule._asdict().items() if isinstance(value, float)})
  state, path = update_rule.State(np.float32(state), 0, 0), []
  with np.errstate(over="ignore"):
    for finite in history.tolist():
      state = update_rule.next_state(state, finite, rule)
      path.append(state[:columns])
  return np.array(path, np.float64)


def assert_the_same(path, reference):
  different = np.flatnonzero((path != reference).any(axis=1))
  assert not different.size, "step {}: {} and {}".format(different[0], path[different[0]], reference[different[0]])


def works(path):
  """The steps of TensorFlow's own classes before their scale is so large that nothing is trained any more."""
  return np.logical_and.accumulate(path[:, 0] <= update_rule.LARGEST_SCALE)


def goes_the_way_of_the_rule(history, arguments, version):
  with tf.Graph().as_default(), testing.control_flow(version):
    loss_scale = mp_compat.DynamicLossScale(**arguments)
    path, = walk(history, [machine(loss_scale)])
  rule = update_rule.Rule(
      loss_scale.increment_period, loss_scale.multiplier, loss_scale.backoff, loss_scale.overflow_tolerance,
      loss_scale.min_loss_scale, loss_scale.max_loss_scale)
  assert_the_same(path, by_the_rule(history, rule, loss_scale.initial_loss_scale, path.shape[1]))
  return path


def goes_the_way_of_tensorflow(history, initial, period, multiplier):
  """Gives how many steps there were to compare."""
  with tf.Graph().as_default(), testing.control_flow(1):
    ours, theirs = [api.DynamicLossScale(initial, period, multiplier) for api in (mp_compat, native)]
    path, reference = walk(
        history, [machine(ours), machine(theirs, [theirs._current_loss_scale, theirs._num_good_steps])])
  compared = works(reference)
  assert_the_same(path[compared], reference[compared])
  return int(compared.sum())


@FEW
@hypothesis.given(histories(), rules(), st.sampled_from([1, 2]))
def test_variables_go_the_way_of_the_pure_rule_whatever_the_rule(history, arguments, version):
  goes_the_way_of_the_rule(history, arguments, version)


@FEW
@hypothesis.given(histories(), at_least_1, counts, factors)
def test_variables_go_the_way_of_tensorflows_class(history, initial, period, multiplier):
  goes_the_way_of_tensorflow(history, initial, period, multiplier)


@FEW
@hypothesis.given(histories(), at_least_1, counts, st.integers(1, 4), factors,
                  st.floats(2. ** -10, .9990234375, width=32))
def test_contribs_manager_goes_the_way_of_the_pure_rule(history, initial, good, bad, up, down):
  arguments = dict(init_loss_scale=initial, incr_every_n_steps=good, decr_every_n_nan_or_inf=bad, incr_ratio=up,
                   decr_ratio=down)
  makers = [contrib.ExponentialUpdateLossScaleManager]
  if hasattr(testing.tensorflow, "contrib"):
    makers.append(testing.tensorflow.contrib.mixed_precision.ExponentialUpdateLossScaleManager)
  with tf.Graph().as_default(), testing.control_flow(1):  # contrib's variables are references
    machines = []
    for number, make in enumerate(makers):
      with tf.variable_scope("manager_{}".format(number)):
        manager = make(**arguments)
      variables = tf.global_variables("manager_{}/".format(number))
      machines.append(([next(v for v in variables if name in v.name) for name in ("loss_scale", "good", "bad")],
                       lambda gradient, manager=manager: manager.update_loss_scale(tf.is_finite(gradient))))
    paths = walk(history, machines)
  rule, ours = update_rule.Rule(good, up, None, bad, 1., decrement_ratio=down), paths[0]
  assert_the_same(ours, by_the_rule(history, rule, initial, 3))
  for reference in paths[1:]:
    assert_the_same(ours[works(reference)], reference[works(reference)])


@FEW
@hypothesis.given(histories(), rules())
def test_a_scale_keeps_its_bounds_its_direction_and_its_counters(history, arguments):
  path = goes_the_way_of_the_rule(history, arguments, 1)
  scale, good = path[:, 0], path[:, 1]
  assert arguments["min_loss_scale"] <= scale.min()
  assert scale.max() <= arguments["max_loss_scale"]
  moved = np.diff(np.append(arguments["initial_loss_scale"], scale))
  assert (moved[history] >= 0).all() and (moved[~history] <= 0).all()
  assert ((0 <= good) & (good < arguments["increment_period"])).all() and not good[~history].any()
  assert not good[moved != 0].any()
  if arguments["overflow_tolerance"] > 1:
    bad = path[:, 2]
    assert ((0 <= bad) & (bad < arguments["overflow_tolerance"])).all() and not bad[moved != 0].any()


@FEW
@hypothesis.given(histories(), rules(powers=True))
def test_powers_of_two_stay_exact_powers_of_two(history, arguments):
  scale = goes_the_way_of_the_rule(history, arguments, 1)[:, 0]
  assert (np.frexp(scale)[0] == .5).all()


@FEW
@hypothesis.given(histories(), rules(), st.integers(2, 4))
def test_checkpoints_on_the_way_change_nothing(history, arguments, sessions):
  paths = []
  for parts in (1, sessions):
    with tf.Graph().as_default():
      paths += walk(history, [machine(mp_compat.DynamicLossScale(**arguments))], parts)
  assert_the_same(*paths)


@pytest.mark.slow
@pytest.mark.no_cover
def test_a_million_steps_go_the_way_of_the_rule_and_of_tensorflow():
  random, steps = np.random.RandomState(0), 0
  while steps < 10 ** 6:
    history = random.random_sample(LONGEST) >= random.choice([.5, .1, .01, .001])
    period, multiplier = random.choice([1, 2, 10, 100, 2000]), random.choice([2., 3., 1.25, 1.0078125])
    steps += goes_the_way_of_tensorflow(history, 2. ** random.randint(0, 30), int(period), multiplier)
    goes_the_way_of_the_rule(history, dict(
        initial_loss_scale=2. ** random.randint(0, 30), increment_period=int(period), multiplier=multiplier,
        overflow_tolerance=random.randint(1, 4)), 1)
    steps += LONGEST
