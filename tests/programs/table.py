"""Tables of training programs, for tests/programs/test_*.py, and functions that train
and compare them.

A program is a function of a `Build`. It builds a graph and returns the train op or a
function `step(session, feed)`. The same program trains with the inner optimizer alone,
with TensorFlow's class and with ours.
"""

import collections
import contextlib
import functools
import re
from typing import Any, Callable, Dict, NamedTuple, Tuple

import numpy as np
import pytest

import mp_compat
from tests import testing
from tests.testing import native
from tests.testing import tf

VERSION = tuple(int(part) for part in tf.VERSION.split(".")[:2])
LOSS_SCALE_VARIABLES = re.compile(
  r"(^|.*/)(current_loss_scale|good_steps|bad_steps)(_\d+)?:0"
)


class Variant(NamedTuple):
  """The settings under which a program is built."""

  control_flow: int
  resource: bool

  def __str__(self):
    return "v{}-{}".format(
      self.control_flow, "resource" if self.resource else "reference"
    )


V2, V1, V1_REFERENCE, V2_REFERENCE = (
  Variant(2, True),
  Variant(1, True),
  Variant(1, False),
  Variant(2, False),
)
ALL = (V2, V1_REFERENCE, V1, V2_REFERENCE)
RESOURCE = (V2, V1)
# branches are functions, which do not accept reference variables
NO_V2_REFERENCE = (V2, V1_REFERENCE, V1)


class Program(NamedTuple):
  """A row of the table."""

  name: str
  build: Callable[["Build"], Any]
  variants: Tuple[Variant, ...] = ALL
  # {reason for skipping: whether this TensorFlow can run the program}
  needs: Dict[str, bool] = {}
  # why TensorFlow's class fails, or None; or a function of the variant that returns
  # this
  tensorflow_fails: Any = None
  limit: Any = None  # the message with which ours fails, for limits in docs/limits.md
  unwrapped_fails: Any = None  # as tensorflow_fails, for the inner optimizer alone
  exact: bool = (
    False  # whether all numbers are dyadic, for compilers that fuse operations
  )
  outside: str = (
    "$^"  # pattern: variables that the program changes in skipped steps, too
  )
  # the nonfinite values in the inputs of skipped steps
  overflow: Tuple[float, ...] = (np.inf, np.nan)
  # whether the program removes the overflow, so that TensorFlow's class does not skip
  hidden: bool = False
  fixed: bool = True  # whether to train with a fixed loss scale, too
  # whether initializers read variables, so that training again needs a new session
  fresh: bool = False
  steps: int = 4
  slow: bool = False  # whether the default selection excludes the program


PROGRAMS = {}  # the rows of all tables, by name


class Table:
  """The programs of one test module."""

  def __init__(self):
    self._names = []

  def add(
    self, name: str, build: Callable[..., Any], *arguments: Any, **options: Any
  ) -> None:
    """Adds the program `build(t, *arguments)` to the table."""
    assert name not in PROGRAMS, name
    PROGRAMS[name] = Program(name, lambda t: build(t, *arguments), **options)
    self._names.append(name)

  def program(self, **options: Any) -> Callable[[Any], Any]:
    """Returns a decorator that adds a function to the table under its name."""

    def decorate(build):
      self.add(build.__name__, build, **options)
      return build

    return decorate

  def make_test(self) -> Callable[..., None]:
    """Returns a test that is parametrized by the rows and their variants.

    Every variant is compared with the unwrapped program. The first variant is also
    compared with TensorFlow's class, and with the unwrapped program under a fixed loss
    scale.
    """
    parameters = []
    for row in (PROGRAMS[name] for name in self._names):
      for variant in row.variants:
        first = variant == row.variants[0]
        comparisons = {"unwrapped": compare_with_reference}
        if first:
          comparisons["tensorflow"] = compare_with_tensorflow
        if first and row.fixed:
          comparisons["fixed"] = functools.partial(compare_with_reference, fixed=True)
        for name, compare in comparisons.items():
          marks = (
            [] if first and name == "unwrapped" and not row.slow else [pytest.mark.slow]
          )
          parameters.append(
            pytest.param(
              compare,
              row,
              variant,
              marks=marks,
              id="{}-{}-{}".format(name, row.name, variant),
            )
          )

    @pytest.mark.parametrize("compare, row, variant", parameters)
    def test_program_trains_with_same_numbers(compare, row, variant):
      for reason, available in row.needs.items():
        if not available:
          pytest.skip("TensorFlow {}.{}: {}".format(*(VERSION + (reason,))))
      with (
        pytest.raises(ValueError, match=row.limit)
        if row.limit
        else contextlib.nullcontext()
      ):
        compare(row, variant)

    return test_program_trains_with_same_numbers


class Build:
  """The inputs, the variables and the optimizer wrapper that a program uses.

  Attributes:
    api: `mp_compat`, TensorFlow's module, or None for the inner optimizer alone.
    resource: whether variables are resources or references.
    graph, initialize, read: the graph in which to train, and functions of a session
      that run the initializers and return {name: value}. A program may replace them.
  """

  def __init__(self, api, fixed, row, variant):
    self.api, self._fixed, self._row = api, fixed, row
    self.resource, self.control_flow = variant.resource, variant.control_flow
    self.graph = tf.get_default_graph()
    self.initialize = lambda sess: sess.run(tf.global_variables_initializer())
    self.read = _read_variables
    self._inputs, self._variables = [], None
    with tf.variable_scope("", use_resource=self.resource):
      self.global_step = tf.train.get_or_create_global_step()
    self.x = self.input(tf.float32, [3], lambda x, flag: x, "x")
    self.flag = self.input(tf.bool, [], lambda x, flag: flag, "flag")

  def input(self, dtype, shape, value, name=None):
    """Makes a placeholder. Every step feeds it with `value(x, flag)`."""
    placeholder = tf.placeholder(dtype, shape, name)
    self._inputs.append((placeholder, value))
    return placeholder

  def feed(self, x, flag):
    return {placeholder: value(x, flag) for placeholder, value in self._inputs}

  def wrap(self, inner=None, loss_scale=None, **ours):
    """Returns the wrapped optimizer; the inner optimizer if there is no API.

    Args:
      inner: the inner optimizer; `MomentumOptimizer(.1, .9)` by default.
      loss_scale: a function of an API that makes a loss scale; by default a dynamic one
        that changes within few steps.
      **ours: further arguments for our class.
    """
    if inner is None:
      inner = (
        tf.train.GradientDescentOptimizer(0.25)
        if self._row.exact
        else tf.train.MomentumOptimizer(0.1, 0.9)
      )
    if self.api is None:
      return inner
    if loss_scale:
      scale = loss_scale(self.api)
    else:
      scale = 128.0 if self._fixed else self.api.DynamicLossScale(2**10, 3)
    return self.api.MixedPrecisionLossScaleOptimizer(
      inner, scale, **(ours if self.api is mp_compat else {})
    )

  @property
  def variables(self):
    """The variables of the model: `w` [3], `table` [6, 2]. The first access makes
    them.
    """
    if self._variables is None:
      divisor = 8 if self._row.exact else 7
      with tf.init_scope(), tf.variable_scope("model", use_resource=self.resource):
        self._variables = [
          tf.get_variable("w", initializer=np.array([1.0, -2.0, 3.0], np.float32)),
          tf.get_variable(
            "table",
            initializer=np.arange(12, dtype=np.float32).reshape([6, 2]) / divisor,
          ),
        ]
    return self._variables

  def loss(self, x=None, sparse=True):
    """Returns a scalar loss; each variable's gradient depends on `x` and on that
    variable only.
    """
    x = self.x if x is None else x
    w, table = self.variables
    rows = tf.gather(table, [1, 4, 1]) if sparse else table[1:4]
    return tf.reduce_sum(x * tf.square(w)) + tf.reduce_sum(
      rows * rows * tf.expand_dims(x, 1)
    )

  def variable(self, name, value, **kwargs):
    """Makes a trainable variable."""
    with tf.variable_scope("", use_resource=self.resource):
      return tf.get_variable(name, initializer=value, **kwargs)


def _read_variables(sess):
  """Returns the value of every variable, on every device."""
  found = collections.OrderedDict()
  for variable in tf.global_variables():
    strategy = getattr(variable, "distribute_strategy", None)
    copies = strategy.experimental_local_results(variable) if strategy else [variable]
    for number, copy in enumerate(copies):
      found[variable.name + (" on replica {}".format(number) if number else "")] = copy
  return dict(zip(found, sess.run(list(found.values()))))


def make_inputs(row):
  """Yields the finite inputs of a program, `(x, flag)` for every step."""
  random = np.random.RandomState(1)
  for step in range(row.steps):
    x = random.choice([-1.0, 1.0, 2.0], 3) if row.exact else random.normal(size=3)
    yield x.astype(np.float32), step % 2 == 0


def make_overflows(row):
  """Yields `(position, (x, flag))` for the steps that must be skipped: the first one,
  and one in the middle.
  """
  for number, value in enumerate(row.overflow):
    x = np.array([1.0, -0.5, 2.0], np.float32)
    x[number % 3] = value
    yield 2 * number, (x, True)


class Run(NamedTuple):
  """The values of all variables before the first step and after every step."""

  clean: Any
  injected: Any  # with inserted steps that overflow; None for the inner optimizer alone


@functools.lru_cache(maxsize=4)  # several comparisons use the same reference
def run(name, variant, api, fixed=False):
  """Builds and trains a program; trains again, from the start, with inserted steps that
  overflow.
  """
  with testing.control_flow(variant.control_flow):
    return train(PROGRAMS[name], variant, api, fixed)


def train(row, variant, api, fixed=False):
  """Builds and trains a program under the current control flow version; see `run`."""
  config = testing.config()
  rewrites = config.graph_options.rewrite_options
  # Grappler takes longer than training. The other variants train with it.
  rewrites.disable_meta_optimizer = variant == row.variants[0]
  # These rewrites multiply constants in advance, as in .1 * (2 * w * x), if no loss
  # scale is between them.
  rewrites.constant_folding = rewrites.arithmetic_optimization = 2  # RewriterConfig.OFF
  with tf.Graph().as_default():
    built = Build(api, fixed, row, variant)
    trained = row.build(built)
    step = trained if callable(trained) else lambda sess, feed: sess.run(trained, feed)
    clean = list(make_inputs(row))
    injected = list(clean)
    for position, overflow in make_overflows(row):
      injected.insert(position, overflow)

    def history(sess, feeds):
      built.initialize(sess)
      yield built.read(sess)
      for x, flag in feeds:
        step(sess, built.feed(x, flag))
        yield built.read(sess)

    with built.graph.as_default(), tf.Session(graph=built.graph, config=config) as sess:
      result = Run(list(history(sess, clean)), None)
      if not api or not row.overflow:
        return result
      with (
        tf.Session(graph=built.graph, config=config)
        if row.fresh
        else contextlib.nullcontext(sess)
      ) as again:
        return result._replace(injected=list(history(again, injected)))


def remove_loss_scale(history):
  """Returns the same history without the loss scale's own variables."""
  return [
    {
      name: value
      for name, value in values.items()
      if not LOSS_SCALE_VARIABLES.match(name)
    }
    for values in history
  ]


def assert_overflows_change_nothing(row, result):
  """Asserts that skipped steps change only the loss scale, and that the other steps
  train as without skipped steps.
  """
  outside = re.compile(row.outside)

  def inner(history):
    return [
      {name: values[name] for name in values if not outside.match(name)}
      for values in remove_loss_scale(history)
    ]

  skipped = [position for position, _ in make_overflows(row)]
  for position in skipped:
    testing.assert_same(
      inner([result.injected[position]]), inner([result.injected[position + 1]])
    )
    scales = [
      name for name in result.injected[position] if "current_loss_scale" in name
    ]
    assert not scales or any(
      result.injected[position + 1][name] < result.injected[position][name]
      for name in scales
    )
  testing.assert_same(
    inner(
      [
        values
        for number, values in enumerate(result.injected)
        if number - 1 not in skipped
      ]
    ),
    inner(result.clean),
  )


def fails_up_to(version, reason):
  """Returns a `tensorflow_fails` for a program that fails with TensorFlow's class up to
  a version of TensorFlow.
  """
  return reason if VERSION <= version else None


def assert_trained(history):
  """Asserts that training changed a variable, so that comparisons are meaningful."""
  changed = [
    name
    for name in history[0]
    if history[0][name].tobytes() != history[-1][name].tobytes()
  ]
  assert any(
    not name.startswith("global_step") and not LOSS_SCALE_VARIABLES.match(name)
    for name in changed
  ), changed


def resolve_reason(reason, variant):
  """Returns the reason for a variant, or None."""
  return reason(variant) if callable(reason) else reason


def compare_with_reference(row, variant, fixed=False):
  """Asserts that our class trains a program with the same numbers, and that it skips
  the steps that overflow.

  The reference is the inner optimizer alone, or TensorFlow's class if the inner
  optimizer fails.
  """
  fails = resolve_reason(row.unwrapped_fails, variant)
  rename = remove_conditional_scopes if fails else list
  reference = rename(
    remove_loss_scale(run(row.name, variant, native if fails else None).clean)
  )
  assert_trained(reference)
  ours = run(row.name, variant, mp_compat, fixed)
  testing.assert_same(rename(remove_loss_scale(ours.clean)), reference)
  if row.overflow:
    assert_overflows_change_nothing(row, ours)


def compare_with_tensorflow(row, variant):
  """Asserts that TensorFlow's class trains with the same numbers, or that it fails if
  the row says so.
  """
  fails = resolve_reason(row.tensorflow_fails, variant)
  ours = run(row.name, variant, mp_compat)
  with pytest.raises(Exception) if fails else contextlib.nullcontext():
    theirs = run(row.name, variant, native)
    testing.assert_same(
      remove_conditional_scopes(ours.clean), remove_conditional_scopes(theirs.clean)
    )
    if row.overflow and not row.hidden:
      testing.assert_same(
        remove_conditional_scopes(ours.injected),
        remove_conditional_scopes(theirs.injected),
      )


def remove_conditional_scopes(history):
  """Returns the same history without the scopes of conditionals in the variables'
  names.
  """
  return [
    {re.sub(r"(^|/)cond(_\d+)?/", r"\1", name): value for name, value in values.items()}
    for values in history
  ]
