"""Tests of the hooks in a MonitoredSession: logs, stopping, error messages, variables
and fetches.
"""

import re
from typing import Any, NamedTuple

import numpy as np
import pytest

import mp_compat
from tests import testing
from tests.testing import Optimizer
from tests.testing import sgd
from tests.testing import tf

FINITE, OVERFLOW = [1.0, 2.0], [np.inf, 2.0]


def monitored_session(hooks, **kwargs):
  return tf.train.MonitoredTrainingSession(
    hooks=hooks, log_step_count_steps=None, **kwargs
  )


def run(hooks, train_op, feeds):
  """Runs until the feeds are used or a hook requests a stop. Returns the number of
  runs.
  """
  runs = 0
  with monitored_session(hooks) as sess:
    for feed in feeds:
      if sess.should_stop():
        break
      sess.run(train_op, feed)
      runs += 1
  return runs


class LoggedTraining(testing.Training):
  """Computes the loss in float16, and records the lines that are logged."""

  def __init__(self, loss_scale, monkeypatch):
    super().__init__()
    self.opt = Optimizer(sgd(), loss_scale)
    self.loss = tf.cast(tf.reduce_sum(tf.cast(self.w * self.x, tf.float16)), tf.float32)
    self.train_op = self.opt.minimize(self.loss, self.global_step)
    self.lines = []
    for level in ["info", "warning"]:
      monkeypatch.setattr(
        tf.logging, level, lambda text, *args: self.lines.append(text % args)
      )

  def run(self, hooks, xs):
    return run(hooks, self.train_op, [{self.x: x} for x in xs])


@pytest.fixture(name="make_training")
def _make_training(graph, monkeypatch):
  del graph
  return lambda loss_scale: LoggedTraining(loss_scale, monkeypatch)


@pytest.mark.parametrize("kind", ["float32", "float16", "rewrite", "loop"])
def test_hook_warns_of_float32(kind, make_training):
  training = make_training(8.0)
  opt = Optimizer(sgd(), 8.0)
  loss = training.loss if kind == "float16" else tf.reduce_sum(tf.square(training.w))
  if kind == "loop":
    loss = tf.while_loop(lambda n, x: n < 2, lambda n, x: (n + 1, x * x), [0, loss])[1]
  opt.minimize(loss, name="descent")
  tf.config.optimizer.set_experimental_options(
    {"auto_mixed_precision": kind == "rewrite"}
  )
  try:
    mp_compat.LossScaleHook(opt).begin()
  finally:
    tf.config.optimizer.set_experimental_options({"auto_mixed_precision": False})
  assert [line.split(".")[0] for line in training.lines if "float16" in line] == (
    ["LossScaleHook: the backward pass of descent has no float16 tensor"]
    if kind == "float32"
    else []
  )


def test_hook_logs_changes_and_periods(make_training):
  training = make_training(mp_compat.DynamicLossScale(8.0, 4))
  hook = mp_compat.LossScaleHook(training.opt, every_n_steps=3)
  variables = tf.global_variables() + tf.local_variables()
  training.run([hook], [FINITE, OVERFLOW, FINITE, FINITE, FINITE, FINITE, FINITE])
  assert (hook.attempted, hook.skipped) == (7, 1)
  assert tf.global_variables() + tf.local_variables() == variables
  # SecondOrStepTimer triggers at its first step, then at every third step.
  assert training.lines == [
    "GradientDescent: loss scale 8 after 1 attempted steps: 0 of the last 1 skipped, 0 (0.00%) of all",
    "GradientDescent: loss scale 4 after 2 attempted steps: 1 of the last 1 skipped, 1 (50.00%) of all",
    "GradientDescent: loss scale 4 after 4 attempted steps: 0 of the last 2 skipped, 1 (25.00%) of all",
    "GradientDescent: loss scale 8 after 6 attempted steps: 0 of the last 2 skipped, 1 (16.67%) of all",
    "GradientDescent: loss scale 8 after 7 attempted steps: 0 of the last 1 skipped, 1 (14.29%) of all",
  ]


@pytest.mark.parametrize(
  "period, first",
  [
    (dict(every_n_steps=None), []),
    (dict(every_n_secs=1000.0), ["loss scale 8 after 1 attempted steps"]),
  ],
)
def test_hook_logs_changes_and_end(make_training, period, first):
  training = make_training(mp_compat.DynamicLossScale(8.0, 100))
  training.run(
    [mp_compat.LossScaleHook(training.opt, **period)],
    [FINITE, FINITE, OVERFLOW, FINITE, FINITE],
  )
  logged = [line.split(": ")[1] for line in training.lines]
  assert logged == first + [
    "loss scale 4 after 3 attempted steps",
    "loss scale 4 after 5 attempted steps",
  ]


@pytest.mark.parametrize(
  "loss_scale, kwargs, runs",
  [
    (lambda: "dynamic", dict(max_consecutive_skips=4), 4),
    # 15 steps lower the scale from 2**15 to 1; 10 steps follow at 1
    (lambda: "dynamic", dict(), 25),
    (lambda: mp_compat.DynamicLossScale(2.0, 100), dict(min_scale_patience=3), 4),
    (lambda: 8.0, dict(min_scale_patience=3), 3),
    # 12 steps lower the scale to 1
    (lambda: mp_compat.DynamicLossScale(2.0, 100, overflow_tolerance=12), dict(), 24),
  ],
)
def test_stall_raises_with_diagnosis(make_training, loss_scale, kwargs, runs):
  training = make_training(loss_scale())
  hook = mp_compat.LossScaleHook(training.opt, **kwargs)
  with pytest.raises(mp_compat.LossScaleStalledError) as raised:
    training.run([hook], [FINITE, FINITE] + [OVERFLOW] * 100)
  assert hook.attempted == 2 + runs and hook.skipped == runs
  text = str(raised.value)
  assert (
    "{} steps in a row were skipped".format(runs) in text
    and "the last applied step was attempt 2" in text
  )
  assert re.search(r"w:0: 0 NaN, 1 inf, the largest of the others 2\b", text)
  if runs == 4 and not kwargs.get("min_scale_patience"):
    assert (
      "32768 (attempt 0) -> 16384 (attempt 3) -> 8192 (attempt 4) -> 4096 (attempt 5) "
      "-> 2048 (attempt 6)" in text
    )


def test_applied_step_resets_skip_count(make_training):
  training = make_training(8.0)
  hook = mp_compat.LossScaleHook(
    training.opt, max_consecutive_skips=3, min_scale_patience=3
  )
  assert training.run([hook], [OVERFLOW, OVERFLOW, FINITE] * 5) == 15


def test_stall_can_stop_run(make_training):
  training = make_training(8.0)
  hook = mp_compat.LossScaleHook(training.opt, min_scale_patience=3, on_stall="stop")
  assert training.run([hook], [OVERFLOW] * 50) == 3
  assert (
    "The loss scale of GradientDescent is stalled: 3 steps in a row"
    in training.lines[1]
  )


@pytest.mark.parametrize("kind", ["session", "graph", "same session"])
def test_each_retry_can_stall(make_training, kind):
  """A program that catches the error and tries again does not skip forever."""
  training = make_training(8.0)
  hook = mp_compat.LossScaleHook(training.opt, min_scale_patience=3)
  attempted = []

  def skip(sess, train_op, x):
    with pytest.raises(mp_compat.LossScaleStalledError, match=": 3 steps in a row"):
      for _ in range(9):
        hook.run(sess, train_op, {x: OVERFLOW})
    attempted.append(hook.attempted)

  graph = tf.get_default_graph()
  for _ in range(3):
    with tf.Graph().as_default() if kind == "graph" else graph.as_default():
      train_op, x = training.train_op, training.x
      if kind == "graph":
        x, w = tf.placeholder(tf.float32, [2]), tf.get_variable("w", [2])
        train_op = training.opt.minimize(tf.reduce_sum(w * x))
      hook.begin()
      with testing.initialized_session() as sess:
        for _ in range(2 if kind == "same session" else 1):
          skip(sess, train_op, x)
  assert attempted == list(range(3, hook.attempted + 1, 3))


def test_each_stall_can_log_one_warning(make_training):
  training = make_training(8.0)
  hook = mp_compat.LossScaleHook(
    training.opt, None, min_scale_patience=2, on_stall="warn"
  )
  assert training.run([hook], [OVERFLOW] * 5 + [FINITE] + [OVERFLOW] * 5) == 11
  assert (
    len(
      [
        line
        for line in training.lines
        if "is stalled" in line and "w:0: 0 NaN, 1 inf" in line
      ]
    )
    == 2
  )


def test_fed_tensors_replace_train_op(make_training):
  """A run that feeds a tensor does not execute the ops that compute it."""
  training = make_training(8.0)
  with tf.control_dependencies([training.train_op]):
    after = tf.identity(training.x)
  pair = after, after * 2.0
  hooks = [
    mp_compat.LossScaleHook(training.opt),
    mp_compat.StopAtAttemptHook(training.opt, 1),
  ]
  with monitored_session(hooks) as sess:
    for feed in [
      {after: FINITE},
      {after.name: FINITE},
      {(training.x, after): (np.array(FINITE), np.array(FINITE))},
    ]:
      np.testing.assert_array_equal(sess.run(pair, feed)[1], [2.0, 4.0])
    assert hooks[0].attempted == 0 and not sess.should_stop()
    np.testing.assert_array_equal(sess.run(training.w), [0.0, 0.0])
    sess.run(pair, {training.x: FINITE})
    assert hooks[0].attempted == 1 and sess.should_stop()


def test_report_is_fetched_when_stalling(make_training):
  training = make_training(8.0)
  fetched = []

  class FetchRecorder(mp_compat.LossScaleHook):
    def before_run(self, run_context):
      args = super().before_run(run_context)
      fetched.append(sorted(args.fetches))
      (status,) = args.fetches["statuses"].values()
      assert status.shape == [3]
      return args

  with pytest.raises(mp_compat.LossScaleStalledError):
    training.run([FetchRecorder(training.opt, min_scale_patience=3)], [OVERFLOW] * 9)
  each = ["statuses", "updates"]
  assert fetched == [each, each, ["diagnoses"] + each]


@pytest.mark.usefixtures("graph")
def test_construction_does_not_depend_on_model():
  """The diagnosis of a stall, which few runs need, adds no ops."""
  hidden, added = tf.placeholder(tf.float16, [4, 8]), []
  with tf.variable_scope("", custom_getter=mp_compat.float32_variable_storage_getter):
    for layer in range(9):
      hidden = tf.tanh(
        tf.matmul(hidden, tf.get_variable("w{}".format(layer), [8, 8], tf.float16))
      )
      opt = Optimizer(sgd(), "dynamic")
      opt.minimize(tf.reduce_mean(tf.cast(hidden, tf.float32)))
      before = len(tf.get_default_graph().get_operations())
      mp_compat.LossScaleHook(opt).begin()
      added.append(len(tf.get_default_graph().get_operations()) - before)
  assert max(added) < 30 and len(set(added[1:])) == 1  # the first hook builds constants


@pytest.mark.parametrize("in_graph", [False, True])
def test_hook_observes_plain_session(make_training, in_graph):
  training = make_training(mp_compat.DynamicLossScale(8.0, 3))
  hook = mp_compat.LossScaleHook(
    training.opt, None, min_scale_patience=2, counters_in_graph=in_graph
  )
  with testing.session() as sess, pytest.raises(
    RuntimeError, match=r"LossScaleHook.begin\(\) was not called. .* after minimize"
  ):
    hook.run(sess, training.train_op)
  hook.begin()
  initializer = tf.global_variables_initializer()
  tf.get_default_graph().finalize()
  for counts in [(3, 1), (3, 1) if in_graph else (6, 2)]:
    with testing.session() as sess:
      sess.run(initializer)
      for x in [FINITE, OVERFLOW, FINITE]:
        _, values = hook.run(
          sess, [training.train_op, {"x": training.x}], {training.x: x}
        )
        np.testing.assert_array_equal(values["x"], x)
        assert hook.run(sess, training.loss, {training.x: x}).shape == ()
      np.testing.assert_array_equal(sess.run(training.w), -2 * np.array(FINITE))
      assert (hook.attempted, hook.skipped) == counts
  with testing.session() as sess, pytest.raises(
    mp_compat.LossScaleStalledError, match="w:0: 0 NaN, 1 inf"
  ):
    sess.run(initializer)
    for _ in range(9):
      hook.run(sess, training.train_op, {training.x: OVERFLOW})
  hook.end(sess)
  assert "{} (".format(hook.skipped) in training.lines[-1]


class Broadcast(tf.train.SessionRunHook):
  """Assigns variables when a session is created, as Horovod's
  BroadcastGlobalVariablesHook does.
  """

  def __init__(self, name, value):
    self._name, self._value = name, value

  def begin(self):
    (variable,) = [
      variable for variable in tf.global_variables() if variable.op.name == self._name
    ]
    self._op = variable.assign(self._value).op

  def after_create_session(self, session, coord):
    session.run(self._op)


def test_scale_is_read_after_broadcast(make_training, tmp_path):
  training = make_training(mp_compat.DynamicLossScale(1024.0, 100))
  hook = mp_compat.LossScaleHook(
    training.opt, None, max_consecutive_skips=2, output_dir=str(tmp_path)
  )
  with pytest.raises(
    mp_compat.LossScaleStalledError,
    match=r"The scale went 128 \(attempt 0\) -> 64 \(attempt 1\)",
  ):
    training.run([hook, Broadcast("current_loss_scale", 128.0)], [OVERFLOW] * 9)
  events = testing.events(str(tmp_path))
  assert events["loss_scale_hook/scale"][0] == (0, 128.0) and events[
    "loss_scale_hook/skipped_steps"
  ][-1] == (2, 2.0)


class AbortsOnce(tf.train.SessionRunHook):
  """Makes MonitoredSession create a new session after the first run, as the loss of a
  parameter server does.
  """

  aborted = False

  def after_run(self, run_context, run_values):
    if not self.aborted:
      self.aborted = True
      raise tf.errors.AbortedError(None, None, "")


@pytest.mark.parametrize(
  "in_graph, text",
  [
    (False, "went 8 .* -> 4 .attempt 1. -> 8 .attempt 1."),
    (True, "went 8 .attempt 0. -> 4 .attempt 1. -> 2"),
  ],
)
def test_state_is_read_in_each_session(make_training, in_graph, text):
  """The new session of this run restores nothing, so it begins with no attempts and a
  scale of 8.
  """
  training = make_training(mp_compat.DynamicLossScale(8.0, 100))
  hook = mp_compat.LossScaleHook(
    training.opt, None, max_consecutive_skips=2, counters_in_graph=in_graph
  )
  with pytest.raises(mp_compat.LossScaleStalledError, match=text):
    training.run([hook, AbortsOnce()], [OVERFLOW] * 9)


def test_counts_are_read_after_broadcast(make_training):
  training = make_training(8.0)
  hook = mp_compat.LossScaleHook(training.opt, None, counters_in_graph=True)
  training.run([hook, Broadcast("loss_scale_hook/attempted_steps", 70)], [OVERFLOW])
  assert (
    hook.attempted == 71
    and "after 71 attempted steps: 1 of the last 1 skipped" in training.lines[-1]
  )


def test_graph_counters_are_separate_and_survive_restore(tmp_path):
  for expected in [[(3, 1), (1, 1), (3, 1)], [(6, 2), (2, 2), (6, 2)]]:
    with tf.Graph().as_default():
      training = testing.Training()
      opts = [Optimizer(sgd(), 8.0) for _ in "ab"]
      train_ops = [opt.minimize(training.loss, training.global_step) for opt in opts]
      hooks = [
        mp_compat.LossScaleHook(opt, counters_in_graph=True) for opt in opts + opts[:1]
      ]
      with monitored_session(hooks, checkpoint_dir=str(tmp_path)) as sess:
        for train_op, x in zip(
          [train_ops[0]] * 3 + [train_ops[1]], [FINITE, OVERFLOW, FINITE, OVERFLOW]
        ):
          sess.run(train_op, {training.x: x})
      assert [(hook.attempted, hook.skipped) for hook in hooks] == expected


def test_every_train_op_is_counted(make_training):
  training = make_training(mp_compat.DynamicLossScale(8.0, 100))
  other = training.opt.minimize(2 * training.loss, training.global_step)
  both = tf.group(training.train_op, other)
  hook = mp_compat.LossScaleHook(training.opt, None)
  hooks = [hook, mp_compat.StopAtAttemptHook(training.opt, 7)]
  with monitored_session(hooks) as sess:
    for fetch, x, expected in [
      (training.train_op, FINITE, (1, 0)),
      (other, FINITE, (2, 0)),
      (training.train_op, OVERFLOW, (3, 1)),
      (both, OVERFLOW, (5, 3)),
      (training.loss, FINITE, (5, 3)),
      (both, FINITE, (7, 3)),
    ]:
      assert not sess.should_stop()
      sess.run(fetch, {training.x: x})
      assert (hook.attempted, hook.skipped) == expected
    assert sess.should_stop()


def test_earlier_train_op_stalls(make_training):
  training = make_training(8.0)
  training.opt.minimize(2 * training.loss, training.global_step)
  with pytest.raises(
    mp_compat.LossScaleStalledError,
    match="w:0: 0 NaN, 1 inf, the largest of the others 2",
  ):
    training.run(
      [mp_compat.LossScaleHook(training.opt, min_scale_patience=2)], [OVERFLOW] * 9
    )


def test_hook_logs_if_train_op_never_ran(make_training, tmp_path):
  training = make_training(8.0)
  run(
    [mp_compat.LossScaleHook(training.opt, output_dir=str(tmp_path))], training.w, [{}]
  )
  assert not testing.events(str(tmp_path))
  assert training.lines == [
    "LossScaleHook: no Session run executed the train op GradientDescent."
  ]


@pytest.mark.each_choice
@pytest.mark.parametrize("how", ["branch", "separate runs"])
@pytest.mark.parametrize("overflows, warns", [(4, True), (2, False)])
def test_check_of_the_program_warns(graph, warnings, how, overflows, warns):
  """The program itself skips steps that overflow, so the loss scale never falls."""
  training, opt = testing.Training(), Optimizer(sgd(), mp_compat.DynamicLossScale(8.0))
  pairs = opt.compute_gradients(
    tf.reduce_sum(
      tf.cast(tf.cast(training.w, tf.float16) * 2.0, tf.float32) * training.x
    )
  )
  is_finite = tf.reduce_all(tf.is_finite(pairs[0][0]))
  if how == "branch":
    with testing.control_flow(1):
      train_op = tf.cond(
        tf.placeholder_with_default(is_finite, []),
        lambda: opt.apply_gradients(pairs),
        tf.no_op,
      )
    warnings.clear()  # that of apply_gradients
  else:
    train_op = opt.apply_gradients(pairs)
  with monitored_session(
    [mp_compat.LossScaleHook(opt, max_consecutive_skips=4)]
  ) as sess:
    for x in [FINITE] + [OVERFLOW] * overflows + [FINITE] + [OVERFLOW] * 2:
      if how == "branch" or sess.run(is_finite, {training.x: x}):
        sess.run(train_op, {training.x: x})
  assert len(warnings) == warns and all(
    "LossScaleHook: 4 runs in a row" in line for line in warnings
  )


BAD_ARGUMENTS = [
  (mp_compat.LossScaleHook, dict(output_dir=3), "output_dir must be a path or None"),
  (mp_compat.GradientRangesHook, dict(output_dir=3), "output_dir must be a path or"),
  (mp_compat.GradientRangesHook, dict(dtypes=tf.int32), "must be floating.*int32"),
  (mp_compat.GradientRangesHook, dict(dtypes="half precision"), "must be floating"),
  (mp_compat.GradientRangesHook, dict(dtypes=16), "must be floating, .* but got 16"),
  (
    mp_compat.LossScaleHook,
    dict(counters_in_graph="yes"),
    "one of True, False, but got",
  ),
  (mp_compat.LossScaleHook, dict(optimizer=sgd()), "optimizer must be the Mixed"),
  (mp_compat.GradientRangesHook, dict(optimizer=sgd()), "optimizer must be the Mixed"),
  (
    mp_compat.StopAtAttemptHook,
    dict(optimizer=sgd(), num_attempts=3),
    "optimizer must be the Mixed",
  ),
]
BAD_ARGUMENTS += [
  (mp_compat.LossScaleHook, dict(every_n_steps=n, every_n_secs=5.0), "but got both")
  for n in (99, 100, 101)
]


@pytest.mark.parametrize("make, kwargs, text", BAD_ARGUMENTS)
def test_constructors_refuse_wrong_arguments(make, kwargs, text):
  kwargs = dict(dict(optimizer=Optimizer(sgd(), 8.0)), **kwargs)
  with pytest.raises(ValueError, match=text):
    make(**kwargs)


class Fetched(NamedTuple):
  """A structure to fetch."""

  train: Any
  other: Any


FETCHES = {
  "op": lambda t: t.train_op,
  "name": lambda t: t.train_op.name,
  "list": lambda t: [t.loss, t.train_op],
  "nested": lambda t: [(t.loss, [t.loss, "loss_sum:0"]), {"a": t.w, 0: [t.train_op]}],
  "named tuple": lambda t: Fetched(t.train_op, [t.w, t.sparse]),
  "dependent tensor": lambda t: t.dependent,
  "composite tensor": lambda t: (
    t.loss,
    tf.SparseTensor(t.sparse.indices, t.dependent, t.sparse.dense_shape),
  ),
}


@pytest.mark.parametrize("case", sorted(FETCHES))
def test_attempts_count_only_train_op_runs(make_training, case):
  training = make_training(8.0)
  tf.identity(training.loss, name="loss_sum")
  training.sparse = tf.SparseTensor([[0]], [1.0], [2])
  with tf.control_dependencies([training.train_op]):
    training.dependent = tf.ones([1])
  fetches = FETCHES[case](training)
  hook = mp_compat.StopAtAttemptHook(training.opt, np.int64(2))
  with monitored_session([hook]) as sess:
    many = [[training.w] * count for count in range(40)]  # more than are remembered
    for other in [
      training.w,
      [training.w, "w:0"],
      Fetched([], {}),
      training.sparse,
    ] * 2 + many:
      sess.run(other)
    sess.run(fetches, {training.x: FINITE})
    assert not sess.should_stop()
    sess.run(fetches, {training.x: OVERFLOW})
    assert sess.should_stop()


LOGGING = """
import mp_compat
import tensorflow.compat.v1 as tf
tf.disable_v2_behavior()
tf.logging.set_verbosity(tf.logging.INFO)
opt = mp_compat.MixedPrecisionLossScaleOptimizer(tf.train.AdamOptimizer(), 8.0)
train_op = opt.minimize(tf.square(tf.get_variable("w", [])))
with tf.train.MonitoredTrainingSession(hooks=[mp_compat.LossScaleHook(opt)]) as sess:
  sess.run(train_op)
tf.logging.info("a line of the program")
"""


@pytest.mark.matrix
def test_verbosity_shows_lines_once():
  done = testing.run_python("-c", LOGGING)
  for line in [
    "loss scale 8 after 1 attempted steps",
    "Running local_init_op",
    "a line of the program",
  ]:
    assert done.stderr.count(line) == 1, done.stderr


def test_stall_error_names_optimizer(make_training):
  training = make_training(8.0)
  other = Optimizer(sgd(), 8.0)
  hooks = [
    mp_compat.LossScaleHook(opt, min_scale_patience=2) for opt in (training.opt, other)
  ]
  with pytest.raises(
    mp_compat.LossScaleStalledError,
    match="The loss scale of GradientDescent_1 is stalled",
  ):
    run(hooks, other.minimize(training.loss), [{training.x: OVERFLOW}] * 9)
