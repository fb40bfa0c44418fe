"""Tests of GradientAccumulator: windows of micro-batches are compared with means
computed in NumPy.
"""

import numpy as np
import pytest

import mp_compat
from tests import testing
from tests.programs.test_strategies import STRATEGIES
from tests.testing import FINITE
from tests.testing import OVERFLOW
from tests.testing import Optimizer
from tests.testing import sgd
from tests.testing import tf

pytestmark = pytest.mark.usefixtures("graph")
NAN = np.array([np.nan, 1.0])


def make_window(loss_scale="dynamic", inner=None, skip="window"):
  """Returns an optimizer, by default gradient descent, and its GradientAccumulator."""
  opt = Optimizer(inner or sgd(), loss_scale)
  return opt, mp_compat.GradientAccumulator(opt, skip)


class AccumulatedTraining:
  """Trains `w` on windows of micro-batches.

  `before` changes the gradients before they are added, `after` changes the mean before
  it is applied. Complex gradients are not computed: the placeholder is added.
  """

  def __init__(
    self, dtype=tf.float32, use_resource=True, before=list, after=list, **kwargs
  ):
    self.training = training = testing.Training(dtype, use_resource)
    opt, window = make_window(**kwargs)
    pairs = (
      [(training.x, training.w)]
      if dtype.is_complex
      else opt.compute_gradients(training.loss)
    )
    self.add_op = window.add(before(pairs))
    self.train_op = window.apply_gradients(
      after(window.mean()), self.training.global_step
    )
    self.state = [self.training.w, self.training.global_step, opt.loss_scale()]
    self.session = testing.session()
    self.session.run(
      [tf.global_variables_initializer(), tf.local_variables_initializer()]
    )

  def run(self, *windows):
    """Applies each window. Returns `w`, the global steps and the loss scales after
    every window, as three tuples.
    """
    after = []
    for window in windows:
      for x in window:
        self.session.run(self.add_op, {self.training.x: x})
      self.session.run(self.train_op)
      after.append(self.session.run(self.state))
    return list(zip(*after))


@pytest.mark.each_choice
@pytest.mark.parametrize("skip", ["window", "micro_batch"])
@pytest.mark.parametrize("dtype", [tf.float16, tf.float32, tf.float64])
@pytest.mark.parametrize("use_resource", [False, True])
def test_window_mean_is_applied_as_one_step(skip, dtype, use_resource):
  windows = AccumulatedTraining(
    dtype, use_resource, skip=skip, loss_scale=mp_compat.DynamicLossScale(2.0**10)
  )
  w, steps, scales = windows.run(
    [FINITE, 3 * FINITE], [FINITE], [FINITE, FINITE, 4 * FINITE]
  )
  np.testing.assert_array_equal(w, [-2 * FINITE, -3 * FINITE, -5 * FINITE])
  assert steps == (1, 2, 3) and scales == (2.0**10,) * 3


@pytest.mark.parametrize(
  "skip, make_scale, subtracted, expected_steps",
  [
    ("window", mp_compat.DynamicLossScale, [1.0, 1.0, 1.0, 2.0], (1, 1, 1, 2)),
    ("micro_batch", mp_compat.DynamicLossScale, [1.0, 3.0, 3.0, 4.0], (1, 2, 2, 3)),
    (
      "micro_batch",
      testing.native.DynamicLossScale,
      [1.0, 3.0, 3.0, 4.0],
      (1, 2, 2, 3),
    ),
    ("window", testing.SkipsFiniteSteps, [0.0, 0.0, 0.0, 0.0], (0, 0, 0, 0)),
    ("micro_batch", testing.SkipsFiniteSteps, [0.0, 2.0, 2.0, 2.0], (0, 1, 1, 1)),
  ],
)
def test_overflow_skips_window_or_micro_batch(
  skip, make_scale, subtracted, expected_steps
):
  w, steps, scales = AccumulatedTraining(skip=skip, loss_scale=make_scale()).run(
    [FINITE], [FINITE, OVERFLOW, 3 * FINITE], [NAN, -OVERFLOW], [FINITE]
  )
  np.testing.assert_array_equal(w, [-factor * FINITE for factor in subtracted])
  assert steps == expected_steps and scales == (2.0**15, 2.0**14, 2.0**13, 2.0**13)


def test_scale_is_updated_once_per_window():
  _, _, scales = AccumulatedTraining(
    loss_scale=mp_compat.DynamicLossScale(8.0, increment_period=2)
  ).run([FINITE] * 5, [FINITE], [FINITE] * 3, [OVERFLOW, FINITE, OVERFLOW], [FINITE])
  assert scales == (8.0, 16.0, 16.0, 8.0, 8.0)


def clip(pairs):
  return [(tf.clip_by_value(g, -9.0, 9.0), v) for g, v in pairs]


def hide(pairs):
  return [
    (tf.where_v2(tf.is_finite(g), g, tf.zeros_like(g)), v) for g, v in clip(pairs)
  ]


@pytest.mark.parametrize(
  "changes, expected",
  [({"before": clip}, [-5.0, -5.5]), ({"after": hide}, [-9.0, -9.0])],
)
def test_hidden_overflow_skips_window(changes, expected):
  w, steps, _ = AccumulatedTraining(**changes).run(
    [FINITE, OVERFLOW], [FINITE, 20 * FINITE]
  )
  np.testing.assert_array_equal(w, [[0.0, 0.0], expected])
  assert steps == (0, 1)


def test_applying_runs_no_backward_pass(graph):
  windows = AccumulatedTraining(inner=tf.train.AdamOptimizer(0.1))
  assert testing.waits_for(windows.add_op, windows.training.x.op)
  assert not testing.waits_for(windows.train_op, windows.training.x.op)
  assert graph.get_collection(tf.GraphKeys.TRAIN_OP) == [windows.train_op]


@pytest.mark.each_choice
@pytest.mark.parametrize("skip", ["window", "micro_batch"])
@pytest.mark.parametrize("mean_in_branch", [True, False])
@pytest.mark.usefixtures("control_flow")
def test_window_is_applied_in_branch(skip, mean_in_branch):
  training = testing.Training()
  opt, window = make_window(skip=skip)
  runs = tf.get_variable("runs", initializer=0, trainable=False, use_resource=True)
  with tf.control_dependencies([window.add(opt.compute_gradients(training.loss))]):
    is_last = tf.equal(runs.assign_add(1) % 2, 0)
  with tf.control_dependencies([is_last]):
    mean = None if mean_in_branch else window.mean()

  def apply():
    return window.apply_gradients(mean or window.mean(), training.global_step)

  run_op = tf.cond(is_last, apply, tf.no_op)
  with testing.initialized_session() as sess:
    for x in [FINITE, 3 * FINITE, FINITE, OVERFLOW, FINITE, FINITE]:
      sess.run(run_op, {training.x: x})
    applied = 3 if skip == "micro_batch" else 2
    assert (
      sess.run(training.global_step) == applied
      and sess.run(opt.loss_scale()) == 2.0**14
    )
    np.testing.assert_array_equal(sess.run(training.w), -(applied + 1) * FINITE)


@pytest.mark.usefixtures("control_flow")
def test_micro_batches_are_added_in_loop():
  training = testing.Training()
  opt, window = make_window()

  def add(i):
    loss = tf.reduce_sum(training.w * training.x * tf.cast(i + 1, tf.float32))
    with tf.control_dependencies(
      [window.add(opt.compute_gradients(loss, [training.w]))]
    ):
      return tf.identity(i) + 1

  loop = tf.while_loop(lambda i: i < 3, add, [tf.constant(0)], parallel_iterations=1)
  with tf.control_dependencies([loop]):
    train_op = window.apply_gradients(window.mean(), training.global_step)
  with testing.initialized_session() as sess:
    for x in [FINITE, OVERFLOW, 2 * FINITE]:
      sess.run(train_op, {training.x: x})
    np.testing.assert_array_equal(sess.run(training.w), -6 * FINITE)
    assert sess.run(training.global_step) == 2


def test_traces_share_window():
  w = tf.get_variable("w", [2], initializer=tf.zeros_initializer(), use_resource=True)
  opt, window = make_window()

  @tf.function
  def add(x):
    with tf.control_dependencies(
      [window.add(opt.compute_gradients(tf.reduce_sum(w * tf.reduce_sum(x)), [w]))]
    ):
      return tf.constant(0)

  x = tf.placeholder(tf.float32)
  add_ops = [add(tf.reshape(x, [size])) for size in (1, 2)]
  assert len(tf.local_variables()) == 3
  train_op = window.apply_gradients(window.mean())
  with testing.initialized_session() as sess:
    sess.run(add_ops[0], {x: [1.0]})
    sess.run(add_ops[1], {x: [2.0, 3.0]})
    sess.run(train_op)
    np.testing.assert_array_equal(sess.run(w), [-3.0, -3.0])


def test_functions_share_window():
  with testing.eager_mode():
    w = tf.Variable([0.0, 0.0], use_resource=True)
    opt, window = make_window()

    @tf.function
    def add(x):
      window.add(
        opt.compute_gradients(lambda: tf.reduce_sum(w * tf.reduce_sum(x)), [w])
      )

    @tf.function
    def apply():
      window.apply_gradients(window.mean())

    for batches, expected in [
      ([[1.0], [2.0, 3.0]], -3.0),
      ([[1.0], [np.inf, 3.0]], -3.0),
      ([[2.0]], -5.0),
    ]:
      for batch in batches:
        add(tf.constant(batch))
      apply()
      np.testing.assert_array_equal(w.numpy(), [expected, expected])
    assert opt.loss_scale().numpy() == 2.0**14


def test_other_variables_cannot_share_windows():
  _, window = make_window()

  def add(variable):
    window.add([(tf.ones([2]), variable)])

  def add_in_functions(variables):
    for variable in variables:
      tf.function(lambda variable=variable: add(variable))()

  with pytest.raises(
    ValueError, match=r"expected v:0 \(float32\), but got w:0 \(float32\)"
  ):
    add_in_functions([tf.get_variable(name, [2], use_resource=True) for name in "vw"])
  with testing.eager_mode():
    with pytest.raises(ValueError, match="must get gradients for the same variables"):
      add_in_functions(
        [tf.Variable([0.0, 0.0], name="w", use_resource=True) for _ in range(2)]
      )
    with pytest.raises(RuntimeError, match="works in graphs only"):
      window.add([])


def test_accumulators_are_local_and_wide():
  windows = AccumulatedTraining(tf.float16, loss_scale=mp_compat.DynamicLossScale(8.0))
  windows.run([FINITE, FINITE])
  assert {v.op.name: v.dtype.base_dtype for v in tf.local_variables()} == {
    "accumulated_gradient": tf.float32,
    "finite_micro_batches": tf.int64,
    "overflowed_micro_batches": tf.int64,
  }
  assert {v.op.name for v in tf.global_variables()} == {
    "w",
    "global_step",
    "current_loss_scale",
    "good_steps",
  }
  # In float16, 2048 + 1 is 2048.
  w, _, _ = windows.run([[2048.0, 0.0]] + [[1.0, 0.0]] * 8)
  assert w[0][0] == np.float16(-1 - (2048 + 8) / 9)
  with tf.Graph().as_default():
    w, _, _ = AccumulatedTraining(tf.float64).run([[1.0, 0.0], [2e-12, 0.0]])
    assert w[0][0] == -(1 + 2e-12) / 2


@pytest.mark.parametrize("dtype", [tf.complex64, tf.complex128])
def test_complex_gradients_accumulate(dtype):
  windows = AccumulatedTraining(
    dtype, loss_scale=8.0, inner=testing.ComplexDescent(1.0)
  )
  w, steps, _ = windows.run([(1 + 2j) * FINITE, (3 + 6j) * FINITE], [OVERFLOW, FINITE])
  np.testing.assert_array_equal(w, [-(2 + 4j) * FINITE] * 2)
  assert steps == (1, 1)


@pytest.mark.parametrize("dtype, factor", [(tf.float32, 1), (tf.complex64, 1 - 2j)])
def test_sparse_gradients_accumulate(dtype, factor):
  table = tf.get_variable(
    "table", initializer=tf.zeros([4, 2], dtype), use_resource=True
  )
  unused = tf.get_variable("unused", [1])
  rows, x = tf.placeholder(tf.int32, [3]), tf.placeholder(dtype, [3, 2])
  _, window = make_window(inner=testing.ComplexDescent(1.0))
  add_op = window.add(
    iter([(tf.IndexedSlices(x, rows, tf.constant([4, 2])), table), (None, unused)])
  )
  mean = window.mean()
  assert mean[1] == (None, unused)
  train_op = window.apply_gradients(iter(mean))
  random, expected = np.random.RandomState(0), np.zeros([4, 2], dtype.as_numpy_dtype)
  with testing.initialized_session() as sess:
    for _ in range(3):
      indices, values = (
        random.randint(4, size=3),
        factor * random.randint(-8, 8, size=[3, 2]),
      )
      np.add.at(expected, indices, -values / 3)
      sess.run(add_op, {rows: indices, x: values})
    sess.run(train_op)
    np.testing.assert_allclose(sess.run(table), expected, rtol=1e-6)


@pytest.mark.usefixtures("control_flow")
def test_means_are_read_before_emptying():
  training = testing.Training()
  opt, window = make_window(8.0)
  add_op = window.add(opt.compute_gradients(training.loss))
  # cannot be waited for
  tf.cond(
    tf.random.uniform([]) < 0.5, lambda: window.mean()[0][0] + 1, lambda: training.w
  )
  monitored = tf.identity(window.mean()[0][0])
  train_op = window.apply_gradients(window.mean())
  with testing.initialized_session() as sess:
    for _ in range(50):
      sess.run(add_op, {training.x: FINITE})
      np.testing.assert_array_equal(sess.run([train_op, monitored])[1], FINITE)
  assert testing.waits_for(train_op, monitored.op.inputs[0].op)


@pytest.mark.parametrize(
  "change",
  [list, lambda pairs: [(tf.clip_by_norm(g, 1.0), v) for g, v in pairs]],
  ids=["", "clipped"],
)
@pytest.mark.parametrize("skip_nonfinite", [True, False])
def test_means_must_be_applied_by_accumulator(change, skip_nonfinite):
  training = testing.Training()
  opt, window = make_window(8.0)
  window.add(opt.compute_gradients(training.loss))
  other = Optimizer(opt.inner_optimizer, 8.0, skip_nonfinite=skip_nonfinite)
  means = change(window.mean())
  with pytest.raises(
    ValueError,
    match="would never empty. Pass them to apply_gradients.. of the GradientAccumulator",
  ):
    other.apply_gradients(means)
  with pytest.raises(ValueError, match="would never empty"):
    mp_compat.apply_gradients_together([(opt, means)])
  window.apply_gradients(means)


def test_missing_local_initializer_raises():
  windows = AccumulatedTraining()
  with testing.session() as sess:
    sess.run(tf.global_variables_initializer())
    with pytest.raises(
      tf.errors.InvalidArgumentError,
      match="not initialized. Run tf.local_variables_ini",
    ):
      sess.run(windows.add_op, {windows.training.x: FINITE})


def test_empty_window_raises():
  windows = AccumulatedTraining()
  with pytest.raises(
    tf.errors.InvalidArgumentError,
    match=r"window is empty.*GradientAccumulator.add\(\)",
  ):
    windows.run([])
  _, global_step, scale = windows.session.run(windows.state)
  assert global_step == 0 and scale == 2.0**15
  windows.run([FINITE])


def test_accumulators_are_placed_on_worker():
  with tf.device(
    tf.train.replica_device_setter(ps_tasks=1, worker_device="/job:worker/task:3")
  ):
    training = testing.Training()
    opt, window = make_window()
    window.add(opt.compute_gradients(training.loss))
  assert {v.device for v in tf.global_variables()} == {"/job:ps/task:0"}
  assert {v.device for v in tf.local_variables()} == {"/job:worker/task:3"}


def test_sums_of_colocated_gradients_belong_to_worker():
  devices = []
  for task in range(2):
    worker = "/job:worker/task:{}".format(task)
    with tf.Graph().as_default(), tf.device(
      tf.train.replica_device_setter(ps_tasks=1, worker_device=worker)
    ):
      table = tf.get_variable("table", [3, 2], initializer=tf.zeros_initializer())
      loss = tf.reduce_sum(tf.nn.embedding_lookup(table, [1]))
      opt, window = make_window()
      window.add(opt.compute_gradients(loss, colocate_gradients_with_ops=True))
      devices.append({variable.device for variable in tf.local_variables()})
  assert devices == [{"/job:worker/task:0"}, {"/job:worker/task:1"}]


@pytest.mark.parametrize(
  "name, skip",
  [("mirrored", "window"), ("mirrored", "micro_batch"), ("central_storage", "window")]
  + [("multi_worker_mirrored", "micro_batch")],
)
def test_replicas_accumulate_sparse_gradients(name, skip):
  strategy = STRATEGIES[name]()
  replicas = strategy.num_replicas_in_sync
  x = tf.placeholder(tf.float32, [replicas])

  def step():
    own = x[tf.distribute.get_replica_context().replica_id_in_sync_group]
    table = tf.get_variable("table", [4], initializer=tf.zeros_initializer())
    opt, window = make_window(skip=skip)
    add_op = window.add(
      opt.compute_gradients(tf.reduce_sum(tf.gather(table, [1, 1, 2])) * own, [table])
    )
    return (
      add_op,
      window.apply_gradients(window.mean()),
      table.read_value(),
      opt.loss_scale(),
    )

  with strategy.scope():
    add_op, train_op, table, scale = strategy.extended.call_for_each_replica(step)
  add_op, train_op = strategy.group(add_op), strategy.group(train_op)
  table = strategy.experimental_local_results(table)[0]
  expected = np.zeros(4)
  with testing.initialized_session() as sess:
    for window in [[1.0, 3.0], [2.0, 2.0], [1.0, np.inf, 3.0]]:
      for value in window:
        # Only the first replica gets the value of the window, which may overflow.
        sess.run(add_op, {x: [value] + [1.0] * (replicas - 1)})
      sess.run(train_op)
      own, others = np.array(window), np.ones(len(window))
      if np.isfinite(own).all() or skip == "micro_batch":
        mean = own[np.isfinite(own)].mean() + others.mean() * (replicas - 1)
        expected -= mean * np.array([0.0, 2.0, 1.0, 0.0])
      np.testing.assert_array_equal(sess.run(table), expected)
    assert sess.run(strategy.experimental_local_results(scale)[0]) == 2.0**14


def test_emptying_window_waits_for_one_op():
  with tf.variable_scope("", use_resource=True):
    many = [tf.get_variable("v{}".format(i), initializer=1.0) for i in range(20)]
  opt, window = make_window()
  window.add(opt.compute_gradients(tf.add_n(many)))
  window.apply_gradients(window.mean())
  waiting = [
    op for op in tf.get_default_graph().get_operations() if len(op.control_inputs) > 10
  ]
  assert waiting and {op.type for op in waiting} == {"NoOp"}  # groups
