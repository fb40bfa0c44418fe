"""Windows of micro-batches, against NumPy's means and against a single step on them."""

import numpy as np
import pytest

import mp_compat
from tests import testing
from tests.testing import BAD
from tests.testing import GOOD
from tests.testing import tf

NAN = np.array([np.nan, 1.])


@pytest.fixture(name="graph", autouse=True, params=[1, 2], ids=["control_flow_v1", "control_flow_v2"])
def _graph(request):
  with testing.control_flow(request.param), tf.Graph().as_default() as graph:
    yield graph


class Windows:
  """A Job whose gradients are accumulated."""

  def __init__(self, skip="window", dtype=tf.float32, use_resource=True, before=list, after=list, scale="dynamic",
               inner=lambda: tf.train.GradientDescentOptimizer(1.)):
    self.job = testing.Job(dtype, use_resource)
    self.opt = mp_compat.MixedPrecisionLossScaleOptimizer(inner(), scale)
    self.accumulator = mp_compat.GradientAccumulator(self.opt, skip=skip)
    self.add_op = self.accumulator.add(before(self.opt.compute_gradients(self.job.loss)))
    self.train_op = self.accumulator.apply_gradients(after(self.accumulator.mean()), self.job.global_step)
    self.state = [self.job.w, self.job.global_step, self.opt.loss_scale()]
    self.session = testing.session()
    self.session.run([tf.global_variables_initializer(), tf.local_variables_initializer()])

  def run(self, *windows):
    """`w`, the global step and the loss scale after every window."""
    after = []
    for window in windows:
      for x in window:
        self.session.run(self.add_op, {self.job.x: x})
      self.session.run(self.train_op)
      after.append(self.session.run(self.state))
    return list(zip(*after))


@pytest.mark.parametrize("skip", ["window", "micro_batch"])
@pytest.mark.parametrize("dtype", [tf.float16, tf.float32, tf.float64])
@pytest.mark.parametrize("use_resource", [False, True])
def test_the_mean_of_a_window_is_applied_as_one_step(skip, dtype, use_resource):
  windows = Windows(skip, dtype, use_resource, scale=mp_compat.DynamicLossScale(2. ** 10))
  w, steps, scales = windows.run([GOOD, 3 * GOOD], [GOOD], [GOOD, GOOD, 4 * GOOD])
  np.testing.assert_array_equal(w, [-2 * GOOD, -3 * GOOD, -5 * GOOD])
  assert steps == (1, 2, 3) and scales == (2. ** 10,) * 3


@pytest.mark.parametrize("bad", [BAD, NAN, -BAD], ids=["inf", "nan", "-inf"])
def test_a_micro_batch_that_is_not_finite_costs_its_window(bad):
  w, steps, scales = Windows().run([GOOD], [GOOD, bad, GOOD], [bad, bad], [GOOD])
  np.testing.assert_array_equal(w, [-GOOD, -GOOD, -GOOD, -2 * GOOD])
  assert steps == (1, 1, 1, 2) and scales == (2. ** 15, 2. ** 14, 2. ** 13, 2. ** 13)


@pytest.mark.parametrize("scale", ["dynamic", "tensorflow's"])
def test_or_only_itself(scale):
  scale = testing.native.DynamicLossScale() if scale == "tensorflow's" else scale
  w, steps, scales = Windows("micro_batch", scale=scale).run([GOOD], [GOOD, BAD, 3 * GOOD], [NAN, BAD], [GOOD])
  np.testing.assert_array_equal(w, [-GOOD, -3 * GOOD, -3 * GOOD, -4 * GOOD])
  assert steps == (1, 2, 2, 3) and scales == (2. ** 15, 2. ** 14, 2. ** 13, 2. ** 13)


@pytest.mark.parametrize("skip, expected", [("window", [0., 0., 0.]), ("micro_batch", [0., -2., -2.])])
def test_windows_obey_a_loss_scale_that_skips_finite_steps(skip, expected):
  windows = Windows(skip, scale=testing.SkipsFiniteSteps())
  w, _, _ = windows.run([GOOD], [GOOD, BAD, 3 * GOOD], [GOOD])
  np.testing.assert_array_equal(w, [factor * GOOD for factor in expected])


def test_the_scale_moves_once_for_a_window():
  scale = mp_compat.DynamicLossScale(8., increment_period=2)
  _, _, scales = Windows(scale=scale).run([GOOD] * 5, [GOOD], [GOOD] * 3, [BAD, GOOD, BAD], [GOOD])
  assert scales == (8., 16., 16., 8., 8.)


def clip(pairs):
  return [(tf.clip_by_value(g, -9., 9.), v) for g, v in pairs]


def test_an_overflow_that_was_clipped_before_it_was_added_is_seen():
  w, steps, _ = Windows(before=clip).run([GOOD, BAD], [GOOD, 20 * GOOD])
  np.testing.assert_array_equal(w, [[0., 0.], [-5., -5.5]])
  assert steps == (0, 1)


def test_and_one_that_is_clipped_after_the_mean():

  def hide(pairs):
    return [(tf.where_v2(tf.is_finite(g), g, tf.zeros_like(g)), v) for g, v in clip(pairs)]

  w, steps, _ = Windows(after=hide).run([GOOD, BAD], [20 * GOOD])
  np.testing.assert_array_equal(w, [[0., 0.], [-9., -9.]])
  assert steps == (0, 1)


def test_the_step_runs_no_backward_pass(graph):
  windows = Windows(inner=lambda: tf.train.AdamOptimizer(.1))
  assert testing.waits_for(windows.add_op, windows.job.x.op)
  assert not testing.waits_for(windows.train_op, windows.job.x.op)
  assert graph.get_collection(tf.GraphKeys.TRAIN_OP) == [windows.train_op]


def test_sums_are_float32_local_and_not_in_checkpoints():
  windows = Windows(dtype=tf.float16, scale=mp_compat.DynamicLossScale(8.))
  windows.run([GOOD, GOOD])
  names = {v.op.name: v.dtype.base_dtype for v in tf.local_variables()}
  assert names == {
      "accumulated_gradient": tf.float32, "finite_micro_batches": tf.int64, "overflowed_micro_batches": tf.int64}
  assert {v.op.name for v in tf.global_variables()} == {"w", "global_step", "current_loss_scale", "good_steps"}
  # In float16, 2048 + 1 is 2048.
  w, _, _ = windows.run([[2048., 0.]] + [[1., 0.]] * 8)
  assert w[0][0] == np.float16(-1 - (2048 + 8) / 9)


def test_float64_is_added_up_in_float64():
  w, _, _ = Windows(dtype=tf.float64).run([[1., 0.], [2e-12, 0.]])
  assert w[0][0] == -(1 + 2e-12) / 2


def test_sparse_gradients_and_none_as_numpy_adds_them():
  table = tf.get_variable("table", [4, 2], initializer=tf.zeros_initializer())
  unused = tf.get_variable("unused", [1])
  rows, x = tf.placeholder(tf.int32, [3]), tf.placeholder(tf.float32, [3, 2])
  opt = mp_compat.MixedPrecisionLossScaleOptimizer(tf.train.GradientDescentOptimizer(1.), "dynamic")
  window = mp_compat.GradientAccumulator(opt)
  grads_and_vars = opt.compute_gradients(tf.reduce_sum(tf.gather(table, rows) * x), [table, unused])
  assert isinstance(grads_and_vars[0][0], tf.IndexedSlices) and grads_and_vars[1][0] is None
  add_op = window.add(iter(grads_and_vars))
  mean = window.mean()
  assert mean[1] == (None, unused)
  train_op = window.apply_gradients(iter(mean))
  random, expected = np.random.RandomState(0), np.zeros([4, 2])
  with testing.session() as sess:
    sess.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
    for _ in range(3):
      indices, values = random.randint(4, size=3), random.randint(-8, 8, size=[3, 2])
      np.add.at(expected, indices, -values / 3)
      sess.run(add_op, {rows: indices, x: values})
    sess.run(train_op)
    np.testing.assert_allclose(sess.run(table), expected, rtol=1e-6)


def test_an_empty_window_is_an_error_that_changes_nothing():
  windows = Windows()
  with pytest.raises(tf.errors.InvalidArgumentError, match=r"window is empty.*GradientAccumulator.add\(\)"):
    windows.run([])
  assert windows.session.run(windows.state)[1:] == [0, 2. ** 15]
  windows.run([GOOD])


def test_replicas_accumulate_each_their_own():
  strategy = tf.distribute.MirroredStrategy(testing.TWO_CPUS)
  x = tf.placeholder(tf.float32, [2, 2])

  def step():
    w = tf.get_variable("w", [2], initializer=tf.zeros_initializer())
    opt = mp_compat.MixedPrecisionLossScaleOptimizer(tf.train.GradientDescentOptimizer(1.), "dynamic")
    window = mp_compat.GradientAccumulator(opt)
    own = x[tf.distribute.get_replica_context().replica_id_in_sync_group]
    add_op = window.add(opt.compute_gradients(tf.reduce_sum(w * own)))
    return add_op, window.apply_gradients(window.mean()), opt.loss_scale()

  with strategy.scope():
    add_op, train_op, scale = strategy.extended.call_for_each_replica(step)
  copies = [copy for v in tf.trainable_variables() for copy in strategy.experimental_local_results(v)]
  add_op, train_op = strategy.group(add_op), strategy.group(train_op)
  with testing.session() as sess:
    sess.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
    for window, expected in [([[GOOD, 3 * GOOD], [GOOD, GOOD]], -3 * GOOD), ([[GOOD, GOOD], [GOOD, BAD]], -3 * GOOD),
                             ([[GOOD, GOOD]], -5 * GOOD)]:
      for batch in window:
        sess.run(add_op, {x: batch})
      sess.run(train_op)
      for copy in copies:
        np.testing.assert_array_equal(sess.run(copy), expected)
    assert sess.run(strategy.experimental_local_results(scale)[0]) == 2. ** 14


def test_sums_stay_with_the_worker_where_variables_go_to_a_parameter_server():
  with tf.device(tf.train.replica_device_setter(ps_tasks=1, worker_device="/job:worker/task:3")):
    job = testing.Job()
    opt = mp_compat.MixedPrecisionLossScaleOptimizer(tf.train.GradientDescentOptimizer(1.), "dynamic")
    window = mp_compat.GradientAccumulator(opt)
    window.add(opt.compute_gradients(job.loss))
  assert {v.device for v in tf.global_variables()} == {"/job:ps/task:0"}
  assert {v.device for v in tf.local_variables()} == {"/job:worker/task:3"}


def test_eager_mode_is_refused():
  opt = mp_compat.MixedPrecisionLossScaleOptimizer(tf.train.GradientDescentOptimizer(1.), "dynamic")
  with testing.eager_mode(), pytest.raises(RuntimeError, match="is for graphs"):
    mp_compat.GradientAccumulator(opt).add([])


STRATEGIES = {
    "mirrored": lambda: tf.distribute.MirroredStrategy(testing.TWO_CPUS),
    "central storage": lambda: tf.distribute.experimental.CentralStorageStrategy(
        compute_devices=testing.TWO_CPUS, parameter_device="/cpu:0"),
    "one worker": tf.distribute.experimental.MultiWorkerMirroredStrategy,
}


@pytest.mark.parametrize("skip", ["window", "micro_batch"])
@pytest.mark.parametrize("name", sorted(STRATEGIES))
def test_sparse_gradients_are_accumulated_in_replicas(name, skip):
  strategy = STRATEGIES[name]()
  replicas = strategy.num_replicas_in_sync
  x = tf.placeholder(tf.float32, [replicas])

  def step():
    own = x[tf.distribute.get_replica_context().replica_id_in_sync_group]
    table = tf.get_variable("table", [4], initializer=tf.zeros_initializer())
    opt = mp_compat.MixedPrecisionLossScaleOptimizer(tf.train.GradientDescentOptimizer(1.), "dynamic")
    window = mp_compat.GradientAccumulator(opt, skip)
    add_op = window.add(opt.compute_gradients(tf.reduce_sum(tf.gather(table, [1, 1, 2])) * own, [table]))
    return add_op, window.apply_gradients(window.mean()), table.read_value()

  with strategy.scope():
    add_op, train_op, table = strategy.extended.call_for_each_replica(step)
  add_op, train_op = strategy.group(add_op), strategy.group(train_op)
  table = strategy.experimental_local_results(table)[0]
  expected = np.zeros(4)
  with testing.session() as sess:
    sess.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
    for window in [[1., 3.], [2., 2.], [1., np.inf, 3.]]:
      for value in window:
        # Only the first replica overflows.
        sess.run(add_op, {x: [value] + [1.] * (replicas - 1)})
      sess.run(train_op)
      own, others = np.array(window), np.ones(len(window))
      if np.isfinite(own).all() or skip == "micro_batch":
        mean = own[np.isfinite(own)].mean() + others.mean() * (replicas - 1)
        expected -= mean * np.array([0., 2., 1., 0.])
      np.testing.assert_array_equal(sess.run(table), expected)


@pytest.mark.slow
def test_sparse_gradients_are_accumulated_by_two_workers():
  said = testing.run_two_workers("tests.processes.accumulation_workers")
  assert said[0] == said[1]
  # By hand: a window applies its mean of x / 2 of each worker, times the learning rate; the second window is skipped.
  after_one = [[1. - .125 * .5] * 2, [1. - .125 * 1.] * 2, [1.] * 2, [1. - .125 * 2.] * 2]
  after_two = [[2. * value - 1. for value in row] for row in after_one]
  assert [each["table"] for each in said[0]] == [after_one, after_one, after_two]
  assert [each["current_loss_scale"] for each in said[0]] == [8., 4., 4.]
  assert [each["global_step"] for each in said[0]] == [1, 1, 2]
