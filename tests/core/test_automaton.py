"""Property tests: loss scale variables, the pure update rule and TensorFlow's classes
have equal states at every step.

Each example is a rule and a history of finite and non-finite steps. One `tf.while_loop`
updates all implementations over the history. The pure rule is evaluated in NumPy's
float32.
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
from mp_compat.core import arguments
from mp_compat.core import update_rule
from tests import testing
from tests.testing import native
from tests.testing import tf

MAX_STEPS = 4000
FEW_EXAMPLES = hypothesis.settings(max_examples=6)

powers_of_two = st.integers(-8, 126).map(lambda exponent: 2.0**exponent)
positive = st.floats(2.0**-8, 2.0**126, width=32)
# TensorFlow's classes raise a smaller scale to 1
at_least_1 = st.floats(1.0, 2.0**126, width=32)
factors = st.one_of(
  st.sampled_from([2.0, 3.0, 1.5, 10.0, 256.0]), st.floats(1.0009765625, 1e4, width=32)
)
counts = st.one_of(st.integers(1, 6), st.integers(1, 3000))


@st.composite
def histories(draw):
  """Draws a history, bool [steps]: segments of finite steps, of overflows, or of both
  at random.
  """
  overflow_rates, lengths = (
    st.sampled_from([0.0, 1.0, 0.5, 0.02]),
    st.one_of(st.integers(1, 20), st.integers(1, 4000)),
  )
  segments = draw(st.lists(st.tuples(overflow_rates, lengths), min_size=1, max_size=12))
  random = np.random.RandomState(draw(st.integers(0, 2**16)))
  return np.concatenate(
    [random.random_sample(length) >= overflows for overflows, length in segments]
  )[:MAX_STEPS]


@st.composite
def rules(draw):
  """Draws all arguments of DynamicLossScale; in half of the rules, scales and factors
  are powers of two.
  """
  sizes, by = draw(
    st.sampled_from(
      [(powers_of_two, st.sampled_from([2.0, 4.0, 16.0])), (positive, factors)]
    )
  )
  floor, initial, ceiling = sorted(draw(st.tuples(sizes, sizes, sizes)))
  return dict(
    initial_loss_scale=initial,
    increment_period=draw(counts),
    multiplier=draw(by),
    backoff=draw(by),
    overflow_tolerance=draw(st.integers(1, 4)),
    min_loss_scale=floor,
    max_loss_scale=draw(st.sampled_from([arguments.LARGEST_SCALE, ceiling])),
  )


def run_history(history, implementations, sessions=1):
  """Updates implementations over a history. Returns for each a float64 array [steps,
  variables] of its states.

  Args:
    history: bool [steps], whether the gradients of a step are finite.
    implementations: for each, its variables and a function that builds the update op
      for a gradient.
    sessions: number of sessions over which the history is split. Each restores the
      checkpoint of the one before.
  """
  finite = tf.placeholder(tf.bool, [None])
  steps = tf.size(finite)

  def body(i, *all_states):
    gradient = tf.where_v2(
      finite[i], 1.0, [math.inf, -math.inf, math.nan][len(history) % 3]
    )
    with tf.control_dependencies([update(gradient) for _, update in implementations]):
      current = [
        tf.stack([tf.cast(variable.read_value(), tf.float64) for variable in variables])
        for variables, _ in implementations
      ]
    with tf.control_dependencies(current):
      return [i + 1] + [
        states.write(i, state) for states, state in zip(all_states, current)
      ]

  arrays = [
    tf.TensorArray(tf.float64, steps, element_shape=[len(variables)])
    for variables, _ in implementations
  ]
  _, *arrays = tf.while_loop(lambda i, *_: i < steps, body, [0] + arrays)
  all_states, parts = [array.stack() for array in arrays], []
  # Constant folding would turn x / 3 into x * (1 / 3), which NumPy does not.
  config = tf.ConfigProto(
    inter_op_parallelism_threads=1, intra_op_parallelism_threads=1
  )
  config.graph_options.rewrite_options.constant_folding = 2  # RewriterConfig.OFF
  saver = tf.train.Saver()
  with tempfile.TemporaryDirectory() as directory:
    checkpoint = os.path.join(directory, "model")
    for part in np.array_split(history, sessions):
      with tf.Session(config=config) as sess:
        if parts:
          saver.restore(sess, checkpoint)
        else:
          sess.run(tf.global_variables_initializer())
        parts.append(sess.run(all_states, {finite: part}))
        if sessions > 1:
          saver.save(sess, checkpoint)
  return [np.concatenate(states) for states in zip(*parts)]


def implementation(loss_scale, variables=None):
  """Returns the variables of a loss scale and a function that builds its update op for
  a gradient.
  """
  return variables or loss_scale.variables(), lambda gradient: loss_scale.update(
    [gradient, None]
  )[0]


def states_of_rule(history, rule, state, columns):
  """Returns the states, float64 [steps, columns], that the pure rule computes in
  float32 for a history.
  """
  rule = rule._replace(
    **{
      name: np.float32(value)
      for name, value in rule._asdict().items()
      if isinstance(value, float)
    }
  )
  state, states = update_rule.State(np.float32(state), 0, 0), []
  with np.errstate(over="ignore"):
    for finite in history.tolist():
      state = update_rule.next_state(state, finite, rule)
      states.append(state[:columns])
  return np.array(states, np.float64)


def assert_same_states(states, reference):
  """Asserts that two arrays of states are equal, and otherwise reports the first
  difference.
  """
  different = np.flatnonzero((states != reference).any(axis=1))
  assert not different.size, "step {}: {} and {}".format(
    different[0], states[different[0]], reference[different[0]]
  )


def usable_steps(states):
  """Returns a bool mask of the steps before the scale exceeds LARGEST_SCALE, as it can
  in TensorFlow's classes.
  """
  return np.logical_and.accumulate(states[:, 0] <= arguments.LARGEST_SCALE)


def check_against_rule(history, arguments, version):
  """Compares DynamicLossScale with the pure rule. Returns its states, float64 [steps,
  variables].
  """
  with tf.Graph().as_default(), testing.control_flow(version):
    loss_scale = mp_compat.DynamicLossScale(**arguments)
    (states,) = run_history(history, [implementation(loss_scale)])
  names = "increment_period multiplier backoff overflow_tolerance min_loss_scale max_loss_scale".split()
  rule = update_rule.Rule(*[getattr(loss_scale, name) for name in names])
  assert_same_states(
    states,
    states_of_rule(history, rule, loss_scale.initial_loss_scale, states.shape[1]),
  )
  return states


def check_against_tensorflow(history, initial, period, multiplier):
  """Compares DynamicLossScale with TensorFlow's class. Returns the number of compared
  steps.
  """
  with tf.Graph().as_default(), testing.control_flow(1):
    ours, theirs = [
      api.DynamicLossScale(initial, period, multiplier) for api in (mp_compat, native)
    ]
    states, reference = run_history(
      history,
      [
        implementation(ours),
        implementation(theirs, [theirs._current_loss_scale, theirs._num_good_steps]),
      ],
    )
  compared = usable_steps(reference)
  assert_same_states(states[compared], reference[compared])
  return int(compared.sum())


@FEW_EXAMPLES
@hypothesis.given(histories(), at_least_1, counts, factors)
def test_variables_match_tensorflow_class(history, initial, period, multiplier):
  check_against_tensorflow(history, initial, period, multiplier)


@FEW_EXAMPLES
@hypothesis.given(
  histories(),
  at_least_1,
  counts,
  st.integers(1, 4),
  factors,
  st.floats(2.0**-10, 0.9990234375, width=32),
)
def test_contrib_manager_matches_rule(history, initial, good, bad, up, down):
  arguments = dict(
    init_loss_scale=initial,
    incr_every_n_steps=good,
    decr_every_n_nan_or_inf=bad,
    incr_ratio=up,
    decr_ratio=down,
  )
  makers = [contrib.ExponentialUpdateLossScaleManager]
  if hasattr(testing.tensorflow, "contrib"):
    makers.append(
      testing.tensorflow.contrib.mixed_precision.ExponentialUpdateLossScaleManager
    )
  # contrib's variables are references
  with tf.Graph().as_default(), testing.control_flow(1):
    implementations = []
    for number, make in enumerate(makers):
      with tf.variable_scope("manager_{}".format(number)):
        manager = make(**arguments)
      variables = tf.global_variables("manager_{}/".format(number))
      implementations.append(
        (
          [
            next(v for v in variables if name in v.name)
            for name in ("loss_scale", "good", "bad")
          ],
          lambda gradient, manager=manager: manager.update_loss_scale(
            tf.is_finite(gradient)
          ),
        )
      )
    all_states = run_history(history, implementations)
  rule, ours = (
    update_rule.Rule(good, up, None, bad, 1.0, decrement_ratio=down),
    all_states[0],
  )
  assert_same_states(ours, states_of_rule(history, rule, initial, 3))
  for reference in all_states[1:]:
    assert_same_states(
      ours[usable_steps(reference)], reference[usable_steps(reference)]
    )


@hypothesis.settings(max_examples=10)
@hypothesis.given(histories(), rules(), st.sampled_from([1, 2]))
def test_variables_match_rule(history, arguments, version):
  """They also obey invariants of the rule."""
  states = check_against_rule(history, arguments, version)
  scale, good = states[:, 0], states[:, 1]
  sizes = [
    value
    for name, value in arguments.items()
    if name not in ("increment_period", "overflow_tolerance")
  ]
  if (np.frexp(sizes)[0] == 0.5).all():
    assert (np.frexp(scale)[0] == 0.5).all()
  assert arguments["min_loss_scale"] <= scale.min()
  assert scale.max() <= arguments["max_loss_scale"]
  moved = np.diff(np.append(arguments["initial_loss_scale"], scale))
  assert (moved[history] >= 0).all() and (moved[~history] <= 0).all()
  assert ((0 <= good) & (good < arguments["increment_period"])).all() and not good[
    ~history
  ].any()
  assert not good[moved != 0].any()
  if arguments["overflow_tolerance"] > 1:
    bad = states[:, 2]
    assert ((0 <= bad) & (bad < arguments["overflow_tolerance"])).all() and not bad[
      moved != 0
    ].any()


@FEW_EXAMPLES
@hypothesis.given(histories(), rules(), st.integers(2, 4))
def test_restoring_preserves_scale_history(history, arguments, sessions):
  all_states = []
  for parts in (1, sessions):
    with tf.Graph().as_default():
      all_states += run_history(
        history, [implementation(mp_compat.DynamicLossScale(**arguments))], parts
      )
  assert_same_states(*all_states)


@pytest.mark.slow
@pytest.mark.no_cover
def test_million_steps_match():
  random, steps = np.random.RandomState(0), 0
  while steps < 10**6:
    history = random.random_sample(MAX_STEPS) >= random.choice([0.5, 0.1, 0.01, 0.001])
    period, multiplier = (
      random.choice([1, 2, 10, 100, 2000]),
      random.choice([2.0, 3.0, 1.25, 1.0078125]),
    )
    steps += check_against_tensorflow(
      history, 2.0 ** random.randint(0, 30), int(period), multiplier
    )
    arguments = dict(
      initial_loss_scale=2.0 ** random.randint(0, 30),
      overflow_tolerance=random.randint(1, 4),
    )
    check_against_rule(
      history, dict(arguments, increment_period=int(period), multiplier=multiplier), 1
    )
    steps += MAX_STEPS
